"""Batches of scored groups, and the account of every prompt drawn for them.

    DataBuffer ──► launch ──► run_group tasks in one nursery ──► closed groups ──► decide ──► generate_batch
        ▲          while the window has room                                 │  keep, filtered, failed, stale
        └── returned prompts ◄── surplus, stale, aborted ◄───────────────────┘

One collector launches and decides groups, at every staleness: inside generate_batch, or, within generating()
and where groups are decided as they finish, without a break between the calls.

max_staleness = 0: groups are decided in launch order, however they finish, so a batch is the first P groups
*by launch* that are kept. The window is ceil(P * over_sampling): one more group is launched for each that
drops out. Who is undecided when the batch is full is aborted, dropped as surplus, and its prompt returned.
Short answers gain nothing by finishing early, and the outcome does not depend on who finishes first. With a
ranker a batch waits for all ceil(P * over_sampling) groups that are kept (fewer, but P, when max_attempts is
spent), and is the P of them with the highest scores, equal ones by launch. The others are dropped as
outranked, and their prompts not returned: they would be drawn again at once, and fill the next competition.

max_staleness ≥ 1: groups are decided as they finish, and P of them are delivered by the rule of pacing.py. A
group is launched whenever fewer than ceil(P * over_sampling) * G samples are being generated (one that waits
for a tool or an environment is not), up to the window of that rule, so engines stay full while the last
members of old groups end. When collecting ends,
abort_all() makes the engine answer with what there is: an unfinished group keeps its finished members with
their rewards, and of the others the tokens that there are, each with the version that made it; a member whose
reward was being computed keeps its finished text and is scored later. A member that cannot go on (several
segments, or a generate function that does not end within STOP_S) starts again. Held groups are resumed before
others are launched. docs/async.md says what is old then, and why nothing becomes too old.

deterministic: at every staleness in launch order, and only when all that were launched have finished, so that
the requests of the next round reach the engine together: what is decoded together, and so the last bits of
every log-prob, does not depend on how long a reward takes. Nothing is held.
"""

from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

import trio

from rollouts.config.rollout import RolloutConfig
from rollouts.data.data_buffer import PromptRow
from rollouts.errors import require
from rollouts.generation.collector import ABORTED, FILTERED, Collector, Ledger
from rollouts.generation.group import Group, GroupPlan, decode_group, encode_group
from rollouts.generation.samples import PromptSource as RowSource
from rollouts.metrics.spans import SpanRecorder
from rollouts.processes.nurseries import open_plain_nursery
from rollouts.protocols import FilterFn, GenerateFn, GroupRewardFn, InferenceEngine, RankerFn, RewardFn
from rollouts.types import (
    JSONObject,
    Metric,
    Numbers,
    RolloutBatch,
    Sample,
    SamplingParams,
)


class PromptSource(RowSource, Protocol):
    """What the manager needs of a DataBuffer."""

    def find_prompt(self, prompt_id: str, epoch: int) -> PromptRow: ...


class AsyncRolloutManager:
    """Turns prompts into batches. Holds groups between batches only when max_staleness ≥ 1; between calls
    nothing runs, but inside generating().

    Its ledger: every prompt drawn is one attempt, named by its group index, and is in exactly one place: in
    the batch in the making, held, or counted as trained, dropped with a reason or failed with a class. A
    prompt that is returned to the DataBuffer closes its attempt; drawing it again opens another. A trained
    group that trains again (config.replay) is no attempt: it is counted apart.
    """

    # until it has ended and, if it failed, a call has raised that
    _collector: Collector | None = None
    _nursery: trio.Nursery | None = None  # of the collector
    _goes_on = False  # inside generating(), where collecting goes on between calls
    _is_awaited = False  # a call waits for its batch

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
        ranker: RankerFn | None = None,
        sampling: SamplingParams,
        seed: int,
        policy_version: Callable[[], int],
        max_staleness: int = 0,
        deterministic: bool = False,
        needs_reward: bool = True,
        spans: SpanRecorder | None = None,
    ) -> None:
        """`policy_version` answers the trainer's version, asked when a batch is, which must not advance until
        it is delivered; `group_reward` sees what `reward` has made of the samples, and its rewards take their
        place; `sampling.seed` is replaced by one of each sample's own, made of `seed` and its id. A
        deterministic engine makes the manager deterministic. Without `needs_reward` samples may train
        unscored. `spans` is told when each sample was generated and scored. Raises ConfigError for what
        cannot train.
        """
        require(
            engine.features.log_probs,
            f"engine {engine.features.name} answers without log-probs of the distribution it samples from,"
            " and nothing can train without them; use it for evaluation, and an engine whose"
            " features.log_probs is True here",
        )
        require(
            sampling.top_p >= 1 and sampling.top_k <= 0,
            f"sampling.top_p={sampling.top_p}, top_k={sampling.top_k}; the trainer computes log-probs over"
            " the whole vocabulary, so training samples need top_p=1 and top_k=0",
        )
        assert max_staleness >= 0 and not (max_staleness and ranker), (max_staleness, ranker)
        self._data_buffer = data_buffer
        self._config = config
        self._max_staleness = max_staleness
        self._plan = GroupPlan(
            engine=engine,
            generate=generate,
            reward=reward,
            group_reward=group_reward,
            filters=tuple(filters),
            ranker=ranker,
            sampling=sampling,
            seed=seed,
            reward_timeout_s=config.reward_timeout_s,
            generate_timeout_s=config.generate_timeout_s,
            needs_reward=needs_reward,
            policy_version=policy_version,
            spans=spans,
        )
        self._in_rounds = deterministic or engine.features.deterministic
        self.overlaps = max_staleness > 0 and not self._in_rounds  # generating() goes on between calls
        self._ledger = Ledger()

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
            raise RuntimeError(
                "generate_batch is running already; await one batch before asking for the next"
            )
        require(
            reward_fn is None or not self._goes_on,
            "reward_fn= inside generating(), where samples are scored before their batch is asked for; give"
            " it to the manager",
        )
        require(
            reward_fn is None or self._plan.group_reward is None,
            "reward_fn= beside a group_reward, whose rewards take its place; pass one of them",
        )
        plan = self._plan._replace(reward=reward_fn or self._plan.reward)
        self._is_awaited = True
        try:
            if self._goes_on:
                return await self._take_batch(plan)
            async with self._open_collecting():
                batch = await self._take_batch(plan)
            return batch  # noqa: RET504 (inside, pyright would take the block for one that swallows errors)
        finally:
            self._is_awaited = False

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
        if self._collector is not None:
            self._collector.note_engine_version(version)

    def note_prompts(self) -> None:
        """The source of prompts has more, after it had too few."""
        if self._collector is not None:
            self._collector.wake()

    def batch_metrics(self) -> dict[str, Metric]:
        """Metrics of the last batch that was delivered, empty before the first: see compute_batch_metrics."""
        return dict(self._ledger.last_metrics)

    def failed_samples(self) -> tuple[Sample, ...]:
        """The samples that failed in the last call, each with metadata["failure"]; they are in no batch."""
        return self._ledger.last_failed

    def statistics(self) -> Numbers:
        """Where everything is now, and what the engine says of itself under its own names.

        Groups since the start of the run: `drawn`, and where they are now: `trained`, `held`, `in_flight`,
        dropped/…, failed/…. `replayed` counts apart how often a trained one has trained again. Of those held,
        `held/finished` and `held/unfinished`. `samples/generating` counts samples.
        """
        ledger, collector = self._ledger, self._collector
        finished = sum(group.decision is not None for group in ledger.held.values())
        return {
            **self._plan.engine.statistics(),
            "drawn": ledger.drawn,
            "trained": ledger.trained,
            "replayed": ledger.replayed,
            "held": len(ledger.held),
            "held/finished": finished,
            "held/unfinished": len(ledger.held) - finished,
            "in_flight": 0 if collector is None else len(collector.open_groups()),
            "samples/generating": 0 if collector is None else collector.generating,
            **{f"dropped/{name.removeprefix(FILTERED)}": n for name, n in sorted(ledger.dropped.items())},
            **{f"failed/{name}": n for name, n in sorted(ledger.failed.items())},
        }

    def check_ledger(self) -> None:
        """Asserts that every prompt drawn is in exactly one place."""
        self._ledger.check(0 if self._collector is None else len(self._collector.open_groups()))

    def snapshot(self) -> Callable[[], JSONObject]:
        """Makes the state of this moment, as JSON for load_state_dict, when it is called. Costs references to
        groups now; every token of every held group is encoded then.

        Taken while a batch is being made, it is what a cancellation at this moment would leave: prompts to
        return, and, where groups are carried over, those that have finished and what the others had when they
        were last stopped.
        """
        ledger, held, in_flight = self._ledger, self._ledger.held, list[Group]()
        if self._collector is not None:
            left, in_flight = self._collector.find_held()
            held = held | left
        groups = [held[index].copy() for index in sorted(held)]
        counts = {
            "trained": ledger.trained,
            "replayed": ledger.replayed,
            "dropped": dict(ledger.dropped),
            "failed": dict(ledger.failed),
        }
        drawn, replay = ledger.drawn, list(ledger.replay)
        return lambda: {
            "next_group_index": drawn,
            "ledger": counts,
            "held": [encode_group(group) for group in groups if group.decision is not None],
            "replay": [encode_group(group) for group in replay],
            "unfinished": [encode_group(group) for group in groups if group.decision is None],
            "in_flight": [[group.index, group.prompt.prompt_id, group.prompt.epoch] for group in in_flight],
        }

    def state_dict(self) -> JSONObject:
        """The snapshot of this moment as JSON."""
        return self.snapshot()()

    def load_state_dict(self, state: JSONObject) -> None:
        """Continues where `state` was taken. Load the DataBuffer's state first: prompts that were in flight
        are returned to it.
        """
        assert self._collector is None, "load_state_dict while a batch is being made"
        find, counts, in_flight = self._data_buffer.find_prompt, state["ledger"], state["in_flight"]
        replay, held, unfinished = (
            [
                decode_group(record, find(record["prompt_id"], record["epoch"]))
                for record in state.get(name, ())
            ]
            for name in ("replay", "held", "unfinished")  # the first is not in states of older versions
        )
        self._ledger = Ledger(
            drawn=state["next_group_index"],
            trained=counts["trained"],
            replayed=counts.get("replayed", 0),
            replay=replay,
            dropped=Counter(counts["dropped"]) + Counter({ABORTED: len(in_flight)}),
            failed=Counter(counts["failed"]),
            held={group.index: group for group in sorted(held + unfinished, key=lambda group: group.index)},
        )
        self._data_buffer.return_prompts([find(prompt_id, epoch) for _, prompt_id, epoch in in_flight])
        self.check_ledger()

    # --- the collector --------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _open_collecting(self) -> AsyncIterator[None]:
        """A nursery for the collector, which ends with the block."""
        try:
            async with open_plain_nursery() as self._nursery:
                yield
                if self._collector is not None:
                    await self._collector.stop()
        finally:
            if self._collector is not None:
                self._collector.put_back(ABORTED)
            self._nursery = self._collector = None

    async def _take_batch(self, plan: GroupPlan) -> RolloutBatch:
        """The next batch, of the collector that runs or of a new one, at the trainer's version. Raises what
        the collector has ended with; the next call begins another.
        """
        try:
            version = plan.policy_version()
            engine_version = min(version, await plan.engine.weight_version()) if self.overlaps else version
            if (collector := self._collector) is None:
                collector = self._collector = Collector(
                    self._data_buffer,
                    self._config,
                    plan,
                    self._ledger,
                    paced=self.overlaps,
                    in_rounds=self._in_rounds,
                    max_staleness=self._max_staleness,
                    waits_for_engines=self._goes_on,
                )
                assert self._nursery is not None
                self._nursery.start_soon(collector.collect)
            await collector.wait_full(version, engine_version)
        except trio.Cancelled:
            # those of this batch come with it; those of the last one were asked for
            self._ledger.last_failed = ()
            raise
        if collector.failure is not None:
            self._collector = None
            raise collector.failure
        return collector.deliver()
