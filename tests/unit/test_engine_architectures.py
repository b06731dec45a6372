"""The embedded engine on tiny models of every family: windows, soft caps, recurrent states, experts, absolute
positions.
"""

import copy
from contextlib import nullcontext
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch

from rollouts.errors import EngineError, ModelError
from rollouts.models.decoding import batch, decoder
from rollouts.models.decoding.batch import open_decoder
from rollouts.models.limits import DEFAULT_CONTEXT
from rollouts.models.load import load_hf_model, resolve_model
from rollouts.testing import engine_contracts
from tests.support.plain_backend import load_tiny
from tests.support.text_tables import cases, read_params
from tests.unit.test_local_engine import check_exact, generate_all, make_model, make_requests, open_engine

TINY = {"llama": "fast", "qwen3": "fast", "moe": "fast", "gemma": "cached", "mamba": "cached"}


def without_cache(monkeypatch):
    """Leaves the last resort only."""

    class Refused:
        def __init__(self, *args, **kwargs):
            raise ModelError("refused by the test")

    monkeypatch.setattr("rollouts.models.decoding.batch.CachedDecoder", Refused)
    monkeypatch.setattr("rollouts.models.decoding.batch.FastDecoder", Refused)


# --- exactness ----------------------------------------------------------------------------------------------


@cases("kind", TINY)
async def test_log_probs_are_the_models_own_on_each_tiny_family(kind):
    model = load_tiny(kind)
    async with open_engine(model, max_rows=5) as engine:
        assert engine.path == TINY[kind]
        await check_exact(engine, model, make_requests(18))


@cases("""
kind     | changes
Gemma3   | head_dim = 8, sliding_window = 20, layer_types = ["sliding_attention", "full_attention"], \
query_pre_attn_scalar = 8
Mamba2   | state_size = 8, num_heads = 8, head_dim = 8, n_groups = 2, chunk_size = 4
FalconH1 | mamba_d_ssm = 32, mamba_n_heads = 4, mamba_d_head = 8, mamba_d_state = 8, mamba_chunk_size = 4
Lfm2     | layer_types = ["conv", "full_attention"]
GPT2     |
Bloom    | n_layer = 2, n_head = 4
GptOss   | head_dim = 8, num_local_experts = 4, sliding_window = 6
""")
async def test_log_probs_are_the_models_own_with_its_cache(kind, changes: dict):
    """GPT2 has absolute positions, Bloom knows them by the mask only."""
    model = make_model(kind, **changes).train()  # its dropout is the trainer's affair
    async with open_engine(model, max_rows=5) as engine:
        assert (engine.path, model.training) == ("cached", True)
        await check_exact(engine, copy.deepcopy(model).eval(), make_requests(18))


@cases("kind: gemma mamba moe")
async def test_log_probs_are_the_models_own_when_everything_is_recomputed(kind, monkeypatch):
    without_cache(monkeypatch)
    model = load_tiny(kind)
    async with open_engine(model, max_rows=5) as engine:
        assert (engine.path, engine.statistics()["recomputes"]) == ("recompute", 1.0)
        await check_exact(engine, model, make_requests(12))


@cases("""
cached | recompute | limit
9e-5   | 0.0       |
3e-4   | 9e-5      |
3e-4   | 7e-5      | 0.00028
3e-4   | 1e-5      | 0.0001
0.011  | 1.0       | 0.01
nan    | 1e-3      | 0.004
""")
def test_the_limit_of_a_probe_is_what_rounding_in_the_models_own_forward_explains(
    cached: float, recompute: float, limit, monkeypatch, caplog
):
    found = iter([cached, recompute])
    monkeypatch.setattr(batch, "measure_difference", lambda decoded, lengths: next(found))
    monkeypatch.setattr(batch, "RecomputeDecoder", Mock())
    monkeypatch.setattr(batch, "DecodeBatch", Mock())
    with pytest.raises(ModelError, match=f"the limit is {limit}") if limit else nullcontext():
        batch.check_log_probs(Mock(), (5,))
    assert ["so this is rounding" in said for said in caplog.messages] == [True] * (
        cached > 1e-4 and not limit
    )


async def test_a_recurrence_that_amplifies_rounding_is_generated_with():
    """Weights so large that its own forward on five rows differs by up to 0.001 nats from that on one."""
    model = make_model("Mamba", state_size=16, initializer_range=1.0, num_hidden_layers=4, hidden_size=128)
    async with open_engine(model, max_rows=5) as engine:
        assert engine.path == "cached"


# --- rows ---------------------------------------------------------------------------------------------------


@cases("kind: llama gemma mamba moe")
async def test_deterministic_runs_give_the_same_bits_and_neighbours_change_no_token(kind):
    """In any order of submission, and whatever was generated before."""
    results = []
    for order, max_rows in ((1, 4), (-1, 4), (1, 1)):
        requests = make_requests(12)[::order]
        again = [replace(request, request_id=f"x{request.request_id}") for request in requests]
        async with open_engine(load_tiny(kind), deterministic=True, max_rows=max_rows, seed=7) as engine:
            assert engine.features.deterministic
            results.append(await generate_all(engine, requests) | await generate_all(engine, again))
    for request_id, completion in results[0].items():
        assert completion.log_probs.tobytes() == results[1][request_id].log_probs.tobytes()
        for other in results[1:]:
            assert completion.token_ids.tolist() == other[request_id].token_ids.tolist()


# --- the choice ---------------------------------------------------------------------------------------------


def test_a_cache_that_is_wrong_beyond_the_window_only_is_not_used(monkeypatch):
    model = make_model("Mistral", sliding_window=40)
    assert open_decoder(model, max_context=160).path == "cached"
    plain = decoder._set_width

    def forget_one(cache, width):
        plain(cache, width)
        for layer in cache.layers if width > 40 else ():
            layer.keys[..., 0, :] = layer.keys[..., -1, :]

    monkeypatch.setattr(decoder, "_set_width", forget_one)
    opened = open_decoder(model, max_context=160)
    assert opened.path == "recompute"
    assert "cached" in opened.refused
    assert open_decoder(model, max_context=40).path == "fast"  # no row leaves the window


@cases("""
kind     | limit
dynamic  | 160
longrope | 80
""")
def test_frequencies_that_change_within_the_context_are_refused_with_the_length_that_the_model_goes_by(
    kind, limit: int
):
    """A dynamic one goes by the context, whatever its original length says."""
    rope = read_params("factor = 2.0, rope_theta = 1e4, original_max_position_embeddings = 80")
    rope |= {"rope_type": kind}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    model = make_model("Llama", rope_parameters=rope)
    assert open_decoder(model, max_context=limit).path == "fast"
    message = rf"rope_type='{kind}' changes.*beyond {limit} tokens.*set max_context to {limit} or less"
    with pytest.raises(ModelError, match=message):
        open_decoder(model, max_context=limit + 1)


def test_in_half_precision_what_is_never_sampled_does_not_count():
    """Logits eight times as large, as trained models have them: bfloat16 leaves 0.4 nats on some of the
    tokens in the tail.
    """
    model = make_model("Llama").to(torch.bfloat16)
    with torch.no_grad():
        model.lm_head.weight.mul_(8)
    assert open_decoder(model, max_context=64).path == "fast"


async def test_a_model_without_a_limit_gets_the_default_context_and_may_have_a_longer_one():
    model = load_tiny("mamba")
    async with open_engine(model) as engine:
        assert engine.features.context_length == DEFAULT_CONTEXT == 8192
    async with open_engine(model, max_context=100_000) as engine:
        assert engine.features.context_length == 100_000
    with pytest.raises(EngineError, match=r"max_context=1; it must be above 1$"):
        async with open_engine(model, max_context=1):
            pass


# --- the contract -------------------------------------------------------------------------------------------


@cases("way", ["cached gemma", "cached mamba", "recomputed mamba"])
@cases("check", engine_contracts.CHECKS)
async def test_engines_with_the_models_own_forward_keep_the_contract(check, way, monkeypatch):
    how, kind = way.split()
    if how == "recomputed":
        without_cache(monkeypatch)
    mode = "shared" if how == "cached" else "copied"
    deterministic = how == "recomputed"
    await check(lambda: open_engine(load_tiny(kind), mode=mode, deterministic=deterministic))


@cases("kind", TINY)
async def test_engines_update_in_memory_and_generate_with_the_new_weights(kind):
    folder = resolve_model(f"tiny:{kind}", seed=1)
    newer = load_hf_model(folder)
    weights = list(newer.state_dict().items())
    await engine_contracts.check_update_in_memory(
        lambda: open_engine(load_tiny(kind), mode="copied"), weights
    )
    async with open_engine(load_tiny(kind), mode="copied") as engine:
        await engine.update_weights_from_checkpoint(folder, 5)
        await check_exact(engine, newer, make_requests(6))
        assert await engine.weight_version() == 5
