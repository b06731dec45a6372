"""Alerts: when a rule begins to hold and when it is over; who is told, by real commands and a real server."""

import http.server
import json
import re
import sys
import threading

import pytest

from rollouts.config.load import load_config
from rollouts.errors import ConfigError
from rollouts.preflight.checks import check_alerts
from rollouts.preflight.findings import Findings
from rollouts.run_dir import RunDir
from rollouts.trackers import launch, sink_alerts
from rollouts.trackers.sinks import ALERTS, RunInfo, TrackedRow
from tests.support.text_tables import cases
from tests.support.tracker_runs import append, make_row


def look(root, settings, *rows, mark="{}"):
    """What is said of the rows, and the mark after them."""
    said = []
    root.mkdir(exist_ok=True)
    (root / "config.toml").write_text(f"[alerts]\n{settings}")
    sink = sink_alerts.open_sink(RunInfo("id", "r", root, {}, {}, json.loads(mark), said.append))
    return said, json.dumps(sink.send([TrackedRow("metrics", row) for row in rows]))


@cases("""
metric              | rule                   | values                  | expected
reward/mean         | below(limit=0.3)       | 0.5 0.2 - 0.1 0.3       | step 2, step 5 over
reward/mean         | above(limit=2)         | 3 2 2.5 -               | step 1, step 2 over, step 3
reward/mean         | absent(steps=2)        | - 1 - - - 1             | step 4, step 6 over
optim/skipped_steps | not_finite             | 0 1 2 0                 | step 2, step 4 over
entropy/mean        | falls(by=0.5, steps=2) | 1 3 0.9 0.9 0.9 0.9 1.5 | step 3, step 7 over
logps/chosen        | falls(by=0.5, steps=1) | -4 -5 -7 -11            | step 4
""")
def test_a_rule_is_said_once_when_it_begins_to_hold_and_once_when_it_is_over(
    tmp_path, metric, rule, values, expected
):
    settings, cells = f'metric = "{metric}"\nrule = "{rule}"', enumerate(values.split(), 1)
    rows = [make_row(step, **({"a/b": 0} if cell == "-" else {metric: float(cell)})) for step, cell in cells]
    said, mark = look(tmp_path, settings, *rows[:3])
    said += look(tmp_path, settings, *rows[3:], mark=mark)[0]  # another follower goes on by the mark
    found = [line[len("r: rl ") : len("r: rl step 1")] + " over" * line.endswith("is over") for line in said]
    assert ", ".join(found) == expected


def test_a_stage_and_an_evaluation_are_looked_at_by_themselves(tmp_path):
    settings = 'metric = "eval/a/loss"\nrule = "absent(steps=1)"\nstage = "rl"'
    rows = [make_row(1, stage=stage, name=name) for stage in ("sft", "rl") for name in ("a", "b")]
    assert look(tmp_path, settings, make_row(1), *rows)[0] == [
        "r: rl step 1: eval/a/loss is absent: absent(steps=1)"
    ]


WRITE = "import sys; open(sys.argv[1], 'a').write(sys.argv[2] + chr(10))"


async def test_a_run_tells_its_log_a_command_and_a_webhook_whose_address_is_a_secret(tmp_path, monkeypatch):
    posted = []

    class Server(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["text"])
            self.send_response(500 if len(posted) > 1 else 204)
            self.end_headers()

    monkeypatch.setattr(Server, "log_message", lambda *_: None)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever).start()
    monkeypatch.setenv("HOOK", f"http://127.0.0.1:{server.server_port}/planted")
    root, out, said = tmp_path / "run", tmp_path / "out", []
    command = json.dumps([sys.executable, "-c", WRITE, str(out)])
    look(root, f'metric = "a/b"\nrule = "above(limit=1)"\nrun = {command}\nwebhook = "HOOK"')
    monkeypatch.setattr(launch, "END_S", 60)
    async with launch.open_trackers(RunDir(root), [ALERTS], say=said.append):
        append(root, *(make_row(step, **{"a/b": value}) for step, value in enumerate((2, 3, 0.5), 1)))
    server.shutdown()
    server.server_close()
    text = ["run: rl step 1: a/b is 2: above(limit=1)", "run: rl step 3: a/b is 0.5: above(limit=1) is over"]
    assert out.read_text().splitlines() == posted == text
    warning = "alerts: warning: HOOK did not take an alert: HTTPStatusError"
    assert "\n".join(said).splitlines() == [*(f"alerts: {line}" for line in text), warning]
    assert "planted" not in "".join(path.read_text() for path in root.rglob("*.*"))


@cases(f"""
command                                     | problem
false                                     | CalledProcessError
/nowhere/program                          | FileNotFoundError
{sys.executable} -c while(1):pass         | TimeoutExpired
""")
def test_a_command_that_fails_or_hangs_and_a_webhook_that_nobody_hears_cost_a_warning_each(
    tmp_path, monkeypatch, command, problem
):
    monkeypatch.setattr(sink_alerts, "TELL_S", 1.0)
    monkeypatch.setenv("HOOK", "http://127.0.0.1:1/planted")  # where nothing listens
    words = command.split()
    settings = f'metric = "a/b"\nrule = "above(limit=1)"\nrun = {words}\nwebhook = "HOOK"'
    said, mark = look(tmp_path, settings, make_row(1, **{"a/b": 2.0}))
    problems = [f"{words[0]} did not take an alert: {problem}", "HOOK did not take an alert: ConnectError"]
    assert said[1:] == [f"warning: {line}" for line in problems]
    assert look(tmp_path, settings, make_row(2, **{"a/b": 2.0}), mark=mark)[0] == []  # it is not told again


@cases("""
settings                                    | problem
rule = "over(limit=1)"                      | rule='over(limit=1)'; write above
rule = "above(limt=1)"                      | rule='above(limt=1)'; write above
rule = "absent(steps=0)"                    | steps are 1 or more
rule = "not_finite"                         | optim/skipped_steps and critic/optim/skipped_steps count
rule = "absent(steps=1)"; webhook = "http:" | webhook is no name of an environment variable
""")
def test_a_rule_that_cannot_hold_is_refused(tmp_path, settings, problem):
    (tmp_path / "c.toml").write_text(f'[alerts]\nmetric = "a/b"\n{settings.replace("; ", chr(10))}')
    with pytest.raises(ConfigError, match=f"(?s)^(?!.*http:).*{re.escape(problem)}"):
        load_config(tmp_path / "c.toml")


@cases("""
settings           | problem
run = ["/nowhere"] | there is no program '/nowhere'; give its path
webhook = "HOOK"   | HOOK is not set; export it with the URL
                   | the metric 'reward/men' is none of ours; did you mean reward/mean?
""")
def test_what_an_alert_lacks_is_found_before_a_run_starts(tmp_path, monkeypatch, settings, problem):
    monkeypatch.delenv("HOOK", raising=False)
    text, findings = f'[alerts]\nmetric = "reward/men"\nrule = "absent(steps=1)"\n{settings}', Findings()
    (tmp_path / "c.toml").write_text(text)
    check_alerts(load_config(tmp_path / "c.toml").alerts, findings)
    assert findings[0].message.endswith(problem)
