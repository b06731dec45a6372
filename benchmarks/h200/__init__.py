"""The suite for one large GPU: python -m benchmarks.h200."""
