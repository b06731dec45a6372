from __future__ import annotations

import builtins
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rollouts.cli import main
from rollouts.errors import RunDirError
from rollouts.inspect.plot import choose_evaluations, choose_panels, draw_curves, save_png, smooth, thin_out
from rollouts.inspect.read import read_run, series, sum_by_name
from rollouts.inspect.table import (
    describe_state,
    find_newest_checkpoint,
    format_counts,
    make_evaluation_table,
    make_stage_table,
    make_step_table,
    make_summary_lines,
)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make_metric_row(stage: str, step: int, attempt: int = 1, **metrics: float) -> dict[str, Any]:
    named = {name.replace("__", "/"): value for name, value in metrics.items()}
    return {
        "schema": 1,
        "stage": stage,
        "step": step,
        "policy_version": step - 1,
        "attempt": attempt,
        "time_unix": 1.0,
        **named,
    }


def write_run(root: Path) -> Path:
    """A finished run: 3 SFT steps; 4 RL steps, killed after 3 of them and resumed from the second."""
    root.mkdir(exist_ok=True)
    sft = [make_metric_row("sft", step, loss__total=3.0 - step, time__step=30.0) for step in (1, 2, 3)]
    dropped: dict[str, Any] = {
        "groups__dropped__zero_std": 2.0,
        "groups__dropped__surplus": 0.0,
        "fail__reward": 1.0,
    }
    first = [
        make_metric_row("rl", step, reward__mean=0.1 * step, time__step=60.0, **dropped) for step in (1, 2, 3)
    ]
    second = [
        make_metric_row("rl", step, 2, reward__mean=0.2 * step, time__step=60.0, **dropped) for step in (3, 4)
    ]
    write_rows(root / "metrics.jsonl", sft + first + second)
    evaluations = [("base", 0, 0.25), ("sft", 3, 0.5), ("rl", 4, 0.875)]
    write_rows(
        root / "evaluations.jsonl",
        [
            {
                **make_metric_row(stage, step),
                "name": "heldout",
                "eval/heldout/avg@1": value,
                "eval/heldout/failed": 1.0,
            }
            for stage, step, value in evaluations
        ],
    )
    chat = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1?"}]
    sample = {"id": "p1-0", "status": "completed", "response": "2", "response_length": 2}
    write_rows(
        root / "samples.jsonl",
        [
            {**make_metric_row("rl", 4, 2), **sample, "prompt": chat, "reward": 1.0},
            {**make_metric_row("rl", 4, 2), **sample, "prompt": "text"},
        ],
    )
    summary = {
        "mode": "sft+rl",
        "accuracy": {"base": 0.25, "sft": None, "rl": 0.875},
        "wall_s": 61.5,
        "peak_rss_gib": 2.0,
        "seed": 0,
        "versions": {"torch": "2.13.0"},
    }
    (root / "summary.json").write_text(json.dumps(summary))
    for stage, step, complete in (("sft", 3, True), ("rl", 4, True), ("rl", 9, False)):
        checkpoint = root / "checkpoints" / stage / f"step_{step}"
        checkpoint.mkdir(parents=True)
        if complete:
            (checkpoint / "manifest.json").write_text("{}")
    return root


def show(part: object) -> str:
    text = io.StringIO()
    Console(file=text, width=160).print(part)
    return text.getvalue()


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("│┃").split("│")]


def find_cells(text: str, beginning: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"│ {beginning} ")]
    return cells(line)


# --- reading ------------------------------------------------------------------------------------------------


def test_a_record_holds_each_step_once_as_the_newest_attempt_wrote_it(tmp_path: Path):
    record = read_run(write_run(tmp_path))
    assert record.stages == ("sft", "rl")
    assert series(record.stage_rows("rl"), "reward/mean") == (
        [1, 2, 3, 4],
        pytest.approx([0.1, 0.2, 0.6, 0.8]),
    )
    assert record.attempts == 2
    assert record.checkpoints == (("rl", 4), ("sft", 3)), "a checkpoint without its manifest is not complete"
    assert record.samples == (), "the large file is read only when asked for"
    assert len(read_run(tmp_path, with_samples=True).samples) == 2


def test_a_run_that_has_only_its_config_is_read(tmp_path: Path):
    (tmp_path / "config.toml").write_text("")
    record = read_run(tmp_path)
    assert (record.metrics, record.summary, record.attempts, record.stages) == ((), None, 0, ())
    assert describe_state(record) == "not finished, 0 attempts, no checkpoint"


def test_a_directory_that_is_no_run_is_refused(tmp_path: Path):
    with pytest.raises(RunDirError, match="is not a run directory"):
        read_run(tmp_path)
    with pytest.raises(RunDirError, match="is not a directory"):
        read_run(tmp_path / "missing")


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_a_damaged_summary_is_named(tmp_path: Path, text: str):
    (tmp_path / "summary.json").write_text(text)
    with pytest.raises(RunDirError, match=r"summary\.json"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    "row", [{"step": 1, "attempt": 1}, {"stage": "rl", "step": "1", "attempt": 1}, {"stage": "rl", "step": 1}]
)
def test_a_row_of_something_else_is_named(tmp_path: Path, row: dict[str, Any]):
    write_rows(tmp_path / "metrics.jsonl", [make_metric_row("rl", 1), row])
    with pytest.raises(RunDirError, match=r"metrics\.jsonl:2"):
        read_run(tmp_path)


def test_counts_are_summed_by_reason():
    rows = [{"fail/reward": 1.0, "fail/data": 0.0}, {"fail/reward": 2.0, "loss/total": 7.0}]
    assert sum_by_name(rows, "fail/") == {"reward": 3.0}
    assert format_counts({"a": 1.0, "b": 12.0}) == "b 12, a 1"


# --- tables -------------------------------------------------------------------------------------------------


def test_the_stage_table_says_how_far_and_what_was_lost(tmp_path: Path):
    record = read_run(write_run(tmp_path))
    assert describe_state(record) == "finished, 2 attempts, checkpoint rl/step_4"
    text = show(make_stage_table(record))
    assert find_cells(text, "sft") == ["sft", "3", "", "2 → 0", "1.5", "", ""]
    assert find_cells(text, "rl") == ["rl", "4", "0.100 → 0.800", "", "4.0", "zero_std 8", "reward 4"]


def test_the_newest_checkpoint_is_of_the_last_stage(tmp_path: Path):
    assert find_newest_checkpoint(read_run(write_run(tmp_path))) == ("rl", 4)


def test_the_evaluation_table_is_in_percent(tmp_path: Path):
    table = make_evaluation_table(read_run(write_run(tmp_path)))
    text = show(table)
    assert find_cells(text, "base") == ["base", "0", "-1", "heldout", "25.0", "1"]
    assert find_cells(text, "rl") == ["rl", "4", "3", "heldout", "87.5", "1"]


def write_preference_run(root: Path) -> Path:
    """Preferences, a reward model and PPO, one step of each, and their evaluations."""
    root.mkdir(exist_ok=True)
    steps = [
        make_metric_row("preference", 1, rewards__margins=0.25, rewards__accuracies=0.5),
        make_metric_row("reward_model", 1, rewards__margins=1.5, rewards__accuracies=1.0),
        make_metric_row("rl", 1, reward__mean=0.5, value__mean=-0.125, value__explained_variance=0.75),
    ]
    write_rows(root / "metrics.jsonl", steps)
    pairs = [("preference", 0, 0.5, 0.0), ("preference", 1, 0.75, 0.125), ("reward_model", 1, 0.875, None)]
    rows: list[dict[str, Any]] = [
        {**make_metric_row("base", 0), "name": "heldout", "eval/heldout/avg@1": 0.25}
    ]
    for stage, step, accuracy, margin in pairs:
        margins = {} if margin is None else {"eval/pairs/rewards/margins": margin}
        rows.append(
            {**make_metric_row(stage, step), "name": "pairs", "eval/pairs/accuracy": accuracy, **margins}
        )
    rows.append({**make_metric_row("preference", 1), "name": "heldout", "eval/heldout/avg@1": 0.5})
    rows.append({**make_metric_row("rl", 1), "name": "heldout", "eval/heldout/avg@1": 1.0})
    write_rows(root / "evaluations.jsonl", rows)
    summary = {
        "mode": "preference+reward_model+rl",
        "pair_accuracy": {"preference": 0.75, "reward_model": 0.875},
    }
    (root / "summary.json").write_text(json.dumps(summary))
    return root


def test_the_evaluation_table_shows_pairs_that_are_ranked_right_and_their_margin(tmp_path: Path):
    lines = show(make_evaluation_table(read_run(write_preference_run(tmp_path)))).splitlines()
    assert cells(lines[2].replace("┃", "│")) == [
        "stage",
        "step",
        "version",
        "name",
        "avg@1",
        "accuracy",
        "margin",
        "failed",
    ]
    rows = [cells(line) for line in lines if line.startswith("│")]
    assert ["preference", "1", "0", "pairs", "", "75.0", "0.125", "0"] in rows
    assert ["preference", "1", "0", "heldout", "50.0", "", "", "0"] in rows
    assert ["reward_model", "1", "0", "pairs", "", "87.5", "", "0"] in rows


def test_the_step_table_shows_margins_and_what_values_explain(tmp_path: Path):
    lines = show(make_step_table(read_run(write_preference_run(tmp_path)), last=3)).splitlines()
    assert cells(lines[2].replace("┃", "│")) == [
        "stage",
        "step",
        "reward",
        "margin",
        "ranked right",
        "value",
        "explained",
    ]
    assert [cells(line) for line in lines[4:7]] == [
        ["preference", "1", "", "0.250", "0.50", "", ""],
        ["reward_model", "1", "", "1.500", "1.00", "", ""],
        ["rl", "1", "0.500", "", "", "-0.125", "0.75"],
    ]


def test_the_summary_tells_the_pairs_that_are_ranked_right(tmp_path: Path):
    assert make_summary_lines(read_run(write_preference_run(tmp_path))) == [
        "mode preference+reward_model+rl",
        "pairs ranked right: preference 75.0 %, reward_model 87.5 %",
    ]


def test_a_stage_begins_with_the_last_evaluation_of_the_same_name(tmp_path: Path):
    """Accuracy of pairs is no accuracy of answers, though it was measured in between."""
    record = read_run(write_preference_run(tmp_path))

    def points(stage: str) -> list[tuple[str, int, float]]:
        accuracies = ("eval/heldout/avg@1", "eval/pairs/accuracy")
        return [
            (row["name"], row["step"], row[key])
            for row in choose_evaluations(record, stage)
            for key in accuracies
            if key in row
        ]

    assert points("rl") == [("heldout", 0, 0.5), ("heldout", 1, 1.0)]
    assert points("preference") == [
        ("heldout", 0, 0.25),
        ("pairs", 0, 0.5),
        ("pairs", 1, 0.75),
        ("heldout", 1, 0.5),
    ]


def test_the_step_table_lists_the_last_steps_and_only_columns_that_have_values(tmp_path: Path):
    record = read_run(write_run(tmp_path))
    lines = show(make_step_table(record, last=2)).splitlines()
    assert cells(lines[2].replace("┃", "│")) == ["stage", "step", "reward", "s/step"]
    assert [cells(line) for line in lines[4:6]] == [
        ["rl", "3", "0.600", "60.00"],
        ["rl", "4", "0.800", "60.00"],
    ]
    assert make_step_table(record, last=0) is None


def test_an_empty_run_has_no_tables_of_steps_or_evaluations(tmp_path: Path):
    (tmp_path / "config.toml").write_text("")
    record = read_run(tmp_path)
    assert make_step_table(record, last=5) is None
    assert make_evaluation_table(record) is None
    assert make_summary_lines(record) == []
    assert draw_curves(record) == []


def test_the_summary_is_told_in_three_lines(tmp_path: Path):
    assert make_summary_lines(read_run(write_run(tmp_path))) == [
        "mode sft+rl, seed 0, wall_s 61.5, peak_rss_gib 2",
        "accuracy: base 25.0 % → rl 87.5 %",
        "versions: torch 2.13.0",
    ]


def test_samples_read_as_text_with_every_turn(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["inspect", str(write_run(tmp_path)), "--samples", "2"]) == 0
    chat, text = capsys.readouterr().out.split("── ")[1:]
    assert (
        chat == "rl step 4 · p1-0 · completed · reward 1.000 · 2 tokens\n[system] Add.\n[user] 1+1?\n→ 2\n\n"
    )
    assert text.startswith("rl step 4 · p1-0 · completed · no reward · 2 tokens\n[prompt] text\n→ 2\n")


# --- curves -------------------------------------------------------------------------------------------------


def test_curves_are_drawn_for_what_each_stage_has(tmp_path: Path):
    curves = draw_curves(read_run(write_run(tmp_path)), width=20)
    assert [curve.plain.splitlines()[0].strip() for curve in curves] == ["sft loss", "rl reward"]
    assert [len(curve.plain.splitlines()) for curve in curves] == [10, 10], (
        "a title, eight lines of curve, the steps"
    )


def test_a_run_of_few_steps_is_a_line_and_no_dots(tmp_path: Path):
    write_rows(
        tmp_path / "metrics.jsonl",
        [make_metric_row("rl", step, reward__mean=step % 3) for step in range(1, 9)],
    )
    (curve,) = draw_curves(read_run(tmp_path), width=40)
    cells = [line.split("┤")[1] for line in curve.plain.splitlines() if "┤" in line]
    assert all(any(line[column] != chr(0x2800) for line in cells) for column in range(40)), (
        "each column of characters has a part of the line"
    )


def test_a_long_curve_keeps_the_lowest_and_the_highest_value_of_each_stretch():
    values = [
        float(index % 7) for index in range(10_000)
    ]  # stretches of 10: index 0 to 9 has its first 0 at 0 and its 6 at 6
    steps, kept = thin_out(list(range(1, 10_001)), values)
    assert (steps[:2], kept[:2]) == ([1, 7], [0.0, 6.0])
    assert len(kept) == 2000
    assert steps == sorted(steps)
    assert thin_out([1, 2], [3.0, 4.0]) == ([1, 2], [3.0, 4.0])


def test_smoothing_is_a_running_mean_over_a_tenth():
    assert smooth([1.0, 2.0, 3.0]) == [1.0, 2.0, 3.0]
    assert smooth([float(value) for value in range(20)])[:3] == [0.0, 0.5, 1.5]


@pytest.fixture
def without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)


@pytest.mark.usefixtures("without_matplotlib")
def test_without_matplotlib_the_error_says_how_to_install_it(tmp_path: Path):
    record = read_run(write_run(tmp_path / "run"))
    with pytest.raises(RunDirError, match=r"rollouts-rl\[plot\]"):
        save_png(record, tmp_path / "curves.png")


def test_the_picture_is_a_png_with_a_column_per_stage(tmp_path: Path):
    pytest.importorskip("matplotlib")
    record = read_run(write_run(tmp_path / "run"))
    save_png(record, tmp_path / "curves.png")
    data = (tmp_path / "curves.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = int.from_bytes(data[16:20]), int.from_bytes(data[20:24])
    assert (width, height) == (
        1210,
        792,
    )  # 2 stages x 5.5 in; 3 panels (reward or loss, seconds, accuracy) x 2.2 in + 0.6 in; at 110 dpi


def test_a_stage_without_a_metric_gives_its_place_to_the_next(tmp_path: Path):
    record = read_run(write_run(tmp_path))
    assert [name for name, _ in choose_panels(record, "sft")] == ["loss/total", "time/step", "evaluations"]
    assert [name for name, _ in choose_panels(record, "rl")] == ["reward/mean", "time/step", "evaluations"]


def test_a_stage_starts_from_the_evaluation_before_it(tmp_path: Path):
    record = read_run(write_run(tmp_path))
    points = {
        stage: [(row["step"], row["eval/heldout/avg@1"]) for row in choose_evaluations(record, stage)]
        for stage in ("sft", "rl")
    }
    assert points == {"sft": [(0, 0.25), (3, 0.5)], "rl": [(0, 0.5), (4, 0.875)]}


def test_stages_of_different_height_are_drawn_side_by_side(tmp_path: Path):
    pytest.importorskip("matplotlib")
    rows = [
        make_metric_row("sft", 1, loss__total=1.0),
        make_metric_row("rl", 1, loss__total=1.0, reward__mean=0.5),
    ]
    write_rows(tmp_path / "metrics.jsonl", rows)
    save_png(read_run(tmp_path), tmp_path / "curves.png")
    assert (
        int.from_bytes((tmp_path / "curves.png").read_bytes()[20:24]) == 550
    )  # 2 panels x 2.2 in + 0.6 in, at 110 dpi


def test_a_run_with_evaluations_alone_is_plotted_and_an_empty_one_refused(tmp_path: Path):
    pytest.importorskip("matplotlib")
    run = tmp_path / "run"
    run.mkdir()
    write_rows(
        run / "evaluations.jsonl",
        [{**make_metric_row("base", 0), "name": "heldout", "eval/heldout/avg@1": 0.5}],
    )
    save_png(read_run(run), tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 1000
    (run / "evaluations.jsonl").write_text("")
    with pytest.raises(RunDirError, match="nothing to plot"):
        save_png(read_run(run), tmp_path / "curves.png")


def test_a_picture_that_cannot_be_written_is_named(tmp_path: Path):
    pytest.importorskip("matplotlib")
    with pytest.raises(RunDirError, match="cannot be written"):
        save_png(read_run(write_run(tmp_path / "run")), tmp_path / "missing" / "curves.png")


def test_reading_a_run_does_not_load_torch(tmp_path: Path):
    script = (
        "import sys; from rollouts.cli import main; code = main(['inspect', sys.argv[1]]); "
        "sys.exit(code or 10 * sum(name in sys.modules for name in ('torch', 'transformers')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(write_run(tmp_path / "run"))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "zero_std 8" in done.stdout
