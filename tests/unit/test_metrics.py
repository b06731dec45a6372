from __future__ import annotations

import io
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from rollouts.errors import MetricError, RunDirError, StorageError
from rollouts.metrics import jsonl
from rollouts.metrics.jsonl import newest_attempts, next_attempt, open_jsonl_logger, read_rows, repair_last_line, select_evenly, shorten_json
from rollouts.metrics.progress import compute_eta_s, format_duration, open_progress
from rollouts.metrics.record import check_metric, flatten_metrics, make_row
from rollouts.metrics.spans import PhaseTimer
from rollouts.run_dir import RunDir
from rollouts.types import Mean, Sample, Status, Total

# --- rows ---------------------------------------------------------------------------------------------------------------------


def test_a_row_is_its_head_and_then_the_metrics_in_order():
    row = make_row("rl", 3, 2, 1, 1700000000.12345, {"reward/mean": 0.5, "loss/total": 1})
    assert list(row.items()) == [
        ("schema", 1),
        ("stage", "rl"),
        ("step", 3),
        ("policy_version", 2),
        ("attempt", 1),
        ("time_unix", 1700000000.123),
        ("reward/mean", 0.5),
        ("loss/total", 1.0),
    ]


def test_an_evaluation_row_carries_its_name():
    assert make_row("rl", 3, 2, 1, 0.0, {"eval/heldout/avg@4": 0.5}, name="heldout")["name"] == "heldout"


@pytest.mark.parametrize(
    "name", ["reward/mean", "time/step", "eval/heldout/pass@16", "eval/h/response_length/mean", "engine/0/version", "a/b/c/d/e", "clip_ratio"]
)
def test_names_in_form_are_taken(name: str):
    assert check_metric(name, 1) == 1.0


@pytest.mark.parametrize(
    "name", ["reward", "Reward/mean", "reward/", "/reward", "reward mean/x", "a/b-c", "0a/b", "a/b/c/d/e/f", "a/@4", "a/b@", "a/b\n", ""]
)
def test_a_name_out_of_form_is_refused_by_name(name: str):
    with pytest.raises(MetricError, match="lower_snake"):
        check_metric(name, 1.0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan"), "1.0", None, [1.0]])
def test_a_value_that_is_not_a_finite_number_is_refused_naming_the_metric(value: object):
    with pytest.raises(MetricError, match=r"metric loss/total = .*finite"):
        check_metric("loss/total", value)


def test_numpy_scalars_and_bools_become_floats():
    assert [check_metric("a/b", value) for value in (np.float32(0.5), np.int64(2), True)] == [0.5, 2.0, 1.0]


def test_a_mean_of_nothing_is_absent_not_zero():
    assert flatten_metrics({"reward/mean": Mean(0.0, 0.0), "loss/total": Mean(3.0, 2.0), "fail/reward": Total(4.0)}) == {
        "loss/total": 1.5,
        "fail/reward": 4.0,
    }


# --- files --------------------------------------------------------------------------------------------------------------------


def make_sample(index: int = 0, **changes: object) -> Sample:
    fields: dict[str, object] = {
        "id": f"s{index}",
        "prompt": "2+2=",
        "response": "4",
        "tokens": [5, 6, 7, 8],
        "loss_mask": [0, 0, 1, 1],
        "rollout_log_probs": [0.0, 0.0, -0.5, -0.25],
        "weight_versions": [-1, -1, 3, 4],
        "reward": 1.0,
        "rewards": {"format": 1.0},
        "group_index": index // 2,
        "status": Status.COMPLETED,
        "metadata": {"answer": "4"},
    }
    return Sample(**{**fields, **changes})  # pyright: ignore[reportArgumentType]


async def test_logged_rows_are_read_back(tmp_path: Path):
    run_dir = RunDir(tmp_path / "run")
    async with open_jsonl_logger(run_dir, attempt=2, samples_per_step=1, time_unix=lambda: 5.0) as logger:
        await logger.log_step("sft", 1, 0, {"loss/total": 2.0})
        assert read_rows(run_dir.metrics)[0]["loss/total"] == 2.0, "on disk when log_step returns"
        await logger.log_step("sft", 2, 1, {})
        await logger.log_samples("rl", 1, 0, [make_sample()])
        await logger.log_evaluation("rl", 1, 1, "heldout", {"eval/heldout/avg@1": 0.25})
        assert logger.statistics() == {"rows": 2, "sample_rows": 1, "evaluation_rows": 1, "repaired_bytes": 0}
    head = {"schema": 1, "attempt": 2, "time_unix": 5.0}
    assert read_rows(run_dir.metrics) == [
        {**head, "stage": "sft", "step": 1, "policy_version": 0, "loss/total": 2.0},
        {**head, "stage": "sft", "step": 2, "policy_version": 1},
    ]
    assert read_rows(run_dir.evaluations) == [{**head, "stage": "rl", "step": 1, "policy_version": 1, "name": "heldout", "eval/heldout/avg@1": 0.25}]
    assert read_rows(run_dir.samples) == [
        {
            **head,
            "stage": "rl",
            "step": 1,
            "policy_version": 0,
            "id": "s0",
            "group_index": 0,
            "status": "completed",
            "prompt": "2+2=",
            "response": "4",
            "reward": 1.0,
            "rewards": {"format": 1.0},
            "tokens": 4,
            "response_length": 2,
            "weight_version_min": 3,
            "weight_version_max": 4,
            "metadata": {"answer": "4"},
        }
    ]


async def test_a_refused_metric_writes_nothing(tmp_path: Path):
    run_dir = RunDir(tmp_path)
    async with open_jsonl_logger(run_dir, attempt=1, samples_per_step=0) as logger:
        with pytest.raises(MetricError, match="loss/total"):
            await logger.log_step("sft", 1, 0, {"reward/mean": 1.0, "loss/total": math.nan})
        assert run_dir.metrics.read_bytes() == b""
        await logger.log_samples("sft", 1, 0, [make_sample()])
        assert run_dir.samples.read_bytes() == b""


async def test_what_a_sample_lacks_is_absent_from_its_row(tmp_path: Path):
    run_dir = RunDir(tmp_path)
    messages = [{"role": "user", "content": "Grüße\n"}]
    async with open_jsonl_logger(run_dir, attempt=1, samples_per_step=8) as logger:
        await logger.log_samples("rl", 1, 0, [Sample(id="x", prompt=messages)])  # pyright: ignore[reportArgumentType]
    (row,) = read_rows(run_dir.samples)
    assert row["prompt"] == messages
    assert row["status"] == "pending"
    assert not {"reward", "rewards", "group_index", "weight_version_min", "weight_version_max", "metadata"} & set(row)


async def test_logged_samples_are_spread_over_the_groups(tmp_path: Path):
    run_dir = RunDir(tmp_path)
    async with open_jsonl_logger(run_dir, attempt=1, samples_per_step=3) as logger:
        await logger.log_samples("rl", 1, 0, [make_sample(index) for index in range(6)])
    assert [row["group_index"] for row in read_rows(run_dir.samples)] == [0, 1, 2]


def test_select_evenly_takes_all_when_there_are_few():
    assert select_evenly(3, 5) == [0, 1, 2]
    assert select_evenly(8, 3) == [0, 2, 5]
    assert select_evenly(0, 3) == []


def test_long_metadata_is_cut_so_that_rows_stay_small():
    assert shorten_json({"a": 1}) == {"a": 1}
    shortened = shorten_json("x" * 5000)
    assert shortened == "x" * 2000 + "… (5000 characters)"
    failure = shorten_json({"class": "reward", "traceback": "y" * 3000})
    assert failure == {"class": "reward", "traceback": "y" * 2000 + "… (3000 characters)"}
    assert shorten_json(list(range(5000))).endswith("… (23891 characters)")
    assert len(shortened) < 2050


def test_a_short_write_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    real_write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: real_write(file, data[:3]))
    with (tmp_path / "file").open("wb") as file:
        jsonl.write_whole(file.fileno(), b"0123456789")
    assert (tmp_path / "file").read_bytes() == b"0123456789"


async def test_a_logger_tells_progress_about_each_step(tmp_path: Path):
    text = io.StringIO()
    with open_progress(Console(file=text, width=200), {"rl": 2}) as progress:
        async with open_jsonl_logger(RunDir(tmp_path), attempt=1, samples_per_step=0, progress=progress) as logger:
            await logger.log_step("rl", 1, 0, {"reward/mean": 0.25})
    assert text.getvalue() == "rl 1/2  reward 0.250\n"


async def test_the_files_are_closed_when_the_run_fails(tmp_path: Path):
    async def fail() -> None:
        async with open_jsonl_logger(RunDir(tmp_path), attempt=1, samples_per_step=0) as logger:
            await logger.log_step("rl", 1, 0, {})
            raise ZeroDivisionError

    with (tmp_path / "probe").open("wb") as probe:
        next_free = probe.fileno()  # the system hands out the lowest free number
    with pytest.raises(ZeroDivisionError):
        await fail()
    with (tmp_path / "probe").open("wb") as probe:
        assert probe.fileno() == next_free


# --- torn lines and attempts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", range(1, 40))
async def test_a_line_torn_at_any_byte_never_damages_the_next_attempt(tmp_path: Path, cut: int):
    run_dir = RunDir(tmp_path)
    whole = b'{"stage":"rl","step":1,"attempt":1}\n'
    last = b'{"stage":"rl","step":2,"attempt":1,"x":1}\n'[:cut]
    run_dir.metrics.write_bytes(whole + last)
    assert [row["step"] for row in read_rows(run_dir.metrics)] == [1]
    async with open_jsonl_logger(run_dir, attempt=2, samples_per_step=0) as logger:
        assert logger.statistics()["repaired_bytes"] == cut
        await logger.log_step("rl", 2, 1, {})
    lines = run_dir.metrics.read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


def test_a_last_line_that_lacks_only_its_newline_is_kept(tmp_path: Path):
    path = tmp_path / "rows"
    path.write_bytes(b'{"a":1}\n{"a":2}')
    assert [row["a"] for row in read_rows(path)] == [1, 2]
    assert repair_last_line(path) == 0
    assert path.read_bytes() == b'{"a":1}\n{"a":2}\n'


def test_a_torn_line_longer_than_one_read_is_cut_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jsonl, "TAIL_BYTES", 4)
    path = tmp_path / "rows"
    path.write_bytes(b'{"a":1}\n{"a":' + b"2" * 50)
    assert repair_last_line(path) == 55
    assert path.read_bytes() == b'{"a":1}\n'


def test_a_file_of_one_torn_line_becomes_empty(tmp_path: Path):
    path = tmp_path / "rows"
    path.write_bytes(b'{"a"')
    assert repair_last_line(path) == 4
    assert path.read_bytes() == b""
    assert repair_last_line(path) == 0
    assert repair_last_line(tmp_path / "missing") == 0


@pytest.mark.parametrize("damage", [b"{broken", b"[1]", b""])
def test_damage_before_the_last_line_is_named(tmp_path: Path, damage: bytes):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"a":1}\n' + damage + b'\n{"a":2}\n')
    with pytest.raises(RunDirError, match=r"metrics\.jsonl:2 is not a JSON object"):
        read_rows(path)


def test_a_missing_file_has_no_rows(tmp_path: Path):
    assert read_rows(tmp_path / "nothing") == []


def test_readers_take_the_highest_attempt_of_each_step():
    rows = [
        {"stage": "rl", "step": 1, "attempt": 1},
        {"stage": "rl", "step": 2, "attempt": 1},
        {"stage": "rl", "step": 2, "attempt": 2},
        {"stage": "sft", "step": 2, "attempt": 1},
        {"stage": "rl", "step": 3, "attempt": 2},
    ]
    assert newest_attempts(rows) == [rows[0], rows[2], rows[3], rows[4]]


def test_samples_of_one_step_are_all_kept_and_evaluations_are_told_apart_by_name():
    samples = [{"stage": "rl", "step": 1, "attempt": 1, "id": "a"}, {"stage": "rl", "step": 1, "attempt": 1, "id": "b"}]
    assert newest_attempts(samples) == samples
    evaluations = [{"stage": "rl", "step": 1, "attempt": 1, "name": "easy"}, {"stage": "rl", "step": 1, "attempt": 2, "name": "hard"}]
    assert newest_attempts(evaluations) == evaluations


def test_the_next_attempt_is_one_more_than_any_row_has(tmp_path: Path):
    run_dir = RunDir(tmp_path)
    assert next_attempt(run_dir) == 1
    run_dir.evaluations.write_text('{"attempt":3}\n')
    run_dir.metrics.write_text('{"attempt":1}\n{"attempt":2}\n')
    assert next_attempt(run_dir) == 4


def test_an_attempt_that_left_only_samples_has_its_number_to_itself(tmp_path: Path):
    """An attempt killed between a step's samples and its row: readers saw its samples and those of the next attempt as one."""
    run_dir = RunDir(tmp_path)
    run_dir.metrics.write_text('{"attempt":1}\n')
    run_dir.samples.write_text('{"attempt":1}\n{"attempt":2}\n{"attempt":2,"resp')
    assert next_attempt(run_dir) == 3
    run_dir.samples.write_text('{"attempt":5,"response":"' + 200_000 * "x" + '"}\n')  # longer than what is read at a time
    assert next_attempt(run_dir) == 6


# --- progress -----------------------------------------------------------------------------------------------------------------


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_log_gets_the_first_and_last_step_and_one_line_in_between_per_interval():
    text, clock = io.StringIO(), Clock()
    with open_progress(Console(file=text, width=20), {"sft": 6}, every_s=10.0, clock=clock) as progress:
        for step in range(1, 7):
            clock.now = 4.0 * (step - 1)  # lines at 0 s, 12 s and, as the last step, 20 s
            progress.update("sft", step, {"loss/total": 1.5, "optim/grad_norm": 0.123456, "perf/trained_tokens_per_s": 1234.5, "time/step": 4.0})
        progress.note("[saved]")
    assert text.getvalue().splitlines() == [
        "sft 1/6  loss 1.5  grad 0.123  tok/s 1234  s/step 4.00  eta 20s",
        "sft 4/6  loss 1.5  grad 0.123  tok/s 1234  s/step 4.00  eta 8s",
        "sft 6/6  loss 1.5  grad 0.123  tok/s 1234  s/step 4.00  eta 0s",
        "[saved]",
    ]


@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(28, "No space left on device"), ValueError("I/O operation on closed file")])
def test_a_log_that_cannot_be_written_any_more_ends_nothing(error: Exception):
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise error

    with open_progress(Console(file=Gone(), width=80)) as progress:
        progress.update("rl", 1, {"time/step": 1.0})
        progress.note("still here")


def test_a_stage_without_a_known_end_shows_no_eta():
    text = io.StringIO()
    with open_progress(Console(file=text, width=80)) as progress:
        progress.update("rl", 7, {"time/step": 1.0})
    assert text.getvalue() == "rl 7  s/step 1.00\n"


def test_a_terminal_shows_the_newest_state_of_every_stage():
    text, clock = io.StringIO(), Clock()
    console = Console(file=text, force_terminal=True, width=100, color_system=None, legacy_windows=False)
    with open_progress(console, {"sft": 2, "rl": 40}, clock=clock) as progress:
        progress.update("sft", 2, {"loss/total": 0.5})
        progress.update("rl", 1, {"reward/mean": 0.25, "time/step": 2.0})
        clock.now = 30.0
        progress.update("rl", 11, {"reward/mean": 0.75, "time/step": 3.0})
        progress.note("a remark")
    shown = text.getvalue()
    assert "a remark" in shown
    last = shown[shown.rindex("stage") :].splitlines()
    assert last[1].split() == ["sft", "2/2", "0.5"]
    assert last[2].split() == ["rl", "11/40", "0.750", "3.00", "1m27s"]  # 29 steps at 3 s


def test_eta_is_of_this_attempts_pace_and_of_the_first_step_before_there_is_one():
    assert compute_eta_s(5, 10, 5, 0.0, 3.0) == 15.0
    assert compute_eta_s(7, 10, 5, 8.0, 1.0) == 12.0
    assert compute_eta_s(5, 10, 5, 0.0, None) is None
    assert compute_eta_s(5, None, 1, 8.0, 1.0) is None


def test_durations_are_short():
    assert [format_duration(seconds) for seconds in (0.4, 59.4, 59.6, 185, 3599.7, 7620)] == ["0s", "59s", "1m00s", "3m05s", "1h00m", "2h07m"]


# --- time by phase ------------------------------------------------------------------------------------------------------------


def test_a_phase_entered_twice_adds_up_and_the_step_is_the_whole():
    clock = Clock()
    timer = PhaseTimer(clock=clock)
    with timer.phase("generate"):
        clock.now = 2.0
    clock.now = 3.0
    with timer.phase("train"):
        clock.now = 4.5
    with timer.phase("generate"):
        clock.now = 5.0
    timer.add("reward", 0.25)
    assert timer.metrics() == {"time/generate": 2.5, "time/train": 1.5, "time/reward": 0.25, "time/step": 5.0}
    assert timer.seconds("train") == 1.5


def test_a_phase_that_fails_is_counted():
    clock = Clock()
    timer = PhaseTimer(clock=clock)

    def fail() -> None:
        clock.now = 1.0
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), timer.phase("train"):
        fail()
    assert timer.seconds("train") == 1.0


def test_a_phase_that_was_not_entered_has_no_seconds():
    timer = PhaseTimer()
    with pytest.raises(KeyError):
        timer.seconds("train")
    assert set(timer.metrics()) == {"time/step"}


@pytest.mark.parametrize("name", ["step", "Train", "a/b", ""])
def test_a_phase_name_that_would_make_a_wrong_metric_is_a_programming_error(name: str):
    with pytest.raises(AssertionError, match="lower_snake"), PhaseTimer().phase(name):
        pass


async def test_rows_that_a_full_disk_refuses_wait_whole_and_are_written_when_it_takes_them(tmp_path, monkeypatch, caplog):
    run_dir, refuse = RunDir(tmp_path), True
    write = os.write

    def write_half(file: int, data: bytes) -> int:
        if not refuse:
            return write(file, data)
        write(file, data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    async with open_jsonl_logger(run_dir, attempt=1, samples_per_step=1) as logger:
        await logger.log_step("sft", 1, 0, {"loss/total": 1.0})
        whole = run_dir.metrics.read_bytes()
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", write_half)
            await logger.log_step("sft", 2, 1, {"loss/total": 2.0})
            await logger.log_step("sft", 3, 2, {"loss/total": 3.0})
            assert run_dir.metrics.read_bytes() == whole, "no half row"
        refuse = False
        await logger.log_step("sft", 4, 3, {"loss/total": 4.0})
    assert [row["step"] for row in read_rows(run_dir.metrics)] == [1, 2, 3, 4]
    (warning,) = caplog.messages
    assert "rows of metrics.jsonl cannot be written" in warning


async def test_rows_that_are_still_refused_at_the_end_are_an_error(tmp_path, monkeypatch):
    def refuse(_file: int, _data: bytes) -> int:
        raise OSError(28, "No space left on device")

    async def run() -> None:
        async with open_jsonl_logger(RunDir(tmp_path), attempt=1, samples_per_step=1) as logger:
            monkeypatch.setattr(os, "write", refuse)
            await logger.log_step("sft", 1, 0, {"loss/total": 1.0})

    with pytest.raises(StorageError, match=r"rows of metrics\.jsonl cannot be written .*No space left"):
        await run()
