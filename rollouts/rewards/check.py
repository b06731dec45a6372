"""What a user's function may answer. Plain functions without trio: the asynchronous callers and the synchronous tier share them."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from rollouts.errors import UserFunctionError
from rollouts.types import FilterDecision, RewardResult, Sample


def check_reward(answer: object, where: str) -> RewardResult:
    """`answer` as a record: a finite number, a mapping of named parts whose sum is the reward, or a RewardResult; True is 1.0.

    Raises UserFunctionError, beginning with `where`, for anything else: NaN, infinity, None, text, no parts at all.
    """
    if isinstance(answer, RewardResult):
        if answer.note is not None and not isinstance(answer.note, str):
            raise UserFunctionError(f"{where} returned the note {shorten(answer.note)}; a note is text")
        return RewardResult(_check_number(answer.reward, where, "reward"), _check_parts(answer.parts, where), answer.note)
    if isinstance(answer, Mapping):
        parts = _check_parts(answer, where)
        if not parts:
            raise UserFunctionError(f"{where} returned a mapping without parts; name at least one")
        return RewardResult(math.fsum(parts.values()), parts)
    return RewardResult(_check_number(answer, where, "reward"))


def check_group_rewards(answer: Any, count: int, where: str) -> tuple[RewardResult, ...]:
    """`answer` as `count` records. Raises UserFunctionError, beginning with `where`, if it has another number of them or one is no reward."""
    values = None if isinstance(answer, str | bytes | Mapping) else _as_list(answer)
    if values is None or len(values) != count:
        raise UserFunctionError(f"{where} returned {shorten(answer)}; it must return {count} rewards, one per sample")
    return tuple(check_reward(value, f"{where}, reward {index}") for index, value in enumerate(values))


def check_decision(answer: object, filter_name: str, where: str) -> FilterDecision:
    """A filter's answer as a record; a drop without a reason gets the filter's name as its reason.

    Raises UserFunctionError, beginning with `where`, for anything but True, False and a FilterDecision.
    """
    if isinstance(answer, FilterDecision):
        return answer if answer.keep or answer.reason else replace(answer, reason=filter_name)
    if not isinstance(answer, bool | np.bool_):
        raise UserFunctionError(f"{where} returned {shorten(answer)}; it must return True, False or a FilterDecision")
    return FilterDecision(keep=True) if answer else FilterDecision(keep=False, reason=filter_name)


def apply_reward(sample: Sample, result: RewardResult) -> Sample:
    """The sample with its reward and the named parts; a note goes to metadata["reward_note"]."""
    metadata = sample.metadata if result.note is None else {**sample.metadata, "reward_note": result.note}
    return replace(sample, reward=result.reward, rewards=result.parts, metadata=metadata)


def function_name(function: Callable[..., Any]) -> str:
    """The name by which errors and metrics call a function, without its module: through functools.partial; the class of a callable object."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", None) or type(function).__name__


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives a coroutine: a coroutine function, also through functools.partial, or an object with an async __call__."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def describe(error: BaseException) -> str:
    """The error's class and message."""
    return f"{type(error).__name__}: {error}"


def shorten(value: object) -> str:
    """The value's repr in at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _check_parts(parts: object, where: str) -> dict[str, float]:
    if not isinstance(parts, Mapping) or not all(isinstance(name, str) and name for name in parts):
        raise UserFunctionError(f"{where} returned the parts {shorten(parts)}; parts are a mapping from names to numbers")
    return {name: _check_number(value, where, f"part {name!r}") for name, value in parts.items()}


def _check_number(value: Any, where: str, what: str) -> float:
    number = math.nan
    if hasattr(value, "__float__") and getattr(value, "ndim", 0) == 0:  # numpy and torch scalars too, arrays not
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
    if not math.isfinite(number):
        raise UserFunctionError(f"{where} returned {shorten(value)} as its {what}; it must be a finite number")
    return number


def _as_list(values: Any) -> list[Any] | None:
    try:
        return list(values)
    except TypeError:
        return None
