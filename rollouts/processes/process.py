"""Every child process of the trainer. None outlives it, not even a grandchild in a session of its own.

    async with open_process([...], log=path) as process:      a server: prints into a file
    async with open_process([...], output_bytes=n) as process: what it prints is read here, its end kept
        await process.wait_ended()    how it ended, when nothing of it is left
        process.terminate()           SIGTERM, and SIGKILL to the whole tree after grace_s
        process.kill()                SIGKILL to the whole tree now
    leaving the block kills what is left; so does the end of this process, by any signal (guard.py)

Who starts what: engines/processes (inference servers), rewards/workers (reward functions), trackers (the
follower of a run), rewards/code (model-written programs, by run_program).

A tracker's follower must live a little longer than the trainer, to send the last rows. Start it with
`open_process(argv, log=…, with_channel=True, linger_s=30)`: it takes the end of its stdin for the end of the
run, sends what is left and ends; the guard kills it after linger_s. Leaving the block closes its stdin and
does not wait. To wait a little, `await process.channel.aclose()` and `wait_ended()` under a deadline.
"""

import json
import os
import shlex
import signal
import socket
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import field
from datetime import UTC, datetime
from pathlib import Path

import trio

from rollouts.errors import InfrastructureError
from rollouts.types import live

GUARD = Path(__file__).with_name("guard.py")
END_S = 30.0  # for SIGKILL to take effect on a whole tree; a GPU driver may hold a process for seconds
TAIL_BYTES = 64 * 1024  # of what a process printed, as much as can be read back
READ_BYTES = 1 << 16


@live
class Process:
    """A child process below its guard. Made by open_process."""

    guard_pid: int
    _control: trio.socket.SocketType
    channel: trio.SocketStream | None  # the other end is the child's stdin
    _log: Path | None
    _log_start: int  # how long the file was before
    _output: int  # the reading end of a pipe; below 0: there is none
    _output_bytes: int
    printed: int = 0  # bytes of output since forget_output
    has_ended: bool = False  # and nothing of it is left
    _turn: trio.Lock = field(default_factory=trio.Lock)  # of who reads the control socket
    _said: dict = field(default_factory=dict)  # by the guard: started, failed, ended
    _rest: bytes = b""
    _tail: bytes = b""

    @property
    def pid(self) -> int:
        """0 before it is known to have started."""
        return self._said.get("started", 0)

    async def wait_started(self) -> None:
        """Until the process exists, or will not."""
        while not (self._said or self.has_ended):
            await self._read_control()

    async def wait_ended(self) -> int | None:
        """Its exit code, or minus the signal that ended it, once it and all below it are gone. None if it was
        killed from here or with its guard, or did not start.
        """
        while not self.has_ended:
            await self._read_control()
        return None if "failed" in self._said else self._said.get("ended")

    async def _read_control(self) -> None:
        async with self._turn:
            if self.has_ended:
                return
            try:
                received = await self._control.recv(4096)
            except ConnectionError:
                received = b""
            *lines, self._rest = (self._rest + received).split(b"\n")
            for line in lines:
                self._said |= json.loads(line)
            if not received:  # both guards are gone
                self.has_ended = True
                os.waitpid(self.guard_pid, 0)  # noqa: ASYNC222  (it is exiting: it closes the socket last)

    def describe_end(self) -> str:
        """How it ended, as the end of a sentence."""
        code = self._said.get("ended")
        if "failed" in self._said:
            return f"did not start: {self._said['failed']}"
        if code is None:
            return "was killed with its guard"
        if code >= 0:
            return f"ended with exit code {code}"
        with suppress(ValueError):  # one that has no name, say a real-time signal
            return f"was killed by {signal.Signals(-code).name}"
        return f"was killed by signal {-code}"

    def terminate(self) -> None:
        """SIGTERM to the child; after grace_s SIGKILL to all that is left of its tree."""
        if not self.has_ended:
            os.kill(self.guard_pid, signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to the whole tree; after linger_s if the process was opened with it."""
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)

    # --- output ---

    def read_output(self) -> bool:
        """Takes what was printed so far. False if there will be no more."""
        while self._output >= 0 and not self.printed_too_much:
            try:
                part = os.read(self._output, READ_BYTES)
            except BlockingIOError:
                return True
            if not part:
                return False
            self.printed += len(part)
            self._tail = (self._tail + part)[-TAIL_BYTES:]
        return False

    async def wait_printed_too_much(self) -> None:
        """Until the process has printed more than output_bytes; takes what it prints meanwhile, so that it
        never waits for a full pipe.
        """
        while not self.printed_too_much:
            if not self.read_output() and not self.printed_too_much:
                await trio.sleep_forever()
            await trio.lowlevel.wait_readable(self._output)

    @property
    def printed_too_much(self) -> bool:
        return self.printed > self._output_bytes

    def forget_output(self) -> None:
        """What was printed so far does not count."""
        self.read_output()
        self.printed, self._tail = 0, b""

    def read_tail(self) -> str:
        """The last of what it printed: at most TAIL_BYTES."""
        if self._log is None:
            return self._tail.decode(errors="replace")
        with suppress(FileNotFoundError), self._log.open("rb") as file:
            file.seek(max(self._log_start, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            return file.read().decode(errors="replace")
        return ""


@asynccontextmanager
async def open_process(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    log: Path | None = None,
    headline: str = "start",
    output_bytes: int = 1 << 20,
    memory_bytes: int | None = None,
    with_channel: bool = False,
    subreaper: bool = False,
    grace_s: float = 0.0,
    linger_s: float = 0.0,
) -> AsyncIterator[Process]:
    """A program in a session of its own, for as long as the block is open; may be left in another task.

    `env` None: this process's. What it prints goes to `log`, appended after a dated line with `headline`;
    without one it is read here, at most `output_bytes`. `memory_bytes` that it, and each process it starts,
    may allocate. `with_channel`: its stdin is a socket, otherwise it is empty. `subreaper`: its orphans
    become its own children. `grace_s` between SIGTERM and SIGKILL. `linger_s` that it may go on after the
    block or this process ends: then leaving the block does not wait for it. Raises OSError if the guard
    cannot be started, InfrastructureError if something is left after END_S.
    """
    words = [str(word) for word in argv]
    limits = {"memory_bytes": memory_bytes, "subreaper": subreaper, "grace_s": grace_s, "linger_s": linger_s}
    settings = {"argv": words, "parent_pid": os.getpid(), **limits}
    with ExitStack() as ours:
        with ExitStack() as theirs:
            control, its_control = open_socket_pair(ours, theirs)
            channel, stdin = None, os.open(os.devnull, os.O_RDONLY)
            theirs.callback(os.close, stdin)
            if with_channel:
                channel_socket, its_channel = open_socket_pair(ours, theirs)
                channel, stdin = trio.SocketStream(channel_socket), its_channel.fileno()
            if log is None:
                log_start, (output, stdout) = 0, os.pipe()
                os.set_blocking(output, False)
                ours.callback(os.close, output)
                ours.callback(trio.lowlevel.notify_closing, output)
            else:
                output, (stdout, log_start) = -1, open_log(log, f"{headline}: {shlex.join(words)}")
            theirs.callback(os.close, stdout)
            command = [sys.executable, "-I", "-S", str(GUARD), json.dumps(settings)]
            files = enumerate([stdin, stdout, stdout, its_control.fileno()])
            actions = [(os.POSIX_SPAWN_DUP2, fd, to) for to, fd in files]
            guard_pid = os.posix_spawn(  # noqa: ASYNC221  (milliseconds: it shares the memory)
                command[0], command, os.environ if env is None else env, file_actions=actions, setsid=True
            )
            process = Process(guard_pid, control, channel, log, log_start, output, output_bytes)
        try:
            yield process
        finally:
            if not linger_s:
                with trio.CancelScope(shield=True, deadline=trio.current_time() + END_S):
                    process.kill()
                    await process.wait_ended()
    if not (process.has_ended or linger_s):
        raise InfrastructureError(
            f"{argv[0]} (pid {process.pid}) is still there {END_S:g} s after SIGKILL; it may hold memory"
            " until the system lets it go"
        )


def open_log(path: Path, headline: str) -> tuple[int, int]:
    """A descriptor that appends to the file, after a dated line; and how long it was before."""
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    if path.is_file():  # one that was there may be open to others, and SGLang prints its key; not /dev/null
        os.fchmod(log, 0o600)
    start = os.fstat(log).st_size
    os.write(log, f"=== {datetime.now(UTC).isoformat(timespec='seconds')} {headline}\n".encode())
    return log, start


def open_socket_pair(ours: ExitStack, theirs: ExitStack) -> tuple[trio.socket.SocketType, socket.socket]:
    first, second = socket.socketpair()
    theirs.callback(second.close)
    first.setblocking(False)
    stream = trio.socket.from_stdlib_socket(first)
    ours.callback(stream.close)
    return stream, second
