"""Models on disk and in memory: names to directories, directories to torch modules and back, tokenizers, the
optimizer.
"""
