"""The shipped tasks: their gold answers earn everything, wrong ones do not, and rows are the same wherever
they are made.
"""

import importlib
import json
import pkgutil
from typing import Any

import pytest

import integration_training.tasks
from integration_training.tasks import arithmetic
from rollouts.types import RewardResult, Sample, SampleGroup, Status
from tests.support.text_tables import cases

# multiply_agent has the rows of another
MODULES = {module.name for module in pkgutil.iter_modules(integration_training.tasks.__path__)}
NAMES = sorted(MODULES - {"multiply_agent"})
TASKS = [importlib.import_module(f"integration_training.tasks.{name}") for name in NAMES]


every_task = cases("task", TASKS, ids=NAMES)


def answer(row, response):
    return Sample(id="s", prompt="p", response=response, metadata=row)


@cases("name: arithmetic.exact_answer arithmetic.close_answer letter_words.share_of_letters")
def test_gold_answers_earn_the_full_reward(name):
    module, _, function = name.partition(".")
    task = TASKS[NAMES.index(module)]
    for seed in range(3):
        for row in task.make_rows(size=150, seed=seed):
            assert getattr(task, function)(answer(row, row["answer"])).reward == 1.0, row


@every_task
def test_row_i_depends_on_the_seed_and_i_alone(task):
    few, many = task.make_rows(size=5, seed=3), task.make_rows(size=20, seed=3)
    assert many[:5] == few
    assert task.make_rows(size=20, seed=4) != many
    assert all(isinstance(row["prompt"], str | list) and isinstance(row["answer"], str) for row in many)
    assert json.loads(json.dumps(many)) == many


@every_task
def test_filters_drop_groups_without_a_difference(task):
    keep = next(value for name, value in vars(task).items() if name.startswith("keep_"))
    samples = (Sample(id=name, prompt="p", reward=1.0, status=Status.COMPLETED) for name in "ab")
    decision = keep(SampleGroup(0, "row-0", tuple(samples)))
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
    found = arithmetic.exact_answer(answer({"answer": 12}, response))
    assert found == RewardResult(exact, {"exact": exact, "well_formed": well_formed})


def test_a_row_without_an_answer_fails_loudly():
    with pytest.raises(KeyError, match="answer"):
        arithmetic.exact_answer(answer({}, "7"))
