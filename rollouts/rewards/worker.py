"""A worker's process, and what it and the trainer send each other over a socket, a line each.

    trainer ──► request, in JSON: a random id, a function's name and role, what it is called with
    worker  ──► an empty line when the function is loaded, then an Answer, in JSON

`python -m rollouts.rewards.worker PYTHONPATH`, with the trainer's socket as stdin, scores samples;
environments/worker.py serves other roles in the same way. The worker trusts the
trainer; the trainer checks all of an answer. The function may end this process, but only this process
answers: a fork by Python is refused before the child exists, and a child that came about otherwise ends
before it answers. It imports numpy and msgspec, and what the function's module imports.
"""

import base64
import faulthandler
import hashlib
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import is_dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from rollouts.config.plugins import load_function
from rollouts.errors import EnvironmentFailed, PlugInError, ToolError, UserFunctionError
from rollouts.rewards.check import check_group_rewards, check_reward, describe, show_traceback
from rollouts.rewards.library import LIBRARY
from rollouts.types import Fields, Function, Sample

TEXT_CHARS = 2000  # of a message
EXIT_LOST_CHANNEL = 113  # the function closed the channel, so that the worker cannot answer
DTYPES = {
    "tokens": np.int64,
    "loss_mask": np.bool_,
    "rollout_log_probs": np.float32,
    "weight_versions": np.int64,
    "turn_rewards": np.float32,
}
# bound here: a function may replace what modules hold
ENCODE, DECODE, DUMP = msgspec.json.encode, json.loads, json.dumps


class Answer(msgspec.Struct, omit_defaults=True):
    """What a worker says of a request."""

    id: str  # of the request
    kind: Literal["done", "failed", "crashed"]
    text: str = ""  # failed: the error's message; crashed: what the function did
    value: msgspec.Raw = msgspec.Raw(b"null")  # done: what the function returned, checked; of a reward a list
    error: str = ""  # failed: the kind of ToolError or EnvironmentFailed
    traceback: str = ""  # failed, if the function raised
    unfit: bool = False  # the call left something behind: the worker must not serve another


# of a request and the start of its errors: yields the user's function on its arguments, is sent what that
# returned, and yields it checked
Job = Generator[Any, Any, None]


class BadAnswer(ValueError):
    """A worker's bytes are no answer."""


def parse_answer(line: bytes, *, request_id: str, kind: Any) -> Answer:
    """The answer to the request of that id, whose value is of that type. Raises BadAnswer."""
    try:
        answer = msgspec.json.decode(line, type=Answer)
        value: Any = msgspec.json.decode(answer.value, type=kind if answer.kind == "done" else Any)
        answer.value = value
    except (ValueError, RecursionError) as error:
        raise BadAnswer(f"an answer that is none ({error}; did it write to file descriptor 3?)") from error
    if answer.id != request_id or b"\n" in line[:-1]:
        raise BadAnswer("an answer that is none (did it write to file descriptor 3, which is the worker's?)")
    return answer


def encode_json(value: Any) -> str:
    """In ASCII, so that half a surrogate pair crosses too. Raises ValueError on NaN and infinity."""
    return DUMP(value, allow_nan=False, default=_encode_value)


def _encode_value(value: Any) -> Any:
    if is_dataclass(value):
        return {name: getattr(value, name) for name in value.__dataclass_fields__}
    # base64 of an array's bytes is five times as fast as a list of numbers
    return base64.b64encode(value.tobytes()).decode() if isinstance(value, np.ndarray) else dict(value)


def decode_sample(record: Fields) -> Sample:
    """The sample that encode_json wrote."""
    arrays = {name: np.frombuffer(base64.b64decode(record[name]), dtype) for name, dtype in DTYPES.items()}
    return Sample(**{**record, **arrays})


@cache
def hash_file(name: str, base_dir: str) -> str:
    """The SHA-256 of the file that a function's name means, as this process first saw it; "" for a module."""
    path = base_dir / Path(name.rpartition(":")[0]).expanduser()
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.suffix == ".py" and path.is_file() else ""


# --- the process --------------------------------------------------------------------------------------------


def main(serve: Callable[..., Job]) -> None:
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
    own_pid, request = os.getpid(), Fields()

    def send(answer: Fields | None) -> None:
        """An answer, or with None that the function is loaded."""
        if os.getpid() != own_pid:
            os._exit(0)  # a child that a C library forked and that came back through the function
        try:
            said = b""
            if answer:
                text = answer.get("text", "").encode(errors="replace").decode()[:TEXT_CHARS]
                said = ENCODE({"id": request["id"], **answer, "text": text})
            channel.sendall(said + b"\n")
        except OSError:
            os._exit(EXIT_LOST_CHANNEL)

    def refuse_fork() -> None:
        # with a preexec_fn, subprocess forks in Python: that child executes at once
        if os.getpid() == own_pid and sys._getframe(1).f_globals.get("__name__") != "subprocess":
            text = "forked its process (os.fork or multiprocessing); use subprocess.run, or threads"
            send({"kind": "crashed", "text": text})
            os._exit(1)

    os.register_at_fork(before=refuse_fork, after_in_child=channel.close)
    for line in channel.makefile("rb"):
        request = DECODE(line)
        send(_serve(request, send, serve))
    os._exit(0)


def _serve(request: Fields, send: Callable[[None], None], serve: Callable[..., Job]) -> Fields:
    """The answer to a request: the function is loaded and called, and its process looked at."""
    where = request["where"]
    before, threads, in_function = None, set(sys._current_frames()), False
    try:
        job = serve(request, where)
        function = next(job)
        send(None)
        before, in_function = _take_state(), True
        value = function()
        in_function = False
        answer = {"kind": "done", "value": msgspec.Raw(encode_json(job.send(value)))}
    except BaseException as error:
        cause = error if in_function else error.__cause__ or error
        if isinstance(cause, MemoryError):
            return {"kind": "crashed", "text": f"ran out of memory ({describe(cause)})"}
        if in_function and isinstance(error, SystemExit):
            return {"kind": "crashed", "text": f"called sys.exit({error.code!r})"}
        own = error.kind if isinstance(error, ToolError | EnvironmentFailed) else ""
        in_function = in_function and not isinstance(error, ToolError)
        text = f"{where} raised {describe(error)}" if in_function else str(error)
        # without the frame of this file, as the function's author would see it
        frames = error.__traceback__ and error.__traceback__.tb_next
        shown = show_traceback(error, frames) if in_function else ""
        answer = {"kind": "failed", "text": text, "traceback": shown, "error": request.get("error", own)}
    # Threads that run Python; a library may keep threads of its own.
    unfit = _take_state() != before or not set(sys._current_frames()) <= threads  # or it was not loaded
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # closed, or replaced by something of the function's
            stream.flush()
    if request["role"] != "environment" or request["method"] == "close":  # until then it may keep processes
        with suppress(ChildProcessError):  # no children: the usual case
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            return {"kind": "crashed", "text": "left a process running behind it; wait for what it starts"}
    return {**answer, "unfit": unfit}


def serve_reward(request: Fields, where: str) -> Job:
    """A reward or group reward function on samples."""
    function = load_named(request, where)
    samples = tuple(map(decode_sample, request["samples"]))
    if request["role"] == "group_reward":
        value = yield partial(function, samples)
        yield check_group_rewards(value, len(samples), where)
    value = yield partial(function, samples[0])
    yield [check_reward(value, where)]


def load_named(request: Fields, where: str) -> Function:
    """The function of a request. Raises UserFunctionError."""
    name, base_dir = request["name"], request["base_dir"]
    try:
        role, params = request["role"], request.get("params", {})
        function = load_function(
            name, role=role, base_dir=Path(base_dir), built_in=LIBRARY.get(role), params=params
        )
    except PlugInError as error:
        raise UserFunctionError(f"{where} cannot be called: {error}") from error.__cause__
    if hash_file(name, base_dir) != request["digest"]:
        raise UserFunctionError(
            f"{where} cannot be called: the file of {name} was changed during the run, and workers that began"
            " earlier have the old one; put it back, or stop and go on with --resume"
        )
    return partial(function, **params) if params else function


def _take_state() -> list[object]:
    """What a call can change in its process so that the next call sees it. Stops an alarm that is set."""
    umask = os.umask(0o077)
    os.umask(umask)
    places = []
    for place in (".", 0, 1, 2):
        with suppress(OSError):  # removed or closed
            places.append((place, *os.stat(place)[1:3]))  # noqa: PTH116  (inode, device)
    limits = (getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_"))
    return [
        *(signal.alarm(0), umask, places, dict(os.environ), sys.getrecursionlimit()),
        [id(signal.getsignal(number)) for number in signal.valid_signals()],
        signal.pthread_sigmask(signal.SIG_BLOCK, []),
        list(map(resource.getrlimit, limits)),
        [(id(stream), getattr(stream, "closed", None)) for stream in (sys.stdin, sys.stdout, sys.stderr)],
    ]


if __name__ == "__main__":
    main(serve_reward)
