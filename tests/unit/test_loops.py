"""The loops on fakes, in virtual time: what they log, in which order they wait, when they save and stop."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import numpy as np
import pytest
import trio

from rollouts.config.schema import RLTrainingConfig, SFTTrainingConfig
from rollouts.config.tables import DataSourceConfig, RolloutConfig
from rollouts.data.data_buffer import DataBuffer
from rollouts.data.sft import SFTSample
from rollouts.errors import (
    FleetDown,
    NotEnoughSamples,
    RolloutsError,
    WeightSyncError,
)
from rollouts.generation.async_rollout_manager import AsyncRolloutManager
from rollouts.generation.generate import make_chat_generate
from rollouts.loops.rl import run_rl_training
from rollouts.loops.sft import run_sft_training
from rollouts.loops.steps import EncodeState, StepHooks
from rollouts.loops.stopping import Stop, end_overdue
from rollouts.loops.weight_push import WeightPush, open_weight_push
from rollouts.metrics.contributions import UpdateRecord
from rollouts.metrics.spans import Span
from rollouts.testing.fakes import FakeTokenizer, ScriptedEngine, ScriptedReply, open_fake_backend
from rollouts.types import GenerateRequest, Sample, SamplingParams

DATA = DataSourceConfig(kind="jsonl", path="unused.jsonl")


class MemoryLogger:
    """A MetricsLogger that keeps what it is told."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, int, int, Mapping[str, float]]] = []
        self.samples: list[tuple[str, int, int]] = []
        self.updates: list[tuple[str, int, UpdateRecord]] = []
        self.spans: list[tuple[str, int, Span]] = []

    async def log_step(
        self,
        stage: str,
        step: int,
        policy_version: int,
        metrics: Mapping[str, float],
        *,
        updates: Sequence[UpdateRecord] = (),
        spans: Sequence[Span] = (),
    ) -> None:
        self.steps.append((stage, step, policy_version, metrics))
        self.updates += [(stage, step, update) for update in updates]
        self.spans += [(stage, step, span) for span in spans]

    async def log_samples(
        self, stage: str, step: int, policy_version: int, samples: Sequence[Sample]
    ) -> None:
        self.samples.append((stage, step, len(samples)))

    async def log_evaluation(
        self, stage: str, step: int, policy_version: int, name: str, metrics: Mapping[str, float]
    ) -> None:
        raise AssertionError("loops do not evaluate by themselves")

    async def log_spans(self, stage: str, step: int, policy_version: int, spans: Sequence[Span]) -> None:
        self.spans += [(stage, step, span) for span in spans]


@dataclasses.dataclass
class Diary:
    """Hooks that write down when they were called, and what the manager and the buffer knew then."""

    checkpoint_every: int = 0
    stop_after: int | None = None  # the stop is requested when that step is complete
    fails: Exception | None = None  # raised by an evaluation
    evaluate_s: float = 0.0
    refused: set[int] = dataclasses.field(default_factory=set)  # steps whose first save did not get in place
    live: Sequence[Any] = ()  # objects with state_dict()
    entries: list[tuple[str, int]] = dataclasses.field(default_factory=list)
    states: dict[int, list[Any]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.said: list[str] = []
        self.completed = -1
        self.stop = Stop(say=self.said.append)
        self.hooks = StepHooks(
            stop=self.stop,
            hold_state=self.hold_state,
            save=self.save,
            is_saved=self.is_saved,
            checkpoint_every=self.checkpoint_every,
            evaluate=self.evaluate,
        )

    def hold_state(self) -> EncodeState:
        self.completed += 1
        if self.completed == self.stop_after:
            self.stop.request()
        states = [one.state_dict() for one in self.live]
        return lambda: {"states": states}

    async def evaluate(self, step: int) -> None:
        if self.fails is not None:
            raise self.fails
        await trio.sleep(self.evaluate_s)
        self.entries.append(("evaluate", step))

    async def save(self, step: int, encode: EncodeState) -> None:
        self.entries.append(("save", step))
        self.states[step] = encode()["states"]
        await trio.sleep(0.1)

    async def is_saved(self, step: int) -> bool:
        return step not in self.refused


def sft_samples(count: int) -> list[SFTSample]:
    mask = np.asarray([False, True, True])
    return [SFTSample(np.asarray([row, 1, 2]), mask, row) for row in range(count)]


async def test_sft_logs_every_step_and_trains_the_rows_of_its_step():
    logger, diary = MemoryLogger(), Diary(checkpoint_every=2)
    async with open_fake_backend() as backend:
        config = SFTTrainingConfig(data=DATA, steps=3, batch_size=2, eval_every=1)
        history = await run_sft_training(backend, sft_samples(6), config, logger, hooks=diary.hooks)
    assert [(stage, step, version) for stage, step, version, _ in logger.steps] == [
        ("sft", 1, 0),
        ("sft", 2, 1),
        ("sft", 3, 2),
    ]
    assert [row["loss/total"] for row in history] == [1.0, 0.5, pytest.approx(1 / 3)]
    rows = [int(tokens[0]) for batch in backend.batches for tokens in batch.tokens]
    assert sorted(rows) == list(range(6)), "an epoch has every row once"
    assert diary.entries == [("evaluate", 1), ("save", 2), ("evaluate", 2), ("save", 3)]


async def test_sft_goes_on_after_the_completed_steps_with_the_rows_it_would_have_had():
    config = SFTTrainingConfig(data=DATA, steps=4, batch_size=2)
    async with open_fake_backend() as whole, open_fake_backend() as rest:
        await run_sft_training(whole, sft_samples(5), config, MemoryLogger(), seed=3)
        await run_sft_training(rest, sft_samples(5), config, MemoryLogger(), seed=3, completed_steps=2)
    first = [[tokens.tolist() for tokens in batch.tokens] for batch in whole.batches]
    assert [[tokens.tolist() for tokens in batch.tokens] for batch in rest.batches] == first[2:]


def rl_config(**changes: object) -> RLTrainingConfig:
    rollout = RolloutConfig(num_prompts=2, samples_per_prompt=2, max_new_tokens=8)
    return RLTrainingConfig.model_validate({"data": DATA, "steps": 3, "rollout": rollout, **changes})


async def first_is_right(sample: Sample) -> float:
    return float(sample.id.endswith("s000"))


def make_manager(
    engine: ScriptedEngine, buffer: DataBuffer, config: RLTrainingConfig, version, reward=first_is_right
) -> AsyncRolloutManager:
    return AsyncRolloutManager(
        buffer,
        engine,
        generate=make_chat_generate(FakeTokenizer()),
        config=config.rollout,
        reward=reward,
        filters=(),
        sampling=SamplingParams(max_new_tokens=8, stop_token_ids=(257,)),
        seed=0,
        policy_version=version,
        max_staleness=config.max_staleness,
    )


@dataclasses.dataclass
class RLRun:
    """A run of the RL loop on fakes, whose step takes 3 * step_s."""

    changes: dict[str, Any] = dataclasses.field(default_factory=dict)
    diary: Diary = dataclasses.field(default_factory=Diary)
    reward: Any = None
    script: Any = None
    sync: Callable[..., Awaitable[Mapping[str, float]]] | None = None
    step_s: float = 0.0
    stop_at_s: float | None = None
    logger: MemoryLogger = dataclasses.field(default_factory=MemoryLogger)

    async def run(self) -> list[dict[str, float]]:
        self.engine = engine = ScriptedEngine(*([self.script] if self.script else []))
        self.buffer = DataBuffer([{"prompt": str(n)} for n in range(60)], seed=0)
        config = rl_config(**self.changes)
        history: list[dict[str, float]] = []
        failure: RolloutsError | None = None

        async def update(backend: Any, engines: Sequence[Any], version: int, **options: Any) -> Any:
            assert backend.weight_version == version, "the trainer has the weights that are sent"
            metrics = await self.sync(version, **options) if self.sync else {}
            engines[0].set_version(version)
            return metrics

        async with open_fake_backend(step_s=self.step_s) as self.backend, trio.open_nursery() as nursery:
            self.manager = make_manager(
                engine,
                self.buffer,
                config,
                lambda: self.backend.weight_version,
                self.reward or first_is_right,
            )
            self.diary.live = self.buffer, self.manager
            if self.stop_at_s is not None:
                nursery.start_soon(request_at, self.diary.stop, trio.current_time() + self.stop_at_s)
            try:
                history = await run_rl_training(
                    self.backend, self.buffer, self.manager, [engine], config, self.logger,
                    sync_weights=update, hooks=self.diary.hooks,
                )  # fmt: skip
            except RolloutsError as error:
                failure = error  # raised below, outside the nursery, which would wrap it in a group
            nursery.cancel_scope.cancel()
        assert engine.in_flight == 0
        if failure is not None:
            raise failure
        return history

    def check_complete(self, step: int) -> None:
        """Every prompt drawn when `step` was saved was trained by then, or is in that state."""
        buffer, manager = self.diary.states[step]
        there = sum(len(manager[name]) for name in ("held", "unfinished", "in_flight")) + len(
            buffer["returned"]
        )
        assert manager["ledger"]["trained"] == 2 * step and buffer["cursor"] == 2 * step + there


async def request_at(stop: Stop, when: float) -> None:
    await trio.sleep_until(when)
    stop.request()


async def test_rl_trains_syncs_and_logs_once_per_step(autojump_clock):
    synced: list[int] = []

    async def sync(version: int) -> dict[str, float]:
        synced.append(version)
        return {"weight_sync/made_up": 1.0}

    run = RLRun({"updates_per_batch": 2, "eval_every": 2}, sync=sync, step_s=10.0)
    history = await run.run()
    assert [(step, version) for _, step, version, _ in run.logger.steps] == [(1, 0), (2, 1), (3, 2)]
    assert synced == [1, 2, 3]
    assert len(run.backend.batches) == 6, "each batch is used updates_per_batch times"
    assert [size for _, _, size in run.logger.samples] == [4, 4, 4], "the trained samples; none failed"
    assert run.diary.entries == [("evaluate", 2), ("save", 3)]
    row = history[0]
    assert (row["reward/mean"], row["off_policy/max"], row["weight_sync/made_up"]) == (0.5, 0.0, 1.0)
    advantages = run.backend.batches[0].advantages
    assert advantages is not None
    np.testing.assert_allclose(
        np.unique(np.concatenate(advantages)), [-0.70710578, 0.0, 0.70710578], atol=1e-5
    )


@pytest.mark.parametrize(("checkpoint_every", "saved"), [(0, [("save", 2)]), (1, [("save", 1), ("save", 2)])])
async def test_a_run_whose_rewards_keep_failing_stops_with_its_complete_steps_saved(
    autojump_clock, checkpoint_every, saved
):
    asked = 0

    async def reward(sample: Sample) -> float:
        nonlocal asked
        asked += 1
        if asked > 8:  # from the third step on
            raise RuntimeError("the grader is gone")
        return float(sample.id.endswith("s000"))

    run = RLRun(diary=Diary(checkpoint_every), reward=reward)
    with pytest.raises(NotEnoughSamples, match="the grader is gone"):
        await run.run()
    assert run.diary.entries == saved
    assert run.logger.samples[-1][1] == 3 and run.logger.samples[-1][2] > 0, "what failed is in the record"
    run.check_complete(2)


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("error", [WeightSyncError("a keeps the old weights"), FleetDown("nobody serves")])
async def test_a_step_whose_weights_reach_no_engine_is_logged_and_saved_before_the_run_stops(
    autojump_clock, error: RolloutsError, staleness: int
):
    async def sync(version: int, *, released: trio.Event | None = None) -> dict[str, float]:
        if version == 2:
            raise error
        return {}

    run = RLRun({"max_staleness": staleness, "steps": 9}, sync=sync, step_s=1.0)
    with pytest.raises(type(error), match=str(error)):
        await run.run()
    assert len(run.backend.batches) == 2, "nothing trains after it"
    assert run.diary.entries == [("save", 2)]
    assert [row[1] for row in run.logger.steps] == [1, 2]
    run.check_complete(2)


# --- stopping -----------------------------------------------------------------------------------------------


async def run_sft(
    diary: Diary, at_s: float, *, step_s: float, micro_batch_s: float = 0.0, **changes: object
) -> int:
    """The steps of an SFT run that was asked to stop. forward_backward and optim_step take step_s each."""
    config = SFTTrainingConfig.model_validate({"data": DATA, "steps": 9, "batch_size": 2, **changes})
    steps: list[int] = []
    async with (
        open_fake_backend(step_s=step_s, micro_batch_s=micro_batch_s) as backend,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(request_at, diary.stop, trio.current_time() + at_s)
        history = await run_sft_training(backend, sft_samples(6), config, MemoryLogger(), hooks=diary.hooks)
        steps.append(len(history))
        nursery.cancel_scope.cancel()
    return steps[0]


@pytest.mark.parametrize(
    ("at_s", "changes", "diary", "steps", "entries"),
    [
        (10, {}, Diary(), 0, []),  # the first step is cut: there is nothing to save
        (70, {}, Diary(), 1, [("save", 1)]),  # the second step is cut
        (70, {}, Diary(checkpoint_every=1), 1, [("save", 1)]),  # and the first is saved already
        (70, {}, Diary(checkpoint_every=1, refused={1}), 1, [("save", 1), ("save", 1)]),
        (100, {}, Diary(), 2, [("save", 2)]),  # in its optimizer step, which leaves nothing to compute
        (70, {"eval_every": 1}, Diary(evaluate_s=50), 1, [("save", 1)]),  # the evaluation is cut
        (500, {"steps": 2}, Diary(), 2, [("save", 2)]),
    ],
)
async def test_a_stop_cuts_what_is_under_way_and_saves_the_last_complete_step(
    autojump_clock, at_s, changes, diary, steps, entries
):
    began = trio.current_time()
    assert await run_sft(diary, at_s, step_s=30, micro_batch_s=3, **changes) == steps
    assert diary.entries == entries
    if at_s == 70:
        assert trio.current_time() - began <= 73.2, "a micro-batch and a save after the signal"


async def test_a_batch_in_the_making_is_given_back_and_the_step_before_is_saved_as_it_was(autojump_clock):
    def script(request: GenerateRequest) -> ScriptedReply:
        return ScriptedReply(token_s=0.5 if request.request_id < "g00000002" else 1000.0)

    for staleness in (0, 1):
        run = RLRun({"steps": 9, "max_staleness": staleness}, script=script, stop_at_s=30)
        assert len(await run.run()) == 1
        assert run.diary.entries == [("save", 1)]
        run.check_complete(1)


async def test_an_update_of_engines_that_hangs_is_cut_and_its_step_is_complete(autojump_clock):
    async def sync(version: int) -> dict[str, float]:
        await trio.sleep_forever()
        return {}

    run = RLRun(sync=sync, step_s=1.0, stop_at_s=100)
    assert len(await run.run()) == 1
    assert run.diary.entries == [("save", 1)] and len(run.logger.steps) == 1


async def test_a_step_cut_between_two_of_its_updates_is_not_saved_and_that_is_said(autojump_clock):
    run = RLRun({"updates_per_batch": 3}, step_s=10.0, stop_at_s=15)
    assert await run.run() == []
    assert run.diary.entries == []
    run = RLRun({"updates_per_batch": 3}, step_s=10.0, stop_at_s=85)  # the first step ends at 70 s
    assert len(await run.run()) == 1
    assert run.diary.entries == []
    assert run.diary.said == [
        (
            "step 1 is not saved, because updates of step 2 have been applied already; the newest complete"
            " checkpoint counts"
        )
    ]


async def test_scopes_are_cancelled_from_the_inside_and_a_completing_block_ends_first(autojump_clock):
    stop, order = Stop(), list[str]()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(request_at, stop, trio.current_time() + 3)
        with stop.scope() as outer:
            with stop.completing():
                with stop.scope() as inner:
                    await trio.sleep_forever()
                await trio.sleep(5)
                order.append("completed")
            await trio.sleep_forever()
    assert inner.cancelled_caught and outer.cancelled_caught and order == ["completed"]
    assert trio.current_time() == 8


async def test_what_hangs_is_ended_before_the_deadline_and_other_ranks_are_told(autojump_clock):
    stop, events = Stop(), list[tuple[str, float]]()

    async def tell() -> None:
        events.append(("told", trio.current_time()))
        await trio.sleep_forever()

    stop.tell_others = tell
    async with trio.open_nursery() as nursery:
        nursery.start_soon(
            lambda: end_overdue(stop, end_process=lambda: events.append(("ended", trio.current_time())))
        )
        stop.request()
    assert events == [("told", 22.0), ("ended", 24.0)]


# --- WeightPush ---------------------------------------------------------------------------------------------


class Updates:
    """Updates that take hold_s of the trainer and load_s more. `failures`: of a version, after seconds."""

    def __init__(self, *, hold_s: float = 1.0, load_s: float = 9.0) -> None:
        self.hold_s, self.load_s = hold_s, load_s
        self.failures: dict[int, tuple[float, Exception]] = {}
        self.events: list[tuple[str, int, float]] = []
        self.overlaps = True

    async def __call__(self, version: int, *, released: trio.Event | None = None) -> Mapping[str, float]:
        began = trio.current_time()
        self.events.append(("begins", version, began))
        after_s, error = self.failures.get(version, (math.inf, None))
        with trio.move_on_at(began + after_s):
            await trio.sleep(self.hold_s)
            if released is not None:
                released.set()
            await trio.sleep(self.load_s)
        if error is not None:
            raise error
        return {f"updated/{version}": 1.0}

    def engines_updated(self, version: int) -> None:
        self.events.append(("engines have", version, trio.current_time()))

    def open(self) -> AbstractAsyncContextManager[WeightPush]:
        return open_weight_push(self, self, rl_config(steps=9), Stop())


async def test_an_update_goes_on_beside_training_and_the_next_one_waits_for_it(autojump_clock):
    updates = Updates()
    async with updates.open() as push:
        await push.send(1)
        assert trio.current_time() == 1 and push.take_metrics() == {}
        await push.send(2)
        assert trio.current_time() == 11, "10 s of the first, and 1 s of its own"
        assert push.take_metrics() == {"updated/1": 1.0}
        await push.send(9)
        assert trio.current_time() == 30, "the last one is waited for"
        assert push.take_metrics() == {"updated/2": 1.0, "updated/9": 1.0}
        await push.send(1)
    assert [event[:2] for event in updates.events[-3:]] == [
        ("begins", 9),
        ("engines have", 9),
        ("begins", 1),
    ], "leaving cancels an update in flight"


async def test_a_failure_cancels_what_is_guarded_and_is_raised_once_by_whoever_asks_next(autojump_clock):
    updates = Updates()
    updates.failures = {1: (5, FleetDown("nobody serves")), 2: (5, WeightSyncError("late"))}
    async with updates.open() as push:
        await push.send(1)
        with pytest.raises(FleetDown, match="nobody serves"), push.guarding():
            await trio.sleep_forever()
        assert trio.current_time() == 5
        await push.send(2)
        with push.guarding(), trio.CancelScope(shield=True):
            await trio.sleep(10)  # a batch that has left the manager is trained on
        await push.send(3)
        assert updates.events[-1][1] == 2, "none is begun after a failure that nobody has heard of"
        with pytest.raises(WeightSyncError, match="late"):
            await push.wait()
        with pytest.raises(KeyError, match="own"), push.guarding():
            raise KeyError("own")
