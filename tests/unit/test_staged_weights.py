"""Updates of an engine's own model that write into memory of earlier ones."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from rollouts.engines.local.weights import StagedWeights, copy_model
from rollouts.errors import EngineError


def make_model() -> nn.Module:
    """Two weights, of which the second is tied to a third name."""
    model = nn.Module()
    model.first = nn.Parameter(torch.zeros(3, 2))
    model.second = nn.Parameter(torch.zeros(4))
    model.tied = model.second
    return model


def make_values(number: float) -> dict[str, torch.Tensor]:
    return {"first": torch.full((3, 2), number), "second": torch.full((4,), number + 0.5)}


def update(
    model: nn.Module, number: float, before: StagedWeights | None, dtype: torch.dtype = torch.float32
) -> StagedWeights:
    staged = StagedWeights(model, before)
    staged.add([(name, value.to(dtype)) for name, value in make_values(number).items()])
    staged.apply()
    return staged


def addresses(model: nn.Module) -> list[int]:
    return [parameter.data_ptr() for parameter in model.parameters()]


def assert_holds(model: nn.Module, number: float) -> None:
    for name, value in make_values(number).items():
        assert torch.equal(model.get_parameter(name), value), name


def test_the_third_update_writes_where_the_first_did_and_never_where_the_model_was_made():
    model = make_model()
    made = model.first.data
    last, seen = None, [addresses(model)]
    for number in (1.0, 2.0, 3.0, 4.0):
        last = update(model, number, last)
        assert_holds(model, number)
        seen.append(addresses(model))
    assert seen[3] == seen[1] and seen[4] == seen[2]
    assert len({tuple(one) for one in seen[:3]}) == 3
    assert not made.any(), "memory that somebody else may have was written to"


def test_weights_of_another_dtype_are_converted_on_the_way_into_kept_memory():
    model, last = make_model(), None
    for number in (1.0, 2.0, 3.0):
        last = update(model, number, last, torch.bfloat16)
        assert_holds(model, number)
        assert model.first.dtype == torch.float32


def test_an_update_that_is_given_up_changes_nothing_and_the_next_one_is_whole():
    model, last = make_model(), None
    for number in (1.0, 2.0):
        last = update(model, number, last)
    given_up = StagedWeights(model, last)
    given_up.add([("first", torch.full((3, 2), 9.0))])
    with pytest.raises(EngineError, match="lacks"):
        given_up.apply()
    assert_holds(model, 2.0)
    update(model, 3.0, last)
    assert_holds(model, 3.0)


def test_a_model_whose_dtype_changed_gets_new_memory():
    model, last = make_model(), None
    for number in (1.0, 2.0):
        last = update(model, number, last)
    room = copy.deepcopy(last.free)
    model.to(torch.bfloat16)
    update(model, 3.0, last)
    assert model.first.dtype == torch.bfloat16 and bool((model.first == 3).all())
    assert all(torch.equal(tensor, room[key]) for key, tensor in last.free.items())


def test_weights_that_came_in_inference_mode_are_not_written_to_later():
    model, last = make_model(), None
    for number in (1.0, 2.0):
        with torch.inference_mode():
            last = update(model, number, last)
    assert last.made == {}
    update(model, 3.0, last)
    assert_holds(model, 3.0)


def test_a_copy_in_bfloat16_is_what_loading_in_bfloat16_gives_rotary_frequencies_included():
    config = LlamaConfig(
        vocab_size=17,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    model: Any = LlamaForCausalLM(config)
    own = copy_model(model, torch.bfloat16)
    assert {parameter.dtype for parameter in own.parameters()} == {torch.bfloat16}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    frequencies = own.model.rotary_emb.inv_freq
    assert frequencies.dtype == torch.float32
    assert torch.equal(frequencies, model.model.rotary_emb.inv_freq)
