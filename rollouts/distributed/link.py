"""Another rank's end of the control channel: commands in, in order; signs of life out; and whom rank 0 says
the run has lost.

    connection ─► one task ─► receive()          ends after rank 0 said BYE and all commands were taken
    LOST from rank 0 ──────────────────────┐
    rank 0's connection ended · silent ────┴─► on_lost, at once
    answer(name, text) ─► ANSWER
    fail(text) · an exception that leaves the context ─► FAIL ─► rank 0 decides who is lost, this rank or a dead one ─► LOST, as above

The tasks are shielded, as those of rank 0 are.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

import msgspec
import trio

from rollouts.distributed.commands import Command, decode_command
from rollouts.distributed.connection import (
    TEXT_CHARS,
    Connection,
    Frame,
    Kind,
    Phase,
    send_beats,
    wait_silent,
)
from rollouts.distributed.hub import (
    ANSWER_CHARS,
    ENDED,
    GRACE_S,
    NOTICE_S,
    RANK,
    decode_lost,
    describe_error,
    encode_lost,
)
from rollouts.errors import ControlError, RankLost

VERDICT_S = GRACE_S + 2 * NOTICE_S  # for rank 0 to say who is lost
TELL_S = 0.2  # for rank 0 to be told that it was given up
END_S = 5.0  # after BYE to rank 0, for it to close the connection


@asynccontextmanager
async def open_link(
    stream: trio.abc.Stream,
    key: bytes,
    *,
    rank: int,
    silence_s: float,
    startup_timeout_s: float,
    on_lost: Callable[[RankLost], None],
) -> AsyncIterator[ControlLink]:
    """Rank `rank`'s end of a stream to rank 0, once rank 0 has accepted the key.

    Leaving before rank 0 has closed the channel, by an exception or without one, is a failure, which ends the
    run. Once a rank is lost on_lost is called; if that returns, the body is cancelled and RankLost raised. A
    body that failed by itself raises its own error, unless another rank's death explains it. Raises RankLost
    if rank 0 does not answer.
    """
    link = ControlLink(Connection(stream), rank, silence_s=silence_s, on_lost=on_lost)
    failure: BaseException | None = None
    try:
        await link._greet(key, startup_timeout_s)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(link._run, nursery.cancel_scope)
            try:
                yield link
                await link._leave()
            except trio.Cancelled:
                await link._give_up("was cancelled")
                raise
            except (
                BaseException
            ) as error:  # raised below, outside the nursery, which would wrap it in a group
                failure = error
                await link._give_up(describe_error(error))
            finally:
                link._tasks.cancel()
    finally:
        await link._connection.close()
    if link._lost is not None and (failure is None or link._lost.rank != rank):
        raise link._lost from failure
    if failure is not None:
        raise failure


class ControlLink:
    """What rank 0 tells this rank. Made by `open_link`."""

    def __init__(
        self, connection: Connection, rank: int, *, silence_s: float, on_lost: Callable[[RankLost], None]
    ) -> None:
        self._connection = connection
        self._rank = rank
        self._silence_s = silence_s
        self._on_lost = on_lost
        self._phase = Phase()
        self._hub_phase = "start-up"  # as it was last told
        self._taken = 0
        self._goodbye = False  # rank 0 has closed the channel
        self._out, self._frames = trio.open_memory_channel[tuple[Kind, bytes]](
            math.inf
        )  # closed: BYE is next
        self._commands_in, self._commands = trio.open_memory_channel[Command](math.inf)
        self._tasks = trio.CancelScope(shield=True)  # around every task
        self._failed = False  # the body has, and raises its own error
        self._lost: RankLost | None = None
        self._finished = trio.Event()  # nothing more comes from rank 0, or somebody is lost

    async def receive(self) -> Command:
        """The next command. Raises trio.EndOfChannel when rank 0 has closed the channel and all its commands
        were taken.
        """
        command = await self._commands.receive()
        self._taken += 1
        return command

    def __aiter__(self) -> ControlLink:
        return self

    async def __anext__(self) -> Command:
        try:
            return await self.receive()
        except trio.EndOfChannel:
            raise StopAsyncIteration from None

    def set_phase(self, text: str) -> None:
        """What this rank does now, for the others to say if it is lost. May be called on any thread."""
        self._phase.set(text)

    def fail(self, text: str) -> None:
        """Reports that this rank cannot go on, so that the run ends on all ranks, naming this one unless
        another one's death explains it.

        Returns at once. The body is to raise why, as soon as it can: being named by rank 0 ends this rank no
        more.
        """
        self._failed = True
        self._out.send_nowait((Kind.FAIL, text[:TEXT_CHARS].encode(errors="replace")))

    def answer(self, name: str, text: str) -> None:
        """Tells rank 0, which waits for it by `name`, what this rank has to say, in ANSWER_CHARS at most.
        Returns at once.
        """
        assert len(text) <= ANSWER_CHARS, len(text)
        self._out.send_nowait((Kind.ANSWER, msgspec.msgpack.encode((name, text))))

    def statistics(self) -> Mapping[str, float]:
        """Commands given out (`commands`), commands that wait to be received (`queued`), bytes `received`."""
        queued = self._commands.statistics().current_buffer_used
        return {"commands": self._taken, "queued": queued, "received": self._connection.received}

    # --- tasks ---

    async def _run(self, body: trio.CancelScope) -> None:
        try:
            with self._tasks:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(send_beats, self._connection, self._phase)
                    nursery.start_soon(self._send)
                    nursery.start_soon(self._watch, body)
                    nursery.start_soon(self._receive, body)
        finally:
            self._finished.set()
            await self._connection.close()  # by which rank 0 knows that this one has taken note

    async def _send(self) -> None:
        async for kind, payload in self._frames:
            await self._connection.send(kind, payload)
        await self._connection.send(Kind.BYE)

    async def _watch(self, body: trio.CancelScope) -> None:
        await wait_silent(self._connection, self._silence_s)
        if self._goodbye:
            return
        lost = RankLost(0, self._hub_phase, f"nothing was heard from it for {self._silence_s:g} s")
        with trio.move_on_after(TELL_S):  # if it was only stopped, it will read this when it goes on
            await self._connection.send(Kind.LOST, encode_lost(lost))
        self._lose(lost, body)

    async def _receive(self, body: trio.CancelScope) -> None:
        reason = ENDED
        try:
            while (frame := await self._connection.receive()) is not None:
                self._take(frame, body)
        except ControlError as error:
            reason = f"it sent {error}"
        if not self._goodbye:
            self._lose(RankLost(0, self._hub_phase, reason), body)
        self._finished.set()

    def _take(self, frame: Frame, body: trio.CancelScope) -> None:
        if frame.kind is Kind.BEAT:
            self._hub_phase = frame.text
        elif frame.kind is Kind.LOST:
            self._lose(decode_lost(frame.payload), body)
        elif frame.kind is Kind.MESSAGE and not self._goodbye:
            self._commands_in.send_nowait(decode_command(frame.payload))
        elif frame.kind is Kind.BYE and not self._goodbye:
            self._goodbye = True
            self._commands_in.close()
        else:
            raise ControlError(f"a {frame.kind.name} frame, which rank {self._rank} does not expect now")

    def _lose(self, lost: RankLost, body: trio.CancelScope) -> None:
        if self._lost is not None:
            return
        self._lost = lost
        self._finished.set()
        if self._failed and lost.rank == self._rank:
            return
        self._on_lost(lost)
        self._tasks.cancel()
        body.cancel()

    # --- the body's side ---

    async def _greet(self, key: bytes, timeout_s: float) -> None:
        """Shows the key. Raises RankLost, after on_lost was called, if rank 0 does not accept it in time."""
        reason = f"it did not accept rank {self._rank} within {timeout_s:g} s"
        with trio.move_on_after(timeout_s):
            await self._connection.send(Kind.HELLO, key + RANK.pack(self._rank))
            if await self._connection.receive_first(Kind.WELCOME, size=0) is not None:
                return
            reason = f"it closed the connection before it accepted rank {self._rank}"
        lost = RankLost(0, self._hub_phase, reason)
        self._on_lost(lost)
        raise lost

    async def _leave(self) -> None:
        if not self._goodbye:
            raise ControlError(
                f"rank {self._rank} left the control channel before rank 0 closed it; take commands until"
                " receive() ends"
            )
        self._out.close()
        with trio.move_on_after(END_S):
            await self._finished.wait()

    async def _give_up(self, reason: str) -> None:
        """Tells rank 0 that this rank cannot go on, and waits until it has decided who is lost."""
        self.fail(reason)
        with trio.move_on_after(VERDICT_S, shield=True):
            await self._finished.wait()
