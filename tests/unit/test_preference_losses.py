"""Preference losses, KTO and the reward model's: numbers worked by hand, and what holds for every loss.

Fixture: one pair with π_c = -10, π_r = -12, ref_c = -11, ref_r = -11.5, lengths 5 and 4; Δ_c = 1, Δ_r = -.5,
Δ = 1.5; β = .1. KTO: z₀ = .05, the chosen response good and the rejected one bad.
"""

import math
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch

from rollouts.errors import ConfigError
from rollouts.losses import LOSSES, LossInputs, LossOutput
from rollouts.losses.preference_losses import (
    PREFERENCE_LOSSES,
    PairLogProbs,
    compute_kto_reference_point,
    compute_kto_weights,
    compute_log_odds,
    compute_pair_log_probs,
    compute_preference_loss,
    kto_loss,
    linearise_preference_loss,
    linearise_row_loss,
)
from rollouts.losses.reward_model_losses import bradley_terry_loss, compute_pair_calibration
from rollouts.types import merge_metrics, metric_values
from tests.support.text_tables import cases, read_cells, read_params

NAMES = list(PREFERENCE_LOSSES)
WITHOUT_REFERENCE = ("simpo", "cpo", "orpo")
NAN, INF = math.nan, math.inf


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def make_pairs(**fields):
    """The fixture; fields given replace it."""
    return PairLogProbs(*map(tensor, (-10, -12, -11, -11.5, 5, 4)))._replace(**fields)


def draw_pairs(count):
    rng = np.random.default_rng(0)
    sums, lengths = rng.uniform(-20.5, -0.5, (4, count)), rng.integers(1, 30, (2, count))
    return PairLogProbs(*map(torch.tensor, (*sums, *lengths.astype(float))))


def of_pairs(name, pairs, **params):
    """The loss as a function of what has a gradient; "kto" and "reward" beside those on pairs."""
    if name == "kto":
        ref = torch.cat([pairs.ref_chosen, pairs.ref_rejected])
        good = torch.arange(len(ref)) < len(pairs.ref_chosen)
        params = {"reference_point": 0.05} | params
        return lambda chosen, rejected: kto_loss(torch.cat([chosen, rejected]), ref, good, **params)
    if name == "reward":
        return partial(bradley_terry_loss, **params)
    return lambda chosen, rejected: compute_preference_loss(
        pairs._replace(chosen=chosen, rejected=rejected), name, **params
    )


def slopes(name, pairs):
    grads = linearise_row_loss(of_pairs(name, pairs), pairs.chosen, pairs.rejected).advantages
    return [(-grad).tolist() for grad in grads]


# --- values -------------------------------------------------------------------------------------------------


@cases("""
name         | params                                | expected    | …
dpo          | beta = 0.1                            | 0.620957048 | −log σ(.15)
dpo          | beta = 0.1, label_smoothing = 0.1     | 0.635957048
robust_dpo   | beta = 0.1, label_smoothing = 0.1     | 0.602207048
ipo          | beta = 0.1                            | 12.25       | (1.5 − 5)²
averaged_ipo | beta = 0.1                            | 21.855625   | (1/5 + .5/4 − 5)²
hinge        | beta = 0.1                            | 0.85        | 1 − .15
length_normalised_dpo | beta = 0.1                   | 0.677029206
simpo        | beta = 2.0, gamma = 1.0               | 0.313261688 | −log σ(2·(−2 + 3) − 1)
orpo         | beta = 1.0                            | 2.288750784
orpo         | beta = 0.1                            | 2.028875078
cpo          | beta = 0.1                            | 2.598138869 | −log σ(.2) + 10/5
cpo          | beta = 0.1, label_smoothing = 0.1, nll_weight = 0.0 | 0.618138869 | −log σ(.2) + .1·.2
rpo          | beta = 0.1                            | 2.620957048 | −log σ(.15) + 10/5
rpo          | beta = 0.1, nll_weight = 0.5          | 1.620957048 | −log σ(.15) + ½·10/5
sppo_hard    | beta = 0.1                            | 36.25       | (1 − 5)² + (−.5 + 5)²
apo_zero     | beta = 0.1                            | 0.962523416 | 1 − σ(.1) + σ(−.05)
apo_down     | beta = 0.1                            | 0.987549342 | σ(.1) + 1 − σ(.15)
nca          | beta = 0.1                            | 1.350824810 | −log σ(.1) − ½·log σ(−.1) − ½·log σ(.05)
exo | beta = 0.1, label_smoothing = 0.1 | 0.431388457 | σ(.15)·log(σ(.15)/.9) + σ(−.15)·log(σ(−.15)/.1)
kto | beta = 0.1 | 0.962521311 | 1 − σ(.1·(1 − .05)) + 1 − σ(.1·(.05 + .5))
kto          | desirable_weight = 2.0, undesirable_weight = 0.5 | 1.195662424
reward       |                                       | 0.126928011 | −log σ(2)
reward       | margins = [0.5], centring = 0.01      | 5.041413278 | −log σ(1.5) + .01·(−10 − 12)²
""")
def test_losses_match_the_numbers_worked_by_hand(name, params: dict, expected: float):
    pairs = make_pairs()
    if "margins" in params:
        params["margins"] = tensor(*params["margins"])
    output = of_pairs(name, pairs, **params)(pairs.chosen, pairs.rejected)
    assert float(output.sum) == pytest.approx(expected, abs=1e-8)
    assert output.count == (2 if name == "kto" else 1)


# --- every loss ---------------------------------------------------------------------------------------------


@cases("name", [*NAMES, "kto", "reward"])
def test_gradients_splits_and_an_empty_batch(name):
    """Finite differences; any split gives the same sums and metrics; the reference has no gradient."""
    pairs = draw_pairs(6)
    leaves = [pairs.chosen.requires_grad_(), pairs.rejected.requires_grad_()]
    assert torch.autograd.gradcheck(lambda c, r: of_pairs(name, pairs)(c, r).sum, leaves)
    references = [values.requires_grad_() for values in pairs[2:4]]
    whole = of_pairs(name, pairs)(pairs.chosen, pairs.rejected)
    grads = torch.autograd.grad(whole.sum, [*leaves, *references], allow_unused=True, retain_graph=True)
    assert grads[2:] == (None, None)
    for cut in (0, 2, 5):
        divided = zip(*(values.split([cut, 6 - cut]) for values in pairs), strict=True)
        parts = [of_pairs(name, PairLogProbs(*part))(*part[:2]) for part in divided]
        total = parts[0].sum + parts[1].sum
        assert parts[0].count + parts[1].count == whole.count
        found = total, *torch.autograd.grad(total, leaves, retain_graph=True)
        torch.testing.assert_close(found, (whole.sum, *grads[:2]), rtol=1e-12, atol=1e-14)
        merged = metric_values(merge_metrics([part.metrics for part in parts]))
        assert merged == pytest.approx(metric_values(whole.metrics))
    assert of_pairs(name, draw_pairs(0))(tensor(), tensor()).metrics == {}


@cases("name", [*NAMES, "kto"])
def test_what_is_not_finite_is_never_hidden_and_margins_of_thousands_stay_finite(name):
    two = PairLogProbs(*(tensor(number.item(), -3.0) for number in make_pairs()))
    for field in PairLogProbs._fields[: 2 if name in WITHOUT_REFERENCE else 4]:
        for value in (-INF, NAN):
            pairs = two._replace(**{field: tensor(value, -3.0)})
            assert of_pairs(name, pairs)(pairs.chosen, pairs.rejected).sum.isnan()
            grad = slopes(name, pairs)["rejected" in field]
            assert not math.isfinite(grad[0]) and math.isfinite(grad[1])
    for large in (make_pairs(chosen=tensor(-9000.0)), make_pairs(rejected=tensor(-9000.0))):
        assert of_pairs(name, large)(large.chosen, large.rejected).sum.isfinite()
        assert np.isfinite(slopes(name, large)).all()


@cases("name", NAMES)
def test_advantages_from_the_slope_give_reinforce_the_same_gradient(name):
    """On tokens: rows two by two are pairs, padding is NaN, and every token of a row has the row's slope."""
    generator = torch.Generator().manual_seed(4)
    mask = torch.tensor([[one == "1" for one in row] for row in ("0111", "0100", "1100", "0011")])
    draws, others = -torch.rand(2, 4, 4, generator=generator, dtype=torch.float64)
    log_probs, ref = torch.where(mask, draws, NAN).requires_grad_(), torch.where(mask, others, -INF)
    pairs = compute_pair_log_probs(LossInputs(log_probs=log_probs, mask=mask, ref_log_probs=ref))
    assert (pairs.chosen_lengths.tolist(), pairs.rejected_lengths.tolist()) == ([3.0, 2.0], [1.0, 2.0])
    output = compute_preference_loss(pairs, name)
    (expected,) = torch.autograd.grad(output.sum, [log_probs], retain_graph=True)
    assert not expected[~mask].any()
    line = linearise_preference_loss(pairs, name)
    advantages = torch.stack(line.advantages, dim=-1).flatten()[:, None].expand(4, 4)
    surrogate = LOSSES["reinforce"](LossInputs(log_probs=log_probs, mask=mask, advantages=advantages))
    (found,) = torch.autograd.grad(surrogate.sum, [log_probs])
    torch.testing.assert_close((found, line.output.sum), (expected, output.sum), rtol=1e-12, atol=1e-14)


# --- of one loss --------------------------------------------------------------------------------------------


def test_odds_are_exact_near_a_certain_and_near_an_impossible_response():
    values = tensor(-1e-3, -0.5, -50.0).requires_grad_()
    near, _, far = compute_log_odds(values).tolist()
    assert near == pytest.approx(6.907255, abs=1e-6)  # log(1/x) − x/2 + …
    assert far == pytest.approx(-50.0, abs=1e-12)
    assert torch.autograd.gradcheck(compute_log_odds, (values,))
    certain = make_pairs(chosen=tensor(0.0))
    assert slopes("orpo", certain)[0] == [pytest.approx(-0.2)]  # of the likelihood alone


METRICS = """
dpo | rewards/chosen 0.1 | rewards/rejected -0.05 | rewards/margins 0.15 | rewards/accuracies 1
cpo    | rewards/chosen -1   | rewards/rejected -1.2  | loss/nll 2 | logps/chosen -10 | logps/rejected -12
rpo    | rewards/chosen 0.1 | loss/nll 2 | logps/chosen -10
simpo  | rewards/chosen -4   | rewards/rejected -6    | logps/chosen -2 | logps/rejected -3
orpo   | loss/nll 2 | log_odds/mean 1.094344277 | logps/chosen -2 | rewards/chosen -0.2
kto    | rewards/chosen 0.1  | rewards/rejected -0.05 | kto/reference_point 0.05 | logps/rejected -12
reward | rewards/chosen -10  | rewards/max -10 | rewards/min -12 | rewards/accuracies 1
"""


@cases("cells", read_cells(METRICS), ids=lambda cells: cells[0])
def test_metrics_are_the_implicit_rewards_of_both_sides(cells):
    found = metric_values(of_pairs(cells[0], make_pairs())(tensor(-10.0), tensor(-12.0)).metrics)
    for key, value in map(str.split, cells[1:]):
        assert found[key] == pytest.approx(float(value)), key


def test_a_tie_is_no_accuracy():
    tie = compute_preference_loss(make_pairs(chosen=tensor(-11.0), rejected=tensor(-11.5)), "dpo")
    assert metric_values(tie.metrics)["rewards/accuracies"] == 0.0


def test_kto_trains_on_one_kind_alone_and_its_reference_point():
    alone = kto_loss(tensor(-10.0), tensor(-11.0), torch.tensor([True]), reference_point=0.05)
    assert float(alone.sum) == pytest.approx(0.476267846) and "rewards/rejected" not in alone.metrics
    point = compute_kto_reference_point(tensor(-10.0, -12.0).requires_grad_(), tensor(-11.0, -12.5))
    assert (float(point), point.requires_grad) == (0.75, False)
    assert float(compute_kto_reference_point(tensor(-10.0), tensor(-5.0))) == 0.0
    assert kto_loss(tensor(-10.0), tensor(-11.0), torch.tensor([True]), reference_point=INF).sum.isnan()
    with pytest.raises(ValueError, match="no row to estimate the reference point from"):
        compute_kto_reference_point(tensor(), tensor())


@cases("""
good | bad | weights
10   | 10  | 1 1
4    | 3   | 1 1
10   | 40  | 4 1
40   | 10  | 1 3
""")
def test_weights_of_kto_balance_the_two_kinds(good: int, bad: int, weights: list[float]):
    assert compute_kto_weights(good, bad) == pytest.approx(weights)
    with pytest.raises(ValueError, match="0 desirable and 5 undesirable rows"):
        compute_kto_weights(0, 5)


def test_calibration_matches_bins_filled_by_hand():
    """Bets of confidence .97, three right of four, and of .66, one right of two."""
    labels = (0.97, 0.97, 0.97, 0.03, 0.66, 0.34)
    scores = tensor(*(math.log(p / (1 - p)) for p in labels))
    found = compute_pair_calibration(scores, torch.zeros_like(scores))
    bets = (4 * 0.97 + 2 * 0.66) / 6, (4 * 0.22 + 2 * 0.16) / 6  # confidence, and how far it is off
    ends = sum((1 - p) ** 2 for p in labels) / 6, -sum(map(math.log, labels)) / 6  # Brier, nll
    assert found == pytest.approx((6, 4 / 6, *bets, *ends))
    assert compute_pair_calibration(tensor(2.0, 2.0), tensor(2.0, 2.0))[1:4] == (0.5, 0.5, 0.0)
    assert compute_pair_calibration(tensor(-100.0, -100.0), tensor(100.0, 100.0))[1:4] == (0.0, 1.0, 1.0)
    with pytest.raises(ValueError, match="0 pairs"):
        compute_pair_calibration(tensor(), tensor())
    with pytest.raises(ValueError, match="pair 1 differ by inf"):
        compute_pair_calibration(tensor(0.0, INF), tensor(0.0, 0.0))


# --- names and refusals -------------------------------------------------------------------------------------


def test_a_function_of_ones_own_takes_the_fields_that_it_names():
    def mine(rejected, chosen_lengths, *, scale):
        return LossOutput((scale * rejected / chosen_lengths).sum(), 1.0, {})

    assert float(compute_preference_loss(make_pairs(), mine, scale=10.0).sum) == -24.0
    with pytest.raises(ConfigError, match="it takes scale"):
        compute_preference_loss(make_pairs(), mine, scale=1.0, other=2.0)


REFUSED = """
orpo   | beta = -0.1                                    | beta=-0.1
dpo    | label_smoothing = 0.5                          | label_smoothing=0.5
exo    | label_smoothing = 0.0                          | label_smoothing=0.0
simpo  | gamma = -1.0                                   | gamma=-1.0
cpo    | nll_weight = -1.0                              | nll_weight=-1.0
dpo    | gamma = 1.0                                    | no parameter 'gamma'; it takes beta, label_smoothing
sigmoid|                                                | did you mean 'dpo'
dppo   |                                                | did you mean 'dpo'
kto    | desirable_weight = -1.0                        | desirable_weight=-1.0
kto    | desirable_weight = 0.0, undesirable_weight = 0.0 | both weights are 0
reward | centring = -1.0                                | centring=-1.0
"""
NOT_ABOVE_0 = [[name, "beta = 0.0", "beta=0.0"] for name in [*NAMES, "kto"] if name != "orpo"]


@cases("name, params, message", [*read_cells(REFUSED), *NOT_ABOVE_0])
def test_bad_parameters_are_named(name, params, message):
    with pytest.raises(ConfigError, match=message):
        of_pairs(name, make_pairs(), **read_params(params))(tensor(-10.0), tensor(-12.0))


@cases("name", NAMES)
def test_a_missing_reference_and_shapes_that_differ_are_named(name):
    needed = pytest.raises(ConfigError, match=f"'{name}' needs ref_chosen")
    with nullcontext() if name in WITHOUT_REFERENCE else needed:
        compute_preference_loss(make_pairs(ref_chosen=None, ref_rejected=None), name)
    with pytest.raises(ValueError, match=f"{name}: .*must be one-dimensional and of one length"):
        compute_preference_loss(make_pairs(chosen=tensor(-1.0, -2.0)), name)


def test_an_odd_row_and_an_empty_response_are_refused():
    ones, mask = torch.ones(4, 2), torch.ones(4, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match="3 rows"):
        compute_pair_log_probs(LossInputs(log_probs=ones[:3], mask=mask[:3]))
    mask[2] = False
    with pytest.raises(ValueError, match="row 2 trains no token"):
        compute_pair_log_probs(LossInputs(log_probs=ones, mask=mask))
