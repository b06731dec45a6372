"""KTO against numbers worked by hand: β = .1, z₀ = .05, Δ = 1 for a good response and −.5 for a bad one."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollouts.data.preference import mismatch_completions
from rollouts.errors import ConfigError
from rollouts.losses.kto_loss import compute_kto_reference_point, compute_kto_weights, kto_loss
from rollouts.losses.preference_pairs import linearise_row_loss
from rollouts.types import merge_metrics, metric_values

GOOD, BAD = 0.476267846, 0.486253465  # 1 − σ(.1·(1 − .05)), 1 − σ(.1·(.05 + .5))


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def run(log_probs: Tensor, ref: Tensor, good: list[bool], **params):
    return kto_loss(log_probs, ref, torch.tensor(good), **{"reference_point": 0.05, "beta": 0.1} | params)


def test_good_and_bad_responses_match_the_numbers_worked_by_hand():
    both = run(tensor(-10.0, -12.0), tensor(-11.0, -11.5), [True, False])
    assert (float(both.sum), both.count) == (pytest.approx(GOOD + BAD, abs=1e-9), 2.0)
    weighted = run(
        tensor(-10.0, -12.0),
        tensor(-11.0, -11.5),
        [True, False],
        desirable_weight=2.0,
        undesirable_weight=0.5,
    )
    assert float(weighted.sum) == pytest.approx(2 * GOOD + 0.5 * BAD, abs=1e-9)
    third = run(tensor(-10.0), tensor(-11.0), [True], desirable_weight=4 / 3)
    assert float(third.sum) == pytest.approx(4 / 3 / (1 + math.exp(0.1 * 0.95)), rel=1e-14), (
        "weights have the precision of the log-probs"
    )


def test_gradients_are_those_of_the_formula_and_the_reference_point_has_none():
    log_probs, point = tensor(-10.0, -12.0).requires_grad_(), tensor(0.05)[0].requires_grad_()
    run(
        log_probs, tensor(-11.0, -11.5), [True, False], reference_point=point, undesirable_weight=3.0
    ).sum.backward()
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == pytest.approx(
        [-0.1 * GOOD * (1 - GOOD), 3 * 0.1 * BAD * (1 - BAD)], abs=1e-9
    )
    assert point.grad is None


def test_advantages_from_the_slope_are_minus_the_gradient():
    line = linearise_row_loss(
        lambda sums: run(sums, tensor(-11.0, -11.5), [True, False]), tensor(-10.0, -12.0)
    )
    assert float(line.output.sum) == pytest.approx(GOOD + BAD, abs=1e-9)
    assert line.advantages[0].tolist() == pytest.approx(
        [0.1 * GOOD * (1 - GOOD), -0.1 * BAD * (1 - BAD)], abs=1e-9
    )


def test_a_batch_of_one_kind_trains_on_that_kind_alone():
    only_good = run(tensor(-10.0), tensor(-11.0), [True])
    assert float(only_good.sum) == pytest.approx(GOOD, abs=1e-9)
    assert set(only_good.metrics) == {"rewards/chosen", "logps/chosen", "kto/reference_point"}
    only_bad = run(tensor(-12.0), tensor(-11.5), [False])
    assert float(only_bad.sum) == pytest.approx(BAD, abs=1e-9)
    assert set(only_bad.metrics) == {"rewards/rejected", "logps/rejected", "kto/reference_point"}


def test_no_row_gives_zero_with_a_zero_gradient():
    log_probs = torch.zeros(0, requires_grad=True)
    output = run(log_probs, torch.zeros(0), [])
    output.sum.backward()
    assert (float(output.sum.detach()), output.count, output.metrics) == (0.0, 0.0, {})


def test_metrics_are_means_over_each_kind():
    output = run(tensor(-10.0, -12.0, -8.0), tensor(-11.0, -11.5, -8.0), [True, False, True])
    assert metric_values(output.metrics) == pytest.approx(
        {
            "rewards/chosen": 0.05,
            "rewards/rejected": -0.05,
            "logps/chosen": -9.0,
            "logps/rejected": -12.0,
            "kto/reference_point": 0.05,
        }
    )


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), cut=st.integers(0, 7))
def test_any_split_of_a_batch_gives_the_same_sum_and_gradient(seed: int, cut: int):
    generator = torch.Generator().manual_seed(seed)
    log_probs, ref = (-20 * torch.rand(7, generator=generator, dtype=torch.float64) for _ in range(2))
    good = torch.rand(7, generator=generator) < 0.5
    point = compute_kto_reference_point(log_probs, ref)

    def part(rows: slice) -> tuple[float, list[float], dict]:
        mine = log_probs[rows].clone().requires_grad_()
        output = kto_loss(mine, ref[rows], good[rows], reference_point=point)
        output.sum.backward()
        assert mine.grad is not None
        return float(output.sum.detach()), mine.grad.tolist(), output.metrics

    whole, first, second = part(slice(0, 7)), part(slice(0, cut)), part(slice(cut, 7))
    assert first[0] + second[0] == pytest.approx(whole[0], rel=1e-10)
    assert first[1] + second[1] == pytest.approx(whole[1], rel=1e-10)
    assert metric_values(merge_metrics([first[2], second[2]])) == pytest.approx(metric_values(whole[2]))


def test_the_reference_point_is_the_mean_log_ratio_and_never_negative():
    log_probs = tensor(-10.0, -12.0).requires_grad_()
    point = compute_kto_reference_point(log_probs, tensor(-11.0, -12.5))
    assert (float(point), point.requires_grad) == (0.75, False)
    assert float(compute_kto_reference_point(tensor(-10.0), tensor(-5.0))) == 0.0
    with pytest.raises(ValueError, match="no row to estimate the reference point from"):
        compute_kto_reference_point(tensor(), tensor())


def test_every_prompt_gets_the_next_completion_of_another_prompt():
    assert mismatch_completions(["a", "b", "c"]) == [1, 2, 0]
    assert mismatch_completions(["a", "a", "b", "b", "a"]) == [2, 2, 4, 4, 2]
    with pytest.raises(ValueError, match="3 rows have 1 different prompt"):
        mismatch_completions(["a", "a", "a"])


@given(st.lists(st.integers(0, 3), min_size=2, max_size=12).filter(lambda ids: len(set(ids)) > 1))
def test_mismatched_completions_are_the_nearest_that_follow(ids: list[int]):
    count = len(ids)
    slow = [
        next((row + ahead) % count for ahead in range(1, count) if ids[(row + ahead) % count] != ids[row])
        for row in range(count)
    ]
    assert mismatch_completions(ids) == slow


@pytest.mark.parametrize(
    ("good", "bad", "expected"),
    [
        (10, 10, (1.0, 1.0)),
        (4, 3, (1.0, 1.0)),
        (10, 40, (4.0, 1.0)),
        (40, 10, (1.0, 3.0)),
        (1, 1, (1.0, 1.0)),
    ],
)
def test_weights_bring_the_two_kinds_into_balance(good: int, bad: int, expected: tuple[float, float]):
    weights = compute_kto_weights(good, bad)
    assert weights == pytest.approx(expected)
    assert 1 - 1e-12 <= weights[0] * good / (weights[1] * bad) <= 4 / 3 + 1e-12


def test_weights_of_a_missing_kind_are_refused():
    with pytest.raises(ValueError, match="0 desirable and 5 undesirable rows"):
        compute_kto_weights(0, 5)


@pytest.mark.parametrize("good", [True, False])
def test_a_response_without_probability_is_not_hidden(good: bool):
    for values, ref in ((-math.inf, -11.0), (-10.0, -math.inf)):
        log_probs = tensor(values, -12.0).requires_grad_()
        found = run(log_probs, tensor(ref, -11.5), [good, good])
        assert found.sum.isnan()
        found.sum.backward()
        assert log_probs.grad is not None
        assert log_probs.grad.isfinite().tolist() == [False, True]
    assert run(tensor(-10.0), tensor(-11.0), [good], reference_point=math.inf).sum.isnan()


def test_what_is_not_finite_is_not_hidden():
    assert math.isnan(float(run(tensor(float("nan")), tensor(-1.0), [True]).sum))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"beta": 0.0}, "kto: beta=0.0 must be above 0"),
        ({"desirable_weight": -1.0}, "desirable_weight=-1.0"),
        (
            {"desirable_weight": 0.0, "undesirable_weight": 0.0},
            "neither may be negative and one must be above 0",
        ),
    ],
)
def test_bad_parameters_are_named(params: dict[str, float], message: str):
    with pytest.raises(ConfigError, match=message):
        run(tensor(-1.0), tensor(-1.0), [True], **params)


def test_shapes_that_differ_are_named():
    with pytest.raises(ValueError, match=r"kto: log_probs \(2,\), ref_log_probs \(1,\), desirable \(2,\)"):
        run(tensor(-1.0, -2.0), tensor(-1.0), [True, False])
