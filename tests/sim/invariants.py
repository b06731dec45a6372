"""What must hold of a simulated run, after every event, every batch and every saved state."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import trio
import trio.testing

from rollouts.engines.fleet import Fleet
from rollouts.generation.async_rollout_manager import AsyncRolloutManager
from rollouts.generation.collector import REPLAYED
from rollouts.weight_sync.sync import WeightSync
from tests.sim.fakes import RecordingBuffer, SimulatedBackend, SimulatedEngine, SimulatedSnapshots
from tests.support.simulated_process import SimulatedProcess, weights_log_prob

Invariant = Literal[
    "ledger",  # every prompt drawn is in exactly one place of the manager's books
    "prompts",  # and of the buffer's: none lost, none trained twice
    # whoever gets requests has committed the published version, or the one that is being published
    "serving",
    "weights",  # and really serves its weights, or its process is gone and nobody could know
    "published",  # nothing is published that no engine has proven, nor committed that the trainer has not
    "paused",  # no engine is left paused without an attempt to resume it
    "seats",  # requests in flight are those that hold a seat
    "tokens",  # a trained token is of a version inside the window, and its log-prob is that of those weights
    "snapshot",  # nobody loads a snapshot that was removed
    "idle",  # at the end nothing is in flight, queued or running
    "recovered",  # at the end every engine that can serve does
    "progress",  # the run ends
    "explained",  # only faults stop a run
    "assertion",  # a promise that the code makes to itself
    "minimum",  # the run had what every run must have
]


class BrokenInvariant(AssertionError):
    """What was found, and by which invariant."""

    def __init__(self, invariant, detail):
        super().__init__(f"{invariant}: {detail}")
        self.invariant = invariant


@dataclass(slots=True)
class FleetReport:
    """What happened, for tests to compare and count."""

    outcome: str = ""  # completed, or gave up
    steps: int = 0  # trained, those that were repeated included
    syncs: int = 0  # weight updates that were published
    released: int = 0  # of those, that let the trainer go on before their end
    saved_in_flight: int = 0  # groups that were in the making when a checkpoint was written
    requests: int = 0  # that came to servers
    trained_tokens: int = 0
    replayed: int = 0  # groups that trained again
    mixed_samples: int = 0  # that trained with tokens of several versions
    interruptions: list[str] = field(default_factory=list)  # what ended a trainer before its last step
    faults: Counter[str] = field(default_factory=Counter)  # that struck, by kind
    warnings: int = 0
    events: int = 0  # after each of which everything was checked
    statistics: Mapping[str, float] = field(default_factory=dict)  # of manager and fleet, at the end
    virtual_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a trainer leaves to the next."""

    step: int
    state: str  # JSON of buffer and manager
    out: frozenset[tuple[int, str]]  # prompts that are not in the buffer
    trained: frozenset[tuple[int, str]]
    lineage: tuple[str, ...]


@dataclass(slots=True, eq=False)
class Trainer:
    """One trainer process: what is gone when it ends."""

    fleet: Fleet
    engines: dict[str, SimulatedEngine]
    sync: WeightSync
    backend: SimulatedBackend
    buffer: RecordingBuffer
    manager: AsyncRolloutManager
    trained: set[tuple[int, str]]
    incarnations: dict[str, int] = field(
        default_factory=dict
    )  # of the process that was last committed, by engine
    updating: set[str] = field(default_factory=set)
    doubted: set[str] = field(
        default_factory=set
    )  # suspects whose process is another one than that which was committed
    most_committed: int = -1
    syncing: int = -1  # the version of the last update that was begun
    trained_all: trio.Event = field(default_factory=trio.Event)


class Checks:
    """The part of a simulation that looks."""

    def __init__(self, schedule):
        self.schedule = schedule
        self.report = FleetReport()
        self.broken: BrokenInvariant | None = None
        self.virtual_s = 0.0
        self.scope = trio.CancelScope()
        self.life = trio.CancelScope()  # around a trainer
        self.servers = {server.name: server for server in schedule.servers}
        self.processes: dict[str, SimulatedProcess] = {}
        self.snapshots = SimulatedSnapshots(schedule.export_s)
        self.trainer: Trainer | None = None

    def fail(self, invariant, detail):
        """Ends the run; the first to fail is told."""
        if self.broken is None:
            self.broken = BrokenInvariant(invariant, detail)
            self.virtual_s = trio.current_time()
            self.scope.cancel()

    def check_event(self):
        """After every step of every task. Cheap: it is most of what a run costs."""
        trainer = self.trainer
        if trainer is None or self.broken is not None:
            return
        self.report.events += 1
        try:
            trainer.manager.check_ledger()
        except AssertionError as error:
            self.fail("ledger", str(error))
        if self.snapshots.missed:
            self.fail("snapshot", f"an engine was told to load {self.snapshots.missed}, which are removed")
        fleet, version = trainer.fleet, trainer.backend.weight_version
        published, is_syncing = fleet.published_version, trainer.sync._lock.locked()
        for member in fleet._members:
            name = member.name
            if member.version is not None and member.version > trainer.most_committed:
                trainer.most_committed = member.version
            if left := [call for call in member.calls if call.request.request_id not in fleet._calls]:
                self.fail("seats", f"{name} keeps seats of {len(left)} requests that have ended")
            process = self.processes[name]
            if member.updating:
                trainer.updating.add(name)
                trainer.doubted.discard(name)
                continue
            if name in trainer.updating:
                trainer.updating.remove(name)
                trainer.incarnations[name] = process.incarnation
            if member.in_service:
                self.check_serving(name, member.version, trainer, published)
                continue
            if (
                member.condition == "suspect"
                and process.up
                and process.incarnation != trainer.incarnations.get(name)
            ):
                trainer.doubted.add(name)  # the check that comes has to notice
            if (
                process.paused is not None
                and process.up
                and not is_syncing
                and not trainer.engines[name].resume_tried
            ):
                self.fail(
                    "paused",
                    f"{name} is paused ({process.paused}), nobody updates it, and nobody has tried to"
                    " resume it",
                )
        if published > trainer.most_committed or trainer.most_committed > version:
            self.fail(
                "published",
                f"published is {published}, the trainer has {version}, engines have proven"
                f" {trainer.most_committed} at most",
            )

    def check_serving(self, name, committed, trainer, published):
        is_syncing = trainer.sync._lock.locked()
        if self.life.cancel_called and committed is not None:
            published = committed  # a trainer that is killed between commit and publish leaves the fleet so
        if committed is None or not (
            committed == published or (is_syncing and committed == trainer.syncing > published)
        ):
            self.fail("serving", f"{name} gets requests with version {committed}, published is {published}")
            return
        process = self.processes[name]
        other_process = process.incarnation != trainer.incarnations.get(name, process.incarnation)
        if not process.up or (
            other_process and not self.servers[name].is_watched and name not in trainer.doubted
        ):
            return  # nobody can know yet; its answers are checked when they train
        if process.paused is not None:
            self.fail("paused", f"{name} gets requests and is paused ({process.paused})")
        if process.weights != trainer.backend.lineage[committed]:
            weights = trainer.backend.lineage[committed]
            self.fail(
                "weights",
                f"{name} gets requests as version {committed}, which is {weights}, and serves"
                f" {process.weights}",
            )

    def check_batch(self, batch):
        """Every token that trains, and which prompts do."""
        trainer = self.trainer
        version = trainer.backend.weight_version
        oldest = version - self.schedule.config.max_staleness
        rows = zip(
            batch.tokens, batch.loss_masks, batch.rollout_log_probs, batch.weight_versions, strict=True
        )
        for tokens, mask, log_probs, versions in rows:
            own = np.flatnonzero(mask)
            told = own, tokens[own], log_probs[own], versions[own]
            self.check_tokens(trainer, *told, oldest=max(oldest, 0), newest=version)
            self.report.trained_tokens += len(own)
            self.report.mixed_samples += len(set(versions[mask].tolist())) > 1
        self.check_prompts(batch, trainer)
        self.report.steps += 1

    def check_tokens(self, trainer, *told, oldest, newest):
        """`told`: by token its position, id, log-prob and version."""
        for position, token, log_prob, version in zip(*(row.tolist() for row in told), strict=True):
            if not oldest <= version <= newest:
                raise BrokenInvariant(
                    "tokens", f"token {position} is of version {version}, the window is {oldest} to {newest}"
                )
            expected = weights_log_prob(trainer.backend.lineage[version], position, token)
            if abs(log_prob - expected) > 1e-6:
                raise BrokenInvariant(
                    "tokens",
                    f"token {position} says version {version}: its log-prob is {log_prob}, of those weights"
                    f" {expected}",
                )

    def check_prompts(self, batch, trainer):
        rollout = self.schedule.config.rollout
        ids = [sample.id for sample in batch.samples]
        groups = Counter((metadata["epoch"], metadata["prompt_id"]) for metadata in batch.metadata)
        replayed = {(row["epoch"], row["prompt_id"]) for row in batch.metadata if REPLAYED in row}
        self.report.replayed += len(replayed)
        if (
            len(set(ids)) != len(ids)
            or len(groups) != rollout.num_prompts + len(replayed)
            or len(replayed) > rollout.replay
            or max(groups.values()) > rollout.samples_per_prompt
        ):
            raise BrokenInvariant("prompts", f"a batch of {ids}")
        if again := (trainer.trained & groups.keys()) ^ replayed:
            raise BrokenInvariant("prompts", f"{sorted(again)} trained twice, or again and never before")
        trainer.trained |= groups.keys()

    def check_books(self, trainer):
        """Every prompt taken off the stream waits in the buffer, or was trained, dropped, failed, is held,
        or, ahead of its batch, in flight.
        """
        books = trainer.manager.statistics()
        final = {name: count for name, count in books.items() if name.startswith(("dropped/", "failed/"))}
        given_back = sum(
            final.pop(name, 0)
            for name in ("dropped/surplus", "dropped/stale", "dropped/aborted", "failed/infrastructure")
        )
        used_up = books["trained"] + books["held"] + books["in_flight"] + sum(final.values())
        buffer = trainer.buffer.buffer.statistics()
        if (books["in_flight"] and not trainer.manager.overlaps) or books["drawn"] != used_up + given_back:
            raise BrokenInvariant("ledger", f"{books}")
        if books.get("dropped/stale"):
            raise BrokenInvariant("tokens", f"{books['dropped/stale']:g} groups became too old")
        if buffer["drawn"] != buffer["returned"] + used_up or len(trainer.buffer.out) != used_up:
            raise BrokenInvariant(
                "prompts",
                f"a prompt was lost: {buffer}, {len(trainer.buffer.out)} are out, {used_up} are used up",
            )
        if not trainer.trained <= trainer.buffer.out or len(trainer.trained) != books["trained"]:
            raise BrokenInvariant(
                "prompts", f"{len(trainer.trained)} trained, the books say {books['trained']}"
            )

    def check_explained(self, error, trainer):
        """No engine of the fleet went without a fault."""
        spared = [one.name for one in trainer.fleet._members if not self.processes[one.name].struck]
        if spared:
            raise BrokenInvariant(
                "explained", f"{', '.join(spared)} had no fault, and yet: {type(error).__name__}: {error}"
            )
