r"""The response's number or formula is the answer's.

Numbers are compared as exact fractions; the number is the last one in the last \boxed{…}, else after the last
####, else in the whole response. Formulas are read and compared by the library math-verify.
"""

import math
import re
import threading
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

from rollouts.errors import DataError, RewardTimeout, UserFunctionError, require
from rollouts.rewards.check import PlainReward, import_extra
from rollouts.rewards.exact import read_answer, read_answers
from rollouts.types import RewardResult, Sample

# a sign only where it cannot be a minus between two terms; commas only where they group thousands
NUMBER = re.compile(
    r"(?:(?<![\w)\]])[-+])?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)(?:/[0-9]+)?"
)
BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
FINAL_MARK = "####"
# the library's patterns take time that grows with the square: 1 s for so many, minutes for a response that
# repeats itself
READ_CHARACTERS = 8000


def numeric_match(sample: Sample, *, key: str = "answer", tolerance: float = 0.0) -> RewardResult:
    """1 if the number that the response ends with equals metadata[key] within `tolerance` · max(1, |answer|);
    otherwise 0.

    1,000 = 1000, 0.5 = 1/2, 7.0 = 7. Parts: `numeric`, the reward itself, and `has_number`, 1 if the response
    holds a number at all. Raises DataError if the sample has no such key or the answer holds no number.
    """
    return _compare_numbers(sample, key, lambda wanted: Fraction(tolerance) * max(1, abs(wanted)))


def make_numeric_reward(*, key: str = "answer", relative: float = 0.0, absolute: float = 0.0) -> PlainReward:
    """numeric_match with |response - answer| <= max(relative · |answer|, absolute), both bounds included; by
    default exact.

    Raises ConfigError if a tolerance is negative or not finite.
    """
    for name, value in (("relative", relative), ("absolute", absolute)):
        require(0 <= value < math.inf, f"{name}={value}; a tolerance is a number that is not negative")

    def numeric_reward(sample: Sample) -> RewardResult:
        # through the decimal that was written: the float 0.1 is a little more than 1/10, which would move the
        # bound
        return _compare_numbers(
            sample, key, lambda wanted: max(Fraction(str(relative)) * abs(wanted), Fraction(str(absolute)))
        )

    return numeric_reward


def _compare_numbers(sample: Sample, key: str, allowed: Callable[[Fraction], Fraction]) -> RewardResult:
    answer = read_answer(sample, key)
    wanted = find_final_number(str(answer))
    if wanted is None:
        raise DataError(
            f"sample {sample.id}: metadata[{key!r}] is {str(answer)[:80]!r}, which holds no number"
        )
    found = find_final_number(sample.response)
    close = found is not None and abs(found - wanted) <= allowed(wanted)
    return RewardResult(float(close), {"numeric": float(close), "has_number": float(found is not None)})


def find_final_number(text: str) -> Fraction | None:
    """The number that a text ends up with; None if it has none, or one that is no number (7/0, thousands of
    digits).
    """
    text = text.replace("−", "-")
    boxed = BOXED.findall(text)
    place = boxed[-1] if boxed else text.rpartition(FINAL_MARK)[2]
    try:
        return Fraction(NUMBER.findall(place)[-1].replace(",", ""))
    # no number; or one of more than 4300 digits, which Python refuses to read, or over zero
    except (IndexError, ValueError, ZeroDivisionError):
        return None


# --- formulas -----------------------------------------------------------------------------------------------


def math_match(sample: Sample) -> RewardResult:
    """1 if the formula that the response ends with equals metadata["answer"], otherwise 0. See
    make_math_reward.
    """
    return make_math_reward()(sample)


def make_math_reward(*, key: str = "answer", timeout_s: int = 5, strict: bool = True) -> PlainReward:
    r"""A reward of 1 if the formula that the response ends with equals metadata[key], a text or a list of
    accepted ones; otherwise 0.

    The response's formula is what its last \boxed{…} holds, else what follows "answer is" or "Answer:", else
    the last formula between $ or the last number; only about 8000 characters are read (find_last_part). The
    answer is LaTeX with or without $; of a text with #### only what follows it. Both are read and compared by
    math-verify: 1/2 = 0.5 = \frac{1}{2}, 50% = 0.5 and 50% = 50, units and currency signs are left out, {1,2}
    = {2,1} but (1,2) ≠ (2,1), (1,2) = {1,2}, (0,1] ≠ [0,1), "x = 5" = 5, decimals count to six places. With
    strict=False names of variables do not matter and sets compare with tuples. Parts: `math`, the reward
    itself, and `parsed`, 0 with a note if the response holds no formula that can be read.

    Raises DataError if the answer is missing or cannot be read; RewardTimeout if one reading or comparing
    takes longer than `timeout_s`, whole seconds, felt as soon as Python code runs again (a product of
    gigantic integers is ended only by the end of the process); UserFunctionError if a comparison fails;
    ConfigError if math-verify is not installed, timeout_s is not a whole number above 0, or it is called
    outside the main thread, where the library cannot stop itself.
    """
    require(
        type(timeout_s) is int and timeout_s > 0,
        f"timeout_s={timeout_s!r}; it must be a whole number of seconds above 0",
    )
    return partial(_compare_formulas, key=key, timeout_s=timeout_s, strict=strict)


def _compare_formulas(sample: Sample, *, key: str, timeout_s: int, strict: bool) -> RewardResult:
    library, where = import_extra("math_verify", "math_match"), f"math_match on sample {sample.id}"
    require(
        threading.current_thread() is threading.main_thread(),
        "math_match runs only in the main thread of a process, where its time can be limited; name it in the"
        " config as a reward",
    )

    def read(text: str, mode: str, at: str) -> Any:
        """What the library makes of the last formula in a text; None if there is none or it cannot be
        read.
        """
        # By default the library answers a timeout, an error and a text without formula with an empty list.
        try:
            found = library.parse(
                text,
                (library.LatexExtractionConfig(boxed_match_priority=0), library.ExprExtractionConfig()),
                fallback_mode="no_fallback",
                extraction_mode=mode,
                parsing_timeout=timeout_s,
                raise_on_error=True,
            )
        except library.errors.TimeoutException as error:  # a BaseException
            raise RewardTimeout(f"{at} took longer than {timeout_s} s") from error
        except MemoryError:
            raise
        except Exception:  # its readers raise all kinds of errors over malformed LaTeX
            return None
        return found[0] if found else None

    wanted, at = [], f"{where}: reading metadata[{key!r}]"
    for answer in read_answers(sample, key):
        text = answer.rpartition(FINAL_MARK)[2].strip()
        is_marked = any(mark in text for mark in ("$", "\\boxed", "\\(", "\\["))
        # The library reads LaTeX only between marks; of a bare \sqrt{2} it would find nothing, of 2\pi the 2.
        wanted.append(read(text if is_marked else f"${text}$", "any_match", at))
        # 0/0 and 1/0 are read as nan and zoo: equal to nothing, so that no response could be right.
        if wanted[-1] is None or str(wanted[-1]) in ("nan", "zoo"):
            raise DataError(f"{at}: it is {answer[:80]!r}, which holds no formula that can be read")
    found = read(find_last_part(sample.response), "first_match", f"{where}: reading the response")
    if found is None:
        return RewardResult(
            0.0, {"math": 0.0, "parsed": 0.0}, "the response holds no formula that can be read"
        )
    try:
        equal = any(
            library.verify(one, found, strict=strict, timeout_seconds=timeout_s, raise_on_error=True)
            for one in wanted
        )
    except library.errors.TimeoutException as error:
        raise RewardTimeout(f"{where}: comparing took longer than {timeout_s} s") from error
    except Exception as error:
        raise UserFunctionError(
            f"{where}: comparing failed with {type(error).__name__}: {str(error)[:200]}"
        ) from error
    return RewardResult(float(equal), {"math": float(equal), "parsed": 1.0})


def find_last_part(text: str) -> str:
    r"""At most 8000 characters of a text, from the start of a line if there is one: those before the end, or
    around the last \boxed.
    """
    half, boxed = READ_CHARACTERS // 2, text.rfind("\\boxed")
    wanted = len(text) - half if boxed < 0 else boxed
    end = min(len(text), wanted + half)
    start = max(0, end - READ_CHARACTERS)
    line = text.find("\n", start, end)
    # inside a line the $ would be paired wrongly; but do not cut away what is wanted
    return text[line if start and 0 <= line < wanted else start : end]
