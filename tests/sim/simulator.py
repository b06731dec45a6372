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
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from unittest import mock

import numpy as np
import trio
import trio.testing

from rollouts.data.data_buffer import DataBuffer
from rollouts.engines.fleet import open_fleet
from rollouts.engines.fleet_members import Member
from rollouts.errors import FleetDown, InfrastructureError, NotEnoughSamples, StalenessError, WeightSyncError
from rollouts.filters import reward_std
from rollouts.generation.async_rollout_manager import AsyncRolloutManager
from rollouts.generation.generate import make_chat_generate
from rollouts.loops.rl import run_rl_training
from rollouts.loops.steps import StepHooks
from rollouts.testing.fakes import fake_uniform
from rollouts.types import GenerateRequest, SamplingParams
from rollouts.weight_sync.sync import WeightSync
from rollouts.weight_sync.update import SilenceLimits, make_probe
from tests.sim.fakes import NoLog, RecordingBuffer, SimulatedBackend, SimulatedEngine
from tests.sim.invariants import BrokenInvariant, Checkpoint, Checks, Trainer
from tests.sim.schedule import LEAST_FAULTS, LEAST_REQUESTS, LEAST_SYNCS
from tests.support.fake_tokenizer import FAKE_END, FakeTokenizer
from tests.support.simulated_process import open_simulated_process

MOST_VIRTUAL_S = 10_000.0  # far more than any schedule takes; a run that is longer waits for what never comes
MOST_LIVES = 8  # of trainers
VISITORS, VISITOR_TOKENS = 2, 6
MOST_WAIT_S = 1500.0  # of a request: longer than the fleet tries
SETTLE_S, MOST_SETTLES = 120.0, 12  # at the end: waits for engines to come back
VOCAB_SIZE = 258


def run_fleet_simulation(schedule):
    """Runs a schedule. Raises BrokenInvariant, whose note says how to see it again."""
    simulation = _Simulation(schedule)
    _seed_scheduler(schedule.seed)
    clock, watchers = trio.testing.MockClock(autojump_threshold=0), [_Watcher(simulation)]
    try:
        with mock.patch("rollouts.engines.fleet.MAX_ATTEMPTS", schedule.max_attempts):
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


def _seed_scheduler(seed):
    """Which of several tasks that wake at once runs first is drawn from the seed too, so that a seed repeats
    its run.
    """
    from trio._core import _run  # trio offers this to its own Hypothesis plug-in only

    _run._ALLOW_DETERMINISTIC_SCHEDULING = True  # pyright: ignore[reportPrivateImportUsage]
    _run._r.seed(seed)


def _find_broken(error):
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
    def __init__(self, simulation):
        self._simulation = simulation

    def after_task_step(self, task):
        self._simulation.check_event()


# --- one run ------------------------------------------------------------------------------------------------


class _Simulation(Checks):
    def __init__(self, schedule):
        super().__init__(schedule)
        self.members = [server.name for server in schedule.servers if not server.joins_at_s]
        self.chat_generate = make_chat_generate(FakeTokenizer())
        self.stop = StepHooks().stop
        self.lives = 0
        self.last_seen = ""
        self.checkpoint = Checkpoint(0, "", frozenset(), frozenset(), ("w0",))

    async def run(self):
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

    async def come_and_go(self, server):
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

    async def live(self):
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

    async def train(self):
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
    async def open_trainer(self):
        schedule, saved = self.schedule, self.checkpoint
        engines = {}
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
                ranker=self.rank if schedule.config.rollout.ranker else None,
                sampling=SamplingParams(max_new_tokens=schedule.max_new_tokens, stop_token_ids=(FAKE_END,)),
                seed=schedule.seed,
                policy_version=lambda: backend.weight_version,
                max_staleness=schedule.config.max_staleness,
            )
            if saved.state:
                buffer_state, manager_state = json.loads(saved.state)
                buffer.buffer.load_state_dict(buffer_state)
                manager.load_state_dict(manager_state)
            self.trainer = trainer = Trainer(
                fleet, engines, sync, backend, buffer, manager, set(saved.trained)
            )
            self.check_books(trainer)
            try:
                yield trainer
            finally:
                self.last_seen, self.trainer = self.describe(), None
                for engine in engines.values():
                    engine.close()

    async def train_until_it_ends(self, trainer):
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

    async def visit(self, trainer, number):
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
            places = len(prompt_ids) + np.arange(len(completion.token_ids))
            told = places, completion.token_ids, completion.log_probs, completion.weight_versions
            self.check_tokens(trainer, *told, oldest=0, newest=trainer.most_committed)
            await trio.sleep(0.5)

    async def sync_weights(
        self,
        backend,
        engines,
        version,
        *,
        released=None,
    ):
        trainer = self.trainer
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

    def hold_state(self):
        """What a checkpoint of this moment holds. Requests the stop that the schedule wants."""
        trainer = self.trainer
        self.check_books(trainer)
        version = trainer.backend.weight_version
        if self.schedule.ends == "stop" and self.lives == 1 and version >= self.schedule.ends_at:
            self.stop.request()
        in_flight = int(trainer.manager.statistics()["in_flight"])
        drawn, rollouts = trainer.buffer.buffer.state_dict(), trainer.manager.snapshot()
        out, trained = frozenset(trainer.buffer.out), frozenset(trainer.trained)
        lineage = tuple(trainer.backend.lineage)

        def encode():
            self.report.saved_in_flight += in_flight
            state = json.dumps([drawn, rollouts()])
            return {"checkpoint": Checkpoint(version, state, out, trained, lineage)}

        return encode

    async def save(self, step, encode):
        await trio.lowlevel.checkpoint()
        self.checkpoint = encode()["checkpoint"]
        assert self.checkpoint.step == step, (self.checkpoint.step, step)

    def make_member(self, name, engines):
        server = self.servers[name]
        engine = engines[name] = SimulatedEngine(
            self.processes[name], server.dialect, silence_s=self.schedule.silence_s
        )
        return Member(
            engine,
            self.processes[name].restart if server.can_restart else None,
            self.processes[name].wait_exited if server.is_watched else None,
        )

    def name_weights(self, lineage):
        """What the next step makes of the weights; the same step of another trainer makes others."""
        step = len(lineage)
        skipped = fake_uniform(self.schedule.seed, "skipped", step) < self.schedule.skipped_step_rate
        return lineage[-1] if skipped else f"w{step}.{self.lives}"

    async def reward(self, sample):
        seed = self.schedule.seed
        await trio.sleep(self.schedule.reward_s * int(4 * fake_uniform(seed, "takes", sample.id)))
        if fake_uniform(seed, "reward fails", sample.id) < self.schedule.failed_reward_rate:
            kind = int(3 * fake_uniform(seed, "how", sample.id))
            if kind == 0:
                raise ValueError("a bug in the reward")
            await trio.sleep(math.inf if kind == 1 else 0.0)
            return math.nan
        return fake_uniform(seed, "reward", sample.id)

    async def rank(self, group):
        await trio.lowlevel.checkpoint()
        return reward_std(group)

    async def filter(self, group):
        await trio.lowlevel.checkpoint()
        return fake_uniform(self.schedule.seed, "filter", group.group_index) >= self.schedule.drop_rate

    def warn(self, text):
        self.report.warnings += 1

    # --- the end --------------------------------------------------------------------------------------------

    async def settle(self, trainer):
        """Waits until all who can serve do, and looks for what was left behind."""
        for _ in range(MOST_SETTLES):
            await trio.sleep(SETTLE_S)
            if not self.find_missing(trainer):
                break
            try:
                await self.sync_weights(trainer.backend, [trainer.fleet], trainer.backend.weight_version)
            except (WeightSyncError, FleetDown) as error:
                self.check_explained(error, trainer)
        if missing := self.find_missing(trainer):
            raise BrokenInvariant("recovered", f"{', '.join(missing)} serve no more; {self.describe()}")
        self.check_idle(trainer)
        self.report.statistics = trainer.manager.statistics()

    def find_missing(self, trainer):
        """Members that could serve, and do not."""
        return [
            member.name
            for member in trainer.fleet._members
            if not member.in_service
            and not member.leaving
            and (
                self.processes[member.name].up
                or (self.servers[member.name].can_restart and not member.gave_up)
            )
        ]

    def check_idle(self, trainer):
        fleet = trainer.fleet
        left = {
            "requests": len(fleet._calls),
            **{f"{member.name} seats": len(member.calls) for member in fleet._members},
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
            member.name
            for member in fleet._members
            if self.processes[member.name].up and self.processes[member.name].paused is not None
        ]
        if paused:
            raise BrokenInvariant("paused", f"{', '.join(paused)} at the end")

    def check_report(self):
        report = self.report
        report.requests = sum(process.requests for process in self.processes.values())
        for process in self.processes.values():
            report.faults.update(type(fault.what).__name__ for fault in process.struck)
        if report.outcome != "completed":
            return
        had = (report.syncs, report.requests, report.faults.total())
        if np.any(np.less(had, (LEAST_SYNCS, LEAST_REQUESTS, LEAST_FAULTS))):
            self.broken = BrokenInvariant("minimum", f"syncs, requests, faults: {had}")

    def describe(self):
        if self.trainer is None:
            return "no trainer"
        states = "; ".join(member.describe() for member in self.trainer.fleet._members)
        return f"version {self.trainer.backend.weight_version}, {self.report.steps} steps; {states}"
