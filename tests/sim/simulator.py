"""Random runs of RL over a fleet of servers that fail, in virtual time, each made of one integer; what must
hold is checked after every event.

    run_rl_training ─► AsyncRolloutManager ─► Fleet ─► ServerEngine with both dialects, HttpClient
          │                                     ▲                       └─► simulated processes
          └─► SimulatedBackend (checks what it trains on)   WeightSync ─► names as snapshots

All but the ends are the real thing. Weights are a word; an engine's log-probs depend on the word that it
really serves, so a token from other weights than it says is found out when it trains. A trainer that stops,
is killed or gives up is followed by one that resumes from its checkpoint.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from unittest import mock

import numpy as np
import trio
import trio.testing

from rollouts.data.data_buffer import DataBuffer
from rollouts.engines.fleet import Fleet, open_fleet
from rollouts.engines.fleet_members import Member
from rollouts.errors import (
    FleetDown,
    InfrastructureError,
    NotEnoughSamples,
    StalenessError,
    WeightSyncError,
)
from rollouts.generation.async_rollout_manager import AsyncRolloutManager
from rollouts.generation.generate import make_chat_generate
from rollouts.loops.rl import run_rl_training
from rollouts.loops.steps import EncodeState, StepHooks
from rollouts.protocols import TrainingBackend
from rollouts.testing.fakes import FAKE_END, FakeTokenizer, fake_uniform
from rollouts.types import GenerateRequest, RolloutBatch, Sample, SampleGroup, SamplingParams
from rollouts.weight_sync.probe import make_probe
from rollouts.weight_sync.sync import WeightSync
from rollouts.weight_sync.update import SilenceLimits
from tests.sim.fakes import NoLog, RecordingBuffer, SimulatedBackend, SimulatedEngine, SimulatedSnapshots
from tests.sim.schedule import LEAST_FAULTS, LEAST_REQUESTS, LEAST_SYNCS, FleetSchedule, SimulatedServer
from tests.support.simulated_process import SimulatedProcess, open_simulated_process, weights_log_prob

MOST_VIRTUAL_S = 10_000.0  # far more than any schedule takes; a run that is longer waits for what never comes
MOST_LIVES = 8  # of trainers
VISITORS, VISITOR_TOKENS = 2, 6
MOST_WAIT_S = 1500.0  # of a request: longer than the fleet tries
SETTLE_S, MOST_SETTLES = 120.0, 12  # at the end: waits for engines to come back
VOCAB_SIZE = 258

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

    def __init__(self, invariant: Invariant, detail: str) -> None:
        super().__init__(f"{invariant}: {detail}")
        self.invariant: Invariant = invariant


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
    mixed_samples: int = 0  # that trained with tokens of several versions
    interruptions: list[str] = field(default_factory=list)  # what ended a trainer before its last step
    faults: Counter[str] = field(default_factory=Counter)  # that struck, by kind
    warnings: int = 0
    events: int = 0  # after each of which everything was checked
    statistics: Mapping[str, float] = field(default_factory=dict)  # of manager and fleet, at the end
    virtual_s: float = 0.0


def run_fleet_simulation(schedule: FleetSchedule) -> FleetReport:
    """Runs a schedule. Raises BrokenInvariant, whose note says how to see it again."""
    simulation = _Simulation(schedule)
    _seed_scheduler(schedule.seed)
    clock, watchers = trio.testing.MockClock(autojump_threshold=0), [_Watcher(simulation)]
    try:
        with mock.patch("rollouts.engines.fleet_requests.MAX_ATTEMPTS", schedule.max_attempts):
            trio.run(simulation.run, clock=clock, instruments=watchers)
    except BaseException as error:
        broken = simulation.broken or _find_broken(error)
        if broken is None:
            error.add_note(f"pytest tests/sim --sim-seed {schedule.seed}")
            raise
        simulation.broken = broken
        broken.__cause__ = None if broken is error else error
    if simulation.broken is not None:
        simulation.broken.add_note(
            f"pytest tests/sim --sim-seed {schedule.seed} (at {simulation.virtual_s:.2f} virtual seconds)"
        )
        raise simulation.broken
    return simulation.report


def describe_report(report: FleetReport) -> str:
    """One line."""
    faults = ", ".join(f"{count} {kind}" for kind, count in sorted(report.faults.items()))
    after = f" after {', '.join(report.interruptions)}" if report.interruptions else ""
    return (
        f"{report.outcome}{after}; {report.steps} steps, {report.syncs} syncs, {report.requests} requests,"
        f" {report.trained_tokens} tokens trained in {report.virtual_s:.0f} virtual seconds; {report.events}"
        f" events checked; {report.faults.total()} faults: {faults}"
    )


def _seed_scheduler(seed: int) -> None:
    """Which of several tasks that wake at once runs first is drawn from the seed too, so that a seed repeats
    its run.
    """
    from trio._core import _run  # trio offers this to its own Hypothesis plug-in only

    _run._ALLOW_DETERMINISTIC_SCHEDULING = True  # pyright: ignore[reportPrivateImportUsage]
    _run._r.seed(seed)


def _find_broken(error: BaseException) -> BrokenInvariant | None:
    """The invariant in an error or a group of them; the code's own assertions are one."""
    if isinstance(error, BaseExceptionGroup):
        found = [_find_broken(inner) for inner in error.exceptions]
        return next((broken for broken in found if broken is not None), None)
    if isinstance(error, BrokenInvariant):
        return error
    if isinstance(error, StalenessError):
        return BrokenInvariant("tokens", str(error))
    if isinstance(error, AssertionError):
        return BrokenInvariant("assertion", str(error))
    return None


class _Watcher(trio.abc.Instrument):
    def __init__(self, simulation: _Simulation) -> None:
        self._simulation = simulation

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        self._simulation.check_event()


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    """What a trainer leaves to the next."""

    step: int
    state: str  # JSON of buffer and manager
    out: frozenset[tuple[int, str]]  # prompts that are not in the buffer
    trained: frozenset[tuple[int, str]]
    lineage: tuple[str, ...]


@dataclass(slots=True, eq=False)
class _Trainer:
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


# --- one run ------------------------------------------------------------------------------------------------


class _Simulation:
    def __init__(self, schedule: FleetSchedule) -> None:
        self.schedule = schedule
        self.report = FleetReport()
        self.broken: BrokenInvariant | None = None
        self.virtual_s = 0.0
        self.scope = trio.CancelScope()
        self.servers = {server.name: server for server in schedule.servers}
        self.processes: dict[str, SimulatedProcess] = {}
        self.members = [server.name for server in schedule.servers if not server.joins_at_s]
        self.snapshots = SimulatedSnapshots(schedule.export_s)
        self.chat_generate = make_chat_generate(FakeTokenizer())
        self.trainer: _Trainer | None = None
        self.stop = StepHooks().stop
        self.lives = 0
        self.life = trio.CancelScope()  # around a trainer
        self.last_seen = ""
        self.checkpoint = _Checkpoint(0, "", frozenset(), frozenset(), ("w0",))

    async def run(self) -> None:
        schedule = self.schedule
        async with AsyncExitStack() as stack:
            for server in schedule.servers:
                opened = open_simulated_process(
                    server.name,
                    schedule.faults,
                    speed=server.speed,
                    vocab_size=VOCAB_SIZE,
                    read_weights=self.snapshots.read,
                )
                self.processes[server.name] = await stack.enter_async_context(opened)
            with self.scope:
                self.scope.deadline = trio.current_time() + MOST_VIRTUAL_S
                async with trio.open_nursery() as nursery:
                    for server in schedule.servers:
                        nursery.start_soon(self.come_and_go, server)
                    while not await self.live() and self.lives < MOST_LIVES:
                        pass
                    nursery.cancel_scope.cancel()
            if self.scope.cancelled_caught and self.broken is None:
                self.broken = BrokenInvariant(
                    "progress", f"the run has not ended after {MOST_VIRTUAL_S:g} s; {self.last_seen}"
                )
            if self.broken is None:
                self.check_report()

    async def come_and_go(self, server: SimulatedServer) -> None:
        """Lets a server join and leave whatever fleet there is at the time."""
        if server.joins_at_s:
            await trio.sleep_until(server.joins_at_s)
            self.members.append(server.name)
            if self.trainer is not None:
                await self.trainer.fleet.join(self.make_member(server.name, self.trainer.engines))
        if server.leaves_at_s == math.inf:
            return
        await trio.sleep_until(server.leaves_at_s)
        self.members.remove(server.name)
        if self.trainer is not None and server.name in self.trainer.engines:
            await self.trainer.fleet.leave(self.trainer.engines[server.name], grace_s=20.0)

    # --- one trainer ----------------------------------------------------------------------------------------

    async def live(self) -> bool:
        """Whether this trainer has finished the run, or its successor is not to try."""
        self.lives += 1
        schedule = self.schedule
        outcome = "killed"
        self.life = trio.CancelScope()
        if schedule.ends == "kill" and self.lives == 1:
            self.life.deadline = trio.current_time() + schedule.ends_at
        with self.life:
            outcome = await self.train()
        self.trainer = None
        self.report.virtual_s = trio.current_time()
        if outcome != "completed":
            self.report.interruptions.append(outcome)
        self.report.outcome = "completed" if outcome == "completed" else "gave up"
        return outcome == "completed"

    async def train(self) -> str:
        """Why this trainer ended."""
        try:
            async with self.open_trainer() as trainer, trio.open_nursery() as nursery:
                nursery.start_soon(trainer.sync.keep_engines_current)
                async with trio.open_nursery() as visitors:
                    for number in range(VISITORS):
                        visitors.start_soon(self.visit, trainer, number)
                    outcome = await self.train_until_it_ends(trainer)
                    trainer.trained_all.set()  # they leave when they have their answers
                    if outcome != "completed":
                        visitors.cancel_scope.cancel()
                if outcome == "completed":
                    await self.settle(trainer)
                nursery.cancel_scope.cancel()
                return outcome
        finally:
            self.trainer = None
        raise AssertionError("unreachable")

    @asynccontextmanager
    async def open_trainer(self) -> AsyncIterator[_Trainer]:
        schedule, saved = self.schedule, self.checkpoint
        engines: dict[str, SimulatedEngine] = {}
        members = [self.make_member(name, engines) for name in self.members]
        async with open_fleet(
            members,
            max_concurrency=schedule.max_concurrency,
            down_limit_s=schedule.down_limit_s,
            seed=schedule.seed,
            warn=self.warn,
        ) as fleet:
            backend = SimulatedBackend(
                step_s=schedule.step_s,
                lineage=list(saved.lineage),
                name_next=self.name_weights,
                check_batch=self.check_batch,
            )
            limit_s = schedule.silence_s * 2
            sync = WeightSync(
                make_probe(VOCAB_SIZE, tolerance=1e-4),
                keeper=self.snapshots,
                fleet=fleet,
                limits=SilenceLimits(
                    pause=limit_s, load=limit_s, set_version=limit_s, resume=limit_s, probe=limit_s * 4
                ),
                warn=self.warn,
            )
            buffer = RecordingBuffer(
                DataBuffer([{"prompt": f"p{row}"} for row in range(schedule.rows)], seed=schedule.seed),
                set(saved.out),
            )
            manager = AsyncRolloutManager(
                buffer,
                fleet,
                generate=self.chat_generate,
                config=schedule.config.rollout,
                reward=self.reward,
                filters=[self.filter],
                sampling=SamplingParams(max_new_tokens=schedule.max_new_tokens, stop_token_ids=(FAKE_END,)),
                seed=schedule.seed,
                policy_version=lambda: backend.weight_version,
                max_staleness=schedule.config.max_staleness,
            )
            if saved.state:
                buffer_state, manager_state = json.loads(saved.state)
                buffer.buffer.load_state_dict(buffer_state)
                manager.load_state_dict(manager_state)
            self.trainer = trainer = _Trainer(
                fleet, engines, sync, backend, buffer, manager, set(saved.trained)
            )
            self.check_books(trainer)
            try:
                yield trainer
            finally:
                self.last_seen, self.trainer = self.describe(), None
                for engine in engines.values():
                    engine.close()

    async def train_until_it_ends(self, trainer: _Trainer) -> str:
        schedule, start = self.schedule, self.checkpoint.step
        hooks = StepHooks(
            hold_state=self.hold_state, save=self.save, checkpoint_every=schedule.checkpoint_every
        )
        self.stop = hooks.stop
        try:
            await self.sync_weights(trainer.backend, [trainer.fleet], start)
            history = await run_rl_training(
                trainer.backend, trainer.buffer.buffer, trainer.manager, [trainer.fleet], schedule.config,
                NoLog(), sync_weights=self.sync_weights, completed_steps=start, hooks=hooks,
            )  # fmt: skip
        except (WeightSyncError, FleetDown, NotEnoughSamples) as error:
            self.check_books(trainer)
            self.check_explained(error, trainer)
            return type(error).__name__
        self.check_books(trainer)
        return "completed" if start + len(history) == schedule.config.steps else "stopped"

    async def visit(self, trainer: _Trainer, number: int) -> None:
        """Asks the fleet all the time, also while it is updated, as an evaluation does, and looks at every
        answer.
        """
        sampling = SamplingParams(max_new_tokens=VISITOR_TOKENS)
        for count in itertools.takewhile(lambda _: not trainer.trained_all.is_set(), itertools.count()):
            prompt_ids = np.arange(1 + (count + number) % 7)
            request = GenerateRequest(
                request_id=f"visitor-{number}-{count}",
                prompt_ids=prompt_ids,
                sampling=replace(sampling, seed=count),
            )
            try:
                with trio.fail_after(MOST_WAIT_S):
                    completion = await trainer.fleet.generate(request)
            except trio.TooSlowError:
                raise BrokenInvariant(
                    "progress", f"{request.request_id} got no answer in {MOST_WAIT_S:g} s; {self.describe()}"
                ) from None
            except (InfrastructureError, FleetDown):
                await trio.sleep(1.0)
                continue
            for index, (token, log_prob, of) in enumerate(
                zip(completion.token_ids, completion.log_probs, completion.weight_versions, strict=True)
            ):
                self.check_token(
                    trainer,
                    len(prompt_ids) + index,
                    int(token),
                    float(log_prob),
                    int(of),
                    oldest=0,
                    newest=trainer.most_committed,
                )
            await trio.sleep(0.5)

    async def sync_weights(
        self,
        backend: TrainingBackend,
        engines: Sequence[Any],
        version: int,
        *,
        released: trio.Event | None = None,
    ) -> Mapping[str, float]:
        trainer = self.trainer
        assert trainer is not None
        trainer.syncing = version
        metrics = await trainer.sync(backend, engines, version, released=released)
        self.report.syncs += 1
        self.report.released += released is not None and released.is_set()
        if trainer.fleet.published_version != version:
            self.fail(
                "published",
                f"the trainer has synced {version}, published is {trainer.fleet.published_version}",
            )
        return metrics

    def hold_state(self) -> EncodeState:
        """What a checkpoint of this moment holds. Requests the stop that the schedule wants."""
        trainer = self.trainer
        assert trainer is not None
        self.check_books(trainer)
        version = trainer.backend.weight_version
        if self.schedule.ends == "stop" and self.lives == 1 and version >= self.schedule.ends_at:
            self.stop.request()
        in_flight = int(trainer.manager.statistics()["in_flight"])
        drawn, rollouts = trainer.buffer.buffer.state_dict(), trainer.manager.snapshot()
        out, trained = frozenset(trainer.buffer.out), frozenset(trainer.trained)
        lineage = tuple(trainer.backend.lineage)

        def encode() -> dict[str, Any]:
            self.report.saved_in_flight += in_flight
            state = json.dumps([drawn, rollouts()])
            return {"checkpoint": _Checkpoint(version, state, out, trained, lineage)}

        return encode

    async def save(self, step: int, encode: EncodeState) -> None:
        await trio.lowlevel.checkpoint()
        self.checkpoint = encode()["checkpoint"]
        assert self.checkpoint.step == step, (self.checkpoint.step, step)

    def make_member(self, name: str, engines: dict[str, SimulatedEngine]) -> Member:
        server = self.servers[name]
        engine = engines[name] = SimulatedEngine(
            self.processes[name], server.dialect, silence_s=self.schedule.silence_s
        )
        return Member(
            engine,
            self.processes[name].restart if server.can_restart else None,
            self.processes[name].wait_exited if server.is_watched else None,
        )

    def name_weights(self, lineage: list[str]) -> str:
        """What the next step makes of the weights; the same step of another trainer makes others."""
        step = len(lineage)
        skipped = fake_uniform(self.schedule.seed, "skipped", step) < self.schedule.skipped_step_rate
        return lineage[-1] if skipped else f"w{step}.{self.lives}"

    async def reward(self, sample: Sample) -> float:
        seed = self.schedule.seed
        await trio.sleep(self.schedule.reward_s * int(4 * fake_uniform(seed, "takes", sample.id)))
        if fake_uniform(seed, "reward fails", sample.id) < self.schedule.failed_reward_rate:
            kind = int(3 * fake_uniform(seed, "how", sample.id))
            if kind == 0:
                raise ValueError("a bug in the reward")
            await trio.sleep(math.inf if kind == 1 else 0.0)
            return math.nan
        return fake_uniform(seed, "reward", sample.id)

    async def filter(self, group: SampleGroup) -> bool:
        await trio.lowlevel.checkpoint()
        return fake_uniform(self.schedule.seed, "filter", group.group_index) >= self.schedule.drop_rate

    def warn(self, text: str) -> None:
        self.report.warnings += 1

    # --- what must hold -------------------------------------------------------------------------------------

    def fail(self, invariant: Invariant, detail: str) -> None:
        """Ends the run; the first to fail is told."""
        if self.broken is None:
            self.broken = BrokenInvariant(invariant, detail)
            self.virtual_s = trio.current_time()
            self.scope.cancel()

    def check_event(self) -> None:
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
        for name, member in fleet._members.items():
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

    def check_serving(self, name: str, committed: int | None, trainer: _Trainer, published: int) -> None:
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

    def check_batch(self, batch: RolloutBatch) -> None:
        """Every token that trains, and which prompts do."""
        trainer = self.trainer
        assert (
            trainer is not None and batch.rollout_log_probs is not None and batch.weight_versions is not None
        )
        version = trainer.backend.weight_version
        oldest = version - self.schedule.config.max_staleness
        rows = zip(
            batch.tokens, batch.loss_masks, batch.rollout_log_probs, batch.weight_versions, strict=True
        )
        for tokens, mask, log_probs, versions in rows:
            for position in np.flatnonzero(mask).tolist():
                token, log_prob, of = (
                    int(tokens[position]),
                    float(log_probs[position]),
                    int(versions[position]),
                )
                self.check_token(
                    trainer, position, token, log_prob, of, oldest=max(oldest, 0), newest=version
                )
                self.report.trained_tokens += 1
            self.report.mixed_samples += len(set(versions[mask].tolist())) > 1
        self.check_prompts(batch, trainer)
        self.report.steps += 1

    def check_token(
        self,
        trainer: _Trainer,
        position: int,
        token: int,
        log_prob: float,
        version: int,
        *,
        oldest: int,
        newest: int,
    ) -> None:
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

    def check_prompts(self, batch: RolloutBatch, trainer: _Trainer) -> None:
        rollout = self.schedule.config.rollout
        ids = [sample.id for sample in batch.samples]
        groups = Counter((metadata["epoch"], metadata["prompt_id"]) for metadata in batch.metadata)
        if (
            len(set(ids)) != len(ids)
            or len(groups) != rollout.num_prompts
            or max(groups.values()) > rollout.samples_per_prompt
        ):
            raise BrokenInvariant("prompts", f"a batch of {ids}")
        if again := trainer.trained & groups.keys():
            raise BrokenInvariant("prompts", f"{sorted(again)} trained twice")
        trainer.trained |= groups.keys()

    def check_books(self, trainer: _Trainer) -> None:
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

    def check_explained(self, error: Exception, trainer: _Trainer) -> None:
        """No engine of the fleet went without a fault."""
        spared = [name for name in trainer.fleet._members if not self.processes[name].struck]
        if spared:
            raise BrokenInvariant(
                "explained", f"{', '.join(spared)} had no fault, and yet: {type(error).__name__}: {error}"
            )

    # --- the end --------------------------------------------------------------------------------------------

    async def settle(self, trainer: _Trainer) -> None:
        """Waits until all who can serve do, and looks for what was left behind."""
        for _ in range(MOST_SETTLES):
            await trio.sleep(SETTLE_S)
            missing = self.find_missing(trainer)
            if not missing:
                break
            try:
                await self.sync_weights(trainer.backend, [trainer.fleet], trainer.backend.weight_version)
            except (WeightSyncError, FleetDown) as error:
                self.check_explained(error, trainer)
        else:
            missing = self.find_missing(trainer)
            if missing:
                raise BrokenInvariant("recovered", f"{', '.join(missing)} serve no more; {self.describe()}")
        self.check_idle(trainer)
        self.report.statistics = trainer.manager.statistics()

    def find_missing(self, trainer: _Trainer) -> list[str]:
        """Members that could serve, and do not."""
        return [
            name
            for name, member in trainer.fleet._members.items()
            if not member.in_service
            and not member.leaving
            and (self.processes[name].up or (self.servers[name].can_restart and not member.gave_up))
        ]

    def check_idle(self, trainer: _Trainer) -> None:
        fleet = trainer.fleet
        left = {
            "requests": len(fleet._calls),
            **{f"{name} seats": len(member.calls) for name, member in fleet._members.items()},
            **{f"{name} tasks": len(engine._in_flight) for name, engine in trainer.engines.items()},
            **{
                f"{name} requests": len(process.running)
                for name, process in self.processes.items()
                if process.up
            },
            "fleet tasks": len(fleet._nursery.child_tasks) - len(fleet._members) - 1,
        }
        if found := {what: count for what, count in left.items() if count}:
            raise BrokenInvariant("idle", f"left behind: {found}")
        paused = [
            name
            for name, member in fleet._members.items()
            if self.processes[name].up and self.processes[name].paused is not None
        ]
        if paused:
            raise BrokenInvariant("paused", f"{', '.join(paused)} at the end")

    def check_report(self) -> None:
        report = self.report
        report.requests = sum(process.requests for process in self.processes.values())
        for process in self.processes.values():
            report.faults.update(type(fault.what).__name__ for fault in process.struck)
        if report.outcome != "completed":
            return
        had = (report.syncs, report.requests, report.faults.total())
        if any(
            count < least
            for count, least in zip(had, (LEAST_SYNCS, LEAST_REQUESTS, LEAST_FAULTS), strict=True)
        ):
            self.broken = BrokenInvariant("minimum", f"syncs, requests, faults: {had}")

    def describe(self) -> str:
        if self.trainer is None:
            return "no trainer"
        states = "; ".join(member.describe() for member in self.trainer.fleet._members.values())
        return f"version {self.trainer.backend.weight_version}, {self.report.steps} steps; {states}"
