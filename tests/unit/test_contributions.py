"""Rows of contributions.jsonl and lines of updates.log, made from an update of two rows."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

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


HEAD = make_head("rl", 12, 11, 2, 0.0)


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
