"""Starts a command-line program many times, in a process of its own each time, with its imports already made.

    parent ── {"argv", "environ", "output", "kill_after_s", …} ──► server: has imported the program, one thread, runs nothing itself
                                                                     └─ fork ──► main(argv), or exec of "command" ──► exit, or SIGKILL in time
           ◄── {"status", "wall_s", "leftover"} ◄──────────────────────┘ descendants that outlive the program become the server's children

A model program spends most of a short run on imports; a forked one begins at once, so that it can be killed at hundreds of instants. Linux only.
`python -m rollouts.testing.fork_server MODULE:FUNCTION [MODULE …]` speaks one JSON object a line on its stdin and stdout.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from rollouts.rewards.worker_os import adopt_orphans, die_with_parent

DRAIN_S = 10.0  # for descendants of a program that has ended to end too
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # forking is sound only while nothing else runs


@dataclass(frozen=True, slots=True)
class Ended:
    """How one run of the program ended."""

    returncode: int  # negative: the signal that ended it
    wall_s: float  # from its start
    timed_out: bool  # it was still running after limit_s, and was killed for that
    leftover: tuple[str, ...]  # command lines of descendants that were still there after DRAIN_S, and were then killed; where `drain` asked


class ForkServer:
    """Made by open_fork_server. One run at a time; blocking."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(
        self,
        argv: Sequence[str],
        *,
        output: Path,
        environ: Mapping[str, str] | None = None,
        command: Sequence[str] | None = None,
        kill_after_s: float | None = None,
        limit_s: float = 300.0,
        drain: bool = True,
    ) -> Ended:
        """Returns when the program has ended. It writes to the file `output`, and has `environ` on top of the server's environment.

        With `command` that is executed instead, as from a shell. `kill_after_s`: SIGKILL then, if it still runs. `drain`: also waits for its
        descendants, and tells which did not end.
        """
        request = {
            "argv": list(argv),
            "environ": dict(environ or {}),
            "command": None if command is None else list(command),
            "output": str(output),
            "kill_after_s": kill_after_s,
            "limit_s": limit_s,
            "drain": drain,
        }
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        reply = self._process.stdout.readline()
        if not reply:
            raise RuntimeError(f"the fork server ended with {self._process.wait()}; what it said is above")
        fields = json.loads(reply)
        return Ended(fields["returncode"], fields["wall_s"], fields["timed_out"], tuple(fields["leftover"]))


@contextmanager
def open_fork_server(program: str, *, imports: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> Iterator[ForkServer]:
    """A server for `program`, "module:function" of one argument, argv, that returns an exit code; with the modules of `imports` loaded too."""
    command = [sys.executable, "-m", "rollouts.testing.fork_server", program, *imports]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **ONE_THREAD, **(environ or {})}
    )
    with process:  # closes the pipes, at which the server ends, and waits for that
        yield ForkServer(process)


# --- the server's side -------------------------------------------------------------------------------------------------------


def main() -> None:
    """Answers requests until stdin closes."""
    module, _, function = sys.argv[1].partition(":")
    for name in (module, *sys.argv[2:]):
        importlib.import_module(name)
    program = getattr(importlib.import_module(module), function)
    assert threading.active_count() == 1, "an import started a thread; forking is not sound"
    adopt_orphans()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the program prints by mistake is no reply
    while line := sys.stdin.readline():
        print(json.dumps(_answer(program, json.loads(line))), file=replies, flush=True)


def _answer(program: Any, request: Mapping[str, Any]) -> dict[str, Any]:
    server, started = os.getpid(), time.monotonic()
    pid = os.fork()
    if pid == 0:
        _become(program, request, server)
    kill_after_s, limit_s = request["kill_after_s"], request["limit_s"]
    status = _wait(pid, started + (limit_s if kill_after_s is None else kill_after_s))
    timed_out = status is None and kill_after_s is None
    if status is None:
        os.kill(pid, signal.SIGKILL)  # it is not reaped, so the id is still its own
        _, status = os.waitpid(pid, 0)
    wall_s = time.monotonic() - started
    leftover = _drain() if request["drain"] else []
    return {"returncode": os.waitstatus_to_exitcode(status), "wall_s": wall_s, "timed_out": timed_out, "leftover": leftover}


def _become(program: Any, request: Mapping[str, Any], server: int) -> NoReturn:
    """In the child: the program, and then the end."""
    code = 1
    try:
        die_with_parent(server)
        output = os.open(request["output"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (output, 1), (output, 2)):
            os.dup2(source, target)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        os.environ.update(request["environ"])
        if request["command"] is not None:
            os.execvpe(request["command"][0], request["command"], os.environ)
        code = program(request["argv"])
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else 1
    except BaseException as error:  # whatever it is, the child must not go on as a second server
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(pid: int, deadline: float) -> int | None:
    """The wait status of the child; None if it still runs at the deadline, which is on the monotonic clock. Reaps orphans meanwhile."""
    while True:
        while (found := _reap()) is not None:
            if found[0] == pid:
                return found[1]
        left = deadline - time.monotonic()
        if left <= 0 or signal.sigtimedwait({signal.SIGCHLD}, left) is None:
            return _status_of(pid)


def _status_of(pid: int) -> int | None:
    done, status = os.waitpid(pid, os.WNOHANG)
    return status if done else None


def _reap() -> tuple[int, int] | None:
    """(pid, status) of one child that has ended, None if none has."""
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, status) if pid else None


def _drain() -> list[str]:
    """Command lines of the children that have not ended after DRAIN_S; they are killed."""
    deadline = time.monotonic() + DRAIN_S
    while _children():
        while _reap() is not None:
            pass
        left = deadline - time.monotonic()
        if not _children() or left <= 0:
            break
        signal.sigtimedwait({signal.SIGCHLD}, left)
    leftover: list[str] = []
    for pid in _children():
        leftover.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip())
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return leftover


def _children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


if __name__ == "__main__":
    main()
