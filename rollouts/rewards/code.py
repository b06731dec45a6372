"""The response is a program, and its tests decide. It runs in a child process with as little around it as the
host allows.

One child per test: its own session, limits on time, memory, disk and processes, no environment, no
descriptors, and, where the kernel lets this user have them, an own empty network, file system and process
numbers (see code_child.py). Nothing of it is left when the reward returns. Blocking, and without threads: it
belongs into a reward's worker process.
"""

from __future__ import annotations

import ast
import json
import math
import os
import re
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from rollouts.errors import ConfigError, DataError, UserFunctionError
from rollouts.rewards.exact import read_answer
from rollouts.types import RewardResult, Sample

CHILD = Path(__file__).with_name("code_child.py")
FENCED = re.compile(r"^[ \t]*```[ \t]*([A-Za-z0-9]*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
PYTHON = ("python", "python3", "py")
MAX_REPORT_BYTES = 1 << 16
START_S = 60.0  # Python starts in much less; a machine so busy that it does not is no fault of the response


@dataclass(frozen=True, slots=True)
class Isolation:
    """What the code cannot reach or use up, each True where the host allowed it."""

    network: bool  # it has none
    # it sees Python's libraries, read-only, and an empty directory in memory; nothing else, no /proc
    filesystem: bool
    processes: bool  # it can signal no process but its own and leaves none behind
    memory: bool  # its address space is limited
    user: bool  # it is not the worker's user, or sees none of that user's files
    privileges: bool  # it has no capabilities and can gain none

    def missing(self) -> tuple[str, ...]:
        """The names of what is not isolated."""
        return tuple(name for name, is_there in asdict(self).items() if not is_there)


@dataclass(frozen=True, slots=True)
class Limits:
    """What one test may use."""

    timeout_s: float = 10.0  # wall clock; each process may use a second more of CPU time
    memory_bytes: int = 512 << 20  # address space of each process
    disk_bytes: int = 16 << 20  # of all files it writes
    output_bytes: int = 1 << 20  # of standard output
    max_processes: int = 16  # threads count too; none where they could not all be ended


DEFAULT_LIMITS = Limits()


class Case(NamedTuple):
    """One test: either a source that runs after the response in its interpreter, or a program's input and
    output.
    """

    source: str | None
    stdin: str
    stdout: str


class Outcome(NamedTuple):
    """What became of one test. A note where it did not pass."""

    passed: bool
    compiled: bool
    timed_out: bool
    note: str


class ChildEnd(NamedTuple):
    """What a child left: `status` is its exit status, None if it was killed here, and then `killed_for` says
    why.
    """

    reports: tuple[Mapping[str, Any], ...]
    stdout: bytes
    status: int | None
    killed_for: str

    def report(self, status: str) -> Mapping[str, Any] | None:
        return next((report for report in self.reports if report.get("status") == status), None)


def code_passes_tests(sample: Sample) -> RewardResult:
    """1 if the program in the response passes all tests in metadata["tests"], otherwise 0. See
    make_code_reward.
    """
    return _reward_code(
        sample, key="tests", partial=False, limits=DEFAULT_LIMITS, namespaces=True, import_paths=()
    )


def make_code_reward(
    *,
    key: str = "tests",
    partial: bool = False,
    limits: Limits = DEFAULT_LIMITS,
    require: Sequence[str] = (),
    namespaces: bool = True,
    import_paths: Sequence[str] = (),
) -> Callable[[Sample], RewardResult]:
    """A reward of 1 if all tests in metadata[key] pass, otherwise 0; with `partial` the fraction that pass.

    The tests are Python source or a list of sources (assert statements, or a `check(candidate)` as in
    HumanEval; each runs after the response in a fresh interpreter), or a list of {"input": standard input,
    "output": expected standard output}, compared here, white space at the ends of lines left out.
    metadata["entry_point"], where it is there, names what the response must define; the tests know it as
    `candidate` too. Parts: `passed`, the fraction of tests, and `compiled`. The note says how the first
    failing test failed and which isolation there was. After a test that took too long the others are not run
    and count as failed. Code that hangs, exits early or breaks a limit has failed its test. That is a reward;
    but the child not starting raises UserFunctionError, and tests that are missing or do not parse raise
    DataError.

    `require` names fields of Isolation without which nothing is run. `import_paths` are directories that the
    code may read and import from; otherwise it has the standard library. `namespaces=False` leaves them out.
    Raises ConfigError for a bad option or isolation that is not to be had.
    """
    _check_options(limits, require, import_paths)
    missing = (
        [name for name in describe_isolation(namespaces=namespaces).missing() if name in require]
        if require
        else []
    )
    if missing:
        raise ConfigError(
            f"require={list(require)}: this host gives the code no isolation of {', '.join(missing)}; run as"
            " root or allow user namespaces (sysctl kernel.unprivileged_userns_clone=1, or a container that"
            " permits unshare and mount), or take them out of require"
        )

    def code_reward(sample: Sample) -> RewardResult:
        return _reward_code(
            sample,
            key=key,
            partial=partial,
            limits=limits,
            namespaces=namespaces,
            import_paths=tuple(import_paths),
        )

    return code_reward


@cache
def describe_isolation(*, namespaces: bool = True) -> Isolation:
    """What this host lets this user isolate, found out by a child without code. Raises UserFunctionError if a
    child does not start.
    """
    with ExitStack() as stack:
        directory = stack.enter_context(_temporary_directory())
        end = _run_child(_request(None, DEFAULT_LIMITS, namespaces=namespaces), "", DEFAULT_LIMITS, directory)
    return Isolation(**_started(end))


def extract_code(response: str) -> str:
    """The last fenced block marked as Python; if there is none the last fenced block without a language; else
    the whole response.

    A block that is not closed ends with the response.
    """
    blocks = [(language.lower(), code) for language, code in FENCED.findall(response)]
    python = [code for language, code in blocks if language in PYTHON]
    bare = [code for language, code in blocks if not language]
    return (python or bare or [response])[-1]


# --- one sample ---------------------------------------------------------------------------------------------


def _reward_code(
    sample: Sample,
    *,
    key: str,
    partial: bool,
    limits: Limits,
    namespaces: bool,
    import_paths: tuple[str, ...],
) -> RewardResult:
    cases = _read_cases(sample, key)
    entry_point = sample.metadata.get("entry_point")
    if entry_point is not None and not (isinstance(entry_point, str) and entry_point.isidentifier()):
        raise DataError(
            f"sample {sample.id}: metadata['entry_point'] is {entry_point!r}; it must be the name of a"
            " function"
        )
    isolation = describe_isolation(namespaces=namespaces)
    code = extract_code(sample.response)
    outcomes: list[Outcome] = []
    for case in cases:
        request = _request(
            code,
            limits,
            namespaces=namespaces,
            test=case.source,
            entry_point=entry_point,
            import_paths=import_paths,
            expected=asdict(isolation),
        )
        outcomes.append(_run_case(request, case, limits, isolation, sample))
        if outcomes[-1].timed_out or not outcomes[-1].compiled:
            break
    passed = sum(outcome.passed for outcome in outcomes)
    compiled = float(outcomes[0].compiled)
    reward = passed / len(cases) if partial else float(passed == len(cases))
    return RewardResult(
        reward, {"passed": passed / len(cases), "compiled": compiled}, _note(outcomes, len(cases), isolation)
    )


def _run_case(
    request: dict[str, Any], case: Case, limits: Limits, isolation: Isolation, sample: Sample
) -> Outcome:
    with ExitStack() as stack:
        directory = "/" if isolation.filesystem else stack.enter_context(_temporary_directory())
        end = _run_child(request, case.stdin, limits, directory)
    try:
        _started(end)
    except UserFunctionError as error:
        raise UserFunctionError(f"sample {sample.id}: {error}") from error
    compiled = end.report("compiled") is not None
    if end.status is None:
        return Outcome(False, compiled, end.killed_for.startswith("took"), f"it {end.killed_for}")
    failed = (
        end.report("syntax")
        or end.report("raised")
        or (end.report("exited") if case.source is not None else None)
    )
    if failed is not None:
        return Outcome(False, compiled, False, str(failed.get("what")))
    if case.source is None:
        return _judge_output(end, case, compiled)
    done = end.report("done")
    passed = (
        end.status == 0
        and done is not None
        and secrets.compare_digest(str(done.get("nonce")), request["nonce"])
    )
    return Outcome(
        passed, compiled, False, "" if passed else f"it ended with status {end.status} before the test had"
    )


def _judge_output(end: ChildEnd, case: Case, compiled: bool) -> Outcome:
    if end.status != 0:
        return Outcome(False, compiled, False, f"it ended with status {end.status}")
    printed = end.stdout.decode(errors="replace")
    passed = _lines(printed) == _lines(case.stdout)
    return Outcome(passed, compiled, False, "" if passed else f"it printed {printed[:100]!r}")


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _note(outcomes: Sequence[Outcome], num_cases: int, isolation: Isolation) -> str:
    failed = next(((index, outcome) for index, outcome in enumerate(outcomes) if not outcome.passed), None)
    what = "" if failed is None else f"; test {failed[0]}: {failed[1].note}"
    there = [field.name for field in fields(isolation) if getattr(isolation, field.name)]
    return (
        f"{sum(o.passed for o in outcomes)} of {num_cases} tests passed{what}; isolated:"
        f" {', '.join(there) or 'nothing'}"
    )


def _read_cases(sample: Sample, key: str) -> list[Case]:
    tests = read_answer(sample, key)
    where = f"sample {sample.id}: metadata[{key!r}]"
    listed = list(tests) if isinstance(tests, list | tuple) else [tests]
    if not listed:
        raise DataError(f"{where} is empty; a program without tests passes nothing")
    return [
        _read_case(test, f"{where}[{index}]" if isinstance(tests, list | tuple) else where)
        for index, test in enumerate(listed)
    ]


def _read_case(test: object, where: str) -> Case:
    if (
        isinstance(test, Mapping)
        and isinstance(test.get("input"), str)
        and isinstance(test.get("output"), str)
    ):
        return Case(None, test["input"], test["output"])
    if not isinstance(test, str) or not test.strip():
        raise DataError(
            f"{where} is {str(test)[:80]!r}; a test is Python source, or a table with the texts 'input' and"
            " 'output'"
        )
    try:
        ast.parse(test)
    except (SyntaxError, ValueError) as error:
        raise DataError(f"{where} is not Python: {error}") from error
    return Case(test, "", "")


def _check_options(limits: Limits, require: Sequence[str], import_paths: Sequence[str]) -> None:
    names = [field.name for field in fields(Isolation)]
    unknown = [
        name
        for name in ([require] if isinstance(require, str) else require)
        if name not in names or isinstance(require, str)
    ]
    if unknown:
        raise ConfigError(f"require={require!r} holds {unknown[0]!r}; it is a list of {', '.join(names)}")
    for field in fields(limits):
        value = getattr(limits, field.name)
        if not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
            raise ConfigError(f"limits.{field.name}={value!r}; it must be a number above 0")
    for path in import_paths:
        if not Path(path).is_absolute() or not Path(path).is_dir():
            raise ConfigError(
                f"import_paths holds {str(path)!r}; each must be the absolute path of a directory that exists"
            )


# --- one child ----------------------------------------------------------------------------------------------


def _request(
    code: str | None,
    limits: Limits,
    *,
    namespaces: bool,
    test: str | None = None,
    entry_point: str | None = None,
    import_paths: tuple[str, ...] = (),
    expected: Mapping[str, bool] | None = None,
) -> dict[str, Any]:
    return {
        "code": code, "test": test, "entry_point": entry_point, "nonce": secrets.token_hex(16), "worker": os.getpid(),
        "namespaces": namespaces, "expected": expected, "import_paths": [str(path) for path in import_paths],
        "cpu_s": math.ceil(limits.timeout_s) + 1, "memory_bytes": int(limits.memory_bytes), "disk_bytes": int(limits.disk_bytes),
        "max_processes": int(limits.max_processes),
    }  # fmt: skip


def _temporary_directory() -> tempfile.TemporaryDirectory[str]:
    directory = tempfile.TemporaryDirectory(prefix="rollouts-code-")
    if os.geteuid() == 0:
        Path(directory.name).chmod(0o777)  # the code will run as another user
    return directory


def _run_child(request: dict[str, Any], stdin: str, limits: Limits, directory: str) -> ChildEnd:
    with ExitStack() as stack:
        request_fd, stdin_fd = (_memory_file(stack, text) for text in (json.dumps(request), stdin))
        result_fd, result_end = _pipe(stack)
        stdout_fd, stdout_end = _pipe(stack)
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-X", "utf8", str(CHILD), str(request_fd), str(result_end)],
            stdin=stdin_fd, stdout=stdout_end if request["test"] is None else subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            pass_fds=(request_fd, result_end),
            env={}, cwd=directory, start_new_session=True,
        )  # fmt: skip
        stack.callback(_end_group, process)
        for fd in (result_end, stdout_end):
            os.close(fd)
        exit_fd = os.pidfd_open(process.pid)
        stack.callback(os.close, exit_fd)
        killed_for, reports, stdout = _read_until_exit(exit_fd, result_fd, stdout_fd, limits)
        status = _end_group(process)
    return ChildEnd(_parse_reports(reports), stdout, None if killed_for else status, killed_for)


def _read_until_exit(
    exit_fd: int, result_fd: int, stdout_fd: int, limits: Limits
) -> tuple[str, bytes, bytes]:
    """Why the child must be killed, empty if it has ended; its reports; its output. The time counts from its
    first report.
    """
    read: dict[int, bytearray] = {result_fd: bytearray(), stdout_fd: bytearray()}
    most = {result_fd: MAX_REPORT_BYTES, stdout_fd: int(limits.output_bytes)}
    deadline = time.monotonic() + START_S
    has_started = has_ended = False
    killed_for = ""
    with selectors.DefaultSelector() as selector:
        for fd in (exit_fd, result_fd, stdout_fd):
            selector.register(fd, selectors.EVENT_READ)
        while not has_ended and not killed_for:
            ready = {key.fd for key, _ in selector.select(max(0.0, deadline - time.monotonic()))}
            if not ready:
                killed_for = f"took longer than {limits.timeout_s:g} s"
            has_ended = exit_fd in ready
            for fd in (result_fd, stdout_fd):  # what it wrote before it ended is there
                if (fd in ready or has_ended) and not _read_available(fd, read[fd], most[fd]):
                    selector.unregister(fd) if fd in selector.get_map() else None
            if not has_started and read[result_fd]:
                has_started, deadline = True, time.monotonic() + limits.timeout_s
            if any(len(read[fd]) > most[fd] for fd in read):
                killed_for = f"wrote more than {limits.output_bytes} bytes of output"
    return killed_for, bytes(read[result_fd]), bytes(read[stdout_fd])


def _read_available(fd: int, into: bytearray, most: int) -> bool:
    """Reads what there is, little more than `most` in all. Whether more may come."""
    while len(into) <= most:
        try:
            chunk = os.read(fd, 65536)
        except BlockingIOError:
            return True
        if not chunk:
            return False
        into += chunk
    return True


def _end_group(process: subprocess.Popen[bytes]) -> int:
    """Kills what is left of the child's process group. Its exit status."""
    if process.returncode is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # not waited for yet, so that the number is still its own
    return process.wait()


def _started(end: ChildEnd) -> Mapping[str, bool]:
    """The isolation that the child reported first. Raises UserFunctionError if it did not come so far."""
    first = end.reports[0] if end.reports else {}
    if not isinstance(first.get("isolation"), Mapping):
        what = first.get("error") or end.killed_for or f"it ended with status {end.status}"
        raise UserFunctionError(
            f"the child process that runs the code ({sys.executable} {CHILD.name}) did not start: {what}"
        )
    return first["isolation"]


def _parse_reports(lines: bytes) -> tuple[Mapping[str, Any], ...]:
    """The lines that are JSON objects; the code can write here too, and what it writes is no error."""
    reports: list[Mapping[str, Any]] = []
    for line in lines.splitlines():
        with suppress(ValueError, RecursionError):
            report = json.loads(line)
            reports += [report] if isinstance(report, dict) else []
    return tuple(reports)


def _memory_file(stack: ExitStack, text: str) -> int:
    fd = os.memfd_create("rollouts-code", 0)
    stack.callback(os.close, fd)
    with os.fdopen(fd, "wb", closefd=False) as file:
        file.write(text.encode(errors="surrogatepass"))
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _pipe(stack: ExitStack) -> tuple[int, int]:
    read_end, write_end = os.pipe()
    stack.callback(os.close, read_end)
    os.set_blocking(read_end, False)
    return read_end, write_end
