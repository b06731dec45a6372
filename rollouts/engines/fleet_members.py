"""One engine of a fleet: what the fleet knows of it, how events change that, and who looks after it.

                      3 failures without a success, its process exited
    healthy ─────► suspect ─────────────────────────────────────────────► dead ◄──────────┐
       ▲  ▲ failure   │ check: another version                             │ after a       │ it raised
       │  └───────────┤                                                    ▼ back-off      │
       │ check passed ▼           it is up, or answers again           restarting ─────────┘
       └─ commit ── stale ◄────────────────────────────────────────────────┘

Only a commit leads from stale to healthy: nothing is served that no weight update has verified. `due` is when
`look_after` acts next: a check of a suspect, a restart, an announcement of a stale engine, the end of a rest.
"""

import math
import random
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import field
from typing import Literal, NamedTuple, get_args

import trio

from rollouts.errors import (
    EngineError,
    EngineOverloaded,
    EngineSetupError,
    InfrastructureError,
    ReplyError,
    RequestRefused,
)
from rollouts.protocols import InferenceEngine
from rollouts.types import Completion, EngineFeatures, GenerateRequest, live

EngineCondition = Literal["healthy", "suspect", "dead", "restarting", "stale"]
CONDITIONS = get_args(EngineCondition)
IN_A_ROW = 3  # failures (of requests, checks or updates) without a success: the engine is dead
CHECK_S = 10.0  # for one health check
RECOVER_S, RECOVER_CAP_S = 1.0, 60.0  # first and longest back-off of checks, restarts, announcements
RETRY_AFTER_CAP_S = 300.0  # a server that asks for a longer rest is asked again after this
MAX_RESTARTS = 8  # in a row, without STABLE_S in service between them
STABLE_S = 300.0
AFFINITY_SLACK = 8  # requests by which a group's engine may be ahead of the least busy one
# The same of the engine that has a trajectory's history: elsewhere all of it is computed anew, thousands of
# tokens and more with each turn, where a group shares one prompt. First turns, which go to the least busy
# engines, level the difference; a quarter of what an engine takes at once.
TRAJECTORY_SLACK = 64


class Member(NamedTuple):
    """An engine and what can be done for its server."""

    engine: InferenceEngine
    # brings the server up again under the same address; None: only its owner can
    restart: Callable[[], Awaitable[None]] | None = None
    # returns the reason when the server's process has exited
    wait_exited: Callable[[], Awaitable[str]] | None = None


@live
class Call:
    """A caller of generate()."""

    request: GenerateRequest
    seat: "FleetMember | None" = None  # its engine, or the last that it had
    seated: trio.Event = field(init=False)  # of that engine, as `stay`
    sent_at: float = 0.0  # when it took that seat
    avoid: str | None = None  # the engine that failed it last
    is_asked: bool = False  # an engine works on it, and can be told to abort it
    aborted: bool = False
    failure: EngineError | None = None  # why it ended
    life: trio.CancelScope = field(default_factory=trio.CancelScope)
    stay: trio.CancelScope = field(init=False)

    def end(self, failure: EngineError | None) -> None:
        """generate() raises `failure`; None: it answers that the request was aborted."""
        self.failure = failure
        self.life.cancel()


@live
class FleetMember:
    """The state of one engine. Its methods are the events; each tells the fleet what changed."""

    member: Member
    max_concurrency: int
    limit: float  # requests at once; max_concurrency at first
    random_: random.Random
    counts: Counter[str]  # the fleet's, of failures by class
    tell: "Callable[[FleetMember, EngineCondition], None]"  # gets the condition before
    announce: Callable[[InferenceEngine], None]  # gets an engine that needs an update
    condition: EngineCondition = "stale"
    version: int = -1  # last committed; −1: never
    updating: bool = False  # between close_admission and the verdict: no new requests, no delivery
    leaving: bool = False
    calls: set[Call] = field(default_factory=set)  # those that have a seat
    sent: int = 0
    strikes: int = 0  # failures in a row, as the next two
    overloads: int = 0
    tries: int = 0  # restarts in a row that did not bring it back for long
    all_failures: int = 0
    restarts: int = 0
    healthy_since: float = 0.0  # a failure that was sent before does not count again
    in_service_since: float = 0.0
    resting_until: float = -math.inf  # no request before: it was overloaded
    due: float = math.inf
    last_error: str = ""

    def __post_init__(self) -> None:
        self.changed = trio.lowlevel.ParkingLot()
        self.scope = trio.CancelScope()  # around its tasks
        self.acting, self.watching = trio.CancelScope(), trio.CancelScope()

    @property
    def engine(self) -> InferenceEngine:
        return self.member.engine

    @property
    def name(self) -> str:
        return self.engine.features.name

    # --- what may be asked of it

    @property
    def in_service(self) -> bool:
        """Whether it is verified and open: it serves now, or when its rest is over."""
        return self.condition == "healthy" and not self.updating and not self.leaving

    @property
    def is_down(self) -> bool:
        return self.condition in ("dead", "restarting")

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

    def _set(
        self, condition: EngineCondition, *, due: float = math.inf, error: str = "", updating: bool = False
    ) -> None:
        """Every change of condition and admission. Who loses service loses what is in flight or held: it is
        asked elsewhere.
        """
        before, self.condition = self.condition, condition
        self.updating, self.due = updating, due
        self.last_error = error or self.last_error
        now = trio.current_time()
        if condition in ("dead", "stale") and not updating:
            for call in self.calls:
                call.stay.cancel()
        if condition == "healthy" and not updating:
            self.healthy_since = now
            if before == "stale":
                self.in_service_since = now
            if self.resting_until > now:
                self.due = self.resting_until
        self.acting.cancel()
        self.changed.unpark_all()
        self.tell(self, before)

    def _after(self, count: int) -> float:
        """The time after the back-off that follows `count` failures in a row."""
        return trio.current_time() + back_off_s(count, RECOVER_S, RECOVER_CAP_S, self.random_)

    # --- requests

    async def ask(self, call: Call) -> Completion | InfrastructureError | None:
        """What came of asking the engine: an answer that may be delivered, the engine's failure, or None when
        it left service meanwhile. Raises RequestRefused.

        What is answered during an update is held until the engine is verified; a failed update cancels the
        call's stay.
        """
        with call.stay:
            try:
                call.is_asked = True
                completion = await self.engine.generate(call.request)
                call.is_asked = False
                if self.updating:
                    await self._hold(call)
                if call.stay.cancel_called:
                    return None
                self._accept(completion)
                return completion
            except RequestRefused:
                raise
            except EngineError as error:
                self.counts[f"fleet/failures/{type(error).__name__}"] += 1
                self.last_error = str(error)
                if isinstance(error, EngineOverloaded):
                    self.overloaded(error)
                else:
                    self.doubt(call.sent_at)
                if isinstance(error, InfrastructureError):
                    return error
                # closed, 401, 404, another version: this engine would draw all requests by failing
                made = InfrastructureError(f"{self.name}: {type(error).__name__}: {error}")
                made.__cause__ = error
                return made
        return None

    async def _hold(self, call: Call) -> None:
        if call.aborted:
            call.end(None)
        while self.updating:
            await self.changed.park()

    def _accept(self, completion: Completion) -> None:
        """A good answer. The limit grows by a tenth a round if it was what kept further requests away. Raises
        ReplyError if some of its tokens are of weights never committed here.
        """
        for version in {*completion.weight_versions.tolist()}:
            if version > self.version or version < min(0, self.version):
                raise ReplyError(
                    f"{self.name}, request {completion.request_id!r}: tokens of weight version {version},"
                    f" committed there is {self.version}"
                )
        self.strikes = self.overloads = 0
        if len(self.calls) >= int(self.limit):
            self.limit = min(self.max_concurrency, self.limit + 0.1)

    def overloaded(self, error: EngineOverloaded) -> None:
        """It takes no more: the limit is halved once per rest, and it is left alone for what it asks, or for
        a back-off.
        """
        now, asked_s = trio.current_time(), error.retry_after_s
        if now >= self.resting_until:  # the others of one burst come during the rest that the first began
            self.overloads += 1
            self.limit = max(1.0, min(self.limit, len(self.calls)) / 2)
            self.resting_until = self._after(self.overloads) if asked_s is None else now
        if asked_s is not None:
            self.resting_until = max(self.resting_until, now + min(asked_s, RETRY_AFTER_CAP_S))
        if self.in_service:
            self.due = self.resting_until
            self.changed.unpark_all()

    def doubt(self, sent_at: float) -> None:
        """A failure that is the engine's: it is checked at once. Counts once per spell of health, whatever
        number of requests failed in that spell.
        """
        self.all_failures += 1
        if self.condition == "healthy" and sent_at >= self.healthy_since and not self._strike():
            due = math.inf if self.updating else trio.current_time()
            self._set("suspect", due=due, updating=self.updating)

    def _strike(self, *, may_die: bool = True) -> bool:
        """Whether it dies of this failure, its last error."""
        self.strikes += 1
        if may_die and self.strikes >= IN_A_ROW:
            self.die(f"{self.strikes} failures without one success between them, the last: {self.last_error}")
        return self.is_down

    def die(self, error: str) -> None:
        """An update under way ends here: its commit comes too late."""
        if self.is_down:
            return
        if self.condition != "stale" and trio.current_time() - self.in_service_since >= STABLE_S:
            self.tries = 0
        self.resting_until = -math.inf
        self._lie_dead(error)

    def _lie_dead(self, error: str) -> None:
        spent = self.member.restart and self.tries >= MAX_RESTARTS
        self._set("dead", due=math.inf if spent else self._after(self.tries + 1), error=error)

    def _go_stale(self, error: str = "") -> None:
        """Announced at once."""
        self._set("stale", due=trio.current_time(), error=error)

    def _come_back(self) -> None:
        self.strikes = self.overloads = 0
        self.limit = self.max_concurrency
        self._go_stale()

    # --- weight updates

    def close_admission(self) -> None:
        if not self.is_down:
            self._set(self.condition, updating=True)

    def commit(self, version: int, published: int) -> bool:
        """Verified at `version`: healthy. Not so where the engine died since its admission was closed."""
        if self.updating and version < published:  # overtaken by the others
            self._go_stale(f"committed at {version}, published is {published}")
        elif self.updating:
            self.version = version
            self.strikes = 0
            self._set("healthy")
        return self.in_service

    def fail(self, error: str) -> None:
        """Not verified: stale, announced again after a back-off; restarted after several in a row if it can
        be.
        """
        self.last_error = error
        if self.is_down:
            return
        self.all_failures += 1
        if not self._strike(may_die=self.member.restart is not None):
            self._set("stale", due=self._after(self.strikes))

    def publish(self, version: int) -> None:
        """Whoever serves an older version is stale from now on; whoever is stale and waits is announced."""
        if self.updating or self.leaving or self.is_down:
            return
        if self.condition != "stale" and self.version < version:
            self._go_stale(f"it serves version {self.version}, published is {version}")
        elif self.condition == "stale" and self.due == math.inf:
            self.due = trio.current_time()
            self.changed.unpark_all()

    # --- its tasks

    async def look_after(self) -> None:
        """Everything that is done for it, until it leaves."""
        with self.scope:
            async with trio.open_nursery() as nursery:
                if self.member.wait_exited:
                    nursery.start_soon(self._watch_process)
                while True:
                    with trio.move_on_at(self.due):
                        await self.changed.park()
                        continue
                    await self._act()

    async def _act(self) -> None:
        if self.condition == "dead" and self.member.restart:
            self.watching.cancel()
            self.tries += 1
            self.restarts += 1
            self._set("restarting")
            try:
                await self.member.restart()
            except Exception as error:  # what keeps a server from starting is reported, and it is tried again
                self.counts[f"fleet/failures/{type(error).__name__}"] += 1
                self._lie_dead(f"{type(error).__name__}: {error}")
            else:
                self._come_back()
        elif self.condition in ("suspect", "dead"):
            with trio.CancelScope() as self.acting:
                await self._examine()
        else:
            self.due = math.inf
            if self.condition == "stale":
                self.announce(self.engine)
            else:  # its rest is over
                self.tell(self, "healthy")

    async def _examine(self) -> None:
        """Asks a suspect or a dead engine how it is and which weights it has."""
        error, version = "its health check says no", None
        try:
            with trio.fail_after(CHECK_S):
                if await self.engine.health():
                    version = await self.engine.weight_version()
        except trio.TooSlowError:
            error = f"no answer to a health check in {CHECK_S:g} s"
        except EngineError as raised:
            error = f"health check: {raised}"
        if self.acting.cancel_called:  # an update or a death came in the same tick as the answer
            return
        if self.condition == "dead":
            self.tries += version is None
            self._come_back() if version is not None else self._lie_dead(error)
        elif version == self.version:
            self._set("healthy")
        elif version is not None:
            self._go_stale(f"it reports weight version {version}, committed was {self.version}")
        else:
            self.last_error = error
            if not self._strike():
                self.due = self._after(self.strikes)

    async def _watch_process(self) -> None:
        assert self.member.wait_exited
        while True:
            while self.is_down:
                await self.changed.park()
            with trio.CancelScope() as self.watching:
                self.die(await self.member.wait_exited())


def back_off_s(count: int, base_s: float, cap_s: float, random_: random.Random) -> float:
    """Seconds to wait after `count` failures: half to all of base·2^(count−1), at most the cap."""
    return min(cap_s, base_s * 2.0 ** min(count - 1, 60)) * random_.uniform(0.5, 1.0)


def choose_member(members: Iterable[FleetMember], call: Call, last: str | None) -> FleetMember | None:
    """Where the request goes: to the engine that answered its trajectory's last one (named `last`), or else
    to its group's, unless that is TRAJECTORY_SLACK or AFFINITY_SLACK requests busier than the least busy one;
    None when all seats are taken. `avoid` is asked only when nobody else has a seat.
    """
    free = [member for member in members if member.has_seat]
    if not free:
        return None
    least = min(free, key=lambda member: (member.name == call.avoid, len(member.calls), member.sent))
    wanted = [(member, TRAJECTORY_SLACK) for member in free if member.name == last]
    if key := call.request.affinity:
        favourite = max(free, key=lambda member: zlib.crc32(f"{key}/{member.name}".encode()))
        wanted.append((favourite, AFFINITY_SLACK))
    for member, slack in wanted:
        if member.name != call.avoid and len(member.calls) - len(least.calls) <= slack:
            return member
    return least


def unite_features(members: Iterable[FleetMember]) -> EngineFeatures:
    """What a fleet of such engines supports: the least of each, every gap once. Raises EngineSetupError where
    they do not fit together.
    """
    each = [member.engine.features for member in members]
    first = each[0]
    for features in each:
        if features.vocab_size != first.vocab_size or features.shares_weights:
            raise EngineSetupError(
                f"{features.name} has a vocabulary of {features.vocab_size}, {first.name} of"
                f" {first.vocab_size}, and shares_weights={features.shares_weights}; the engines of a"
                " fleet serve one model, and none generates with the trainer's own parameters"
            )
    shared = "update_from_checkpoint keep_pause deterministic seeds version_spans log_probs"
    return EngineFeatures(  # weights in memory are the members', by weight_sync
        first.vocab_size,
        min(features.context_length for features in each),
        **{name: all(getattr(features, name) for features in each) for name in shared.split()},
        name="fleet",
        max_adapter_rank=min(features.max_adapter_rank for features in each),
        frees_memory=False,
        gaps=tuple(dict.fromkeys(gap for features in each for gap in features.gaps)),
    )
