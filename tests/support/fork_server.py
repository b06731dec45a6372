"""Starts a command-line program many times, in a process of its own each time, or in several that are ranks,
with its imports already made.

    parent ─ {"argv", "environ", "output", "kill_after_s", …}
        ─► server: has imported the program, one thread, runs nothing itself
           ◄── {"pids"} ◄────────────────────────────────────────────┤
                                                                     └─ fork
        ─► main(argv), or exec of "command" ─► exit, or SIGKILL in time
           ◄─ {"returncodes", "wall_s", "leftover", …} ◄─┘ descendants that outlive the program become the
               server's children

A model program spends most of a short run on imports; a forked one begins at once, so that it can be killed
at hundreds of instants. To several processes the server is what torchrun is: when one fails, the others get
SIGTERM, and SIGKILL 30 s later; nobody is started again. Linux only. `python -m tests.support.fork_server
MODULE:FUNCTION [MODULE …]` speaks one JSON object a line on its stdin and stdout.
"""

import importlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from rollouts.processes.guard import PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG, find_children, prctl, reap

DRAIN_S = 10.0  # for descendants of a program that has ended to end too
END_S = 30.0  # for the others of a process that has failed, from SIGTERM to SIGKILL: what torchrun gives them
ALONE: tuple[Mapping[str, str], ...] = ({},)
# forking is sound only while nothing else runs
ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
OPTIONS = {
    "command": None,  # executed instead of the program, as from a shell
    "kill_after_s": None,  # SIGKILL then to the process number `killed`, if it still runs
    "killed": 0,
    "end_others": True,  # when a process fails the others are ended, as by torchrun
    "limit_s": 300.0,
    "drain": True,  # wait() also waits for descendants, and names those that did not end
}


class Ended(NamedTuple):
    """How one run of the program ended."""

    returncode: int  # of the process that failed first, 0 if none did; negative: the signal that ended it
    returncodes: tuple[int, ...]  # of its processes, as they were started
    wall_s: float  # from its start to the end of the last process
    others_s: float  # from the end of the first process to that of the last
    timed_out: bool  # it was still running after limit_s, and was killed for that
    # where `drain` asked: command lines of descendants that were killed, DRAIN_S after the program's end
    leftover: tuple[str, ...]


class ForkServer:
    """Made by open_fork_server. One run at a time; blocking."""

    def __init__(self, process):
        self._process = process

    def run(self, argv, **options):
        """`start`, and then `wait`."""
        self.start(argv, **options)
        return self.wait()

    def start(
        self,
        argv,
        *,
        output,
        errors=None,
        environ=None,
        processes=ALONE,
        **options,
    ):
        """Starts the program; the ids of its processes, one for each of `processes`, in whose environment it
        has those variables besides.

        It writes to the file `output`, and stderr to `errors` where that is given, and has `environ` on top
        of the server's environment. `options` replace OPTIONS.
        """
        assert options.keys() <= OPTIONS.keys(), options
        request = {
            **OPTIONS,
            **options,
            "argv": [*argv],
            "environ": environ or {},
            "processes": processes,
            "output": str(output),
            "errors": str(errors or output),
        }
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read_reply()["pids"]

    def wait(self):
        """Returns when the program that was started has ended, on all its processes."""
        ended = Ended(**self._read_reply())
        return ended._replace(returncodes=tuple(ended.returncodes), leftover=tuple(ended.leftover))

    def _read_reply(self):
        reply = self._process.stdout.readline()
        if not reply:
            raise RuntimeError(f"the fork server ended with {self._process.wait()}; what it said is above")
        return json.loads(reply)


def place_ranks(count):
    """For `processes`: the environment of each of so many ranks on this machine; of one, that of a lone
    process.
    """
    if count == 1:
        return ALONE
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    common = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    places = [{"RANK": rank, "LOCAL_RANK": rank, **common} for rank in range(count)]
    return tuple({name: str(value) for name, value in place.items()} for place in places)


@contextmanager
def open_fork_server(program, *, imports=(), environ=None):
    """A server for `program`, "module:function" of one argument, argv, that returns an exit code; with the
    modules of `imports` loaded too.
    """
    command = [sys.executable, "-m", "tests.support.fork_server", program, *imports]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **ONE_THREAD, **(environ or {})},
    )
    with process:  # closes the pipes, at which the server ends, and waits for that
        yield ForkServer(process)


# --- the server's side --------------------------------------------------------------------------------------


def main():
    """Answers requests until stdin closes."""
    module, _, function = sys.argv[1].partition(":")
    for name in (module, *sys.argv[2:]):
        importlib.import_module(name)
    program = getattr(importlib.import_module(module), function)
    assert threading.active_count() == 1  # else an import started a thread: forking is not sound
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    with os.fdopen(os.dup(1), "w") as replies:
        os.dup2(2, 1)  # what the program prints by mistake is no reply
        while line := sys.stdin.readline():
            request, started = json.loads(line), time.monotonic()
            pids = _start(program, request)
            print(json.dumps({"pids": pids}), file=replies, flush=True)
            print(json.dumps(_watch(pids, request, started)._asdict()), file=replies, flush=True)


def _start(program, request):
    server, pids = os.getpid(), []
    for environ in request["processes"]:
        pid = os.fork()
        if pid == 0:
            _become(program, request, environ, server)
        pids.append(pid)
    return pids


def _watch(pids, request, started):
    """How it ended. Whatever still runs is not reaped, so its id is still its own."""
    codes = {}
    limit = started + request["limit_s"]
    kill_at = math.inf if request["kill_after_s"] is None else started + request["kill_after_s"]
    end_at = first_end = math.inf
    while len(codes) < len(pids):
        # orphans are reaped too
        codes |= {pid: os.waitstatus_to_exitcode(status) for pid, status in reap().items() if pid in pids}
        now = time.monotonic()
        running = [pid for pid in pids if pid not in codes]
        first_end = min(first_end, now) if codes else first_end
        if end_at == math.inf and request["end_others"] and any(codes.values()):
            end_at = now + END_S
            _signal(running, signal.SIGTERM)
        if now >= min(limit, end_at):
            _signal(running, signal.SIGKILL)
        if now >= kill_at:
            kill_at = math.inf
            _signal([pid for pid in running if pid == pids[request["killed"]]], signal.SIGKILL)
        if running:
            signal.sigtimedwait({signal.SIGCHLD}, max(0.001, min(limit, end_at, kill_at) - now))
    ended = time.monotonic()
    leftover = _drain() if request["drain"] else ()
    failed = [code for code in codes.values() if code]  # in the order in which they ended
    ordered = tuple(codes[pid] for pid in pids)
    timed_out = ended >= limit
    return Ended((failed or [0])[0], ordered, ended - started, ended - first_end, timed_out, leftover)


def _signal(pids, number):
    for pid in pids:
        os.kill(pid, number)


def _become(program, request, environ, server):
    """In the child: the program, and then the end."""
    code = 1
    try:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != server:  # it ended before we asked
            os._exit(0)
        for target, name in enumerate((os.devnull, request["output"], request["errors"])):
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT if target else os.O_RDONLY
            os.dup2(os.open(name, flags, 0o644), target)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        os.environ.update({**request["environ"], **environ})
        tempfile.tempdir = None  # as the environment says now, whatever an import has asked before
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


def _drain():
    """Command lines of the children that have not ended after DRAIN_S; they are killed."""
    deadline = time.monotonic() + DRAIN_S
    while (reap(), find_children())[1] and (left := deadline - time.monotonic()) > 0:
        signal.sigtimedwait({signal.SIGCHLD}, left)
    leftover = find_children()
    lines = [Path(f"/proc/{pid}/cmdline").read_text(errors="replace") for pid in leftover]
    for pid in leftover:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return tuple(line.replace("\0", " ").strip() for line in lines)


if __name__ == "__main__":
    main()
