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
from integration_training.tasks import arithmetic
from rollouts.types import RewardResult, Sample, SampleGroup, Status
from tests.support.text_tables import cases

AGENT = "multiply_agent"  # has the rows of another
NAMES = sorted(
    {module.name for module in pkgutil.iter_modules(integration_training.tasks.__path__)} - {AGENT}
)
TASKS = [importlib.import_module(f"integration_training.tasks.{name}") for name in NAMES]


@pytest.fixture(params=TASKS, ids=NAMES)
def task(request) -> ModuleType:
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


@cases("name: arithmetic.exact_answer arithmetic.close_answer letter_words.share_of_letters")
def test_gold_answers_earn_the_full_reward(name):
    task = TASKS[NAMES.index(name.partition(".")[0])]
    for row in [row for seed in range(3) for row in task.make_rows(size=150, seed=seed)]:
        gold = answer(row, row["answer"])
        assert find_reward(name)(gold).reward == 1.0, row


def test_row_i_depends_on_the_seed_and_i_alone(task):
    few, many = task.make_rows(size=5, seed=3), task.make_rows(size=20, seed=3)
    assert many[:5] == few
    assert task.make_rows(size=20, seed=4) != many
    assert all(isinstance(row["prompt"], str | list) and isinstance(row["answer"], str) for row in many)
    assert json.loads(json.dumps(many)) == many


def test_filters_drop_groups_without_a_difference(task):
    keep = next(value for name, value in vars(task).items() if name.startswith("keep_"))
    decision = keep(group_of(RewardResult(1.0), RewardResult(1.0)))
    assert not decision.keep and decision.reason and decision.detail


@cases("""
response    | exact | well_formed
" 12\\n"    | 1 | 1
"12"       | 1 | 1
"1"        | 0 | 1
"012"      | 0 | 1
"12."      | 0 | 0
""         | 0 | 0
"12 is it" | 0 | 0
""")
def test_arithmetic_takes_the_answer_and_nothing_else(response: Any, exact: float, well_formed: float):
    parts = {"exact": exact, "well_formed": well_formed}
    found = arithmetic.exact_answer(answer({"answer": 12}, response))
    assert found == RewardResult(exact, parts)


def test_a_row_without_an_answer_fails_loudly():
    with pytest.raises(KeyError, match="answer"):
        arithmetic.exact_answer(answer({}, "7"))
