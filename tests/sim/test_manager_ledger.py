"""The rollout manager under random schedules of failures, cancellations and restarts, in virtual time. The
invariants are the simulator's.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from tests.sim.simulator import draw_schedule, run_simulation

SCHEDULES = 3000
CHUNK = 250


@pytest.mark.parametrize("first_seed", range(0, SCHEDULES, CHUNK))
def test_no_prompt_is_lost_or_used_twice_whatever_goes_wrong(first_seed: int):
    outcomes: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    for seed in range(first_seed, first_seed + CHUNK):
        report = run_simulation(draw_schedule(seed))
        outcomes.update(report.outcomes)
        totals.update(report.statistics)
        totals["snapshots"] += report.snapshots
        totals["mixed_samples"] += report.mixed_samples
    # a chunk in which something never happened would prove nothing about it
    assert set(outcomes) == {"delivered", "cancelled", "NotEnoughSamples", "UserFunctionError"}
    for name in (
        "trained",
        "held",
        "dropped/surplus",
        "dropped/aborted",
        "dropped/filter",
        "failed/reward_timeout",
        "snapshots",
        "mixed_samples",
    ):
        assert totals[name] > 0, name
    for name in (
        "failed/engine",
        "failed/infrastructure",
        "failed/data",
        "failed/generate",
        "failed/reward",
        "held/finished",
        "held/unfinished",
    ):
        assert totals[name] > 0, name


def test_the_batches_do_not_depend_on_who_finishes_first():
    different_ends = 0
    for seed in range(70):
        schedule = draw_schedule(seed, faults=False)
        if not schedule.in_rounds and schedule.max_staleness > 0:
            continue
        schedule = dataclasses.replace(schedule, latency_step_s=0.5)
        first = run_simulation(schedule)
        second = run_simulation(dataclasses.replace(schedule, latency_seed=schedule.seed + 1))
        assert first.sample_ids == second.sample_ids
        assert first.prompt_keys == second.prompt_keys
        assert first.statistics == second.statistics
        different_ends += first.virtual_s != second.virtual_s
    assert different_ends > 20
