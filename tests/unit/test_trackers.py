"""Following a run's files: what is read, in which order, from where; positions; names, secrets, settings."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from rollouts.cli.settings import check_output
from rollouts.config.load import load_config
from rollouts.config.schema import RunConfig
from rollouts.config.secrets import find_secrets, hide_secrets, remove_secrets
from rollouts.config.tables import TRACKERS
from rollouts.errors import ConfigError, RunDirError
from rollouts.trackers import commands, sinks
from rollouts.trackers.follower import describe_run
from rollouts.trackers.launch import describe_catching_up
from rollouts.trackers.position import (
    LeftOut,
    Position,
    open_position,
    position_path,
    read_batch,
    read_position,
    write_position,
)
from rollouts.trackers.sinks import SINKS, Place, TrackedRow, check_trackers
from tests.support.tracker_runs import BEGAN, append, make_row, make_run

FILES = ("metrics", "evaluations")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run")


def read_all(root: Path, position: Position, *, limit: int = 100) -> tuple[list[TrackedRow], Position]:
    rows, ends = read_batch(root, FILES, position, limit=limit, say=pytest.fail)
    return rows, replace(position, files={**position.files, **ends}, number=position.number + len(rows))


def steps(rows: list[TrackedRow]) -> list[int]:
    return [row.row["step"] for row in rows]


# --- reading ------------------------------------------------------------------------------------------------


def test_rows_come_by_their_time_over_the_files_and_are_numbered(root: Path):
    append(root, make_row(1), make_row(2), make_row(3))
    append(root, make_row(2, time_unix=BEGAN + 1002.5, name="heldout"), file="evaluations")
    rows, position = read_all(root, Position("id"))
    assert [row.file for row in rows] == ["metrics", "metrics", "evaluations", "metrics"]
    assert [(row.number, row.row["step"]) for row in rows] == [(0, 1), (1, 2), (2, 2), (3, 3)]
    assert len({row.key for row in rows}) == 4
    assert read_all(root, position)[0] == []
    append(root, make_row(4), part=1)
    rows, position = read_all(root, position)
    assert [(row.number, row.row["step"]) for row in rows] == [(4, 4)]
    assert position.files["metrics"] == Place(1, (root / "metrics.1.jsonl").stat().st_size)


@pytest.mark.parametrize("time_unix", ["", "NaN", '"12"', "null", "1" + "0" * 400, "[" * 3000 + "]" * 3000])
def test_a_line_that_is_no_row_is_passed_over_and_said_once(root: Path, time_unix: str):
    (root / "metrics.jsonl").write_text(
        f'{{"stage": "rl", "step": 1, "attempt": 1, "time_unix": {time_unix}}}\n'
    )
    append(root, make_row(2))
    said: list[str] = []
    rows, ends = read_batch(root, FILES, Position("id"), limit=9, say=said.append)
    assert (steps(rows), len(said), "metrics.jsonl: no row" in said[0]) == ([2], 1, True)
    assert read_batch(root, FILES, Position("id", ends), limit=9, say=pytest.fail).ends == {}


def test_a_file_that_lost_its_end_in_a_power_cut_is_followed_from_a_whole_row(root: Path):
    append(root, make_row(1), make_row(2))
    _, position = read_all(root, Position("id"))
    lines = (root / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (root / "metrics.jsonl").write_bytes(lines[0])
    append(root, {**make_row(2, attempt=2), "a/longer": 1.0})
    rows, _ = read_all(root, position)
    assert [(row.row["step"], row.row["attempt"]) for row in rows] == [(2, 2)]


# --- the position -------------------------------------------------------------------------------------------


def test_a_position_is_read_back_as_it_was_written_and_as_earlier_versions_wrote_it(root: Path):
    path = position_path(root, "fake")
    path.parent.mkdir()
    first = open_position(path)
    assert len(first.id) == 32
    whole = replace(
        first, files={"metrics": Place(2, 7)}, number=3, mark={"size": 4}, left_out=LeftOut(1, "x")
    )
    write_position(path, whole)
    assert read_position(path) == whole == open_position(path)
    held = json.loads(path.read_text())
    del held["left_out"]
    path.write_text(json.dumps({**held, "sending": None, "handed": 0}))
    assert open_position(path) == replace(whole, left_out=LeftOut())


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"schema": 2}', '{"schema": 1, "id": "a", "files": {"m": {"part": -1, "offset": 0}}}'],
)
def test_a_position_that_cannot_be_read_is_refused_with_the_way_out(root: Path, text: str):
    path = position_path(root, "fake")
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(RunDirError, match="remove it to send the whole run again"):
        open_position(path)


# --- names, settings and secrets ----------------------------------------------------------------------------


def test_the_trackers_of_config_command_and_sinks_are_the_same():
    assert set(TRACKERS) == set(SINKS) == set(commands.NAMES)
    expected = "to send the rest: python -m rollouts track 'runs/my demo' --to otlp --to wandb --once"
    assert describe_catching_up(Path("runs/my demo"), ["otlp", "wandb"]) == expected


def load(tmp_path: Path, trackers: str) -> RunConfig:
    (tmp_path / "c.toml").write_text(f"[output]\ntrackers = {trackers}\n")
    return load_config(tmp_path / "c.toml")


@pytest.mark.parametrize(
    ("trackers", "message"),
    [
        ('["wanbd"]', r'output\.trackers = "wanbd": .*; did you mean "wandb"\?'),
        ('["wandb", "wandb"]', "named twice"),
    ],
)
def test_a_tracker_that_is_none_is_refused_when_the_config_loads(tmp_path: Path, trackers: str, message: str):
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, trackers)


def test_a_missing_package_is_named_with_what_installs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    kind = dataclasses.replace(SINKS["wandb"], package="there_is_no_such.package")
    monkeypatch.setattr(sinks, "SINKS", {**SINKS, "wandb": kind})
    config = load(tmp_path, '["statsd", "wandb"]')
    with pytest.raises(ConfigError, match=r"output\.trackers: .*pip install 'rollouts-rl\[wandb\]'"):
        check_trackers(config.output.trackers)
    (finding,) = [finding for finding in check_output(config) if finding.subject == "output.trackers"]
    assert finding.level == "error"


def test_settings_that_look_like_secrets_are_left_out(root: Path):
    assert describe_run(root, Position("id")).config["engine"] == {"env": {"API_KEY": "***"}}
    settings = """{"max_new_tokens": 7, "keys": "kept", "url": "http://user:word@host/x", "secret": "",
        "list": [{"hf_token": "abc"}], "args": ["--api-key", "abc", "--token=abc", "--port", "1"],
        "PGPASSWORD": "x"}"""
    shown = """{"max_new_tokens": 7, "keys": "kept", "url": "http://***@host/x", "secret": "",
        "list": [{"hf_token": "***"}], "args": ["--api-key", "***", "--token=***", "--port", "1"],
        "PGPASSWORD": "***"}"""
    assert remove_secrets("", json.loads(settings)) == json.loads(shown)


def test_secrets_of_the_environment_are_hidden_in_what_is_printed():
    variables = (
        "OTEL_EXPORTER_OTLP_HEADERS=x-key=top%20secret,tenant=1 WANDB_API_KEY=abcdef0123"
        " PROXY=http://me:pass@word@host:1 HOME=/home/me"
    )
    environment = dict(variable.split("=", 1) for variable in variables.split())
    text = "key abcdef0123 and top secret, top%20secret at http://a:b@c/ in /home/me with pass@word"
    shown = hide_secrets(text, find_secrets(environment))
    assert shown == "key *** and top ***, *** at http://***@c/ in /home/me with ***"
