"""The embedded engine: continuous batching on a plain Hugging Face causal LM, in this process, on the device thread.

    engine.py    LocalEngine and open_local_engine: requests, pauses, updates, the scheduler task (trio)
    batch.py     the rows being decoded: admission, one decode step, removal                     (device thread)
    decoder.py   the model's forward pass over slots, checked against the model's own at open    (device thread)
    kv_slots.py  keys and values by slot                                                          (device thread)
    sampling.py  one token per row from logits, by a counter-based stream                         (device thread)
    weights.py   an update that arrives in buckets and becomes visible at once                    (device thread)
    requests.py  what a request must satisfy
"""

from rollouts.engines.local.engine import LocalEngine, open_local_engine

__all__ = ["LocalEngine", "open_local_engine"]
