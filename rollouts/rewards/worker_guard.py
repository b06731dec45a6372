"""The guard: a small process with one thread that forks the reward workers, kills them with all their
descendants, and outlives nobody.

    trainer ──► spawn id + (channel, output) ──► fork ──► worker      the channel and the output go straight from trainer to worker;
            ──► kill id                      ──► SIGKILL              the guard never reads them
            ──► end id                       ──► SIGKILL after a grace
            ◄── hello · born id pid · died id status

    the trainer's end closes, or its process ends ──► everything below the guard is killed and reaped; then the guard ends

Workers are forked, not started anew, so a replacement is there in milliseconds with numpy and this package
loaded. The guard adopts orphans: each child of its that is no worker was left behind by one, and is killed,
and so are the orphans that this makes, until none is left.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import gc
import json
import os
import select
import signal
import socket
import struct
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from rollouts.rewards import worker_os
from rollouts.rewards.worker_process import reset_signals, run_worker

COMMAND = struct.Struct("<cI")  # what, worker id
EVENT = struct.Struct("<cIii")  # what, worker id, pid or wait status, whether the guard killed it
SPAWN, KILL, END = b"s", b"k", b"e"
HELLO, BORN, DIED = b"h", b"b", b"d"
END_GRACE_S = 0.5  # for a worker that closed its channel to end by itself, so that its status says why
SWEEPS = 50  # looks for orphans in a row
SWEEP_S = 0.02  # between two such rows while there are some
CLOSE_S = 5.0  # until what cannot be killed is left to the system


@dataclass(slots=True)
class Guard:
    """What the guard knows: its end of the control socket and the workers that are alive."""

    control: socket.socket
    wake: int  # readable after a signal
    memory_bytes: int
    pids: dict[int, int] = field(default_factory=dict)  # pid: worker id
    killed: set[int] = field(default_factory=set)  # worker ids
    deadlines: dict[int, float] = field(
        default_factory=dict
    )  # worker id: when a worker that should end is killed


def main() -> None:
    """Runs until the trainer is gone. The one argument is JSON: control_fd, memory_bytes, python_path (what
    the workers shall find).
    """
    settings = json.loads(sys.argv[1])
    os.environ.pop("PYTHONPATH", None)  # it carried the trainer's sys.path to here
    if settings["python_path"] is not None:
        os.environ["PYTHONPATH"] = settings["python_path"]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends with the trainer, not before
    worker_os.adopt_orphans()
    gc.collect()
    gc.freeze()  # so that a worker's collector does not copy all these pages
    with socket.socket(
        fileno=settings["control_fd"]
    ) as control:  # a worker leaves by os._exit and never comes back to here
        guard = Guard(control, _open_wake_pipe(), settings["memory_bytes"])
        trainer = _open_trainer()
        send_event(guard, HELLO, 0, 0)
        while serve(guard, trainer):
            pass
        kill_everything(guard)


def _open_wake_pipe() -> int:
    readable, writable = os.pipe()
    os.set_blocking(readable, False)
    os.set_blocking(writable, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    return readable


def _open_trainer() -> int | None:
    """Readable when the trainer has ended, though somebody else may hold a copy of its end of the socket."""
    parent = os.getppid()
    if not hasattr(os, "pidfd_open") or parent == 1:
        return None
    try:
        return os.pidfd_open(parent)
    except OSError:
        return None


def serve(guard: Guard, trainer: int | None) -> bool:
    """Waits for something to do and does it. False when the trainer is gone."""
    poll = select.poll()
    for fd in (guard.control.fileno(), guard.wake, *([] if trainer is None else [trainer])):
        poll.register(fd, select.POLLIN)
    strays = sweep(guard)
    wait_s = (
        SWEEP_S
        if strays
        else max(0.0, min(guard.deadlines.values(), default=3600.0 + time.monotonic()) - time.monotonic())
    )
    ready = {fd for fd, _ in poll.poll(wait_s * 1000)}
    if trainer in ready:
        return False
    if guard.wake in ready:
        with contextlib.suppress(BlockingIOError):
            os.read(guard.wake, 4096)
    reap(guard)
    now = time.monotonic()
    for worker_id in [worker_id for worker_id, deadline in guard.deadlines.items() if deadline <= now]:
        kill(guard, worker_id)
    return obey(guard) if guard.control.fileno() in ready else True


def obey(guard: Guard) -> bool:
    """One command. False if there will be no more."""
    fds = array.array("i")
    try:
        message, ancillary, _, _ = guard.control.recvmsg(COMMAND.size, socket.CMSG_SPACE(2 * fds.itemsize))
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(payload[: len(payload) // fds.itemsize * fds.itemsize])
        while message and len(message) < COMMAND.size:
            rest = guard.control.recv(COMMAND.size - len(message))
            message = message + rest if rest else b""
    except ConnectionError:
        return False
    if not message:
        return False
    what, worker_id = COMMAND.unpack(message)
    if what == SPAWN:
        spawn(guard, worker_id, channel_fd=fds[0], output_fd=fds[1])
    elif what == KILL:
        kill(guard, worker_id)
    elif what == END and worker_id in guard.pids.values():
        guard.deadlines.setdefault(worker_id, time.monotonic() + END_GRACE_S)
    return True


def spawn(guard: Guard, worker_id: int, *, channel_fd: int, output_fd: int) -> None:
    """A worker, or if the system cannot fork now, one that died at once."""
    guard_pid = os.getpid()
    try:
        pid = os.fork()
    except OSError:
        pid = -1
    if pid == 0:
        _become_worker(guard, guard_pid, channel_fd, output_fd)
    os.close(channel_fd)
    os.close(output_fd)
    if pid > 0:
        guard.pids[pid] = worker_id
    send_event(guard, BORN, worker_id, pid)
    if pid < 0:
        send_event(guard, DIED, worker_id, 0)


def _become_worker(guard: Guard, guard_pid: int, channel_fd: int, output_fd: int) -> NoReturn:
    try:
        signal.set_wakeup_fd(-1)
        reset_signals()
        os.setsid()
        worker_os.die_with_parent(guard_pid)
        worker_os.adopt_orphans()
        guard.control.detach()
        channel_fd = _keep_only(channel_fd, output_fd)
        run_worker(socket.socket(fileno=channel_fd), memory_bytes=guard.memory_bytes)
    except BaseException as error:  # nothing may return into the guard's loop
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        os._exit(1)


def _keep_only(channel_fd: int, output_fd: int) -> int:
    """Standard streams, and the channel under a new number; every other file of the guard's is closed."""
    # out of the way of the numbers that are about to be given
    channel_fd, output_fd = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 8) for fd in (channel_fd, output_fd))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output_fd, 1)
    os.dup2(output_fd, 2)
    os.dup2(channel_fd, 3, inheritable=False)
    os.closerange(4, max(int(entry.name) for entry in Path("/dev/fd").iterdir()) + 1)
    return 3


def kill(guard: Guard, worker_id: int) -> None:
    """Kills a worker and its process group; its other descendants become orphans when it is gone, and are
    swept.
    """
    guard.deadlines.pop(worker_id, None)
    for pid in [pid for pid, other in guard.pids.items() if other == worker_id]:
        if not worker_os.has_ended(pid):
            guard.killed.add(worker_id)
        worker_os.kill_group(pid)


def reap(guard: Guard) -> None:
    """Takes leave of every child that has ended and tells the trainer of those that were workers."""
    for pid in worker_os.find_ended(guard.pids):
        if pid in guard.pids:
            worker_os.kill_group(pid)  # the rest of its group, while its id is still its own
        _, status = os.waitpid(pid, 0)
        worker_id = guard.pids.pop(pid, None)
        if worker_id is not None:
            guard.deadlines.pop(worker_id, None)
            send_event(guard, DIED, worker_id, status, by_guard=worker_id in guard.killed)
            guard.killed.discard(worker_id)


def sweep(guard: Guard) -> bool:
    """Kills what workers left behind. True if some of it may be left, for its own children turn up only when
    it is dead.

    Many looks in a row: something that forks and ends all the time lives only as long as a look takes.
    """
    for _ in range(SWEEPS):
        strays = (worker_os.find_children() or set()) - set(guard.pids)
        if not strays:
            return False
        for pid in strays:
            worker_os.kill_stray(pid, spare={os.getpgrp(), *guard.pids})
        reap(guard)
    return True


def kill_everything(guard: Guard) -> None:
    """Kills and reaps until this process has no child left."""
    deadline = time.monotonic() + CLOSE_S
    for pid in list(guard.pids):
        worker_os.kill_group(pid)
    guard.pids.clear()
    while time.monotonic() < deadline:
        sweep(guard)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:  # no child is left
            return
        select.select([guard.wake], [], [], SWEEP_S)
        with contextlib.suppress(BlockingIOError):
            os.read(guard.wake, 4096)


def send_event(guard: Guard, what: bytes, worker_id: int, number: int, *, by_guard: bool = False) -> None:
    """Tells the trainer; if it is gone, the next read says so."""
    with contextlib.suppress(ConnectionError):
        guard.control.sendall(EVENT.pack(what, worker_id, number, by_guard))


if __name__ == "__main__":
    main()
