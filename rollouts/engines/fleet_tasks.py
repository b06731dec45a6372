"""What is done for one member of a fleet until it leaves: the duties of its state, each when it is due, and a
watch on its process.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import trio

from rollouts.engines import fleet_state
from rollouts.engines.fleet_members import LiveMember
from rollouts.engines.fleet_state import Duty, EngineState, FleetSettings
from rollouts.errors import EngineError, EngineOverloaded
from rollouts.protocols import InferenceEngine


@dataclass(frozen=True, slots=True)
class MemberTasks:
    """What these tasks need of the fleet."""

    settings: FleetSettings
    draw: Callable[[], float]  # in [0, 1), for back-offs
    apply: Callable[
        [LiveMember, EngineState], None
    ]  # makes a state the member's, and carries out what follows from it
    count: Callable[[BaseException], None]  # a failure, by class
    announce: Callable[[InferenceEngine], None]  # a stale member, to who updates weights


async def tend_member(live: LiveMember, tasks: MemberTasks) -> None:
    """Everything that is done for one member, until it leaves."""
    with live.scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(supervise, live, tasks)
            if live.member.wait_exited is not None:
                nursery.start_soon(watch_process, live, tasks, live.member.wait_exited)


async def supervise(live: LiveMember, tasks: MemberTasks) -> None:
    while True:
        duty, changed = live.state.duty, live.changed
        if duty is None or duty.at > trio.current_time():
            with trio.move_on_at(math.inf if duty is None else duty.at):
                await changed.wait()
            continue
        await trio.lowlevel.checkpoint()
        if live.state.duty is duty:
            await do_duty(live, tasks, duty)


async def do_duty(live: LiveMember, tasks: MemberTasks, duty: Duty) -> None:
    if duty.kind == "rest":
        tasks.apply(live, fleet_state.rested(live.state))
    elif duty.kind == "announce":
        tasks.apply(live, fleet_state.announced(live.state))
        tasks.announce(live.engine)
    elif duty.kind == "restart":
        await restart_server(live, tasks)
    else:
        live.working = trio.CancelScope()
        event: Callable[[EngineState], EngineState] | None = None
        with live.working:
            event = await (see_load(live, tasks) if duty.kind == "load" else examine(live, tasks, duty))
        if event is not None and live.state.duty is duty:
            tasks.apply(live, event(live.state))


async def see_load(live: LiveMember, tasks: MemberTasks) -> Callable[[EngineState], EngineState]:
    ticket, settings = fleet_state.get_ticket(live.state), tasks.settings
    try:
        with trio.fail_after(settings.check_s):
            load = await live.engine.load()
    except (trio.TooSlowError, EngineOverloaded):
        return fleet_state.rested  # requests tell soon enough
    # refused, not found: whatever it is, it says something of the engine and nothing of the fleet
    except EngineError as error:
        tasks.count(error)
        now, draw, text = trio.current_time(), tasks.draw(), str(error)
        return lambda state: fleet_state.doubted(
            fleet_state.rested(state), ticket, text, now, settings, draw=draw
        )
    return partial(fleet_state.load_seen, running=load.running, waiting=load.waiting, settings=settings)


async def examine(live: LiveMember, tasks: MemberTasks, duty: Duty) -> Callable[[EngineState], EngineState]:
    """Asks a suspect or a dead engine how it is and which weights it has."""
    error, version = "its health check says no", None
    try:
        with trio.fail_after(tasks.settings.check_s):
            if await live.engine.health():
                version = await live.engine.weight_version()
    except trio.TooSlowError:
        error = f"no answer to a health check in {tasks.settings.check_s:g} s"
    except EngineError as raised:
        error = f"health check: {raised}"
    now = trio.current_time()
    if version is not None:
        if duty.kind == "check":
            return partial(fleet_state.check_passed, version=version, now=now)
        return partial(fleet_state.came_back, now=now, settings=tasks.settings)
    said = (
        f"{error}; before it: {live.state.last_error}"
        if duty.kind == "check" and not live.state.failed_checks
        else error
    )
    no = fleet_state.check_failed if duty.kind == "check" else fleet_state.not_reached
    return partial(no, error=said, now=now, settings=tasks.settings, draw=tasks.draw())


async def restart_server(live: LiveMember, tasks: MemberTasks) -> None:
    restart = live.member.restart
    assert restart is not None
    live.watching.cancel()  # what it says of the old process is known
    tasks.apply(live, fleet_state.restart_started(live.state))
    try:
        await restart()
    except Exception as error:  # whatever keeps a server from starting: it is tried again, and reported
        tasks.count(error)
        now, text = trio.current_time(), f"{type(error).__name__}: {error}"
        tasks.apply(
            live, fleet_state.restart_failed(live.state, text, now, tasks.settings, draw=tasks.draw())
        )
        return
    tasks.apply(live, fleet_state.came_back(live.state, trio.current_time(), tasks.settings))


async def watch_process(
    live: LiveMember, tasks: MemberTasks, wait_exited: Callable[[], Awaitable[str]]
) -> None:
    while True:
        while live.state.condition in ("dead", "restarting"):
            await live.changed.wait()
        why = None
        live.watching = trio.CancelScope()
        with live.watching:
            why = await wait_exited()
        if why is not None:
            tasks.apply(
                live,
                fleet_state.died(live.state, why, trio.current_time(), tasks.settings, draw=tasks.draw()),
            )
