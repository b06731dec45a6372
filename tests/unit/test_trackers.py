"""Following a run's files: what is read, in which order, from where; positions; names, secrets, settings."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import pytest
import trio
from msgspec.structs import replace

from rollouts.cli import main, make_parser
from rollouts.config.load import load_config
from rollouts.config.secrets import find_secrets, hide_secrets, remove_secrets
from rollouts.config.tables import Tracker
from rollouts.errors import ConfigError, RowsRefused, RunDirError, SinkRefused, SinkUnavailable
from rollouts.trackers import follower, sinks
from rollouts.trackers.follower import (
    LeftOut,
    Position,
    describe_run,
    position_path,
    read_batch,
    read_position,
    write_position,
)
from rollouts.trackers.launch import describe_catching_up
from rollouts.trackers.sinks import ALERTS, SINKS, Place, SinkKind, TrackedRow, check_trackers
from tests.support.text_tables import cases
from tests.support.tracker_runs import BEGAN, append, make_row, make_run

FILES = ("metrics", "evaluations")


@pytest.fixture
def root(tmp_path, monkeypatch):
    for name in ("LOOK_S", "FIRST_WAIT_S", "LAST_WAIT_S"):
        monkeypatch.setattr(follower, name, 0.01)
    return make_run(tmp_path / "run")


def steps(rows):
    return [row.row["step"] for row in rows]


def read_all(root, position):
    rows, ends = read_batch(root, FILES, position, limit=100, say=pytest.fail)
    return rows, replace(position, files={**position.files, **ends}, number=position.number + len(rows))


# --- reading ------------------------------------------------------------------------------------------------


def test_rows_come_by_their_time_over_the_files_and_are_numbered(root):
    append(root, make_row(1), make_row(2), make_row(3))
    append(root, make_row(2, time_unix=BEGAN + 1002.5, name="heldout"), file="evaluations")
    rows, position = read_all(root, Position("id"))
    assert [row.file for row in rows] == ["metrics", "metrics", "evaluations", "metrics"]
    assert [(row.number, row.row["step"]) for row in rows] == [*enumerate([1, 2, 2, 3])]
    assert len({row.key for row in rows}) == 4
    assert read_all(root, position)[0] == []
    append(root, make_row(4), part=1)
    rows, position = read_all(root, position)
    assert [(row.number, row.row["step"]) for row in rows] == [(4, 4)]
    assert position.files["metrics"] == Place(1, (root / "metrics.1.jsonl").stat().st_size)


@cases("time_unix", ["", "NaN", '"12"', "null", "1" + "0" * 400, "[" * 3000 + "]" * 3000])
def test_a_line_that_is_no_row_is_passed_over_and_said_once(root, time_unix):
    (root / "metrics.jsonl").write_text(
        f'{{"stage": "rl", "step": 1, "attempt": 1, "time_unix": {time_unix}}}\n'
    )
    append(root, make_row(2))
    said = []
    rows, ends = read_batch(root, FILES, Position("id"), limit=9, say=said.append)
    (line,) = said
    assert steps(rows) == [2] and "metrics.jsonl: no row" in line
    assert read_batch(root, FILES, Position("id", ends), limit=9, say=pytest.fail)[1] == {}


def test_a_file_that_lost_its_end_in_a_power_cut_is_followed_from_a_whole_row(root):
    append(root, make_row(1), make_row(2))
    _, position = read_all(root, Position("id"))
    metrics = root / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes().splitlines(keepends=True)[0])
    append(root, {**make_row(2, attempt=2), "a/longer": 1.0})
    rows, _ = read_all(root, position)
    assert [(row.row["step"], row.row["attempt"]) for row in rows] == [(2, 2)]


# --- the position -------------------------------------------------------------------------------------------


def test_a_position_is_read_back_as_it_was_written_and_as_earlier_versions_wrote_it(root):
    path = position_path(root, "fake")
    path.parent.mkdir()
    first = read_position(path)
    assert len(first.id) == 32
    files, left_out = {"metrics": Place(2, 7)}, LeftOut(1, "x")
    whole = replace(first, files=files, number=3, mark={"size": 4}, left_out=left_out)
    write_position(path, whole)
    assert read_position(path) == whole
    held = json.loads(path.read_text())
    del held["left_out"]
    path.write_text(json.dumps({**held, "sending": None, "handed": 0}))
    assert read_position(path) == replace(whole, left_out=LeftOut())


@cases("""
text | …
     | an empty file
[]   |
{"schema": 2} |
{"schema": 1, "id": "a", "files": {"m": {"part": -1, "offset": 0}}} |
""")
def test_a_position_that_cannot_be_read_is_refused_with_the_way_out(root, text):
    path = position_path(root, "fake")
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(RunDirError, match="remove it to send the whole run again"):
        read_position(path)


def test_a_link_out_of_the_run_is_not_followed(tmp_path, capsys):
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    for folder in (run, elsewhere):
        folder.mkdir()
    (run / "metrics.jsonl").touch()
    (run / "trackers").symlink_to(elsewhere)
    assert main(["track", str(run), "--to", ALERTS, "--once"]) == 2
    assert f"leads to {elsewhere}, outside {run}" in capsys.readouterr().err
    assert not [*elsewhere.iterdir()]


# --- names, settings and secrets ----------------------------------------------------------------------------


def test_the_trackers_of_config_command_and_sinks_are_the_same():
    words = [word for name in SINKS for word in ("--to", name)]
    assert make_parser("track").parse_args(["track", "runs/demo", *words]).to == list(SINKS)
    assert {*get_args(Tracker), ALERTS} == set(SINKS)
    expected = "to send the rest: python -m rollouts track 'runs/my demo' --to otlp --to wandb --once"
    assert describe_catching_up(Path("runs/my demo"), ["otlp", "wandb"]) == expected


def load(tmp_path, trackers):
    (tmp_path / "c.toml").write_text(f"[output]\ntrackers = {trackers}\n")
    return load_config(tmp_path / "c.toml")


@cases(r"""
trackers           | message
["wanbd"]          | output\.trackers.* = "wanbd": .*; did you mean .?wandb.?\?
["wandb", "wandb"] | named twice
""")
def test_a_tracker_that_is_none_is_refused_when_the_config_loads(tmp_path, trackers, message):
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, trackers)


def test_a_missing_package_is_named_with_what_installs_it(tmp_path, monkeypatch):
    kind = SINKS["wandb"]._replace(package="there_is_no_such.package")
    monkeypatch.setattr(sinks, "SINKS", {**SINKS, "wandb": kind})
    config = load(tmp_path, '["statsd", "wandb"]')
    with pytest.raises(ConfigError, match=r"output\.trackers: .*pip install 'rollouts-rl\[wandb\]'"):
        check_trackers(config.output.trackers)


def test_settings_that_look_like_secrets_are_left_out(root):
    assert describe_run(root, Position("id")).config["engine"] == {"env": {"API_KEY": "***"}}
    settings = """{"max_new_tokens": 7, "keys": "kept", "url": "http://user:word@host/x", "secret": "",
        "list": [{"hf_token": "abc"}], "args": ["--api-key", "abc", "--token=abc", "--port", "1"],
        "PGPASSWORD": "x"}"""
    shown = """{"max_new_tokens": 7, "keys": "kept", "url": "http://***@host/x", "secret": "",
        "list": [{"hf_token": "***"}], "args": ["--api-key", "***", "--token=***", "--port", "1"],
        "PGPASSWORD": "***"}"""
    assert remove_secrets("", json.loads(settings)) == json.loads(shown)


def test_secrets_of_the_environment_are_hidden_in_what_is_printed():
    environment = """{"OTEL_EXPORTER_OTLP_HEADERS": "x-key=top%20secret,tenant=1",
        "WANDB_API_KEY": "abcdef0123", "PROXY": "http://me:pass@word@host:1", "HOME": "/home/me"}"""
    text = "key abcdef0123 and top secret, top%20secret at http://a:b@c/ in /home/me with pass@word"
    shown = hide_secrets(text, find_secrets(json.loads(environment)))
    assert shown == "key *** and top ***, *** at http://***@c/ in /home/me with ***"


# --- following ----------------------------------------------------------------------------------------------


@dataclass
class FakeSink:
    """Stores rows, or raises the next of its faults."""

    faults: Sequence[Exception | None] = ()
    bad: Sequence[int] = ()  # steps that are refused for good
    most: int = 99  # rows of one send
    on_fault: Callable[[], None] = lambda: None
    close_faults: Sequence[Exception | None] = ()
    store: list[TrackedRow] = field(default_factory=list)

    def send(self, rows):
        if len(rows) > self.most or {*self.bad} & {*steps(rows)}:
            raise RowsRefused("bad value")
        fault, *self.faults = self.faults or [None]
        if fault:
            self.on_fault()
            raise fault
        self.store += rows
        return {"rows": len(self.store)}

    def close(self):
        fault, *self.close_faults = self.close_faults or [None]
        if fault:
            raise fault


@pytest.fixture
def run_follower(root, monkeypatch):
    """(outcome, what was said) of following a run of eight steps that is over."""

    def run(sink, **kind):
        said, over = [], trio.Event()
        over.set()
        append(root, *(make_row(step) for step in range(1, 9)))
        (root / "trackers").mkdir(exist_ok=True)
        monkeypatch.setattr(follower, "SINKS", {"fake": SinkKind("", **{"batch_rows": 3, **kind})})
        monkeypatch.setattr(follower, "open_sink", lambda name, run: sink)
        return trio.run(follower.follow, root, "fake", said.append, over), said

    return run


def check_stored(root, taken, left_out):
    """Rows taken or left out, and rows left out, on disk."""
    position = read_position(position_path(root, "fake"))
    assert (position.number, position.left_out.rows) == (taken, left_out)


def test_a_service_that_is_away_gets_the_rows_later_and_that_is_said_once(run_follower):
    sink = FakeSink(faults=[None, *[SinkUnavailable("no route")] * 4])
    outcome, said = run_follower(sink)
    assert (outcome, steps(sink.store)) == ("sent", [*range(1, 9)])
    assert said == ["does not take rows: no route; tried again until it does", "takes rows again"]


def test_a_refusal_ends_the_follower_when_the_run_is_over(run_follower):
    sink = FakeSink(faults=[SinkRefused("wrong key")])
    assert run_follower(sink) == ("behind", ["refuses rows: wrong key"])


@cases("""
bad       | most | refused
[3]       | 99   | 1
[1, 2, 3] | 99   | 3
[]        | 2    | 0
[2, 8]    | 1    | 2
""")
@cases("confirms_at_close: no yes")
def test_rows_refused_for_good_are_named_counted_and_left_out_and_the_others_arrive_once(
    root, run_follower, bad: Any, most: int, refused: int, confirms_at_close: bool
):
    sink = FakeSink(bad=bad, most=most)
    outcome, said = run_follower(sink, batch_rows=8, confirms_at_close=confirms_at_close)
    assert outcome == "sent"
    assert steps(sink.store) == [step for step in range(1, 9) if step not in bad]
    assert len(said) == refused
    assert all("(stage rl, step" in text and "is left out: bad value" in text for text in said)
    check_stored(root, 8, refused)


def test_after_an_outage_in_the_middle_only_the_rest_of_the_batch_comes_again(root, run_follower):
    """Though an earlier row of another file was written meanwhile."""
    late = make_row(1, time_unix=BEGAN, name="heldout")
    faults = [None, None, SinkUnavailable("away")]
    sink = FakeSink(bad=[2], faults=faults, on_fault=lambda: append(root, late, file="evaluations"))
    assert run_follower(sink, batch_rows=8)[0] == "sent"
    sent = [(row.file, row.row["step"]) for row in sink.store]
    assert sorted(sent) == [("evaluations", 1), *(("metrics", step) for step in (1, *range(3, 9)))]


def test_a_library_that_confirms_at_close_has_its_rows_counted_only_then(root, run_follower):
    sink = FakeSink(close_faults=[OSError("upload failed"), None])
    assert run_follower(sink, confirms_at_close=True)[0] == "sent"
    assert [row.number for row in sink.store] == [*range(8)] * 2
    check_stored(root, 8, 0)
