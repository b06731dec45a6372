"""Frozen models that score what the policy sampled."""
