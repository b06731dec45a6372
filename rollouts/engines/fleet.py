"""Many engines that behave as one: a request goes to whoever serves, and engines fail, restart and return
underneath.

    generate() ──► queue, by arrival ──► seat on an engine ──► engine.generate ──► answer
                     ▲                     │ the engine's fault,       └ held while the engine is updated
                     └── asked again first ┘ or it left service

What an event does to an engine is in `fleet_members`. A seat is taken in the moment in which a waiter is
woken, and given back in a `finally`: a cancelled caller leaves neither a seat nor a place in the queue.
Weight sync drives the admission side: close_admission, then commit or fail, then publish. Nothing else makes
an engine serve.
"""

import math
import random
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NoReturn

import trio

from rollouts.engines.fleet_members import (
    CONDITIONS,
    Call,
    EngineCondition,
    FleetMember,
    Member,
    back_off_s,
    choose_member,
    unite_features,
)
from rollouts.engines.wire import NamedAdapters, make_empty_completion
from rollouts.errors import (
    EngineClosed,
    EngineError,
    EngineOverloaded,
    EngineSetupError,
    FleetDown,
    InfrastructureError,
)
from rollouts.metrics.spans import Answered, note_answer
from rollouts.models.limits import check_new
from rollouts.processes.nurseries import open_plain_nursery
from rollouts.protocols import InferenceEngine, PauseMode, Say
from rollouts.types import Completion, GenerateRequest, live

WARN_EVERY_S = 30.0
SERVED = ("healthy", "suspect")
MAX_ATTEMPTS = 20  # failures of one request before the last is raised; an overload is none
CLOSED = "the fleet is closed; use it inside `async with open_fleet(...)`"
TRAJECTORIES = 1 << 16  # whose last engine is known; the oldest are forgotten
RETRY_S, RETRY_CAP_S = 0.1, 10.0  # first and longest back-off of a request


@asynccontextmanager
async def open_fleet(
    members: Sequence[Member],
    *,
    max_concurrency: int = 1024,
    down_limit_s: float = 600.0,
    seed: int = 0,
    warn: Say,
) -> "AsyncIterator[Fleet]":
    """The members as one engine. All begin stale: the first weight update puts them into service.

    `max_concurrency`: requests in flight on one engine, until an overload lowers its limit. `down_limit_s`:
    seconds with nobody in service, or of a request that met nothing but overload. `seed` draws the jitter of
    back-offs. `warn` gets a sentence when an engine dies, goes stale or stays dead, and every WARN_EVERY_S
    while nobody serves. Leaving cancels what is in flight, whose callers get EngineClosed. Raises
    EngineSetupError for no members, two of one name, and engines of different models.
    """
    if not members:
        raise EngineSetupError("a fleet needs at least one engine")
    async with open_plain_nursery() as nursery:
        fleet = Fleet(max_concurrency, down_limit_s, random.Random(seed), warn, nursery)
        try:
            for member in members:
                fleet._add(member)
            nursery.start_soon(fleet._watch_service)
            yield fleet
        finally:
            fleet._close()


@live
class Fleet:
    """An InferenceEngine made of many. Made by open_fleet."""

    _max_concurrency: int
    _down_limit_s: float
    _random: random.Random
    _warn: Say
    _nursery: trio.Nursery

    def __post_init__(self) -> None:
        self.published_version = -1
        self._members: list[FleetMember] = []
        self._calls: dict[str, Call] = {}  # everyone who is in generate(), by request id
        self._queue = deque[Call]()  # who waits for a seat
        self._answered_by: dict[str, str] = {}  # name of the engine, by trajectory
        self._adapters = NamedAdapters()  # which every member has
        self._paused = self._closed = False
        self._down_since = math.inf  # nobody serves since then; inf: somebody does
        self._counts = Counter({"fleet/retries": 0})
        self._changed = trio.lowlevel.ParkingLot()  # woken by an engine's condition, and by who belongs to it
        self._stale_sender, self.stale_members = trio.open_memory_channel[InferenceEngine](math.inf)

    # --- requests

    async def generate(self, request: GenerateRequest) -> Completion:
        """One completion, from whichever engine. Waits while nobody serves; failures of an engine are retried
        elsewhere.

        Raises RequestRefused for a fault of the request itself; the last InfrastructureError after
        MAX_ATTEMPTS of them (any other EngineError of a member becomes one); EngineOverloaded after
        down_limit_s of nothing else; FleetDown after down_limit_s with nobody in service, or at once when all
        are dead for good; EngineClosed.
        """
        self._check_open()
        check_new(request, self._calls, self._adapters.paths)
        call = self._calls[request.request_id] = Call(request)
        try:
            with call.life:
                return await self._run(call)
        finally:
            del self._calls[request.request_id]
        if call.failure:
            raise call.failure
        return make_empty_completion(request)

    async def _run(self, call: Call) -> Completion:
        tries = attempts = 0
        overloaded_since = math.inf
        while True:
            member = await self._take_seat(call)
            try:
                outcome = await member.ask(call)
            finally:
                self._leave_seat(call, member)
            now = trio.current_time()
            if isinstance(outcome, Completion):
                note_answer(Answered(member.name, call.sent_at, now - call.sent_at, len(outcome.token_ids)))
                if key := call.request.trajectory:
                    self._answered_by[key] = member.name
                    if len(self._answered_by) > TRAJECTORIES:
                        del self._answered_by[next(iter(self._answered_by))]
                return outcome
            if call.aborted:
                return make_empty_completion(call.request)
            self._counts["fleet/retries"] += 1
            tries += 1
            if isinstance(outcome, EngineOverloaded):  # no attempt is spent
                overloaded_since = min(overloaded_since, now)
                if now - overloaded_since >= self._down_limit_s:
                    raise EngineOverloaded(
                        f"request {call.request.request_id!r} met nothing but overload for"
                        f" down_limit_s={self._down_limit_s:g}; give the fleet more engines, or lower its"
                        f" concurrency. The last: {outcome}",
                        retry_after_s=outcome.retry_after_s,
                    ) from outcome
            else:
                attempts, overloaded_since = attempts + 1, math.inf
                if attempts >= MAX_ATTEMPTS:
                    raise outcome or InfrastructureError(
                        f"{member.name} left service while request {call.request.request_id!r} was on it:"
                        f" {member.last_error}"
                    )
            if outcome:  # else the engine left service: elsewhere, at once
                call.avoid = member.name
                await trio.sleep(back_off_s(tries, RETRY_S, RETRY_CAP_S, self._random))

    async def _take_seat(self, call: Call) -> FleetMember:
        """The engine on which this call has a seat. _watch_service ends the wait where nobody serves."""
        (self._queue.appendleft if call.seat else self._queue.append)(call)
        call.seat, call.seated, call.stay = None, trio.Event(), trio.CancelScope()
        self._note_service()
        try:
            self._dispatch()
            await call.seated.wait()
        except BaseException:
            if not call.seat:
                self._queue.remove(call)
            else:
                self._leave_seat(call, call.seat)
            raise
        assert call.seat
        return call.seat

    def _dispatch(self) -> None:
        """Seats those who wait, the first first, for as long as there are seats."""
        while self._queue and not self._paused:
            call = self._queue[0]
            answered_by = self._answered_by.get(call.request.trajectory)
            member = choose_member(self._members, call, answered_by)
            if not member:
                return
            self._queue.popleft()
            member.sent += 1
            member.calls.add(call)
            call.seat, call.sent_at = member, trio.current_time()
            call.seated.set()

    def _leave_seat(self, call: Call, member: FleetMember) -> None:
        call.is_asked = False
        member.calls.discard(call)
        if not member.calls:  # whoever waits for its leave
            member.changed.unpark_all()
        self._dispatch()

    # --- whether anyone serves

    def _member_changed(self, member: FleetMember, before: EngineCondition) -> None:
        died = member.condition == "dead" and before != "dead"
        if died or (member.condition == "stale" and before in SERVED):
            what = "is dead" if died else "is out of service until a weight update"
            if member.gave_up:
                what = f"stays dead after {member.tries} restarts in a row"
            self._warn(f"{member.name} {what}: {member.last_error}")
        self._note_service()
        self._dispatch()

    def _note_service(self) -> None:
        """An outage begins when the last engine is lost or, before the first update, with the first request.
        An engine that served and is updated is no outage; an update that begins in an outage does not end it.
        """
        if any(member.condition == "healthy" and not member.leaving for member in self._members):
            self._down_since = math.inf
        elif self._down_since == math.inf and (self.published_version >= 0 or self._queue):
            self._down_since = trio.current_time()
        self._changed.unpark_all()

    def _is_over(self) -> bool:
        """Whether every member is dead for good: waiting brings nobody back."""
        return bool(self._members) and all(member.gave_up for member in self._members)

    async def _watch_service(self) -> None:
        """Warns while nobody serves, and ends the wait for it at the limit."""
        warned_at = -math.inf
        while True:
            now = trio.current_time()
            down_s = now - self._down_since
            if down_s >= self._down_limit_s or (down_s >= 0 and self._is_over()):
                for call in self._queue:  # nobody waits any longer
                    call.end(self._make_fleet_down(self._down_since))
            warn_at = max(self._down_since, warned_at) + WARN_EVERY_S
            if now >= warn_at:
                warned_at = now
                self._warn(f"{self._describe_outage(self._down_since)} {len(self._queue)} requests wait.")
                continue
            ends_at = self._down_since + self._down_limit_s
            with trio.move_on_at(min(warn_at, ends_at if ends_at > now else math.inf)):
                await self._changed.park()

    def _describe_outage(self, since: float) -> str:
        return (
            f"no engine of the fleet has been in service for {trio.current_time() - since:.0f} s:"
            f" {'; '.join(member.describe() for member in self._members) or 'all have left'}."
        )

    def _make_fleet_down(self, since: float) -> FleetDown:
        return FleetDown(
            f"{self._describe_outage(since)} The limit is down_limit_s={self._down_limit_s:g}, or no restart"
            " is left; see the engines' logs, then resume: nothing is in flight"
        )

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosed(CLOSED)

    # --- the admission side of a weight update

    def members_for_update(self) -> tuple[InferenceEngine, ...]:
        """The engines that an update should try: all but those that are dead, restarting or leaving."""
        return tuple(member.engine for member in self._reachable())

    async def wait_members_for_update(self) -> tuple[InferenceEngine, ...]:
        """members_for_update() as soon as there is one. Raises EngineClosed; FleetDown as generate() does."""
        began = trio.current_time()
        with trio.move_on_after(self._down_limit_s):
            while not self._is_over():
                self._check_open()
                if engines := self.members_for_update():
                    return engines
                await self._changed.park()
        raise self._make_fleet_down(began)

    def needs_update(self, engine: InferenceEngine) -> bool:
        """Whether it is a member that is up and out of service until an update succeeds."""
        member = self._find(engine)
        return member is not None and member.condition == "stale" and not member.leaving

    def close_admission(self, engine: InferenceEngine) -> None:
        """No new requests to it; what it answers is held until commit() or fail()."""
        if member := self._find(engine):
            member.close_admission()

    def commit(self, engine: InferenceEngine, version: int) -> bool:
        """Verified at `version`: it serves, its held answers are delivered. False when it died, or left."""
        member = self._find(engine)
        return member is not None and member.commit(version, self.published_version)

    def fail(self, engine: InferenceEngine, error: BaseException) -> None:
        """Not verified: stale, announced again after a back-off. What it works on or holds goes elsewhere."""
        if member := self._find(engine):
            member.fail(f"{type(error).__name__}: {error}")

    def publish(self, version: int) -> None:
        """`version` is the fleet's: whoever serves an older one goes stale; stale members are announced."""
        self.published_version = version
        for member in self._members:
            member.publish(version)

    def _find(self, engine: InferenceEngine) -> FleetMember | None:
        """Its member; None when it has left."""
        return next((member for member in self._members if member.engine is engine), None)

    # --- coming and going

    async def join(self, member: Member) -> None:
        """Takes a member in, stale, with all adapters. Raises EngineSetupError as open_fleet does."""
        async with self._adapters.changing:
            for name, path in self._adapters.paths.items():
                await member.engine.add_adapter(name, path)
            self._check_open()
            self._add(member)

    def _add(self, joining: Member) -> None:
        member = FleetMember(
            joining,
            self._max_concurrency,
            self._max_concurrency,  # its limit at first
            self._random,
            self._counts,
            tell=self._member_changed,
            announce=self._stale_sender.send_nowait,
        )
        if any(one.name == member.name for one in self._members):
            raise EngineSetupError(f"two engines are named {member.name!r}; give one another `name`")
        self.features = unite_features([*self._members, member])
        self._members.append(member)
        if self.published_version >= 0:
            member.publish(self.published_version)
        self._nursery.start_soon(member.look_after)
        self._note_service()

    async def leave(self, engine: InferenceEngine, *, grace_s: float = 60.0) -> None:
        """Lets a member go: it gets nothing new, what it has not answered in `grace_s` is asked elsewhere."""
        member = self._find(engine)
        if not member or member.leaving:
            return
        member.leaving = True
        self._note_service()
        try:
            with trio.move_on_after(grace_s):
                while member.calls:
                    await member.changed.park()
        finally:
            for call in member.calls:
                call.stay.cancel()
            member.scope.cancel()
            self._members.remove(member)
            self._note_service()
            if self._members:
                self.features = unite_features(self._members)

    # --- the fleet as an engine

    async def _tell_all(
        self, members: Iterable[FleetMember], tell: Callable[[InferenceEngine], Awaitable[None]]
    ) -> dict[FleetMember, EngineError]:
        """The errors, when all were told."""
        self._check_open()
        errors = {}

        async def tell_one(member: FleetMember) -> None:
            try:
                await tell(member.engine)
            except EngineError as error:
                errors[member] = error

        async with trio.open_nursery() as nursery:
            for member in members:
                nursery.start_soon(tell_one, member)
        return errors

    def _reachable(self) -> list[FleetMember]:
        return [member for member in self._members if not (member.is_down or member.leaving)]

    def _refuse(self, *args: object, **options: object) -> NoReturn:
        raise EngineError(
            "a fleet is not updated and gives no memory back as one engine: weight_sync updates its"
            " members_for_update() and commits each"
        )

    update_weights_from_checkpoint = begin_update = receive_bucket = finish_update = _refuse
    release_memory = restore_memory = _refuse

    async def weight_version(self) -> int:
        """The published version."""
        await trio.lowlevel.checkpoint()
        return self.published_version

    async def checksum(self) -> None:
        """None: engines of different kinds have different checksums."""
        await trio.lowlevel.checkpoint()

    async def pause(self, mode: PauseMode) -> None:
        """Nobody is sent anything until resume(); the members in service pause. Raises the first member's
        error after all were told: a resume() is owed in any case.
        """
        self._paused = True
        serving = [one for one in self._members if one.condition in SERVED]
        for error in (await self._tell_all(serving, lambda engine: engine.pause(mode))).values():
            raise error

    async def resume(self) -> None:
        """The fleet sends requests again, and every member that can be reached resumes. Raises like pause."""
        self._paused = False
        self._dispatch()
        for error in (await self._tell_all(self._reachable(), lambda engine: engine.resume())).values():
            raise error

    async def add_adapter(self, name: str, adapter: Path) -> None:
        """Every member takes it, or none, and the error of one is raised; who is away takes it when back."""
        async with self._adapters.adding(name, adapter):
            members = {*self._members}
            errors = await self._tell_all(members, lambda engine: engine.add_adapter(name, adapter))
            for error in errors.values():
                await self._tell_all(members - errors.keys(), lambda engine: engine.remove_adapter(name))
                raise error

    async def remove_adapter(self, name: str) -> None:
        """Requests may not name it any more. Raises EngineError while one in flight does."""
        async with self._adapters.removing(name, (call.request for call in self._calls.values())):
            await self._tell_all(self._members, lambda engine: engine.remove_adapter(name))

    async def abort_all(self) -> None:
        """Every request is answered with what it has: nothing, if no engine works on it or it is held."""
        for call in self._calls.values():
            call.aborted = True
            if not call.is_asked:
                call.end(None)
        busy = [member for member in self._members if member.calls]
        for member in await self._tell_all(busy, lambda engine: engine.abort_all()):
            for call in member.calls:
                if call.aborted:
                    call.end(None)

    async def health(self) -> bool:
        """Whether anyone is in service."""
        await trio.lowlevel.checkpoint()
        return any(member.in_service for member in self._members)

    def statistics(self) -> dict[str, int]:
        """`engine/<name>/…` for each member, and `fleet/…`. state: 0 healthy, 1 suspect, 2 dead, 3
        restarting, 4 stale; version −1: none yet.
        """
        values = {
            **self._counts,
            "fleet/serving": sum(member.in_service for member in self._members),
            "fleet/queued": len(self._queue),
        }
        for member in self._members:
            name = member.name
            values |= {
                f"engine/{name}/state": CONDITIONS.index(member.condition),
                f"engine/{name}/version": member.version,
                f"engine/{name}/in_flight": len(member.calls),
                f"engine/{name}/limit": int(member.limit),
                f"engine/{name}/failures": member.all_failures,
                f"engine/{name}/restarts": member.restarts,
            }
        return values

    # --- life

    def _close(self) -> None:
        """Whoever is in generate(), and every later call, gets EngineClosed."""
        self._closed = True
        for call in self._calls.values():
            call.end(EngineClosed(CLOSED))
        self._stale_sender.close()
        self._note_service()
