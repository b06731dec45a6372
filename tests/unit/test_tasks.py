"""The shipped tasks: their gold answers earn everything, wrong ones do not, and rows are the same wherever
they are made.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
from types import ModuleType

import pytest

import integration_training.tasks
from integration_training.tasks import (
    arithmetic,
    countdown,
    json_extraction,
    letter_counting,
    letter_words,
    sorting,
    summary_length,
)
from rollouts.config.plugins import load_function
from rollouts.types import RewardResult, Sample, SampleGroup, Status

NAMES = sorted(module.name for module in pkgutil.iter_modules(integration_training.tasks.__path__))
TASKS = [importlib.import_module(f"integration_training.tasks.{name}") for name in NAMES]
REWARDS = {
    arithmetic: [arithmetic.exact_answer, arithmetic.close_answer],
    countdown: [countdown.reaches_target],
    json_extraction: [json_extraction.extracts_fields],
    letter_counting: [letter_counting.counts_right],
    letter_words: [letter_words.share_of_letters],
    sorting: [sorting.in_order],
    summary_length: [summary_length.fits],
}


@pytest.fixture(params=TASKS, ids=NAMES)
def task(request: pytest.FixtureRequest) -> ModuleType:
    return request.param


def answer(row: dict, response: str) -> Sample:
    return Sample(
        id="s",
        prompt=row["prompt"],
        response=response,
        metadata={key: value for key, value in row.items() if key != "prompt"},
    )


def group_of(row: dict, results: list[RewardResult]) -> SampleGroup:
    samples = [
        Sample(
            id=f"s{index}",
            prompt=row["prompt"],
            reward=result.reward,
            rewards=result.parts,
            status=Status.COMPLETED,
        )
        for index, result in enumerate(results)
    ]
    return SampleGroup(0, "row-0", tuple(samples))


def test_the_shipped_tasks():
    made = "arithmetic countdown json_extraction letter_counting letter_words sorting summary_length"
    assert made.split() == NAMES


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_gold_answers_earn_the_full_reward(task, seed):
    for row in task.make_rows(size=150, seed=seed):
        gold = answer(row, row["answer"])
        for reward in REWARDS[task]:
            assert reward(gold).reward == 1.0, row
        if task is letter_counting:
            assert sum(character == row["letter"] for character in row["word"]) == int(row["answer"])
        if task is json_extraction:
            assert all(str(value) in row["prompt"] for value in json.loads(row["answer"]).values())
        if task is summary_length:
            results = summary_length.win_rates([gold, answer(row, "")])
            assert [result.reward for result in results] == [1.0, 0.0]


def test_row_i_depends_on_the_seed_and_i_alone(task):
    few, many = task.make_rows(size=5, seed=3), task.make_rows(size=20, seed=3)
    assert many[:5] == few
    assert task.make_rows(size=20, seed=4) != many
    assert all(isinstance(row["prompt"], str) and isinstance(row["answer"], str) for row in many)
    assert json.loads(json.dumps(many)) == many


def test_the_functions_that_a_page_names_exist_and_fit_their_role(task, tmp_path):
    page = task.__doc__ or ""
    for role, key in (
        ("rows", "function"),
        ("reward", "reward"),
        ("group_reward", "group_reward"),
        ("filter", "filters"),
    ):
        for line in page.splitlines():
            name, equals, value = line.strip().partition(" = ")
            if equals and name == key:
                load_function(value.strip('[]"'), role=role, base_dir=tmp_path)
    assert "integration_training.tasks" in page and "filters = " in page


def test_countdown_says_what_is_wrong_with_a_try():
    assert "which are not given" in (countdown.reaches_target(answer(SUM, "2*2*4")).note or "")
    assert countdown.evaluate("1/3 + 1/6")[0] * 2 == 1


def test_countdown_keeps_groups_that_are_partly_solved():
    row = countdown.make_rows(size=1, seed=0)[0]
    solved, tried = RewardResult(1.0, {"solved": 1.0}), RewardResult(0.1, {"solved": 0.0})
    assert countdown.keep_solvable(group_of(row, [solved, tried])).keep
    assert countdown.keep_solvable(group_of(row, [solved, solved])).reason == "all_or_none_solved"
    assert not countdown.keep_solvable(group_of(row, [tried, tried])).keep


COUNT = {"prompt": "How many r in strawberry?", "answer": "3", "word": "strawberry", "letter": "r"}
ADA = {"prompt": "p", "answer": '{"name": "Ada", "age": 30}'}
ORDER = {"prompt": "p", "answer": "1, 2, 3", "numbers": [3, 1, 2]}
SUM = {"prompt": "p", "answer": "(3 + 5) * 2", "numbers": [5, 2, 3], "target": 16}
SCORED = [
    (
        letter_counting.counts_right,  # takes the last number
        COUNT,
        {"3": 1, " 3\n": 1, "It is 3.": 0.5, "03": 1, "2, no: 3": 0.5, "3 or 4": 0, "three": 0, "": 0},
    ),
    (letter_counting.counts_right, {"prompt": "p", "answer": "0"}, {"0": 1, "10": 0}),
    (
        json_extraction.extracts_fields,
        ADA,
        {
            '{"name": "Ada", "age": 30}': 1,
            '{"name": "Ada", "age": "30"}': 1,
            '{"name": "Ada", "age": 31}': 0.2 + 0.8 / 2,
            '{"name": "Ada", "age": 30, "city": "Oslo"}': 0.2 + 0.8 * 2 / 3,
            '{"name": "Ada"}': 0.2 + 0.8 / 2,
            "{}": 0.2,
            "[1]": 0,
            "Ada is 30": 0,
            '{"name": "Ada", "age": true}': 0.2 + 0.8 / 2,
        },
    ),
    (
        sorting.in_order,  # half of the share of neighbours in order
        ORDER,
        {"1, 2, 3": 1, "[1,2,3]": 1, "1, 3, 2": 0.25, "3, 2, 1": 0, "1, 2": 0, "1, 2, 2, 3": 0, "1 2 3": 0},
    ),
    (
        countdown.reaches_target,
        SUM,
        {
            "(3+5)*2": 1,
            "3*5": 0.1,
            "2*2*4": 0,
            "3+5+": 0,
            "__import__('os')": 0,
            "3**2": 0,
            "5/(3-3)": 0,
            "True": 0,
            "(" * 5000: 0,
        },
    ),
]


@pytest.mark.parametrize(("reward", "row", "expected"), SCORED)
def test_answers_are_scored_as_the_page_says(reward, row, expected):
    found = {text: reward(answer(row, text)).reward for text in expected}
    assert found == pytest.approx(expected)


def test_a_summary_is_scored_by_coverage_and_length():
    row = {"prompt": "p", "answer": "", "target_words": 10, "facts": ["otter", "river", "coin", "child"]}
    fits = summary_length.fits(answer(row, "an otter and a coin"))  # 2 of 4 facts, 5 of 10 words
    assert fits == RewardResult(0.25, {"coverage": 0.5, "length": 0.5})


def test_preferences_are_win_rates_with_ties_as_half():
    row = {"prompt": "p", "answer": "", "target_words": 4, "facts": ["otter", "river", "coin", "child"]}
    samples = [
        answer(row, text)
        for text in ("otter river coin child", "otter river coin coin", "coin otter river river", "")
    ]
    assert [result.reward for result in summary_length.win_rates(samples)] == [1.0, 0.5, 0.5, 0.0]
    with pytest.raises(ValueError, match="at least two"):
        summary_length.win_rates(samples[:1])


def test_filters_drop_groups_without_a_difference(task):
    row = task.make_rows(size=1, seed=0)[0]
    keep = next(value for name, value in vars(task).items() if name.startswith("keep_"))
    alike = RewardResult(1.0, {"solved": 1.0, "parsed": 1.0, "sorted": 1.0, "same_numbers": 1.0})
    decision = keep(group_of(row, [alike, alike]))
    assert not decision.keep and decision.reason and decision.detail


def test_arithmetic_takes_the_answer_and_nothing_else():
    for response, exact, well_formed in (
        *((" 12\n", 1, 1), ("12", 1, 1), ("1", 0, 1), ("012", 0, 1)),
        *(("12.", 0, 0), ("", 0, 0), ("12 is it", 0, 0)),
    ):
        found = arithmetic.exact_answer(answer({"prompt": "p", "answer": 12}, response))
        assert found == RewardResult(exact, {"exact": exact, "well_formed": well_formed}), response


def test_a_row_without_an_answer_fails_loudly():
    with pytest.raises(KeyError, match="answer"):
        arithmetic.exact_answer(answer({"prompt": "p"}, "7"))
