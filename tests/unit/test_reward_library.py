"""The library of rewards: what each counts, by hand, and what it refuses."""

from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from rollouts.errors import ConfigError, DataError
from rollouts.rewards import fuzzy, multiple_choice
from rollouts.rewards import math as math_rewards
from rollouts.rewards.combine import apply_weights, combine_rewards
from rollouts.rewards.exact import exact_match
from rollouts.rewards.format import (
    json_format,
    make_extracted,
    make_format_reward,
    make_json_reward,
    make_tags_reward,
    think_answer_format,
)
from rollouts.rewards.fuzzy import fuzzy_match
from rollouts.rewards.length import make_length_cutoff, make_length_target, make_soft_overlong_punishment
from rollouts.rewards.math import make_numeric_reward, numeric_match
from rollouts.rewards.normalise import RewardNormaliser
from rollouts.types import RewardResult, Sample
from tests.support.text_tables import cases


def sample_of(response, *, num_tokens=0, **metadata):
    """A sample of two prompt tokens and `num_tokens` that train."""
    mask = [0, 0] + [1] * num_tokens
    arrays = {"tokens": range(len(mask)), "loss_mask": mask}
    return Sample(id="s", prompt="q", response=response, metadata=metadata, **arrays)


def find(name):
    """What a table names: of this file, or of the library."""
    return {**vars(fuzzy), **vars(math_rewards), **vars(multiple_choice), **globals()}[name]


# --- what each counts ---

exact_any_case, fuzzy_any_case = (partial(one, ignore_case=True) for one in (exact_match, fuzzy_match))
tolerant, lines = partial(numeric_match, tolerance=0.001), make_format_reward("a.b")
characters = make_length_target(target=4, width=4, unit="characters")
cut, apples = (make_length_cutoff(most=2, unit="words"), make_extracted(numeric_match, "[0-9]+ apples"))
relative, absolute = make_numeric_reward(relative=0.1), make_numeric_reward(absolute=0.5)
larger = make_numeric_reward(relative=0.1, absolute=0.5)
tags, some_tags = make_tags_reward(["plan", "code"]), make_tags_reward(["plan", "code"], partial=True)
extracted, words = make_extracted(exact_match), make_length_target(target=4, width=2)
digits, keys = make_format_reward(r"[0-9]+\.", weight=0.5), make_json_reward(["name", "age"])
first, only = (make_extracted(exact_match, pick=pick) for pick in ("first", "only"))


# reward | response, answer, how much
@cases(r"""
reward      | case
exact_match | [" Paris\n", "Paris ", 1]
exact_match | ["Paris.", "Paris", 0]
exact_match | ["paris", "Paris", 0]
exact_match | ["12", 12, 1]
exact_match | ["b", ["a", "b"], 1]
exact_any_case | ["paris", "Paris", 1]
fuzzy_match | ["kitten", "kitten", 1]
fuzzy_match | ["abcd", "abxd", 0.75]
fuzzy_match | ["ab", "cd", 0]
fuzzy_match | [" ab \n", "abc", 0.8]
fuzzy_match | ["", "", 1]
fuzzy_match | ["b", ["abc", "bc", "xyz"], 0.666666666667]
fuzzy_match | ["12", 12, 1]
fuzzy_match | ["AB", "ab", 0]
fuzzy_any_case | ["AB", "ab", 1]
f1_match | ["The Eiffel Tower!", "eiffel tower", 1]
f1_match | ["It's  An apple, THE pear.", "its apple pear", 1]
f1_match | ["in the city of Paris", "Paris", 0.4]
f1_match | ["a b b c", "b b d", 0.666666666667]
f1_match | ["the", "a", 1]
f1_match | ["the", "Paris", 0]
f1_match | ["cat", ["dog", "a cat"], 1]
f1_match | ["theatre", "atre", 0]
numeric_match | ["it is 0.50", "1/2", 1]
numeric_match | ["0.333", "1/3", 0]
numeric_match | ["no idea", 1, 0]
tolerant | ["0.333", "1/3", 1]
tolerant | ["1001", 1000, 1]
relative | ["9", 10, 1]
relative | ["11", 10, 1]
relative | ["11.01", 10, 0]
relative | ["8.99", 10, 0]
relative | ["0.001", 0, 0]
absolute | ["-10.5", -10, 1]
absolute | ["-9.5", -10, 1]
absolute | ["-9.4", -10, 0]
larger | ["1.5", 1, 1]
larger | ["1.51", 1, 0]
larger | ["110", 100, 1]
larger | ["110.5", 100, 0]
digits | ["12.", "", 0.5]
digits | ["12. Yes", "", 0]
lines | ["a\nb", "", 1]
words | ["w ", "", 0]
words | ["w w ", "", 0]
words | ["w w w ", "", 0.5]
words | ["w w w w ", "", 1]
words | ["w w w w w ", "", 0.5]
words | ["w w w w w w w w w ", "", 0]
characters | ["a b", "", 0.75]
cut | ["a b c", "", 0]
json_format | [" {\"a\": [1, null]}\n", "", 1]
json_format | ["3", "", 1]
json_format | ["{'a': 1}", "", 0]
json_format | ["{\"a\": 1} x", "", 0]
json_format | ["{\"a\": NaN}", "", 0]
json_format | ["", "", 0]
json_format | ["{\"a\": 1, \"a\": 2}", "", 0]
keys | ["{\"name\": 1, \"age\": null, \"more\": 2}", "", 1]
keys | ["{\"name\": 1}", "", 0]
keys | ["[\"name\", \"age\"]", "", 0]
think_answer_format | ["<think>\n1+1\n</think>\n<answer>2</answer>\n", "", 1]
think_answer_format | ["<think></think><answer></answer>", "", 1]
think_answer_format | ["<think>a</think><answer>2</answer> done", "", 0]
think_answer_format | ["<think>a</think>b</think><answer>2</answer>", "", 0]
think_answer_format | ["<answer>2</answer>", "", 0]
tags | ["<plan>a</plan>\n<code>b\n</code>\n", "", 1]
tags | ["<code>b</code><plan>a</plan>", "", 0]
tags | ["x <plan>a</plan><code>b</code>", "", 0]
some_tags | ["x <code>b</code><plan>a</plan>", "", 1]
some_tags | ["<plan>a</plan><code>b", "", 0.75]
some_tags | ["<plan>a<plan></plan><code>b</code>", "", 0.75]
some_tags | ["nothing", "", 0]
extracted | ["<answer> 2 </answer>", "2", 1]
extracted | ["<answer>1</answer> <answer>2</answer>", "2", 1]
extracted | ["2", "2", 0]
first | ["<answer>1</answer><answer>2</answer>", "1", 1]
only | ["<answer>2</answer><answer>2</answer>", "2", 0]
apples | ["3 pears, 2 apples, 9 plums", 2, 1]
""")
def test_what_a_reward_counts(reward, case: Any):
    response, answer, expected = case
    result = find(reward)(sample_of(response, answer=answer))
    assert result.reward == pytest.approx(expected, abs=1e-11)
    named = {"exact", "similarity", "f1", "numeric", "format", "length"} & set(result.parts)
    assert [result.parts[name] for name in named] == [result.reward] or result.parts["extracted"] == 0.0


def test_json_that_is_too_deep_is_no_json():
    assert json_format(sample_of("[" * 100_000)).reward == 0.0


@cases(
    r"""
reward | response | row | parts | note
numeric_match | x | answer = 1 | numeric = 0, has_number = 0 |
keys | [] | | format = 0, json = 1 | JSON without the keys name, age
only | 2 | | extracted = 0 | 0 matches of <answer>((?:(?!</?answer>).)*)</answer>
multiple_choice_match | The answer is C | THIRD | choice = 1, chosen = 1 |
multiple_choice_match | The answer is B | THIRD | choice = 0, chosen = 1 |
multiple_choice_match | answer: D | THIRD | choice = 0, chosen = 0 | no choice was found
multiple_choice_match | (B) | answer = "(b)" | choice = 1, chosen = 1 |
multiple_choice_match | I pick A or B | THIRD | choice = 0, chosen = 0 | ambiguous: it chooses A and B at once
multiple_choice_match | A. x\nB. y | THIRD | choice = 0, chosen = 0 | ambiguous: lines begin with A, B
""".replace("THIRD", 'answer = 2, choices = ["x", "y", "z"]')
)
def test_parts_and_notes_say_why(reward, response, row: dict, parts: dict, note):
    """The first part is the reward."""
    sample = sample_of(response.replace("\\n", "\n"), **row)
    assert find(reward)(sample) == RewardResult(next(iter(parts.values())), parts, note or None)


def test_what_was_extracted_keeps_tokens_and_metadata():
    judge = Mock(return_value=0.5)
    found = make_extracted(judge)(sample_of("<answer>x</answer>", num_tokens=3, answer="x"))
    assert found == RewardResult(0.5, {"extracted": 1.0})
    (seen,) = judge.call_args.args
    assert (seen.response, seen.response_length, seen.metadata) == ("x", 3, {"answer": "x"})


@cases("""
num_tokens | punishment
0          | 0.0
80         | 0.0
81         | -0.05
90         | -0.5
100        | -1.0
200        | -1.0
""")
def test_overlong_responses_are_punished_softly(num_tokens: int, punishment: float):
    sample = sample_of("", num_tokens=num_tokens)
    make = partial(make_soft_overlong_punishment, max_tokens=100, buffer_tokens=20)
    result = make()(sample)
    assert result == RewardResult(punishment, {"overlong": punishment})
    assert str(result.reward) != "-0.0"
    assert make(weight=0.5)(sample).reward == punishment / 2


# --- what each refuses ---


extract_exact = partial(make_extracted, exact_match)


weigh_a_and_b = partial(apply_weights, RewardResult(0, {"a": 1.0, "b": 1.0}))
weigh_nothing, weigh_exact = (
    partial(apply_weights, RewardResult(0)),
    partial(combine_rewards, {"a": exact_match}),
)


@cases(r"""
reward      | row            | message
exact_match | solution = "1" | sample s has no metadata\['answer'\] .*; its row has solution
numeric_match | | no metadata\['answer'\]
numeric_match | answer = "x" | metadata\['answer'\] is 'x', which holds no number
math_match | | no metadata\['answer'\]
math_match | answer = [] | an empty list
fuzzy_match | answer = [] | an empty list
exact_match | answer = [] | an empty list
multiple_choice_match | | no metadata\['answer'\]
multiple_choice_match | answer = "Paris" | a letter from A to J or a number from 0 to 9
multiple_choice_match | answer = "D", choices = ["x", "y"] | a letter from A to B
multiple_choice_match | answer = 2, choices = ["x", "y"] | a number from 0 to 1
multiple_choice_match | answer = true | is 'True'
multiple_choice_match | answer = "A", choices = "xy" | a list of 2 to 26 choices
math_match | answer = "" | which holds no formula that can be read
math_match | answer = "???" | which holds no formula that can be read
math_match | answer = '\frac{' | which holds no formula that can be read
math_match | answer = "0/0" | which holds no formula that can be read
math_match | answer = '\frac{1}{0}' | which holds no formula that can be read
math_match | answer = ["1", "???"] | which holds no formula that can be read
""")
def test_a_row_that_cannot_be_judged_is_an_error_and_not_a_wrong_answer(reward, row: dict, message):
    with pytest.raises(DataError, match=message):
        find(reward)(sample_of("1", **row))


@cases(r"""
make                | options         | message
make_numeric_reward | relative = -0.1 | not negative
make_numeric_reward | relative = nan | not negative
make_math_reward | timeout_s = 0 | a whole number of seconds
make_math_reward | timeout_s = true | a whole number of seconds
make_tags_reward | tags = [] | names such as
make_tags_reward | tags = ["a", "a"] | names such as
make_tags_reward | tags = ["a b"] | names such as
make_tags_reward | tags = ["<a>"] | names such as
make_format_reward | pattern = "(" | pattern='\(' is not a regular expression
make_json_reward | required_keys = "name" | it must be a list of texts
extract_exact | pattern = "(a)(b)" | has 2 groups
extract_exact | pattern = "a", pick = "middle" | it must be first, last or only
make_soft_overlong_punishment | max_tokens = 10, buffer_tokens = 0 | 0 < buffer <= max
make_soft_overlong_punishment | max_tokens = 10, buffer_tokens = 11 | 0 < buffer <= max
make_length_target | target = -1, width = 1 | target=-1
make_length_target | target = 1, width = 1, unit = "lines" | one of tokens, words, characters
make_length_cutoff | most = 1, least = 2 | 0 <= least <= most
weigh_a_and_b | weights = { a = 1 } | 'b' has no weight
weigh_nothing | weights = { a = 1.0 } | there are the parts \(none\)
weigh_exact | weights = { b = 1.0 } | 'b' is weighted but not there
weigh_exact | weights = { a = nan } | a weight is a finite number
""")
def test_options_that_make_no_sense_are_refused(make, options: dict, message):
    with pytest.raises(ConfigError, match=message):
        find(make)(**options)


async def asynchronous(sample): ...


@cases("""
names | reward       | message
      |              | name at least one
a a   | exact_match  | and each once
a.b   | exact_match  | component 'a.b' is .*; a name is text without a dot
a     | PARTS        | component 'a' is RewardResult
a     | asynchronous | a function that is not async
""")
def test_components_that_make_no_sense_are_refused(names, reward, message):
    with pytest.raises(ConfigError, match=message):
        combine_rewards([(name, find(reward)) for name in names.split()])


# --- combinations ---


def test_rewards_combine_by_their_weights_and_keep_their_parts():
    rewards = {"number": numeric_match, "format": think_answer_format}
    combined = combine_rewards(rewards, weights={"number": 2.0, "format": 0.5})
    names = ("number", "number.numeric", "number.has_number", "format", "format.format")
    result = combined(sample_of("<think>1+1</think><answer>2</answer>", answer=2))
    assert result == RewardResult(2.5, dict.fromkeys(names, 1.0))
    assert combined(sample_of("2", answer=2)).reward == 2.0
    found = combine_rewards({"a": lambda _: 0.25, "b": lambda _: True})(sample_of(""))
    assert found == RewardResult(1.25, {"a": 0.25, "b": 1.0})
    largest = combine_rewards({"a": lambda _: 3, "b": lambda _: 2}, weights={"a": 1, "b": 2}, aggregate=max)
    assert largest(sample_of("")).reward == 4


def test_rewards_are_normalised_by_all_that_were_seen():
    normalise = RewardNormaliser()
    assert normalise([1.0, 4.0]) == pytest.approx([-1, 1]) and normalise([]).shape == (0,)
    normalise = RewardNormaliser(**normalise.state_dict())
    with pytest.raises(ValueError, match=r"rewards\[1\] is nan"):
        normalise([9.0, np.nan])
    seen = np.array([1.0, 4.0, 7.0, 0.0, 0.0])
    assert normalise(seen[2:]) == pytest.approx((seen[2:] - seen.mean()) / seen.std())
    assert RewardNormaliser()([0.1] * 3) == pytest.approx([0, 0, 0], abs=1e-6)


PARTS = RewardResult(9.0, {"a": 1.0, "b": -0.5, "a.x": 0.5, "a.x.y": 0.25}, "note")


@cases("""
weights                    | reward
{"a": 2, "b": 1}           | 1.5
{"a": 1, "b": 0}           | 1.0
{"a": 1, "b": 0, "a.x": 2} | 2.0
""")
def test_weights_make_the_reward_anew_and_details_need_none(weights: Any, reward: float):
    assert apply_weights(PARTS, weights) == replace(PARTS, reward=reward)
