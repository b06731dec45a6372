"""Following a run while it goes on, in virtual time."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import trio
from rich.console import Console
from trio.testing import MockClock, wait_all_tasks_blocked

from rollouts.cli import main
from rollouts.inspect import tail
from rollouts.inspect.tail import HELD_ROWS, FileCursor, draw_screen, estimate_left_s, find_steps, follow
from rollouts.run_dir import Activity
from tests.unit.run_rows import HEAD, write_rows

HERE = Activity("here", locked=True, finished=False)


def row(step: int, **fields: Any) -> dict[str, Any]:
    return {**HEAD, "step": step, "time_unix": 100.0 + 10 * step, "reward/mean": step / 10, **fields}


def line(step: int, **fields: Any) -> str:
    return json.dumps(row(step, **fields)) + "\n"


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "config.toml").write_text("[rl]\nsteps = 12\n")
    append(tmp_path / "metrics.jsonl", line(1))
    return tmp_path


@pytest.fixture
def metrics(run: Path) -> Path:
    return run / "metrics.jsonl"


def read_steps(cursor: FileCursor) -> list[int]:
    return [found["step"] for found in cursor.read_new()]


def test_the_screen_says_where_the_run_is(run: Path):
    odd = {"time/generate": 2.0, "optim/skipped_steps": 1, "fail/reward": 3}
    first, again = [row(1), row(2), row(3)], [row(2, attempt=2, **odd), row(3, attempt=2)]
    history = {kind: [] for kind in HELD_ROWS} | {
        "metrics": [*first, *again, row(4, attempt=2, time_unix=900.0)],
        "samples": [row(2, id="a", status="completed", reward=1, response="x\x1b[2Jy\nz")],
        "spans": 2 * [row(2, name="generate", track="vllm", tokens=7)],
    }
    found, _ = find_steps(history["metrics"])
    assert [step["step"] for step in found] == [1, 2, 3, 4], "attempt 2 began again at step 2"
    assert estimate_left_s(found, {"rl": 12}) == 8 * (10 + 770) / 2, "by the median of the two paces"
    text = draw_screen(run, history, {"rl": 12}, HERE, width=200, now_unix=905.0).plain
    assert text.startswith(f"{run}: running\nrl step 4 of 12, attempt 2, 5 s ago, 52 min left\n")
    for part in (
        "reward/mean 0.1 ▁▃▆█ 0.4",
        "engine    vllm: 2 requests, 14 tokens in step 2",
        "failed    reward 3",
        "reward 1: x\\x1b[2Jy\\nz",
        "warning   rl: attempt 2 goes on from step 2",
        "warning   rl step 2: 1 optimizer steps changed nothing",
    ):
        assert part in text, part


def test_a_torn_line_that_the_next_attempt_repairs_is_no_row(metrics: Path):
    append(metrics, line(2)[:20])
    cursor = FileCursor(metrics)
    assert read_steps(cursor) == [1]
    append(metrics, line(2)[20:] + line(3)[:9])
    assert read_steps(cursor) == [2]
    metrics.write_text(line(1) + line(2) + line(4, attempt=2))  # the torn line is cut off, and rows follow
    assert read_steps(cursor) == [4]


def test_parts_are_followed_in_order(metrics: Path):
    cursor = FileCursor(metrics)
    assert read_steps(cursor) == [1]
    append(metrics, line(2))
    for part in (1, 2):
        append(metrics.with_name(f"metrics.{part}.jsonl"), line(2 + part))
    assert read_steps(cursor) == [2, 3, 4]
    assert read_steps(cursor) == []


def test_a_long_file_is_followed_from_its_end(metrics: Path, monkeypatch: pytest.MonkeyPatch):
    append(metrics, "".join(map(line, range(2, 101))))
    monkeypatch.setattr(tail, "START_BYTES", 3 * len(line(100)))
    assert read_steps(FileCursor(metrics)) == [98, 99, 100]


def test_a_row_of_another_writer_is_shown_as_far_as_it_goes(
    run: Path, metrics: Path, capsys: pytest.CaptureFixture[str]
):
    """No time, numbers that are none, a span and a sample without what they should have."""
    odd = {"reward/mean": "NaN", "fail/reward": "many", "optim/skipped_steps": "x", "time/train": "long"}
    append(metrics, line(2, **odd) + '{"stage": "rl", "step": 3, "attempt": 1}\n')
    write_rows(run / "spans.jsonl", {"name": "generate", "tokens": "many", "start_unix": None})
    write_rows(run / "samples.jsonl", {"reward": "NaN", "response": None})
    assert main(["tail", str(run), "--once"]) == 0
    assert "rl step 3 of 12, attempt 1\n" in capsys.readouterr().out


def test_a_run_of_another_machine_is_followed_until_it_has_a_summary(
    run: Path, capsys: pytest.CaptureFixture[str]
):
    (run / "run.lock").write_text('{"pid": 1, "host": "node3"}\n')

    async def finish() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(follow, run, Console(width=200), 0.5, False)
            await wait_all_tasks_blocked()
            assert "rl step 1 of 12  reward" in capsys.readouterr().out
            (run / "summary.json").write_text("{}")

    trio.run(finish, clock=MockClock(autojump_threshold=0))
    assert f"{run}: finished\n" in capsys.readouterr().out


def test_of_a_run_that_is_over_the_screen_is_shown_once(run: Path, capsys: pytest.CaptureFixture[str]):
    out = io.StringIO()
    trio.run(follow, run, Console(file=out, force_terminal=True, width=80, height=30), 0.5, False)
    assert "rl step 1 of 12" in out.getvalue()
    assert main(["tail", str(run)]) == 0
    assert ": stopped\n" in capsys.readouterr().out
    assert main(["tail", str(run), "--every", "0"]) == main(["tail", str(run / "nothing")]) == 2
