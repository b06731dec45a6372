"""Whole RL runs on a real SGLang server, as a user starts them. Needs ROLLOUTS_SGLANG_PYTHON, or SGLang in
.venv-sglang.
"""

import pytest

from .conftest import find_python
from .runs import STEPS, SYNC_EVERY, assert_proven, train, use_short

pytestmark = pytest.mark.engines


def count_updates(log):
    """How often a server loaded weights from disk and how often it took a bucket out of a process group."""
    text = log.read_text(errors="replace")
    return text.count("weights online from disk begin"), text.count("POST /update_weights_from_distributed ")


def test_run_starts_a_server_updates_it_from_disk_and_leaves_nothing(tmp_path):
    flags = f"{use_short(tmp_path, 'tiny:llama')} --engine.python {find_python('sglang')}"
    train(tmp_path, "demo_sglang.toml", flags)
    assert_proven(tmp_path / "run")
    assert count_updates(tmp_path / "run/engines/sglang-0.log") == (1 + STEPS // SYNC_EVERY, 0)


def test_run_on_a_running_server_updates_it_in_memory(sglang_server, snapshots, tmp_path):
    from_disk, in_memory = count_updates(sglang_server.log)
    flags = f'--engine.urls ["{sglang_server.url}"] --engine.transport memory'
    flags += f" {use_short(tmp_path, snapshots[0])}"
    train(tmp_path, "demo_sglang.toml", flags, SGLANG_API_KEY=sglang_server.api_key)
    assert_proven(tmp_path / "run")
    assert count_updates(sglang_server.log) == (from_disk, in_memory + 1 + STEPS // SYNC_EVERY)
