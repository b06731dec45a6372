"""The KL coefficient: fixed, proportional (Ziegler 2019) or two-sided control, by hand."""

from __future__ import annotations

import math

import pytest

from rollouts.kl_control import KL_CONTROLS, compute_adaptive_entropy_coef, exceeds_kl_limit

PROPORTIONAL = {"target": 0.1, "horizon": 10_000}
BAND = {"target": 2.0, "tolerance": 0.5, "factor": 2.0}


@pytest.mark.parametrize(
    ("name", "settings", "kl", "coefficient"),
    [  # from 0.1, after 1,000 samples
        ("fixed", {}, 100.0, 0.1),
        ("proportional", PROPORTIONAL, 0.12, 0.102),  # error .2 · 1000/10000
        ("proportional", PROPORTIONAL, 0.11, 0.101),
        ("proportional", PROPORTIONAL, 100.0, 0.102),  # the error is clipped at .2
        ("proportional", PROPORTIONAL, 0.0, 0.098),
        ("proportional", PROPORTIONAL, math.nan, 0.1),
        ("two_sided", BAND, 2.51, 0.2),
        ("two_sided", BAND, 2.5, 0.1),
        ("two_sided", BAND, 1.5, 0.1),
        ("two_sided", BAND, 1.49, 0.05),
        ("two_sided", BAND | {"highest": 0.15}, 9.0, 0.15),
        ("two_sided", BAND | {"lowest": 0.08}, 0.0, 0.08),
        ("two_sided", BAND | {"highest": 0.05}, math.inf, 0.1),
    ],
)
def test_controllers_by_hand(name, settings, kl, coefficient):
    assert KL_CONTROLS[name](**settings)(0.1, kl, 1000) == pytest.approx(coefficient, abs=1e-12)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("proportional", PROPORTIONAL | {"horizon": 0}),
        ("proportional", PROPORTIONAL | {"limit": 0.0}),
        ("two_sided", BAND | {"factor": 1.0}),
        ("two_sided", BAND | {"lowest": 0.2, "highest": 0.1}),
    ],
)
def test_settings_that_make_no_sense_are_refused_when_made(name, settings):
    with pytest.raises(ValueError, match=r"must be above 0|the rule is"):
        KL_CONTROLS[name](**settings)


def test_updates_on_a_batch_end_beyond_the_limit():
    ends = {0.0: False, 0.015: False, 0.0150001: True, math.nan: True}
    assert {kl: exceeds_kl_limit(kl, limit=0.015) for kl in ends} == ends


def test_the_entropy_coefficient_follows_its_target_within_bounds():
    coefs = [0.01]
    for entropy in (0.1, 0.1, 0.3, math.nan, 0.3, 0.3, 0.3):
        coefs.append(compute_adaptive_entropy_coef(coefs[-1], entropy, target=0.2, step=0.005, highest=0.018))
    assert coefs == pytest.approx([0.01, 0.015, 0.018, 0.013, 0.013, 0.008, 0.003, 0.0])
    with pytest.raises(ValueError, match="the rule is"):
        compute_adaptive_entropy_coef(0.1, 0.1, target=0.2, lowest=1.0, highest=0.5)
