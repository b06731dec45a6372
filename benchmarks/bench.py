"""Runs benchmarks one after the other, keeps what they found, and writes docs/benchmarks.md.

    python -m benchmarks.bench [NAME ...] [--args="--quick"] [--render] [--add FILE]

Without names, the CPU set. Each runs in a process of its own; one that fails does not stop the others, and
keeps its earlier result. The last line of a benchmark's output goes into benchmarks/results/bench-DATE.json,
beside the newest results of the others, and from there into the page, with the notes of benchmarks/notes.md.
Results with `--quick` among `--args` are for a look: they and their page go to runs/bench. --render runs
nothing and writes the page again. --add takes the output of a benchmark that ran elsewhere, such as h200.
Exit status 1 if a benchmark failed or missed a target.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.bench_page import Results, write_page
from benchmarks.harness import describe_machine, make_parser, read_versions

ROOT = (
    Path(__file__).resolve().parents[1]
)  # the working directory, so that commands read as a user would write them
CPU_SET = (
    "packing",
    "logprob_head",
    "train_step",
    "exact_kl",
    "prefix_share",
    "engine_cpu",
    "weight_sync",
    "async_overlap",
    "driver_scale",
    "agents",
    "e2e_reward",
    "lora",
    "service",
    "serve_beside",
)
ON_REQUEST = (
    "http_client",
    "rollout_tail",
    "reward_workers",
    "ranks",
    "allocator",
    "viewer",
    "record_cost",
    "memory",
    "long_context",
    "roofline",
    "startup",
    "h200_tiny",
    "h200",
)
RESULTS = Path("benchmarks/results")
NOTES = Path("benchmarks/notes.md")
PAGE = Path("docs/benchmarks.md")
RUNS = Path("runs/bench")  # logs, and results of quick runs
LIMIT_S = 3600.0  # of one benchmark


def make_arguments(name: str, args: Sequence[str]) -> list[str]:
    """The command line after `python` of a benchmark."""
    module, own = ("h200", ["--tiny"]) if name == "h200_tiny" else (name, [])
    return ["-m", f"benchmarks.{module}", *own, *args]


def parse_result(text: str) -> dict[str, Any] | None:
    """The object that a benchmark's output ends with, in the form of harness.finish; None if it ends with
    none.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    try:
        found = json.loads(lines[-1])
    except (IndexError, ValueError):
        return None
    is_result = isinstance(found, dict) and isinstance(found.get("met"), dict)
    return found if is_result else None


def run_benchmark(name: str, args: Sequence[str]) -> dict[str, Any] | None:
    """What the benchmark found, with when and how it ran; None if it found nothing. Its output goes to
    runs/bench/NAME.log, and here when it ends.
    """
    arguments, log = make_arguments(name, args), RUNS / f"{name}.log"
    RUNS.mkdir(parents=True, exist_ok=True)
    print(f"== python {shlex.join(arguments)}   (log: {log})", flush=True)
    began = time.monotonic()
    with log.open("w", encoding="utf-8") as output:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}  # the log is there to be watched
        child = subprocess.Popen(
            [sys.executable, *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            status: int | str = child.wait(LIMIT_S)
        except (
            BaseException
        ) as error:  # a benchmark's servers and children end with it, also when this is interrupted
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            status = f"no end after {LIMIT_S:.0f} s"
    text = log.read_text(encoding="utf-8", errors="replace")
    print(text, flush=True)
    found = parse_result(text)
    if found is None or isinstance(status, str):
        print(f"{name} FAILED ({status}): {log}", flush=True)
        return None
    here = {"machine": describe_machine(), "versions": read_versions()}
    return describe_run({**here, **found}, arguments, exit_status=status, wall_s=time.monotonic() - began)


def describe_run(
    found: Mapping[str, Any], arguments: Sequence[str], *, exit_status: int, wall_s: float | None
) -> dict[str, Any]:
    """A result with when and how it came about."""
    return {
        **found,
        "command": ["python", *arguments],
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "commit": read_commit(),
        "exit_status": exit_status,
        "wall_s": None if wall_s is None else round(wall_s, 1),
    }


def read_commit() -> str | None:
    """The commit that is checked out; None outside of a checkout."""
    try:
        asked = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return None
    return asked.stdout.strip() or None if asked.returncode == 0 else None


def read_results(folder: Path) -> dict[str, dict[str, Any]]:
    """The newest file's results, by name of the benchmark; empty where there is none."""
    files = sorted(folder.glob("bench-*.json"))
    return json.loads(files[-1].read_text(encoding="utf-8")) if files else {}


def write_results(folder: Path, results: Results, *, date: str) -> Path:
    """The file of the day."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"bench-{date}.json"
    path.write_text(json.dumps(results, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return path


def main() -> int:
    os.chdir(ROOT)
    parser = make_parser(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join((*CPU_SET, *ON_REQUEST))}")
    parser.add_argument("--args", default="", help="passed on to each benchmark, as one word: --args=--quick")
    parser.add_argument("--render", action="store_true", help="run nothing")
    parser.add_argument("--add", type=Path, metavar="FILE", help="output of a benchmark that ran elsewhere")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in (*CPU_SET, *ON_REQUEST)]
    if unknown:
        parser.error(f"there is no benchmark {unknown[0]!r}; there are {', '.join((*CPU_SET, *ON_REQUEST))}")
    args = shlex.split(arguments.args)
    signal.signal(
        signal.SIGTERM, lambda number, frame: sys.exit(128 + number)
    )  # by an exception, so that run_benchmark ends its child
    folder, page = (RUNS, RUNS / "benchmarks.md") if "--quick" in args else (RESULTS, PAGE)
    new: dict[str, dict[str, Any]] = {}
    failed: list[str] = []
    if arguments.add is not None:
        found = parse_result(arguments.add.read_text(encoding="utf-8", errors="replace"))
        if found is None or not found["benchmark"]:
            parser.error(f"--add {arguments.add}: its last line is no JSON object of a benchmark")
        name = str(found["benchmark"])
        new[name] = describe_run(
            found, make_arguments(name, []), exit_status=int(False in found["met"].values()), wall_s=None
        )
    for name in () if arguments.render or arguments.add else arguments.names or CPU_SET:
        result = run_benchmark(name, args)
        if result is None:
            failed.append(name)
            continue
        new[name] = result
        write_results(folder, {**read_results(folder), **new}, date=time.strftime("%Y-%m-%d", time.gmtime()))
    results = {**read_results(folder), **new}
    if new:
        write_results(folder, results, date=time.strftime("%Y-%m-%d", time.gmtime()))
    write_page(page, results, cpu_set=CPU_SET, others=ON_REQUEST, notes=NOTES)
    missed = [
        f"{name}: {metric}"
        for name, result in new.items()
        for metric, met in result["met"].items()
        if met is False
    ]
    for line in (*(f"failed: {name}" for name in failed), *(f"missed: {miss}" for miss in missed)):
        print(line)
    print(f"{page} is written from {len(results)} results")
    return 1 if failed or any(result["exit_status"] for result in new.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
