"""Several runs side by side: how far each came, which settings differ, and their metrics at equal steps."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from rollouts.errors import RunDirError
from rollouts.inspect.read import RunRecord, sum_by_name
from rollouts.inspect.sparklines import TELLING, format_number
from rollouts.inspect.table import ACCURACY, DROPPED, FAILED, describe_state, format_counts
from rollouts.run_dir import RunDir

NOT_COMPARED = frozenset({"output.dir"})  # settings that are different in every run
WINDOW = 10  # metrics are means over the last tenth of the steps that both have
MISSING = "—"


def name_runs(roots: Sequence[Path]) -> list[str]:
    """A short name for each run: its directory's, with as many directories above it as it takes to tell them
    apart.
    """
    parts = [root.resolve().parts for root in roots]
    deepest = max(len(path) for path in parts)
    for depth in range(1, deepest + 1):
        names = ["/".join(path[-depth:]) for path in parts]
        if len(set(names)) == len(names):
            return names
    return [str(root) for root in roots]


def make_fact_table(records: Mapping[str, RunRecord]) -> Table:
    """A column per run: state, and per stage steps, reward, accuracy, minutes, and what was lost."""
    table = make_run_table("", records)
    table.add_row("state", *(describe_state(record) for record in records.values()))
    stages = list(dict.fromkeys(stage for record in records.values() for stage in record.stages))
    for stage in stages:
        facts = [describe_stage(record, stage) for record in records.values()]
        for name in dict.fromkeys(name for fact in facts for name in fact):
            table.add_row(f"{stage}: {name}", *(fact.get(name, MISSING) for fact in facts))
    return table


def describe_stage(record: RunRecord, stage: str) -> dict[str, str]:
    """What a stage came to, by name; what it does not have is left out."""
    if stage not in record.stages:
        return {}
    rows = record.stage_rows(stage)
    facts = {"steps": str(rows[-1]["step"])}
    for name, label in (("reward/mean", "reward first → last"), ("loss/total", "loss first → last")):
        _, values = record.series(stage, name)
        if len(values):
            facts[label] = f"{format_number(values[0], 3)} → {format_number(values[-1], 3)}"
    facts |= find_accuracies(record, stage)
    _, seconds = record.series(stage, "time/step")
    if len(seconds):
        facts["minutes"] = f"{seconds.sum() / 60:.1f}"
        facts["s/step"] = f"{seconds.mean():.3g}"
    for prefix, label in ((DROPPED, "groups dropped"), (FAILED, "samples failed")):
        if counts := sum_by_name(rows, prefix):
            facts[label] = format_counts(counts)
    return facts


def find_accuracies(record: RunRecord, stage: str) -> dict[str, str]:
    """Of the last evaluation of each name in a stage, each statistic in percent."""
    found: dict[str, str] = {}
    for row in record.evaluations:
        for name, value in row.items() if row["stage"] == stage else ():
            if match := ACCURACY.fullmatch(name):
                found[f"{match['name']} {match['stat']}"] = f"{100 * value:.1f} %"
    return found


def make_setting_table(records: Mapping[str, RunRecord]) -> Table | None:
    """The settings of config.toml that are not equal in all runs; None if there are none. Raises RunDirError
    for a config that is no TOML.

    A table that a run lacks as a whole is one row, in which the others have the number of its settings.
    """
    settings = [read_settings(RunDir(record.root).config) for record in records.values()]
    table = make_run_table("settings that differ", records)
    for key, values in collect_differences(settings).items():
        table.add_row(key, *values)
    return table if table.row_count else None


def collect_differences(settings: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    """Setting, or `[table]` that some run lacks as a whole, to what each run has."""
    rows: dict[str, list[str]] = {}
    for key in sorted({key for known in settings for key in known} - NOT_COMPARED):
        values = [known.get(key, MISSING) for known in settings]
        if all(value == values[0] for value in values):
            continue
        table = find_missing_table(key, settings)
        if not table:
            rows[key] = values
            continue
        counts = [sum(name.startswith(f"{table}.") for name in known) for known in settings]
        rows[f"[{table}]"] = [f"{count} settings" if count else MISSING for count in counts]
    return rows


def find_missing_table(key: str, settings: Sequence[Mapping[str, str]]) -> str:
    """The uppermost table of a setting that one of the runs lacks as a whole, "" if there is none."""
    words = key.split(".")
    for depth in range(1, len(words)):
        table = ".".join(words[:depth])
        if any(
            not any(name == table or name.startswith(f"{table}.") for name in known) for known in settings
        ):
            return table
    return ""


def read_settings(path: Path) -> dict[str, str]:
    """Each setting of a TOML file as text, by its dotted key; none if it is missing. Raises RunDirError for
    what is no TOML.
    """
    if not path.exists():
        return {}
    try:
        return flatten_settings(tomllib.loads(path.read_text(encoding="utf-8")))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RunDirError(
            f"{path} is not TOML ({error}); the file is damaged: restore it, or compare without this run"
        ) from error


def flatten_settings(table: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Each value below the tables as text, by dotted key."""
    flat: dict[str, str] = {}
    for key, value in table.items():
        inner = isinstance(value, dict) and value
        flat |= (
            flatten_settings(value, f"{prefix}{key}.")
            if inner
            else {prefix + key: '""' if value == "" else str(value)}
        )
    return flat


def make_metric_table(records: Mapping[str, RunRecord], stage: str) -> Table | None:
    """The telling metrics of a stage at equal steps, and by how much each run is above (+) or below the
    first; None if no two runs share steps.

    The steps are the last tenth (at least one) of those up to the step that all runs with this stage have
    reached.
    """
    held = {name: record for name, record in records.items() if stage in record.stages}
    if len(held) < 2:
        return None
    end = min(int(record.stage_rows(stage)[-1]["step"]) for record in held.values())
    begin = end - max(1, end // WINDOW) + 1
    span = f"step {end}" if begin == end else f"mean of steps {begin} to {end}"
    table = make_run_table(f"{stage}, {span}", held)
    for name in TELLING:
        means = [mean_between(record, stage, name, begin, end) for record in held.values()]
        if sum(mean is not None for mean in means) > 1 and any(means):
            table.add_row(name, *format_means(means))
    return table if table.row_count else None


def mean_between(record: RunRecord, stage: str, name: str, begin: int, end: int) -> float | None:
    """The mean of a metric over steps `begin` to `end`, None where no step has it."""
    steps, values = record.series(stage, name)
    chosen = values[(steps >= begin) & (steps <= end)]
    return float(np.mean(chosen)) if len(chosen) else None


def format_means(means: Sequence[float | None]) -> list[str]:
    """Each mean, and behind it the difference from the first one."""
    first = means[0]
    cells: list[str] = []
    for place, mean in enumerate(means):
        if mean is None:
            cells.append(MISSING)
        elif place == 0 or first is None:
            cells.append(format_number(mean))
        else:
            difference = mean - first
            cells.append(
                f"{format_number(mean)}"
                f" ({'+' if difference >= 0 else '−'}{format_number(abs(difference), 3)})"
            )
    return cells


def make_run_table(title: str, names: Mapping[str, RunRecord]) -> Table:
    """A table whose columns are runs."""
    table = Table(title=title or None, title_justify="left", title_style="bold")
    table.add_column("")
    for name in names:
        table.add_column(name, justify="right", overflow="fold")
    return table
