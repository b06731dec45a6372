"""Following a run's files: what is read, in which order, from where; what is sent again; what the sink's failures cost."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from rollouts.cli.settings import check_output
from rollouts.config.load import load_config
from rollouts.config.schema import TRACKERS, RunConfig
from rollouts.errors import ConfigError, RunDirError, SinkRefused, SinkUnavailable, TrackerError
from rollouts.trackers import commands, sinks, worker
from rollouts.trackers.launch import check_trackers
from rollouts.trackers.position import Place, Position, advance, count_unsent, open_position, position_path, read_batch, read_position, write_position
from rollouts.trackers.secrets import find_secrets, hide_secrets, remove_secrets
from rollouts.trackers.sinks import SINKS, Mark, RunInfo, SinkKind, TrackedRow
from rollouts.trackers.worker import DONE, REFUSED, Control, Following, choose_aliases, choose_wait, follow, read_config
from tests.unit.tracker_files import BEGAN, append, make_row, make_run

FILES = ("metrics", "evaluations")


class FakeControl(Control):
    """The run is over from the start; waits take no time and are kept."""

    def __init__(self) -> None:
        self.over = True
        self.waits: list[float] = []

    def wait(self, seconds: float) -> None:
        if seconds:
            self.waits.append(seconds)


class FakeSink:
    """Keeps what it takes; raises what `faults` has for each send, before or (as a lost answer) after it took the rows."""

    def __init__(self, store: list[TrackedRow], faults: list[Exception | None], *, after: bool = False) -> None:
        self.store, self.faults, self.after = store, faults, after

    def send(self, rows: Sequence[TrackedRow]) -> Mark | None:
        fault = self.faults.pop(0) if self.faults else None
        if fault is not None and not self.after:
            raise fault
        self.store += rows
        if fault is not None:
            raise fault
        return {"rows": len(self.store)}

    def close(self) -> None:
        return


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run")


def make_following(root: Path, sink: FakeSink, said: list[str], *, batch_rows: int = 3, confirms_at_close: bool = False) -> Following:
    kind = SinkKind("", FILES, deadline_s=30.0, batch_rows=batch_rows, confirms_at_close=confirms_at_close)
    return Following(root, "fake", kind, lambda run: sink, said.append, lambda row: row)


def read_all(root: Path, position: Position, *, limit: int = 100, **options: int) -> tuple[list[TrackedRow], Position]:
    batch = read_batch(root, FILES, position, limit=limit, say=pytest.fail, **options)
    return batch.rows, advance(position, batch.ends, len(batch.rows), None)


def steps(rows: Sequence[TrackedRow]) -> list[object]:
    return [row.row["step"] for row in rows]


# --- reading -----------------------------------------------------------------------------------------------------------------


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
    append(root, make_row(2, time_unix=BEGAN, name="heldout"), file="evaluations")  # earlier than all, written later
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
    assert read_batch(root, FILES, advance(Position("id"), batch.ends, 1, None), limit=9, say=pytest.fail).ends == {}


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


# --- the position ------------------------------------------------------------------------------------------------------------


def test_a_position_is_read_back_as_it_was_written(root: Path):
    path = position_path(root, "fake")
    first = open_position(path)
    assert len(first.id) == 32
    whole = replace(first, files={"metrics": Place(2, 7)}, sending={"metrics": Place(2, 9)}, number=3, handed=1, mark={"size": 4})
    write_position(path, whole)
    assert read_position(path) == whole == open_position(path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 2}', '{"schema": 1, "id": "a", "files": {"metrics": {"part": -1, "offset": 0}}}'])
def test_a_position_that_cannot_be_read_is_refused_with_the_way_out(root: Path, text: str):
    path = position_path(root, "fake")
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(RunDirError, match="remove it to send the whole run again"):
        open_position(path)


# --- sending -----------------------------------------------------------------------------------------------------------------


def test_everything_is_sent_once_and_a_second_follower_goes_on_from_there(root: Path):
    append(root, *(make_row(step) for step in range(1, 8)))
    store: list[TrackedRow] = []
    said: list[str] = []
    following = make_following(root, FakeSink(store, []), said)
    assert follow(following, FakeControl()) == DONE
    append(root, make_row(8))
    assert follow(following, FakeControl()) == DONE
    assert steps(store) == list(range(1, 9))
    assert [row.number for row in store] == list(range(8))
    position = open_position(following.position_path)
    assert (position.number, position.mark, position.sending, said) == (8, {"rows": 8}, None, [])


def test_a_service_that_is_away_gets_the_rows_later_and_that_is_said_once(root: Path):
    append(root, *(make_row(step) for step in range(1, 5)))
    store: list[TrackedRow] = []
    said: list[str] = []
    faults: list[Exception | None] = [None, *[SinkUnavailable("no route")] * 4]
    control = FakeControl()
    assert follow(make_following(root, FakeSink(store, faults), said), control, draw=lambda: 0.0) == DONE
    assert steps(store) == [1, 2, 3, 4]
    assert control.waits == [0.5, 1.0, 2.0, 4.0]
    assert said == ["does not take rows: no route; tried again until it does", "takes rows again"]


def test_rows_of_which_the_answer_was_lost_come_again_with_their_numbers(root: Path):
    append(root, *(make_row(step) for step in range(1, 5)))
    store: list[TrackedRow] = []
    sink = FakeSink(store, [OSError("reset")], after=True)
    assert follow(make_following(root, sink, []), FakeControl()) == DONE
    assert [(row.row["step"], row.number) for row in store] == [(1, 0), (2, 1), (3, 2), (1, 0), (2, 1), (3, 2), (4, 3)]


def test_a_refusal_ends_the_follower_only_when_the_run_is_over(root: Path):
    append(root, make_row(1))
    said: list[str] = []
    control = FakeControl()
    control.over = False

    def end_run(seconds: float) -> None:
        control.waits += [seconds] if seconds else []
        control.over = len(control.waits) >= 2

    control.wait = end_run  # pyright: ignore[reportAttributeAccessIssue]
    faults: list[Exception | None] = [SinkRefused("wrong key")] * 9
    assert follow(make_following(root, FakeSink([], faults), said), control) == REFUSED
    assert control.waits == [300.0, 300.0]
    assert said == ["refuses rows: wrong key; tried again until it does", "refuses rows: wrong key"]


def test_settings_of_the_environment_that_are_wrong_are_a_refusal(root: Path):
    said: list[str] = []
    following = make_following(root, FakeSink([], []), said)

    def open_sink(run: RunInfo) -> FakeSink:
        raise TrackerError("PORT=x is no port")

    assert follow(replace(following, open_sink=open_sink), FakeControl()) == REFUSED
    assert said == ["refuses rows: PORT=x is no port"]


def test_a_library_that_confirms_at_close_has_its_rows_counted_only_then(root: Path):
    append(root, *(make_row(step) for step in range(1, 5)))
    held: list[tuple[int, int]] = []

    class Late(FakeSink):
        closings: list[Exception | None] = [OSError("upload failed"), None]

        def close(self) -> None:
            position = open_position(position_path(root, "fake"))
            held.append((position.number, position.handed))
            fault = self.closings.pop(0)
            if fault is not None:
                raise fault

    store: list[TrackedRow] = []
    following = make_following(root, Late(store, []), [], confirms_at_close=True)
    assert follow(following, FakeControl()) == DONE
    assert held == [(0, 4), (0, 4)]
    assert [row.number for row in store] == [0, 1, 2, 3] * 2
    assert open_position(following.position_path).number == 4


@pytest.mark.parametrize(
    ("failures", "asked_s", "over", "draw", "expected"),
    [
        (1, None, False, 0.0, 0.5),
        (4, None, False, 0.0, 4.0),
        (4, None, False, 1.0, 2.0),
        (9999, None, False, 0.0, 60.0),
        (9, None, True, 0.0, 5.0),
        (1, 20.0, False, 0.0, 20.0),
        (1, 1e9, False, 0.0, 300.0),
        (1, 20.0, True, 0.0, 5.0),
    ],
)
def test_waits_double_up_to_a_limit_and_heed_the_service(failures: int, asked_s: float | None, over: bool, draw: float, expected: float):
    assert choose_wait(failures, asked_s=asked_s, over=over, draw=lambda: draw) == expected


def test_the_end_of_the_pipe_ends_the_process(monkeypatch: pytest.MonkeyPatch):
    def leave(code: int) -> NoReturn:
        raise SystemExit(code)

    monkeypatch.setattr(worker, "leave", leave)
    readable, writable = os.pipe()
    control = Control(readable)
    os.write(writable, b"o")
    control.wait(30.0)
    assert control.over
    os.close(writable)
    with pytest.raises(SystemExit, match="5"):
        control.wait(30.0)
    os.close(readable)


# --- names and secrets -------------------------------------------------------------------------------------------------------


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
    install = r"tracker wandb needs the package there_is_no_such, which is not installed: pip install 'rollouts-rl\[wandb\]'"
    with pytest.raises(ConfigError, match=rf"output\.trackers: {install}"):
        check_trackers(config.output.trackers)
    (finding,) = [finding for finding in check_output(config) if finding.subject == "output.trackers"]
    assert finding.level == "error"
    with pytest.raises(ConfigError, match=rf"--to wandb: {install}"):
        commands.check_names(["wandb"])
    with pytest.raises(ConfigError, match="--to wanbd: not a tracker; did you mean wandb"):
        commands.check_names(["wanbd"])


def test_metrics_are_the_numbers_beside_the_head_under_their_stage_where_a_service_has_none():
    row = TrackedRow("evaluations", make_row(3, **{"name": "heldout", "eval/heldout/avg@4": 0.25, "note": "text"}), aliases={"eval_reward": 0.25})
    assert row.metrics() == {"eval/heldout/avg@4": 0.25}
    assert row.staged_metrics() == {"rl/eval/heldout/avg@4": 0.25, "eval_reward": 0.25}


def test_rows_get_the_aliases_that_the_config_asks_for(root: Path):
    add = choose_aliases(root)
    assert add(TrackedRow("metrics", make_row(2))).aliases == {"loss": 2.0, "reward": 1.0}
    (root / "config.toml").write_text("[output]\n")
    assert choose_aliases(root)(TrackedRow("metrics", make_row(2))).aliases == {}


def test_settings_that_look_like_secrets_are_left_out(root: Path):
    assert read_config(root)["engine"] == {"env": {"API_KEY": "***"}}
    settings = {"max_new_tokens": 7, "keys": "kept", "url": "http://user:word@host/x", "list": [{"hf_token": "abc"}], "secret": ""}
    assert remove_secrets(settings) == {
        "max_new_tokens": 7, "keys": "kept", "url": "http://***@host/x", "list": [{"hf_token": "***"}], "secret": ""
    }  # fmt: skip


def test_secrets_of_the_environment_are_blotted_out_of_what_is_said():
    headers = {"OTEL_EXPORTER_OTLP_HEADERS": "x-key=abcdefgh,tenant=1"}
    secrets = find_secrets({"WANDB_API_KEY": "0123456789", **headers, "URI": "https://me:passphrase@host", "HOME": "/root"})
    text = hide_secrets("key 0123456789 or abcdefgh, passphrase, https://other:word@host, /root", secrets)
    assert text == "key *** or ***, ***, https://***@host, /root"


def test_a_sink_is_told_its_run_and_the_mark_of_the_last_position(root: Path):
    append(root, make_row(1))
    seen: list[RunInfo] = []
    sink = FakeSink([], [])
    following = make_following(root, sink, [])

    def open_sink(run: RunInfo) -> FakeSink:
        seen.append(run)
        return sink

    following = replace(following, open_sink=open_sink)
    follow(following, FakeControl())
    follow(following, FakeControl())
    assert [run.mark for run in seen] == [None, {"rows": 1}]
    assert seen[0].id == seen[1].id
    assert (seen[0].name, seen[0].root, seen[0].config["name"]) == ("run", root, "t")


def test_a_secret_is_hidden_without_its_percent_signs_and_with_an_at_sign_in_it():
    secrets = find_secrets({"OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20s%C3%A9cret-1", "SERVICE": "http://user:p@ssw0rd@host"})
    assert hide_secrets("ascii cannot encode 'Bearer sécret-1'", secrets) == "ascii cannot encode '*** ***'"
    assert hide_secrets("http://user:p@ssw0rd@host refused", []) == "http://***@host refused"
