"""Engines for the tests of the fleet: they answer, fail, die and come back as a test wants it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import trio
import trio.testing

from rollouts.engines.fleet import Fleet, open_fleet
from rollouts.engines.fleet_members import Member
from rollouts.errors import (
    EngineError,
    EngineSetupError,
    EngineUnreachable,
    ReplyError,
)
from rollouts.types import Completion, EngineFeatures, EngineLoad, GenerateRequest, SamplingParams

FEATURES = EngineFeatures(
    vocab_size=100,
    context_length=64,
    in_memory_update=True,
    update_from_checkpoint=True,
    shares_weights=False,
    keep_pause=True,
    deterministic=True,
)
Script = Callable[["FakeEngine", GenerateRequest], Awaitable[None]]


@dataclass(eq=False)
class FakeEngine:
    """Answers one token of its version after `seconds`. `script` runs first and may raise or wait."""

    name: str
    version: int = 0
    seconds: float = 1.0
    script: Script | None = None
    healthy: bool = True
    health_error: EngineError | None = None
    health_hangs: bool = False
    features: EngineFeatures = field(init=False)
    asked: list[str] = field(default_factory=list)  # request ids
    asked_at: list[float] = field(default_factory=list)
    running: dict[str, trio.Event] = field(default_factory=dict)
    most_running: int = 0
    checks: int = 0
    calls: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.features = replace(FEATURES, name=self.name)

    async def generate(self, request: GenerateRequest) -> Completion:
        assert request.request_id not in self.running
        self.asked.append(request.request_id)
        self.asked_at.append(trio.current_time())
        aborted = self.running[request.request_id] = trio.Event()
        self.most_running = max(self.most_running, len(self.running))
        try:
            if self.script is not None:
                await self.script(self, request)
            with trio.move_on_after(self.seconds):
                await aborted.wait()
        finally:
            del self.running[request.request_id]
        return make_completion(request, self.version, aborted=aborted.is_set())

    async def weight_version(self) -> int:
        return self.version

    async def health(self) -> bool:
        self.checks += 1
        if self.health_hangs:
            await trio.sleep_forever()
        await trio.lowlevel.checkpoint()
        if self.health_error is not None:
            raise self.health_error
        return self.healthy

    async def load(self) -> EngineLoad:
        return EngineLoad(running=len(self.running), waiting=0)

    async def abort_all(self) -> None:
        self.calls.append("abort_all")
        for event in self.running.values():
            event.set()

    async def pause(self, mode: str) -> None:
        self.calls.append(f"pause {mode}")

    async def resume(self) -> None:
        self.calls.append("resume")

    async def release_memory(self) -> None:
        raise AssertionError("never asked of a member by a fleet")

    async def restore_memory(self) -> None:
        raise AssertionError("never asked of a member by a fleet")

    async def update_weights_from_checkpoint(self, path: Path, version: int) -> dict[str, Any]:
        self.version = version
        return {"path": str(path)}

    async def checksum(self) -> None:
        return None

    async def begin_update(self) -> None:
        raise AssertionError("never asked of a member by a fleet")

    def receive_bucket(self, bucket: Sequence[Any]) -> None:
        raise AssertionError("never asked of a member by a fleet")

    async def finish_update(self, version: int) -> None:
        raise AssertionError("never asked of a member by a fleet")

    def statistics(self) -> dict[str, float]:
        return {}


def make_completion(request: GenerateRequest, version: int, *, aborted: bool = False) -> Completion:
    return Completion(
        request_id=request.request_id,
        token_ids=np.array([7]),
        log_probs=np.array([-0.5], np.float32),
        weight_versions=np.array([version]),
        finish_reason="abort" if aborted else "stop",
    )


def ask(name: str, affinity: str = "") -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        prompt_ids=np.array([1]),
        sampling=SamplingParams(max_new_tokens=4),
        affinity=affinity,
    )


def fail_first(times: int, error: Callable[[], Exception], wait_s: float = 0.0) -> Script:
    """The first `times` requests fail."""
    count = 0

    async def script(engine: FakeEngine, request: GenerateRequest) -> None:
        nonlocal count
        count += 1
        if count <= times:
            await trio.sleep(wait_s)
            raise error()

    return script


async def hang(engine: FakeEngine, request: GenerateRequest) -> None:
    await trio.sleep_forever()


def unreachable() -> Exception:
    return EngineUnreachable("connection reset")


def garbage() -> Exception:
    return ReplyError("the log-prob of token 0 is nan")


@asynccontextmanager
async def fleet_of(
    *engines: FakeEngine | Member,
    commit: bool = True,
    warnings: list[str] | None = None,
    **options: Any,
) -> AsyncIterator[Fleet]:
    """In service at version 0, unless `commit` is off. Leaving checks that nothing is in flight or queued."""
    members = [engine if isinstance(engine, Member) else Member(engine) for engine in engines]
    said: list[str] = [] if warnings is None else warnings
    async with open_fleet(members, warn=said.append, **options) as fleet:
        if commit:
            update(fleet, 0)
        yield fleet
        assert not fleet._calls
        assert fleet.statistics()["fleet/queued"] == 0
        assert all(not member.calls for member in fleet._members.values())


def update(fleet: Fleet, version: int) -> None:
    for engine in fleet.members_for_update():
        fleet.close_admission(engine)
        assert isinstance(engine, FakeEngine)
        engine.version = version
        fleet.commit(engine, version)
    fleet.publish(version)


def state_of(fleet: Fleet, name: str) -> str:
    return fleet._members[name].condition


async def gather(fleet: Fleet, *requests: GenerateRequest) -> dict[str, Completion | Exception]:
    """Answers and errors by request id, all asked at once in this order."""
    results: dict[str, Completion | Exception] = {}

    async def one(request: GenerateRequest) -> None:
        try:
            results[request.request_id] = await fleet.generate(request)
        except EngineError as error:
            results[request.request_id] = error

    async with trio.open_nursery() as nursery:
        for request in requests:
            nursery.start_soon(one, request)
            await trio.testing.wait_all_tasks_blocked()
    return results


async def gather_with(fleet: Fleet, look: Callable[[], Awaitable[None]], *requests: GenerateRequest) -> None:
    """All requests at once, and `look` beside them."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(look)
        for request in requests:
            nursery.start_soon(fleet.generate, request)


@dataclass(eq=False)
class Process:
    """A server process of a fake engine: dies when told, comes back `start_s` after restart()."""

    engine: FakeEngine
    start_s: float = 5.0
    fails: int = 0  # restarts that raise
    exited: trio.Event = field(default_factory=trio.Event)
    restarted_at: list[float] = field(default_factory=list)

    def die(self) -> None:
        self.exited.set()

    async def wait_exited(self) -> str:
        await self.exited.wait()
        return "signal 9; last lines: ..."

    async def restart(self) -> None:
        self.restarted_at.append(trio.current_time())
        await trio.sleep(self.start_s)
        if len(self.restarted_at) <= self.fails:
            raise EngineSetupError("the port is taken")
        self.engine.version = -1
        old, self.exited = self.exited, trio.Event()
        old.set()  # one that still ran is gone now

    def member(self) -> Member:
        return Member(self.engine, restart=self.restart, wait_exited=self.wait_exited)
