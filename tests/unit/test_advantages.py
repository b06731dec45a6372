"""Advantages of rows against numbers worked by hand: rewards [1, 0, 0, .5], lengths [2, 3, 4, 1]; mean .375,
sample std .478714. Those from a critic's values, and a slow sweep; KL in token rewards.
"""

import itertools
import re
import statistics
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from rollouts.advantages import (
    ADVANTAGES,
    AdvantageInputs,
    GAEResult,
    broadcast_advantages,
    check_advantage_params,
    compute_advantages,
    compute_explained_variance,
    compute_gae,
    compute_group_advantages,
    compute_role_advantages,
    compute_token_rewards,
    subtract_kl,
    whiten_advantages,
)
from rollouts.errors import ConfigError
from rollouts.types import Sample, Status
from tests.support.made_updates import floats
from tests.support.text_tables import cases

REWARDS = [1.0, 0.0, 0.0, 0.5]
group_relative = cases("kind: grpo centred rloo maxrl opo pass_at_k")


@cases("""
kind      | expected | …
grpo      | 1.305579692 -0.783347815 -0.783347815 0.261115938
centred   | 0.625 -0.375 -0.375 0.125
lite_ppo  | 1.305579692 -0.783347815 -0.783347815 0.261115938 | as grpo, of a batch of one group
rloo      | 0.833333333 -0.5 -0.5 0.166666667
maxrl     | 1.666666667 -1 -1 0.333333333
opo       | 0.75 -0.25 -0.25 0.25 | baseline (2·1 + 1·.5)/10
pass_at_k | 0.5 0 0 0 | best less second best
reinforce_pp_baseline | 1.765045167 -0.588348389 -0.588348389 0.588348389 | centred, once a token: \
mean −.125, variance 1.625/9; (.625 + .125)/sqrt(.180556 + 1e-8)
reinforce_pp | 1.765045167 -0.588348389 -0.588348389 0.588348389 | raw: mean .25, the same spread
raw       | 1 0 0 .5
""")
def test_one_group_matches_the_numbers_worked_by_hand(kind, expected: list[float]):
    advantages = compute_group_advantages(REWARDS, [7] * 4, kind, lengths=[2, 3, 4, 1])
    assert advantages.dtype == np.float32
    assert_allclose(advantages, expected, rtol=1e-6, atol=1e-9)


def test_lite_ppo_divides_by_the_spread_of_the_whole_batch():
    """Rewards 1, 0, 0, ½ and a group of 1, 1: their variance is (3.25 − 6·(3.5/6)²)/5 = .2416667."""
    advantages = compute_group_advantages([*REWARDS, 1.0, 1.0], [7, 7, 7, 7, 8, 8], "lite_ppo")
    expected = np.asarray([0.625, -0.375, -0.375, 0.125, 0, 0]) / (0.2416666667**0.5 + 1e-6)
    assert_allclose(advantages, expected, rtol=1e-6)


ROWS = st.tuples(st.integers(0, 3), st.sampled_from([0.0, 1.0, 0.5, -0.25, 3.0]), st.integers(0, 9))


@group_relative
@settings(max_examples=60, deadline=None)
@given(batch=st.lists(ROWS, max_size=12))
def test_groups_do_not_see_each_other_in_any_row_order(kind, batch):
    """Each group by itself has the same advantages."""
    groups, rewards, lengths = (np.asarray([row[at] for row in batch]) for at in range(3))
    found = compute_group_advantages(rewards, groups, kind, lengths=lengths)
    for group in set(groups.tolist()):
        rows = groups == group
        alone = compute_group_advantages(rewards[rows], [0] * rows.sum(), kind, lengths=lengths[rows])
        assert_allclose(found[rows], alone, rtol=1e-5, atol=1e-6)


@group_relative
def test_a_lone_sample_and_a_group_of_equal_rewards_get_exactly_zero(kind):
    advantages = compute_group_advantages([5.0, 0.1, 0.1, 0.1], [0, 1, 1, 1], kind, lengths=[1, 2, 3, 4])
    assert advantages.tolist() == [0.0, 0.0, 0.0, 0.0]


@cases("k: 2 3 4 5 0")
def test_pass_at_k_is_what_a_row_adds_to_the_best_of_every_subset(k: int):
    rewards = [0.3, 1.0, 0.3, -0.5, 0.8]
    size = 5 if k == 0 else k
    found = compute_group_advantages(rewards, [3] * 5, "pass_at_k", k=k)
    for row in range(5):
        subsets = [subset for subset in itertools.combinations(range(5), size) if row in subset]
        added = [max(rewards[i] for i in s) - max(rewards[i] for i in s if i != row) for s in subsets]
        assert found[row] == pytest.approx(statistics.fmean(added), rel=1e-6, abs=1e-9)


def gdpo(parts, groups=(0, 0, 0), **weights):
    inputs = AdvantageInputs(
        rewards=np.zeros(len(groups)),
        group_indices=np.asarray(groups),
        named_rewards=parts,
        reward_weights=weights,
    )
    return np.asarray(compute_advantages(inputs, ADVANTAGES["gdpo"])).tolist()


def test_gdpo_weighs_the_parts_and_leaves_details_out():
    parts = {"right": [1.0, 0.0, 1.0], "speed": [0.0, 10.0, 5.0], "right.parsed": [0.0, 1.0, 1.0]}
    plain = gdpo(parts)
    assert plain == gdpo(parts, right=1.0, speed=1.0) != gdpo(parts, right=1.0, speed=0.5)
    grpo = compute_group_advantages([1.0, 0.0, 1.0], [0] * 3, "grpo")
    assert_allclose(gdpo(parts, right=1.0, speed=0.0), grpo, atol=1e-5)
    large = parts | {"speed": [0.0, 10_000.0, 5_000.0]}
    assert_allclose(gdpo(large), plain, atol=1e-5, err_msg="no reward is scaled out of sight")
    assert gdpo({"right": [1.0, 1.0]}, (0, 0)) == [0.0, 0.0]
    with pytest.raises(
        ValueError,
        match="reward_weights has 'sped' and there is no such named reward; there are right, speed",
    ):
        gdpo(parts, right=1.0, sped=2.0)


@cases("""
kind | fields | wrong
gpro | | grpo, centred, lite_ppo, rloo
grpo | group_indices = [0] | group_indices has shape (1,)
opo  | lengths = [1] | lengths has shape
grpo | std_epsilon = -1 | std_epsilon=-1; it must be 0 or above
lite_ppo | std_epsilon = -1 | std_epsilon=-1; it must be 0 or above
gdpo | | 'gdpo' needs named rewards
gdpo | named_rewards = { a = [1.0] } | named_rewards['a'] has shape
gdpo | named_rewards = { right = [0.0, nan] } | named_rewards['right'][1] is nan
raw  | rewards = [0.0, nan] | rewards[1] is nan
raw  | rewards = [0.0, inf] | rewards[1] is inf
raw  | trajectories = [0] | trajectories has shape (1,)
raw  | rewards = [1.0, 0.0], trajectories = [0, 0] | rewards[1] is 0.0, and 1.0 in another segment of its
raw  | group_indices = [7, 8], rewards = [1, 1], trajectories = [0, 0] | group_indices[1] is 8, and 7 in
raw  | named_rewards = { a = [2.0, 3.0] }, rewards = [1, 1], trajectories = [0, 0] | ['a'][1] is 3.0, and 2.0
opo  | | advantage 'opo' needs lengths
reinforce_pp | | advantage 'reinforce_pp' needs lengths
reinforce_pp_baseline | | advantage 'reinforce_pp_baseline' needs lengths
""")
def test_what_does_not_fit_is_named(kind, fields: dict, wrong):
    given_fields = {"rewards": [0.0, 1.0], "group_indices": [0, 0]} | fields
    with pytest.raises(ValueError, match=re.escape(wrong)):
        compute_group_advantages(kind=kind, **given_fields)


# --- trajectories of several segments -----------------------------------------------------------------------


# rewards [1, 1, 0] where rows 0 and 1 are one trajectory: the numbers of the rewards [1, 0]
@cases("""
kind      | expected | …
grpo      | 0.7071058 0.7071058 -0.7071058
centred   | 0.5 0.5 -0.5
rloo      | 1 1 -1
maxrl     | 1 1 -1
opo       | 0.4444444 0.4444444 -0.5555556 | lengths 2 + 3 and 4: baseline 5/9
pass_at_k | 1 1 0
reinforce_pp | 0.8432740 0.8432740 -1.0540926 | of tokens [1]·5 + [0]·4: mean 5/9, variance 5/18
reinforce_pp_baseline | 0.8432740 0.8432740 -1.0540926
gdpo      | 0.7071058 0.7071058 -0.7071058
remax     | 0.75 0.75 -0.25
raw       | 1 1 0
""")
def test_a_trajectory_counts_once_however_many_segments_it_has(kind, expected: list[float]):
    parts = {"right": [1.0, 1.0, 0.0]} if kind == "gdpo" else {"greedy_reward": [0.25] * 3}
    rows = {"lengths": [2, 3, 4], "named_rewards": parts}
    found = compute_group_advantages([1.0, 1.0, 0.0], [7, 7, 7], kind, trajectories=[5, 5, 2], **rows)
    assert_allclose(found, expected, rtol=2e-6)


# --- functions of one's own ---------------------------------------------------------------------------------


def inputs_of(rewards, **fields):
    return AdvantageInputs(
        rewards=np.asarray(rewards), group_indices=np.zeros(len(rewards), np.int64), **fields
    )


def test_samples_are_one_a_reward():
    with pytest.raises(ValueError, match="samples has 1 rows for 2 rewards"):
        inputs_of([0.0, 0.0], samples=[None])


def test_a_function_of_ones_own_answers_per_row_or_per_token():
    two = inputs_of([1.0, 2.0])
    rows = compute_advantages(two, lambda inputs: (inputs.rewards * 2).tolist())
    assert np.asarray(rows).tolist() == [2.0, 4.0]
    tokens = compute_advantages(two, lambda inputs, *, scale: [np.arange(3) * scale, np.ones(2)], scale=2.0)
    assert isinstance(tokens, tuple)
    assert [row.tolist() for row in tokens] == [[0.0, 2.0, 4.0], [1.0, 1.0]]
    masks = (np.array([False, True, True]), np.array([True, False]))
    assert [row.tolist() for row in broadcast_advantages(tokens, masks)] == [[0.0, 2.0, 4.0], [1.0, 0.0]]


@cases(r"""
answer            | wrong
[1.0]             | answered with 1 advantages for 2 rows
null              | answered with NoneType for 2 rows
1.0               | answered with float64 for 2 rows
[1.0, NaN]        | answered for row 1 with nan
[1.0, 1e39]       | answered for row 1 with 1e\+39; an advantage is one finite number \(float32\)
[[1, 1], [Infinity]] | answered for row 1 with shape \(1,\)
[[[1]], [[1]]]    | answered for row 0 with shape \(1, 1\)
""")
def test_what_is_no_advantage_is_refused_by_the_name_of_the_function(answer: Any, wrong):
    def my_own(inputs):
        return np.float64(answer) if answer == 1.0 else answer

    with pytest.raises(ValueError, match=f"my_own {wrong}"):
        compute_advantages(inputs_of([1.0, 2.0]), my_own)


def test_parameters_that_a_function_takes_pass():
    check_advantage_params("grpo", ADVANTAGES["grpo"], {"std_epsilon": 1e-4})
    check_advantage_params("m:f", lambda inputs, **params: inputs.rewards, {"anything": 1})


@cases("""
kind | name    | there_is
grpo | std_eps | did you mean 'std_epsilon'
raw  | k       | it takes none
grpo | rewards | it takes std_epsilon, leave
""")
def test_a_parameter_that_the_function_does_not_take_is_named_with_the_nearest(kind, name, there_is):
    with pytest.raises(ConfigError, match=f"'{kind}' has no parameter '{name}'; {there_is}"):
        check_advantage_params(kind, ADVANTAGES[kind], {name: 1})


def test_lite_ppo_without_an_epsilon_gives_0_to_a_batch_of_equal_rewards():
    assert compute_group_advantages([0.5] * 4, [7, 7, 8, 8], "lite_ppo", std_epsilon=0).tolist() == [0.0] * 4


# --- self-play ----------------------------------------------------------------------------------------------


def test_each_role_is_measured_against_its_own_running_mean():
    # decay .9: first mover .5, then .9·.5 + .1·1 = .55; the other role is new and starts at 0, then .1·(−1) =
    # −.1
    result = compute_role_advantages(
        [1.0, -1.0, 1.0, 0.0], ["first", "second", "first", "second"], {"first": 0.5}, decay=0.9
    )
    assert_allclose(result.advantages, [0.5, -1.0, 0.45, 0.1], rtol=1e-6)
    assert result.baselines == pytest.approx({"first": 0.55 * 0.9 + 0.1, "second": -0.09})


# --- a critic -----------------------------------------------------------------------------------------------


ALL = np.ones(3, bool)
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
        assert_allclose(found.advantages[row], expected, rtol=1e-5, atol=1e-6)
        returns = np.where(masks[row], expected + values[row], 0.0)
        assert_allclose(found.returns[row], returns, rtol=1e-5, atol=1e-6)


def test_a_truncated_row_may_go_on_with_what_the_critic_expected_of_it():
    """δ = (.6 − .5, .7 − .6, 1 + .7 − .7) and (…, 1 − .7); the advantages are their sums to the end."""
    statuses = Status.TRUNCATED, Status.COMPLETED
    inputs = inputs_of(
        [1.0, 1.0], values=floats(VALUES) * 2, loss_masks=(ALL,) * 2, token_rewards=floats([0, 0, 1]) * 2,
        samples=tuple(Sample(id=status, prompt="p", status=status) for status in statuses),
    )  # fmt: skip
    found = ADVANTAGES["gae"](inputs, bootstrap_truncated=True, lam=1.0, whiten=False)
    assert_allclose(found.advantages, [[1.2, 1.1, 1.0], [0.5, 0.4, 0.3]], rtol=1e-5)
    assert_allclose(found.returns, [[1.7] * 3, [1.0] * 3], rtol=1e-5)


def test_whitened_advantages_have_mean_zero_and_variance_one_over_trained_tokens():
    """1, 2 and 6: mean 3, variance 7 with n − 1."""
    masks = [np.array([True, False, True]), np.array([False]), np.array([True])]
    found = np.concatenate(whiten_advantages([[1.0, NAN, 2.0], [INF], [6.0]], masks))
    assert_allclose(found, np.array([-2, 0, -1, 0, 3]) / 7**0.5, rtol=1e-6)
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
    assert compute_explained_variance([values[:3], values[3:]], returns, masks) == pytest.approx(expected)
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
    for row, wanted in zip(tokens, [[0.0, -0.2, 1.15], [0.0], [3.05, 0.0]], strict=True):
        assert_allclose(row, wanted, rtol=1e-5, atol=1e-7)
    rewards, _ = subtract_kl([1.0, 2.0, 3.0], LOG_PROBS, REFERENCES, MASKS, 0.5)
    assert_allclose([row.sum() for row in tokens][::2], rewards[::2], rtol=1e-6)


@cases("function", [subtract_kl, compute_token_rewards])
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


def with_critic(rewards, values):
    """One row of at most three tokens, which all train."""
    rows = {"token_rewards": floats(rewards), "values": floats(values)}
    return inputs_of(rewards[-1:], loss_masks=(ALL[: len(rewards)],), **rows)


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
    assert_allclose(found.advantages[0], advantages, rtol=1e-4)
    assert_allclose(found.returns[0], returns, rtol=1e-6)


def test_a_function_of_ones_own_may_answer_as_gae_does_and_is_checked():
    inputs = with_critic([0.0, 1.0], [0.5, 0.5])
    found = compute_advantages(inputs, lambda given: GAEResult(given.values, given.token_rewards))
    assert isinstance(found, GAEResult)
    assert [row.tolist() for row in (*found.advantages, *found.returns)] == [[0.5, 0.5], [0.0, 1.0]]
    with pytest.raises(ValueError, match="returns: answered for row 0"):
        compute_advantages(inputs, lambda given: GAEResult(given.values, floats([NAN, 1.0])))
    with pytest.raises(ValueError, match="GAEResult of numbers"):
        compute_advantages(inputs, lambda given: GAEResult(given.values, (1.0,)))
