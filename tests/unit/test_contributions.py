"""Rows of contributions.jsonl and lines of updates.log, made from an update of two rows."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import pytest

from rollouts.metrics.contributions import Place, UpdateRecord, encode_contributions, format_update
from rollouts.metrics.record import make_head
from rollouts.types import ForwardBackwardResult, OptimStepResult, Total
from tests.support.made_updates import make_update


def read_back(update: UpdateRecord, places: Sequence[Place] = ()) -> list[dict[str, Any]]:
    """The rows that are written, without a head."""
    return [
        json.loads(line)
        for line in encode_contributions({}, update, update.batch.response_lengths, places).splitlines()
    ]


def write_line(update: UpdateRecord) -> str:
    return format_update(make_head("rl", 12, 11, 2, 0.0), update, update.batch.response_lengths)


def test_a_row_says_which_sample_with_which_advantage_weight_and_share():
    places = [Place("rl-1-000000.bin", 0, 3), Place("rl-1-000000.bin", 160, 2)]
    # advantage (0.5 + 1.5) / 2, weight (1 + 0.5) / 2, share (0.125 + 0.25) / (0.125 + 0.25 + 0.375)
    assert read_back(make_update(), places) == json.loads("""[
    {"update": 1, "id": "a", "group_index": 4, "row": 0, "advantage": 1.0, "weight": 0.75, "share": 0.5,
     "tokens": 2, "reward": 1.0, "loss": -0.0625, "denominator": 3.0,
     "shard": "rl-1-000000.bin", "offset": 0, "length": 3},
    {"update": 1, "id": "b", "group_index": 4, "row": 1, "advantage": -2.0, "weight": 2.0, "share": 0.5,
     "tokens": 1, "reward": -0.5, "loss": -0.0625, "denominator": 3.0,
     "shard": "rl-1-000000.bin", "offset": 160, "length": 2} ]""")


def test_without_arrays_a_row_names_no_shard_and_without_traces_it_has_neither_weight_nor_share():
    forward = dataclasses.replace(make_update().forward, per_token=None)
    rows = read_back(make_update(forward=forward))
    assert [set(row) & {"shard", "offset", "length", "weight", "share"} for row in rows] == [set(), set()]
    assert [row["advantage"] for row in rows] == [1.0, -2.0]


LOST = ForwardBackwardResult(loss=None, denominator=3.0, metrics={}, skipped="the loss is nan")
UNFIT = OptimStepResult(step=7, lr=3e-4, grad_norm=None, clipped=False, skipped="the gradient norm is inf")


@pytest.mark.parametrize(
    ("changes", "loss", "skipped"),
    [({"forward": LOST}, None, "the loss is nan"), ({"optim": UNFIT}, -0.0625, "the gradient norm is inf")],
)
def test_a_skipped_update_has_a_row_for_every_sample_says_why_and_gives_nobody_a_share(
    changes: dict[str, Any], loss: float | None, skipped: str
):
    update = make_update(**changes)
    rows = read_back(update)
    assert [(row["share"], row.get("loss"), row["denominator"]) for row in rows] == 2 * [(0.0, loss, 3.0)]
    assert not any("weight" in row for row in rows)
    assert all(row["skipped"] == skipped for row in rows)
    words = write_line(update).split()
    norm = words[words.index("grad_norm") + 1 :][:2]
    assert (norm == ["-", "-"]) == (update.optim.grad_norm is None)


COLUMNS = "step update version loss kl beta grad_norm lr samples zero_advantage tokens"


def test_lines_are_aligned_and_what_an_update_has_not_is_a_dash():
    update = make_update()
    forward = ForwardBackwardResult(loss=1.0, denominator=1.0, metrics={"advantage/skipped_rows": Total(1.0)})
    optim = OptimStepResult(step=1, lr=1e-5, grad_norm=0.1, clipped=False)
    bare = make_update(update=0, forward=forward, kl_coef=None, optim=optim)
    critic = dataclasses.replace(update, part="critic", contributes=False)
    lines = [write_line(one) for one in (update, bare, critic)]
    for word in COLUMNS.split():
        assert len({line.index(f"{word} ") for line in lines}) == 1, word
    for part in ("kl          -", "beta         -", "zero_advantage     1", "whole"):
        assert part in lines[1]
    assert lines[2].split()[3] == "rl.critic"
