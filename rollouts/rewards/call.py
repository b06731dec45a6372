"""How a user's function is called and its answer checked.

One rule for generate, reward, group_reward and filter alike: a coroutine function is awaited where it is,
anything else runs in a thread (and if it answers with an awaitable, that is awaited). A thread whose caller
has gone away is abandoned, not stopped. Reward functions that have a name run in processes instead, which can
be stopped: what rewards/workers.py makes of them looks like a coroutine function here, and keeps its own
time.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import trio

from rollouts.errors import RewardTimeout, RolloutsError, UserFunctionError
from rollouts.protocols import FilterFn, GenerateFn, GroupRewardFn, InferenceEngine, RewardFn
from rollouts.rewards.blocking import running_in_loop
from rollouts.rewards.check import (
    check_decision,
    check_group_rewards,
    check_reward,
    describe,
    function_name,
    is_async,
    shorten,
)
from rollouts.rewards.combine import CombineFn, check_combined, describe_combine
from rollouts.types import FilterDecision, RewardResult, Sample, SampleGroup, SamplingParams, Status

# calls of sync functions at once: enough to hide waiting for a sandbox or a service; Python code shares one
# lock anyway
USER_THREADS = 32


async def call_generate(
    generate: GenerateFn,
    sample: Sample,
    engine: InferenceEngine,
    sampling: SamplingParams,
    *,
    limiter: trio.CapacityLimiter | None = None,
) -> tuple[Sample, ...]:
    """The segments of one trajectory, at least one, none of them pending; they carry the id of `sample`
    (later ones id.1, id.2, …) and its group.

    Raises what the engine and the data raised (EngineError, DataError, ModelError); UserFunctionError for any
    other exception and for an answer that is not a sample or a sequence of samples.
    """
    where = f"generate function {function_name(generate)} on sample {sample.id}"
    try:
        answer = await _call(generate, sample, engine, sampling, kind="generate", limiter=limiter)
    except BaseException as error:
        inner = _find_own(error)
        if isinstance(inner, RolloutsError) and not isinstance(inner, UserFunctionError):
            raise inner from (None if inner is error else error)
        raise UserFunctionError(f"{where} raised {describe(inner)}") from inner
    segments = (
        (answer,) if isinstance(answer, Sample) else tuple(answer) if isinstance(answer, Sequence) else ()
    )
    if not segments or not all(isinstance(segment, Sample) for segment in segments):
        raise UserFunctionError(
            f"{where} returned {shorten(answer)}; it must return a Sample or a sequence of Samples that is"
            " not empty"
        )
    if any(segment.status is Status.PENDING for segment in segments):
        raise UserFunctionError(
            f"{where} returned a sample whose status is still pending; set completed, truncated, aborted or"
            " failed"
        )
    return tuple(_name_segment(segment, sample, index) for index, segment in enumerate(segments))


def _name_segment(segment: Sample, sample: Sample, index: int) -> Sample:
    name = sample.id if index == 0 else f"{sample.id}.{index}"  # number_trajectories reads it
    if segment.id == name and segment.group_index == sample.group_index:
        return segment
    return replace(segment, id=name, group_index=sample.group_index)


async def call_reward(
    reward: RewardFn,
    sample: Sample,
    *,
    timeout_s: float = math.inf,
    limiter: trio.CapacityLimiter | None = None,
) -> RewardResult:
    """The reward as a checked record. `timeout_s` counts from when the function starts, not while it waits
    for a thread.

    Raises UserFunctionError naming function and sample if it raises or its answer is no reward; RewardTimeout
    if it takes too long.
    """
    where = f"reward function {function_name(reward)} on sample {sample.id}"
    return check_reward(
        await _call_in_time(reward, sample, where=where, timeout_s=timeout_s, limiter=limiter), where
    )


async def call_group_reward(
    group_reward: GroupRewardFn,
    samples: Sequence[Sample],
    *,
    timeout_s: float = math.inf,
    limiter: trio.CapacityLimiter | None = None,
) -> tuple[RewardResult, ...]:
    """One checked reward per sample, in their order. Raises like call_reward, and if the number of rewards is
    another than of samples.
    """
    where = f"group reward function {function_name(group_reward)} on the group of sample {samples[0].id}"
    answer = await _call_in_time(
        group_reward, tuple(samples), where=where, timeout_s=timeout_s, limiter=limiter
    )
    return check_group_rewards(answer, len(samples), where)


async def call_combine(
    combine: CombineFn, result: RewardResult, *, of: str, timeout_s: float = math.inf
) -> RewardResult:
    """The result with the reward combine(parts); `of` says in errors whose parts they are. Raises like
    call_reward.
    """
    where = describe_combine(combine, result, of=of)
    return check_combined(
        await _call_in_time(combine, dict(result.parts), where=where, timeout_s=timeout_s, limiter=None),
        result,
        where,
    )


async def call_filter(
    filter_: FilterFn,
    group: SampleGroup,
    *,
    timeout_s: float = math.inf,
    limiter: trio.CapacityLimiter | None = None,
) -> FilterDecision:
    """The decision; a drop without a reason gets the function's name as its reason. `timeout_s` counts like
    that of call_reward.

    Raises UserFunctionError naming function and group, also if the filter takes too long.
    """
    name = function_name(filter_)
    where = f"filter {name} on group {group.group_index} (prompt {group.prompt_id})"
    try:
        answer = await _call_before(filter_, group, kind="filter", timeout_s=timeout_s, limiter=limiter)
    except _TooLate:
        raise UserFunctionError(
            f"{where} took longer than {timeout_s:g} s; make it faster or raise rl.rollout.reward_timeout_s"
        ) from None
    except BaseException as error:
        inner = _find_own(error)
        raise UserFunctionError(f"{where} raised {describe(inner)}") from inner
    return check_decision(answer, name, where)


# --- calling ------------------------------------------------------------------------------------------------


class _TooLate(Exception):
    """The deadline of a call has passed; no user function can raise this one."""


async def _call_in_time(
    function: Callable[..., Any],
    argument: object,
    *,
    where: str,
    timeout_s: float,
    limiter: trio.CapacityLimiter | None,
) -> Any:
    if keeps_own_time(function):
        return await function(argument)  # raises what it means itself
    try:
        kind = where.partition(" function ")[0]
        return await _call_before(function, argument, kind=kind, timeout_s=timeout_s, limiter=limiter)
    except _TooLate:
        raise RewardTimeout(
            f"{where} took longer than {timeout_s:g} s; make it faster or raise rl.rollout.reward_timeout_s"
        ) from None
    except BaseException as error:
        inner = _find_own(error)
        raise UserFunctionError(f"{where} raised {describe(inner)}") from inner


def keeps_own_time(function: Callable[..., Any]) -> bool:
    """Whether the function is one of RewardWorkers': it waits for a free worker, which must not count as the
    function's time.
    """
    return getattr(function, "keeps_own_time", False) is True


async def _call_before(
    function: Callable[..., Any],
    argument: object,
    *,
    kind: str,
    timeout_s: float,
    limiter: trio.CapacityLimiter | None,
) -> Any:
    with trio.CancelScope() as scope:
        answer = await _call(
            function, argument, kind=kind, limiter=limiter, on_start=lambda: _set_deadline(scope, timeout_s)
        )
        if not scope.cancel_called:  # else it kept the cancellation to itself, or never awaited
            return answer
    raise _TooLate


def _set_deadline(scope: trio.CancelScope, timeout_s: float) -> None:
    scope.deadline = trio.current_time() + timeout_s


async def _call(
    function: Callable[..., Any],
    *arguments: object,
    kind: str,
    limiter: trio.CapacityLimiter | None,
    on_start: Callable[[], None] = lambda: None,
) -> Any:
    if is_async(function):
        on_start()
        with running_in_loop(kind, function_name(function)):
            return await function(*arguments)
    async with limiter or trio.to_thread.current_default_thread_limiter():
        on_start()
        # A limiter of its own: a thread that is abandoned must not keep its place, or as many hung calls as
        # there are places would stop everything. The budget of failed samples bounds how many there can be.
        # The answer comes in a tuple, for trio refuses a bare coroutine as a thread's answer.
        (answer,) = await trio.to_thread.run_sync(
            lambda: (function(*arguments),),
            thread_name=function_name(function),
            abandon_on_cancel=True,
            limiter=trio.CapacityLimiter(1),
        )
    if not inspect.isawaitable(answer):
        return answer
    with running_in_loop(kind, function_name(function)):
        return await answer


def _find_own(error: BaseException) -> BaseException:
    """What the function raised, without the groups that nurseries put around one error; SystemExit and the
    like are its own too.

    Raises the cancellation if there is one in it: who is cancelled has nothing more to say. Likewise
    KeyboardInterrupt, which is Ctrl-C wherever nobody receives signals.
    """
    if isinstance(error, trio.Cancelled | KeyboardInterrupt):
        raise error
    if isinstance(error, BaseExceptionGroup):
        passing = error.subgroup((trio.Cancelled, KeyboardInterrupt))
        if passing is not None:
            raise passing
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
