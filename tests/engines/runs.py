"""Whole runs of train.py against real servers, as a user starts them."""

import json
import os
import subprocess
import sys
import uuid

from tests.support.processes import find_processes

from .conftest import ROOT

STEPS, SYNC_EVERY = 4, 2
# The demo's configs, smaller; a random model's answers are scored by their bytes, so that every batch has
# something to learn from.
SHORT = (
    f"--model.threads 1 --rl.steps {STEPS} --rl.sync_every {SYNC_EVERY} --rl.rollout.num_prompts 4"
    " --rl.rollout.samples_per_prompt 8 --rl.optim.lr 1e-3 --eval.data.size 16 --rl.data.size 64"
)
TRAIN = ROOT / "integration_training/train.py"
REWARD = """
def share_of_even_bytes(sample):
    tokens = [int(token) for token, trained in zip(sample.tokens, sample.loss_mask, strict=True) if trained]
    return sum(token % 2 == 0 for token in tokens) / len(tokens)
"""


def make_command(folder, config, flags, *, program=TRAIN):
    """train.py with a config of integration_training/configs, writing into folder/run.

    It and its servers give way to the tests beside them, which have to reach a server in the middle of its
    work.
    """
    path = str(ROOT / "integration_training/configs" / config)
    command = ["nice", "-n", "10", sys.executable, str(program), "--config", path, "--mode", "rl"]
    return [*command, *flags.split(), "--output.dir", str(folder / "run")]


def use_short(folder, model):
    """Settings of a short run of this model, with a reward that random models earn."""
    (folder / "reward.py").write_text(REWARD)
    return f"{SHORT} --rl.rollout.reward {folder}/reward.py:share_of_even_bytes --model.name {model}"


def make_environment(folder, mark, environment):
    settings = {"OMP_NUM_THREADS": "1", "RUN_MARK": mark, "ROLLOUTS_CACHE": str(folder / "cache")}
    return os.environ | settings | environment


def train(folder, config, flags, *, exit_code=0, program=TRAIN, **environment):
    """What a run that ended with `exit_code` wrote to stderr. Nothing that it started runs any more."""
    mark = uuid.uuid4().hex
    result = subprocess.run(
        make_command(folder, config, flags, program=program),
        capture_output=True,
        text=True,
        env=make_environment(folder, mark, environment),
        timeout=900,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert result.returncode == exit_code, result.stderr[-4000:]
    assert find_processes(mark) == []
    return result.stderr


def read_rows(path):
    """The whole lines of a file of JSON rows that may be written to; none if it is not there yet."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def assert_proven(run, *, steps=range(1, STEPS + 1)):
    """Every step was trained on samples as old as the server's weights, which every second one brought to the
    trainer's, proven by the probe.
    """
    rows = read_rows(run / "metrics.jsonl")
    rows = [row for row in rows if row["stage"] == "rl"]
    assert [row["step"] for row in rows] == list(steps)
    assert [row["off_policy/max"] for row in rows] == [(row["step"] - 1) % SYNC_EVERY for row in rows]
    assert (
        max(row["optim/grad_norm"] for row in rows) > 0
    )  # a step whose samples all earned the same has none
    told = [
        row["step"] for row in rows if "weight_sync/probe_difference/max" in row
    ]  # the step that was the last when an update ended
    assert (
        told[-1] == steps[-1] and len(told) >= len(steps) // SYNC_EVERY - 1
    )  # the last row may tell of two, of which it has the later
    assert all(row["weight_sync/probe_difference/max"] < 1e-3 for row in rows if row["step"] in told)
