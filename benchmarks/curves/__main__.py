"""Whether each algorithm learns: real runs of `integration_training/train.py`, one after the other, and a bar
that each must clear.

    python -m benchmarks.curves [NAME ...] [--report]

Without names, every job of benchmarks/curves/jobs.toml that has `always`; a name is a job's, or JOB-SEED for
one of its seeds. Runs go to runs/curves/NAME, what they measured to benchmarks/results/curves/NAME.json, and
from all files there docs/curves.md and its pictures are written anew, so that the results of jobs that did
not run now stay. --report trains nothing and only does the last part. Exit status 1 if a run failed or a bar
is missed.
"""

import argparse
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.curves.bars import Bar, Job, Verdict, judge, load_jobs, read_values
from benchmarks.curves.report import write_report
from benchmarks.harness import read_cpu_name
from rollouts.inspect.record import Record, find_checkpoints, open_record
from rollouts.run_dir import RunDir

ROOT = (
    Path(__file__).resolve().parents[2]
)  # the working directory, so that commands read as a user would write them
FOLDER = Path("benchmarks/curves")
DEMOS = Path("integration_training/configs")
RESULTS = Path("benchmarks/results/curves")
RUNS = Path("runs/curves")
LIMIT_S = 3600.0  # of one run
DIGITS = 5  # significant ones of the values that are kept


def find_start(root: Path) -> Path | None:
    """The newest checkpoint of the last stage of a finished run at `root`; None if it has not finished."""
    if not RunDir(root).summary.exists():
        return None
    with open_record(root, points=True) as record:
        stage = record.rows("FROM stages")[-1]["stage"]
    return RunDir(root).checkpoint(
        stage, max(step for name, step in find_checkpoints(RunDir(root)) if name == stage)
    )


def make_command(job: Job, name: str, start: Path | None) -> list[str]:
    """The command line after `python` of the job's run `name`."""
    config = next(path for path in (FOLDER / job.config, DEMOS / job.config) if path.exists())
    model = ["--model.name", str(start)] if start else []
    seed = ["--seed", str(job.seeds[job.run_names().index(name)])] if len(job.seeds) > 1 else []
    return [
        "integration_training/train.py",
        "--config",
        str(config),
        "--mode",
        job.mode,
        "--output.dir",
        str(RUNS / name),
        *model,
        *seed,
        *job.flags,
    ]


def run_job(jobs: Mapping[str, Job], job: Job, name: str) -> bool:
    """Makes the job's run `name`, and first the run that it starts from if there is none. False, and the old
    result stays, if a run failed.
    """
    start = find_start(RUNS / job.start) if job.start else None
    if job.start and start is None:
        return run_job(jobs, jobs[job.start], job.start) and run_job(jobs, job, name)
    command, root, log, load = (
        make_command(job, name, start),
        RUNS / name,
        RUNS / f"{name}.log",
        os.getloadavg()[0],
    )
    print(f"== {name}: {job.mode}", flush=True)
    shutil.rmtree(root, ignore_errors=True)
    RUNS.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as output:
        program = ["nice", "-n", "5", sys.executable, *command]
        ended = subprocess.run(program, stdout=output, stderr=subprocess.STDOUT, timeout=LIMIT_S, check=False)
    if ended.returncode != 0:
        print(f"{name} ended with {ended.returncode}; {log} says why", file=sys.stderr)
        return False
    with open_record(root, points=True) as record:
        curves = {bar.metric: read_values(record, bar) for bar in job.bars}
    verdicts = [judge(bar, curves[bar.metric][1], read_others(jobs, bar)) for bar in job.bars]
    for verdict in verdicts:
        print(
            f"   {'met   ' if verdict.met else 'MISSED'} {verdict.bar}: {verdict.first:.4g} ->"
            f" {verdict.last:.4g}",
            flush=True,
        )
    result = describe_run(job, command, record, load) | make_values(verdicts, curves)
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(result) + "\n", encoding="utf-8")
    return True


def read_others(jobs: Mapping[str, Job], bar: Bar) -> list[list[float]]:
    """The values of the bar's metric in each run of the job that it compares with, from their results."""
    paths = [RESULTS / f"{name}.json" for name in jobs[bar.of].run_names()] if bar.of else []
    return [
        json.loads(path.read_text(encoding="utf-8"))["curves"][bar.metric]["values"]
        for path in paths
        if path.exists()
    ]


def describe_run(job: Job, command: Sequence[str], record: Record, load: float) -> dict[str, Any]:
    """What was run, when and where."""
    assert record.summary, "a run that ended with 0 has a summary"
    return {
        "job": job.name,
        "command": ["python", *command],
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "machine": f"{len(os.sched_getaffinity(0))} cores of {read_cpu_name()}",
        "load": round(load, 1),
        "wall_s": record.summary["wall_s"],
        "versions": {"python": platform.python_version(), **record.summary["versions"]},
    }


def make_values(
    verdicts: Sequence[Verdict], curves: Mapping[str, tuple[list[int], list[float]]]
) -> dict[str, Any]:
    """Verdicts, and the curves that they judge, as JSON."""
    return {
        "verdicts": [
            {key: keep_digits(value) for key, value in asdict(verdict).items()} for verdict in verdicts
        ],
        "curves": {
            metric: {"steps": steps, "values": [keep_digits(value) for value in values]}
            for metric, (steps, values) in curves.items()
        },
    }


def keep_digits(value: Any) -> Any:
    """A finite float with DIGITS significant digits; None for one that is not finite, which JSON cannot hold;
    anything else as it is.
    """
    if not isinstance(value, float):
        return value
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None


def main() -> int:
    os.chdir(ROOT)
    jobs = load_jobs(FOLDER / "jobs.toml")
    run_of = {name: job for job in jobs.values() for name in job.run_names()}
    parser = argparse.ArgumentParser(description="Train with every algorithm and see whether it learns.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(jobs)}, or JOB-SEED")
    parser.add_argument(
        "--report", action="store_true", help="run nothing; write the page and its pictures again"
    )
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in jobs and name not in run_of]
    if unknown:
        parser.error(f"there is no job {unknown[0]!r}; there are {', '.join(jobs)}")
    asked = [*arguments.names] or [job.name for job in jobs.values() if job.always]
    chosen = (
        []
        if arguments.report
        else [name for each in asked for name in (jobs[each].run_names() if each in jobs else [each])]
    )
    finished = [run_job(jobs, run_of[name], name) for name in dict.fromkeys(chosen)]
    return 0 if write_report(jobs, RESULTS, Path("docs")) and all(finished) else 1


if __name__ == "__main__":
    sys.exit(main())
