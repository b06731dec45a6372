from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from rollouts.cli import main
from rollouts.errors import RunDirError
from rollouts.inspect.columns import open_columns
from rollouts.inspect.compare import (
    collect_differences,
    flatten_settings,
    format_means,
    make_fact_table,
    make_metric_table,
    make_setting_table,
    name_runs,
)
from rollouts.inspect.outcomes import (
    Failure,
    collect_failures,
    count_lags,
    describe_lags,
    list_trouble,
    make_dropped_table,
    make_failure_table,
)
from rollouts.inspect.phases import Phase, compute_phases, make_phase_table
from rollouts.inspect.read import read_run
from rollouts.inspect.sparklines import draw_sparkline, format_number, make_sparkline_table, mean_by_range
from rollouts.inspect.table import count_fitting, make_stage_table, make_step_table
from rollouts.run_dir import RunDir


def make_row(stage: str, step: int, **fields: Any) -> dict[str, Any]:
    head = {
        "schema": 1,
        "stage": stage,
        "step": step,
        "policy_version": step - 1,
        "attempt": 1,
        "time_unix": 1.0,
    }
    return head | {name.replace("__", "/"): value for name, value in fields.items()}


def write_run(
    root: Path,
    *,
    metrics: list[dict[str, Any]],
    samples: list[dict[str, Any]] | None = None,
    config: str = "",
) -> Path:
    root.mkdir(exist_ok=True)
    (root / "config.toml").write_text(config)
    for name, rows in (("metrics", metrics), ("samples", samples or [])):
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def show(part: object, width: int = 120) -> str:
    console = Console(width=width, force_terminal=False, highlight=False, markup=False)
    with console.capture() as capture:
        console.print(part)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


# --- sparklines ---------------------------------------------------------------------------------------------


def test_a_sparkline_rises_with_the_mean_of_each_range():
    steps = np.arange(1, 9)
    assert draw_sparkline(steps, steps.astype(float), first=1, last=8, width=8) == "▁▂▃▄▅▆▇█"
    # Pairs: means 1.5, 3.5, 5.5, 7.5; shares of the range 0, 1/3, 2/3, 1 → blocks 0, 2 (8/3), 5 (16/3), 7.
    assert draw_sparkline(steps, steps.astype(float), first=1, last=8, width=4) == "▁▃▆█"


def test_a_flat_sparkline_is_half_high_and_a_gap_is_blank():
    assert draw_sparkline(np.array([1, 4]), np.array([2.0, 2.0]), first=1, last=4, width=10) == "▅  ▅"


def test_ranges_hold_the_mean_of_their_values():
    means = mean_by_range(np.array([1, 2, 4]), np.array([1.0, 3.0, 9.0]), first=1, last=6, ranges=3)
    np.testing.assert_array_equal(means, [2.0, 9.0, np.nan])


def test_numbers_have_the_digits_that_count():
    assert [format_number(value) for value in (12.3456, 0.00123456, 123456.0, -1.5e-7, 2e9)] == [
        "12.35",
        "0.001235",
        "123456",
        "-1.5e-07",
        "2e+09",
    ]


@pytest.mark.parametrize("width", [80, 160])
def test_the_sparkline_table_fits_and_has_first_last_min_and_max(tmp_path: Path, width: int):
    rewards = [0.5, 0.25, 1.0, 0.75]
    metrics = [
        make_row("rl", step, reward__mean=reward, off_policy__mean=0, mismatch_kl__mean=-1e-9)
        for step, reward in enumerate(rewards, 1)
    ]
    text = show(
        make_sparkline_table(read_run(write_run(tmp_path, metrics=metrics)), "rl", width=width), width
    )
    assert max(map(len, text.splitlines())) <= width
    assert text.splitlines()[0] == "rl, steps 1 to 4"
    assert text.splitlines()[2].split() == ["reward/mean", "▃▁█▆", "0.5", "0.75", "0.25", "1"]
    assert "off_policy" not in text, "what is 0 throughout tells nothing"


@pytest.mark.parametrize(
    ("width", "headings"), [(100, "first last min max"), (60, "first last"), (40, "last")]
)
def test_a_narrow_terminal_has_fewer_numbers_and_whole_ones(tmp_path: Path, width: int, headings: str):
    metrics = [
        make_row("rl", step, groups__zero_std_frac=1.2345e-5 * step, reward__mean=-0.012345 * step)
        for step in range(1, 9)
    ]
    lines = show(
        make_sparkline_table(read_run(write_run(tmp_path, metrics=metrics)), "rl", width=width), width
    ).splitlines()
    assert max(map(len, lines)) <= width
    assert lines[1].split() == ["metric", "course", *headings.split()]
    assert "…" not in "".join(lines)


def test_a_narrow_terminal_has_a_stage_on_a_line(tmp_path: Path):
    record = read_run(
        write_run(
            tmp_path,
            metrics=[
                make_row("rl", step, reward__mean=step / 4, time__step=60.0, fail__reward=1)
                for step in (1, 2)
            ],
        )
    )
    assert (
        make_stage_table(record, width=60)
        == "stage rl, steps 2, reward first → last 0.250 → 0.500, minutes 2.0, failed reward 2"
    )
    assert not isinstance(make_stage_table(record, width=100), str)


def test_what_is_no_number_is_in_no_table_and_no_curve(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Rows as another writer may leave them: NaN as a word, beyond what a number takes, a truth value,
    nothing.
    """
    rows = [make_row("rl", step, reward__mean=0.25 * step, time__step=1.0) for step in (1, 2, 3)]
    odd = [{"reward/mean": "NaN"}, {"reward/mean": None, "loss/total": "Infinity"}, {"reward/mean": True}]
    metrics = rows + [make_row("rl", 4 + place) | fields for place, fields in enumerate(odd)]
    run = write_run(tmp_path / "run", metrics=metrics)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(
            '{"stage":"rl","step":7,"attempt":1,"reward/mean":1e999}\n{"stage":"rl","step":8,"attempt":1,"reward/mean":NaN}\n'
        )
    evaluation = make_row("rl", 8, eval__heldout__failed="none") | {
        "name": "heldout",
        "eval/heldout/avg@1": "NaN",
    }
    (run / "evaluations.jsonl").write_text(json.dumps(evaluation) + "\n")
    assert read_run(run).series("rl", "reward/mean")[1].tolist() == [0.25, 0.5, 0.75]
    assert main(["inspect", str(run)]) == 0
    assert "NaN" not in (out := capsys.readouterr().out) and "nan" not in out and "inf" not in out
    assert main(["tail", str(run), "--once"]) == 0
    assert "reward/mean 0.25 ▁▅█ 0.75" in capsys.readouterr().out


def test_one_step_has_no_course(tmp_path: Path):
    assert (
        make_sparkline_table(
            read_run(write_run(tmp_path, metrics=[make_row("rl", 1, reward__mean=1)])), "rl", width=80
        )
        is None
    )


# --- phases -------------------------------------------------------------------------------------------------


def test_time_is_told_by_phase_with_what_no_phase_took(tmp_path: Path):
    times = {
        "time__generate": 2.0,
        "time__train": 5.0,
        "time__weight_sync": 1.0,
        "time__weight_sync_pause": 0.5,
        "time__step": 10.0,
    }
    record = read_run(write_run(tmp_path, metrics=[make_row("rl", 1, **times), make_row("rl", 2, **times)]))
    assert compute_phases(record, "rl") == [
        Phase("train", 10.0, 0.5, ""),
        Phase("generate", 4.0, 0.2, ""),
        Phase("weight_sync", 2.0, 0.1, ""),
        Phase("weight_sync_pause", 1.0, 0.05, "weight_sync"),
        Phase("other", 4.0, 0.2, ""),
    ]
    lines = [line.split() for line in show(make_phase_table(record, "rl", width=80), 80).splitlines()]
    assert lines[2] == ["train", "5", "50.0", "%", "█" * 17]  # half of 34
    assert lines[5][:5] == ["of", "it", "pause", "0.5", "5.0"]


def test_phases_that_overlap_say_so_and_have_no_rest(tmp_path: Path):
    record = read_run(
        write_run(tmp_path, metrics=[make_row("rl", 1, time__generate=9.0, time__train=8.0, time__step=10.0)])
    )
    assert [phase.name for phase in compute_phases(record, "rl")] == ["generate", "train"]
    assert "overlap" in show(make_phase_table(record, "rl", width=160), 160)
    assert (
        make_phase_table(read_run(write_run(tmp_path, metrics=[make_row("rl", 1)])), "rl", width=80) is None
    )


# --- what was lost ------------------------------------------------------------------------------------------


def write_faulty_run(root: Path) -> Path:
    """Three steps; a reward that failed twice, an engine once; groups dropped; samples up to two versions
    old.
    """
    metrics = [
        make_row("rl", 1, fail__reward=1, groups__drawn=10, groups__dropped__zero_std=1),
        make_row(
            "rl",
            2,
            fail__reward=1,
            fail__engine=0,
            groups__drawn=10,
            groups__dropped__zero_std=2,
            optim__skipped_steps=1,
        ),
        make_row("rl", 3, fail__engine=1, groups__drawn=5, groups__dropped__surplus=1),
    ]
    message = "line one\nline two"
    failed = {
        "status": "failed",
        "metadata": {"failure": {"class": "reward", "function": "grade", "message": message}},
    }
    old = {"weight_version_min": 0, "weight_version_max": 1}
    samples = [
        make_row("rl", 1, **failed),
        make_row(
            "rl",
            2,
            **failed
            | {"metadata": {"failure": {"class": "reward", "function": "grade", "message": "newest"}}},
        ),
        make_row("rl", 1, weight_version_min=0, weight_version_max=0),
        make_row("rl", 3, **old),
        make_row("rl", 2, **old),
        make_row("eval-rl", 3, weight_version_min=0, weight_version_max=0),
    ]
    return write_run(root, metrics=metrics, samples=samples)


def test_failures_are_counted_by_class_with_the_newest_example(tmp_path: Path):
    record = read_run(write_faulty_run(tmp_path))
    failures = collect_failures(record, open_columns(RunDir(tmp_path), "samples"))
    assert failures == [Failure("reward", 2, "rl 2", "grade: newest"), Failure("engine", 1, "rl 3", "")]
    text = show(make_failure_table(failures, width=80), 80)
    assert "none was logged" in text
    assert max(map(len, text.splitlines())) <= 80
    assert make_failure_table([], width=80) is None
    assert list_trouble(record) == [
        "1 optimizer steps changed nothing, for loss or gradient was not finite (optim/skipped_steps)"
    ]


def test_dropped_groups_have_a_reason_and_a_share(tmp_path: Path):
    lines = [
        line.split() for line in show(make_dropped_table(read_run(write_faulty_run(tmp_path)))).splitlines()
    ]
    assert lines[2:] == [["rl", "zero_std", "3", "12.0", "%"], ["rl", "surplus", "1", "4.0", "%"]]


def test_lags_are_of_the_samples_of_training(tmp_path: Path):
    lags = count_lags(open_columns(RunDir(write_faulty_run(tmp_path)), "samples"))
    assert (lags.counts.tolist(), lags.mixed) == ([1, 1, 1], 2)
    text = show(describe_lags(lags, width=80))
    assert "staleness of 3 logged samples" in text
    assert "66.7 % have tokens of more than one version" in text


def test_samples_of_the_newest_weights_are_one_line_and_far_ones_one_row(tmp_path: Path):
    fresh = write_run(
        tmp_path / "a", metrics=[], samples=[make_row("rl", 1, weight_version_min=0, weight_version_max=0)]
    )
    lags = count_lags(open_columns(RunDir(fresh), "samples"))
    assert describe_lags(lags, width=80) == "staleness: all 1 logged samples were made by the newest weights"
    far = [make_row("rl", step, weight_version_min=0, weight_version_max=0) for step in (9, 10, 10**9)]
    lags = count_lags(open_columns(RunDir(write_run(tmp_path / "b", metrics=[], samples=far)), "samples"))
    assert lags.counts.tolist() == [0] * 8 + [3]
    assert "8 or more" in show(describe_lags(lags, width=80))
    assert describe_lags(count_lags(open_columns(RunDir(tmp_path), "samples")), width=80) is None


# --- the table of steps -------------------------------------------------------------------------------------


def test_columns_that_do_not_fit_are_left_out_and_counted(tmp_path: Path):
    metrics = [
        make_row(
            "rl",
            1,
            reward__mean=0.5,
            loss__total=1.0,
            optim__grad_norm=2.0,
            optim__lr=1e-5,
            entropy__mean=1.0,
            time__step=3.0,
        )
    ]
    record = read_run(write_run(tmp_path, metrics=metrics))
    # Widths: stage 5, step 4, reward 6, loss 4, grad norm 9, lr 8, entropy 7, s/step 6: with 3 each and 1,
    # the first five take 44.
    assert (
        count_fitting([["stage", "step", "reward", "loss", "grad norm", "lr", "entropy", "s/step"]], 44) == 5
    )
    text = show(make_step_table(record, last=1, width=44), 44)
    assert "3 more columns" in text.replace("\n", " ")
    assert "grad norm" in text
    assert "entropy" not in text


# --- several runs -------------------------------------------------------------------------------------------


def write_two_runs(root: Path) -> tuple[Path, Path]:
    def metrics(steps: int, gain: float) -> list[dict[str, Any]]:
        return [
            make_row("rl", step, reward__mean=gain * step, time__step=30.0) for step in range(1, steps + 1)
        ]

    first = write_run(
        root / "a",
        metrics=metrics(20, 0.01),
        config='name = "x"\n[rl]\nsteps = 20\n[rl.critic]\nclip = 0.2\n[output]\ndir = "a"\n',
    )
    second = write_run(
        root / "b", metrics=metrics(30, 0.02), config='name = "x"\n[rl]\nsteps = 30\n[output]\ndir = "b"\n'
    )
    return first, second


def test_runs_are_compared_at_equal_steps(tmp_path: Path):
    records = {path.name: read_run(path) for path in write_two_runs(tmp_path)}
    text = show(make_metric_table(records, "rl"))
    assert "rl, mean of steps 19 to 20" in text  # the last tenth of 20
    assert "0.195" in text
    assert "0.39 (+0.195)" in text
    assert make_metric_table({"a": records["a"]}, "rl") is None
    assert make_metric_table(records, "sft") is None


def test_settings_that_differ_are_listed_and_a_missing_table_is_one_row(tmp_path: Path):
    records = {path.name: read_run(path) for path in write_two_runs(tmp_path)}
    text = show(make_setting_table(records))
    assert [line.strip("│ ").split() for line in text.splitlines() if line.startswith("│")] == [
        ["[rl.critic]", "│", "1", "settings", "│", "—"],
        ["rl.steps", "│", "20", "│", "30"],
    ]
    assert make_setting_table({"a": records["a"]}) is None
    (tmp_path / "b" / "config.toml").write_text("[")
    with pytest.raises(RunDirError, match=r"b/config\.toml is not TOML"):
        make_setting_table(records)


def test_settings_are_flattened_by_dotted_key():
    flat = flatten_settings({"a": 1, "b": {"c": "", "d": {"e": [1, 2]}, "f": {}}})
    assert flat == {"a": "1", "b.c": '""', "b.d.e": "[1, 2]", "b.f": "{}"}
    assert collect_differences([{"a": "1"}, {}]) == {"a": ["1", "—"]}


def test_facts_have_a_column_per_run(tmp_path: Path):
    text = show(make_fact_table({path.name: read_run(path) for path in write_two_runs(tmp_path)}))
    rows = {
        line.strip("│ ").split("│")[0].strip(): [cell.strip() for cell in line.strip("│ ").split("│")[1:]]
        for line in text.splitlines()
    }
    assert rows["rl: steps"] == ["20", "30"]
    assert rows["rl: reward first → last"] == ["0.01 → 0.2", "0.02 → 0.6"]
    assert rows["rl: minutes"] == ["10.0", "15.0"]


def test_a_difference_is_from_the_first_run():
    assert format_means([2.0, 1.5, None, 2.25]) == ["2", "1.5 (−0.5)", "—", "2.25 (+0.25)"]
    assert format_means([None, 1.5]) == ["—", "1.5"]


def test_runs_of_one_name_are_told_apart_by_what_is_above_them():
    assert name_runs([Path("/x/a/run"), Path("/x/b/run")]) == ["a/run", "b/run"]
    assert name_runs([Path("/x/a"), Path("/x/b")]) == ["a", "b"]


# --- what there is little of --------------------------------------------------------------------------------


def test_a_run_without_steps_has_no_empty_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "config.toml").write_text("")
    assert main(["inspect", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0] == f"{tmp_path}: not finished, 0 attempts, no checkpoint"
    assert "┃" not in out


def test_one_step_is_the_last_step(tmp_path: Path):
    record = read_run(write_run(tmp_path, metrics=[make_row("rl", 1, reward__mean=0.5)]))
    assert show(make_step_table(record, last=10)).splitlines()[0].strip() == "last step"


# --- the command --------------------------------------------------------------------------------------------


def test_inspect_prints_every_section_and_ends_with_the_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    pytest.importorskip("matplotlib")
    run = write_faulty_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"torn')
    assert main(["inspect", str(run)]) == 0
    out = capsys.readouterr().out
    for part in (
        "last 3 steps",
        "staleness of 3",
        "groups that were not trained",
        "samples that failed",
        "grade: newest",
        "last line is torn",
    ):
        assert part in out
    assert out.splitlines()[-1] == f"wrote {run / 'curves.png'}"
    assert main(["inspect", str(run)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"{run / 'curves.png'} is up to date"


def test_inspect_of_several_runs_compares_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    first, second = write_two_runs(tmp_path)
    assert main(["inspect", str(first), str(second)]) == 0
    out = capsys.readouterr().out
    assert "settings that differ" in out
    assert "rl, mean of steps 19 to 20" in out
    assert not (first / "curves.png").exists()
    assert main(["inspect", str(first), str(second), "--png", "x.png"]) == 2
    assert "--png is for one run" in capsys.readouterr().err
