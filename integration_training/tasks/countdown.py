"""Countdown: reach a target number with the given numbers, each used at most once, and + - * /.

[rl.data]
kind = "python"
function = "integration_training.tasks.countdown:make_rows"
params = { count = 3, largest = 20 }
size = 2000
seed = 1

[rl.rollout]
reward = "integration_training.tasks.countdown:reaches_target"
filters = ["integration_training.tasks.countdown:keep_mixed"]
"""

import ast
import operator
import random
from collections import Counter
from collections.abc import Callable
from fractions import Fraction

from integration_training.tasks import Row, keep_mixed, make_task
from rollouts.types import RewardResult, Sample

__all__ = ["keep_mixed"]  # the filter of this task

OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
LONGEST_EXPRESSION = 200  # characters; no answer needs more, and a parser given more may be kept busy
WELL_FORMED_REWARD = 0.1


def _make_row(draw: random.Random, *, count: int = 3, largest: int = 20) -> Row:
    """A solvable puzzle of `count` numbers from 1 to `largest`; `answer` is one solution."""
    while True:
        numbers = [draw.randint(1, largest) for _ in range(count)]
        expression = str(numbers[0])
        for number in numbers[1:]:
            expression = f"({expression} {draw.choice('+-*/')} {number})"
        value, _ = evaluate(expression)
        if value.denominator == 1 and 0 < value <= 1000 and value not in numbers:
            break
    shown = draw.sample(numbers, len(numbers))
    given = ", ".join(map(str, shown))
    prompt = (
        f"Use the numbers {given}, each at most once, with + - * / and brackets to make {value}. Answer with"
        " the expression only."
    )
    return {"prompt": prompt, "answer": expression[1:-1], "numbers": shown, "target": int(value)}


make_rows = make_task("countdown", _make_row)


def reaches_target(sample: Sample) -> RewardResult:
    """1 if the response is an expression over the given numbers that equals the target; 0.1 if it is one that
    equals something else; or 0.

    Parts: `solved` and `well_formed`. A division by zero is not well formed.
    """
    numbers, target = sample.metadata["numbers"], sample.metadata["target"]
    try:
        value, used = evaluate(sample.response)
        if extra := Counter(used) - Counter(numbers):
            raise ValueError(f"uses {sorted(extra.elements())}, which are not given so often")
    except (ValueError, ZeroDivisionError) as error:
        return RewardResult(0.0, {"solved": 0.0, "well_formed": 0.0}, note=str(error))
    solved = float(value == target)
    parts = {"solved": solved, "well_formed": 1.0}
    return RewardResult(max(solved, WELL_FORMED_REWARD), parts, note=f"= {value}")


def evaluate(expression: str) -> tuple[Fraction, list[int]]:
    """The exact value and the numbers used. The text is parsed, never executed. Raises ValueError for
    anything but + - * / and whole numbers.
    """
    if len(expression) > LONGEST_EXPRESSION:
        raise ValueError(f"longer than {LONGEST_EXPRESSION} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError("not an expression") from error
    used: list[int] = []
    return _value_of(tree, used), used


def _value_of(node: ast.expr, used: list[int]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left = _value_of(node.left, used)
        return OPERATORS[type(node.op)](left, _value_of(node.right, used))
    raise ValueError(f"{type(node).__name__} is not allowed: only whole numbers, + - * / and brackets")
