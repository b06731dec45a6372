"""Whole runs of the tiny config, as a user starts them: a process of their own, a directory of their own."""

import os
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rollouts.checkpoints.load import find_newest_checkpoint
from tests import ROOT
from tests.support.compare_runs import assert_same_run, read_stage
from tests.support.fork_server import ForkServer, open_fork_server, place_ranks
from tests.support.kill_harness import IMPORTS, RANK_IMPORTS

TRAIN = ROOT / "integration_training/train.py"
TINY = ROOT / "integration_training/configs/tiny.toml"
SHORT = shlex.split("""
    --sft.steps 20 --rl.steps 4 --rl.eval_every 2 --rl.rollout.filters []
    --output.checkpoint_every 4 --output.keep_checkpoints 0
""")
STEPS = [*(("sft", step) for step in range(1, 21)), *(("rl", step) for step in range(1, 5))]  # of SHORT
LIMIT_S = 300.0


def read_tiny():
    """The text of TINY for a file that lies elsewhere."""
    return TINY.read_text().replace("../tasks", str(TINY.parents[1] / "tasks"))


@dataclass(frozen=True)
class Train:
    """Starts train.py with the tiny config, shortened, writing into a directory of this test.

    `run` and `run_config` fork the process from one that has made its imports, which is what most of so short
    a run would spend its time on; `run_fresh` starts a program as a shell does.
    """

    cache: Path
    server: ForkServer
    wholes: dict[tuple[Any, ...], Path] = field(default_factory=dict)

    def command(self, out, *arguments, mode="sft+rl", torchrun=""):
        """torchrun: its flags, where it starts the run."""
        launcher = ["-m", "torch.distributed.run", *torchrun.split()] if torchrun else []
        argv = self.arguments(*arguments, mode=mode)
        return [sys.executable, *launcher, str(TRAIN), *argv, "--output.dir", str(out)]

    def arguments(self, *arguments, mode="sft+rl"):
        return ["--config", str(TINY), "--mode", mode, *SHORT, *arguments]

    def environment(self):
        return {**os.environ, "ROLLOUTS_CACHE": str(self.cache), "PYTHONWARNINGS": "default"}

    def run(self, out, *arguments, mode="sft+rl", **options):
        return self.fork(self.arguments(*arguments, mode=mode), out, **options)

    def run_config(self, config, out, *arguments, mode="sft+rl"):
        """The same with a config of the test's own, as it is."""
        return self.fork(["--config", str(config), "--mode", mode, *arguments], out)

    def whole(self, argv, *, ranks=1):
        """The directory of the run that nobody stopped, made when it is first asked for."""
        key = (ranks, *argv)
        if key not in self.wholes:
            out = self.cache.with_name(f"whole-{len(self.wholes)}")
            self.fork(argv, out, ranks=ranks)
            self.wholes[key] = out
        return self.wholes[key]

    def stop_and_resume(self, argv, out, stop_after):
        """The rows of its stage, of a run that is stopped after STAGE:STEP, which it saves, and resumed."""
        stage, _, step = stop_after.partition(":")
        self.fork(argv, out, environ={"STOP_AFTER": stop_after})
        newest = find_newest_checkpoint(out / "checkpoints" / stage)
        assert newest is not None and newest.name == f"step_{step}" and not (out / "summary.json").exists()
        self.fork([*argv, "--resume"], out)
        rows = read_stage(out / "metrics.jsonl", stage)
        attempts = [(number, 1 if number <= int(step) else 2) for number in range(1, len(rows) + 1)]
        assert [(row["step"], row["attempt"]) for row in rows] == attempts
        return rows

    def run_whole_and_parts(self, argv, folder, stop_after):
        """What stop_and_resume() gives, and the directories of a run that nobody stopped and of that one,
        which are the same to the bit.
        """
        whole, parts = self.whole(argv), folder / "parts"
        rows = self.stop_and_resume(argv, parts, stop_after)
        assert_same_run(whole, parts, stopped=True)
        return rows, whole, parts

    def run_fresh(self, out, *arguments, torchrun=""):
        return self.execute(self.command(out, *arguments, torchrun=torchrun))

    def popen(self, command, **environ):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, env=self.environment() | environ, text=True, **pipes)

    def execute(self, command):
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env=self.environment(),
            timeout=LIMIT_S,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done

    def fork(self, argv, out, *, code=0, **options):
        """`argv` of train.py, run to its end, at which it has this exit code; options as of `start`."""
        self.start(argv, out, **options)
        ended = self.server.wait()
        assert not ended.timed_out, self.said(out)
        assert not ended.leftover, ended.leftover
        done = subprocess.CompletedProcess(argv, ended.returncode, *self.said(out))
        assert done.returncode == code, done.stderr
        return done

    def start(
        self,
        argv,
        out,
        *,
        ranks=1,
        environ=None,
        end_others=True,
    ):
        """The processes of a run, one a rank; `server.wait()` is to follow."""
        stdout, stderr = self.outputs(out)
        stdout.unlink(missing_ok=True)
        stderr.unlink(missing_ok=True)
        environ = {
            "ROLLOUTS_CACHE": str(self.cache),
            **(environ or {}),
        }  # not the server's: tests find what a run has left by it
        return self.server.start(
            [*argv, "--output.dir", str(out)],
            output=stdout,
            errors=stderr,
            environ=environ,
            processes=place_ranks(ranks),
            end_others=end_others,
            limit_s=LIMIT_S,
        )

    def said(self, out):
        """stdout and stderr of the last run in `out`."""
        stdout, stderr = self.outputs(out)
        return stdout.read_text(), stderr.read_text()

    def outputs(self, out):
        return out.with_name(f"{out.name}.stdout"), out.with_name(f"{out.name}.stderr")


@pytest.fixture(scope="session")
def train(tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    environ = {"PYTHONWARNINGS": "default", "PYTHONPATH": str(ROOT)}
    imports = (*IMPORTS, *RANK_IMPORTS, "reasoning_gym")
    with open_fork_server("tests.e2e.held_train:main", imports=imports, environ=environ) as server:
        yield Train(cache, server)


@pytest.fixture(scope="session")
def finished_run(train, tmp_path_factory):
    """An sft+rl run that nobody disturbed, in a process of its own from the start."""
    out = tmp_path_factory.mktemp("finished") / "run"
    train.run_fresh(out)
    return out
