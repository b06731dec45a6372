"""A critic or reward model on two ranks is one in a single process: losses, gradient norms, values, weights,
and what it saves.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trio
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from rollouts.backends.pytorch import PyTorchTrainingBackend
from rollouts.device_thread import open_device_thread
from rollouts.models.export import save_hf_model
from rollouts.models.optim import create_adamw_optimizer
from rollouts.models.scalar_head import get_scalar_weight, load_scalar_model
from rollouts.models.tokenizers import make_byte_tokenizer
from tests.distributed.job import run_ranks
from tests.distributed.scalar_program import OPTIM, STEPS, Case, list_checks, make_critic_rollouts, train
from tests.distributed.train_program import find_model

pytestmark = pytest.mark.slow

TOLERANCE = {
    "float32": 2e-6,
    "float64": 1e-10,
}  # of norms; AdamW's first steps move a weight as far for a small gradient as for a large one


@pytest.fixture(scope="module")
def headed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Directories of models with a head of their own that is not 0, by the model that they were made of."""
    found: dict[str, str] = {}
    for name in ("gpt2", "tiny:byte", "tiny:llama", "tiny:qwen3", "tiny:moe"):
        model = load_scalar_model(find_model(name))
        with torch.no_grad():
            get_scalar_weight(model).copy_(
                torch.randn((1, 64), generator=torch.Generator().manual_seed(1)) * 0.1
            )
        folder = tmp_path_factory.mktemp("headed") / name.replace(":", "-")
        save_hf_model(model, folder, make_byte_tokenizer())
        found[name] = str(folder)
    return found


def list_cases(headed: dict[str, str]) -> list[Case]:
    return [
        *(Case("gpt2", "float64", loss, path=headed["gpt2"]) for loss in ("value", "linear")),
        Case("gpt2", "float64", "value"),  # a head of 0, on a causal model's directory
        Case(
            "gpt2",
            "float64",
            "value",
            {"share_prefix": False, "gradient_checkpointing": True, "reduce_each_micro_batch": True},
            headed["gpt2"],
        ),
        Case(
            "tiny:llama",
            "float32",
            "value",
            {"compile_backend": "aot_eager"},
            path=headed["tiny:llama"],
            steps=1,
        ),
        *(Case(name, "float32", "linear", path=headed[name]) for name in ("tiny:qwen3", "tiny:moe")),
        Case("tiny:qwen3", "float32", "value"),
    ]


@pytest.fixture(scope="module")
def trained(
    headed: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[dict[str, Any]], Path]:
    folder = tmp_path_factory.mktemp("ranks")
    return run_ranks(
        2, "tests.distributed.scalar_program", "cases", json.dumps(list_cases(headed)), out=folder / "found"
    ), folder


@pytest.fixture(scope="module")
def results(headed: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("contract")
    broken = Path(shutil.copytree(headed["tiny:byte"], folder / "broken"))
    weights = load_file(broken / "model.safetensors")
    del weights["score.weight"]
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    return run_ranks(
        2,
        "tests.distributed.scalar_program",
        "contract",
        headed["tiny:byte"],
        str(broken),
        out=folder / "found",
    )


def train_alone(case: Case, folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The same in this process, with whole batches in one micro-batch or a few."""

    async def run() -> tuple[dict[str, Any], dict[str, Tensor]]:
        model = load_scalar_model(
            Path(case.path) if case.path else find_model(case.model), dtype=getattr(torch, case.dtype)
        )
        async with open_device_thread(name="trainer", torch_threads=1) as thread:
            optimizer = create_adamw_optimizer(model, OPTIM)
            return await train(
                PyTorchTrainingBackend(model, optimizer, thread, optim=OPTIM, total_steps=STEPS), case, folder
            )

    return trio.run(run)


def assert_equal(
    said: dict[str, Any],
    weights: dict[str, Tensor],
    alone: dict[str, Any],
    wanted: dict[str, Tensor],
    dtype: str,
) -> None:
    tolerance = TOLERANCE[dtype]
    assert said["losses"] == pytest.approx(alone["losses"], rel=10 * tolerance, abs=10 * tolerance)
    assert said["norms"] == pytest.approx(alone["norms"], rel=max(tolerance, 1e-9) * 100)
    assert said["metrics"] == pytest.approx(alone["metrics"], rel=1e-4, abs=1e-5)
    assert not [name for name in said["metrics"] if "entropy" in name]
    for one, other in zip([*said["rows"], said["scores"]], [*alone["rows"], alone["scores"]], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)
    assert set(weights) == set(wanted)
    apart = sum(float((weights[name].double() - wanted[name].double()).square().sum()) for name in wanted)
    assert (
        apart**0.5
        <= tolerance * sum(float(weight.double().square().sum()) for weight in wanted.values()) ** 0.5
    ), apart


def test_a_critic_on_two_ranks_trains_as_in_one_process(
    trained: tuple[list[dict[str, Any]], Path], headed: dict[str, str], tmp_path: Path
):
    found, folder = trained
    for number, case in enumerate(list_cases(headed)):
        alone, wanted = train_alone(case, tmp_path / str(number))
        assert_equal(
            found[number], load_file(folder / f"found.{number}.safetensors"), alone, wanted, case.dtype
        )


def test_what_ranks_save_is_a_reward_model_and_goes_on_in_one_process(
    trained: tuple[list[dict[str, Any]], Path], headed: dict[str, str], tmp_path: Path
):
    found, folder = trained
    for number in (0, len(list_cases(headed)) - 1):
        case, saved = list_cases(headed)[number], folder / f"found.{number}.saved"
        again, weights = train_alone(case._replace(loads=str(saved)), tmp_path / str(number))
        said = found[number] | {name: found[number][name][STEPS // 2 :] for name in ("losses", "norms")}
        assert_equal(said, load_file(folder / f"found.{number}.safetensors"), again, weights, case.dtype)
        theirs = AutoModelForSequenceClassification.from_pretrained(str(saved), dtype=torch.float32).eval()
        config = json.loads((saved / "config.json").read_text())
        assert (
            config["architectures"] == [type(theirs).__name__]
            and config["pad_token_id"] == 256
            and theirs.config.num_labels == 1
        )
        ours = load_scalar_model(saved)
        ids = torch.from_numpy(make_critic_rollouts(0).tokens[0])[None]
        torch.testing.assert_close(
            theirs(input_ids=ids).logits, ours(input_ids=ids).logits, atol=1e-6, rtol=0
        )


@pytest.mark.parametrize("check", list_checks())
def test_a_scalar_backend_keeps_the_contract_on_two_ranks(check: str, results: dict[str, str]):
    assert results[check] == "ok", results[check]


def test_files_without_the_head_that_they_should_have_are_refused_on_all_ranks(results: dict[str, str]):
    assert results["refused"].startswith("ModelError") and "1 are missing: score.weight" in results["refused"]
