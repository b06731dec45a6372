"""What the operating system does for reward workers, and what happens where it does not.

Linux: prctl makes the guard and each worker adopt orphans, and lets a worker die with its guard; /proc tells
who a process's children are. Elsewhere: a worker that is killed takes its process group along; descendants
that left the group are not found.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Container, Iterable, Iterator
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # of linux/prctl.h
CREDENTIALS = struct.Struct("iii")  # pid, uid, gid: what the kernel says about who sent some bytes
SCM_CREDENTIALS = 2  # of linux/socket.h; the socket module does not name it before 3.14
LINUX = sys.platform == "linux"

_libc = ctypes.CDLL(None, use_errno=True) if LINUX else None


def adopt_orphans() -> None:
    """Descendants whose parent ends become children of this process instead of init's."""
    if _libc is not None:
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent(parent_pid: int) -> None:
    """This process is killed when the thread that forked it ends: only sound when the parent has no other
    threads.
    """
    if _libc is None:
        return
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it ended before we asked
        os._exit(0)


def prefer_for_out_of_memory() -> None:
    """When the machine runs out of memory the kernel looks here first, not at the trainer."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("900")


def limit_resources(*, memory_bytes: int) -> None:
    """No core files, and at most `memory_bytes` of data: RLIMIT_DATA, which on Linux counts private memory
    that can be written.

    RLIMIT_AS would count address space that libraries only reserve. Shared memory is not counted. A child
    process gets the same limit for itself.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = memory_bytes if hard == resource.RLIM_INFINITY else min(memory_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def find_children() -> set[int] | None:
    """Ids of this single-threaded process's children, also ended ones that nobody waited for; None where
    there is no /proc that is ours.
    """
    own = os.getpid()
    try:
        if int(Path("/proc/self").readlink().name) != own:
            return None  # mounted for other process numbers
    except FileNotFoundError:
        return None
    try:
        return {int(pid) for pid in Path(f"/proc/self/task/{own}/children").read_text().split()}
    except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN
        return {
            int(entry.name)
            for entry in Path("/proc").iterdir()
            if entry.name.isdigit() and parent_of(int(entry.name)) == own
        }


def parent_of(pid: int) -> int | None:
    """The parent's id, from /proc; None if the process is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    return int(text.rpartition(")")[2].split()[1])  # the name before it may hold anything, ')' too


def find_ended(known: Iterable[int]) -> Iterator[int]:
    """Children that have ended, one after the other; each must be waited for before the next is asked for.

    Where waitid is missing (macOS before Python 3.13) only `known` children are looked at.
    """
    while hasattr(os, "waitid"):
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None:
            return
        yield ended.si_pid
    for pid in list(known):
        if "Z" in _state_of(pid):
            yield pid


def has_ended(pid: int) -> bool:
    """Whether a child has ended; it stays there to be waited for."""
    if not hasattr(os, "waitid"):
        return "Z" in _state_of(pid)
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def _state_of(pid: int) -> str:
    """The state that ps tells, with a Z if the process has ended and was not waited for."""
    return subprocess.run(
        ["ps", "-o", "state=", "-p", str(pid)], capture_output=True, text=True, check=False
    ).stdout


def kill_group(pid: int) -> None:
    """Kills a child and the group that it leads. Call it before the child is waited for: until then its id
    means nobody else.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def kill_stray(pid: int, *, spare: Container[int]) -> None:
    """Kills a process that a worker left behind, with the whole group that it is in unless that is one to
    `spare`.

    The kernel kills a group at once. A chain of processes of which each forks the next and ends cannot be
    killed one by one: by the time that one is found it has a successor. Call it before the process is waited
    for: an ended one still tells its group.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        group = os.getpgid(pid)
        if group > 1 and group not in spare:
            os.killpg(group, signal.SIGKILL)
    kill_group(pid)


def tell_senders(receiver: socket.socket) -> None:
    """From now on the kernel adds to what `receiver` receives who sent it; it writes that itself, the sender
    cannot.
    """
    if hasattr(socket, "SO_PASSCRED"):
        receiver.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)


def sender_of(ancillary: list[tuple[int, int, bytes]]) -> int | None:
    """The process that sent what came with these; None where the kernel does not say."""
    for level, kind, payload in ancillary:
        if (
            LINUX
            and level == socket.SOL_SOCKET
            and kind == SCM_CREDENTIALS
            and len(payload) >= CREDENTIALS.size
        ):
            return CREDENTIALS.unpack_from(payload)[0]
    return None
