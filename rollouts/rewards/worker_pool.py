"""The trainer's side of the guard: open_guard starts it, spawn asks for workers, kill ends them, and
read_events hears what became of them.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import math
import os
import re
import socket
import subprocess
import sys
import termios
from collections.abc import AsyncIterator, Hashable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import trio

from rollouts.errors import RewardCrashed
from rollouts.rewards import worker_os
from rollouts.rewards.worker_guard import BORN, COMMAND, DIED, END, EVENT, HELLO, KILL, SPAWN
from rollouts.rewards.worker_messages import HEADER, BadAnswer

SECRET_NAMES = re.compile("KEY|TOKEN|SECRET|PASSWORD", re.IGNORECASE)
ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"
)  # forking is sound only without threads, too
START_TIMEOUT_S = 60.0  # for the guard's imports, on a disk that is slow
# a little more than the guard takes at most; it is gone in milliseconds unless something cannot be killed
CLOSE_TIMEOUT_S = 8.0
READ_BYTES = 1 << 16
TAIL_BYTES = 4000  # of a function's output that are kept for the failure's message


@dataclass(frozen=True, slots=True)
class End:
    """How a worker ended."""

    status: int  # as os.wait tells it
    killed: bool  # by the guard, because we asked


@dataclass(slots=True, eq=False)
class Worker:
    """One worker process as the trainer sees it."""

    id: int
    channel: trio.socket.SocketType
    output_fd: int  # what the function prints, or its children
    output_limit: int  # bytes of output per call
    pid: int = 0  # 0: not born; below 0: could not be forked
    born: trio.Event = field(default_factory=trio.Event)
    dropped: trio.Event = field(
        default_factory=trio.Event
    )  # it gets no more calls: killed, or ended by itself
    ended: trio.Event = field(default_factory=trio.Event)
    end: End | None = None  # stays None if its guard died
    loaded: set[Hashable] = field(default_factory=set)  # functions that it has imported
    calls: int = 0
    printed: int = 0  # bytes since the call began
    tail: bytes = b""  # of them

    def begin_call(self) -> None:
        """What was printed before belongs to no call."""
        self.drain()
        self.calls += 1
        self.printed, self.tail = 0, b""

    def drain(self) -> bool:
        """Takes what was printed so far, at most until it is too much. False if there will be no more."""
        while not self.too_much_output:
            try:
                part = os.read(self.output_fd, READ_BYTES)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not part:
                return False
            self.printed += len(part)
            self.tail = (self.tail + part)[-TAIL_BYTES:]
        return True

    @property
    def too_much_output(self) -> bool:
        return self.printed > self.output_limit

    def has_unread(self) -> bool:
        """Whether something waits to be read though nothing was asked; the end of the channel is nothing."""
        count = array.array("i", [0])
        fcntl.ioctl(self.channel.fileno(), termios.FIONREAD, count)
        return count[0] > 0

    async def receive_frame(self, limit: int) -> bytes | None:
        """The body of the next frame; None if the channel ends. Raises BadAnswer for one above `limit` bytes,
        or of another process.
        """
        received = bytearray()
        wanted = HEADER.size
        while len(received) < wanted:
            part, ancillary, _, _ = await self.channel.recvmsg(
                READ_BYTES, socket.CMSG_SPACE(worker_os.CREDENTIALS.size)
            )
            if not part:
                return None
            sender = worker_os.sender_of(ancillary)
            if sender not in (None, self.pid):
                raise BadAnswer(
                    f"an answer from process {sender}, which is not the worker but one that it started"
                )
            received += part
            if wanted == HEADER.size and len(received) >= HEADER.size:
                wanted += HEADER.unpack_from(received)[0]
                if wanted > limit:
                    raise BadAnswer(f"an answer of {wanted} bytes, more than the {limit} of output_bytes")
        if len(received) > wanted:
            raise BadAnswer(
                "more than one answer (did it write to file descriptor 3, which is the worker's?)"
            )
        return bytes(received[HEADER.size :])


class GuardClient:
    """A running guard. Made by open_guard."""

    def __init__(self, control: trio.socket.SocketType, output_limit: int) -> None:
        self._control = control
        self._output_limit = output_limit
        self._commands, self._pending = trio.open_memory_channel[tuple[bytes, int, Sequence[int]]](math.inf)
        self._workers: dict[int, Worker] = {}
        self._next_id = 1

    @asynccontextmanager
    async def spawn(self) -> AsyncIterator[Worker]:
        """A worker that is being born. Its sockets close when the context is left, which ends it if nothing
        did before.
        """
        channel, theirs = socket.socketpair()
        readable, writable = os.pipe()
        os.set_blocking(readable, False)
        channel.setblocking(False)
        worker_os.tell_senders(channel)
        worker = Worker(self._next_id, trio.socket.from_stdlib_socket(channel), readable, self._output_limit)
        self._next_id += 1
        self._workers[worker.id] = worker
        self._command(SPAWN, worker, [theirs.detach(), writable])
        try:
            yield worker
        finally:
            self._workers.pop(worker.id, None)
            worker.dropped.set()
            worker.ended.set()
            worker.channel.close()
            trio.lowlevel.notify_closing(worker.output_fd)
            os.close(worker.output_fd)

    def kill(self, worker: Worker) -> None:
        """It gets no more calls, and is killed with its descendants as soon as the guard hears of it."""
        if not worker.dropped.is_set():
            worker.dropped.set()
            self._command(KILL, worker)

    async def wait_ended(self, worker: Worker) -> End | None:
        """How a worker ended whose channel is closed; killed if it does not do so by itself. None if its
        guard died.
        """
        if not worker.dropped.is_set():
            worker.dropped.set()
            self._command(END, worker)
        await worker.ended.wait()
        return worker.end

    def _command(self, what: bytes, worker: Worker, fds: Sequence[int] = ()) -> None:
        try:
            self._commands.send_nowait((what, worker.id, fds))
        except trio.BrokenResourceError:  # the guard is gone, and with it the worker
            _close_all(fds)

    async def write_commands(self) -> None:
        """Passes commands on, in order, until cancelled."""
        try:
            async for what, worker_id, fds in self._pending:
                await self._write(COMMAND.pack(what, worker_id), fds)
        finally:
            with contextlib.suppress(trio.WouldBlock):
                while True:
                    _close_all(self._pending.receive_nowait()[2])
            self._pending.close()

    async def _write(self, message: bytes, fds: Sequence[int]) -> None:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            sent = await self._control.sendmsg([message], ancillary)
            while sent < len(message):
                sent += await self._control.send(message[sent:])
        except OSError:
            pass  # the guard is gone; read_events hears of it
        finally:
            _close_all(fds)

    async def read_events(self) -> None:
        """Notes what the guard says of its workers, until the guard is gone."""
        buffered = b""
        while part := await _receive(self._control):
            buffered += part
            while len(buffered) >= EVENT.size:
                what, worker_id, number, killed = EVENT.unpack_from(buffered)
                buffered = buffered[EVENT.size :]
                worker = self._workers.get(worker_id)
                if worker is None:
                    continue
                if what == BORN:
                    worker.pid = number
                    worker.born.set()
                elif what == DIED:
                    worker.drain()  # before anybody who waits for the end closes it
                    worker.end = End(number, bool(killed))
                    worker.dropped.set()
                    worker.ended.set()

    async def wait_started(self) -> bool:
        """Whether the guard came up."""
        with trio.move_on_after(START_TIMEOUT_S):
            return (await _receive(self._control, EVENT.size))[:1] == HELLO
        return False


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


async def _receive(control: trio.socket.SocketType, count: int = 4096) -> bytes:
    try:
        return await control.recv(count)
    except ConnectionError:
        return b""


@asynccontextmanager
async def open_guard(*, memory_bytes: int, output_limit: int) -> AsyncIterator[GuardClient]:
    """A guard without workers. When the context is left, everything below the guard is killed and reaped
    first, then it ends itself.

    Raises RewardCrashed if it does not start. It is not found by a terminal's Ctrl-C: it has a session of its
    own.
    """
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    settings = {
        "control_fd": theirs.fileno(),
        "memory_bytes": memory_bytes,
        "python_path": os.environ.get("PYTHONPATH"),
    }
    try:
        process = await trio.lowlevel.open_process(
            [sys.executable, "-P", "-m", "rollouts.rewards.worker_guard", json.dumps(settings)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            env=make_environment(),
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    control = trio.socket.from_stdlib_socket(ours)
    guard = GuardClient(control, output_limit)
    try:
        if not await guard.wait_started():
            process.kill()
            code = await process.wait()
            raise RewardCrashed(
                f"the guard of the reward workers did not start (it ended with {code}); what it said is on"
                " stderr"
            )
        yield guard
    finally:
        control.close()  # tells the guard
        with trio.CancelScope(shield=True):
            with trio.move_on_after(CLOSE_TIMEOUT_S):
                await process.wait()
            process.kill()
            await process.wait()


def make_environment() -> dict[str, str]:
    """The trainer's environment without what looks like a secret, with its import path, and one thread per
    numerical library.
    """
    kept = {name: value for name, value in os.environ.items() if not SECRET_NAMES.search(name)}
    path = [str(Path(entry).resolve()) for entry in sys.path]  # '' is the working directory
    return {**kept, **ONE_THREAD, "PYTHONPATH": os.pathsep.join(path)}
