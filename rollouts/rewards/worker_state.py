"""What of a process a call can change so that the next call would see it: taken before and after, and
compared.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

SIGNALS = sorted(signal.valid_signals())
LIMITS = sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")})
TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)

State = dict[str, Any]


def take_state() -> State:
    """The process as it is now; a timer that runs is stopped, for it would go off in the middle of something
    else.
    """
    pending = [timer for timer in TIMERS if signal.setitimer(timer, 0.0)[0] > 0]
    umask = os.umask(0o077)
    os.umask(umask)
    return {
        "a pending alarm or timer": pending,
        "another working directory": _find_directory(),
        "another umask": umask,
        "another signal handler": [(number, id(signal.getsignal(number))) for number in SIGNALS],
        "other blocked signals": signal.pthread_sigmask(signal.SIG_BLOCK, []),
        "another resource limit": [resource.getrlimit(limit) for limit in LIMITS],
        "another environment variable": dict(os.environ),
        "other standard streams": [
            (id(stream), getattr(stream, "closed", None)) for stream in (sys.stdin, sys.stdout, sys.stderr)
        ],
        "other standard files": [_identify_file(fd) for fd in (0, 1, 2)],
        "another recursion limit": sys.getrecursionlimit(),
        "a running thread": set(sys._current_frames()),  # those that run Python; a library may keep its own
    }


def compare_states(before: State, after: State) -> str:
    """What the call left behind, in words; "" if nothing."""
    left = [name for name, value in after.items() if name != "a running thread" and value != before[name]]
    if after["a running thread"] - before["a running thread"]:
        left.append("a running thread")
    return ", ".join(left)


def _find_directory() -> tuple[str, int] | None:
    with contextlib.suppress(OSError):
        path = Path.cwd()
        return str(path), path.stat().st_ino
    return None  # it was removed


def _identify_file(fd: int) -> tuple[int, int] | None:
    with contextlib.suppress(OSError):
        found = os.fstat(fd)
        return found.st_dev, found.st_ino
    return None
