"""Spans: the phases of a step, and the requests and rewards of samples."""

import itertools
from contextlib import suppress
from functools import partial
from unittest.mock import Mock

import trio

from rollouts.metrics import spans as spans_module
from rollouts.metrics.spans import PhaseTimer, Span, SpanRecorder
from rollouts.types import SamplingParams
from tests.unit.fleet_engines import FakeEngine, fleet_of
from tests.unit.manager_runs import chat_generate, make_run


def ticking(step, start=0.0):
    """A clock that says `start`, then `step` more each time."""
    return partial(next, itertools.count(start, step))


# --- the pieces ---------------------------------------------------------------------------------------------


def test_the_phases_of_a_step_are_spans_of_the_trainer(monkeypatch):
    monkeypatch.setattr(spans_module, "time", Mock(perf_counter=ticking(1.0), time=ticking(10.0, 1000.0)))
    timer = PhaseTimer()
    for name in ("generate", "train", "train"):  # a phase entered twice adds up
        with suppress(ValueError), timer.phase(name):
            raise ValueError("no")
    names = {999.0: "generate", 1009.0: "train", 1019.0: "train"}  # 1 s before each ended
    assert timer.spans() == [Span(name, "trainer", began, 1.0) for began, name in names.items()]
    assert timer.metrics() == {"time/generate": 1.0, "time/train": 2.0, "time/step": 7.0}


def test_spans_of_samples_are_given_out_if_they_were_kept_and_others_always(monkeypatch):
    monkeypatch.setattr(spans_module, "time", Mock(perf_counter=ticking(1.0), time=lambda: 100.0))
    recorder = SpanRecorder()
    recorder.add("generate", "vllm-0", 5.0, 2.0, id="a", tokens=3)
    recorder.add("reward", "rewards", 3.0, 1.0, id="a")
    recorder.add("generate", "vllm-0", 5.0, 2.0, id="b")
    with recorder.measure("evaluate"):
        pass
    recorder.keep(["a", "unknown"])
    assert recorder.take() == [
        Span("evaluate", "trainer", 99.0, 1.0),
        Span("generate", "vllm-0", 95.0, 2.0, "a", 3),
        Span("reward", "rewards", 97.0, 1.0, "a"),
    ]
    assert recorder.take() == []
    recorder.keep(["b"])
    (late,) = recorder.take()
    assert late.id == "b"  # a sample may train in a later step than the one it was generated in


def test_what_is_held_is_bounded(monkeypatch):
    monkeypatch.setattr(spans_module, "HELD_IDS", 10)
    monkeypatch.setattr(spans_module, "HELD_SPANS", 5)
    recorder, names = SpanRecorder(), [f"s{number}" for number in range(100)]
    for name in names:
        recorder.add("generate", "local", 0.0, 0.0, id=name)
        recorder.add("checkpoint", "trainer", 0.0, 0.0)
    assert len(recorder.take()) == 5
    recorder.keep(names)
    assert [span.id for span in recorder.take()] == names[-10:]


# --- requests, rewards --------------------------------------------------------------------------------------


async def test_requests_and_rewards_of_samples_have_the_engine_the_time_and_the_tokens(
    autojump_clock, monkeypatch
):
    """Two engines of 2 s and 3 s a request; a generate function of one's own that asks twice; a reward of 1
    s.
    """
    monkeypatch.setattr(spans_module, "time", Mock(perf_counter=trio.current_time, time=trio.current_time))
    began, recorder = trio.current_time(), SpanRecorder()

    async def ask_twice(sample, engine, sampling):
        await chat_generate(sample, engine, sampling)
        return await chat_generate(sample, engine, sampling)

    async def reward(sample):
        await trio.sleep(1.0)
        return 1.0

    seconds = {"engine-0": 2.0, "engine-1": 3.0}
    engines = [FakeEngine(name, seconds=duration) for name, duration in seconds.items()]
    async with fleet_of(*engines) as fleet:
        options = {"num_prompts": 1, "sampling": SamplingParams(max_new_tokens=1), "spans": recorder}
        run = make_run(engine=fleet, generate=ask_twice, reward=reward, **options)
        batch = await run.manager.generate_batch()
    recorder.keep(sample.id for sample in batch.samples)
    spans = recorder.take()
    for sample in batch.samples:
        mine = [span for span in spans if span.id == sample.id]
        first, second = (span.track for span in mine[:2])
        then = began + seconds[first]
        assert mine == [
            Span("generate", first, began, seconds[first], sample.id, 1),
            Span("generate", second, then, seconds[second], sample.id, 1),
            Span("reward", "rewards", then + seconds[second], 1.0, sample.id),
        ]
