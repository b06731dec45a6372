"""For tests, ours and yours: fakes of the protocols and a simulator in virtual time."""
