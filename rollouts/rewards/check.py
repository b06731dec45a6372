"""What a user's function may answer. Plain functions without trio: the asynchronous callers, the worker
processes and the synchronous tier share them.
"""

import contextlib
import importlib
import inspect
import itertools
import math
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence, Set, Sized
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, get_args

import numpy as np

from rollouts.errors import ConfigError, UserFunctionError, require
from rollouts.messages import check_json
from rollouts.types import FilterDecision, Function, Numbers, RewardResult, Sample

LARGEST_REWARD = float(np.finfo(np.float32).max)  # batches hold rewards in float32
TURNS = "turns"  # the part of a reward that the turns of a trajectory have earned
NOTE_CHARS = 10_000  # of a note; the rest is cut
TRACEBACK_FRAMES, TRACEBACK_CHARS = 4, 2000  # of a failure's record, the last
# exceptions that a user's function may raise as its own; KeyboardInterrupt and Cancelled are not among them
RAISED = (Exception, SystemExit, GeneratorExit)

PlainReward = Callable[[Sample], RewardResult]
"""A reward as this library makes them: not async, and its answer is the record."""


def check_reward(answer: Any, where: str) -> RewardResult:
    """`answer` as a record: a finite number, a mapping of named parts whose sum is the reward, or a
    RewardResult; True is 1.0.

    Raises UserFunctionError, beginning with `where`, for anything else: NaN, infinity, what float32 cannot
    hold, None, text, no parts.
    """
    if isinstance(answer, Mapping):
        if not answer:
            raise UserFunctionError(f"{where} returned a mapping without parts; name at least one")
        parts = _check_parts(answer, where)
        return RewardResult(add_up(parts.values(), where), parts)
    if not isinstance(answer, RewardResult):
        answer = RewardResult(answer)
    parts, note = _check_parts(answer.parts, where), answer.note
    if note is not None:
        _check_text(note, where, "note")
        if len(note) > NOTE_CHARS:
            note = f"{note[:NOTE_CHARS]} … (cut: the note had {len(note)} characters)"
    return RewardResult(check_number(answer.reward, where, "reward"), parts, note)


def check_group_rewards(answer: Any, count: int, where: str) -> tuple[RewardResult, ...]:
    """`answer`, a sequence or an array, as `count` records.

    Raises UserFunctionError, beginning with `where`, if it has another number of them (an iterator, which may
    have no end, or a set, which has no order, is refused) or one is no reward.
    """
    values = []
    if isinstance(answer, Sized) and not isinstance(answer, str | bytes | Mapping | Set):
        with contextlib.suppress(*RAISED):  # an array without axes, or an object of the user's
            values = list(itertools.islice(iter(answer), count + 1))  # type: ignore[call-overload]
    if len(values) != count:
        raise UserFunctionError(
            f"{where} returned {shorten(answer)}; it must return {count} rewards, one per sample"
        )
    return tuple(check_reward(value, f"{where}, reward {index}") for index, value in enumerate(values))


def check_decision(answer: object, filter_name: str, where: str) -> FilterDecision:
    """A filter's answer as a record; a drop without a reason gets the filter's name as its reason.

    Raises UserFunctionError, beginning with `where`, for anything but True, False and a FilterDecision.
    """
    match FilterDecision(bool(answer)) if isinstance(answer, bool | np.bool_) else answer:
        case FilterDecision(bool() | np.bool_() as keep, str() as reason, str() as detail):
            _check_text(reason + detail, where, "reason or detail")
            return FilterDecision(bool(keep), reason or ("" if keep else filter_name), detail)
    raise UserFunctionError(
        f"{where} returned {shorten(answer)}; it must return True, False or a FilterDecision (keep: True or"
        " False; reason and detail: text)"
    )


def require_choice(name: str, value: object, literal: Any) -> None:
    """Raises ConfigError naming the option unless its value is one of a Literal's, or of a collection."""
    known = get_args(literal) or literal
    require(value in known, f"{name}={value!r}; it must be one of {', '.join(known)}")


def import_extra(module: str, what: str, extra: str = "rewards") -> Any:
    """A library that only this needs. Raises ConfigError naming the extra if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"{what} needs {module} ({error}); pip install 'rollouts-rl[{extra}]'") from error


def apply_reward(sample: Sample, result: RewardResult) -> Sample:
    """The sample with its reward and the named parts; a note goes to metadata["reward_note"].

    Raises UserFunctionError if its metadata are no longer JSON: the function has changed them.
    """
    check_metadata(sample, "a reward function")
    metadata = sample.metadata if result.note is None else {**sample.metadata, "reward_note": result.note}
    return replace(sample, reward=result.reward, rewards=result.parts, metadata=metadata)


def reward_trajectory(segments: Sequence[Sample], final: RewardResult) -> tuple[Sample, ...]:
    """The segments of a trajectory with the reward that all share: `final` and the rewards of its turns.

    Where a turn has one, or the last segment already a part TURNS, the parts are those of `final`, without
    any the part "final", and TURNS: the sum of theirs. Raises UserFunctionError as apply_reward, and where
    float32 cannot hold the sum.
    """
    turns = [one.turn_rewards.sum(dtype=np.float64) for one in segments]
    if any(turns) or TURNS in segments[-1].rewards:
        parts = {**(final.parts or {"final": final.reward}), TURNS: math.fsum(turns)}
        total = add_up((final.reward, *turns), f"the turns of sample {segments[-1].id}")
        final = replace(final, reward=total, parts=parts)
    return tuple(apply_reward(one, final) for one in segments)


def check_metadata(sample: Sample, where: str) -> None:
    """Raises UserFunctionError, beginning with `where`, for metadata that no file of JSON can hold."""
    try:
        check_json("metadata", sample.metadata)
    except (ValueError, RecursionError) as error:
        raise UserFunctionError(
            f"{where} left in sample {sample.id} what cannot be recorded: {error}"
        ) from error


def function_name(function: Function) -> str:
    """The name by which errors and metrics call a function, without its module: through functools.partial;
    the class of a callable object.
    """
    function = _unwrap(function)
    return getattr(function, "__name__", None) or type(function).__name__


def is_async(function: Function) -> bool:
    """Whether calling it gives a coroutine: a coroutine function, also through functools.partial, or an
    object with an async __call__.
    """
    function = _unwrap(function)
    return any(map(inspect.iscoroutinefunction, (function, function.__call__)))


def _unwrap(function: Function) -> Function:
    while isinstance(function, partial):
        function = function.func
    return function


def show_traceback(error: BaseException, tb: TracebackType | None) -> str:
    """The last frames of `tb` and the error, as Python prints them, in text that any file can hold."""
    lines = traceback.format_exception(type(error), error, tb, limit=-TRACEBACK_FRAMES, chain=False)
    return "".join(lines).encode(errors="replace").decode()[-TRACEBACK_CHARS:]


def describe(error: BaseException) -> str:
    """The error's class and message. Raises nothing, whatever the error's __str__ does."""
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException as second:
        return f"{type(error).__name__}: (its text cannot be had: {type(second).__name__})"


def shorten(value: object) -> str:
    """The value's repr in at most 80 characters. Raises nothing, whatever its __repr__ does."""
    try:
        text = repr(value)
    except BaseException as error:
        return f"a {type(value).__name__} (its repr cannot be had: {type(error).__name__})"
    return text if len(text) <= 80 else text[:77] + "..."


def add_up(values: Iterable[float], where: str) -> float:
    """The sum. Raises UserFunctionError, beginning with `where`, if it is not finite."""
    try:
        return check_number(math.fsum(values), where, "sum of its parts")
    except (OverflowError, ValueError) as error:  # ValueError: inf - inf
        raise UserFunctionError(
            f"{where} returned parts whose sum is not finite; keep them smaller"
        ) from error


def _check_parts(parts: Mapping[Any, Any], where: str) -> Numbers:
    try:
        items = [*parts.items()]
    except RAISED as error:
        raise UserFunctionError(f"{where} returned parts that cannot be read: {describe(error)}") from error
    for name, _ in items:
        _check_text(name or None, where, "name of a part")
    return {name: check_number(value, where, f"part {shorten(name)}") for name, value in items}


def check_number(value: Any, where: str, what: str) -> float:
    """Raises UserFunctionError, beginning with `where`, for what is no finite number of float32."""
    number, cause = math.nan, None
    try:
        if hasattr(value, "__float__") and getattr(value, "ndim", 0) == 0:  # numpy's and torch's scalars too
            number = float(value)
    except RAISED as error:  # a tensor of complex numbers raises RuntimeError, a user's class anything
        cause = error
    if not abs(number) <= LARGEST_REWARD:
        raise UserFunctionError(
            f"{where} returned {shorten(value)} as its {what}; it must be a finite number, at most"
            f" {LARGEST_REWARD:.3g} (float32)"
        ) from cause
    return number


def _check_text(text: object, where: str, what: str) -> None:
    """Raises UserFunctionError for what is no text, or none that a file can hold (half a surrogate pair)."""
    try:
        str.encode(text)  # pyright: ignore[reportArgumentType]
    except (TypeError, UnicodeEncodeError) as error:
        raise UserFunctionError(
            f"{where} returned {shorten(text)} as its {what}, which must be text in UTF-8 ({error}); half a"
            " surrogate pair goes with text.encode('utf-8', 'replace').decode()"
        ) from error
