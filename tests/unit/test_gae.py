"""Advantages from a critic's values against numbers worked by hand and a slow sweep; KL in token rewards."""

import numpy as np
import pytest

from rollouts.advantages import (
    ADVANTAGES,
    AdvantageInputs,
    GAEResult,
    compute_advantages,
    compute_explained_variance,
    compute_gae,
    compute_token_rewards,
    subtract_kl,
    whiten_advantages,
)
from rollouts.types import Sample, Status
from tests.support.made_updates import floats
from tests.support.text_tables import cases

ALL = np.array([True, True, True])
NAN, INF = float("nan"), float("inf")
VALUES = [0.5, 0.6, 0.7]


def slow_gae(rewards, values, mask, gamma, lam, bootstrap):
    """One row from its definition: A_t = Σ_l (gamma·lam)^l δ_{t+l} over the trained tokens."""
    kept = np.flatnonzero(mask)
    deltas = rewards[kept] + gamma * np.append(values[kept][1:], bootstrap)[: len(kept)] - values[kept]
    result = np.zeros(len(mask))
    for index, position in enumerate(kept):
        result[position] = sum((gamma * lam) ** ahead * delta for ahead, delta in enumerate(deltas[index:]))
    return result


def test_rows_of_all_shapes_match_the_slow_sweep_and_see_neither_each_other_nor_a_tools_tokens():
    rng = np.random.default_rng(0)
    masks = [rng.random(length) < 0.6 for length in (0, 1, 7, 12, 3)]
    rewards, values = ([np.where(mask, rng.normal(size=len(mask)), NAN) for mask in masks] for _ in range(2))
    lams, bootstrap = rng.random(5), rng.normal(size=5)
    found = compute_gae(rewards, values, masks, gamma=0.97, lam=lams, bootstrap_values=bootstrap)
    for row in range(5):
        expected = slow_gae(rewards[row], values[row], masks[row], 0.97, lams[row], bootstrap[row])
        assert found.advantages[row].dtype == np.float32
        np.testing.assert_allclose(found.advantages[row], expected, rtol=1e-5, atol=1e-6)
        returns = np.where(masks[row], expected + values[row], 0.0)
        np.testing.assert_allclose(found.returns[row], returns, rtol=1e-5, atol=1e-6)


def test_a_truncated_row_may_go_on_with_what_the_critic_expected_of_it():
    """δ = (.6 − .5, .7 − .6, 1 + .7 − .7) and (…, 1 − .7); the advantages are their sums to the end."""
    statuses = Status.TRUNCATED, Status.COMPLETED
    inputs = AdvantageInputs(
        rewards=np.ones(2), group_indices=np.zeros(2), values=floats(VALUES) * 2, loss_masks=(ALL,) * 2,
        token_rewards=floats([0, 0, 1]) * 2,
        samples=tuple(Sample(id=status, prompt="p", status=status) for status in statuses),
    )  # fmt: skip
    found = ADVANTAGES["gae"](inputs, bootstrap_truncated=True, lam=1.0, whiten=False)
    np.testing.assert_allclose(found.advantages, [[1.2, 1.1, 1.0], [0.5, 0.4, 0.3]], rtol=1e-5)
    np.testing.assert_allclose(found.returns, [[1.7] * 3, [1.0] * 3], rtol=1e-5)


def test_whitened_advantages_have_mean_zero_and_variance_one_over_trained_tokens():
    """1, 2 and 6: mean 3, variance 7 with n − 1."""
    masks = [np.array([True, False, True]), np.array([False]), np.array([True])]
    found = np.concatenate(whiten_advantages([[1.0, NAN, 2.0], [INF], [6.0]], masks))
    np.testing.assert_allclose(found, np.array([-2, 0, -1, 0, 3]) / 7**0.5, rtol=1e-6)
    assert not whiten_advantages([[2.0] * 3], [ALL])[0].any() and whiten_advantages([], []) == ()


@cases("""
values    | expected    | …
1 nan 2 6 | 1
3 3 3 3   | 0
0 0 1 8   | 0.571428571 | R − V = 1, 1, −2 has variance 2; R has (4 + 1 + 9)/3
""")
def test_explained_variance_is_one_for_a_perfect_critic_and_zero_for_a_constant(
    values: list[float], expected: float
):
    masks, returns = [np.array([True, False, True]), ALL[:1]], [[1.0, NAN, 2.0], [6.0]]
    found = compute_explained_variance([values[:3], values[3:]], returns, masks)
    assert found == pytest.approx(expected)
    assert compute_explained_variance([[1.0]], [[2.0]], [ALL[:1]]) is None


@cases(r"""
change                            | wrong
gamma = 1.01                      | gamma=1.01; it must be from 0 to 1
lam = [-0.1]                      | lam=-0.1; it must be from 0 to 1
lam = [0.1, 0.2]                  | one number, or one per row of 1
critic_lam = 2.0                  | critic_lam=2.0
bootstrap_values = [0.0, 1.0]     | one number, or one per row of 1
bootstrap_values = [nan]          | one finite number per row
values = [[0.0, nan, 1.0]]        | values\[0\], token 1 is nan
rewards = [[0.0, 1.0]]            | rewards\[0\] has shape \(2,\) and its loss mask \(3,\)
rewards = []                      | 0 rows of rewards for 1 loss masks
""")
def test_gae_names_what_is_wrong(change: dict, wrong):
    with pytest.raises(ValueError, match=wrong):
        compute_gae(**{"rewards": [[0, 0, 1]], "values": [VALUES], "loss_masks": [ALL]} | change)


# --- the KL term in the reward ------------------------------------------------------------------------------

LOG_PROBS = floats([NAN, -0.7, -0.9], [NAN], [-1.6, INF])
REFERENCES = floats([NAN, -1.1, -0.6], [0.0], [-1.5, 0.0])
MASKS = [np.array([False, True, True]), np.array([False]), np.array([True, False])]


def test_kl_on_every_token_adds_up_to_kl_once_per_sample():
    tokens = compute_token_rewards([1.0, 2.0, 3.0], LOG_PROBS, REFERENCES, MASKS, 0.5)
    # −½·.4; 1 − ½·(−.3); 3 − ½·(−.1); a row in which nothing trains has nowhere to put its reward
    expected = [[0.0, -0.2, 1.15], [0.0], [3.05, 0.0]]
    for row, wanted in zip(tokens, expected, strict=True):
        np.testing.assert_allclose(row, wanted, rtol=1e-5, atol=1e-7)
    rewards, _ = subtract_kl([1.0, 2.0, 3.0], LOG_PROBS, REFERENCES, MASKS, 0.5)
    np.testing.assert_allclose([row.sum() for row in tokens][::2], rewards[::2], rtol=1e-6)


@pytest.mark.parametrize("function", [subtract_kl, compute_token_rewards])
@cases(r"""
change                       | wrong
ref_log_probs = [[-1.0]]     | ref_log_probs\[0\] has shape \(1,\)
rewards = [1.0, 2.0]         | shape \(2,\) for 1 rows
log_probs = [[nan, 0.0]]     | log_probs\[0\], token 0 is nan
rewards = [nan]              | rewards\[0\] is nan
""")
def test_kl_refuses_rows_that_do_not_fit_and_log_probs_that_are_not_finite(function, change: dict, wrong):
    row = [[-1.0, -2.0]]
    given = {"rewards": [1.0], "log_probs": row, "ref_log_probs": row, "loss_masks": [ALL[:2]], "beta": 0.1}
    with pytest.raises(ValueError, match=wrong):
        function(**given | change)


# --- by name, as a run with a critic asks -------------------------------------------------------------------


def with_critic(rewards: list[float], values: list[float]) -> AdvantageInputs:
    """One row of at most three tokens, which all train."""
    return AdvantageInputs(
        rewards=np.asarray(rewards[-1:]),
        group_indices=np.zeros(1, np.int64),
        token_rewards=floats(rewards),
        values=floats(values),
        loss_masks=(ALL[: len(rewards)],),
    )


@cases("""
params                                       | advantages                     | returns                 | …
gamma = 0.99, whiten = false                 | 0.446828575 0.37515 0.3        | 0.946828575 0.97515 1
gamma = 0.99                                 | 0.9920258 0.0157603 -1.0077861 | 0.946828575 0.97515 1   | \
whitened: mean .3739929, deviation .0734213 with n − 1
lam = 0.5, critic_lam = 1.0, whiten = false  | 0.225 0.25 0.3                 | 1 1 1                   | \
.1 + .05 + .075, .1 + .15
""")
def test_gae_by_its_name_gives_advantages_and_returns(
    params: dict, advantages: list[float], returns: list[float]
):
    inputs = with_critic([0.0, 0.0, 1.0], VALUES)
    found = compute_advantages(inputs, ADVANTAGES["gae"], **{"gamma": 1.0, "lam": 0.95} | params)
    np.testing.assert_allclose(found.advantages[0], advantages, rtol=1e-4)
    np.testing.assert_allclose(found.returns[0], returns, rtol=1e-6)


def test_a_function_of_ones_own_may_answer_as_gae_does_and_is_checked():
    inputs = with_critic([0.0, 1.0], [0.5, 0.5])
    found = compute_advantages(inputs, lambda given: GAEResult(given.values, given.token_rewards))
    assert isinstance(found, GAEResult)
    assert [row.tolist() for row in (*found.advantages, *found.returns)] == [[0.5, 0.5], [0.0, 1.0]]
    with pytest.raises(ValueError, match="returns: answered for row 0"):
        compute_advantages(inputs, lambda given: GAEResult(given.values, floats([NAN, 1.0])))
    with pytest.raises(ValueError, match="GAEResult of numbers"):
        compute_advantages(inputs, lambda given: GAEResult(given.values, (1.0,)))
