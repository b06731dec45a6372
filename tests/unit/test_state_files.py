"""Optimizer state that several ranks saved, read by one process; and every way in which such files can be
wrong, named.
"""

from __future__ import annotations

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

from rollouts.backends.sharded_state import (
    hold_sharded_state,
    load_sharded_state,
    read_sharded_state,
    save_sharded_state,
)
from rollouts.backends.state_files import read_optimizer_files, read_part
from rollouts.errors import CheckpointError

NAME = "model.norm.weight"


def make_model() -> PreTrainedModel:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=11, num_hidden_layers=1, **sizes, tie_word_embeddings=True)
    )


def make_moments(model: PreTrainedModel) -> dict[str, Tensor]:
    """exp_avg/NAME and exp_avg_sq/NAME, no two elements equal."""
    found: dict[str, Tensor] = {}
    for number, (name, parameter) in enumerate(model.named_parameters()):
        for offset, kind in enumerate(("exp_avg", "exp_avg_sq")):
            found[f"{kind}/{name}"] = (
                torch.arange(parameter.numel(), dtype=torch.float32).view(parameter.shape)
                + 1000 * number
                + 0.5 * offset
            )
    return found


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
        save_file(
            tensors, state / f"optimizer-{rank}-of-{ranks}.safetensors", metadata={"layout": json.dumps(said)}
        )
    (state / "backend.json").write_text('{"steps": 3}')
    return state


def load(checkpoint: Path, model: PreTrainedModel) -> torch.optim.AdamW:
    optimizer = torch.optim.AdamW(model.parameters())
    assert load_sharded_state(checkpoint, model, optimizer, ["steps"], rank=0, ranks=1) == {"steps": 3}
    return optimizer


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 16])
def test_one_process_puts_together_what_ranks_saved(ranks: int, tmp_path: Path):
    model = make_model()
    moments = make_moments(model)
    write_ranks(tmp_path, moments, ranks)
    optimizer = load(tmp_path, model)
    for name, parameter in model.named_parameters():
        assert float(optimizer.state[parameter]["step"]) == 3.0
        assert torch.equal(optimizer.state[parameter]["exp_avg"], moments[f"exp_avg/{name}"])
        assert torch.equal(optimizer.state[parameter]["exp_avg_sq"], moments[f"exp_avg_sq/{name}"])
    assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(0).get_state())


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_any_rows_are_read_from_whichever_files_have_them(ranks: int, tmp_path: Path):
    moments = make_moments(make_model())
    found = read_optimizer_files(write_ranks(tmp_path, moments, ranks))
    whole = moments["exp_avg/model.embed_tokens.weight"]
    for start, stop, first in [(0, 11, 0), (3, 9, 2), (10, 11, 7), (4, 4, 0)]:
        slices = (slice(start, stop), slice(first, 8))
        part = read_part(found.pieces["model.embed_tokens.weight"]["exp_avg"], slices, torch.float32)
        assert torch.equal(part, whole[start:stop, first:8])


def test_what_is_saved_is_loaded_and_numbers_are_in_json(tmp_path: Path):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.tensor([[1, 2, 3]]), use_cache=False).logits.sum().backward()
    optimizer.step()
    torch.manual_seed(5)
    save_sharded_state(tmp_path, model, optimizer, {"steps": 3}, rank=0, ranks=1)
    drawn = torch.rand(3)
    other = load(tmp_path, model)
    assert torch.equal(torch.rand(3), drawn)
    for parameter in model.parameters():
        assert all(
            torch.equal(other.state[parameter][kind], optimizer.state[parameter][kind])
            for kind in ("step", "exp_avg", "exp_avg_sq")
        )
    path = tmp_path / "state/optimizer-0-of-1.safetensors"
    assert min(tensor.ndim for tensor in load_file(path).values()) == 1
    with safe_open(path, framework="pt") as file:
        assert json.loads(file.metadata()["layout"])["steps"][NAME] == 1.0


def test_an_optimizer_that_never_stepped_is_saved_and_loaded_as_such(tmp_path: Path):
    model = make_model()
    save_sharded_state(tmp_path, model, torch.optim.AdamW(model.parameters()), {"steps": 3}, rank=0, ranks=1)
    assert len(load(tmp_path, model).state) == 0


def test_a_state_that_is_held_does_not_move_when_training_goes_on(tmp_path: Path):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.tensor([[1, 2, 3]]), use_cache=False).logits.sum().backward()
        optimizer.step()
        before = {
            name: optimizer.state[parameter]["exp_avg"].clone()
            for name, parameter in model.named_parameters()
        }
        held = hold_sharded_state(model, optimizer, {"steps": 3}, rank=0, ranks=1, copied=True)
    model(torch.tensor([[4]]), use_cache=False).logits.sum().backward()
    optimizer.step()
    held.write(tmp_path)
    loaded = load(tmp_path, model)
    assert all(
        torch.equal(loaded.state[parameter]["exp_avg"], before[name])
        for name, parameter in model.named_parameters()
    )


def test_ranks_that_are_new_draw_numbers_of_their_own_and_the_same_ones_every_time(tmp_path: Path):
    model = make_model()
    write_ranks(tmp_path, make_moments(model), 2)
    states = [
        [
            read_sharded_state(tmp_path, model, [], rank=rank, ranks=5).random_states["rng/cpu"]
            for rank in range(5)
        ]
        for _ in range(2)
    ]
    drawn = [[torch.rand(1, generator=generator(state)).item() for state in of_ranks] for of_ranks in states]
    assert drawn[0] == drawn[1] and len(set(drawn[0])) == 5
    assert drawn[0][:2] == [
        torch.rand(1, generator=torch.Generator().manual_seed(rank)).item() for rank in range(2)
    ]


def generator(state: Tensor) -> torch.Generator:
    made = torch.Generator()
    made.set_state(state)
    return made


def edit_layout(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def edit(state: Path) -> None:
        path = state / "optimizer-1-of-2.safetensors"
        with safe_open(path, framework="pt") as file:
            layout = json.loads(file.metadata()["layout"])
        change(layout)
        save_file(load_file(path), path, metadata={"layout": json.dumps(layout)})

    return edit


def edit_tensors(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def edit(state: Path) -> None:
        path = state / "optimizer-1-of-2.safetensors"
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, metadata=metadata)

    return edit


def truncate(state: Path) -> None:
    path = state / "optimizer-1-of-2.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def move_file(target: str) -> Callable[[Path], object]:
    return lambda state: (state / "optimizer-1-of-2.safetensors").rename(state / target)


def copy_file(target: str) -> Callable[[Path], object]:
    return lambda state: (state / target).write_bytes((state / "optimizer-1-of-2.safetensors").read_bytes())


KEY = f"exp_avg/{NAME}"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, r"optimizer-1-of-2\.safetensors cannot be read"),
        (
            move_file("elsewhere"),
            r"optimizer-1-of-2\.safetensors is missing; the optimizer was saved by 2 ranks",
        ),
        (copy_file("optimizer-0-of-3.safetensors"), r"has optimizer files of 2 and of 3 ranks"),
        (
            copy_file("optimizer-7-of-2.safetensors"),
            r"optimizer-7-of-2\.safetensors is of a rank beyond the 2",
        ),
        (copy_file("optimizer.safetensors"), r"optimizer\.safetensors and .* are of two different saves"),
        (
            copy_file("optimizer-0-of-2.safetensors"),
            r"optimizer-0-of-2\.safetensors: layout says rank 1 of 2; the file's name says otherwise",
        ),
        (
            lambda state: (state / "backend.json").write_text("[1]"),
            r"backend\.json has steps=None; it must be a number",
        ),
        (
            edit_layout(lambda layout: layout.pop("steps")),
            r"optimizer-1-of-2\.safetensors: its metadata has no layout that can be read",
        ),
        (
            edit_layout(lambda layout: layout["steps"].update({NAME: 4.0})),
            r"layout\.steps is not what .*optimizer-0-of-2\.safetensors has",
        ),
        (
            edit_layout(lambda layout: layout["tensors"].pop(KEY)),
            r"layout\.tensors and the file's tensors differ in 'exp_avg/model\.norm\.weight'",
        ),
        (
            edit_layout(lambda layout: layout["tensors"][KEY].update(offset=[5])),
            r"norm\.weight' of shape \(4,\) at \(5,\) does not lie in",
        ),
        (
            edit_layout(lambda layout: layout["tensors"][KEY].update(offset=[3])),
            r"'exp_avg/model\.norm\.weight' has elements that .* has too",
        ),
        (
            edit_layout(lambda layout: layout["tensors"][KEY].update(shape=[9])),
            r"is of \(9,\) as a whole, in .* of \(8,\)",
        ),
        (
            edit_tensors(lambda tensors: tensors.update({KEY: tensors[KEY][:3].clone()})),
            r"the files together lack elements of 'exp_avg/model\.norm",
        ),
        (
            edit_tensors(lambda tensors: tensors.update({"rng/cpu": torch.zeros(3)})),
            r"1-of-2\.safetensors: 'rng/cpu' has dtype torch\.float32",
        ),
        (
            edit_tensors(lambda tensors: tensors.update({"rng/cpu": torch.zeros(9, dtype=torch.uint8)})),
            r"'rng/cpu' is not a random state",
        ),
    ],
)
def test_files_that_are_wrong_are_named_before_anything_is_changed(
    damage: Callable[[Path], object], message: str, tmp_path: Path
):
    model = make_model()
    damage(write_ranks(tmp_path, make_moments(model), 2))
    optimizer = torch.optim.AdamW(model.parameters())
    before = torch.get_rng_state()
    with pytest.raises(CheckpointError, match=message):
        load_sharded_state(tmp_path, model, optimizer, ["steps"], rank=1, ranks=2)
    assert len(optimizer.state) == 0 and torch.equal(torch.get_rng_state(), before)


def test_another_models_state_is_refused_by_name(tmp_path: Path):
    model = make_model()
    moments = make_moments(model)
    write_ranks(
        tmp_path / "a",
        {**moments, "exp_avg/model.other": torch.ones(3), "exp_avg_sq/model.other": torch.ones(3)},
        2,
    )
    with pytest.raises(CheckpointError, match=r"'exp_avg/model\.other', which is no parameter of this model"):
        load(tmp_path / "a", model)
    write_ranks(tmp_path / "b", {**moments, f"exp_avg/{NAME}": torch.ones(6)}, 2)
    with pytest.raises(
        CheckpointError, match=r"'exp_avg/model\.norm\.weight' has shape \(6,\), the parameter \(8,\)"
    ):
        load(tmp_path / "b", model)
    write_ranks(
        tmp_path / "c", {key: value for key, value in moments.items() if key != f"exp_avg_sq/{NAME}"}, 2
    )
    with pytest.raises(CheckpointError, match=rf"has \['exp_avg', 'step'\] of {NAME}; AdamW needs"):
        load(tmp_path / "c", model)
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors cannot be read"):
        load(tmp_path / "nowhere", model)
