"""What every InferenceEngine must do, as functions that raise AssertionError: run them on fakes and on real engines.

Each takes `open_engine`, which gives an async context with a fresh engine, open and not paused, whose vocabulary holds the ids 1..9.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import numpy as np
import trio
import trio.testing

from rollouts.errors import EngineClosed, EngineError, RequestRefused, WeightVersionError
from rollouts.protocols import InferenceEngine
from rollouts.types import Completion, GenerateRequest, SamplingParams

OpenEngine = Callable[[], AbstractAsyncContextManager[InferenceEngine]]


def make_request(request_id: str = "a", *, prompt: tuple[int, ...] = (1, 2, 3), max_new_tokens: int = 4, **sampling: Any) -> GenerateRequest:
    """A small request."""
    params = SamplingParams(max_new_tokens=max_new_tokens, **sampling)
    return GenerateRequest(request_id=request_id, prompt_ids=np.asarray(prompt, np.int64), sampling=params)


async def check_completion_is_whole(open_engine: OpenEngine) -> None:
    """Equal lengths, ids in the vocabulary, log-probs not above 0, every token of the version that the engine reports."""
    async with open_engine() as engine:
        completion = await engine.generate(make_request())
        count = len(completion.token_ids)
        assert completion.request_id == "a"
        assert 1 <= count <= 4
        assert len(completion.log_probs) == len(completion.weight_versions) == count
        assert completion.token_ids.dtype == np.int64
        assert completion.log_probs.dtype == np.float32
        assert ((completion.token_ids >= 0) & (completion.token_ids < engine.features.vocab_size)).all()
        assert np.isfinite(completion.log_probs).all()
        assert (completion.log_probs <= 1e-6).all()
        assert (completion.weight_versions == await engine.weight_version()).all()
        assert completion.finish_reason in ("stop", "length")
        assert await engine.health()


async def check_many_requests_are_all_answered(open_engine: OpenEngine) -> None:
    """Forty callers at once get forty completions, each its own."""
    async with open_engine() as engine:
        answers: dict[str, Completion] = {}

        async def ask(name: str) -> None:
            answers[name] = await engine.generate(make_request(name))

        async with trio.open_nursery() as nursery:
            for index in range(40):
                nursery.start_soon(ask, f"request-{index}")
        assert {name: answer.request_id for name, answer in answers.items()} == {f"request-{i}": f"request-{i}" for i in range(40)}
        assert engine.statistics()["running"] == 0


async def check_bad_requests_are_refused(open_engine: OpenEngine) -> None:
    """An empty prompt and one too long are refused by name; the engine goes on."""
    async with open_engine() as engine:
        for request in (make_request(prompt=()), make_request(max_new_tokens=engine.features.context_length)):
            message = await _message_of(RequestRefused, lambda request=request: engine.generate(request))
            assert "'a'" in message, message
        assert len((await engine.generate(make_request())).token_ids)


async def check_ids_in_flight_are_unique(open_engine: OpenEngine) -> None:
    """A second request of the same id is refused while the first waits, and taken afterwards."""
    async with open_engine() as engine:
        await engine.pause("wait")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.generate, make_request())
            await trio.testing.wait_all_tasks_blocked()
            await _message_of(RequestRefused, lambda: engine.generate(make_request()))
            await engine.resume()
        await engine.generate(make_request())


async def check_paused_engine_admits_nothing(open_engine: OpenEngine) -> None:
    """In each mode of pause a new request waits until resume, and is then answered in full."""
    async with open_engine() as engine:
        for mode in ("abort", "wait", "keep"):
            await engine.pause(mode)
            answers: list[Completion] = []

            async def ask(name: str = mode, answers: list[Completion] = answers) -> None:
                answers.append(await engine.generate(make_request(name)))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask)
                await trio.testing.wait_all_tasks_blocked()
                assert answers == []
                await engine.resume()
            assert answers[0].finish_reason != "abort"


async def check_abort_all_answers_everyone(open_engine: OpenEngine) -> None:
    """Requests that wait are answered with "abort" and what they have, here nothing."""
    async with open_engine() as engine:
        await engine.pause("keep")
        answers: list[Completion] = []

        async def ask(name: str) -> None:
            answers.append(await engine.generate(make_request(name)))

        async with trio.open_nursery() as nursery:
            for name in ("a", "b"):
                nursery.start_soon(ask, name)
            await trio.testing.wait_all_tasks_blocked()
            await engine.abort_all()
        assert [(answer.finish_reason, len(answer.token_ids)) for answer in answers] == [("abort", 0), ("abort", 0)]
        await engine.resume()
        assert (await engine.generate(make_request("c"))).finish_reason != "abort"


async def check_cancelled_caller_leaves_no_trace(open_engine: OpenEngine) -> None:
    """After a caller is cancelled nothing runs and its id is free again."""
    async with open_engine() as engine:
        await engine.pause("wait")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.generate, make_request())
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        await engine.resume()
        assert engine.statistics()["running"] == 0
        assert len((await engine.generate(make_request())).token_ids)


async def check_update_in_memory(open_engine: OpenEngine, weights: list[tuple[str, Any]]) -> None:
    """`weights`, a whole model, become the new version; buckets outside an update are refused. A shared engine takes none."""
    async with open_engine() as engine:
        before = await engine.weight_version()
        if not engine.features.in_memory_update:
            await _message_of(EngineError, engine.begin_update)
            return
        _expect(EngineError, lambda: engine.receive_bucket(weights[:1]))
        await engine.pause("wait")
        await engine.begin_update()
        for start in range(0, len(weights), 3):
            engine.receive_bucket(weights[start : start + 3])
        assert await engine.weight_version() == before
        await engine.finish_update(before + 1)
        await engine.resume()
        assert await engine.weight_version() == before + 1
        assert (await engine.generate(make_request())).weight_versions.tolist()[0] == before + 1


async def check_shared_engine_keeps_the_trainers_version(open_engine: OpenEngine, path: Path) -> None:
    """An update to the trainer's version does nothing, one to another version is an error."""
    async with open_engine() as engine:
        version = await engine.weight_version()
        assert engine.features.shares_weights
        await engine.update_weights_from_checkpoint(path, version)
        await _message_of(WeightVersionError, lambda: engine.update_weights_from_checkpoint(path, version + 1))


async def check_closed_engine_says_so(open_engine: OpenEngine) -> None:
    """Calls after closing raise EngineClosed, and health is False."""
    async with open_engine() as engine:
        pass
    await _message_of(EngineClosed, lambda: engine.generate(make_request()))
    await _message_of(EngineClosed, lambda: engine.pause("wait"))
    assert not await engine.health()


CHECKS = (
    check_completion_is_whole,
    check_many_requests_are_all_answered,
    check_bad_requests_are_refused,
    check_ids_in_flight_are_unique,
    check_paused_engine_admits_nothing,
    check_abort_all_answers_everyone,
    check_cancelled_caller_leaves_no_trace,
    check_closed_engine_says_so,
)  # that need nothing but an engine


async def _message_of(kind: type[Exception], call: Callable[[], Awaitable[object]]) -> str:
    try:
        await call()
    except kind as error:
        return str(error)
    raise AssertionError(f"{kind.__name__} was not raised")


def _expect(kind: type[Exception], call: Callable[[], object]) -> None:
    try:
        call()
    except kind:
        return
    raise AssertionError(f"{kind.__name__} was not raised")
