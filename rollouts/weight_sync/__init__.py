"""Brings inference engines to the trainer's weights and proves that they have them."""
