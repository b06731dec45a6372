"""The embedded engine with adapters: the trainer's as it trains, a copy of it, and many at once by name."""

import threading
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
import trio
from numpy.testing import assert_allclose
from trio.testing import wait_all_tasks_blocked

from rollouts.errors import EngineError, RequestRefused
from rollouts.models.devices import measure_rounding
from rollouts.models.load import resolve_model
from rollouts.models.lora import Adapter, route_all, use_adapters
from rollouts.testing.engine_contracts import make_request
from rollouts.testing.torch_contracts import make_batch, train
from rollouts.types import Completion, RolloutBatch
from tests.support.adapters import make_random, open_both, save_random
from tests.support.plain_backend import load_tiny, score_completion
from tests.support.text_tables import cases
from tests.unit.test_local_engine import after_steps, generate_all, make_requests, open_engine

torch.set_num_threads(1)
Adapters = dict[str, Adapter]
REQUEST = make_request(prompt=(5, 6, 7), max_new_tokens=20)


@asynccontextmanager
async def open_named(kind, names):
    """An engine on tiny:`kind`, its model, and an adapter for each letter of `names`."""
    model, path = load_tiny(kind), resolve_model(f"tiny:{kind}")
    adapters = {name: make_random(model, path, seed=ord(name)) for name in "ab"}
    async with open_engine(model) as engine:
        for name in names:
            await engine.add_adapter(name, adapters[name])
        yield engine, model, adapters


def check_log_probs(model, adapters, request, answer):
    """They are those of a plain forward with the adapter that the request names."""
    with use_adapters(model, route_all(adapters.get(request.adapter))):
        wanted = score_completion(model, request, answer)
    assert_allclose(answer.log_probs, wanted, atol=1e-4)


@pytest.mark.skipif(not measure_rounding()[0], reason="this CPU multiplies no bfloat16")
@cases("names: a b ab-")
async def test_adapters_are_added_to_products_of_packed_weights(names):
    model, path = load_tiny("llama"), resolve_model("tiny:llama")
    adapters = {"a": make_random(model, path, targets=["down_proj"]), "b": make_random(model, path, seed=1)}
    async with open_engine(model, autocast_dtype=torch.bfloat16) as engine:
        assert engine.path == "fast"
        for name, adapter in adapters.items():
            await engine.add_adapter(name, adapter)
        requests = [replace(REQUEST, request_id=name, adapter=name.strip("-")) for name in names]
        answers = await generate_all(engine, requests)
    for request in requests:
        answer, away = answers[request.request_id], []
        for adapter in (adapters.get(request.adapter), *adapters.values()):
            with use_adapters(model, route_all(adapter)):
                away.append(np.abs(score_completion(model, request, answer) - answer.log_probs).mean())
        assert away[0] < 0.03 and sum(one > 0.1 for one in away) == 1 + (request.adapter == "")


def start_later(engine, nursery, work):
    """`work` begins after five decode steps."""

    async def start():
        nursery.start_soon(work)

    after_steps(engine, 5, start)


# --- the trainer's adapter ----------------------------------------------------------------------------------


async def score(backend, answer):
    """The backend's log-probs of an answer to REQUEST."""
    tokens, first = np.concatenate([REQUEST.prompt_ids, answer.token_ids]), len(REQUEST.prompt_ids)
    mask = np.arange(len(tokens)) >= first
    batch = RolloutBatch(tokens=(tokens,), loss_masks=(mask,), advantages=(mask.astype(np.float32),))
    return (await backend.forward(batch))[0][first:]


@cases("kind: llama gemma moe")
async def test_a_shared_engine_generates_with_the_adapter_as_it_trains(kind):
    async with open_both(resolve_model(f"tiny:{kind}")) as (backend, engine):
        for version in range(2):
            answer = await engine.generate(REQUEST)
            assert set(answer.weight_versions) == {version}
            assert_allclose(answer.log_probs, await score(backend, answer), atol=1e-4)
            await train(backend, make_batch())
            await backend.set_weight_version(version + 1)
            assert np.abs(answer.log_probs - await score(backend, answer)).max() > 0.01


async def test_a_copied_engine_shares_the_base_and_follows_updates_of_the_adapter():
    async with open_both(resolve_model("tiny:llama"), "copied") as (backend, engine):
        assert engine._model is backend.model
        mine, theirs = await engine.copy_weights(), await backend.get_weights()
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
        places = [one.data_ptr() for one in backend.model.parameters()]
        old = await score(backend, await engine.generate(REQUEST))
        await train(backend, make_batch())
        unaware = await engine.generate(REQUEST)
        assert_allclose(unaware.log_probs, old, atol=1e-4)
        await engine.begin_update()
        await backend.stream_weights(engine.receive_bucket)
        await engine.finish_update(1)
        aware = await engine.generate(REQUEST)
        assert set(aware.weight_versions) == {1}
        assert_allclose(aware.log_probs, await score(backend, aware), atol=1e-4)
        assert places == [one.data_ptr() for one in backend.model.parameters()]


# --- adapters by name ---------------------------------------------------------------------------------------


@cases("kind: llama gemma moe")
async def test_rows_of_unlike_adapters_are_what_each_adapter_gives_alone(kind):
    """The same prompts for each."""
    named = zip(make_requests(18), ("", "a", "b") * 6, strict=True)
    requests = [replace(request, adapter=name) for request, name in named]
    async with open_named(kind, "ab") as (engine, model, adapters):
        together = await generate_all(engine, requests)
    for request in requests:
        check_log_probs(model, adapters, request, together[request.request_id])
    for name in ("", "a", "b"):
        async with open_named(kind, name) as (engine, *_):
            alone = await generate_all(engine, [one for one in requests if one.adapter == name])
        for key, answer in alone.items():
            assert answer.token_ids.tolist() == together[key].token_ids.tolist()


async def test_no_keys_and_values_of_one_adapter_are_used_for_another():
    """Turns of one trajectory, each with the next adapter; only those of the base are kept."""
    request = replace(REQUEST, trajectory="t")
    kept = list[float]()
    async with open_named("llama", "ab") as (engine, model, adapters):
        for name in ("", "", "a", "a", "b", ""):
            request = replace(request, adapter=name)
            before = engine.statistics()["prefix_tokens"]
            answer = await engine.generate(request)
            kept.append(engine.statistics()["prefix_tokens"] - before)
            check_log_probs(model, adapters, request, answer)
            request = replace(request, prompt_ids=np.concatenate([request.prompt_ids, answer.token_ids]))
    assert [bool(count) for count in kept] == [False, True, False, False, False, False]


@cases("""
kind  | ended
llama | b0 a1 a0
gemma | a0 b0 a1
moe   | a0 b0 a1
""")
async def test_where_rows_cannot_be_mixed_nobody_overtakes_the_next_adapters_turn(kind, ended):
    found = list[str]()

    async def ask(name, tokens):
        await engine.generate(replace(make_request(name, max_new_tokens=tokens), adapter=name[0]))
        found.append(name)

    async with open_named(kind, "ab") as (engine, *_), trio.open_nursery() as nursery:
        await engine.pause("wait")
        for name, tokens in (("a0", 20), ("b0", 3), ("a1", 6)):
            nursery.start_soon(ask, name, tokens)
            await wait_all_tasks_blocked()
        await engine.resume()
    assert found == ended.split()


@cases("kind: llama gemma moe")
async def test_adapters_come_and_go_while_others_generate(kind, tmp_path):
    """One from a directory."""
    long = replace(make_request("long", max_new_tokens=40), adapter="a")
    short = replace(make_request("short", max_new_tokens=5), adapter="b")
    async with open_named(kind, "a") as (engine, model, adapters), trio.open_nursery() as nursery:
        adapters["b"] = save_random(model, resolve_model(f"tiny:{kind}"), tmp_path, seed=9)

        async def come_and_go():
            await engine.add_adapter("b", tmp_path)
            answers["short"] = await engine.generate(short)
            await engine.remove_adapter("b")
            with pytest.raises(RequestRefused, match=r"adapter='b'; the engine has \['a'\]"):
                await engine.generate(short)

        answers = dict[str, Completion]()
        start_later(engine, nursery, come_and_go)
        answers["long"] = await engine.generate(long)
    for request in (long, short):
        check_log_probs(model, adapters, request, answers[request.request_id])


async def test_a_name_that_is_taken_or_in_use_and_an_adapter_of_another_model_are_refused():
    request = replace(make_request(max_new_tokens=30), adapter="a")
    async with open_named("llama", "a") as (engine, _, adapters), trio.open_nursery() as nursery:

        async def remove():
            with pytest.raises(EngineError, match=r"has \['a'\], and \['a'\] in flight use it"):
                await engine.remove_adapter("a")

        start_later(engine, nursery, remove)
        await engine.generate(request)
        other = make_random(load_tiny("llama"), resolve_model("tiny:llama"))
        for name, adapter, problem in (
            ("", adapters["b"], "the name must be new, and not empty"),
            ("a", adapters["b"], "the name must be new, and not empty"),
            ("c", other, r"add_adapter\('c'\): it is an adapter of another model"),
        ):
            with pytest.raises(EngineError, match=problem):
                await engine.add_adapter(name, adapter)
        await engine.remove_adapter("a")
        with pytest.raises(EngineError, match=r"remove_adapter\('a'\): the engine has \[\]"):
            await engine.remove_adapter("a")


async def test_of_two_that_add_one_name_at_once_one_is_refused():
    async with open_named("llama", "") as (engine, _, adapters):
        with pytest.RaisesGroup(EngineError):
            async with trio.open_nursery() as nursery:
                for adapter in adapters.values():
                    nursery.start_soon(engine.add_adapter, "a", adapter)


async def test_an_adapter_goes_while_the_row_of_a_cancelled_caller_is_still_there():
    """The others' answers come as before."""
    gate, scope = threading.Event(), trio.CancelScope()

    async def ask_in_vain():
        with scope:
            await engine.generate(replace(make_request("cancelled"), adapter="a"))

    async with open_named("llama", "a") as (engine, *_), trio.open_nursery() as nursery:
        engine._device_thread.submit(gate.wait)
        nursery.start_soon(ask_in_vain)
        await wait_all_tasks_blocked()
        scope.cancel()
        await wait_all_tasks_blocked()
        nursery.start_soon(engine.remove_adapter, "a")
        nursery.start_soon(engine.generate, make_request("other"))
        await wait_all_tasks_blocked()
        gate.set()
    assert "a" not in engine._batch.adapters
