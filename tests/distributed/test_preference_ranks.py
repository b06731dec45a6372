"""DPO, KTO and reward models on two ranks, between which pairs are torn apart, train as in one process."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
from safetensors.torch import load_file

from rollouts.backends.open import open_pytorch_backend
from rollouts.models.load import resolve_model
from tests.distributed.job import run_ranks
from tests.distributed.preference_program import OPTIONS, STAGES, head_of, train

pytestmark = pytest.mark.slow
NAMES = ("loss/total", "optim/grad_norm", "rewards/chosen", "rewards/rejected", "rewards/margins")


def test_two_ranks_train_on_preferences_as_one_process(tmp_path: Path):
    found = run_ranks(2, "tests.distributed.preference_program", out=tmp_path / "found")

    async def train_alone(stage: str) -> Any:
        async with open_pytorch_backend(
            resolve_model("tiny:llama"), head=head_of(stage), **OPTIONS
        ) as backend:
            return await train(backend, stage)

    for stage in STAGES:
        history, weights = trio.run(functools.partial(train_alone, stage))
        for one, other in zip(found[stage], history, strict=True):
            for name in NAMES:
                assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-5), (stage, name)
        saved = load_file(tmp_path / f"found.{stage}.safetensors")
        assert set(saved) == set(weights)
        for name, wanted in weights.items():
            torch.testing.assert_close(
                saved[name],
                wanted,
                atol=2e-5,
                rtol=0.0,
                msg=lambda text, where=(stage, name): f"{where}: {text}",
            )
