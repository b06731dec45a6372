"""Bradley-Terry losses and calibration against numbers worked by hand. Fixture: scores 1.2 and .4."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollouts.errors import ConfigError
from rollouts.losses.reward_model_losses import bradley_terry_loss, compute_pair_calibration
from rollouts.types import merge_metrics, metric_values


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize(
    ("margin", "centring", "expected"),
    [(None, 0.0, 0.371100666), (0.5, 0.0, 0.554355244), (None, 0.01, 0.371100666 + 0.0256)],
)
def test_losses_match_the_numbers_worked_by_hand(margin: float | None, centring: float, expected: float):
    margins = None if margin is None else tensor(margin)
    output = bradley_terry_loss(tensor(1.2), tensor(0.4), margins=margins, centring=centring)
    assert (float(output.sum), output.count) == (pytest.approx(expected, abs=1e-9), 1.0)


def test_gradients_are_those_of_the_formula():
    chosen, rejected, margins = (
        tensor(1.2).requires_grad_(),
        tensor(0.4).requires_grad_(),
        tensor(0.5).requires_grad_(),
    )
    bradley_terry_loss(chosen, rejected, margins=margins, centring=0.01).sum.backward()
    assert chosen.grad is not None and rejected.grad is not None
    assert chosen.grad.tolist() == pytest.approx([-sigmoid(-0.3) + 0.02 * 1.6])
    assert rejected.grad.tolist() == pytest.approx([sigmoid(-0.3) + 0.02 * 1.6])
    assert margins.grad is None


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), cut=st.integers(0, 6), shift=st.floats(-20, 20))
def test_splits_add_up_and_without_centring_only_differences_count(seed: int, cut: int, shift: float):
    generator = torch.Generator().manual_seed(seed)
    chosen, rejected = (torch.randn(6, generator=generator, dtype=torch.float64) for _ in range(2))
    whole = bradley_terry_loss(chosen, rejected, centring=0.01)
    parts = [
        bradley_terry_loss(chosen[rows], rejected[rows], centring=0.01)
        for rows in (slice(0, cut), slice(cut, 6))
    ]
    assert sum(float(part.sum) for part in parts) == pytest.approx(float(whole.sum), rel=1e-10)
    merged = metric_values(merge_metrics([part.metrics for part in parts]))
    assert merged == pytest.approx(metric_values(whole.metrics))
    plain = float(bradley_terry_loss(chosen, rejected).sum)
    assert float(bradley_terry_loss(chosen + shift, rejected + shift).sum) == pytest.approx(plain, rel=1e-9)


def test_metrics_say_how_often_and_how_far_the_right_one_wins():
    output = bradley_terry_loss(tensor(1.2, -1.0, 0.5), tensor(0.4, 1.0, 0.5))
    assert metric_values(output.metrics) == pytest.approx(
        {
            "rewards/chosen": 0.7 / 3,
            "rewards/rejected": 1.9 / 3,
            "rewards/margins": -0.4,
            "rewards/accuracies": 1 / 3,
            "rewards/max": 1.2,
            "rewards/min": -1.0,
        }
    )


def test_no_pair_gives_zero_and_nothing_that_is_not_finite_is_hidden():
    empty = bradley_terry_loss(tensor(), tensor())
    assert (float(empty.sum), empty.count, empty.metrics) == (0.0, 0.0, {})
    assert math.isnan(float(bradley_terry_loss(tensor(float("nan")), tensor(0.0)).sum))


def test_scores_far_apart_neither_overflow_nor_lose_their_gradient():
    chosen = torch.tensor([-3000.0], requires_grad=True)
    loss = bradley_terry_loss(chosen, torch.tensor([3000.0])).sum
    loss.backward()
    assert chosen.grad is not None
    assert (loss.detach().item(), chosen.grad.item()) == (6000.0, -1.0)


def test_bad_parameters_and_shapes_are_named():
    with pytest.raises(ConfigError, match="centring=-1"):
        bradley_terry_loss(tensor(1.0), tensor(1.0), centring=-1)
    with pytest.raises(ValueError, match=r"chosen_scores \(2,\), rejected_scores \(1,\)"):
        bradley_terry_loss(tensor(1.0, 2.0), tensor(1.0))
    with pytest.raises(ValueError, match=r"margins \(2,\)"):
        bradley_terry_loss(tensor(1.0), tensor(1.0), margins=tensor(1.0, 2.0))


def logit(p: float) -> float:
    return math.log(p / (1 - p))


def test_calibration_matches_bins_filled_by_hand():
    # p of the label: .95 .95 .95 .05 (bets of confidence .95, three right of four) and .65 .35 (bets of .65,
    # one right of two)
    scores = tensor(*map(logit, (0.95, 0.95, 0.95, 0.05, 0.65, 0.35)))
    found = compute_pair_calibration(scores, torch.zeros_like(scores), num_bins=5)  # bins of width .1 from .5
    assert (found.num_pairs, found.bin_counts) == (6, (0, 2, 0, 0, 4))
    assert found.accuracy == pytest.approx(4 / 6)
    assert found.confidence == pytest.approx((4 * 0.95 + 2 * 0.65) / 6)
    assert found.expected_calibration_error == pytest.approx((4 * 0.2 + 2 * 0.15) / 6)
    assert found.brier == pytest.approx((3 * 0.0025 + 0.9025 + 0.1225 + 0.4225) / 6)
    assert found.nll == pytest.approx(
        -(3 * math.log(0.95) + math.log(0.05) + math.log(0.65) + math.log(0.35)) / 6
    )


def test_a_tie_is_a_calibrated_guess():
    found = compute_pair_calibration(tensor(2.0, 2.0), tensor(2.0, 2.0))
    assert (found.accuracy, found.confidence, found.expected_calibration_error) == (0.5, 0.5, 0.0)


def test_a_certain_model_that_is_always_wrong_has_the_largest_error():
    found = compute_pair_calibration(tensor(-100.0, -100.0), tensor(100.0, 100.0))
    assert (found.accuracy, found.expected_calibration_error, found.bin_counts[-1]) == (0.0, 1.0, 2)


def test_calibration_of_labels_drawn_from_the_model_itself_is_near_perfect():
    generator = torch.Generator().manual_seed(0)
    differences = 2 * torch.randn(20000, generator=generator, dtype=torch.float64)
    preferred = torch.rand(20000, generator=generator, dtype=torch.float64) < torch.sigmoid(differences)
    labelled = torch.where(preferred, differences, -differences)
    honest = compute_pair_calibration(labelled, torch.zeros_like(labelled))
    too_sure = compute_pair_calibration(3 * labelled, torch.zeros_like(labelled))
    assert honest.expected_calibration_error < 0.015
    assert too_sure.expected_calibration_error > 0.1
    assert too_sure.confidence > too_sure.accuracy


def test_calibration_refuses_what_it_cannot_count():
    with pytest.raises(ValueError, match="0 pairs, num_bins=10"):
        compute_pair_calibration(tensor(), tensor())
    with pytest.raises(ValueError, match="pair 1 differ by inf"):
        compute_pair_calibration(tensor(0.0, math.inf), tensor(0.0, 0.0))
