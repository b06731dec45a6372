"""Losses and held-out measures of reward models: one score per response, of which one of a pair is preferred.
Axes: P pairs.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rollouts.losses.inputs import LossOutput, check_numbers, sum_rows
from rollouts.losses.preference_losses import check_one_per_pair


def bradley_terry_loss(
    chosen_scores: Tensor, rejected_scores: Tensor, *, margins: Tensor | None = None, centring: float = 0.0
) -> LossOutput:
    """−log σ(s_c − s_r − m) + centring·(s_c + s_r)² per pair [P], summed; the count is the number of pairs.
    Scores have no unit.

    margins [P], without gradient: how much better the chosen response is said to be; None is 0. Centring
    holds the scores, which the first term fixes only up to a constant, near 0; 0.01 is usual. No pair gives
    (0 with a zero gradient, 0). A NaN or an infinite score is not hidden. Papers: 2203.02155; Llama 2,
    2307.09288 (margin); 2312.09244 (centring). Raises ConfigError for a negative centring, ValueError on
    shapes that differ.

    Metrics: rewards/chosen, rewards/rejected, rewards/margins (s_c − s_r), rewards/accuracies (share of s_c >
    s_r; a tie is none), rewards/max, rewards/min over both.
    """
    check_numbers("bradley_terry", centring=centring)
    margins = torch.zeros_like(chosen_scores) if margins is None else margins.detach()
    check_one_per_pair(
        "bradley_terry", chosen_scores=chosen_scores, rejected_scores=rejected_scores, margins=margins
    )
    differences = chosen_scores - rejected_scores
    losses = -logsigmoid(differences - margins)
    if centring:
        losses = losses + centring * (chosen_scores + rejected_scores).square()
    values = {
        "rewards/chosen": chosen_scores,
        "rewards/rejected": rejected_scores,
        "rewards/margins": differences,
        "rewards/accuracies": differences > 0,
        "rewards/max": torch.maximum(chosen_scores, rejected_scores),
        "rewards/min": torch.minimum(chosen_scores, rejected_scores),
    }
    return sum_rows(losses, values)


NUM_BINS = 10  # of calibration, from 0.5 to 1


class PairCalibration(NamedTuple):
    """How well σ(s_c − s_r) predicts which response of a held-out pair is preferred."""

    num_pairs: int
    accuracy: float  # share of pairs with s_c > s_r, a tie counted as one half
    confidence: float  # mean of max(p, 1 − p); above the accuracy: the model is too sure
    expected_calibration_error: float  # Σ over bins of (pairs in it / P) · |accuracy − confidence|
    brier: float  # mean of (1 − p)²
    nll: float  # mean of −log p, nats: the Bradley-Terry loss


def compute_pair_calibration(chosen_scores: Tensor, rejected_scores: Tensor) -> PairCalibration:
    """Accuracy and calibration on held-out pairs, from scores [P], in float64.

    p = σ(s_c − s_r) is the probability given to the label. The model bets on the response with the higher
    score, with the confidence max(p, 1 − p); it is calibrated if bets of confidence c are right in a share c
    of the cases. A bin holds confidences in [low, high), the last one 1 as well. Paper: 1706.04599 (expected
    calibration error), with NUM_BINS of them. Raises ValueError if there is no pair, shapes differ, or a
    score is not finite.
    """
    check_one_per_pair("calibration", chosen_scores=chosen_scores, rejected_scores=rejected_scores)
    if len(chosen_scores) == 0:
        raise ValueError("0 pairs; there must be at least one")
    differences = (chosen_scores.double() - rejected_scores.double()).detach()
    if bad := (~torch.isfinite(differences)).nonzero().flatten().tolist():
        raise ValueError(
            f"the scores of pair {bad[0]} differ by {float(differences[bad[0]])}; scores must be finite"
        )
    probability = torch.sigmoid(differences)
    confidence = torch.sigmoid(differences.abs())
    right = torch.where(differences == 0, 0.5, (differences > 0).double())
    bins = ((confidence - 0.5) * 2 * NUM_BINS).long().clamp(max=NUM_BINS - 1)
    gaps = torch.bincount(bins, right - confidence)  # of bins of equal widths from 0.5 to 1
    return PairCalibration(
        num_pairs=len(differences),
        accuracy=float(right.mean()),
        confidence=float(confidence.mean()),
        expected_calibration_error=float(gaps.abs().sum() / len(differences)),
        brier=float((1 - probability).square().mean()),
        nll=float(-logsigmoid(differences).mean()),
    )
