"""Following a run while it goes on, in virtual time."""

import io
import json

import pytest
import trio
from rich.console import Console
from trio.testing import wait_all_tasks_blocked

from rollouts.cli import main
from rollouts.inspect import tail
from rollouts.inspect.tail import find_start, follow
from rollouts.metrics.jsonl import Place, read_lines
from tests.unit.run_rows import HEAD, write_rows


def row(step, **fields):
    return {**HEAD, "step": step, "time_unix": 100.0 + 10 * step, "reward/mean": step / 10, **fields}


def line(step, **fields):
    return json.dumps(row(step, **fields)) + "\n"


def append(path, text):
    with path.open("a") as file:
        file.write(text)


@pytest.fixture
def run(tmp_path):
    (tmp_path / "config.toml").write_text("[rl]\nsteps = 12\n")
    append(tmp_path / "metrics.jsonl", line(1))
    return tmp_path


@pytest.fixture
def metrics(run):
    return run / "metrics.jsonl"


def test_the_screen_says_where_the_run_is(run, capsys, monkeypatch):
    monkeypatch.setattr("time.time", lambda: 905.0)
    odd = {"time/generate": 2.0, "optim/skipped_steps": 1, "fail/reward": 3}
    again = [row(2, attempt=2, **odd), row(3, attempt=2), row(4, attempt=2, time_unix=900.0)]
    write_rows(run / "metrics.jsonl", row(1), row(2), row(3, **odd), *again)
    write_rows(run / "samples.jsonl", row(2, id="a", status="completed", reward=1, response="x\x1b[2Jy\nz"))
    write_rows(run / "spans.jsonl", *[row(2, name="generate", track="vllm", tokens=7)] * 2)
    (run / "run.lock").write_text('{"pid": 1, "host": "node3"}\n')  # so that it may go on
    assert main(["tail", str(run), "--once"]) == 0
    text = capsys.readouterr().out
    # attempt 2 began again at step 2, and eight steps are left, by the median of the two paces
    assert "\nrl step 4 of 12, attempt 2, 5 s ago, 52 min left\nreward/mean 0.1 ▁▃▆█ 0.4\n" in text
    for part in (
        "engine    vllm: 2 requests, 14 tokens in step 2\n",
        "failed    reward 3\n",
        "reward 1: x\\x1b[2Jy\\nz\n",
        "warning   rl: attempt 2 goes on from step 2\n",
        "warning   rl step 2: 1 optimizer steps changed nothing",
    ):
        assert part in text, part


def read_steps(metrics, place):
    lines, ends = zip(*read_lines(metrics, place), strict=True)
    return [json.loads(line)["step"] for line in lines], ends[-1]


def test_a_torn_line_that_the_next_attempt_repairs_is_no_row(metrics):
    append(metrics, line(2)[:20])
    first, place = read_steps(metrics, Place())
    append(metrics, line(2)[20:] + line(3)[:9])
    second, place = read_steps(metrics, place)
    assert (first, second) == ([1], [2])
    metrics.write_text(line(1) + line(2) + line(4, attempt=2))  # the torn line is cut off, and rows follow
    assert read_steps(metrics, place)[0] == [4]


def test_a_long_file_is_followed_from_its_end(metrics, monkeypatch):
    append(metrics, "".join(map(line, range(2, 100))))
    append(metrics.with_name("metrics.1.jsonl"), line(100))
    monkeypatch.setattr(tail, "START_BYTES", 3 * len(line(100)))
    assert read_steps(metrics, find_start(metrics))[0] == [97, 98, 99, 100]


def test_a_row_of_another_writer_is_shown_as_far_as_it_goes(run, metrics, capsys):
    """No time, numbers that are none, a span and a sample without what they should have."""
    odd = (
        """{"reward/mean": "NaN", "fail/reward": "many", "optim/skipped_steps": "x", "time/train": "long"}"""
    )
    append(metrics, line(2, **json.loads(odd)) + 'no row\n{"stage": "rl", "step": 3, "attempt": 1}\n')
    write_rows(run / "spans.jsonl", {"name": "generate", "tokens": "many", "start_unix": None})
    write_rows(run / "samples.jsonl", {"reward": "NaN", "response": None, "status": "failed"})
    assert main(["tail", str(run), "--once"]) == 0
    assert "rl step 3 of 12, attempt 1\n" in capsys.readouterr().out


async def test_a_run_of_another_machine_is_followed_until_it_has_a_summary(
    run, metrics, capsys, autojump_clock
):
    (run / "run.lock").write_text('{"pid": 1, "host": "node3"}\n')

    async with trio.open_nursery() as nursery:
        nursery.start_soon(follow, run, Console(width=200), 0.5, False)
        await wait_all_tasks_blocked()
        assert capsys.readouterr().out == "rl step 1 of 12  reward 0.100\n"
        append(metrics, line(2))
        await trio.sleep(1)
        assert capsys.readouterr().out == "rl step 2 of 12  reward 0.200\n"
        (run / "summary.json").write_text("{}")
    assert f"{run}: finished\n" in capsys.readouterr().out


def test_of_a_run_that_is_over_the_screen_is_shown_once(run, capsys):
    out = io.StringIO()
    trio.run(follow, run, Console(file=out, force_terminal=True, width=80, height=30), 0.5, False)
    assert "rl step 1 of 12" in out.getvalue()
    assert main(["tail", str(run)]) == 0
    assert ": stopped\n" in capsys.readouterr().out
    assert main(["tail", str(run), "--every", "0"]) == main(["tail", str(run / "nothing")]) == 2
