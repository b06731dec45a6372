"""Curves of chosen metrics, and the command `plot`."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from rollouts.cli import main
from rollouts.errors import ConfigError
from rollouts.inspect.chart import ChartOptions, Curve, collect_panels, draw_chart, match_names, smooth_values
from rollouts.inspect.read import read_run


def write_run(root: Path, factor: float = 1.0) -> Path:
    root.mkdir()
    head = {"schema": 1, "policy_version": 0, "attempt": 1, "time_unix": 1.0}
    rows = [{**head, "stage": "sft", "step": 1, "loss/total": 3.0}]
    rows += [
        {
            **head,
            "stage": "rl",
            "step": step,
            "loss/total": factor * step,
            "reward/mean": 0.5,
            "reward/std": 0.1,
        }
        for step in (1, 2, 3, 4)
    ]
    (root / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluation = {**head, "stage": "rl", "step": 4, "name": "heldout", "eval/heldout/avg@1": 0.25}
    (root / "evaluations.jsonl").write_text(json.dumps(evaluation) + "\n")
    return root


def make_curve(values: list[float], run: str = "a") -> Curve:
    return Curve(run, "rl", "loss/total", np.arange(1, len(values) + 1), np.array(values))


def read_dots(lines: list[str], column: int) -> set[int]:
    """The rows of dots, from above, that are set in a column of dots, by Unicode's numbering: left 1, 2, 3, 7
    and right 4, 5, 6, 8 from above.
    """
    numbers = ((1, 2, 3, 7), (4, 5, 6, 8))[column % 2]
    cells = [ord(line.split("┤")[1][column // 2]) - 0x2800 for line in lines]
    return {
        4 * row + place
        for row, cell in enumerate(cells)
        for place, number in enumerate(numbers)
        if cell >> (number - 1) & 1
    }


def test_a_pattern_chooses_all_metrics_that_match_in_each_stage(tmp_path: Path):
    records = {"a": read_run(write_run(tmp_path / "a")), "b": read_run(write_run(tmp_path / "b", 2.0))}
    panels = collect_panels(records, ["loss/total", "reward/*"])
    assert [(panel[0].stage, panel[0].name, [curve.run for curve in panel]) for panel in panels] == [
        ("sft", "loss/total", ["a", "b"]),
        ("rl", "loss/total", ["a", "b"]),
        ("rl", "reward/mean", ["a", "b"]),
        ("rl", "reward/std", ["a", "b"]),
    ]
    assert panels[1][1].values.tolist() == [2.0, 4.0, 6.0, 8.0]


def test_evaluations_have_curves_too(tmp_path: Path):
    [[curve]] = collect_panels({"a": read_run(write_run(tmp_path / "a"))}, ["eval/*"])
    assert (curve.name, curve.steps.tolist(), curve.values.tolist()) == ("eval/heldout/avg@1", [4], [0.25])


def test_an_unknown_metric_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=r"reward/maen: .*near are reward/mean"):
        match_names("reward/maen", ["loss/total", "reward/mean"])


def test_an_unknown_stage_is_refused_with_those_there_are(tmp_path: Path):
    with pytest.raises(ConfigError, match="--stage ppo: the stages are sft, rl"):
        collect_panels({"a": read_run(write_run(tmp_path / "a"))}, ["loss/total"], stage="ppo")


def test_smoothing_is_the_mean_of_a_value_and_those_before_it():
    assert smooth_values(np.array([1.0, 3.0, 5.0, 7.0]), 2).tolist() == [1.0, 2.0, 4.0, 6.0]


def test_a_rising_line_goes_from_the_lower_left_to_the_upper_right():
    lines = draw_chart([make_curve([0.0, 1.0])], ChartOptions(width=2, height=2)).plain.splitlines()
    # 4 columns of dots, 8 rows: heights 0, 1/3, 2/3, 1 of 7 are rows 7, 5, 2, 0 from above; halfway between
    # them are rows 6, 3.5 and 1
    columns = [{7, 6}, {6, 5, 4}, {3, 2, 1}, {1, 0}]
    assert [read_dots(lines[1:3], column) for column in range(4)] == columns
    assert lines[3].strip() == "1step 2"


@pytest.mark.parametrize(
    "values", [[0.0, 9.0, 1.0, 8.0, 0.0, 0.0, 9.0, 4.0], [float(step % 7) for step in range(20)]]
)
def test_a_curve_of_few_steps_is_one_line_without_gaps(values: list[float]):
    lines = draw_chart([make_curve(values)], ChartOptions(width=30, height=5)).plain.splitlines()[1:6]
    columns = [read_dots(lines, column) for column in range(60)]
    for column in columns:
        assert column == set(range(min(column), max(column) + 1)), "no gap within a column"
    for one, other in pairwise(columns):
        assert min(one) <= max(other) + 1 and min(other) <= max(one) + 1, "nor between two"


def test_a_logarithmic_curve_leaves_out_what_has_none_and_labels_values():
    text = draw_chart([make_curve([0.0, 1.0, 100.0])], ChartOptions(width=4, height=3, log=True)).plain
    lines = text.splitlines()
    assert "(logarithmic)" in lines[0]
    assert (lines[1].split()[0], lines[3].split()[0]) == ("100", "1")
    assert "no value is above 0" in draw_chart([make_curve([0.0, -1.0])], ChartOptions(log=True)).plain


def test_each_run_has_its_colour_and_is_named():
    text = draw_chart(
        [make_curve([1.0, 1.0], "a"), make_curve([2.0, 2.0], "b")], ChartOptions(width=4, height=2)
    )
    assert text.plain.splitlines()[-1].split() == ["━", "a", "━", "b"]
    assert {str(span.style) for span in text.spans} == {"cyan", "yellow"}


def test_plot_stacks_runs_where_there_are_no_colours(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    first, second = write_run(tmp_path / "a"), write_run(tmp_path / "b", 2.0)
    assert main(["plot", str(first), "loss/total", str(second), "--stage", "rl"]) == 0
    out = capsys.readouterr().out
    assert out.count("rl loss/total") == 2
    assert out.index("\n8 ┤") > out.index("4 ┤")


def test_plot_draws_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "p.png"
    run = str(write_run(tmp_path / "a"))
    assert main(["plot", run, "loss/*", "--png", str(picture), "--log", "--smooth", "2"]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main(["plot", run, "loss/*", "--png", str(tmp_path / "no" / "p.png")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_plot_without_a_metric_or_with_a_bad_window_exits_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = str(write_run(tmp_path / "a"))
    assert main(["plot", run, run]) == 2
    assert main(["plot", run, "loss/total", "--smooth", "0"]) == 2
    assert "--smooth 0: at least 1" in capsys.readouterr().err
