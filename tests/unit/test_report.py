"""The report: what is in its file, how curves and samples are thinned, and that nothing of a run becomes a
part of the page.
"""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from operator import itemgetter

import numpy as np
import pytest

from rollouts.cli import main
from rollouts.errors import StorageError
from rollouts.inspect.record import open_record
from rollouts.inspect.report.page import gather_run, write_report
from tests.browser.written_run import NASTY, head, write_run
from tests.unit.run_rows import write_block, write_rows


class Page(HTMLParser):
    """Each tag with its attributes and what a script or style holds."""

    def __init__(self, path):
        super().__init__()
        self.elements = []
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs), []))

    def handle_data(self, data):
        if self.cdata_elem:
            self.elements[-1][2].append(data)

    def code(self):
        """Style and script of the page, without its data."""
        return {tag: "".join(text) for tag, of, text in self.elements if text and "type" not in of}

    def data(self, name):
        return next(json.loads("".join(text)) for _, of, text in self.elements if of.get("id") == name)


def gather(root, *, share=1.0):
    with open_record(root, points=True) as record:
        return gather_run(record, share=share)


def of_rl(rows):
    (row,) = (row for row in rows if row["stage"] == "rl")
    return row


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "written")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    root = write_run(tmp_path_factory.mktemp("report") / "written")
    assert main(["report", str(root)]) == 0
    return Page(root / "report.html")


@pytest.fixture
def facts(page):
    return page.data("report-data")["runs"][0]


# --- the file -----------------------------------------------------------------------------------------------


def test_texts_of_a_run_stay_texts(page):
    sample = page.data("sample-data")[0][0]
    assert sample["prompt"][1]["content"] == f"What is 1 + 0? {NASTY}"
    assert sample["metadata"]["note"] == NASTY
    assert [tag for tag, *_ in page.elements].count("script") == 3
    assert "\u2028" not in page.source


def test_the_page_loads_nothing(page):
    assert page.source.startswith("<!doctype html>")
    for tag, attributes, _ in page.elements:
        for name in {"src", "href", "action", "data", "srcset", "style"} & attributes.keys():
            assert re.match("#|data:|$", attributes[name] or ""), tag
        assert tag not in ("iframe", "object", "embed", "base", "img")
    calls = r"@import|url\(|fetch\(|XMLHttpRequest|WebSocket|eval\(|innerHTML|localStorage"
    assert not re.search(rf"https?://(?!www\.w3\.org/2000/svg)|{calls}", "".join(page.code().values()))


def test_the_policy_allows_the_styles_and_scripts_of_the_page_and_nothing_else(page):
    (policy,) = (of["content"] for _, of, _ in page.elements if "http-equiv" in of)
    rules = dict(rule.strip().split(" ", 1) for rule in str(policy).split(";"))
    wanted = dict.fromkeys(("default-src", "base-uri", "form-action"), "'none'") | {"img-src": "data:"}
    for tag in ("style", "script"):
        digest = base64.b64encode(hashlib.sha256(page.code()[tag].encode()).digest()).decode()
        wanted[f"{tag}-src"] = f"'sha256-{digest}'"
    assert rules == wanted


def test_a_run_is_told_in_numbers(facts):
    assert (facts["name"], facts["state"]) == ("written", "finished")
    outcome = """{"stage": "rl", ">steps": 20, ">minutes": "0.7", ">reward first → last": "0.01 → 0.2",
        ">loss first → last": "1 → 0.05", ">groups dropped": 8, ">samples failed": 4}"""
    assert facts["outcomes"][1] == json.loads(outcome)
    assert {stage["stage"]: stage["rows"] for stage in facts["stages"]} == {"sft": 5, "rl": 20}
    assert facts["logged"] == [{"total": 80}]
    assert [row["eval/heldout/avg@1"] for row in facts["evaluations"]] == [0.02, 0.4]


def test_phases_failures_and_messages_are_counted(facts):
    assert {"time/generate": [1.25] * 20, "time/step": [2] * 20}.items() <= of_rl(facts["phases"]).items()
    (found,) = facts["failed"]
    assert found.items() >= {"name": "reward", "total": 4, "first": 5, "last": 20}.items()
    parts = {place * 20 // 25 for place in (9, 14, 19, 24)}  # of 25 rows, after 5 of sft
    assert {part["part"]: part["samples"] for part in found["spread"]} == dict.fromkeys(parts, 1)
    text = """{"class": "reward", "function": "tasks:judge", "text": "no answer after 5 s", "count": 4,
        "first": 5, "last": 20, "sample": "s5-3", "stage": "rl", "step": 5, "kinds": 1, "place": 19}"""
    assert facts["messages"] == [json.loads(text)]


def test_secrets_of_the_settings_are_hidden(page, facts):
    assert not re.search("hunter2|user:pass", page.source)
    shown = {"engine.password": "***", "engine.urls": '["http://***@127.0.0.1:1"]', "rl.changes.1.at": "9"}
    assert shown.items() <= dict(facts["config"]).items()


def test_several_runs_are_compared_and_a_path_that_cannot_be_written_is_named(tmp_path):
    runs = [write_run(tmp_path / str(lr) / "written", steps=2, lr=lr) for lr in (1e-3, 5e-3)]
    write_report(runs, tmp_path / "both.html")
    one, other = Page(tmp_path / "both.html").data("report-data")["runs"]
    assert one["name"] != other["name"]
    with pytest.raises(StorageError, match=r"missing/report\.html cannot be written .*--output"):
        write_report(runs[:1], tmp_path / "missing/report.html")


def test_a_run_that_has_begun_only_has_a_report(tmp_path, capsys):
    (tmp_path / "config.toml").write_text('name = "begun"\n')
    facts = gather(tmp_path)[0]
    assert facts["state"] == "stopped"
    assert (facts["stages"], facts["means"], facts["logged"]) == ([], [], [{"total": 0}])
    (tmp_path / "run.lock").write_text('{"pid": 7, "host": "node3"}')
    write_rows(tmp_path / "metrics.jsonl", head("rl", 1))
    facts = gather(tmp_path)[0]
    assert facts["activity"] == "perhaps running on node3, whose lock may not be seen here"
    assert (facts["certain"], facts["times"][0]["newest"]) == (False, head("rl", 1)["time_unix"])
    assert main(["report", str(tmp_path)]) == 0
    assert str(tmp_path / "report.html") in capsys.readouterr().out


def test_rows_of_an_earlier_attempt_are_left_out(run):
    write_rows(run / "metrics.1.jsonl", head("rl", 20, attempt=2) | {"reward/mean": 0.9})
    facts = gather(run)[0]
    assert of_rl(facts["means"])["reward/mean"][-2:] == [0.19, 0.9]
    assert of_rl(facts["axes"])["resumed"] == [19]


# --- samples ------------------------------------------------------------------------------------------------


def test_a_report_stays_within_its_bytes_and_says_how_many_samples_it_shows(tmp_path):
    facts, samples = gather(write_run(tmp_path / "many", steps=150, per_step=8), share=1 / 60)
    assert len("".join(samples).encode()) <= 200_000
    assert facts["logged"] == [{"total": 1200}] and len(samples) > 50
    assert facts["messages"][0]["sample"] in {json.loads(text)["id"] for text in samples}


def test_samples_that_trained_have_their_advantage_share_and_tokens(run):
    arrays = """{"tokens": [72, 105, 33], "mask": [0, 1, 1],
        "mu": [0, -1.0, -0.5], "log_prob": [0, -0.5, -0.5]}"""
    row = '{"update": 0, "id": "s20-1", "row": 1, "advantage": -0.5, "share": 0.25}'
    row = head("rl", 20) | json.loads(row)
    here, gone = write_block(run, "s20-1", **json.loads(arrays)), {"shard": "rl-1-000007.bin", "offset": 0}
    write_rows(run / "contributions.jsonl", row | here, row | {"id": "s20-2"} | gone, row | {"id": "none"})
    facts, texts = gather(run)
    samples = {sample["id"]: sample for sample in map(json.loads, texts)}
    shown = """{"advantage": -0.5, "share": 0.25, "arrays":
        {"pieces": ["72 ", "105 ", "33 "], "mask": [0, 1, 1], "cut": 0, "logprob_diff": [0, 0.5, 0]}}"""
    assert samples["s20-1"] | json.loads(shown) == samples["s20-1"]  # trainer minus engine, where it trains
    assert "arrays" not in samples["s20-2"]
    assert "advantage" not in samples["s19-1"]
    said = "tokens are shown by number: .*no tokenizer.json.*1 shown samples were removed"
    assert re.search(said, " ".join(facts["notes"]))


def test_values_are_counted_by_step_range_and_bin(tmp_path):
    rows = """[{"step": 1, "response_length": 0.0, "policy_version": 0},
        {"step": 1, "response_length": 2.0, "policy_version": 2},
        {"step": 2, "response_length": 2.0, "policy_version": 1}, {"step": 9, "policy_version": 20}]"""
    (tmp_path / "config.toml").touch()
    samples = ({"id": "x", "weight_version_min": 0, **row} for row in json.loads(rows))
    write_rows(tmp_path / "samples.jsonl", *samples)
    lag, length = sorted(gather(tmp_path)[0]["spreads"], key=itemgetter("name"))
    lag["counts"] = [row[:3] + row[-1:] for row in lag["counts"]]
    wanted = """{"name": "lag", "steps": [[1, 1], [2, 2], [9, 9]], "means": [1, 1, 20], "more": true,
        "counts": [[1, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 1]]}"""
    assert lag | json.loads(wanted) == lag
    wanted = """{"name": "length", "counts": [[1, 0, 1], [0, 0, 1]], "more": false,
        "edges": [-0.5, 0.5, 1.5, 2.5]}"""
    assert length | json.loads(wanted) == length


def test_a_curve_of_many_steps_has_few_points_and_an_envelope(tmp_path):
    facts, _ = gather(write_run(tmp_path / "long", steps=1000), share=1e-6)
    steps = of_rl(facts["axes"])["step"]
    assert (len(steps), steps[:2]) == (100, [1, 11])
    first = [of_rl(facts[name])["reward/mean"][0] for name in ("means", "lows", "highs")]
    assert first == [0.055, 0.01, 0.1]
    (counts, edge) = next(
        (row["counts"], row["edges"][-1]) for row in facts["spreads"] if row["name"] == "length"
    )
    assert (len(counts), np.sum(counts), edge) == (24, 4000, 7.5)
