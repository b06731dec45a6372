"""The response is a program, and its tests decide. It runs in a child process with as little around it as the
host allows.

One child per test: its own session, limits on time, memory, disk and processes, no environment, no
descriptors, and, where the kernel lets this user have them, an own empty network, file system and process
numbers (see code_child.py). Nothing of it is left when the reward returns. Blocking, and without threads: it
belongs into a reward's worker process.
"""

import ast
import json
import math
import os
import re
import secrets
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from rollouts.errors import ConfigError, DataError, UserFunctionError, require
from rollouts.processes.program import run_program
from rollouts.rewards.check import PlainReward
from rollouts.rewards.exact import read_answer
from rollouts.types import Fields, RewardResult, Sample

CHILD = Path(__file__).with_name("code_child.py")
FENCED = re.compile(r"^[ \t]*```[ \t]*([A-Za-z0-9]*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
PYTHON = ("python", "python3", "py")
LATE = "it took longer than"


class Isolation(NamedTuple):
    """What the code cannot reach or use up, each True where the host allowed it."""

    network: bool  # it has none
    # it sees Python's libraries, read-only, and an empty directory in memory; nothing else, no /proc
    filesystem: bool
    processes: bool  # it can signal no process but its own and leaves none behind
    memory: bool  # its address space is limited
    user: bool  # it is not the worker's user, or sees none of that user's files
    privileges: bool  # it has no capabilities and can gain none


class Limits(NamedTuple):
    """What one test may use."""

    timeout_s: float = 10.0  # wall clock; each process may use a second more of CPU time
    memory_bytes: int = 512 << 20  # address space of each process
    disk_bytes: int = 16 << 20  # of all files it writes
    output_bytes: int = 1 << 20  # of standard output
    max_processes: int = 16  # threads count too; none where they could not all be ended


DEFAULT_LIMITS = Limits()


Test = str | Mapping[str, str]  # a source that runs after the response, or a program's "input" and "output"


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
) -> PlainReward:
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
    if missing := [name for name in require if not getattr(describe_isolation(namespaces=namespaces), name)]:
        raise ConfigError(
            f"require={list(require)}: this host gives the code no isolation of {', '.join(missing)}; run as"
            " root or allow user namespaces (sysctl kernel.unprivileged_userns_clone=1, or a container that"
            " permits unshare and mount), or take them out of require"
        )

    def code_reward(sample: Sample) -> RewardResult:
        tests, isolation = _read_tests(sample, key), describe_isolation(namespaces=namespaces)._asdict()
        request = {
            "code": extract_code(sample.response),
            "entry_point": _read_entry_point(sample),
            "import_paths": list(map(str, import_paths)),
            "expected": isolation,
            "namespaces": namespaces,
        }
        notes, compiled = list[str](), True  # why each test failed, "" where it passed
        for test in tests:
            reports, note = _run_child(request, test, limits, where=f"sample {sample.id}: ")
            notes.append(note)
            compiled &= "compiled" in reports
            if not compiled or note.startswith(LATE):
                break
        passed = notes.count("")
        failed = next((f"; test {at}: {note}" for at, note in enumerate(notes) if note), "")
        there = ", ".join(name for name, is_there in isolation.items() if is_there) or "nothing"
        return RewardResult(
            passed / len(tests) if partial else float(passed == len(tests)),
            {"passed": passed / len(tests), "compiled": float(compiled)},
            f"{passed} of {len(tests)} tests passed{failed}; isolated: {there}",
        )

    return code_reward


@cache
def describe_isolation(*, namespaces: bool = True) -> Isolation:
    """What this host lets this user isolate, found out by a child without code. Raises UserFunctionError if a
    child does not start.
    """
    request = {"code": None, "import_paths": [], "expected": None, "namespaces": namespaces}
    reports, _ = _run_child(request, "", DEFAULT_LIMITS)
    return Isolation(**reports["isolation"])


def extract_code(response: str) -> str:
    """The last fenced block marked as Python; if there is none the last fenced block without a language; else
    the whole response.

    A block that is not closed ends with the response.
    """
    blocks = [(language.lower(), code) for language, code in FENCED.findall(response)]
    python = [code for language, code in blocks if language in PYTHON]
    return (python or [code for language, code in blocks if not language] or [response])[-1]


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _read_tests(sample: Sample, key: str) -> list[Test]:
    given = read_answer(sample, key)
    where = f"sample {sample.id}: metadata[{key!r}]"
    if given in ([], ()):
        raise DataError(f"{where} is empty; a program without tests passes nothing")
    tests: Any = given if isinstance(given, list | tuple) else [given]
    for index, test in enumerate(tests):
        problem, rule = "", "a test is Python source, or a table with the texts 'input' and 'output'"
        match test:
            case {"input": str(), "output": str()}:
                pass
            case str() if test.strip():
                try:
                    ast.parse(test)
                except (SyntaxError, ValueError) as error:
                    problem = f"is not Python: {error}"
            case _:
                problem = f"is {str(test)[:80]!r}; {rule}"
        if problem:
            raise DataError(f"{where}{'' if tests == [given] else f'[{index}]'} {problem}")
    return tests


def _read_entry_point(sample: Sample) -> str | None:
    name = sample.metadata.get("entry_point")
    if name is None or (isinstance(name, str) and name.isidentifier()):
        return name
    raise DataError(
        f"sample {sample.id}: metadata['entry_point'] is {name!r}; it must be the name of a function"
    )


def _check_options(limits: Limits, required: Sequence[str], import_paths: Sequence[str]) -> None:
    require(
        not isinstance(required, str) and set(required) <= set(Isolation._fields),
        f"require={required!r}; it is a list of {', '.join(Isolation._fields)}",
    )
    for name, value in limits._asdict().items():
        require(0 < value < math.inf, f"limits.{name}={value!r}; it must be a number above 0")
    for path in map(Path, import_paths):
        require(
            path.is_absolute() and path.is_dir(),
            f"import_paths holds {str(path)!r}; each must be the absolute path of a directory that exists",
        )


def _run_child(request: Fields, test: Test, limits: Limits, *, where: str = "") -> tuple[Fields, str]:
    """What a child reported of one test, and why the test failed, "" if it passed.

    Raises UserFunctionError if the child did not start.
    """
    is_source, nonce = isinstance(test, str), secrets.token_hex(16)
    message = {
        **request,
        **{name: math.ceil(value) for name, value in limits._asdict().items()},
        "isolations": Isolation._fields,
        "test": test if is_source else None,
        "nonce": nonce,
        "worker": os.getpid(),
    }
    has_own_root = request["expected"] is not None and request["expected"]["filesystem"]
    with nullcontext("/") if has_own_root else tempfile.TemporaryDirectory(prefix="rollouts-code-") as path:
        if os.geteuid() == 0 and not has_own_root:
            Path(path).chmod(0o777)  # the code will run as another user
        status, lines, stdout = run_program(
            [sys.executable, "-I", "-S", "-X", "utf8", str(CHILD)],
            request=json.dumps(message).encode(),
            stdin=b"" if isinstance(test, str) else test["input"].encode(errors="surrogatepass"),
            cwd=path,
            timeout_s=limits.timeout_s,
            output_bytes=0 if is_source else math.ceil(limits.output_bytes),
        )
    reports = {}
    for line in lines.splitlines():
        with suppress(ValueError, RecursionError, TypeError):  # the code can write here too
            reports = {**json.loads(line), **reports}
    ended = f"it ended with status {status}"
    if not isinstance(reports.get("isolation"), Mapping):
        why = reports.get("error") or ("it does not report anything" if status is None else ended)
        raise UserFunctionError(
            f"{where}the child process that runs the code ({sys.executable} {CHILD.name}) did not start:"
            f" {why}"
        )
    printed = stdout.decode(errors="replace")
    if status is None:
        note = f"{LATE} {limits.timeout_s:g} s"
    elif len(stdout) > limits.output_bytes:
        note = f"it wrote more than {limits.output_bytes} bytes of output"
    elif "failed" in reports:
        note = str(reports["failed"]) or "it failed"  # the code can write an empty reason
    elif isinstance(test, str):
        passed = status == 0 and reports.get("done") == nonce
        note = "" if passed else f"{ended} before the test had"
    elif status != 0:
        note = ended
    else:
        note = "" if _lines(printed) == _lines(test["output"]) else f"it printed {printed[:100]!r}"
    return reports, note
