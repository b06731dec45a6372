"""The shipped tasks: their gold answers earn everything, wrong ones do not, and rows are the same wherever
they are made.
"""

import importlib
import json
import pkgutil
from types import ModuleType
from typing import Any

import pytest

import integration_training.tasks
from integration_training.tasks import arithmetic, countdown, summary_length
from rollouts.types import RewardResult, Sample, SampleGroup, Status
from tests.support.text_tables import read_cells

NAMES = sorted(module.name for module in pkgutil.iter_modules(integration_training.tasks.__path__))
TASKS = [importlib.import_module(f"integration_training.tasks.{name}") for name in NAMES]


@pytest.fixture(params=TASKS, ids=NAMES)
def task(request: pytest.FixtureRequest) -> ModuleType:
    return request.param


def find_reward(name: str) -> Any:
    module, _, function = name.partition(".")
    return getattr(TASKS[NAMES.index(module)], function)


def answer(row: dict, response: str) -> Sample:
    return Sample(id="s", prompt="p", response=response, metadata=row)


def group_of(*results: RewardResult) -> SampleGroup:
    samples = [
        Sample(id=f"s{index}", prompt="p", reward=one.reward, rewards=one.parts, status=Status.COMPLETED)
        for index, one in enumerate(results)
    ]
    return SampleGroup(0, "row-0", tuple(samples))


GOLD = """
arithmetic.exact_answer arithmetic.close_answer countdown.reaches_target json_extraction.extracts_fields
letter_counting.counts_right letter_words.share_of_letters sorting.in_order summary_length.fits
"""


@pytest.mark.parametrize("name", GOLD.split())
def test_gold_answers_earn_the_full_reward(name: str):
    task = TASKS[NAMES.index(name.partition(".")[0])]
    for row in [row for seed in range(3) for row in task.make_rows(size=150, seed=seed)]:
        gold = answer(row, row["answer"])
        assert find_reward(name)(gold).reward == 1.0, row
        if task.__name__.endswith("letter_counting"):
            assert row["word"].count(row["letter"]) == int(row["answer"])
        if task.__name__.endswith("json_extraction"):
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


TASK_ROWS = json.loads("""{
"letter_counting.counts_right": {"answer": "3", "word": "strawberry", "letter": "r"},
"json_extraction.extracts_fields": {"answer": "{\\"name\\": \\"Ada\\", \\"age\\": 30}"},
"sorting.in_order": {"answer": "1, 2, 3", "numbers": [3, 1, 2]},
"countdown.reaches_target": {"answer": "(3 + 5) * 2", "numbers": [5, 2, 3], "target": 16} }""")
# Of letters the last number counts; in_order gives half of the share of neighbours in order; of fields 0.2 is
# for an object and 0.8 for the share of right fields.
SCORES = """
letter_counting.counts_right | 1 | 3 ; 03
letter_counting.counts_right | 0.5 | 2, no: 3 ; It is 3.
letter_counting.counts_right | 0 | 3 or 4 ; three ; 13
json_extraction.extracts_fields | 1 | {"name": "Ada", "age": 30} ; {"name": "Ada", "age": "30"}
json_extraction.extracts_fields | 0.6 | {"name": "Ada", "age": 31} ; {"name": "Ada"}
json_extraction.extracts_fields | 0.6 | {"name": "Ada", "age": true}
json_extraction.extracts_fields | 0.7333333333 | {"name": "Ada", "age": 30, "city": "Oslo"}
json_extraction.extracts_fields | 0.2 | {}
json_extraction.extracts_fields | 0 | [1] ; Ada is 30
sorting.in_order | 1 | 1, 2, 3 ; [1,2,3]
sorting.in_order | 0.25 | 1, 3, 2
sorting.in_order | 0 | 3, 2, 1 ; 1, 2 ; 1, 2, 2, 3 ; 1 2 3
countdown.reaches_target | 1 | (3+5)*2
countdown.reaches_target | 0.1 | 3*5
countdown.reaches_target | 0 | 2*2*4 ; 3+5+ ; __import__('os') ; 3**2 ; 5/(3-3) ; True
"""


@pytest.mark.parametrize(("name", "expected", "texts"), read_cells(SCORES))
def test_answers_are_scored_as_the_page_says(name: str, expected: str, texts: str):
    reward = find_reward(name)
    for text in texts.split(" ; "):
        assert reward(answer(TASK_ROWS[name], text)).reward == pytest.approx(float(expected)), text


def test_countdown_refuses_what_is_no_sum_of_the_numbers_and_says_why():
    row = TASK_ROWS["countdown.reaches_target"]
    assert "which are not given" in (countdown.reaches_target(answer(row, "2*2*4")).note or "")
    assert countdown.reaches_target(answer(row, "(" * 5000)).reward == 0
    assert countdown.evaluate("1/3 + 1/6")[0] * 2 == 1


def test_a_summary_is_scored_by_coverage_and_length():
    row = {"answer": "", "target_words": 10, "facts": ["otter", "river", "coin", "child"]}
    fits = summary_length.fits(answer(row, "an otter and a coin"))  # 2 of 4 facts, 5 of 10 words
    assert fits == RewardResult(0.25, {"coverage": 0.5, "length": 0.5})


def test_preferences_are_win_rates_with_ties_as_half():
    row = {"answer": "", "target_words": 4, "facts": ["otter", "river", "coin", "child"]}
    samples = [
        answer(row, text)
        for text in ("otter river coin child", "otter river coin coin", "coin otter river river", "")
    ]
    assert [result.reward for result in summary_length.win_rates(samples)] == [1.0, 0.5, 0.5, 0.0]
    with pytest.raises(ValueError, match="at least two"):
        summary_length.win_rates(samples[:1])


def test_filters_drop_groups_without_a_difference(task):
    keep = next(value for name, value in vars(task).items() if name.startswith("keep_"))
    decision = keep(group_of(RewardResult(1.0), RewardResult(1.0)))
    assert not decision.keep and decision.reason and decision.detail


ARITHMETIC = """
" 12\\n"    | 1 | 1
"12"       | 1 | 1
"1"        | 0 | 1
"012"      | 0 | 1
"12."      | 0 | 0
""         | 0 | 0
"12 is it" | 0 | 0
"""


@pytest.mark.parametrize(("response", "exact", "well_formed"), read_cells(ARITHMETIC))
def test_arithmetic_takes_the_answer_and_nothing_else(response: str, exact: str, well_formed: str):
    parts = {"exact": float(exact), "well_formed": float(well_formed)}
    found = arithmetic.exact_answer(answer({"answer": 12}, json.loads(response)))
    assert found == RewardResult(float(exact), parts)


def test_a_row_without_an_answer_fails_loudly():
    with pytest.raises(KeyError, match="answer"):
        arithmetic.exact_answer(answer({}, "7"))
