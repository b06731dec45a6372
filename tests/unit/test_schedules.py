"""Settings as functions of the step."""

import pytest

from rollouts.schedules import choose_at_step, interpolate_cosine, interpolate_linear
from tests.support.text_tables import cases, read_params

SPAN = read_params("first = 1.0, last = 0.2, begin = 12, end = 20")


def test_each_piece_holds_from_its_step_on_and_all_steps_have_one():
    schedule = {60: "dapo", 1: "grpo", 100: "gspo"}
    found = [choose_at_step(schedule, step) for step in (1, 59, 60, 99, 100)]
    assert found == ["grpo", "grpo", "dapo", "dapo", "gspo"]
    for wrong, step in (({}, 1), ({2: 1.0}, 2), ({1: 1.0}, 0)):
        with pytest.raises(ValueError, match=r"begins at|step=0"):
            choose_at_step(wrong, step)


@cases("""
step | linear | cosine      | …
1    | 1.0    | 1.0
12   | 1.0    | 1.0
14   | 0.8    | 0.882842712 | 0.2 + 0.8·(1 + √½)/2
16   | 0.6    | 0.6
99   | 0.2    | 0.2
""")
def test_interpolation_by_hand(step: int, linear: float, cosine: float):
    assert interpolate_linear(step, **SPAN) == pytest.approx(linear)
    assert interpolate_cosine(step, **SPAN) == pytest.approx(cosine)
    with pytest.raises(ValueError, match="1 <= begin < end"):
        interpolate_linear(step, **SPAN | {"end": 12})
