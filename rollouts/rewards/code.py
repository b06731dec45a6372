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
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from rollouts.errors import ConfigError, DataError, UserFunctionError
from rollouts.processes.program import run_program
from rollouts.rewards.exact import read_answer
from rollouts.types import RewardResult, Sample

CHILD = Path(__file__).with_name("code_child.py")
FENCED = re.compile(r"^[ \t]*```[ \t]*([A-Za-z0-9]*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
PYTHON = ("python", "python3", "py")
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
    """What a child left: `status` is its exit status; None if it broke a limit, which `note` names."""

    reports: tuple[Mapping[str, Any], ...]
    stdout: bytes
    status: int | None
    note: str

    def report(self, status: str) -> Mapping[str, Any] | None:
        return next((report for report in self.reports if report.get("status") == status), None)


def code_passes_tests(sample: Sample) -> RewardResult:
    """1 if the program in the response passes all tests in metadata["tests"], otherwise 0. See
    make_code_reward.
    """
    return make_code_reward()(sample)


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
    missing = [name for name in require if not getattr(describe_isolation(namespaces=namespaces), name)]
    if missing:
        raise ConfigError(
            f"require={list(require)}: this host gives the code no isolation of {', '.join(missing)}; run as"
            " root or allow user namespaces (sysctl kernel.unprivileged_userns_clone=1, or a container that"
            " permits unshare and mount), or take them out of require"
        )

    def code_reward(sample: Sample) -> RewardResult:
        cases = _read_cases(sample, key)
        entry_point = sample.metadata.get("entry_point")
        if entry_point is not None and not (isinstance(entry_point, str) and entry_point.isidentifier()):
            where = f"sample {sample.id}: metadata['entry_point']"
            raise DataError(f"{where} is {entry_point!r}; it must be the name of a function")
        isolation = describe_isolation(namespaces=namespaces)
        request = {
            "code": extract_code(sample.response),
            "entry_point": entry_point,
            "import_paths": [str(path) for path in import_paths],
            "expected": asdict(isolation),
        }
        outcomes: list[Outcome] = []
        for case in cases:
            end = _run_child(request, case, limits, namespaces=namespaces, where=f"sample {sample.id}: ")
            outcomes.append(_judge(end, case))
            if outcomes[-1].timed_out or not outcomes[-1].compiled:
                break
        passed = sum(outcome.passed for outcome in outcomes)
        reward = passed / len(cases) if partial else float(passed == len(cases))
        parts = {"passed": passed / len(cases), "compiled": float(outcomes[0].compiled)}
        return RewardResult(reward, parts, _note(outcomes, len(cases), isolation))

    return code_reward


def _note(outcomes: Sequence[Outcome], num_cases: int, isolation: Isolation) -> str:
    failed = next((f"; test {at}: {case.note}" for at, case in enumerate(outcomes) if not case.passed), "")
    there = ", ".join(name for name, is_there in asdict(isolation).items() if is_there) or "nothing"
    passed = sum(outcome.passed for outcome in outcomes)
    return f"{passed} of {num_cases} tests passed{failed}; isolated: {there}"


@cache
def describe_isolation(*, namespaces: bool = True) -> Isolation:
    """What this host lets this user isolate, found out by a child without code. Raises UserFunctionError if a
    child does not start.
    """
    request = {"code": None, "import_paths": [], "expected": None}
    end = _run_child(request, Case("", "", ""), DEFAULT_LIMITS, namespaces=namespaces)
    return Isolation(**end.reports[0]["isolation"])


def extract_code(response: str) -> str:
    """The last fenced block marked as Python; if there is none the last fenced block without a language; else
    the whole response.

    A block that is not closed ends with the response.
    """
    blocks = [(language.lower(), code) for language, code in FENCED.findall(response)]
    python = [code for language, code in blocks if language in PYTHON]
    bare = [code for language, code in blocks if not language]
    return (python or bare or [response])[-1]


def _judge(end: ChildEnd, case: Case) -> Outcome:
    """What became of a test whose child has ended."""
    compiled = end.report("compiled") is not None
    if end.status is None:
        return Outcome(False, compiled, end.note.startswith("it took"), end.note)
    failed = (
        end.report("syntax")
        or end.report("raised")
        or (end.report("exited") if case.source is not None else None)
    )
    if failed is not None:
        return Outcome(False, compiled, False, str(failed.get("what")))
    if case.source is not None:
        done = end.report("done")
        passed = end.status == 0 and done is not None
        note = f"it ended with status {end.status} before the test had"
    elif end.status != 0:
        passed, note = False, f"it ended with status {end.status}"
    else:
        printed = end.stdout.decode(errors="replace")
        passed, note = _lines(printed) == _lines(case.stdout), f"it printed {printed[:100]!r}"
    return Outcome(passed, compiled, False, "" if passed else note)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


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
    if isinstance(require, str) or not set(require) <= set(names):
        raise ConfigError(f"require={require!r}; it is a list of {', '.join(names)}")
    for name, value in asdict(limits).items():
        if not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
            raise ConfigError(f"limits.{name}={value!r}; it must be a number above 0")
    for path in import_paths:
        if not Path(path).is_absolute() or not Path(path).is_dir():
            raise ConfigError(
                f"import_paths holds {str(path)!r}; each must be the absolute path of a directory that exists"
            )


def _run_child(
    request: Mapping[str, Any], case: Case, limits: Limits, *, namespaces: bool, where: str = ""
) -> ChildEnd:
    """What a child made of one test. Raises UserFunctionError if it did not start."""
    nonce = secrets.token_hex(16)
    message = {
        **request,
        **{name: math.ceil(value) for name, value in asdict(limits).items()},
        "test": case.source,
        "nonce": nonce,
        "worker": os.getpid(),
        "namespaces": namespaces,
    }
    has_own_root = request["expected"] is not None and request["expected"]["filesystem"]
    with nullcontext("/") if has_own_root else tempfile.TemporaryDirectory(prefix="rollouts-code-") as path:
        if os.geteuid() == 0 and not has_own_root:
            Path(path).chmod(0o777)  # the code will run as another user
        status, reports, stdout = run_program(
            [sys.executable, "-I", "-S", "-X", "utf8", str(CHILD)],
            request=json.dumps(message).encode(),
            stdin=case.stdin.encode(errors="surrogatepass"),
            cwd=path,
            start_s=START_S,
            timeout_s=limits.timeout_s,
            output_bytes=math.ceil(limits.output_bytes) if case.source is None else 0,
        )
    note = f"it ended with status {status}"
    if status is None:
        note = f"it took longer than {limits.timeout_s:g} s" if reports else "it does not report anything"
    elif len(stdout) > limits.output_bytes:
        status, note = None, f"it wrote more than {limits.output_bytes} bytes of output"
    parsed: list[Mapping[str, Any]] = []
    for line in reports.splitlines():
        with suppress(ValueError, RecursionError):  # the code can write here too
            report = json.loads(line)
            if isinstance(report, dict) and (report.get("status") != "done" or report.get("nonce") == nonce):
                parsed.append(report)
    first = parsed[0] if parsed else {}
    if not isinstance(first.get("isolation"), Mapping):
        raise UserFunctionError(
            f"{where}the child process that runs the code ({sys.executable} {CHILD.name}) did not start:"
            f" {first.get('error') or note}"
        )
    return ChildEnd(tuple(parsed), stdout, status, note)
