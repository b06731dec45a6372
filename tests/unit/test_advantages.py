"""Group advantages against numbers worked by hand: rewards [1, 0, 0, .5] have mean .375 and sample std .478714."""

from __future__ import annotations

import statistics

import numpy as np
import pytest

from rollouts.advantages import ADVANTAGES, broadcast_advantages, compute_group_advantages, subtract_kl

REWARDS = [1.0, 0.0, 0.0, 0.5]
GOLDEN = {
    "grpo": [1.305579692, -0.783347815, -0.783347815, 0.261115938],
    "centred": [0.625, -0.375, -0.375, 0.125],
    "rloo": [0.833333333, -0.5, -0.5, 0.166666667],
}


def slow_advantages(rewards: list[float], groups: list[int], kind: str) -> list[float]:
    result = []
    for row, reward in enumerate(rewards):
        members = [rewards[other] for other in range(len(rewards)) if groups[other] == groups[row]]
        others = [rewards[other] for other in range(len(rewards)) if groups[other] == groups[row] and other != row]
        if len(set(members)) == 1:
            result.append(0.0)
        elif kind == "rloo":
            result.append(reward - statistics.fmean(others))
        else:
            scale = statistics.stdev(members) + 1e-6 if kind == "grpo" else 1.0
            result.append((reward - statistics.fmean(members)) / scale)
    return result


@pytest.mark.parametrize("kind", GOLDEN)
def test_one_group_matches_the_numbers_worked_by_hand(kind):
    advantages = compute_group_advantages(REWARDS, [7, 7, 7, 7], kind)
    assert advantages.dtype == np.float32
    np.testing.assert_allclose(advantages, GOLDEN[kind], rtol=1e-6)


@pytest.mark.parametrize("kind", GOLDEN)
def test_groups_do_not_see_each_other_in_any_row_order(kind):
    rng = np.random.default_rng(0)
    groups = rng.permutation(np.repeat([3, 11, 5], [4, 2, 6])).tolist()
    rewards = rng.normal(size=12).round(3).tolist()
    np.testing.assert_allclose(compute_group_advantages(rewards, groups, kind), slow_advantages(rewards, groups, kind), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", GOLDEN)
def test_a_lone_sample_and_a_group_of_equal_rewards_get_exactly_zero(kind):
    advantages = compute_group_advantages([5.0, 0.1, 0.1, 0.1], [0, 1, 1, 1], kind)
    assert advantages.tolist() == [0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("kind", GOLDEN)
def test_advantages_of_a_group_sum_to_zero(kind):
    assert abs(float(compute_group_advantages([3.0, -1.0, 0.25, 9.0], [0] * 4, kind).sum())) < 1e-6


def test_the_row_without_signal_from_the_others_still_gets_its_advantage():
    # leaving row 0 out, the std is 0; the group's own is .5
    np.testing.assert_allclose(compute_group_advantages([1, 0, 0, 0], [0] * 4, "grpo"), [1.5, -0.5, -0.5, -0.5], rtol=1e-5)


def test_a_failed_sample_that_left_the_batch_does_not_move_the_mean():
    np.testing.assert_allclose(compute_group_advantages([1.0, 3.0, 2.0], [0, 0, 0], "centred"), [-1.0, 1.0, 0.0])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_is_refused_and_named(bad):
    with pytest.raises(ValueError, match=r"rewards\[2\] is (nan|inf)"):
        compute_group_advantages([0.0, 1.0, bad], [0, 0, 1])


def test_unknown_kinds_and_wrong_lengths_are_refused():
    with pytest.raises(ValueError, match="grpo, centred, rloo"):
        compute_group_advantages([0.0], [0], "gae")
    with pytest.raises(ValueError, match=r"\(2,\) and group_indices \(1,\)"):
        compute_group_advantages([0.0, 1.0], [0])
    assert set(ADVANTAGES) == set(GOLDEN)


def test_an_empty_batch_gives_no_advantages():
    assert compute_group_advantages([], []).shape == (0,)


def test_broadcast_puts_the_row_value_on_trained_tokens_only():
    masks = (np.array([False, True, True]), np.array([False]), np.array([True]))
    rows = broadcast_advantages([0.5, 2.0, -1.0], masks)
    assert [row.tolist() for row in rows] == [[0.0, 0.5, 0.5], [0.0], [-1.0]]
    assert all(row.dtype == np.float32 for row in rows)
    with pytest.raises(ValueError, match="one per row"):
        broadcast_advantages([0.5], masks)


def test_kl_comes_off_the_reward_once_per_sample():
    # row 0: (-.7+1.1) + (-.9+.6) = .1; row 1 trains nothing; row 2: -1.6+1.5 = -.1
    log_probs = [np.float32([np.nan, -0.7, -0.9]), np.float32([np.nan]), np.float32([-1.6, np.inf])]
    references = [np.float32([np.nan, -1.1, -0.6]), np.float32([0.0]), np.float32([-1.5, 0.0])]
    masks = [np.array([False, True, True]), np.array([False]), np.array([True, False])]
    rewards, kl = subtract_kl([1.0, 2.0, 3.0], log_probs, references, masks, 0.5)
    np.testing.assert_allclose(kl, [0.1, 0.0, -0.1], atol=1e-6)
    np.testing.assert_allclose(rewards, [0.95, 2.0, 3.05], rtol=1e-6)
    assert rewards.dtype == kl.dtype == np.float32


def test_kl_refuses_rows_that_do_not_fit_and_log_probs_that_are_not_finite():
    row, mask = np.float32([-1.0, -2.0]), np.array([True, True])
    with pytest.raises(ValueError, match="row 0 has 2 log-probs, 1 reference"):
        subtract_kl([1.0], [row], [row[:1]], [mask], 0.1)
    with pytest.raises(ValueError, match=r"shape \(2,\) for 1 rows"):
        subtract_kl([1.0, 2.0], [row], [row], [mask], 0.1)
    with pytest.raises(ValueError, match=r"rewards\[0\] is nan"):
        subtract_kl([1.0], [np.float32([np.nan, 0.0])], [row], [mask], 0.1)
