"""One engine of a fleet: what the fleet knows of it, how events change that, and who looks after it.

                 3 failed checks, its process exited, 3 failures without a success
    healthy ─────► suspect ─────────────────────────────────────────────► dead ◄──────────┐
       ▲  ▲ failure   │ check: another version                             │ after a       │ it raised
       │  └───────────┤                                                    ▼ back-off      │
       │ check passed ▼           it is up, or answers again           restarting ─────────┘
       └─ commit ── stale ◄────────────────────────────────────────────────┘

Only a commit leads from stale to healthy: nothing is served that no weight update has verified. `due` is when
`look_after` acts next: a check of a suspect, a restart, an announcement of a stale engine, the end of a rest.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import trio

from rollouts.errors import EngineError, EngineOverloaded, EngineSetupError
from rollouts.protocols import InferenceEngine
from rollouts.types import EngineFeatures, GenerateRequest

EngineCondition = Literal["healthy", "suspect", "dead", "restarting", "stale"]
CONDITIONS: tuple[EngineCondition, ...] = ("healthy", "suspect", "dead", "restarting", "stale")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """How patient a fleet is. Seconds where a name ends in _s."""

    max_concurrency: int = 1024  # requests in flight on one engine, until an overload lowers its limit
    retry_after_cap_s: float = 300.0  # a server that asks for a longer rest is asked again after this
    affinity_slack: int = 8  # requests by which a group's engine may be ahead of the least busy one
    max_attempts: int = 20  # failures of one request before the last is raised; an overload is none
    retry_base_s: float = 0.1
    retry_cap_s: float = 10.0
    failures_to_dead: int = 3  # spells of failure without one success between them
    checks_to_dead: int = 3  # failed health checks in a row
    check_s: float = 10.0  # deadline of one health check
    recover_base_s: float = 1.0  # first back-off of checks, restarts, announcements
    recover_cap_s: float = 60.0
    max_restarts: int = 8  # in a row, without stable_s in service between them
    stable_s: float = 300.0  # in service for so long: earlier restarts are forgotten
    updates_to_dead: int = 3  # failed updates in a row after which an engine is restarted if it can be
    down_limit_s: float = 600.0  # nobody in service, or a request met nothing but overload
    warn_every_s: float = 30.0


@dataclass(frozen=True)
class Member:
    """An engine and what can be done for its server."""

    engine: InferenceEngine
    # brings the server up again under the same address; None: only its owner can
    restart: Callable[[], Awaitable[None]] | None = None
    # returns the reason when the server's process has exited
    wait_exited: Callable[[], Awaitable[str]] | None = None


class Ticket(NamedTuple):
    """When a request was sent, in the engine's own counting."""

    life: int  # a reply of an earlier life is never delivered
    trust: int  # a failure sent before the last passed check does not count again


NO_TICKET = Ticket(0, 0)


@dataclass(slots=True, eq=False)
class Call:
    """A caller of generate()."""

    request: GenerateRequest
    arrival: int
    event: trio.Event = field(default_factory=trio.Event)  # ends its wait: seated, failed or aborted
    seat: FleetMember | None = None
    ticket: Ticket = NO_TICKET  # of that seat
    avoid: str | None = None  # the engine that failed it last
    error: EngineError | None = None
    aborted: bool = False
    quarantined: bool = False
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)  # around its stay on an engine


@dataclass(frozen=True, slots=True)
class Hooks:
    """What a member tells its fleet."""

    changed: Callable[[FleetMember, EngineCondition], None]  # with the condition before
    announce: Callable[[InferenceEngine], None]  # it needs an update
    count: Callable[[BaseException], None]  # a failure
    draw: Callable[[], float]  # in [0, 1), for back-offs


class FleetMember:
    """The state of one engine. Its methods are the events; each tells the fleet what changed."""

    def __init__(self, member: Member, settings: FleetSettings, hooks: Hooks) -> None:
        self.member = member
        self.engine = member.engine
        self.name = member.engine.features.name
        self.condition: EngineCondition = "stale"
        self.version: int | None = None  # last committed; None: never
        self.updating = False  # between close_admission and the verdict: no new requests, no delivery
        self.leaving = False
        self.limit = float(settings.max_concurrency)
        self.calls: set[Call] = set()  # those that have a seat
        self.sent = 0
        self.ticket = NO_TICKET
        self.failures = self.failed_checks = self.failed_updates = self.overloads = 0  # in a row
        self.tries = 0  # restarts in a row that did not bring it back for long
        self.all_failures = self.restarts = 0
        self.healthy_since = 0.0
        self.resting_until = -math.inf  # no request before: it was overloaded
        self.due = math.inf
        self.last_error = ""
        self.changed = trio.Event()  # replaced when set
        self.scope = trio.CancelScope()  # around its tasks
        self._examining = trio.CancelScope()
        self._watching = trio.CancelScope()
        self._settings = settings
        self._hooks = hooks

    # --- what may be asked of it

    @property
    def in_service(self) -> bool:
        """Whether it is verified and open: it serves now, or when its rest is over."""
        return self.condition == "healthy" and not self.updating and not self.leaving

    @property
    def is_reachable(self) -> bool:
        """Whether a weight update should try it."""
        return self.condition in ("healthy", "suspect", "stale") and not self.leaving

    @property
    def has_seat(self) -> bool:
        free = len(self.calls) < int(self.limit)
        return free and self.in_service and trio.current_time() >= self.resting_until

    @property
    def gave_up(self) -> bool:
        """Whether it stays dead: its restarts are spent."""
        return self.condition == "dead" and self.due == math.inf

    def describe(self) -> str:
        """Name, condition and last error, for a message."""
        what = "updating" if self.updating else self.condition + (" for good" if self.gave_up else "")
        return f"{self.name}: {what}" + (f" ({self.last_error})" if self.last_error else "")

    # --- changes

    def wake(self) -> None:
        changed, self.changed = self.changed, trio.Event()
        changed.set()

    def _set(
        self, condition: EngineCondition, *, due: float = math.inf, error: str = "", updating: bool = False
    ) -> None:
        """Every change of condition and admission. Losing service ends a life: what is in flight or held is
        asked elsewhere.
        """
        before, self.condition = self.condition, condition
        self.updating, self.due = updating, due
        self.last_error = error or self.last_error
        life, trust = self.ticket
        if condition in ("dead", "stale") and not updating:
            self.ticket = Ticket(life + 1, trust)
            for call in self.calls:
                call.scope.cancel()
        if condition == "healthy" and not updating:
            self.ticket = Ticket(life, trust + 1)
            self.due = self.resting_until if self.resting_until > trio.current_time() else math.inf
            self.healthy_since = trio.current_time() if before == "stale" else self.healthy_since
        self._examining.cancel()
        self.wake()
        self._hooks.changed(self, before)

    def _in(self, count: int) -> float:
        """The time after the back-off that follows `count` failures in a row."""
        settings = self._settings
        wait_s = back_off_s(count, settings.recover_base_s, settings.recover_cap_s, self._hooks.draw())
        return trio.current_time() + wait_s

    # --- requests

    def answered(self, ticket: Ticket) -> None:
        """A good answer. The limit grows by a tenth a round if it was what kept further requests away."""
        if ticket.life == self.ticket.life:
            self.failures = self.overloads = 0
            if len(self.calls) >= int(self.limit):
                self.limit = min(float(self._settings.max_concurrency), self.limit + 0.1)

    def overloaded(self, ticket: Ticket, error: EngineOverloaded) -> None:
        """It takes no more: the limit is halved once per rest, and it is left alone for what it asks, or for
        a back-off.
        """
        self._hooks.count(error)
        self.last_error = str(error)
        if ticket.life != self.ticket.life:
            return
        now = trio.current_time()
        begins = (
            now >= self.resting_until
        )  # the others of one burst come during the rest that the first began
        if begins:
            self.overloads += 1
            self.limit = max(1.0, min(self.limit, float(len(self.calls))) / 2)
        if error.retry_after_s is not None:
            rest_s = min(max(error.retry_after_s, 0.0), self._settings.retry_after_cap_s)
            self.resting_until = max(self.resting_until, now + rest_s)
        elif begins:
            self.resting_until = self._in(self.overloads)
        if self.in_service:
            self.due = self.resting_until
            self.wake()

    def doubt(self, ticket: Ticket, error: EngineError) -> None:
        """A failure that is the engine's: it is checked at once. Counts once per spell of health, whatever
        number of requests failed in that spell.
        """
        self._hooks.count(error)
        if ticket.life != self.ticket.life:
            return
        self.all_failures += 1
        self.last_error = str(error)
        if self.condition != "healthy" or ticket != self.ticket:
            return
        self.failures += 1
        if self.failures >= self._settings.failures_to_dead:
            self.die(f"{self.failures} failures without one success between them, the last: {error}")
            return
        self.failed_checks = 0
        due = math.inf if self.updating else trio.current_time()
        self._set("suspect", due=due, updating=self.updating)

    def die(self, error: str) -> None:
        """An update under way ends here: its commit comes too late."""
        if self.condition in ("dead", "restarting"):
            return
        in_service_s = trio.current_time() - self.healthy_since
        if self.condition != "stale" and in_service_s >= self._settings.stable_s:
            self.tries = 0
        self.resting_until = -math.inf
        self._lie_dead(error)

    def _lie_dead(self, error: str) -> None:
        spent = self.member.restart is not None and self.tries >= self._settings.max_restarts
        self._set("dead", due=math.inf if spent else self._in(self.tries + 1), error=error)

    def _come_back(self) -> None:
        self.failures = self.failed_checks = self.failed_updates = self.overloads = 0
        self.limit = float(self._settings.max_concurrency)
        self._set("stale", due=trio.current_time())

    # --- weight updates

    def close_admission(self) -> None:
        if self.condition not in ("dead", "restarting"):
            self._set(self.condition, updating=True)

    def commit(self, version: int, published: int) -> bool:
        """Verified at `version`: healthy. Not so where the engine died since its admission was closed."""
        if not self.updating:
            return self.in_service
        if version < published:  # overtaken by the others
            late = f"committed at {version}, published is {published}"
            self._set("stale", due=trio.current_time(), error=late)
            return False
        self.version = version
        self.failures = self.failed_checks = self.failed_updates = 0
        self._set("healthy")
        return self.in_service

    def fail(self, error: str) -> None:
        """Not verified: stale, announced again after a back-off; restarted after several in a row if it can
        be.
        """
        self.last_error = error
        if self.condition in ("dead", "restarting"):
            return
        self.failed_updates += 1
        self.all_failures += 1
        if self.member.restart is not None and self.failed_updates >= self._settings.updates_to_dead:
            self.die(f"{self.failed_updates} weight updates failed, the last: {error}")
        else:
            self._set("stale", due=self._in(self.failed_updates), error=error)

    def publish(self, version: int) -> None:
        """Whoever serves an older version is stale from now on; whoever is stale and waits is announced."""
        if self.updating or self.leaving or self.condition in ("dead", "restarting"):
            return
        if self.condition == "stale":
            if self.due == math.inf:
                self.due = trio.current_time()
                self.wake()
        elif self.version is None or self.version < version:
            why = f"it serves version {self.version}, published is {version}"
            self._set("stale", due=trio.current_time(), error=why)

    # --- its tasks

    async def look_after(self) -> None:
        """Everything that is done for it, until it leaves."""
        with self.scope:
            async with trio.open_nursery() as nursery:
                if self.member.wait_exited is not None:
                    nursery.start_soon(self._watch_process, self.member.wait_exited)
                while True:
                    changed = self.changed
                    with trio.move_on_at(self.due):
                        await changed.wait()
                        continue
                    await self._act()

    async def _act(self) -> None:
        if self.condition == "dead" and self.member.restart is not None:
            await self._restart(self.member.restart)
        elif self.condition in ("suspect", "dead"):
            with trio.CancelScope() as self._examining:
                await self._examine()
        else:
            self.due = math.inf
            if self.condition == "stale":
                self._hooks.announce(self.engine)
            else:  # its rest is over
                self._hooks.changed(self, "healthy")

    async def _examine(self) -> None:
        """Asks a suspect or a dead engine how it is and which weights it has."""
        error, version = "its health check says no", None
        try:
            with trio.fail_after(self._settings.check_s):
                if await self.engine.health():
                    version = await self.engine.weight_version()
        except trio.TooSlowError:
            error = f"no answer to a health check in {self._settings.check_s:g} s"
        except EngineError as raised:
            error = f"health check: {raised}"
        if self._examining.cancel_called:  # an update or a death came in the same tick as the answer
            return
        if version is None and self.condition == "dead":
            self.tries += 1
            self._lie_dead(error)
        elif version is None:
            if not self.failed_checks:
                error += f"; before it: {self.last_error}"
            self.failed_checks += 1
            if self.failed_checks >= self._settings.checks_to_dead:
                self.die(error)
            else:
                self.last_error, self.due = error, self._in(self.failed_checks)
        elif self.condition == "dead":
            self._come_back()
        elif version == self.version:
            self.failed_checks = 0
            self._set("healthy")
        else:
            why = f"it reports weight version {version}, committed was {self.version}"
            if self.last_error:
                why += f"; before it: {self.last_error}"
            self._set("stale", due=trio.current_time(), error=why)

    async def _restart(self, restart: Callable[[], Awaitable[None]]) -> None:
        self._watching.cancel()
        self.tries += 1
        self.restarts += 1
        self._set("restarting")
        try:
            await restart()
        except Exception as error:  # whatever keeps a server from starting is reported, and it is tried again
            self._hooks.count(error)
            self._lie_dead(f"{type(error).__name__}: {error}")
        else:
            self._come_back()

    async def _watch_process(self, wait_exited: Callable[[], Awaitable[str]]) -> None:
        while True:
            while self.condition in ("dead", "restarting"):
                await self.changed.wait()
            with trio.CancelScope() as self._watching:
                self.die(await wait_exited())


def back_off_s(count: int, base_s: float, cap_s: float, draw: float) -> float:
    """Seconds to wait after `count` failures: base·2^(count−1), at most the cap, between half and all of it
    by `draw` in [0, 1).
    """
    return min(cap_s, base_s * 2.0 ** min(count - 1, 60)) * (0.5 + 0.5 * draw)


def unite_features(all_features: Sequence[EngineFeatures]) -> EngineFeatures:
    """What a fleet of such engines supports: the least of each, every gap once. Raises EngineSetupError where
    they do not fit together.
    """
    first = all_features[0]
    for features in all_features:
        if features.vocab_size != first.vocab_size:
            raise EngineSetupError(
                f"{features.name} has a vocabulary of {features.vocab_size}, {first.name} of"
                f" {first.vocab_size}; the engines of a fleet serve one model"
            )
        if features.shares_weights:
            raise EngineSetupError(
                f"{features.name} generates with the trainer's own parameters and needs no fleet; use it as"
                " it is"
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
