"""Child processes that take turns: one line of JSON to a child's stdin, one from its stdout.

    parent ── {"do": "step"} ──► child, which works alone ── {"wall_s": …, "cpu_s": …} ──► parent

What a child's libraries print goes to a log. A child that ends without an answer is an error that shows the
end of that log.
"""

import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from benchmarks.harness import Turn, read_status_bytes, restart_peak

ENDS_WITHIN_S = 60.0


class Child:
    """A running program and the pipes to it. Made by open_child."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process = process
        self._log = log

    def ask(self, **question: Any) -> dict[str, Any]:
        """The child's answer. Raises RuntimeError with the end of its log if it ended instead."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise RuntimeError(
                f"{self.process.args!r} ended with"
                f" {self.process.wait()}:\n{self._log.read_text('utf-8')[-4000:]}"
            )
        return json.loads(answer)

    def take_turn(self, **question: Any) -> Turn:
        """As ask, of an answer that is a turn."""
        answer = self.ask(**question)
        return Turn(answer["wall_s"], answer["cpu_s"])


@contextmanager
def open_child(
    module: str, arguments: Sequence[str], *, log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[Child]:
    """`python -m module arguments`, with its stderr in `log`. It is told to end by the end of its stdin, and
    killed if it does not.
    """
    command = [sys.executable, "-m", module, *arguments]
    with log.open("w", encoding="utf-8") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        try:
            yield Child(process, log)
        finally:
            if process.stdin is not None:
                with suppress(BrokenPipeError):  # it has ended already
                    process.stdin.close()
            try:
                process.wait(ENDS_WITHIN_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()


# --- in the child -------------------------------------------------------------------------------------------


def take_stdout() -> IO[str]:
    """The pipe to the parent. From here on file descriptor 1 is stderr, so that nothing a library prints is
    taken for an answer.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    return answers


def read_question() -> dict[str, Any] | None:
    """The next question; None when there are no more. Blocks."""
    line = sys.stdin.readline()
    return json.loads(line) if line else None


class Stopwatch:
    """Wall and CPU seconds of this process since it was made, and page faults."""

    def __init__(self) -> None:
        self._wall, self._times, self._faults = time.perf_counter(), os.times(), count_faults()

    def read(self) -> dict[str, float]:
        """As the fields of an answer: seconds, of which `system_s` of the CPU's in the kernel, and minor
        faults.
        """
        now = os.times()
        user, system = now.user - self._times.user, now.system - self._times.system
        return {
            "wall_s": time.perf_counter() - self._wall,
            "cpu_s": user + system,
            "system_s": system,
            "faults": count_faults() - self._faults,
        }


def count_faults() -> int:
    """Minor page faults of this process so far."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def read_memory() -> dict[str, int]:
    """As the field of an answer: the most bytes that were resident of this process so far."""
    return {"peak_bytes": read_status_bytes("VmHWM")}


def trim_heap() -> None:
    """Gives memory that was freed back to the system, so that what is resident is in use; where libc can."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def try_restart_peak() -> None:
    """Peak memory counts from here on, so that loading is not in it; without the right to do so, from the
    start.
    """
    with suppress(OSError):
        restart_peak()
