"""Tokens from a model: continuous batching on any causal language model of transformers, in one thread.

batch.py       the rows being decoded: admission, one decode step, removal; and which way a model is run,
               checked against its own forward when it is opened
stop_texts.py  texts that end a row
decoder.py     fast: the forward pass of a Llama-like model taken apart, and its keys and values; cached and
               recompute: the model's own forward, for all other models; what a request asks of its prompt
"""
