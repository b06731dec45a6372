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
from rollouts.metrics.jsonl import Row
from rollouts.run_dir import Activity

HERE, OVER = Activity("here", locked=True, finished=False), Activity("nowhere", locked=False, finished=False)
HEAD = {"schema": 1, "stage": "rl", "policy_version": 0, "attempt": 1}


def line(step: int, **fields: Any) -> str:
    return (
        json.dumps({**HEAD, "step": step, "time_unix": 100.0 + 10 * step, "reward/mean": step / 10, **fields})
        + "\n"
    )


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "config.toml").write_text("[rl]\nsteps = 12\n")
    (tmp_path / "metrics.jsonl").write_text(line(1))
    return tmp_path


def steps(rows: list[Row]) -> list[int]:
    return [row["step"] for row in rows]


def test_the_screen_says_where_the_run_is(run: Path):
    history, asked = {kind: [] for kind in HELD_ROWS}, {"rl": 12}
    odd = {"time/generate": 2.0, "optim/skipped_steps": 1, "fail/reward": 3}
    sample = {"id": "a", "status": "completed", "reward": 1, "response": "x\x1b[2Jy\nz"}
    rows = [("metrics", line(step)) for step in (1, 2, 3)] + [("metrics", line(2, attempt=2, **odd))]
    rows += [("samples", line(2, **sample))] + 2 * [
        ("spans", line(2, name="generate", track="vllm", tokens=7))
    ]
    rows += [("metrics", line(3, attempt=2)), ("metrics", line(4, attempt=2, time_unix=900.0))]
    for kind, text in rows:
        history[kind].append(json.loads(text))
    found, _ = find_steps(history["metrics"])
    assert steps(found) == [1, 2, 3, 4], "attempt 2 began again at step 2"
    assert estimate_left_s(found, asked) == 8 * (10 + 770) / 2, "by the median of the two paces"
    lines = draw_screen(run, history, asked, HERE, width=200, now_unix=905.0).plain.splitlines()
    assert lines[:2] == [f"{run}: running", "rl step 4 of 12, attempt 2, 5 s ago, 52 min left"]
    text = "\n".join(lines)
    for part in (
        "reward/mean 0.1 ▁▃▆█ 0.4",
        "engine    vllm: 2 requests, 14 tokens in step 2",
        "failed    reward 3",
        "reward 1: x\\x1b[2Jy\\nz",
        "warning   rl: attempt 2 goes on from step 2",
        "warning   rl step 2: 1 optimizer steps changed nothing",
    ):
        assert part in text, part


def test_a_torn_line_that_the_next_attempt_repairs_is_no_row(run: Path):
    path = run / "metrics.jsonl"
    append(path, line(2)[:20])
    cursor = FileCursor(path)
    assert steps(cursor.read_new()) == [1]
    append(path, line(2)[20:] + line(3)[:9])
    assert steps(cursor.read_new()) == [2]
    path.write_text(line(1) + line(2))
    append(path, line(4, attempt=2))  # the torn line is cut off, and rows follow
    assert steps(cursor.read_new()) == [4]


def test_parts_are_followed_in_order(run: Path):
    cursor = FileCursor(run / "metrics.jsonl")
    cursor.read_new()
    append(run / "metrics.jsonl", line(2))
    (run / "metrics.1.jsonl").write_text(line(3))
    (run / "metrics.2.jsonl").write_text(line(4))
    assert steps(cursor.read_new()) == [2, 3, 4]
    assert cursor.read_new() == []


def test_a_long_file_is_followed_from_its_end(run: Path, monkeypatch: pytest.MonkeyPatch):
    append(run / "metrics.jsonl", "".join(line(step) for step in range(2, 101)))
    monkeypatch.setattr(tail, "START_BYTES", 3 * len(line(100)))
    assert steps(FileCursor(run / "metrics.jsonl").read_new()) == [98, 99, 100]


def test_a_row_of_another_writer_is_shown_as_far_as_it_goes(run: Path, capsys: pytest.CaptureFixture[str]):
    """No time, numbers that are none, a span and a sample without what they should have."""
    odd = {"reward/mean": "NaN", "fail/reward": "many", "optim/skipped_steps": "x", "time/train": "long"}
    append(
        run / "metrics.jsonl",
        json.dumps({**HEAD, "step": 2, **odd})
        + "\n"
        + json.dumps({"stage": "rl", "step": 3, "attempt": 1})
        + "\n",
    )
    (run / "spans.jsonl").write_text(
        json.dumps({**HEAD, "step": 2, "name": "generate", "tokens": "many", "start_unix": None}) + "\n"
    )
    (run / "samples.jsonl").write_text(
        json.dumps({**HEAD, "step": 2, "reward": "NaN", "response": None}) + "\n"
    )
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


def test_on_a_terminal_the_screen_is_drawn_again(run: Path):
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80, height=30)
    trio.run(follow, run, console, 0.5, False)
    assert "rl step 1 of 12" in out.getvalue()


def test_tail_prints_the_screen_of_a_run_that_is_over(run: Path, capsys: pytest.CaptureFixture[str]):
    for words in (["--once"], []):
        assert main(["tail", str(run), *words]) == 0
        assert ": stopped\n" in capsys.readouterr().out
    assert main(["tail", str(run), "--every", "0"]) == 2
    assert main(["tail", str(run / "nothing")]) == 2
