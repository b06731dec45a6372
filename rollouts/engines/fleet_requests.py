"""The callers of a fleet: each waits for a seat on an engine, by arrival, and is asked again elsewhere when
its engine fails. Drawn in `fleet`.
"""

from __future__ import annotations

import heapq
import random
import zlib
from collections import Counter
from collections.abc import Callable

import trio

from rollouts.engines.fleet_members import Call, FleetMember, FleetSettings, back_off_s
from rollouts.engines.wire import make_empty_completion
from rollouts.errors import (
    EngineClosed,
    EngineError,
    EngineOverloaded,
    FleetDown,
    InfrastructureError,
    ReplyError,
    RequestRefused,
)
from rollouts.metrics.spans import note_answer
from rollouts.types import Completion, GenerateRequest


class FleetRequests:
    """Everyone who is in generate(). Part of a Fleet."""

    def __init__(
        self,
        live: dict[str, FleetMember],
        settings: FleetSettings,
        random_: random.Random,
        counts: Counter[str],
        *,
        is_queued: Callable[[], None],
        find_outage: Callable[[], FleetDown | None],
    ) -> None:
        """`live`: the fleet's own members. `is_queued` is told when someone begins to wait. `find_outage`:
        why waiting is in vain.
        """
        self.calls: dict[str, Call] = {}
        self.waiting: dict[int, Call] = {}  # by arrival
        self.paused = False
        self.closed = False
        self._order: list[int] = []  # heap of arrivals, also of some that wait no more
        self._arrivals = 0
        self._live = live
        self._settings = settings
        self._random = random_
        self._counts = counts
        self._is_queued = is_queued
        self._find_outage = find_outage

    async def generate(self, request: GenerateRequest) -> Completion:
        """One completion, from whichever engine. Waits while nobody serves; failures of an engine are retried
        elsewhere.

        Raises RequestRefused for a fault of the request itself; the last InfrastructureError after
        max_attempts of them (any other EngineError of a member becomes one); EngineOverloaded after
        down_limit_s of nothing else; FleetDown after down_limit_s with nobody in service, or at once when all
        are dead for good; EngineClosed.
        """
        self.check_open()
        if request.request_id in self.calls:
            raise RequestRefused(
                f"request {request.request_id!r} is in flight in this fleet already; ids must be unique"
            )
        call = self.calls[request.request_id] = Call(request, self._arrivals)
        self._arrivals += 1
        try:
            return await self._run(call)
        finally:
            del self.calls[request.request_id]

    async def _run(self, call: Call) -> Completion:
        attempts, overloads, overloaded_since = 0, 0, 0.0
        while not call.aborted:
            live = await self._take_seat(call)
            if live is None:
                break
            started = trio.current_time()
            outcome = await self._ask(call, live)
            if isinstance(outcome, Completion):
                note_answer(live.name, started, trio.current_time() - started, len(outcome.token_ids))
                return outcome
            self.check_open()
            if call.aborted:
                break
            self._counts["fleet/retries"] += 1
            if isinstance(outcome, EngineOverloaded):  # no attempt is spent
                overloads += 1
                overloaded_since = overloaded_since if overloads > 1 else trio.current_time()
                self._refuse_when_overloaded(call, outcome, overloaded_since)
            else:
                attempts, overloads = attempts + 1, 0
                if attempts >= self._settings.max_attempts:
                    raise outcome or InfrastructureError(
                        f"{live.name} left service while request {call.request.request_id!r} was on it:"
                        f" {live.last_error}"
                    )
            if outcome is not None:  # else the engine left service: elsewhere, at once
                call.avoid = live.name
                await self._back_off(call, overloads or attempts)
        self.check_open()
        return make_empty_completion(call.request)

    async def _back_off(self, call: Call, failures: int) -> None:
        settings, draw = self._settings, self._random.random()
        call.event = trio.Event()
        with trio.move_on_after(back_off_s(failures, settings.retry_base_s, settings.retry_cap_s, draw)):
            await call.event.wait()

    def _refuse_when_overloaded(self, call: Call, error: EngineOverloaded, since: float) -> None:
        waited_s = trio.current_time() - since
        if waited_s >= self._settings.down_limit_s:
            raise EngineOverloaded(
                f"request {call.request.request_id!r} met nothing but overload for {waited_s:.0f} s, the"
                f" last: {error}. The limit is down_limit_s={self._settings.down_limit_s:g}; give the fleet"
                " more engines, or lower its concurrency",
                retry_after_s=error.retry_after_s,
            ) from error

    async def _take_seat(self, call: Call) -> FleetMember | None:
        """The engine on which a seat has been taken for this call; None when it was aborted. Raises
        FleetDown, EngineClosed.
        """
        self.check_open()
        call.event, call.seat, call.error = trio.Event(), None, None
        self.waiting[call.arrival] = call
        heapq.heappush(self._order, call.arrival)
        self.dispatch()
        self._is_queued()
        self.refuse(call)
        try:
            await call.event.wait()
        except trio.Cancelled:
            if call.seat is not None:
                self._leave_seat(call, call.seat)
            raise
        finally:
            self.waiting.pop(call.arrival, None)
            if not self.waiting:
                self._order.clear()
        if call.error is not None:
            raise call.error
        return call.seat

    async def _ask(self, call: Call, live: FleetMember) -> Completion | InfrastructureError | None:
        """What came of asking an engine: an answer that may be delivered, the engine's failure, or None when
        it left service meanwhile.
        """
        outcome: Completion | InfrastructureError | None = None
        if call.aborted or self.closed:
            call.scope.cancel()
        try:
            with call.scope:
                outcome = await self._send(call, live)
                if live.updating and isinstance(outcome, Completion):
                    await self._sit_out_update(call, live)
                if isinstance(outcome, Completion):
                    outcome = self._check_version(call, live, outcome)
        finally:
            self._leave_seat(call, live)
        lost = live.ticket.life != call.ticket.life or call.scope.cancel_called
        return None if isinstance(outcome, Completion) and lost else outcome

    async def _send(self, call: Call, live: FleetMember) -> Completion | InfrastructureError:
        """Asks, and tells the engine's state what came of it."""
        try:
            return await live.engine.generate(call.request)
        except EngineOverloaded as error:
            live.overloaded(call.ticket, error)
            return error
        except InfrastructureError as error:
            live.doubt(call.ticket, error)
            return error
        except RequestRefused:
            raise
        # closed, 401, 404, another version: of this engine too, which would draw all requests by failing them
        except EngineError as error:
            made = InfrastructureError(f"{live.name}: {type(error).__name__}: {error}")
            made.__cause__ = error
            live.doubt(call.ticket, error)
            if isinstance(error, EngineClosed):
                live.die(str(error))
            return made

    async def _sit_out_update(self, call: Call, live: FleetMember) -> None:
        """Returns once the engine is verified. A failed update and abort_all() cancel the call's scope."""
        call.quarantined = True
        if call.aborted:
            call.scope.cancel()
        try:
            while live.updating and live.ticket.life == call.ticket.life:
                await live.changed.wait()
        finally:
            call.quarantined = False

    def _check_version(
        self, call: Call, live: FleetMember, completion: Completion
    ) -> Completion | ReplyError:
        """The completion, or the error if some of its tokens are of weights never committed here."""
        if live.ticket.life != call.ticket.life:
            return completion
        assert live.version is not None
        for version in {int(version) for version in completion.weight_versions}:
            if version > live.version or version < min(0, live.version):
                error = ReplyError(
                    f"{live.name}, request {completion.request_id!r}: tokens of weight version {version},"
                    f" committed there is {live.version}"
                )
                live.doubt(call.ticket, error)
                return error
        live.answered(call.ticket)
        return completion

    # --- seats

    def dispatch(self) -> None:
        """Seats those who waited longest, for as long as there are seats."""
        while self.waiting and not self.paused and not self.closed:
            while self._order[0] not in self.waiting:
                heapq.heappop(self._order)
            call = self.waiting[self._order[0]]
            live = self._choose(call)
            if live is None:
                return
            live.sent += 1
            live.calls.add(call)
            call.seat, call.ticket, call.scope = live, live.ticket, trio.CancelScope()
            self.end_wait(call)

    def _choose(self, call: Call) -> FleetMember | None:
        """Where the request goes: to its group's engine unless that is affinity_slack requests busier than
        the least busy one; None when all seats are taken. `avoid` is asked only when nobody else has a seat.
        """
        free = [live for live in self._live.values() if live.has_seat]
        if not free:
            return None
        least = min(free, key=lambda live: (live.name == call.avoid, len(live.calls), live.sent))
        if call.request.affinity:
            key = call.request.affinity
            favourite = max(free, key=lambda live: zlib.crc32(f"{key}/{live.name}".encode()))
            ahead = len(favourite.calls) - len(least.calls)
            if favourite.name != call.avoid and ahead <= self._settings.affinity_slack:
                return favourite
        return least

    def _leave_seat(self, call: Call, live: FleetMember) -> None:
        live.calls.discard(call)
        if live.leaving:
            live.wake()
        self.dispatch()

    def end_wait(self, call: Call) -> None:
        self.waiting.pop(call.arrival, None)
        call.event.set()

    def refuse(self, *calls: Call) -> None:
        """Those that wait are answered with FleetDown if waiting is in vain."""
        for call in calls:
            if call.arrival in self.waiting and (error := self._find_outage()) is not None:
                call.error = error
                self.end_wait(call)

    # --- life

    def abort(self) -> None:
        """Answers those that wait, in the queue or between two tries, or whose answers are held, with
        nothing.
        """
        for call in list(self.calls.values()):
            call.aborted = True
            self.end_wait(call)
            if call.quarantined:
                call.scope.cancel()

    def check_open(self) -> None:
        if self.closed:
            raise EngineClosed("the fleet is closed; use it inside `async with open_fleet(...)`")

    def close(self) -> None:
        """Whoever is in generate(), and every later call, gets EngineClosed."""
        self.closed = True
        for call in self.calls.values():
            call.scope.cancel()
            call.event.set()
