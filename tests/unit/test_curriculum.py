"""Curricula: weights as a function of the step and of what was seen, checked, and the same when resumed."""

import json
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from rollouts.data.curriculum import (
    SourceStatistics,
    call_curriculum,
    decode_statistics,
    encode_statistics,
    favour_medium,
    linear_shift,
    update_statistics,
)
from rollouts.errors import UserFunctionError
from rollouts.types import Sample
from tests.support.text_tables import cases


def sample(source: str, reward: float) -> Sample:
    return Sample(id=f"{source}-{reward}", prompt="p", reward=reward, metadata={"source": source})


def test_statistics_count_samples_and_rewards_of_every_source():
    samples = [sample("a", reward) for reward in (1.0, 0.0, 0.5)]
    samples.append(replace(samples[-1], id="a-0.5.1"))  # another segment of the same trajectory
    first = update_statistics(
        dict.fromkeys("ab", SourceStatistics()), samples, step=1, drawn={"a": 2, "b": 1}
    )
    # drawn, batches, samples, sum of rewards, reward of the last batch, its step
    assert first == {"a": SourceStatistics(2, 1, 3, 1.5, 0.5, 1), "b": SourceStatistics(drawn=1)}
    second = update_statistics(first, [sample("b", 1.0), sample("a", 1.0)], step=2, drawn={"a": 3, "b": 2})
    assert second["a"] == SourceStatistics(3, 2, 4, 2.5, 1.0, 2)
    assert (second["a"].mean_reward, second["b"].mean_reward, first["b"].mean_reward) == (0.625, 1.0, None)


@cases("""
weights
[1, 2]
{"easy": 1.0, "herd": 1.0}
{"easy": 1.0, "hard": 1.0, "more": 1.0}
{"easy": -0.5, "hard": 1}
{"easy": NaN, "hard": 1}
{"easy": Infinity, "hard": 1}
{"easy": true, "hard": 1}
{"easy": "1", "hard": 1}
{"easy": 0, "hard": 0.0}
""")
def test_weights_that_break_a_rule_name_function_step_and_value(weights: Any):
    with pytest.raises(UserFunctionError) as caught:
        call_curriculum(
            lambda *_: weights,
            7,
            dict.fromkeys(["easy", "hard"], SourceStatistics()),
            function="mine.py:plan",
        )
    assert str(caught.value).startswith(f"curriculum mine.py:plan in step 7 gave {weights!r}; it must give")


@pytest.mark.parametrize("weights", [{"easy": Fraction(10**400)}, SystemExit()], ids=["huge", "exits"])
def test_a_curriculum_that_cannot_be_read_or_exits_has_failed(weights):
    def plan(*_):
        if isinstance(weights, BaseException):
            raise weights
        return weights

    with pytest.raises(UserFunctionError, match=r"plan in step 1 raised (SystemExit|OverflowError)"):
        call_curriculum(plan, 1, {"easy": SourceStatistics()}, function="plan")


def test_the_only_source_may_have_another_name_after_a_resume():
    saved = encode_statistics({"source-0": SourceStatistics(drawn=3, batches=1, samples=2, reward_sum=0.3)})
    assert decode_statistics(json.loads(json.dumps(saved)), ["easy"])["easy"].mean_reward == 0.3 / 2


# --- ready ones ---------------------------------------------------------------------------------------------


def test_a_linear_shift_goes_straight_from_one_weighting_to_the_other():
    shift = linear_shift({"easy": 3, "hard": 1}, {"easy": 0, "hard": 5}, first_step=10, last_step=30)
    by_step = {step: shift(step, {}) for step in (1, 10, 15, 20, 30, 99)}
    assert by_step[1] == by_step[10] == {"easy": 0.75, "hard": 0.25}
    assert by_step[15] == {"easy": 0.5625, "hard": 0.4375}
    assert by_step[20] == {"easy": 0.375, "hard": 0.625}
    assert by_step[30] == by_step[99] == {"easy": 0.0, "hard": 1.0}


def test_medium_rewards_are_favoured_and_nothing_is_dropped():
    def seen(reward):
        return SourceStatistics(last_batch_reward=reward)

    rewards = {"hopeless": 0.0, "hard": 0.25, "medium": 0.5, "solved": 1.0, "beyond": 1.5, "new": None}
    found = favour_medium(1, {name: seen(reward) for name, reward in rewards.items()})
    assert list(found.values()) == pytest.approx([0.1, 0.775, 1.0, 0.1, 0.1, 1.0])
    assert favour_medium(1, {"a": seen(0.0)}, low=-1.0, high=1.0) == {"a": 1.0}
    assert favour_medium(1, {"a": seen(1.0)}, floor=0.5) == {"a": 0.5}
