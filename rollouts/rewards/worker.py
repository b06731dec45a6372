"""A reward worker's process: reads a request, calls the function, checks what it did to the process, answers.

`python -m rollouts.rewards.worker PYTHONPATH`, with the trainer's socket as stdin. The function may end this
process, but only this process answers: a fork by Python is refused before the child exists, and a child that
came about otherwise ends before it answers.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import inspect
import json
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from rollouts.config.plugins import load_function
from rollouts.errors import PlugInError, UserFunctionError
from rollouts.rewards.check import check_group_rewards, check_reward, describe
from rollouts.rewards.combine import CombineFn, apply_combine
from rollouts.rewards.worker_messages import TEXT_CHARS, Answer, decode_sample

TRACEBACK_FRAMES = 4
EXIT_LOST_CHANNEL = 113  # the function closed the channel, so that the worker cannot answer
SIGNALS = sorted(signal.valid_signals())
LIMITS = sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")})
TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
ENCODE, DECODE = msgspec.json.encode, json.loads  # bound here: a function may replace what modules hold


def main() -> None:
    """Serves requests until the channel ends."""
    os.environ.pop("PYTHONPATH")  # it brought the trainer's sys.path; programs that rewards start get the own
    if sys.argv[1]:
        os.environ["PYTHONPATH"] = sys.argv[1]
    channel = socket.socket(fileno=os.dup2(0, 3, inheritable=False))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", errors="backslashreplace", closefd=False)
    faulthandler.enable(all_threads=False)  # a segmentation fault says where, on stderr
    own_pid, request_id = os.getpid(), ""

    def answer(**what: Any) -> None:
        if os.getpid() != own_pid:
            os._exit(0)  # a child that a C library forked and that came back through the function
        line = ENCODE(Answer(request_id, **{key: _shorten(value) for key, value in what.items()})) + b"\n"
        try:
            channel.sendall(line)
        except OSError:
            os._exit(EXIT_LOST_CHANNEL)

    def refuse_fork() -> None:
        caller = sys._getframe(1).f_globals.get("__name__")
        if (
            os.getpid() == own_pid and caller != "subprocess"
        ):  # with a preexec_fn: that child executes at once
            answer(crashed="forked its process (os.fork or multiprocessing); use subprocess.run, or threads")
            os._exit(1)

    os.register_at_fork(before=refuse_fork, after_in_child=channel.close)
    for line in channel.makefile("rb"):
        request = DECODE(line)
        request_id = request["id"]
        try:
            result = _serve(request, answer)
        except MemoryError as error:
            result = {"crashed": f"ran out of memory ({describe(error)})"}
        answer(**result)
    os._exit(0)


def _shorten(value: Any) -> Any:
    """Text without what cannot be encoded, of at most TEXT_CHARS characters."""
    return value.encode(errors="replace").decode()[-TEXT_CHARS:] if isinstance(value, str) else value


def _serve(request: Mapping[str, Any], answer: Callable[..., None]) -> dict[str, Any]:
    """Loads and calls the function; what to answer."""
    where, base_dir, role = request["where"], Path(request["base_dir"]), request["role"]
    try:
        files = dict(_find_digest(name, base_dir) for name in (request["name"], request["combine"]) if name)
        function = load_function(request["name"], role=role, base_dir=base_dir)
        combine = None
        if request["combine"]:
            combine = load_function(request["combine"], role="reward_combine", base_dir=base_dir)
    except PlugInError as error:
        if isinstance(error.__cause__, MemoryError):
            raise error.__cause__ from None
        return {"refused": f"{where} cannot be called: {error}"}
    samples = tuple(decode_sample(record) for record in request["samples"])
    answer(files=files)
    before, threads = _take_state(), set(sys._current_frames())
    try:
        value = function(samples if role == "group_reward" else samples[0])
        if inspect.isawaitable(value):
            getattr(value, "close", bool)()
            result = {"refused": f"{where} returned something to await; async functions run in the trainer"}
        else:
            result = _check(value, combine, len(samples), where, grouped=role == "group_reward")
    except MemoryError:
        raise
    except SystemExit as error:
        return {"crashed": f"called sys.exit({error.code!r})"}
    except BaseException as error:  # whatever it is, it is the function's
        # without the frame of this file, as the function's author would see it
        tb = error.__traceback__ and error.__traceback__.tb_next
        lines = traceback.format_exception(type(error), error, tb, limit=-TRACEBACK_FRAMES, chain=False)
        result = {"raised": describe(error), "traceback": "".join(lines)}
    # Threads that run Python; a library may keep threads of its own.
    unfit = _take_state() != before or not set(sys._current_frames()) <= threads
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, or replaced by something of the function's
            stream.flush()
    with contextlib.suppress(ChildProcessError):  # no children: the usual case
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        return {"crashed": "left a process running behind it; wait for what it starts"}
    return {**result, "unfit": unfit}


def _check(value: Any, combine: CombineFn | None, count: int, where: str, *, grouped: bool) -> dict[str, Any]:
    """What to answer for a function's return value."""
    try:
        rewards = check_group_rewards(value, count, where) if grouped else (check_reward(value, where),)
        if combine is not None:
            rewards = [apply_combine(reward, combine, of=where) for reward in rewards]
        return {"rewards": list(rewards)}
    except UserFunctionError as error:
        if isinstance(error.__cause__, MemoryError):
            raise error.__cause__ from None
        return {"refused": str(error)}


_DIGESTS: dict[str, str] = {}  # of files as they were first read: they may have been edited since


def _find_digest(name: str, base_dir: Path) -> tuple[str, str]:
    """The path of a function's file and the SHA-256 of its bytes; of a module its name and ""."""
    where = name.rpartition(":")[0]
    if not where.endswith(".py"):
        return where, ""
    path = (base_dir / Path(where).expanduser()).resolve()
    if str(path) not in _DIGESTS and path.is_file():
        _DIGESTS[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
    return str(path), _DIGESTS.get(str(path), "")


def _take_state() -> list[object]:
    """What a call can change in its process so that the next call sees it. A timer that runs is stopped."""
    pending = [timer for timer in TIMERS if signal.setitimer(timer, 0.0)[0] > 0]
    umask = os.umask(0o077)
    os.umask(umask)
    try:
        directory = (str(Path.cwd()), Path.cwd().stat().st_ino)
    except OSError:  # it was removed
        directory = None
    files = []
    for fd in (0, 1, 2):
        with contextlib.suppress(OSError):
            files.append((os.fstat(fd).st_dev, os.fstat(fd).st_ino))
    return [
        pending,
        umask,
        directory,
        files,
        [id(signal.getsignal(number)) for number in SIGNALS],
        signal.pthread_sigmask(signal.SIG_BLOCK, []),
        [resource.getrlimit(limit) for limit in LIMITS],
        dict(os.environ),
        [(id(stream), getattr(stream, "closed", None)) for stream in (sys.stdin, sys.stdout, sys.stderr)],
        sys.getrecursionlimit(),
    ]


if __name__ == "__main__":
    main()
