"""ServerReference on real servers gives the log-probs of the same model here."""

from dataclasses import replace

import numpy as np
import pytest
import trio

from rollouts.device_thread import open_device_thread
from rollouts.reference.score import open_frozen_reference
from rollouts.reference.server import open_server_reference
from rollouts.testing.torch_contracts import make_batch

from .conftest import VOCAB_SIZE, open_engine
from .model_checks import load

pytestmark = pytest.mark.engines


async def test_a_server_gives_the_models_own_log_probs(server, snapshots):
    async with open_engine(server) as engine:
        await load(engine, snapshots[0])  # another test may have left other weights
    batches = [make_batch(seed) for seed in range(3)]
    batches[2] = replace(
        batches[2], loss_masks=tuple(mask & (np.arange(len(mask)) % 2 == 0) for mask in batches[2].loss_masks)
    )
    found = {}
    options = {"kind": server.kind, "vocab_size": VOCAB_SIZE, "api_key": server.api_key}
    async with open_server_reference(server.url, **options) as scorer, trio.open_nursery() as nursery:

        async def score(index):
            found[index] = await scorer.score(batches[index])

        for index in range(len(batches)):
            nursery.start_soon(score, index)
    async with (
        open_device_thread(name="plain", torch_threads=1) as thread,
        open_frozen_reference(snapshots[0], device_thread=thread) as reference,
    ):
        for index, batch in enumerate(batches):
            for one, two in zip(found[index], await reference.score(batch), strict=True):
                np.testing.assert_allclose(one, two, atol=1e-4)
