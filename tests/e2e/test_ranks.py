"""Several ranks are the same run as one: under torchrun, started by themselves, across changes of their
number, and when one is lost.
"""

import os
import shlex
import signal
import sys
import time

import psutil
import pytest
import trio
from torch.nn.utils import parameters_to_vector
from transformers import AutoModelForCausalLM

from rollouts.metrics.jsonl import newest_attempts, read_rows
from tests.support.processes import is_alive, wait_until

pytestmark = pytest.mark.slow
PATIENCE_S = 240.0
NOTICED_S = 30.0  # what is promised
BEATS_S = 5.0  # of a rank on a busy machine, until its heartbeat has said what it does now
STEPS = 12
SETTINGS = shlex.split("--sft.optim.schedule constant --rl.steps 2 --rl.eval_every 0 --sft.eval_every 6")
LAST_STEPS = shlex.split("--sft.eval_every 0 --output.checkpoint_every 2 --sft.steps 6")


def torchrun(train, out, *arguments, mode, restarts=0):
    """train.py on two ranks, as torchrun starts it."""
    flags = f"--standalone --nproc-per-node=2 --max-restarts={restarts}"
    return train.command(out, *SETTINGS, "--sft.steps", str(STEPS), *arguments, mode=mode, torchrun=flags)


def whole(train, *arguments, mode, ranks):
    """The directory of the same on so many ranks, without a launcher."""
    argv = train.arguments(*SETTINGS, "--sft.steps", str(STEPS), *arguments, mode=mode)
    return train.whole(argv, ranks=ranks)


def rows_of(out, stage):
    """The rows of the stage, one a step."""
    return [row for row in newest_attempts(read_rows(out / "metrics.jsonl")) if row["stage"] == stage]


def assert_same_sft(one, several):
    """Equal up to the order of sums."""
    expected, found = rows_of(one, "sft")[:STEPS], rows_of(several, "sft")[:STEPS]
    assert [row["step"] for row in found] == [row["step"] for row in expected] == [*range(1, STEPS + 1)]
    for name in ("loss/total", "optim/grad_norm", "entropy/mean"):
        assert [row[name] for row in found] == pytest.approx([row[name] for row in expected], rel=1e-4), name


def test_two_ranks_under_torchrun_are_the_run_of_one(train, tmp_path):
    alone = whole(train, mode="sft+rl", ranks=1)
    length = "--sft.steps 0 --sft.epochs 1.16"  # of 330 rows, 32 a step: 11.96 steps
    result = train.execute(torchrun(train, tmp_path / "run", *length.split(), mode="sft+rl"))
    assert "the engine has a copy on rank 0" in result.stderr
    assert_same_sft(alone, tmp_path / "run")
    expected, found = rows_of(alone, "rl"), rows_of(tmp_path / "run", "rl")
    assert [row["step"] for row in found] == [1, 2]
    assert found[0]["reward/mean"] == pytest.approx(
        expected[0]["reward/mean"], abs=0.05
    )  # a sampled token may fall on the other side of a rounding
    assert found[0]["weight_sync/engines_updated"] == 1.0
    left, right = (read_rows(out / "evaluations.jsonl") for out in (alone, tmp_path / "run"))
    assert [(row["stage"], row["step"]) for row in right] == [(row["stage"], row["step"]) for row in left]
    ours, theirs = (
        AutoModelForCausalLM.from_pretrained(out / f"checkpoints/sft/step_{STEPS}")
        for out in (alone, tmp_path / "run")
    )
    one, other = (parameters_to_vector(model.parameters()) for model in (ours, theirs))
    assert (one - other).norm() <= 1e-4 * one.norm()


# --- ranks that are lost ------------------------------------------------------------------------------------

AGREEMENT = "train.before_agreement"  # a micro-batch, and so here a step: next is an all-gather
KILLED, STOPPED = "its process has ended", "no heartbeat came for 20 s"


@pytest.mark.parametrize(
    ("held", "how", "reason"),
    [
        pytest.param(1, signal.SIGKILL, KILLED, id="killed-before"),
        pytest.param(0, signal.SIGKILL, KILLED, id="killed-inside"),
        pytest.param(0, signal.SIGSTOP, STOPPED, id="stopped-inside"),
    ],
)
async def test_when_a_rank_is_lost_before_or_inside_a_collective_the_other_ends_and_names_it(
    train, tmp_path, held, how, reason
):
    """One rank is held before an all-gather, so the other is inside it; rank 1 is lost. Nobody ends rank 0
    but itself.
    """
    out = tmp_path / "run"
    listed = tmp_path / "reached"
    environ = {"ROLLOUTS_HANG_AT": f"{AGREEMENT}:3:{held}", "ROLLOUTS_LIST_POINTS": str(listed)}
    argv = train.arguments(*LAST_STEPS, mode="sft")
    pids = train.start(argv, out, ranks=2, environ=environ, end_others=False)
    try:
        await wait_reached(listed, 6, pids)
        await trio.sleep(BEATS_S)
        os.kill(pids[1], how)
        since = time.monotonic()
        await wait_until(lambda: not is_alive(pids[0]))
        took_s = time.monotonic() - since
    finally:
        for pid in filter(is_alive, pids):
            os.kill(pid, signal.SIGKILL)
        ended = train.server.wait()
    assert ended.returncodes == (75, -signal.SIGKILL), train.said(out)
    assert took_s < NOTICED_S
    lost = f"rollouts: rank 1 was lost during forward_backward of step 3: {reason}; this process ends too\n"
    assert train.said(out)[1].count(lost) == 1
    assert ended.leftover == ()


async def test_torchrun_gets_rid_of_a_rank_that_stands_still_and_starts_all_again(train, tmp_path):
    """Rank 1 is stopped before the all-gather of step 5, in which rank 0 is. Started again after step 2 or 4,
    nobody comes to a fifth one.
    """
    out, listed = tmp_path / "run", tmp_path / "reached"
    environ = {
        "ROLLOUTS_HANG_AT": f"{AGREEMENT}:5:1",
        "ROLLOUTS_LIST_POINTS": str(listed),
        # for a rank that does not end by SIGTERM; torch before 2.13 always gives it 30 s
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "2",
    }
    words = torchrun(train, out, *LAST_STEPS, mode="sft", restarts=1)
    with train.popen(words, **environ) as process:
        try:
            await wait_reached(listed, 10, [process.pid])
            await trio.sleep(BEATS_S)
            stopped = next(
                one for one in psutil.Process(process.pid).children() if one.environ().get("RANK") == "1"
            )
            stopped.suspend()
            _, stderr = process.communicate(timeout=PATIENCE_S)
        finally:
            process.terminate()  # nothing is left to end unless the test has failed
    assert process.returncode == 0, stderr
    said = [line for line in stderr.splitlines() if line.startswith("rollouts:")]
    lost = f"rollouts: rank 1 was lost during forward_backward of step 5: {STOPPED}; this process ends too"
    assert lost in said
    assert not stopped.is_running()
    rows = rows_of(out, "sft")
    attempts = {row["step"]: row["attempt"] for row in rows}
    assert attempts in (
        {1: 1, 2: 1, 3: 1, 4: 1, 5: 2, 6: 2},
        {1: 1, 2: 1, 3: 2, 4: 2, 5: 2, 6: 2},
    )  # step 4 is saved beside the next one
    expected = rows_of(whole(train, *LAST_STEPS, mode="sft", ranks=2), "sft")
    for name in ("loss/total", "optim/grad_norm", "entropy/mean"):
        assert [row[name] for row in rows] == [row[name] for row in expected], name


async def wait_reached(listed, count, alive):
    """Until the ranks together have come so often to the all-gather of a loss. They run until then."""
    with trio.fail_after(PATIENCE_S):
        while not listed.exists() or listed.read_text().split().count(AGREEMENT) != count:
            assert all(map(is_alive, alive)), alive
            await trio.sleep(0.02)


if sys.platform != "linux":
    pytestmark = [pytestmark, pytest.mark.skip(reason="finds ranks by their environment")]
