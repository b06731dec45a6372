"""What damage, a full disk and a second start do to a whole run."""

import os
import resource
import shutil
import subprocess
from pathlib import Path

import pytest

from rollouts.metrics.jsonl import newest_attempts, read_rows
from rollouts.preflight.run_directory import lock_run_dir
from rollouts.run_dir import RunDir
from tests.support.compare_runs import assert_same_run, weights_digest
from tests.support.text_tables import cases


def flip_a_bit(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


@pytest.fixture
def copied(finished_run, tmp_path):
    """A copy of the finished run that a test may damage."""
    return Path(shutil.copytree(finished_run, tmp_path / "run"))


@pytest.mark.slow
@cases("""
file                        | named
state/optimizer.safetensors | has not the SHA-256
manifest.json               |
""")
def test_a_damaged_checkpoint_is_named_and_the_run_goes_on_exactly_from_the_one_before(
    file, named, train, finished_run, copied
):
    flip_a_bit(copied / "checkpoints/sft/step_20" / file)
    result = train.run(copied, "--resume")
    skipped = [line for line in result.stderr.splitlines() if "skipped a checkpoint" in line]
    assert len(skipped) == 1, result.stderr
    assert f"sft/step_20/{file}" in skipped[0] and named in skipped[0]
    assert "training goes on after step 16" in result.stderr
    for aside in copied.glob("checkpoints/*/damaged-*"):
        shutil.rmtree(aside)
    assert_same_run(finished_run, copied)
    rows = newest_attempts(read_rows(copied / "metrics.jsonl"))
    assert len({(row["stage"], row["step"]) for row in rows}) == len(rows) == 24


def test_a_stage_whose_checkpoints_are_all_damaged_does_not_start_over(train, copied):
    flip_a_bit(copied / "checkpoints/rl/step_4/model.safetensors")
    result = train.run(copied, "--resume", code=2)
    assert "training does not start over by itself; restore one of step_4" in result.stderr
    assert [path.name for path in (copied / "checkpoints/rl").iterdir()] == ["step_4"]


def test_a_second_run_in_a_directory_ends_with_2_and_names_the_first(train, copied):
    before = sorted(copied.iterdir())
    descriptor = lock_run_dir(RunDir(copied))
    for arguments in ((), ("--resume",)):
        result = train.run(copied, *arguments, code=2)
        assert f"is in use by process {os.getpid()} on" in result.stderr
    os.close(descriptor)
    assert sorted(copied.iterdir()) == before


@pytest.mark.slow
def test_a_disk_without_room_for_checkpoints_costs_them_and_the_last_one_ends_the_run(
    train, finished_run, tmp_path
):
    """A limit on the size of a file stands in for the disk: rows are smaller than it, the model's files
    larger.
    """
    out = tmp_path / "run"
    largest = max(
        path.stat().st_size
        for path in (finished_run / "checkpoints/sft/step_20").rglob("*")
        if path.is_file()
    )
    assert (finished_run / "samples.jsonl").stat().st_size < largest - 1
    result = subprocess.run(
        train.command(out, mode="sft"),
        env=train.environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (largest - 1, largest - 1)),
    )
    assert result.returncode == 1, result.stderr
    assert "StorageError" in result.stderr
    assert "step_20 cannot be written (File too large" in result.stderr
    assert "Traceback" not in result.stderr
    rows = read_rows(out / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 21))  # training went on
    assert sum(row.get("checkpoint/failed", 0.0) for row in rows) == pytest.approx(
        4.0
    )  # of steps 4, 8, 12 and 16
    assert not [path for path in out.rglob("*") if path.name.startswith(".tmp-")]
    train.run(out, "--resume", mode="sft")
    assert weights_digest(out / "checkpoints/sft/step_20") == weights_digest(
        finished_run / "checkpoints/sft/step_20"
    )
