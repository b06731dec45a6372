"""pytest-trio runs `async def test_…`; its `autojump_clock` gives virtual time, never with a real thread
under it.
"""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
