"""A stop on request: from every phase of a run it is gone in time, what is complete is on disk, nothing is
left, and the run goes on exactly.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

from rollouts.checkpoints.load import check_checkpoint, find_newest_checkpoint
from rollouts.loops.stopping import GRACE_TICKS
from rollouts.metrics.jsonl import read_rows
from tests import ROOT
from tests.e2e.conftest import TINY
from tests.e2e.held_train import RELEASED
from tests.support.compare_runs import find_differences, read_comparable
from tests.support.processes import find_processes, wait_until
from tests.support.text_tables import cases

pytestmark = pytest.mark.slow

EXIT_S = 25.0  # from the signal; torchrun kills after 30
REACH_S = 120.0
HERE = Path(__file__).with_name("held_train.py")
SETTINGS = shlex.split(
    "--sft.steps 2 --rl.steps 4 --rl.eval_every 2 --rl.rollout.filters [] --rl.micro_batch_tokens 32"
    f" --rl.rollout.reward {HERE}:reward --rl.rollout.reward_timeout_s 300 --eval.reward {HERE}:eval_reward"
    " --rl.loss tests.e2e.held_train:loss --output.keep_checkpoints 0"
)
NEWEST = {
    "startup": None,
    "generate": 1,
    "reward": 1,
    "train": 1,
    "sync": 2,
    "save": 1,
    "evaluate": 2,
}  # RL steps on disk after the stop, at least
ON_RANKS = ("train", "sync", "save")  # the phases in which the other ranks work
EVERY_PHASE = "EVERY_PHASE" in os.environ  # on ranks too: make soak


def arguments(*more):
    return ["--config", str(TINY), "--mode", "sft+rl", *SETTINGS, *more]


def hold(out, phase):
    return {
        "HOLD": phase,
        "HOLD_METRICS": str(out / "metrics.jsonl"),
        "HOLD_REACHED": str(out.parent / "reached"),
    }


def run(train, out, *more, ranks=1):
    train.fork(arguments(*more), out, ranks=ranks)


async def wait_reached(out, pid):
    """Until the run stands in its phase. The file is another process's: there is no event to wait for."""
    with trio.fail_after(REACH_S):
        while not (out.parent / "reached").exists():
            assert Path(f"/proc/{pid}").exists()  # else it ended before
            await trio.sleep(0.02)


# --- in a phase ---------------------------------------------------------------------------------------------


async def stop_in(train, out, phase, *more, ranks):
    """stdout and stderr of a run that was stopped in the phase, as a launcher does it, and is gone in time
    with exit code 0.
    """
    pids = train.start(arguments(*more), out, ranks=ranks, environ=hold(out, phase))
    try:
        await wait_reached(out, pids[0])
    except BaseException:
        os.kill(pids[0], signal.SIGKILL)
        train.server.wait()
        raise
    began = time.monotonic()
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    (out.parent / RELEASED).touch()  # of a held save, which goes on; nothing else looks
    ended = train.server.wait()
    took = time.monotonic() - began
    stdout, stderr = train.said(out)
    assert set(ended.returncodes) == {0}, (ended, stderr)
    assert took <= EXIT_S, (took, stderr)
    assert ended.leftover == ()
    assert "Traceback" not in stderr, stderr
    print(f"{phase} on {ranks} ranks: {took:.1f} s")
    return stdout, stderr


@cases(
    "phase, ranks",
    [
        (phase, ranks)
        for ranks in (1, 2)
        for phase in NEWEST
        if ranks == 1 or phase in ON_RANKS or EVERY_PHASE
    ],
)
async def test_sigterm_in_a_phase_ends_in_time_and_the_run_goes_on_exactly(train, tmp_path, phase, ranks):
    out = tmp_path / "run"
    every = ("--output.checkpoint_every", "1") if phase == "save" else ()
    stdout, stderr = await stop_in(train, out, phase, *every, ranks=ranks)
    assert "--resume" in stdout and not (out / "summary.json").exists()
    assert "by force" not in stderr
    newest = find_newest_checkpoint(out / "checkpoints/rl")
    assert (newest and newest.name) == (NEWEST[phase] and f"step_{NEWEST[phase]}") or phase == "save", (
        stderr
    )  # which goes on beside a step
    assert newest is not None or phase == "startup"
    if newest is not None:
        check_checkpoint(newest, hashes=True)
    run(train, out, "--resume", *every, ranks=ranks)
    rows = [(row["stage"], row["step"]) for row in read_rows(out / "metrics.jsonl")]
    assert rows == [("sft", 1), ("sft", 2), ("rl", 1), ("rl", 2), ("rl", 3), ("rl", 4)]  # one row a step
    whole = train.whole(arguments(), ranks=ranks)
    differences = find_differences(whole, out, stopped=True)
    if (phase, ranks) == (
        "sync",
        2,
    ):  # of an engine with weights of its own; the row of a step whose sync was cut does not tell of one
        assert differences.pop(0).startswith('metrics.jsonl, rl step 2: {"weight_sync/')
        left, right = (
            [
                {name: value for name, value in row.items() if not name.startswith("weight_sync/")}
                for row in read_comparable(run / "metrics.jsonl")
            ]
            for run in (whole, out)
        )
        assert left == right
    assert not differences


# --- while a function holds the event loop ------------------------------------------------------------------

ON_THE_LOOP = ("--rl.rollout.reward", f"{HERE}:async_reward", "--output.checkpoint_every", "1")


@cases("ranks: 1 2")
async def test_a_function_that_blocks_the_event_loop_is_named_and_does_not_hold_up_a_stop(
    train, tmp_path, ranks: int
):
    out = tmp_path / "run"
    _, stderr = await stop_in(train, out, "loop", *ON_THE_LOOP, ranks=ranks)
    assert "stopped by force" in stderr
    named = stderr.partition("the event loop has been held for 4 s")[2]
    assert "by block; await" in named and "in async_reward" in named
    run(train, out, "--resume", *ON_THE_LOOP, ranks=ranks)
    assert not find_differences(train.whole(arguments(*ON_THE_LOOP), ranks=ranks), out, stopped=True)


async def test_a_second_signal_ends_at_once_whatever_holds_the_event_loop(train, tmp_path):
    out = tmp_path / "run"
    [pid] = train.start(arguments(*ON_THE_LOOP), out, environ=hold(out, "loop"))
    await wait_reached(out, pid)
    began = time.monotonic()
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(pid, number)
        await trio.sleep(0.5)  # two that come at once may be one
    ended = train.server.wait()
    assert time.monotonic() - began < GRACE_TICKS and set(ended.returncodes) <= {130, 143}, train.said(out)


async def test_a_function_that_holds_the_event_loop_for_a_while_ends_no_run_of_ranks(train, tmp_path):
    out = tmp_path / "run"
    train.fork(arguments(*ON_THE_LOOP), out, ranks=2, environ=hold(out, "pause"))
    said = train.said(out)[1]
    assert "the event loop has been held for 4 s" in said and "in async_reward" in said
    assert not find_differences(train.whole(arguments(*ON_THE_LOOP), ranks=2), out)


# --- when the record is taken away --------------------------------------------------------------------------


@cases("deed: delete move")
def test_a_record_that_vanishes_ends_the_run_with_its_state_saved(train, tmp_path, deed):
    out, thief = tmp_path / "run", ("--rl.rollout.reward", f"{HERE}:thieving_reward")
    done = train.fork(arguments(*thief), out, code=1, environ=hold(out, deed))
    assert f"RecordLost: {out / 'metrics.jsonl'} was deleted, moved or cut by someone else" in done.stderr
    assert "everything is in" not in done.stdout and not (out / "summary.json").exists()
    saved = [row["step"] for row in read_rows(out / "metrics.jsonl")]
    newest = find_newest_checkpoint(out / "checkpoints/rl")
    assert newest is not None and newest.name == f"step_{saved[-1]}" == "step_2"
    check_checkpoint(newest, hashes=True)
    left = "rl" if deed == "move" else "sft+rl"  # what sft had is elsewhere
    run(train, out, "--mode", left, "--resume", *thief)
    assert [row["step"] for row in read_rows(out / "metrics.jsonl")] == [2, 3, 4]


# --- after a step -------------------------------------------------------------------------------------------

SIX_STEPS = {
    "sft": shlex.split("--sft.steps 6 --sft.eval_every 4"),
    "rl": shlex.split(
        "--rl.steps 6 --rl.eval_every 4 --rl.rollout.num_prompts 4 --rl.rollout.samples_per_prompt 4"
    ),
}
EVERY_OTHER = shlex.split("--output.checkpoint_every 2 --output.samples_per_step 1000")


@cases("""
step | …
1    | early
3    | between checkpoints
5    | before the last
""")
@cases("stage: sft rl")
def test_a_run_stopped_after_a_step_and_resumed_is_the_run_that_never_stopped(
    train, tmp_path, stage, step: int
):
    """Weights, optimizer, random states, rows of metrics, samples and evaluations: bit for bit."""
    argv = train.arguments(*SIX_STEPS[stage], *EVERY_OTHER, mode=stage)
    rows, *_ = train.run_whole_and_parts(argv, tmp_path, f"{stage}:{step}")
    assert len(rows) == 6


# --- under a launcher ---------------------------------------------------------------------------------------


@contextmanager
def start_torchrun(train, out, phase, *, ranks):
    """A held run in a session of its own; whatever of it is left at the end is killed."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    process = subprocess.Popen(
        [sys.executable, *launcher, "-m", "tests.e2e.held_train", *arguments("--output.dir", str(out))],
        env={**train.environment(), **hold(out, phase), "PYTHONPATH": str(ROOT), "STOP_TEST": str(out)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        for left in find_processes(str(out)):
            left.kill()
        process.communicate()


async def test_sigterm_to_torchrun_ends_it_with_its_ranks_in_time(train, tmp_path):
    out = tmp_path / "run"
    with start_torchrun(train, out, "reward", ranks=2) as process:
        await wait_reached(out, process.pid)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=60)
        assert time.monotonic() - began <= EXIT_S, stderr
        await wait_until(lambda: not find_processes(str(out)), seconds=5)
    assert "stopping: " in stderr
    assert (out / "checkpoints/rl/step_1/manifest.json").exists(), stderr
