"""How one group comes about: generate → reward for each sample at once, then group reward, filters and ranker
when the last of them is done.

    prompt ─► G members in one nursery ─► those that did not fail ─► group reward ─► filters ─► decision
               generate, then reward        fewer than 2: failed_samples

How far each member has come is in the Group, also while it runs: whoever stops the group can go on from there
later. Told to stop, a member whose engine aborts it ends with the tokens it has, and one that waits for
something else with what it has noted of its progress; otherwise aborts are continued (continuing.py).

What users, data and engines do wrong ends in the record of a sample or of the group; only cancellation and
our own bugs leave as exceptions.
"""

import logging
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from statistics import mode
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np
import trio

from rollouts.crash_points import reach
from rollouts.data.data_buffer import PromptRow
from rollouts.errors import (
    DataError,
    EngineError,
    EnvironmentFailed,
    InfrastructureError,
    RequestRefused,
    RolloutsError,
    TrajectoryLeftOut,
    UserFunctionError,
)
from rollouts.generation.continuing import ContinuingEngine
from rollouts.generation.generate import compute_request_seed
from rollouts.generation.samples import check_enough, make_samples
from rollouts.metrics.spans import REWARDS, Answered, SpanRecorder, listing_answers
from rollouts.protocols import FilterFn, GenerateFn, GroupRewardFn, InferenceEngine, RankerFn, RewardFn
from rollouts.rewards.call import call_filter, call_generate, call_group_reward, call_ranker, call_reward
from rollouts.rewards.check import (
    apply_reward,
    check_metadata,
    check_reward,
    function_name,
    reward_trajectory,
    show_traceback,
)
from rollouts.rewards.workers import RaisedInWorker
from rollouts.types import (
    FilterDecision,
    JSONObject,
    RewardResult,
    Sample,
    SampleGroup,
    SamplingParams,
    Status,
    live,
)

# the class of samples that an engine, not anything of their own, kept from being generated
WAITS_S = 60.0  # without a change, after which the samples that are waited for are named
INFRASTRUCTURE = "infrastructure"
LEFT_OUT = "left_out"  # of trajectories that a limit ended, where rl.rollout.at_limit drops them


class GroupPlan(NamedTuple):
    """Everything that is the same for all groups of a batch."""

    engine: InferenceEngine
    generate: GenerateFn
    reward: RewardFn | None
    sampling: SamplingParams
    seed: int  # of the run
    reward_timeout_s: float
    group_reward: GroupRewardFn | None = None
    filters: Sequence[FilterFn] = ()
    ranker: RankerFn | None = None
    generate_timeout_s: float = math.inf  # between two requests to the engine
    needs_reward: bool = True  # False: where nothing scores samples they train without
    # the trainer's version, which no token is newer than; without bound where nothing trains
    policy_version: Callable[[], int] = lambda: sys.maxsize
    # whether the tokens of an aborted sample, the oldest of this version, are too old to go on from
    is_stale: Callable[[int | None], bool] = lambda oldest: False
    is_stopping: Callable[[], bool] = lambda: False  # whether an aborted sample ends with what it has
    on_generated: Callable[[], None] = lambda: None  # called whenever a member no longer generates
    # gets 1 and -1 for a trajectory that waits for something other than the engine, and no longer
    on_waiting: Callable[[int], None] = lambda change: None
    spans: SpanRecorder | None = None  # is told when each sample was generated and scored


@dataclass
class Member:
    """How far one sample of a group has come: pending → partial → generated → scored."""

    pending: Sample  # as it was before anything was generated
    partial: Sample | None = None  # aborted, or noted on the way: with the tokens that it goes on from
    segments: tuple[Sample, ...] = ()  # generated, or one failed sample; empty: not yet
    scored: bool = False  # nothing is left to do for it alone: it has its reward, or has failed
    generate_s: float = 0.0
    reward_s: float | None = None  # None: not scored by itself

    @property
    def failed(self) -> bool:
        return bool(self.segments) and self.segments[-1].status is Status.FAILED


@live
class Group:
    """One attempt at a prompt. run_group moves it on, and nobody else does while it runs."""

    index: int  # unique in the run
    prompt: PromptRow
    members: list[Member]  # in launch order
    decision: FilterDecision | None = None  # whether it may train; None: it has not finished
    score: float = 0.0  # of the ranker
    deadline: int = 0  # the last version that may consume it, while it is open: see pacing.py
    error: RolloutsError | None = None  # what stops the whole call
    calls: set[ContinuingEngine] = field(default_factory=set)  # of the generate function, under way

    @property
    def samples(self) -> tuple[Sample, ...]:
        """What may train: the segments of members that have not failed, or the tokens they go on from."""
        return tuple(
            sample
            for member in self.members
            if not member.failed
            for sample in member.segments or (() if member.partial is None else (member.partial,))
        )

    @property
    def sample_group(self) -> SampleGroup:
        return SampleGroup(self.index, self.prompt.prompt_id, self.samples)

    @property
    def failed(self) -> tuple[Sample, ...]:
        return tuple(member.segments[-1] for member in self.members if member.failed)

    @property
    def failure_class(self) -> str | None:
        """The commonest class of failure, if the group was dropped for its failed samples."""
        if self.decision is None or _check_left(self.members).keep:
            return None
        return mode(map(failure_class_of, self.failed))

    @property
    def oldest_version(self) -> int | None:
        """The oldest weight version of any token that trains; None if there is none."""
        versions = [sample.oldest_version for sample in self.samples]
        return min((version for version in versions if version is not None), default=None)

    def copy(self) -> "Group":
        """A copy that stays as it is while this group goes on."""
        return replace(self, members=[*map(replace, self.members)], error=None)


def start_group(index: int, prompt: PromptRow, samples_per_prompt: int) -> Group:
    """A group of which nothing is done yet."""
    return Group(
        index, prompt, [Member(pending=sample) for sample in make_samples(index, prompt, samples_per_prompt)]
    )


async def run_group(plan: GroupPlan, group: Group) -> bool:
    """Whether the group has finished, with a decision or an error; False if it was told to stop before that.
    Raises only Cancelled.
    """

    async def run_member(member: Member) -> None:
        try:
            if not member.segments:
                call = ContinuingEngine(plan, member)
                group.calls.add(call)
                try:
                    await generate_member(call)
                finally:
                    group.calls.discard(call)
                    plan.on_generated()
            if member.segments:
                await score_member(plan, member)
        except RolloutsError as error:
            group.error = group.error or error
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for member in group.members:
            if not member.scored:
                nursery.start_soon(run_member, member)
    if group.error is None and all(member.scored for member in group.members):
        try:
            await close_group(plan, group)
        except RolloutsError as error:
            group.error = error
    return group.decision is not None or group.error is not None


async def tell_waiting(changed: trio.lowlevel.ParkingLot, list_waiting: Callable[[], list[str]]) -> None:
    """Names the samples that are waited for each time that `changed` was quiet for WAITS_S."""
    while True:
        with trio.move_on_after(WAITS_S) as limit:
            await changed.park()
        if limit.cancelled_caught and (waiting := list_waiting()):
            logging.getLogger("rollouts").warning(
                "nothing has moved on for %g s; samples under way: %d, %s%s",
                WAITS_S,
                len(waiting),
                ", ".join(waiting[:4]),
                ", …" * (len(waiting) > 4),
            )


# --- one member ---------------------------------------------------------------------------------------------


async def make_trajectory(plan: GroupPlan, sample: Sample) -> Member:
    """A generated and scored trajectory, or the sample as failed. Raises what stops the whole call: see
    classify_generate_error.
    """
    return await score_member(plan, await generate_member(ContinuingEngine(plan, Member(pending=sample))))


async def generate_member(call: ContinuingEngine) -> Member:
    """The member with its segments, or failed, or, if the plan is stopping, with the tokens it has. Raises
    like make_trajectory.

    A sample that comes back aborted goes on where it stopped, if it is one segment, or else from what was
    noted; or starts again if there is nothing, or its tokens are not fresh enough.
    """
    plan, member = call.plan, call.member
    started, function = trio.current_time(), function_name(plan.generate)
    try:
        segments = ()
        with listing_answers() as answers, call.running():
            segments = await _generate_segments(call)
        if call.scope.cancelled_caught and not plan.is_stopping():
            raise UserFunctionError(
                f"generate function {function} on sample {member.pending.id} took longer than"
                f" {plan.generate_timeout_s:g} s without asking the engine; make it faster or raise"
                " rl.rollout.generate_timeout_s"
            )
        segments = segments or (member.partial or member.pending,)  # without: it was told to stop
        if segments[-1].status is Status.FAILED:
            said = segments[-1].metadata.get("failure") or "the generate function returned it as failed"
            segments = (fail_sample(segments[-1], UserFunctionError(str(said)), "generate", function),)
    except RolloutsError as error:
        segments = (fail_sample(member.pending, error, classify_generate_error(error), function),)
        answers = []
    last, now = segments[-1], trio.current_time()
    if plan.spans is not None:  # one for each request that a fleet had answered, else one for all
        tokens = sum(segment.response_length for segment in segments)
        for one in answers or [Answered(plan.engine.features.name, started, now - started, tokens)]:
            plan.spans.add(
                "generate", one.engine, now - one.start, one.duration_s, id=last.id, tokens=one.tokens
            )
    member.generate_s += now - started
    member.partial = last if last.status is Status.ABORTED else None
    member.segments = () if last.status in (Status.ABORTED, Status.PENDING) else segments
    member.scored = last.status is Status.FAILED
    return member


async def _generate_segments(call: ContinuingEngine) -> tuple[Sample, ...]:
    """The finished segments; or one sample, aborted or pending, to go on from if the plan is stopping."""
    plan, pending = call.plan, call.member.pending
    sampling = replace(plan.sampling, seed=compute_request_seed(plan.seed, pending.id))
    start, engine = call.member.partial or pending, cast(InferenceEngine, call)
    # of what an earlier call was answered nothing is known here
    made = call.made if start is pending else None
    while not plan.is_stopping():
        reach("rollout.dispatch")
        segments = await call_generate(
            plan.generate, start, engine, sampling, newest_version=plan.policy_version, made=made
        )
        reach("rollout.generated")
        last = segments[-1]
        if last.status is not Status.ABORTED:
            return segments
        noted = last if len(segments) == 1 else call.member.partial
        start = pending
        if noted is not None and not plan.is_stale(noted.oldest_version):
            start = noted
        call.count_abort(0)
    return (start,)


async def score_member(plan: GroupPlan, member: Member) -> Member:
    """The generated member with its reward, or as failed; as it is where the group is scored together. Where
    nothing scores it, the generate function has set its reward, that of the whole trajectory, or none is
    needed.
    """
    if member.scored:
        return member
    last = member.segments[-1]
    if plan.reward is not None:
        started = trio.current_time()
        try:
            reach("rollout.before_reward")
            result = await call_reward(plan.reward, last, timeout_s=plan.reward_timeout_s)
            reach("rollout.after_reward")
            member.segments = reward_trajectory(member.segments, result)
        except UserFunctionError as error:
            member.segments = (_fail_scoring(last, error, plan.reward),)
        member.reward_s = seconds = trio.current_time() - started
        if plan.spans is not None:
            plan.spans.add("reward", REWARDS, seconds, seconds, id=last.id)
    elif plan.group_reward is None and (plan.needs_reward or last.reward is not None):
        name = function_name(plan.generate)
        where = f"without reward and group_reward, generate function {name} on sample {last.id}"
        try:
            own: Any = last.reward  # None is refused
            result = check_reward(RewardResult(own, last.rewards), where)
            member.segments = tuple(apply_reward(one, result) for one in member.segments)
        except UserFunctionError as error:
            member.segments = (fail_sample(last, error, "generate", name),)
    member.scored = True
    return member


# --- the group ----------------------------------------------------------------------------------------------


async def close_group(plan: GroupPlan, group: Group) -> None:
    """Gives the group its rewards, where it is scored together, its decision and its score. Raises
    UserFunctionError if a filter or the ranker does not answer, or not in time; the group is then as it was.
    """
    members, decision = group.members, _check_left(group.members)
    if decision.keep and plan.group_reward is not None:
        scored = [member for member in members if not member.failed]
        ends = [member.segments[-1] for member in scored]
        try:
            reach("rollout.before_reward")
            results = await call_group_reward(plan.group_reward, ends, timeout_s=plan.reward_timeout_s)
            reach("rollout.after_reward")
            segments = [reward_trajectory(one.segments, of) for one, of in zip(scored, results, strict=True)]
        except UserFunctionError as error:  # they have all failed
            segments = [(_fail_scoring(end, error, plan.group_reward),) for end in ends]
        turns = iter(segments)
        members = [one if one.failed else replace(one, segments=next(turns)) for one in members]
        decision = _check_left(members)
    left = replace(group, members=members).sample_group
    for filter_ in plan.filters:
        if decision.keep:
            decision = await call_filter(filter_, left, timeout_s=plan.reward_timeout_s)
    if decision.keep and plan.ranker is not None:
        group.score = await call_ranker(plan.ranker, left, timeout_s=plan.reward_timeout_s)
    group.members, group.decision = members, decision


def _check_left(members: Sequence[Member]) -> FilterDecision:
    """Whether enough of the members have not failed."""
    return check_enough(sum(not member.failed for member in members), len(members))


# --- failures -----------------------------------------------------------------------------------------------


def failure_class_of(sample: Sample) -> str:
    """The class that a failed sample is counted under."""
    return sample.metadata["failure"]["class"]


def classify_generate_error(error: RolloutsError) -> str:
    """The class that a failed sample is counted under. Raises `error` itself if it is not one sample's but
    everybody's.
    """
    match error:
        case TrajectoryLeftOut():
            return LEFT_OUT
        case EnvironmentFailed():
            return "environment"
        case UserFunctionError():
            return "generate"
        case RequestRefused() | DataError():
            return "data"
        case InfrastructureError():
            return INFRASTRUCTURE
        case EngineError() if type(error) is EngineError:  # what is below it is everybody's
            return "engine"
    raise error


def classify_reward_error(error: UserFunctionError) -> str:
    """The class that a sample is counted under whose reward function did not answer."""
    return f"reward_{error.kind}" if error.kind in ("timeout", "crashed") else "reward"


def _fail_scoring(sample: Sample, error: UserFunctionError, function: Callable[..., object]) -> Sample:
    return fail_sample(sample, error, classify_reward_error(error), function_name(function))


def fail_sample(sample: Sample, error: RolloutsError, failure_class: str, function: str) -> Sample:
    """The sample as failed, without a reward; metadata["failure"] has class, function, message and the last
    frames of the traceback.

    The traceback is of what a function, the data or the engine raised; empty when none did: a time-out, a
    crash, an answer that is no reward.
    """
    cause = error.__cause__ or (None if isinstance(error, UserFunctionError) else error)
    text = show_traceback(cause, cause.__traceback__) if cause else ""
    if isinstance(cause, RaisedInWorker):
        text = str(cause)
    failure = {"class": failure_class, "function": function, "message": str(error), "traceback": text}
    metadata = {}
    with suppress(UserFunctionError):  # a function has put there what no file can hold
        check_metadata(sample, function)
        metadata |= sample.metadata
    metadata["failure"] = failure
    return replace(sample, status=Status.FAILED, reward=None, rewards={}, metadata=metadata)


# --- as JSON ------------------------------------------------------------------------------------------------


def encode_group(group: Group) -> JSONObject:
    """A held group as JSON, exactly: every float32 is a float64. Pending samples are made of the prompt
    again, so they are left out.
    """
    return {
        "group_index": group.index,
        "prompt_id": group.prompt.prompt_id,
        "epoch": group.prompt.epoch,
        "finished": group.decision is not None,
        "members": [
            {
                name: msgspec.to_builtins(value, enc_hook=np.ndarray.tolist)
                for name, value in vars(member).items()
                if name != "pending"
            }
            for member in group.members
        ],
    }


def decode_group(record: JSONObject, prompt: PromptRow) -> Group:
    """The inverse of encode_group. Raises ValueError naming the field of a sample that is wrong."""
    group = start_group(record["group_index"], prompt, len(record["members"]))
    group.decision = FilterDecision(keep=True) if record["finished"] else None
    for index, saved in enumerate(record["members"]):
        partial = saved["partial"] and Sample(**saved["partial"])
        segments = tuple(Sample(**sample) for sample in saved["segments"])
        made = {**saved, "partial": partial, "segments": segments}
        group.members[index] = replace(group.members[index], **made)
    return group
