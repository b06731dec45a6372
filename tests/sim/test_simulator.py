"""RL over fleets of servers that fail, in virtual time: nothing is lost, nobody serves weights that he has
not proven, and planted bugs are found.
"""

import logging
from collections import Counter
from typing import get_args

import pytest

from tests.sim.planted_bugs import PLANTED_BUGS
from tests.sim.schedule import draw_fleet_schedule
from tests.sim.simulator import BrokenInvariant, run_fleet_simulation
from tests.support.fault_plan import AnyFault
from tests.support.text_tables import cases

FIRST_SEEDS, SEEDS = 20, 120  # in every run of the tests, and with the slow ones; --sim-seeds takes more
FIRST_BLOCK, BLOCK = 20, 25  # seeds of one test
MOST_SEEDS_FOR_A_BUG = 200
FAULTS = {kind.__name__ for kind in get_args(AnyFault)}


@pytest.fixture(autouse=True)
def quiet(caplog):
    """Failures are the subject here; their warnings would only be kept for a report that nobody reads."""
    caplog.set_level(logging.CRITICAL, logger="rollouts")


def run_seeds(first_seed, count):
    """Runs the schedules of these seeds, each of which has all that a run must have, and looks at what they
    were together.
    """
    faults = Counter()
    totals = Counter()
    for seed in range(first_seed, first_seed + count):
        report = run_fleet_simulation(draw_fleet_schedule(seed))
        totals["completed"] += report.outcome == "completed"
        totals["undisturbed"] += report.outcome == "completed" and not set(report.interruptions) - {
            "stopped",
            "killed",
        }
        totals["resumed"] += bool(report.interruptions)
        totals["mixed samples"] += report.mixed_samples
        totals["replayed"] += report.replayed
        totals["released"] += report.released
        totals["saved in flight"] += report.saved_in_flight
        faults.update(report.faults)
    assert totals["completed"] >= 0.95 * count, totals
    assert totals["undisturbed"] >= 0.8 * count, (
        totals
    )  # no fault was so bad that a trainer had to be started again
    assert set(faults) == FAULTS  # else a kind of fault never struck: it would prove nothing
    assert totals["resumed"] > 0 and totals["mixed samples"] > 0 and totals["replayed"] > 0, totals
    assert totals["released"] > 0 and totals["saved in flight"] > 0, (
        totals
    )  # updates went on beside training, and generation beside both


@cases("first_seed", range(0, FIRST_SEEDS, FIRST_BLOCK))
def test_training_survives_whatever_goes_wrong_with_its_servers(first_seed):
    run_seeds(first_seed, FIRST_BLOCK)


@pytest.mark.slow
@cases("first_seed", range(FIRST_SEEDS, SEEDS, BLOCK))
def test_training_survives_many_schedules(first_seed):
    run_seeds(first_seed, BLOCK)


def test_the_run_of_a_given_seed_is_sound(sim_seed):
    print(run_fleet_simulation(draw_fleet_schedule(sim_seed)))


def test_a_seed_repeats_its_run():
    schedule = draw_fleet_schedule(3)
    assert run_fleet_simulation(schedule) == run_fleet_simulation(schedule)


def find_broken(seeds):
    """The first of the seeds whose run breaks an invariant."""
    for seed in seeds:
        try:
            run_fleet_simulation(draw_fleet_schedule(seed))
        except BrokenInvariant as broken:
            return seed, broken
    pytest.fail(f"not found in {len(seeds)} seeds")


@cases("plant", PLANTED_BUGS)
def test_a_planted_bug_is_found(plant, monkeypatch):
    plant(monkeypatch)
    seed, broken = find_broken(range(MOST_SEEDS_FOR_A_BUG))
    assert broken.invariant in PLANTED_BUGS[plant], broken
    assert broken.__notes__[0].startswith(f"pytest tests/sim --sim-seed {seed} ")
