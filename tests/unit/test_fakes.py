"""The fakes keep the promises of the protocols that they stand for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import trio

from rollouts.errors import (
    BackendClosed,
    BackendError,
    EarlierStepFailed,
    EngineClosed,
    EngineError,
    RequestRefused,
    WeightVersionError,
)
from rollouts.protocols import InferenceEngine, TrainingBackend
from rollouts.testing.fakes import (
    FAKE_END,
    FAKE_START,
    FakeBackend,
    FakeTokenizer,
    ScriptedEngine,
    ScriptedReply,
    open_fake_backend,
)
from rollouts.types import Completion, GenerateRequest, LossSpec, OptimParams, RolloutBatch, SamplingParams


def request(name: str = "r", *, max_new_tokens: int = 8, prompt_ids=(1, 2)) -> GenerateRequest:
    sampling = SamplingParams(max_new_tokens=max_new_tokens, stop_token_ids=(FAKE_END,), seed=1)
    return GenerateRequest(request_id=name, prompt_ids=np.asarray(prompt_ids, np.int64), sampling=sampling)


def accept(engine: InferenceEngine, backend: TrainingBackend) -> None:
    """The type checker reads this: both fakes have the shape of their protocol."""


# --- tokenizer ---


def test_text_survives_the_tokenizer_and_special_tokens_do_not():
    tokenizer = FakeTokenizer()
    ids = tokenizer.encode("<|start|>user\nä?<|end|>")
    assert ids[0] == FAKE_START and ids[-1] == FAKE_END and len(ids) == 2 + len("user\nä?".encode())
    assert tokenizer.decode(ids) == "user\nä?"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|start|>user\nä?<|end|>"


# --- engine ---


async def generate(engine: ScriptedEngine, into: list[Completion], *arguments, **options) -> None:
    into.append(await engine.generate(request(*arguments, **options)))


async def test_each_token_has_the_version_that_made_it(autojump_clock):
    engine = ScriptedEngine(lambda request: ScriptedReply(text="abc", token_s=1.0), version=4)
    done: list[Completion] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(generate, engine, done)
        await trio.sleep(2.5)
        engine.set_version(5)
    assert done[0].weight_versions.tolist() == [4, 4, 5, 5] and await engine.weight_version() == 5


async def test_abort_ends_requests_with_what_they_have(autojump_clock):
    engine = ScriptedEngine(lambda request: ScriptedReply(text="abc", token_s=1.0))
    done: list[Completion] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(generate, engine, done)
        await trio.sleep(1.5)
        await engine.pause("abort")
        assert engine.in_flight == 0 and trio.current_time() == 2
        nursery.start_soon(generate, engine, done, "later")
        await trio.sleep(10)
        assert len(done) == 1, "a paused engine admits nothing"
        await engine.resume()
    assert done[0].token_ids.tolist() == [*b"a"] and done[0].finish_reason == "abort"
    assert done[1].finish_reason == "stop" and trio.current_time() == 16


async def test_keep_freezes_requests_until_resume(autojump_clock):
    engine = ScriptedEngine(lambda request: ScriptedReply(text="abc", token_s=1.0))
    done: list[Completion] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(generate, engine, done)
        await trio.sleep(1.5)
        await engine.pause("keep")
        assert trio.current_time() == 1.5 and engine.in_flight == 1
        await trio.sleep(10)
        await engine.resume()
    assert done[0].token_ids.tolist() == [*b"abc", FAKE_END]


async def test_requests_that_break_a_rule_are_refused(autojump_clock):
    engine = ScriptedEngine(lambda request: ScriptedReply(token_s=1.0), context_length=10)
    with pytest.raises(RequestRefused, match="needs 11 tokens; the context is 10"):
        await engine.generate(request(prompt_ids=(1, 2, 3)))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(engine.generate, request())
        await trio.sleep(0.5)
        with pytest.raises(RequestRefused, match="in flight already"):
            await engine.generate(request())


async def test_a_closed_engine_serves_nobody(autojump_clock):
    engine = ScriptedEngine(lambda request: ScriptedReply(token_s=1.0))
    assert await engine.health()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(expect_closed, engine)
        await trio.sleep(0.5)
        engine.close()
    await expect_closed(engine)
    assert not await engine.health()


async def expect_closed(engine: ScriptedEngine) -> None:
    with pytest.raises(EngineClosed):
        await engine.generate(request())


async def test_weights_arrive_in_buckets_or_from_disk(tmp_path: Path):
    engine = ScriptedEngine()
    async with open_fake_backend() as backend:
        accept(engine, backend)
        with pytest.raises(EngineError, match="outside an update"):
            engine.receive_bucket([])
        with pytest.raises(EngineError, match="without begin_update"):
            await engine.finish_update(1)
        await engine.begin_update()
        await backend.stream_weights(engine.receive_bucket)
        await engine.finish_update(1)
    assert engine.received == ["weight"] and await engine.weight_version() == 1
    assert await engine.update_weights_from_checkpoint(tmp_path, 2) == {"version": 2}
    with pytest.raises(EngineError, match="is not a directory"):
        await engine.update_weights_from_checkpoint(tmp_path / "none", 3)
    assert await engine.weight_version() == 2
    await engine.release_memory()
    await engine.restore_memory()


async def test_an_engine_that_shares_weights_takes_no_update(tmp_path: Path):
    engine = ScriptedEngine(shares_weights=True)
    assert engine.features.shares_weights and not engine.features.in_memory_update
    with pytest.raises(EngineError, match="takes no update"):
        await engine.begin_update()
    with pytest.raises(WeightVersionError):
        await engine.update_weights_from_checkpoint(tmp_path, 1)


# --- backend ---


def make_batch() -> RolloutBatch:
    return RolloutBatch(
        tokens=(np.arange(4), np.arange(3)),
        loss_masks=(np.array([0, 0, 1, 1], bool), np.array([0, 1, 1], bool)),
    )


@pytest.mark.parametrize(
    ("loss", "denominator"),
    [
        (LossSpec("sft"), 4.0),
        (LossSpec("sft", unit="sequences"), 2.0),
        (LossSpec("sft", unit="constant", constant=9.0), 9.0),
    ],
)
async def test_the_backend_counts_the_unit_of_the_loss(loss: LossSpec, denominator: float):
    async with open_fake_backend() as backend:
        result = await backend.forward_backward(make_batch(), loss)
        assert result.denominator == denominator and backend.losses == [loss] and len(backend.batches) == 1
        assert [row.tolist() for row in await backend.forward(make_batch())] == [[0, 0, -1, -1], [0, -1, -1]]


async def test_futures_finish_in_submission_order_and_may_be_awaited_twice(autojump_clock):
    async with open_fake_backend(step_s=10) as backend:
        first, second = (
            backend.forward_backward(make_batch(), LossSpec("sft")),
            backend.optim_step(OptimParams(lr=0.5)),
        )
        assert not first.done()
        assert (await second.result()).lr == 0.5
        assert trio.current_time() == 20 and first.done()
        assert await second == await second.result()
        assert backend.statistics() == {"submitted": 2.0, "steps": 1.0}


async def test_cancelling_a_waiter_does_not_cancel_the_step(autojump_clock):
    async with open_fake_backend(step_s=10) as backend:
        step = backend.optim_step()
        with trio.move_on_after(1):
            await step
        assert (await step).step == 1


async def test_steps_after_a_failed_one_fail_until_reset():
    async with open_fake_backend(failures={0: BackendError("out of memory")}) as backend:
        steps = backend.optim_step(), backend.optim_step()
        with pytest.raises(BackendError, match="out of memory"):
            await steps[0]
        with pytest.raises(EarlierStepFailed, match="out of memory"):
            await steps[1]
        await backend.reset()
        assert (await backend.optim_step()).step == 1


async def test_a_failure_that_nobody_awaited_is_raised_when_the_backend_closes():
    opened: list[FakeBackend] = []

    async def forget_the_future() -> None:
        async with open_fake_backend(failures={0: BackendError("out of memory")}) as backend:
            opened.append(backend)
            backend.optim_step()

    with pytest.raises(BackendError, match="out of memory"):
        await forget_the_future()
    with pytest.raises(BackendClosed):
        opened[0].optim_step()
