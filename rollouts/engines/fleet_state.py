"""What a fleet knows of one engine, and how each event changes it. Pure: time and random draws are arguments,
nothing waits here.

                    check failed k times, exited, failures without a success
    healthy ─────► suspect ─────────────────────────────────────────────────► dead ◄──────────┐
       ▲  ▲  failure  │ other version                                          │ restart due  │ it raised
       │  └───────────┤                                                        ▼              │
       │   check      ▼                       it is up, or answers again    restarting ───────┘
       └─commit─── stale ◄──────────────────────────────────────────────────────┘

Only `committed` leads from stale to healthy: nothing is served that no weight update has verified. A check
leads from suspect to healthy when the engine is well and still has the version that was committed. What is to
be done next, and when, is the `duty` of the record: the fleet's supervisor sleeps until then. A transition
makes a new duty, so that work done for an old one is recognised and thrown away.

`life` counts the spells between two losses of service. A reply that was asked for in an earlier life is never
delivered. `trust` counts how often the engine became healthy: what was sent before the last check cannot
condemn it a second time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

EngineCondition = Literal["healthy", "suspect", "dead", "restarting", "stale"]
CONDITIONS: tuple[EngineCondition, ...] = (
    "healthy",
    "suspect",
    "dead",
    "restarting",
    "stale",
)  # metrics count in this order
DutyKind = Literal["rest", "load", "check", "restart", "reach", "announce"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """How patient a fleet is. Seconds where a name ends in _s."""

    start_concurrency: int = 128  # requests in flight on an engine of which nothing is known
    max_concurrency: int = 1024  # never more on one engine
    overload_factor: float = 0.5  # what an overload leaves of the limit
    waiting_share: float = (
        0.25  # an engine with more than this share of its running requests waiting has too many
    )
    load_every: int = 64  # answers at the limit after which the engine is asked how many wait in it
    retry_after_cap_s: float = (
        300.0  # a server that asks for more is asked again after this; it counts as in service meanwhile
    )
    affinity_slack: int = 8  # requests by which a group's engine may be ahead of the least busy one
    max_attempts: int = 20  # failures of one request before the last of them is raised; an overload is none
    retry_base_s: float = 0.1
    retry_cap_s: float = 10.0
    failures_to_dead: int = 3  # spells of failure without one success between them
    checks_to_dead: int = 3  # failed health checks in a row
    check_s: float = 10.0  # deadline of one health check
    recover_base_s: float = 1.0  # first back-off of checks, restarts, announcements
    recover_cap_s: float = 60.0
    max_restarts: int = 8  # in a row, without stable_s in service between them
    stable_s: float = 300.0  # in service for so long: earlier restarts are forgotten
    updates_to_dead: int = 3  # failed updates in a row after which an engine that can be restarted is
    down_limit_s: float = (
        600.0  # nobody in service for so long: FleetDown; nothing but overload for so long: EngineOverloaded
    )
    warn_every_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Duty:
    """What the supervisor of an engine does next, unless something happens before `at`. Compared by identity:
    it names one occasion.
    """

    kind: DutyKind
    at: float


class Ticket(NamedTuple):
    """When a request was sent, in the engine's own counting."""

    life: int
    trust: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """One engine of a fleet."""

    name: str
    can_restart: bool
    limit: float  # requests in flight at most, rounded down
    threshold: float  # below it the limit grows by 1 an answer, above it by 1 a full round of answers
    condition: EngineCondition = "stale"
    version: int | None = None  # last committed; None: never
    updating: bool = False  # between admission_closed and the verdict: no new requests, no delivery
    hopeful: bool = False  # that update began while it served, or is its first
    leaving: bool = False
    in_flight: int = 0
    sent: int = 0
    life: int = 0
    trust: int = 0
    failures: int = 0  # spells since the last success
    failed_checks: int = 0  # in a row, since it was healthy
    failed_updates: int = 0  # in a row
    tries: int = 0  # restarts or calls in a row that did not bring it back for long
    overloads: int = 0  # in a row
    answers: int = 0  # at the limit, since the load was asked for
    all_failures: int = 0
    restarts: int = 0
    healthy_since: float = 0.0
    resting_until: float = -math.inf  # no request before: it was overloaded
    duty: Duty | None = None
    last_error: str = ""


def make_engine_state(
    name: str, *, can_restart: bool, announce_at: float | None, settings: FleetSettings
) -> EngineState:
    """A member that has just come: stale. With `announce_at` it is announced as such; without, the first
    update of all finds it.
    """
    return EngineState(
        name=name,
        can_restart=can_restart,
        limit=float(min(settings.start_concurrency, settings.max_concurrency)),
        threshold=float(settings.max_concurrency),
        duty=None if announce_at is None else Duty("announce", announce_at),
    )


def compute_backoff_s(count: int, base_s: float, cap_s: float, draw: float) -> float:
    """Seconds to wait after `count` failures: base·2^(count−1), at most the cap, between half and all of it
    by `draw` in [0, 1).
    """
    return min(cap_s, base_s * 2.0 ** min(count - 1, 60)) * (0.5 + 0.5 * draw)


# --- who may be asked ---------------------------------------------------------------------------------------


def in_service(state: EngineState) -> bool:
    """Whether it is verified and open: it serves now, or when its rest is over."""
    return state.condition == "healthy" and not state.updating and not state.leaving


def may_serve(state: EngineState) -> bool:
    """Whether the fleet can count on it: in service, or in an update that found it so, or in its first."""
    return not state.leaving and (state.hopeful if state.updating else state.condition == "healthy")


def is_reachable(state: EngineState) -> bool:
    """Whether a weight update should try it."""
    return state.condition in ("healthy", "suspect", "stale") and not state.leaving


def needs_update(state: EngineState) -> bool:
    """Whether it is up and out of service until an update succeeds."""
    return state.condition == "stale" and not state.leaving


def has_seat(state: EngineState, now: float) -> bool:
    """Whether a request may be sent to it now."""
    return in_service(state) and now >= state.resting_until and state.in_flight < int(state.limit)


def choose_engine(
    states: Iterable[EngineState], now: float, *, pinned: str | None, avoid: str | None, slack: int
) -> EngineState | None:
    """Where the next request goes: to `pinned` unless that is `slack` requests busier than the least busy;
    None when all seats are taken.

    `avoid` failed this request last: it is asked again only when nobody else has a seat. Of equals the one
    that was asked least is taken.
    """
    least: EngineState | None = None
    least_key: tuple[bool, int, int] | None = None
    friend: EngineState | None = None
    for state in states:
        if not has_seat(state, now):
            continue
        if state.name == pinned and pinned != avoid:
            friend = state
        key = state.name == avoid, state.in_flight, state.sent
        if least_key is None or key < least_key:
            least, least_key = state, key
    if friend is not None and least is not None and friend.in_flight <= least.in_flight + slack:
        return friend
    return least


# --- requests -----------------------------------------------------------------------------------------------


def get_ticket(state: EngineState) -> Ticket:
    return Ticket(state.life, state.trust)


def request_sent(state: EngineState) -> EngineState:
    assert in_service(state) and state.in_flight < int(state.limit), state
    return replace(state, in_flight=state.in_flight + 1, sent=state.sent + 1)


def request_dropped(state: EngineState) -> EngineState:
    """It ended without saying anything about the engine: cancelled, refused, or of an earlier life."""
    assert state.in_flight > 0, state
    return replace(state, in_flight=state.in_flight - 1)


def request_answered(state: EngineState, ticket: Ticket, now: float, settings: FleetSettings) -> EngineState:
    """A good answer. The limit grows if it was what kept further requests away."""
    if ticket.life != state.life:
        return request_dropped(state)
    limit, answers, duty = state.limit, state.answers, state.duty
    if state.in_flight >= int(limit):
        limit = min(
            float(settings.max_concurrency), limit + (1.0 if limit < state.threshold else 1.0 / limit)
        )
        answers += 1
    if answers >= settings.load_every and duty is None and in_service(state):
        answers, duty = 0, Duty("load", now)
    return replace(
        state, in_flight=state.in_flight - 1, failures=0, overloads=0, limit=limit, answers=answers, duty=duty
    )


def request_overloaded(
    state: EngineState,
    ticket: Ticket,
    error: str,
    retry_after_s: float | None,
    now: float,
    settings: FleetSettings,
    *,
    draw: float,
) -> EngineState:
    """It takes no more: the limit is cut once per rest, and it is left alone for what it asks, or for a
    back-off.
    """
    before, state = state, replace(request_dropped(state), last_error=error)
    if ticket.life != state.life:
        return state
    cut = now >= before.resting_until  # the others of one burst arrive during the rest that the first began
    overloads = state.overloads + 1 if cut else state.overloads
    asked_s = -math.inf if retry_after_s is None else min(retry_after_s, settings.retry_after_cap_s)
    backoff_s = (
        compute_backoff_s(max(1, overloads), settings.recover_base_s, settings.recover_cap_s, draw)
        if cut
        else 0.0
    )
    rest_until = max(before.resting_until, now + (backoff_s if retry_after_s is None else max(asked_s, 0.0)))
    limit = (
        max(1.0, min(before.limit, float(before.in_flight)) * settings.overload_factor)
        if cut
        else before.limit
    )
    duty = state.duty
    if in_service(state) and rest_until != before.resting_until:
        duty = Duty("rest", rest_until)
    threshold = limit if cut else before.threshold
    return replace(
        state,
        overloads=overloads,
        limit=limit,
        threshold=threshold,
        resting_until=rest_until,
        answers=0,
        duty=duty,
    )


def request_failed(
    state: EngineState, ticket: Ticket, error: str, now: float, settings: FleetSettings, *, draw: float
) -> EngineState:
    """The engine's fault: it is suspected and checked at once."""
    return doubted(request_dropped(state), ticket, error, now, settings, draw=draw)


def doubted(
    state: EngineState, ticket: Ticket, error: str, now: float, settings: FleetSettings, *, draw: float
) -> EngineState:
    """Something spoke against it. Counts once per spell of health, whatever number of requests failed in that
    spell.
    """
    if ticket.life != state.life:
        return state
    state = replace(state, all_failures=state.all_failures + 1, last_error=error)
    if state.condition != "healthy" or ticket.trust != state.trust:
        return state
    if state.failures + 1 >= settings.failures_to_dead:
        return died(
            state,
            f"{state.failures + 1} failures without one success between them, the last: {error}",
            now,
            settings,
            draw=draw,
        )
    duty = None if state.updating else Duty("check", now)
    return replace(state, condition="suspect", failures=state.failures + 1, failed_checks=0, duty=duty)


def load_seen(state: EngineState, running: int, waiting: int, settings: FleetSettings) -> EngineState:
    """How many run and wait in it. A long queue inside is cut to what it runs and a little: at most half of
    the limit at a time.
    """
    state = replace(state, duty=None)
    if not running or waiting <= running * settings.waiting_share:
        return state
    limit = min(
        state.limit,
        max(1.0, state.limit * settings.overload_factor, running * (1.0 + settings.waiting_share)),
    )
    return replace(state, limit=limit, threshold=limit)


def rested(state: EngineState) -> EngineState:
    return replace(state, duty=None)


# --- health -------------------------------------------------------------------------------------------------


def check_passed(state: EngineState, version: int, now: float) -> EngineState:
    """Well, and with `version`: healthy if that is the committed one, else stale."""
    assert state.condition == "suspect" and not state.updating, state
    if version != state.version:
        why = (
            f"it reports weight version {version}, committed was {state.version}; last error:"
            f" {state.last_error}"
        )
        return replace(
            state, condition="stale", life=state.life + 1, duty=Duty("announce", now), last_error=why
        )
    return _healthy(state, now)


def check_failed(
    state: EngineState, error: str, now: float, settings: FleetSettings, *, draw: float
) -> EngineState:
    assert state.condition == "suspect" and not state.updating, state
    failed = state.failed_checks + 1
    state = replace(state, failed_checks=failed, last_error=error)
    if failed >= settings.checks_to_dead:
        return died(state, error, now, settings, draw=draw)
    return replace(
        state,
        duty=Duty(
            "check", now + compute_backoff_s(failed, settings.recover_base_s, settings.recover_cap_s, draw)
        ),
    )


def died(state: EngineState, error: str, now: float, settings: FleetSettings, *, draw: float) -> EngineState:
    """Dead; nothing happens to one that is dead or being restarted. An update under way on it ends here: its
    commit comes too late.
    """
    if state.condition in ("dead", "restarting"):
        return state
    stable = state.condition in ("healthy", "suspect") and now - state.healthy_since >= settings.stable_s
    state = replace(
        state,
        condition="dead",
        updating=False,
        life=state.life + 1,
        last_error=error,
        tries=0 if stable else state.tries,
        resting_until=-math.inf,
    )
    return _plan_return(state, now, settings, draw=draw)


def restart_started(state: EngineState) -> EngineState:
    assert state.condition == "dead" and state.can_restart, state
    return replace(
        state, condition="restarting", tries=state.tries + 1, restarts=state.restarts + 1, duty=None
    )


def restart_failed(
    state: EngineState, error: str, now: float, settings: FleetSettings, *, draw: float
) -> EngineState:
    assert state.condition == "restarting", state
    return _plan_return(replace(state, condition="dead", last_error=error), now, settings, draw=draw)


def came_back(state: EngineState, now: float, settings: FleetSettings) -> EngineState:
    """Restarted, or it answers again: stale, with a clean sheet, and announced."""
    assert state.condition in ("dead", "restarting"), state
    limit = float(min(settings.start_concurrency, settings.max_concurrency))
    return replace(
        state,
        condition="stale", failures=0, failed_checks=0, failed_updates=0, overloads=0, answers=0,
        limit=limit, threshold=float(settings.max_concurrency), duty=Duty("announce", now),
    )  # fmt: skip


def not_reached(
    state: EngineState, error: str, now: float, settings: FleetSettings, *, draw: float
) -> EngineState:
    assert state.condition == "dead" and not state.can_restart, state
    return _plan_return(replace(state, tries=state.tries + 1, last_error=error), now, settings, draw=draw)


def gave_up(state: EngineState) -> bool:
    """Whether it stays dead: its restarts are spent."""
    return state.condition == "dead" and state.duty is None


def _plan_return(state: EngineState, now: float, settings: FleetSettings, *, draw: float) -> EngineState:
    if state.can_restart and state.tries >= settings.max_restarts:
        return replace(state, duty=None)
    wait_s = compute_backoff_s(state.tries + 1, settings.recover_base_s, settings.recover_cap_s, draw)
    return replace(state, duty=Duty("restart" if state.can_restart else "reach", now + wait_s))


def _healthy(state: EngineState, now: float) -> EngineState:
    duty = Duty("rest", state.resting_until) if state.resting_until > now else None
    since = now if state.condition == "stale" else state.healthy_since
    return replace(
        state, condition="healthy", trust=state.trust + 1, failed_checks=0, healthy_since=since, duty=duty
    )


# --- weight updates -----------------------------------------------------------------------------------------


def announced(state: EngineState) -> EngineState:
    return replace(state, duty=None)


def admission_closed(state: EngineState) -> EngineState:
    """An update of it begins. Nothing happens to one that is dead or being restarted: it comes back stale."""
    if state.condition in ("dead", "restarting"):
        return state
    hopeful = (
        state.condition == "healthy" or (state.version is None and state.life == 0)
        if not state.updating
        else state.hopeful
    )
    return replace(state, updating=True, hopeful=hopeful, duty=None)


def committed(state: EngineState, version: int, published: int, now: float) -> EngineState:
    """Verified at `version`: healthy. Not so, and no change, where the engine died since its admission was
    closed.
    """
    if not state.updating:
        return state
    if version < published:  # overtaken: it must not serve what the others have left behind
        late = f"committed at {version}, published is {published}"
        return replace(
            state,
            condition="stale",
            updating=False,
            life=state.life + 1,
            duty=Duty("announce", now),
            last_error=late,
        )
    return replace(_healthy(state, now), updating=False, version=version, failures=0, failed_updates=0)


def update_failed(
    state: EngineState, error: str, now: float, settings: FleetSettings, *, draw: float
) -> EngineState:
    """Not verified: stale and out of service, announced again after a back-off. After several in a row it is
    restarted if it can be.
    """
    if state.condition in ("dead", "restarting"):
        return replace(state, last_error=error)
    failed = state.failed_updates + 1
    state = replace(
        state, updating=False, failed_updates=failed, all_failures=state.all_failures + 1, last_error=error
    )
    if state.can_restart and failed >= settings.updates_to_dead:
        return died(state, f"{failed} weight updates failed, the last: {error}", now, settings, draw=draw)
    duty = Duty(
        "announce", now + compute_backoff_s(failed, settings.recover_base_s, settings.recover_cap_s, draw)
    )
    return replace(state, condition="stale", life=state.life + 1, duty=duty)


def version_published(state: EngineState, version: int, now: float) -> EngineState:
    """Whoever serves an older version, because no update reached it, is stale from now on. Whoever is stale
    and waits for nothing is announced.
    """
    if state.condition == "stale" and not state.updating and not state.leaving and state.duty is None:
        return replace(state, duty=Duty("announce", now))
    if (
        state.condition not in ("healthy", "suspect")
        or state.updating
        or (state.version is not None and state.version >= version)
    ):
        return state
    why = f"it serves version {state.version}, published is {version}"
    return replace(state, condition="stale", life=state.life + 1, duty=Duty("announce", now), last_error=why)


def find_foreign_version(versions: Iterable[int], committed_version: int | None) -> int | None:
    """A token's version that this engine cannot rightly have: above what was committed, or of weights that
    were never named.
    """
    assert committed_version is not None
    for version in versions:
        if version > committed_version or version < min(0, committed_version):
            return version
    return None


def left(state: EngineState) -> EngineState:
    return replace(state, leaving=True)


def describe(state: EngineState) -> str:
    """Name, condition and last error, for a message."""
    what = (
        "updating"
        if state.updating
        else f"{state.condition} for good"
        if gave_up(state) and state.can_restart
        else state.condition
    )
    return f"{state.name}: {what}" + (f" ({state.last_error})" if state.last_error else "")
