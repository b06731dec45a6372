"""Whole RL runs on real vLLM servers, as a user starts them. Needs ROLLOUTS_VLLM_PYTHON, or vLLM in
.venv-vllm.
"""

import os
import signal
import subprocess
import time
import uuid
from pathlib import Path

import pytest

from tests.support.compare_runs import read_stage

from .conftest import find_python, open_engine
from .model_checks import load
from .runs import assert_proven, find_processes, make_command, make_environment, read_rows, train, use_short

pytestmark = pytest.mark.engines
PATIENCE_S = 900.0
REWARD = """
def share_of_digits(sample):
    return sum(character.isdigit() for character in sample.response) / max(1, len(sample.response))
"""


def test_a_language_model_learns_on_a_server_whose_weights_are_proven_every_second_step(tmp_path):
    (tmp_path / "digits.py").write_text(REWARD)
    flags = (
        f"--engine.python {find_python('vllm')} --rl.steps 8 --rl.rollout.num_prompts 4 --model.threads 1"
        " --rl.rollout.samples_per_prompt 8 --rl.optim.lr 1e-4 --eval.data.size 16"
        f" --rl.rollout.reward {tmp_path}/digits.py:share_of_digits"
    )
    train(tmp_path, "demo_vllm.toml", flags)
    run = tmp_path / "run"
    assert_proven(run, steps=range(1, 9))
    rewards = [row["reward/mean"] for row in read_rows(run / "metrics.jsonl")]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1, rewards
    samples = [
        row
        for row in read_rows(run / "samples.jsonl")
        if row["stage"] == "rl" and row["weight_version_min"] is not None
    ]
    assert samples
    for row in samples:  # steps 1 and 2 are sampled at version 0, 3 and 4 at 2, ...
        served = (row["step"] - 1) // 2 * 2
        assert (row["weight_version_min"], row["weight_version_max"]) == (served, served)


async def test_a_server_that_keeps_its_old_weights_and_says_200_stops_the_run_before_a_sample_of_them_trains(
    vllm_server, snapshots, tmp_path
):
    async with open_engine(vllm_server) as engine:
        await load(engine, snapshots[0])  # another test may have left other weights
    errors = train(
        tmp_path,
        "demo_vllm.toml",
        f'{use_short(tmp_path, snapshots[0])} --engine.urls ["{vllm_server.url}"]',
        exit_code=1,
        program=Path(__file__).with_name("sabotaged_train.py"),
        VLLM_API_KEY=vllm_server.api_key,
    )
    assert "WeightSyncError" in errors
    run = tmp_path / "run"
    steps = [row["step"] for row in read_rows(run / "metrics.jsonl")]
    assert steps == [1, 2]  # the step whose weights did not arrive is the last
    samples = read_stage(run / "samples.jsonl")
    assert {row["weight_version_max"] for row in samples} == {0}
    assert (run / "checkpoints/rl/step_2/manifest.json").exists()


def test_a_server_killed_in_the_middle_of_a_batch_costs_nothing_and_serves_again(snapshots, tmp_path):
    mark = uuid.uuid4().hex
    flags = (
        f"{use_short(tmp_path, snapshots[0])} --engine.python {find_python('vllm')} --engine.count 2"
        " --rl.steps 400 --rl.rollout.max_new_tokens 160 --output.checkpoint_every 2"
    )
    command = make_command(tmp_path, "demo_vllm.toml", flags)
    run_dir, errors = tmp_path / "run", tmp_path / "errors.txt"
    metrics, log = run_dir / "metrics.jsonl", run_dir / "engines/vllm-0.log"
    with errors.open("wb") as stderr:
        run = subprocess.Popen(
            command,
            env=make_environment(tmp_path, mark, {}),
            stdin=subprocess.DEVNULL,
            stdout=stderr,
            stderr=stderr,
        )
    try:
        wait_until(run, errors, lambda: len(read_rows(metrics)) >= 1)
        time.sleep(1)  # into the next batch: generating takes most of a step
        first_line = next(line for line in log.read_text().splitlines() if " start 1 of " in line)
        port = first_line.split("--port ")[1].split()[0]
        commands = {one.pid: " ".join(one.cmdline()) for one in find_processes(mark)}
        killed = [pid for pid, words in commands.items() if "vllm.entrypoints" in words and port in words]
        os.kill(max(killed), signal.SIGKILL)  # the server itself; its guards have lower ids
        wait_until(run, errors, lambda: any(map(serves_again, read_rows(metrics))))
        run.send_signal(signal.SIGINT)
        assert run.wait(PATIENCE_S) == 0
    finally:
        run.kill()
        run.wait()
    assert "vllm-0 is dead" in errors.read_text()
    rows = read_rows(metrics)
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1)), (
        "every step completed, the one of the kill among them"
    )
    assert max(row["off_policy/max"] for row in rows) <= 1
    last = [row for row in rows if "engine/vllm_0/state" in row][-1]
    told = last[
        "engine/vllm_0/version"
    ]  # of the last update that had ended; there is one after every second step
    assert told == last["engine/vllm_1/version"] and last["step"] - 3 <= told <= last["step"]
    assert " start 2 of vllm-0" in log.read_text()
    assert find_processes(mark) == []


def serves_again(row):
    return row.get("engine/vllm_0/restarts") == 1 and row["engine/vllm_0/state"] == 0


def wait_until(run, errors, condition):
    """Asks twice a second: what is waited for happens in other processes."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert run.poll() is None and time.monotonic() < deadline, errors.read_text()[-4000:]
        time.sleep(0.5)
