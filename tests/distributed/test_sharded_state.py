"""Weights, moments, steps and random states across changes of the number of ranks: equal bit for bit, whoever
saved and whoever loads.

The model has 259 tokens and three experts: no number of ranks here divides its rows, and of four ranks one
has no expert at all.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from rollouts.backends.state import read_state
from rollouts.models.load import load_hf_model
from rollouts.ranks.group import Ranks

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
LAUNCH_S = 240.0
DAMAGED = ["cut", "missing", "misshapen", "unknown"]


def launch(ranks: int, folder: Path, **plan: Any) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["-m", "tests.distributed.sharded_state_rank", str(folder), json.dumps(plan)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LAUNCH_S, check=False
    )
    assert done.returncode == 0, done.stderr[-5000:]


def make_model() -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 8,
    }
    experts: dict[str, Any] = {
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "num_key_value_heads": 2,
    }
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=259, **sizes, **experts, tie_word_embeddings=True))


def load_alone(path: Path) -> dict[str, torch.Tensor]:
    """What one process, without any ranks, has after loading."""
    model = load_hf_model(path)
    optimizer = torch.optim.AdamW(model.parameters())
    read_state(path, model, ["steps"], Ranks(0, 1, 1, torch.device("cpu"))).apply(optimizer, model.device)
    found = {f"weight/{name}": parameter.detach() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        found |= {f"{kind}/{name}": value for kind, value in optimizer.state[parameter].items()}
    return found


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    make_model().save_pretrained(str(folder / "model"))
    single = folder / "single"  # as one process saves it
    shutil.copytree(folder / "model", single)
    (single / "state").mkdir()
    model = load_hf_model(single)
    state: dict[str, torch.Tensor] = {"rng/cpu": torch.get_rng_state()}
    for name, parameter in model.named_parameters():
        state |= {
            f"exp_avg/{name}": torch.randn_like(parameter),
            f"exp_avg_sq/{name}": torch.rand_like(parameter),
        }
        state[f"step/{name}"] = torch.tensor(2.0)
    save_file(state, single / "state/optimizer.safetensors")
    (single / "state/backend.json").write_text(json.dumps({"steps": 2.0}))
    damage(folder)
    launch(2, folder, jobs=[{"name": "two", "train": 2, "save": "c2", "compare": True}])
    hybrid = {"name": "hybrid", "mesh": [2, 2], "train": 2, "save": "c2x2"}
    launch(
        4,
        folder,
        jobs=[{"name": "four", "train": 2, "save": "c4"}, hybrid, {"name": "two_on_four", "load": "c2"}],
    )
    launch(1, folder, jobs=[{"name": "two_on_one", "load": "c2", "save": "c1"}])
    back = [{"name": f"{name}_on_two", "load": name} for name in ("c1", "c4", "c2x2", "single")]
    launch(2, folder, jobs=[*back, {"name": "again", "load": "c1"}], refusals=DAMAGED, differences=DAMAGED)
    return folder


def damage(folder: Path) -> None:
    """Copies of the model with a file that is cut, without a weight, with one of another shape, with one too
    many.
    """
    for name in DAMAGED:
        shutil.copytree(folder / "model", folder / name)
        file = folder / name / "model.safetensors"
        if name == "cut":
            file.write_bytes(file.read_bytes()[:-100])
            continue
        tensors = load_file(file)
        if name == "missing":
            del tensors["model.norm.weight"]
        elif name == "misshapen":
            tensors["model.norm.weight"] = torch.ones(7)
        else:
            tensors["model.extra.weight"] = torch.ones(7)
        save_file(tensors, file, metadata={"format": "pt"})


def test_two_ranks_compute_what_one_process_does(folder: Path):
    assert [json.loads((folder / f"two-same-{rank}.json").read_text()) for rank in range(2)] == [True, True]


@pytest.mark.parametrize(
    ("loaded", "saved"),
    [
        ("two_on_one", "two"),
        ("two_on_four", "two"),
        ("c1_on_two", "two"),
        ("c4_on_two", "four"),
        ("c2x2_on_two", "hybrid"),
    ],
)
def test_a_change_of_ranks_changes_no_bit(folder: Path, loaded: str, saved: str):
    assert_same(load_file(folder / f"{loaded}.safetensors"), load_file(folder / f"{saved}.safetensors"))


def test_the_steps_of_training_are_those_that_ran(folder: Path):
    state = load_file(folder / "c4_on_two.safetensors")
    assert {float(value) for name, value in state.items() if name.startswith("step/")} == {2.0}
    assert any(float(value.abs().max()) > 0 for name, value in state.items() if name.startswith("exp_avg/"))


@pytest.mark.parametrize(
    ("checkpoint", "saved"), [("c2", "two"), ("c4", "four"), ("c2x2", "hybrid"), ("c1", "two")]
)
def test_one_process_loads_what_ranks_saved(folder: Path, checkpoint: str, saved: str):
    assert_same(load_alone(folder / checkpoint), load_file(folder / f"{saved}.safetensors"))


def test_ranks_load_what_one_process_saved(folder: Path):
    assert_same(load_file(folder / "single_on_two.safetensors"), load_alone(folder / "single"))


def test_replicas_save_their_rows_once(folder: Path):
    keys = [len(load_file(folder / f"c2x2/state/optimizer-{rank}-of-4.safetensors")) for rank in range(4)]
    assert keys[:2] == [keys[0]] * 2 and keys[0] > 20
    assert keys[2:] == [1, 1]  # their random state alone


def test_a_rank_goes_on_with_its_own_random_numbers_and_a_new_one_with_none_of_the_others(folder: Path):
    def digests(name: str, ranks: int) -> list[str]:
        return [json.loads((folder / f"{name}-rng-{rank}.json").read_text()) for rank in range(ranks)]

    assert digests("c4_on_two", 2) == digests("four", 4)[:2]
    assert digests("two_on_one", 1) == digests("two", 2)[:1]
    assert digests("two_on_four", 4)[:2] == digests("two", 2)
    assert len({*digests("two_on_four", 4)}) == 4
    assert digests("c1_on_two", 2) == digests("again", 2)


def test_a_model_that_does_not_fit_is_refused_alike_on_every_rank(folder: Path):
    said = [json.loads((folder / f"refusals-{rank}.json").read_text()) for rank in range(2)]
    assert said[0] == said[1]
    assert "model.safetensors cannot be read" in said[0]["cut"]
    assert "1 are missing: model.norm.weight" in said[0]["missing"]
    assert "model.norm.weight (7,) for (32,)" in said[0]["misshapen"]
    assert "1 are not the model's: model.extra.weight" in said[0]["unknown"]
    assert all(text.startswith("ModelError: ") for text in said[0].values())


def test_ranks_that_differ_are_refused_alike_naming_ranks_and_what_differs(folder: Path):
    said = [json.loads((folder / f"differences-{rank}.json").read_text()) for rank in range(2)]
    assert said[0] == said[1]
    host = socket.gethostname()
    assert said[0]["model"] == "nothing"
    for name in DAMAGED:
        assert said[0][name].startswith("ModelError: the model's model.safetensors is "), said[0][name]
        assert f" on rank 1 on {host} and " in said[0][name] and f" on rank 0 on {host};" in said[0][name]
