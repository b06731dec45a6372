"""What a whole run leaves, and that it can be repeated, stopped and continued. test_kill has runs that are
killed.
"""

import json
import os
import shutil
import signal
import weakref
from contextlib import asynccontextmanager

import pytest
import trio

import integration_training.stages
import integration_training.train
from rollouts.metrics.jsonl import read_rows
from tests.e2e.conftest import SHORT, STEPS, TINY
from tests.support.compare_runs import assert_same_run, read_stage, weights_digest
from tests.support.text_tables import cases

PATIENCE_S = 120.0


async def wait_for_row(path, stage, step, process):
    """Until the file has the row. The file is another process's: there is no event to wait for."""
    with trio.fail_after(PATIENCE_S):
        while not (
            path.exists() and any(row["stage"] == stage and row["step"] >= step for row in read_rows(path))
        ):
            assert process.poll() is None, process.communicate()
            await trio.sleep(0.02)


def test_a_run_leaves_the_files_that_the_documentation_names(finished_run):
    named = "config.toml metrics.jsonl samples.jsonl evaluations.jsonl checkpoints summary.json"
    assert set(named.split()) <= {path.name for path in finished_run.iterdir()}
    summary = json.loads((finished_run / "summary.json").read_text())
    assert summary["mode"] == "sft+rl"
    assert summary["steps"] == 24
    assert set(summary["accuracy"]) == {"base", "sft", "rl"}
    assert all(0 <= value <= 1 for value in summary["accuracy"].values())
    assert summary["reward"]["first"] is not None
    assert 0 < summary["peak_rss_gib"] < 8
    rows = read_rows(finished_run / "metrics.jsonl")
    assert [(row["stage"], row["step"]) for row in rows] == STEPS
    assert rows[20]["policy_version"] == 0


def test_two_deterministic_runs_are_the_same_bits(train, finished_run, tmp_path):
    """The other one was started by a shell."""
    train.run(tmp_path / "again")
    assert_same_run(finished_run, tmp_path / "again")


async def test_ctrl_c_once_finishes_the_step_and_saves(train, finished_run, tmp_path):
    out = tmp_path / "stopped"
    process = train.popen(train.command(out))
    await wait_for_row(out / "metrics.jsonl", "rl", 1, process)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0 and "--resume" in stdout and "Traceback" not in stderr, stderr
    assert not (out / "summary.json").exists()
    last = read_rows(out / "metrics.jsonl")[-1]["step"]
    assert (out / f"checkpoints/rl/step_{last}/manifest.json").exists()
    train.run(out, "--resume")
    stopped, whole = (weights_digest(run / "checkpoints/rl/step_4") for run in (out, finished_run))
    assert stopped == whole


async def test_ctrl_c_twice_exits_now(train, tmp_path):
    out = tmp_path / "stopped"
    process = train.popen(train.command(out, "--sft.steps", "100000"))
    await wait_for_row(out / "metrics.jsonl", "sft", 1, process)
    for number in (signal.SIGSTOP, signal.SIGINT, signal.SIGTERM, signal.SIGCONT):
        os.kill(process.pid, number)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode in (130, 143)


@cases("""
flags                          | steps
                               | 20
--sft.steps 0 --sft.epochs 0.2 | 3
""")
def test_resume_without_a_run_starts_one_and_a_finished_run_stays_finished(
    train, tmp_path, flags, steps: int
):
    for _ in range(2):
        train.run(tmp_path / "run", "--resume", *flags.split(), mode="sft")
        # 0.2 epochs of 330 rows, 32 a step, are 2.06 steps
        assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == steps
        assert f"steps = {steps}\nepochs = 0.0\n" in (tmp_path / "run/config.toml").read_text()


def test_more_steps_of_a_stage_that_a_later_one_was_built_on_are_refused(train, finished_run, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(finished_run, out)
    for mode in ("sft+rl", "sft"):
        done = train.run(out, "--resume", "--sft.steps", "30", mode=mode, code=2)
        said = "sft.steps=30, but 'rl' has begun from step 20, without the others; set sft.steps=20"
        assert said in done.stderr
    assert not (out / "checkpoints/sft/step_30").exists()
    done = train.run(out, "--resume", mode="rl", code=2)
    assert "from which 'rl' would not begin; go on with --mode sft+rl" in done.stderr


def test_torchrun_runs_the_same_program_to_the_same_bits(train, finished_run, tmp_path):
    train.run_fresh(tmp_path / "torchrun", torchrun="--nproc-per-node=1")
    assert_same_run(finished_run, tmp_path / "torchrun")


def test_rl_starts_with_the_weights_of_the_sft_checkpoint(train, finished_run, tmp_path):
    checkpoint = finished_run / "checkpoints/sft/step_20"
    train.run(tmp_path / "rl", "--model.name", str(checkpoint), mode="rl")
    continued = read_stage(finished_run / "metrics.jsonl")
    alone = read_rows(tmp_path / "rl/metrics.jsonl")
    for name in ("reward/mean", "loss/total", "optim/grad_norm", "entropy/mean", "mismatch_kl/mean"):
        assert alone[0][name] == continued[0][name], name


@pytest.mark.slow
def test_the_model_of_a_stage_is_gone_before_the_next_one_loads(tmp_path, monkeypatch):
    # with its moments it is three times the weights, for as long as RL trains
    models, alive = [], []
    open_stage = integration_training.stages.open_stage

    @asynccontextmanager
    async def open_watched(*arguments):
        alive.append(sum(model() is not None for model in models))
        async with open_stage(*arguments) as opened:
            models.append(weakref.ref(opened.backend.model))
            yield opened

    monkeypatch.setattr(integration_training.stages, "open_stage", open_watched)
    flags = f"--config {TINY} --mode sft+rl --output.dir {tmp_path}/run {' '.join(SHORT)}"
    assert integration_training.train.main([*flags.split(), "--sft.steps", "2", "--rl.steps", "1"]) == 0
    assert alive == [0, 0]
