"""The arithmetic task: a number and nothing else is right."""

from __future__ import annotations

import pytest

from integration_training.tasks.arithmetic import exact_answer, is_number, leading_characters
from rollouts.types import Sample


def answered(response: str, **metadata: object) -> Sample:
    return Sample(id="s", prompt="3 + 4 =", response=response, metadata=metadata)


@pytest.mark.parametrize(
    ("response", "answer", "exact", "well_formed"),
    [
        ("7", "7", 1, 1),
        (" 7\n", "7", 1, 1),
        ("7", 7, 1, 1),
        ("-12", "-12", 1, 1),
        ("8", "7", 0, 1),
        ("7.", "7", 0, 0),
        ("07", "7", 0, 1),
        ("3 + 4 = 7", "7", 0, 0),
        ("", "7", 0, 0),
        ("seven", "7", 0, 0),
    ],
)
def test_only_the_answer_itself_earns_the_reward(response, answer, exact, well_formed):
    result = exact_answer(answered(response, answer=answer))
    assert (result.reward, result.parts) == (exact, {"exact": exact, "well_formed": well_formed})


def test_a_row_without_answer_fails_loudly():
    for reward in (exact_answer, leading_characters):
        with pytest.raises(KeyError, match="answer"):
            reward(answered("7"))


@pytest.mark.parametrize(
    ("response", "share"),
    [
        ("12", 1),
        (" 12\n", 1),
        ("1", 1 / 2),
        ("123", 2 / 3),
        ("1x", 1 / 2),
        ("21", 0),
        ("", 0),
        ("12 is it", 2 / 8),
    ],
)
def test_a_good_start_earns_its_share(response, share):
    result = leading_characters(answered(response, answer="12"))
    assert result.reward == pytest.approx(share)
    assert result.parts == {"exact": float(share == 1)}


@pytest.mark.parametrize(
    ("text", "yes"),
    [("7", True), ("-7", True), ("+3.25", True), ("7.", False), ("1e3", False), ("", False), ("7 8", False)],
)
def test_a_number_is_digits_with_at_most_a_sign_and_a_point(text, yes):
    assert is_number(text) is yes
