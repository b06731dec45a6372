"""Rewards: how user functions are called, what counts as an answer, and the simple rewards."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import threading
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing

from rollouts.errors import (
    DataError,
    EngineClosed,
    EngineError,
    RewardTimeout,
    UserFunctionError,
)
from rollouts.preflight.functions import make_trial_samples
from rollouts.rewards import call
from rollouts.rewards.call import (
    call_filter,
    call_generate,
    call_group_reward,
    call_reward,
    watch_blocking,
)
from rollouts.rewards.check import apply_reward, check_group_rewards, check_reward
from rollouts.testing.fakes import ScriptedEngine
from rollouts.types import FilterDecision, RewardResult, Sample, SampleGroup, SamplingParams, Status

SAMPLE = Sample(id="g0-s0", prompt="1+1?", response="2", metadata={"answer": "2"}, status=Status.COMPLETED)
GROUP = SampleGroup(3, "row-7", (SAMPLE,))
SAMPLING = SamplingParams(max_new_tokens=4)


def answering(value: Any):
    async def reward(sample: Sample) -> Any:
        return value

    return reward


# --- what counts as a reward ---


@pytest.mark.parametrize(
    ("value", "result"),
    [
        *(
            (one, RewardResult(1.0))
            for one in (1, True, np.float32(1), np.bool_(True), np.array(1.0), Fraction(1))
        ),
        ({"exact": True, "length": -0.25}, RewardResult(0.75, {"exact": 1.0, "length": -0.25})),
        (RewardResult(np.float32(0.5), {"a": 2}, "why"), RewardResult(0.5, {"a": 2.0}, "why")),
    ],
)
def test_numbers_named_parts_and_results_are_rewards(value: Any, result: RewardResult):
    assert check_reward(value, "f") == result


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (math.nan, "returned nan as its reward; it must be a finite number"),
        (math.inf, "returned inf as its reward"),
        (None, "returned None as its reward"),
        ("1", "returned '1' as its reward"),
        (np.array([1.0]), "returned array"),
        ([1.0], r"returned \[1.0\] as its reward"),
        (10**400, "returned 1000"),
        ({}, "a mapping without parts"),
        ({"a": math.nan}, "returned nan as its part 'a'"),
        ({1: 1.0}, "parts are a mapping from names to numbers"),
        (RewardResult(math.nan), "returned nan as its reward"),
        (RewardResult(1.0, {"a": None}), "returned None as its part 'a'"),  # type: ignore[dict-item]
        (RewardResult(1.0, note=3), "a note is text"),  # type: ignore[arg-type]
    ],
)
async def test_anything_else_is_an_error_that_names_function_and_sample(value: Any, message: str):
    with pytest.raises(UserFunctionError, match=message) as caught:
        await call_reward(answering(value), SAMPLE)
    assert str(caught.value).startswith("reward function reward on sample g0-s0")


def test_a_reward_is_written_into_the_sample():
    scored = apply_reward(SAMPLE, RewardResult(0.5, {"a": 0.5}, "half right"))
    assert (scored.reward, scored.rewards, scored.metadata) == (
        0.5,
        {"a": 0.5},
        {"answer": "2", "reward_note": "half right"},
    )
    assert "reward_note" not in apply_reward(SAMPLE, RewardResult(1.0)).metadata


# --- calling ---


class CallableReward:
    async def __call__(self, sample: Sample) -> float:
        return float(threading.current_thread() is threading.main_thread())


async def weighted(sample: Sample, *, weight: float) -> float:
    return weight * (threading.current_thread() is threading.main_thread())


def in_main_thread(sample: Sample) -> float:
    return float(threading.current_thread() is threading.main_thread())


@pytest.mark.parametrize(
    ("function", "reward"),
    [
        (in_main_thread, 0.0),
        (functools.partial(weighted, weight=2.0), 2.0),
        (CallableReward(), 1.0),
        (lambda sample: weighted(sample, weight=3.0), 3.0),
    ],
    ids=["sync", "partial", "object", "sync that returns an awaitable"],
)
async def test_async_functions_run_where_they_are_and_others_in_a_thread(function: Any, reward: float):
    assert (await call_reward(function, SAMPLE)).reward == reward


async def test_an_exception_inside_a_nursery_is_named_itself_and_kept_as_the_cause():
    async def reward(sample: Sample) -> float:
        async with trio.open_nursery():
            raise KeyError("solution")

    with pytest.raises(UserFunctionError, match="on sample g0-s0 raised KeyError: 'solution'") as caught:
        await call_reward(reward, SAMPLE)
    assert isinstance(caught.value.__cause__, KeyError)


async def test_a_reward_that_takes_too_long_is_a_timeout_and_not_a_reward(autojump_clock):
    async def slow(sample: Sample) -> float:
        await trio.sleep(31)
        return 1.0

    assert (await call_reward(slow, SAMPLE, timeout_s=32)).reward == 1.0
    with pytest.raises(RewardTimeout, match="reward function slow on sample g0-s0 took longer than 30 s"):
        await call_reward(slow, SAMPLE, timeout_s=30)


# --- groups ---


async def test_a_group_reward_gives_one_reward_per_sample():
    async def ranks(samples) -> Any:
        return np.arange(len(samples)) / 2

    results = await call_group_reward(ranks, [SAMPLE, SAMPLE, SAMPLE])
    assert [result.reward for result in results] == [0.0, 0.5, 1.0]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1.0], r"returned \[1.0\]; it must return 2 rewards, one per sample"),
        (1.0, "it must return 2 rewards"),
        ({"a": 1.0, "b": 2.0}, "it must return 2 rewards"),
        ("ab", "it must return 2 rewards"),
        ([1.0, None], "on the group of sample g0-s0, reward 1 returned None"),
    ],
)
async def test_a_group_reward_of_another_shape_is_refused(value: Any, message: str):
    with pytest.raises(UserFunctionError, match=message):
        await call_group_reward(answering(value), [SAMPLE, SAMPLE])


@pytest.mark.parametrize(
    ("value", "decision"),
    [
        (True, FilterDecision(True)),
        (np.bool_(True), FilterDecision(True)),
        (False, FilterDecision(False, "reward")),
        (FilterDecision(False), FilterDecision(False, "reward")),
        (FilterDecision(False, "too_easy", "all right"), FilterDecision(False, "too_easy", "all right")),
        (FilterDecision(True), FilterDecision(True)),
    ],
)
async def test_a_drop_always_has_a_reason(value: Any, decision: FilterDecision):
    assert await call_filter(answering(value), GROUP) == decision


@pytest.mark.parametrize(
    "value",
    [
        *(None, 1, "yes", 0.5),
        *(FilterDecision("no"), FilterDecision(False, 3)),  # type: ignore[arg-type]
        FilterDecision(False, detail=None),  # type: ignore[arg-type]
    ],
)
async def test_a_filter_answers_yes_or_no(value: Any):
    with pytest.raises(
        UserFunctionError,
        match=r"filter reward on group 3 \(prompt row-7\) returned .* True, False or a FilterDecision",
    ):
        await call_filter(answering(value), GROUP)


# --- generate ---


def generating(value: Any):
    async def generate(sample: Sample, engine, sampling) -> Any:
        if isinstance(value, Exception):
            raise value
        return value

    return generate


async def test_segments_carry_the_id_of_their_sample():
    own = Sample(id="mine", prompt="x", status=Status.COMPLETED)
    pending = Sample(id="g4-s1", prompt="x", group_index=4)
    (single,) = await call_generate(generating(own), pending, ScriptedEngine(), SAMPLING)
    assert (single.id, single.group_index) == ("g4-s1", 4)
    segments = await call_generate(generating([own, own, own]), pending, ScriptedEngine(), SAMPLING)
    assert [segment.id for segment in segments] == ["g4-s1", "g4-s1.1", "g4-s1.2"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "returned None; it must return a Sample or a sequence of Samples"),
        ([], r"returned \[\]"),
        ([SAMPLE, "text"], "it must return a Sample"),
        (Sample(id="x", prompt="x"), "status is still pending"),
        (ValueError("oops"), "generate function generate on sample g0-s0 raised ValueError: oops"),
    ],
)
async def test_a_generate_function_returns_finished_samples(value: Any, message: str):
    with pytest.raises(UserFunctionError, match=message):
        await call_generate(generating(value), SAMPLE, ScriptedEngine(), SAMPLING)


@pytest.mark.parametrize(
    ("raised", "seen"),
    [
        (EngineClosed("gone"), EngineClosed),
        (DataError("bad row"), DataError),
        (ExceptionGroup("nursery", [EngineError("down")]), EngineError),
        (ExceptionGroup("nursery", [EngineError("down"), EngineError("too")]), UserFunctionError),
    ],
)
async def test_errors_of_engine_and_data_keep_their_type(raised: Exception, seen: type[Exception]):
    with pytest.raises(seen):
        await call_generate(generating(raised), SAMPLE, ScriptedEngine(), SAMPLING)


async def test_hung_calls_do_not_keep_the_places_of_others():
    let_go = threading.Event()

    def hang(sample: Sample) -> float:
        let_go.wait(30)
        return 1.0

    limiter = trio.CapacityLimiter(2)
    sample = Sample(id="s", prompt="p")
    try:
        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:
                for _ in range(5):
                    nursery.start_soon(expect_timeout, hang, sample, limiter)
            assert (await call_reward(lambda sample: 0.5, sample, timeout_s=5, limiter=limiter)).reward == 0.5
    finally:
        let_go.set()


async def expect_timeout(function, sample: Sample, limiter: trio.CapacityLimiter) -> None:
    with pytest.raises(RewardTimeout):
        await call_reward(function, sample, timeout_s=0.05, limiter=limiter)


# --- filters have an end ---


async def test_a_filter_that_takes_too_long_is_an_error_that_names_it(autojump_clock):
    async def slow(group: SampleGroup) -> bool:
        await trio.sleep(31)
        return True

    assert (await call_filter(slow, GROUP, timeout_s=32)).keep
    with pytest.raises(
        UserFunctionError, match=r"filter slow on group 3 \(prompt row-7\) took longer than 30 s"
    ) as caught:
        await call_filter(slow, GROUP, timeout_s=30)
    assert not isinstance(caught.value, RewardTimeout)


# --- async functions that block the event loop ---


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Lets seconds pass for who watches the event loop."""
    now = [0.0]
    monkeypatch.setattr(call.time, "perf_counter", lambda: now[0])
    return lambda seconds: now.__setitem__(0, now[0] + seconds)


async def test_async_functions_that_block_the_event_loop_are_named_once(clock: Callable[[float], None]):
    async def generate(sample: Sample, engine: Any, sampling: Any) -> Sample:
        await trio.lowlevel.checkpoint()
        clock(0.2)
        await trio.lowlevel.checkpoint()
        return SAMPLE

    async def ranks(samples: Any) -> list[float]:
        clock(0.3)
        return [1.0]

    async def keep(group: SampleGroup) -> bool:
        clock(0.4)
        return True

    said: list[str] = []
    with watch_blocking(said.append):
        for _ in range(2):
            await call_generate(generate, SAMPLE, ScriptedEngine(), SAMPLING)
            await call_group_reward(ranks, [SAMPLE])
            await call_filter(keep, GROUP)
    assert [sentence[: sentence.index(" in one")] for sentence in said] == [
        "async generate function generate blocked the event loop for 0.20 s",
        "async group reward function ranks blocked the event loop for 0.30 s",
        "async filter keep blocked the event loop for 0.40 s",
    ]


async def test_waiting_and_the_time_of_other_tasks_are_not_blocking(clock: Callable[[float], None]):
    async def waits(sample: Sample) -> float:
        clock(0.09)
        await trio.testing.wait_all_tasks_blocked()
        clock(0.09)
        return 1.0

    async def somebody_else() -> None:
        clock(5.0)

    said: list[str] = []
    with watch_blocking(said.append):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(call_reward, waits, SAMPLE)
            nursery.start_soon(somebody_else)
        await call_reward(lambda sample: clock(5.0) or 1.0, SAMPLE)
    assert said == []


# --- what functions of this process may do ---


class Unprintable:
    def __repr__(self) -> str:
        raise SystemExit("no repr")

    __str__ = __repr__


class Silent(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class OddNumber:
    def __float__(self) -> float:
        raise RuntimeError("can't convert complex")


def raising(error: BaseException):
    async def raises(*arguments: Any) -> Any:
        raise error

    return raises


ENDINGS = [
    SystemExit(3),
    GeneratorExit(),
    BaseExceptionGroup("two", [SystemExit(1), KeyError("a")]),
    Silent(),
]


@pytest.mark.parametrize("error", ENDINGS, ids=lambda error: type(error).__name__)
async def test_a_function_that_wants_to_end_the_run_fails_its_own_sample(error: BaseException):
    function = raising(error)
    for called, what in (
        (lambda: call_reward(function, SAMPLE), "reward function raises on sample g0-s0 raised"),
        (lambda: call_group_reward(function, [SAMPLE]), "raises on the group of sample g0-s0 raised"),
        (lambda: call_filter(function, GROUP), "filter raises on group 3"),
        (lambda: call_generate(function, SAMPLE, ScriptedEngine(), SAMPLING), "generate function raises on"),
    ):
        with pytest.raises(UserFunctionError, match=what):
            await called()


async def test_ctrl_c_is_nobodys_failure():
    with pytest.raises(KeyboardInterrupt):
        await call_reward(raising(KeyboardInterrupt()), SAMPLE)


async def test_cancellation_inside_a_group_of_errors_passes_through(autojump_clock):
    async def reward(sample: Sample) -> float:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            try:
                await trio.sleep_forever()
            finally:
                raise KeyError("while it was cancelled")

    with trio.move_on_after(1) as scope:
        await call_reward(reward, SAMPLE)
    assert scope.cancelled_caught


async def test_a_reward_that_ignores_its_deadline_and_answers_is_late_all_the_same(autojump_clock):
    async def stubborn(sample: Sample) -> float:
        with contextlib.suppress(trio.Cancelled):
            await trio.sleep_forever()
        return 1.0

    with pytest.raises(RewardTimeout, match="reward function stubborn on sample g0-s0 took longer than 2 s"):
        await call_reward(stubborn, SAMPLE, timeout_s=2)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Unprintable(), r"returned a Unprintable \(its repr cannot be had: SystemExit\) as its reward"),
        (OddNumber(), "returned .* as its reward; it must be a finite number"),
        ({"a": 1e308, "b": 1e308}, "returned parts whose sum is not finite"),
        ({"a\ud800": 1.0}, "returned the name of a part .* with half a surrogate pair at character 1"),
        (RewardResult(1.0, {}, "\ud800"), "returned the note .* with half a surrogate pair at character 0"),
    ],
)
def test_answers_that_cannot_be_read_or_written_are_refused(value: Any, message: str):
    with pytest.raises(UserFunctionError, match=f"^f {message}"):
        check_reward(value, "f")


def test_a_long_note_is_cut_and_says_so():
    note = check_reward(RewardResult(1.0, {}, "x" * 10_001), "f").note
    assert note == "x" * 10_000 + " … (cut: the note had 10001 characters)"
    assert check_reward(RewardResult(1.0, {}, "x" * 10_000), "f").note == "x" * 10_000


def raise_in_the_middle():
    yield 1.0
    raise ValueError("oops")


@pytest.mark.parametrize(
    "value",
    [itertools.repeat(1.0), raise_in_the_middle(), {1.0}, iter([1.0])],
    ids=["endless", "raising", "set", "iterator"],
)
def test_group_rewards_without_number_or_order_are_refused_and_not_waited_for(value: Any):
    with pytest.raises(UserFunctionError, match="it must return 1 rewards, one per sample"):
        check_group_rewards(value, 1, "f")


def test_samples_of_a_trial_call_share_nothing_and_keep_our_names():
    first, second = make_trial_samples([{"prompt": "q", "x": {"y": 1}, "epoch": 7}])
    first.metadata["x"]["y"] = 2
    assert second.metadata == {"x": {"y": 1}, "prompt_id": "row-0", "epoch": 0}
