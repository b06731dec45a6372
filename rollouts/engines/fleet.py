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
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn, TypeVar

import trio

from rollouts.engines.fleet_members import (
    CONDITIONS,
    EngineCondition,
    FleetMember,
    Member,
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

WARN_EVERY_S = 30.0
ResultT = TypeVar("ResultT")


@asynccontextmanager
async def open_fleet(
    members: Sequence[Member],
    *,
    max_concurrency: int = 1024,
    down_limit_s: float = 600.0,
    seed: int = 0,
    warn: Callable[[str], None],
) -> AsyncIterator[Fleet]:
    """The members as one engine. All begin stale: the first weight update puts them into service.

    `max_concurrency`: requests in flight on one engine, until an overload lowers its limit. `down_limit_s`:
    seconds with nobody in service, or of a request that met nothing but overload. `seed` draws the jitter of
    back-offs. `warn` gets a sentence when an engine dies, goes stale or stays dead, and every WARN_EVERY_S
    while nobody serves. Leaving cancels what is in flight, whose callers get EngineClosed, and closes
    `stale_members`. Raises EngineSetupError: no members, two of one name, vocabularies of different sizes, an
    engine that shares the trainer's parameters.
    """
    failure: Exception | None = None
    async with trio.open_nursery() as nursery:
        fleet = Fleet(max_concurrency, down_limit_s, random.Random(seed), warn, nursery)
        try:
            if not members:
                raise EngineSetupError("a fleet needs at least one engine")
            for member in members:
                fleet._add(member)
            nursery.start_soon(fleet._warn_in_outages)
            yield fleet
        except Exception as error:  # raised below, outside the nursery, which would wrap it in a group
            failure = error
        finally:
            fleet._close()
            nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure


class Fleet(FleetRequests):
    """An InferenceEngine made of many. Made by open_fleet."""

    def __init__(
        self,
        max_concurrency: int,
        down_limit_s: float,
        random_: random.Random,
        warn: Callable[[str], None],
        nursery: trio.Nursery,
    ) -> None:
        super().__init__(down_limit_s, random_)
        self.published_version = -1
        self.features: EngineFeatures
        self._max_concurrency = max_concurrency
        self._warn = warn
        self._nursery = nursery
        self._changed = trio.Event()  # replaced when set: an engine's condition, or who belongs to it
        self._stale_sender, self.stale_members = trio.open_memory_channel[InferenceEngine](math.inf)

    # --- what engines tell

    def _member_changed(self, member: FleetMember, before: EngineCondition) -> None:
        if member.condition != before:
            what = ""
            if member.gave_up:
                what = f"stays dead after {member.tries} restarts in a row"
            elif member.condition == "dead":
                what = "could not be restarted" if before == "restarting" else "is dead"
            elif member.condition == "stale" and before in ("healthy", "suspect"):
                what = "is out of service until a weight update"
            if what:
                self._warn(f"{member.name} {what}: {member.last_error}")
        self._note_service()
        self._dispatch()

    def _note_service(self) -> None:
        """An outage begins when the last engine is lost or, before the first update, with the first request.
        An engine that served and is updated is no outage, however long that takes; an update that begins in
        an outage does not end it. Whoever waits looks again whether that is in vain.
        """
        members = [member for member in self._members.values() if not member.leaving]
        since = self._down_since
        if any(member.condition == "healthy" for member in members):
            self._down_since = math.inf
        elif since == math.inf and (
            self.published_version >= 0 or any(call.waits for call in self._calls.values())
        ):
            self._down_since = trio.current_time()
        if since != self._down_since or self._is_over():
            self._wake_calls()
        changed, self._changed = self._changed, trio.Event()
        changed.set()

    def _wake_calls(self) -> None:
        for call in self._calls.values():
            if call.waits:
                call.event.set()

    def _is_over(self) -> bool:
        """Whether every member is dead for good: waiting brings nobody back."""
        return bool(self._members) and all(member.gave_up for member in self._members.values())

    async def _warn_in_outages(self) -> None:
        while True:
            with trio.move_on_at(self._down_since + WARN_EVERY_S) as scope:
                await self._changed.wait()
            while scope.cancelled_caught and self._down_since < math.inf:
                waiting = sum(call.waits for call in self._calls.values())
                self._warn(f"{self._describe_outage(self._down_since)} {waiting} requests wait.")
                await trio.sleep(WARN_EVERY_S)

    def _describe_outage(self, since: float) -> str:
        states = "; ".join(member.describe() for member in self._members.values()) or "all have left"
        seconds = trio.current_time() - since
        return f"no engine of the fleet has been in service for {seconds:.0f} s: {states}."

    def _check_outage(self) -> None:
        """Raises FleetDown when waiting is in vain."""
        since = self._down_since
        if since < math.inf and (self._is_over() or trio.current_time() >= since + self._down_limit_s):
            raise FleetDown(
                f"{self._describe_outage(since)} The limit is down_limit_s={self._down_limit_s:g}, or no"
                " restart is left; see the engines' logs, then resume: nothing is in flight"
            )

    # --- the admission side of a weight update

    def members_for_update(self) -> tuple[InferenceEngine, ...]:
        """The engines that an update should try: all but those that are dead, restarting or leaving."""
        return tuple(member.engine for member in self._reachable())

    async def wait_members_for_update(self) -> tuple[InferenceEngine, ...]:
        """members_for_update() as soon as there is one. Raises EngineClosed; FleetDown after down_limit_s, or
        when all are dead for good.
        """
        began = trio.current_time()
        with trio.move_on_after(self._down_limit_s):
            while not self._is_over():
                self._check_open()
                if engines := self.members_for_update():
                    return engines
                await self._changed.wait()
        raise FleetDown(
            f"{self._describe_outage(began)} None of them can be given weights; see the engines' logs, then"
            " resume: nothing is in flight"
        )

    def needs_update(self, engine: InferenceEngine) -> bool:
        """Whether it is a member that is up and out of service until an update succeeds."""
        member = self._find(engine)
        return member is not None and member.condition == "stale" and not member.leaving

    def close_admission(self, engine: InferenceEngine) -> None:
        """No new requests to it; what it answers is held until commit() or fail()."""
        if member := self._find(engine):
            member.close_admission()

    def commit(self, engine: InferenceEngine, version: int) -> bool:
        """Verified at `version`: it serves, and its held answers are delivered. False when it died, or left,
        during the update.
        """
        member = self._find(engine)
        return member is not None and member.commit(version, self.published_version)

    def fail(self, engine: InferenceEngine, error: BaseException | str) -> None:
        """Not verified: out of service and stale, announced again after a back-off. What it holds or still
        works on goes elsewhere.
        """
        if member := self._find(engine):
            member.fail(error if isinstance(error, str) else f"{type(error).__name__}: {error}")

    def publish(self, version: int) -> None:
        """`version` is the fleet's from now on. Whoever serves an older one goes stale, and every stale
        member is announced.
        """
        self.published_version = version
        for member in list(self._members.values()):
            member.publish(version)

    def _find(self, engine: InferenceEngine) -> FleetMember | None:
        """Its member; None when it has left."""
        member = self._members.get(engine.features.name)
        return member if member is not None and member.engine is engine else None

    # --- coming and going

    async def join(self, member: Member) -> None:
        """Takes a member in: stale, and announced where something has been published. Raises EngineSetupError
        as open_fleet does.
        """
        self._check_open()
        self._add(member)
        await trio.lowlevel.checkpoint()

    def _add(self, joining: Member) -> None:
        member = FleetMember(
            joining,
            self._max_concurrency,
            changed=self._member_changed,
            announce=self._stale_sender.send_nowait,
            counts=self._counts,
            random_=self._random,
        )
        if member.name in self._members:
            raise EngineSetupError(
                f"two engines of the fleet are named {member.name!r}; names must be unique, give one another"
                " `name`"
            )
        self.features = unite_features([*self._all_features(), joining.engine.features])
        self._members[member.name] = member
        if self.published_version >= 0:
            member.publish(self.published_version)
        self._nursery.start_soon(member.look_after)
        self._note_service()

    async def leave(self, engine: InferenceEngine, *, grace_s: float = 60.0) -> None:
        """Lets a member go: it gets nothing new, what it has not answered within `grace_s` is asked
        elsewhere. It is not closed.
        """
        member = self._find(engine)
        if member is None or member.leaving:
            return
        member.leaving = True
        self._note_service()
        try:
            with trio.move_on_after(grace_s):
                while member.calls:
                    await member.changed.wait()
        finally:
            for call in member.calls:
                call.scope.cancel()
            member.scope.cancel()
            del self._members[member.name]
            self._note_service()
            if self._members:
                self.features = unite_features(self._all_features())

    def _all_features(self) -> list[EngineFeatures]:
        return [member.engine.features for member in self._members.values()]

    # --- the fleet as an engine

    async def _fan_out(
        self,
        members: Sequence[FleetMember],
        ask: Callable[[InferenceEngine], Awaitable[ResultT]],
        *,
        must: bool = True,
    ) -> dict[str, ResultT]:
        """Answers by engine, when all were asked. An error that is the engine's fault makes it a suspect; the
        first is raised if all `must` answer.
        """
        self._check_open()
        answers: dict[str, ResultT] = {}
        errors: list[EngineError] = []

        async def ask_one(member: FleetMember) -> None:
            sent_at = trio.current_time()
            try:
                answers[member.name] = await ask(member.engine)
            except EngineError as error:
                errors.append(error)
                if isinstance(error, InfrastructureError) and not isinstance(error, EngineOverloaded):
                    member.doubt(error, sent_at=sent_at)

        async with trio.open_nursery() as nursery:
            for member in members:
                nursery.start_soon(ask_one, member)
        if errors and must:
            raise errors[0]
        return answers

    def _serving(self) -> list[FleetMember]:
        return [member for member in self._members.values() if member.condition in ("healthy", "suspect")]

    def _reachable(self) -> list[FleetMember]:
        return [member for member in self._members.values() if not (member.is_down or member.leaving)]

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
        self._paused = True
        await self._fan_out(self._serving(), lambda engine: engine.pause(mode))

    async def resume(self) -> None:
        """The fleet sends requests again, and every member that can be reached resumes. Raises the first
        member's error after all were told.
        """
        self._paused = False
        try:
            await self._fan_out(self._reachable(), lambda engine: engine.resume())
        finally:
            self._dispatch()

    async def abort_all(self) -> None:
        """Every request is answered with what it has: in flight by its engine; queued, between two tries or
        held back by an update with nothing.
        """
        for call in self._calls.values():
            call.aborted, call.waits = True, False
            call.event.set()
            if call.is_held:
                call.scope.cancel()
        busy = [member for member in self._members.values() if member.calls]
        answers = await self._fan_out(busy, _abort, must=False)
        for member in busy:
            for call in member.calls if member.name not in answers else ():
                if call.aborted:
                    call.scope.cancel()

    async def health(self) -> bool:
        """Whether anyone is in service."""
        await trio.lowlevel.checkpoint()
        return any(member.in_service for member in self._members.values())

    async def load(self) -> EngineLoad:
        """The sum over members in service that answer, and the fleet's own queue; cache_usage is that of the
        fullest.
        """
        answers = await self._fan_out(self._serving(), lambda engine: engine.load(), must=False)
        usages = [load.cache_usage for load in answers.values() if load.cache_usage is not None]
        waiting = sum(call.waits for call in self._calls.values())
        return EngineLoad(
            running=sum(load.running for load in answers.values()),
            waiting=sum(load.waiting for load in answers.values()) + waiting,
            cache_usage=max(usages, default=None),
        )

    async def release_memory(self) -> None:
        await self._fan_out(self._serving(), lambda engine: engine.release_memory())

    async def restore_memory(self) -> None:
        await self._fan_out(self._reachable(), lambda engine: engine.restore_memory())

    def statistics(self) -> dict[str, float]:
        """`engine/<name>/…` for each member, and `fleet/…`. state: 0 healthy, 1 suspect, 2 dead, 3
        restarting, 4 stale; version −1: none yet.
        """
        values: dict[str, float] = dict(self._counts)
        for name, member in self._members.items():
            values |= {
                f"engine/{name}/state": CONDITIONS.index(member.condition),
                f"engine/{name}/version": -1 if member.version is None else member.version,
                f"engine/{name}/in_flight": len(member.calls),
                f"engine/{name}/limit": int(member.limit),
                f"engine/{name}/failures": member.all_failures,
                f"engine/{name}/restarts": member.restarts,
            }
        values["fleet/serving"] = sum(member.in_service for member in self._members.values())
        values["fleet/queued"] = sum(call.waits for call in self._calls.values())
        return {name: float(value) for name, value in values.items()}

    # --- life

    def _close(self) -> None:
        """Whoever is in generate(), and every later call, gets EngineClosed."""
        self._closed = True
        for call in self._calls.values():
            call.scope.cancel()
            call.event.set()
        self._stale_sender.close()
        self._note_service()


async def _abort(engine: InferenceEngine) -> bool:
    await engine.abort_all()
    return True


def _refuse_update() -> NoReturn:
    raise EngineError(
        "a fleet is not updated as one engine; weight_sync updates its members_for_update() and commits each"
    )


def unite_features(all_features: Sequence[EngineFeatures]) -> EngineFeatures:
    """What a fleet of such engines supports: the least of each, every gap once. Raises EngineSetupError where
    they do not fit together.
    """
    first = all_features[0]
    for features in all_features:
        if features.vocab_size != first.vocab_size or features.shares_weights:
            raise EngineSetupError(
                f"{features.name} has a vocabulary of {features.vocab_size}, {first.name} of"
                f" {first.vocab_size}, and shares_weights={features.shares_weights}; the engines of a"
                " fleet serve one model, and none generates with the trainer's own parameters"
            )
    shared = "update_from_checkpoint keep_pause deterministic seeds version_spans log_probs frees_memory"
    return replace(
        first,
        **{name: all(getattr(features, name) for features in all_features) for name in shared.split()},
        name="fleet",
        context_length=min(features.context_length for features in all_features),
        in_memory_update=False,  # of the members, by weight_sync
        checksum=False,
        gaps=tuple(dict.fromkeys(gap for features in all_features for gap in features.gaps)),
    )
