"""An engine that gets new weights only every other step has the same ones after a stop as in a run that
nobody stopped.
"""

import pytest

from rollouts.checkpoints.load import find_newest_checkpoint
from tests.e2e.test_stop import arguments, run, stop_in
from tests.support.compare_runs import assert_same_run, read_stage

pytestmark = pytest.mark.slow

LAGGING = ("--engine.mode", "copied", "--rl.sync_every", "2", "--rl.max_staleness", "1")


async def test_a_stop_between_two_weight_updates_goes_on_with_the_weights_that_the_engine_had(
    train, tmp_path
):
    """The engine is updated after steps 2 and 4; the stop cuts step 2 in the middle of its micro-batches,
    whose loss draws random numbers.
    """
    unbroken, out = tmp_path / "unbroken/run", tmp_path / "stopped/run"
    for folder in (unbroken, out):
        folder.parent.mkdir()
    train.fork(arguments(*LAGGING), unbroken, environ={"ENCODED": str(tmp_path / "encoded")})
    lags = [row["off_policy/max"] for row in read_stage(unbroken / "metrics.jsonl")]
    assert lags == [0.0, 1.0, 0.0, 1.0]
    assert (tmp_path / "encoded").read_text() == "encoded\n", (
        "once, for the checkpoint at the end, and not in every step"
    )
    await stop_in(train, out, "train", *LAGGING, ranks=1)
    newest = find_newest_checkpoint(out / "checkpoints/rl")
    assert newest is not None and newest.name == "step_1"
    assert (newest / "state/engine.safetensors").exists()
    run(train, out, "--resume", *LAGGING)
    assert_same_run(unbroken, out, stopped=True)
