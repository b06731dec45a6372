"""What every InferenceEngine must do, as functions that raise AssertionError: run them on fakes and on real
engines.

Each takes `open_engine`, which gives an async context with a fresh engine, open and not paused, whose
vocabulary holds the ids 1..9.

    CHECKS           need nothing but an engine; fakes pass them too
    MODEL_CHECKS     need a model that decodes: contexts of LONG + 64 tokens, several requests at a time
    those with `second`  need two snapshots of that model with different weights; leave the engine with the
                     second as its next versions

They wait for other requests' answers, never for time: see at_work().
"""

import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import trio
import trio.testing
from numpy.testing import assert_raises, assert_raises_regex

from rollouts.errors import EngineClosed, EngineError, RequestRefused
from rollouts.protocols import InferenceEngine, PauseMode
from rollouts.types import Completion, GenerateRequest, SamplingParams

Answers = dict[str, Completion]  # by request_id
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
async def asked(engine: InferenceEngine, *requests: GenerateRequest) -> AsyncIterator[Answers]:
    """In the block, the requests wait for the engine; after it their answers are there, by request_id."""
    answers = {}

    async def ask(request: GenerateRequest) -> None:
        answers[request.request_id] = await engine.generate(request)

    async with trio.open_nursery() as nursery:
        for request in requests:
            nursery.start_soon(ask, request)
        await trio.testing.wait_all_tasks_blocked()
        yield answers


@asynccontextmanager
async def at_work(engine: InferenceEngine) -> AsyncIterator[Answers]:
    """In the block, a request "long" is in the middle of its work; its completion is there at the latest when
    the block has ended.

    Two short ones are awaited first: one may overtake it on the way to the engine, the next is sent when that
    one has been answered. On a starved CPU vLLM was seen to read no request for seconds, until the long one
    was done: who needs it unfinished asks disturb().
    """
    async with asked(engine, make_request("long", max_new_tokens=LONG)) as answers:
        for name in ("short-1", "short-2"):
            await engine.generate(make_request(name, max_new_tokens=8))
        yield answers


async def disturb(engine: InferenceEngine, act: Callable[[Answers], Awaitable[None]]) -> Completion:
    """What a request of LONG tokens, in the middle of whose work `act` is done, is answered with: cut short,
    or of two versions.

    `act` is given the answers so far, which are none, and leaves the engine serving. All is done again, up to
    TRIES times, if the request was whole before `act` reached the engine.
    """
    for _ in range(TRIES):
        async with at_work(engine) as answers:
            if not answers:
                await act(answers)
        answer = answers["long"]
        if answer.finish_reason == "abort" or answer.weight_versions[0] != answer.weight_versions[-1]:
            return answer
    raise AssertionError(
        f"a request of {LONG} tokens was whole and of one version {TRIES} times, whatever was done to it"
    )


async def check_completions_are_whole(open_engine: OpenEngine) -> None:
    """Forty callers at once get forty completions, each its own: equal lengths, ids in the vocabulary,
    log-probs not above 0, every token of the version that the engine reports. Calls after closing raise
    EngineClosed, and health is False.
    """
    async with open_engine() as engine:
        async with asked(engine, *(make_request(str(index)) for index in range(40))) as answers:
            pass
        version = await engine.weight_version()
        for request_id, completion in answers.items():
            ids, log_probs, versions = completion.token_ids, completion.log_probs, completion.weight_versions
            assert completion.request_id == request_id
            assert 1 <= len(ids) == len(log_probs) == len(versions) <= 4
            assert (ids.dtype, log_probs.dtype) == (np.int64, np.float32)
            assert 0 <= ids.min() <= ids.max() < engine.features.vocab_size
            known = np.isfinite(log_probs) & (log_probs <= 1e-6)
            assert known.all() if engine.features.log_probs else np.isnan(log_probs).all(), log_probs
            assert (versions == version).all()
            assert completion.finish_reason in ("stop", "length")
        assert len(answers) == 40 and engine.statistics()["running"] == 0
        assert await engine.health()
    with assert_raises(EngineClosed):
        await engine.generate(make_request())
    with assert_raises(EngineClosed):
        await engine.pause("wait")
    assert not await engine.health()


async def check_bad_requests_are_refused(open_engine: OpenEngine) -> None:
    """An empty prompt and one too long are refused by name, and a second request of an id while the first
    waits; the engine goes on. When the first one's caller is cancelled nothing runs, and the id is free.
    """
    async with open_engine() as engine:
        for request in (make_request(prompt=()), make_request(max_new_tokens=engine.features.context_length)):
            with assert_raises_regex(RequestRefused, "'a'"):
                await engine.generate(request)
        await engine.pause("wait")
        with trio.CancelScope() as scope:
            async with asked(engine, make_request()):
                with assert_raises(RequestRefused):
                    await engine.generate(make_request())
                scope.cancel()
        await engine.resume()
        assert engine.statistics().get("running", 0) == 0
        assert len((await engine.generate(make_request())).token_ids)


async def check_paused_engine_admits_nothing(open_engine: OpenEngine) -> None:
    """In each mode of pause that there is a new request waits until resume, and is then answered in full, or
    until abort_all, and is then answered with what it has, here nothing.
    """
    async with open_engine() as engine:
        for mode in ("abort", "wait", "keep") if engine.features.keep_pause else ("abort", "wait"):
            await engine.pause(mode)
            async with asked(engine, make_request(mode)) as answers:
                assert not answers
                await engine.resume()
            assert answers[mode].finish_reason != "abort"
        await engine.pause("wait")
        async with asked(engine, make_request("a"), make_request("b")) as answers:
            await engine.abort_all()
        found = [(answer.finish_reason, len(answer.token_ids)) for answer in answers.values()]
        assert found == [("abort", 0)] * 2
        await engine.resume()
        assert (await engine.generate(make_request("c"))).finish_reason != "abort"


async def check_update_in_memory(open_engine: OpenEngine, weights: list[tuple[str, Any]]) -> None:
    """`weights`, a whole model, become the new version; buckets outside an update are refused."""
    async with open_engine() as engine:
        version = await engine.weight_version()
        if not engine.features.in_memory_update:
            with assert_raises(EngineError):
                await engine.begin_update()
            return
        with assert_raises(EngineError):
            engine.receive_bucket(weights[:1])
        await engine.pause("wait")
        await engine.begin_update()
        for start in range(0, len(weights), 3):
            engine.receive_bucket(weights[start : start + 3])
        assert await engine.weight_version() == version
        await engine.finish_update(version + 1)
        await engine.resume()
        assert await engine.weight_version() == version + 1
        assert (await engine.generate(make_request())).weight_versions[0] == version + 1


# --- with a model behind the engine -------------------------------------------------------------------------


async def check_seed_fixes_the_tokens(open_engine: OpenEngine) -> None:
    """Where features.seeds: the same seed gives the same tokens, whatever runs beside it, and other seeds
    give others.
    """
    async with open_engine() as engine:
        if not engine.features.seeds:
            said = any("seed" in gap for gap in engine.features.gaps)
            assert said, "an engine without seeds says so in its gaps"
            return
        alone = await engine.generate(make_request(max_new_tokens=16, seed=11))
        requests = [make_request(str(seed), max_new_tokens=16, seed=seed) for seed in (11, 12, 13, 2**64 - 1)]
        async with asked(engine, *requests) as answers:
            pass
        assert answers["11"].token_ids.tolist() == alone.token_ids.tolist()
        assert len({tuple(answer.token_ids) for answer in answers.values()}) > 1


async def check_stop_token_ends_and_stays(open_engine: OpenEngine) -> None:
    """A stop token ends the completion and is its last token; nothing else ends it before its limit.

    At temperature 0 the tokens do not depend on the seed, and no log-prob is that of a certain event. An
    answer that is sent back in a prompt has the log-probs there that it was answered with, and whatever an
    engine keeps of a trajectory between its turns, the next one is answered as a prompt of its own.
    """
    async with open_engine() as engine:
        greedy = partial(make_request, max_new_tokens=12, temperature=0.0)
        whole = await engine.generate(replace(greedy(seed=1), trajectory="t"))
        assert (len(whole.token_ids), whole.finish_reason) == (12, "length")
        assert (whole.log_probs < 0).any(), "log-probs of greedy tokens are those at temperature 1, not 0"
        stop = int(whole.token_ids[5])
        cut = await engine.generate(greedy(seed=2, stop_token_ids=(stop,)))
        length = whole.token_ids.tolist().index(stop) + 1
        assert cut.token_ids.tolist() == whole.token_ids.tolist()[:length]
        assert np.allclose(cut.log_probs, whole.log_probs[:length], atol=1e-3)
        assert cut.finish_reason == "stop"
        prompt = (1, 2, 3, *whole.token_ids.tolist())
        request = replace(make_request(prompt=prompt, max_new_tokens=1), score_prompt=True)
        scored = (await engine.generate(request)).prompt_log_probs
        assert scored is not None and scored.shape == (len(prompt),) and scored[0] == 0
        assert np.allclose(scored[3:], whole.log_probs, atol=1e-3)
        turns = [replace(greedy(prompt=prompt), trajectory=key) for key in ("t", "")]
        turn, alone = [(await engine.generate(each)).log_probs for each in turns]
        assert np.allclose(turn, alone, atol=1e-3)
        assert whole.prompt_log_probs is None, "it was not asked for"


async def check_work_in_flight_is_ended(open_engine: OpenEngine) -> None:
    """abort_all and pause("abort") answer with the tokens that are there, pause("wait") with all; each before
    it returns, and the engine goes on. After a caller is cancelled the engine has nothing left to do.
    """
    async with open_engine() as engine:

        async def end(answers: Answers) -> None:
            if mode is None:
                await engine.abort_all()
                return
            await engine.pause(mode)
            await trio.lowlevel.checkpoint()
            assert len(answers) == 1, mode
            await engine.resume()

        mode: PauseMode | None
        for mode in (None, "abort"):
            answer = await disturb(engine, end)
            assert (answer.finish_reason, 0 < len(answer.token_ids) < LONG) == ("abort", True), mode
            assert len(answer.log_probs) == len(answer.weight_versions) == len(answer.token_ids)
            assert (answer.weight_versions == await engine.weight_version()).all()
        mode = "wait"
        async with at_work(engine) as answers:
            await end(answers)
        assert (answers["long"].finish_reason, len(answers["long"].token_ids)) == ("length", LONG)
        with trio.CancelScope() as scope:
            async with at_work(engine):
                scope.cancel()
        assert engine.statistics()["running"] == 0
        await engine.pause("wait")
        await engine.resume()
        await engine.generate(make_request("long", max_new_tokens=2))


async def update(engine: InferenceEngine, path: Path, version: int) -> None:
    """Brings a paused engine to the weights in `path`, as a version, and lets it serve on."""
    await engine.pause("wait")
    try:
        await engine.update_weights_from_checkpoint(path, version)
    finally:
        await engine.resume()


async def check_update_from_checkpoint(open_engine: OpenEngine, first: Path, second: Path) -> None:
    """Each update shows in version, log-probs and checksum, and the first weights give the first log-probs
    again: no cache survives.
    """
    async with open_engine() as engine:
        request = make_request(prompt=(*range(1, 10),) * 20, temperature=0.0)
        version = await engine.weight_version()
        log_probs, checksums = [], []
        for path in (first, second, first):
            version += 1
            await update(engine, path, version)
            assert await engine.weight_version() == version
            completion = await engine.generate(request)
            assert (completion.weight_versions == version).all()
            log_probs.append(completion.log_probs)
            checksums.append(await engine.checksum())
        assert np.allclose(log_probs[0], log_probs[2], atol=1e-3)
        assert not np.allclose(log_probs[0][:1], log_probs[1][:1], atol=1e-3)
        same = checksums[0] == checksums[2] != checksums[1]
        assert same if engine.features.checksum else checksums == [None] * 3


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


async def update_frozen(engine: InferenceEngine, path: Path, answers: Answers) -> None:
    """What is in flight stands still while the engine is brought to the weights in `path`, as its next
    version, and goes on with them.
    """
    await engine.pause("keep")
    before = [*answers]
    await engine.update_weights_from_checkpoint(path, await engine.weight_version() + 1)
    assert [*answers] == before
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
        before = await engine.generate(make_request(temperature=0.0))
        version = await engine.weight_version()
        for path in (folder / "nowhere", empty, cut):
            with assert_raises_regex(EngineError, path.name):
                await update(engine, path, version + 1)
        after = await engine.generate(make_request(temperature=0.0))
        assert np.allclose(before.log_probs, after.log_probs, atol=1e-3)
        assert (after.weight_versions == version).all() and await engine.weight_version() == version


CHECKS = (
    check_completions_are_whole,
    check_bad_requests_are_refused,
    check_paused_engine_admits_nothing,
)  # that need nothing but an engine

MODEL_CHECKS = (
    check_seed_fixes_the_tokens,
    check_stop_token_ends_and_stays,
    check_work_in_flight_is_ended,
)  # each takes open_engine
