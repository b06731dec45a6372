"""What `--dry-run` and `check` share: config, files, rows, functions, templates, lengths, memory. Nothing
here trains or loads torch.
"""
