"""Training loops: pure functions over protocols. Importing one loads neither torch nor transformers."""
