"""Rows of contributions.jsonl and lines of updates.log, made from an update of two rows."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from rollouts.metrics.contributions import Place, UpdateRecord, encode_contributions, format_update
from rollouts.metrics.record import make_head
from rollouts.types import (
    ForwardBackwardResult,
    Mean,
    OptimStepResult,
    RolloutBatch,
    Sample,
    TokenArrays,
    Total,
)


def floats(*rows: list[float]) -> tuple[Any, ...]:
    return tuple(np.asarray(row, np.float32) for row in rows)


def make_update(**changes: Any) -> UpdateRecord:
    """Two rows of a group: three tokens of which two train, and two tokens of which one does."""
    masks = (np.array([False, True, True]), np.array([False, True]))
    tokens = (np.array([5, 6, 7]), np.array([5, 8]))
    samples = tuple(
        Sample(id=name, prompt="p", tokens=ids, loss_mask=mask, reward=reward)
        for name, ids, mask, reward in zip(("a", "b"), tokens, masks, (1.0, -0.5), strict=True)
    )
    batch = RolloutBatch(
        tokens=tokens,
        loss_masks=masks,
        rewards=np.array([1.0, -0.5], np.float32),
        advantages=floats([0, 0.5, 1.5], [0, -2.0]),
        group_indices=np.array([4, 4]),
        samples=samples,
    )
    traced = TokenArrays(
        log_probs=floats([0, -1, -2], [0, -3]),
        slopes=floats([0, -0.125, 0.25], [0, 0.375]),
        weights=floats([0, 1.0, 0.5], [0, 2.0]),
    )
    forward = ForwardBackwardResult(
        loss=-0.0625, denominator=3.0, metrics={"kl/ref": Mean(0.3, 3.0)}, per_token=traced
    )
    optim = OptimStepResult(step=7, lr=3e-4, grad_norm=2.5, clipped=True)
    return dataclasses.replace(
        UpdateRecord(update=1, batch=batch, forward=forward, optim=optim, kl_coef=0.05, contributes=True),
        **changes,
    )


def read_back(update: UpdateRecord, places: Sequence[Place] = ()) -> list[dict[str, Any]]:
    """The rows that are written, without a head."""
    return [
        json.loads(line)
        for line in encode_contributions({}, update, update.batch.response_lengths, places).splitlines()
    ]


def write_line(head: Mapping[str, Any], update: UpdateRecord) -> str:
    return format_update(head, update, update.batch.response_lengths)


def test_a_row_says_which_sample_with_which_advantage_weight_and_share():
    first, second = read_back(
        make_update(), [Place("rl-1-000000.bin", 0, 3), Place("rl-1-000000.bin", 160, 2)]
    )
    assert first == {
        "update": 1,
        "id": "a",
        "group_index": 4,
        "row": 0,
        "advantage": 1.0,  # (0.5 + 1.5) / 2
        "weight": 0.75,  # (1 + 0.5) / 2
        "share": 0.5,  # (0.125 + 0.25) / (0.125 + 0.25 + 0.375)
        "tokens": 2,
        "reward": 1.0,
        "loss": -0.0625,
        "denominator": 3.0,
        "shard": "rl-1-000000.bin",
        "offset": 0,
        "length": 3,
    }
    assert (second["advantage"], second["weight"], second["share"], second["tokens"]) == (-2.0, 2.0, 0.5, 1)
    assert (second["offset"], second["length"]) == (160, 2)


def test_without_arrays_a_row_names_no_shard_and_without_traces_it_has_neither_weight_nor_share():
    forward = dataclasses.replace(make_update().forward, per_token=None)
    rows = read_back(make_update(forward=forward))
    assert [set(row) & {"shard", "offset", "length", "weight", "share"} for row in rows] == [set(), set()]
    assert [row["advantage"] for row in rows] == [1.0, -2.0]


def test_a_skipped_update_has_a_row_for_every_sample_and_no_loss():
    forward = ForwardBackwardResult(loss=None, denominator=3.0, metrics={}, skipped="the loss is nan")
    rows = read_back(make_update(forward=forward))
    assert [row["share"] for row in rows] == [0.0, 0.0]
    assert all("loss" not in row and row["denominator"] == 3.0 for row in rows)


def test_an_update_whose_gradient_was_not_finite_says_why_and_gives_nobody_a_share():
    optim = OptimStepResult(
        step=7, lr=3e-4, grad_norm=None, clipped=False, skipped="the gradient norm is inf"
    )
    update = make_update(optim=optim)
    for row in read_back(update):
        assert (row["skipped"], row["share"], row["loss"]) == ("the gradient norm is inf", 0.0, -0.0625)
        assert "weight" not in row
    head = {"time_unix": 0.0, "attempt": 1, "stage": "rl", "step": 3, "policy_version": 2}
    words = write_line(head, update).split()
    assert words[words.index("grad_norm") + 1 :][:2] == ["-", "-"]


@pytest.mark.parametrize("slope", [0.0, float("inf"), float("nan")])
def test_where_no_finite_slope_is_every_share_is_0(slope: float):
    update = make_update()
    assert update.forward.per_token is not None
    traced = dataclasses.replace(update.forward.per_token, slopes=floats([0, slope, 0], [0, 0]))
    rows = read_back(
        dataclasses.replace(update, forward=dataclasses.replace(update.forward, per_token=traced))
    )
    assert [row["share"] for row in rows] == [0.0, 0.0]


def test_shares_of_many_rows_add_up_to_1():
    rng = np.random.default_rng(3)
    lengths = rng.integers(1, 30, 200)
    batch = RolloutBatch(
        tokens=tuple(np.zeros(n, np.int64) for n in lengths),
        loss_masks=tuple(np.ones(n, bool) for n in lengths),
        advantages=tuple(rng.normal(size=n).astype(np.float32) for n in lengths),
    )
    slopes = tuple(rng.normal(size=n).astype(np.float32) * 1e-4 for n in lengths)
    traced = TokenArrays(log_probs=slopes, slopes=slopes, weights=slopes)
    forward = ForwardBackwardResult(loss=0.0, denominator=1.0, metrics={}, per_token=traced)
    rows = read_back(make_update(batch=batch, forward=forward))
    assert sum(row["share"] for row in rows) == pytest.approx(1.0, abs=1e-7)
    assert rows[5]["share"] == pytest.approx(
        np.abs(slopes[5]).sum() / sum(np.abs(row).sum() for row in slopes), rel=1e-5
    )


def test_numbers_are_those_that_were_used_to_the_last_bit():
    rewards = np.array([1.63, -0.1, 123456.7, 1e-7, 0.0, -2.0, 3e-30, 7e20], np.float32)
    means = np.array([1 / 3, -1e-6, 2.5, 0.0, 1e10, -7e-20, 1.0, 0.1], np.float32)
    batch = RolloutBatch(
        tokens=tuple(np.zeros(1, np.int64) for _ in rewards),
        loss_masks=tuple(np.ones(1, bool) for _ in rewards),
        rewards=rewards,
        mean_advantages=means,
    )
    rows = read_back(
        make_update(batch=batch, forward=ForwardBackwardResult(loss=0.0, denominator=1.0, metrics={}))
    )
    assert [row["reward"] for row in rows] == rewards.tolist()
    assert [row["advantage"] for row in rows] == means.tolist()


def test_a_reward_reads_as_in_samples_jsonl():
    batch = RolloutBatch(
        tokens=(np.zeros(1, np.int64),),
        loss_masks=(np.ones(1, bool),),
        rewards=np.array([0.1], np.float32),
        samples=(
            Sample(id="a", prompt="p", tokens=np.zeros(1, np.int64), loss_mask=np.ones(1, bool), reward=0.1),
        ),
    )
    forward = ForwardBackwardResult(loss=0.0, denominator=1.0, metrics={})
    [row] = read_back(make_update(batch=batch, forward=forward))
    assert row["reward"] == 0.1, "not 0.10000000149011612, the float32"
    shaped = dataclasses.replace(batch, rewards=np.array([0.25], np.float32))
    [row] = read_back(make_update(batch=shaped, forward=forward))
    assert row["reward"] == 0.25, "what trained, where that is another"


def test_an_update_that_is_not_a_policys_has_no_rows():
    assert read_back(make_update(contributes=False, part="critic")) == []


HEAD = make_head("rl", 12, 11, 2, 0.0)


def test_the_line_of_an_update_reads_by_column():
    line = write_line(HEAD, make_update())
    words = (
        "1970-01-01T00:00:00Z attempt 2 rl step 12 update 1 version 12 loss -6.250000e-02 kl +1.000e-01 beta"
        " 5.000e-02 grad_norm 2.500e+00 clipped lr 3.000e-04 samples 2 zero_advantage 0 tokens 3"
    )
    assert " ".join(line.split()) == words


def test_lines_are_aligned_and_what_an_update_has_not_is_a_dash():
    update = make_update()
    forward = ForwardBackwardResult(loss=1.0, denominator=1.0, metrics={"advantage/skipped_rows": Total(1.0)})
    bare = dataclasses.replace(
        update,
        update=0,
        forward=forward,
        kl_coef=None,
        optim=OptimStepResult(step=1, lr=1e-5, grad_norm=0.1, clipped=False),
    )
    lines = [
        write_line(HEAD, one)
        for one in (update, bare, dataclasses.replace(update, part="critic", contributes=False))
    ]
    for word in (
        "step",
        "update",
        "version",
        "loss",
        "kl ",
        "beta",
        "grad_norm",
        "lr ",
        "samples",
        "zero_advantage",
        "tokens",
    ):
        assert len({line.index(word) for line in lines}) == 1, word
    assert (
        "kl          -" in lines[1]
        and "beta         -" in lines[1]
        and "zero_advantage     1" in lines[1]
        and "whole" in lines[1]
    )
    assert lines[2].split()[3] == "rl.critic"


def test_a_skipped_update_says_why_on_its_one_line():
    forward = ForwardBackwardResult(loss=None, denominator=3.0, metrics={}, skipped="the loss is\nnan")
    optim = OptimStepResult(step=7, lr=3e-4, grad_norm=None, clipped=False, skipped="the loss is nan")
    line = write_line(HEAD, make_update(forward=forward, optim=optim))
    assert line.endswith("  skipped: the loss is nan") and "\n" not in line and "grad_norm         -" in line
