"""The KL coefficient: fixed, proportional (Ziegler 2019) or two-sided control, by hand."""

from __future__ import annotations

import math

import pytest

from rollouts.kl_control import (
    KL_CONTROLS,
    compute_adaptive_entropy_coef,
    compute_adaptive_kl_coef,
    compute_two_sided_kl_coef,
    exceeds_kl_limit,
    keep_kl_coef,
    make_adaptive_kl_control,
    make_two_sided_kl_control,
)


def test_the_fixed_coefficient_ignores_what_was_measured():
    assert keep_kl_coef(0.05, 100.0, 512) == 0.05


def test_proportional_control_matches_the_number_worked_by_hand():
    # error = .12/.1 - 1 = .2; .1 * (1 + .2 * 256/10000) = .100512
    assert compute_adaptive_kl_coef(0.1, 0.12, 256, target=0.1, horizon=10_000) == pytest.approx(
        0.100512, abs=1e-12
    )


@pytest.mark.parametrize(("kl", "expected"), [(100.0, 0.102), (0.0, 0.098), (-5.0, 0.098), (0.1, 0.1)])
def test_the_error_is_clipped_and_vanishes_at_the_target(kl, expected):
    # clip ±.2 times 1000/10000
    assert compute_adaptive_kl_coef(0.1, kl, 1000, target=0.1, horizon=10_000) == pytest.approx(expected)


@pytest.mark.parametrize("kl", [math.nan, math.inf])
def test_a_kl_that_is_not_finite_leaves_the_coefficient_alone(kl):
    assert compute_adaptive_kl_coef(0.1, kl, 256, target=0.1, horizon=10_000) == 0.1


@pytest.mark.parametrize(
    "settings",
    [
        {"target": 0.0, "horizon": 10},
        {"target": 1.0, "horizon": 0},
        {"target": 1.0, "horizon": 10, "limit": 0.0},
    ],
)
def test_settings_that_are_not_positive_are_refused_when_made(settings):
    with pytest.raises(ValueError, match="must be above 0"):
        make_adaptive_kl_control(**settings)


BAND = {"target": 2.0, "tolerance": 0.5, "factor": 2.0}


@pytest.mark.parametrize(
    ("kl", "expected"),
    [(2.51, 0.2), (2.5, 0.1), (2.0, 0.1), (1.5, 0.1), (1.49, 0.05), (-3.0, 0.05), (1e9, 0.2)],
)
def test_two_sided_control_moves_by_its_factor_outside_the_band_only(kl, expected):
    assert compute_two_sided_kl_coef(0.1, kl, **BAND) == pytest.approx(expected)


def test_two_sided_control_stays_within_its_bounds_and_ignores_what_is_not_finite():
    assert compute_two_sided_kl_coef(0.1, 9.0, **BAND, highest=0.15) == 0.15
    assert compute_two_sided_kl_coef(0.1, 0.0, **BAND, lowest=0.08) == 0.08
    assert compute_two_sided_kl_coef(0.0, 9.0, **BAND) == 0.0
    assert compute_two_sided_kl_coef(0.0, 9.0, **BAND, lowest=0.01) == 0.01
    assert compute_two_sided_kl_coef(0.1, math.nan, **BAND, highest=0.05) == 0.1


@pytest.mark.parametrize(
    "wrong",
    [
        {"target": 0.0},
        {"tolerance": -0.1},
        {"factor": 1.0},
        {"lowest": 0.2, "highest": 0.1},
        {"lowest": -0.1},
    ],
)
def test_two_sided_settings_that_make_no_sense_are_refused_when_made(wrong):
    with pytest.raises(ValueError, match="the rule is"):
        make_two_sided_kl_control(**(BAND | wrong))


def test_controllers_are_made_by_name():
    controls = {"fixed": {}, "proportional": {"target": 2.0, "horizon": 1000}, "two_sided": BAND}
    assert set(controls) == set(KL_CONTROLS)
    coefs = {name: KL_CONTROLS[name](**params)(0.1, 4.0, 100) for name, params in controls.items()}
    assert coefs == pytest.approx({"fixed": 0.1, "proportional": 0.1 * (1 + 0.2 * 0.1), "two_sided": 0.2})


@pytest.mark.parametrize(
    ("kl", "ends"), [(0.0, False), (0.015, False), (0.0150001, True), (math.nan, True), (math.inf, True)]
)
def test_updates_on_a_batch_end_beyond_the_limit(kl, ends):
    assert exceeds_kl_limit(kl, limit=0.015) is ends


def test_the_entropy_coefficient_follows_its_target_within_bounds():
    coefs = [0.01]
    for entropy in (0.1, 0.1, 0.3, 0.3, math.nan, 0.3, 0.3, 0.3):
        coefs.append(compute_adaptive_entropy_coef(coefs[-1], entropy, target=0.2, step=0.005, highest=0.018))
    assert coefs == pytest.approx([0.01, 0.015, 0.018, 0.013, 0.008, 0.008, 0.003, 0.0, 0.0])
    with pytest.raises(ValueError, match="the rule is step >= 0 and lowest <= highest"):
        compute_adaptive_entropy_coef(0.1, 0.1, target=0.2, lowest=1.0, highest=0.5)
