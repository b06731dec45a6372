"""Training backends: one protocol, one contract suite."""
