"""A reward worker's process, and what it and the trainer send each other: JSON, one object a line.

    trainer ──► request: a random id, a function's name, samples
    worker  ──► answer "loaded", then "scored", "raised", "refused" or "crashed"

`python -m rollouts.rewards.worker PYTHONPATH`, with the trainer's socket as stdin. The worker trusts the
trainer; the trainer checks all of an answer. The function may end this process, but only this process
answers: a fork by Python is refused before the child exists, and a child that came about otherwise ends
before it answers. It imports numpy and msgspec, and what the function's module imports.
"""

from __future__ import annotations

import base64
import contextlib
import faulthandler
import functools
import hashlib
import inspect
import json
import math
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from rollouts.config.plugins import load_function
from rollouts.errors import PlugInError, UserFunctionError
from rollouts.rewards.check import check_group_rewards, check_reward, describe
from rollouts.types import RewardResult, Sample

TRACEBACK_FRAMES = 4
TEXT_CHARS = 2000  # of a message or a traceback
EXIT_LOST_CHANNEL = 113  # the function closed the channel, so that the worker cannot answer
DTYPES = {
    "tokens": np.int64,
    "loss_mask": np.bool_,
    "rollout_log_probs": np.float32,
    "weight_versions": np.int64,
}
ENCODE, DECODE = msgspec.json.encode, json.loads  # bound here: a function may replace what modules hold


class Answer(msgspec.Struct, omit_defaults=True):
    """One line of a worker's."""

    id: str  # of the request
    kind: Literal["loaded", "scored", "raised", "refused", "crashed"]
    text: str = ""  # why there are no rewards: "KeyError: 'gold'"
    rewards: list[RewardResult] = []  # one per sample
    traceback: str = ""
    unfit: bool = False  # the call left something behind: the worker must not serve another


class BadAnswer(ValueError):
    """A worker's bytes are no answer."""


def parse_answer(line: bytes, *, request_id: str, count: int | None) -> Answer:
    """The answer to the request of that id: its `count` rewards, or with None that its function is loaded; or
    why not. Raises BadAnswer.
    """
    try:
        answer = msgspec.json.decode(line, type=Answer)
    except (ValueError, RecursionError) as error:
        raise BadAnswer(f"an answer that is none ({error})") from error
    numbers = [number for one in answer.rewards for number in (one.reward, *one.parts.values())]
    if (
        answer.id != request_id
        or answer.kind in (("scored", "raised") if count is None else ("loaded",))
        or len(answer.rewards) != (count if answer.kind == "scored" else 0)
        or not all(map(math.isfinite, numbers))
    ):
        raise BadAnswer("an answer that is none (did it write to file descriptor 3, which is the worker's?)")
    return answer


def encode_request(request: Mapping[str, Any]) -> bytes:
    """A line of ASCII, so that half a surrogate pair crosses too. Raises ValueError on NaN and infinity."""
    return json.dumps(request, allow_nan=False, default=_encode_value).encode() + b"\n"


def _encode_value(value: Any) -> Any:
    if isinstance(value, Sample):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    # base64 of an array's bytes is five times as fast as a list of numbers
    return base64.b64encode(value.tobytes()).decode() if isinstance(value, np.ndarray) else dict(value)


def decode_sample(record: Mapping[str, Any]) -> Sample:
    """The sample that encode_request wrote."""
    arrays = {name: np.frombuffer(base64.b64decode(record[name]), dtype) for name, dtype in DTYPES.items()}
    return Sample(**{**record, **arrays})


@functools.cache
def hash_file(name: str, base_dir: str) -> str:
    """The SHA-256 of the file that a function's name means, as this process first saw it; "" for a module."""
    path = base_dir / Path(name.rpartition(":")[0]).expanduser()
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.suffix == ".py" and path.is_file() else ""


# --- the process --------------------------------------------------------------------------------------------


def main() -> None:
    """Serves requests until the channel ends."""
    os.environ.pop("PYTHONPATH")  # it brought the trainer's sys.path; programs that rewards start get the own
    if sys.argv[1]:
        os.environ["PYTHONPATH"] = sys.argv[1]
    channel = socket.socket(fileno=os.dup2(0, 3, inheritable=False))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    faulthandler.enable(all_threads=False)  # a segmentation fault says where, on stderr
    own_pid, request_id = os.getpid(), ""

    def send(kind: str, text: str = "", **more: Any) -> None:
        if os.getpid() != own_pid:
            os._exit(0)  # a child that a C library forked and that came back through the function
        text = text.encode(errors="replace").decode()[-TEXT_CHARS:]
        try:
            channel.sendall(ENCODE({"id": request_id, "kind": kind, "text": text, **more}) + b"\n")
        except OSError:
            os._exit(EXIT_LOST_CHANNEL)

    def refuse_fork() -> None:
        # with a preexec_fn, subprocess forks in Python: that child executes at once
        if os.getpid() == own_pid and sys._getframe(1).f_globals.get("__name__") != "subprocess":
            send("crashed", "forked its process (os.fork or multiprocessing); use subprocess.run, or threads")
            os._exit(1)

    os.register_at_fork(before=refuse_fork, after_in_child=channel.close)
    for line in channel.makefile("rb"):
        request = DECODE(line)
        request_id = request["id"]
        send(**_serve(request, send))
    os._exit(0)


def _serve(request: Mapping[str, Any], send: Callable[[str], None]) -> dict[str, Any]:
    """The answer to a request: the function is loaded and called, and its process looked at."""
    in_function = False
    before, threads = None, set(sys._current_frames())
    try:
        function = _load(request)
        samples: Any = tuple(map(decode_sample, request["samples"]))
        send("loaded")
        before, in_function = _take_state(), True
        value = function(samples if request["role"] == "group_reward" else samples[0])
        in_function = False
        answer = {"kind": "scored", "rewards": _check(value, request)}
    except BaseException as error:
        cause = error if in_function else error.__cause__ or error
        if isinstance(cause, MemoryError):
            return {"kind": "crashed", "text": f"ran out of memory ({describe(cause)})"}
        if not in_function:
            answer = {"kind": "refused", "text": str(error)}
        elif isinstance(error, SystemExit):
            return {"kind": "crashed", "text": f"called sys.exit({error.code!r})"}
        else:
            # without the frame of this file, as the function's author would see it
            tb = error.__traceback__ and error.__traceback__.tb_next
            lines = traceback.format_exception(type(error), error, tb, limit=-TRACEBACK_FRAMES, chain=False)
            shown = "".join(lines).encode(errors="replace").decode()[-TEXT_CHARS:]
            answer = {"kind": "raised", "text": describe(error), "traceback": shown}
    # Threads that run Python; a library may keep threads of its own.
    unfit = _take_state() != before or not set(sys._current_frames()) <= threads  # or it was not loaded
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, or replaced by something of the function's
            stream.flush()
    with contextlib.suppress(ChildProcessError):  # no children: the usual case
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        return {"kind": "crashed", "text": "left a process running behind it; wait for what it starts"}
    return {**answer, "unfit": unfit}


def _load(request: Mapping[str, Any]) -> Callable[..., Any]:
    """The function. Raises UserFunctionError."""
    where, name, base_dir = request["where"], request["name"], request["base_dir"]
    try:
        function = load_function(name, role=request["role"], base_dir=Path(base_dir))
    except PlugInError as error:
        raise UserFunctionError(f"{where} cannot be called: {error}") from error.__cause__
    if hash_file(name, base_dir) != request["digest"]:
        raise UserFunctionError(
            f"{where} cannot be called: the file of {name} was changed during the run, and workers that began"
            " earlier have the old one; put it back, or stop and go on with --resume"
        )
    return function


def _check(value: Any, request: Mapping[str, Any]) -> Sequence[RewardResult]:
    """The rewards that a function returned. Raises UserFunctionError."""
    where = request["where"]
    if inspect.isawaitable(value):
        getattr(value, "close", bool)()
        raise UserFunctionError(f"{where} returned something to await; async functions run in the trainer")
    if request["role"] == "group_reward":
        return check_group_rewards(value, len(request["samples"]), where)
    return [check_reward(value, where)]


def _take_state() -> list[object]:
    """What a call can change in its process so that the next call sees it. A timer that runs is stopped."""
    timers = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
    pending = [timer for timer in timers if signal.setitimer(timer, 0.0)[0] > 0]
    umask = os.umask(0o077)
    os.umask(umask)
    places: list[object] = []
    for place in (".", 0, 1, 2):
        with contextlib.suppress(OSError):  # removed or closed
            places.append((place, *os.stat(place)[1:3]))  # noqa: PTH116  (inode, device)
    limits = (getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_"))
    return [
        *(pending, umask, places, dict(os.environ), sys.getrecursionlimit()),
        [id(signal.getsignal(number)) for number in signal.valid_signals()],
        signal.pthread_sigmask(signal.SIG_BLOCK, []),
        list(map(resource.getrlimit, limits)),
        [(id(stream), getattr(stream, "closed", None)) for stream in (sys.stdin, sys.stdout, sys.stderr)],
    ]


if __name__ == "__main__":
    main()
