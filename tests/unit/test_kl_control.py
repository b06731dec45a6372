"""The KL coefficient: fixed, proportional (Ziegler 2019) or two-sided control, by hand."""

import math
import tomllib

import pytest

from rollouts.kl_control import KL_CONTROLS, compute_adaptive_entropy_coef, exceeds_kl_limit
from tests.support.text_tables import cases

USUAL = tomllib.loads("""
fixed = {}
proportional = { target = 0.1, horizon = 10_000 }
two_sided = { target = 2.0, tolerance = 0.5, factor = 2.0 }
""")


# from 0.1, after 1,000 samples; the first error is .2 · 1000/10000, and it is clipped at .2
@cases("""
name         | settings       | kl   | coefficient
fixed        |                | 100  | .1
proportional |                | .12  | .102
proportional |                | .11  | .101
proportional |                | 100  | .102
proportional |                | 0    | .098
proportional |                | nan  | .1
two_sided    |                | 2.51 | .2
two_sided    |                | 2.5  | .1
two_sided    |                | 1.5  | .1
two_sided    |                | 1.49 | .05
two_sided    | highest = 0.15 | 9    | .15
two_sided    | lowest = 0.08  | 0    | .08
two_sided    | highest = 0.05 | inf  | .1
""")
def test_controllers_by_hand(name, settings: dict, kl: float, coefficient: float):
    control = KL_CONTROLS[name](**USUAL[name] | settings)
    assert control(0.1, kl, 1000) == pytest.approx(coefficient, abs=1e-12)


# the target is 2, the band 1.5 to 2.5; what is below .5 counts as .5, what is above 8 as 8
@cases("""
before | kl  | coefficient | …
1      | 2   | .4
2      | 1.5 | .05625
1      | 3   | 1.8 | (3/1)^2, and above the band
0      | 2   | 1.6
0.1    | 0   | .05 | below the band
4      | 1e300 | .8 | (8/4)^2, and above the band
""")
def test_with_a_power_the_coefficient_follows_the_kl_at_once(before: float, kl: float, coefficient: float):
    control = KL_CONTROLS["two_sided"](**USUAL["two_sided"], power=2.0)
    assert control(0.1, kl, 1000, before) == pytest.approx(coefficient, abs=1e-12)


@cases("""
name         | settings
proportional | horizon = 0
proportional | limit = 0.0
two_sided    | factor = 1.0
two_sided    | power = -1.0
two_sided    | lowest = 0.2, highest = 0.1
""")
def test_settings_that_make_no_sense_are_refused_when_made(name, settings: dict):
    with pytest.raises(ValueError, match=r"must be above 0|the rule is"):
        KL_CONTROLS[name](**USUAL[name] | settings)


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
