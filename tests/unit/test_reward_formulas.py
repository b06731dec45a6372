"""Numbers, choices and formulas that a response ends with."""

import sys
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from unittest.mock import Mock

import pytest

from rollouts.errors import ConfigError, RewardTimeout, UserFunctionError
from rollouts.rewards.fuzzy import fuzzy_match
from rollouts.rewards.math import find_final_number, make_math_reward, math_match
from rollouts.rewards.multiple_choice import find_choice
from rollouts.types import RewardResult
from tests.support.text_tables import cases
from tests.unit.test_reward_library import sample_of

# the answer == a response that is right, or wrong
EQUAL = r"""
1/2 == \boxed{\frac{1}{2}}
\frac{1}{2} == The answer is $\frac12$.
$\frac{1}{2}$ == so it is 0.5
0.5 == \boxed{\dfrac{2}{4}}
42 == The answer is 42.
so #### 42 == \boxed{42}
1,000 == \boxed{1000}
1000 == The answer is 1,000
\sqrt{2} == \boxed{2^{1/2}}
\sqrt{8} == \boxed{2\sqrt{2}}
2\pi == $\pi \cdot 2$
x^2 + 2x + 1 == \boxed{(x+1)^2}
x + y == \boxed{y + x}
x = 5 == \boxed{5}
5 == \boxed{x = 5}
50% == \boxed{0.5}
50% == \boxed{50}
0.5 == \boxed{50\%}
5 \text{ cm} == \boxed{5}
5 == \boxed{5\text{ apples}}
12 == \boxed{\$12}
90^\circ == \boxed{90}
\{1, 2\} == \boxed{\{2, 1\}}
1, 2 == \boxed{2, 1}
\{1,2\} == \boxed{(1,2)}
[0, 1) == \boxed{[0,1)}
(-\infty, 1) \cup (2, \infty) == \boxed{(-\infty,1)\cup(2,\infty)}
(1, 2, 3) == \boxed{(1,2,3)}
\begin{pmatrix}1\\2\end{pmatrix} == \boxed{\begin{bmatrix}1\\2\end{bmatrix}}
x > 3 == \boxed{3 < x}
\text{east} == \boxed{\text{east}}
-3 == \boxed{-3}
3 + 4i == \boxed{4i+3}
\infty == \boxed{\infty}
\log_2 8 == \boxed{3}
10^{-3} == \boxed{0.001}
1/3 == \boxed{0.333333}
\boxed{9} == First 8. The final answer is $9$. I hope it is correct.
"""
UNEQUAL = r"""
1/2 == \boxed{\frac{1}{3}}
42 == The answer is 43.
42 == I thought of 42, but it is \boxed{41}
2 == \boxed{1} or \boxed{2}
2 == \boxed{\{1, 2\}}
1/3 == \boxed{0.33}
(1, 2) == \boxed{(2, 1)}
[0, 1) == \boxed{[0, 1]}
(0, 1, 2) == \boxed{(0, 2, 1)}
x > 3 == \boxed{x \ge 3}
x > 3 == \boxed{x < 3}
x + 1 == \boxed{y + 1}
50% == \boxed{0.05}
\sqrt{2} == \boxed{1.41}
\text{east} == \boxed{\text{west}}
-3 == \boxed{3}
3 + 4i == \boxed{3 - 4i}
5 == \boxed{\frac{1}{0}}
"""


def read_pairs(equal, table):
    return [(equal, *line.split(" == ")) for line in table.strip().splitlines()]


# "-": nothing
@cases(r"""
number | text
42 | 42
2469/2 | The answer is 1,234.50.
7 | so 3 + 4 = 7
3 | 5-3
-3 | x = -3
-3 | it is −3
1/2 | 1/2 of it
1/2 | .5
3 | 1, 2 and 3
2 | 1,2
8 | first 9 #### 8 apples
-2 | 9 or \boxed{1} or \boxed{ -2 } or 7
- | none
- | 5 \boxed{x}
- | 5 ####
- | 1/0
- | 9…
""")
def test_the_final_number_of_a_text(number, text):
    text = text.replace("9…", "9" * 5000)
    assert find_final_number(text) == (None if number == "-" else Fraction(number))


@cases(r"""
letter | text
B | The answer is (B)
B | The answer is B.
B | B.
B | B
C | (C)
B | **B**
B | **B.** Paris
B | B) Paris
B | B. Paris
B | So \boxed{B}
B | \boxed{\text{(b)}}
D | \boxed{\textbf{D}}.
C | \boxed{A} no, \boxed{C}
B | The answer is A, that is \boxed{B}
B | Answer: b
D | answer: **d**
C | **Answer:** C
C | **Answer: C**
A | Final answer: A
D | the correct answer is option D because it is
B | Therefore the correct option is B.
C | I would choose C
B | Option B is correct.
A | A is the right answer
B | The answer is A. Wait, the answer is B.
C | The answer is:\n\nC
D | The answer is $D$.
C | Let me think.\nA would be wrong.\n\nC
B | A: wrong\nthe answer is B
- | <answer>B</answer>
- | The answer is a pity
- | The answer is A good thing
- | I think so
- | The answer is Z
- | The answer is Banana
- | A cat sat
- | \boxed{AB}
- | The answer is A or B
- | The answer is (A) and (C).
- | Answer: A/B
- | A. Paris\nB. London
- |
""")
def test_a_choice_is_found_or_not(letter, text):
    found, why = find_choice(text.replace("\\n", "\n"))
    assert (found or "-") == letter, why
    assert bool(why) == (letter == "-")


EQUALITY = [
    *read_pairs(1.0, EQUAL),
    *read_pairs(0.0, UNEQUAL),
    (1.0, 42, r"\boxed{42}"),
    (1.0, ["7", "8"], r"\boxed{8}"),
    (0.0, ["7", "8"], r"\boxed{9}"),
]


@cases("equal, answer, response", EQUALITY)
def test_equal_and_unequal_formulas(equal, answer, response):
    found = math_match(sample_of(response, answer=answer))
    assert found == RewardResult(equal, {"math": equal, "parsed": 1.0})


@cases("response", ["", "I do not know.", r"4 \boxed{", r"4, thus \boxed{\frac{}"])
def test_a_response_without_formula_is_0_with_a_note(response):
    result = math_match(sample_of(response, answer="x^2"))
    assert result.reward == result.parts["math"] == 0.0
    if "4" not in response:
        note = "the response holds no formula that can be read"
        assert result == RewardResult(0.0, {"math": 0.0, "parsed": 0.0}, note)


def test_a_response_that_repeats_itself_is_read_in_time():
    assert make_math_reward(timeout_s=5)(sample_of("1 " * 50_000, answer="2")).reward == 0.0


def test_what_takes_too_long_or_fails_is_an_error_and_not_a_reward(monkeypatch):
    import math_verify.grader
    import math_verify.parser

    def endless(*_, **__):
        while True:
            pass

    def read_or_hang(text, *rest, **options):
        return endless() if "slow" in text else read(text, *rest, **options)

    read, broken = math_verify.parser.extract_target_from_pred, Mock(side_effect=TypeError("oops"))
    grader, parser, compare = math_verify.grader, math_verify.parser, "sympy_expr_eq"
    for module, name, function, error, message in (
        (grader, compare, endless, RewardTimeout, "comparing took longer than 1 s"),
        (grader, compare, broken, UserFunctionError, "comparing failed with TypeError: oops"),
        (parser, read.__name__, read_or_hang, RewardTimeout, "reading the response took longer than 1 s"),
    ):
        monkeypatch.setattr(module, name, function)
        with pytest.raises(error, match=f"math_match on sample s: {message}"):
            make_math_reward(timeout_s=1)(sample_of("slow 1", answer="2"))


def test_formulas_are_compared_only_where_their_time_can_be_limited():
    with ThreadPoolExecutor() as threads, pytest.raises(ConfigError, match="runs only in the main thread"):
        threads.submit(math_match, sample_of("1", answer="1")).result()


@cases("reward, package", [(fuzzy_match, "rapidfuzz.distance"), (math_match, "math_verify")])
def test_a_missing_library_is_named_with_its_extra(reward, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    with pytest.raises(ConfigError, match=r"pip install 'rollouts-rl\[rewards\]'"):
        reward(sample_of("1", answer="1"))
