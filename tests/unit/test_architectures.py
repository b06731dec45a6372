"""Any causal model trains as a plain forward of each row would train it: layouts, heads and windows are taken
only where they are exact.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from rollouts.backends.open import open_pytorch_backend
from rollouts.backends.pytorch import PyTorchTrainingBackend
from rollouts.config.tables import OptimConfig
from rollouts.data.packing import make_micro_batches
from rollouts.device_thread import open_device_thread
from rollouts.errors import ModelError
from rollouts.models.export import save_hf_model
from rollouts.models.forward_plan import describe_plan, plan_forward
from rollouts.models.gradient_checkpointing import checkpoint_layers
from rollouts.models.load import load_hf_model, load_tokenizer, resolve_model
from rollouts.models.log_probs import NO_LIMIT, compute_micro_batch_log_probs, make_trie_mask
from rollouts.models.optim import create_adamw_optimizer
from rollouts.models.tiny import TINY_KINDS
from rollouts.reference.score import open_frozen_reference
from rollouts.testing import torch_contracts as contract
from rollouts.testing.torch_contracts import SFT, make_batch
from rollouts.types import LossSpec, RolloutBatch

torch.set_num_threads(1)
OPTIM = OptimConfig(lr=1e-2, max_nonfinite_steps=2)
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# what a model may do to its logits and its context, beside what the tiny models do
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "logits divided": ("Granite", {**SIZES, "logits_scaling": 3.0, "embedding_multiplier": 2.0}),
    "logits multiplied, parallel layers": ("Cohere", {**SIZES, "logit_scale": 0.25}),
    "head with a bias": ("Phi", {**SIZES, "tie_word_embeddings": False}),
    "learned positions": (
        "GPT2",
        {"vocab_size": 64, "n_positions": 256, "n_embd": 32, "n_layer": 2, "n_head": 4},
    ),
    "bias by distance in the row": (
        "Bloom",
        {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    ),
    "a window in every layer": ("Mistral", {**SIZES, "sliding_window": 7}),
    "a window in some layers": (
        "Gemma3",
        {**SIZES, "head_dim": 8, "sliding_window": 7, "query_pre_attn_scalar": 8, "num_hidden_layers": 6},
    ),
    "local layers of another name": (
        "GPTNeo",
        {
            "vocab_size": 64,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "window_size": 7,
            "attention_types": [[["global", "local"], 1]],
            "max_position_embeddings": 256,
        },
    ),
    "another mixture of experts": (
        "Mixtral",
        {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "router_jitter_noise": 0.1},
    ),
    "recurrent and attending layers": (
        "RecurrentGemma",
        {
            **SIZES,
            "num_hidden_layers": 3,
            "lru_width": 32,
            "attention_window_size": 8,
            "logits_soft_cap": 3.0,
        },
    ),
}


@functools.cache
def make_other(name: str) -> Any:
    family, settings = OTHERS[name]
    config_name = "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
    head = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    torch.manual_seed(0)
    model = getattr(transformers, head)(getattr(transformers, config_name)(**settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1 or parameter is getattr(model.get_output_embeddings(), "bias", None):
                parameter.copy_(torch.randn(parameter.shape) * 0.2)
    return model


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@functools.cache
def load_once(kind: str, cache: Path) -> Any:
    return load_hf_model(resolve_model(f"tiny:{kind}", cache_dir=cache))


def new_model(name: str, cache: Path) -> Any:
    """A copy of its own for each test: backends change weights."""
    return copy.deepcopy(load_once(name, cache) if name in TINY_KINDS else make_other(name))


@asynccontextmanager
async def open_backend(model: Any, **options: Any) -> AsyncIterator[Any]:
    async with open_device_thread(name="trainer", torch_threads=1) as device_thread:
        optimizer = create_adamw_optimizer(model, OPTIM)
        yield PyTorchTrainingBackend(model, optimizer, device_thread, optim=OPTIM, total_steps=10, **options)


def score_slowly(model: Any, batch: RolloutBatch) -> list[Tensor]:
    """[T_i - 1] of every row by itself, from the logits that the model itself gives."""
    rows = []
    for tokens in batch.tokens:
        ids = torch.from_numpy(tokens)
        log_probs = (model(input_ids=ids[None], use_cache=False).logits[0] / batch.temperature).log_softmax(
            -1
        )
        rows.append(log_probs[:-1].gather(-1, ids[1:, None]).squeeze(-1))
    return rows


def differentiate_slowly(model: Any, batch: RolloutBatch) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of REINFORCE over all tokens, row by row."""
    assert batch.advantages is not None
    total: Any = 0.0
    for row, log_probs in enumerate(score_slowly(model, batch)):
        mask, advantages = (
            torch.from_numpy(np.asarray(batch.loss_masks[row][1:])),
            torch.from_numpy(batch.advantages[row][1:]),
        )
        total = total - (log_probs * advantages)[mask].sum()
    loss = total / sum(int(mask.sum()) for mask in batch.loss_masks)
    loss.backward()
    return float(loss.detach()), take_gradients(model)


def take_gradients(model: Any) -> dict[str, Tensor]:
    return {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def assert_gradients_close(
    found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float = 1e-5
) -> None:
    """To `tolerance` of the largest gradient. A parameter that no row reached has no gradient, or zeros."""
    scale = max(float(gradient.abs().max()) for gradient in wanted.values())
    for name in {*found, *wanted}:
        zeros = torch.zeros_like(found.get(name, wanted.get(name)))  # pyright: ignore[reportArgumentType, reportCallIssue]
        difference = float((found.get(name, zeros) - wanted.get(name, zeros)).abs().max())
        assert difference <= tolerance * max(scale, 1.0), (
            f"{name}: {difference:.1e} where gradients reach {scale:.1e}"
        )


FORMS: dict[str, dict[str, Any]] = {
    "padded": {"share_prefix": False, "micro_batch_tokens": 10_000},
    "a micro-batch per row": {"share_prefix": False, "micro_batch_tokens": 1},
    "shared if exact": {"share_prefix": True, "micro_batch_tokens": 10_000},
    "shared if exact, in micro-batches": {"share_prefix": True, "micro_batch_tokens": 24},
}


# --- exactness ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", TINY_KINDS)
async def test_log_probs_and_gradients_are_those_of_a_plain_forward_of_each_row(
    kind: str, form: str, cache: Path
):
    await check_exact(new_model(kind, cache), new_model(kind, cache), **FORMS[form])


@pytest.mark.parametrize("name", OTHERS)
async def test_other_models_are_exact_too(name: str, cache: Path):
    await check_exact(new_model(name, cache), new_model(name, cache))


async def check_exact(model: Any, slow: Any, **options: Any) -> None:
    batch = make_batch(temperature=0.7)
    with torch.no_grad():
        wanted_rows = score_slowly(slow, batch)
    wanted_loss, wanted = differentiate_slowly(slow, batch)
    async with open_backend(model, **options) as backend:
        rows = await backend.forward(batch)
        result = await backend.forward_backward(batch, LossSpec("reinforce"))
        found = take_gradients(backend.model)
    for row, mask, wanted_row in zip(rows, batch.loss_masks, wanted_rows, strict=True):
        np.testing.assert_allclose(row[mask], wanted_row.numpy()[mask[1:]], atol=1e-5, rtol=1e-5)
    assert result.loss == pytest.approx(wanted_loss, abs=1e-5)
    assert_gradients_close(found, wanted)


@pytest.mark.parametrize("kind", TINY_KINDS)
async def test_accumulated_batches_add_up(kind: str, cache: Path):
    spec, batch = LossSpec("reinforce", unit="constant", constant=9.0), make_batch()
    async with open_backend(new_model(kind, cache)) as backend:
        await backend.forward_backward(batch, spec)
        whole = take_gradients(backend.model)
        await backend.reset()
        for rows in (range(4), range(4, 9)):
            await backend.forward_backward(contract.take_rows(batch, rows), spec)
        assert_gradients_close(take_gradients(backend.model), whole)


async def test_rows_longer_than_the_window_and_than_the_probe_are_exact(cache: Path):
    """Gemma's window of 8 against rows of 40, in a trie whose branches part at 30."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 259, 30)
    tokens = tuple(np.concatenate([prompt, rng.integers(0, 259, 10)]) for _ in range(3))
    batch = RolloutBatch(tokens=tokens, loss_masks=tuple(np.arange(40) >= 25 for _ in tokens))
    model = new_model("gemma", cache)
    with torch.no_grad():
        wanted = score_slowly(model, batch)
    async with open_backend(model) as backend:
        rows = await backend.forward(batch)
        assert backend.statistics()["batches_as_tries"] == 1
    for row, mask, wanted_row in zip(rows, batch.loss_masks, wanted, strict=True):
        np.testing.assert_allclose(row[mask], wanted_row.numpy()[mask[1:]], atol=1e-5)


@pytest.mark.parametrize("kind", TINY_KINDS)
async def test_a_reference_scores_as_a_plain_forward(kind: str, cache: Path):
    batch, path = make_batch(temperature=1.3), resolve_model(f"tiny:{kind}", cache_dir=cache)
    async with (
        open_device_thread(name="reference", torch_threads=1) as thread,
        open_frozen_reference(path, device_thread=thread) as reference,
    ):
        rows = await reference.score(batch)
    with torch.no_grad():
        wanted = score_slowly(load_once(kind, cache), batch)
    for row, mask, wanted_row in zip(rows, batch.loss_masks, wanted, strict=True):
        np.testing.assert_allclose(row[mask], wanted_row.numpy()[mask[1:]], atol=1e-5)
        assert (row[~mask] == 0).all()


# --- what is taken, and why not -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "layout", "head"),
    [
        ("llama", "packed", "linear"),
        ("qwen3", "packed", "linear"),
        ("gemma", "tries", "own"),
        ("mamba", "rows", "linear"),
        ("moe", "packed", "linear"),
    ],
)
def test_the_fastest_exact_layout_and_head_are_taken(kind: str, layout: str, head: str, cache: Path):
    plan = plan_forward(load_once(kind, cache))
    assert (plan.choose_layout(10_000), plan.head, plan.logit_scale) == (layout, head, 1.0)
    assert bool(plan.reason) == (layout != "packed")


@pytest.mark.parametrize(
    ("name", "layout", "head"),
    [
        ("logits divided", "packed", "linear"),
        ("logits multiplied, parallel layers", "packed", "linear"),
        ("head with a bias", "packed", "own"),
        ("learned positions", "packed", "linear"),
        ("bias by distance in the row", "rows", "linear"),
        ("a window in every layer", "packed", "linear"),
        ("a window in some layers", "packed", "linear"),
        ("local layers of another name", "rows", "linear"),
        ("another mixture of experts", "packed", "linear"),
        ("recurrent and attending layers", "rows", "own"),
    ],
)
def test_other_models_get_the_fastest_exact_layout_and_head(name: str, layout: str, head: str):
    plan = plan_forward(make_other(name))
    assert (plan.choose_layout(100), plan.head) == (layout, head), plan


def test_a_scale_of_the_logits_is_measured():
    assert plan_forward(make_other("logits divided")).logit_scale == pytest.approx(1 / 3, rel=1e-6)
    assert plan_forward(make_other("logits multiplied, parallel layers")).logit_scale == pytest.approx(
        0.25, rel=1e-6
    )


def test_a_model_that_ignores_the_mask_is_found_out_by_the_probe(cache: Path):
    model = new_model("llama", cache)
    model.config.layer_types = None
    forward = model.model.forward
    model.model.forward = lambda *inputs, **options: forward(*inputs, **{**options, "attention_mask": None})
    plan = plan_forward(model)
    assert plan.choose_layout(1) == "rows"
    assert "tries are not exact: log-probs differ" in plan.reason


def test_a_model_whose_rows_disturb_each_other_runs_one_at_a_time(cache: Path):
    model = new_model("llama", cache)
    forward = model.model.forward

    def leak(*inputs: Any, **options: Any) -> Any:
        output = forward(*inputs, **options)
        hidden = output.last_hidden_state
        output.last_hidden_state = hidden + hidden.mean((0, 2), keepdim=True) * (len(hidden) - 1)
        return output

    model.model.forward = leak
    plan = plan_forward(model)
    assert plan.choose_layout(1) == "single"
    assert "padded rows are not exact" in plan.reason


async def test_experts_with_a_capacity_run_one_row_at_a_time(cache: Path):
    model = new_model("moe", cache)
    model.config.expert_capacity = 8
    async with open_backend(model) as backend:
        await backend.forward(make_batch())
        assert backend.statistics()["batches_as_single"] == 1
    assert "expert_capacity=8" in plan_forward(model).reason


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 32,
}


def make_longrope() -> Any:
    torch.manual_seed(0)
    return transformers.Phi3ForCausalLM(
        transformers.Phi3Config(**SIZES, rope_parameters=LONGROPE, original_max_position_embeddings=32)
    ).eval()


def make_dynamic(**rope: Any) -> Any:
    torch.manual_seed(0)
    settings = {
        **SIZES,
        "max_position_embeddings": 16,
        "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4, **rope},
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings)).eval()


def make_rows(*lengths: int) -> RolloutBatch:
    rng = np.random.default_rng(0)
    tokens = tuple(rng.integers(0, 64, length) for length in lengths)
    return RolloutBatch(tokens=tokens, loss_masks=tuple(np.arange(length) > 0 for length in lengths))


def test_positions_that_change_with_the_longest_row_bound_what_is_padded():
    plan = plan_forward(make_longrope())
    assert [plan.choose_layout(length) for length in (32, 33, 100)] == ["packed", "single", "single"]
    assert "longrope" in plan.reason


@pytest.mark.parametrize("lengths", [(32, 7, 20), (34, 7, 32, 50)])
async def test_rows_at_and_beyond_the_length_of_longrope_are_exact(lengths: tuple[int, ...]):
    model, batch = make_longrope(), make_rows(*lengths)
    with torch.no_grad():
        wanted = score_slowly(model, batch)
    async with open_backend(model) as backend:
        rows = await backend.forward(batch)
    for row, wanted_row in zip(rows, wanted, strict=True):
        np.testing.assert_allclose(row[1:], wanted_row.numpy(), atol=1e-5)


async def test_a_row_that_would_change_dynamic_frequencies_for_the_rows_after_it_is_refused():
    model, short = make_dynamic(), make_rows(16, 9, 16)
    with torch.no_grad():
        wanted = score_slowly(model, short)
    async with open_backend(model) as backend:
        with pytest.raises(
            ModelError,
            match=r"a row of 17 tokens.*at most 16.*'dynamic'.*config\.max_position_embeddings=16.*shorter",
        ):
            await backend.forward(make_rows(9, 17))
        await backend.reset()
        with pytest.raises(ModelError, match="a row of 17 tokens"):
            await backend.forward_backward(make_rows(17), SFT)
        await backend.reset()
        rows = await backend.forward(short)
    for row, wanted_row in zip(rows, wanted, strict=True):
        np.testing.assert_allclose(row[1:], wanted_row.numpy(), atol=1e-5)


async def test_a_reference_refuses_rows_that_dynamic_frequencies_have_no_log_probs_for(tmp_path: Path):
    save_hf_model(make_dynamic(), tmp_path / "model")
    async with (
        open_device_thread(name="reference", torch_threads=1) as thread,
        open_frozen_reference(tmp_path / "model", device_thread=thread) as reference,
    ):
        with pytest.raises(ModelError, match=r"a row of 40 tokens.*'dynamic'"):
            await reference.score(make_rows(40))


def test_dynamic_frequencies_are_bound_by_the_context_and_not_by_the_original_one():
    assert plan_forward(make_dynamic(original_max_position_embeddings=64)).refused_above == 16


@pytest.mark.parametrize("window", [8, 40])
def test_a_model_whose_log_probs_depend_on_the_end_of_rows_beyond_its_window_is_refused_there(window: int):
    """All of its keys rank alike, so which of them it drops beyond the window depends on how long the row
    is.
    """
    torch.manual_seed(0)
    model = transformers.DogeForCausalLM(transformers.DogeConfig(**SIZES, keep_window_size=window)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn(parameter.shape) * 0.15)
    plan = plan_forward(model)
    assert plan.choose_layout(window) == "rows"
    with pytest.raises(ModelError, match=rf"at most {window}.*keep_window_size={window}"):
        plan.choose_layout(window + 1)


def look_ahead_beyond(model: Any, distance: int) -> None:
    """Rows above `distance` tokens begin to see their last token."""
    forward = model.model.forward

    def run(*inputs: Any, **options: Any) -> Any:
        output = forward(*inputs, **options)
        hidden = output.last_hidden_state
        output.last_hidden_state = hidden + hidden[:, -1:] if hidden.shape[1] > distance else hidden
        return output

    model.model.forward = run


def test_a_model_that_looks_ahead_beyond_a_distance_of_its_config_is_refused_there(cache: Path):
    model = new_model("llama", cache)
    model.config.block_size_of_memory = 100
    assert plan_forward(model).refused_above == NO_LIMIT
    look_ahead_beyond(model, 100)
    plan = plan_forward(model)
    assert (plan.refused_above, plan.choose_layout(100)) == (100, "rows")
    assert "block_size_of_memory=100" in plan.refusal


def test_a_model_that_looks_ahead_in_rows_longer_than_the_ones_compared_is_refused(cache: Path):
    model = new_model("llama", cache)
    look_ahead_beyond(model, 20)
    with pytest.raises(ModelError, match="not causal"):
        plan_forward(model)


def test_a_distance_too_long_to_try_is_said(cache: Path):
    model = new_model("llama", cache)
    model.config.block_size_of_memory = 5000
    assert "causal in rows above block_size_of_memory=5000 was not tried" in plan_forward(model).reason


def test_a_window_that_the_config_does_not_rule_bounds_the_tries(cache: Path):
    """The layers have their window elsewhere, so making the config's smaller for the probe changes
    nothing.
    """
    model = new_model("a window in every layer", cache)
    model.config.sliding_window = 50
    forward = model.model.forward
    fixed = {"sliding_window": 50}

    def run(*inputs: Any, **options: Any) -> Any:
        shown, model.config.sliding_window = model.config.sliding_window, fixed["sliding_window"]
        try:
            return forward(*inputs, **options)
        finally:
            model.config.sliding_window = shown

    model.model.forward = run
    plan = plan_forward(model)
    assert [plan.choose_layout(length) for length in (50, 51)] == ["packed", "rows"]
    assert model.config.sliding_window == 50


def test_logits_that_need_more_than_the_hidden_states_are_taken_from_the_whole_model(cache: Path):
    """Here each token's logits also depend on the token itself, past the decoder; neither head alone can
    know.
    """
    model, slow = new_model("llama", cache), new_model("llama", cache)
    for one in (model, slow):
        add_input_to_logits(one)
    plan = plan_forward(model)
    assert (plan.head, plan.choose_layout(100)) == ("whole", "packed")
    batch = make_batch()
    (micro_batch,) = make_micro_batches(
        batch.tokens, batch.loss_masks, micro_batch_tokens=10_000, share_prefix=True
    )
    found = compute_micro_batch_log_probs(model, micro_batch, plan=plan, temperature=1.0)
    found.log_probs[torch.from_numpy(micro_batch.token_pairs)].sum().backward()
    torch.stack(
        [
            row[torch.from_numpy(mask[1:])].sum()
            for row, mask in zip(score_slowly(slow, batch), batch.loss_masks, strict=True)
        ]
    ).sum().backward()
    assert_gradients_close(take_gradients(model), take_gradients(slow))


def add_input_to_logits(model: Any) -> None:
    forward = model.forward

    def run(*, input_ids: Tensor, **options: Any) -> Any:
        output = forward(input_ids=input_ids, **options)
        output.logits = output.logits + torch.nn.functional.one_hot(input_ids, output.logits.shape[-1])
        return output

    model.forward = run


@pytest.mark.parametrize("kind", TINY_KINDS)
async def test_bfloat16_stays_close_to_float32(kind: str, cache: Path):
    found = []
    for dtype in (None, torch.bfloat16):
        async with open_backend(new_model(kind, cache), autocast_dtype=dtype) as backend:
            result = await backend.forward_backward(make_batch(), SFT)
            found.append(result.loss)
            assert all(
                parameter.grad.dtype == torch.float32
                for parameter in backend.model.parameters()
                if parameter.grad is not None
            )
    assert found[0] == pytest.approx(found[1], abs=0.05)


def test_the_window_of_a_trie_counts_along_the_path():
    """Nodes a b c d and, from b on, e f: f stands at depth 3 and sees e and b, though three other nodes lie
    between b and it.
    """
    subtree_end = torch.tensor([[6, 6, 4, 4, 6, 6]])
    depth = torch.tensor([[0, 1, 2, 3, 2, 3]])
    mask = make_trie_mask(subtree_end, dtype=torch.float32, position_ids=depth, window=3)
    sees = ["".join("x" if value == 0 else "." for value in row) for row in mask[0, 0]]
    assert sees == ["x.....", "xx....", "xxx...", ".xxx..", "xx..x.", ".x..xx"]


def test_a_model_that_looks_ahead_is_refused():
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48
    )
    model = transformers.BertLMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    with pytest.raises(ModelError, match="not causal"):
        plan_forward(model)


def test_logits_that_are_no_numbers_are_refused_before_training(cache: Path):
    model = new_model("llama", cache)
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(ModelError, match="weights are damaged"):
        plan_forward(model)


def test_planning_changes_neither_the_model_nor_random_numbers(cache: Path):
    model = new_model("gemma", cache)
    before = {name: parameter.clone() for name, parameter in model.state_dict().items()}
    torch.manual_seed(0)
    wanted = torch.rand(3)
    torch.manual_seed(0)
    config = model.config.to_json_string()
    model.train()
    plan_forward(model)
    assert torch.equal(torch.rand(3), wanted)
    assert model.training
    assert model.config.to_json_string() == config
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert "forward" not in model.get_decoder().__dict__
    assert not model.get_decoder()._forward_hooks


async def test_statistics_and_the_log_say_which_layout_is_used(cache: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "rollouts")
    async with open_backend(new_model("mamba", cache)) as backend:
        await backend.forward(make_batch())
        statistics = backend.statistics()
    assert (
        statistics["batches_as_tries"],
        statistics["batches_as_rows"],
        statistics["batches_as_single"],
    ) == (0, 1, 0)
    assert (
        "MambaForCausalLM trains on right-padded rows, linear head; tries need attention in every layer"
        in caplog.text
    )
    assert (
        describe_plan(backend.model, plan_forward(load_once("llama", cache)))
        == "MambaForCausalLM trains on packed rows, linear head"
    )


# --- dropout and gradient checkpointing ---------------------------------------------------------------------


async def test_dropout_is_off_even_if_the_model_came_in_training_mode(cache: Path):
    model = new_model("llama", cache)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    async with open_backend(model.train()) as backend:
        first, second = await backend.forward(make_batch()), await backend.forward(make_batch())
    assert all((one == other).all() for one, other in zip(first, second, strict=True))


def saved_bytes(model: Any, batch: RolloutBatch) -> tuple[int, dict[str, Tensor]]:
    """Bytes that the graph keeps for the gradient, and the gradients."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = -torch.stack([row.sum() for row in score_slowly(model, batch)]).sum()
    loss.backward()
    return sum(kept.values()), take_gradients(model)


@pytest.mark.parametrize("kind", TINY_KINDS)
async def test_gradient_checkpointing_gives_the_same_gradients_for_less_memory(kind: str, cache: Path):
    rng = np.random.default_rng(0)
    batch = RolloutBatch(tokens=(rng.integers(0, 259, 200),), loss_masks=(np.arange(200) > 0,))
    plain, checkpointed = new_model(kind, cache), new_model(kind, cache)
    assert checkpoint_layers(checkpointed) == len(list(plain.get_decoder().layers))
    (plain_bytes, wanted), (fewer_bytes, found) = saved_bytes(plain, batch), saved_bytes(checkpointed, batch)
    assert_gradients_close(found, wanted, tolerance=1e-6)
    assert fewer_bytes < 0.7 * plain_bytes, (fewer_bytes, plain_bytes)


@pytest.mark.parametrize("kind", TINY_KINDS)
async def test_open_pytorch_backend_checkpoints_and_trains_the_same(kind: str, cache: Path, tmp_path: Path):
    path, weights = resolve_model(f"tiny:{kind}", cache_dir=cache), []
    for checkpointing in (False, True):
        async with open_pytorch_backend(
            path, optim=OPTIM, total_steps=3, threads=1, autocast="off", gradient_checkpointing=checkpointing
        ) as backend:
            await backend.forward_backward(make_batch(), SFT)
            weights.append(take_gradients(backend.model))
            await backend.optim_step()
    assert_gradients_close(*weights, tolerance=1e-6)


def test_a_model_without_layers_to_compute_twice_is_refused():
    with pytest.raises(ModelError, match="no layers for gradient checkpointing"):
        checkpoint_layers(torch.nn.Linear(1, 1))  # pyright: ignore[reportArgumentType]


# --- the contract, and files --------------------------------------------------------------------------------


@pytest.mark.parametrize("check", [name for name in vars(contract) if name.startswith("check_")])
@pytest.mark.parametrize("kind", TINY_KINDS)
async def test_contract(kind: str, check: str, cache: Path, tmp_path: Path):
    promise = getattr(contract, check)
    await promise(
        lambda: open_backend(new_model(kind, cache)),
        *([tmp_path] if "folder" in inspect.signature(promise).parameters else []),
    )


@pytest.mark.parametrize("kind", TINY_KINDS)
async def test_what_is_saved_and_what_is_streamed_reloads_in_transformers(
    kind: str, cache: Path, tmp_path: Path
):
    streamed: dict[str, Tensor] = {}
    tokenizer = load_tokenizer(resolve_model(f"tiny:{kind}", cache_dir=cache))
    async with open_backend(new_model(kind, cache), tokenizer=tokenizer) as backend:
        await contract.train(backend, make_batch())
        await backend.save(tmp_path / "saved")
        await backend.stream_weights(
            lambda bucket: streamed.update({name: tensor.clone() for name, tensor in bucket})
        )
    saved = load_hf_model(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").encode("hé") == tokenizer.encode("hé")
    contract.assert_weights_equal(dict(saved.named_parameters()), streamed)
    other = new_model(kind, cache)
    lost = other.load_state_dict(streamed, strict=False)
    assert not lost.unexpected_keys
    contract.assert_weights_equal(dict(other.named_parameters()), streamed)
    ids = torch.arange(30)[None]
    with torch.no_grad():
        assert torch.equal(other(input_ids=ids).logits, saved(input_ids=ids).logits)


def test_tied_weights_are_written_once_and_untied_ones_twice(cache: Path, tmp_path: Path):
    for kind, tied in (("llama", True), ("qwen3", False), ("gemma", True), ("mamba", True), ("moe", False)):
        model = load_once(kind, cache)
        assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied
        save_hf_model(model, tmp_path / kind)
        again = load_hf_model(tmp_path / kind)
        assert (
            again.get_input_embeddings().weight is getattr(again.get_output_embeddings(), "weight", None)
        ) == tied


@pytest.mark.parametrize("kind", TINY_KINDS)
def test_a_tiny_model_is_a_function_of_its_seed(kind: str, tmp_path: Path):
    paths = [
        resolve_model(f"tiny:{kind}", cache_dir=tmp_path / name, seed=seed)
        for name, seed in (("a", 1), ("b", 1), ("a", 2))
    ]
    files = [{file.name: file.read_bytes() for file in path.iterdir()} for path in paths]
    assert files[0] == files[1]
    assert files[0]["model.safetensors"] != files[2]["model.safetensors"]
    model = load_hf_model(paths[0])
    assert model.config.vocab_size >= len(load_tokenizer(paths[0]))


def test_an_unknown_tiny_model_names_the_nearest(tmp_path: Path):
    with pytest.raises(ModelError, match="did you mean 'tiny:gemma'"):
        resolve_model("tiny:gema", cache_dir=tmp_path)


def test_a_plan_without_limits_is_written_in_one_line(cache: Path):
    plan = dataclasses.replace(
        plan_forward(load_once("llama", cache)), tries_up_to=64, rows_up_to=NO_LIMIT, reason="why"
    )
    assert (
        describe_plan(load_once("llama", cache), plan)
        == "LlamaForCausalLM trains on packed rows, linear head; tries up to 64 tokens; why"
    )
