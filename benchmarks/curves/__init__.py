"""Training runs that show that each algorithm learns: python -m benchmarks.curves."""
