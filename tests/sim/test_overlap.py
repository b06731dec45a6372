"""Generating, training and weight updates go on at once, in virtual time: a step takes as long as the slower
of the two.
"""

import math

import pytest

from tests.sim.overlap_simulator import OverlapSetting, run_overlap
from tests.support.text_tables import cases

GENERATE_S = 8.0  # of a batch on a full engine: 400 tokens of 0.02 s


def make_setting(ratio, max_staleness, **options):
    train_s = GENERATE_S / ratio
    times = {"hold_s": 0.01 * train_s, "export_s": 0.03 * train_s, "pause_s": 0.01 * train_s, **options}
    return OverlapSetting(max_staleness=max_staleness, train_s=train_s, steps=30, warm_up=12, **times)


@pytest.mark.slow
@cases("ratio: 0.5 1.0 2.0")
def test_a_step_takes_as_long_as_the_slower_of_generation_and_training(ratio: float):
    longest_s = 106.0  # of the lengths that this seed draws, asserted below
    staleness = math.ceil(longest_s / max(GENERATE_S, GENERATE_S / ratio)) + 1
    report = run_overlap(make_setting(ratio, staleness))
    assert report.longest_s <= longest_s
    assert report.step_s <= 1.05 * max(report.generate_limit_s, report.train_limit_s)
    assert report.lag_max <= staleness and report.stale == 0


def test_a_snapshot_that_takes_as_long_as_the_step_costs_nothing_where_staleness_allows():
    quick = make_setting(0.5, 16, export_s=0.0)
    slow = make_setting(0.5, 16, export_s=0.9 * quick.train_s)
    assert run_overlap(slow).step_s == pytest.approx(run_overlap(quick).step_s, rel=0.02)


def test_without_staleness_the_loop_waits_for_the_longest_response_and_then_trains():
    report = run_overlap(make_setting(1.0, 0))
    assert report.lag_max == 0 and report.mixed == 0
    assert report.step_s > 4 * max(report.generate_limit_s, report.train_limit_s)


@cases("staleness: 1 2 5")
def test_a_small_bound_is_kept_and_costs_time_instead_of_samples(staleness: int):
    report = run_overlap(make_setting(1.0, staleness))
    assert report.lag_max <= staleness
    assert report.stale == 0
    assert report.mixed > 0  # updates reach requests in flight
