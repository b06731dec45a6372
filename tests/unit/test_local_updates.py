"""The embedded engine: new weights, failures, and which way a model is run."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
import trio
import trio.testing

from rollouts.engines.local import LocalEngine
from rollouts.errors import EngineError, ModelError, RequestRefused
from rollouts.testing.engine_contracts import check_bad_snapshots_change_nothing, make_request
from tests.support.plain_backend import score_completion
from tests.support.text_tables import cases
from tests.unit.test_local_engine import (
    after_steps,
    check_exact,
    make_model,
    make_requests,
    open_engine,
)

# --- weights ------------------------------------------------------------------------------------------------


async def send(engine: LocalEngine, weights: Mapping[str, torch.Tensor], version: int):
    await engine.begin_update()
    items = list(weights.items())
    for start in range(0, len(items), 4):
        engine.receive_bucket(items[start : start + 4])
    await engine.finish_update(version)


async def test_a_copied_engine_follows_the_trainer_only_when_told():
    model, other = make_model(), make_model(seed=1)
    request = make_request(max_new_tokens=15)
    async with open_engine(model, mode="copied", trainer_version=lambda: 3) as engine:
        assert await engine.weight_version() == 3
        assert engine.features.in_memory_update and not engine.features.shares_weights
        with torch.no_grad():
            for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
                mine.copy_(theirs)
        unaware = await engine.generate(request)
        await send(engine, model.state_dict(), 4)
        aware = await engine.generate(request)
    assert unaware.weight_versions.tolist() == [3] * 15
    assert aware.weight_versions.tolist() == [4] * 15
    assert np.abs(unaware.log_probs - score_completion(model, request, unaware)).max() > 0.1
    np.testing.assert_allclose(aware.log_probs, score_completion(model, request, aware), atol=1e-4)


async def test_tied_weights_may_come_under_either_name():
    model = make_model(tie_word_embeddings=True)
    other = make_model(tie_word_embeddings=True, seed=1)
    weights = {name: value for name, value in other.state_dict().items() if name != "lm_head.weight"}
    async with open_engine(model, mode="copied") as engine:
        await send(engine, weights, 1)
        await check_exact(engine, other, [make_request()])


@cases(r"""
name              | size | message
model.extra       | 2 | 'model.extra' of shape \[2\], which the engine's model does not have
model.norm.weight | 3 | 'model.norm.weight' of shape \[3\], which the engine's model has of shape \[32\]
model.norm.weight | 0 | lacks 1 of .* \['model.norm.weight'\]; nothing was changed
""")
async def test_an_update_that_does_not_fit_changes_nothing(name, size: int, message):
    model = make_model()
    weights = {**make_model(seed=1).state_dict(), name: torch.zeros(size)}
    if not size:
        del weights[name]
    async with open_engine(model, mode="copied") as engine:
        with pytest.raises(EngineError, match=message):
            await send(engine, weights, 1)
        await engine.resume()  # gives the update up
        with pytest.raises(EngineError, match="without begin_update"):
            await engine.finish_update(1)
        await check_exact(engine, model, [make_request(max_new_tokens=10)])
        assert await engine.weight_version() == 0


async def test_bad_snapshots_change_nothing(tmp_path):
    make_model(seed=1).save_pretrained(tmp_path / "good")
    (tmp_path / "bad").mkdir()
    paths = (tmp_path / "good", tmp_path / "bad")
    await check_bad_snapshots_change_nothing(lambda: open_engine(mode="copied"), *paths)


async def test_an_update_in_flight_is_seen_token_by_token_and_prompts_of_old_weights_are_not_reused():
    other = make_model(seed=1)
    late = make_request("late", prompt=(5, 6, 7), max_new_tokens=8)
    early = make_request("early", prompt=(5, 6, 7), max_new_tokens=40)
    async with open_engine(mode="copied") as engine, trio.open_nursery() as nursery:

        async def update():
            await send(engine, other.state_dict(), 1)  # pauses by itself
            await check_exact(engine, other, [late])

        async def start():
            nursery.start_soon(update)

        after_steps(engine, 6, start)
        assert (await engine.generate(early)).weight_versions.tolist() == [0] * 7 + [1] * 33


# --- failures -----------------------------------------------------------------------------------------------


async def test_a_device_failure_reaches_every_caller_and_the_engine_goes_on():
    failures = []
    async with open_engine(max_rows=2) as engine:
        plain = engine._batch.step

        def fail(version):
            raise RuntimeError("out of memory")

        async def ask(name):
            with pytest.raises(EngineError, match=f"{name}.*out of memory") as caught:
                await engine.generate(make_request(name))
            failures.append(caught.value)

        engine._batch.step = fail  # pyright: ignore[reportAttributeAccessIssue]
        async with trio.open_nursery() as nursery:
            for index in range(4):
                nursery.start_soon(ask, f"r{index}")
        engine._batch.step = plain  # pyright: ignore[reportAttributeAccessIssue]
        assert await engine.health()
        model: Any = engine._batch._whole.model.model
        good = model.norm.weight.detach().clone()
        with torch.no_grad():
            model.norm.weight.fill_(float("nan"))
        with pytest.raises(EngineError, match="logits are not finite in 1 of 1 rows"):
            await engine.generate(make_request())
        with torch.no_grad():
            model.norm.weight.copy_(good)
        assert len((await engine.generate(make_request())).token_ids) == 4
    assert len(failures) == 4
    assert all(isinstance(failure.__cause__, RuntimeError) for failure in failures)


@cases(r"""
changes                | message
prompt = []            | prompt_ids has shape \(0,\)
prompt = [1, 101]      | prompt_ids holds \[101\]; the vocabulary is 0..100
max_new_tokens = 158   | max_new_tokens=158 make 161; the context is 160
temperature = nan      | temperature=nan
top_p = 1.1            | top_p=1.1
top_k = -1             | top_k=-1
""")
async def test_a_bad_request_is_refused_by_field_value_and_rule(changes: dict, message):
    async with open_engine() as engine:
        with pytest.raises(RequestRefused, match=message):
            await engine.generate(make_request(**changes))


@cases("""
options                   | message
{"trainer_version": null} | needs trainer_version
{"max_rows": 0}           | max_rows=0
{"max_context": 161}      | max_context=161
""")
async def test_settings_that_do_not_fit_are_refused(options: Any, message):
    with pytest.raises(EngineError, match=message):
        async with open_engine(**options):
            pass


def odd_forward(model):
    plain = model.model.forward

    def forward(*args, **kwargs) -> Any:
        output = plain(*args, **kwargs)
        output.last_hidden_state = output.last_hidden_state * 2
        return output

    model.model.forward = forward


def broken(model):
    model.model.layers[1].self_attn.v_proj = torch.nn.Linear(32, 7)


def sees_the_future(model):
    for layer in model.model.layers:
        plain = layer.self_attn.forward

        def forward(*args, plain=plain, **kwargs) -> Any:
            return plain(*args, **{**kwargs, "attention_mask": torch.zeros(1, 1, 1, 1)})

        layer.self_attn.forward = forward


@cases("""
kind    | changes                           | reason
Mistral | sliding_window = 64               | sliding_window=64 is shorter than the context of 160
Gemma2  | head_dim = 8                      | config has .'final_logit_softcapping'
Llama   | final_logit_softcapping = 30.0    | config has .'final_logit_softcapping'
Olmo2   |                                   | parts
Llama   |                                   | differ from the model's own by
""")
async def test_a_model_that_is_not_llama_like_runs_by_its_own_forward(kind, changes: dict, reason):
    model = make_model(kind, **changes)
    if reason.startswith("differ"):
        odd_forward(model)
    async with open_engine(model, max_rows=3) as engine:
        await check_exact(engine, model, make_requests(8))
        assert engine.path == "cached"
        assert re.search(reason, engine.describe())
        assert engine.statistics()["fast_path"] == 0.0


async def test_a_model_whose_cache_does_not_fit_its_layers_is_recomputed():
    model = make_model("Llama", layer_types=["full_attention", "linear_attention"])
    async with open_engine(model) as engine:
        await check_exact(engine, model, [make_request(max_new_tokens=10)])
        assert engine.path == "recompute"
        assert "very slow" in engine.describe() and "full attention only" in engine.describe()


FAILS = "fast: it does not run: RuntimeError.*cached: it does not run: RuntimeError.*recompute: it does not"
DIFFERS = (
    "fast: its log-probs differ.*cached: .*recompute: its log-probs differ from the model's own by .* nats"
)


@pytest.mark.parametrize(("alter", "message"), [(broken, FAILS), (sees_the_future, DIFFERS)])
async def test_a_model_that_no_way_runs_exactly_is_refused_with_all_the_reasons(alter, message):
    model = make_model()
    alter(model)
    with pytest.raises(ModelError, match=message):
        async with open_engine(model):
            pass
