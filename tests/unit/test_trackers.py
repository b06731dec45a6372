"""Following a run's files: what is read, in which order, from where; what is unsent; names, secrets and
settings.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rollouts.cli.settings import check_output
from rollouts.config.load import load_config
from rollouts.config.schema import TRACKERS, RunConfig
from rollouts.errors import ConfigError, RunDirError
from rollouts.trackers import commands, sinks
from rollouts.trackers.launch import check_trackers, describe_catching_up
from rollouts.trackers.position import (
    LeftOut,
    Place,
    Position,
    advance,
    count_unsent,
    open_position,
    position_path,
    read_batch,
    read_position,
    write_position,
)
from rollouts.trackers.secrets import find_secrets, hide_secrets, remove_secrets
from rollouts.trackers.sinks import SINKS, TrackedRow
from rollouts.trackers.worker import read_config
from tests.unit.tracker_fakes import FILES, steps
from tests.unit.tracker_files import BEGAN, append, make_row, make_run


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run")


def read_all(
    root: Path, position: Position, *, limit: int = 100, **options: int
) -> tuple[list[TrackedRow], Position]:
    batch = read_batch(root, FILES, position, limit=limit, say=pytest.fail, **options)
    return batch.rows, advance(position, batch.ends, len(batch.rows), None)


# --- reading ------------------------------------------------------------------------------------------------


def test_rows_come_by_their_time_over_the_files_and_are_numbered(root: Path):
    append(root, make_row(1), make_row(2), make_row(3))
    append(root, make_row(2, time_unix=BEGAN + 1002.5, name="heldout"), file="evaluations")
    rows, position = read_all(root, Position("id"))
    assert [(row.file, row.row["step"], row.number) for row in rows] == [
        ("metrics", 1, 0), ("metrics", 2, 1), ("evaluations", 2, 2), ("metrics", 3, 3)
    ]  # fmt: skip
    assert position.number == 4
    assert read_all(root, position)[0] == []
    append(root, make_row(4))
    assert [(row.row["step"], row.number) for row in read_all(root, position)[0]] == [(4, 4)]


def test_a_line_without_its_newline_is_waited_for(root: Path):
    append(root, make_row(1))
    with (root / "metrics.jsonl").open("a") as file:
        file.write('{"stage": "rl", "step": 2')
    rows, position = read_all(root, Position("id"))
    assert steps(rows) == [1]
    with (root / "metrics.jsonl").open("a") as file:
        file.write(', "attempt": 1, "time_unix": 1.0}\n')
    assert steps(read_all(root, position)[0]) == [2]


def test_parts_are_read_in_order_and_a_place_is_one_in_a_part(root: Path):
    append(root, make_row(1), make_row(2))
    rows, position = read_all(root, Position("id"), limit=1)
    append(root, make_row(3), part=1)
    append(root, make_row(4), part=2)
    rows, position = read_all(root, position, limit=2)
    assert steps(rows) == [2, 3]
    assert position.place("metrics") == Place(1, (root / "metrics.1.jsonl").stat().st_size)
    assert count_unsent(root, FILES, position) == (root / "metrics.2.jsonl").stat().st_size
    assert steps(read_all(root, position)[0]) == [4]


def test_what_was_being_sent_is_read_again_exactly_though_more_is_there(root: Path):
    append(root, make_row(1), make_row(2), make_row(3))
    batch = read_batch(root, FILES, Position("id"), limit=2, say=pytest.fail)
    append(
        root, make_row(2, time_unix=BEGAN, name="heldout"), file="evaluations"
    )  # earlier than all, written later
    again = read_batch(root, FILES, Position("id", sending=batch.ends), limit=100, say=pytest.fail)
    assert again == batch
    assert steps(again.rows) == [1, 2]


def test_a_batch_ends_at_its_bytes_but_holds_a_row_at_least(root: Path):
    append(root, make_row(1), make_row(2), make_row(3))
    line = len((root / "metrics.jsonl").read_bytes().splitlines(keepends=True)[0])
    rows, position = read_all(root, Position("id"), batch_bytes=2 * line)
    assert steps(rows) == [1, 2]
    assert steps(read_all(root, position, batch_bytes=1)[0]) == [3]


def test_a_line_that_is_no_row_is_passed_over_and_said_once(root: Path):
    append(root, make_row(1))
    with (root / "metrics.jsonl").open("a") as file:
        file.write("\0\0\0\n")
    said: list[str] = []
    batch = read_batch(root, FILES, Position("id"), limit=9, say=said.append)
    assert steps(batch.rows) == [1]
    assert len(said) == 1
    assert "metrics.jsonl: no row" in said[0]
    assert (
        read_batch(root, FILES, advance(Position("id"), batch.ends, 1, None), limit=9, say=pytest.fail).ends
        == {}
    )


def test_a_file_that_lost_its_end_in_a_power_cut_is_followed_from_a_whole_row(root: Path):
    append(root, make_row(1), make_row(2))
    _, position = read_all(root, Position("id"))
    lines = (root / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (root / "metrics.jsonl").write_bytes(lines[0])
    append(root, {**make_row(2, attempt=2), "a/longer": 1.0})
    said: list[str] = []
    batch = read_batch(root, FILES, position, limit=9, say=said.append)
    assert [(row.row["step"], row.row["attempt"]) for row in batch.rows] == [(2, 2)]
    assert "is not what it was" in said[0]


@pytest.mark.parametrize(
    "time_unix", ["NaN", "Infinity", '"12"', "null", "1" + "0" * 400, "[" * 3000 + "]" * 3000]
)
def test_a_row_without_a_time_is_passed_over(root: Path, time_unix: str):
    (root / "metrics.jsonl").write_text(
        f'{{"stage": "rl", "step": 1, "attempt": 1, "time_unix": {time_unix}}}\n'
    )
    append(root, make_row(2))
    said: list[str] = []
    assert steps(read_batch(root, FILES, Position("id"), limit=9, say=said.append).rows) == [2]
    assert len(said) == 1


def test_a_torn_last_line_of_a_killed_writer_is_not_unsent(root: Path):
    append(root, make_row(1), make_row(2))
    _, position = read_all(root, Position("id"))
    size = (root / "metrics.jsonl").stat().st_size
    assert count_unsent(root, FILES, Position("id")) == size
    with (root / "metrics.jsonl").open("a") as file:
        file.write('{"stage": "rl", "note": "' + "x" * 200_000)  # longer than what is read at once
    assert count_unsent(root, FILES, position) == 0
    assert count_unsent(root, FILES, Position("id")) == size
    append(
        root, make_row(3), part=1
    )  # a line that is no longer the last one is passed over: it is still to be read
    assert count_unsent(root, FILES, position) == 200_025 + (root / "metrics.1.jsonl").stat().st_size


# --- the position -------------------------------------------------------------------------------------------


def test_a_position_is_read_back_as_it_was_written(root: Path):
    path = position_path(root, "fake")
    first = open_position(path)
    assert len(first.id) == 32
    sending = {"metrics": Place(2, 9)}
    whole = replace(
        first,
        files={"metrics": Place(2, 7)},
        sending=sending,
        number=3,
        handed=1,
        mark={"size": 4},
        left_out=LeftOut(1, "x"),
    )
    write_position(path, whole)
    assert read_position(path) == whole == open_position(path)


def test_a_position_of_an_earlier_version_has_nothing_left_out(root: Path):
    path = position_path(root, "fake")
    open_position(path)
    held = json.loads(path.read_text())
    del held["left_out"]
    path.write_text(json.dumps(held))
    assert open_position(path).left_out == LeftOut(0, "")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"schema": 2}',
        '{"schema": 1, "id": "a", "files": {"metrics": {"part": -1, "offset": 0}}}',
    ],
)
def test_a_position_that_cannot_be_read_is_refused_with_the_way_out(root: Path, text: str):
    path = position_path(root, "fake")
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(RunDirError, match="remove it to send the whole run again"):
        open_position(path)


def test_the_command_that_sends_the_rest_can_be_pasted():
    expected = "to send the rest: python -m rollouts track 'runs/my demo' --to otlp --to wandb --once"
    assert describe_catching_up(Path("runs/my demo"), ["otlp", "wandb"]) == expected


# --- names and secrets --------------------------------------------------------------------------------------


def test_the_trackers_of_config_command_and_sinks_are_the_same():
    assert set(TRACKERS) == set(SINKS) == set(commands.NAMES)


def load(tmp_path: Path, trackers: str) -> RunConfig:
    path = tmp_path / "c.toml"
    path.write_text(f"[output]\ntrackers = {trackers}\n")
    return load_config(path)


def test_a_tracker_that_is_none_is_refused_when_the_config_loads(tmp_path: Path):
    assert load(tmp_path, '["wandb", "tensorboard"]').output.trackers == ["wandb", "tensorboard"]
    with pytest.raises(ConfigError, match=r'output\.trackers: "wanbd" is no tracker; did you mean wandb\?'):
        load(tmp_path, '["wanbd"]')
    with pytest.raises(ConfigError, match="named twice"):
        load(tmp_path, '["wandb", "wandb"]')


def test_a_missing_package_is_named_with_what_installs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    kind = replace(SINKS["wandb"], packages=("there_is_no_such.package",))
    monkeypatch.setattr(sinks, "SINKS", {**SINKS, "wandb": kind})
    config = load(tmp_path, '["statsd", "wandb"]')
    install = (
        r"tracker wandb needs the package there_is_no_such, which is not installed: pip install"
        r" 'rollouts-rl\[wandb\]'"
    )
    with pytest.raises(ConfigError, match=rf"output\.trackers: {install}"):
        check_trackers(config.output.trackers)
    (finding,) = [finding for finding in check_output(config) if finding.subject == "output.trackers"]
    assert finding.level == "error"
    with pytest.raises(ConfigError, match=rf"--to wandb: {install}"):
        commands.check_names(["wandb"])
    with pytest.raises(ConfigError, match="--to wanbd: not a tracker; did you mean wandb"):
        commands.check_names(["wanbd"])


def test_metrics_are_the_numbers_beside_the_head_under_their_stage_where_a_service_has_none():
    row = TrackedRow(
        "evaluations",
        make_row(3, **{"name": "heldout", "eval/heldout/avg@4": 0.25, "note": "text"}),
        aliases={"eval_reward": 0.25},
    )
    assert row.metrics() == {"eval/heldout/avg@4": 0.25}
    assert row.staged_metrics() == {"rl/eval/heldout/avg@4": 0.25, "eval_reward": 0.25}


def test_settings_that_look_like_secrets_are_left_out(root: Path):
    assert read_config(root)["engine"] == {"env": {"API_KEY": "***"}}
    settings = {
        "max_new_tokens": 7,
        "keys": "kept",
        "url": "http://user:word@host/x",
        "list": [{"hf_token": "abc"}],
        "secret": "",
    }
    assert remove_secrets(settings) == {
        "max_new_tokens": 7, "keys": "kept", "url": "http://***@host/x", "list": [{"hf_token": "***"}],
        "secret": "",
    }  # fmt: skip
    assert set(remove_secrets({"PGPASSWORD": "x", "azure_storage_connection_string": "x"}).values()) == {
        "***"
    }
    args = ["--api-key", "abc", "--dtype", "half", "--hf-token=abc", "--seed=1", "--flag", "--key", "x"]
    hidden = ["--api-key", "***", "--dtype", "half", "--hf-token=***", "--seed=1", "--flag", "--key", "***"]
    assert remove_secrets({"args": args}) == {"args": hidden}


def test_secrets_of_the_environment_are_blotted_out_of_what_is_said():
    headers = {"OTEL_EXPORTER_OTLP_HEADERS": "x-key=abcdefgh,tenant=1"}
    secrets = find_secrets(
        {"WANDB_API_KEY": "0123456789", **headers, "URI": "https://me:passphrase@host", "HOME": "/root"}
    )
    text = hide_secrets("key 0123456789 or abcdefgh, passphrase, https://other:word@host, /root", secrets)
    assert text == "key *** or ***, ***, https://***@host, /root"


def test_a_secret_is_hidden_without_its_percent_signs_and_with_an_at_sign_in_it():
    secrets = find_secrets(
        {
            "OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20s%C3%A9cret-1",
            "SERVICE": "http://user:p@ssw0rd@host",
        }
    )
    assert hide_secrets("ascii cannot encode 'Bearer sécret-1'", secrets) == "ascii cannot encode '*** ***'"
    assert hide_secrets("http://user:p@ssw0rd@host refused", []) == "http://***@host refused"
