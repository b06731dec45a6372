from __future__ import annotations

import io
import json
import math

import numpy as np
import pytest
from rich.console import Console

from rollouts.errors import MetricError
from rollouts.metrics.progress import open_progress
from rollouts.metrics.record import (
    check_metric,
    encode_row,
)

# --- rows ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "reward",
        "Reward/mean",
        "reward/",
        "/reward",
        "reward mean/x",
        "a/b-c",
        "0a/b",
        "a/b/c/d/e/f",
        "a/@4",
        "a/b@",
        "a/b\n",
        "",
    ],
)
def test_a_name_out_of_form_is_refused_by_name(name: str):
    with pytest.raises(MetricError, match="lower_snake"):
        check_metric(name, 1.0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan"), "1.0", None, [1.0]])
def test_a_value_that_is_not_a_finite_number_is_refused_naming_the_metric(value: object):
    with pytest.raises(MetricError, match=r"metric loss/total = .*finite"):
        check_metric("loss/total", value)


def test_a_row_is_encoded_as_the_standard_library_reads_it():
    row = {
        "stage": "rl",
        "step": 3,
        "loss/total": 1.0,
        "tiny": 1e-7,
        "text": "Grüße \u2028 \n",
        "messages": [{"content": "a"}],
        "none": None,
    }
    assert json.loads(encode_row(row)) == row
    assert json.loads(
        encode_row({"a": np.float32(0.5), "b": np.int64(2), "c": np.float64(0.25), "d": 2**70})
    ) == {
        "a": 0.5,
        "b": 2,
        "c": 0.25,
        "d": 2**70,
    }
    assert b"\n" not in encode_row(row)


@pytest.mark.parametrize("value", [math.nan, math.inf, np.float32("nan"), np.float64("inf")])
def test_a_number_that_is_not_finite_is_refused_naming_the_field(value: float):
    with pytest.raises(MetricError, match="field rewards = "):
        encode_row({"text": "null", "none": None, "rewards": {"parts": [1.0, value]}})


def test_half_a_surrogate_pair_does_not_end_a_run():
    """A dataset's JSON can hold one, and UTF-8 cannot."""
    assert json.loads(encode_row({"prompt": "a\ud800b", "reward": np.float32(0.5)})) == {
        "prompt": "a?b",
        "reward": 0.5,
    }
    with pytest.raises(MetricError, match="field reward = nan"):
        encode_row({"prompt": "\ud800", "reward": math.nan})


# --- progress -----------------------------------------------------------------------------------------------


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_log_gets_the_first_and_last_step_and_one_line_in_between_per_interval():
    text, clock = io.StringIO(), Clock()
    with open_progress(Console(file=text, width=20), {"sft": 6}, every_s=10.0, clock=clock) as progress:
        for step in range(1, 7):
            clock.now = 4.0 * (step - 1)  # lines at 0 s, 12 s and, as the last step, 20 s
            progress.update(
                "sft",
                step,
                {
                    "loss/total": 1.5,
                    "optim/grad_norm": 0.123456,
                    "perf/trained_tokens_per_s": 1234.5,
                    "time/step": 4.0,
                },
            )
    assert text.getvalue().splitlines() == [
        "sft 1/6  loss 1.5  grad 0.123  tok/s 1234  s/step 4.00  eta 20s",
        "sft 4/6  loss 1.5  grad 0.123  tok/s 1234  s/step 4.00  eta 8s",
        "sft 6/6  loss 1.5  grad 0.123  tok/s 1234  s/step 4.00  eta 0s",
    ]


def test_a_terminal_shows_the_newest_state_of_every_stage():
    text, clock = io.StringIO(), Clock()
    console = Console(file=text, force_terminal=True, width=100, color_system=None, legacy_windows=False)
    with open_progress(console, {"sft": 2, "rl": 40}, clock=clock) as progress:
        progress.update("sft", 2, {"loss/total": 0.5})
        progress.update("rl", 1, {"reward/mean": 0.25, "time/step": 2.0})
        clock.now = 30.0
        progress.update("rl", 11, {"reward/mean": 0.75, "time/step": 3.0})
    shown = text.getvalue()
    last = shown[shown.rindex("stage") :].splitlines()
    assert last[1].split() == ["sft", "2/2", "0.5"]
    assert last[2].split() == ["rl", "11/40", "0.750", "3.00", "1m27s"]  # 29 steps at 3 s
