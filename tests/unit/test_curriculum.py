"""Curricula: weights as a function of the step and of what was seen, checked, and the same when resumed.
DataBuffer: a seeded endless stream, prompts given back, exact resume.
"""

import json
import re
import sys
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from rollouts.data.curriculum import (
    SourceStatistics,
    call_curriculum,
    decode_statistics,
    favour_medium,
    linear_shift,
    update_statistics,
)
from rollouts.data.data_buffer import DataBuffer, PromptRow
from rollouts.errors import DataError, UserFunctionError
from rollouts.types import Sample
from tests.support.text_tables import cases
from tests.unit.manager_runs import ROWS


def sample(source, reward):
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
    sources = dict.fromkeys(["easy", "hard"], SourceStatistics())
    said = re.escape(f"curriculum mine.py:plan in step 7 gave {weights!r}; it must give")
    with pytest.raises(UserFunctionError, match=f"^{said}"):
        call_curriculum(lambda *_: weights, 7, sources, function="mine.py:plan")


@cases("raised: OverflowError SystemExit")
def test_a_curriculum_that_cannot_be_read_or_exits_has_failed(raised):
    def plan(*_):
        return {"easy": Fraction(10**400)} if raised == "OverflowError" else sys.exit()

    with pytest.raises(UserFunctionError, match=f"plan in step 1 raised {raised}"):
        call_curriculum(plan, 1, {"easy": SourceStatistics()}, function="plan")


def test_the_only_source_may_have_another_name_after_a_resume():
    saved = {"source-0": SourceStatistics(drawn=3, batches=1, samples=2, reward_sum=0.3)._asdict()}
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


# --- DataBuffer ---------------------------------------------------------------------------------------------


def test_the_order_is_the_one_that_older_runs_saw():
    # written down once: a change would make old checkpoints continue in another order
    order = [int(prompt.prompt_id[4:]) for prompt in DataBuffer(ROWS[:8], seed=7).get_prompts(8)]
    assert order == [0, 1, 3, 5, 7, 2, 4, 6]


def test_the_state_of_other_rows_is_refused_and_changes_nothing():
    rows = ROWS[:3]
    saved = DataBuffer(rows, seed=0)
    saved.get_prompts(1)
    reordered = [{"answer": row["answer"], "prompt": row["prompt"]} for row in rows]  # of keys alone
    DataBuffer(reordered, seed=5).load_state_dict(saved.state_dict())
    for others in (rows[::-1], [*rows[:2], rows[2] | {"answer": "other"}], [*rows, {"prompt": "more"}]):
        other = DataBuffer(others, seed=0)
        said = rf"{saved.fingerprint} \(3 rows\), this one is {other.fingerprint} \({len(others)} rows\)"
        with pytest.raises(DataError, match=said):
            other.load_state_dict(saved.state_dict())
        assert other.statistics()["drawn"] == 0


def test_only_prompts_that_are_out_can_be_returned():
    buffer = DataBuffer(ROWS[:3], seed=0)
    drawn = buffer.get_prompts(4)
    with pytest.raises(DataError, match="is not out"):
        buffer.return_prompts([drawn[0], drawn[0]])
    buffer.return_prompts([drawn[0]])
    undrawn = next(f"row-{index}" for index in range(3) if f"row-{index}" != drawn[3].prompt_id)
    others = PromptRow(undrawn, 1, {}), PromptRow("row-0", 2, {}), PromptRow("row-0", -1, {})
    for prompt in (drawn[0], *others):
        with pytest.raises(DataError, match="is not out"):
            buffer.return_prompts([prompt])
    assert buffer.statistics()["returned"] == 1


@cases("""
rows                                               | message
[]                                                 | has no rows
[{"prompt": "a"}, {"prompt": " "}]                 | row 1: prompt is empty
[{"prompt": "a"}, {"question": "b"}]               | row 1: neither `prompt` nor `messages`
[{"messages": [{"role": "user", "content": "a"}]}] | row 0: no `prompt`
[{"prompt": "a", "score": NaN}]                    | row 0: score is nan
""")
def test_rows_that_cannot_be_asked_are_refused_at_the_start(rows: Any, message):
    with pytest.raises(DataError, match=message):
        DataBuffer(rows, seed=0)
