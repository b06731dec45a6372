"""Rank 0's end of the control channel: commands out, signs of life in, and the decision whom the run has
lost.

    send(command) ─► a queue per rank ─► its task ─► connection         a slow rank holds up neither the caller nor another rank
    ANSWER from a rank ─► wait_answers(name), when all have come
    connection ended · nothing heard · never connected ──► a report that is certain ──┐
    FAIL from a rank · an exception that leaves the context ──► one that may be a consequence ──┴─► decided ─► LOST to the others ─► on_lost

The first report counts. One that is not certain waits GRACE_S for a certain one about another rank: a rank
inside a collective with a dead one fails as well, and often says so first. The tasks are shielded: a
cancelled body may have to wait for a device thread that waits for the lost rank, and only on_lost can end
that.
"""

from __future__ import annotations

import functools
import hmac
import math
import struct
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import trio

from rollouts.distributed.commands import Command, encode_command
from rollouts.distributed.connection import (
    TEXT_CHARS,
    Connection,
    Frame,
    Kind,
    Phase,
    send_beats,
    wait_silent,
)
from rollouts.errors import ControlError, RankLost

RANK = struct.Struct("<I")
ANSWER_CHARS = 8000
KEY_BYTES = 32
HELLO_S = 5.0  # for a stranger to show the key
GRACE_S = 1.0  # for the death that explains a failure to be seen
NOTICE_S = 1.0  # for the others to take note of whom the run has lost
CLOSE_S = 10.0  # after BYE, for the ranks to leave their contexts
ENDED = "its connection ended, as when its process is killed"
STOPPED = "a requested stop did not end in time, so it ends by force"


@dataclass(slots=True, eq=False)
class _Peer:
    """Another rank, once it has shown the key."""

    rank: int
    connection: Connection
    outbox: trio.MemorySendChannel[list[memoryview]]  # encoded commands; closed: BYE comes after the last
    phase: str  # as it was last told
    said_bye: trio.Event = field(default_factory=trio.Event)  # all commands have gone out, and BYE
    ended: trio.Event = field(default_factory=trio.Event)  # nothing more comes from it


class _Report(NamedTuple):
    lost: RankLost
    certain: bool  # not the consequence of another rank's death


@asynccontextmanager
async def open_hub(
    listeners: Sequence[trio.abc.Listener[Any]],
    key: bytes,
    *,
    world_size: int,
    silence_s: float,
    startup_timeout_s: float,
    on_lost: Callable[[RankLost], None],
) -> AsyncIterator[ControlHub]:
    """Rank 0's end, once all other ranks have connected; the listeners are then closed.

    Leaving normally sends BYE after all commands and waits, CLOSE_S at most, until the others have left their
    contexts too. Leaving by an exception tells them that rank 0 has failed. Once a rank is lost on_lost is
    called; if that returns, the body is cancelled and RankLost raised.
    """
    assert len(key) == KEY_BYTES, len(key)
    hub = ControlHub(world_size, silence_s=silence_s)
    failure: BaseException | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(hub._run, listeners, key, on_lost, nursery.cancel_scope)
        try:
            await hub._wait_connected(startup_timeout_s)
            yield hub
            await hub._close()
        except trio.Cancelled:
            await hub._give_up("was cancelled")
            raise
        except BaseException as error:  # raised below, outside the nursery, which would wrap it in a group
            failure = error
            await hub._give_up(describe_error(error))
        finally:
            hub._tasks.cancel()
    if hub._lost is not None and not hub._failed:
        raise hub._lost from failure
    if failure is not None:
        raise failure


class ControlHub:
    """What rank 0 tells the others. Made by `open_hub`."""

    def __init__(self, world_size: int, *, silence_s: float) -> None:
        self._others = range(1, world_size)
        self._silence_s = silence_s
        self._phase = Phase()
        self._peers: dict[int, _Peer] = {}
        self._commands = 0
        self._closing = False
        self._tasks = trio.CancelScope(shield=True)  # around every task
        self._accepting = trio.CancelScope()
        self._connected = trio.Event()  # all are
        self._answers: dict[str, dict[int, str]] = {}  # by name, by rank
        self._news = (
            trio.Event()
        )  # set once, when an answer comes or a rank is lost; another one has then taken its place
        self._report_in, self._reports = trio.open_memory_channel[_Report](math.inf)
        self._failed = False  # the body has, and raises its own error
        self._lost: RankLost | None = None
        self._own: _Report | None = None
        self._decided = trio.Event()  # and the others told

    def send(self, command: Command) -> None:
        """Sends a command to all other ranks, after those before it. Returns at once.

        Its arrays are not copied and must not be changed any more. Raises ControlError for a command that
        cannot cross, RankLost after a rank was lost.
        """
        pieces = encode_command(command)
        if self._lost is not None:
            raise self._lost
        if self._closing:
            raise ControlError(
                f"command {command.name!r} comes after the control channel was closed; send inside its `async"
                " with`"
            )
        self._commands += 1
        for peer in self._peers.values():
            peer.outbox.send_nowait(pieces)

    async def wait_answers(self, name: str) -> dict[int, str]:
        """What all other ranks have answered to what a command calls `name`, by rank, once all have. Ask
        once. Raises RankLost.
        """
        while len(self._answers.get(name, {})) < len(self._others):
            if self._lost is not None:
                raise self._lost
            await self._news.wait()
        return self._answers.pop(name, {})

    def set_phase(self, text: str) -> None:
        """What rank 0 does now, for the others to say if it is lost. May be called on any thread."""
        self._phase.set(text)

    async def end_others(self) -> None:
        """Tells the other ranks that the run, which was asked to stop, ends by force: they end as after a
        finished run, whatever they wait for.

        Returns when they have taken note, after NOTICE_S at latest; the caller, who is not in the body, then
        ends this process.
        """
        if self._peers and self._lost is None:
            self._report(0, self._phase.text, STOPPED, certain=True)
            await self._decided.wait()

    def statistics(self) -> Mapping[str, float]:
        """Other ranks (`ranks`), commands given (`commands`), the most that one rank has still to be sent
        (`queued`), bytes `received`.
        """
        queued = [peer.outbox.statistics().current_buffer_used for peer in self._peers.values()]
        received = sum(peer.connection.received for peer in self._peers.values())
        return {
            "ranks": len(self._peers),
            "commands": self._commands,
            "queued": max(queued, default=0),
            "received": received,
        }

    # --- tasks ---

    async def _run(
        self,
        listeners: Sequence[trio.abc.Listener[Any]],
        key: bytes,
        on_lost: Callable[[RankLost], None],
        body: trio.CancelScope,
    ) -> None:
        try:
            with self._tasks:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._accept, listeners, key, nursery)
                    nursery.start_soon(self._decide, on_lost, body)
        finally:
            self._decided.set()  # nobody decides any more: on_lost may have raised

    async def _accept(
        self, listeners: Sequence[trio.abc.Listener[Any]], key: bytes, nursery: trio.Nursery
    ) -> None:
        with self._accepting:
            self._check_complete()
            if listeners:
                await trio.serve_listeners(
                    functools.partial(self._serve, key), list(listeners), handler_nursery=nursery
                )

    async def _serve(self, key: bytes, stream: trio.abc.Stream) -> None:
        """The life of one connection; it is closed afterwards."""
        connection = Connection(stream)
        rank = await self._read_rank(connection, key)
        if rank is None:
            return
        outbox, commands = trio.open_memory_channel[list[memoryview]](math.inf)
        peer = self._peers[rank] = _Peer(rank, connection, outbox, phase="start-up")
        await connection.send(Kind.WELCOME)
        self._check_complete()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._send_commands, peer, commands)
            nursery.start_soon(send_beats, connection, self._phase)
            nursery.start_soon(self._watch, peer)
            await self._receive(peer)
            nursery.cancel_scope.cancel()
        await connection.close()
        peer.ended.set()

    async def _read_rank(self, connection: Connection, key: bytes) -> int | None:
        """Who has connected; None if it is a stranger, or one too many."""
        with trio.move_on_after(HELLO_S):
            hello = await connection.receive_first(Kind.HELLO, size=KEY_BYTES + RANK.size)
            if hello is None or not hmac.compare_digest(hello[:KEY_BYTES], key):
                return None
            rank = RANK.unpack(hello[KEY_BYTES:])[0]
            return rank if rank in self._others and rank not in self._peers else None

    def _check_complete(self) -> None:
        if len(self._peers) == len(self._others):
            self._accepting.cancel()
            self._connected.set()

    async def _send_commands(
        self, peer: _Peer, commands: trio.MemoryReceiveChannel[list[memoryview]]
    ) -> None:
        async for pieces in commands:
            await peer.connection.send_message(pieces)
        await peer.connection.send(Kind.BYE)
        peer.said_bye.set()

    async def _watch(self, peer: _Peer) -> None:
        await wait_silent(peer.connection, self._silence_s)
        self._report(
            peer.rank, peer.phase, f"nothing was heard from it for {self._silence_s:g} s", certain=True
        )

    async def _receive(self, peer: _Peer) -> None:
        """Returns when the rank has said goodbye, or its stream has ended."""
        reason = ENDED
        try:
            while (frame := await peer.connection.receive()) is not None:
                if frame.kind is Kind.BYE and self._closing:
                    return
                self._take(peer, frame)
        except ControlError as error:
            reason = f"it sent {error}"
        self._report(peer.rank, peer.phase, reason, certain=True)

    def _take(self, peer: _Peer, frame: Frame) -> None:
        if frame.kind is Kind.BEAT:
            peer.phase = frame.text
        elif frame.kind is Kind.FAIL:
            self._report(peer.rank, peer.phase, frame.text, certain=False)
        elif frame.kind is Kind.ANSWER:
            name, text = decode_answer(frame.payload)
            self._answers.setdefault(name, {})[peer.rank] = text
            self._tell_news()
        elif frame.kind is Kind.LOST:  # this process was stopped for a while, and has been given up
            self._report_in.send_nowait(_Report(decode_lost(frame.payload), certain=True))
        else:
            raise ControlError(f"a {frame.kind.name} frame, which rank 0 does not expect now")

    def _tell_news(self) -> None:
        self._news.set()
        self._news = trio.Event()

    # --- who is lost ---

    def _report(self, rank: int, phase: str, reason: str, *, certain: bool) -> None:
        self._report_in.send_nowait(_Report(RankLost(rank, phase, reason), certain))

    async def _decide(self, on_lost: Callable[[RankLost], None], body: trio.CancelScope) -> None:
        report = await self._reports.receive()
        if not report.certain:
            with trio.move_on_after(GRACE_S):
                report = await self._wait_certain(other_than=report.lost.rank)
        self._lost = lost = report.lost
        self._failed = report is self._own
        self._tell_news()
        with trio.move_on_after(NOTICE_S):
            async with trio.open_nursery() as nursery:
                for peer in self._peers.values():
                    gone = report.certain and peer.rank == lost.rank
                    nursery.start_soon(self._notify, peer, lost, gone)
        if not self._failed:
            if lost.reason != STOPPED:
                on_lost(lost)
            body.cancel()
        self._decided.set()

    async def _wait_certain(self, *, other_than: int) -> _Report:
        while True:
            report = await self._reports.receive()
            if report.certain and report.lost.rank != other_than:
                return report

    async def _notify(self, peer: _Peer, lost: RankLost, gone: bool) -> None:
        """Returns when the rank has taken note, which ends its connection. Until then this process must live:
        it would take the notice with it if its end closed with something unread.
        """
        await peer.connection.send(Kind.LOST, encode_lost(lost))
        if not gone:
            await peer.ended.wait()

    # --- the body's side ---

    async def _wait_connected(self, timeout_s: float) -> None:
        with trio.move_on_after(timeout_s):
            await self._connected.wait()
            return
        missing = [rank for rank in self._others if rank not in self._peers]
        others = (
            f", nor did rank{'s' if len(missing) > 2 else ''} {', '.join(map(str, missing[1:]))}"
            if missing[1:]
            else ""
        )
        self._report(
            missing[0], "start-up", f"it did not connect within {timeout_s:g} s{others}", certain=True
        )
        await trio.sleep_forever()  # until it is decided

    async def _close(self) -> None:
        self._closing = True
        for peer in self._peers.values():
            peer.outbox.close()
        for peer in self._peers.values():
            await peer.said_bye.wait()
        with trio.move_on_after(CLOSE_S):
            for peer in self._peers.values():
                await peer.ended.wait()

    async def _give_up(self, reason: str) -> None:
        """Tells the others that rank 0 cannot go on, unless another rank's death explains that."""
        if not self._peers:
            return
        with trio.CancelScope(shield=True):
            self._own = _Report(RankLost(0, self._phase.text, reason), certain=False)
            self._report_in.send_nowait(self._own)
            await self._decided.wait()


def describe_error(error: BaseException) -> str:
    """Type and message of an error in one line; of what is inside, for a group of one."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return " ".join(f"{type(error).__name__}: {error}".split())[:TEXT_CHARS]


def decode_answer(payload: memoryview) -> tuple[str, str]:
    """(name, text) of an ANSWER frame. Raises ControlError."""
    try:
        return msgspec.msgpack.decode(payload, type=tuple[str, str])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ControlError(f"an ANSWER frame that says nothing: {error}") from error


def encode_lost(lost: RankLost) -> bytes:
    """The payload of a LOST frame."""
    return msgspec.msgpack.encode((lost.rank, lost.phase[:TEXT_CHARS], lost.reason[:TEXT_CHARS]))


def decode_lost(payload: memoryview) -> RankLost:
    """The loss in a LOST frame. Raises ControlError."""
    try:
        return RankLost(*msgspec.msgpack.decode(payload, type=tuple[int, str, str]))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ControlError(f"a LOST frame that says nothing: {error}") from error
