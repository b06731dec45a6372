"""The control channel: rank 0 tells the others what to do, and every rank notices within seconds that another
one is gone.

    rank 0 (hub.py)                                                 rank r (link.py)
    send(command) ─► queue of r ─► one task ─► MESSAGE, PART … ───► one task ─► queue ─► receive()
    set_phase ─► BEAT: on a change, and once a second ────────────► heard
    heard ◄───────────────────── BEAT: on a change, once a second ◄─ set_phase
    the context is left ─► BYE, after all commands ───────────────► receive() ends; the context is left ─► BYE

    a connection that ends without BYE, or nothing heard for `silence_s` ──► that rank is lost
    fail(text), or an exception that leaves a context ──► the rank that says so is lost, unless a dead one explains it
    rank 0 decides, tells the others whom the run has lost, waits until they have taken note, and calls on_lost; they call theirs.
    Whoever loses rank 0 decides alone. end_others() says that rank 0 ends by force in a requested stop: nobody has failed.

What ends the process is os._exit: its device thread may be inside a collective, which nothing can interrupt.
Trio's thread must come round: one that is held up for `silence_s` (a long computation in Python, an import)
looks dead to the others.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import select
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple, NoReturn

import msgspec
import trio

from rollouts.distributed.commands import Command, decode_command, encode_command
from rollouts.distributed.hub import ENDED, KEY_BYTES, STOPPED, ControlHub, open_hub
from rollouts.distributed.launch import ALONE, Launch
from rollouts.distributed.link import ControlLink, open_link
from rollouts.errors import ControlError, RankLost

__all__ = [
    "EXIT_RANK_LOST", "RANK_SILENCE_S", "STARTUP_TIMEOUT_S", "Command", "ControlHub", "ControlLink", "decode_command", "encode_command",
    "end_after_rank_0", "exit_on_lost", "open_control",
]  # fmt: skip

EXIT_RANK_LOST = 75  # EX_TEMPFAIL: start it again
RANK_SILENCE_S = 6.0
PATIENCE_S = 8.0  # for a rank 0 that has failed to say why, and to end before the others
STARTUP_TIMEOUT_S = 60.0
OUTSIDE = "192.0.2.1"  # an address that nobody has: the way to it is the default route


class Address(NamedTuple):
    """Where rank 0 listens, and what shows that a caller belongs to the run."""

    host: str
    port: int
    key: bytes


def exit_on_lost(lost: RankLost) -> NoReturn:
    """Says in one line on stderr who is lost and in which phase, and ends this process at once with
    EXIT_RANK_LOST.
    """
    _exit_saying(str(lost), EXIT_RANK_LOST)


def end_after_rank_0(lost: RankLost) -> NoReturn:
    """Ends this process with exit code 75, and leaves a rank 0 that has failed by an error of its own the
    time to end first.

    A launcher ends the others as soon as one has ended, and shows the exit code of that one: it should be the
    one that knows why. Where rank 0 ends by force because a requested stop did not, nobody has failed: the
    exit code is 0, so that a launcher starts nothing again.
    """
    if lost.reason == STOPPED:
        _exit_saying(f"rank 0 was stopped during {lost.phase}: {STOPPED}", 0)
    if lost.rank == 0 and lost.reason != ENDED and not lost.reason.startswith("nothing was heard"):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        select.select([], [], [], PATIENCE_S)  # trio does not run any more
    exit_on_lost(lost)


def _exit_saying(text: str, code: int) -> NoReturn:
    with contextlib.suppress(OSError, ValueError):  # whoever read it may be gone, or it is closed
        sys.stdout.flush()
    with contextlib.suppress(OSError, ValueError):
        print(f"rollouts: {' '.join(text.split())}; this process ends too", file=sys.stderr, flush=True)
    os._exit(code)


@asynccontextmanager
async def open_control(
    launch: Launch,
    *,
    share: Callable[[bytes | None], Awaitable[bytes]],
    on_lost: Callable[[RankLost], None] = exit_on_lost,
    silence_s: float = RANK_SILENCE_S,
    startup_timeout_s: float = STARTUP_TIMEOUT_S,
) -> AsyncIterator[ControlHub | ControlLink]:
    """This rank's end of the control channel: a ControlHub on rank 0, a ControlLink on the others.

    `share` brings bytes from rank 0, which passes them, to all, which pass None. Raises ControlError if no
    channel can be opened, RankLost if a rank is not there within `startup_timeout_s`; see open_hub and
    open_link for the rest.
    """
    if launch.rank == 0:
        key = secrets.token_bytes(KEY_BYTES)
        listeners = await _listen(launch) if launch.world_size > 1 else []
        try:
            for listener in listeners:
                host, port = listener.socket.getsockname()[:2]
                await share(msgspec.msgpack.encode(Address(host, port, key)))
        except BaseException:
            for listener in listeners:
                await trio.aclose_forcefully(listener)
            raise
        async with open_hub(
            listeners,
            key,
            world_size=launch.world_size,
            silence_s=silence_s,
            startup_timeout_s=startup_timeout_s,
            on_lost=on_lost,
        ) as hub:
            yield hub
    else:
        address = _parse_address(await share(None))
        stream = await _connect(address, startup_timeout_s, on_lost)
        async with open_link(
            stream,
            address.key,
            rank=launch.rank,
            silence_s=silence_s,
            startup_timeout_s=startup_timeout_s,
            on_lost=on_lost,
        ) as link:
            yield link


async def _listen(launch: Launch) -> list[trio.SocketListener]:
    """One listener, on a free port of an address that all ranks reach. Raises ControlError."""
    host = await _choose_host(launch)
    try:
        return await trio.open_tcp_listeners(0, host=host)
    except OSError as error:
        raise ControlError(f"rank 0 cannot listen for the other ranks on {host}: {error}") from error


async def _choose_host(launch: Launch) -> str:
    """The address of this node on the way to MASTER_ADDR, which the others reach too."""
    if launch.on_one_node:
        return ALONE
    towards_master = await _find_own_address(launch.master_addr)
    if towards_master is not None and not ipaddress.ip_address(towards_master).is_loopback:
        return towards_master
    if towards_master is not None and (launch.master_addr == "localhost" or _is_address(launch.master_addr)):
        return towards_master  # several "nodes" on this machine
    # /etc/hosts of some systems gives a node's own name the address 127.0.1.1, which others cannot reach
    host = await _find_own_address(OUTSIDE) or towards_master
    if host is None:
        raise ControlError(
            f"MASTER_ADDR={launch.master_addr!r} cannot be resolved on rank 0; give an address that all nodes"
            " reach"
        )
    return host


async def _find_own_address(target: str) -> str | None:
    """The address under which this machine would reach `target`; None if it would not. Nothing is sent."""
    try:
        found = await trio.socket.getaddrinfo(target, 1, type=socket.SOCK_DGRAM)
        with socket.socket(found[0][0], socket.SOCK_DGRAM) as probe:
            probe.connect(found[0][4])
            return probe.getsockname()[0]
    except OSError:
        return None


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _parse_address(shared: bytes) -> Address:
    try:
        return Address(*msgspec.msgpack.decode(shared, type=tuple[str, int, bytes]))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ControlError(f"what rank 0 shared is no address of a control channel: {error}") from error


async def _connect(
    address: Address, timeout_s: float, on_lost: Callable[[RankLost], None]
) -> trio.SocketStream:
    try:
        with trio.fail_after(timeout_s):
            return await trio.open_tcp_stream(address.host, address.port)
    except (OSError, trio.TooSlowError) as error:
        why = f": {error}" if str(error) else f" within {timeout_s:g} s"
        lost = RankLost(0, "start-up", f"no connection to {address.host} port {address.port}{why}")
        on_lost(lost)
        raise lost from error
