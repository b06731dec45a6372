"""What `--dry-run` and `check` share: config, files, rows, functions, templates, lengths. Nothing here trains or loads torch."""
