"""Whether each algorithm learns: real runs of `integration_training/train.py`, one after the other, and a bar that each must clear.

    python -m benchmarks.curves [NAME ...] [--report]

Without names, every job of benchmarks/curves/jobs.toml that has `always`; a name is a job's, or JOB-SEED for one of its seeds. Runs go to runs/curves/NAME,
what they measured to benchmarks/results/curves/NAME.json, and from all of these files docs/curves.md and docs/curves/GROUP.png are written anew,
so that results of jobs that did not run now stay. --report trains nothing and only does the last part. Exit status 1 if a run failed or a bar is
missed.
"""

from __future__ import annotations

IMPORTS

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "benchmarks" / "curves"
RESULTS = ROOT / "benchmarks" / "results" / "curves"
RUNS = Path("runs") / "curves"  # below ROOT; as a user would write it
REPORT = ROOT / "docs" / "curves.md"
PICTURES = ROOT / "docs" / "curves"
LIMIT_S = 3600.0  # of one run
DIGITS = 5  # significant ones of the values kept


def find_start(root: Path) -> Path | None:
    """The newest checkpoint of the last stage of a finished run at `root`; None if it has not finished."""
    if not RunDir(root).summary.exists():
        return None
    record = read_run(root)
    stage = record.stages[-1]
    return RunDir(root).checkpoint(stage, max(step for name, step in record.checkpoints if name == stage))


def make_command(job: Job, seed: int, name: str, start: Path | None) -> list[str]:
    """The command line after `python`, relative to the repository."""
    flags = [*job.flags, *(("--model.name", str(start)) if start else ()), *(("--seed", str(seed)) if len(job.seeds) > 1 else ())]
    config = f"benchmarks/curves/{job.config}" if (FOLDER / job.config).exists() else f"integration_training/configs/{job.config}"
    return ["integration_training/train.py", "--config", config, "--mode", job.mode, "--output.dir", str(RUNS / name), *flags]


def run_job(jobs: dict[str, Job], job: Job, name: str) -> bool:
    """Runs the job's seed called `name` and writes its result. False, and no result, if the run failed."""
    start = None
    if job.start:
        start = find_start(RUNS / job.start)
        if start is None:
            if not run_job(jobs, jobs[job.start], job.start):
                return False
            start = find_start(RUNS / job.start)
    seed = job.seeds[job.names().index(name)]
    command, root = make_command(job, seed, name, start), RUNS / name
    shutil.rmtree(root, ignore_errors=True)
    RUNS.mkdir(parents=True, exist_ok=True)
    print(f"== {name}: python {' '.join(command)}", flush=True)
    load, log = os.getloadavg()[0], RUNS / f"{name}.log"
    with log.open("w", encoding="utf-8") as output:
        ended = subprocess.run(["nice", "-n", "5", sys.executable, *command], stdout=output, stderr=subprocess.STDOUT, timeout=LIMIT_S, check=False)
    if ended.returncode != 0:
        print(f"{name} ended with {ended.returncode}; see {log}", file=sys.stderr)
        return False
    write_result(job, name, command, read_run(root), load)
    return True


def write_result(job: Job, name: str, command: Sequence[str], record: RunRecord, load: float) -> None:
    """benchmarks/results/curves/NAME.json: command, date, machine, versions, verdicts and the curves that they judge."""
    curves = {bar.metric: read_values(record, bar) for bar in job.bars}
    verdicts = [judge(bar, curves[bar.metric][1]) for bar in job.bars]
    summary = record.summary or {}
    result = {
        "job": job.name,
        "command": f"python {' '.join(command)}",
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "machine": describe_machine(),
        "load": round(load, 1),
        "wall_s": summary["wall_s"],
        "versions": {"python": platform.python_version(), **summary["versions"]},
        "verdicts": [{key: keep_digits(value) for key, value in asdict(verdict).items()} for verdict in verdicts],
        "curves": {metric: {"steps": steps, "values": [keep_digits(value) for value in values]} for metric, (steps, values) in curves.items()},
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for verdict in verdicts:
        print(f"   {'met   ' if verdict.met else 'MISSED'} {verdict.bar}: {verdict.first:.4g} -> {verdict.last:.4g} ({verdict.errors:.3g} errors)", flush=True)


def keep_digits(value: Any) -> Any:
    """A finite float with DIGITS significant digits; None for one that is not finite, which JSON cannot hold; anything else as it is."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None


def describe_machine() -> str:
    """Cores that this process may use, of which processor."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} cores of {model}"


def main() -> int:
    jobs = load_jobs(FOLDER / "jobs.toml")
    by_name = {name: job for job in jobs.values() for name in job.names()}
    parser = argparse.ArgumentParser(description="Train with every algorithm and see whether it learns.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(jobs)}, or JOB-SEED")
    parser.add_argument("--report", action="store_true", help="run nothing; write the page again")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in jobs and name not in by_name]
    if unknown:
        parser.error(f"there is no job {unknown[0]!r}; there are {', '.join(jobs)}")
    asked = [*arguments.names] or [job.name for job in jobs.values() if job.always]
    chosen = [] if arguments.report else [name for each in asked for name in (jobs[each].names() if each in jobs else [each])]
    os.chdir(ROOT)
    finished = [run_job(jobs, by_name[name], name) for name in dict.fromkeys(chosen)]
    return 0 if write_report(jobs) and all(finished) else 1


if __name__ == "__main__":
    sys.exit(main())
