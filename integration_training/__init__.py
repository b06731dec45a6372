"""Training programs made of rollouts: train.py, its configs, and tasks on one page each."""
