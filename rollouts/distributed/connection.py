"""One connection between rank 0 and another rank: frames, signs of life, and large messages that do not hold
either of them up.

    frame: kind (u8) · bytes of the payload (u32) · payload

    HELLO    rank → 0   key [32], rank (u32): the first frame, before which nothing else is read
    WELCOME  0 → rank   the key was right
    BEAT     both       what the sender is doing (text); once a second, and when that changes
    MESSAGE  0 → rank   bytes (u64) of the message that follows in parts
    PART     0 → rank   the next bytes of the message, at most PART_BYTES: other frames pass between parts
    FAIL     rank → 0   what went wrong here (text)
    ANSWER   rank → 0   msgpack [name, text]: what a rank has to say about something that rank 0 has named in a command
    LOST     both       msgpack [rank, phase, reason]: which rank the run has lost; to rank 0 only if that is rank 0 itself
    BYE      both       nothing more will be asked of the other side; a stream that ends without it was cut by a death

Every byte is a sign of life, so a frame that takes long to cross is no silence.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import trio

from rollouts.errors import ControlError

HEADER = struct.Struct("<BI")
MESSAGE_HEAD = struct.Struct("<Q")
PART_BYTES = 1 << 20
FRAME_BYTES = 1 << 16  # any other frame, at most
MESSAGE_BYTES = 1 << 40  # a message, at most
READ_BYTES = 1 << 18
JOINED_BYTES = 1 << 14  # up to here a copy is cheaper than a second system call
BEAT_S = 1.0
TICK_S = 0.25  # between two looks at what was heard
TEXT_CHARS = 1000


class Kind(enum.IntEnum):
    """What a frame is."""

    HELLO = 1
    WELCOME = 2
    BEAT = 3
    MESSAGE = 4
    PART = 5
    FAIL = 6
    LOST = 7
    BYE = 8
    ANSWER = 9


KINDS = frozenset(Kind)


class Frame(NamedTuple):
    """One frame as it was received; a message in its parts is one frame of kind MESSAGE."""

    kind: Kind
    payload: memoryview

    @property
    def text(self) -> str:
        return str(self.payload, "utf-8", errors="replace")[:TEXT_CHARS]


class Phase:
    """What this rank is doing now, for its heartbeats to tell."""

    def __init__(self) -> None:
        self.text = "start-up"
        self.changed = trio.Event()  # set once, when the text changes; another one has then taken its place
        self._token = trio.lowlevel.current_trio_token()

    def set(self, text: str) -> None:
        """May be called on any thread."""
        if text != self.text:
            self.text = text
            self._token.run_sync_soon(self._tell, idempotent=True)

    def _tell(self) -> None:
        self.changed.set()
        self.changed = trio.Event()


class Connection:
    """Frames over a stream. Any task may send; one task receives."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.received = 0  # bytes so far: each one is a sign of life
        self._stream = stream
        self._message = memoryview(b"")  # the one that is being received
        self._filled = 0  # bytes of it
        self._turn = trio.Lock()  # fair: a heartbeat goes out before the next part of a message

    async def send(self, kind: Kind, payload: bytes | memoryview = b"") -> bool:
        """Whether the frame went out; not if the connection has ended, which whoever receives will see. A
        cancelled call spoils the stream.
        """
        head = HEADER.pack(kind, len(payload))
        try:
            async with self._turn:
                if len(payload) <= JOINED_BYTES:
                    await self._stream.send_all(head + payload)
                else:
                    await self._stream.send_all(head)
                    await self._stream.send_all(payload)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return False
        return True

    async def send_text(self, kind: Kind, text: str) -> bool:
        """`send` of a text, which is cut if it is long."""
        return await self.send(kind, text[:TEXT_CHARS].encode(errors="replace"))

    async def send_message(self, pieces: Sequence[memoryview]) -> bool:
        """Sends the pieces as one message, in parts. Pieces that fill a part are not copied."""
        going = await self.send(Kind.MESSAGE, MESSAGE_HEAD.pack(sum(piece.nbytes for piece in pieces)))
        for part in split_pieces(pieces, PART_BYTES):
            going = going and await self.send(Kind.PART, part)
        return going

    async def receive(self) -> Frame | None:
        """The next frame, or message; None when the stream has ended, in whatever way. Raises ControlError
        for bytes that are no frame.
        """
        while (head := await self._receive_head()) is not None:
            kind, size = head
            if kind is Kind.PART:
                if not await self._fill(self._take_part(size)):
                    return None
                if self._filled == self._message.nbytes:
                    return Frame(Kind.MESSAGE, self._message)
                continue
            payload = memoryview(bytearray(size))
            if not await self._fill(payload):
                return None
            if kind is not Kind.MESSAGE:
                return Frame(kind, payload)
            self._begin_message(payload)
        return None

    async def receive_first(self, kind: Kind, *, size: int) -> memoryview | None:
        """The payload of a first frame, if it is of that kind and size: nothing else of a stranger is read."""
        head = bytearray(HEADER.size)
        payload = memoryview(bytearray(size))
        if not await self._fill(memoryview(head)) or HEADER.unpack(head) != (kind, size):
            return None
        return payload if await self._fill(payload) else None

    async def close(self) -> None:
        """At once, without a goodbye."""
        await trio.aclose_forcefully(self._stream)

    async def _receive_head(self) -> tuple[Kind, int] | None:
        head = bytearray(HEADER.size)
        if not await self._fill(memoryview(head)):
            return None
        number, size = HEADER.unpack(head)
        if number not in KINDS or size > (PART_BYTES if number == Kind.PART else FRAME_BYTES):
            raise ControlError(f"a frame of kind {number} with {size} bytes")
        return Kind(number), size

    def _begin_message(self, payload: memoryview) -> None:
        size = MESSAGE_HEAD.unpack(payload)[0] if payload.nbytes == MESSAGE_HEAD.size else 0
        if not 0 < size <= MESSAGE_BYTES or self._filled < self._message.nbytes:
            raise ControlError(
                f"a message of {size} bytes, with {self._message.nbytes - self._filled} still missing of the"
                " one before"
            )
        try:
            self._message, self._filled = (
                np.empty(size, np.uint8).data,
                0,
            )  # aligned, and not filled with zeros first
        except MemoryError as error:
            raise ControlError(f"a message of {size} bytes, for which there is no memory") from error

    def _take_part(self, size: int) -> memoryview:
        """Where the next `size` bytes of the message belong."""
        if not 0 < size <= self._message.nbytes - self._filled:
            raise ControlError(
                f"a part of {size} bytes, with {self._message.nbytes - self._filled} missing of the message"
            )
        self._filled += size
        return self._message[self._filled - size : self._filled]

    async def _fill(self, view: memoryview) -> bool:
        """Whether the stream went on long enough to fill `view`."""
        at = 0
        while at < view.nbytes:
            try:
                data = await self._stream.receive_some(min(view.nbytes - at, READ_BYTES))
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return False
            if not data:
                return False
            view[at : at + len(data)] = data
            at += len(data)
            self.received += len(data)
        return True


async def send_beats(connection: Connection, phase: Phase) -> None:
    """Tells the other side that this one lives and what it is doing, until the connection ends."""
    changed = phase.changed
    while await connection.send_text(Kind.BEAT, phase.text):
        with trio.move_on_after(BEAT_S):
            await changed.wait()
        changed = phase.changed  # before the next text is read: a change while it is being sent is not missed


async def wait_silent(connection: Connection, silence_s: float) -> None:
    """Returns when nothing has been heard for `silence_s` during which this process was awake itself.

    A process that was stopped, or got no time, finds its clock far ahead and what the others sent meanwhile
    not yet read. So a long tick counts as a short one, and the last look is a tick later, when whatever had
    arrived has been read.
    """
    silent_s, heard, before = 0.0, connection.received, trio.current_time()
    last_look = False
    while not last_look:
        last_look = silent_s >= silence_s
        await trio.sleep(TICK_S)
        now = trio.current_time()
        if connection.received != heard:
            silent_s, last_look = 0.0, False
        else:
            silent_s += min(now - before, 2 * TICK_S)
        heard, before = connection.received, now


def split_pieces(pieces: Sequence[memoryview], size: int) -> Iterator[bytes | memoryview]:
    """The bytes of all pieces in stretches of `size`, the last one shorter. A stretch within one piece is a
    view of it, another one a copy.
    """
    stretch: list[memoryview] = []
    room = size
    for piece in pieces:
        while piece.nbytes:
            stretch.append(piece[:room])
            piece = piece[room:]
            room -= stretch[-1].nbytes
            if not room:
                yield _join(stretch)
                stretch, room = [], size
    if stretch:
        yield _join(stretch)


def _join(stretch: Sequence[memoryview]) -> bytes | memoryview:
    return stretch[0] if len(stretch) == 1 else b"".join(stretch)
