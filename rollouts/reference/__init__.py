"""Frozen models that score what the policy sampled, and which shortcuts of a forward pass are exact for a
model.
"""
