"""From prompts to batches: one sample, one group, one batch, and the account of every prompt drawn."""
