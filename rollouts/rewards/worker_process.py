"""What runs inside a reward worker: read a request, call the function, check what it did to its process,
answer.

Forked by worker_guard, so Python, numpy and this package are loaded already. Everything the function does can
end this process; nothing that it does can answer in its place: a forked child is refused before it exists,
and one that came about otherwise ends before answering.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import inspect
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import numpy as np

from rollouts.config.plugins import load_function
from rollouts.errors import PlugInError, UserFunctionError
from rollouts.rewards.check import check_group_rewards, check_reward
from rollouts.rewards.combine import CombineFn, apply_combine
from rollouts.rewards.worker_messages import (
    HEADER,
    Answer,
    Crashed,
    Loaded,
    Raised,
    Refused,
    Rewards,
    decode_frame,
    decode_sample,
    encode_answer,
)
from rollouts.rewards.worker_os import limit_resources, prefer_for_out_of_memory
from rollouts.rewards.worker_state import compare_states, take_state

TRACEBACK_FRAMES = 4
_DIGESTS: dict[str, str] = {}  # of the files imported so far: what is read again may have been edited since
EXIT_LOST_CHANNEL = 113  # the worker could not answer: its function closed the channel


def run_worker(channel: socket.socket, *, memory_bytes: int) -> NoReturn:
    """Serves requests until the channel ends, then leaves without cleaning up: this process is a copy of
    another one.
    """
    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(fd, mode, errors="backslashreplace", closefd=False)
        for fd, mode in ((0, "r"), (1, "w"), (2, "w"))
    )
    faulthandler.enable(
        file=2, all_threads=False
    )  # a segfault says where, on stderr, which the failure quotes
    np.random.seed()
    prefer_for_out_of_memory()
    limit_resources(memory_bytes=memory_bytes)
    serving = {"id": ""}
    _refuse_forks(channel, serving)
    own_pid = os.getpid()
    while (request := _read_request(channel)) is not None:
        serving["id"] = request["id"]
        frame = _answer_in_bounds(request)
        if os.getpid() != own_pid:
            os._exit(0)  # a child that a C library forked and that came back through the function
        try:
            channel.sendall(frame)
        except OSError:
            os._exit(EXIT_LOST_CHANNEL)
    os._exit(0)


def _answer_in_bounds(request: Mapping[str, Any]) -> bytes:
    request_id = request["id"]
    try:
        before = take_state() if "samples" in request else None  # what an import does, every worker does
        answer = _answer(request)
        unfit = "" if before is None else compare_states(before, take_state())
        _flush()
        answer = answer if isinstance(answer, Crashed) else _find_leftovers() or answer
        return encode_answer(answer, request_id=request_id, unfit=unfit)
    except MemoryError as error:
        return encode_answer(
            Crashed(f"ran out of memory (MemoryError: {_text_of(error)})"), request_id=request_id
        )


def _answer(request: Mapping[str, Any]) -> Answer:
    where = request["where"]
    try:
        function, combine, digests = _load(request)
    except PlugInError as error:
        if isinstance(error.__cause__, MemoryError):
            raise error.__cause__ from None
        return Refused(f"{where} cannot be called: {error}")
    if "samples" not in request:
        return Loaded(digests)
    samples = tuple(decode_sample(record) for record in request["samples"])
    argument = samples if request["role"] == "group_reward" else samples[0]
    try:
        value = function(argument)
    except MemoryError:
        raise
    except SystemExit as error:
        return Crashed(f"called sys.exit({error.code!r})")
    except BaseException as error:  # whatever it is, it is the function's
        return _describe_raised(error)
    if inspect.isawaitable(value):
        if inspect.iscoroutine(value):
            value.close()
        return Refused(
            f"{where} returned something to await; a worker process calls plain functions, an async def runs"
            " in the trainer"
        )
    answer = _check(value, samples, where, grouped=request["role"] == "group_reward")
    return _combine(answer, combine, where) if combine is not None and isinstance(answer, Rewards) else answer


def _load(request: Mapping[str, Any]) -> tuple[Callable[..., Any], CombineFn | None, dict[str, str]]:
    """The function, the one that combines its parts, and the digests of the files that they were imported
    from.
    """
    base_dir = Path(request["base_dir"])
    digests = dict(_find_digest(name, base_dir) for name in (request["name"], request["combine"]) if name)
    function = load_function(request["name"], role=request["role"], base_dir=base_dir)
    combine = (
        load_function(request["combine"], role="reward_combine", base_dir=base_dir)
        if request["combine"]
        else None
    )
    return function, combine, digests


def _find_digest(name: str, base_dir: Path) -> tuple[str, str]:
    """The path of the file that a function's name means and the SHA-256 of the bytes that it had when it was
    first asked for, "" for a module.
    """
    where = name.rpartition(":")[0]
    path = (base_dir / Path(where).expanduser()).resolve()
    if where.endswith(".py") and str(path) not in _DIGESTS and path.is_file():
        _DIGESTS[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
    return (str(path) if where.endswith(".py") else where), _DIGESTS.get(str(path), "")


def _combine(answer: Rewards, combine: CombineFn, where: str) -> Answer:
    try:
        return Rewards(tuple(apply_combine(result, combine, of=where) for result in answer.results))
    except UserFunctionError as error:
        if isinstance(error.__cause__, MemoryError):
            raise error.__cause__ from None
        return Refused(str(error))
    except BaseException as error:
        return _describe_raised(error)


def _check(value: Any, samples: tuple[Any, ...], where: str, *, grouped: bool) -> Answer:
    try:
        return Rewards(
            check_group_rewards(value, len(samples), where) if grouped else (check_reward(value, where),)
        )
    except UserFunctionError as error:
        return Refused(str(error))
    except MemoryError:
        raise
    except Exception as error:  # an answer whose own methods raise
        return _describe_raised(error)


def _describe_raised(error: BaseException) -> Raised:
    # without the frame of this file, as the function's author would see it
    tb = error.__traceback__.tb_next if error.__traceback__ is not None else None
    lines = traceback.format_exception(type(error), error, tb, limit=-TRACEBACK_FRAMES, chain=False)
    return Raised(f"{type(error).__name__}: {_text_of(error)}", "".join(lines))


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as second:
        return f"(its text cannot be had: {type(second).__name__})"


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, or replaced by something of the function's
            stream.flush()


# --- processes of the function's ----------------------------------------------------------------------------


def _find_leftovers() -> Crashed | None:
    """A crash if a child is still running; those that have ended are reaped. Orphans count too where the
    worker is their subreaper.
    """
    with contextlib.suppress(ChildProcessError):  # no children: the usual case
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        return Crashed("left a process running behind it; wait for what it starts")
    return None


def _refuse_forks(channel: socket.socket, serving: Mapping[str, str]) -> None:
    """From now on a fork of Python's ends this process, with an answer that says so, before there is a child."""
    own_pid = os.getpid()

    def refuse() -> None:
        if os.getpid() != own_pid or _forks_for_subprocess(sys._getframe(1)):
            return
        with contextlib.suppress(OSError):
            reason = "forked its process (os.fork or multiprocessing); use subprocess.run, or threads"
            channel.sendall(encode_answer(Crashed(reason), request_id=serving["id"]))
        os._exit(1)

    os.register_at_fork(before=refuse, after_in_child=channel.close)


def _forks_for_subprocess(caller: FrameType) -> bool:
    return (
        caller.f_globals.get("__name__") == "subprocess"
    )  # with a preexec_fn; the child executes another program at once


# --- frames -------------------------------------------------------------------------------------------------


def _read_request(channel: socket.socket) -> Mapping[str, Any] | None:
    header = _read_exactly(channel, HEADER.size)
    body = header and _read_exactly(channel, HEADER.unpack(header)[0])
    return decode_frame(body) if body else None


def _read_exactly(channel: socket.socket, count: int) -> bytes | None:
    parts: list[bytes] = []
    while count:
        try:
            part = channel.recv(min(count, 1 << 20))
        except OSError:
            os._exit(EXIT_LOST_CHANNEL)
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def reset_signals() -> None:
    """Default handlers, whatever the process was forked from had; no signal is blocked."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
