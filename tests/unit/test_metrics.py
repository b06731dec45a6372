from __future__ import annotations

import io
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from rollouts.errors import MetricError
from rollouts.metrics.progress import open_progress
from rollouts.metrics.record import check_metric, encode_row
from tests.support.text_tables import read_cells

# --- rows ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        *read_cells(
            "reward | Reward/mean | reward/ | /reward | a b/c | a/b-c | 0a/b | a/b/c/d/e/f | a/@4 | a/b@"
        )[0],
        "a/b\n",
        "",
    ],
)
def test_a_name_out_of_form_is_refused_by_name(name: str):
    with pytest.raises(MetricError, match="lower_snake"):
        check_metric(name, 1.0)


@pytest.mark.parametrize("value", [math.nan, -math.inf, np.float32("nan"), "1.0", None, [1.0]])
def test_a_value_that_is_not_a_finite_number_is_refused_naming_the_metric(value: object):
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


@pytest.mark.parametrize("value", [math.nan, math.inf, np.float32("nan"), np.float64("inf")])
@pytest.mark.parametrize("text", ["null", "\ud800"])
def test_a_number_that_is_not_finite_is_refused_naming_the_field(value: float, text: str):
    with pytest.raises(MetricError, match="field rewards = "):
        encode_row({"text": text, "none": None, "rewards": {"parts": [1.0, value]}})


# --- progress -----------------------------------------------------------------------------------------------


def test_a_log_gets_the_first_and_last_step_and_one_line_in_between_per_interval():
    text, time = io.StringIO(), SimpleNamespace(now=0.0)
    metrics = json.loads(
        '{"loss/total": 1.5, "optim/grad_norm": 0.1234, "perf/trained_tokens_per_s": 1234.5, "time/step": 4}'
    )
    with open_progress(
        Console(file=text, width=20), {"sft": 6}, every_s=10.0, clock=lambda: time.now
    ) as progress:
        for step in range(1, 7):
            time.now = 4.0 * (step - 1)  # lines at 0 s, 12 s and, as the last step, 20 s
            progress.update("sft", step, metrics)
    assert text.getvalue().splitlines() == [
        f"sft {step}/6  loss 1.5  grad 0.123  tok/s 1234  s/step 4.00  eta {eta}s"
        for step, eta in ((1, 20), (4, 8), (6, 0))
    ]


def test_a_terminal_shows_the_newest_state_of_every_stage():
    text, time = io.StringIO(), SimpleNamespace(now=0.0)
    console = Console(file=text, force_terminal=True, width=100, color_system=None, legacy_windows=False)
    with open_progress(console, {"sft": 2, "rl": 40}, clock=lambda: time.now) as progress:
        progress.update("sft", 2, {"loss/total": 0.5})
        progress.update("rl", 1, {"reward/mean": 0.25, "time/step": 2.0})
        time.now = 30.0
        progress.update("rl", 11, {"reward/mean": 0.75, "time/step": 3.0})
    shown = text.getvalue()
    last = shown[shown.rindex("stage") :].splitlines()
    # 29 steps at 3 s are left
    assert [" ".join(line.split()) for line in last[1:3]] == ["sft 2/2 0.5", "rl 11/40 0.750 3.00 1m27s"]
