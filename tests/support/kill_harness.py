"""Kills training runs with SIGKILL, starts them again with --resume until they finish, and says what was lost
or differs.

    unbroken run ─► how often each crash point is reached, how long it takes, what it leaves
    killed run   ─► attempt 1 ─ SIGKILL ─► attempt 2 --resume ─ SIGKILL ─► … ─► last attempt ─► what it leaves
                         at a crash point, or after a time drawn from a seed; of several ranks one is killed

    with open_kill_harness(Job("sft", ("--config", "tiny.toml", "--mode", "sft"), ("sft",)), Path("work")) as
    harness:
        outcome = harness.kill("a", [Cut(point="checkpoint.before_rename:2"), Cut(after_s=1.5)])
        assert not outcome.violations

A violation is a sentence. The promises: every resume succeeds; no step with a complete checkpoint is computed
again or lost; readers see one row for each step; the files of the run, all bits of its checkpoints included,
are those of the unbroken run, where the job is exact; every prompt is accounted for; the other ranks of one
that is killed are gone within seconds; no process and no temporary file outlives the last attempt. Jobs write
into directories below the given one. Linux only.
"""

import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rollouts.checkpoints.load import find_newest_checkpoint, load_trainer_state
from rollouts.crash_points import LIST_VARIABLE, POINTS
from rollouts.metrics.jsonl import newest_attempts, read_rows
from rollouts.run_dir import RunDir, parse_step
from tests.support.compare_runs import find_differences
from tests.support.fork_server import Ended, ForkServer, open_fork_server, place_ranks

PROGRAM = "integration_training.train:main"
FRESH = f"import sys; from {PROGRAM.replace(':', ' import ')}; sys.exit(main())"
IMPORTS = (
    "transformers.models.llama.modeling_llama",
    "rollouts.engines.local",
    "rollouts.backends.open",
    "rollouts.weight_sync.sync",
)
RANK_IMPORTS = ("rollouts.ranks.meet", "rollouts.backends.fsdp", "torch.distributed.rendezvous")
OTHERS_S = 10.0  # for the other ranks to end after one was killed
TAIL_CHARS = 1500  # of an attempt's output that a violation quotes
LIMIT_S = 300.0  # for one attempt


@dataclass(frozen=True, slots=True)
class Job:
    """A training command."""

    name: str
    arguments: tuple[str, ...]  # of train.py, but for --output.dir and --resume
    stages: tuple[str, ...]  # as in --mode
    imports: tuple[str, ...] = ()  # modules that it loads besides IMPORTS, such as where its rows come from
    exact: bool = True  # two runs of it give the same bits, so what a killed one leaves is compared
    ranks: int = 1  # processes that train together


@dataclass(frozen=True, slots=True)
class Cut:
    """When an attempt is killed: at a crash point, or after some seconds."""

    point: str | None = None  # name[:nth[:rank]]
    after_s: float | None = None
    rank: int = 0  # that is killed after those seconds
    optional: bool = False  # a point that need not be reached: an attempt that resumes may have less to do
    fresh: bool = False  # a process that imports everything anew, so that it can be killed while it does

    def __str__(self):
        return (self.point or f"{self.after_s:.3f} s on rank {self.rank}") + (
            " (fresh)" if self.fresh else ""
        )


UNDISTURBED = Cut()  # never


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of the program."""

    cut: Cut  # UNDISTURBED: nobody killed it
    ended: Ended
    committed: Mapping[str, int]  # by stage, the steps that were complete on disk when it began

    @property
    def was_killed(self):
        return -signal.SIGKILL in self.ended.returncodes and not self.ended.timed_out


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one run."""

    name: str
    attempts: tuple[Attempt, ...]
    violations: tuple[str, ...]

    @property
    def kills(self):
        return sum(attempt.was_killed for attempt in self.attempts)


@dataclass(slots=True)
class KillHarness:
    """Made by open_kill_harness. Blocking; one run at a time."""

    job: Job
    root: Path
    server: ForkServer
    reference: Path
    reached: Sequence[
        Mapping[str, int]
    ] = ()  # of each rank: by crash point, how often the unbroken run reaches it
    wall_s: float = 0.0  # of the unbroken run
    usual: frozenset[str] = (
        frozenset()
    )  # names that libraries leave in the temporary directory of a run that nobody killed, for the next one

    def run_unbroken(self):
        """Makes the run that others are compared with. Raises AssertionError if it breaks a promise by
        itself.
        """
        listed = [self.root / f"reached-{rank}.txt" for rank in range(self.job.ranks)]
        ended = self._start(self.reference, UNDISTURBED, resume=False, lists=listed)
        self.reached = [Counter(path.read_text().split()) if path.exists() else Counter() for path in listed]
        self.wall_s = ended.wall_s
        self.usual = frozenset(path.name for path in self._temporary.iterdir())
        violations = self._find_violations(self.reference, [Attempt(UNDISTURBED, ended, {})])
        assert not violations, violations

    def kill(self, name, cuts):
        """Kills a run by each of `cuts` in turn, lets it finish, and compares. Its directory is removed if
        there was no violation.
        """
        out = self.root / name
        assert not out.exists(), f"{out} is there already"
        attempts = []
        violations = []
        for cut in [*cuts, UNDISTURBED]:
            committed, began = read_committed(out, self.job.stages), time.time()
            attempts.append(Attempt(cut, self._start(out, cut, resume=bool(attempts)), committed))
            violations += check_others_ended(attempts[-1])
            violations += check_rows_of_attempt(out, committed, began)
            violations += check_nothing_lost(committed, read_committed(out, self.job.stages))
            if not attempts[-1].was_killed:
                break
        missed = attempts[-1].cut
        if missed.point is not None and not missed.optional:
            violations.append(f"{missed} was never reached")
        violations += self._find_violations(out, attempts)
        if not violations and self.job.exact:
            violations += find_differences(self.reference, out, stages=self.job.stages)
        if not violations:
            shutil.rmtree(out)
            self._output(out).unlink(missing_ok=True)
        return Outcome(name, tuple(attempts), tuple(violations))

    def plan_points(self, *, once=False):
        """By name of a run, its cuts: every point that a rank of the unbroken run reaches, the first, middle
        and last time; the points of a resumed start, after a kill in the middle; and every point in two
        attempts running. Of several ranks each is killed at its points, in the middle only: where in the run
        a rank dies is tried by the job of one rank. once: so it is with one rank too.
        """
        plan = {}
        thorough = self.job.ranks == 1 and not once
        for rank, reached in enumerate(self.reached):
            place = "" if self.job.ranks == 1 else f":{rank}"
            for point, count in reached.items():
                middle = (count + 1) // 2
                for nth in sorted({1, middle, count}) if thorough else [middle]:
                    plan[f"{point}-{nth}{place}"] = [Cut(f"{point}:{nth}{place}")]
                if thorough:
                    plan[f"{point}-again"] = [Cut(f"{point}:{middle}"), Cut(f"{point}:1", optional=True)]
        saved = Cut(
            f"checkpoint.complete:{max(1, self.reached[0]['checkpoint.complete'] - 1)}"
        )  # the last but one, of the last stage
        for point in POINTS:
            if point.startswith("resume.") and (point != "resume.state_loaded" or "rl" in self.job.stages):
                plan[f"{point}-1"] = [saved, Cut(f"{point}:1")]
        return plan

    def draw_cuts(self, seed, *, fresh=False):
        """One or two random instants of the unbroken run's duration, made of the seed. `fresh`: one
        instant of a start that imports anew.
        """
        draw = random.Random(f"{self.job.name}/{seed}")
        if fresh:
            assert self.job.ranks == 1  # a launcher that is killed leaves its ranks to themselves
            return [Cut(after_s=draw.uniform(0, 4 * self.wall_s), fresh=True)]
        return [
            Cut(after_s=draw.uniform(0, self.wall_s), rank=draw.randrange(self.job.ranks))
            for _ in range(draw.randint(1, 2))
        ]

    @property
    def _temporary(self):
        return self.root / "tmp"

    def _find_violations(self, out, attempts):
        left = [
            f"{path} was left behind" for path in self._temporary.iterdir() if path.name not in self.usual
        ]
        return [*left, *find_violations(self.job, out, attempts, self._output(out))]

    def _output(self, out):
        return out.with_name(f"{out.name}.output")

    def _start(self, out, cut, *, resume, lists=()):
        argv = [*self.job.arguments, "--output.dir", str(out), *(["--resume"] if resume else [])]
        listings = [{LIST_VARIABLE: str(path)} for path in lists] or [{}] * self.job.ranks
        point = {"ROLLOUTS_CRASH_AT": cut.point} if cut.point is not None else {}
        return self.server.run(
            argv,
            output=self._output(out),
            environ={"TMPDIR": str(self._temporary), "ROLLOUTS_CACHE": str(self.root / "cache"), **point},
            processes=[
                {**place, **listing}
                for place, listing in zip(place_ranks(self.job.ranks), listings, strict=True)
            ],
            command=[sys.executable, "-c", FRESH, *argv] if cut.fresh else None,
            kill_after_s=cut.after_s,
            killed=cut.rank,
            limit_s=LIMIT_S,
            drain=cut == UNDISTURBED,
        )


@contextmanager
def open_kill_harness(job, root, *, server=None):
    """A harness for `job` that has made the unbroken run, in `root`/unbroken. `server`: one for train.py that
    is there already.
    """
    for folder in (root / "tmp", root / "cache"):
        folder.mkdir(parents=True)
    with ExitStack() as stack:
        if server is None:
            imports = (*IMPORTS, *(RANK_IMPORTS if job.ranks > 1 else ()), *job.imports)
            server = stack.enter_context(
                open_fork_server(PROGRAM, imports=imports, environ={"PYTHONWARNINGS": "ignore"})
            )
        harness = KillHarness(job, root, server, root / "unbroken")
        harness.run_unbroken()
        yield harness


# --- the promises -------------------------------------------------------------------------------------------


def read_committed(out, stages):
    """By stage, the steps of the newest complete checkpoint."""
    newest = {stage: find_newest_checkpoint(RunDir(out).stage_checkpoints(stage)) for stage in stages}
    return {stage: parse_step(path.name) or 0 for stage, path in newest.items() if path is not None}


def check_nothing_lost(before, after):
    """Violations of: what was complete stays complete, or something newer is."""
    return [
        f"{stage}: step {step} was complete, and now {after.get(stage, 0)} is"
        for stage, step in before.items()
        if after.get(stage, 0) < step
    ]


def check_others_ended(attempt):
    """Violations of: when one rank is killed the others end soon, without being killed themselves."""
    ended = attempt.ended
    if not attempt.was_killed or (
        ended.others_s <= OTHERS_S and ended.returncodes.count(-signal.SIGKILL) == 1
    ):
        return []
    return [
        (
            f"{attempt.cut}: ranks ended with {ended.returncodes}, the last {ended.others_s:.1f} s after the"
            " first"
        )
    ]


def check_rows_of_attempt(out, committed, began_unix):
    """Violations of: an attempt goes on with the step after the newest complete one, and has consecutive
    steps.
    """
    found = []
    by_stage = {}
    for row in read_rows(out / "metrics.jsonl"):
        if row["time_unix"] >= began_unix:
            by_stage.setdefault(row["stage"], []).append(row["step"])
    for stage, steps in by_stage.items():
        first = committed.get(stage, 0) + 1
        if steps != list(range(first, first + len(steps))):
            found.append(f"{stage}: an attempt that began after step {first - 1} computed the steps {steps}")
    return found


def find_violations(job, out, attempts, output):
    """Violations of what must hold of a run that ended, whatever happened to it before."""
    last = attempts[-1].ended
    if last.returncode != 0:
        said = output.read_text()[-TAIL_CHARS:] if output.exists() else ""
        ending = (
            f"was still running after {last.wall_s:.0f} s"
            if last.timed_out
            else f"ended with {last.returncode}"
        )
        return [
            (
                f"attempt {len(attempts)}, after {[str(attempt.cut) for attempt in attempts[:-1]]}, {ending}:"
                f" {said}"
            )
        ]
    found = [f"a process outlived the run: {command}" for command in last.leftover]
    found += [f"{path} was left behind" for path in sorted(out.rglob(".tmp-*"))]
    rows = newest_attempts(read_rows(out / "metrics.jsonl"))
    committed = read_committed(out, job.stages)
    expected = [(stage, step) for stage in job.stages for step in range(1, committed.get(stage, 0) + 1)]
    seen = [(row["stage"], row["step"]) for row in rows]
    if seen != expected:
        found.append(f"readers see the rows {seen}; the steps are {expected}")
    if not (out / "summary.json").exists():
        found.append("there is no summary.json")
    newest = find_newest_checkpoint(RunDir(out).stage_checkpoints("rl"))
    if newest is not None:
        found += check_ledger(load_trainer_state(newest))
    return found


def check_ledger(state):
    """Violations of: every prompt that left the stream trained, was given up for a reason, is held, or waits
    in the DataBuffer.
    """
    buffer, manager = state["data_buffer"], state["rollout_manager"]
    ledger = manager["ledger"]
    given_back = {"surplus", "stale", "aborted"}
    used = ledger["trained"] + sum(
        count for reason, count in ledger["dropped"].items() if reason not in given_back
    )
    used += sum(count for name, count in ledger["failed"].items() if name != "infrastructure")
    held = len(manager["held"]) + len(manager["unfinished"])
    waiting = len(buffer["returned"]) + len(manager["in_flight"])
    drawn = buffer["counts"]["drawn"] if "counts" in buffer else sum(buffer["drawn"])
    if drawn != used + held + waiting:
        return [f"{drawn} prompts were drawn; {used} are used up, {held} held, {waiting} wait: {ledger}"]
    return []
