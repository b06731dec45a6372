"""Optimizer state that several ranks saved, read by one process; and every way in which such files can be
wrong, named.
"""

import copy
from typing import Any

import pytest
import torch
import trio
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from rollouts.backends.scripts import save_training
from rollouts.backends.state import Position, hold_state, read_state
from rollouts.errors import CheckpointError
from rollouts.ranks.meet import Ranks
from rollouts.testing.torch_contracts import assert_weights_equal
from tests.support.plain_backend import open_backend
from tests.support.text_tables import cases, read_params

NAME, KEY = "model.norm.weight", "exp_avg/model.norm.weight"
SECOND = "optimizer-1-of-2.safetensors"
POSITION = Position(3, 1, 2)
KINDS = ("exp_avg", "exp_avg_sq")
ALONE = Ranks(0, 1, 1, torch.device("cpu"))


def make_model(vocab_size=11):
    torch.manual_seed(0)
    sizes = read_params("hidden_size = 8, intermediate_size = 12, num_attention_heads = 2")
    sizes |= {"vocab_size": vocab_size, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True))


def make_moments(model):
    """exp_avg/NAME and exp_avg_sq/NAME, no two elements equal."""
    weights = {f"{kind}/{name}": one for name, one in model.named_parameters() for kind in KINDS}
    sizes = [one.numel() for one in weights.values()]
    values = torch.arange(float(sum(sizes))).split(sizes)
    return {key: mine.view_as(weights[key]) for key, mine in zip(weights, values, strict=True)}


def write_ranks(checkpoint, moments, ranks):
    """The files of `ranks` ranks as the format says: rows in order, ceil(n / ranks) each, what is left for
    the last ones.
    """
    state = checkpoint / "state"
    state.mkdir(parents=True)
    for rank in range(ranks):
        tensors = {"rng/cpu": torch.Generator().manual_seed(rank).get_state()}
        for key, whole in moments.items():
            rows = -(-len(whole) // ranks)
            tensors[key] = whole[rank * rows : (rank + 1) * rows]
            tensors[f"step/{key.partition('/')[2]}"] = torch.tensor(3.0)
        file = "optimizer.safetensors" if ranks == 1 else f"optimizer-{rank}-of-{ranks}.safetensors"
        save_file(tensors, state / file)
    (state / "backend.json").write_text('{"steps": 3, "skipped_in_a_row": 1, "weight_version": 2}')
    return state


def load(checkpoint, model):
    optimizer = torch.optim.AdamW(model.parameters())
    loaded = read_state(checkpoint, model, ALONE)
    assert loaded.position == POSITION
    loaded.apply(optimizer, torch.device("cpu"))
    return optimizer


@cases("ranks: 1 2 3 5 16")
def test_what_ranks_saved_is_put_together(ranks: int, tmp_path):
    model = make_model()
    moments = make_moments(model)
    write_ranks(tmp_path, moments, ranks)
    optimizer = load(tmp_path, model)
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        assert float(state["step"]) == 3.0
        assert all(torch.equal(state[kind], moments[f"{kind}/{name}"]) for kind in KINDS)
    assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(0).get_state())


@cases("copied: no yes")
def test_what_is_held_is_loaded_and_a_copy_stays_when_training_goes_on(copied: bool, tmp_path):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.tensor([[1, 2, 3]]), use_cache=False).logits.sum().backward()
    optimizer.step()
    torch.manual_seed(5)
    held = hold_state(model, optimizer, POSITION, ALONE, copied=copied)
    drawn, before = torch.rand(3), copy.deepcopy(optimizer.state_dict()["state"])
    if copied:
        optimizer.step()
    held.write(tmp_path)
    torch.testing.assert_close(load(tmp_path, model).state_dict()["state"], before, rtol=0, atol=0)
    assert torch.equal(torch.rand(3), drawn)


def test_ranks_that_are_new_draw_numbers_of_their_own_and_the_same_ones_every_time(tmp_path):
    model = make_model()
    write_ranks(tmp_path, make_moments(model), 2)

    def draw(rank):
        states = read_state(tmp_path, model, Ranks(rank, 5, 5, torch.device("cpu"))).random_states
        return torch.rand(1, generator=torch.Generator().set_state(states["rng/cpu"])).item()

    drawn = [*map(draw, range(5))]
    assert drawn == [*map(draw, range(5))] and len(set(drawn)) == 5
    saved = [torch.Generator().manual_seed(rank) for rank in (0, 1)]
    assert drawn[:2] == [torch.rand(1, generator=generator).item() for generator in saved]


def change(tensors, key, value):
    """These, of which one has other values, or is not there."""
    kept = {name: tensor for name, tensor in tensors.items() if name != key}
    return kept if value is None else {**kept, key: torch.tensor(value)}


@cases(rf"""
key         | value                      | message
step/{NAME} | 4.0                        | has the steps .*3.*4.* of {NAME}, by rank
{KEY}       | null                       | '{KEY}' has shape \(4,\), the model's parameter \(8,\)
{KEY}       | [1.0, 1.0, 1.0]            | '{KEY}' has shape \(7,\), the model's parameter \(8,\)
{KEY}       | [[1.0], [1.0], [1.0], [1.0]] | '{KEY}' has shape \(8,\), the model's parameter \(8,\)
rng/cpu     | [0.0, 0.0, 0.0]            | 'rng/cpu' is no random state
""")
def test_a_file_that_says_something_else_is_named_before_anything_is_changed(
    key, value: Any, message, tmp_path
):
    file = write_ranks(tmp_path, make_moments(make_model()), 2) / SECOND
    save_file(change(load_file(file), key, value), file)
    check_refused(tmp_path, message)


@cases(f"""
name | content | message
{SECOND} | x | {SECOND} cannot be read
{SECOND} |   | {SECOND} is missing; 2 ranks saved
backend.json | [1] | backend\\.json cannot be read
backend.json | {{}} | backend\\.json cannot be read .*steps
backend.json | {{"steps": "3"}} | backend\\.json cannot be read .*steps
optimizer-0-of-3.safetensors | copy | optimizer-0-of-3\\.safetensors is of another save
optimizer-7-of-2.safetensors | copy | optimizer-7-of-2\\.safetensors is of another save
optimizer.safetensors        | copy | optimizer\\.safetensors is of another save
""")
def test_files_that_are_damaged_or_of_two_saves_are_named(name, content, message, tmp_path):
    """copy: of the second file."""
    state = write_ranks(tmp_path, make_moments(make_model()), 2)
    data = (state / SECOND).read_bytes() if content == "copy" else content.encode()
    (state / name).unlink(missing_ok=True)
    if data:
        (state / name).write_bytes(data)
    check_refused(tmp_path, message)


def check_refused(checkpoint, message):
    model, before = make_model(), torch.get_rng_state()
    with pytest.raises(CheckpointError, match=message):
        read_state(checkpoint, model, Ranks(1, 2, 2, torch.device("cpu")))
    assert torch.equal(torch.get_rng_state(), before)


@cases(rf"""
key                 | value           | message
exp_avg/model.other | [1.0, 1.0, 1.0] | moments of 'model\.other', which the model does not have
{KEY}               | [1.0, 1.0, 1.0] | {KEY}' has shape \(3,\), the model's parameter \(8,\)
exp_avg_sq/{NAME}   | null            | exp_avg_sq/{NAME}' has shape None, the model's
""")
def test_another_models_state_is_refused_by_name(key, value: Any, message, tmp_path):
    model = make_model()
    write_ranks(tmp_path, change(make_moments(model), key, value), 2)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, model)


def test_a_backend_goes_on_from_what_a_script_saved(tmp_path):
    model, other = make_model(), make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.arange(6)[None]).logits.square().sum().backward()
    optimizer.step()
    save_training(tmp_path, 3, model, optimizer, {})

    async def check():
        async with open_backend(other) as backend:
            await backend.load(tmp_path / "checkpoints/rl/step_3")
            assert_weights_equal(await backend.get_weights(), dict(model.named_parameters()))
            for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
                moment = backend.trainer.optimizer.state[theirs]["exp_avg"]
                assert torch.equal(optimizer.state[mine]["exp_avg"], moment)

    trio.run(check)
