"""ServerReference on real servers gives the log-probs of the same model here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from rollouts.device_thread import open_device_thread
from rollouts.engines.sglang import open_sglang_engine
from rollouts.engines.vllm import open_vllm_engine
from rollouts.reference.score import open_frozen_reference
from rollouts.reference.server import ServerKind, open_server_reference
from rollouts.testing.torch_contracts import make_batch

from .conftest import VOCAB_SIZE, RunningServer
from .model_checks import load

pytestmark = pytest.mark.engines


async def check_same_log_probs(server: RunningServer, kind: ServerKind, path: Path) -> None:
    batches = [make_batch(seed) for seed in range(3)]
    batches[2] = replace(
        batches[2], loss_masks=tuple(mask & (np.arange(len(mask)) % 2 == 0) for mask in batches[2].loss_masks)
    )
    found = {}
    options: dict[str, Any] = {
        "kind": kind,
        "vocab_size": VOCAB_SIZE,
        "api_key": server.api_key,
    }
    async with open_server_reference(server.url, **options) as scorer, trio.open_nursery() as nursery:

        async def score(index: int) -> None:
            found[index] = await scorer.score(batches[index])

        for index in range(len(batches)):
            nursery.start_soon(score, index)
    async with (
        open_device_thread(name="plain", torch_threads=1) as thread,
        open_frozen_reference(path, device_thread=thread) as reference,
    ):
        for index, batch in enumerate(batches):
            for one, two in zip(found[index], await reference.score(batch), strict=True):
                np.testing.assert_allclose(one, two, atol=1e-4)


async def test_vllm_gives_the_models_own_log_probs(vllm_server: RunningServer, snapshots: tuple[Path, Path]):
    async with open_vllm_engine(
        vllm_server.url, api_key=vllm_server.api_key, vocab_size=VOCAB_SIZE
    ) as engine:
        await load(engine, snapshots[0])  # another test may have left other weights
    await check_same_log_probs(vllm_server, "vllm", snapshots[0])


async def test_sglang_gives_the_models_own_log_probs(
    sglang_server: RunningServer, snapshots: tuple[Path, Path]
):
    keys = {"api_key": sglang_server.api_key}
    async with open_sglang_engine(sglang_server.url, vocab_size=VOCAB_SIZE, **keys) as engine:
        await load(engine, snapshots[0])
    await check_same_log_probs(sglang_server, "sglang", snapshots[0])
