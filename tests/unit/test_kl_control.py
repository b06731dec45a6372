"""The KL coefficient: fixed, or proportional control (Ziegler 2019) against numbers worked by hand."""

from __future__ import annotations

import math

import pytest

from rollouts.kl_control import compute_adaptive_kl_coef, keep_kl_coef, make_adaptive_kl_control


def test_the_fixed_coefficient_ignores_what_was_measured():
    assert keep_kl_coef(0.05, 100.0, 512) == 0.05


def test_proportional_control_matches_the_number_worked_by_hand():
    # error = .12/.1 - 1 = .2; .1 * (1 + .2 * 256/10000) = .100512
    assert compute_adaptive_kl_coef(0.1, 0.12, 256, target=0.1, horizon=10_000) == pytest.approx(0.100512, abs=1e-12)


@pytest.mark.parametrize(("kl", "expected"), [(100.0, 0.102), (0.0, 0.098), (-5.0, 0.098), (0.1, 0.1)])
def test_the_error_is_clipped_and_vanishes_at_the_target(kl, expected):
    # clip ±.2 times 1000/10000
    assert compute_adaptive_kl_coef(0.1, kl, 1000, target=0.1, horizon=10_000) == pytest.approx(expected)


@pytest.mark.parametrize("kl", [math.nan, math.inf])
def test_a_kl_that_is_not_finite_leaves_the_coefficient_alone(kl):
    assert compute_adaptive_kl_coef(0.1, kl, 256, target=0.1, horizon=10_000) == 0.1


def test_a_step_longer_than_the_horizon_never_turns_the_coefficient_negative():
    assert compute_adaptive_kl_coef(0.1, 0.0, 100, target=0.1, horizon=10) == 0.0


def test_the_controller_settles_where_kl_meets_its_target():
    control = make_adaptive_kl_control(target=2.0, horizon=1000)
    coef = 0.01
    for _ in range(2000):
        coef = control(coef, 1.0 / coef, 256)  # a policy whose KL falls as the coefficient rises
    assert coef == pytest.approx(0.5, rel=1e-3)


@pytest.mark.parametrize("settings", [{"target": 0.0, "horizon": 10}, {"target": 1.0, "horizon": 0}, {"target": 1.0, "horizon": 10, "limit": 0.0}])
def test_settings_that_are_not_positive_are_refused_when_made(settings):
    with pytest.raises(ValueError, match="must be above 0"):
        make_adaptive_kl_control(**settings)
