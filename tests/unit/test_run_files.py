"""What train.py writes whole and reads back: settings and summary survive a power cut, and evaluations are of
the weights that there are.
"""

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from integration_training.run import print_report, write_atomically
from integration_training.stages import is_evaluated, sync_at_start
from rollouts.errors import StorageError
from rollouts.run_dir import RunDir
from tests.support.recorded_writes import record_writes
from tests.support.text_tables import cases


def test_a_file_is_on_disk_before_it_has_its_name_and_the_name_before_the_call_returns(tmp_path, monkeypatch):
    calls, file = record_writes(monkeypatch, "replace"), tmp_path / "config.toml"
    write_atomically(file, "a = 1\n")
    assert calls == ["fsync .tmp-config.toml", "replace config.toml", f"fsync {tmp_path.name}"]
    assert file.read_text() == "a = 1\n"


def test_a_file_that_cannot_be_synced_leaves_the_old_one(tmp_path, monkeypatch):
    file = tmp_path / "config.toml"
    write_atomically(file, "a = 1\n")
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    with pytest.raises(StorageError, match=r"config\.toml cannot be written .*Input/output error"):
        write_atomically(file, "a = 2\n")
    with pytest.raises(StorageError, match="it is no plain file"):
        write_atomically(Path(os.devnull), "")
    assert [*tmp_path.iterdir()] == [file] and file.read_text() == "a = 1\n"


def test_the_end_shows_failed_samples_and_needs_nobody_who_reads_it(tmp_path, monkeypatch, capsys):
    run = SimpleNamespace(run_dir=RunDir(tmp_path))
    row = '{"stage": "eval-rl", "prompt": "p", "response": "%s", "step": %d}\n'
    run.run_dir.samples.write_text(row % ("of an older step", 1) + row % ("\\u001b[2J", 2))
    summary = json.loads('{"accuracy": {}, "mode": "rl", "wall_s": 9, "peak_rss_gib": 1}')
    print_report(run, summary)
    said = capsys.readouterr().out
    assert "  response  \\x1b[2J\n  reward    none: the sample failed\n" in said and "older" not in said
    monkeypatch.setattr("sys.stdout", Mock(write=Mock(side_effect=BrokenPipeError)))
    print_report(run, summary)


# attempt of the evaluation of step 4 | attempt:step of the rows | whether it counts
@cases("""
attempt | trained | counts | …
1 | 1:1 1:2 1:3 1:4 | yes
1 | 1:4 2:5         | yes    | attempt 2 went on
1 | 1:4 2:3 2:4     | no     | step 4 was trained again
1 | 1:4 2:3         | no     | its row was lost
2 | 1:4 2:3 2:4     | yes
3 | 1:4 2:3 2:4     | yes    | evaluated at the start of attempt 3
""")
def test_an_evaluation_counts_unless_its_step_was_trained_again_since(
    tmp_path, attempt, trained, counts: bool
):
    run_dir = RunDir(tmp_path)
    run = SimpleNamespace(run_dir=run_dir, rows=SimpleNamespace(held_out=["a prompt"]))
    assert not is_evaluated(run, "rl", 4)
    row = '{{"stage": "{}", "attempt": {}, "step": {}, "name": "heldout"}}\n'.format
    rows = [row("rl", *place.split(":")) for place in trained.split()]
    run_dir.metrics.write_text(row("sft", 9, 1) + "".join(rows))
    run_dir.evaluations.write_text(row("rl", attempt, 4))
    assert is_evaluated(run, "rl", 4) == counts
    assert not is_evaluated(run, "rl", 3)
    run.rows.held_out = []
    assert is_evaluated(run, "rl", 3)  # there is nothing to evaluate on


@cases("""
newest   | trains | served
"step_5" | no     | trainer's 5
"step_5" | yes    | saved 5
null     | yes    | trainer's 0
""")
async def test_the_engine_is_only_as_old_as_it_was_saved_where_steps_follow(
    newest: Any, trains: bool, served, tmp_path, monkeypatch
):
    """A run that was cut between two updates may be resumed with the steps it has: they are evaluated."""
    synced = []

    def record(kind):
        async def sync(*arguments):
            synced.append(f"{kind} {arguments[-1]}")

        return sync

    monkeypatch.setattr("integration_training.stages.sync_as_saved", record("saved"))
    opened = SimpleNamespace(backend=None, engine=object(), sync_weights=record("trainer's"))
    opened.newest, opened.completed = (tmp_path / newest, 5) if newest else (None, 0)
    opened.section = SimpleNamespace(steps=9 if trains else 5)
    await sync_at_start(opened)
    assert synced == [served]
