"""Optimizer state that several ranks saved, read by one process; and every way in which such files can be
wrong, named.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from rollouts.backends.state import find_optimizer_files, hold_state, read_headers, read_part, read_state
from rollouts.errors import CheckpointError
from rollouts.ranks.group import Ranks

NAME, KEY = "model.norm.weight", "exp_avg/model.norm.weight"
ALONE = Ranks(0, 1, 1, torch.device("cpu"))


def make_model() -> PreTrainedModel:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=11, num_hidden_layers=1, **sizes, tie_word_embeddings=True)
    return LlamaForCausalLM(config)


def make_moments(model: PreTrainedModel) -> dict[str, Tensor]:
    """exp_avg/NAME and exp_avg_sq/NAME, no two elements equal."""
    return {
        f"{kind}/{name}": torch.arange(parameter.numel(), dtype=torch.float32).view(parameter.shape)
        + 1000 * number
        + 0.5 * offset
        for number, (name, parameter) in enumerate(model.named_parameters())
        for offset, kind in enumerate(("exp_avg", "exp_avg_sq"))
    }


def write_ranks(checkpoint: Path, moments: dict[str, Tensor], ranks: int) -> Path:
    """The files of `ranks` ranks as the format says: rows in order, ceil(n / ranks) each, what is left for
    the last ones.
    """
    state = checkpoint / "state"
    state.mkdir(parents=True)
    names = sorted({key.partition("/")[2] for key in moments})
    for rank in range(ranks):
        tensors, layout = {"rng/cpu": torch.Generator().manual_seed(rank).get_state()}, {}
        for key, whole in moments.items():
            rows = -(-len(whole) // ranks)
            if len(part := whole[rank * rows : (rank + 1) * rows]):
                tensors[key] = part.contiguous()
                layout[key] = {"shape": list(whole.shape), "offset": [rank * rows, *[0] * (whole.ndim - 1)]}
        said = {"rank": rank, "ranks": ranks, "steps": dict.fromkeys(names, 3.0), "tensors": layout}
        file = state / f"optimizer-{rank}-of-{ranks}.safetensors"
        save_file(tensors, file, metadata={"layout": json.dumps(said)})
    (state / "backend.json").write_text('{"steps": 3}')
    return state


def load(checkpoint: Path, model: PreTrainedModel) -> torch.optim.AdamW:
    optimizer = torch.optim.AdamW(model.parameters())
    loaded = read_state(checkpoint, model, ["steps"], ALONE)
    assert loaded.position == {"steps": 3}
    loaded.apply(optimizer, torch.device("cpu"))
    return optimizer


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 16])
def test_what_ranks_saved_is_put_together(ranks: int, tmp_path: Path):
    model = make_model()
    moments = make_moments(model)
    _, pieces = read_headers(find_optimizer_files(write_ranks(tmp_path, moments, ranks)))
    optimizer = load(tmp_path, model)
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        assert float(state["step"]) == 3.0
        assert all(torch.equal(state[kind], moments[f"{kind}/{name}"]) for kind in ("exp_avg", "exp_avg_sq"))
    assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(0).get_state())
    key = "exp_avg/model.embed_tokens.weight"
    for start, stop, first in [(0, 11, 0), (3, 9, 2), (10, 11, 7), (4, 4, 0)]:
        cut = slice(start, stop), slice(first, 8)
        assert torch.equal(read_part(pieces[key], key, cut, torch.float32), moments[key][cut])


@pytest.mark.parametrize("copied", [False, True])
def test_what_is_held_is_loaded_and_a_copy_stays_when_training_goes_on(copied: bool, tmp_path: Path):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.tensor([[1, 2, 3]]), use_cache=False).logits.sum().backward()
    optimizer.step()
    torch.manual_seed(5)
    held = hold_state(model, optimizer, {"steps": 3}, ALONE, copied=copied)
    drawn = torch.rand(3)
    before = [{**copy.deepcopy(optimizer.state[parameter])} for parameter in model.parameters()]
    if copied:
        optimizer.step()
    held.write(tmp_path)
    other = load(tmp_path, model)
    assert torch.equal(torch.rand(3), drawn)
    for parameter, state in zip(model.parameters(), before, strict=True):
        assert all(torch.equal(other.state[parameter][kind], value) for kind, value in state.items())
    assert load_file(tmp_path / "state/optimizer.safetensors")[f"step/{NAME}"] == 1.0


def test_ranks_that_are_new_draw_numbers_of_their_own_and_the_same_ones_every_time(tmp_path: Path):
    model = make_model()
    write_ranks(tmp_path, make_moments(model), 2)

    def draw(rank: int) -> float:
        states = read_state(tmp_path, model, [], Ranks(rank, 5, 5, torch.device("cpu"))).random_states
        return torch.rand(1, generator=torch.Generator().set_state(states["rng/cpu"])).item()

    drawn = [draw(rank) for rank in range(5)]
    assert drawn == [draw(rank) for rank in range(5)] and len(set(drawn)) == 5
    saved = [torch.Generator().manual_seed(rank) for rank in (0, 1)]
    assert drawn[:2] == [torch.rand(1, generator=generator).item() for generator in saved]


SECOND = "optimizer-1-of-2.safetensors"


def edit(change: Callable[[dict[str, Any], dict[str, Tensor]], object]) -> Callable[[Path], None]:
    """Changes layout and tensors of the second file."""

    def work(state: Path) -> None:
        with safe_open(state / SECOND, framework="pt") as file:
            layout = json.loads(file.metadata()["layout"])
        tensors = load_file(state / SECOND)
        change(layout, tensors)
        save_file(tensors, state / SECOND, metadata={"layout": json.dumps(layout)})

    return work


def copy_file(target: str) -> Callable[[Path], object]:
    return lambda state: (state / target).write_bytes((state / SECOND).read_bytes())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda state: (state / SECOND).write_bytes(b"x"), rf"{SECOND} cannot be read"),
        (lambda state: (state / SECOND).unlink(), rf"{SECOND} is missing; 2 ranks saved"),
        (copy_file("optimizer-0-of-3.safetensors"), r"optimizer-0-of-3\.safetensors and .* are of two saves"),
        (copy_file("optimizer-7-of-2.safetensors"), r"optimizer-7-of-2\.safetensors and .* are of two saves"),
        (copy_file("optimizer.safetensors"), r"optimizer\.safetensors and .* are of two saves"),
        (copy_file("optimizer-0-of-2.safetensors"), r"0-of-2\.safetensors: layout says rank 1 of 2"),
        (lambda state: (state / "backend.json").write_text("[1]"), r"backend\.json has steps=None; it must"),
        (edit(lambda layout, _: layout.pop("steps")), rf"{SECOND}: its metadata has no readable layout"),
        (edit(lambda layout, _: layout["steps"].update({NAME: 4.0})), r"are of two saves: other steps"),
        (edit(lambda _, tensors: tensors.pop(KEY)), rf"{KEY}' is not what its layout says"),
        (edit(lambda layout, _: layout["tensors"].pop(KEY)), rf"the files lack elements of '{KEY}'"),
        (edit(lambda layout, _: layout["tensors"][KEY].update(offset=[5])), rf"lack elements of '{KEY}'"),
        (edit(lambda layout, _: layout["tensors"][KEY].update(shape=[9])), rf"{KEY}' is not what its layout"),
        (edit(lambda _, tensors: tensors.update({KEY: tensors[KEY][:3].clone()})), r"files lack elements"),
        (
            edit(lambda _, tensors: tensors.update({"rng/cpu": torch.zeros(3)})),
            r"'rng/cpu' is no random state",
        ),
    ],
)
def test_files_that_are_wrong_are_named_before_anything_is_changed(
    damage: Callable[[Path], object], message: str, tmp_path: Path
):
    model = make_model()
    damage(write_ranks(tmp_path, make_moments(model), 2))
    before = torch.get_rng_state()
    with pytest.raises(CheckpointError, match=message):
        read_state(tmp_path, model, ["steps"], Ranks(1, 2, 2, torch.device("cpu")))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"exp_avg/model.other": torch.ones(3)}, r"model\.other' has shape \(3,\), .* does not exist"),
        ({KEY: torch.ones(6)}, rf"{KEY}' has shape \(6,\), the model's parameter \(8,\)"),
        ({f"exp_avg_sq/{NAME}": None}, rf"has \['exp_avg', 'step'\] of {NAME}; AdamW needs"),
    ],
)
def test_another_models_state_is_refused_by_name(changes: dict[str, Any], message: str, tmp_path: Path):
    model = make_model()
    moments = {key: value for key, value in {**make_moments(model), **changes}.items() if value is not None}
    write_ranks(tmp_path, moments, 2)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, model)
