"""Rewards: how a user's function is called and its answer checked, and a few simple ones."""
