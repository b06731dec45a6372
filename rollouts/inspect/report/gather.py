"""What a report holds of a run: the rows of a few statements, of which facts.js makes what the page says."""

from typing import Any

from rollouts.inspect.record import (
    DROPPED,
    OUTCOMES,
    TROUBLE,
    Record,
    find_checkpoints,
    load_facts,
    read_settings,
)
from rollouts.inspect.report.samples import gather_samples
from rollouts.run_dir import RunDir, describe_activity, find_activity

POINTS = 2000  # of a curve, at most
CURVE_VALUES = 1_200_000  # numbers of all curves of a report together
SAMPLE_BYTES = 12_000_000  # of samples as JSON, of all runs together
MESSAGES = 100  # distinct ones that are listed
NEWEST_LINES, LINE_CHARS = 2000, 500  # of updates.log that are shown
BYTES = """, id, reward, response_length::DOUBLE AS length,
    400 + least(coalesce(strlen(prompt), 0) + coalesce(strlen(response), 0), 40000)
    + coalesce(strlen(metadata), 0) AS bytes"""
# `placed`: the rows of metrics, consecutive ones of a stage in a bucket; a stage has at most {points} buckets
PLACED = """
    CREATE MACRO rounded(x) AS if(isfinite(x), format('{{:.5g}}', x)::DOUBLE, NULL);
    CREATE TABLE placed AS
    SELECT metrics_held.*, NULL::DOUBLE AS "no metric",
        lag(metrics_held.attempt) OVER steps < metrics_held.attempt AS resumed,
        (row_number() OVER steps - 1) // ceil(rows / {points})::INT AS bucket
    FROM metrics_held JOIN stages USING (stage) WINDOW steps AS (PARTITION BY stage ORDER BY step)"""
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
        max(last) AS last, list({{'part': part, 'samples': total}}) AS spread
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
        UNPIVOT (SELECT stage, step, reward, length, lag::DOUBLE AS lag FROM samples_held)
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
TABLES = {
    "stages": "FROM stages",
    "totals": "FROM totals",
    "outcomes": OUTCOMES,
    "axes": AXES,
    "means": CURVES.format(value=f"avg({METRICS})"),
    "lows": CURVES.format(value=f"min({METRICS})"),
    "highs": CURVES.format(value=f"max({METRICS})"),
    "phases": CURVES.format(value="sum(COLUMNS('^(time/.*|no metric)$')) / count(*)"),  # absent ones are 0
    "failed": FAILED.format(),
    "dropped": DROPPED,
    "trouble": TROUBLE,
    "messages": f"SELECT *, count(*) OVER () AS kinds FROM messages LIMIT {MESSAGES}",
    "spreads": SPREADS,
    "evaluations": "SELECT * EXCLUDE (schema, attempt) FROM evaluations_held ORDER BY rowid",
    "logged": "SELECT count(*) AS total FROM samples_held",
    "times": "SELECT min(time_unix) AS begun, max(time_unix) AS newest FROM metrics_held",
}


def gather_run(record: Record, name: str = "", *, share: float = 1.0) -> tuple[dict[str, Any], list[str]]:
    """(everything of a run that the page says of it, its samples as JSON texts), in this share of the page.
    The record must have its points.
    """
    load_facts(record, BYTES)
    (most,) = record.rows("SELECT greatest(1, count(DISTINCT name)) AS names FROM totals")
    points = max(100, min(POINTS, int(share * CURVE_VALUES) // (3 * most["names"])))
    record.connection.execute(PLACED.format(points=points))
    tables = {table: record.rows(sql) for table, sql in TABLES.items()}
    activity = find_activity(record.run_dir)
    samples = gather_samples(record, int(share * SAMPLE_BYTES), [row["place"] for row in tables["messages"]])
    facts = tables | {
        "name": name,
        "directory": str(record.root),
        "state": activity.state,
        "activity": describe_activity(activity),
        "certain": activity.certain,
        "attempts": record.attempts,
        "checkpoints": sorted(find_checkpoints(record.run_dir)),
        "summary": record.summary,
        "notes": record.notes,
        "updates": read_updates(record.run_dir),
        "config": list(read_settings(record.run_dir).items()),
    }
    return facts, samples


def read_updates(run_dir: RunDir) -> dict[str, Any]:
    """The newest lines of updates.log, how many there are, and whether the last is torn."""
    text = run_dir.updates_log.read_text("utf-8", "replace") if run_dir.updates_log.exists() else ""
    *lines, torn = text.split("\n")
    shown = [line[:LINE_CHARS] for line in lines[-NEWEST_LINES:]]
    return {"lines": shown, "total": len(lines), "torn": bool(torn)}
