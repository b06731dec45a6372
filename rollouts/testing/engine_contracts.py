"""What every InferenceEngine must do, as functions that raise AssertionError: run them on fakes and on real
engines.

Each takes `open_engine`, which gives an async context with a fresh engine, open and not paused, whose
vocabulary holds the ids 1..9.

    CHECKS           need nothing but an engine; fakes pass them too
    MODEL_CHECKS     need a model that decodes: contexts of LONG + 64 tokens, several requests at a time
    SNAPSHOT_CHECKS  need two snapshots of that model with different weights; leave the engine with the second
                     as its next versions

They wait for other requests' answers, never for time: see at_work().
"""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import trio
import trio.testing

from rollouts.errors import EngineClosed, EngineError, RequestRefused, WeightVersionError
from rollouts.protocols import InferenceEngine, PauseMode
from rollouts.types import Completion, GenerateRequest, SamplingParams

OpenEngine = Callable[[], AbstractAsyncContextManager[InferenceEngine]]
LONG = 800  # tokens of a request that is still at work when a short one is done
TRIES = 20


def make_request(
    request_id: str = "a", *, prompt: tuple[int, ...] = (1, 2, 3), max_new_tokens: int = 4, **sampling: Any
) -> GenerateRequest:
    """A small request."""
    params = SamplingParams(max_new_tokens=max_new_tokens, **sampling)
    return GenerateRequest(request_id=request_id, prompt_ids=np.asarray(prompt, np.int64), sampling=params)


@asynccontextmanager
async def at_work(engine: InferenceEngine) -> AsyncIterator[list[Completion]]:
    """In the block, a request "long" is in the middle of its work; its completion is in the list at the
    latest when the block has ended.

    Two short ones are awaited first: one may overtake it on the way to the engine, the next is sent when that
    one has been answered. On a starved CPU vLLM was seen to read no request for seconds, until the long one
    was done: who needs it unfinished asks disturb().
    """
    answers: list[Completion] = []

    async def ask() -> None:
        answers.append(await engine.generate(make_request("long", max_new_tokens=LONG)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        for name in ("short-1", "short-2"):
            await engine.generate(make_request(name, max_new_tokens=8))
        yield answers


async def disturb(engine: InferenceEngine, act: Callable[[list[Completion]], Awaitable[None]]) -> Completion:
    """What a request of LONG tokens, in the middle of whose work `act` is done, is answered with: cut short,
    or of two versions.

    `act` is given the answers so far, which are none, and leaves the engine serving. All is done again, up to
    TRIES times, if the request was whole before `act` reached the engine.
    """
    for _ in range(TRIES):
        async with at_work(engine) as answers:
            if not answers:
                await act(answers)
        versions = answers[0].weight_versions
        if answers[0].finish_reason == "abort" or versions[0] != versions[-1]:
            return answers[0]
    raise AssertionError(
        f"a request of {LONG} tokens was whole and of one version {TRIES} times, whatever was done to it"
    )


@asynccontextmanager
async def asked(engine: InferenceEngine, *requests: GenerateRequest) -> AsyncIterator[dict[str, Completion]]:
    """In the block, the requests wait for the engine; after it their answers are there, by request_id."""
    answers: dict[str, Completion] = {}

    async def ask(request: GenerateRequest) -> None:
        answers[request.request_id] = await engine.generate(request)

    async with trio.open_nursery() as nursery:
        for request in requests:
            nursery.start_soon(ask, request)
        await trio.testing.wait_all_tasks_blocked()
        yield answers


async def check_completion_is_whole(open_engine: OpenEngine) -> None:
    """Equal lengths, ids in the vocabulary, log-probs not above 0, every token of the version that the engine
    reports.
    """
    async with open_engine() as engine:
        completion = await engine.generate(make_request())
        ids, log_probs, versions = completion.token_ids, completion.log_probs, completion.weight_versions
        assert completion.request_id == "a"
        assert 1 <= len(ids) == len(log_probs) == len(versions) <= 4
        assert (ids.dtype, log_probs.dtype) == (np.int64, np.float32)
        assert 0 <= ids.min() <= ids.max() < engine.features.vocab_size
        if engine.features.log_probs:
            assert np.isfinite(log_probs).all() and log_probs.max() <= 1e-6
        else:
            assert np.isnan(log_probs).all(), "what is not known is no number"
        assert (versions == await engine.weight_version()).all()
        assert completion.finish_reason in ("stop", "length")
        assert await engine.health()


async def check_many_requests_are_all_answered(open_engine: OpenEngine) -> None:
    """Forty callers at once get forty completions, each its own."""
    async with open_engine() as engine:
        names = [f"request-{index}" for index in range(40)]
        async with asked(engine, *map(make_request, names)) as answers:
            pass
        assert {name: answer.request_id for name, answer in answers.items()} == {name: name for name in names}
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
        async with asked(engine, make_request()):
            await _message_of(RequestRefused, lambda: engine.generate(make_request()))
            await engine.resume()
        await engine.generate(make_request())


async def check_paused_engine_admits_nothing(open_engine: OpenEngine) -> None:
    """In each mode of pause that there is a new request waits until resume, and is then answered in full."""
    async with open_engine() as engine:
        for mode in ("abort", "wait", "keep") if engine.features.keep_pause else ("abort", "wait"):
            await engine.pause(mode)
            async with asked(engine, make_request(mode)) as answers:
                assert not answers
                await engine.resume()
            assert answers[mode].finish_reason != "abort"


async def check_abort_all_answers_everyone(open_engine: OpenEngine) -> None:
    """Requests that wait are answered with "abort" and what they have, here nothing."""
    async with open_engine() as engine:
        await engine.pause("wait")
        async with asked(engine, make_request("a"), make_request("b")) as answers:
            await engine.abort_all()
        found = [(answer.finish_reason, len(answer.token_ids)) for answer in answers.values()]
        assert found == [("abort", 0)] * 2
        await engine.resume()
        assert (await engine.generate(make_request("c"))).finish_reason != "abort"


async def check_cancelled_caller_leaves_no_trace(open_engine: OpenEngine) -> None:
    """After a caller is cancelled nothing runs and its id is free again."""
    async with open_engine() as engine:
        await engine.pause("wait")
        with trio.CancelScope() as scope:
            async with asked(engine, make_request()):
                scope.cancel()
        await engine.resume()
        assert engine.statistics()["running"] == 0
        assert len((await engine.generate(make_request())).token_ids)


async def check_update_in_memory(open_engine: OpenEngine, weights: list[tuple[str, Any]]) -> None:
    """`weights`, a whole model, become the new version; buckets outside an update are refused. A shared
    engine takes none.
    """
    async with open_engine() as engine:
        before = await engine.weight_version()
        if not engine.features.in_memory_update:
            await _message_of(EngineError, engine.begin_update)
            return

        async def receive_too_early() -> None:
            engine.receive_bucket(weights[:1])

        await _message_of(EngineError, receive_too_early)
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
        await _message_of(
            WeightVersionError, lambda: engine.update_weights_from_checkpoint(path, version + 1)
        )


async def check_closed_engine_says_so(open_engine: OpenEngine) -> None:
    """Calls after closing raise EngineClosed, and health is False."""
    async with open_engine() as engine:
        pass
    await _message_of(EngineClosed, lambda: engine.generate(make_request()))
    await _message_of(EngineClosed, lambda: engine.pause("wait"))
    assert not await engine.health()


# --- with a model behind the engine -------------------------------------------------------------------------


async def check_seed_fixes_the_tokens(open_engine: OpenEngine) -> None:
    """Where features.seeds: the same seed gives the same tokens, whatever runs beside it, and other seeds
    give others.
    """
    async with open_engine() as engine:
        if not engine.features.seeds:
            assert any("seed" in gap for gap in engine.features.gaps), (
                "an engine without seeds says so in its gaps"
            )
            return
        alone = await engine.generate(make_request(max_new_tokens=16, seed=11))
        seeds = (11, 12, 13, 2**64 - 1)
        async with asked(
            engine, *(make_request(f"seed-{seed}", max_new_tokens=16, seed=seed) for seed in seeds)
        ) as answers:
            pass
        assert answers["seed-11"].token_ids.tolist() == alone.token_ids.tolist()
        assert len({tuple(answer.token_ids.tolist()) for answer in answers.values()}) > 1


async def check_greedy_repeats_itself(open_engine: OpenEngine) -> None:
    """At temperature 0 the tokens do not depend on the seed, and no log-prob is that of a certain event."""
    async with open_engine() as engine:
        first = await engine.generate(make_request(max_new_tokens=8, temperature=0.0, seed=1))
        second = await engine.generate(make_request(max_new_tokens=8, temperature=0.0, seed=2))
        assert first.token_ids.tolist() == second.token_ids.tolist()
        assert np.allclose(first.log_probs, second.log_probs, atol=1e-3)
        assert (first.log_probs < 0).any(), "log-probs of greedy tokens are those at temperature 1, not 0"


async def check_prompts_are_scored(open_engine: OpenEngine) -> None:
    """An answer that is sent back in a prompt has the log-probs there that it was answered with."""
    async with open_engine() as engine:
        answer = await engine.generate(make_request(max_new_tokens=8))
        prompt = (1, 2, 3, *answer.token_ids.tolist())
        request = replace(make_request("b", prompt=prompt, max_new_tokens=1), score_prompt=True)
        scored = (await engine.generate(request)).prompt_log_probs
        assert scored is not None and scored.shape == (len(prompt),) and scored[0] == 0
        assert np.allclose(scored[3:], answer.log_probs, atol=1e-3)
        assert answer.prompt_log_probs is None, "it was not asked for"


async def check_stop_token_ends_and_stays(open_engine: OpenEngine) -> None:
    """A stop token ends the completion and is its last token; nothing else ends it before its limit."""
    async with open_engine() as engine:
        whole = await engine.generate(make_request(max_new_tokens=12, temperature=0.0))
        assert (len(whole.token_ids), whole.finish_reason) == (12, "length")
        stop = int(whole.token_ids[5])
        cut = await engine.generate(make_request(max_new_tokens=12, temperature=0.0, stop_token_ids=(stop,)))
        length = whole.token_ids.tolist().index(stop) + 1
        assert cut.token_ids.tolist() == whole.token_ids.tolist()[:length]
        assert cut.finish_reason == "stop"


async def check_abort_keeps_what_is_there(open_engine: OpenEngine) -> None:
    """An aborted request is answered with the tokens that it has, all of one version, and the engine goes
    on.
    """
    async with open_engine() as engine:
        answer = await disturb(engine, lambda _: engine.abort_all())
        assert answer.finish_reason == "abort"
        assert 0 < len(answer.token_ids) < LONG
        assert len(answer.log_probs) == len(answer.weight_versions) == len(answer.token_ids)
        assert (answer.weight_versions == await engine.weight_version()).all()
        assert (await engine.generate(make_request("after"))).finish_reason == "length"


async def check_pause_ends_what_is_in_flight(open_engine: OpenEngine) -> None:
    """abort answers with what there is, wait with everything; both before pause returns."""
    async with open_engine() as engine:

        async def pause(mode: PauseMode, answers: list[Completion]) -> None:
            await engine.pause(mode)
            await trio.lowlevel.checkpoint()
            assert len(answers) == 1, mode
            await engine.resume()

        assert len((await disturb(engine, lambda answers: pause("abort", answers))).token_ids) < LONG
        async with at_work(engine) as answers:
            await pause("wait", answers)
        assert (answers[0].finish_reason, len(answers[0].token_ids)) == ("length", LONG)


async def check_cancelled_request_frees_its_place(open_engine: OpenEngine) -> None:
    """After a caller that was being answered is cancelled, the engine has nothing left to do."""
    async with open_engine() as engine:
        with trio.CancelScope() as scope:
            async with at_work(engine):
                scope.cancel()
        assert engine.statistics()["running"] == 0
        await engine.pause("wait")
        await engine.resume()
        await engine.generate(make_request("long", max_new_tokens=2))
        load = await engine.load()
        assert (load.running, load.waiting) == (0, 0)


async def check_update_from_checkpoint(open_engine: OpenEngine, first: Path, second: Path) -> None:
    """Each update shows in version, log-probs and checksum, and the first weights give the first log-probs
    again: no cache survives.
    """
    async with open_engine() as engine:
        version = await engine.weight_version()
        seen: list[tuple[list[float], str | None]] = []
        for path in (first, second, first):
            version += 1
            await engine.pause("wait")
            await engine.update_weights_from_checkpoint(path, version)
            await engine.resume()
            assert await engine.weight_version() == version
            completion = await engine.generate(
                make_request(prompt=tuple(range(1, 10)) * 20, max_new_tokens=4, temperature=0.0)
            )
            assert (completion.weight_versions == version).all()
            seen.append((completion.log_probs.tolist(), await engine.checksum()))
        assert np.allclose(seen[0][0], seen[2][0], atol=1e-3)
        assert not np.allclose(seen[0][0][:1], seen[1][0][:1], atol=1e-3)
        if engine.features.checksum:
            assert seen[0][1] == seen[2][1] != seen[1][1]
        else:
            assert [checksum for _, checksum in seen] == [None] * 3


async def check_keep_pause_spans_two_versions(open_engine: OpenEngine, second: Path) -> None:
    """A request in flight over pause("keep"), an update and resume comes back whole, its tokens of the
    version that made each.
    """
    async with open_engine() as engine:
        before = await engine.weight_version()
        if not (engine.features.keep_pause and engine.features.version_spans):
            return
        answer = await disturb(engine, lambda answers: update_frozen(engine, second, answers))
        assert (len(answer.token_ids), answer.finish_reason) == (LONG, "length")
        versions = answer.weight_versions.tolist()
        old = versions.count(versions[0])
        assert versions == [versions[0]] * old + [await engine.weight_version()] * (LONG - old)
        assert versions[0] >= before


async def update_frozen(engine: InferenceEngine, path: Path, answers: list[Completion]) -> None:
    """What is in flight stands still while the engine is brought to the weights in `path`, as its next
    version, and goes on with them.
    """
    await engine.pause("keep")
    before = list(answers)
    await engine.update_weights_from_checkpoint(path, await engine.weight_version() + 1)
    assert answers == before
    await engine.resume()


async def check_bad_snapshots_change_nothing(open_engine: OpenEngine, second: Path, folder: Path) -> None:
    """A snapshot that is not there, has no weights or is cut is refused by name; version and log-probs stay,
    and the engine serves.
    """
    cut, empty = folder / "cut", folder / "empty"
    empty.mkdir()
    shutil.copytree(second, cut, copy_function=shutil.copyfile)
    for file in cut.glob("*.safetensors"):
        os.truncate(file, file.stat().st_size // 2)
    async with open_engine() as engine:
        version = await engine.weight_version()
        before = await engine.generate(make_request(temperature=0.0))
        for path in (folder / "nowhere", empty, cut):
            await engine.pause("wait")
            message = await _message_of(
                EngineError, lambda path=path: engine.update_weights_from_checkpoint(path, version + 1)
            )
            await engine.resume()
            assert path.name in message, message
        after = await engine.generate(make_request(temperature=0.0))
        assert await engine.weight_version() == version
        assert np.allclose(before.log_probs, after.log_probs, atol=1e-3)
        assert (after.weight_versions == version).all()


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

MODEL_CHECKS = (
    check_seed_fixes_the_tokens,
    check_greedy_repeats_itself,
    check_prompts_are_scored,
    check_stop_token_ends_and_stays,
    check_abort_keeps_what_is_there,
    check_pause_ends_what_is_in_flight,
    check_cancelled_request_frees_its_place,
)  # each takes open_engine

SNAPSHOT_CHECKS = (
    check_update_from_checkpoint,
    check_keep_pause_spans_two_versions,
    check_bad_snapshots_change_nothing,
)  # see their arguments


async def _message_of(kind: type[Exception], call: Callable[[], Awaitable[object]]) -> str:
    try:
        await call()
    except kind as error:
        return str(error)
    raise AssertionError(f"{kind.__name__} was not raised")
