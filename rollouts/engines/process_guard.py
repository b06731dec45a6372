"""The guard of one inference server: two small processes that start it, say when it ends, and let nothing of
it outlive the trainer.

    trainer ──► outer guard ──► inner guard ──► server ──► its workers, wherever they put themselves
    stdin closes, or the parent ends   ──► everything below is killed and reaped; then the guard ends
    SIGTERM                            ──► SIGTERM to the server; what is left after the grace is killed
    the server ends by itself          ──► what it left behind is killed
    stdout (one JSON object a line)    ──► {"started": pid}, {"failed": why} or {"ended": exit code or minus the signal}

Both adopt orphans: a process that leaves its group and session is still found below them, because an orphan
becomes a child of the nearest guard that is alive. There are two so that either may be killed with SIGKILL:
the other then does the work. The standard library is enough, so that it starts in milliseconds in whatever
Python runs the trainer. The key of the server passes through the environment or a file, never through here.

On systems other than Linux nobody adopts orphans: there the server's process group is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

LINUX = sys.platform == "linux"
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # of linux/prctl.h
KILL_S = 20.0  # until what cannot be killed, say in a driver, is left to the system
LOOK_S = 0.02  # between two looks for what a killed process left behind

_libc = ctypes.CDLL(None, use_errno=True) if LINUX else None


def main() -> None:
    """Runs until the server's whole tree is gone. The one argument is JSON: command, parent_pid, grace_s,
    inner (this is the inner guard).
    """
    settings = json.loads(sys.argv[1])
    wake = _open_wake_pipe()
    if _libc is not None:
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    parent = _open_parent(settings["parent_pid"])
    child = _start(settings)
    if child is not None:
        _watch(child, wake, parent, settings)
    _kill_everything(None if child is None else child.pid, wake)


def _start(settings: dict) -> subprocess.Popen | None:
    """The inner guard, or if this is the inner one, the server in a session of its own."""
    own = os.getpid()

    def before_exec() -> None:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)  # what is ignored here would be ignored by the server too
        if _libc is not None:
            _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != own:
                os._exit(1)

    if not settings["inner"]:
        inner = json.dumps({**settings, "inner": True, "parent_pid": own})
        # No death signal here: when the outer guard is killed, the inner one must live to clean up.
        return subprocess.Popen([sys.executable, "-I", "-S", __file__, inner], start_new_session=True)
    try:
        child = subprocess.Popen(
            settings["command"],
            stdin=subprocess.DEVNULL,
            stdout=2,
            start_new_session=True,
            preexec_fn=before_exec,
        )
    except (OSError, subprocess.SubprocessError) as error:
        _say({"failed": f"{settings['command'][0]} does not start: {error}"})
        return None
    _say({"started": child.pid})
    return child


def _watch(child: subprocess.Popen, wake: int, parent: int | None, settings: dict) -> None:
    """Returns when the child has ended or must be killed: the trainer is gone, or the grace after SIGTERM is
    over.
    """
    poll = select.poll()
    for fd in (0, wake, *([] if parent is None else [parent])):
        poll.register(fd, select.POLLIN)
    deadline = None
    while True:
        wait_ms = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
        ready = {fd for fd, _ in poll.poll(wait_ms)}
        if ready - {wake}:  # nobody writes to stdin: it is readable when the trainer's end is closed
            return
        signals = _drain(wake)
        if signal.SIGTERM in signals and deadline is None:
            child.terminate()
            # The outer guard only waits for the inner one, and a little longer: that one kills the server
            # after the grace.
            deadline = time.monotonic() + settings["grace_s"] + (0.0 if settings["inner"] else KILL_S)
        if child.poll() is not None:
            if settings["inner"]:
                _say({"ended": child.returncode})
            return
        if deadline is not None and time.monotonic() >= deadline:
            return


def _kill_everything(group: int | None, wake: int) -> None:
    """Kills and reaps until this process has no descendant left.

    Whole groups, because a chain of processes of which each forks the next and ends cannot be killed one by
    one. A dead process's children become ours, so they turn up at the next look.
    """
    deadline = time.monotonic() + KILL_S
    own = os.getpgrp()
    if group is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    while time.monotonic() < deadline:
        for pid in _find_descendants():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                below = os.getpgid(pid)
                if below not in (0, 1, own):
                    os.killpg(below, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:  # none is left
            return
        select.select([wake], [], [], LOOK_S)
        _drain(wake)


def _find_descendants() -> list[int]:
    """Every process below this one, from /proc; empty where there is none."""
    children: dict[int, list[int]] = {}
    proc = Path("/proc")
    for entry in proc.iterdir() if LINUX and proc.is_dir() else ():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            stat = (entry / "stat").read_text(errors="replace")
            parent = int(stat.rpartition(")")[2].split()[1])  # the name before it may hold anything, ')' too
            children.setdefault(parent, []).append(int(entry.name))
    found: list[int] = []
    waiting = [os.getpid()]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def _open_wake_pipe() -> int:
    """Readable after a signal; holds its number. SIGINT and SIGHUP are for the trainer: this process ends
    with it, not before.
    """
    readable, writable = os.pipe()
    os.set_blocking(readable, False)
    os.set_blocking(writable, False)
    signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _note)
    signal.signal(signal.SIGCHLD, _note)
    return readable


def _note(number: int, frame: FrameType | None) -> None:
    """The wake-up pipe has the number already."""


def _drain(wake: int) -> bytes:
    with contextlib.suppress(BlockingIOError):
        return os.read(wake, 4096)
    return b""


def _open_parent(pid: int) -> int | None:
    """Readable when the parent has ended, though somebody else may hold a copy of its end of stdin. Ends at
    once if it has ended already.
    """
    if LINUX and os.getppid() != pid:
        sys.exit(0)
    try:
        return os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None
    except OSError:
        return None


def _say(message: dict) -> None:
    """Tells the trainer; if it is gone, nobody needs to know."""
    with contextlib.suppress(OSError):
        os.write(1, json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main()
