"""What goes wrong with inference servers, as data: which engine, when, what. The same plan drives a
FaultyEngine and a fault server.

    plan = FaultPlan((
        Fault("a", Crash(after_tokens=3, restart_after_s=20.0), at_request=5),      # dies in the middle of
        its sixth request
        Fault("b", StaleWeights(), at_update=1),                                     # says the new version,
        serves the old weights
        Fault("b", Hang(for_s=90.0), at_s=300.0),
    ))

Counts begin at 0 and go on over restarts of a server. A fault strikes once, at the first occasion that is not
before the one it names: one that was busy with an earlier fault does not save a server from the later one.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

BadReplyKind = Literal[
    "log_prob_nan",
    "log_prob_null",
    "log_prob_infinite",
    "log_prob_positive",
    "id_too_large",
    "id_negative",
    "log_probs_short",
    "log_probs_long",
    "no_tokens",
    "too_many_tokens",
    "malformed_json",
    "wrong_type",
    "spans_missing",
    "spans_short",
    "spans_gap",
    "spans_overlap",
    "spans_falling",
]
UpdatePhase = Literal["pause", "load", "set_version", "resume", "probe"]
BAD_REPLY_KINDS: tuple[BadReplyKind, ...] = get_args(BadReplyKind)
UPDATE_PHASES: tuple[UpdatePhase, ...] = get_args(UpdatePhase)


@dataclass(frozen=True, slots=True)
class Crash:
    """The process is gone: every connection breaks, later ones are refused until it is started again, with
    its base weights, unnamed.
    """

    restart_after_s: float | None = None  # started again by itself; None: only by whoever calls restart()
    after_tokens: int = 0  # of the request that it strikes; all it has made by then is lost


@dataclass(frozen=True, slots=True)
class Hang:
    """Calls are accepted and nothing is answered, nor anything decoded."""

    for_s: float = math.inf
    only_this_request: bool = False  # the server goes on, this one request is forgotten


@dataclass(frozen=True, slots=True)
class Slow:
    """A token takes `factor` times as long."""

    factor: float
    for_s: float = math.inf


@dataclass(frozen=True, slots=True)
class BadStatus:
    """A status instead of an answer, to `count` requests in a row."""

    status: int  # 429, 500, 503, …
    count: int = 1
    retry_after_s: int | None = None  # said in a Retry-After header; None: no such header


@dataclass(frozen=True, slots=True)
class CutBody:
    """The connection closes after this many bytes of the answer's body; at or beyond its end, one byte before
    it.
    """

    at_byte: int


@dataclass(frozen=True, slots=True)
class BadReply:
    """An answer with status 200 that no engine may give."""

    kind: BadReplyKind
    token: int = 0  # the one that is spoiled, where the kind spoils one; the last one if there are fewer


@dataclass(frozen=True, slots=True)
class UpdateFails:
    """A call of an update fails; "probe" is the first request after its resume. A load that fails leaves the
    weights as they were.
    """

    phase: UpdatePhase
    how: Literal["error", "crash", "hang"] = "error"
    count: int = 1  # so many times in a row


@dataclass(frozen=True, slots=True)
class StaleWeights:
    """The load answers 200 and keeps the old weights; the version is taken."""


@dataclass(frozen=True, slots=True)
class WrongVersion:
    """The version that the server takes, and puts on its tokens, is off by `shift`."""

    shift: int = -1


RequestFault = Crash | Hang | Slow | BadStatus | CutBody | BadReply
UpdateFault = UpdateFails | StaleWeights | WrongVersion | Crash | Hang
TimedFault = Crash | Hang | Slow
FaultKind = Literal["crash", "hang", "slow", "status", "cut", "reply", "update", "stale", "version"]
FAULT_KINDS: tuple[FaultKind, ...] = get_args(FaultKind)


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong. Exactly one of the three moments is given.

    At an update, Crash and Hang strike in the middle of the load. Raises ValueError for a fault that cannot
    happen at its moment.
    """

    engine: str  # EngineFeatures.name
    what: RequestFault | UpdateFault
    at_request: int | None = None  # the n-th generate request that reaches the server
    at_update: int | None = None  # the n-th load of weights, with the calls around it
    at_s: float | None = None  # seconds after the server was opened

    def __post_init__(self) -> None:
        moments = {
            "at_request": (self.at_request, RequestFault),
            "at_update": (self.at_update, UpdateFault),
            "at_s": (self.at_s, TimedFault),
        }
        given = [name for name, (value, _) in moments.items() if value is not None]
        if len(given) != 1:
            raise ValueError(
                f"{self.what} of engine {self.engine!r} has moments {given}; give one of at_request,"
                " at_update, at_s"
            )
        value, kinds = moments[given[0]]
        if not isinstance(self.what, kinds):
            possible = ", ".join(kind.__name__ for kind in get_args(kinds))
            raise ValueError(
                f"{given[0]}={value} of engine {self.engine!r}: {self.what} cannot happen there;"
                f" {possible} can"
            )
        if value is not None and value < 0:
            raise ValueError(f"{given[0]}={value} of engine {self.engine!r}: counts and seconds begin at 0")


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Everything that goes wrong in a run."""

    faults: tuple[Fault, ...] = ()

    def of_engine(self, name: str) -> tuple[Fault, ...]:
        """The faults of one engine, in the plan's order."""
        return tuple(fault for fault in self.faults if fault.engine == name)


NO_FAULTS = FaultPlan()


def draw_fault_plan(
    seed: int,
    *,
    engines: Sequence[str],
    kinds: Sequence[FaultKind] = FAULT_KINDS,
    most: int = 4,
    requests: int = 20,
    updates: int = 4,
    horizon_s: float = 300.0,
    recovers: bool = False,
) -> FaultPlan:
    """The plan of an integer: 0 to `most` faults per engine, of the given kinds, spread over so many
    requests, updates and seconds.

    With `recovers` every crash and hang ends by itself; else some wait for somebody to call restart().
    """
    draw = random.Random(f"fault plan {seed}")
    faults = [
        _draw_fault(
            draw,
            engine,
            draw.choice(list(kinds)),
            requests=requests,
            updates=updates,
            horizon_s=horizon_s,
            recovers=recovers,
        )
        for engine in engines
        for _ in range(draw.randint(0, most))
    ]
    return FaultPlan(tuple(faults))


def _draw_fault(
    draw: random.Random,
    engine: str,
    kind: FaultKind,
    *,
    requests: int,
    updates: int,
    horizon_s: float,
    recovers: bool,
) -> Fault:
    at_request = draw.randrange(max(requests, 1))
    at_update = draw.randrange(max(updates, 1))
    at_s = draw.uniform(0, horizon_s)
    lasts_s = draw.uniform(1, horizon_s / 2)
    ends = recovers or draw.random() < 0.5
    if kind in ("crash", "hang", "slow"):
        what = _draw_outage(
            draw, kind, lasts_s=lasts_s, ends=ends, only_one=not recovers and draw.random() < 0.3
        )
        moments = {"at_request": at_request, "at_s": at_s} | (
            {} if isinstance(what, Slow) else {"at_update": at_update}
        )
        if isinstance(what, Hang) and what.only_this_request:
            moments = {"at_request": at_request}
        moment = draw.choice(list(moments))
        return Fault(engine, what, **{moment: moments[moment]})  # pyright: ignore[reportArgumentType]  (a float only under at_s)
    if kind == "status":
        status = draw.choice([429, 500, 503])
        retry_after = draw.choice([None, 1, 5]) if status != 500 else None
        return Fault(
            engine,
            BadStatus(status, count=draw.choice([1, 1, 2, 5]), retry_after_s=retry_after),
            at_request=at_request,
        )
    if kind == "cut":
        return Fault(engine, CutBody(draw.randrange(200)), at_request=at_request)
    if kind == "reply":
        return Fault(
            engine, BadReply(draw.choice(BAD_REPLY_KINDS), token=draw.randrange(3)), at_request=at_request
        )
    if kind == "update":
        ways: tuple[Literal["error", "crash", "hang"], ...] = (
            ("error", "error", "crash") if recovers else ("error", "error", "crash", "hang")
        )
        how = draw.choice(ways)
        return Fault(
            engine,
            UpdateFails(draw.choice(UPDATE_PHASES), how, count=draw.choice([1, 1, 2])),
            at_update=at_update,
        )
    return Fault(
        engine, StaleWeights() if kind == "stale" else WrongVersion(draw.choice([-1, 1])), at_update=at_update
    )


def _draw_outage(
    draw: random.Random, kind: str, *, lasts_s: float, ends: bool, only_one: bool
) -> Crash | Hang | Slow:
    if kind == "crash":
        return Crash(restart_after_s=lasts_s if ends else None, after_tokens=draw.randrange(3))
    if kind == "hang":
        return Hang(for_s=lasts_s if ends else math.inf, only_this_request=only_one)
    return Slow(draw.choice([2.0, 10.0, 50.0]), for_s=lasts_s if ends else math.inf)
