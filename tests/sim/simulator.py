"""Random runs of the rollout manager in virtual time, each made of one integer, with its books checked after
every batch.

A schedule draws everything that can go wrong: latencies, engine errors, refused requests, generate, reward
and filter functions that raise, rewards that are not numbers or never come, engines that abort, cancellation
at any moment, a process that dies in the middle of a batch. Whether a sample fails or a group is dropped, and
what it answers, depends on its id alone, so a slow, obvious model can say what a batch must hold, however
often its samples were interrupted. Which of the tasks that wake at the same moment runs first is left to
trio, which shuffles them: every run of a schedule tries another order.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import trio
import trio.testing

from rollouts.config.tables import RolloutConfig
from rollouts.data.data_buffer import DataBuffer, PromptRow
from rollouts.errors import (
    EngineError,
    EngineUnreachable,
    NotEnoughSamples,
    RequestRefused,
    UserFunctionError,
)
from rollouts.generation.async_rollout_manager import AsyncRolloutManager
from rollouts.generation.generate import make_chat_generate
from rollouts.protocols import InferenceEngine
from rollouts.testing.fakes import FAKE_END, FakeTokenizer, ScriptedEngine, ScriptedReply, fake_uniform
from rollouts.types import FilterDecision, GenerateRequest, RolloutBatch, Sample, SampleGroup, SamplingParams

FAULTS = ("engine", "refused", "unreachable", "generate", "reward", "nan", "hang")
TIMEOUT_S = 5.0
MAX_NEW_TOKENS = 3
MOST_VIRTUAL_S = 10_000.0  # far more than any schedule takes; a run that is longer waits for what never comes


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One run, drawn from one integer by draw_schedule."""

    seed: int
    latency_seed: int  # of latencies alone: two schedules that differ in it see the same faults
    rows: int
    config: RolloutConfig
    max_staleness: int
    in_rounds: bool  # the manager's deterministic mode
    batches: int
    fault_rate: float  # of samples, spread over FAULTS
    drop_rate: float  # of groups, by the filter
    broken_filter_rate: float  # of groups, whose filter raises
    two_segments_rate: float  # of samples, whose trajectory has two segments
    latency_step_s: float  # latencies are 0 to 3 times this; 0: everything happens at once
    engine_lag: int  # versions by which the engine is behind the trainer
    sync_every: int  # versions between its updates
    abort_every_s: float  # seconds between abort_all() calls of somebody else; inf: none
    cancel_after_s: tuple[float, ...]  # per batch, seconds after which it is cancelled; inf: never
    restart_after: int  # batch after which the process is replaced by one that resumes from JSON; -1: never
    snapshot_at_s: float  # when the state is saved in the middle of whatever goes on; inf: never


def draw_schedule(seed: int, *, faults: bool = True, latency_seed: int | None = None) -> Schedule:
    """The schedule of an integer. Without `faults` nothing fails, is cancelled, aborted or restarted; filters
    still drop groups.
    """
    draw = random.Random(seed)
    batches = draw.choice([1, 1, 2, 3])
    config = RolloutConfig(
        num_prompts=draw.choice([1, 2, 2, 3]),
        samples_per_prompt=draw.choice([1, 2, 2, 3]),
        over_sampling=draw.choice([1.0, 1.5, 2.0]),
        max_attempts=draw.randint(2, 5),
        max_failed_fraction=draw.choice([0.0, 0.3, 1.0, 1.0]),
        reward_timeout_s=TIMEOUT_S,
    )
    max_staleness = draw.choice([0, 0, 1, 1, 2])
    drop_rate = draw.choice([0.0, 0.3])
    in_rounds = draw.random() < 0.25
    chances = [draw.random() for _ in range(6)]
    cancel_after = tuple(draw.uniform(0, 12) if draw.random() < 0.4 else math.inf for _ in range(batches))
    drawn = Schedule(
        seed=seed,
        latency_seed=seed if latency_seed is None else latency_seed,
        rows=draw.randint(1, 7),
        config=config if faults else config.model_copy(update={"max_attempts": 50}),
        max_staleness=max_staleness,
        in_rounds=in_rounds,
        batches=batches,
        fault_rate=draw.choice([0.02, 0.1, 0.3]) if faults and chances[0] < 0.6 else 0.0,
        drop_rate=drop_rate,
        broken_filter_rate=0.05 if faults and chances[1] < 0.2 else 0.0,
        two_segments_rate=0.3 if chances[2] < 0.2 else 0.0,
        latency_step_s=draw.choice([0.0, 0.5, 0.5]),
        engine_lag=draw.choice([0, max_staleness]),
        sync_every=1,
        abort_every_s=draw.uniform(4, 12) if faults and chances[3] < 0.15 else math.inf,
        cancel_after_s=cancel_after if faults and chances[4] < 0.5 else (math.inf,) * batches,
        restart_after=draw.randint(0, batches - 1) if faults and chances[5] < 0.3 else -1,
        snapshot_at_s=draw.uniform(0, 20) if faults and chances[5] > 0.7 else math.inf,
    )
    if max_staleness == 0 or in_rounds:
        return drawn
    more = draw.choice([0, 0, 2, 5])  # what is carried over shows in later batches
    lag = draw.randint(0, drawn.engine_lag)
    cancel_after += tuple(
        draw.uniform(0, 12) if faults and draw.random() < 0.1 else math.inf for _ in range(more)
    )
    cancel_after = (*drawn.cancel_after_s, *cancel_after[batches:])
    return replace(
        drawn,
        batches=batches + more,
        engine_lag=lag,
        sync_every=draw.randint(1, max_staleness - lag + 1),
        cancel_after_s=cancel_after,
    )


@dataclass(slots=True)
class SimulationReport:
    """What happened, for tests to compare and count."""

    outcomes: list[str] = field(
        default_factory=list
    )  # per batch: delivered, cancelled, or the name of the error
    sample_ids: list[list[str]] = field(default_factory=list)  # of each batch delivered
    prompt_keys: list[tuple[int, str]] = field(
        default_factory=list
    )  # (epoch, prompt id) that trained, in order
    statistics: Mapping[str, float] = field(default_factory=dict)  # of the manager, at the end
    virtual_s: float = 0.0
    snapshots: int = 0
    mixed_samples: int = 0  # that trained with tokens of several versions


def run_simulation(schedule: Schedule) -> SimulationReport:
    """Runs a schedule in virtual time. Raises AssertionError, naming the seed, when an invariant is
    broken.
    """
    try:
        return trio.run(Simulation(schedule).run, clock=trio.testing.MockClock(autojump_threshold=0))
    except BaseException as error:
        error.add_note(f"schedule {schedule}")
        raise


# --- the slow, obvious model --------------------------------------------------------------------------------


def fault_of(schedule: Schedule, sample_id: str) -> str | None:
    """What goes wrong with a sample, None if nothing."""
    if fake_uniform(schedule.seed, "fault", sample_id) >= schedule.fault_rate:
        return None
    return FAULTS[int(len(FAULTS) * fake_uniform(schedule.seed, "kind", sample_id))]


def text_of(schedule: Schedule, sample_id: str) -> str:
    """What a sample answers, in one piece or in many."""
    return "abc"[: int((MAX_NEW_TOKENS + 1) * fake_uniform(schedule.seed, "length", sample_id))]


def engine_version_of(schedule: Schedule, version: int) -> int:
    """The engine's version when the trainer is at `version`."""
    return max(0, version - version % schedule.sync_every - schedule.engine_lag)


def outcome_of(schedule: Schedule, group_index: int) -> str:
    """What becomes of a group that is let finish: kept, dropped, failed, or broken (its filter raises)."""
    size = schedule.config.samples_per_prompt
    fine = sum(fault_of(schedule, f"g{group_index:08d}-s{index:03d}") is None for index in range(size))
    if fine < min(2, size):
        return "failed"
    if fake_uniform(schedule.seed, "broken", group_index) < schedule.broken_filter_rate:
        return "broken"
    return "dropped" if fake_uniform(schedule.seed, "drop", group_index) < schedule.drop_rate else "kept"


def first_kept(schedule: Schedule, first_group_index: int) -> list[int]:
    """The groups of a batch that is decided in launch order."""
    kept: list[int] = []
    group_index = first_group_index
    while len(kept) < schedule.config.num_prompts:
        if outcome_of(schedule, group_index) == "kept":
            kept.append(group_index)
        group_index += 1
    return kept


class RecordingBuffer:
    """A DataBuffer that refuses to hand out a prompt that is out, or to take back one that is not."""

    def __init__(self, buffer: DataBuffer, out: set[tuple[int, str]]) -> None:
        self.buffer = buffer
        self.out = out

    def get_prompts(self, count: int) -> list[PromptRow]:
        prompts = self.buffer.get_prompts(count)
        for prompt in prompts:
            assert prompt.key not in self.out, f"{prompt.key} was drawn twice"
            self.out.add(prompt.key)
        return prompts

    def return_prompts(self, prompts: Sequence[PromptRow]) -> None:
        for prompt in prompts:
            assert prompt.key in self.out, f"{prompt.key} was returned without being out"
            self.out.remove(prompt.key)
        self.buffer.return_prompts(prompts)

    def find_prompt(self, prompt_id: str, epoch: int) -> PromptRow:
        return self.buffer.find_prompt(prompt_id, epoch)


# --- one run ------------------------------------------------------------------------------------------------


class Simulation:
    """One process: a manager, its buffer and its engine, and what must hold of them."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.version = 0
        self.report = SimulationReport()
        self.trained: set[tuple[int, str]] = set()
        self.engine = ScriptedEngine(self.answer)
        self.chat_generate = make_chat_generate(FakeTokenizer())
        self.buffer = RecordingBuffer(self.make_buffer(), set())
        self.manager = self.make_manager(self.buffer)

    def make_buffer(self) -> DataBuffer:
        return DataBuffer(
            [{"prompt": f"p{index}"} for index in range(self.schedule.rows)], seed=self.schedule.seed
        )

    def make_manager(self, buffer: RecordingBuffer) -> AsyncRolloutManager:
        schedule = self.schedule
        return AsyncRolloutManager(
            buffer,
            self.engine,
            generate=self.generate,
            config=schedule.config,
            reward=self.reward,
            filters=[self.filter],
            sampling=SamplingParams(max_new_tokens=MAX_NEW_TOKENS, stop_token_ids=(FAKE_END,)),
            seed=schedule.seed,
            policy_version=lambda: self.version,
            max_staleness=schedule.max_staleness,
            deterministic=schedule.in_rounds,
        )

    @property
    def is_paced(self) -> bool:
        return self.schedule.max_staleness > 0 and not self.schedule.in_rounds

    async def run(self) -> SimulationReport:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.abort_now_and_then)
            nursery.start_soon(self.save_in_the_middle)
            nursery.cancel_scope.deadline = trio.current_time() + MOST_VIRTUAL_S
            for batch in range(self.schedule.batches):
                self.engine.set_version(engine_version_of(self.schedule, self.version))
                self.report.outcomes.append(await self.run_batch(self.schedule.cancel_after_s[batch]))
                self.check_books()
                if batch == self.schedule.restart_after:
                    self.restart()
                    self.check_books()
            nursery.cancel_scope.cancel()
        assert len(self.report.outcomes) == self.schedule.batches, (
            f"batch {len(self.report.outcomes)} never ended"
        )
        engine = self.engine.statistics()
        self.report.statistics = {
            name: count for name, count in self.manager.statistics().items() if name not in engine
        }
        self.report.virtual_s = trio.current_time()
        return self.report

    async def run_batch(self, cancel_after_s: float) -> str:
        state = self.manager.state_dict()
        drawn_before = self.manager.statistics()["drawn"]
        batch: RolloutBatch | None = None
        outcome = "cancelled"
        with trio.move_on_after(cancel_after_s):
            try:
                batch = await self.manager.generate_batch()
                outcome = "delivered"
            except (NotEnoughSamples, UserFunctionError) as error:
                outcome = type(error).__name__
        drawn = self.manager.statistics()["drawn"] - drawn_before
        assert drawn <= self.schedule.config.num_prompts * self.schedule.config.max_attempts, (
            "more groups than max_attempts allows"
        )
        if batch is not None:
            self.check_batch(batch, state["next_group_index"])
            self.version += 1
        return outcome

    # --- what can go wrong ---

    def latency(self, *key: object) -> float:
        return self.schedule.latency_step_s * int(
            4 * fake_uniform(self.schedule.latency_seed, *key)
        )  # few values, so that ends coincide

    def answer(self, request: GenerateRequest) -> ScriptedReply:
        sample_id, _, done = request.request_id.partition("@")
        fault = fault_of(self.schedule, sample_id)
        errors = {
            "engine": EngineError("it broke"),
            "refused": RequestRefused("it is too long"),
            "unreachable": EngineUnreachable("it is gone"),
        }
        error = errors.get(fault or "")
        return ScriptedReply(
            text=text_of(self.schedule, sample_id)[int(done or 0) :],
            token_s=self.latency("token", request.request_id),
            error=error,
        )

    async def generate(
        self, sample: Sample, engine: InferenceEngine, sampling: SamplingParams
    ) -> Sample | list[Sample]:
        answer = self.chat_generate(sample, engine, sampling)
        assert not isinstance(answer, Sample | Sequence)
        done = await answer
        assert isinstance(done, Sample)
        if fault_of(self.schedule, sample.id) == "generate":
            raise ValueError("a bug in generate")
        two = fake_uniform(self.schedule.seed, "segments", sample.id) < self.schedule.two_segments_rate
        return [done, done] if two else done

    async def reward(self, sample: Sample) -> Any:
        sample_id = sample.id.partition(".")[0]
        fault = fault_of(self.schedule, sample_id)
        await trio.sleep(math.inf if fault == "hang" else self.latency("reward", sample_id))
        if fault == "reward":
            raise KeyError("answer")
        return math.nan if fault == "nan" else {"part": fake_uniform(self.schedule.seed, "reward", sample_id)}

    async def filter(self, group: SampleGroup) -> bool | FilterDecision:
        await trio.sleep(self.latency("filter", group.group_index))
        outcome = outcome_of(self.schedule, group.group_index)
        if outcome == "broken":
            raise ZeroDivisionError("a bug in a filter")
        return outcome == "kept"

    async def abort_now_and_then(self) -> None:
        while self.schedule.abort_every_s < math.inf:
            await trio.sleep(self.schedule.abort_every_s)
            await self.engine.abort_all()

    async def save_in_the_middle(self) -> None:
        await trio.sleep(self.schedule.snapshot_at_s)
        buffer, manager = self.resume(
            json.dumps([self.buffer.buffer.state_dict(), self.manager.state_dict()])
        )
        self.check_balance(buffer.buffer, manager)
        self.report.snapshots += 1

    def resume(self, saved: str) -> tuple[RecordingBuffer, AsyncRolloutManager]:
        """What another process makes of the saved state."""
        buffer_state, manager_state = json.loads(saved)
        buffer = RecordingBuffer(self.make_buffer(), set(self.buffer.out))
        buffer.buffer.load_state_dict(buffer_state)
        manager = self.make_manager(buffer)
        manager.load_state_dict(manager_state)
        return buffer, manager

    def restart(self) -> None:
        expected = self.buffer.buffer.state_dict(), self.manager.state_dict()
        self.buffer, self.manager = self.resume(json.dumps(expected))
        assert (
            self.buffer.buffer.state_dict(),
            self.manager.state_dict(),
        ) == expected, "a restart changed the state"

    # --- what must hold ---

    def check_books(self) -> None:
        """After every call, however it ended: nothing runs, and every prompt taken off the stream is in
        exactly one place.
        """
        assert self.engine.in_flight == 0, "a request outlived its batch"
        statistics = self.manager.statistics()
        assert statistics["in_flight"] == 0
        assert statistics["held"] == statistics["held/finished"] + statistics["held/unfinished"]
        if self.is_paced:
            assert statistics["held"] <= self.schedule.config.num_prompts * (
                self.schedule.max_staleness + 1
            ), "more groups than the window allows"
            assert statistics.get("dropped/stale", 0) == 0, "a group became too old"
        else:
            assert statistics["held"] == 0, "a group was carried over"
        assert len(self.buffer.out) == self.check_balance(self.buffer.buffer, self.manager), (
            "prompts that are out are not those that are used up"
        )
        assert self.trained <= self.buffer.out, "a prompt that trained was returned too"

    def check_balance(self, buffer: DataBuffer, manager: AsyncRolloutManager) -> int:
        """How many prompts are used up or held: those that were drawn from the stream and do not wait in the
        buffer.
        """
        statistics = manager.statistics()
        final = {
            name: count for name, count in statistics.items() if name.startswith(("dropped/", "failed/"))
        }
        given_back = sum(
            final.pop(name, 0)
            for name in ("dropped/surplus", "dropped/stale", "dropped/aborted", "failed/infrastructure")
        )
        used_up = statistics["trained"] + statistics["held"] + sum(final.values())
        assert statistics["drawn"] == used_up + given_back, f"the ledger does not balance: {statistics}"
        assert buffer.statistics()["drawn"] == buffer.statistics()["returned"] + used_up, (
            f"a prompt was lost: {buffer.statistics()} {statistics}"
        )
        return int(used_up)

    def check_batch(self, batch: RolloutBatch, first_group_index: int) -> None:
        schedule, size = self.schedule, self.schedule.config.samples_per_prompt
        ids = [sample.id for sample in batch.samples]
        assert ids == sorted(ids) and len(set(ids)) == len(ids), "rows are not in launch order"
        members: dict[int, set[str]] = {}
        for sample in batch.samples:
            assert (
                sample.group_index is not None
                and sample.reward is not None
                and sample.oldest_version is not None
            )
            assert fault_of(schedule, sample.id.partition(".")[0]) is None, "a failed sample is in the batch"
            assert 0 <= self.version - sample.oldest_version <= schedule.max_staleness, "a sample is too old"
            assert np.all(np.diff(sample.weight_versions[sample.loss_mask]) >= 0), (
                "a later token has an earlier version"
            )
            assert sample.response == text_of(schedule, sample.id.partition(".")[0]), (
                "an interruption lost or repeated tokens"
            )
            members.setdefault(sample.group_index, set()).add(sample.id.partition(".")[0])
        assert len(members) == schedule.config.num_prompts, "the batch has another number of groups"
        for group_index, group in members.items():
            assert min(2, size) <= len(group) <= size, "a group has another size"
            assert outcome_of(schedule, group_index) == "kept", (
                "a group is in the batch that the filter dropped"
            )
        if not self.is_paced:
            assert list(members) == first_kept(schedule, first_group_index), "not the first groups by launch"
        keys = dict.fromkeys((metadata["epoch"], metadata["prompt_id"]) for metadata in batch.metadata)
        assert len(keys) == len(members) and not self.trained & set(keys), "a prompt trained twice"
        self.trained |= set(keys)
        self.report.sample_ids.append(ids)
        self.report.prompt_keys += keys
        self.report.mixed_samples += sum(
            len(set(sample.weight_versions[sample.loss_mask].tolist())) > 1 for sample in batch.samples
        )
