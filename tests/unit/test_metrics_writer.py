"""The logger of a run: what each call writes, that the event loop goes on meanwhile, and what becomes of rows
when a disk refuses them.
"""

import json
import math
import os
import threading
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import trio
import trio.testing

from rollouts.errors import MetricError
from rollouts.metrics.jsonl import read_rows
from rollouts.metrics.token_shards import TokenShards, read_token_arrays
from rollouts.metrics.writer import open_jsonl_logger
from rollouts.run_dir import RunDir
from rollouts.types import Sample, Status
from tests.support.made_updates import make_update

# --- files --------------------------------------------------------------------------------------------------


SAMPLE = Sample(
    **json.loads("""{
    "id": "s0", "prompt": "2+2=", "response": "4", "tokens": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1],
    "rollout_log_probs": [0, 0, -0.5, -0.25], "weight_versions": [-1, -1, 3, 4], "reward": 1.0,
    "rewards": {"format": 1.0}, "group_index": 0, "metadata": {"answer": "4"} }"""),
    status=Status.COMPLETED,
)
ROWS = {
    "metrics": """[
        {"stage": "sft", "step": 1, "policy_version": 0, "loss/total": 2.0},
        {"stage": "sft", "step": 2, "policy_version": 1}]""",
    "evaluations": """[
        {"stage": "rl", "step": 1, "policy_version": 1, "name": "heldout", "eval/heldout/avg@1": 0.25}]""",
    "samples": """[
        {"stage": "rl", "step": 1, "policy_version": 0, "id": "s0", "group_index": 0, "prompt": "2+2=",
        "status": "completed", "response": "4", "reward": 1.0, "rewards": {"format": 1.0}, "tokens": 4,
        "response_length": 2, "metadata": {"answer": "4"}, "weight_version_min": 3, "weight_version_max": 4}]
    """,
}


@pytest.fixture
def run_dir(tmp_path):
    return RunDir(tmp_path / "run")


open_logger = partial(open_jsonl_logger, attempt=1, samples_per_step=1)


async def test_logged_rows_are_read_back(run_dir, monkeypatch):
    monkeypatch.setattr("rollouts.metrics.writer.time", SimpleNamespace(time=lambda: 5.0))
    async with open_logger(run_dir, attempt=2) as logger:
        await logger.log_step("sft", 1, 0, {"loss/total": 2.0})
        assert read_rows(run_dir.metrics)[0]["loss/total"] == 2.0  # on disk when log_step returns
        await logger.log_step("sft", 2, 1, {})
        await logger.log_samples("rl", 1, 0, [SAMPLE])
        await logger.log_evaluation("rl", 1, 1, "heldout", {"eval/heldout/avg@1": 0.25})
    for name, lines in ROWS.items():
        rows = read_rows(getattr(run_dir, name))
        assert rows == [{"schema": 1, "attempt": 2, "time_unix": 5.0} | row for row in json.loads(lines)]


async def test_a_refused_metric_and_samples_that_nobody_asked_for_write_nothing(run_dir):
    async with open_logger(run_dir, samples_per_step=0) as logger:
        with pytest.raises(MetricError, match="loss/total"):
            await logger.log_step("sft", 1, 0, {"reward/mean": 1.0, "loss/total": math.nan})
        await logger.log_samples("sft", 1, 0, [SAMPLE])
    assert run_dir.metrics.read_bytes() + run_dir.samples.read_bytes() == b""


# --- a disk that refuses ------------------------------------------------------------------------------------


async def test_rows_that_a_full_disk_refuses_wait_whole_and_are_written_when_it_takes_them(
    run_dir, monkeypatch, caplog
):
    write = os.write

    def write_half(file, data):
        write(file, data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    async with open_logger(run_dir) as logger:
        await logger.log_step("sft", 1, 0, {})
        whole = run_dir.metrics.read_bytes()
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", write_half)
            await logger.log_step("sft", 2, 1, {})
            await logger.log_step("sft", 3, 2, {})
            assert run_dir.metrics.read_bytes() == whole  # no half row
        await logger.log_step("sft", 4, 3, {})
    assert [row["step"] for row in read_rows(run_dir.metrics)] == [1, 2, 3, 4]
    (warning,) = caplog.messages
    assert "rows of metrics.jsonl cannot be written" in warning


# --- off the event loop -------------------------------------------------------------------------------------


async def test_calls_that_wait_for_a_slow_disk_keep_their_order(run_dir, monkeypatch):
    free, real_write = threading.Event(), os.write

    def write_slowly(file, data):
        assert free.wait(10)
        return real_write(file, data)

    async with open_logger(run_dir) as logger:
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", write_slowly)
            async with trio.open_nursery() as nursery:
                for step in range(1, 21):
                    nursery.start_soon(logger.log_step, "rl", step, step - 1, {})
                    await trio.testing.wait_all_tasks_blocked()
                free.set()
    assert [row["step"] for row in read_rows(run_dir.metrics)] == [*range(1, 21)]


async def test_a_row_is_written_also_when_its_caller_is_cancelled(run_dir):
    async with open_logger(run_dir) as logger:
        with trio.move_on_after(0) as scope:
            await logger.log_step("rl", 1, 0, {})
        assert scope.cancelled_caught  # the caller goes on as if it were not cancelled
        assert [row["step"] for row in read_rows(run_dir.metrics)] == [1]


# --- spans and updates --------------------------------------------------------------------------------------


async def test_an_update_leaves_arrays_rows_that_name_them_and_a_line(run_dir):
    updates = [make_update(update=number, contributes=number < 2) for number in range(3)]
    async with open_logger(run_dir, attempt=2, token_arrays_bytes=1 << 20) as logger:
        await logger.log_step("rl", 4, 3, {}, updates=updates)
    rows = read_rows(run_dir.contributions)
    assert [(row["stage"], row["step"], row["attempt"], row["update"], row["id"]) for row in rows] == [
        ("rl", 4, 2, update, name) for update in (0, 1) for name in ("a", "b")
    ]
    assert [read_token_arrays(run_dir, row)["tokens"].tolist() for row in rows] == 2 * [[5, 6, 7], [5, 8]]
    assert run_dir.updates_log.read_text().count("-6.250000e-02") == 3


async def test_arrays_that_the_disk_refuses_are_left_out_and_their_rows_are_not(run_dir, monkeypatch, caplog):
    refuse = Mock(side_effect=OSError("no space"))
    async with open_logger(run_dir, token_arrays_bytes=1 << 20) as logger:
        with monkeypatch.context() as patch:
            patch.setattr(TokenShards, "_open_shard", refuse)
            for step in (1, 2):
                await logger.log_step("rl", step, step - 1, {}, updates=[make_update(update=0)])
        await logger.log_step("rl", 3, 2, {}, updates=[make_update(update=0)])
    rows = read_rows(run_dir.contributions)
    assert [(row["step"], "offset" in row) for row in rows[::2]] == [(1, False), (2, False), (3, True)]
    (warning,) = caplog.messages
    assert "the arrays of these steps are left out" in warning
