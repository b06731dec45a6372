"""A row of samples.jsonl: texts, and beside them at most 700 bytes."""

import dataclasses
import io
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from rollouts.data.data_buffer import DataBuffer
from rollouts.errors import MetricError
from rollouts.metrics import progress as progress_module
from rollouts.metrics.names import METRICS, find_metric
from rollouts.metrics.progress import open_progress
from rollouts.metrics.record import check_metric, encode_row, encode_sample_rows, make_head, shorten_failure
from rollouts.types import Sample, Status
from rollouts.weight_sync.sync import make_metric_name
from tests import ROOT
from tests.support.text_tables import cases, read_cells
from tests.unit.fleet_engines import UNREACHABLE, FakeEngine, fail, fleet_of, gather
from tests.unit.test_mixture import make_mixture
from tests.unit.test_weight_sync import World

# --- rows ---------------------------------------------------------------------------------------------------


@cases(
    "name",
    [
        *read_cells(
            "reward | Reward/mean | reward/ | /reward | a b/c | a/b-c | 0a/b | a/b/c/d/e/f | a/@4 | a/b@"
        )[0],
        "a/b\n",
        "",
    ],
)
def test_a_name_out_of_form_is_refused_by_name(name):
    with pytest.raises(MetricError, match="lower_snake"):
        check_metric(name, 1.0)


@cases("value", [math.nan, -math.inf, np.float32("nan"), "1.0", None, [1.0]])
def test_a_value_that_is_not_a_finite_number_is_refused_naming_the_metric(value):
    with pytest.raises(MetricError, match=r"metric loss/total = .*finite"):
        check_metric("loss/total", value)


def test_a_row_is_encoded_as_the_standard_library_reads_it():
    row = json.loads(
        '{"stage": "rl", "loss/total": 1.0, "tiny": 1e-7, "text": "Grüße \\u2028 \\n", "list": [{"a": null}]}'
    )
    assert json.loads(encode_row(row)) == row
    assert b"\n" not in encode_row(row)
    # half a surrogate pair, which a dataset's JSON can hold and UTF-8 cannot, does not end a run
    odd = {"a": np.float32(0.5), "b": np.int64(2), "c": 2**70, "prompt": "a\ud800b"}
    assert json.loads(encode_row(odd)) == {"a": 0.5, "b": 2, "c": 2**70, "prompt": "a?b"}


@cases("value", [math.nan, math.inf, np.float32("nan"), np.float64("inf")])
@cases("text", ["null", "\ud800"])
def test_a_number_that_is_not_finite_is_refused_naming_the_field(value, text):
    with pytest.raises(MetricError, match="field rewards = "):
        encode_row({"text": text, "none": None, "rewards": {"parts": [1.0, value]}})


# --- progress -----------------------------------------------------------------------------------------------


@pytest.fixture
def time(monkeypatch):
    """The clock of progress, which says `now`."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(progress_module, "time", clock)
    return clock


def test_a_log_gets_the_first_and_last_step_and_one_line_in_between_per_interval(time, monkeypatch):
    monkeypatch.setattr(progress_module, "LINE_S", 10.0)
    text = io.StringIO()
    metrics = json.loads(
        '{"loss/total": 1.5, "optim/grad_norm": 0.1234, "perf/trained_tokens_per_s": 1234.5, "time/step": 4}'
    )
    with open_progress(Console(file=text, width=20), {"sft": 6}) as progress:
        for step in range(1, 7):
            time.now = 4.0 * (step - 1)  # lines at 0 s, 12 s and, as the last step, 20 s
            progress("sft", step, metrics)
    said = "sft {}/6  loss 1.5  grad 0.123  tok/s 1234  s/step 4.00  eta {}s\n".format
    assert text.getvalue() == said(1, 20) + said(4, 8) + said(6, 0)


def test_a_terminal_shows_the_newest_state_of_every_stage(time):
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=100, color_system=None, legacy_windows=False)
    with open_progress(console, {"sft": 2, "rl": 40}) as progress:
        progress("sft", 2, {"loss/total": 0.5})
        progress("rl", 1, {"reward/mean": 0.25, "time/step": 2.0})
        time.now = 30.0
        progress("rl", 11, {"reward/mean": 0.75, "time/step": 3.0})
    shown = text.getvalue()
    last = shown[shown.rindex("stage") :].splitlines()
    # 29 steps at 3 s are left
    assert [" ".join(line.split()) for line in last[1:3]] == ["sft 2/2 0.5", "rl 11/40 0.750 3.00 1m27s"]


def test_a_terminal_that_is_gone_ends_no_run():
    text = io.StringIO()
    with open_progress(Console(file=text, force_terminal=True), {"sft": 2}) as progress:
        text.close()
        progress("sft", 2, {"loss/total": 0.5})
    with pytest.raises(ValueError, match="closed file"):  # what writing to it says
        text.write("x")


HEAD = make_head("eval-preference", 1_000_000, 1_000_000, 999, 1_700_000_000.123)
ROW_BYTES = 700  # what docs/run_directory.md promises

finite = st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | finite | st.text(max_size=300),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=20), inner, max_size=5),
    max_leaves=20,
)
failures = st.fixed_dictionaries(
    dict.fromkeys(("class", "function", "message", "traceback"), st.text(max_size=3000))
)
samples = st.builds(
    Sample,
    id=st.text(st.characters(codec="ascii", categories=["L", "N", "P"]), min_size=1, max_size=40),
    prompt=st.text(max_size=2000),
    response=st.text(max_size=2000),
    tokens=st.just(np.arange(100_000)),
    loss_mask=st.just(np.ones(100_000)),
    weight_versions=st.just(np.full(100_000, 1_000_000)),
    reward=st.none() | finite,
    rewards=st.dictionaries(st.text(max_size=60), finite, max_size=40),
    group_index=st.just(99_999_999),
    status=st.just(Status.TRUNCATED),
    metadata=st.dictionaries(st.text(max_size=60), values, max_size=30),
)


@settings(max_examples=150, deadline=None)
@given(sample=samples, failure=st.none() | failures | values)
def test_a_row_is_at_most_700_bytes_beside_its_texts(sample, failure):
    metadata = sample.metadata if failure is None else sample.metadata | {"failure": failure}
    row = json.loads(encode_sample_rows(HEAD, [dataclasses.replace(sample, metadata=metadata)]))
    kept = row.get("metadata", {})
    texts = {"prompt": "", "response": ""}
    if "failure" in kept:
        texts["metadata"] = kept | {"failure": {}}
    assert len(encode_row(row | texts)) <= ROW_BYTES
    assert row["id"] == sample.id
    assert len(row.get("rewards", {})) + row.get("rewards_cut", 0) == len(sample.rewards)  # kept or counted
    assert len(kept) + row.get("metadata_cut", 0) == len(metadata)  # each key is kept or counted
    assert ("failure" in kept) == ("failure" in metadata)
    kept.pop("failure", None)
    assert [key for key in metadata if key in kept] == [*kept]


def test_a_failure_keeps_its_four_texts_each_cut():
    texts = {"class": "reward", "function": "f", "message": "m"}
    cut = 2000 * "y" + "… (3000 characters)"
    assert shorten_failure({**texts, "traceback": 3000 * "y", "more": "z"}) == {**texts, "traceback": cut}
    assert shorten_failure(3000 * "y") == cut


def test_the_documentation_is_the_table():
    page = (ROOT / "docs/run_directory.md").read_text(encoding="utf-8")
    lines = [f"| `{one.name}` | {one.unit or '–'} | {one.stages} | {one.meaning} |\n" for one in METRICS]
    table = "".join(["| metric | unit | stage | meaning |\n|---|---|---|---|\n", *lines])
    assert table in page, f"docs/run_directory.md, section Metrics, is not the table:\n{table}"


@cases("""
name      | line
time/step | time/step
time/generate | time/{phase}
eval/heldout/avg@16 | eval/{name}/avg@{k}
eval/pairs/kto/desirable/frac | eval/{name}/kto/desirable/frac
eval/pairs/accuracy | eval/{name}/accuracy
eval/pairs/rewards/margins | eval/{name}/{area}/{stat}
engine/vllm_0/state | engine/{name}/state
reward/part/exact/mean | reward/part/{name}/mean
""")
def test_a_name_is_found_in_the_table(name, line):
    assert find_metric(name).name == line


def test_statistics_that_the_loop_logs_under_an_area_are_in_the_table():
    buffer = DataBuffer(make_mixture(first=(4, 0.5), second_place=(4, 0.5)), seed=0)
    logged = {f"data/{name}" for name in buffer.statistics()}
    assert {"data/epoch", "data/source/first/share", "data/source/second_place/drawn"} <= logged
    assert [name for name in logged if find_metric(name) is None] == []


async def test_what_servers_and_their_updates_say_is_in_the_table(autojump_clock):
    engines = FakeEngine("vllm-0", script=fail(UNREACHABLE)), FakeEngine("vllm-1")
    async with fleet_of(*engines) as fleet:
        await gather(fleet, *"abcd")
        said = {make_metric_name(name) for name in fleet.statistics()}
    said |= (await World().step(3.0)).keys()
    assert {
        "fleet/failures/engine_unreachable",
        "engine/vllm_0/state",
        "weight_sync/probe_difference/max",
    } <= said
    assert [name for name in said if find_metric(name) is None] == []
