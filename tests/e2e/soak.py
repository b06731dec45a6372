"""Kills short runs at every crash point and at random instants, and writes what came of it.

python -m tests.e2e.soak [--instants 200] [--seed 0] [--jobs sft rl …] [--out FILE]
"""

import argparse
import datetime as dt
import os
import platform
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.harness import read_cpu_name
from tests import ROOT
from tests.e2e.kill_jobs import BOTH, JOBS, RL, SFT
from tests.support.kill_harness import open_kill_harness

RESULTS = ROOT / "benchmarks/results"
THOROUGH = "the first, middle and last time that it is reached; twice running"
ONCE = "in the middle of the times that it is reached"
FRESH_EVERY = 10  # one instant in so many is of a process that imports everything anew
RANK_SHARE = 10  # a job on ranks gets one instant for so many of all others


REPORT = """# Soak, {date}

{machine}, Python {python}, torch {torch}. `make soak`, seed {seed}, {minutes:.0f} minutes: \
{kills} SIGKILLs, {violations} violations.

A run is killed at a crash point ({points}; while it resumes), or at random
instants, resumed until it is finished, and compared with the run that nobody killed: rows, weights, \
optimizer and loop state bit for bit,
one row for each step, no committed step lost or computed again, every prompt accounted for, no process or \
temporary file left.
Of two ranks one is killed, at a point of its own or an instant, and the other has to end within 10 s.

| job | unbroken, s | crash points | runs cut at points | kills | runs cut at instants | kills | violations |
|---|---|---|---|---|---|---|---|
"""


@dataclass(slots=True)
class Tally:
    """What came of the runs of one job."""

    name: str
    wall_s: float = 0.0  # of the run that nobody killed
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def add(self, kind, outcome, cuts):
        self.counts[f"{kind} runs"] += 1
        self.counts[f"{kind} kills"] += outcome.kills
        self.counts["attempts"] += len(outcome.attempts)
        for violation in outcome.violations:
            self.failures.append(
                f"{self.name}, {outcome.name}, cut at {', '.join(map(str, cuts))}: {violation}"
            )
        print("x" if outcome.violations else ".", end="", flush=True)


def soak_points(harness, tally, *, once):
    plan = harness.plan_points(once=once)
    for name, cuts in plan.items():
        tally.add("point", harness.kill(name, cuts), cuts)
    tally.counts["points"] = len(
        {cut.point.partition(":")[0] for cuts in plan.values() for cut in cuts if cut.point}
    )


def soak_instants(harness, tally, *, kills, seed):
    """At least `kills` runs that a random instant hit. A draw after the end of its run kills nothing and does
    not count.
    """
    while tally.counts["instant kills"] < kills:
        fresh = seed % FRESH_EVERY == FRESH_EVERY - 1 and harness.job.ranks == 1
        cuts = harness.draw_cuts(seed, fresh=fresh)
        tally.add("instant", harness.kill(f"seed-{seed}", cuts), cuts)
        seed += 1


def write_report(path, tallies, *, seed, wall_s, once):
    """One row a job, then every violation."""
    kills = sum(tally.counts["point kills"] + tally.counts["instant kills"] for tally in tallies)
    failures = [failure for tally in tallies for failure in tally.failures]
    lines = REPORT.format(
        date=dt.date.today(),
        machine=f"{read_cpu_name()}, {os.cpu_count()} cores",
        python=platform.python_version(),
        torch=torch.__version__,
        seed=seed,
        minutes=wall_s / 60,
        kills=kills,
        violations=len(failures),
        points=ONCE if once else THOROUGH,
    ).splitlines()
    for tally in tallies:
        count = tally.counts
        cells = (
            count["points"],
            count["point runs"],
            count["point kills"],
            count["instant runs"],
            count["instant kills"],
            len(tally.failures),
        )
        lines.append(f"| {tally.name} | {tally.wall_s:.1f} | " + " | ".join(map(str, cells)) + " |")
    lines += ["", *(f"- {failure}" for failure in failures)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines).rstrip() + "\n", "utf-8")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--instants",
        type=int,
        default=200,
        help="kills at random instants, over SFT, RL and both; a tenth of that on ranks",
    )
    parser.add_argument("--seed", type=int, default=0, help="the first; they count up from there")
    parser.add_argument(
        "--jobs", nargs="*", default=[job.name for job in JOBS], choices=[job.name for job in JOBS]
    )
    parser.add_argument(
        "--once",
        action="store_true",
        help="kill at each point in the middle of the run only: a quarter of the time",
    )
    parser.add_argument("--out", type=Path, default=RESULTS / f"soak-{dt.date.today().isoformat()}.md")
    options = parser.parse_args()
    jobs = [job for job in JOBS if job.name in options.jobs]
    shared = [job for job in jobs if job in (SFT, RL, BOTH)]
    started, tallies = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="rollouts-soak-") as folder:
        for number, job in enumerate(jobs):
            tally = Tally(job.name)
            tallies.append(tally)
            with open_kill_harness(job, Path(folder) / f"job-{number}") as harness:
                tally.wall_s = harness.wall_s
                soak_points(harness, tally, once=options.once)
                if job in shared:
                    soak_instants(
                        harness, tally, kills=-(-options.instants // len(shared)), seed=options.seed
                    )
                if job.ranks > 1:
                    soak_instants(harness, tally, kills=-(-options.instants // RANK_SHARE), seed=options.seed)
            print(f" {job.name}")
            write_report(
                options.out, tallies, seed=options.seed, wall_s=time.monotonic() - started, once=options.once
            )
    failures = [failure for tally in tallies for failure in tally.failures]
    print("\n".join([*failures, f"{options.out} has the result"]))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
