"""What there is to say of a run: the numbers and texts that the terminal, several runs side by side and the
report draw.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rollouts.config.secrets import flatten_settings, remove_secrets
from rollouts.errors import RunDirError
from rollouts.inspect.record import Record, Stage
from rollouts.run_dir import RunDir

ACCURACY = re.compile(r"eval/(?P<name>.+)/(?P<stat>(?:avg|pass)@\d+|accuracy)")
TROUBLE = {
    "optim/skipped_steps": "optimizer steps changed nothing: loss or gradient was not finite",
    "checkpoint/failed": "checkpoints could not be saved",
    "weight_sync/engines_failed": "weight updates of an engine failed",
}
DROPPED, FAILED = "groups/dropped/", "fail/"
NOT_PHASES = ("step", "weight_sync_pause")  # the whole, and a part of another phase
PHASES = 6  # of which each has a colour; the rest of the step has the seventh
REST = "rest of the step"
PARTS = 20  # of the run's steps, over which failures are counted
# of each sample; `failure` is the metadata's of one that failed
SAMPLE_FACTS = """stage, step, attempt, status, policy_version - weight_version_min AS lag,
    weight_version_max > weight_version_min AS mixed,
    CASE WHEN status = 'failed' THEN metadata->'$.failure' END AS failure,
    CASE WHEN status = 'failed' THEN id END AS failed_id"""
# by class and text, the most frequent first; texts that differ in numbers are one, shown as the first was
MESSAGES = r"""SELECT class, function, arg_min(text, place) AS text, count(*) AS count, min(step) AS first,
        max(step) AS last, arg_min(failed_id, place) AS sample, arg_min(stage, place) AS stage,
        arg_min(step, place) AS step, min(place) AS place
    FROM (SELECT *, coalesce(failure->>'$.class', 'unknown') AS class,
            coalesce(failure->>'$.function', '') AS function,
            coalesce(nullif(trim(left(failure->>'$.message', 400)), ''), '(no message)') AS text,
            regexp_replace(text, '0x[0-9a-f]+|\d+(\.\d+)?', '#', 'gi') AS kind
        FROM samples_held WHERE status = 'failed')
    GROUP BY class, function, kind ORDER BY count DESC, min(place)"""


def describe_stage(stage: Stage) -> dict[str, Any]:
    """What a stage came to: steps, seconds in steps, reward and loss of the first and the last step, samples
    that failed and groups that were dropped.
    """

    def find_ends(name: str) -> list[float] | None:
        values = stage.series(name)[1]
        return [float(values[0]), float(values[-1])] if len(values) else None

    return {
        "name": stage.name,
        "last": int(stage.columns["step"][-1]),
        "seconds": float(stage.filled("time/step").sum()),
        "reward": find_ends("reward/mean"),
        "loss": find_ends("loss/total"),
        "failed": round(sum(stage.sum_below(FAILED).values())),
        "dropped": round(sum(stage.sum_below(DROPPED).values())),
    }


def sum_stages(record: Record, prefix: str) -> list[tuple[str, float]]:
    """The sum over all stages of each metric whose name begins with `prefix`, without the prefix, the largest
    first.
    """
    totals: dict[str, float] = {}
    for stage in record.stages.values():
        for name, total in stage.sum_below(prefix).items():
            totals[name] = totals.get(name, 0.0) + total
    return sorted(totals.items(), key=lambda item: -item[1])


def split_phases(stage: Stage) -> dict[str, np.ndarray]:
    """Seconds of each phase in every step, the longest first, and the rest of the step last: below 0 where
    phases overlap. Empty where the stage has no phases.
    """
    sums = stage.sum_below("time/")
    names = [name for name in sums if name not in NOT_PHASES][:PHASES]
    phases = {name: stage.filled(f"time/{name}") for name in names}
    if phases:
        phases[REST] = stage.filled("time/step") - np.sum(list(phases.values()), axis=0)
    return phases


def find_failures(record: Record) -> dict[str, Any]:
    """Samples that failed by class (of the metrics) and by message (of logged samples, in the table
    samples_held), dropped groups by reason, and steps that went wrong.
    """
    stages = list(record.stages.values())
    steps = np.concatenate([np.empty(0, np.int64), *(stage.columns["step"] for stage in stages)])
    classes: list[dict[str, Any]] = []
    for name, total in sum_stages(record, FAILED):
        counts = np.concatenate([stage.filled(FAILED + name) for stage in stages])
        places = np.flatnonzero(counts)
        spread = np.bincount(places * PARTS // len(counts), weights=counts[places], minlength=PARTS)
        found = {"first": int(steps[places].min()), "last": int(steps[places].max())}
        classes.append(
            {"name": name, "total": round(total), "steps": len(places), **found, "spread": spread.tolist()}
        )
    trouble = {what: sum(total for _, total in sum_stages(record, name)) for name, what in TROUBLE.items()}
    return {
        "classes": classes,
        "messages": record.rows(MESSAGES),
        "dropped": sum_stages(record, DROPPED),
        "trouble": [(what, total) for what, total in trouble.items() if total],
    }


def find_accuracies(record: Record, stage: str | None = None) -> dict[str, list[float]]:
    """`name stat` of each accuracy that was evaluated (of a stage), with its values in the order of the
    run.
    """
    found: dict[str, list[float]] = {}
    for row in record.evaluations:
        for name, value in row.items() if stage in (None, row["stage"]) else ():
            if match := ACCURACY.fullmatch(name):
                found.setdefault(f"{match['name']} {match['stat']}", []).append(value)
    return found


def find_failure(row: Mapping[str, Any]) -> dict[str, Any]:
    """Why a sample failed, by its row; empty where that is not known."""
    metadata = row.get("metadata")
    failure = metadata.get("failure") if isinstance(metadata, dict) else None
    return failure if isinstance(failure, dict) else {}


def describe_failure(failure: Mapping[str, Any]) -> str:
    """`function: message` of a failed sample on one line."""
    texts = (str(failure[name]) for name in ("function", "message", "text") if failure.get(name))
    return " ".join(": ".join(texts).split())


def count_of(number: int, thing: str) -> str:
    """`1 attempt`, `2 attempts`."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def format_duration(seconds: float) -> str:
    """`45 s`, `12 min`, `3.5 h`."""
    if seconds < 100:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def read_settings(run_dir: RunDir) -> dict[str, str]:
    """Each setting of config.toml as text by its dotted name, secrets hidden; none if it is missing.

    Raises RunDirError for what is no TOML.
    """
    try:
        table = tomllib.loads(run_dir.config.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise RunDirError(f"{run_dir.config} is not TOML ({error}); restore the file") from error
    return flatten_settings(remove_secrets("", table))


def find_differences(settings: Sequence[Mapping[str, str]]) -> dict[str, list[str | None]]:
    """Settings that are not the same in all runs, with each run's value, None where it has none."""
    names = dict.fromkeys(name for run in settings for name in run if name != "output.dir")
    values = {name: [run.get(name) for run in settings] for name in names}
    return {name: found for name, found in values.items() if len(set(found)) > 1}
