"""Runs killed with SIGKILL at crash points and at random instants, and resumed. `make soak` does the same at
every point and ten times as often.
"""

import signal

import pytest

from rollouts.crash_points import POINTS
from tests.e2e.kill_jobs import BOTH, GAME, RL, RL_RANKS, SFT, STALE_GAME
from tests.support.kill_harness import (
    Cut,
    check_nothing_lost,
    check_rows_of_attempt,
    open_kill_harness,
)
from tests.support.text_tables import cases

pytestmark = pytest.mark.slow
ONE_OF_EACH_CLASS = (
    *("start.directory_made:1", "files.partial:1", "stage.complete:1", "rollout.after_reward:9"),
    *("train.before_optim_step:6", "sync.committed:3", "metrics.after_samples:7"),
    *("checkpoint.before_rename:3", "end.before_summary:1"),
)
RANDOM_INSTANTS = 20  # over SFT and RL


@pytest.fixture(scope="module")
def both(train, tmp_path_factory):
    with open_kill_harness(BOTH, tmp_path_factory.mktemp("both") / "work", server=train.server) as harness:
        yield harness


def test_one_point_of_each_class_is_tried():
    classes = {point.partition(".")[0] for point in POINTS}
    assert {point.partition(".")[0] for point in ONE_OF_EACH_CLASS} == classes - {
        "resume"
    }  # those need a run that was killed before


@cases("point", ONE_OF_EACH_CLASS)
def test_a_run_killed_at_a_crash_point_goes_on_exactly(both, point):
    outcome = both.kill(point.replace(":", "-"), [Cut(point)])
    assert outcome.kills == 1
    assert outcome.violations == ()


@cases("job", [GAME, STALE_GAME], ids=lambda job: job.name)
def test_a_run_killed_in_the_middle_of_trajectories_loses_none(job, train, tmp_path):
    """In its first turns, between turns of the second step, and while it plays on after that."""
    with open_kill_harness(job, tmp_path / "work", server=train.server) as harness:
        cuts = [Cut("rollout.turn:6"), Cut("rollout.turn:40"), Cut("rollout.turn:11", optional=True)]
        outcome = harness.kill("turns", cuts)
    assert outcome.violations == ()
    assert outcome.kills >= 2


def test_a_run_killed_while_it_resumes_goes_on_exactly(both):
    outcome = both.kill(
        "resume", [Cut("checkpoint.complete:3"), Cut("resume.restored:1"), Cut("resume.state_loaded:1")]
    )
    assert outcome.kills == 3
    assert outcome.violations == ()


def test_a_run_on_ranks_goes_on_exactly_after_one_and_then_the_other_was_killed(train, tmp_path):
    """Rank 1 before the all-gather of step 3, in which rank 0 is; resumed after step 2, rank 0 while it saves
    step 4, which rank 1 does too.
    """
    with open_kill_harness(RL_RANKS, tmp_path / "work", server=train.server) as harness:
        outcome = harness.kill(
            "ranks", [Cut("train.before_agreement:3:1"), Cut("checkpoint.directory_made:1:0")]
        )
    assert outcome.violations == ()
    assert [attempt.ended.returncodes for attempt in outcome.attempts] == [
        (75, -signal.SIGKILL),
        (-signal.SIGKILL, 75),
        (0, 0),
    ]


@cases("job", [SFT, RL], ids=lambda job: job.name)
def test_runs_killed_at_random_instants_go_on_exactly(job, train, tmp_path):
    with open_kill_harness(job, tmp_path / "work", server=train.server) as harness:
        kills = 0
        for seed in range(RANDOM_INSTANTS // 2):
            outcome = harness.kill(f"seed-{seed}", harness.draw_cuts(seed))
            assert outcome.violations == (), (seed, outcome)
            kills += outcome.kills
    assert kills > 0


def test_a_step_that_is_lost_is_noticed(both, tmp_path):
    """The harness itself: a run whose newest checkpoint vanishes between two attempts breaks a promise."""
    assert check_nothing_lost({"sft": 3}, {"sft": 2}) == ["sft: step 3 was complete, and now 2 is"]
    assert check_nothing_lost({"sft": 3}, {"sft": 3, "rl": 1}) == []
    assert check_rows_of_attempt(both.reference, {}, 0.0) == []
    assert check_rows_of_attempt(both.reference, {"sft": 2}, 0.0) == [
        "sft: an attempt that began after step 2 computed the steps [1, 2, 3]"
    ]
