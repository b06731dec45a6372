"""Engines for the tests of the fleet: they answer, fail, die and come back as a test wants it."""

from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from rollouts.engines.fleet import open_fleet
from rollouts.engines.fleet_members import Member
from rollouts.errors import EngineError, EngineSetupError, EngineUnreachable, ReplyError
from rollouts.types import Completion, EngineFeatures, GenerateRequest, SamplingParams

FEATURES = EngineFeatures(vocab_size=258, context_length=64, in_memory_update=True, deterministic=True)
UNREACHABLE = EngineUnreachable("connection reset")
GARBAGE = ReplyError("the log-prob of token 0 is nan")
NAMES = [f"r{index}" for index in range(10_000)]  # of requests
Script = Callable[["FakeEngine", GenerateRequest], Awaitable[None]]


class FakeEngine:
    """Answers one token of its version after `seconds`. `script` runs first and may raise or wait. With
    `start_s` it has a process that can be restarted, which takes that long and fails the first `fails` times.
    """

    def __init__(
        self,
        name,
        script=None,
        *,
        seconds=1.0,
        start_s=None,
        fails=0,
        **features,
    ):
        self.features = replace(FEATURES, **{"name": name} | features)
        self.script, self.seconds, self.start_s, self.fails = script, seconds, start_s, fails
        self.version = 0
        self.health_error = None
        self.health_hangs = False
        self.asked = []  # request ids
        self.asked_at = []
        self.running = {}
        self.checks = 0
        self.calls = []
        self.exited = trio.Event()
        self.restarted_at = []

    async def generate(self, request):
        assert request.request_id not in self.running
        self.asked.append(request.request_id)
        self.asked_at.append(trio.current_time())
        aborted = self.running[request.request_id] = trio.Event()
        try:
            if self.script is not None:
                await self.script(self, request)
            with trio.move_on_after(self.seconds):
                await aborted.wait()
        finally:
            del self.running[request.request_id]
        return Completion(
            request_id=request.request_id,
            token_ids=np.array([7]),
            log_probs=np.array([-0.5], np.float32),
            weight_versions=np.array([self.version]),
            finish_reason="abort" if aborted.is_set() else "stop",
        )

    async def weight_version(self):
        return self.version

    async def health(self):
        self.checks += 1
        if self.health_hangs:
            await trio.sleep_forever()
        await trio.lowlevel.checkpoint()
        if self.health_error is not None:
            raise self.health_error
        return True

    async def abort_all(self):
        for event in self.running.values():
            event.set()

    async def pause(self, mode):
        self.calls.append(f"pause {mode}")

    async def resume(self):
        self.calls.append("resume")

    async def wait_exited(self):
        await self.exited.wait()
        return "signal 9; last lines: ..."

    async def restart(self):
        assert self.start_s is not None
        self.restarted_at.append(trio.current_time())
        await trio.sleep(self.start_s)
        if len(self.restarted_at) <= self.fails:
            raise EngineSetupError("the port is taken")
        self.version = -1
        old, self.exited = self.exited, trio.Event()
        old.set()  # one that still ran is gone now


def ask(name, affinity=""):
    """What comes before a "#" in the name is its trajectory."""
    trajectory, turn, _ = name.partition("#")
    return GenerateRequest(
        request_id=name,
        prompt_ids=np.array([1]),
        sampling=SamplingParams(max_new_tokens=4),
        affinity=affinity,
        trajectory=trajectory if turn else "",
    )


def fail(error, *, times=float("inf"), wait_s=0.0):
    """The first `times` requests fail."""
    count = 0

    async def script(engine, request):
        nonlocal count
        count += 1
        if count <= times:
            await trio.sleep(wait_s)
            raise error

    return script


async def ask_in_vain(fleet, kind, match=None):
    with pytest.raises(kind, match=match):
        await fleet.generate(ask("r"))


async def hang(engine, request):
    await trio.sleep_forever()


@asynccontextmanager
async def fleet_of(*engines, commit=True, warnings=None, **options):
    """In service at version 0, unless `commit` is off. Leaving checks that nothing is in flight or queued."""
    members = [
        Member(engine)
        if getattr(engine, "start_s", None) is None
        else Member(engine, restart=engine.restart, wait_exited=engine.wait_exited)
        for engine in engines
    ]
    said = [] if warnings is None else warnings
    async with open_fleet(members, warn=said.append, **options) as fleet:
        if commit:
            update(fleet, 0)
        yield fleet
        assert not fleet._calls
        assert fleet.statistics()["fleet/queued"] == 0
        assert all(not member.calls for member in fleet._members)


@asynccontextmanager
async def fleet_of_two(script=None, **options):
    """A fleet of a, which has the script, and of b; and both."""
    a, b = FakeEngine("a", script), FakeEngine("b")
    async with fleet_of(a, b, **options) as fleet:
        yield fleet, a, b


def update(fleet, version):
    for engine in fleet.members_for_update():
        fleet.close_admission(engine)
        engine.version = version
        fleet.commit(engine, version)
    fleet.publish(version)


def find_member(fleet, name):
    return next(member for member in fleet._members if member.name == name)


def state_of(fleet, name):
    return find_member(fleet, name).condition


@asynccontextmanager
async def asking(fleet, *names, affinity=""):
    """Requests of these names, sent at once in this order; by name, their answers and errors, which are
    complete after the context.
    """
    results = {}

    async def one(name):
        try:
            results[name] = await fleet.generate(ask(name, affinity))
        except EngineError as error:
            results[name] = error

    async with trio.open_nursery() as nursery:
        for name in names:
            nursery.start_soon(one, name)
            await wait_all_tasks_blocked()
        yield results


async def gather(fleet, *names, affinity=""):
    """The answers and errors, in the order of the names."""
    async with asking(fleet, *names, affinity=affinity) as results:
        pass
    return [results[name] for name in names]
