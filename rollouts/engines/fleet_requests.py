"""The callers of a fleet: each waits for a seat on an engine, by arrival, and is asked again elsewhere when
its engine fails. Drawn in `fleet`.
"""

from __future__ import annotations

import heapq
import math
import random
import zlib
from collections import Counter

import trio

from rollouts.engines.fleet_members import Call, FleetMember, back_off_s
from rollouts.engines.wire import make_empty_completion
from rollouts.errors import (
    EngineClosed,
    EngineError,
    EngineOverloaded,
    InfrastructureError,
    ReplyError,
    RequestRefused,
)
from rollouts.metrics.spans import note_answer
from rollouts.types import Completion, GenerateRequest

AFFINITY_SLACK = 8  # requests by which a group's engine may be ahead of the least busy one
MAX_ATTEMPTS = 20  # failures of one request before the last is raised; an overload is none
RETRY_S, RETRY_CAP_S = 0.1, 10.0  # first and longest back-off of a request


class FleetRequests:
    """The part of a Fleet that everyone in generate() meets."""

    def __init__(self, down_limit_s: float, random_: random.Random) -> None:
        self._members: dict[str, FleetMember] = {}
        self._calls: dict[str, Call] = {}  # everyone who is in generate(), by request id
        self._queue: list[tuple[int, Call]] = []  # a heap by arrival, also of some that wait no more
        self._arrivals = 0
        self._paused = self._closed = False
        self._down_since = math.inf  # nobody serves since then; inf: somebody does
        self._down_limit_s = down_limit_s
        self._random = random_
        self._counts = Counter({"fleet/retries": 0})

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosed("the fleet is closed; use it inside `async with open_fleet(...)`")

    def _note_service(self) -> None:
        """Sets _down_since, and wakes who waits if waiting may be in vain."""
        raise NotImplementedError

    def _check_outage(self) -> None:
        """Raises FleetDown when waiting is in vain."""
        raise NotImplementedError

    async def generate(self, request: GenerateRequest) -> Completion:
        """One completion, from whichever engine. Waits while nobody serves; failures of an engine are retried
        elsewhere.

        Raises RequestRefused for a fault of the request itself; the last InfrastructureError after
        MAX_ATTEMPTS of them (any other EngineError of a member becomes one); EngineOverloaded after
        down_limit_s of nothing else; FleetDown after down_limit_s with nobody in service, or at once when all
        are dead for good; EngineClosed.
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
        attempts = overloads = 0
        overloaded_since = math.inf
        while (member := await self._take_seat(call)) is not None:
            outcome = await self._ask(call, member)
            if isinstance(outcome, Completion):
                elapsed_s = trio.current_time() - call.sent_at
                note_answer(member.name, call.sent_at, elapsed_s, len(outcome.token_ids))
                return outcome
            self._check_open()
            if call.aborted:
                break
            self._counts["fleet/retries"] += 1
            if isinstance(outcome, EngineOverloaded):  # no attempt is spent
                overloads += 1
                overloaded_since = min(overloaded_since, trio.current_time())
                if trio.current_time() - overloaded_since >= self._down_limit_s:
                    raise EngineOverloaded(
                        f"request {call.request.request_id!r} met nothing but overload for"
                        f" down_limit_s={self._down_limit_s:g}; give the fleet more engines, or lower its"
                        f" concurrency. The last: {outcome}",
                        retry_after_s=outcome.retry_after_s,
                    ) from outcome
            else:
                attempts, overloads, overloaded_since = attempts + 1, 0, math.inf
                if attempts >= MAX_ATTEMPTS:
                    raise outcome or InfrastructureError(
                        f"{member.name} left service while request {call.request.request_id!r} was on it:"
                        f" {member.last_error}"
                    )
            if outcome is not None:  # else the engine left service: elsewhere, at once
                call.avoid, call.event = member.name, trio.Event()
                with trio.move_on_after(
                    back_off_s(overloads or attempts, RETRY_S, RETRY_CAP_S, self._random)
                ):
                    await call.event.wait()
        self._check_open()
        return make_empty_completion(call.request)

    async def _take_seat(self, call: Call) -> FleetMember | None:
        """The engine on which a seat has been taken for this call; None when it was aborted. Raises
        FleetDown, EngineClosed.
        """
        call.seat, call.waits = None, not call.aborted
        heapq.heappush(self._queue, (call.arrival, call))
        self._note_service()
        self._dispatch()
        try:
            await trio.lowlevel.checkpoint_if_cancelled()
            while call.waits:
                self._check_open()
                self._check_outage()
                call.event = trio.Event()
                with trio.move_on_at(self._down_since + self._down_limit_s):
                    await call.event.wait()
        except BaseException:
            if call.seat is not None:
                self._leave_seat(call, call.seat)
            raise
        finally:
            call.waits = False
        return call.seat

    def _dispatch(self) -> None:
        """Seats those who waited longest, for as long as there are seats."""
        while self._queue and not self._paused:
            call = self._queue[0][1]
            if call.waits:
                member = self._choose(call)
                if member is None:
                    return
                member.sent += 1
                member.calls.add(call)
                call.seat, call.sent_at = member, trio.current_time()
                call.scope, call.waits = trio.CancelScope(), False
                call.event.set()
            heapq.heappop(self._queue)

    def _choose(self, call: Call) -> FleetMember | None:
        """Where the request goes: to its group's engine unless that is AFFINITY_SLACK requests busier than
        the least busy one; None when all seats are taken. `avoid` is asked only when nobody else has a seat.
        """
        free = [member for member in self._members.values() if member.has_seat]
        if not free:
            return None
        least = min(free, key=lambda member: (member.name == call.avoid, len(member.calls), member.sent))
        if key := call.request.affinity:
            favourite = max(free, key=lambda member: zlib.crc32(f"{key}/{member.name}".encode()))
            ahead = len(favourite.calls) - len(least.calls)
            if favourite.name != call.avoid and ahead <= AFFINITY_SLACK:
                return favourite
        return least

    def _leave_seat(self, call: Call, member: FleetMember) -> None:
        member.calls.discard(call)
        member.wake()
        self._dispatch()

    async def _ask(self, call: Call, member: FleetMember) -> Completion | InfrastructureError | None:
        """What came of asking an engine: an answer that may be delivered, the engine's failure, or None when
        it left service meanwhile.
        """
        outcome: Completion | InfrastructureError | None = None
        if call.aborted or self._closed:
            call.scope.cancel()
        try:
            with call.scope:
                outcome = await self._send(call, member)
                if isinstance(outcome, Completion) and member.updating:
                    await self._hold_during_update(call, member)
                if isinstance(outcome, Completion):
                    outcome = self._check_version(call, member, outcome)
        finally:
            self._leave_seat(call, member)
        return None if isinstance(outcome, Completion) and call.scope.cancel_called else outcome

    async def _send(self, call: Call, member: FleetMember) -> Completion | InfrastructureError:
        """Asks, and tells the engine's state of a failure."""
        try:
            return await member.engine.generate(call.request)
        except RequestRefused:
            raise
        except EngineError as error:
            if isinstance(error, EngineOverloaded):
                member.overloaded(error)
            else:
                member.doubt(error, sent_at=call.sent_at)
            if isinstance(error, InfrastructureError):
                return error
            # closed, 401, 404, another version: of this engine too, which would draw all requests by failing
            made = InfrastructureError(f"{member.name}: {type(error).__name__}: {error}")
            made.__cause__ = error
            return made

    async def _hold_during_update(self, call: Call, member: FleetMember) -> None:
        """Returns once the engine is verified. A failed update and abort_all() cancel the call's scope."""
        call.is_held = True
        if call.aborted:
            call.scope.cancel()
        while member.updating:
            await member.changed.wait()

    def _check_version(
        self, call: Call, member: FleetMember, completion: Completion
    ) -> Completion | ReplyError:
        """The completion, or the error if some of its tokens are of weights never committed here."""
        if call.scope.cancel_called:
            return completion
        assert member.version is not None
        for version in {int(version) for version in completion.weight_versions}:
            if version > member.version or version < min(0, member.version):
                error = ReplyError(
                    f"{member.name}, request {completion.request_id!r}: tokens of weight version {version},"
                    f" committed there is {member.version}"
                )
                member.doubt(error, sent_at=call.sent_at)
                return error
        member.answered()
        return completion
