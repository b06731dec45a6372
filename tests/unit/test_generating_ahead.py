"""AsyncRolloutManager.generating: what goes on while the caller trains, how old it may become, and
where everything is whatever ends it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
import trio
import trio.testing

from rollouts.config.tables import RolloutConfig
from rollouts.data.data_buffer import DataBuffer
from rollouts.errors import (
    EngineClosed,
    EngineError,
    FleetDown,
    UserFunctionError,
)
from rollouts.generation.async_rollout_manager import AsyncRolloutManager
from rollouts.generation.generate import make_chat_generate
from rollouts.generation.group import MAX_STARTS
from rollouts.testing.fakes import FAKE_END, FakeTokenizer, ScriptedEngine, ScriptedReply
from rollouts.types import (
    FilterDecision,
    GenerateRequest,
    RolloutBatch,
    Sample,
    SampleGroup,
    SamplingParams,
    metric_values,
)
from tests.sim.simulator import RecordingBuffer

SAMPLING = SamplingParams(max_new_tokens=8, stop_token_ids=(FAKE_END,))
ROWS = [{"prompt": f"question {index}"} for index in range(40)]
STREAM = [prompt.key for prompt in DataBuffer(ROWS, seed=0).get_prompts(120)]
Script = Callable[[GenerateRequest], ScriptedReply]


def group_of(request_id: str) -> int:
    return int(request_id[1:9])


async def index_reward(sample: Sample) -> float:
    return float(sample.id[11:14])


def go_on(text: str, *, token_s: float) -> Script:
    """One answer, wherever it was cut."""
    return lambda request: ScriptedReply(
        text=text[int(request.request_id.partition("@")[2] or 0) :], token_s=token_s
    )


seconds_each = go_on("ab", token_s=1.0)  # two letters and an end: three tokens


@dataclasses.dataclass
class Run:
    """A manager with its parts, and the trainer's version."""

    manager: AsyncRolloutManager
    buffer: DataBuffer
    recorder: RecordingBuffer
    engine: ScriptedEngine
    version: list[int]

    async def take(self) -> list[int]:
        """The groups of the next batch, after which the trainer's version is one more: nothing takes time."""
        batch = await self.manager.generate_batch()
        self.version[0] += 1
        return groups_of(batch)

    def update(self, version: int) -> None:
        self.engine.set_version(version)
        self.manager.engines_updated(version)

    def count(self, name: str) -> float:
        return self.manager.statistics().get(name, 0.0)

    def check_balance(self) -> None:
        """Every group is in one place, and every prompt that the buffer has not got is that of a group that
        has one.
        """
        counts = self.manager.statistics()
        dropped = sum(count for name, count in counts.items() if name.startswith("dropped/"))
        failed = sum(count for name, count in counts.items() if name.startswith("failed/"))
        assert counts["drawn"] == counts["trained"] + counts["held"] + counts["in_flight"] + dropped + failed
        returned = sum(
            counts.get(name, 0)
            for name in ("dropped/surplus", "dropped/aborted", "dropped/stale", "failed/infrastructure")
        )
        assert len(self.recorder.out) == counts["drawn"] - returned

    def held_prompts(self) -> list[tuple[int, str]]:
        state = self.manager.state_dict()
        return [(one["epoch"], one["prompt_id"]) for one in [*state["held"], *state["unfinished"]]]

    def check_prompts(self, trained: list[tuple[int, str]]) -> None:
        """Trained, held, or still to come: every prompt of the stream is in one place. For runs whose filters
        drop nothing, between draws.
        """
        everywhere = [*trained, *self.held_prompts(), *keys_upcoming(self.buffer, 30)]
        assert sorted(everywhere) == sorted(STREAM[: len(everywhere)])


def make_run(
    script: Script | None = None,
    *,
    num_prompts: int = 2,
    samples_per_prompt: int = 1,
    max_staleness: int = 1,
    reward: Any = index_reward,
    state: str | None = None,
    engine: ScriptedEngine | None = None,
    version: int = 0,
    **options: Any,
) -> Run:
    """`state`: JSON of buffer and manager to go on from."""
    of_config = {
        name: options.pop(name)
        for name in list(options)
        if name in RolloutConfig.model_fields and name != "filters"
    }
    of_config = {
        "num_prompts": num_prompts,
        "samples_per_prompt": samples_per_prompt,
        "over_sampling": 1.0,
    } | of_config
    config = RolloutConfig.model_validate(of_config)
    engine, trainer = engine or ScriptedEngine(script or seconds_each), [version]
    buffer = DataBuffer(ROWS, seed=0)
    recorder = RecordingBuffer(buffer, set())
    settings = {
        "sampling": SAMPLING,
        "seed": 1,
        "policy_version": lambda: trainer[0],
        "max_staleness": max_staleness,
    } | options
    generate = settings.pop("generate", make_chat_generate(FakeTokenizer()))
    manager = AsyncRolloutManager(
        recorder, engine, generate=generate, config=config, reward=reward, **settings
    )
    if state is not None:
        of_buffer, of_manager = json.loads(state)
        buffer.load_state_dict(of_buffer)
        recorder.out |= set(STREAM) - set(keys_upcoming(buffer, len(STREAM)))
        manager.load_state_dict(of_manager)
    return Run(manager, buffer, recorder, engine, trainer)


def keys_upcoming(buffer: DataBuffer, count: int) -> list[tuple[int, str]]:
    other = DataBuffer(ROWS, seed=0)
    other.load_state_dict(buffer.state_dict())
    return [prompt.key for prompt in other.get_prompts(count)]


def groups_of(batch: RolloutBatch) -> list[int]:
    assert batch.group_indices is not None
    return list(dict.fromkeys(batch.group_indices.tolist()))


def prompts_of(batch: RolloutBatch) -> list[tuple[int, str]]:
    return list(dict.fromkeys((row["epoch"], row["prompt_id"]) for row in batch.metadata))


def lags_of(batch: RolloutBatch, version: int) -> list[int]:
    assert batch.weight_versions is not None
    return [
        version - int(versions[mask].min())
        for versions, mask in zip(batch.weight_versions, batch.loss_masks, strict=True)
        if mask.any()
    ]


# --- when generation goes on --------------------------------------------------------------------------------


async def test_generation_goes_on_while_the_caller_trains(autojump_clock):
    run = make_run()
    async with run.manager.generating():
        assert await run.take() == [0, 1]
        assert trio.current_time() == 3
        await trio.sleep(100)
        assert len(run.engine.requests) == 4, "W = 2 * (0 + 1 - 1 + 1) groups may be open"
        began = trio.current_time()
        assert await run.take() == [2, 3]
        assert trio.current_time() == began, "they were there"
        await trio.sleep(100)
        assert len(run.engine.requests) == 4, (
            "engines at version 0 are too far behind for a batch that is consumed at version 2"
        )
        run.update(1)
        await trio.sleep(3)
        assert len(run.engine.requests) == 6
        assert await run.take() == [4, 5]


def keep_all_but(*groups: int):
    async def chosen(group: SampleGroup) -> FilterDecision:
        return FilterDecision(group.group_index not in groups, "not_chosen")

    return chosen


async def test_an_unfinished_answer_that_others_overtake_is_waited_for_in_the_last_batch_that_can_have_it(
    autojump_clock,
):
    """Group 0 takes 31 s, the others 3 s. s = 1 lets it miss batch 0 and no other."""
    run = make_run(
        lambda request: (
            ScriptedReply(text="ab", token_s=1.0)
            if group_of(request.request_id)
            else ScriptedReply("abcdef", 31 / 7)
        )
    )
    async with run.manager.generating():
        assert 0 not in await run.take()
        run.update(1)
        batch = await run.manager.generate_batch()
        assert 0 in groups_of(batch) and max(lags_of(batch, 1)) == 1


# --- the end of the block -----------------------------------------------------------------------------------


class OwnError(Exception):
    """Of the body."""


async def leave_by_cancellation(run: Run) -> None:
    with trio.move_on_after(4.5) as scope:
        async with run.manager.generating():
            await run.take()
            await trio.sleep_forever()
    assert scope.cancelled_caught


async def leave_by_an_error(run: Run) -> None:
    async def work() -> None:
        async with run.manager.generating():
            await run.take()
            await trio.sleep(1.5)
            raise OwnError

    with pytest.raises(OwnError):
        await work()


async def leave_by_an_error_that_cuts_a_call(run: Run) -> None:
    async def fail() -> None:
        await trio.sleep(4.5)
        raise OwnError

    async def work() -> None:
        async with run.manager.generating(), trio.open_nursery() as nursery:
            nursery.start_soon(fail)
            while True:
                await run.take()

    with pytest.raises(ExceptionGroup) as caught:
        await work()
    assert [type(error) for error in caught.value.exceptions] == [OwnError], (
        "the group is that of the nursery inside"
    )


async def leave_normally(run: Run) -> None:
    async with run.manager.generating():
        await run.take()
        await trio.sleep(1.5)


@pytest.mark.parametrize(
    "leave",
    [leave_by_cancellation, leave_by_an_error, leave_by_an_error_that_cuts_a_call, leave_normally],
)
async def test_whatever_ends_the_block_no_prompt_is_lost(autojump_clock, leave: Callable[[Run], Any]):
    run = make_run(max_staleness=3)
    await leave(run)
    assert run.engine.in_flight == 0 and run.count("in_flight") == 0
    run.check_balance()
    cut = (
        {"held": 2.0, "dropped/aborted": 0.0}
        if leave is leave_normally
        else {"held": 0.0, "dropped/aborted": 2.0}
    )
    assert {name: run.count(name) for name in cut} == cut, (
        "what was being generated starts again, unless the block was left normally, which holds it"
    )
    trained = STREAM[: int(run.count("trained"))]
    run.check_prompts(trained)
    batch = await run.manager.generate_batch()  # after the block too
    assert sorted(prompts_of(batch)) == sorted(STREAM[len(trained) : len(trained) + 2])
    run.check_prompts(trained + prompts_of(batch))
    run.check_balance()


async def test_a_call_that_is_cancelled_changes_nothing_and_the_next_one_gets_the_batch(autojump_clock):
    run = make_run()
    async with run.manager.generating():
        with trio.move_on_after(1.5) as scope:
            await run.manager.generate_batch()
        assert scope.cancelled_caught
        assert run.engine.in_flight == 2 and run.count("drawn") == 2
        assert run.manager.batch_metrics() == {}
        assert await run.take() == [0, 1]
        assert trio.current_time() == 3, "nothing began again"
        assert run.manager.batch_metrics() != {}


# --- what fails in the background ---------------------------------------------------------------------------


def fail_in_group(number: int, *, times: int = 1):
    """A filter that raises for the first `times` that it is asked about a group."""
    raised: list[int] = []

    async def filter_(group: SampleGroup) -> bool:
        if group.group_index == number and len(raised) < times:
            raised.append(number)
            raise ZeroDivisionError("a bug")
        return True

    return filter_


async def test_a_filter_that_fails_beside_training_is_raised_by_the_next_call_and_the_one_after_begins_again(
    autojump_clock,
):
    run = make_run(filters=[fail_in_group(2)], max_staleness=2)
    async with run.manager.generating():
        assert await run.take() == [0, 1]
        await trio.sleep(50)
        assert run.engine.in_flight == 0 and run.count("in_flight") == 0, "generation has ended"
        run.check_balance()
        with pytest.raises(UserFunctionError, match="ZeroDivisionError"):
            await run.manager.generate_batch()
        batch = await run.manager.generate_batch()
    run.check_prompts(STREAM[:2] + prompts_of(batch))
    run.check_balance()


@pytest.mark.parametrize("error", [FleetDown("nobody serves"), EngineClosed("gone")])
async def test_engines_that_are_gone_end_generation_and_their_return_begins_it_again(
    autojump_clock, error: EngineError
):
    down = [True]
    run = make_run(
        lambda request: ScriptedReply(
            text="ab", token_s=1.0, error=error if down[0] and group_of(request.request_id) > 1 else None
        )
    )
    async with run.manager.generating():
        await run.take()
        await trio.sleep(20)
        assert run.engine.in_flight == 0
        down[0] = False
        with pytest.raises(type(error)):
            await run.manager.generate_batch()
        run.update(1)
        batch = await run.manager.generate_batch()
        assert sorted(prompts_of(batch)) == sorted(STREAM[2:4])
    run.check_prompts(STREAM[:4])
    run.check_balance()


# --- each batch for itself ----------------------------------------------------------------------------------


async def test_metrics_and_failed_samples_are_those_of_one_batch(autojump_clock):
    async def reward(sample: Sample) -> float:
        if sample.id == "g00000000-s001":
            raise KeyError("gold")
        return float(group_of(sample.id))

    def in_turn(request: GenerateRequest) -> ScriptedReply:
        return ScriptedReply(text="ab", token_s=1 + 0.1 * group_of(request.request_id))

    run = make_run(
        in_turn, samples_per_prompt=3, reward=reward, filters=[keep_all_but(1)], max_failed_fraction=0.3
    )
    async with run.manager.generating():
        assert await run.take() == [0, 2]
        first = metric_values(run.manager.batch_metrics())
        assert [sample.id for sample in run.manager.failed_samples()] == ["g00000000-s001"]
        run.update(1)
        assert await run.take() == [3, 4]
        second = metric_values(run.manager.batch_metrics())
        assert run.manager.failed_samples() == ()
    assert first["fail/reward"] == 1 and "fail/reward" not in second
    assert [name for name in first if "not_chosen" in name] and not [
        name for name in second if "not_chosen" in name
    ]
    assert second["reward/mean"] == 3.5, "of groups 3 and 4"


async def test_a_trainer_that_skips_versions_gets_nothing_stale_and_the_prompts_come_again(autojump_clock):
    run = make_run(num_prompts=1, max_staleness=2)
    async with run.manager.generating():
        batch = await run.manager.generate_batch()
        await trio.sleep(50)
        waiting = run.count("in_flight")
        assert waiting == 2, "W = 1 * (0 + 2 - 1 + 1)"
        run.version[0] = 5
        run.update(5)
        trained = prompts_of(batch)
        for version in (5, 6, 7):
            run.version[0] = version
            batch = await run.manager.generate_batch()
            assert max(lags_of(batch, version)) == version - 5
            trained += prompts_of(batch)
    assert run.count("dropped/stale") == waiting
    assert set(STREAM[1:3]) <= set(trained), "those that were dropped came again"
    run.check_prompts(trained)
    run.check_balance()


# --- saving in the middle -----------------------------------------------------------------------------------


@pytest.mark.parametrize("after_s", [0.0, 1.5, 2.9, 4.0, 50.0])
async def test_a_state_saved_while_all_runs_loses_nothing_and_trains_nothing_twice(
    autojump_clock, after_s: float
):
    run = make_run(
        lambda request: ScriptedReply(text="abcdef"[: 2 + group_of(request.request_id) % 5], token_s=1.0),
        max_staleness=3,
    )
    trained: list[tuple[int, str]] = []
    async with run.manager.generating():
        for version in range(2):
            trained += prompts_of(await run.manager.generate_batch())
            run.version[0] = version + 1
            run.update(version + 1)
        await trio.sleep(after_s)
        state = json.dumps([run.buffer.state_dict(), run.manager.state_dict()])
        await run.manager.generate_batch()  # the run that is saved goes on, and dies
    again = make_run(state=state, max_staleness=3, version=2, engine=ScriptedEngine(seconds_each, version=2))
    assert again.count("in_flight") == 0 and again.count("trained") == 4
    async with again.manager.generating():
        for version in range(2, 6):
            batch = await again.manager.generate_batch()
            assert all(0 <= lag <= 3 for lag in lags_of(batch, version))
            trained += prompts_of(batch)
            again.version[0] = version + 1
            again.update(version + 1)
    assert len(trained) == len(set(trained)) == 12
    again.check_prompts(trained)


# --- random schedules ---------------------------------------------------------------------------------------


# --- an engine that keeps aborting --------------------------------------------------------------------------


@pytest.mark.parametrize(("every_s", "aborts"), [(1.5, 19), (2.5, 9)])
async def test_an_answer_that_is_aborted_again_and_again_is_finished_if_each_time_there_is_more_of_it(
    autojump_clock, every_s: float, aborts: int
):
    """20 tokens of 1 s. Aborts every 1.5 s leave one each, every 2.5 s two each: more often than MAX_STARTS,
    and never in vain.
    """
    run = make_run(
        go_on("abcdefghijklmnopqrs", token_s=1.0),
        num_prompts=1,
        sampling=dataclasses.replace(SAMPLING, max_new_tokens=20),
    )

    async def abort_now_and_then() -> None:
        while True:
            await trio.sleep(every_s)
            told.append(run.engine.in_flight)
            await run.engine.abort_all()

    told: list[int] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(abort_now_and_then)
        async with run.manager.generating():
            batch = await run.manager.generate_batch()
        nursery.cancel_scope.cancel()
    assert [sample.response for sample in batch.samples] == ["abcdefghijklmnopqrs"]
    assert int(batch.loss_masks[0].sum()) == 20 and len(told) >= aborts > MAX_STARTS
