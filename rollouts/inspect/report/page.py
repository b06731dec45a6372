"""The HTML file: one page with its styles, scripts and values inside, which its own policy forbids to load
anything.

It holds the rows of a few statements, of which facts.js makes what the page says, and logged samples, within
a number of bytes, with the values of their tokens.
"""

import base64
import hashlib
import html
import math
import re
import time
from pathlib import Path
from typing import Any

import numpy as np

from rollouts import __version__
from rollouts.errors import RecordError
from rollouts.inspect.guardrails import GUARDRAILS, MATTERED, load_guardrails, read_log
from rollouts.inspect.record import (
    DROPPED,
    OUTCOMES,
    TROUBLE,
    Record,
    find_checkpoints,
    load_facts,
    open_records,
    read_settings,
)
from rollouts.inspect.samples import find_updates, list_turns, read_tokens
from rollouts.run_dir import describe_activity, find_activity, replace_file
from rollouts.types import Fields, encode_json

# --- samples ------------------------------------------------------------------------------------------------


TEXT_CHARS = 20_000  # of a prompt's message, a response or another text; a longer one is cut
# The places of samples that together have no more than so many bytes, the most wanted first. A sample's place
# in each order is the bytes before it over the order's share of the room; the least of these counts. Examples
# of failures, which messages name, come first; whole steps in the order of a hash are even over the run.
CHOSEN = """
    WITH ordered AS (
        SELECT place, bytes, least(
            CASE WHEN place IN (SELECT unnest(?::BIGINT[])) THEN 0 END,
            sum(bytes) OVER (ORDER BY age, place) / 0.3,
            CASE WHEN status = 'failed' THEN sum(bytes) OVER (
                PARTITION BY status ORDER BY place DESC) / 0.15 END,
            CASE WHEN reward IS NOT NULL THEN least(
                sum(bytes) OVER (PARTITION BY reward IS NULL ORDER BY reward DESC, place DESC),
                sum(bytes) OVER (PARTITION BY reward IS NULL ORDER BY reward, place DESC)) / 0.1 END,
            sum(bytes) OVER (ORDER BY hash(stage, step), place) / 0.3) AS rank
        FROM (SELECT *, rowid AS place, dense_rank() OVER (PARTITION BY stage ORDER BY step DESC) AS age
            FROM samples_held))
    SELECT place FROM ordered
    QUALIFY sum(bytes) OVER (ORDER BY rank, place) <= ? ORDER BY rank, place"""
LEFT_OUT = frozenset({"schema", "attempt", "time_unix", "messages"})  # of a row, in the page
TOKEN_BYTES = 28  # of a token with its values, in JSON
SHARE = 0.3  # of the room that tokens may take
SAMPLE_TOKENS = 4_000  # of one sample; the rest is cut


def gather_samples(record: Record, limit_bytes: int, examples: list[int]) -> list[str]:
    """JSON of the samples for the page in the order of the file, by the table samples_held. `examples`:
    places that are wanted first.

    A sample that was trained has advantage, weight and share of its first update, and `arrays` with values of
    its tokens, the most wanted samples first, until those take their SHARE. A trajectory has `turns`, the
    advantage and weight of its last segment, and the share of all.
    """
    for_tokens = SHARE * limit_bytes * bool(record.rows("FROM contributions LIMIT 1"))
    chosen = [row["place"] for row in record.rows(CHOSEN, [examples, int(limit_bytes - for_tokens)])]
    rows = record.read_samples(chosen)
    updates = find_updates(record, rows)
    texts = {}
    missing = 0
    for place, row, found in zip(chosen, rows, updates, strict=True):
        sample = {name: value for name, value in row.items() if name not in LEFT_OUT}
        if "messages" in row:
            sample["turns"] = list_turns(row)
        update = found[-1] if found else {}
        sample |= {name: update[name] for name in ("advantage", "weight", "share") if name in update}
        if for_tokens > 0 and "shard" in update:
            try:
                pieces, values = read_tokens(record, found)
            except RecordError:
                missing += 1
            else:
                cut = slice(SAMPLE_TOKENS)
                sample["arrays"] = {name: round_numbers(array[cut]) for name, array in values.items()}
                sample["arrays"] |= {"pieces": pieces[cut], "cut": len(pieces[SAMPLE_TOKENS:])}
                for_tokens -= TOKEN_BYTES * len(pieces[cut])
        text = encode_for_script(shorten(sample))
        limit_bytes -= len(text.encode(errors="replace")) + 1
        if limit_bytes < 0:
            break
        texts[place] = text
    if missing:
        record.notes.append(
            f"per-token arrays of {missing} shown samples were removed to make room, or are damaged"
        )
    return [texts[place] for place in sorted(texts)]


def shorten(value: Any) -> Any:
    """The value with long texts cut, and None for numbers that are not finite."""
    if isinstance(value, str) and len(value) > TEXT_CHARS:
        return f"{value[:TEXT_CHARS]}… ({len(value):,} characters in all)"
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: shorten(inner) for name, inner in value.items()}
    return [shorten(inner) for inner in value] if isinstance(value, list) else value


def encode_for_script(value: Any) -> str:
    """JSON that may stand inside a script element: without `<` and JavaScript's other line ends."""
    text = encode_json(value)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def round_numbers(values: np.ndarray) -> list[float]:
    """Plain numbers of three digits, whole ones without a point."""
    short = (float(f"{value:.3g}") for value in values.tolist())
    return [int(number) if number.is_integer() else number for number in short]


# --- rows ---------------------------------------------------------------------------------------------------


POINTS = 2000  # of a curve, at most
CURVE_VALUES = 1_200_000  # numbers of all curves of a report together
SAMPLE_BYTES = 12_000_000  # of samples as JSON, of all runs together
MESSAGES = 100  # distinct ones that are listed
NEWEST_LINES, LINE_CHARS = 2000, 500  # of updates.log that are shown
BYTES = """, 400 + least(coalesce(strlen(prompt), 0) + coalesce(strlen(response), 0), 40000)
    + coalesce(strlen(metadata), 0) + coalesce(strlen(messages), 0) AS bytes"""
# `placed`: the rows of metrics, consecutive ones of a stage in a bucket; a stage has at most {most} buckets,
# fewer where three numbers of each metric and bucket would be more than {values}
PLACED = """
    CREATE MACRO rounded(x) AS if(isfinite(x), format('{{:.5g}}', x)::DOUBLE, NULL);
    CREATE TABLE placed AS
    SELECT metrics_held.*, NULL::DOUBLE AS "no metric",
        lag(metrics_held.attempt) OVER steps < metrics_held.attempt AS resumed,
        (row_number() OVER steps - 1) // ceil(rows / points)::INT AS bucket
    FROM metrics_held JOIN stages USING (stage), (
        SELECT greatest(100, least({most}, {values} // (3 * greatest(1, count(DISTINCT name))))) AS points
        FROM totals) WINDOW steps AS (PARTITION BY stage ORDER BY step)"""
AXES = """
    SELECT stage, list(step ORDER BY bucket) AS step, list(seconds ORDER BY bucket) AS time,
        coalesce(list(bucket ORDER BY bucket) FILTER (resumed), []) AS resumed
    FROM (SELECT stage, bucket, min(step) AS step, coalesce(bool_or(resumed), false) AS resumed,
            arg_min(time_unix, step) - (SELECT min(time_unix) FROM metrics_held) AS seconds
        FROM placed GROUP BY stage, bucket)
    GROUP BY stage"""
# of each stage a list for each metric: a value of each bucket
CURVES = """
    SELECT stage, list(COLUMNS(* EXCLUDE (stage, bucket)) ORDER BY bucket)
    FROM (SELECT stage, bucket, rounded({value}) FROM placed GROUP BY stage, bucket) GROUP BY stage"""
METRICS = """COLUMNS(* EXCLUDE (
    schema, stage, step, policy_version, attempt, time_unix, resumed, bucket))"""
# over twentieths of the run's steps
FAILED = """
    SELECT name[6:] AS name, sum(total)::BIGINT AS total, sum(steps)::BIGINT AS steps, min(first) AS first,
        max(last) AS last, list({'part': part, 'samples': total}) AS spread
    FROM (SELECT name, part, sum(value) AS total, count(*) AS steps, min(step) AS first, max(step) AS last
        FROM points JOIN (
            SELECT rowid AS place, (row_number() OVER () - 1) * 20 // count(*) OVER () AS part
            FROM metrics_held
        ) USING (place) WHERE name LIKE 'fail/%' AND value > 0 GROUP BY name, part)
    GROUP BY name ORDER BY sum(total) DESC"""
# Of each stage and each of reward, length and lag: counts by range of steps (at most 24) and bin, and means.
# Bins are whole numbers for lag (the last takes all from 11 on) and short lengths, else 20 of equal width;
# what is longer than 99.5 % of the responses is in the last.
SPREADS = """
    WITH held AS (
        UNPIVOT (SELECT stage, step, reward, response_length::DOUBLE AS length, lag::DOUBLE AS lag
            FROM samples_held)
        ON reward, length, lag INTO NAME name VALUE value),
    tops AS (
        SELECT stage, name, max(value) AS most, min(value) AS least,
            CASE name WHEN 'length' THEN greatest(1, quantile_cont(value, 0.995)) ELSE most END AS top,
            name = 'lag' OR (name = 'length' AND top <= 20) AS whole,
            (CASE WHEN whole THEN least(floor(top), if(name = 'lag', 11, 20)) + 1 ELSE 20 END)::INT AS bins,
            CASE WHEN whole THEN -0.5 WHEN name = 'length' THEN 0 WHEN least = most THEN least - 0.5
                ELSE least END AS low,
            CASE WHEN whole THEN 1 WHEN least = most AND name = 'reward' THEN 1 / bins
                ELSE (top - low) / bins END AS width
        FROM held GROUP BY stage, name),
    ranges AS (
        SELECT stage, name, step, ntile(24) OVER (PARTITION BY stage, name ORDER BY step) AS range
        FROM (SELECT DISTINCT stage, name, step FROM held)),
    counted AS (
        SELECT stage, name, range, min(step) AS first, max(step) AS last, avg(value) AS mean,
            any_value(bins) AS bins,
            histogram(least(bins - 1, greatest(0, floor((value - low) / width)))::INT) AS counts
        FROM held JOIN tops USING (stage, name) JOIN ranges USING (stage, name, step)
        GROUP BY stage, name, range)
    SELECT stage, name, list([first, last] ORDER BY range) AS steps,
        list(rounded(mean) ORDER BY range) AS means,
        list([coalesce(counts[bin], 0) FOR bin IN range(counted.bins)] ORDER BY range) AS counts,
        any_value([low + bin * width FOR bin IN range(tops.bins + 1)]) AS edges,
        any_value(if(name = 'lag', most > 11, most > top)) AS more
    FROM counted JOIN tops USING (stage, name)
    WHERE NOT (name = 'lag' AND starts_with(stage, 'eval-')) GROUP BY stage, name"""
# the newest of what updates.log says in words
EVENTS = f"""
    SELECT stage, step, time, kind, left(words, {LINE_CHARS}) AS words
    FROM (FROM events ORDER BY place DESC LIMIT {NEWEST_LINES}) ORDER BY place"""
TABLES = {
    "stages": "FROM stages",
    "totals": "FROM totals",
    "outcomes": OUTCOMES,
    "axes": AXES,
    "means": CURVES.format(value=f"avg({METRICS})"),
    "lows": CURVES.format(value=f"min({METRICS})"),
    "highs": CURVES.format(value=f"max({METRICS})"),
    "phases": CURVES.format(value="sum(COLUMNS('^(time/.*|no metric)$')) / count(*)"),  # absent ones are 0
    "failed": FAILED,
    "dropped": DROPPED,
    "trouble": TROUBLE,
    "guardrails": GUARDRAILS,
    "guards": "SELECT name, low, high, band FROM guards",
    "events": EVENTS,
    "mattered": MATTERED,
    "messages": f"SELECT *, count(*) OVER () AS kinds FROM messages LIMIT {MESSAGES}",
    "spreads": SPREADS,
    "evaluations": "SELECT * EXCLUDE (schema, attempt) FROM evaluations_held ORDER BY rowid",
    "logged": "SELECT count(*) AS total FROM samples_held",
    "times": "SELECT min(time_unix) AS begun, max(time_unix) AS newest FROM metrics_held",
}


def gather_run(record: Record, name: str = "", *, share: float) -> tuple[Fields, list[str]]:
    """(everything of a run that the page says of it, its samples as JSON texts), in this share of the page.
    The record must have its points.
    """
    load_facts(record, BYTES)
    text = read_log(record)
    load_guardrails(record, text)
    record.execute(PLACED.format(most=POINTS, values=int(share * CURVE_VALUES)))
    tables = {table: record.rows(sql) for table, sql in TABLES.items()}
    activity = find_activity(record.run_dir)
    *lines, torn = text.split("\n")
    samples = gather_samples(record, int(share * SAMPLE_BYTES), [row["place"] for row in tables["messages"]])
    return tables | {
        "name": name,
        "directory": str(record.root),
        "state": activity.state,
        "activity": describe_activity(activity),
        "certain": activity.certain,
        "attempts": record.attempts,
        "checkpoints": sorted(find_checkpoints(record.run_dir)),
        "summary": record.summary,
        "notes": record.notes,
        "updates": {
            "lines": [line[:LINE_CHARS] for line in lines[-NEWEST_LINES:]],
            "total": len(lines),
            "torn": bool(torn),
        },
        "config": list(read_settings(record.run_dir).items()),
    }, samples


# --- the page -----------------------------------------------------------------------------------------------


def write_report(roots: list[Path], path: Path) -> int:
    """Writes the report of one run, or the comparison of several, and returns its bytes. A file that is there
    is replaced as a whole. Texts of the runs are only in its JSON and in its title, escaped for both.

    Raises RunDirError for a directory that is no run, or is damaged; StorageError where the file cannot be
    written.
    """
    with open_records(roots) as records:
        runs = [gather_run(record, name, share=1 / len(roots)) for name, record in records.items()]
    facts = [facts for facts, _ in runs]
    # report.html names the files that stand inside it, in order
    here = Path(__file__).with_name("report.html")
    frame = re.sub(
        r"\{\{(\w+\.\w+)\}\}",
        lambda match: here.with_name(match[1]).read_text("utf-8"),
        here.read_text("utf-8"),
    )
    style, script = re.findall("<(?:style|script)>(.*?)</(?:style|script)>", frame, re.DOTALL)
    values = {
        "policy": f"default-src 'none'; style-src 'sha256-{hash_source(style)}'; script-src"
        f" 'sha256-{hash_source(script)}'; img-src data:; base-uri 'none'; form-action 'none'",
        "title": html.escape(" · ".join(run["name"] for run in facts)),
        "data": encode_for_script({"version": __version__, "made": int(time.time()), "runs": facts}),
        "samples": f"[{','.join('[' + ','.join(texts) + ']' for _, texts in runs)}]",
    }
    page = re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], frame).encode(errors="replace")
    replace_file(path, [page], way_out="name another file with --output FILE")
    return len(page)


def hash_source(text: str) -> str:
    """SHA-256 in base64, as a content security policy names a style or a script that it allows."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
