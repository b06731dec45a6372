"""The report: what is in its file, how curves and samples are thinned, and that nothing of a run becomes a
part of the page.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollouts.cli import main
from rollouts.errors import StorageError
from rollouts.inspect.record import open_record
from rollouts.inspect.report.gather import RunReport, gather_run
from rollouts.inspect.report.page import write_report
from rollouts.inspect.report.samples import round_numbers
from tests.browser.written_run import NASTY, head, write_rows, write_run
from tests.unit.run_rows import write_block


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


def gather(root: Path, *, sample_bytes: int = 10**6, **options: int) -> RunReport:
    with open_record(root, points=True) as record:
        return gather_run(record, sample_bytes=sample_bytes, **options)


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
    assert main(["report", str(run)]) == 0
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
    calls = r"@import|url\(|fetch\(|XMLHttpRequest|WebSocket|eval\(|innerHTML|localStorage"
    assert not re.search(rf"https?://(?!www\.w3\.org/2000/svg)|{calls}", code)


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
    assert run["outcomes"][1] == {
        "stage": "rl", ">steps": 20, ">minutes": "0.7", ">reward first → last": "0.01 → 0.2",
        ">loss first → last": "1 → 0.05", ">groups dropped": 8, ">samples failed": 4,
    }  # fmt: skip
    assert [(stage["stage"], stage["rows"]) for stage in run["stages"]] == [("sft", 5), ("rl", 20)]
    assert run["samples"] == {"total": 80, "shown": 80, "how": ""}
    assert [row["eval/heldout/avg@1"] for row in run["evaluations"]] == [0.02, 0.4]


def test_secrets_of_the_settings_are_hidden(tmp_path: Path, page: Elements) -> None:
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "hunter2" not in text
    assert "user:pass" not in text
    settings = dict(script_of(page, "report-data")["runs"][0]["config"])
    assert settings["engine.password"] == "***"
    assert settings["engine.urls"] == '["http://***@127.0.0.1:1"]'
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


def test_a_run_that_has_begun_only_has_a_report(tmp_path: Path) -> None:
    root = tmp_path / "begun"
    root.mkdir()
    (root / "config.toml").write_text('name = "begun"\n')
    facts = gather(root).facts
    assert facts["state"] == "stopped"
    assert (facts["stages"], facts["means"], facts["samples"]["total"]) == ([], [], 0)
    (root / "run.lock").write_text('{"pid": 7, "host": "node3"}')
    (root / "metrics.jsonl").write_text(json.dumps(head("rl", 1)) + "\n")
    facts = gather(root).facts
    assert facts["activity"] == "perhaps running on node3, whose lock may not be seen here"
    assert (facts["certain"], facts["times"][0]["newest"]) == (False, head("rl", 1)["time_unix"])
    assert write_report([root], root / "report.html") > 1000


def test_rows_of_an_earlier_attempt_are_left_out(run: Path) -> None:
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(head("rl", 20, attempt=2) | {"reward/mean": 0.9}) + "\n")
    facts = gather(run).facts
    assert [row["reward/mean"][-2:] for row in facts["means"] if row["stage"] == "rl"] == [[0.19, 0.9]]
    assert [row["resumed"] for row in facts["axes"] if row["stage"] == "rl"] == [[19]]


def test_phases_failures_and_messages_are_counted(page: Elements) -> None:
    run = script_of(page, "report-data")["runs"][0]
    (phases,) = (row for row in run["phases"] if row["stage"] == "rl")
    assert (phases["time/generate"], phases["time/step"]) == ([1.25] * 20, [2] * 20)
    (found,) = run["failed"]
    assert (found["name"], found["total"], found["first"], found["last"]) == ("reward", 4, 5, 20)
    parts = {place * 20 // 25 for place in (9, 14, 19, 24)}  # of 25 rows, after 5 of sft
    assert {part["part"]: part["samples"] for part in found["spread"]} == dict.fromkeys(parts, 1)
    (message,) = run["messages"]
    text = """{"class": "reward", "function": "tasks:judge", "text": "no answer after 5 s", "count": 4,
        "first": 5, "last": 20, "sample": "s5-3", "stage": "rl", "step": 5}"""
    assert message == json.loads(text)


# --- samples ------------------------------------------------------------------------------------------------


def test_a_report_stays_within_its_bytes_and_says_how_many_samples_it_shows(tmp_path: Path) -> None:
    root = write_run(tmp_path / "many", steps=150, per_step=8)
    facts, samples = gather(root, sample_bytes=200_000)
    assert sum(len(text.encode()) for text in samples) <= 200_000
    assert facts["samples"]["total"] == 1200
    assert facts["samples"]["shown"] == len(samples) > 50
    assert any(json.loads(text)["id"] == facts["messages"][0]["sample"] for text in samples)


def test_samples_that_trained_have_their_advantage_share_and_tokens(run: Path) -> None:
    arrays = {"tokens": [72, 105, 33], "mask": [0, 1, 1], "mu": [0, -1.0, -0.5], "log_prob": [0, -0.5, -0.5]}
    row = head("rl", 20) | {"update": 0, "id": "s20-1", "row": 1, "advantage": -0.5, "share": 0.25}
    here, gone = write_block(run, "s20-1", **arrays), {"shard": "rl-1-000007.bin", "offset": 0}
    write_rows(run / "contributions.jsonl", [row | here, row | {"id": "s20-2"} | gone, row | {"id": "none"}])
    facts, texts = gather(run)
    samples = {sample["id"]: sample for sample in map(json.loads, texts)}
    assert (samples["s20-1"]["advantage"], samples["s20-1"]["share"]) == (-0.5, 0.25)
    shown = {"pieces": ["72 ", "105 ", "33 "], "mask": [0, 1, 1], "cut": 0, "difference": [None, 0.5, 0]}
    assert samples["s20-1"]["arrays"] == shown, "trainer minus engine, of tokens that train"
    assert "arrays" not in samples["s20-2"]
    assert "advantage" not in samples["s19-1"]
    said = "Tokens are shown by number: .*no tokenizer.json.*1 shown samples were removed"
    assert re.search(said, " ".join(facts["notes"]))


def test_values_are_counted_by_step_range_and_bin(tmp_path: Path) -> None:
    facts = [(1, 0.0, 0), (1, 2.0, 2), (2, 2.0, 1), (9, None, 20)]  # step, length, lag
    rows = [
        head("rl", step)
        | {"id": "x", "response_length": length, "policy_version": lag, "weight_version_min": 0}
        for step, length, lag in facts
    ]
    tmp_path.joinpath("config.toml").touch()
    write_rows(tmp_path / "samples.jsonl", rows)
    spreads = {row["name"]: row for row in gather(tmp_path).facts["spreads"]}
    assert spreads["lag"]["steps"] == [[1, 1], [2, 2], [9, 9]]
    assert [row[:3] + row[-1:] for row in spreads["lag"]["counts"]] == [
        [1, 0, 1, 0],
        [0, 1, 0, 0],
        [0, 0, 0, 1],
    ]
    assert (spreads["lag"]["means"], spreads["lag"]["more"]) == ([1, 1, 20], True)
    assert (spreads["length"]["counts"], spreads["length"]["more"]) == ([[1, 0, 1], [0, 0, 1]], False)
    assert spreads["length"]["edges"] == [-0.5, 0.5, 1.5, 2.5]
    assert "reward" not in spreads


def test_a_curve_of_many_steps_has_few_points_and_an_envelope(tmp_path: Path) -> None:
    run = gather(write_run(tmp_path / "long", steps=1000), points=100).facts
    tables = {
        name: next(row for row in run[name] if row["stage"] == "rl")
        for name in ("axes", "means", "lows", "highs")
    }
    assert (len(tables["axes"]["step"]), tables["axes"]["step"][:2]) == (100, [1, 11])
    assert [tables[name]["reward/mean"][0] for name in ("means", "lows", "highs")] == [0.055, 0.01, 0.1]
    assert round_numbers([1.23456789, 2.0, math.nan, math.inf, 1e-9], 5) == [1.2346, 2, None, None, 1e-9]
    (lengths,) = (row for row in run["spreads"] if row["name"] == "length")
    assert (len(lengths["counts"]), np.sum(lengths["counts"]), lengths["edges"][-1]) == (24, 4000, 7.5)
