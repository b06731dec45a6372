"""Crashes of the rollout manager at any task step, and what starts again from the last committed checkpoint.
The invariants are the simulator's.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.sim.crash_simulator import draw_crash_schedule, draw_crashes, run_with_crashes
from tests.sim.simulator import Schedule

CRASHES = 1000
CHUNKS = 4
RUNS_PER_SCHEDULE = 4


def is_repeatable(schedule: Schedule) -> bool:
    """Whether batches depend on ids alone: decided in launch order."""
    return (schedule.in_rounds or schedule.max_staleness == 0) and schedule.abort_every_s == float("inf")


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_after_a_crash_at_any_step_no_prompt_trains_twice_or_is_skipped(chunk: int):
    crashes = lost_steps = compared = 0
    seed = chunk * 10_000
    while crashes < CRASHES // CHUNKS:
        draw, schedule = random.Random(f"crashes/{seed}"), draw_crash_schedule(seed, steps=3)
        options: dict[str, Any] = {
            "checkpoint_every": draw.choice([1, 1, 2]),
            "save_s": draw.choice([0.0, 0.5, 3.0]),
        }
        unbroken = run_with_crashes(schedule, [], **options)
        for _ in range(RUNS_PER_SCHEDULE):
            broken = run_with_crashes(schedule, draw_crashes(draw, unbroken.task_steps), **options)
            crashes, lost_steps = crashes + broken.crashes, lost_steps + broken.lost_steps
            if is_repeatable(schedule):
                assert (broken.trained, broken.sample_ids) == (unbroken.trained, unbroken.sample_ids), (
                    f"seed {seed}"
                )
                compared += 1
        seed += 1
    assert lost_steps > 20  # else no crash cost anything, and nothing had to come again
    assert compared > 20


def skip_a_prompt(buffer: Any, manager: Any) -> None:
    buffer["cursor"] += 1


def repeat_a_prompt(buffer: Any, manager: Any) -> None:
    buffer["cursor"] -= 1


def forget_what_was_returned(buffer: Any, manager: Any) -> None:
    buffer["returned"] = []


def forget_what_is_held(buffer: Any, manager: Any) -> None:
    manager["held"] = manager["unfinished"] = []


def repeat_attempts(buffer: Any, manager: Any) -> None:
    manager["next_group_index"] -= 1


@pytest.mark.parametrize(
    "tamper", [skip_a_prompt, repeat_a_prompt, forget_what_was_returned, forget_what_is_held, repeat_attempts]
)
def test_a_resume_that_loses_something_is_noticed(tamper: Any):
    def is_noticed(seed: int) -> bool:
        schedule = draw_crash_schedule(seed, steps=3)
        steps = run_with_crashes(schedule, []).task_steps
        try:
            run_with_crashes(
                schedule, [steps * 3 // 4], save_s=0.0, tamper=tamper
            )  # some steps are committed, and some are to come
        except (AssertionError, BaseExceptionGroup):
            return True
        return False

    assert any(is_noticed(seed) for seed in range(100))
