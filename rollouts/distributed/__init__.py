"""Several processes as one job: how they are launched, talk and notice that one is gone."""
