"""The library of rewards: what each counts, by hand, and what it refuses."""

from __future__ import annotations

import builtins
import json
import math
import threading
from typing import Any

import numpy as np
import pytest

from rollouts.errors import ConfigError, DataError, RewardTimeout, UserFunctionError
from rollouts.rewards.combine import apply_combine, apply_weights, combine_rewards
from rollouts.rewards.exact import exact_match
from rollouts.rewards.format import (
    json_format,
    make_extracted,
    make_json_reward,
    make_tags_reward,
    think_answer_format,
)
from rollouts.rewards.fuzzy import f1_match, fuzzy_match, normalise_words
from rollouts.rewards.length import make_length_cutoff, make_length_target, make_soft_overlong_punishment
from rollouts.rewards.math import (
    find_last_part,
    make_math_reward,
    make_numeric_reward,
    math_match,
    numeric_match,
)
from rollouts.rewards.multiple_choice import find_choice, multiple_choice_match
from rollouts.types import RewardResult, Sample


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


# --- likeness ---


@pytest.mark.parametrize(
    ("response", "answer", "similarity"),
    [
        ("kitten", "kitten", 1.0),
        ("abcd", "abxd", 0.75),  # one out, one in, of 8 characters: 1 - 2/8
        ("ab", "cd", 0.0),
        (" ab \n", "abc", 0.8),  # 1 - 1/5
        ("", "abc", 0.0),
        ("", "", 1.0),
        ("b", ["abc", "bc", "xyz"], 2 / 3),  # the nearest: 1 - 1/3
        ("12", 12, 1.0),
    ],
)
def test_likeness_counts_characters_put_in_and_taken_out(response: str, answer: Any, similarity: float):
    result = fuzzy_match(sample_of(response, answer=answer))
    assert result.reward == pytest.approx(similarity, abs=1e-12)
    assert result.parts == {"similarity": result.reward}


def test_likeness_may_ignore_case():
    assert fuzzy_match(sample_of("AB", answer="ab")).reward == 0.0
    assert fuzzy_match(sample_of("AB", answer="ab"), ignore_case=True).reward == 1.0


@pytest.mark.parametrize(
    ("response", "answer", "f1"),
    [
        ("The Eiffel Tower!", "eiffel tower", 1.0),
        ("in the city of Paris", "Paris", 0.4),  # in city of paris: p 1/4, r 1: 2 * 1/4 / (5/4)
        ("a b b c", "b b d", 2 * 2 / 6),  # "a" is an article; both b count
        ("London", "Paris", 0.0),
        ("the", "a", 1.0),  # nothing is left of either
        ("the", "Paris", 0.0),
        ("cat", ["dog", "a cat"], 1.0),
        ("theatre", "atre", 0.0),  # an article only as a word
    ],
)
def test_f1_counts_shared_words(response: str, answer: Any, f1: float):
    result = f1_match(sample_of(response, answer=answer))
    assert result.reward == pytest.approx(f1, abs=1e-12)
    assert result.parts == {"f1": result.reward}


def test_words_are_normalised_as_squad_does():
    assert normalise_words("It's  An apple, THE pear.") == ["its", "apple", "pear"]


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


def test_an_ambiguous_choice_is_0_with_a_note():
    result = multiple_choice_match(sample_of("The answer is A or B", answer="A"))
    assert result == RewardResult(
        0.0, {"choice": 0.0, "chosen": 0.0}, "ambiguous: it chooses A and B at once"
    )
    assert (
        multiple_choice_match(sample_of("A. x\nB. y", answer="A")).note == "ambiguous: lines begin with A, B"
    )
    assert multiple_choice_match(sample_of("well", answer="A")).note == "no choice was found"


def test_only_as_many_letters_count_as_there_are_choices():
    row = {"answer": 2, "choices": ["x", "y", "z"]}
    assert multiple_choice_match(sample_of("The answer is C", **row)) == RewardResult(
        1.0, {"choice": 1.0, "chosen": 1.0}
    )
    assert multiple_choice_match(sample_of("The answer is B", **row)) == RewardResult(
        0.0, {"choice": 0.0, "chosen": 1.0}
    )
    assert multiple_choice_match(sample_of("The answer is D", **row)).parts["chosen"] == 0.0
    assert (
        multiple_choice_match(sample_of("(b)", answer="(b)")).reward == 0.0
    )  # a small letter alone is no choice
    assert multiple_choice_match(sample_of("(B)", answer="(b)")).reward == 1.0


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, r"no metadata\['answer'\]"),
        (
            {"answer": "Paris"},
            r"metadata\['answer'\] is 'Paris'; it must be a letter from A to J or a number from 0 to 9",
        ),
        ({"answer": "D", "choices": ["x", "y"]}, "a letter from A to B"),
        ({"answer": 2, "choices": ["x", "y"]}, "a number from 0 to 1"),
        ({"answer": True}, "is 'True'"),
        ({"answer": "A", "choices": "xy"}, "a list of 2 to 26 choices"),
    ],
)
def test_a_row_with_a_strange_choice_is_an_error(row: dict[str, Any], message: str):
    with pytest.raises(DataError, match=message):
        multiple_choice_match(sample_of("A", **row))


# --- numbers ---


def test_tolerances_are_relative_or_absolute_and_bounds_count():
    relative = make_numeric_reward(relative=0.1)
    assert [relative(sample_of(text, answer=10)).reward for text in ("9", "11", "11.01", "8.99")] == [
        1.0,
        1.0,
        0.0,
        0.0,
    ]
    assert relative(sample_of("0.001", answer=0)).reward == 0.0  # nothing is near 0 relatively
    absolute = make_numeric_reward(absolute=0.5)
    assert [absolute(sample_of(text, answer=-10)).reward for text in ("-10.5", "-9.5", "-9.4")] == [
        1.0,
        1.0,
        0.0,
    ]
    both = make_numeric_reward(relative=0.1, absolute=0.5)  # the larger of the two
    assert [both(sample_of(text, answer=1)).reward for text in ("1.5", "1.51")] == [1.0, 0.0]
    assert [both(sample_of(text, answer=100)).reward for text in ("110", "110.5")] == [1.0, 0.0]
    assert make_numeric_reward(key="n")(sample_of("1/2", n="0.5")) == RewardResult(
        1.0, {"numeric": 1.0, "has_number": 1.0}
    )


@pytest.mark.parametrize("options", [{"relative": -0.1}, {"absolute": math.inf}, {"relative": math.nan}])
def test_a_tolerance_is_not_negative(options: dict[str, Any]):
    with pytest.raises(ConfigError, match="a tolerance is a number that is not negative"):
        make_numeric_reward(**options)


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


@pytest.mark.parametrize("answer", ["", "???", r"\frac{", "0/0", r"\frac{1}{0}", ["1", "???"]])
def test_an_answer_that_cannot_be_read_is_an_error_and_not_a_wrong_answer(answer: Any):
    with pytest.raises(
        DataError,
        match=r"math_match on sample s: metadata\['answer'\] is .*, which holds no formula that can be read",
    ):
        math_match(sample_of("1", answer=answer))


def test_an_answer_must_be_there():
    with pytest.raises(DataError, match=r"no metadata\['answer'\]"):
        math_match(sample_of("1"))
    with pytest.raises(DataError, match="an empty list"):
        math_match(sample_of("1", answer=[]))


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("short", "short"),
        ("a" * 9000, "a" * 8000),
        ("a" * 9000 + "\n" + "b" * 5000, "\n" + "b" * 5000),
        ("a" * 9000 + "\n" + "b" * 10, "a" * 7989 + "\n" + "b" * 10),  # too little would be left
        ("a" * 9000 + r"\boxed{1}" + "b" * 9000, "a" * 4000 + r"\boxed{1}" + "b" * 3991),
        (r"\boxed{1}" + "b" * 9000, r"\boxed{1}" + "b" * 3991),
        (r"\boxed{1}" + "b\n" * 9000 + r"\boxed{2}", "\n" + "b\n" * 3995 + r"\boxed{2}"),
    ],
)
def test_of_a_long_text_the_last_part_is_read(text: str, part: str):
    assert find_last_part(text) == part


def test_a_response_that_repeats_itself_is_read_in_time():
    assert make_math_reward(timeout_s=5)(sample_of("1 " * 50_000, answer="2")).reward == 0.0


def test_names_of_variables_matter_unless_told_otherwise():
    sample = sample_of(r"\boxed{y^2}", result="x^2")
    assert make_math_reward(key="result")(sample).reward == 0.0
    assert make_math_reward(key="result", strict=False)(sample).reward == 1.0


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


@pytest.mark.parametrize("timeout_s", [0, 1.5, True])
def test_the_time_is_whole_seconds(timeout_s: Any):
    with pytest.raises(ConfigError, match="a whole number of seconds above 0"):
        make_math_reward(timeout_s=timeout_s)


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


# --- forms ---


@pytest.mark.parametrize(
    ("response", "whole", "partial"),
    [
        ("<plan>a</plan>\n<code>b\n</code>\n", 1.0, 1.0),
        ("<code>b</code><plan>a</plan>", 0.0, 1.0),
        ("x <plan>a</plan><code>b</code>", 0.0, 1.0),
        ("<plan>a</plan><code>b", 0.0, 0.75),
        ("<plan>a<plan></plan><code>b</code>", 0.0, 0.75),
        ("nothing", 0.0, 0.0),
    ],
)
def test_tags_stand_in_order_or_are_counted(response: str, whole: float, partial: float):
    assert make_tags_reward(["plan", "code"])(sample_of(response)) == RewardResult(whole, {"format": whole})
    assert make_tags_reward(["plan", "code"], partial=True)(sample_of(response)) == RewardResult(
        partial, {"format": partial}
    )


def test_tags_agree_with_the_think_answer_format():
    tags = make_tags_reward(["think", "answer"])
    good, bad = (
        "<think>\n1\n</think> <answer>2</answer>",
        ["<think>a</think>", "<think>a</think>b</think><answer>2</answer>", "<answer>2</answer>"],
    )
    for response in (good, *bad):
        assert tags(sample_of(response)).reward == think_answer_format(sample_of(response)).reward


@pytest.mark.parametrize("tags", [[], ["a", "a"], ["a b"], ["<a>"]])
def test_tags_are_names(tags: list[str]):
    with pytest.raises(ConfigError, match="they must be names such as 'think'"):
        make_tags_reward(tags)


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        (' {"a": [1, null]}\n', 1.0),
        ("3", 1.0),
        ("{'a': 1}", 0.0),
        ('{"a": 1} x', 0.0),
        ('{"a": NaN}', 0.0),
        ('{"a": 1, "a": 2}', 0.0),
        ("", 0.0),
        ("[" * 100_000, 0.0),
    ],
)
def test_the_whole_response_is_json(response: str, reward: float):
    result = json_format(sample_of(response))
    assert (result.reward, result.parts) == (reward, {"format": reward, "json": reward})
    assert (result.note is None) == (reward == 1.0)


def test_json_has_the_keys_asked_for():
    reward = make_json_reward(["name", "age"])
    assert reward(sample_of(json.dumps({"name": 1, "age": None, "more": 2}))).reward == 1.0
    assert reward(sample_of('{"name": 1}')) == RewardResult(
        0.0, {"format": 0.0, "json": 1.0}, "JSON without the keys age"
    )
    assert reward(sample_of('["name", "age"]')).parts == {"format": 0.0, "json": 1.0}
    with pytest.raises(ConfigError, match="it must be a list of texts"):
        make_json_reward("name")


def test_another_reward_is_applied_to_what_was_extracted():
    reward = make_extracted(exact_match)
    assert reward(sample_of("<answer> 2 </answer>", answer="2")) == RewardResult(
        1.0, {"exact": 1.0, "extracted": 1.0}
    )
    assert reward(sample_of("<answer>1</answer> <answer>2</answer>", answer="2")).reward == 1.0
    assert reward(sample_of("2", answer="2")) == RewardResult(
        0.0, {"extracted": 0.0}, "0 matches of <answer>((?:(?!</?answer>).)*)</answer>"
    )
    assert (
        make_extracted(exact_match, pick="first")(
            sample_of("<answer>1</answer><answer>2</answer>", answer="1")
        ).reward
        == 1.0
    )
    only = make_extracted(exact_match, pick="only")
    assert only(sample_of("<answer>2</answer><answer>2</answer>", answer="2")).parts == {"extracted": 0.0}
    assert (
        make_extracted(numeric_match, r"[0-9]+ apples")(
            sample_of("3 pears, 2 apples, 9 plums", answer=2)
        ).reward
        == 1.0
    )


def test_what_was_extracted_keeps_tokens_and_metadata():
    seen: list[Sample] = []

    def look(sample: Sample) -> float:
        seen.append(sample)
        return 0.5

    assert make_extracted(look)(sample_of("<answer>x</answer>", num_tokens=3, answer="x")) == RewardResult(
        0.5, {"extracted": 1.0}
    )
    assert (seen[0].response, seen[0].response_length, seen[0].metadata) == ("x", 3, {"answer": "x"})


@pytest.mark.parametrize(
    ("pattern", "pick", "message"),
    [
        ("(", "last", "is not a regular expression"),
        ("(a)(b)", "last", "has 2 groups"),
        ("a", "middle", "it must be first, last or only"),
    ],
)
def test_what_to_extract_must_be_clear(pattern: str, pick: str, message: str):
    with pytest.raises(ConfigError, match=message):
        make_extracted(exact_match, pattern, pick=pick)


# --- length ---


@pytest.mark.parametrize(
    ("num_tokens", "punishment"),
    [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (100, -1.0), (101, -1.0), (200, -1.0)],
)
def test_overlong_responses_are_punished_softly(num_tokens: int, punishment: float):
    result = make_soft_overlong_punishment(max_tokens=100, buffer_tokens=20)(
        sample_of("", num_tokens=num_tokens)
    )
    assert result == RewardResult(punishment, {"overlong": punishment})
    assert str(result.reward) != "-0.0"
    half = make_soft_overlong_punishment(max_tokens=100, buffer_tokens=20, weight=0.5)
    assert half(sample_of("", num_tokens=num_tokens)).reward == punishment / 2


def test_a_target_length_is_worth_less_the_further_away():
    words = make_length_target(target=4, width=2)
    assert [words(sample_of("w " * n)).reward for n in (1, 2, 3, 4, 5, 6, 9)] == [
        0.0,
        0.0,
        0.5,
        1.0,
        0.5,
        0.0,
        0.0,
    ]
    assert make_length_target(target=4, width=4, unit="characters")(sample_of("a b")) == RewardResult(
        0.75, {"length": 0.75}
    )
    assert make_length_target(target=4, width=4, unit="tokens")(sample_of("a b", num_tokens=6)).reward == 0.5


def test_a_cutoff_includes_its_bounds():
    tokens = make_length_cutoff(most=3, least=2)
    assert [tokens(sample_of("", num_tokens=n)).reward for n in (1, 2, 3, 4)] == [0.0, 1.0, 1.0, 0.0]
    assert make_length_cutoff(most=2, unit="words")(sample_of("a b c")) == RewardResult(0.0, {"length": 0.0})


@pytest.mark.parametrize(
    ("factory", "options", "message"),
    [
        (make_soft_overlong_punishment, {"max_tokens": 10, "buffer_tokens": 0}, "0 < buffer <= max"),
        (make_soft_overlong_punishment, {"max_tokens": 10, "buffer_tokens": 11}, "0 < buffer <= max"),
        (
            make_soft_overlong_punishment,
            {"max_tokens": 10, "buffer_tokens": 1, "weight": -1},
            "weight=-1; it must be a number above 0",
        ),
        (make_length_target, {"target": -1, "width": 1}, "target=-1"),
        (make_length_target, {"target": 1, "width": 0}, "width=0; it must be a number above 0"),
        (
            make_length_target,
            {"target": 1, "width": 1, "unit": "lines"},
            "unit='lines'; it must be one of tokens, words, characters",
        ),
        (make_length_cutoff, {"most": 1, "least": 2}, "0 <= least <= most"),
    ],
)
def test_lengths_that_make_no_sense_are_refused(factory: Any, options: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        factory(**options)


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


def test_notes_of_components_are_joined():
    combined = combine_rewards({"json": json_format, "choice": multiple_choice_match, "exact": exact_match})
    note = combined(sample_of("x", answer="A")).note
    assert (
        note is not None
        and note.startswith("json: not JSON: ")
        and note.endswith("; choice: no choice was found")
    )


def test_combinations_nest():
    inner = combine_rewards({"exact": exact_match})
    assert combine_rewards({"all": inner})(sample_of("a", answer="a")).parts == {
        "all": 1.0,
        "all.exact": 1.0,
        "all.exact.exact": 1.0,
    }


def test_a_component_that_fails_fails_the_whole():
    with pytest.raises(DataError, match="no metadata"):
        combine_rewards({"a": lambda _: 1.0, "exact": exact_match})(sample_of(""))
    with pytest.raises(UserFunctionError, match=r"\(component 'a'\) on sample s returned nan"):
        combine_rewards({"a": lambda _: math.nan})(sample_of(""))


async def asynchronous(sample: Sample) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("rewards", "weights", "message"),
    [
        ({}, None, "has no components"),
        ([("a", exact_match), ("a", exact_match)], None, "has 2 components named 'a'"),
        ({"a.b": exact_match}, None, "a component named 'a.b'; a name is text without a dot"),
        ({"": exact_match}, None, "a component named ''"),
        ({"a": 1.0}, None, "component 'a' is a float"),
        ({"a": asynchronous}, None, r"component 'a' \(asynchronous\) is async"),
        (
            {"a": exact_match},
            {"b": 1.0},
            "'b' is weighted but not there; combine_rewards has the components a",
        ),
        ({"a": exact_match, "b": exact_match}, {"a": 1.0}, "'b' has no weight"),
        ({"a": exact_match}, {"a": math.nan}, "'a' is nan; a weight is a finite number"),
    ],
)
def test_combinations_that_make_no_sense_are_refused(rewards: Any, weights: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        combine_rewards(rewards, weights=weights)


def test_weights_make_the_reward_anew_from_all_parts():
    result = RewardResult(9.0, {"a": 1.0, "b": -0.5}, "note")
    assert apply_weights(result, {"a": 2.0, "b": 1}) == RewardResult(1.5, {"a": 1.0, "b": -0.5}, "note")
    assert apply_weights(result, {"a": 1, "b": 0}).reward == 1.0


def test_details_of_a_part_need_no_weight():
    result = RewardResult(0.0, {"a": 1.0, "a.x": 0.5, "a.x.y": 0.25})
    assert apply_weights(result, {"a": 2.0}).reward == 2.0
    assert apply_weights(result, {"a": 2.0, "a.x": 2.0}).reward == 3.0


@pytest.mark.parametrize(
    ("parts", "weights", "message"),
    [
        (
            {"a": 1.0},
            {"a": 1.0, "c": 1.0},
            "weights: 'c' is weighted but not there; the reward has the parts a",
        ),
        (
            {"a": 1.0, "b": 1.0},
            {"a": 1.0},
            "weights: 'b' has no weight; the reward has the parts a, b; give it one, 0 if it shall not count",
        ),
        ({"a.b": 1.0}, {}, "'a.b' has no weight"),
        ({}, {"a": 1.0}, r"the reward has the parts \(none\)"),
        ({"a": 1.0}, {"a": math.inf}, "'a' is inf; a weight is a finite number"),
        ({"a": 1.0}, {"a": "1"}, "'a' is '1'; a weight is a finite number"),
    ],
)
def test_weights_and_parts_must_match(parts: dict[str, float], weights: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        apply_weights(RewardResult(0.0, parts), weights)


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


def test_a_users_function_cannot_change_the_parts():
    result = RewardResult(0.0, {"a": 0.5})
    assert apply_combine(result, lambda parts: parts.pop("a")) == RewardResult(0.5, {"a": 0.5})  # type: ignore[attr-defined]
