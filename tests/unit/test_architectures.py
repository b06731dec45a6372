"""Any causal model trains as a plain forward of each row would train it: layouts, heads and windows are taken
only where they are exact. Packing, shared prefixes, the fused head and skipping change no gradient.
"""

import copy
import functools
import json
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from rollouts.errors import ModelError
from rollouts.models.forward_plan import describe_plan, plan_forward
from rollouts.models.layers import checkpoint_layers
from rollouts.models.load import load_hf_model, load_tokenizer, resolve_model
from rollouts.models.made import MODELS
from rollouts.testing.torch_contracts import make_batch
from rollouts.types import LossSpec, RolloutBatch
from tests.support.made_updates import floats
from tests.support.plain_backend import (
    assert_gradients_close,
    compute_plain_loss,
    load_tiny,
    open_backend,
    score_plainly,
    stack,
    take_gradients,
)
from tests.support.text_tables import cases, read_cells, read_params
from tests.unit.test_local_engine import make_model

torch.set_num_threads(1)
SIZES = json.loads("""{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.02}""")
# model, what it does to its logits or its context; layout of long rows, head and scale of the logits
OTHERS = {
    name: (family, read_params(settings), layout, head, float(scale))
    for name, family, settings, layout, head, scale in read_cells("""
divided    | Granite | logits_scaling = 3.0, embedding_multiplier = 2.0 | packed | linear | 0.3333333
parallel   | Cohere  | logit_scale = 0.25                               | packed | linear | 0.25
head bias  | Phi     | tie_word_embeddings = false                      | packed | own    | 1
learned    | GPT2    | n_positions = 256                                | packed | linear | 1
distance   | Bloom   | n_layer = 2                                      | rows   | linear | 1
windows    | Mistral | sliding_window = 7                               | packed | linear | 1
some windows | Gemma3 | head_dim = 8, sliding_window = 7, query_pre_attn_scalar = 8, num_hidden_layers = 6 \
| packed | linear | 1
own windows | GPTNeo | num_layers = 2, num_heads = 4, window_size = 7, \
attention_types = [[["global", "local"], 1]] | rows | linear | 1
experts    | Mixtral | num_local_experts = 4, num_experts_per_tok = 2, router_jitter_noise = 0.1 \
| packed | linear | 1
recurrent  | RecurrentGemma | num_hidden_layers = 3, lru_width = 32, attention_window_size = 8, \
logits_soft_cap = 3.0 | rows | own | 1
gemma      | tiny | | rows   | own    | 1
mamba      | tiny | | rows   | linear | 1
llama      | tiny | | packed | linear | 1
qwen3      | tiny | | packed | linear | 1
moe        | tiny | | packed | linear | 1
""")
}


@functools.cache
def make_once(name):
    family, settings, *_ = OTHERS.get(name, ("tiny", {}))
    if family == "tiny":
        return load_tiny(name)
    model = make_model(family, **{**SIZES, **settings})
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1 or parameter is getattr(model.get_output_embeddings(), "bias", None):
                parameter.copy_(torch.randn(parameter.shape) * 0.2)
    return model


def new_model(name):
    """A copy of its own for each test: backends change weights."""
    return copy.deepcopy(make_once(name))


# a micro-batch per row; shared if exact, at once and in micro-batches; padded rows
FORMS = [
    {"share_prefix": share, "micro_batch_tokens": tokens}
    for share, tokens in ((False, 1), (True, 10_000), (True, 24), (False, 10_000))
]
# --- exactness ----------------------------------------------------------------------------------------------


@cases("name", OTHERS)
async def test_the_fastest_exact_layout_and_head_are_taken(name):
    """Log-probs and gradients are those of a plain forward of each row."""
    family, _, layout, head, scale = OTHERS[name]
    plan = plan_forward(new_model(name))
    assert (plan.choose_layout(100), plan.head) == (layout, head), plan
    assert plan.logit_scale == pytest.approx(scale, rel=1e-6)
    assert bool(plan.reason) == (layout != "packed")
    for options in FORMS if family == "tiny" else [{}]:
        await check_exact(new_model(name), new_model(name), **options)


@cases("name", ["windows", "some windows"])
async def test_rows_longer_than_the_window_and_than_the_probe_are_exact(name):
    """A window of 7 against rows of 40, whose branches part at 30."""
    batch = make_rows(40, 40, 40)
    for row in batch.tokens:
        row[:30] = batch.tokens[0][:30]
    await check_exact(new_model(name), new_model(name), batch)


def make_rows(*lengths):
    rng = np.random.default_rng(0)
    return RolloutBatch(
        tokens=tuple(rng.integers(0, 64, length) for length in lengths),
        loss_masks=tuple(np.arange(length) > 0 for length in lengths),
        advantages=tuple(np.ones(length, np.float32) for length in lengths),
    )


async def check_exact(model, slow, batch=None, **options):
    """Log-probs, loss and gradients of REINFORCE over all tokens are those of each row by itself."""
    batch = batch or make_batch(temperature=0.7)
    wanted_loss, _ = compute_plain_loss(slow, batch, LossSpec("reinforce"))
    async with open_backend(model, **options) as backend:
        rows = await backend.forward(batch)
        result = await backend.forward_backward(batch, LossSpec("reinforce"))
        found = take_gradients(backend.model)
    wanted = score_plainly(slow, batch)[0].detach()
    np.testing.assert_allclose(stack(rows), wanted, atol=1e-5, rtol=1e-5)
    for row, mask in zip(rows, batch.loss_masks, strict=True):
        assert row.dtype == np.float32 and not row[~mask].any()
    assert result.loss == pytest.approx(wanted_loss, abs=1e-5)
    assert_gradients_close(found, take_gradients(slow))


# --- what is taken, and why not -----------------------------------------------------------------------------


def test_a_model_whose_rows_disturb_each_other_runs_one_at_a_time():
    model = new_model("llama")
    forward = model.model.forward

    def leak(*inputs, **options):
        output = forward(*inputs, **options)
        hidden = output.last_hidden_state
        output.last_hidden_state = hidden + hidden.mean((0, 2), keepdim=True) * (len(hidden) - 1)
        return output

    model.model.forward = leak
    plan = plan_forward(model)
    assert plan.choose_layout(1) == "single"
    assert "padded rows are not exact" in plan.reason


async def test_experts_with_a_capacity_run_one_row_at_a_time():
    model = new_model("moe")
    model.config.expert_capacity = 8
    async with open_backend(model) as backend:
        await backend.forward(make_batch())
        assert backend.statistics()["batches_as_single"] == 1
    assert "expert_capacity=8" in plan_forward(model).reason


def make_rope(family, length, **rope):
    settings = {**SIZES, "rope_parameters": {"rope_theta": 1e4, **rope}, "max_position_embeddings": length}
    return make_model(family, **settings, original_max_position_embeddings=32)


LONGROPE = read_params(
    'rope_type = "longrope", original_max_position_embeddings = 32,'
    " short_factor = [1.0, 1.0, 1.0, 1.0], long_factor = [4.0, 4.0, 4.0, 4.0]"
)
make_longrope = functools.partial(make_rope, "Phi3", 256, **LONGROPE)
make_dynamic = functools.partial(make_rope, "Llama", 16, rope_type="dynamic", factor=4.0)


@cases("lengths: [32,7,20] [34,7,32,50]")
async def test_rows_at_and_beyond_the_length_of_longrope_are_exact(lengths: Any):
    plan = plan_forward(make_longrope())
    assert [plan.choose_layout(length) for length in (32, 33)] == ["packed", "single"]
    assert "packed rows, linear head; rope_type='longrope'" in describe_plan(make_longrope(), plan)
    await check_exact(make_longrope(), make_longrope(), make_rows(*lengths))


async def test_a_row_that_would_change_dynamic_frequencies_for_the_rows_after_it_is_refused():
    message = r"a row of 17 tokens.*at most 16.*'dynamic'.*config\.max_position_embeddings=16.*shorter"
    async with open_backend(make_dynamic(original_max_position_embeddings=64)) as backend:
        with pytest.raises(ModelError, match=message):
            await backend.forward(make_rows(9, 17))
    await check_exact(make_dynamic(), make_dynamic(), make_rows(16, 9, 16))


async def test_logits_that_need_more_than_the_hidden_states_are_taken_from_the_whole_model():
    """Here each token's logits also depend on the token itself, past the decoder; neither head alone can
    know.
    """
    models = new_model("llama"), new_model("llama")
    for model in models:

        def run(*, input_ids, forward=model.forward, **options):
            output = forward(input_ids=input_ids, **options)
            output.logits = output.logits + torch.nn.functional.one_hot(input_ids, output.logits.shape[-1])
            return output

        model.forward = run
    plan = plan_forward(models[0])
    assert (plan.head, plan.choose_layout(100)) == ("whole", "packed")
    await check_exact(*models)


def test_a_model_that_looks_ahead_or_gives_no_numbers_is_refused():
    torch.manual_seed(0)
    bert = transformers.BertLMHeadModel(transformers.BertConfig(**SIZES)).eval()
    damaged = new_model("llama")
    with torch.no_grad():
        damaged.model.norm.weight.fill_(float("nan"))
        for parameter in bert.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    for model, message in ((bert, "not causal"), (damaged, "weights are damaged")):
        with pytest.raises(ModelError, match=message):
            plan_forward(model)


def test_planning_changes_neither_the_model_nor_random_numbers():
    model = new_model("gemma").train()
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


# --- dropout and gradient checkpointing ---------------------------------------------------------------------


async def test_dropout_is_off_even_if_the_model_came_in_training_mode():
    model = new_model("llama")
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    async with open_backend(model.train()) as backend:
        first, second = await backend.forward(make_batch()), await backend.forward(make_batch())
    assert all((one == other).all() for one, other in zip(first, second, strict=True))


def saved_bytes(model, batch):
    """Bytes that the graph keeps for the gradient, and the gradients."""
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        compute_plain_loss(model, batch, LossSpec("sft"))
    return sum(kept.values()), take_gradients(model)


@cases("kind", MODELS)
async def test_gradient_checkpointing_gives_the_same_gradients_for_less_memory(kind):
    rng = np.random.default_rng(0)
    batch = RolloutBatch(tokens=(rng.integers(0, 259, 200),), loss_masks=(np.arange(200) > 0,))
    plain, checkpointed = new_model(kind), new_model(kind)
    assert checkpoint_layers(checkpointed) == len(list(plain.get_decoder().layers))
    (plain_bytes, wanted), (fewer_bytes, found) = saved_bytes(plain, batch), saved_bytes(checkpointed, batch)
    assert_gradients_close(found, wanted, tolerance=1e-6)
    assert fewer_bytes < 0.7 * plain_bytes, (fewer_bytes, plain_bytes)


# --- files --------------------------------------------------------------------------------


@cases("kind", MODELS)
def test_a_tiny_model_is_a_function_of_its_seed(kind, tmp_path):
    paths = [resolve_model(f"tiny:{kind}", cache_dir=tmp_path / str(at), seed=at // 2) for at in range(3)]
    first, again, other = ({file.name: file.read_bytes() for file in path.iterdir()} for path in paths)
    assert first == again
    assert first["model.safetensors"] != other["model.safetensors"]
    assert load_hf_model(paths[0]).config.vocab_size >= len(load_tokenizer(paths[0]))


# --- less work, the same gradient ---------------------------------------------------------------------------


TOLERANCE = 1e-4  # ‖a − b‖ / ‖b‖ of each parameter's gradient
SPECS = {
    "clip": LossSpec("ppo_clip"),
    "kl": LossSpec("ppo_clip", params={"kl_coef": 0.1}),
    "entropy": LossSpec("ppo_clip", params={"entropy_coef": 0.05}),
}


def load_kind(kind):
    if kind != "windowed":
        return load_tiny(kind)
    # the window is shorter than the rows
    sizes = "sliding_window = 24, vocab_size = 259, max_position_embeddings = 512, initializer_range = 0.02"
    return make_model("Mistral", **read_params(sizes))


def make_groups():
    """Two groups of unlike prompts, the third row of each with a beginning of its answer in common with the
    first, and one group without an advantage.
    """
    rng = np.random.default_rng(0)
    tokens, masks, advantages = [], [], []
    for prompt, answers, scale in ((150, (40, 9, 35), 1.0), (7, (12, 5, 30), 1.0), (20, (6, 8), 0.0)):
        start = rng.integers(0, 250, prompt)
        first = rng.integers(0, 250, answers[0])
        for number, length in enumerate(answers):
            answer = rng.integers(0, 250, length) if number else first
            if number == 2:
                answer[:4] = first[:4]
            tokens.append(np.concatenate([start, answer]))
            masks.append(np.arange(prompt + length) >= prompt)
            advantages.append(np.where(masks[-1], scale * rng.standard_normal(), 0.0).astype(np.float32))

    old, ref = (
        [np.where(mask, -5.5 + 0.3 * rng.standard_normal(len(mask)), 0.0) for mask in masks] for _ in range(2)
    )
    return RolloutBatch(
        tokens=tuple(tokens),
        loss_masks=tuple(masks),
        advantages=tuple(advantages),
        old_log_probs=floats(*old),
        ref_log_probs=floats(*ref),
        temperature=1.2,
    )


def choose_plan(model, on):
    """The model's own, or without what is not switched on: then rows are computed alone, or their logits at
    every position.
    """
    plan = plan_forward(model)
    if not {"packing", "sharing"} & {*on}:
        plan = plan._replace(layout="single")
    return plan if "fused_head" in on else plan._replace(head="whole")


async def check_gradients(kind, loss, *on):
    """With these switches they are those of each row by itself."""
    model, plain, batch, spec = load_kind(kind), load_kind(kind), make_groups(), SPECS[loss]
    compute_plain_loss(plain, batch, spec)
    options = {"share_prefix": "sharing" in on, "skip_zero_advantage": "skipping" in on}
    async with open_backend(model, plan=choose_plan(model, on), **options) as backend:
        await backend.forward_backward(batch, spec)
        statistics = backend.statistics()
    wanted = "packed" if {"packing", "sharing"} & {*on} else "single"
    assert statistics[f"batches_as_{wanted}"] == 1
    assert statistics["skipped_rows"] == (2 if "skipping" in on and loss == "clip" else 0)
    found = take_gradients(model)
    for name, gradient in take_gradients(plain).items():
        assert (found[name] - gradient).norm() <= TOLERANCE * gradient.norm(), name


@cases("""
loss    | switches
clip    | packing sharing fused_head skipping
kl      | packing sharing fused_head skipping
entropy | packing sharing fused_head skipping
clip    | packing
clip    | sharing
clip    | fused_head
clip    | skipping
clip    |
""")
@cases("kind: llama qwen3 windowed")
async def test_all_switches_together_and_each_alone_give_the_plain_gradient(kind, loss, switches):
    await check_gradients(kind, loss, *switches.split())
