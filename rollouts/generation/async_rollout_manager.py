"""Batches of scored groups, and the account of every prompt drawn for them.

    DataBuffer ──► launch ──► run_group tasks in one nursery ──► closed groups ──► decide ──► generate_batch
        ▲          while the window has room                                 │  keep, filtered, failed, stale
        └── returned prompts ◄── surplus, stale, aborted ◄───────────────────┘

One collector launches and decides groups, at every staleness: inside generate_batch, or, within generating()
and where groups are decided as they finish, without a break between the calls.

max_staleness = 0: groups are decided in launch order, however they finish, so a batch is the first P groups
*by launch* that are kept. The window is ceil(P * over_sampling): one more group is launched for each that
drops out. Who is undecided when the batch is full is aborted, dropped as surplus, and its prompt returned.
Short answers gain nothing by finishing early, and the outcome does not depend on who finishes first.

max_staleness ≥ 1: groups are decided as they finish, and P of them are delivered by the rule of pacing.py. A
group is launched whenever fewer than ceil(P * over_sampling) * G samples are being generated, up to the
window of that rule, so engines stay full while the last members of old groups end. When collecting ends,
abort_all() makes the engine answer with what there is: an unfinished group keeps its finished members with
their rewards, and of the others the tokens that there are, each with the version that made it; a member whose
reward was being computed keeps its finished text and is scored later. A member that cannot go on (several
segments, or a generate function that does not end within STOP_S) starts again. Held groups are resumed before
others are launched. docs/async.md says what is old then, and why nothing becomes too old.

deterministic: at every staleness in launch order, and only when all that were launched have finished, so that
the requests of the next round reach the engine together: what is decoded together, and so the last bits of
every log-prob, does not depend on how long a reward takes. Nothing is held.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Protocol

import trio

from rollouts.config.tables import RolloutConfig
from rollouts.crash_points import reach
from rollouts.data.data_buffer import PromptRow
from rollouts.errors import ConfigError, InfrastructureError, RolloutsError
from rollouts.generation.batch import check_budget, compute_batch_metrics, draw_limit, make_batch
from rollouts.generation.draw import Draw, ManagerSnapshot, Report, carry
from rollouts.generation.group import (
    INFRASTRUCTURE,
    ClosedGroup,
    GroupPlan,
    GroupWork,
    failure_class_of,
    run_group,
    start_group,
)
from rollouts.generation.ledger import ABORTED, FILTERED, STALE, SURPLUS, Ledger
from rollouts.generation.pacing import Pace
from rollouts.generation.staleness import (
    HeldGroup,
    UnfinishedGroup,
    compute_lag,
    decode_held_group,
    decode_unfinished_group,
    find_oldest_version,
)
from rollouts.metrics.spans import SpanRecorder
from rollouts.protocols import FilterFn, GenerateFn, GroupRewardFn, InferenceEngine, RewardFn
from rollouts.rewards.call import USER_THREADS
from rollouts.types import JSONValue, Metric, RolloutBatch, Sample, SamplingParams


class PromptSource(Protocol):
    """What the manager needs of a DataBuffer."""

    def get_prompts(self, count: int) -> list[PromptRow]: ...
    def return_prompts(self, prompts: Sequence[PromptRow]) -> None: ...
    def find_prompt(self, prompt_id: str, epoch: int) -> PromptRow: ...


# finished groups, in batches, beyond which nothing more is launched ahead: it would only be older when it is
# consumed
READY_BATCHES = 1.25
RUNNING = "generate_batch is running already; await one batch before asking for the next"
# for generate functions to end after the engine has answered them; those that don't start again in the next
# call
STOP_S = 10.0


class AsyncRolloutManager:
    """Turns prompts into batches. Holds groups between batches only when max_staleness ≥ 1; between calls
    nothing runs, but inside generating().
    """

    def __init__(
        self,
        data_buffer: PromptSource,
        engine: InferenceEngine,
        *,
        generate: GenerateFn,
        config: RolloutConfig,
        reward: RewardFn | None,
        group_reward: GroupRewardFn | None = None,
        filters: Sequence[FilterFn] = (),
        sampling: SamplingParams,
        seed: int,
        policy_version: Callable[[], int],
        max_staleness: int = 0,
        deterministic: bool = False,
        spans: SpanRecorder | None = None,
    ) -> None:
        """`policy_version` answers the trainer's version, asked when a batch is, which must not advance until
        it is delivered; `sampling.seed` is replaced by one of each sample's own, made of `seed` and its id. A
        deterministic engine makes the manager deterministic. `spans` is told when each sample was generated
        and scored. Raises ConfigError for settings, or an engine, that cannot train.
        """
        if not engine.features.log_probs:
            raise ConfigError(
                f"engine {engine.features.name} answers without log-probs of the distribution it samples"
                " from, and nothing can train without them; use it for evaluation, and an engine whose"
                " features.log_probs is True here"
            )
        if sampling.top_p < 1 or sampling.top_k > 0:
            raise ConfigError(
                f"sampling.top_p={sampling.top_p}, top_k={sampling.top_k}; the trainer computes log-probs"
                " over the whole vocabulary, so training samples need top_p=1 and top_k=0"
            )
        assert max_staleness >= 0, max_staleness
        self._data_buffer = data_buffer
        self._engine = engine
        self._generate = generate
        self._config = config
        self._reward = reward
        self._group_reward = group_reward
        self._filters = tuple(filters)
        self._sampling = sampling
        self._seed = seed
        self._policy_version = policy_version
        self._max_staleness = max_staleness
        self._spans = spans
        self._in_rounds = deterministic or engine.features.deterministic
        self.overlaps = max_staleness > 0 and not self._in_rounds  # generating() goes on between calls
        self._limiter = trio.CapacityLimiter(USER_THREADS)
        self._ledger = Ledger()
        self._held: dict[int, HeldGroup] = {}  # by group index, in launch order, like the next
        self._unfinished: dict[int, UnfinishedGroup] = {}
        self._failures: Counter[str] = Counter()  # samples by class
        self._next_group_index = 0
        self._current: Draw | None = None  # while the collector runs, and until what it left is put back
        self._nursery: trio.Nursery | None = None  # of the collector
        self._goes_on = False  # inside generating(), where collecting goes on between calls
        self._is_awaited = False  # a call waits for its batch
        self._failure: RolloutsError | None = None  # that ended the collector, until a call has raised it
        self._last_metrics: dict[str, Metric] = {}
        self._last_failed: tuple[Sample, ...] = ()

    async def generate_batch(self, reward_fn: RewardFn | None = None) -> RolloutBatch:
        """The next P groups that were kept, as rows in launch order; `reward_fn` takes the place of the
        manager's reward for this batch.

        Members that failed are left out, so a group has 2 to G trajectories. On every way out nothing is in
        flight; if that is by cancellation or an error, the prompts of the unfinished batch are back in the
        buffer, or held if staleness allows, those of groups that failed among them. A group that an engine's
        failures left with too few samples (class infrastructure) gives its prompt back, and its samples do
        not count for max_failed_fraction. Raises NotEnoughSamples, with counts by reason, when max_attempts
        or max_failed_fraction is spent; UserFunctionError when a filter does not answer; FleetDown,
        EngineClosed, WeightVersionError, EngineSetupError, ModelError and other errors that are not one
        sample's alone. Inside generating() a call that is cancelled changes nothing, and one that raises says
        what ended generation; the next begins it again.
        """
        if self._is_awaited:
            raise RuntimeError(RUNNING)
        self._is_awaited = True
        try:
            if self._goes_on:
                if reward_fn is not None:
                    raise ConfigError(
                        "reward_fn= inside generating(), where samples are scored before their batch is asked"
                        " for; give it to the manager"
                    )
                return await self._take_batch(self._make_plan(None))
            plan = self._make_plan(reward_fn)
            async with self._open_collecting():
                return await self._take_batch(plan)
        finally:
            self._is_awaited = False
        raise AssertionError("unreachable")

    @asynccontextmanager
    async def generating(self) -> AsyncIterator[None]:
        """Inside, if `overlaps`, generation goes on between calls of generate_batch, from the first one on.

        Whoever updates the engines calls engines_updated. While they are too far behind for anything to
        train, launching waits for that; outside, it is found out, as NotEnoughSamples. Every task has ended
        when the block is left, and nothing is lost: generate_batch goes on from there, after a cancellation
        or an error without the tokens that were being generated.
        """
        assert self._nursery is None, "generation is under way already"
        if not self.overlaps:
            yield
            return
        self._goes_on = True
        try:
            async with self._open_collecting():
                yield
        finally:
            self._goes_on = False

    def engines_updated(self, version: int) -> None:
        """Every engine that serves has the weights of `version`, or newer ones. More may be launched then."""
        draw = self._current
        if draw is not None and draw.pace is not None:
            draw.pace.engine_version = max(draw.pace.engine_version, min(version, draw.pace.policy_version))
            draw.reports.send_nowait(None)

    def batch_metrics(self) -> dict[str, Metric]:
        """Metrics of the last batch that was delivered, empty before the first: see compute_batch_metrics."""
        return dict(self._last_metrics)

    def failed_samples(self) -> tuple[Sample, ...]:
        """The samples that failed in the last call, each with metadata["failure"]; they are in no batch."""
        return self._last_failed

    def statistics(self) -> Mapping[str, float]:
        """Where everything is now, and what the engine says of itself under its own names.

        Groups since the start of the run: `drawn`, and where they are now: `trained`, `held`, `in_flight`,
        dropped/…, failed/…. Of those held, `held/finished` and `held/unfinished`; of those in flight,
        `in_flight/queued` have finished and wait for the batch (paced) or their turn. `samples/generating`
        and `samples/failed/CLASS` count samples.
        """
        counts, draw = self._ledger.counts(), self._current or Draw()
        queued = len(draw.kept) + len(draw.closed)
        return {
            **self._engine.statistics(),
            "drawn": float(counts.drawn),
            "trained": float(counts.trained),
            "held": float(counts.held),
            "held/finished": float(len(self._held)),
            "held/unfinished": float(len(self._unfinished)),
            "in_flight": float(counts.in_flight),
            "in_flight/queued": float(queued),
            "samples/generating": float(draw.generating),
            **{f"samples/failed/{name}": float(count) for name, count in sorted(self._failures.items())},
            **{
                f"dropped/{reason.removeprefix(FILTERED)}": float(count)
                for reason, count in sorted(counts.dropped.items())
            },
            **{f"failed/{name}": float(count) for name, count in sorted(counts.failed.items())},
        }

    def snapshot(self) -> ManagerSnapshot:
        """Everything an exact resume needs, as it is now; costs references to groups, not their tokens.

        Taken while a batch is being made, it is what a cancellation at this moment would leave: prompts to
        return, and, where groups are carried over, those that have finished and what the others had when they
        were last stopped.
        """
        draw = self._current or Draw()
        carried = carry(draw, self._is_stale)
        held, unfinished = self._held | carried.held, self._unfinished | carried.unfinished
        return ManagerSnapshot(
            next_group_index=self._next_group_index,
            ledger=self._ledger.state_dict(),
            failures=dict(self._failures),
            held=tuple(held[group_index] for group_index in sorted(held)),
            unfinished=tuple(unfinished[group_index] for group_index in sorted(unfinished)),
            in_flight=tuple(carried.returned.items()),
        )

    def state_dict(self) -> dict[str, JSONValue]:
        """The snapshot of this moment as JSON."""
        return self.snapshot().encode()

    def load_state_dict(self, state: Mapping[str, JSONValue]) -> None:
        """Continues where `state` was taken. Load the DataBuffer's state first: prompts that were in flight
        are returned to it.
        """
        assert self._current is None, "load_state_dict while a batch is being made"
        find = self._data_buffer.find_prompt
        self._next_group_index = int(state["next_group_index"])
        self._failures = Counter(
            state.get("failures", {})
        )  # states of earlier versions have neither this nor unfinished groups
        held = [
            decode_held_group(record, find(record["prompt_id"], record["epoch"])) for record in state["held"]
        ]
        records = state.get("unfinished", [])
        unfinished = [
            decode_unfinished_group(record, find(record["prompt_id"], record["epoch"])) for record in records
        ]
        self._held = {one.group.group_index: one for one in held}
        self._unfinished = {one.group_index: one for one in unfinished}
        self._ledger.load_state_dict(state["ledger"])
        for group_index in [*self._held, *self._unfinished]:
            self._ledger.open(group_index)
            self._ledger.hold(group_index)
        for group_index, _, _ in state["in_flight"]:
            self._ledger.open(group_index)
            self._ledger.drop(group_index, ABORTED)
        self._data_buffer.return_prompts(
            [find(prompt_id, epoch) for _, prompt_id, epoch in state["in_flight"]]
        )
        self._ledger.check()

    # --- collecting -----------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _open_collecting(self) -> AsyncIterator[None]:
        """A nursery for the collector, which ends with the block."""
        failure: Exception | None = None
        try:
            async with trio.open_nursery() as self._nursery:
                try:
                    yield
                    if self._current is not None:
                        await self._stop_collecting(self._current)
                except Exception as error:  # raised outside the nursery, which would wrap it in a group
                    failure = error
                self._nursery.cancel_scope.cancel()
        finally:
            self._nursery, self._failure = None, None
            if self._current is not None:
                self._end(self._current)
        if failure is not None:
            raise failure

    async def _take_batch(self, plan: GroupPlan) -> RolloutBatch:
        """The next batch, once the collector has it."""
        try:
            draw = await self._start_collecting(plan)
            while draw.failure is None and not self._is_full(draw):
                await draw.changed.wait()
            if not self.overlaps:
                await draw.ended.wait()
        except trio.Cancelled:
            self._last_failed = ()  # those of this batch come with it; those of the last one were asked for
            raise
        if draw.failure is not None:
            await draw.ended.wait()
            self._raise_failure()
        return self._deliver(draw)

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    async def _start_collecting(self, plan: GroupPlan) -> Draw:
        """The draw of the collector that runs, or of a new one, at the trainer's version."""
        version = self._policy_version()
        engine_version = min(version, await self._engine.weight_version()) if self.overlaps else version
        self._raise_failure()
        if self._current is None:
            draw = self._current = Draw()
            if self.overlaps:
                draw.pace = Pace(
                    num_prompts=self._config.num_prompts,
                    max_staleness=self._max_staleness,
                    policy_version=version,
                    engine_version=engine_version,
                    waits_for_engines=self._goes_on,
                )
            assert self._nursery is not None
            self._nursery.start_soon(self._collect, draw, plan)
        elif self._current.pace is not None:
            self._move_to(self._current, self._current.pace, version)
            self.engines_updated(engine_version)
        return self._current

    def _move_to(self, draw: Draw, pace: Pace, version: int) -> None:
        """The batch in the making will be consumed at `version`. Finished groups are too old for it only if
        the trainer has skipped versions.
        """
        pace.policy_version = version
        stale = [index for index in sorted(draw.kept) if self._is_stale(draw.kept[index].group.samples)]
        for group_index in stale:
            pace.close(group_index)
            self._drop(draw, group_index, STALE)
            self._data_buffer.return_prompts([draw.kept.pop(group_index).prompt])

    async def _stop_collecting(self, draw: Draw) -> None:
        """Ends every request with what it has, and the collector. Members that still generate after STOP_S
        are cancelled.
        """
        draw.is_stopping = True
        draw.reports.send_nowait(None)
        with trio.move_on_after(STOP_S):
            if draw.generating:
                # an engine that cannot be told: its requests end by cancellation
                with suppress(InfrastructureError):
                    await self._engine.abort_all()
            while draw.generating and draw.failure is None:
                await draw.changed.wait()
        if draw.failure is None:
            draw.scope.cancel()
        await draw.ended.wait()
        # what stops a call is left to the next one
        for group_index in sorted(draw.closed):
            if draw.closed[group_index].error is None:
                self._decide(draw.closed.pop(group_index), draw)

    async def _collect(self, draw: Draw, plan: GroupPlan) -> None:
        """Launches and decides groups; where nothing is carried over, until the batch is full. Every task has
        ended when this returns.
        """
        plan = replace(plan, is_stopping=lambda: draw.is_stopping, ended=draw.reports)
        try:
            async with trio.open_nursery() as nursery:
                draw.scope = nursery.cancel_scope
                try:
                    self._take_held(draw)
                    self._launch(draw, plan, nursery, list(draw.work.values()))
                    while self.overlaps or not self._is_full(draw):
                        if self._is_full(draw) and not self._goes_on:
                            draw.is_stopping = True
                        self._check_budget(draw)
                        self._launch_more(draw, plan, nursery)
                        self._check_budget(draw)  # the limit may have left fewer than are needed
                        draw.notify()
                        self._take_report(draw, await draw.received.receive())
                        while (ready := self._next_ready(draw)) is not None:
                            # replaced at once, even if the batch is full in a moment: else ids would depend
                            # on who finishes first
                            if not self._decide(ready, draw) and not self.overlaps:
                                self._check_budget(draw)
                                self._launch_more(draw, plan, nursery)
                except RolloutsError as error:
                    draw.failure = error
                nursery.cancel_scope.cancel()
        finally:
            while draw.received.statistics().current_buffer_used:
                self._take_report(draw, draw.received.receive_nowait())
            draw.generating = 0
            if draw.failure is not None:
                self._failure = draw.failure
                self._end(draw)
            draw.ended.set()
            draw.notify()

    def _launch(self, draw: Draw, plan: GroupPlan, nursery: trio.Nursery, works: Sequence[GroupWork]) -> None:
        for work in works:
            draw.generating += work.num_to_generate
            nursery.start_soon(_run_and_send, plan, work, draw.reports)

    def _launch_more(self, draw: Draw, plan: GroupPlan, nursery: trio.Nursery) -> None:
        """Launches as many groups as the window has room for."""
        if draw.is_stopping:
            return
        opened = self._open_groups(draw, self._find_room(draw))
        if draw.pace is not None:
            for work in opened:
                draw.pace.open(work.group_index)
        self._launch(draw, plan, nursery, opened)

    def _find_room(self, draw: Draw) -> int:
        # 10 * 1.1 is a little more than 11
        at_once = math.ceil(self._config.num_prompts * self._config.over_sampling - 1e-9)
        if draw.pace is None:
            is_round = self._in_rounds and len(draw.undecided) > 0
            return 0 if is_round else at_once - len(draw.kept) - len(draw.undecided)
        if self._goes_on and len(draw.pace.finished) >= READY_BATCHES * self._config.num_prompts:
            return 0
        size = self._config.samples_per_prompt
        return min((at_once * size - draw.generating) // size, draw.pace.room)

    def _is_full(self, draw: Draw) -> bool:
        return len(draw.kept) >= self._config.num_prompts if draw.pace is None else draw.pace.is_full()

    def _take_report(self, draw: Draw, report: Report) -> None:
        """Notes that a group has closed, or that a member of one no longer generates."""
        if isinstance(report, ClosedGroup):
            draw.closed[report.group_index] = report
        elif report is not None:
            draw.generating -= 1

    def _next_ready(self, draw: Draw) -> ClosedGroup | None:
        """A closed group that is to be decided now. In launch order: the one whose turn it is; None while
        that one, or in rounds any of them, still runs, or when the batch is full.
        """
        if draw.pace is not None:
            return draw.closed.pop(next(iter(draw.closed))) if draw.closed else None
        if self._is_full(draw) or (self._in_rounds and len(draw.closed) < len(draw.undecided)):
            return None
        turn = next(iter(draw.undecided), None)
        return None if turn is None else draw.closed.pop(turn, None)

    # --- making a batch -------------------------------------------------------------------------------------

    def _make_plan(self, reward_fn: RewardFn | None) -> GroupPlan:
        reward = reward_fn or self._reward
        if reward is not None and self._group_reward is not None:
            raise ConfigError(
                "both reward and group_reward are given; score samples one by one or by group: pass one of"
                " them"
            )
        return GroupPlan(
            engine=self._engine,
            generate=self._generate,
            reward=reward,
            group_reward=self._group_reward,
            filters=self._filters,
            sampling=self._sampling,
            seed=self._seed,
            samples_per_prompt=self._config.samples_per_prompt,
            reward_timeout_s=self._config.reward_timeout_s,
            limiter=self._limiter,
            may_continue=lambda sample: not self._is_stale([sample]),
            spans=self._spans,
        )

    def _open_groups(self, draw: Draw, count: int) -> list[GroupWork]:
        """Up to `count` new attempts, as many as the draw limit leaves."""
        prompts = self._data_buffer.get_prompts(max(0, min(count, draw_limit(self._config) - draw.drawn)))
        opened = [
            start_group(index, prompt, self._config.samples_per_prompt)
            for index, prompt in enumerate(prompts, start=self._next_group_index)
        ]
        for work in opened:
            self._ledger.open(work.group_index)
            draw.undecided[work.group_index] = work.prompt
            draw.work[work.group_index] = work
        self._next_group_index += len(opened)
        draw.drawn += len(opened)
        reach("rollout.drawn")
        return opened

    def _decide(self, closed: ClosedGroup, draw: Draw) -> bool:
        """Whether the group is kept. Raises what stops the whole call, leaving the group undecided."""
        reach("rollout.group_finished")
        if closed.error is not None:
            draw.closed[closed.group_index] = closed
            raise closed.error
        prompt = draw.undecided.pop(closed.group_index)
        del draw.work[closed.group_index]
        draw.decided.append(closed)
        draw.failed += closed.failed
        if closed.failure_class is not None:
            draw.failed_groups[closed.group_index] = (prompt, closed.failure_class)
            draw.dropped[closed.decision.reason] += 1
        elif not closed.decision.keep:
            self._drop(draw, closed.group_index, FILTERED + closed.decision.reason)
        elif self._is_stale(closed.samples):
            self._drop(draw, closed.group_index, STALE)
            self._data_buffer.return_prompts([prompt])
        else:
            draw.kept[closed.group_index] = HeldGroup(closed.group, prompt)
            if draw.pace is not None:
                draw.pace.finish(closed.group_index, oldest=find_oldest_version(closed.samples))
            return True
        if draw.pace is not None:
            draw.pace.close(closed.group_index)
        return False

    def _drop(self, draw: Draw, group_index: int, reason: str) -> None:
        self._ledger.drop(group_index, reason)
        draw.dropped[reason] += 1

    def _is_stale(self, samples: Sequence[Sample]) -> bool:
        """Whether the batch in the making is too late for them."""
        pace = None if self._current is None else self._current.pace
        version = self._policy_version() if pace is None else pace.policy_version
        return compute_lag(samples, version) > self._max_staleness

    def _check_budget(self, draw: Draw) -> None:
        check_budget(draw, self._config, max_staleness=self._max_staleness)

    # --- the end of a batch ---------------------------------------------------------------------------------

    def _deliver(self, draw: Draw) -> RolloutBatch:
        """The batch. What is left in draw.undecided is surplus, or goes on."""
        self._check_budget(draw)
        chosen = sorted(draw.kept) if draw.pace is None else draw.pace.choose()
        groups = [draw.kept[group_index].group for group_index in chosen]
        assert len(groups) == self._config.num_prompts, (len(groups), self._config.num_prompts)
        assert not any(self._is_stale(group.samples) for group in groups), (
            "the policy version advanced while a batch was made"
        )
        batch = make_batch(groups, temperature=self._sampling.temperature)
        for group_index in chosen:
            self._ledger.train(group_index)
            del draw.kept[group_index]
        for group_index, (prompt, failure_class) in draw.failed_groups.items():
            self._ledger.fail(group_index, failure_class)
            if failure_class == INFRASTRUCTURE:
                self._data_buffer.return_prompts([prompt])
        draw.failed_groups.clear()
        if draw.pace is None:
            self._put_back(draw, SURPLUS)
        self._last_metrics = compute_batch_metrics(
            groups, decided=draw.decided, drawn=draw.drawn, dropped=draw.dropped
        )
        self._note_failed(draw)
        draw.begin_next()
        if draw.pace is not None:
            for group_index in chosen:
                draw.pace.close(group_index)
            if self._goes_on:  # the next batch is consumed when the trainer is done with this one
                draw.pace.policy_version += 1
                draw.reports.send_nowait(None)
        return batch

    def _take_held(self, draw: Draw) -> None:
        """Moves held groups into the draw. Those that are too old go, and where nothing is carried over all
        of them: a manager with other settings has held them. Their prompts are returned.
        """
        pace, returned = draw.pace, dict[int, tuple[PromptRow, str]]()
        for group_index, held in self._held.items():
            oldest = find_oldest_version(held.group.samples)
            if self._is_stale(held.group.samples):
                returned[group_index] = held.prompt, STALE
            elif pace is None:
                returned[group_index] = held.prompt, SURPLUS
            else:
                draw.kept[group_index] = held
                pace.open(group_index, oldest=oldest)
                pace.finish(group_index, oldest=oldest)
        for group_index, group in self._unfinished.items():
            oldest = find_oldest_version(sample for member in group.members for sample in member.samples)
            if pace is None:
                returned[group_index] = group.prompt, SURPLUS
            elif pace.is_stale(oldest):
                returned[group_index] = group.prompt, STALE
            else:
                self._ledger.resume(group_index)
                draw.undecided[group_index] = group.prompt
                draw.work[group_index] = GroupWork(group_index, group.prompt, list(group.members))
                pace.open(group_index, oldest=oldest)
        self._held, self._unfinished = {}, {}
        for group_index in sorted(returned):
            self._drop(draw, group_index, returned[group_index][1])
        self._data_buffer.return_prompts([returned[group_index][0] for group_index in sorted(returned)])

    def _end(self, draw: Draw) -> None:
        """Puts back what a collector that has ended leaves."""
        self._current = None
        self._put_back(draw, ABORTED)
        if draw.failed:
            self._note_failed(draw)
        self._ledger.check()
        assert self._ledger.counts().in_flight == 0, "a group is still in flight"

    def _note_failed(self, draw: Draw) -> None:
        self._last_failed = tuple(draw.failed)
        self._failures.update(failure_class_of(sample) for sample in draw.failed)

    def _put_back(self, draw: Draw, reason: str) -> None:
        """Holds and returns what is left of a draw; does nothing after a batch that was delivered."""
        carried = carry(draw, self._is_stale)
        for group_index in [*carried.held, *carried.unfinished]:
            self._ledger.hold(group_index)
        self._held = dict(sorted((self._held | carried.held).items()))
        self._unfinished = dict(sorted((self._unfinished | carried.unfinished).items()))
        for group_index in carried.returned:
            self._drop(draw, group_index, reason)
        self._data_buffer.return_prompts(list(carried.returned.values()))
        for left in (draw.kept, draw.failed_groups, draw.undecided, draw.work, draw.closed):
            left.clear()


async def _run_and_send(plan: GroupPlan, work: GroupWork, send: trio.MemorySendChannel[Report]) -> None:
    closed = await run_group(plan, work)
    if closed is not None:
        send.send_nowait(closed)
