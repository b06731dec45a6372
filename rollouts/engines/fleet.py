"""Many engines that behave as one: a request goes to whoever serves, and engines fail, restart and return
underneath.

    generate() ──► queue, by arrival ──► seat on an engine ──► engine.generate ──► (quarantine while it is updated) ──► answer
        ▲             waits: nobody has a seat     │ the engine's fault, or it left service meanwhile
        └──────────────────────────────────────────┘ asked again, elsewhere if there is an elsewhere

    supervisor, one an engine   sleeps until the duty of its state: checks a suspect, restarts or reaches a dead one, announces a stale one
    watcher, one an engine      waits for its process to exit, where there is one (both: `fleet_tasks`)
    outage watch, one a fleet   while nobody serves: warns, and after down_limit_s answers all who wait with FleetDown (`fleet_outage`)

What an event does to an engine is decided in `fleet_state`; here it is only carried out, on what
`fleet_members` keeps of members and callers. A seat is taken in the moment in which a waiter is woken, and
given back in a `finally`: a cancelled caller leaves neither a seat nor a place in the queue behind. Weight
sync drives the admission side: close_admission → commit or fail, then publish. Nobody else makes an engine
serve.
"""

from __future__ import annotations

import math
import random
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np
import trio

from rollouts.engines import fleet_state
from rollouts.engines.fleet_members import Call, CallQueue, LiveMember, Member, unite_features
from rollouts.engines.fleet_outage import Outage, watch_outages
from rollouts.engines.fleet_state import CONDITIONS, EngineState, FleetSettings, Ticket
from rollouts.engines.fleet_tasks import MemberTasks, tend_member
from rollouts.errors import (
    EngineClosed,
    EngineError,
    EngineOverloaded,
    EngineSetupError,
    FleetDown,
    InfrastructureError,
    ReplyError,
    RequestRefused,
)
from rollouts.metrics.spans import note_answer
from rollouts.protocols import InferenceEngine, PauseMode
from rollouts.types import Completion, EngineFeatures, EngineLoad, GenerateRequest

if TYPE_CHECKING:
    import torch

ResultT = TypeVar("ResultT")
PINS_KEPT = 65_536  # affinity keys remembered; the oldest is forgotten first
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
        fleet = Fleet(members, settings=settings, random_=random.Random(seed), warn=warn, nursery=nursery)
        try:
            fleet._start()
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
        members: Sequence[Member],
        *,
        settings: FleetSettings,
        random_: random.Random,
        warn: Callable[[str], None],
        nursery: trio.Nursery,
    ) -> None:
        self.settings = settings
        self.published_version = -1
        self._random = random_
        self._warn = warn
        self._nursery = nursery
        self._live: dict[str, LiveMember] = {}
        self._former: set[str] = set()  # names of members that left
        self._members = tuple(members)
        self._calls: dict[str, Call] = {}
        self._queue = CallQueue()
        self._arrivals = 0
        self._pins: OrderedDict[str, str] = OrderedDict()
        self._paused = False
        self._closed = False
        self._counts: Counter[str] = Counter()
        self._outage = Outage()
        self._moved = trio.Event()  # a member changed its condition, or came or went
        self._stale_sender, self.stale_members = trio.open_memory_channel[InferenceEngine](math.inf)
        self._tasks = MemberTasks(
            settings, random_.random, self._apply, self._count, self._stale_sender.send_nowait
        )

    def _start(self) -> None:
        if not self._members:
            raise EngineSetupError(
                "a fleet without members cannot serve; give open_fleet at least one engine"
            )
        self._features = unite_features([member.engine.features for member in self._members])
        for member in self._members:
            self._add(member, announce_at=None)
        self._nursery.start_soon(
            watch_outages, self._outage, self.settings, self._warn_of_outage, self._fail_waiting
        )

    # --- requests -------------------------------------------------------------------------------------------

    @property
    def features(self) -> EngineFeatures:
        return self._features

    async def generate(self, request: GenerateRequest) -> Completion:
        """One completion, from whichever engine. Waits while nobody serves; failures that are an engine's are
        retried elsewhere.

        Raises RequestRefused, which the request itself deserves; the last InfrastructureError after
        max_attempts of them (any other EngineError of a member is made one; an overload counts for nothing,
        but for the time: EngineOverloaded after down_limit_s of nothing else); FleetDown after down_limit_s
        with nobody in service, or at once when all are dead for good; EngineClosed.
        """
        self._check_open()
        if request.request_id in self._calls:
            raise RequestRefused(
                f"request {request.request_id!r} is in flight in this fleet already; ids must be unique"
            )
        call = self._calls[request.request_id] = Call(request, self._arrivals)
        self._arrivals += 1
        try:
            return await self._run(call)
        finally:
            del self._calls[request.request_id]

    async def _run(self, call: Call) -> Completion:
        attempts, overloads, overloaded_since = 0, 0, 0.0
        while not call.aborted:
            live = await self._take_seat(call)
            if live is None:
                break
            started = trio.current_time()
            outcome = await self._ask(call, live)
            if isinstance(outcome, Completion):
                note_answer(live.state.name, started, trio.current_time() - started, len(outcome.token_ids))
                return outcome
            self._check_open()
            if call.aborted:
                break
            self._counts["fleet/retries"] += 1
            if isinstance(
                outcome, EngineOverloaded
            ):  # no attempt is spent: the engine rests, and the place in the queue is kept
                overloads, overloaded_since = (
                    overloads + 1,
                    overloaded_since if overloads else trio.current_time(),
                )
                self._refuse_when_overloaded(call, outcome, overloaded_since)
                call.avoid = live.state.name
                await self._back_off(call, overloads)
                continue
            attempts, overloads = attempts + 1, 0
            if attempts >= self.settings.max_attempts:
                raise outcome or _make_left_service(call, live.state)
            if outcome is not None:  # else the engine left service: elsewhere, at once
                call.avoid = live.state.name
                await self._back_off(call, attempts)
        self._check_open()
        return make_empty_completion(call.request)

    async def _take_seat(self, call: Call) -> LiveMember | None:
        """The engine on which a seat has been taken for this call; None when it was aborted. Raises
        FleetDown, EngineClosed.
        """
        self._check_open()
        call.event, call.seat, call.error = trio.Event(), None, None
        self._queue.put(call)
        self._dispatch()
        if call.waiting:
            self._note_service()
            self._refuse_when_down(call)
        try:
            await call.event.wait()
        except trio.Cancelled:
            if call.seat is not None:
                self._leave_seat(call, call.seat)
                self._apply(call.seat, fleet_state.request_dropped(call.seat.state))
            raise
        finally:
            self._queue.remove(call)
        if call.error is not None:
            raise call.error
        return call.seat

    async def _ask(self, call: Call, live: LiveMember) -> Completion | InfrastructureError | None:
        """What came of asking an engine: an answer that may be delivered, the engine's failure, or None when
        it left service meanwhile.
        """
        ticket = call.ticket
        outcome: Completion | InfrastructureError | None = None
        if call.aborted or self._closed:
            call.scope.cancel()
        try:
            with call.scope:
                outcome = await self._send(call, live, ticket)
                if live.state.updating and isinstance(outcome, Completion):
                    outcome = await self._sit_out_update(call, live, ticket, outcome)
        finally:
            self._leave_seat(call, live)
        if isinstance(outcome, Completion) and (live.state.life != ticket.life or call.scope.cancel_called):
            return None
        return outcome

    def _refuse_when_overloaded(self, call: Call, error: EngineOverloaded, since: float) -> None:
        waited_s = trio.current_time() - since
        if waited_s >= self.settings.down_limit_s:
            raise EngineOverloaded(
                f"request {call.request.request_id!r} met nothing but overload for {waited_s:.0f} s, the"
                f" last: {error}. The limit is down_limit_s={self.settings.down_limit_s:g}; give the fleet"
                " more engines, or lower its concurrency",
                retry_after_s=error.retry_after_s,
            ) from error

    def _leave_seat(self, call: Call, live: LiveMember) -> None:
        live.calls.discard(call)
        if live.state.leaving:
            live.wake()

    async def _back_off(self, call: Call, attempts: int) -> None:
        settings = self.settings
        call.event = trio.Event()
        with trio.move_on_after(
            fleet_state.compute_backoff_s(
                attempts, settings.retry_base_s, settings.retry_cap_s, self._random.random()
            )
        ):
            await call.event.wait()

    async def _send(self, call: Call, live: LiveMember, ticket: Ticket) -> Completion | InfrastructureError:
        """Asks, and gives the seat back together with what the engine's state learns from the outcome."""
        learn: Callable[[EngineState], EngineState] = fleet_state.request_dropped
        try:
            completion = await live.engine.generate(call.request)
            foreign = None if live.state.updating else self._find_foreign(live, ticket, completion)
            if foreign is not None:
                learn = self._blame(ticket, foreign)
                return foreign
            learn = partial(
                fleet_state.request_answered, ticket=ticket, now=trio.current_time(), settings=self.settings
            )
            return completion
        except EngineOverloaded as error:
            self._count(error)
            learn = partial(
                fleet_state.request_overloaded, ticket=ticket, error=str(error), retry_after_s=error.retry_after_s,
                now=trio.current_time(), settings=self.settings, draw=self._random.random(),
            )  # fmt: skip
            return error
        except InfrastructureError as error:
            learn = self._blame(ticket, error)
            return error
        except EngineClosed as error:
            gone = InfrastructureError(f"{live.state.name} is closed: {error}")
            learn = partial(self._bury, error=gone)
            return gone
        except RequestRefused:
            raise
        # 401, 404, another version: of this engine too, which would draw all requests by failing them quickly
        except EngineError as error:
            learn = self._blame(ticket, error)
            return make_infrastructure_error(live.state.name, error)
        finally:
            self._apply(live, learn(live.state))

    async def _sit_out_update(
        self, call: Call, live: LiveMember, ticket: Ticket, completion: Completion
    ) -> Completion | InfrastructureError | None:
        """The quarantined answer once its engine is verified. A failed update cancels the call's scope; so
        does abort_all().
        """
        if call.aborted:
            return None
        call.quarantined = True
        try:
            while live.state.updating and live.state.life == ticket.life:
                await live.changed.wait()
        finally:
            call.quarantined = False
        if live.state.life != ticket.life:
            return None
        foreign = self._find_foreign(live, ticket, completion)
        if foreign is None:
            return completion
        self._doubt(live, ticket, foreign)
        return foreign

    def _find_foreign(self, live: LiveMember, ticket: Ticket, completion: Completion) -> ReplyError | None:
        """The error in an answer with tokens of weights that nobody committed on this engine."""
        versions = completion.weight_versions
        if not len(versions) or live.state.life != ticket.life:
            return None
        found = fleet_state.find_foreign_version(
            (int(versions.min()), int(versions.max())), live.state.version
        )
        if found is None:
            return None
        return ReplyError(
            f"{live.state.name}, request {completion.request_id!r}: tokens of weight version {found},"
            f" committed there is {live.state.version}"
        )

    # --- seats ----------------------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        """Seats those who waited longest, for as long as there are seats."""
        now = trio.current_time()
        while not self._paused and not self._closed and (call := self._queue.find_first()) is not None:
            key = call.request.affinity
            chosen = fleet_state.choose_engine(
                (live.state for live in self._live.values()),
                now,
                pinned=self._pins.get(key) if key else None,
                avoid=call.avoid,
                slack=self.settings.affinity_slack,
            )
            if chosen is None:
                return
            live = self._live[chosen.name]
            live.state = fleet_state.request_sent(chosen)
            if key:
                self._pin(key, chosen.name)
            call.seat, call.ticket, call.scope = live, fleet_state.get_ticket(chosen), trio.CancelScope()
            live.calls.add(call)
            self._queue.remove(call)
            call.event.set()

    def _pin(self, key: str, name: str) -> None:
        """The first engine of a key stays its engine, until it serves no more."""
        pinned = self._live.get(self._pins.get(key, ""))
        if pinned is None or not fleet_state.in_service(pinned.state):
            self._pins[key] = name
        self._pins.move_to_end(key)
        if len(self._pins) > PINS_KEPT:
            self._pins.popitem(last=False)

    # --- what engines' states learn -------------------------------------------------------------------------

    def _apply(self, live: LiveMember, new: EngineState) -> None:
        """Makes `new` the engine's state and carries out what follows from it."""
        old = live.state
        live.state = new
        if new.life != old.life:
            for call in live.calls:
                call.scope.cancel()
        if new.duty is not old.duty:
            live.working.cancel()
        moved = new.condition != old.condition or new.updating != old.updating
        if moved or new.duty is not old.duty:
            live.wake()
        if moved:
            self._report(old, new)
            self._note_service()
            self._note_move()
        self._dispatch()

    def _report(self, old: EngineState, new: EngineState) -> None:
        if fleet_state.gave_up(new):
            self._warn(f"{new.name} stays dead after {new.tries} restarts in a row: {new.last_error}")
        elif new.condition == "dead" and old.condition != "restarting":
            self._warn(f"{new.name} is dead: {new.last_error}")
        elif new.condition == "dead":
            self._warn(f"{new.name} could not be restarted: {new.last_error}")
        elif new.condition == "stale" and old.condition in ("healthy", "suspect"):
            self._warn(f"{new.name} is out of service until a weight update: {new.last_error}")

    def _count(self, error: BaseException) -> None:
        self._counts[f"fleet/failures/{type(error).__name__}"] += 1

    def _blame(self, ticket: Ticket, error: EngineError) -> Callable[[EngineState], EngineState]:
        """What a state learns from a request that failed by the engine's fault."""
        self._count(error)
        return partial(
            fleet_state.request_failed,
            ticket=ticket,
            error=str(error),
            now=trio.current_time(),
            settings=self.settings,
            draw=self._random.random(),
        )

    def _bury(self, state: EngineState, *, error: EngineError) -> EngineState:
        """What a state learns from a request to an engine that is closed."""
        self._count(error)
        return self._died(fleet_state.request_dropped(state), error)

    def _died(self, state: EngineState, error: object) -> EngineState:
        return fleet_state.died(
            state, str(error), trio.current_time(), self.settings, draw=self._random.random()
        )

    def _doubt(self, live: LiveMember, ticket: Ticket, error: InfrastructureError) -> None:
        self._count(error)
        now, draw = trio.current_time(), self._random.random()
        self._apply(live, fleet_state.doubted(live.state, ticket, str(error), now, self.settings, draw=draw))

    # --- nobody serves --------------------------------------------------------------------------------------

    def _note_service(self) -> None:
        self._outage.note([live.state for live in self._live.values()], is_asked=self._queue.waiting > 0)
        if self._queue.waiting and self._is_over():
            self._fail_waiting()

    def _is_over(self) -> bool:
        """Whether every member is dead for good: waiting brings nobody back."""
        return bool(self._live) and all(fleet_state.gave_up(live.state) for live in self._live.values())

    def _note_move(self) -> None:
        moved, self._moved = self._moved, trio.Event()
        moved.set()

    def _warn_of_outage(self, since: float) -> None:
        self._warn(f"{self._describe_outage(since)} {self._queue.waiting} requests wait.")

    def _describe_outage(self, since: float) -> str:
        states = (
            "; ".join(fleet_state.describe(live.state) for live in self._live.values()) or "all have left"
        )
        return (
            f"no engine of the fleet has been in service for {trio.current_time() - since:.0f} s: {states}."
        )

    def _fail_waiting(self) -> None:
        for call in self._queue.list_waiting():
            self._refuse_when_down(call)

    def _refuse_when_down(self, call: Call) -> None:
        since = self._outage.since
        if since is None or (
            trio.current_time() < since + self.settings.down_limit_s and not self._is_over()
        ):
            return
        limit = f"The limit is down_limit_s={self.settings.down_limit_s:g}"
        why = f"No restart is left (max_restarts={self.settings.max_restarts})" if self._is_over() else limit
        call.error = FleetDown(
            f"{self._describe_outage(since)} {why}; see the engines' logs, then resume: nothing is in flight"
        )
        self._queue.remove(call)
        call.event.set()

    # --- the admission side of a weight update --------------------------------------------------------------

    def members_for_update(self) -> tuple[InferenceEngine, ...]:
        """The engines that an update should try: all but those that are dead, restarting or leaving."""
        return tuple(live.engine for live in self._live.values() if fleet_state.is_reachable(live.state))

    async def wait_members_for_update(self) -> tuple[InferenceEngine, ...]:
        """members_for_update() as soon as there is one. Raises EngineClosed; FleetDown after down_limit_s, or
        when all are dead for good.
        """
        began = trio.current_time()
        with trio.move_on_after(self.settings.down_limit_s):
            while not self._is_over():
                self._check_open()
                members = self.members_for_update()
                if members:
                    return members
                await self._moved.wait()
        raise FleetDown(
            f"{self._describe_outage(began)} None of them can be given weights; see the engines' logs, then"
            " resume: nothing is in flight"
        )

    def needs_update(self, engine: InferenceEngine) -> bool:
        """Whether it is a member that is up and does not serve: it waits for an update."""
        live = self._find(engine)
        return live is not None and fleet_state.needs_update(live.state)

    def close_admission(self, engine: InferenceEngine) -> None:
        """No new requests to it; what it answers is held until commit() or fail()."""
        live = self._find(engine)
        if live is not None:
            self._apply(live, fleet_state.admission_closed(live.state))

    def commit(self, engine: InferenceEngine, version: int) -> bool:
        """Verified at `version`: it serves, and its held answers are delivered. False when it died, or left,
        during the update.
        """
        live = self._find(engine)
        if live is None:
            return False
        self._apply(
            live, fleet_state.committed(live.state, version, self.published_version, trio.current_time())
        )
        return fleet_state.in_service(live.state)

    def fail(self, engine: InferenceEngine, error: BaseException | str) -> None:
        """Not verified: out of service and stale, announced again after a back-off. What it holds or still
        works on goes elsewhere.
        """
        live = self._find(engine)
        if live is None:
            return
        text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        now, draw = trio.current_time(), self._random.random()
        self._apply(live, fleet_state.update_failed(live.state, text, now, self.settings, draw=draw))

    def publish(self, version: int) -> None:
        """`version` is the fleet's from now on. Whoever serves an older one goes stale, and every stale
        member is announced.
        """
        self.published_version = version
        for live in list(self._live.values()):
            self._apply(live, fleet_state.version_published(live.state, version, trio.current_time()))

    def _find(self, engine: InferenceEngine) -> LiveMember | None:
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

    # --- coming and going -----------------------------------------------------------------------------------

    async def join(self, member: Member) -> None:
        """Takes a member in: stale, and announced where something has been published. Raises EngineSetupError
        as open_fleet does.
        """
        self._check_open()
        features = unite_features(
            [*(live.engine.features for live in self._live.values()), member.engine.features]
        )
        self._add(member, announce_at=trio.current_time() if self.published_version >= 0 else None)
        self._features = features
        self._note_move()
        await trio.lowlevel.checkpoint()

    def _add(self, member: Member, *, announce_at: float | None) -> None:
        features = member.engine.features
        if features.name in self._live:
            raise EngineSetupError(
                f"two engines of the fleet are named {features.name!r}; names must be unique, give one"
                " another `name`"
            )
        state = fleet_state.make_engine_state(
            features.name,
            can_restart=member.restart is not None,
            announce_at=announce_at,
            settings=self.settings,
        )
        live = self._live[features.name] = LiveMember(member, state)
        self._former.discard(features.name)
        self._nursery.start_soon(tend_member, live, self._tasks)

    async def leave(self, engine: InferenceEngine, *, grace_s: float = 60.0) -> None:
        """Lets a member go: it gets nothing new, what it has not answered within `grace_s` is asked
        elsewhere. It is not closed.
        """
        live = self._find(engine)
        if live is None or live.state.leaving:
            return
        live.state = fleet_state.left(live.state)
        self._note_service()
        try:
            with trio.move_on_after(grace_s):
                await self._wait_empty(live)
        finally:
            self._remove(live)

    def _remove(self, live: LiveMember) -> None:
        for call in live.calls:
            call.scope.cancel()
        live.scope.cancel()
        del self._live[live.state.name]
        self._former.add(live.state.name)
        self._note_service()
        self._note_move()
        if self._live:
            self._features = unite_features([other.engine.features for other in self._live.values()])

    async def _wait_empty(self, live: LiveMember) -> None:
        while live.calls:
            await live.changed.wait()

    # --- the fleet as an engine -----------------------------------------------------------------------------

    async def _fan_out(
        self, lives: Sequence[LiveMember], ask: Callable[[InferenceEngine], Awaitable[ResultT]]
    ) -> tuple[dict[str, ResultT], dict[str, EngineError]]:
        """Answers and errors by engine, when all were asked. An error that is the engine's fault makes it a
        suspect.
        """
        answers: dict[str, ResultT] = {}
        errors: dict[str, EngineError] = {}

        async def ask_one(live: LiveMember) -> None:
            ticket = fleet_state.get_ticket(live.state)
            try:
                answers[live.state.name] = await ask(live.engine)
            except EngineError as error:
                errors[live.state.name] = error
                if isinstance(error, InfrastructureError) and not isinstance(error, EngineOverloaded):
                    self._doubt(live, ticket, error)

        async with trio.open_nursery() as nursery:
            for live in lives:
                nursery.start_soon(ask_one, live)
        return answers, errors

    async def _tell_all(
        self, lives: Sequence[LiveMember], ask: Callable[[InferenceEngine], Awaitable[ResultT]]
    ) -> dict[str, ResultT]:
        self._check_open()
        answers, errors = await self._fan_out(lives, ask)
        for error in errors.values():
            raise error
        return answers

    def _serving(self) -> list[LiveMember]:
        return [live for live in self._live.values() if live.state.condition in ("healthy", "suspect")]

    def _reachable(self) -> list[LiveMember]:
        return [live for live in self._live.values() if fleet_state.is_reachable(live.state)]

    async def update_weights_from_checkpoint(self, path: Path, version: int) -> Mapping[str, Any]:
        """Answers by engine name, of all that can be reached. Verifies nothing and so puts nobody into
        service: weight_sync does.
        """
        return await self._tell_all(
            self._reachable(), lambda engine: engine.update_weights_from_checkpoint(path, version)
        )

    async def weight_version(self) -> int:
        """The published version."""
        await trio.lowlevel.checkpoint()
        return self.published_version

    async def checksum(self) -> None:
        """None: engines of different kinds have different checksums."""
        await trio.lowlevel.checkpoint()

    async def pause(self, mode: PauseMode) -> None:
        """Nobody is sent anything until resume(); the members in service pause.

        Raises the first member's error after all were told: the others are paused, and the fleet sends
        nothing; a resume() is owed in any case.
        """
        self._paused = True
        await self._tell_all(self._serving(), lambda engine: engine.pause(mode))

    async def resume(self) -> None:
        """The fleet sends requests again, and every member that can be reached resumes. Raises the first
        member's error after all were told.
        """
        self._paused = False
        try:
            await self._tell_all(self._reachable(), lambda engine: engine.resume())
        finally:
            self._dispatch()

    async def abort_all(self) -> None:
        """Every request is answered with what it has: in flight by its engine, queued, between two tries or
        held back by an update with nothing.
        """
        self._check_open()
        for call in list(self._calls.values()):
            call.aborted = True
            if call.seat is not None and not call.waiting and not call.event.is_set():
                call.event.set()  # between two tries
            if call.waiting:
                self._queue.remove(call)
                call.event.set()
            elif call.quarantined:
                call.scope.cancel()
        busy = [live for live in self._live.values() if live.calls]
        _, errors = await self._fan_out(busy, lambda engine: engine.abort_all())
        for call in [
            call for live in busy if live.state.name in errors for call in live.calls if call.aborted
        ]:
            call.scope.cancel()

    async def health(self) -> bool:
        """Whether anyone is in service."""
        await trio.lowlevel.checkpoint()
        return any(fleet_state.in_service(live.state) for live in self._live.values())

    async def load(self) -> EngineLoad:
        """The sum over members in service that answer, and the fleet's own queue; cache_usage is that of the
        fullest.
        """
        answers, _ = await self._fan_out(self._serving(), lambda engine: engine.load())
        usages = [load.cache_usage for load in answers.values() if load.cache_usage is not None]
        return EngineLoad(
            running=sum(load.running for load in answers.values()),
            waiting=sum(load.waiting for load in answers.values()) + self._queue.waiting,
            cache_usage=max(usages, default=None),
        )

    async def release_memory(self) -> None:
        await self._tell_all(self._serving(), lambda engine: engine.release_memory())

    async def restore_memory(self) -> None:
        await self._tell_all(self._reachable(), lambda engine: engine.restore_memory())

    async def begin_update(self) -> None:
        _refuse_update("begin_update")

    def receive_bucket(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        _refuse_update("receive_bucket")

    async def finish_update(self, version: int) -> None:
        _refuse_update("finish_update")

    def statistics(self) -> dict[str, float]:
        """`engine/<name>/…` for each member, and `fleet/…`. state: 0 healthy, 1 suspect, 2 dead, 3
        restarting, 4 stale; version −1: none yet.
        """
        values: dict[str, float] = {}
        serving = 0
        for name, live in self._live.items():
            state = live.state
            serving += fleet_state.in_service(state)
            values |= {
                f"engine/{name}/state": float(CONDITIONS.index(state.condition)),
                f"engine/{name}/version": -1.0 if state.version is None else float(state.version),
                f"engine/{name}/in_flight": float(state.in_flight),
                f"engine/{name}/limit": float(int(state.limit)),
                f"engine/{name}/failures": float(state.all_failures),
                f"engine/{name}/restarts": float(state.restarts),
            }
        totals = {"fleet/serving": serving, "fleet/queued": self._queue.waiting, "fleet/retries": 0}
        return values | {name: float(value) for name, value in (totals | self._counts).items()}

    # --- life -----------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosed("the fleet is closed; use it inside `async with open_fleet(...)`")

    def _close(self) -> None:
        """Whoever is in generate(), and every later call, gets EngineClosed."""
        self._closed = True
        self._stale_sender.close()
        self._note_move()
        for call in self._calls.values():
            call.scope.cancel()
            call.event.set()


def make_empty_completion(request: GenerateRequest) -> Completion:
    """The answer to a request that was aborted before anything of it could be kept."""
    none = np.zeros(0, np.int64)
    return Completion(
        request_id=request.request_id,
        token_ids=none,
        log_probs=np.zeros(0, np.float32),
        weight_versions=none,
        finish_reason="abort",
    )


def make_infrastructure_error(name: str, error: EngineError) -> InfrastructureError:
    """An engine's own failure as one that may be asked elsewhere; the original is its cause."""
    made = InfrastructureError(f"{name}: {type(error).__name__}: {error}")
    made.__cause__ = error
    return made


def _make_left_service(call: Call, state: EngineState) -> InfrastructureError:
    return InfrastructureError(
        f"{state.name} left service while request {call.request.request_id!r} was on it: {state.last_error}"
    )


def _refuse_update(name: str) -> NoReturn:
    raise EngineError(
        f"{name}: a fleet is not updated as one engine; weight_sync updates its members_for_update() and"
        " commits each"
    )
