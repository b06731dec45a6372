"""What launches and decides groups while batches are asked for: see async_rollout_manager.py.

open_groups ──► undecided: running ──► closed: finished ──► kept ──► deliver
                                            └─► dropped, or failed_groups until the batch is delivered
deliver ──► replay: trained, and drawn again for later batches while it is not too old (config.replay)
put_back ──► what may be carried over is held, the prompts of the others are returned
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import field, replace

import numpy as np
import trio

from rollouts.config.rollout import RolloutConfig
from rollouts.crash_points import reach
from rollouts.errors import EngineError, InfrastructureError, NotEnoughSamples, RolloutsError
from rollouts.generation.batch import FILTERED, compute_batch_metrics
from rollouts.generation.group import (
    INFRASTRUCTURE,
    LEFT_OUT,
    Group,
    GroupPlan,
    failure_class_of,
    run_group,
    start_group,
    tell_waiting,
)
from rollouts.generation.pacing import can_deliver
from rollouts.generation.samples import PromptSource, convert_to_batch
from rollouts.processes.nurseries import open_plain_nursery
from rollouts.types import Metric, RolloutBatch, Sample, Total, live

# reasons for which a group is dropped; a filter's own reason follows FILTERED
SURPLUS = "surplus"  # the batch was full without it
STALE = "stale"  # older than max_staleness
OUTRANKED = "outranked"  # others that competed for the batch had a higher score
ABORTED = "aborted"  # the call that drew it was cancelled or failed

REPLAYED = "replayed"  # the metadata of a sample that trains again
REPLAY_STREAM = 0x7265706C  # keeps the draws apart from others with the same seed
# finished groups, in batches, beyond which nothing more is launched ahead: it would only be older when it is
# consumed
READY_BATCHES = 1.25
# for generate functions to end after the engine has answered them; those that don't start again in the next
# call
STOP_S = 10.0


@live
class Ledger:
    """What a manager keeps between batches: what became of every prompt drawn, and the groups it holds."""

    drawn: int = 0  # attempts, and the index of the next group
    trained: int = 0
    replayed: int = 0  # times that a trained group has trained again: no attempt
    replay: list[Group] = field(default_factory=list)  # that may, oldest batch first
    dropped: Counter[str] = field(default_factory=Counter)  # attempts by reason
    failed: Counter[str] = field(default_factory=Counter)  # attempts by class of failure
    held: dict[int, Group] = field(default_factory=dict)  # by index, in launch order
    last_failed: tuple[Sample, ...] = ()  # samples of the last batch
    last_metrics: dict[str, Metric] = field(default_factory=dict)

    def check(self, in_flight: int) -> None:
        """Asserts that every prompt drawn is in exactly one place."""
        closed = self.trained + self.dropped.total() + self.failed.total()
        assert closed + len(self.held) + in_flight == self.drawn, (
            f"a prompt was lost: {self.drawn} drawn, {closed} closed, {len(self.held)} held, {in_flight} open"
        )


@live
class Collector:
    """The batch in the making, and what goes on into the next. Groups are by index, and each is in one of
    `undecided`, `kept` and `failed_groups`.
    """

    data_buffer: PromptSource
    config: RolloutConfig
    plan: GroupPlan
    ledger: Ledger
    paced: bool  # decides groups as they finish, and carries over; else they are decided in launch order
    in_rounds: bool  # not paced: when all that were launched have finished
    max_staleness: int
    # an update of engines that are too far behind is under way, so that nothing is launched until it is done
    waits_for_engines: bool
    policy_version: int = 0  # of the trainer, when the batch in the making is consumed
    engine_version: int = -1  # the oldest that an engine in service has, at most policy_version

    def __post_init__(self) -> None:
        config = self.config
        # groups; 10 * 1.1 is a little more than 11
        self._at_once = math.ceil(config.num_prompts * config.over_sampling - 1e-9)
        self._draw_limit = config.num_prompts * config.max_attempts  # groups of one batch
        self.plan = self.plan._replace(
            is_stale=self._is_stale,
            is_stopping=lambda: self._is_stopping,
            on_generated=self._note_generated,
            on_waiting=self._note_waiting,
        )
        # in launch order: running, or finished and waiting their turn
        self._undecided: dict[int, Group] = {}
        self._closed: dict[int, Group] = {}  # those of them that have finished
        # of the batch; paced: may be more, of which the batch is chosen
        self._kept: dict[int, Group] = {}
        self._failed_groups: dict[int, Group] = {}  # decided, and counted when the batch is delivered
        self._begin_batch()
        self.generating = 0  # samples
        self._waiting = 0  # of them for tools and environments
        self._is_stopping = False
        self.failure: RolloutsError | None = None  # that ended it
        self._scope = trio.CancelScope()  # of its tasks
        self._nursery: trio.Nursery  # the same
        self._changed = trio.lowlevel.ParkingLot()  # woken by each change
        self._ended = trio.Event()  # every task has ended

    def _begin_batch(self) -> None:
        self._decided: list[Group] = []
        self._failed: list[Sample] = []  # of the decided
        self._drawn = 0
        self._dropped: Counter[str] = Counter()  # groups by reason

    def _note_generated(self) -> None:
        self.generating -= 1
        if self.generating % self.config.samples_per_prompt == 0:  # room for one more group
            self._changed.unpark_all()

    def _note_waiting(self, change: int) -> None:
        self._waiting += change
        if change > 0:
            self._changed.unpark_all()

    def note_engine_version(self, version: int) -> None:
        """Every engine that serves has the weights of `version`, or newer ones."""
        self.engine_version = max(self.engine_version, min(version, self.policy_version))
        self.wake()

    def wake(self) -> None:
        """Something has changed outside."""
        self._changed.unpark_all()

    async def wait_full(self, version: int, engine_version: int) -> None:
        """Returns when a batch, consumed at `version`, can be delivered, or the collector has failed."""
        self.policy_version = version
        # finished groups are too old for it only if the trainer has skipped versions
        for index, group in sorted(self._kept.items()):
            if self._is_stale(group.oldest_version):
                del self._kept[index]
                self._drop([group], STALE, returned=True)
        self.note_engine_version(engine_version)
        while self.failure is None and not self._is_full():
            await self._changed.park()
        if not self.paced or self.failure is not None:
            await self._ended.wait()

    async def stop(self) -> None:
        """Ends every request with what it has, and the collector. Members that wait for something else are
        cancelled at once where they have noted progress, the others if they still generate after STOP_S.
        """
        self._is_stopping = True
        for group in self._undecided.values():
            for call in group.calls:
                call.end_if_idle()
        self._changed.unpark_all()
        with trio.move_on_after(STOP_S):
            if self.generating:
                # an engine that cannot be told: its requests end by cancellation
                with suppress(InfrastructureError):
                    await self.plan.engine.abort_all()
            while self.generating and self.failure is None:
                await self._changed.park()
        self._scope.cancel()
        await self._ended.wait()
        for index in sorted(self._closed):
            if self._closed[index].error is None:  # what stops a call is left to the next one
                self._decide(index)

    async def collect(self) -> None:
        """Launches and decides groups; where nothing is carried over, until the batch is full. Every task has
        ended when this returns.
        """
        try:
            with self._scope:
                async with open_plain_nursery() as self._nursery:
                    await self._work()
        except RolloutsError as error:
            self.failure = error
        finally:
            self.generating = 0
            if self.failure is not None:
                self.put_back(ABORTED)
            self._ended.set()
            self._changed.unpark_all()

    def _list_generating(self) -> list[str]:
        members = [member for group in self._undecided.values() for member in group.members]
        return [member.pending.id for member in members if not member.segments]

    async def _work(self) -> None:
        self._nursery.start_soon(tell_waiting, self._changed, self._list_generating)
        self._take_held()
        self._launch(self._undecided.values())
        while self.paced or not self._is_full():
            if self._is_full() and not self.waits_for_engines:
                self._is_stopping = True
            self._launch_more()
            self._check_budget()  # the limit may have left fewer than are needed
            self._changed.unpark_all()
            await self._changed.park()
            while (ready := self._next_ready()) is not None:
                # replaced at once, even if the batch is full in a moment: else ids would depend on who
                # finishes first
                if not self._decide(ready) and not self.paced:
                    self._launch_more()

    def _launch(self, groups: Iterable[Group]) -> None:
        for group in groups:
            self.generating += sum(not member.segments for member in group.members)
            self._nursery.start_soon(self._run, group)

    async def _run(self, group: Group) -> None:
        if await run_group(self.plan, group):
            self._closed[group.index] = group
            self._changed.unpark_all()

    def _launch_more(self) -> None:
        """Launches new attempts, as many as the window has room for and the draw limit leaves."""
        self._check_budget()
        room = min(self._find_room(), self._draw_limit - self._drawn)
        if self._is_stopping or room <= 0:
            return
        opened = [
            start_group(index, prompt, self.config.samples_per_prompt)
            for index, prompt in enumerate(self.data_buffer.get_prompts(room), self.ledger.drawn)
        ]
        for group in opened:
            self._admit(self._undecided, group)
        self.ledger.drawn += len(opened)
        self._drawn += len(opened)
        reach("rollout.drawn")
        self._launch(opened)

    def _admit(self, place: dict[int, Group], group: Group) -> None:
        """Puts an open group there, with its deadline."""
        oldest = group.oldest_version
        group.deadline = (self.engine_version if oldest is None else oldest) + self.max_staleness
        place[group.index] = group

    def _find_room(self) -> int:
        """How many more groups may be launched now; 0 or less: none."""
        open_, num_prompts = len(self._kept) + len(self._undecided), self.config.num_prompts
        if not self.paced:
            return 0 if self.in_rounds and self._undecided else self._at_once - open_
        if self.waits_for_engines and len(self._kept) >= READY_BATCHES * num_prompts:
            return 0
        # the window is at least P, even if the engines are too far behind for anything to train: that is then
        # found out, unless it is waited for
        batches = self.engine_version + self.max_staleness - self.policy_version + 1
        window = num_prompts * max(0 if self.waits_for_engines else 1, batches)
        size = self.config.samples_per_prompt
        return min((self._at_once * size - (self.generating - self._waiting)) // size, window - open_)

    def _is_full(self) -> bool:
        if self.paced:
            finished, running = (
                [group.deadline for group in groups.values()] for groups in (self._kept, self._undecided)
            )
            return can_deliver(
                finished, running, num_prompts=self.config.num_prompts, version=self.policy_version
            )
        more_come = self._undecided or self._drawn < self._draw_limit
        competing = self.plan.ranker is not None and more_come
        return len(self._kept) >= (self._at_once if competing else self.config.num_prompts)

    def _next_ready(self) -> int | None:
        """The finished group that is to be decided now. In launch order: the one whose turn it is; None while
        that one, or in rounds any of them, still runs, or when the batch is full.
        """
        if self.paced:
            return next(iter(self._closed), None)
        if self._is_full() or (self.in_rounds and len(self._closed) < len(self._undecided)):
            return None
        turn = next(iter(self._undecided), None)
        return turn if turn in self._closed else None

    def _decide(self, index: int) -> bool:
        """Whether the group is kept. Raises what stops the whole call, leaving the group undecided."""
        reach("rollout.group_finished")
        group = self._closed[index]
        if group.error is not None:
            raise group.error
        assert group.decision is not None
        del self._closed[index], self._undecided[index]
        self._decided.append(group)
        self._failed += group.failed
        if group.failure_class is not None:
            self._failed_groups[index] = group
            self._dropped[group.decision.reason] += 1
        elif not group.decision.keep:
            self._drop([group], FILTERED + group.decision.reason, returned=False)
        elif self._is_stale(group.oldest_version):
            self._drop([group], STALE, returned=True)
        else:
            self._admit(self._kept, group)
            return True
        return False

    def _drop(self, groups: Sequence[Group], reason: str, *, returned: bool) -> None:
        """Counts attempts as dropped, and gives their prompts back if they are `returned`."""
        if groups:
            self.ledger.dropped[reason] += len(groups)
            self._dropped[reason] += len(groups)
        if self.plan.spans is not None:
            self.plan.spans.keep((), rest=(sample.id for group in groups for sample in group.samples))
        if returned:
            self.data_buffer.return_prompts([group.prompt for group in groups])

    def _is_stale(self, oldest: int | None) -> bool:
        """Whether the batch in the making is too late for tokens, the oldest of this version."""
        version = self.policy_version if self.paced else self.plan.policy_version()
        return oldest is not None and oldest + self.max_staleness < version

    def _check_budget(self) -> None:
        """Raises NotEnoughSamples when so many samples failed, or so many groups were drawn, that the batch
        is given up.
        """
        config = self.config
        # else the first failure would be a share of 1
        seen = max(len(self._decided), config.num_prompts) * config.samples_per_prompt
        # max_attempts alone bounds those of engines and of limits
        failed = [
            sample for sample in self._failed if failure_class_of(sample) not in (INFRASTRUCTURE, LEFT_OUT)
        ]
        if len(failed) > config.max_failed_fraction * seen:
            raise NotEnoughSamples(
                f"{len(failed)} of {seen} samples failed ({_count_text(map(failure_class_of, failed))}), more"
                f" than max_failed_fraction={config.max_failed_fraction:g} allows; the first:"
                f" {failed[0].metadata['failure']['message']}"
            )
        if len(self._kept) + len(self._undecided) >= config.num_prompts or self._drawn < self._draw_limit:
            return
        hints = ""
        if self._failed:
            hints = f"; the first failure: {self._failed[0].metadata['failure']['message']}"
        if STALE in self._dropped:
            hints += (
                f"; stale: the engine's weights are more than max_staleness={self.max_staleness} steps"
                " behind the trainer's"
            )
        raise NotEnoughSamples(
            f"{len(self._kept)} of num_prompts={config.num_prompts} groups were kept of {self._drawn} drawn"
            f" ({_count_text(self._dropped.elements()) or 'nothing dropped'}), and"
            f" max_attempts={config.max_attempts} allows no more; loosen the filters, use easier or harder"
            f" prompts, or raise max_attempts, or max_new_tokens where groups are truncated{hints}"
        )

    # --- the end of a batch ---------------------------------------------------------------------------------

    def deliver(self) -> RolloutBatch:
        """The batch. What is undecided is surplus, or goes on."""
        self._check_budget()
        # deadlines are all alike where groups have scores
        best = sorted(self._kept.values(), key=lambda group: (group.deadline, -group.score, group.index))
        groups = sorted(best[: self.config.num_prompts], key=lambda group: group.index)
        assert len(groups) == self.config.num_prompts, (len(groups), self.config.num_prompts)
        assert not any(self._is_stale(group.oldest_version) for group in groups), (
            "the policy version advanced while a batch was made"
        )
        ledger = self.ledger
        # config.replay of the groups of earlier batches that are not too old for this one, each as likely as
        # any other: a pure function of the seed and the groups trained so far
        ledger.replay = [group for group in ledger.replay if not self._is_stale(group.oldest_version or 0)]
        draws = np.random.default_rng([REPLAY_STREAM, self.plan.seed, ledger.trained])
        drawn = sorted(draws.permutation(len(ledger.replay))[: self.config.replay])
        samples = [sample for group in groups for sample in group.samples]
        samples += [
            replace(sample, metadata={**sample.metadata, REPLAYED: True})
            for index in drawn
            for sample in ledger.replay[index].samples
        ]
        batch = convert_to_batch(samples, temperature=self.plan.sampling.temperature)
        ledger.trained += len(groups)
        for group in groups:
            del self._kept[group.index]
        for group in self._failed_groups.values():
            ledger.failed[str(group.failure_class)] += 1
            if group.failure_class == INFRASTRUCTURE:
                self.data_buffer.return_prompts([group.prompt])
        self._failed_groups.clear()
        outranked = []
        if not self.paced:
            outranked = list(self._kept.values())
            self._kept.clear()
            self._drop(outranked, OUTRANKED, returned=False)
            self.put_back(SURPLUS)
        ledger.last_metrics = compute_batch_metrics(
            groups, outranked=outranked, decided=self._decided, drawn=self._drawn, dropped=self._dropped
        )
        if self.config.replay:
            ledger.replay += groups
            ledger.replayed += len(drawn)
            ledger.last_metrics["groups/replayed"] = Total(len(drawn))
        ledger.last_failed = tuple(self._failed)
        self._begin_batch()
        if self.waits_for_engines:  # the next batch is consumed when the trainer is done with this one
            self.policy_version += 1
            self._changed.unpark_all()
        return batch

    def _take_held(self) -> None:
        """Takes over held groups. Those that are too old go, and where nothing is carried over all of them: a
        manager with other settings has held them. Their prompts are returned.
        """
        held, self.ledger.held = self.ledger.held, {}
        returned = []
        for group in held.values():
            oldest = group.oldest_version
            if self._is_stale(oldest) or not self.paced:
                self._drop([group], STALE if self._is_stale(oldest) else SURPLUS, returned=False)
                returned.append(group)
                continue
            self._admit(self._undecided if group.decision is None else self._kept, group)
        self.data_buffer.return_prompts([group.prompt for group in returned])

    def open_groups(self) -> list[Group]:
        """All groups that are neither trained nor dropped, in launch order."""
        groups = self._kept | self._failed_groups | self._undecided
        return [groups[index] for index in sorted(groups)]

    def find_held(self) -> tuple[dict[int, Group], list[Group]]:
        """The groups that are carried over if it ends now, as copies, and the others, whose prompts are
        returned.

        Prompts of groups that failed are returned: what failed them may be what stopped the batch, and mended
        before they are drawn again. So are, unless the batch was full, those of groups that have not begun.
        """

        def is_held(group: Group) -> bool:
            if not self.paced or group.index in self._failed_groups:
                return False
            if group.decision is not None:
                fresh = group.decision.keep and not self._is_stale(group.oldest_version)
                return group.index in self._kept or fresh
            goes_on = group.error is None or isinstance(group.error, EngineError)
            has_begun = any(member.segments or member.partial is not None for member in group.members)
            return goes_on and (self._is_stopping or has_begun)

        groups = self.open_groups()
        held = {group.index: group.copy() for group in groups if is_held(group)}
        return held, [group for group in groups if group.index not in held]

    def put_back(self, reason: str) -> None:
        """Holds and returns what is left; does nothing after a batch that was delivered."""
        if reason == ABORTED:
            self.policy_version = self.plan.policy_version()
            self.ledger.last_failed = tuple(self._failed) or self.ledger.last_failed
        held, returned = self.find_held()
        self.ledger.held = dict(sorted((self.ledger.held | held).items()))
        for groups in (self._kept, self._failed_groups, self._undecided, self._closed):
            groups.clear()
        self._drop(returned, reason, returned=True)
        self.ledger.check(0)


def _count_text(names: Iterable[str]) -> str:
    counts = sorted(Counter(names).items())
    return ", ".join(f"{name.removeprefix(FILTERED)}: {count}" for name, count in counts)
