"""What a user's function may answer. Plain functions without trio: the asynchronous callers and the
synchronous tier share them.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Set, Sized
from dataclasses import replace
from typing import Any

import numpy as np

from rollouts.errors import UserFunctionError
from rollouts.types import FilterDecision, RewardResult, Sample

NOTE_CHARS = 10_000  # of a note; what is beyond is cut
RAISED = (
    Exception,
    SystemExit,
    GeneratorExit,
)  # what a plain function of a user's may raise that is its own: not what stops everything


def check_reward(answer: object, where: str) -> RewardResult:
    """`answer` as a record: a finite number, a mapping of named parts whose sum is the reward, or a
    RewardResult; True is 1.0.

    Raises UserFunctionError, beginning with `where`, for anything else: NaN, infinity, None, text, no parts
    at all.
    """
    if isinstance(answer, RewardResult):
        note = _check_note(answer.note, where)
        return RewardResult(
            _check_number(answer.reward, where, "reward"), _check_parts(answer.parts, where), note
        )
    if isinstance(answer, Mapping):
        parts = _check_parts(answer, where)
        if not parts:
            raise UserFunctionError(f"{where} returned a mapping without parts; name at least one")
        return RewardResult(add_up(parts.values(), where), parts)
    return RewardResult(_check_number(answer, where, "reward"))


def check_group_rewards(answer: Any, count: int, where: str) -> tuple[RewardResult, ...]:
    """`answer`, a sequence or an array, as `count` records.

    Raises UserFunctionError, beginning with `where`, if it has another number of them or one is no reward.
    """
    values = _as_list(answer, count)
    if values is None:
        raise UserFunctionError(
            f"{where} returned {shorten(answer)}; it must return {count} rewards, one per sample"
        )
    return tuple(check_reward(value, f"{where}, reward {index}") for index, value in enumerate(values))


def check_decision(answer: object, filter_name: str, where: str) -> FilterDecision:
    """A filter's answer as a record; a drop without a reason gets the filter's name as its reason.

    Raises UserFunctionError, beginning with `where`, for anything but True, False and a FilterDecision.
    """
    if isinstance(answer, FilterDecision):
        if not isinstance(answer.keep, bool | np.bool_):
            raise UserFunctionError(
                f"{where} returned a FilterDecision with keep={shorten(answer.keep)}; it must be True or"
                " False"
            )
        for name in ("reason", "detail"):
            if not isinstance(getattr(answer, name), str):
                raise UserFunctionError(
                    f"{where} returned a FilterDecision with {name}={shorten(getattr(answer, name))}; it must"
                    " be text"
                )
            _check_text(getattr(answer, name), where, name)
        return replace(
            answer,
            keep=bool(answer.keep),
            reason=answer.reason if answer.keep or answer.reason else filter_name,
        )
    if not isinstance(answer, bool | np.bool_):
        raise UserFunctionError(
            f"{where} returned {shorten(answer)}; it must return True, False or a FilterDecision"
        )
    return FilterDecision(keep=True) if answer else FilterDecision(keep=False, reason=filter_name)


def apply_reward(sample: Sample, result: RewardResult) -> Sample:
    """The sample with its reward and the named parts; a note goes to metadata["reward_note"]."""
    metadata = sample.metadata if result.note is None else {**sample.metadata, "reward_note": result.note}
    return replace(sample, reward=result.reward, rewards=result.parts, metadata=metadata)


def function_name(function: Callable[..., Any]) -> str:
    """The name by which errors and metrics call a function, without its module: through functools.partial;
    the class of a callable object.
    """
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", None) or type(function).__name__


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives a coroutine: a coroutine function, also through functools.partial, or an
    object with an async __call__.
    """
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004
    )


def describe(error: BaseException) -> str:
    """The error's class and message. Raises nothing, whatever the error's __str__ does."""
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException as second:
        return f"{type(error).__name__}: (its text cannot be had: {type(second).__name__})"


def add_up(values: Iterable[float], where: str) -> float:
    """The sum. Raises UserFunctionError, beginning with `where`, if it is not finite."""
    try:
        total = math.fsum(values)
    except (OverflowError, ValueError):  # ValueError: inf - inf
        total = math.nan
    if not math.isfinite(total):
        raise UserFunctionError(f"{where} returned parts whose sum is not finite; keep them smaller")
    return total


def shorten(value: object) -> str:
    """The value's repr in at most 80 characters. Raises nothing, whatever its __repr__ does."""
    try:
        text = repr(value)
    except BaseException as error:
        return f"a {type(value).__name__} (its repr cannot be had: {type(error).__name__})"
    return text if len(text) <= 80 else text[:77] + "..."


def _check_note(note: Any, where: str) -> str | None:
    if note is None:
        return None
    if not isinstance(note, str):
        raise UserFunctionError(f"{where} returned the note {shorten(note)}; a note is text")
    _check_text(note, where, "note")
    return (
        note
        if len(note) <= NOTE_CHARS
        else f"{note[:NOTE_CHARS]} … (cut: the note had {len(note)} characters)"
    )


def _check_text(text: str, where: str, what: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserFunctionError(
            f"{where} returned the {what} {shorten(text)} with half a surrogate pair at character"
            f" {error.start}, which no file can hold; make it with text.encode('utf-8', 'replace').decode()"
        ) from error


def _check_parts(parts: object, where: str) -> dict[str, float]:
    try:
        items = list(parts.items()) if isinstance(parts, Mapping) else None
    except RAISED as error:
        raise UserFunctionError(f"{where} returned parts that cannot be read: {describe(error)}") from error
    if items is None or not all(isinstance(name, str) and name for name, _ in items):
        raise UserFunctionError(
            f"{where} returned the parts {shorten(parts)}; parts are a mapping from names to numbers"
        )
    for name, _ in items:
        _check_text(name, where, "name of a part")
    return {name: _check_number(value, where, f"part {shorten(name)}") for name, value in items}


def _check_number(value: Any, where: str, what: str) -> float:
    number, cause = math.nan, None
    try:
        if (
            hasattr(value, "__float__") and getattr(value, "ndim", 0) == 0
        ):  # numpy and torch scalars too, arrays not
            number = float(value)
    except (
        RAISED
    ) as error:  # a tensor of complex numbers raises RuntimeError, a user's class whatever it likes
        number, cause = math.nan, error
    if not math.isfinite(number):
        raise UserFunctionError(
            f"{where} returned {shorten(value)} as its {what}; it must be a finite number"
        ) from cause
    return number


def _as_list(values: Any, count: int) -> list[Any] | None:
    """The `count` values; None if there are not so many, or they have no number or no order: an iterator may
    have no end.
    """
    if isinstance(values, str | bytes | Mapping | Set) or not isinstance(values, Sized):
        return None
    try:
        found = list(itertools.islice(iter(values), count + 1)) if len(values) == count else []  # type: ignore[call-overload]
    except RAISED:  # an array without axes, or something of the user's
        return None
    return found if len(found) == count else None
