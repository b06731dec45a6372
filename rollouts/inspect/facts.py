"""What there is to say of a run: statements and texts that the terminal and the report share."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from rollouts.config.secrets import flatten_settings, remove_secrets
from rollouts.errors import RunDirError
from rollouts.inspect.record import Record
from rollouts.metrics.jsonl import Row
from rollouts.run_dir import RunDir

ACCURACY = re.compile(r"eval/(?P<name>.+)/(?P<stat>(?:avg|pass)@\d+|accuracy)")
TROUBLE = {
    "optim/skipped_steps": "optimizer steps changed nothing: loss or gradient was not finite",
    "checkpoint/failed": "checkpoints could not be saved",
    "weight_sync/engines_failed": "weight updates of an engine failed",
}
STEP_FACTS = {  # metric: heading, format; what a step says of itself
    "reward/mean": ("reward", ".3f"),
    "loss/total": ("loss", ".4g"),
    "optim/grad_norm": ("grad norm", ".3g"),
    "response_length/mean": ("length", ".1f"),
    "truncated/frac": ("cut", ".2f"),
    "off_policy/max": ("lag", ".0f"),
    "perf/trained_tokens_per_s": ("tok/s", ".0f"),
    "perf/generated_tokens_per_s": ("tok/s", ".0f"),
    "time/step": ("s/step", ".2f"),
    "entropy/mean": ("entropy", ".3f"),
    "clip_ratio": ("clipped", ".3f"),
    "optim/lr": ("lr", ".2e"),
    "rewards/margins": ("margin", ".3f"),
    "rewards/accuracies": ("ranked right", ".2f"),
    "value/mean": ("value", ".3f"),
    "value/explained_variance": ("explained", ".2f"),
}
# the columns of samples_held; `failure` is the metadata's of one that failed
SAMPLE_FACTS = """stage, step, attempt, status, policy_version - weight_version_min AS lag,
    weight_version_max > weight_version_min AS mixed,
    CASE WHEN status = 'failed' THEN metadata->'$.failure' END AS failure,
    CASE WHEN status = 'failed' THEN id END AS failed_id"""
# `messages`: by class and text, the most frequent first; texts that differ in numbers are one, shown as the
# first was. Numbers have four digits, and no exponent where the whole part is longer.
DESCRIBING = r"""
    CREATE OR REPLACE MACRO brief(x) AS
        if(abs(x) >= 1e4 AND abs(x) < 1e7, printf('%.0f', x), format('{:.4g}', x));
    CREATE OR REPLACE MACRO percent(part, whole) AS printf('%.1f %%', 100 * part / nullif(whole, 0));
    CREATE OR REPLACE VIEW messages AS
    SELECT class, function, arg_min(text, place) AS text, count(*) AS count, min(step) AS first,
        max(step) AS last, arg_min(failed_id, place) AS sample, arg_min(stage, place) AS stage,
        arg_min(step, place) AS step, min(place) AS place
    FROM (SELECT *, rowid AS place, coalesce(failure->>'$.class', 'unknown') AS class,
            coalesce(failure->>'$.function', '') AS function,
            coalesce(nullif(trim(left(failure->>'$.message', 400)), ''), '(no message)') AS text,
            regexp_replace(text, '0x[0-9a-f]+|\d+(\.\d+)?', '#', 'gi') AS kind
        FROM samples_held WHERE status = 'failed')
    GROUP BY class, function, kind ORDER BY count DESC, place"""
OUTCOMES = """
    SELECT stages.stage, stages.last AS ">steps",
        printf('%.1f', sum(total) FILTER (name = 'time/step') / 60) AS ">minutes",
        coalesce(any_value(brief(totals.first) || ' → ' || brief(totals.last))
            FILTER (name = 'reward/mean'), '') AS ">reward first → last",
        coalesce(any_value(brief(totals.first) || ' → ' || brief(totals.last))
            FILTER (name = 'loss/total'), '') AS ">loss first → last",
        (sum(total) FILTER (name LIKE 'groups/dropped/%'))::BIGINT AS ">groups dropped",
        (sum(total) FILTER (name LIKE 'fail/%'))::BIGINT AS ">samples failed"
    FROM stages LEFT JOIN totals USING (stage) GROUP BY ALL ORDER BY min(stages.rowid)"""
DROPPED = """
    SELECT 'groups that were not trained' AS title, name[16:] AS reason, sum(total)::BIGINT AS ">groups",
        percent(sum(total), (SELECT sum(total) FROM totals WHERE name = 'groups/drawn')) AS ">of those drawn"
    FROM totals WHERE name LIKE 'groups/dropped/%' GROUP BY name HAVING sum(total) > 0
    ORDER BY sum(total) DESC"""


def load_facts(record: Record, more: str = "") -> None:
    """Loads samples_held, with `more` columns, and makes the macros and views of this page."""
    record.load("samples", SAMPLE_FACTS + more)
    record.connection.execute(DESCRIBING)


def find_trouble(record: Record) -> list[tuple[str, float]]:
    """What went wrong in steps, and how often."""
    totals = {
        row["name"]: row["total"]
        for row in record.rows("SELECT name, sum(total) AS total FROM totals GROUP BY name")
    }
    return [(what, totals[name]) for name, what in TROUBLE.items() if totals.get(name)]


def describe_step(row: Row) -> dict[str, str]:
    """The main numbers that a row of metrics has, by heading."""
    return {
        heading: format(row[name], form)
        for name, (heading, form) in STEP_FACTS.items()
        if isinstance(row.get(name), int | float)
    }


def find_failure(row: Row) -> dict[str, Any]:
    """Why a sample failed, by its row; empty where that is not known."""
    metadata = row.get("metadata")
    failure = metadata.get("failure") if isinstance(metadata, dict) else None
    return failure if isinstance(failure, dict) else {}


def describe_failure(failure: Mapping[str, Any]) -> str:
    """`function: message` of a failed sample on one line."""
    texts = (str(failure[name]) for name in ("function", "message") if failure.get(name))
    return " ".join(": ".join(texts).split())


def count_of(number: int, thing: str) -> str:
    """`1 attempt`, `2 attempts`."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


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
