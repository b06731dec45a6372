"""The library of rewards: what each counts, by hand, and what it refuses."""

from __future__ import annotations

import builtins
import math
import threading
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest

from rollouts.errors import ConfigError, DataError, RewardTimeout, UserFunctionError
from rollouts.rewards.combine import apply_combine, apply_weights, combine_rewards
from rollouts.rewards.exact import exact_match
from rollouts.rewards.format import (
    json_format,
    make_extracted,
    make_format_reward,
    make_json_reward,
    make_tags_reward,
    think_answer_format,
)
from rollouts.rewards.fuzzy import f1_match, fuzzy_match
from rollouts.rewards.length import make_length_cutoff, make_length_target, make_soft_overlong_punishment
from rollouts.rewards.math import (
    find_final_number,
    make_math_reward,
    make_numeric_reward,
    math_match,
    numeric_match,
)
from rollouts.rewards.multiple_choice import find_choice, multiple_choice_match
from rollouts.types import RewardResult, Sample

THIRD = {"answer": 2, "choices": ["x", "y", "z"]}  # of three choices


def sample_of(response: str, *, num_tokens: int = 0, **metadata: Any) -> Sample:
    """A sample of two prompt tokens and `num_tokens` that train."""
    mask = [0, 0] + [1] * num_tokens
    return Sample(
        id="s",
        prompt="q",
        response=response,
        tokens=np.arange(len(mask)),
        loss_mask=np.array(mask, bool),
        metadata=metadata,
    )


# --- what each counts ---

relative, absolute = make_numeric_reward(relative=0.1), make_numeric_reward(absolute=0.5)
larger = make_numeric_reward(relative=0.1, absolute=0.5)
tags, some_tags = make_tags_reward(["plan", "code"]), make_tags_reward(["plan", "code"], partial=True)
extracted, words = make_extracted(exact_match), make_length_target(target=4, width=2)
digits, keys = make_format_reward(r"[0-9]+\.", weight=0.5), make_json_reward(["name", "age"])
first, only = (make_extracted(exact_match, pick=pick) for pick in ("first", "only"))


@pytest.mark.parametrize(
    ("reward", "response", "answer", "expected"),
    [
        (exact_match, " Paris\n", "Paris ", 1.0),
        (exact_match, "Paris.", "Paris", 0.0),
        (exact_match, "paris", "Paris", 0.0),
        (partial(exact_match, ignore_case=True), "paris", "Paris", 1.0),
        (exact_match, "12", 12, 1.0),
        (exact_match, "b", ["a", "b"], 1.0),
        (fuzzy_match, "kitten", "kitten", 1.0),
        (fuzzy_match, "abcd", "abxd", 0.75),  # one out, one in, of 8 characters: 1 - 2/8
        (fuzzy_match, "ab", "cd", 0.0),
        (fuzzy_match, " ab \n", "abc", 0.8),  # 1 - 1/5
        (fuzzy_match, "", "", 1.0),
        (fuzzy_match, "b", ["abc", "bc", "xyz"], 2 / 3),  # the nearest: 1 - 1/3
        (fuzzy_match, "12", 12, 1.0),
        (fuzzy_match, "AB", "ab", 0.0),
        (partial(fuzzy_match, ignore_case=True), "AB", "ab", 1.0),
        (f1_match, "The Eiffel Tower!", "eiffel tower", 1.0),
        (f1_match, "It's  An apple, THE pear.", "its apple pear", 1.0),
        (f1_match, "in the city of Paris", "Paris", 0.4),  # in city of paris: p 1/4, r 1: 2 * 1/4 / (5/4)
        (f1_match, "a b b c", "b b d", 2 * 2 / 6),  # "a" is an article; both b count
        (f1_match, "the", "a", 1.0),  # nothing is left of either
        (f1_match, "the", "Paris", 0.0),
        (f1_match, "cat", ["dog", "a cat"], 1.0),
        (f1_match, "theatre", "atre", 0.0),  # an article only as a word
        (numeric_match, "it is 0.50", "1/2", 1.0),
        (numeric_match, "0.333", "1/3", 0.0),
        (numeric_match, "no idea", 1, 0.0),
        (partial(numeric_match, tolerance=1e-3), "0.333", "1/3", 1.0),
        (partial(numeric_match, tolerance=1e-3), "1001", 1000, 1.0),  # relative above 1
        *((relative, text, 10, value) for text, value in (("9", 1), ("11", 1), ("11.01", 0), ("8.99", 0))),
        (relative, "0.001", 0, 0.0),  # nothing is near 0 relatively
        *((absolute, text, -10, value) for text, value in (("-10.5", 1), ("-9.5", 1), ("-9.4", 0))),
        *((larger, "1.5", 1, 1), (larger, "1.51", 1, 0), (larger, "110", 100, 1), (larger, "110.5", 100, 0)),
        (digits, "12.", "", 0.5),
        (digits, "12. Yes", "", 0.0),
        (make_format_reward("a.b"), "a\nb", "", 1.0),
        *((words, "w " * n, "", value) for n, value in ((1, 0), (2, 0), (3, 0.5), (4, 1), (5, 0.5), (9, 0))),
        (make_length_target(target=4, width=4, unit="characters"), "a b", "", 0.75),
        (make_length_cutoff(most=2, unit="words"), "a b c", "", 0.0),
        *((json_format, text, "", 1.0) for text in (' {"a": [1, null]}\n', "3")),
        *(
            (json_format, text, "", 0.0)
            for text in ("{'a': 1}", '{"a": 1} x', '{"a": NaN}', "", "[" * 100_000)
        ),
        (json_format, '{"a": 1, "a": 2}', "", 0.0),
        (keys, '{"name": 1, "age": null, "more": 2}', "", 1.0),
        (keys, '{"name": 1}', "", 0.0),
        (keys, '["name", "age"]', "", 0.0),
        (think_answer_format, "<think>\n1+1\n</think>\n<answer>2</answer>\n", "", 1.0),
        (think_answer_format, "<think></think><answer></answer>", "", 1.0),
        (think_answer_format, "<think>a</think><answer>2</answer> done", "", 0.0),
        (think_answer_format, "<think>a</think>b</think><answer>2</answer>", "", 0.0),
        (think_answer_format, "<answer>2</answer>", "", 0.0),
        (tags, "<plan>a</plan>\n<code>b\n</code>\n", "", 1.0),
        (tags, "<code>b</code><plan>a</plan>", "", 0.0),
        (tags, "x <plan>a</plan><code>b</code>", "", 0.0),
        (some_tags, "x <code>b</code><plan>a</plan>", "", 1.0),
        (some_tags, "<plan>a</plan><code>b", "", 0.75),
        (some_tags, "<plan>a<plan></plan><code>b</code>", "", 0.75),
        (some_tags, "nothing", "", 0.0),
        (extracted, "<answer> 2 </answer>", "2", 1.0),
        (extracted, "<answer>1</answer> <answer>2</answer>", "2", 1.0),
        (extracted, "2", "2", 0.0),
        (first, "<answer>1</answer><answer>2</answer>", "1", 1.0),
        (only, "<answer>2</answer><answer>2</answer>", "2", 0.0),
        (make_extracted(numeric_match, r"[0-9]+ apples"), "3 pears, 2 apples, 9 plums", 2, 1.0),
    ],
)
def test_what_a_reward_counts(reward: Any, response: str, answer: Any, expected: float):
    result = reward(sample_of(response, answer=answer))
    assert result.reward == pytest.approx(expected, abs=1e-12)
    named = {"exact", "similarity", "f1", "numeric", "format", "length"} & set(result.parts)
    assert [result.parts[name] for name in named] == [result.reward] or result.parts["extracted"] == 0.0


@pytest.mark.parametrize(
    ("reward", "response", "row", "parts", "note"),
    [
        (numeric_match, "x", {"answer": 1}, {"numeric": 0, "has_number": 0}, None),
        (keys, "[]", {}, {"format": 0, "json": 1}, "JSON without the keys name, age"),
        (only, "2", {}, {"extracted": 0}, "0 matches of <answer>((?:(?!</?answer>).)*)</answer>"),
        (multiple_choice_match, "The answer is C", THIRD, {"choice": 1, "chosen": 1}, None),
        (multiple_choice_match, "The answer is B", THIRD, {"choice": 0, "chosen": 1}, None),
        (multiple_choice_match, "answer: D", THIRD, {"choice": 0, "chosen": 0}, "no choice was found"),
        (multiple_choice_match, "(B)", {"answer": "(b)"}, {"choice": 1, "chosen": 1}, None),
        (
            *(multiple_choice_match, "The answer is A or B", THIRD, {"choice": 0, "chosen": 0}),
            "ambiguous: it chooses A and B at once",
        ),
        (
            *(multiple_choice_match, "A. x\nB. y", THIRD, {"choice": 0, "chosen": 0}),
            "ambiguous: lines begin with A, B",
        ),
    ],
)
def test_parts_and_notes_say_why(
    reward: Any, response: str, row: dict[str, Any], parts: dict[str, float], note: str | None
):
    assert reward(sample_of(response, **row)) == RewardResult(next(iter(parts.values())), parts, note)


def test_what_was_extracted_keeps_tokens_and_metadata():
    seen: list[Sample] = []
    reward = make_extracted(lambda sample: seen.append(sample) or 0.5)
    assert reward(sample_of("<answer>x</answer>", num_tokens=3, answer="x")) == RewardResult(
        0.5, {"extracted": 1.0}
    )
    assert (seen[0].response, seen[0].response_length, seen[0].metadata) == ("x", 3, {"answer": "x"})


@pytest.mark.parametrize(
    ("num_tokens", "punishment"), [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (100, -1.0), (200, -1.0)]
)
def test_overlong_responses_are_punished_softly(num_tokens: int, punishment: float):
    sample = sample_of("", num_tokens=num_tokens)
    result = make_soft_overlong_punishment(max_tokens=100, buffer_tokens=20)(sample)
    assert result == RewardResult(punishment, {"overlong": punishment})
    assert str(result.reward) != "-0.0"
    half = make_soft_overlong_punishment(max_tokens=100, buffer_tokens=20, weight=0.5)
    assert half(sample).reward == punishment / 2


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("42", Fraction(42)),
        ("The answer is 1,234.50.", Fraction("1234.5")),
        ("so 3 + 4 = 7", Fraction(7)),
        ("5-3", Fraction(3)),
        ("x = -3", Fraction(-3)),
        ("it is −3", Fraction(-3)),
        ("1/2 of it", Fraction(1, 2)),
        (".5", Fraction(1, 2)),
        ("1, 2 and 3", Fraction(3)),
        ("1,2", Fraction(2)),
        ("first 9 #### 8 apples", Fraction(8)),
        (r"9 or \boxed{1} or \boxed{ -2 } or 7", Fraction(-2)),
        *((text, None) for text in ("none", r"5 \boxed{x}", "5 ####", "1/0", "9" * 5000)),
    ],
)
def test_the_final_number_of_a_text(text: str, number: Fraction | None):
    assert find_final_number(text) == number


# --- what each refuses ---


@pytest.mark.parametrize(
    ("reward", "row", "message"),
    [
        (exact_match, {"solution": "1"}, r"sample s has no metadata\['answer'\] .*; its row has solution"),
        (numeric_match, {}, r"no metadata\['answer'\]"),
        (numeric_match, {"answer": "x"}, r"metadata\['answer'\] is 'x', which holds no number"),
        (math_match, {}, r"no metadata\['answer'\]"),
        *((reward, {"answer": []}, "an empty list") for reward in (math_match, fuzzy_match, exact_match)),
        (multiple_choice_match, {}, r"no metadata\['answer'\]"),
        (multiple_choice_match, {"answer": "Paris"}, "a letter from A to J or a number from 0 to 9"),
        (multiple_choice_match, {"answer": "D", "choices": ["x", "y"]}, "a letter from A to B"),
        (multiple_choice_match, {"answer": 2, "choices": ["x", "y"]}, "a number from 0 to 1"),
        (multiple_choice_match, {"answer": True}, "is 'True'"),
        (multiple_choice_match, {"answer": "A", "choices": "xy"}, "a list of 2 to 26 choices"),
        *(
            (math_match, {"answer": answer}, "which holds no formula that can be read")
            for answer in ("", "???", r"\frac{", "0/0", r"\frac{1}{0}", ["1", "???"])
        ),
    ],
)
def test_a_row_that_cannot_be_judged_is_an_error_and_not_a_wrong_answer(
    reward: Any, row: dict[str, Any], message: str
):
    with pytest.raises(DataError, match=message):
        reward(sample_of("1", **row))


async def asynchronous(sample: Sample) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        *((partial(make_numeric_reward, relative=x), "not negative") for x in (-0.1, math.nan, math.inf)),
        *((partial(make_math_reward, timeout_s=x), "a whole number of seconds") for x in (0, 1.5, True)),
        *((partial(make_tags_reward, x), "names such as") for x in ([], ["a", "a"], ["a b"], ["<a>"])),
        (partial(make_format_reward, "("), r"pattern='\(' is not a regular expression"),
        (partial(make_json_reward, "name"), "it must be a list of texts"),
        (partial(make_extracted, exact_match, "(a)(b)"), "has 2 groups"),
        (partial(make_extracted, exact_match, "a", pick="middle"), "it must be first, last or only"),
        *(
            (partial(make_soft_overlong_punishment, max_tokens=10, buffer_tokens=x), "0 < buffer <= max")
            for x in (0, 11)
        ),
        (partial(make_soft_overlong_punishment, max_tokens=9, buffer_tokens=1, weight=-1), "weight=-1"),
        (partial(make_length_target, target=-1, width=1), "target=-1"),
        (partial(make_length_target, target=1, width=0), "width=0"),
        (partial(make_length_target, target=1, width=1, unit="lines"), "one of tokens, words, characters"),
        (partial(make_length_cutoff, most=1, least=2), "0 <= least <= most"),
        (partial(combine_rewards, {}), "name at least one"),
        (partial(combine_rewards, [("a", exact_match)] * 2), "and each once"),
        (
            partial(combine_rewards, {"a.b": exact_match}),
            "component 'a.b' is .*; a name is text without a dot",
        ),
        (partial(combine_rewards, {"": exact_match}), "component '' is"),
        (partial(combine_rewards, {"a": 1.0}), "component 'a' is 1.0"),
        (partial(combine_rewards, {"a": asynchronous}), "a function that is not async"),
        (partial(combine_rewards, {"a": exact_match}, weights={"b": 1.0}), "'b' is weighted but not there"),
        (partial(combine_rewards, {"a": exact_match}, weights={}), "'a' has no weight"),
        (
            partial(combine_rewards, {"a": exact_match}, weights={"a": math.nan}),
            "a weight is a finite number",
        ),
        (
            partial(apply_weights, RewardResult(0, {"a": 1.0}), {"a": 1, "c": 1}),
            "'c' is weighted but not there",
        ),
        (partial(apply_weights, RewardResult(0, {"a": 1.0, "b": 1.0}), {"a": 1}), "'b' has no weight"),
        (partial(apply_weights, RewardResult(0, {"a.b": 1.0}), {}), "'a.b' has no weight"),
        (partial(apply_weights, RewardResult(0), {"a": 1.0}), r"there are the parts \(none\)"),
        (partial(apply_weights, RewardResult(0, {"a": 1.0}), {"a": "1"}), "a weight is a finite number"),
    ],
)
def test_options_that_make_no_sense_are_refused(make: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        make()


# --- choices ---


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("The answer is (B)", "B"),
        ("The answer is B.", "B"),
        ("B.", "B"),
        ("B", "B"),
        ("(C)", "C"),
        ("**B**", "B"),
        ("**B.** Paris", "B"),
        ("B) Paris", "B"),
        ("B. Paris", "B"),
        (r"So \boxed{B}", "B"),
        (r"\boxed{\text{(b)}}", "B"),
        (r"\boxed{\textbf{D}}.", "D"),
        (r"\boxed{A} no, \boxed{C}", "C"),
        (r"The answer is A, that is \boxed{B}", "B"),
        ("Answer: b", "B"),
        ("answer: **d**", "D"),
        ("**Answer:** C", "C"),
        ("**Answer: C**", "C"),
        ("Final answer: A", "A"),
        ("the correct answer is option D because it is", "D"),
        ("Therefore the correct option is B.", "B"),
        ("I would choose C", "C"),
        ("Option B is correct.", "B"),
        ("A is the right answer", "A"),
        ("The answer is A. Wait, the answer is B.", "B"),
        ("The answer is:\n\nC", "C"),
        ("The answer is $D$.", "D"),
        ("Let me think.\nA would be wrong.\n\nC", "C"),
        ("A: wrong\nthe answer is B", "B"),
        ("<answer>B</answer>", None),  # no sentence: make_extracted takes what is inside
        ("The answer is a pity", None),
        ("The answer is A good thing", None),
        ("I think so", None),
        ("The answer is Z", None),
        ("The answer is Banana", None),
        ("A cat sat", None),
        ("", None),
        (r"\boxed{AB}", None),
        ("The answer is A or B", None),
        ("The answer is (A) and (C).", None),
        ("Answer: A/B", None),
        ("A. Paris\nB. London", None),
    ],
)
def test_a_choice_is_found_or_not(text: str, letter: str | None):
    choice = find_choice(text)
    assert choice.letter == letter, choice
    assert bool(choice.why) == (letter is None)


# --- formulas ---

EQUAL = [
    ("1/2", r"\boxed{\frac{1}{2}}"),
    (r"\frac{1}{2}", r"The answer is $\frac12$."),
    (r"$\frac{1}{2}$", "so it is 0.5"),
    ("0.5", r"\boxed{\dfrac{2}{4}}"),
    ("42", "The answer is 42."),
    (42, r"\boxed{42}"),
    ("so #### 42", r"\boxed{42}"),
    ("1,000", r"\boxed{1000}"),
    ("1000", "The answer is 1,000"),
    (r"\sqrt{2}", r"\boxed{2^{1/2}}"),
    (r"\sqrt{8}", r"\boxed{2\sqrt{2}}"),
    (r"2\pi", r"$\pi \cdot 2$"),
    ("x^2 + 2x + 1", r"\boxed{(x+1)^2}"),
    ("x + y", r"\boxed{y + x}"),
    ("x = 5", r"\boxed{5}"),
    ("5", r"\boxed{x = 5}"),
    ("50%", r"\boxed{0.5}"),
    ("50%", r"\boxed{50}"),
    ("0.5", r"\boxed{50\%}"),
    (r"5 \text{ cm}", r"\boxed{5}"),
    ("5", r"\boxed{5\text{ apples}}"),
    ("12", r"\boxed{\$12}"),
    (r"90^\circ", r"\boxed{90}"),
    (r"\{1, 2\}", r"\boxed{\{2, 1\}}"),
    ("1, 2", r"\boxed{2, 1}"),
    (r"\{1,2\}", r"\boxed{(1,2)}"),
    ("[0, 1)", r"\boxed{[0,1)}"),
    (r"(-\infty, 1) \cup (2, \infty)", r"\boxed{(-\infty,1)\cup(2,\infty)}"),
    ("(1, 2, 3)", r"\boxed{(1,2,3)}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{\begin{bmatrix}1\\2\end{bmatrix}}"),
    ("x > 3", r"\boxed{3 < x}"),
    (r"\text{east}", r"\boxed{\text{east}}"),
    ("-3", r"\boxed{-3}"),
    ("3 + 4i", r"\boxed{4i+3}"),
    (r"\infty", r"\boxed{\infty}"),
    (r"\log_2 8", r"\boxed{3}"),
    ("10^{-3}", r"\boxed{0.001}"),
    ("1/3", r"\boxed{0.333333}"),
    (["7", "8"], r"\boxed{8}"),
    (r"\boxed{9}", "First 8. The final answer is $9$. I hope it is correct."),
]
UNEQUAL = [
    ("1/2", r"\boxed{\frac{1}{3}}"),
    ("42", "The answer is 43."),
    ("42", r"I thought of 42, but it is \boxed{41}"),
    ("2", r"\boxed{1} or \boxed{2}"),
    ("2", r"\boxed{\{1, 2\}}"),
    ("1/3", r"\boxed{0.33}"),
    ("(1, 2)", r"\boxed{(2, 1)}"),
    ("[0, 1)", r"\boxed{[0, 1]}"),
    ("(0, 1, 2)", r"\boxed{(0, 2, 1)}"),
    ("x > 3", r"\boxed{x \ge 3}"),
    ("x > 3", r"\boxed{x < 3}"),
    ("x + 1", r"\boxed{y + 1}"),
    ("50%", r"\boxed{0.05}"),
    (r"\sqrt{2}", r"\boxed{1.41}"),
    (r"\text{east}", r"\boxed{\text{west}}"),
    ("-3", r"\boxed{3}"),
    ("3 + 4i", r"\boxed{3 - 4i}"),
    (["7", "8"], r"\boxed{9}"),
    ("5", r"\boxed{\frac{1}{0}}"),
]


@pytest.mark.parametrize(("answer", "response"), EQUAL)
def test_equal_formulas(answer: Any, response: str):
    assert math_match(sample_of(response, answer=answer)) == RewardResult(1.0, {"math": 1.0, "parsed": 1.0})


@pytest.mark.parametrize(("answer", "response"), UNEQUAL)
def test_unequal_formulas(answer: Any, response: str):
    assert math_match(sample_of(response, answer=answer)) == RewardResult(0.0, {"math": 0.0, "parsed": 1.0})


@pytest.mark.parametrize("response", ["", "I do not know.", r"4 \boxed{", r"4, thus \boxed{\frac{}"])
def test_a_response_without_formula_is_0_with_a_note(response: str):
    result = math_match(sample_of(response, answer="x^2"))
    assert result.reward == 0.0
    assert result.parts["math"] == 0.0
    if "4" not in response:
        assert result == RewardResult(
            0.0, {"math": 0.0, "parsed": 0.0}, "the response holds no formula that can be read"
        )


def test_a_response_that_repeats_itself_is_read_in_time():
    assert make_math_reward(timeout_s=5)(sample_of("1 " * 50_000, answer="2")).reward == 0.0


def test_a_comparison_that_takes_too_long_is_a_timeout_and_not_a_reward(monkeypatch: pytest.MonkeyPatch):
    import math_verify.grader

    def endless(*_: Any, **__: Any) -> bool:
        while True:
            pass

    monkeypatch.setattr(math_verify.grader, "sympy_expr_eq", endless)
    with pytest.raises(RewardTimeout, match="math_match on sample s: comparing took longer than 1 s"):
        make_math_reward(timeout_s=1)(sample_of("1", answer="2"))


def test_a_reading_that_takes_too_long_is_a_timeout_and_not_a_reward(monkeypatch: pytest.MonkeyPatch):
    import math_verify.parser

    def endless(*_: Any, **__: Any) -> list[Any]:
        while True:
            pass

    read = math_verify.parser.extract_target_from_pred
    monkeypatch.setattr(
        math_verify.parser,
        "extract_target_from_pred",
        lambda text, *a, **k: endless() if "slow" in text else read(text, *a, **k),
    )
    with pytest.raises(
        RewardTimeout, match="math_match on sample s: reading the response took longer than 1 s"
    ):
        make_math_reward(timeout_s=1)(sample_of("slow 1", answer="2"))


def test_a_comparison_that_fails_is_an_error_and_not_a_reward(monkeypatch: pytest.MonkeyPatch):
    import math_verify.grader

    def broken(*_: Any, **__: Any) -> bool:
        raise TypeError("oops")

    monkeypatch.setattr(math_verify.grader, "sympy_expr_eq", broken)
    with pytest.raises(
        UserFunctionError, match="math_match on sample s: comparing failed with TypeError: oops"
    ):
        math_match(sample_of("1", answer="2"))


def test_formulas_are_compared_only_where_their_time_can_be_limited():
    raised: list[Exception] = []

    def compare() -> None:
        try:
            math_match(sample_of("1", answer="1"))
        except ConfigError as error:
            raised.append(error)

    thread = threading.Thread(target=compare)
    thread.start()
    thread.join()
    assert "runs only in the main thread" in str(raised[0])


@pytest.mark.parametrize(("reward", "package"), [(fuzzy_match, "rapidfuzz"), (math_match, "math_verify")])
def test_a_missing_library_is_named_with_its_extra(
    reward: Any, package: str, monkeypatch: pytest.MonkeyPatch
):
    from rollouts.rewards import fuzzy
    from rollouts.rewards import math as math_rewards

    real = builtins.__import__

    def refuse(name: str, *arguments: Any, **options: Any) -> Any:
        if name.split(".")[0] == package:
            raise ModuleNotFoundError(f"No module named {package!r}")
        return real(name, *arguments, **options)

    for load in (fuzzy._load_indel, math_rewards._load_math_verify):
        load.cache_clear()
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ConfigError, match=r"pip install 'rollouts-rl\[rewards\]'"):
        reward(sample_of("1", answer="1"))


# --- combinations ---


def test_rewards_combine_by_their_weights_and_keep_their_parts():
    combined = combine_rewards(
        {"number": numeric_match, "format": think_answer_format}, weights={"number": 2.0, "format": 0.5}
    )
    result = combined(sample_of("<think>1+1</think><answer>2</answer>", answer=2))
    assert result == RewardResult(
        2.5,
        {"number": 1.0, "number.numeric": 1.0, "number.has_number": 1.0, "format": 1.0, "format.format": 1.0},
    )
    assert combined(sample_of("2", answer=2)).reward == 2.0
    assert combine_rewards({"a": lambda _: 0.25, "b": lambda _: True})(sample_of("")) == RewardResult(
        1.25, {"a": 0.25, "b": 1.0}
    )


def test_weights_make_the_reward_anew_from_all_parts():
    result = RewardResult(9.0, {"a": 1.0, "b": -0.5}, "note")
    assert apply_weights(result, {"a": 2.0, "b": 1}) == RewardResult(1.5, {"a": 1.0, "b": -0.5}, "note")
    assert apply_weights(result, {"a": 1, "b": 0}).reward == 1.0


def test_details_of_a_part_need_no_weight():
    result = RewardResult(0.0, {"a": 1.0, "a.x": 0.5, "a.x.y": 0.25})
    assert apply_weights(result, {"a": 2.0}).reward == 2.0
    assert apply_weights(result, {"a": 2.0, "a.x": 2.0}).reward == 3.0


def test_a_users_function_makes_the_reward_from_the_parts():
    result = RewardResult(0.0, {"a": 0.5, "b": 4.0}, "note")
    assert apply_combine(result, lambda parts: parts["a"] * parts["b"]) == RewardResult(
        2.0, {"a": 0.5, "b": 4.0}, "note"
    )


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda parts: parts["c"], r"on the parts a raised KeyError: 'c'"),
        (lambda parts: math.nan, "returned nan as its reward"),
        (lambda parts: parts, "returned a dict; it must be a finite number"),
        (lambda parts: None, "returned None"),
    ],
)
def test_what_the_users_function_answers_must_be_a_number(function: Any, message: str):
    with pytest.raises(UserFunctionError, match=message):
        apply_combine(RewardResult(0.0, {"a": 0.5}), function)
