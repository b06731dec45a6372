"""What `inspect` prints: of one run everything at a glance, of several what differs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
from rich.console import Console, RenderableType
from rich.table import Table

from rollouts.inspect.chart import Curve, draw_chart, draw_sparkline
from rollouts.inspect.facts import (
    ACCURACY,
    REST,
    SAMPLE_FACTS,
    count_of,
    describe_failure,
    describe_stage,
    find_accuracies,
    find_differences,
    find_failures,
    read_settings,
    split_phases,
)
from rollouts.inspect.record import Record, Stage, find_checkpoints
from rollouts.inspect.terminal import format_number, tabulate

STEP_COLUMNS = {  # metric: heading, format
    "reward/mean": (">reward", ".3f"),
    "loss/total": (">loss", ".4g"),
    "optim/grad_norm": (">grad norm", ".3g"),
    "optim/lr": (">lr", ".2e"),
    "entropy/mean": (">entropy", ".3f"),
    "rewards/margins": (">margin", ".3f"),
    "rewards/accuracies": (">ranked right", ".2f"),
    "accuracy": (">accuracy", ".2f"),
    "value/mean": (">value", ".3f"),
    "value/explained_variance": (">explained", ".2f"),
    "clip_ratio": (">clipped", ".3f"),
    "response_length/mean": (">length", ".1f"),
    "truncated/frac": (">cut", ".2f"),
    "off_policy/max": (">lag", ".0f"),
    "perf/trained_tokens_per_s": (">tok/s", ".0f"),
    "perf/generated_tokens_per_s": (">tok/s", ".0f"),
    "time/step": (">s/step", ".2f"),
}
TELLING = (  # the first SHOWN that a stage has and that are not 0 throughout
    *("reward/mean", "loss/total", "rewards/accuracies", "rewards/margins", "loss/nll", "entropy/mean"),
    *("response_length/mean", "truncated/frac", "optim/grad_norm", "kl/ref", "mismatch_kl/mean"),
    *("clip_ratio", "off_policy/mean", "groups/zero_std_frac", "value/explained_variance"),
    *("importance_weight/ess", "perf/generated_tokens_per_s", "perf/trained_tokens_per_s"),
    *("time/step", "optim/lr"),
)
SHOWN = 12
LAGS = 8  # versions; samples further behind count as these
LEAST_WIDTH = 100  # of a terminal that shows four numbers of each course


def print_run(console: Console, record: Record, *, last: int) -> None:
    """Prints everything about a run, the state and the outcome last. Parts that it has nothing for are left
    out.
    """
    record.load("samples", SAMPLE_FACTS)
    stages = list(record.stages.values())
    print_parts(console, iterate_parts(record, stages, last=last, width=console.width))
    console.print(f"{record.root}: {describe_state(record)}", soft_wrap=True)
    print_parts(console, [tabulate("", [{"stage": stage.name} | list_facts(stage) for stage in stages])])
    for line in [*list_summary(record), *record.notes]:
        console.print(line, soft_wrap=True)


def print_parts(console: Console, parts: Iterable[RenderableType]) -> None:
    """Prints parts with a line between them, without empty tables."""
    for part in parts:
        if not isinstance(part, Table) or part.row_count:
            console.print(part, soft_wrap=not isinstance(part, Table))
            console.print()


def iterate_parts(record: Record, stages: list[Stage], *, last: int, width: int) -> Iterator[RenderableType]:
    """The parts of a run's page."""
    for stage in stages:
        for name in ("reward/mean", "loss/total"):
            curve = Curve("", stage.name, name, *stage.series(name))
            if len(curve.values) > 1:
                yield draw_chart([curve], width=max(20, min(72, width - 14)), height=8)
    yield from (make_course_table(stage, width=width) for stage in stages)
    yield make_step_table(stages, last=last, width=width)
    yield make_evaluation_table(record)
    yield from (make_phase_table(stage, width=width) for stage in stages)
    yield make_lag_table(record, width=width)
    failures = find_failures(record)
    drawn = sum(stage.filled("groups/drawn").sum() for stage in stages)
    groups = [
        {"reason": reason, ">groups": f"{count:.0f}", ">of those drawn": describe_share(count, drawn)}
        for reason, count in failures["dropped"]
    ]
    yield tabulate("groups that were not trained", groups)
    examples = {message["class"]: message for message in reversed(failures["messages"])}
    kinds = [
        {
            "class": kind["name"],
            ">samples": str(kind["total"]),
            ">last at step": str(kind["last"]),
            "for example": describe_failure(examples.get(kind["name"], {"text": "none was logged"})),
        }
        for kind in failures["classes"]
    ]
    yield tabulate("samples that failed", kinds)
    yield from (f"{total:.0f} {what}" for what, total in failures["trouble"])


def make_course_table(stage: Stage, *, width: int) -> Table:
    """The telling metrics of a stage: course, first, last, lowest and highest value; empty for one step."""
    begin, end = int(stage.columns["step"][0]), int(stage.columns["step"][-1])
    wide = width >= LEAST_WIDTH
    rows: list[dict[str, str]] = []
    for name, steps, values in [(name, *stage.series(name)) for name in TELLING]:
        if len(values) > 1 and values.any():
            numbers = {">first": values[0], ">last": values[-1], ">min": values.min(), ">max": values.max()}
            room = max(4, min(60, width - (80 if wide else 44)))
            course = draw_sparkline(steps, values, first=begin, last=end, width=room)
            cells = {key: format_number(value) for key, value in numbers.items() if wide or key == ">last"}
            rows.append({"metric": name, "|course": course} | cells)
    return tabulate(f"{stage.name}, steps {begin} to {end}", rows[:SHOWN], lines=False)


def make_step_table(stages: list[Stage], *, last: int, width: int) -> Table:
    """The last steps of the run, without columns that none of them has and those that do not fit."""
    rows: list[dict[str, str]] = []
    places = [(stage, place) for stage in stages for place in range(len(stage))[-last:]]
    for stage, place in places[-last:]:
        cells = {"stage": stage.name, ">step": str(stage.columns["step"][place])}
        for name, (heading, form) in STEP_COLUMNS.items():
            value = stage.columns[name][place] if name in stage.columns else np.nan
            cells[heading] = format(value, form) if np.isfinite(value) else cells.get(heading, "")
        rows.append(cells)
    return tabulate(f"last {count_of(len(rows), 'step')}", rows, width=width)


def make_evaluation_table(record: Record) -> Table:
    """Accuracy of each evaluation in percent, and where preferences were evaluated the margin of their
    rewards.
    """
    rows: list[dict[str, str]] = []
    for row in record.evaluations:
        prefix, version = f"eval/{row.get('name')}/", str(row.get("policy_version", ""))
        cells = {"stage": row["stage"], ">step": str(row["step"]), ">version": version}
        cells["name"] = row.get("name", "")
        for name, value in row.items():
            if match := ACCURACY.fullmatch(name):
                cells[f">{match['stat']}"] = f"{100 * value:.1f} %"
        if f"{prefix}rewards/margins" in row:
            cells[">margin"] = f"{row[f'{prefix}rewards/margins']:.3f}"
        rows.append(cells | {">failed": f"{row.get(f'{prefix}failed', 0):.0f}"})
    return tabulate("evaluations", rows)


def make_phase_table(stage: Stage, *, width: int) -> Table:
    """Seconds per step, share of the time and a bar for each phase; empty where the stage has none."""
    total = float(stage.filled("time/step").sum())
    rows: list[dict[str, str]] = []

    def add(name: str, seconds: float) -> None:
        shown = {"phase": name, ">s/step": f"{seconds / len(stage):.3g}"}
        rows.append(shown | draw_share(seconds, total, width=width))

    rest = 0.0
    for name, seconds in split_phases(stage).items():
        rest = float(seconds.sum())
        if name != REST or rest >= 0.005 * total:
            add(name, rest)
        if name == "weight_sync" and "time/weight_sync_pause" in stage.columns:
            add("  of it pause", float(stage.filled("time/weight_sync_pause").sum()))
    overlap = " (phases overlap: together they are more than the step)" if rest < -0.005 * total else ""
    return tabulate(f"{stage.name}, time by phase{overlap}", rows, lines=False)


def make_lag_table(record: Record, *, width: int) -> Table | str:
    """How many weight versions behind the logged samples of training were."""
    found = record.connection.execute(
        f"SELECT least(lag, {LAGS}) AS behind, count(*), count(*) FILTER (mixed) FROM samples_held"
        " WHERE NOT starts_with(stage, 'eval-') AND lag IS NOT NULL GROUP BY behind ORDER BY behind"
    ).fetchall()
    total = sum(count for _, count, _ in found)
    if found and found[-1][0] == 0:
        return f"staleness: all {total} logged samples were made by the newest weights"
    rows: list[dict[str, str]] = []
    for lag, count, _ in found:
        label = f"{lag} or more" if lag == LAGS else str(lag)
        shown = {">versions behind": label, ">samples": str(count)}
        rows.append(shown | draw_share(count, total, width=width))
    mixed = describe_share(sum(mixed for *_, mixed in found), total)
    title = f"staleness of {total} logged samples, {mixed} with tokens of more than one version"
    return tabulate(title, rows, lines=False)


def describe_share(part: float, whole: float) -> str:
    """`12.5 %`, "" of nothing."""
    return f"{100 * part / whole:.1f} %" if whole else ""


def draw_share(part: float, whole: float, *, width: int) -> dict[str, str]:
    """A share in percent and as a bar."""
    share = part / whole if whole else 0.0
    bar = "█" * round(min(1.0, share) * max(4, min(50, width - 46)))
    return {">share": describe_share(part, whole), "|": bar}


def describe_state(record: Record) -> str:
    """Whether the run is finished, how often it was started, and its newest checkpoint."""
    checkpoints = [f"checkpoint {stage}/step_{step}" for stage, step in find_checkpoints(record.run_dir)]
    state = "finished" if record.summary else "not finished"
    return ", ".join([state, count_of(record.attempts, "attempt"), (checkpoints or ["no checkpoint"])[-1]])


def list_facts(stage: Stage) -> dict[str, str]:
    """What a stage came to, by heading."""
    found = describe_stage(stage)
    facts = {">steps": str(found["last"]), ">minutes": f"{found['seconds'] / 60:.1f}"}
    for name in ("reward", "loss"):
        facts[f">{name} first → last"] = " → ".join(map(format_number, found[name] or ()))
    totals = {">groups dropped": found["dropped"], ">samples failed": found["failed"]}
    return facts | {name: str(total or "") for name, total in totals.items()}


def list_summary(record: Record) -> list[str]:
    """What summary.json says beyond the tables. Empty until the run is finished."""
    facts: list[str] = []
    for name, value in record.summary.items():
        if isinstance(value, int | float | str):
            facts.append(f"{name} {value}")
    lines = [", ".join(facts)]
    for name, joint in (("accuracy", " → "), ("pair_accuracy", ", ")):
        held = record.summary.get(name) or {}
        known = [f"{stage} {100 * value:.1f} %" for stage, value in held.items() if value is not None]
        lines.append(f"{name.replace('_', ' ')}: {joint.join(known)}" if known else "")
    versions = [f"{name} {version}" for name, version in record.summary.get("versions", {}).items()]
    lines.append(f"versions: {', '.join(versions)}" if versions else "")
    return [line for line in lines if line]


# --- several runs -------------------------------------------------------------------------------------------


def print_comparison(console: Console, records: Mapping[str, Record]) -> None:
    """Prints runs side by side: metrics at equal steps, settings that differ, and what each came to."""
    stages = list(dict.fromkeys(name for record in records.values() for name in record.stages))
    parts = [make_metric_table(records, stage) for stage in stages]
    differing = find_differences([read_settings(record.run_dir) for record in records.values()])
    settings = [
        {"setting": name} | {f">{run}": value or "" for run, value in zip(records, values, strict=True)}
        for name, values in sorted(differing.items())
    ]
    facts: dict[str, dict[str, str]] = {}
    for run, record in records.items():
        facts.setdefault("state", {"": "state"})[f">{run}"] = describe_state(record)
        for stage in record.stages.values():
            accuracies = find_accuracies(record, stage.name).items()
            shares = {name: f"{100 * values[-1]:.1f} %" for name, values in accuracies}
            for name, text in (list_facts(stage) | shares).items():
                label = f"{stage.name}: {name.strip('>')}"
                facts.setdefault(label, {"": label})[f">{run}"] = text
    parts += [tabulate("settings that differ", settings, absent="—")]
    print_parts(console, [*parts, tabulate("", list(facts.values()), absent="—")])
    for note in (note for record in records.values() for note in record.notes):
        console.print(note, soft_wrap=True)


def make_metric_table(records: Mapping[str, Record], stage: str) -> Table:
    """The telling metrics of a stage, and how far each run is above (+) or below the first.

    They are means over the last tenth of the steps that all runs with this stage have reached.
    """
    held = {name: record.stages[stage] for name, record in records.items() if stage in record.stages}
    end = min(int(found.columns["step"][-1]) for found in held.values())
    begin = end - max(1, end // 10) + 1
    rows: list[dict[str, str]] = []
    for name in TELLING if len(held) > 1 else ():
        first, cells = np.nan, {"": name}
        for run, found in held.items():
            steps, values = found.series(name)
            chosen = values[(steps >= begin) & (steps <= end)]
            if not len(chosen):
                continue
            mean = float(chosen.mean())
            cells[f">{run}"] = format_number(mean)
            if len(cells) == 2:
                first = mean
            else:
                difference = format_number(abs(mean - first), 3)
                cells[f">{run}"] += f" ({'+' if mean >= first else '−'}{difference})"
        rows += [cells] if len(cells) > 2 else []
    span = f"step {end}" if begin == end else f"mean of steps {begin} to {end}"
    return tabulate(f"{stage}, {span}", rows, absent="—")
