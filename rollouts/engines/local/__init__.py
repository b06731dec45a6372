"""The embedded engine: continuous batching on any causal LM of transformers, in this process, on the device
thread.

engine.py    LocalEngine and open_local_engine: requests, pauses, updates, the scheduler task (trio)
batch.py     the rows being decoded: admission, one decode step, removal                     (device thread)
opening.py   which way a model is run, checked against its own forward when the engine opens  (device thread)
interface.py what the batch asks of a model
decoder.py   fast: the forward pass of a Llama-like model taken apart, and its keys and values (device thread)
whole_model.py  cached and recompute: the model's own forward, for all other models           (device thread)
weights.py   an update that arrives in buckets and becomes visible at once                    (device thread)
"""

from rollouts.engines.local.engine import LocalEngine, open_local_engine

__all__ = ["LocalEngine", "open_local_engine"]
