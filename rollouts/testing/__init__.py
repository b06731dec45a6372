"""For tests, ours and yours: fakes of the protocols, and the contracts of engines and backends."""
