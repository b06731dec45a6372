"""Any causal model trains as a plain forward of each row would train it: layouts, heads and windows are taken
only where they are exact.
"""

from __future__ import annotations

import copy
import functools
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from rollouts.errors import ModelError
from rollouts.models.forward_plan import describe_plan, plan_forward
from rollouts.models.layers import checkpoint_layers
from rollouts.models.load import load_hf_model, load_tokenizer, resolve_model
from rollouts.models.tiny import TINY_KINDS
from rollouts.testing.torch_contracts import make_batch
from rollouts.types import LossSpec, RolloutBatch
from tests.support.plain_backend import assert_gradients_close, open_backend, take_gradients

torch.set_num_threads(1)
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
    "logits divided": ("Granite", {"logits_scaling": 3.0, "embedding_multiplier": 2.0}),
    "logits multiplied, parallel layers": ("Cohere", {"logit_scale": 0.25}),
    "head with a bias": ("Phi", {"tie_word_embeddings": False}),
    "learned positions": ("GPT2", {"n_positions": 256, "n_embd": 32, "n_layer": 2, "n_head": 4}),
    "bias by distance in the row": ("Bloom", {"n_layer": 2, "n_head": 4}),
    "a window in every layer": ("Mistral", {"sliding_window": 7}),
    "a window in some layers": (
        "Gemma3",
        {"head_dim": 8, "sliding_window": 7, "query_pre_attn_scalar": 8, "num_hidden_layers": 6},
    ),
    "local layers of another name": (
        "GPTNeo",
        {
            "num_layers": 2,
            "num_heads": 4,
            "window_size": 7,
            "attention_types": [[["global", "local"], 1]],
            "intermediate_size": None,
        },
    ),
    "another mixture of experts": (
        "Mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "router_jitter_noise": 0.1},
    ),
    "recurrent and attending layers": (
        "RecurrentGemma",
        {"num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 8, "logits_soft_cap": 3.0},
    ),
}


@functools.cache
def make_other(name: str) -> Any:
    family, settings = OTHERS[name]
    own = {"GPT2": {"vocab_size": 64}, "Bloom": {"vocab_size": 64, "hidden_size": 32}}
    settings = {**own.get(family, SIZES), **settings}
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
    parts = [
        (log_probs * torch.from_numpy(batch.advantages[row][1:]))[torch.from_numpy(batch.loss_masks[row][1:])]
        for row, log_probs in enumerate(score_slowly(model, batch))
    ]
    loss = -torch.cat(parts).mean()
    loss.backward()
    return float(loss.detach()), take_gradients(model)


FORMS: dict[str, dict[str, Any]] = {
    "a micro-batch per row": {"share_prefix": False, "micro_batch_tokens": 1},
    "shared if exact": {"share_prefix": True, "micro_batch_tokens": 10_000},
    "shared if exact, in micro-batches": {"share_prefix": True, "micro_batch_tokens": 24},
}
# layout of long rows, head, scale of the logits, where they are not packed, linear and 1
TAKEN: dict[str, tuple[str, str, float]] = {
    **dict.fromkeys((*TINY_KINDS, *OTHERS), ("packed", "linear", 1.0)),
    "gemma": ("rows", "own", 1.0),
    "mamba": ("rows", "linear", 1.0),
    "logits divided": ("packed", "linear", 1 / 3),
    "logits multiplied, parallel layers": ("packed", "linear", 0.25),
    "head with a bias": ("packed", "own", 1.0),
    "bias by distance in the row": ("rows", "linear", 1.0),
    "local layers of another name": ("rows", "linear", 1.0),
    "recurrent and attending layers": ("rows", "own", 1.0),
}


# --- exactness ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", TINY_KINDS)
async def test_log_probs_and_gradients_are_those_of_a_plain_forward_of_each_row(
    kind: str, form: str, cache: Path
):
    await check_exact(new_model(kind, cache), new_model(kind, cache), **FORMS[form])


@pytest.mark.parametrize("name", TAKEN)
async def test_the_fastest_exact_layout_and_head_are_taken(name: str, cache: Path):
    model = new_model(name, cache)
    layout, head, scale = TAKEN[name]
    plan = plan_forward(model)
    assert (plan.choose_layout(100), plan.head) == (layout, head), plan
    assert plan.logit_scale == pytest.approx(scale, rel=1e-6)
    assert bool(plan.reason) == (layout != "packed")
    if name in OTHERS:
        await check_exact(model, new_model(name, cache))


async def test_rows_longer_than_the_window_and_than_the_probe_are_exact(cache: Path):
    """A window of 7 against rows of 40, whose branches part at 30."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 64, 30)
    tokens = tuple(np.concatenate([prompt, rng.integers(0, 64, 10)]) for _ in range(3))
    batch = RolloutBatch(tokens=tokens, loss_masks=tuple(np.arange(40) >= 25 for _ in tokens))
    for name in ("a window in every layer", "a window in some layers"):
        await check_scores(new_model(name, cache), batch)


async def check_scores(model: Any, batch: RolloutBatch) -> None:
    with torch.no_grad():
        wanted = score_slowly(model, batch)
    async with open_backend(model) as backend:
        rows = await backend.forward(batch)
    for row, mask, wanted_row in zip(rows, batch.loss_masks, wanted, strict=True):
        np.testing.assert_allclose(row[mask], wanted_row.numpy()[mask[1:]], atol=1e-5)


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


# --- what is taken, and why not -----------------------------------------------------------------------------


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


@pytest.mark.parametrize("lengths", [(32, 7, 20), (34, 7, 32, 50)])
async def test_rows_at_and_beyond_the_length_of_longrope_are_exact(lengths: tuple[int, ...]):
    plan = plan_forward(make_longrope())
    assert [plan.choose_layout(length) for length in (32, 33)] == ["packed", "single"]
    assert "packed rows, linear head; rope_type='longrope'" in describe_plan(make_longrope(), plan)
    await check_scores(make_longrope(), make_rows(*lengths))


async def test_a_row_that_would_change_dynamic_frequencies_for_the_rows_after_it_is_refused():
    short = make_rows(16, 9, 16)
    async with open_backend(make_dynamic(original_max_position_embeddings=64)) as backend:
        with pytest.raises(
            ModelError,
            match=r"a row of 17 tokens.*at most 16.*'dynamic'.*config\.max_position_embeddings=16.*shorter",
        ):
            await backend.forward(make_rows(9, 17))
    await check_scores(make_dynamic(), short)


async def test_logits_that_need_more_than_the_hidden_states_are_taken_from_the_whole_model(cache: Path):
    """Here each token's logits also depend on the token itself, past the decoder; neither head alone can
    know.
    """
    models = new_model("llama", cache), new_model("llama", cache)
    for model in models:

        def run(*, input_ids: Tensor, forward: Any = model.forward, **options: Any) -> Any:
            output = forward(input_ids=input_ids, **options)
            output.logits = output.logits + torch.nn.functional.one_hot(input_ids, output.logits.shape[-1])
            return output

        model.forward = run
    plan = plan_forward(models[0])
    assert (plan.head, plan.choose_layout(100)) == ("whole", "packed")
    await check_exact(*models)


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
    model = new_model("gemma", cache).train()
    before, config = copy.deepcopy(model.state_dict()), model.config.to_json_string()
    torch.manual_seed(0)
    wanted = torch.rand(3)
    torch.manual_seed(0)
    plan_forward(model)
    assert torch.equal(torch.rand(3), wanted)
    assert model.training and model.config.to_json_string() == config
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert "forward" not in model.get_decoder().__dict__
    assert not model.get_decoder()._forward_hooks


async def test_the_log_says_which_layout_is_used_and_why(cache: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "rollouts")
    async with open_backend(new_model("mamba", cache)) as backend:
        await backend.forward(make_batch())
        assert backend.statistics()["batches_as_rows"] == 1
    assert "MambaForCausalLM trains on right-padded rows, linear head; packed rows are" in caplog.text


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


def test_a_model_without_layers_to_compute_twice_is_refused():
    with pytest.raises(ModelError, match="no layers for gradient checkpointing"):
        checkpoint_layers(torch.nn.Linear(1, 1))  # pyright: ignore[reportArgumentType]


# --- the contract, and files --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TINY_KINDS)
def test_a_tiny_model_is_a_function_of_its_seed(kind: str, tmp_path: Path):
    paths = [resolve_model(f"tiny:{kind}", cache_dir=tmp_path / str(at), seed=at // 2) for at in range(3)]
    first, again, other = ({file.name: file.read_bytes() for file in path.iterdir()} for path in paths)
    assert first == again
    assert first["model.safetensors"] != other["model.safetensors"]
    assert load_hf_model(paths[0]).config.vocab_size >= len(load_tokenizer(paths[0]))
