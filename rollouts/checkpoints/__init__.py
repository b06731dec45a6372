"""Checkpoints that are complete or absent: a Hugging Face model directory, training state in state/, one
manifest written last.
"""
