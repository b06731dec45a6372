"""What held a run in bounds: the band of each guard, how it was kept, what was published; and the samples
that moved the weights most.

config.toml ─► guards ─┐
metrics ───────────────┴─► a row for each guard      updates.log ─► events, those lines that are words
"""

import json

from rollouts.inspect.record import Record, read_settings

# `guards`: of RL, as the settings have them, with their numbers where they are numbers: `low` and `high` are
# inside, NULL is no bound. Clipping alone makes no table, for nearly every run clips.
# `events`: what updates.log says in words, in its order; a resumed run may say a step's again
LOADING = r"""
    CREATE TABLE said (settings JSON, lines VARCHAR[]);
    CREATE TABLE mattered (stage VARCHAR, step BIGINT, id VARCHAR, share DOUBLE, advantage DOUBLE,
        reward DOUBLE, kl DOUBLE, rewards JSON);
    CREATE MACRO number_in(call, name) AS
        finite(TRY_CAST(regexp_extract(call, '\b' || name || '\s*=\s*([^,)\s]+)', 1) AS DOUBLE));
    CREATE VIEW events AS
    SELECT * REPLACE (step::BIGINT AS step), CASE
            WHEN contains(words, 'rollback') THEN 'rolled back'
            WHEN starts_with(words, 'publication ') THEN 'published'
            WHEN starts_with(words, 'refused: ') THEN 'refused'
            WHEN starts_with(words, 'learning stops: ') THEN 'stopped' ELSE 'said' END AS kind
    FROM (SELECT row_number() OVER () AS place, unnest(regexp_extract(line,
            '^(\S+)  (\S+) step (\d+): (.*)', ['time', 'stage', 'step', 'words']))
        FROM (SELECT unnest(lines) AS line FROM said));
    CREATE VIEW guards AS
    WITH given AS (SELECT key, value->>'$' AS text FROM said, json_each(settings)),
    control AS (
        SELECT number_in(text, 'target') AS target, text LIKE 'two_sided%' AS two_sided,
            if(two_sided, coalesce(number_in(text, 'tolerance'), 0), NULL) AS tolerance,
            if(two_sided, coalesce(number_in(text, 'lowest'), 0), NULL) AS lowest,
            if(two_sided, number_in(text, 'highest'), NULL) AS highest
        FROM given WHERE key = 'rl.kl_control' AND text NOT LIKE 'fixed%'),
    signs AS (
        SELECT min(key) AS key, any_value(text) FILTER (key LIKE '%.metric') AS name,
            any_value(text) FILTER (key LIKE '%.action') AS action,
            any_value(text) FILTER (key LIKE '%.rule') AS rule
        FROM given WHERE key LIKE 'online.signs.%'
        GROUP BY regexp_extract(key, '^online\.signs\.(\d*)', 1)),
    known AS (
        SELECT 1 AS nth, 'kl/ref_per_sample' AS name, 'target' AS kind, target - tolerance AS low,
            target + tolerance AS high, brief(target) || coalesce(' ± ' || brief(tolerance), '') AS band
        FROM control
        UNION ALL SELECT 2, 'kl/coef', 'bound', lowest, highest, NULL FROM control
        UNION ALL SELECT nth, name, kind, NULL, TRY_CAST(text AS DOUBLE) AS high, NULL
        FROM given JOIN (VALUES
            (3, 'kl/ref_after', 'undone', 'rl.kl_ref_limit'), (4, 'kl/update', 'undone', 'rl.kl_limit'),
            (5, 'optim/grad_norm', 'clipped', 'rl.optim.max_grad_norm'),
            (6, 'optim/grad_norm/max', 'undone', 'rl.grad_norm_limit')) AS limits(nth, name, kind, key)
            USING (key) WHERE high > 0
        UNION ALL SELECT 6 + row_number() OVER (ORDER BY len(key), key), name, action,
            if(rule LIKE 'below%', number_in(rule, 'limit'), NULL) AS low,
            CASE WHEN rule LIKE 'above%' THEN number_in(rule, 'limit')
                WHEN rule LIKE 'not_finite%' THEN 0 END AS high,
            if(low IS NULL AND high IS NULL, rule, NULL) FROM signs)
    SELECT * REPLACE (coalesce(band, brief(low) || ' to ' || brief(high), '≤ ' || brief(high),
        '≥ ' || brief(low)) AS band)
    FROM known QUALIFY count(*) FILTER (name != 'optim/grad_norm') OVER () > 0;
    INSERT INTO said SELECT ?, regexp_extract_all(?, '(?m)^\S+  \S+ step \d{1,15}: .*')"""
# A row for each guard whose metric was logged, in the steps of RL. `outside`: of the target how many steps
# were on either side; else how many were clipped or undone for it or at a bound, or outside with what the
# sign then does.
GUARDRAILS = """
    WITH held AS MATERIALIZED (
        SELECT name, step, place, value FROM points SEMI JOIN (
            SELECT name FROM guards UNION ALL
            SELECT unnest(['optim/undone', 'optim/clipped', 'kl/coef_at_bound', 'optim/updates',
                'optim/skipped_steps']) WHERE EXISTS (FROM guards)) USING (name)
        WHERE stage = 'rl'),
    found AS (
        SELECT guards.*, step, value, value < low AS below, value > high AS above,
            coalesce(below, false) OR coalesce(above, false) AS out,
            place IN (SELECT place FROM held WHERE name = 'optim/undone' AND value > 0) AS undone,
            place IN (SELECT place FROM held WHERE name = 'optim/clipped' AND value > 0) AS clipped,
            place IN (SELECT place FROM held WHERE name = 'kl/coef_at_bound' AND value > 0) AS bound
        FROM held JOIN guards USING (name)),
    means AS (
        SELECT nth, (step - first) * wide // (last - first + 1) AS range, avg(value) AS mean
        FROM found, (SELECT *, least(coalesce(getvariable('course'), 24), last - first + 1) AS wide
            FROM stages WHERE stage = 'rl') GROUP BY ALL),
    courses AS (SELECT nth, map_from_entries(list((range, mean))) AS course FROM means GROUP BY nth),
    updates AS (
        SELECT (SELECT rows FROM stages WHERE stage = 'rl')
                + coalesce(sum(value - 1) FILTER (name = 'optim/updates'), 0) AS updates,
            coalesce(sum(value) FILTER (name = 'optim/skipped_steps'), 0) AS skipped FROM held),
    counts AS (
        SELECT format('{} published, {} refused', count(*) FILTER (kind = 'published'),
            count(*) FILTER (kind = 'refused')) AS counts
        FROM (SELECT arg_max(kind, place) AS kind FROM events WHERE kind IN ('published', 'refused')
            GROUP BY stage, step) HAVING count(*) > 0)
    SELECT concat_ws(', ', 'guardrails', format('{} of {:.0f} updates succeeded',
            percent(updates - skipped, updates), updates), counts) AS title,
        name AS guard, any_value(band) AS band,
        if(count(low) + count(high) = 0, NULL, percent(count(*) FILTER (NOT out), count(*))) AS ">inside",
        CASE any_value(kind)
            WHEN 'target' THEN if(count(low) = 0, NULL, format('{} below, {} above',
                count(*) FILTER (below), count(*) FILTER (above)))
            WHEN 'bound' THEN if(count(low) = 0, NULL, format('{} at a bound', count(*) FILTER (bound)))
            WHEN 'clipped' THEN format('{} clipped', count(*) FILTER (clipped))
            WHEN 'undone' THEN format('{} undone', count(*) FILTER (undone AND out))
            ELSE if(count(low) + count(high) = 0, any_value(kind),
                format('{} ({})', count(*) FILTER (out), any_value(kind))) END AS outside,
        sparkline([any_value(course)[range]
            FOR range IN range(1 + list_max(map_keys(any_value(course))))]) AS "|course",
        brief(arg_max(value, step)) AS ">last", brief(min(value)) AS ">lowest",
        brief(avg(value)) AS ">mean", brief(max(value)) AS ">highest"
    FROM found JOIN courses USING (nth), updates LEFT JOIN counts ON true
    GROUP BY nth, name, updates, skipped, counts ORDER BY nth"""
HAPPENED = """
    SELECT 'what happened' || if(total > 10, format(', the newest 10 of {}', total), '') AS title,
        time, stage, step AS ">step", words AS what
    FROM (SELECT *, count(*) OVER () AS total FROM events ORDER BY place DESC LIMIT 10) ORDER BY place"""
# The rows of contributions with the largest shares of an update's gradient: one pass over the file, which may
# be large, so that only runs with guards have them. Which attempt is the newest the rows of metrics know.
FILLING = """
    INSERT INTO mattered BY NAME
    SELECT stage, step, id, share, advantage, reward, kl, rewards
    FROM contributions_lines SEMI JOIN metrics_held USING (stage, step, attempt)
    WHERE share > 0 ORDER BY share DESC LIMIT 8"""
MATTERED = """
    SELECT 'samples that mattered most, by their share of an update''s gradient' AS title, stage,
        step AS ">step", id, percent(share, 1) AS ">share", brief(advantage) AS ">advantage",
        brief(reward) AS ">reward", brief(kl) AS ">kl", (
            SELECT string_agg(key || ' ' || brief(value::DOUBLE), ', ' ORDER BY id) FROM json_each(rewards)
            WHERE NOT contains(key, '.')) AS "parts of the reward"
    FROM mattered ORDER BY share DESC, step, id"""


def read_log(record: Record) -> str:
    """The text of updates.log, empty where there is none."""
    path = record.run_dir.updates_log
    return path.read_text("utf-8", "replace") if path.exists() else ""


def load_guardrails(record: Record, log: str) -> None:
    """Makes the views guards and events of a record that has its facts, and the table mattered."""
    record.execute(LOADING, [json.dumps(read_settings(record.run_dir)), log])
    if record.rows("FROM guards"):
        record.execute(FILLING)
