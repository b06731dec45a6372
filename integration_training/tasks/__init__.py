"""Tasks: a dataset, a reward and a filter on one page each."""
