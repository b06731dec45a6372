"""Settings as functions of the step."""

from __future__ import annotations

import pytest

from rollouts.schedules import choose_at_step, interpolate_cosine, interpolate_linear

SPAN = {"first": 1.0, "last": 0.2, "begin": 11, "end": 21}


def test_each_piece_holds_from_its_step_on():
    schedule = {1: "grpo", 60: "dapo", 100: "gspo"}
    assert [choose_at_step(schedule, step) for step in (1, 59, 60, 99, 100, 5000)] == [
        "grpo",
        "grpo",
        "dapo",
        "dapo",
        "gspo",
        "gspo",
    ]
    assert choose_at_step({60: {"clip_high": 0.28}, 1: {"clip_high": 0.2}}, 59) == {"clip_high": 0.2}, (
        "the order of the entries does not matter"
    )
    assert choose_at_step({0: 5.0}, 1) == 5.0


@pytest.mark.parametrize(
    ("schedule", "step", "wrong"),
    [({}, 1, "begins at nothing"), ({2: 1.0}, 2, "begins at 2"), ({1: 1.0}, 0, "step=0")],
)
def test_a_schedule_must_cover_every_step(schedule, step, wrong):
    with pytest.raises(ValueError, match=wrong):
        choose_at_step(schedule, step)


@pytest.mark.parametrize(
    ("step", "linear", "cosine"),
    [(1, 1.0, 1.0), (11, 1.0, 1.0), (16, 0.6, 0.6), (21, 0.2, 0.2), (99, 0.2, 0.2)],
)
def test_interpolation_meets_its_ends_and_its_middle(step, linear, cosine):
    assert interpolate_linear(step, **SPAN) == pytest.approx(linear)
    assert interpolate_cosine(step, **SPAN) == pytest.approx(cosine)


def test_a_quarter_of_the_way_the_cosine_lies_above_the_line():
    span = SPAN | {"begin": 12, "end": 20}
    assert interpolate_linear(14, **span) == pytest.approx(0.8)
    assert interpolate_cosine(14, **span) == pytest.approx(0.2 + 0.8 * (1 + 2**-0.5) / 2)


@pytest.mark.parametrize("span", [{"begin": 0}, {"begin": 21}, {"end": 11}])
def test_a_span_of_no_steps_is_refused(span):
    for interpolate in (interpolate_linear, interpolate_cosine):
        with pytest.raises(ValueError, match="1 <= begin < end"):
            interpolate(5, **(SPAN | span))
