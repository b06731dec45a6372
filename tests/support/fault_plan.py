"""What goes wrong with inference servers, as data: which engine, when, what.

    plan = (
        Fault("a", Crash(restart_after_s=20.0), at_request=5),   # dies in the middle of its sixth request
        Fault("b", StaleWeights(), at_update=1),                 # the new version, the old weights
        Fault("b", Hang(for_s=90.0), at_s=300.0),
    )

Counts begin at 0 and go on over restarts of a server. A fault strikes once, at the first occasion that is not
before the one it names: one that was busy with an earlier fault does not save a server from the later one.
"""

import math
import random
from dataclasses import dataclass
from typing import Literal, get_args

BadReplyKind = Literal[
    "log_prob_nan",
    "log_prob_positive",
    "id_too_large",
    "log_probs_short",
    "no_tokens",
    "too_many_tokens",
    "malformed_json",
    "wrong_type",
    "spans_missing",
    "spans_short",
    "spans_falling",
]
UpdatePhase = Literal["pause", "load", "set_version", "resume", "probe"]
BAD_REPLY_KINDS: tuple[BadReplyKind, ...] = get_args(BadReplyKind)
UPDATE_PHASES: tuple[UpdatePhase, ...] = get_args(UpdatePhase)


@dataclass(frozen=True, slots=True)
class Crash:
    """The process is gone, with what it has made of its requests: every connection breaks, later ones are
    refused until it is started again, with its base weights, unnamed.
    """

    restart_after_s: float | None = None  # started again by itself; None: only by whoever calls restart()


@dataclass(frozen=True, slots=True)
class Hang:
    """Calls are accepted and nothing is answered, nor anything decoded."""

    for_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Slow:
    """A token takes `factor` times as long."""

    factor: float
    for_s: float = math.inf


@dataclass(frozen=True, slots=True)
class BadStatus:
    """A status instead of an answer."""

    status: int  # 429, 500, 503, …
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


@dataclass(frozen=True, slots=True)
class UpdateFails:
    """A call of an update fails; "probe" is the first request after its resume. A load that fails leaves the
    weights as they were. "error": so do the next two of this phase, which only
    repeat it.
    """

    phase: UpdatePhase
    how: Literal["error", "crash"] = "error"


@dataclass(frozen=True, slots=True)
class StaleWeights:
    """The load answers 200 and keeps the old weights; the version is taken."""


@dataclass(frozen=True, slots=True)
class WrongVersion:
    """The version that the server takes, and puts on its tokens, is off by `shift`."""

    shift: int = -1


AnyFault = Crash | Hang | Slow | BadStatus | CutBody | BadReply | UpdateFails | StaleWeights | WrongVersion


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong, at one of three moments."""

    engine: str  # EngineFeatures.name
    what: AnyFault
    at_request: int | None = None  # the n-th generate request that reaches the server
    at_update: int | None = None  # the n-th load of weights, with the calls around it
    at_s: float | None = None  # seconds after the server was opened


FaultPlan = tuple[Fault, ...]
"""Everything that goes wrong in a run."""


def draw_fault_plan(seed, *, engines, count, requests, updates, horizon_s):
    """The plan of an integer: `count` faults, spread over engines, requests, updates and seconds. Each ends
    by itself, or by a restart.
    """
    draw = random.Random(f"fault plan {seed}")
    lasts_s = draw.uniform(1, horizon_s / 2)
    at_request = [
        lambda: Crash(restart_after_s=lasts_s),
        lambda: Hang(lasts_s),
        lambda: Slow(draw.choice([2.0, 10.0, 50.0]), lasts_s),
        lambda: BadStatus(draw.choice([429, 500, 503]), draw.choice([None, 1, 5])),
        lambda: CutBody(draw.randrange(200)),
        lambda: BadReply(draw.choice(BAD_REPLY_KINDS)),
    ]
    at_update = [
        lambda: UpdateFails(draw.choice(UPDATE_PHASES), draw.choice(["error", "error", "crash"])),
        StaleWeights,
        lambda: WrongVersion(draw.choice([-1, 1])),
    ]
    faults = []
    for _ in range(count):
        engine, make = draw.choice(engines), draw.choice(at_request + at_update)
        if make in at_update:
            faults.append(Fault(engine, make(), at_update=draw.randrange(updates)))
        elif make in at_request[:3] and draw.random() < 0.5:
            faults.append(Fault(engine, make(), at_s=draw.uniform(0, horizon_s)))
        else:
            faults.append(Fault(engine, make(), at_request=draw.randrange(requests)))
    return tuple(faults)
