"""What a trainer on two ranks says before it is released is what a single process says, and a copy of its
weights is written as they were.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from rollouts.backends.open import open_pytorch_backend
from tests.distributed.greedy_program import COUNT, OPTIM, PROMPT, take_step
from tests.distributed.job import run_ranks
from tests.distributed.train_program import find_model

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["tiny:llama", "tiny:moe"])
def test_two_ranks_answer_as_one_process_and_their_copy_is_what_they_had(name: str, tmp_path: Path):
    found = run_ranks(
        2, "tests.distributed.greedy_program", str(find_model(name)), str(tmp_path), out=tmp_path / "found"
    )

    async def answer_alone() -> list[Any]:
        async with open_pytorch_backend(
            find_model(name), optim=OPTIM, total_steps=10, autocast="off", threads=1
        ) as backend:
            before = await backend.complete_greedily(PROMPT, COUNT).result()
            await take_step(backend, 0)
            return [before, await backend.complete_greedily(PROMPT, COUNT).result()]

    before, after = trio.run(answer_alone)
    np.testing.assert_allclose(found["before"], before, atol=1e-5)
    np.testing.assert_allclose(found["after"], after, atol=1e-4)
    assert np.abs(before - after).max() > 1e-2
    of_backend, of_copy, of_later = found["digests"]
    assert of_copy == of_backend != of_later
