"""Rewards: how user functions are called, and what counts as an answer."""

import contextlib
import itertools
import json
import math
import threading
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing

from rollouts.errors import DataError, EngineClosed, EngineError, RewardTimeout, UserFunctionError
from rollouts.rewards import call
from rollouts.rewards.call import call_filter, call_generate, call_group_reward, call_reward, watch_blocking
from rollouts.rewards.check import apply_reward, check_group_rewards, check_reward
from rollouts.testing.fakes import ScriptedEngine
from rollouts.types import FilterDecision, RewardResult, Sample, SampleGroup, SamplingParams, Status
from tests.support.text_tables import cases, read_cells

SAMPLE = Sample(id="g0-s0", prompt="1+1?", response="2", metadata={"answer": "2"}, status=Status.COMPLETED)
GROUP = SampleGroup(3, "row-7", (SAMPLE,))
ENGINE, NO_SAMPLING = ScriptedEngine(), SamplingParams(max_new_tokens=1)

# each kind of function: how it is called, and how its errors call it when its name is "user"
CALLS = {
    "reward": (partial(call_reward, sample=SAMPLE), "reward function user on sample g0-s0"),
    "group": (
        partial(call_group_reward, samples=[SAMPLE, SAMPLE]),
        "group reward function user on the group of sample g0-s0",
    ),
    "filter": (partial(call_filter, group=GROUP), r"filter user on group 3 \(prompt row-7\)"),
    "generate": (
        partial(call_generate, sample=SAMPLE, engine=ENGINE, sampling=NO_SAMPLING),
        "generate function user on sample g0-s0",
    ),
}


def answering(value, takes_s: float = 0.0):
    """An async function that gives `value`, or raises it."""

    async def user(*arguments):
        await trio.sleep(takes_s)
        if isinstance(value, BaseException):
            raise value
        return value

    return user


# --- what counts as a reward ---


def test_numbers_named_parts_and_results_are_rewards():
    group = check_group_rewards(np.arange(3) / 2, 3, "f")
    assert [*group] == [*map(RewardResult, (0.0, 0.5, 1.0))]
    for one in (1, True, np.float32(1), np.bool_(True), np.array(1.0), Fraction(1)):
        assert check_reward(one, "f") == RewardResult(1.0)
    parts = RewardResult(0.75, {"exact": 1.0, "length": -0.25})
    assert check_reward({"exact": True, "length": -0.25}, "f") == parts
    own = RewardResult(np.float32(0.5), {"a": 2}, "why")
    assert check_reward(own, "f") == RewardResult(0.5, {"a": 2.0}, "why")


class Unprintable:
    def __repr__(self) -> str:
        raise SystemExit("no repr")

    __str__ = __repr__


class OddNumber:
    def __float__(self) -> float:
        raise RuntimeError("can't convert complex")


def raise_in_the_middle():
    yield 1.0
    raise ValueError("oops")


# kind of function | its answer in JSON | what the error says
JSON_ANSWERS = r"""
reward   | NaN                      | returned nan as its reward; it must be a finite number
reward   | Infinity                 | returned inf as its reward
reward   | null                     | returned None as its reward
reward   | "1"                      | returned '1' as its reward
reward   | [1.0]                    | returned \[1.0\] as its reward
reward   | {}                       | returned a mapping without parts
reward   | {"a": NaN}               | returned nan as its part 'a'
reward   | {"": 1.0}                | returned None as its name of a part
reward   | 1e39                     | returned 1e\+39 as its reward; .* at most 3.4e\+38 \(float32\)
reward   | {"a": -1e308}            | returned -1e\+308 as its part 'a'
reward   | {"a": 3e38, "b": 3e38}   | returned 6e\+38 as its sum of its parts
reward   | {"a\ud800": 1.0}         | returned .* as its name of a part, .*surrogates not allowed
group    | [1.0]                    | returned \[1.0\]; it must return 2 rewards, one per sample
group    | 1.0                      | it must return 2 rewards, one per sample
group    | {"a": 1.0, "b": 2.0}     | it must return 2 rewards, one per sample
group    | "ab"                     | it must return 2 rewards, one per sample
group    | [1.0, null]              | reward 1 returned None
group    | [1.0, 1e39]              | reward 1 returned 1e\+39
filter   | null                     | True, False or a FilterDecision
filter   | 1                        | True, False or a FilterDecision
filter   | "yes"                    | True, False or a FilterDecision
filter   | 0.5                      | True, False or a FilterDecision
generate | null                     | returned None; it must return a Sample or a sequence of Samples
generate | []                       | returned \[\]; it must return a Sample or a sequence of Samples
"""
no_count = "it must return 2 rewards, one per sample"
NO_DECISIONS = ("no",), (False, 3), (False, "why", None)
NO_ANSWERS = [
    *((kind, json.loads(value), message) for kind, value, message in read_cells(JSON_ANSWERS)),
    ("reward", np.array([1.0]), "returned array"),
    ("reward", 10**400, "returned 1000"),
    ("reward", {1: 1.0}, "returned 1 as its name of a part, which must be text"),
    ("reward", RewardResult(math.nan), "returned nan as its reward"),
    ("reward", RewardResult(1.0, {"a": None}), "returned None as its part 'a'"),  # type: ignore[dict-item]
    ("reward", RewardResult(1.0, {}, 3), "returned 3 as its note, which must be text"),
    ("reward", RewardResult(1.0, {}, "\ud800"), "returned .* as its note, .*surrogates not allowed"),
    ("reward", Unprintable(), r"returned a Unprintable \(its repr cannot be had: SystemExit\) as its reward"),
    ("reward", OddNumber(), "returned .* as its reward; it must be a finite number"),
    ("group", {1.0, 2.0}, no_count),
    ("group", iter([1.0, 1.0]), no_count),
    ("group", itertools.repeat(1.0), no_count),  # endless
    ("group", raise_in_the_middle(), no_count),
    *(("filter", FilterDecision(*value), "True, False or a FilterDecision") for value in NO_DECISIONS),
    ("generate", [SAMPLE, "text"], "it must return a Sample or a sequence of Samples"),
    ("generate", Sample(id="x", prompt="x"), "status is still pending"),
]


@pytest.mark.parametrize(("kind", "value", "message"), NO_ANSWERS)
async def test_what_is_no_answer_is_an_error_that_names_function_and_sample(kind, value, message):
    ask, where = CALLS[kind]
    with pytest.raises(UserFunctionError, match=f"^{where}.* {message}"):
        await ask(answering(value))


def test_a_reward_is_written_into_the_sample():
    scored = apply_reward(SAMPLE, RewardResult(0.5, {"a": 0.5}, "half right"))
    assert (scored.reward, scored.rewards) == (0.5, {"a": 0.5})
    assert scored.metadata == {"answer": "2", "reward_note": "half right"}
    assert "reward_note" not in apply_reward(SAMPLE, RewardResult(1.0)).metadata


def test_a_long_note_is_cut_and_says_so():
    note = check_reward(RewardResult(1.0, {}, "x" * 10_001), "f").note
    assert note == "x" * 10_000 + " … (cut: the note had 10001 characters)"
    assert check_reward(RewardResult(1.0, {}, "x" * 10_000), "f").note == "x" * 10_000


async def test_a_drop_always_has_a_reason():
    told = FilterDecision(False, "too_easy", "all right")
    for value in (False, FilterDecision(False)):
        assert await call_filter(answering(value), GROUP) == FilterDecision(False, "user")
    for value, decision in ((np.bool_(True), FilterDecision(True)), (told, told)):
        assert await call_filter(answering(value), GROUP) == decision


async def test_segments_carry_the_id_of_their_sample():
    own = Sample(id="mine", prompt="x", status=Status.COMPLETED)
    source = {"source": "easy", "prompt_id": "row-1", "epoch": 2}  # by which a mixture is counted
    pending = Sample(id="g4-s1", prompt="x", group_index=4, metadata={**source, "answer": "5"})
    for value, names in ((own, ["g4-s1"]), ([own] * 3, ["g4-s1", "g4-s1.1", "g4-s1.2"])):
        segments = await call_generate(answering(value), pending, ENGINE, NO_SAMPLING)
        found = [(segment.id, segment.group_index, segment.metadata) for segment in segments]
        assert found == [(name, 4, source) for name in names]


TRAINED = json.loads('{"tokens": [5, 6, 7], "loss_mask": [0, 0, 1], "weight_versions": [-1, -1, 3]}')


@cases(r"""
changed                              | message
{}                                   |
{"loss_mask": [1, 0, 1]}             | loss_mask trains the first token; nothing comes before it
{"tokens": [5, 258, 7]}              | tokens hold the id 258; the model's are 0 to 257
{"rollout_log_probs": [0, 0, 0.5]}   | rollout_log_probs hold \[0.5\] for a token that trains
{"rollout_log_probs": [0, 0, -1e30]} | rollout_log_probs hold .* at least -9000
{"weight_versions": [-1, -1, -1]}    | weight_versions hold \[-1\] .* and the trainer is at 3
{"weight_versions": [-1, -1, 4]}     | weight_versions hold \[4\] .* and the trainer is at 3
""")
async def test_a_generated_sample_that_cannot_train_is_an_error_of_its_function(changed: Any, message):
    fields = TRAINED | changed
    first, second = (Sample(id="a", prompt="x", status=Status.COMPLETED, **one) for one in (TRAINED, fields))
    answer = answering([first, second])
    expected = pytest.raises(UserFunctionError, match=f"^generate function user on sample g0-s0 .*{message}")
    with expected if message else contextlib.nullcontext():
        await call_generate(answer, SAMPLE, ENGINE, NO_SAMPLING, newest_version=lambda: 3)


@pytest.mark.parametrize("left", [{1, 2}, math.nan, 10**5000, object()], ids=["set", "nan", "long", "object"])
async def test_what_a_function_leaves_in_a_sample_and_no_file_can_hold_is_its_error(left):
    meddled = replace(SAMPLE, metadata={})

    def meddle(*arguments):
        meddled.metadata["left"] = left
        return meddled

    message = r"left in sample g0-s0 what cannot be recorded: metadata\.left is"
    with pytest.raises(UserFunctionError, match=message):
        await CALLS["generate"][0](meddle)
    with pytest.raises(UserFunctionError, match=message):
        await call_filter(lambda group: bool(meddle()), SampleGroup(3, "row-7", (meddled,)))
    with pytest.raises(UserFunctionError, match="what cannot be recorded"):
        apply_reward(meddled, RewardResult(1.0))


# --- calling ---


async def weighted(sample: Sample, *, weight: float) -> float:
    return weight * (threading.current_thread() is threading.main_thread())


class CallableReward:
    async def __call__(self, sample: Sample) -> float:
        return await weighted(sample, weight=1.0)


@pytest.mark.parametrize(
    ("function", "reward"),
    [
        (lambda sample: float(threading.current_thread() is threading.main_thread()), 0.0),
        (partial(weighted, weight=2.0), 2.0),
        (CallableReward(), 1.0),
        (lambda sample: weighted(sample, weight=3.0), 3.0),
    ],
    ids=["sync", "partial", "object", "sync that returns an awaitable"],
)
async def test_async_functions_run_where_they_are_and_others_in_a_thread(function, reward):
    assert (await call_reward(function, SAMPLE)).reward == reward


async def test_an_exception_inside_a_nursery_is_named_itself_and_kept_as_the_cause():
    async def reward(sample):
        async with trio.open_nursery():
            raise KeyError("solution")

    with pytest.raises(UserFunctionError, match="on sample g0-s0 raised KeyError: 'solution'") as caught:
        await call_reward(reward, SAMPLE)
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize(
    ("raised", "seen"),
    [
        (EngineClosed("gone"), EngineClosed),
        (DataError("bad row"), DataError),
        (ExceptionGroup("nursery", [EngineError("down")]), EngineError),
        (ExceptionGroup("nursery", [EngineError("down"), EngineError("too")]), UserFunctionError),
    ],
)
async def test_errors_of_engine_and_data_keep_their_type(raised, seen):
    with pytest.raises(seen):
        await CALLS["generate"][0](answering(raised))


class Silent(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


TWO = BaseExceptionGroup("two", [SystemExit(1), KeyError("a")])


@pytest.mark.parametrize(
    "error", [SystemExit(3), GeneratorExit(), TWO, Silent()], ids=lambda error: type(error).__name__
)
@pytest.mark.parametrize("kind", CALLS)
async def test_a_function_that_wants_to_end_the_run_fails_its_own_sample(kind, error):
    ask, where = CALLS[kind]
    with pytest.raises(UserFunctionError, match=f"^{where} raised"):
        await ask(answering(error))


async def test_ctrl_c_is_nobodys_failure():
    with pytest.raises(KeyboardInterrupt):
        await call_reward(answering(KeyboardInterrupt()), SAMPLE)


# --- time ---


@cases("""
kind   | value
reward | 1.0
filter | true
""")
async def test_a_function_that_takes_too_long_has_not_answered(autojump_clock, kind, value: Any):
    ask, where = CALLS[kind]
    slow = answering(value, takes_s=31)
    await ask(slow, timeout_s=32)
    with pytest.raises(UserFunctionError, match=f"{where} took longer than 30 s") as caught:
        await ask(slow, timeout_s=30)
    assert isinstance(caught.value, RewardTimeout) == (kind == "reward")


async def test_a_reward_that_ignores_its_deadline_and_answers_is_late_all_the_same(autojump_clock):
    async def stubborn(sample):
        with contextlib.suppress(trio.Cancelled):
            await trio.sleep_forever()
        return 1.0

    with pytest.raises(RewardTimeout, match="reward function stubborn on sample g0-s0 took longer than 2 s"):
        await call_reward(stubborn, SAMPLE, timeout_s=2)


async def test_cancellation_inside_a_group_of_errors_passes_through(autojump_clock):
    async def reward(sample):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            try:
                await trio.sleep_forever()
            finally:
                raise KeyError("while it was cancelled")

    with trio.move_on_after(1) as scope:
        await call_reward(reward, SAMPLE)
    assert scope.cancelled_caught


async def test_hung_calls_do_not_keep_the_places_of_others(monkeypatch):
    let_go = threading.Event()
    monkeypatch.setattr(call, "USER_THREADS", 2)

    async def expect_timeout():
        with pytest.raises(RewardTimeout):
            await call_reward(lambda sample: let_go.wait(30), SAMPLE, timeout_s=0.05)

    try:
        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                for _ in range(5):
                    nursery.start_soon(expect_timeout)
            assert (await call_reward(lambda sample: 0.5, SAMPLE, timeout_s=15)).reward == 0.5
    finally:
        let_go.set()


# --- async functions that block the event loop ---


@pytest.fixture
def clock(monkeypatch) -> Callable[[float], None]:
    """Lets seconds pass for who watches the event loop."""
    now = [0.0]
    monkeypatch.setattr(call.time, "perf_counter", lambda: sum(now))
    return now.append


async def test_async_functions_that_block_the_event_loop_are_named_once(clock):
    async def user(*arguments):
        await trio.lowlevel.checkpoint()
        clock(0.2)
        await trio.lowlevel.checkpoint()
        return [1.0, 1.0]

    said = []
    with watch_blocking(said.append):
        for kind in ("group", "generate", "group"):
            with contextlib.suppress(UserFunctionError):
                await CALLS[kind][0](user)
    for sentence, kind in zip(said, ("group reward", "generate"), strict=True):
        assert f"async {kind} function user blocked the event loop for 0.20 s in one" in sentence


async def test_waiting_and_the_time_of_other_tasks_are_not_blocking(clock):
    async def waits(sample):
        clock(0.09)
        await trio.testing.wait_all_tasks_blocked()
        clock(0.09)
        return 1.0

    async def somebody_else():
        clock(5.0)

    said = []
    with watch_blocking(said.append):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(call_reward, waits, SAMPLE)
            nursery.start_soon(somebody_else)
        await call_reward(lambda sample: clock(5.0) or 1.0, SAMPLE)
    assert said == []
