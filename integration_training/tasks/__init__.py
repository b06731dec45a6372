"""Tasks: a dataset, a reward, a filter and a self-check of the gold answers on one page each."""
