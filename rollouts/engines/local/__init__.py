"""The embedded engine: models/decoding on the device thread of this process, for callers that await.

engine.py    LocalEngine and open_local_engine: requests, pauses, updates, the scheduler task (trio)
weights.py   an update that arrives in buckets and becomes visible at once                   (device thread)
"""

from rollouts.engines.local.engine import LocalEngine, open_local_engine

__all__ = ["LocalEngine", "open_local_engine"]
