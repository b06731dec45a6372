"""Alerts: the rules of [[alerts]], looked at row by row. What begins to hold, or holds no longer, is said in
the run's log, to a command and to a webhook.

The mark is what of each rule holds in each stage: a resumed run, and a follower that starts again, goes on
with it. A command or webhook has TELL_S, one after the other; what fails or is late is a warning, and the row
counts as sent. What a command has left behind ends with the follower.
"""

import os
import subprocess
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import httpx

from rollouts.config.load import load_recorded
from rollouts.config.tables import AlertConfig, RuleConfig
from rollouts.errors import parse_call
from rollouts.run_dir import RunDir
from rollouts.trackers.sinks import Batch, Mark, RunInfo, Sink
from rollouts.types import Fields

TELL_S = 10.0


def open_sink(run: RunInfo) -> Sink:
    """Looks at rows and tells what is new. Raises ConfigError for a run whose config cannot be read."""
    alerts = load_recorded(RunDir(run.root).config).alerts
    states = run.mark.get("states", {})

    def tell_all(alert: AlertConfig, text: str) -> None:
        """Says it in the run's log, to the command and to the webhook, and of each of these if it failed."""
        run.say(text)
        for tell, to in ((run_command, alert.run), (post, [alert.webhook])):
            try:
                if any(to):
                    tell(to, text)
            except Exception as error:  # whatever it is; its own text may have the webhook's URL
                run.say(f"warning: {to[0]} did not take an alert: {type(error).__name__}")

    def send(rows: Batch) -> Mark:
        """Returns when all was told, or could not be, which is said."""
        for tracked in rows:
            row = tracked.row
            for alert in alerts:
                state = states.setdefault(f"{row['stage']} {alert}", {"holds": False})
                asked = alert.stage in ("", row["stage"])
                found = check_rule(alert, row, state) if asked else None
                if found not in (None, state["holds"]):
                    state["holds"] = found
                    tell_all(
                        alert,
                        f"{run.name}: {row['stage']} step {row['step']}: {alert.metric} is"
                        f" {row.get(alert.metric, 'absent')}: {alert.rule}{'' if found else ' is over'}",
                    )
        return {"states": states}

    return Sink(send)


def check_rule(alert: RuleConfig, row: Fields, state: dict[str, Any]) -> bool | None:
    """Whether the rule holds; None: the row does not tell. `state`, of the stage, changes."""
    area, name, *_ = f"{alert.metric}/".split("/")
    # the metric belongs into a step's row, or an evaluation's, which has a name
    if row.get("name") != (name if area == "eval" else None):
        return None
    (rule, numbers), value = parse_call(alert.rule), row.get(alert.metric)
    if rule == "absent":
        state["missed"] = state.get("missed", 0) + 1 if value is None else 0
        return state["missed"] >= numbers["steps"]
    if value is None:
        return None
    if rule == "below":
        return value < numbers["limit"]
    if rule != "falls":  # not_finite: of the steps that were skipped for it
        return value > numbers.get("limit", 0)
    seen = state.setdefault("seen", [])
    mean = fmean(seen or [value])
    fallen = len(seen) >= numbers["steps"] and value < mean - numbers["by"] * abs(mean)
    if not fallen:  # or the mean would follow, and the alert be over though nothing rose again
        state["seen"] = [*seen, value][-int(numbers["steps"]) :]
    return fallen


def run_command(words: Sequence[str], text: str) -> None:
    """Raises OSError or SubprocessError for a command that does not start, fails, or is late and killed."""
    quiet = subprocess.DEVNULL
    subprocess.run([*words, text], stdin=quiet, stdout=quiet, stderr=quiet, timeout=TELL_S, check=True)


def post(variable: Sequence[str], text: str) -> None:
    """Raises HTTPError for an answer that is late, or no success."""
    httpx.post(os.environ[variable[0]], json={"text": text}, timeout=TELL_S).raise_for_status()
