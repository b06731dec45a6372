"""The report: what is in its file, how curves and samples are thinned, and that nothing of a run becomes a
part of the page.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import math
import re
import struct
import subprocess
import sys
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollouts.errors import RunDirError, StorageError
from rollouts.inspect.columns import open_columns
from rollouts.inspect.report import add_parser, token_view
from rollouts.inspect.report.choose import (
    TEXT_CHARS,
    choose_samples,
    encode_page_json,
    shorten_row,
    spread_out,
    take,
)
from rollouts.inspect.report.curves import bucket_size, downsample, make_curves, make_phases, shorten
from rollouts.inspect.report.failures import collect_messages, describe_class
from rollouts.inspect.report.gather import gather_run
from rollouts.inspect.report.page import write_report
from rollouts.inspect.report.settings import find_differences, flatten_settings
from rollouts.inspect.report.spreads import make_spread, whole_edges
from rollouts.inspect.report.token_view import make_token_values
from rollouts.inspect.report.updates import parse_update, read_updates
from rollouts.run_dir import RunDir
from tests.browser.written_run import NASTY, head, make_metrics, make_samples, write_rows, write_run

NAN = math.nan


class Elements(HTMLParser):
    """Tags with their attributes, and the text of each script and style."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[dict[str, str | None], str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self.texts.append((dict(attrs) | {"tag": tag}, ""))

    def handle_data(self, data: str) -> None:
        if self.tags and self.cdata_elem:
            self.texts[-1] = (self.texts[-1][0], self.texts[-1][1] + data)


def parse_page(path: Path) -> Elements:
    page = Elements()
    page.feed(path.read_text(encoding="utf-8"))
    page.close()
    return page


def script_of(page: Elements, name: str) -> Any:
    return next(json.loads(text) for attributes, text in page.texts if attributes.get("id") == name)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "written")


@pytest.fixture
def page(run: Path, tmp_path: Path) -> Elements:
    write_report([run], tmp_path / "report.html")
    return parse_page(tmp_path / "report.html")


# --- the file -----------------------------------------------------------------------------------------------


def test_the_command_writes_report_html_into_the_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    arguments = parser.parse_args(["report", str(run)])
    assert arguments.run(arguments) == 0
    assert (run / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert str(run / "report.html") in capsys.readouterr().out


def test_texts_of_a_run_stay_texts(page: Elements, tmp_path: Path) -> None:
    samples = script_of(page, "sample-data")[0]
    assert samples[0]["prompt"][1]["content"] == f"What is 1 + 0? {NASTY}"
    assert samples[0]["metadata"]["note"] == NASTY
    assert len([tag for tag, _ in page.tags if tag == "script"]) == 3
    assert "\u2028" not in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_the_page_loads_nothing(page: Elements, tmp_path: Path) -> None:
    for tag, attributes in page.tags:
        for name in ("src", "href", "action", "data", "srcset", "style"):
            value = attributes.get(name) or ""
            assert value.startswith(("#", "data:")) or not value, (tag, name, value)
        assert tag not in ("iframe", "object", "embed", "base", "img"), tag
    code = "".join(text for attributes, text in page.texts if attributes.get("type") != "application/json")
    assert not re.search(
        r"https?://(?!www\.w3\.org/2000/svg)|@import|url\(|fetch\(|XMLHttpRequest|WebSocket|eval\(|innerHTML|localStorage",
        code,
    )


def test_the_policy_allows_the_styles_and_scripts_of_the_page_and_nothing_else(page: Elements) -> None:
    policy = next(
        str(attributes["content"])
        for tag, attributes in page.tags
        if tag == "meta" and "http-equiv" in attributes
    )
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    sources = {
        kind: text
        for attributes, text in page.texts
        if attributes.get("type") is None
        for kind in [f"{attributes['tag']}-src"]
    }
    for kind, text in sources.items():
        assert rules[kind] == f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert set(rules) == {"default-src", "style-src", "script-src", "img-src", "base-uri", "form-action"}


def test_a_run_is_told_in_numbers(page: Elements) -> None:
    run = script_of(page, "report-data")["runs"][0]
    assert (run["name"], run["state"]) == ("written", "finished")
    assert [(stage["name"], stage["last"], stage["reward"]) for stage in run["stages"]] == [
        ("sft", 5, None),
        ("rl", 20, [0.01, 0.2]),
    ]
    assert run["stages"][1]["seconds"] == 19 * 10 + 2  # nineteen gaps of ten seconds, and the first step
    assert run["stages"][1]["failed"] == 4
    assert run["stages"][1]["dropped"] == 8
    assert run["samples"] == {"total": 80, "shown": 80, "how": ""}
    assert [row["metrics"]["eval/heldout/avg@1"] for row in run["evaluations"]] == [0.02, 0.4]
    assert {tile["name"]: tile["value"] for tile in run["tiles"]}["Heldout avg@1"] == "40.0 %"


def test_secrets_of_the_settings_are_hidden(tmp_path: Path, page: Elements) -> None:
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "hunter2" not in text
    assert "user:pass" not in text
    settings = dict(script_of(page, "report-data")["runs"][0]["config"])
    assert settings["engine.password"] == "(hidden)"
    assert settings["engine.urls"] == '["http://127.0.0.1:1"]'
    assert settings["rl.changes.1.at"] == "9"


def test_several_runs_are_compared(run: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "more" / "written", lr=5e-3)
    write_report([run, other], tmp_path / "both.html")
    report = script_of(parse_page(tmp_path / "both.html"), "report-data")
    assert len({item["name"] for item in report["runs"]}) == 2
    assert report["differences"] == [["rl.optim.lr", ["0.001", "0.005"]]]


def test_a_file_that_cannot_be_written_is_named(run: Path, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"missing/report\.html cannot be written .*--output"):
        write_report([run], tmp_path / "missing" / "report.html")


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match="not a run directory"):
        write_report([tmp_path], tmp_path / "report.html")


def test_a_run_that_has_begun_only_has_a_report(tmp_path: Path) -> None:
    root = tmp_path / "begun"
    root.mkdir()
    (root / "config.toml").write_text('name = "begun"\n')
    facts = gather_run(root, sample_bytes=1000).facts
    assert facts["state"] == "stopped"
    assert (facts["stages"], facts["curves"], facts["samples"]["total"]) == ([], {}, 0)
    (root / "run.lock").write_text('{"pid": 7, "host": "node3"}')
    (root / "metrics.jsonl").write_text(
        '{"schema": 1, "stage": "rl", "step": 1, "policy_version": 0, "attempt": 1, "time_unix": 86400.0}\n'
    )
    facts = gather_run(root, sample_bytes=1000).facts
    assert facts["state"] == "perhaps running"
    assert (
        dict(facts["facts"])["state"]
        == "perhaps running on node3, whose lock may not be seen here; last row 1970-01-02 00:00 UTC, 1"
        " attempt"
    )
    assert write_report([root], root / "report.html") > 1000


def test_rows_of_an_earlier_attempt_are_left_out(run: Path) -> None:
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(head("rl", 20, attempt=2) | {"reward/mean": 0.9}) + "\n")
    curves = gather_run(run, sample_bytes=10**6).facts["curves"]["rl"]
    assert curves["metrics"]["reward/mean"]["mean"][-2:] == [0.19, 0.9]
    assert curves["resumed"] == [19]


def test_importing_the_command_loads_neither_torch_nor_numpy() -> None:
    code = (
        "import rollouts.inspect.report, sys; print([name for name in ('torch', 'transformers', 'numpy',"
        " 'pydantic') if name in sys.modules])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )


# --- curves -------------------------------------------------------------------------------------------------


def test_five_values_in_twos_keep_mean_least_and_greatest() -> None:
    mean, low, high = downsample(np.array([1.0, 3.0, NAN, 5.0, 7.0]), 2)
    assert (mean.tolist(), low.tolist(), high.tolist()) == ([2.0, 5.0, 7.0], [1.0, 5.0, 7.0], [3.0, 5.0, 7.0])


def test_a_bucket_without_values_has_none() -> None:
    assert shorten(downsample(np.array([NAN, NAN, 4.0]), 2).mean) == [None, 4]


@pytest.mark.parametrize(
    ("rows", "points", "size"), [(0, 10, 1), (10, 10, 1), (11, 10, 2), (100_000, 2000, 50)]
)
def test_buckets_are_as_small_as_the_points_allow(rows: int, points: int, size: int) -> None:
    assert bucket_size(rows, points) == size


def test_numbers_are_shortened_to_five_digits_and_what_is_not_finite_is_none() -> None:
    assert shorten(np.array([1.23456789, 2.0, NAN, math.inf, 1e-9])) == [1.2346, 2, None, None, 1e-9]


def test_a_curve_of_many_steps_has_few_points_and_an_envelope(tmp_path: Path) -> None:
    root = tmp_path / "long"
    root.mkdir()
    write_rows(root / "metrics.jsonl", make_metrics(1000))
    columns = open_columns(RunDir(root), "metrics")
    rows = np.flatnonzero(columns.match_text("stage", "rl"))
    curves = make_curves(columns, rows, points=100, begin_unix=1_800_000_000.0)
    assert (curves["rows"], len(curves["step"]), curves["step"][:2], curves["time"][:2]) == (
        1000,
        100,
        [1, 11],
        [10, 110],
    )
    reward = curves["metrics"]["reward/mean"]
    assert (reward["mean"][0], reward["low"][0], reward["high"][0]) == (0.055, 0.01, 0.1)


def test_phases_and_the_rest_of_the_step_sum_to_the_step(run: Path) -> None:
    columns = open_columns(RunDir(run), "metrics")
    phases = make_phases(columns, np.flatnonzero(columns.match_text("stage", "rl")), points=100)
    assert phases is not None
    assert phases["total"] == {"generate": 25.0, "train": 10.0, "rest of the step": 5.0}
    assert not phases["ahead"]


# --- distributions and failures -----------------------------------------------------------------------------


def test_values_are_counted_by_step_range_and_bin() -> None:
    spread = make_spread(np.array([1, 1, 2, 9]), np.array([0.0, 2.0, 1.0, 7.0]), whole_edges(2))
    assert spread["steps"] == [[1, 1], [2, 2], [9, 9]]
    assert spread["counts"] == [
        [1, 0, 1],
        [0, 1, 0],
        [0, 0, 1],
    ]  # 7 is in the last bin, for 7 and what lies beyond its edge
    assert spread["means"] == [1, 1, 7]


def test_failures_are_counted_by_class_and_part_of_the_run(run: Path) -> None:
    columns = open_columns(RunDir(run), "metrics")
    found = describe_class(columns, np.flatnonzero(columns.match_text("stage", "rl")), "fail/reward")
    assert found == {
        "name": "reward",
        "total": 4,
        "steps": 4,
        "first": 5,
        "last": 20,
        "spread": [int(place % 5 == 4) for place in range(20)],
    }


def test_messages_that_differ_in_numbers_are_one(run: Path) -> None:
    samples = open_columns(RunDir(run), "samples")
    (message,) = collect_messages(samples, np.arange(samples.rows))
    assert (message["text"], message["count"], message["first"], message["last"]) == (
        "no answer after 5 s",
        4,
        5,
        20,
    )
    assert (message["class"], message["function"], message["sample"], message["step"]) == (
        "reward",
        "tasks:judge",
        "s5-3",
        5,
    )


# --- samples ------------------------------------------------------------------------------------------------


def test_too_many_samples_are_chosen_within_the_bytes_with_the_newest_the_failed_and_the_extremes(
    tmp_path: Path,
) -> None:
    root = tmp_path / "many"
    root.mkdir()
    write_rows(root / "samples.jsonl", make_samples(200, 8))
    columns = open_columns(RunDir(root), "samples")
    choice = choose_samples(columns, np.arange(columns.rows), 300_000, first=[4])
    sizes = columns.column("length")[choice.rows]
    assert len(set(choice.rows.tolist())) == len(choice.rows) < columns.rows
    assert 200_000 < sizes.sum() <= 300_000
    assert choice.rows[0] == 4
    steps = columns.column("step")[choice.rows]
    assert 200 in steps
    assert np.histogram(steps, bins=4, range=(1, 200))[0].min() > 20  # evenly over the run too
    assert columns.match_text("status", "failed")[choice.rows].sum() >= 20
    assert choice.how == "newest steps, failed, best rewards, worst rewards, and steps evenly over the run"


def test_a_report_stays_within_its_bytes_and_says_how_many_samples_it_shows(tmp_path: Path) -> None:
    root = write_run(tmp_path / "many", steps=150, per_step=8)
    facts, samples = gather_run(root, sample_bytes=200_000)
    assert sum(len(text.encode()) for text in samples) <= 200_000
    assert facts["samples"]["total"] == 1200
    assert facts["samples"]["shown"] == len(samples) > 50
    assert any(json.loads(text)["id"] == facts["failures"]["messages"][0]["sample"] for text in samples)


def test_a_huge_sample_keeps_no_other_one_out(tmp_path: Path) -> None:
    root = write_run(tmp_path / "huge", steps=150, per_step=8)
    usual = (root / "samples.jsonl").read_text()
    huge = [
        head("rl", step)
        | {
            "id": f"huge{step}",
            "response": "x" * 3_000_000,
            "reward": 9.0,
            "status": "failed",
        }
        for step in (1, 150)
    ]
    (root / "samples.jsonl").write_text(json.dumps(huge[0]) + "\n" + usual + json.dumps(huge[1]) + "\n")
    facts, samples = gather_run(root, sample_bytes=200_000)
    shown = [json.loads(text) for text in samples]
    assert sum(len(text.encode()) for text in samples) <= 200_000
    assert len(shown) > 150, "of some 800 bytes each"
    assert max(row["step"] for row in shown if row["id"] != "huge150") == 150, "the newest step is there"
    assert "huge1" in {row["id"] for row in shown}, "cut to 20,000 characters it fits"
    assert facts["samples"]["total"] == 1202


def test_what_does_not_fit_is_passed_over() -> None:
    costs = np.array([5.0, 100.0, 3.0, 4.0, 1.0, 1.0])
    taken = np.zeros(6, dtype=bool)
    assert take(np.array([1, 0, 2, 3, 4, 5]), taken, costs, 10.0).tolist() == [
        0,
        2,
        4,
        5,
    ]  # 5 + 3, then 4 is too much, 1 + 1
    assert taken.tolist() == [True, False, True, False, True, True]
    assert take(np.array([1, 3]), taken, costs, 3.0).tolist() == []


def test_a_report_of_long_samples_and_many_tokens_stays_within_its_bytes(tmp_path: Path) -> None:
    """A run whose samples and token arrays would take more than 20 MB, with letters of three bytes: in whole,
    and as one of ten runs.
    """
    root = write_long_run(tmp_path / "long")
    for limit, rows, with_arrays in ((12_000_000, 120, 25), (1_200_000, 10, 3)):
        facts, texts = gather_run(root, sample_bytes=limit)
        assert sum(len(text.encode()) for text in texts) <= limit
        assert len(texts) >= rows
        assert sum('"arrays":' in text for text in texts) >= with_arrays
    assert facts["samples"]["total"] == 150
    assert write_report([root] * 10, tmp_path / "report.html") < 15_000_000


def write_long_run(root: Path) -> Path:
    """150 samples of 30,000 letters and of 4,000 tokens each."""
    root.mkdir()
    (root / "config.toml").write_text("")
    length = 4000
    columns = {
        "tokens": ("<i4", [123_456.0] * length),
        "mask": ("|u1", [1.0] * length),
        "advantage": ("<f4", [-1.23456] * length),
    }
    columns |= {"mu": ("<f4", [-0.123456] * length), "log_prob": ("<f4", [-2.23456] * length)}
    write_block(root, "s", columns)
    samples = [
        head("rl", step) | {"id": f"s{step}", "status": "completed", "response": "語" * 30_000, "reward": 1.0}
        for step in range(1, 151)
    ]
    (root / "samples.jsonl").write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in samples)
    )
    where = {"update": 0, "shard": "rl-1-000000.bin", "offset": 0, "length": length}
    block = (root / "tokens" / "rl-1-000000.bin").read_bytes()
    shard = b""
    rows = []
    for step in range(1, 151):
        rows.append(head("rl", step) | where | {"id": f"s{step}", "offset": len(shard)})
        shard += rename_block(block, f"s{step}")
    (root / "tokens" / "rl-1-000000.bin").write_bytes(shard)
    write_rows(root / "contributions.jsonl", rows)
    return root


def rename_block(block: bytes, sample: str) -> bytes:
    """The block as that of another sample."""
    _, size, payload, _ = struct.unpack_from("<4sIII", block)
    header = json.dumps(json.loads(block[16 : 16 + size]) | {"id": sample}).encode()
    body = header + block[16 + size :]
    return struct.pack("<4sIII", b"tok1", len(header), payload, zlib.crc32(body)) + body


@pytest.mark.parametrize("length", [0, 1, 2, 7, 64])
def test_every_beginning_of_a_spread_order_is_spread(length: int) -> None:
    order = spread_out(np.arange(length))
    assert sorted(order.tolist()) == list(range(length))
    assert length < 4 or (order[:2].tolist()[0] == 0 and order[1] >= length // 2 - 1)


def test_long_texts_are_cut_and_numbers_that_are_not_finite_are_left_out() -> None:
    row = shorten_row(
        {
            "schema": 1,
            "step": 3,
            "response": "x" * (TEXT_CHARS + 5),
            "reward": NAN,
            "metadata": {"a": [math.inf, "y"]},
        }
    )
    assert row == {
        "step": 3,
        "response": f"{'x' * TEXT_CHARS}… (20,005 characters in all)",
        "reward": None,
        "metadata": {"a": [None, "y"]},
    }


def test_page_json_says_the_same_without_what_could_end_a_script() -> None:
    text = encode_page_json({"a": NASTY, "b": "\u2029"})
    assert json.loads(text) == {"a": NASTY, "b": "\u2029"}
    assert not re.search("[<\u2028\u2029]", text)


def test_token_values_are_of_trained_tokens_and_the_difference_is_trainer_minus_engine() -> None:
    arrays = {
        "tokens": [5, 6, 7],
        "mask": [0, 1, 1],
        "mu": [0.0, -1.0, -2.0],
        "log_prob": [0.0, -1.25, -1.5],
        "advantage": [0.5, 0.5, -0.125],
    }
    words = {5: "Hi", 6: " the", 7: "re"}
    values = make_token_values(
        {name: np.array(column) for name, column in arrays.items()},
        lambda ids: "".join(words[token] for token in ids),
    )
    assert values == {
        "pieces": ["Hi", " the", "re"],
        "mask": [0, 1, 1],
        "cut": 0,
        "advantage": [None, 0.5, -0.125],
        "difference": [None, -0.25, 0.5],
    }


def write_block(root: Path, sample: str, columns: dict[str, tuple[str, list[float]]]) -> None:
    """A shard of one block, by the format's description."""
    length = len(next(iter(columns.values()))[1])
    header = json.dumps(
        {"id": sample, "length": length, "columns": [[name, kind] for name, (kind, _) in columns.items()]}
    ).encode()
    payload = b"".join(np.array(values, kind).tobytes() for kind, values in columns.values())
    (root / "tokens").mkdir()
    prefix = struct.pack("<4sIII", b"tok1", len(header), len(payload), zlib.crc32(header + payload))
    (root / "tokens" / "rl-1-000000.bin").write_bytes(prefix + header + payload)


def test_samples_that_trained_have_their_advantage_share_and_tokens(run: Path) -> None:
    values = {"tokens": ("<i4", [72.0, 105.0, 33.0]), "mask": ("|u1", [0.0, 1.0, 1.0])}
    values |= {"mu": ("<f4", [0, -1.0, -0.5]), "log_prob": ("<f4", [0, -0.5, -0.5])}
    write_block(run, "s20-1", values)
    row = head("rl", 20) | {
        "update": 0,
        "id": "s20-1",
        "row": 1,
        "advantage": -0.5,
        "weight": 1.0,
        "share": 0.25,
        "tokens": 2,
        "reward": 0.25,
    }
    here, gone = (
        {"shard": "rl-1-000000.bin", "offset": 0, "length": 3},
        {"shard": "rl-1-000007.bin", "offset": 0, "length": 3},
    )
    write_rows(
        run / "contributions.jsonl", [row | here, row | {"id": "s20-2"} | gone, row | {"id": "not logged"}]
    )
    facts, texts = gather_run(run, sample_bytes=10**6)
    samples = {sample["id"]: sample for sample in map(json.loads, texts)}
    assert (samples["s20-1"]["advantage"], samples["s20-1"]["share"]) == (-0.5, 0.25)
    assert samples["s20-1"]["arrays"] == {
        "pieces": ["72 ", "105 ", "33 "],
        "mask": [0, 1, 1],
        "cut": 0,
        "difference": [None, 0.5, 0],
    }
    assert "arrays" not in samples["s20-2"]
    assert "advantage" not in samples["s19-1"]
    assert re.search(
        r"Tokens are shown by number: .*no tokenizer\.json.*1 shown samples were removed",
        " ".join(facts["notes"]),
    )


def test_a_step_whose_updates_are_not_all_read_has_no_values(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        head("rl", step) | {"update": update, "id": f"s{step}-1", "weight": 1.0 - update}
        for step in (19, 20)
        for update in (0, 1)
    ]
    write_rows(run / "contributions.jsonl", rows)
    contributions = open_columns(RunDir(run), "contributions")
    samples = [head("rl", step) | {"id": f"s{step}-1"} for step in (19, 20)]
    monkeypatch.setattr(token_view, "ROWS_READ", 3)
    assert [
        (key, row["weight"]) for key, row in token_view.read_contributions(contributions, samples).items()
    ] == [(("rl", 20, "s20-1"), 1.0)]


# --- settings and updates -----------------------------------------------------------------------------------


def test_settings_that_differ_are_found_with_those_that_one_run_lacks() -> None:
    one = {"a": {"b": 1, "c": [1]}, "output": {"dir": "x"}}
    other = {"a": {"b": 2, "c": [1]}, "output": {"dir": "y"}, "d": "e"}
    assert find_differences([flatten_settings(one), flatten_settings(other)]) == [
        ("a.b", ["1", "2"]),
        ("d", [None, '"e"']),
    ]


def test_lines_of_the_audit_log_are_columns(run: Path) -> None:
    updates = read_updates(RunDir(run))
    assert updates["columns"] == [
        "time, UTC", "stage", "attempt", "step", "update", "version", "loss", "gradient norm", "clipped", "learning rate", "samples",
        "of these zero advantage", "tokens", "note",
    ]  # fmt: skip
    assert updates["total"] == 20
    assert updates["lines"][6][-1] == "skipped: the loss is not finite"
    assert updates["unread"] == 0
    assert parse_update("whatever a later version writes") is None


def test_a_line_that_cannot_be_read_spoils_no_other(run: Path) -> None:
    path = run / "updates.log"
    lines = path.read_text().splitlines(keepends=True)
    whole = read_updates(RunDir(run))
    path.write_text("".join([*lines[:3], lines[3][:40] + lines[4], "\x00\x00\n", *lines[5:], lines[0][:-9]]))
    updates = read_updates(RunDir(run))
    assert updates["columns"] == whole["columns"]
    assert updates["lines"] == whole["lines"][:3] + whole["lines"][5:]
    assert (updates["total"], updates["unread"]) == (
        18,
        3,
    )  # two lines that were joined, one of zeros, one without its end


def test_lines_that_are_all_of_another_form_are_shown_as_they_are(run: Path) -> None:
    (run / "updates.log").write_text("one\ntwo\n")
    assert read_updates(RunDir(run)) == {"columns": [], "lines": [["one"], ["two"]], "total": 2, "unread": 0}
