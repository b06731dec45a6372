"""Batches of scored groups, and the account of every prompt drawn for them.

    DataBuffer ──► launch ──► run_group tasks in one nursery ──► closed groups ──► decide ──► batch
        ▲          ceil(P * over_sampling) at once,                               │  keep, filtered, failed, stale
        │          one more for each that drops out  ◄────────────────────────────┘
        └── whoever is undecided when the batch is full: aborted, dropped as surplus, prompt returned

max_staleness = 0: groups are decided in launch order, however they finish, so a batch is the first P groups *by launch*
that are kept. Short answers gain nothing by finishing early, and the outcome does not depend on who finishes first.
max_staleness ≥ 1: groups are decided as they finish. One that is kept after the batch is full is held for a later batch.
deterministic: in launch order, and only when all that were launched have finished, so that the requests of the next round reach the
engine together: what is decoded together, and so the last bits of every log-prob, does not depend on how long a reward takes.

generate_batch() owns every task that it starts and ends them all before it returns; between calls nothing runs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import trio

from rollouts.config.schema import RolloutConfig
from rollouts.data.data_buffer import PromptRow
from rollouts.errors import ConfigError, NotEnoughSamples, RolloutsError
from rollouts.generation.batch import compute_batch_metrics, make_batch
from rollouts.generation.group import ClosedGroup, GroupPlan, failure_class_of, run_group
from rollouts.generation.ledger import ABORTED, FILTERED, STALE, SURPLUS, Ledger
from rollouts.generation.staleness import HeldGroup, compute_lag, decode_held_group, encode_held_group
from rollouts.protocols import FilterFn, GenerateFn, GroupRewardFn, InferenceEngine, RewardFn
from rollouts.rewards.call import USER_THREADS
from rollouts.types import JSONValue, Metric, RolloutBatch, Sample, SamplingParams


class PromptSource(Protocol):
    """What the manager needs of a DataBuffer."""

    def get_prompts(self, count: int) -> list[PromptRow]: ...
    def return_prompts(self, prompts: Sequence[PromptRow]) -> None: ...
    def find_prompt(self, prompt_id: str, epoch: int) -> PromptRow: ...


@dataclass(slots=True, eq=False)
class _Draw:
    """One batch in the making."""

    undecided: dict[int, PromptRow] = field(default_factory=dict)  # by group index, in launch order: running, or closed and waiting their turn
    closed: dict[int, ClosedGroup] = field(default_factory=dict)  # those of them that have finished
    kept: list[HeldGroup] = field(default_factory=list)  # of the batch
    decided: list[ClosedGroup] = field(default_factory=list)
    failed_groups: dict[int, PromptRow] = field(default_factory=dict)  # decided, but in the ledger only when the batch is delivered
    drawn: int = 0
    dropped: Counter[str] = field(default_factory=Counter)  # groups by reason

    @property
    def failed(self) -> tuple[Sample, ...]:
        return tuple(sample for closed in self.decided for sample in closed.failed)


class AsyncRolloutManager:
    """Turns prompts into batches. Holds finished groups between batches only when max_staleness ≥ 1; nothing runs between calls."""

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
    ) -> None:
        """`policy_version` answers the trainer's version, which must not advance while generate_batch runs; `sampling.seed` is replaced by
        one of each sample's own, made of `seed` and its id. A deterministic engine makes the manager deterministic.
        Raises ConfigError for settings that cannot train.
        """
        if sampling.top_p < 1 or sampling.top_k > 0:
            raise ConfigError(
                f"sampling.top_p={sampling.top_p}, top_k={sampling.top_k}; the trainer computes log-probs over the whole vocabulary, so training "
                "samples need top_p=1 and top_k=0"
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
        self._in_rounds = deterministic or engine.features.deterministic
        self._in_launch_order = self._in_rounds or max_staleness == 0
        self._limiter = trio.CapacityLimiter(USER_THREADS)
        self._ledger = Ledger()
        self._held: list[HeldGroup] = []
        self._next_group_index = 0
        self._current: _Draw | None = None  # while generate_batch runs
        self._last_metrics: dict[str, Metric] = {}
        self._last_failed: tuple[Sample, ...] = ()

    async def generate_batch(self, reward_fn: RewardFn | None = None) -> RolloutBatch:
        """The next P groups that were kept, as rows in launch order; `reward_fn` takes the place of the manager's reward for this batch.

        Members that failed are left out, so a group has 2 to G trajectories. On every way out nothing is in flight; if that is by
        cancellation or an error, the prompts of the unfinished batch are back in the buffer, or held if staleness allows, those of groups
        that failed among them.
        Raises NotEnoughSamples, with counts by reason, when max_attempts or max_failed_fraction is spent; UserFunctionError when a filter
        does not answer; EngineClosed, ModelError and other errors that are not one sample's alone.
        """
        if self._current is not None:
            raise RuntimeError("generate_batch is running already; await one batch before asking for the next")
        plan = self._make_plan(reward_fn)
        draw = self._current = _Draw()
        try:
            self._take_held(draw)
            await self._collect_groups(draw, plan)
            return self._deliver(draw)
        finally:
            self._current = None
            self._give_up(draw)
            self._last_failed = draw.failed
            self._ledger.check()
            assert self._ledger.counts().in_flight == 0, "a group is still in flight"

    def batch_metrics(self) -> dict[str, Metric]:
        """Metrics of the last batch that was delivered, empty before the first: see compute_batch_metrics."""
        return dict(self._last_metrics)

    def failed_samples(self) -> tuple[Sample, ...]:
        """The samples that failed in the last call, each with metadata["failure"]; they are in no batch."""
        return self._last_failed

    def statistics(self) -> Mapping[str, float]:
        """Groups since the start of the run: `drawn`, and where they are now: `trained`, `held`, `in_flight`, dropped/…, failed/…."""
        counts = self._ledger.counts()
        return {
            "drawn": float(counts.drawn),
            "trained": float(counts.trained),
            "held": float(counts.held),
            "in_flight": float(counts.in_flight),
            **{f"dropped/{reason.removeprefix(FILTERED)}": float(count) for reason, count in sorted(counts.dropped.items())},
            **{f"failed/{name}": float(count) for name, count in sorted(counts.failed.items())},
        }

    def state_dict(self) -> dict[str, JSONValue]:
        """Everything an exact resume needs, as JSON. Taken while a batch is being made, its prompts are saved as prompts to return."""
        draw = self._current or _Draw()
        undelivered = {held.group.group_index: held.prompt for held in draw.kept} | draw.failed_groups | draw.undecided
        return {
            "next_group_index": self._next_group_index,
            "ledger": self._ledger.state_dict(),
            "held": [encode_held_group(held) for held in self._held],
            "in_flight": [[index, prompt.prompt_id, prompt.epoch] for index, prompt in sorted(undelivered.items())],
        }

    def load_state_dict(self, state: Mapping[str, JSONValue]) -> None:
        """Continues where `state` was taken. Load the DataBuffer's state first: prompts that were in flight are returned to it."""
        assert self._current is None, "load_state_dict while a batch is being made"
        find = self._data_buffer.find_prompt
        self._next_group_index = int(state["next_group_index"])
        self._held = [decode_held_group(record, find(record["prompt_id"], record["epoch"])) for record in state["held"]]
        self._ledger.load_state_dict(state["ledger"])
        for held in self._held:
            self._ledger.open(held.group.group_index)
            self._ledger.hold(held.group.group_index)
        for group_index, _, _ in state["in_flight"]:
            self._ledger.open(group_index)
            self._ledger.drop(group_index, ABORTED)
        self._data_buffer.return_prompts([find(prompt_id, epoch) for _, prompt_id, epoch in state["in_flight"]])
        self._ledger.check()

    # --- making a batch ------------------------------------------------------------------------------------------------------

    def _make_plan(self, reward_fn: RewardFn | None) -> GroupPlan:
        reward = reward_fn or self._reward
        if reward is not None and self._group_reward is not None:
            raise ConfigError("both reward and group_reward are given; score samples one by one or by group: pass one of them")
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
            may_continue=lambda sample: compute_lag([sample], self._policy_version()) <= self._max_staleness,
        )

    @property
    def _draw_limit(self) -> int:
        return self._config.num_prompts * self._config.max_attempts

    async def _collect_groups(self, draw: _Draw, plan: GroupPlan) -> None:
        """Fills draw.kept. Every task has ended when this returns or raises."""
        send, receive = trio.open_memory_channel[ClosedGroup](math.inf)  # never more than the groups in flight
        failure: RolloutsError | None = None
        async with trio.open_nursery() as nursery:

            def launch(count: int) -> None:
                for group_index, prompt in self._open_groups(draw, count):
                    nursery.start_soon(_run_and_send, plan, group_index, prompt, send)

            try:
                await self._fill(draw, launch, receive)
            except RolloutsError as error:
                failure = error  # raised below, outside the nursery, which would wrap it in a group
            nursery.cancel_scope.cancel()
        while receive.statistics().current_buffer_used:
            closed = receive.receive_nowait()
            draw.closed[closed.group_index] = closed
        if failure is not None:
            raise failure

    async def _fill(self, draw: _Draw, launch: Callable[[int], None], receive: trio.MemoryReceiveChannel[ClosedGroup]) -> None:
        """Decides groups in their turn, with a new launch for each that drops out, until the batch is full. Raises when a budget is spent."""
        wanted = self._config.num_prompts
        if len(draw.kept) < wanted:
            launch(math.ceil(wanted * self._config.over_sampling - 1e-9) - len(draw.kept))  # 10 * 1.1 is a little more than 11
        owed = 0  # replacements that wait for the end of a round
        while len(draw.kept) < wanted:
            ready = self._next_ready(draw)
            if ready is None:
                launch(owed)
                owed = 0
                self._check_budget(draw)  # the limit may have left fewer than are owed
                closed = await receive.receive()
                draw.closed[closed.group_index] = closed
                continue
            if self._decide(ready, draw):
                continue
            self._check_budget(draw)
            if self._in_rounds:
                owed += 1
            else:  # at once, even if the batch is full in a moment: else ids would depend on who finishes first
                launch(1)

    def _open_groups(self, draw: _Draw, count: int) -> list[tuple[int, PromptRow]]:
        """Up to `count` new attempts, as many as the draw limit leaves."""
        prompts = self._data_buffer.get_prompts(max(0, min(count, self._draw_limit - draw.drawn)))
        opened = list(enumerate(prompts, start=self._next_group_index))
        for group_index, prompt in opened:
            self._ledger.open(group_index)
            draw.undecided[group_index] = prompt
        self._next_group_index += len(opened)
        draw.drawn += len(opened)
        return opened

    def _next_ready(self, draw: _Draw) -> ClosedGroup | None:
        """The closed group whose turn it is to be decided; None while that one, or in rounds any of them, still runs."""
        if self._in_rounds and len(draw.closed) < len(draw.undecided):
            return None
        turn = next(iter(draw.undecided if self._in_launch_order else draw.closed), None)
        return None if turn is None else draw.closed.pop(turn, None)

    def _decide(self, closed: ClosedGroup, draw: _Draw) -> bool:
        """Whether the group is kept. Raises what stops the whole call, leaving the group undecided."""
        if closed.error is not None:
            raise closed.error
        prompt = draw.undecided.pop(closed.group_index)
        draw.decided.append(closed)
        if closed.failure_class is not None:
            draw.failed_groups[closed.group_index] = prompt
            draw.dropped[closed.decision.reason] += 1
        elif not closed.decision.keep:
            self._drop(draw, closed.group_index, FILTERED + closed.decision.reason)
        elif self._is_stale(closed.samples):
            self._drop(draw, closed.group_index, STALE)
            self._data_buffer.return_prompts([prompt])
        else:
            draw.kept.append(HeldGroup(closed.group, prompt))
            return True
        return False

    def _drop(self, draw: _Draw, group_index: int, reason: str) -> None:
        self._ledger.drop(group_index, reason)
        draw.dropped[reason] += 1

    def _is_stale(self, samples: Sequence[Sample]) -> bool:
        return compute_lag(samples, self._policy_version()) > self._max_staleness

    def _check_budget(self, draw: _Draw) -> None:
        """Raises NotEnoughSamples when so many samples failed, or so many groups were drawn, that the batch is given up."""
        config = self._config
        failed = draw.failed
        seen = max(len(draw.decided), config.num_prompts) * config.samples_per_prompt  # else the first failure would be a share of 1
        if len(failed) > config.max_failed_fraction * seen:
            classes = Counter(failure_class_of(sample) for sample in failed)
            raise NotEnoughSamples(
                f"{len(failed)} of {seen} samples failed ({_count_text(classes)}), more than max_failed_fraction={config.max_failed_fraction:g} "
                f"allows; the first: {failed[0].metadata['failure']['message']}"
            )
        if len(draw.kept) + len(draw.undecided) < config.num_prompts and draw.drawn >= self._draw_limit:
            hints = f"; the first failure: {failed[0].metadata['failure']['message']}" if failed else ""
            if STALE in draw.dropped:
                hints += f"; stale: the engine's weights are more than max_staleness={self._max_staleness} steps behind the trainer's"
            raise NotEnoughSamples(
                f"{len(draw.kept)} of num_prompts={config.num_prompts} groups were kept of {draw.drawn} drawn ({_count_text(draw.dropped)}), and "
                f"max_attempts={config.max_attempts} allows no more; loosen the filters, use easier or harder prompts, or raise max_attempts{hints}"
            )

    # --- the end of a batch --------------------------------------------------------------------------------------------------

    def _deliver(self, draw: _Draw) -> RolloutBatch:
        """The batch. What is left in draw.undecided is surplus."""
        self._check_budget(draw)
        groups = sorted((held.group for held in draw.kept), key=lambda group: group.group_index)
        assert len(groups) == self._config.num_prompts, (len(groups), self._config.num_prompts)
        assert not any(self._is_stale(group.samples) for group in groups), "the policy version advanced while a batch was made"
        batch = make_batch(groups, temperature=self._sampling.temperature)
        for group in groups:
            self._ledger.train(group.group_index)
        draw.kept.clear()
        for closed in draw.decided:
            if closed.failure_class is not None:
                self._ledger.fail(closed.group_index, closed.failure_class)
        draw.failed_groups.clear()
        self._keep_surplus(draw)
        self._return_undecided(draw, SURPLUS)
        self._last_metrics = compute_batch_metrics(groups, decided=draw.decided, drawn=draw.drawn, dropped=draw.dropped)
        return batch

    def _keep_surplus(self, draw: _Draw) -> None:
        """Holds the groups that finished after the batch was full, where carrying over is allowed."""
        if self._in_launch_order:
            return
        finished, draw.closed = draw.closed, {}
        for group_index, closed in finished.items():
            if closed.error is None and closed.decision.keep and not self._is_stale(closed.samples):
                self._hold(HeldGroup(closed.group, draw.undecided.pop(group_index)))

    def _hold(self, held: HeldGroup) -> None:
        self._ledger.hold(held.group.group_index)
        self._held = sorted([*self._held, held], key=lambda item: item.group.group_index)

    def _take_held(self, draw: _Draw) -> None:
        """Moves held groups into the batch, oldest first; those that have become too old go, and their prompts are returned."""
        held, self._held = self._held, []
        returned: list[PromptRow] = []
        for item in held:
            stale = self._is_stale(item.group.samples)
            if stale or self._in_launch_order:
                self._drop(draw, item.group.group_index, STALE if stale else SURPLUS)
                returned.append(item.prompt)
            elif len(draw.kept) < self._config.num_prompts:
                draw.kept.append(item)
            else:
                self._held.append(item)
        self._data_buffer.return_prompts(returned)

    def _return_undecided(self, draw: _Draw, reason: str) -> None:
        for group_index in draw.undecided:
            self._drop(draw, group_index, reason)
        self._data_buffer.return_prompts(list(draw.undecided.values()))
        draw.undecided.clear()

    def _give_up(self, draw: _Draw) -> None:
        """Gives back what a batch that was not delivered has; does nothing after one that was.

        Prompts of groups that failed are among it: what failed them may be what stopped the batch, and mended before they are drawn again.
        """
        if self._in_launch_order:
            draw.undecided = {held.group.group_index: held.prompt for held in draw.kept} | draw.undecided  # kept ones were launched earlier
        else:
            self._keep_surplus(draw)
            for held in draw.kept:
                self._hold(held)
        draw.kept.clear()
        undelivered = draw.failed_groups | draw.undecided
        draw.undecided = {group_index: undelivered[group_index] for group_index in sorted(undelivered)}
        draw.failed_groups.clear()
        self._return_undecided(draw, ABORTED)


async def _run_and_send(plan: GroupPlan, group_index: int, prompt: PromptRow, send: trio.MemorySendChannel[ClosedGroup]) -> None:
    send.send_nowait(await run_group(plan, group_index, prompt))


def _count_text(counts: Mapping[str, Any]) -> str:
    return ", ".join(f"{name.removeprefix(FILTERED)}: {count}" for name, count in sorted(counts.items())) or "nothing dropped"
