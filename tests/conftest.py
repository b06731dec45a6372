"""pytest-trio runs `async def test_…`; its `autojump_clock` gives virtual time, never with a real thread
under it.
"""

import os

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session", autouse=True)
def _models(tmp_path_factory):
    """Small models are made once, for this process and those that it starts."""
    os.environ["ROLLOUTS_CACHE"] = str(tmp_path_factory.mktemp("models"))
