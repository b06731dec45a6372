"""Preference losses against numbers worked by hand.

Fixture: one pair with π_c = -10, π_r = -12, ref_c = -11, ref_r = -11.5, lengths 5 and 4; Δ_c = 1, Δ_r = -.5,
Δ = 1.5; β = .1.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollouts.errors import ConfigError
from rollouts.losses.inputs import LossInputs
from rollouts.losses.preference_losses import (
    PREFERENCE_LOSSES,
    TRL_LOSS_TYPES,
    compute_log_odds,
    compute_preference_loss,
    linearise_preference_loss,
    resolve_preference_loss,
)
from rollouts.losses.preference_pairs import PairLogProbs, compute_pair_log_probs, compute_row_log_probs
from rollouts.losses.rl_losses import reinforce_loss
from rollouts.types import merge_metrics, metric_values

NAMES = list(PREFERENCE_LOSSES)
WITHOUT_REFERENCE = ("simpo", "cpo", "orpo")
NAN, INF = float("nan"), float("inf")


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def make_pairs(**fields: Tensor | None) -> PairLogProbs:
    """The fixture; fields given replace it."""
    one = {
        "chosen": -10.0,
        "rejected": -12.0,
        "ref_chosen": -11.0,
        "ref_rejected": -11.5,
        "chosen_lengths": 5.0,
        "rejected_lengths": 4.0,
    }
    given: dict[str, Any] = {name: tensor(value) for name, value in one.items()} | fields
    return PairLogProbs(**given)


def draw_pairs(count: int, seed: int = 0) -> PairLogProbs:
    generator = torch.Generator().manual_seed(seed)
    sums = [-20 * torch.rand(count, generator=generator, dtype=torch.float64) - 0.5 for _ in range(4)]
    lengths = [torch.randint(1, 30, (count,), generator=generator).double() for _ in range(2)]
    return PairLogProbs(*sums, *lengths)


def slopes(name: str, pairs: PairLogProbs, **params: float) -> tuple[list[float], list[float]]:
    chosen, rejected = pairs.chosen.clone().requires_grad_(), pairs.rejected.clone().requires_grad_()
    total = compute_preference_loss(pairs._replace(chosen=chosen, rejected=rejected), name, **params).sum
    grads = torch.autograd.grad(total, (chosen, rejected))
    return grads[0].tolist(), grads[1].tolist()


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


# --- values -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "params", "expected"),
    [
        ("dpo", {"beta": 0.1}, 0.620957048),
        ("dpo", {"beta": 0.1, "label_smoothing": 0.1}, 0.635957048),
        ("robust_dpo", {"beta": 0.1, "label_smoothing": 0.1}, 0.602207048),
        ("ipo", {"beta": 0.1}, 12.25),
        ("averaged_ipo", {"beta": 0.1}, 21.855625),  # (1/5 + .5/4 − 5)²
        ("hinge", {"beta": 0.1}, 0.85),
        ("length_normalised_dpo", {"beta": 0.1}, 0.677029206),
        ("simpo", {"beta": 2.0, "gamma": 1.0}, 0.313261688),  # −log σ(2·(−2 + 3) − 1)
        ("orpo", {"beta": 1.0}, 2.0 + 0.288750784),
        ("orpo", {"beta": 0.1}, 2.0 + 0.0288750784),
        ("cpo", {"beta": 0.1}, 0.598138869 + 2.0),  # −log σ(.2) + 10/5
        ("cpo", {"beta": 0.1, "label_smoothing": 0.1, "nll_weight": 0.0}, 0.618138869),  # + .1 · .2
        ("sppo_hard", {"beta": 0.1}, 16.0 + 20.25),  # (1 − 5)² + (−.5 + 5)²
        ("apo_zero", {"beta": 0.1}, 1 - sigmoid(0.1) + sigmoid(-0.05)),
        ("apo_down", {"beta": 0.1}, sigmoid(0.1) + 1 - sigmoid(0.15)),
        (
            "nca",
            {"beta": 0.1},
            -math.log(sigmoid(0.1)) - 0.5 * math.log(sigmoid(-0.1)) - 0.5 * math.log(sigmoid(0.05)),
        ),
        (
            "exo",
            {"beta": 0.1, "label_smoothing": 0.1},
            sigmoid(0.15) * math.log(sigmoid(0.15) / 0.9) + sigmoid(-0.15) * math.log(sigmoid(-0.15) / 0.1),
        ),
    ],
)
def test_losses_match_the_numbers_worked_by_hand(name: str, params: dict[str, float], expected: float):
    output = compute_preference_loss(make_pairs(), name, **params)
    assert (float(output.sum), output.count) == (pytest.approx(expected, abs=1e-9), 1.0)


@pytest.mark.parametrize(
    ("name", "params", "chosen", "rejected"),
    [
        ("dpo", {"beta": 0.1}, -0.1 * sigmoid(-0.15), 0.1 * sigmoid(-0.15)),
        (
            "dpo",
            {"beta": 0.1, "label_smoothing": 0.1},
            -0.1 * (0.9 - sigmoid(0.15)),
            0.1 * (0.9 - sigmoid(0.15)),
        ),
        (
            "robust_dpo",
            {"beta": 0.1, "label_smoothing": 0.1},
            -0.1 * (0.9 * sigmoid(-0.15) + 0.1 * sigmoid(0.15)) / 0.8,
            None,
        ),
        ("ipo", {"beta": 0.1}, 2 * (1.5 - 5), -2 * (1.5 - 5)),
        ("averaged_ipo", {"beta": 0.1}, 2 * (0.325 - 5) / 5, -2 * (0.325 - 5) / 4),
        ("hinge", {"beta": 0.1}, -0.1, 0.1),
        ("length_normalised_dpo", {"beta": 0.1}, -0.1 / 5 * sigmoid(-0.0325), 0.1 / 4 * sigmoid(-0.0325)),
        ("simpo", {"beta": 2.0, "gamma": 1.0}, -2 / 5 * sigmoid(-1), 2 / 4 * sigmoid(-1)),
        # log odds' slope is 1/(1 − e^p), times that of p = π/|y|
        (
            "orpo",
            {"beta": 1.0},
            -0.2 * (1 + sigmoid(-1.094344277) / (1 - math.exp(-2))),
            0.25 * sigmoid(-1.094344277) / (1 - math.exp(-3)),
        ),
        ("cpo", {"beta": 0.1}, -0.1 * sigmoid(-0.2) - 0.2, 0.1 * sigmoid(-0.2)),
        ("sppo_hard", {"beta": 0.1}, 2 * (1 - 5), 2 * (-0.5 + 5)),
        (
            "apo_zero",
            {"beta": 0.1},
            -0.1 * sigmoid(0.1) * sigmoid(-0.1),
            0.1 * sigmoid(0.05) * sigmoid(-0.05),
        ),
        ("nca", {"beta": 0.1}, 0.1 * (-sigmoid(-0.1) + 0.5 * sigmoid(0.1)), 0.05 * sigmoid(-0.05)),
    ],
)
def test_gradients_match_the_formulas_worked_by_hand(
    name: str, params: dict[str, float], chosen: float, rejected: float | None
):
    expected = (
        pytest.approx([chosen], abs=1e-9),
        pytest.approx([-chosen if rejected is None else rejected], abs=1e-9),
    )
    assert slopes(name, make_pairs(), **params) == expected


@pytest.mark.parametrize("name", NAMES)
def test_gradients_agree_with_central_differences(name: str):
    pairs, step = draw_pairs(4), 1e-5
    found = slopes(name, pairs)
    for field, gradient in zip(("chosen", "rejected"), found, strict=True):
        for index in range(4):
            values = []
            for sign in (1, -1):
                moved = getattr(pairs, field).clone()
                moved[index] += sign * step
                values.append(float(compute_preference_loss(pairs._replace(**{field: moved}), name).sum))
            assert gradient[index] == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-5, abs=1e-7)


def test_hinge_has_exactly_no_gradient_beyond_its_margin():
    assert slopes("hinge", make_pairs(chosen=tensor(10.0))) == ([0.0], [0.0])


def test_robust_dpo_is_the_unbiased_estimate_of_dpo_under_flipped_labels():
    """With a share ε of labels flipped its expectation is DPO's loss under the true labels."""
    pairs, share = make_pairs(), 0.2
    flipped = pairs._replace(
        chosen=pairs.rejected,
        rejected=pairs.chosen,
        ref_chosen=pairs.ref_rejected,
        ref_rejected=pairs.ref_chosen,
    )
    right, wrong = (
        float(compute_preference_loss(one, "robust_dpo", label_smoothing=share).sum)
        for one in (pairs, flipped)
    )
    assert (1 - share) * right + share * wrong == pytest.approx(
        float(compute_preference_loss(pairs, "dpo").sum), rel=1e-12
    )


def test_ipo_is_smallest_at_a_margin_of_half_of_one_over_beta():
    assert float(compute_preference_loss(make_pairs(chosen=tensor(-6.5)), "ipo", beta=0.1).sum) == 0.0
    assert slopes("ipo", make_pairs(chosen=tensor(-6.5)), beta=0.1) == ([0.0], [0.0])


# --- odds ---------------------------------------------------------------------------------------------------


def test_log_odds_are_exact_near_a_certain_and_near_an_impossible_response():
    # p = 1 − 1e-5: odds 99999; p = ½: 1; p = e^−40: e^−40 · (1 + e^−40)
    log_probs = tensor(math.log1p(-1e-5), -math.log(2), -40.0)
    assert compute_log_odds(log_probs).tolist() == pytest.approx(
        [math.log(99999), 0.0, -40.0], rel=1e-12, abs=1e-15
    )
    assert compute_log_odds(log_probs.float()).tolist() == pytest.approx(
        [math.log(99999), 0.0, -40.0], rel=1e-3, abs=1e-6
    )


def test_a_response_of_certain_tokens_has_finite_odds_and_no_gradient_through_them():
    certain = make_pairs(chosen=tensor(0.0))
    assert float(compute_log_odds(certain.chosen)) == pytest.approx(math.log(1e6), rel=1e-6)
    chosen, rejected = slopes("orpo", certain, beta=1.0)
    assert chosen == [-0.2], "of the likelihood alone"
    assert math.isfinite(rejected[0])


def test_an_impossible_response_is_not_hidden():
    for name in NAMES:
        assert math.isnan(float(compute_preference_loss(make_pairs(chosen=tensor(-INF)), name).sum)), name
    assert math.isnan(float(compute_preference_loss(make_pairs(chosen=tensor(NAN)), "dpo").sum))


@pytest.mark.parametrize("name", NAMES)
def test_a_token_without_probability_inside_the_mask_is_never_hidden(name: str):
    """-inf in one row of the first pair: the loss and that row's slope are NaN, so that neither route trains
    on it; other pairs keep theirs.
    """
    fields = ("log_probs",) if name in WITHOUT_REFERENCE else ("log_probs", "ref_log_probs")
    clean = -1.0 - torch.arange(8, dtype=torch.float64).reshape(4, 2) / 10
    for field in fields:
        for row in (0, 1):
            values = {"log_probs": clean.clone(), "ref_log_probs": clean.clone()}
            values[field][row, 1] = -INF
            inputs = LossInputs(mask=torch.ones(4, 2, dtype=torch.bool), **values)
            found = linearise_preference_loss(compute_pair_log_probs(inputs), name)
            assert found.output.sum.isnan(), (field, row)
            assert found.advantages[row][0].isnan(), (field, row)
            assert all(advantages[1].isfinite() for advantages in found.advantages), (field, row)


@pytest.mark.parametrize("name", ["dpo", "robust_dpo", "simpo", "cpo", "nca", "exo", "length_normalised_dpo"])
def test_a_margin_of_thousands_keeps_value_and_gradient_finite(name: str):
    for chosen in (-5000.0, 5000.0):
        pairs = PairLogProbs(
            *(value.float() for value in make_pairs(chosen=tensor(chosen)) if value is not None)
        )
        assert math.isfinite(float(compute_preference_loss(pairs, name, beta=1.0).sum))
        assert all(map(math.isfinite, itertools.chain(*slopes(name, pairs, beta=1.0))))


# --- properties ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 1000), cuts=st.lists(st.integers(0, 8), max_size=4))
def test_any_split_into_micro_batches_gives_the_same_sum_count_and_gradient(
    name: str, seed: int, cuts: list[int]
):
    pairs = draw_pairs(8, seed)
    whole = compute_preference_loss(pairs, name)
    edges = [0, *sorted(cuts), 8]
    parts = [
        PairLogProbs(*(value[first:last] for value in pairs if value is not None))
        for first, last in itertools.pairwise(edges)
    ]
    outputs = [compute_preference_loss(part, name) for part in parts]
    assert sum(float(output.sum) for output in outputs) == pytest.approx(float(whole.sum), rel=1e-10)
    assert sum(output.count for output in outputs) == whole.count == 8.0
    merged = metric_values(merge_metrics([output.metrics for output in outputs]))
    assert merged == pytest.approx(metric_values(whole.metrics), rel=1e-10)
    chosen, rejected = slopes(name, pairs)
    split = [slopes(name, part) for part in parts if len(part.chosen)]
    assert [slope for one, _ in split for slope in one] == pytest.approx(chosen, rel=1e-10)
    assert [slope for _, other in split for slope in other] == pytest.approx(rejected, rel=1e-10)


@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 1000), shift=st.floats(-50, 50))
def test_the_losses_of_differences_see_only_the_difference(seed: int, shift: float):
    """Policy and reference raised together for one response: whoever has a reference does not notice."""
    pairs = draw_pairs(3, seed)
    assert pairs.ref_chosen is not None
    moved = pairs._replace(chosen=pairs.chosen + shift, ref_chosen=pairs.ref_chosen + shift)
    for name in set(NAMES) - set(WITHOUT_REFERENCE):
        value = float(compute_preference_loss(pairs, name).sum)
        assert float(compute_preference_loss(moved, name).sum) == pytest.approx(value, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_no_pair_gives_zero_with_a_zero_gradient_and_no_metric(name: str):
    empty = PairLogProbs(*(torch.zeros(0, dtype=torch.float64) for _ in range(6)))
    chosen = empty.chosen.clone().requires_grad_()
    output = compute_preference_loss(empty._replace(chosen=chosen), name)
    output.sum.backward()
    assert (float(output.sum.detach()), output.count, output.metrics) == (0.0, 0.0, {})
    assert chosen.grad is not None


def test_the_reference_gets_no_gradient():
    ref_chosen, ref_rejected, chosen = (tensor(value).requires_grad_() for value in (-11.0, -11.5, -10.0))
    compute_preference_loss(
        make_pairs(chosen=chosen, ref_chosen=ref_chosen, ref_rejected=ref_rejected), "dpo"
    ).sum.backward()
    assert chosen.grad is not None
    assert (ref_chosen.grad, ref_rejected.grad) == (None, None)


# --- metrics ------------------------------------------------------------------------------------------------


def test_metrics_are_the_implicit_rewards_of_both_sides():
    pairs = PairLogProbs(
        tensor(-10.0, -4.0, -7.0),
        tensor(-12.0, -3.0, -7.0),
        tensor(-11.0, -4.0, -7.0),
        tensor(-11.5, -4.0, -7.0),
        *[tensor(1.0, 1.0, 1.0)] * 2,
    )
    values = metric_values(compute_preference_loss(pairs, "dpo", beta=0.1).metrics)
    assert values == pytest.approx(
        {
            "rewards/chosen": 0.1 / 3,  # (.1 + 0 + 0)/3
            "rewards/rejected": (-0.05 + 0.1) / 3,
            "rewards/margins": (0.15 - 0.1 + 0) / 3,
            "rewards/accuracies": 1 / 3,  # a tie is no win
            "logps/chosen": -7.0,
            "logps/rejected": -22 / 3,
        }
    )


def test_orpo_reports_its_two_parts():
    values = metric_values(compute_preference_loss(make_pairs(), "orpo", beta=0.1).metrics)
    assert values["loss/nll"] == 2.0
    assert values["log_odds/mean"] == pytest.approx(1.094344277)
    assert (values["rewards/chosen"], values["logps/rejected"]) == (pytest.approx(-0.2), -3.0)


# --- from tokens to pairs -----------------------------------------------------------------------------------


def make_token_inputs(log_probs: Tensor) -> LossInputs:
    """Two pairs as rows chosen, rejected, chosen, rejected; NaN and -inf outside the masks."""
    mask = torch.tensor(
        [
            [False, True, True, True],
            [False, True, True, False],
            [False, True, False, False],
            [False, True, True, True],
        ]
    )
    ref = torch.where(mask, torch.full_like(log_probs, -1.5), torch.full_like(log_probs, -INF))
    return LossInputs(log_probs=log_probs, mask=mask, ref_log_probs=ref)


def token_log_probs() -> Tensor:
    values = torch.tensor(
        [[NAN, -1.0, -2.0, -3.0], [-INF, -0.5, -0.25, NAN], [NAN, -4.0, NAN, NAN], [INF, -1.0, -1.0, -1.0]],
        dtype=torch.float64,
    )
    return values.requires_grad_()


def test_rows_two_by_two_become_pairs_and_nothing_outside_the_mask_leaks():
    log_probs = token_log_probs()
    pairs = compute_pair_log_probs(make_token_inputs(log_probs))
    assert pairs.ref_chosen is not None and pairs.ref_rejected is not None
    assert [value.tolist() for value in pairs if value is not None] == [
        [-6.0, -4.0],
        [-0.75, -3.0],
        [-4.5, -1.5],
        [-3.0, -4.5],
        [3.0, 1.0],
        [2.0, 3.0],
    ]
    compute_preference_loss(pairs, "dpo", beta=0.5).sum.backward()
    # Δ = −1.5 − 2.25 and −2.5 − 1.5: every token of a row has the slope of its row
    first, second = 0.5 * sigmoid(0.5 * 3.75), 0.5 * sigmoid(0.5 * 4.0)
    assert log_probs.grad is not None
    expected = [
        [0, -first, -first, -first],
        [0, first, first, 0],
        [0, -second, 0, 0],
        [0, second, second, second],
    ]
    assert [value for row in log_probs.grad.tolist() for value in row] == pytest.approx(
        [value for row in expected for value in row]
    )


def test_padding_changes_nothing():
    inputs = make_token_inputs(token_log_probs())
    assert inputs.ref_log_probs is not None
    wider = LossInputs(
        log_probs=torch.nn.functional.pad(inputs.log_probs, (0, 3), value=NAN),
        mask=torch.nn.functional.pad(inputs.mask, (0, 3), value=False),
        ref_log_probs=torch.nn.functional.pad(inputs.ref_log_probs, (0, 3), value=INF),
    )
    for narrow, wide in zip(compute_pair_log_probs(inputs), compute_pair_log_probs(wider), strict=True):
        assert narrow is not None and wide is not None and narrow.tolist() == wide.tolist()


def test_an_odd_row_and_an_empty_response_are_refused():
    inputs = make_token_inputs(token_log_probs())
    with pytest.raises(ValueError, match="3 rows; pairs need an even number"):
        compute_pair_log_probs(LossInputs(log_probs=inputs.log_probs[:3], mask=inputs.mask[:3]))
    with pytest.raises(ValueError, match="row 1 trains no token"):
        compute_row_log_probs(
            LossInputs(log_probs=torch.zeros(2, 3), mask=torch.tensor([[True, False, False], [False] * 3]))
        )


@pytest.mark.parametrize("name", NAMES)
def test_advantages_from_the_slope_give_reinforce_the_same_gradient(name: str):
    """The rows of a pair may then lie in different micro-batches."""
    log_probs = torch.where(
        make_token_inputs(token_log_probs()).mask, token_log_probs().detach(), 0.0
    ).requires_grad_()
    inputs = make_token_inputs(log_probs)
    pairs = compute_pair_log_probs(inputs)
    (wanted,) = torch.autograd.grad(compute_preference_loss(pairs, name).sum, log_probs)
    with torch.no_grad():
        line = linearise_preference_loss(compute_pair_log_probs(inputs), name)
    per_row = torch.stack(line.advantages, dim=1).flatten()
    found = torch.zeros_like(log_probs)
    for rows in ([0, 3], [2], [1]):
        part = LossInputs(
            log_probs=log_probs[rows],
            mask=inputs.mask[rows],
            advantages=per_row[rows, None].expand(len(rows), 4),
        )
        (grad,) = torch.autograd.grad(reinforce_loss(part, unit="constant").sum, log_probs)
        found += grad
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=0)
    assert not line.output.sum.requires_grad
    assert float(line.output.sum) == float(compute_preference_loss(pairs, name).sum.detach())


# --- names and mistakes -------------------------------------------------------------------------------------


def test_trl_names_lead_to_losses_that_exist():
    assert set(TRL_LOSS_TYPES.values()) <= set(PREFERENCE_LOSSES)
    with pytest.raises(ConfigError, match="'sigmoid' is not known; did you mean 'dpo'"):
        resolve_preference_loss("sigmoid")
    with pytest.raises(ConfigError, match="did you mean 'hinge'"):
        resolve_preference_loss("hingee")


def test_a_function_of_ones_own_takes_the_fields_that_it_names():
    def largest_gap(rejected: Tensor, chosen: Tensor, *, scale: float = 1.0):
        return compute_preference_loss(make_pairs(chosen=scale * chosen, rejected=rejected), "simpo")

    assert float(compute_preference_loss(make_pairs(), largest_gap, scale=1.0).sum) == pytest.approx(
        0.313261688
    )


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("dpo", {"beta": 0.0}, "dpo: beta=0.0 must be above 0"),
        ("dpo", {"label_smoothing": 0.5}, "label_smoothing=0.5 must be at least 0 and below 0.5"),
        ("exo", {"label_smoothing": 0.0}, "label_smoothing=0.0 must be above 0"),
        ("robust_dpo", {"label_smoothing": -0.1}, "label_smoothing=-0.1"),
        ("simpo", {"gamma": -1.0}, "gamma=-1.0 must not be negative"),
        ("cpo", {"nll_weight": -1.0}, "nll_weight=-1.0"),
        ("orpo", {"beta": -0.1}, "orpo: beta=-0.1"),
        ("dpo", {"bta": 0.1}, "no parameter 'bta'; it takes beta, label_smoothing"),
        ("hinge", {"chosen": 0.1}, "no parameter 'chosen'; it takes beta"),
    ],
)
def test_bad_parameters_are_named(name: str, params: dict[str, float], message: str):
    with pytest.raises(ConfigError, match=message):
        compute_preference_loss(make_pairs(), name, **params)


@pytest.mark.parametrize("name", sorted(set(NAMES) - set(WITHOUT_REFERENCE)))
def test_a_missing_reference_is_named(name: str):
    with pytest.raises(ConfigError, match="needs ref_chosen and ref_rejected and the pairs have none"):
        compute_preference_loss(make_pairs(ref_chosen=None, ref_rejected=None), name)


@pytest.mark.parametrize("name", WITHOUT_REFERENCE)
def test_losses_without_a_reference_need_none(name: str):
    assert math.isfinite(
        float(compute_preference_loss(make_pairs(ref_chosen=None, ref_rejected=None), name).sum)
    )


@pytest.mark.parametrize("name", NAMES)
def test_shapes_that_differ_are_named(name: str):
    with pytest.raises(ValueError, match=r"chosen \(2,\)"):
        compute_preference_loss(make_pairs(chosen=tensor(-1.0, -2.0)), name)
