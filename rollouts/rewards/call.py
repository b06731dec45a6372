"""How a user's function is called and its answer checked.

One rule for generate, reward, group_reward and filter: a coroutine function is awaited where it is,
anything else runs in a thread (and if it answers with an awaitable, that is awaited). A thread whose caller
has gone away is abandoned, not stopped. Sync reward functions that a config names run in processes instead,
which can be stopped: rewards/workers.py makes async functions of them, which keep their own time.
"""

import contextlib
import inspect
import math
import sys
import time
import types
from collections.abc import Awaitable, Callable, Generator, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import trio

from rollouts.data.mixture import SOURCE_FIELD
from rollouts.engines.wire import HIGHEST_LOG_PROB, LOWEST_LOG_PROB
from rollouts.errors import EnvironmentFailed, RewardTimeout, RolloutsError, UserFunctionError
from rollouts.protocols import FilterFn, GenerateFn, GroupRewardFn, InferenceEngine, RankerFn, RewardFn, Say
from rollouts.rewards.check import (
    check_decision,
    check_group_rewards,
    check_metadata,
    check_number,
    check_reward,
    describe,
    function_name,
    is_async,
    shorten,
)
from rollouts.types import (
    Completion,
    FilterDecision,
    FloatArray,
    Function,
    IntArray,
    RewardResult,
    Sample,
    SampleGroup,
    SamplingParams,
    Status,
)

OWN_METADATA = ("prompt_id", "epoch", SOURCE_FIELD)  # of a sample, whatever a generate function answers
# calls of sync functions at once: enough to hide waiting for a service; Python code shares one lock anyway
USER_THREADS = 32
_user_threads: trio.lowlevel.RunVar[trio.CapacityLimiter | None] = trio.lowlevel.RunVar("user threads")
BLOCKING_S = 0.1  # in one step; above it an async function is named as blocking the event loop
_watchers: list[Callable[[str, float], None]] = []  # get an async function's name and the seconds of a step


async def call_generate(
    generate: GenerateFn,
    sample: Sample,
    engine: InferenceEngine,
    sampling: SamplingParams,
    *,
    newest_version: Callable[[], int] = lambda: sys.maxsize,
    made: Sequence[Completion] | None = None,
) -> tuple[Sample, ...]:
    """The segments of one trajectory, at least one, none of them pending; they carry the id of `sample`
    (later ones id.1, id.2, …), its group, and its prompt_id, epoch and source.

    newest_version: the trainer's, where the segments are to train. made: what the engine has answered when
    the function returns, where that is known. Raises what the engine and the data raised
    (EngineError, DataError, ModelError); UserFunctionError for any other exception, for an answer that is not
    a sample or a sequence of samples, and for one that could not be trained on or recorded.
    """
    where = f"generate function {function_name(generate)} on sample {sample.id}"
    own = {key: sample.metadata[key] for key in OWN_METADATA if key in sample.metadata}
    try:
        answer = await call_user(generate, sample, engine, sampling, where=where)
    except UserFunctionError as error:
        cause = error.__cause__
        users = isinstance(cause, UserFunctionError) and not isinstance(cause, EnvironmentFailed)
        if isinstance(cause, RolloutsError) and not users:
            raise cause from None
        raise
    segments = [answer] if isinstance(answer, Sample) else answer
    if not (isinstance(segments, Sequence) and segments and all(isinstance(s, Sample) for s in segments)):
        raise UserFunctionError(
            f"{where} returned {shorten(answer)}; it must return a Sample or a sequence of Samples, not empty"
        )
    named = []
    for index, segment in enumerate(segments):
        check_metadata(segment, where)
        _check_trains(segment, where, engine.features.vocab_size, newest_version(), made)
        name = f"{sample.id}.{index}" if index else sample.id  # number_trajectories reads it
        fields = {"id": name, "group_index": sample.group_index, "metadata": {**segment.metadata, **own}}
        same = all(getattr(segment, key) == value for key, value in fields.items())
        named.append(segment if same else replace(segment, **fields))
    return tuple(named)


def _check_trains(
    sample: Sample, where: str, vocab_size: int, newest: int, made: Sequence[Completion] | None
) -> None:
    """Raises UserFunctionError, beginning with `where`, for a sample that would fail its batch, or falsify
    it: what its constructor cannot know.
    """
    mask, largest = sample.loss_mask, sample.tokens.max(initial=0)
    log_probs, versions = sample.rollout_log_probs[mask], sample.weight_versions[mask]
    odd = log_probs[(log_probs > HIGHEST_LOG_PROB) | (log_probs < LOWEST_LOG_PROB)]
    trains = newest < sys.maxsize
    strange = versions[(versions < 0) | (versions > newest)] if trains else ()
    foreign: Any = ()
    if trains and made is not None:
        parts = [(one.token_ids, one.log_probs, one.weight_versions) for one in made]
        own = sample.tokens[mask], log_probs, versions
        whole = [np.concatenate(column) for column in zip(*parts, strict=True)]
        # what was answered, in its order, is the rule; rows are looked up where it is not
        if not (whole and all(map(np.array_equal, own, whole))):
            given = {row for part in parts for row in _made_rows(*part)}
            foreign = [row[0] for row in _made_rows(*own) if row not in given]
    for rule, broken in {
        "status is still pending; set completed, truncated, aborted or failed": (
            sample.status is Status.PENDING
        ),
        "tokens are empty; return what was generated, or the sample as failed": (
            trains and not len(mask) and sample.status in (Status.COMPLETED, Status.TRUNCATED)
        ),
        "loss_mask trains the first token; nothing comes before it to predict it from: mask it out": (
            mask[:1].any()
        ),
        f"tokens hold the id {largest}; the model's are 0 to {vocab_size - 1}": largest >= vocab_size,
        f"rollout_log_probs hold {odd[:1]} for a token that trains; a log-prob is at most 0, and at least"
        f" {LOWEST_LOG_PROB:g}": len(odd),
        f"weight_versions hold {strange[:1]} for a token that trains, and the trainer is at {newest}; take"
        " them and the log-probs over from the completion, or mask it out": len(strange),
        f"tokens hold {foreign[:1]} to train, with a log-prob that the engine has not given for it at that"
        " version; take them over from the completion, or mask it out": len(foreign),
    }.items():
        if broken:
            raise UserFunctionError(f"{where} returned a sample whose {rule}")


def _made_rows(tokens: IntArray, log_probs: FloatArray, versions: IntArray) -> list[tuple[int, float, int]]:
    """Each token with its log-prob, as samples hold it, and version."""
    numbers = np.asarray(log_probs, np.float32)
    return [*zip(np.asarray(tokens).tolist(), numbers.tolist(), np.asarray(versions).tolist(), strict=True)]


async def call_reward(reward: RewardFn, sample: Sample, *, timeout_s: float = math.inf) -> RewardResult:
    """The reward as a checked record. `timeout_s` counts from when the function starts, not while it waits
    for a thread.

    Raises UserFunctionError naming function and sample if it raises or its answer is no reward; RewardTimeout
    if it takes too long.
    """
    where = f"reward function {function_name(reward)} on sample {sample.id}"
    return check_reward(await call_user(reward, sample, where=where, timeout_s=timeout_s), where)


async def call_group_reward(
    group_reward: GroupRewardFn, samples: Sequence[Sample], *, timeout_s: float = math.inf
) -> tuple[RewardResult, ...]:
    """One checked reward per sample, in their order. Raises like call_reward, and if the number of rewards is
    another than of samples.
    """
    where = f"group reward function {function_name(group_reward)} on the group of sample {samples[0].id}"
    answer = await call_user(group_reward, tuple(samples), where=where, timeout_s=timeout_s)
    return check_group_rewards(answer, len(samples), where)


async def call_filter(
    filter_: FilterFn, group: SampleGroup, *, timeout_s: float = math.inf
) -> FilterDecision:
    """The decision; a drop without a reason gets the function's name as its reason. `timeout_s` counts like
    that of call_reward.

    Raises UserFunctionError naming function and group, also if the filter takes too long.
    """
    name = function_name(filter_)
    where = f"filter {name} on group {group.group_index} (prompt {group.prompt_id})"
    answer = await call_user(filter_, group, where=where, timeout_s=timeout_s, kind=UserFunctionError)
    for sample in group.samples:
        check_metadata(sample, where)
    return check_decision(answer, name, where)


async def call_ranker(ranker: RankerFn, group: SampleGroup, *, timeout_s: float) -> float:
    """The ranker's number. Raises like call_filter."""
    where = f"ranker {function_name(ranker)} on group {group.group_index} (prompt {group.prompt_id})"
    answer = await call_user(ranker, group, where=where, timeout_s=timeout_s, kind=UserFunctionError)
    return check_number(answer, where, "score")


@contextlib.contextmanager
def watch_blocking(warn: Say) -> Iterator[None]:
    """While open, `warn` gets a sentence, once for each function, about an async user function that held the
    event loop for more than BLOCKING_S in one step.

    Wall time is measured, so on a very busy machine a function that did little can be named.
    """
    named = set()

    def look(what: str, held_s: float) -> None:
        if held_s > BLOCKING_S and what not in named:
            named.add(what)
            warn(
                f"async {what} blocked the event loop for {held_s:.2f} s in one step, in which nothing"
                " else could go on; await what takes long, or make the function sync: a reward, a tool or an"
                " environment then runs in a worker process, any other function in a thread"
            )

    _watchers.append(look)
    try:
        yield
    finally:
        _watchers.remove(look)


# --- calling ------------------------------------------------------------------------------------------------


async def call_user(
    function: Function,
    *arguments: object,
    where: str,
    timeout_s: float = math.inf,
    kind: type[UserFunctionError] | None = None,
    threads: bool = True,
) -> Any:
    """The function's answer. Raises `kind` (None: RewardTimeout) after timeout_s, and (None:
    UserFunctionError) from whatever it raised. Without threads a sync one runs here.

    Cancellation and KeyboardInterrupt (Ctrl-C where nobody receives signals) pass through.
    """
    if getattr(function, "keeps_own_time", False) is True:  # waiting for a worker is not the function's time
        return await function(*arguments)
    what = where.partition(" on ")[0]
    with trio.CancelScope() as scope:
        try:
            if is_async(function) or not threads:
                scope.deadline = trio.current_time() + timeout_s
                answer = function(*arguments)
            else:
                if (places := _user_threads.get(None)) is None:
                    _user_threads.set(places := trio.CapacityLimiter(USER_THREADS))
                async with places:
                    scope.deadline = trio.current_time() + timeout_s
                    # A limiter of its own: a thread that is abandoned must not keep its place, or as many
                    # hung calls as there are places would stop everything. The budget of failed samples
                    # bounds how many there can be. In a tuple, for trio refuses a bare coroutine.
                    (answer,) = await trio.to_thread.run_sync(
                        lambda: (function(*arguments),),
                        thread_name=function_name(function),
                        abandon_on_cancel=True,
                        limiter=trio.CapacityLimiter(1),
                    )
            answer = await _timed(answer, what) if inspect.isawaitable(answer) else answer
        except BaseException as error:
            inner = find_own(error)
            raise (kind or UserFunctionError)(f"{where} raised {describe(inner)}") from inner
        if not scope.cancel_called:  # otherwise it answered too late, having kept the cancellation to itself
            return answer
    raise (kind or RewardTimeout)(
        f"{where} took longer than {timeout_s:g} s; make it faster or raise rl.rollout.reward_timeout_s (of"
        " tools and environments: tool_timeout_s)"
    )


@types.coroutine
def _timed(awaitable: Awaitable[Any], what: str) -> Generator[Any, Any, Any]:
    """What the awaitable returns. The watchers get the seconds of each of its steps."""
    steps = awaitable.__await__()
    resume = partial(next, steps)
    while True:
        began_s = time.perf_counter()
        try:
            trap = resume()
        except StopIteration as stop:
            return stop.value
        finally:
            for watch in _watchers:
                watch(what, time.perf_counter() - began_s)
        try:
            resume = partial(steps.send, (yield trap))
        except BaseException as error:  # thrown in: the function's own
            resume = partial(steps.throw, error)


def find_own(error: BaseException) -> BaseException:
    """What the function raised, without the groups that nurseries put around one error; SystemExit and the
    like are its own too. Raises the cancellation or KeyboardInterrupt that is in it.
    """
    if isinstance(error, trio.Cancelled | KeyboardInterrupt):
        raise error
    if isinstance(error, BaseExceptionGroup):
        if (passing := error.subgroup((trio.Cancelled, KeyboardInterrupt))) is not None:
            raise passing
        if len(error.exceptions) == 1:
            return find_own(error.exceptions[0])
    return error
