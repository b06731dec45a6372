"""Many engines that behave as one: a request goes to whoever serves, and engines fail, restart and return
underneath.

    generate() ──► queue, by arrival ──► seat on an engine ──► engine.generate ──► answer
        ▲                                  │ the engine's fault,       └ held while the engine is updated
        └──── asked again, elsewhere ──────┘ or it left service

What an event does to an engine, and who looks after it, is in `fleet_members`. A seat is taken in the moment
in which a waiter is woken, and given back in a `finally`: a cancelled caller leaves neither a seat nor a
place in the queue. Weight sync drives the admission side: close_admission, then commit or fail, then publish.
Nothing else makes an engine serve. While nobody serves, the fleet warns, and after down_limit_s answers all
who wait with FleetDown.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NoReturn, TypeVar

import trio

from rollouts.engines.fleet_members import (
    CONDITIONS,
    EngineCondition,
    FleetMember,
    FleetSettings,
    Hooks,
    Member,
    unite_features,
)
from rollouts.engines.fleet_requests import FleetRequests
from rollouts.errors import (
    EngineError,
    EngineOverloaded,
    EngineSetupError,
    FleetDown,
    InfrastructureError,
)
from rollouts.protocols import InferenceEngine, PauseMode
from rollouts.types import EngineFeatures, EngineLoad

if TYPE_CHECKING:
    from pathlib import Path

    import torch

ResultT = TypeVar("ResultT")
DEFAULTS = FleetSettings()


@asynccontextmanager
async def open_fleet(
    members: Sequence[Member],
    *,
    settings: FleetSettings = DEFAULTS,
    seed: int = 0,
    warn: Callable[[str], None],
) -> AsyncIterator[Fleet]:
    """The members as one engine. All begin stale: the first weight update puts them into service. `seed`
    draws the jitter of back-offs.

    `warn` gets a sentence when an engine dies, goes stale or stays dead, and every warn_every_s while nobody
    serves. Leaving cancels what is in flight, whose callers get EngineClosed, and closes `stale_members`.
    Raises EngineSetupError: no members, two of one name, vocabularies of different sizes, an engine that
    shares the trainer's parameters.
    """
    failure: Exception | None = None
    async with trio.open_nursery() as nursery:
        fleet = Fleet(settings, random.Random(seed), warn, nursery)
        try:
            if not members:
                raise EngineSetupError("a fleet needs at least one engine")
            for member in members:
                fleet._add(member)
            nursery.start_soon(fleet._watch_outages)
            yield fleet
        except Exception as error:  # raised below, outside the nursery, which would wrap it in a group
            failure = error
        finally:
            fleet._close()
            nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure


class Fleet:
    """An InferenceEngine made of many. Made by open_fleet."""

    def __init__(
        self,
        settings: FleetSettings,
        random_: random.Random,
        warn: Callable[[str], None],
        nursery: trio.Nursery,
    ) -> None:
        self.settings = settings
        self.published_version = -1
        self.features: EngineFeatures
        self._warn = warn
        self._nursery = nursery
        self._live: dict[str, FleetMember] = {}
        self._former: set[str] = set()  # names of members that left
        self._counts: Counter[str] = Counter()
        self._down_since: float | None = None  # nobody serves since then; None: somebody does
        self._has_served = False
        self._changed = trio.Event()  # replaced when set: an engine's condition, or who belongs to it
        self._stale_sender, self.stale_members = trio.open_memory_channel[InferenceEngine](math.inf)
        self._requests = FleetRequests(
            self._live,
            settings,
            random_,
            self._counts,
            is_queued=self._note_service,
            find_outage=self._find_outage,
        )
        self.generate = self._requests.generate
        self._hooks = Hooks(self._member_changed, self._stale_sender.send_nowait, self._count, random_.random)

    # --- what engines tell

    def _member_changed(self, live: FleetMember, before: EngineCondition) -> None:
        if live.condition != before:
            self._report(live, before)
        self._note_service()
        self._notify()
        self._requests.dispatch()

    def _report(self, live: FleetMember, before: EngineCondition) -> None:
        if live.gave_up:
            self._warn(f"{live.name} stays dead after {live.tries} restarts in a row: {live.last_error}")
        elif live.condition == "dead":
            what = "could not be restarted" if before == "restarting" else "is dead"
            self._warn(f"{live.name} {what}: {live.last_error}")
        elif live.condition == "stale" and before in ("healthy", "suspect"):
            self._warn(f"{live.name} is out of service until a weight update: {live.last_error}")

    def _count(self, error: BaseException) -> None:
        self._counts[f"fleet/failures/{type(error).__name__}"] += 1

    def _notify(self) -> None:
        changed, self._changed = self._changed, trio.Event()
        changed.set()

    # --- nobody serves

    def _note_service(self) -> None:
        """An outage begins when the last engine is lost or, before the first update, with the first request.
        An engine that served and is updated is no outage, however long that takes, and neither is the first
        update of all. An update that begins in an outage does not end it.
        """
        lives = [live for live in self._live.values() if not live.leaving]
        since = self._down_since
        if any(live.condition == "healthy" for live in lives):
            self._has_served = self._has_served or any(live.in_service for live in lives)
            self._down_since = None
        elif any(live.updating and live.version is None for live in lives) and not self._has_served:
            self._down_since = None
        elif since is None and (self._has_served or self._requests.waiting):
            self._down_since = trio.current_time()
        if since != self._down_since:
            self._notify()
        if self._requests.waiting and self._is_over():
            self._fail_waiting()

    def _is_over(self) -> bool:
        """Whether every member is dead for good: waiting brings nobody back."""
        return bool(self._live) and all(live.gave_up for live in self._live.values())

    async def _watch_outages(self) -> None:
        """In an outage warns every warn_every_s, and answers all who wait once, at down_limit_s."""
        while True:
            since = self._down_since
            if since is None:
                await self._changed.wait()
                continue
            warn_at, limit_at = since + self.settings.warn_every_s, since + self.settings.down_limit_s
            while self._down_since == since:
                with trio.move_on_at(min(warn_at, limit_at)):
                    await self._changed.wait()
                    continue
                if trio.current_time() >= warn_at:
                    warn_at += self.settings.warn_every_s
                    self._warn(f"{self._describe_outage(since)} {len(self._requests.waiting)} requests wait.")
                if trio.current_time() >= limit_at:
                    limit_at = math.inf
                    self._fail_waiting()

    def _describe_outage(self, since: float) -> str:
        states = "; ".join(live.describe() for live in self._live.values()) or "all have left"
        seconds = trio.current_time() - since
        return f"no engine of the fleet has been in service for {seconds:.0f} s: {states}."

    def _fail_waiting(self) -> None:
        self._requests.refuse(*self._requests.waiting.values())

    def _find_outage(self) -> FleetDown | None:
        since = self._down_since
        if since is None:
            return None
        if self._is_over():
            why = f"No restart is left (max_restarts={self.settings.max_restarts})"
        elif trio.current_time() >= since + self.settings.down_limit_s:
            why = f"The limit is down_limit_s={self.settings.down_limit_s:g}"
        else:
            return None
        return FleetDown(
            f"{self._describe_outage(since)} {why}; see the engines' logs, then resume: nothing is in flight"
        )

    # --- the admission side of a weight update

    def members_for_update(self) -> tuple[InferenceEngine, ...]:
        """The engines that an update should try: all but those that are dead, restarting or leaving."""
        return tuple(live.engine for live in self._reachable())

    async def wait_members_for_update(self) -> tuple[InferenceEngine, ...]:
        """members_for_update() as soon as there is one. Raises EngineClosed; FleetDown after down_limit_s, or
        when all are dead for good.
        """
        began = trio.current_time()
        with trio.move_on_after(self.settings.down_limit_s):
            while not self._is_over():
                self._requests.check_open()
                if members := self.members_for_update():
                    return members
                await self._changed.wait()
        raise FleetDown(
            f"{self._describe_outage(began)} None of them can be given weights; see the engines' logs, then"
            " resume: nothing is in flight"
        )

    def needs_update(self, engine: InferenceEngine) -> bool:
        """Whether it is a member that is up and out of service until an update succeeds."""
        live = self._find(engine)
        return live is not None and live.condition == "stale" and not live.leaving

    def close_admission(self, engine: InferenceEngine) -> None:
        """No new requests to it; what it answers is held until commit() or fail()."""
        if live := self._find(engine):
            live.close_admission()

    def commit(self, engine: InferenceEngine, version: int) -> bool:
        """Verified at `version`: it serves, and its held answers are delivered. False when it died, or left,
        during the update.
        """
        live = self._find(engine)
        return live is not None and live.commit(version, self.published_version)

    def fail(self, engine: InferenceEngine, error: BaseException | str) -> None:
        """Not verified: out of service and stale, announced again after a back-off. What it holds or still
        works on goes elsewhere.
        """
        if live := self._find(engine):
            live.fail(error if isinstance(error, str) else f"{type(error).__name__}: {error}")

    def publish(self, version: int) -> None:
        """`version` is the fleet's from now on. Whoever serves an older one goes stale, and every stale
        member is announced.
        """
        self.published_version = version
        for live in list(self._live.values()):
            live.publish(version)

    def _find(self, engine: InferenceEngine) -> FleetMember | None:
        """Its member; None when it has left. Raises EngineError for an engine that never was one."""
        name = engine.features.name
        live = self._live.get(name)
        if live is not None and live.engine is engine:
            return live
        if live is not None or name in self._former:
            return None
        raise EngineError(
            f"{name!r} is no member of this fleet, which has {', '.join(self._live) or 'none'}; join() it"
            " first"
        )

    # --- coming and going

    async def join(self, member: Member) -> None:
        """Takes a member in: stale, and announced where something has been published. Raises EngineSetupError
        as open_fleet does.
        """
        self._requests.check_open()
        self._add(member)
        await trio.lowlevel.checkpoint()

    def _add(self, member: Member) -> None:
        live = FleetMember(member, self.settings, self._hooks)
        if live.name in self._live:
            raise EngineSetupError(
                f"two engines of the fleet are named {live.name!r}; names must be unique, give one"
                " another `name`"
            )
        features = unite_features([*self._all_features(), member.engine.features])
        self._live[live.name], self.features = live, features
        self._former.discard(live.name)
        if self.published_version >= 0:
            live.publish(self.published_version)
        self._nursery.start_soon(live.look_after)
        self._notify()

    async def leave(self, engine: InferenceEngine, *, grace_s: float = 60.0) -> None:
        """Lets a member go: it gets nothing new, what it has not answered within `grace_s` is asked
        elsewhere. It is not closed.
        """
        live = self._find(engine)
        if live is None or live.leaving:
            return
        live.leaving = True
        self._note_service()
        try:
            with trio.move_on_after(grace_s):
                while live.calls:
                    await live.changed.wait()
        finally:
            for call in live.calls:
                call.scope.cancel()
            live.scope.cancel()
            del self._live[live.name]
            self._former.add(live.name)
            self._note_service()
            self._notify()
            if self._live:
                self.features = unite_features(self._all_features())

    def _all_features(self) -> list[EngineFeatures]:
        return [live.engine.features for live in self._live.values()]

    # --- the fleet as an engine

    async def _fan_out(
        self, lives: Sequence[FleetMember], ask: Callable[[InferenceEngine], Awaitable[ResultT]]
    ) -> tuple[dict[str, ResultT], dict[str, EngineError]]:
        """Answers and errors by engine, when all were asked. An error that is the engine's fault makes it a
        suspect.
        """
        answers: dict[str, ResultT] = {}
        errors: dict[str, EngineError] = {}

        async def ask_one(live: FleetMember) -> None:
            ticket = live.ticket
            try:
                answers[live.name] = await ask(live.engine)
            except EngineError as error:
                errors[live.name] = error
                if isinstance(error, InfrastructureError) and not isinstance(error, EngineOverloaded):
                    live.doubt(ticket, error)

        async with trio.open_nursery() as nursery:
            for live in lives:
                nursery.start_soon(ask_one, live)
        return answers, errors

    async def _tell_all(
        self, lives: Sequence[FleetMember], ask: Callable[[InferenceEngine], Awaitable[ResultT]]
    ) -> dict[str, ResultT]:
        self._requests.check_open()
        answers, errors = await self._fan_out(lives, ask)
        for error in errors.values():
            raise error
        return answers

    def _serving(self) -> list[FleetMember]:
        return [live for live in self._live.values() if live.condition in ("healthy", "suspect")]

    def _reachable(self) -> list[FleetMember]:
        return [live for live in self._live.values() if live.is_reachable]

    async def update_weights_from_checkpoint(self, path: Path, version: int) -> NoReturn:
        _refuse_update()

    async def begin_update(self) -> NoReturn:
        _refuse_update()

    def receive_bucket(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> NoReturn:
        _refuse_update()

    async def finish_update(self, version: int) -> NoReturn:
        _refuse_update()

    async def weight_version(self) -> int:
        """The published version."""
        await trio.lowlevel.checkpoint()
        return self.published_version

    async def checksum(self) -> None:
        """None: engines of different kinds have different checksums."""
        await trio.lowlevel.checkpoint()

    async def pause(self, mode: PauseMode) -> None:
        """Nobody is sent anything until resume(); the members in service pause.

        Raises the first member's error after all were told: the others are paused, and a resume() is owed in
        any case.
        """
        self._requests.paused = True
        await self._tell_all(self._serving(), lambda engine: engine.pause(mode))

    async def resume(self) -> None:
        """The fleet sends requests again, and every member that can be reached resumes. Raises the first
        member's error after all were told.
        """
        self._requests.paused = False
        try:
            await self._tell_all(self._reachable(), lambda engine: engine.resume())
        finally:
            self._requests.dispatch()

    async def abort_all(self) -> None:
        """Every request is answered with what it has: in flight by its engine; queued, between two tries or
        held back by an update with nothing.
        """
        self._requests.check_open()
        self._requests.abort()
        busy = [live for live in self._live.values() if live.calls]
        _, errors = await self._fan_out(busy, lambda engine: engine.abort_all())
        for live in busy:
            for call in live.calls if live.name in errors else ():
                if call.aborted:
                    call.scope.cancel()

    async def health(self) -> bool:
        """Whether anyone is in service."""
        await trio.lowlevel.checkpoint()
        return any(live.in_service for live in self._live.values())

    async def load(self) -> EngineLoad:
        """The sum over members in service that answer, and the fleet's own queue; cache_usage is that of the
        fullest.
        """
        answers, _ = await self._fan_out(self._serving(), lambda engine: engine.load())
        usages = [load.cache_usage for load in answers.values() if load.cache_usage is not None]
        return EngineLoad(
            running=sum(load.running for load in answers.values()),
            waiting=sum(load.waiting for load in answers.values()) + len(self._requests.waiting),
            cache_usage=max(usages, default=None),
        )

    async def release_memory(self) -> None:
        await self._tell_all(self._serving(), lambda engine: engine.release_memory())

    async def restore_memory(self) -> None:
        await self._tell_all(self._reachable(), lambda engine: engine.restore_memory())

    def statistics(self) -> dict[str, float]:
        """`engine/<name>/…` for each member, and `fleet/…`. state: 0 healthy, 1 suspect, 2 dead, 3
        restarting, 4 stale; version −1: none yet.
        """
        values: dict[str, float] = {}
        for name, live in self._live.items():
            counts = {
                "state": CONDITIONS.index(live.condition),
                "version": -1 if live.version is None else live.version,
                "in_flight": len(live.calls),
                "limit": int(live.limit),
                "failures": live.all_failures,
                "restarts": live.restarts,
            }
            values |= {f"engine/{name}/" + key: float(count) for key, count in counts.items()}
        serving = sum(live.in_service for live in self._live.values())
        totals = {"fleet/serving": serving, "fleet/queued": len(self._requests.waiting), "fleet/retries": 0}
        return values | {name: float(value) for name, value in (totals | self._counts).items()}

    def _close(self) -> None:
        self._requests.close()
        self._stale_sender.close()
        self._notify()


def _refuse_update() -> NoReturn:
    raise EngineError(
        "a fleet is not updated as one engine; weight_sync updates its members_for_update() and commits each"
    )
