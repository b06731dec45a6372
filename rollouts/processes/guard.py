"""The guard of one child process: starts it, reports its end, and lets nothing of it outlive the trainer.

    trainer ──► outer guard ──fork──► inner guard ──exec──► child ──► what it starts, in whatever session
    control socket closes, or the trainer ends ──► after linger_s the whole tree is killed and reaped
    SIGTERM to the outer guard                 ──► SIGTERM to the child, after grace_s SIGKILL to what is left
    the child ends                             ──► what it left behind is killed
    control socket, a JSON object a line       ──► {"started": pid}, {"failed": why}, {"ended": code}

Both guards are subreapers: an orphan below them becomes a child of the nearest living guard, also one that
left its group and session. There are two so that SIGKILL to either leaves the other to clean up. The script
needs only the standard library and starts in milliseconds. Other systems than Linux have no subreaper; there
the child's process group is killed, and a process that left it is not found.
"""

import ctypes
import json
import math
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

CONTROL = 3  # descriptor of the control socket
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER = 1, 4, 24, 36  # linux/prctl.h
CAP_SYS_PTRACE = 19  # of linux/capability.h
KILL_S = 20.0  # after which a process that cannot be killed, say in a driver, is left to the system
LOOK_S = 0.01  # between two looks for what a killed process left behind


def main() -> None:
    """Runs until the child's whole tree is gone. The one argument is JSON: argv, parent_pid, memory_bytes,
    subreaper, grace_s, linger_s.
    """
    settings = json.loads(sys.argv[1])
    os.set_inheritable(CONTROL, False)
    os.closerange(CONTROL + 1, os.sysconf("SC_OPEN_MAX"))  # what a library of the trainer left inheritable
    outer_pid = os.getpid()

    def start_inner() -> int:
        pid = os.fork()
        if pid == 0:
            os.setsid()
            guard(outer_pid, lambda: start_child(settings), {**settings, "reports": True})
            os._exit(0)
        return pid

    # The inner guard kills after the grace and reports; the outer one waits longer for it.
    guard(settings["parent_pid"], start_inner, {**settings, "grace_s": settings["grace_s"] + KILL_S})


def guard(parent_pid: int, start: Callable[[], int], settings: dict) -> None:
    """Starts a process, watches it and leaves nothing of it."""
    # readable after a signal, it holds the signal's number
    wake, writable = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(writable, False)
    signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    for number in (signal.SIGINT, signal.SIGHUP):  # which are for the trainer
        signal.signal(number, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)  # which is not ignored: its number goes into the wake pipe
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    parent = os.pidfd_open(parent_pid) if hasattr(os, "pidfd_open") and os.getppid() == parent_pid else None
    if os.getppid() != parent_pid:
        return
    child = start()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # otherwise the trainer would not see the child close it
    watch(child, wake, [CONTROL] if parent is None else [CONTROL, parent], settings)
    kill_everything(child, wake)


def start_child(settings: dict) -> int:
    """The child, in a session of its own and within its limits."""
    guard_pid = os.getpid()
    pid = os.fork()
    if pid:
        say({"started": pid})
        return pid
    try:
        signal.set_wakeup_fd(-1)
        for name in ("SIGINT", "SIGHUP", "SIGTERM", "SIGCHLD", "SIGPIPE", "SIGXFSZ"):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard_pid:
            os._exit(1)
        if settings["subreaper"]:
            prctl(PR_SET_CHILD_SUBREAPER, 1)
        memory_bytes = settings["memory_bytes"]
        if memory_bytes is not None:
            # of private writable memory: RLIMIT_AS would count address space that libraries only reserve
            _, hard = resource.getrlimit(resource.RLIMIT_DATA)
            limit = memory_bytes if hard == resource.RLIM_INFINITY else min(memory_bytes, hard)
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core files
            prctl(PR_CAPBSET_DROP, CAP_SYS_PTRACE)  # root too looks into no other process's memory then
            # when the machine runs out of memory this process ends before the trainer
            with suppress(OSError):
                Path("/proc/self/oom_score_adj").write_text("900")
        os.execvp(settings["argv"][0], settings["argv"])
    except (OSError, ValueError) as error:
        say({"failed": f"{settings['argv'][0]} does not start: {error}"})
    finally:
        os._exit(127)


def watch(child: int, wake: int, ends: list[int], settings: dict) -> None:
    """Returns when the child has ended or must be killed. `ends` are readable when the trainer is gone."""
    poll = select.poll()
    for fd in (wake, *ends):
        poll.register(fd, select.POLLIN)
    deadline = math.inf
    while True:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return
        ready = {fd for fd, _ in poll.poll(None if left_s == math.inf else left_s * 1000)}
        for fd in ready.intersection(ends):
            poll.unregister(fd)
            deadline = min(deadline, time.monotonic() + settings["linger_s"])
        if signal.SIGTERM in drain(wake):
            os.kill(child, signal.SIGTERM)
            deadline = min(deadline, time.monotonic() + settings["grace_s"])
        status = reap().get(child)
        if status is not None:
            if "reports" in settings:
                say({"ended": os.waitstatus_to_exitcode(status)})
            return


def kill_everything(child: int, wake: int) -> None:
    """Kills and reaps until this process has no descendant.

    It kills whole groups: a chain of processes of which each forks the next and ends cannot be killed one by
    one. The children of a killed process become ours and are found at the next look.
    """
    deadline = time.monotonic() + KILL_S
    kill(child, group=child)
    while time.monotonic() < deadline:
        for _ in range(50):  # many looks in a row: such a process lives only as long as a look takes
            for pid in find_children():
                with suppress(ProcessLookupError):
                    kill(pid, group=os.getpgid(pid))
            if not reap():
                break
        try:
            os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:  # no child is left
            return
        select.select([wake], [], [], LOOK_S)
        drain(wake)


def kill(pid: int, *, group: int) -> None:
    """Kills a process and the group that it is in, unless that is ours."""
    with suppress(ProcessLookupError, PermissionError):
        if group not in (0, 1, os.getpgrp()):
            os.killpg(group, signal.SIGKILL)
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def find_children() -> set[int]:
    """Ids of this process's children, from /proc; empty where there is none."""
    own = os.getpid()
    with suppress(OSError):
        return {int(pid) for pid in Path(f"/proc/self/task/{own}/children").read_text().split()}
    found = set()
    with suppress(OSError):
        for entry in Path("/proc").iterdir():  # a kernel without CONFIG_PROC_CHILDREN
            with suppress(OSError, ValueError, IndexError):
                # the name before the state may hold anything, also ')'
                stat = (entry / "stat").read_text(errors="replace").rpartition(")")[2]
                if int(stat.split()[1]) == own:
                    found.add(int(entry.name))
    return found


def reap() -> dict[int, int]:
    """Wait statuses of the children that have ended, by id."""
    ended = {}
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = found[1]
    return ended


def drain(wake: int) -> bytes:
    with suppress(BlockingIOError):
        return os.read(wake, 4096)
    return b""


def say(message: dict) -> None:
    """Tells the trainer, unless it is gone."""
    with suppress(OSError):
        os.write(CONTROL, json.dumps(message).encode() + b"\n")


def prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main()
