"""What there is to say of a run: tables and statements that the commands and the report share."""

import tomllib

from rollouts.config.secrets import flatten_settings, remove_secrets
from rollouts.errors import RunDirError
from rollouts.inspect.record import Record
from rollouts.run_dir import RunDir

ACCURACY = r"^eval/.+/((avg|maj|pass)@\d+|accuracy)$"  # metrics that are shares
# `telling()`: metrics that are shown first, in order; `troubles`: what went wrong in a step, by metric;
# `step_facts`: what a step says of itself, by metric, with its heading (of two with one heading the later
# counts); `describe_step(row)`: the text of each heading, of a row as JSON
DESCRIBING = r"""
    CREATE OR REPLACE MACRO telling() AS [
        'reward/mean', 'loss/total', 'rewards/accuracies', 'rewards/margins', 'loss/nll', 'entropy/mean',
        'response_length/mean', 'truncated/frac', 'optim/grad_norm', 'kl/ref', 'mismatch_kl/mean',
        'clip_ratio', 'off_policy/mean', 'groups/zero_std_frac', 'value/explained_variance',
        'importance_weight/ess', 'perf/generated_tokens_per_s', 'perf/trained_tokens_per_s', 'time/step',
        'optim/lr'];
    CREATE OR REPLACE TABLE troubles AS FROM (VALUES
        ('optim/skipped_steps', 'optimizer steps changed nothing: not finite, or beyond rl.kl_limit'),
        ('checkpoint/failed', 'checkpoints could not be saved'),
        ('weight_sync/engines_failed', 'weight updates of an engine failed')) AS known(name, what);
    CREATE OR REPLACE TABLE step_facts AS SELECT *, row_number() OVER () AS number FROM (VALUES
        ('reward/mean', 'reward', '%.3f'), ('loss/total', 'loss', '%.4g'),
        ('optim/grad_norm', 'grad norm', '%.3g'), ('response_length/mean', 'length', '%.1f'),
        ('truncated/frac', 'cut', '%.2f'), ('off_policy/max', 'lag', '%.0f'),
        ('perf/trained_tokens_per_s', 'tok/s', '%.0f'), ('perf/generated_tokens_per_s', 'tok/s', '%.0f'),
        ('time/step', 's/step', '%.2f'), ('entropy/mean', 'entropy', '%.3f'),
        ('clip_ratio', 'clipped', '%.3f'), ('optim/lr', 'lr', '%.2e'),
        ('rewards/margins', 'margin', '%.3f'), ('rewards/accuracies', 'ranked right', '%.2f'),
        ('value/mean', 'value', '%.3f'), ('value/explained_variance', 'explained', '%.2f')
    ) AS known(name, heading, form);
    CREATE OR REPLACE MACRO finite(x) AS if(isfinite(x), x, NULL);
    CREATE OR REPLACE MACRO number_of(row, name) AS
        finite(TRY_CAST(row->>('$."' || name || '"') AS DOUBLE));
    CREATE OR REPLACE MACRO describe_step(row) AS (
        SELECT map_from_entries(list((heading, shown) ORDER BY number))
        FROM (SELECT heading, min(number) AS number,
                arg_max(printf(form, value), number) FILTER (value IS NOT NULL) AS shown
            FROM (SELECT *, number_of(row, name) AS value FROM step_facts) GROUP BY heading))"""
# the columns of samples_held; `failure` is the metadata's of one that failed
SAMPLE_FACTS = """stage, step, attempt, status, policy_version - weight_version_min AS lag,
    weight_version_max > weight_version_min AS mixed,
    CASE WHEN status = 'failed' THEN metadata->'$.failure' END AS failure,
    CASE WHEN status = 'failed' THEN id END AS failed_id"""
# `messages`: by class and text, the most frequent first; texts that differ in numbers are one, shown as the
# first was
MESSAGES = r"""
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
TROUBLE = """
    SELECT what, sum(total) AS total FROM totals JOIN troubles USING (name)
    GROUP BY what HAVING sum(total) > 0 ORDER BY min(troubles.rowid)"""


def load_facts(record: Record, more: str = "") -> None:
    """Loads samples_held, with `more` columns, and makes the tables, macros and views of this page."""
    record.load("samples", SAMPLE_FACTS + more)
    record.connection.execute(f"{DESCRIBING};{MESSAGES}")


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
