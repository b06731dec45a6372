"""How one group comes about: generate → reward for each sample at once, then group reward and filters when
the last of them is done.

    prompt ─► G members in one nursery ─► those that did not fail ─► group reward ─► filters ─► ClosedGroup
               generate, then reward        fewer than 2: failed_samples

How far each member has come is in the GroupWork, also while it runs: whoever stops the group can go on from
there later. Told to stop, a member whose engine aborts it ends with the tokens it has.

What users, data and engines do wrong ends in the record of a sample or of the group; only cancellation and
our own bugs leave as exceptions.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import trio

from rollouts.crash_points import reach
from rollouts.data.data_buffer import PromptRow
from rollouts.errors import (
    ConfigError,
    DataError,
    EngineClosed,
    EngineError,
    EngineSetupError,
    FleetDown,
    InfrastructureError,
    RequestRefused,
    RewardCrashed,
    RewardTimeout,
    RolloutsError,
    UserFunctionError,
    WeightVersionError,
)
from rollouts.generation.generate import compute_request_seed
from rollouts.generation.rollouts import FAILED_SAMPLES, make_samples
from rollouts.generation.staleness import Member
from rollouts.metrics.spans import REWARDS, Answered, SpanRecorder, listing_answers
from rollouts.protocols import FilterFn, GenerateFn, GroupRewardFn, InferenceEngine, RewardFn
from rollouts.rewards.call import call_filter, call_generate, call_group_reward, call_reward
from rollouts.rewards.check import apply_reward, function_name
from rollouts.rewards.workers import RaisedInWorker
from rollouts.types import FilterDecision, Sample, SampleGroup, SamplingParams, Status

MAX_STARTS = 8  # in vain, of one sample whose engine keeps aborting it; after that it has failed
# the class of samples that an engine, not anything of their own, kept from being generated
INFRASTRUCTURE = "infrastructure"
TRACEBACK_FRAMES = 4
TRACEBACK_CHARS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """Everything that is the same for all groups of a batch."""

    engine: InferenceEngine
    generate: GenerateFn
    reward: RewardFn | None
    group_reward: GroupRewardFn | None
    filters: Sequence[FilterFn]
    sampling: SamplingParams
    seed: int  # of the run
    samples_per_prompt: int  # G
    reward_timeout_s: float
    limiter: trio.CapacityLimiter  # places of sync functions
    may_continue: Callable[
        [Sample], bool
    ]  # whether the tokens of an aborted sample are fresh enough to go on from
    is_stopping: Callable[[], bool] = lambda: False  # whether an aborted sample ends with what it has
    ended: trio.MemorySendChannel[ClosedGroup | int | None] | None = (
        None  # gets the group index whenever a member no longer generates
    )
    spans: SpanRecorder | None = None  # is told when each sample was generated and scored


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One member of a group: its segments, all scored, or one failed sample."""

    segments: tuple[Sample, ...]
    generate_s: float
    reward_s: float | None  # None: not scored by itself

    @property
    def failed(self) -> bool:
        return self.segments[-1].status is Status.FAILED


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedGroup:
    """What became of one group. It trains if `decision.keep`."""

    group_index: int
    prompt: PromptRow
    samples: tuple[Sample, ...] = ()  # scored, in launch order
    failed: tuple[Sample, ...] = ()
    trajectories: tuple[Trajectory, ...] = ()
    decision: FilterDecision = field(default_factory=lambda: FilterDecision(keep=True))
    error: RolloutsError | None = None  # what stops the whole call

    @property
    def group(self) -> SampleGroup:
        return SampleGroup(self.group_index, self.prompt.prompt_id, self.samples)

    @property
    def failure_class(self) -> str | None:
        """The commonest class of failure, if the group was dropped for its failed samples."""
        if self.decision.reason != FAILED_SAMPLES or self.decision.keep:
            return None
        return Counter(failure_class_of(sample) for sample in self.failed).most_common(1)[0][0]


def failure_class_of(sample: Sample) -> str:
    """The class that a failed sample is counted under."""
    return sample.metadata["failure"]["class"]


@dataclass(slots=True, eq=False)
class GroupWork:
    """A group in the making. run_group moves its members on, and nobody else does while it runs."""

    group_index: int
    prompt: PromptRow
    members: list[Member]  # in launch order

    @property
    def num_to_generate(self) -> int:
        """Members that have no finished answer yet."""
        return sum(not member.segments for member in self.members)

    @property
    def has_begun(self) -> bool:
        return any(member.has_begun for member in self.members)


def start_group(group_index: int, prompt: PromptRow, samples_per_prompt: int) -> GroupWork:
    """A group of which nothing is done yet."""
    return GroupWork(
        group_index,
        prompt,
        [Member(pending=sample) for sample in make_samples(group_index, prompt, samples_per_prompt)],
    )


async def run_group(plan: GroupPlan, work: GroupWork) -> ClosedGroup | None:
    """The group when the last of its members is done; None if it was told to stop before that. Raises only
    Cancelled.
    """
    fatal: list[RolloutsError] = []

    async def run_member(index: int) -> None:
        try:
            await _advance_member(plan, work, index)
        except RolloutsError as error:
            fatal.append(error)
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for index, member in enumerate(work.members):
            if not member.scored:
                nursery.start_soon(run_member, index)
    if fatal:
        return ClosedGroup(group_index=work.group_index, prompt=work.prompt, error=fatal[0])
    if not all(member.scored for member in work.members):
        return None
    trajectories = tuple(
        Trajectory(member.segments, member.generate_s, member.reward_s) for member in work.members
    )
    try:
        return await close_group(
            plan, ClosedGroup(group_index=work.group_index, prompt=work.prompt, trajectories=trajectories)
        )
    except RolloutsError as error:
        return ClosedGroup(group_index=work.group_index, prompt=work.prompt, error=error)


# --- one member ---------------------------------------------------------------------------------------------


async def make_trajectory(plan: GroupPlan, sample: Sample) -> Trajectory:
    """A generated and scored trajectory, or the sample as failed. Raises what stops the whole call: see
    classify_generate_error; ConfigError.
    """
    member = await score_member(plan, await generate_member(plan, Member(pending=sample)))
    return Trajectory(member.segments, member.generate_s, member.reward_s)


async def _advance_member(plan: GroupPlan, work: GroupWork, index: int) -> None:
    """Moves one member on until it is scored, or as far as a plan that is stopping allows."""
    if not work.members[index].segments:
        try:
            work.members[index] = await generate_member(plan, work.members[index])
        finally:
            if plan.ended is not None:
                plan.ended.send_nowait(work.group_index)
    member = work.members[index]
    if member.segments and not member.scored:
        work.members[index] = await score_member(plan, member)


async def generate_member(plan: GroupPlan, member: Member) -> Member:
    """The member with its segments, or failed, or, if the plan is stopping, with the tokens it has. Raises
    like make_trajectory.

    A sample that the engine aborted goes on where it stopped if it is one segment and its tokens are fresh
    enough, or else starts again.
    """
    started = trio.current_time()
    function = function_name(plan.generate)
    try:
        with listing_answers() as answers:
            answer = await _generate_segments(plan, member)
    except RolloutsError as error:
        failed = fail_sample(member.pending, error, classify_generate_error(error), function)
        if plan.spans is not None:
            _record_generation(plan.spans, plan.engine, (failed,), (), trio.current_time() - started)
        return _end_generating(member, started, segments=(failed,), scored=True)
    last = answer[-1]
    if plan.spans is not None:
        _record_generation(plan.spans, plan.engine, answer, answers, trio.current_time() - started)
    if last.status is Status.FAILED:
        return _end_generating(member, started, segments=(_complete_failure(last, function),), scored=True)
    if last.status is Status.ABORTED or last.status is Status.PENDING:
        return _end_generating(member, started, partial=last if last.status is Status.ABORTED else None)
    return _end_generating(member, started, segments=answer)


def _end_generating(
    member: Member,
    started: float,
    *,
    segments: tuple[Sample, ...] = (),
    partial: Sample | None = None,
    scored: bool = False,
) -> Member:
    seconds = member.generate_s + trio.current_time() - started
    return replace(member, segments=segments, partial=partial, scored=scored, generate_s=seconds)


def _record_generation(
    spans: SpanRecorder,
    engine: InferenceEngine,
    segments: Sequence[Sample],
    answers: Sequence[Answered],
    seconds: float,
) -> None:
    """A span for each request that a fleet had answered, or one for all, of an engine that is no fleet; of
    several segments, the last one's.
    """
    sample_id = segments[-1].id
    for answered in answers:
        spans.add(
            "generate",
            answered.engine,
            trio.current_time() - answered.start,
            answered.duration_s,
            id=sample_id,
            tokens=answered.tokens,
        )
    if not answers:
        tokens = sum(segment.response_length for segment in segments)
        spans.add("generate", engine.features.name, seconds, seconds, id=sample_id, tokens=tokens)


async def _generate_segments(plan: GroupPlan, member: Member) -> tuple[Sample, ...]:
    """The finished segments; or one sample, aborted or pending, to go on from if the plan is stopping."""
    sampling = replace(plan.sampling, seed=compute_request_seed(plan.seed, member.pending.id))
    start = member.pending if member.partial is None else member.partial
    in_vain = 0
    while in_vain < MAX_STARTS:
        if plan.is_stopping():
            return (start,)
        reach("rollout.dispatch")
        segments = await call_generate(plan.generate, start, plan.engine, sampling, limiter=plan.limiter)
        reach("rollout.generated")
        last = segments[-1]
        if last.status is not Status.ABORTED:
            return segments
        before, start = start, last if len(segments) == 1 and plan.may_continue(last) else member.pending
        in_vain += int(start.loss_mask.sum()) <= int(before.loss_mask.sum())
    if plan.is_stopping():
        return (start,)
    raise EngineError(
        f"sample {member.pending.id} was aborted by its engine {MAX_STARTS} times without a token more; find"
        " out who calls abort_all()"
    )


async def score_member(plan: GroupPlan, member: Member) -> Member:
    """The generated member with its reward, or as failed; as it is where the group is scored together. Raises
    ConfigError without any reward.
    """
    if member.scored:
        return member
    started, segments = trio.current_time(), member.segments
    if plan.reward is not None:
        segments = await score_trajectory(plan.reward, segments, plan)
        seconds = trio.current_time() - started
        if plan.spans is not None:
            plan.spans.add("reward", REWARDS, seconds, seconds, id=member.segments[-1].id)
        return replace(member, segments=segments, scored=True, reward_s=seconds)
    if plan.group_reward is None:
        reward = segments[-1].reward
        if reward is None:
            raise ConfigError(
                f"sample {segments[-1].id} has no reward: pass reward or group_reward, or let the generate"
                " function set it"
            )
        segments = tuple(
            replace(segment, reward=reward, rewards=segments[-1].rewards) for segment in segments
        )
    return replace(member, segments=segments, scored=True)


async def score_trajectory(
    reward: RewardFn, segments: tuple[Sample, ...], plan: GroupPlan
) -> tuple[Sample, ...]:
    """The segments with the reward of the last one, or that one as failed."""
    last = segments[-1]
    try:
        reach("rollout.before_reward")
        result = await call_reward(reward, last, timeout_s=plan.reward_timeout_s, limiter=plan.limiter)
        reach("rollout.after_reward")
    except UserFunctionError as error:
        return (fail_sample(last, error, classify_reward_error(error), function_name(reward)),)
    return tuple(apply_reward(segment, result) for segment in segments)


# --- the group ----------------------------------------------------------------------------------------------


async def close_group(plan: GroupPlan, closed: ClosedGroup) -> ClosedGroup:
    """The group without its failed samples, scored together and filtered. Raises UserFunctionError if a
    filter does not answer, or not in time.
    """
    closed = _without_failed(closed)
    if closed.decision.keep and plan.group_reward is not None:
        closed = _without_failed(await score_group(plan.group_reward, closed, plan))
    if not closed.decision.keep:
        return closed
    for filter_ in plan.filters:
        decision = await call_filter(
            filter_, closed.group, timeout_s=plan.reward_timeout_s, limiter=plan.limiter
        )
        if not decision.keep:
            return replace(closed, decision=decision)
    return closed


def _without_failed(closed: ClosedGroup) -> ClosedGroup:
    finished = [trajectory for trajectory in closed.trajectories if not trajectory.failed]
    failed = tuple(trajectory.segments[-1] for trajectory in closed.trajectories if trajectory.failed)
    samples = tuple(segment for trajectory in finished for segment in trajectory.segments)
    closed = replace(closed, samples=samples, failed=failed)
    if len(finished) >= min(2, len(closed.trajectories)):  # one sample alone has nothing to be compared with
        return closed
    detail = f"{len(failed)} of {len(closed.trajectories)} samples failed"
    return replace(closed, decision=FilterDecision(keep=False, reason=FAILED_SAMPLES, detail=detail))


async def score_group(group_reward: GroupRewardFn, closed: ClosedGroup, plan: GroupPlan) -> ClosedGroup:
    """The group with one reward per trajectory, given to its last segment and shared by the others; all of
    them failed if that fails.
    """
    finished = [trajectory for trajectory in closed.trajectories if not trajectory.failed]
    ends = [trajectory.segments[-1] for trajectory in finished]
    try:
        reach("rollout.before_reward")
        results = await call_group_reward(
            group_reward, ends, timeout_s=plan.reward_timeout_s, limiter=plan.limiter
        )
        reach("rollout.after_reward")
    except UserFunctionError as error:
        name = function_name(group_reward)
        failed = [
            replace(t, segments=(fail_sample(t.segments[-1], error, classify_reward_error(error), name),))
            for t in finished
        ]
        return replace(closed, trajectories=(*failed, *(t for t in closed.trajectories if t.failed)))
    scored = {
        trajectory.segments[-1].id: replace(
            trajectory, segments=tuple(apply_reward(segment, result) for segment in trajectory.segments)
        )
        for trajectory, result in zip(finished, results, strict=True)
    }
    return replace(closed, trajectories=tuple(scored.get(t.segments[-1].id, t) for t in closed.trajectories))


# --- failures -----------------------------------------------------------------------------------------------


def classify_generate_error(error: RolloutsError) -> str:
    """The class that a failed sample is counted under. Raises `error` itself if it is not one sample's but
    everybody's.
    """
    if isinstance(error, UserFunctionError):
        return "generate"
    if isinstance(error, RequestRefused | DataError):
        return "data"
    if isinstance(error, InfrastructureError):
        return INFRASTRUCTURE
    if isinstance(error, EngineError) and not isinstance(
        error, EngineClosed | WeightVersionError | EngineSetupError | FleetDown
    ):
        return "engine"
    raise error


def classify_reward_error(error: UserFunctionError) -> str:
    """The class that a sample is counted under whose reward function did not answer."""
    if isinstance(error, RewardTimeout):
        return "reward_timeout"
    return "reward_crashed" if isinstance(error, RewardCrashed) else "reward"


def fail_sample(sample: Sample, error: RolloutsError, failure_class: str, function: str) -> Sample:
    """The sample as failed, without a reward; metadata["failure"] has class, function, message and the last
    frames of the traceback.

    The traceback is of what a function, the data or the engine raised; empty when none did: a time-out, a
    crash, an answer that is no reward.
    """
    cause = error.__cause__ or (None if isinstance(error, UserFunctionError) else error)
    failure = {
        "class": failure_class,
        "function": function,
        "message": str(error),
        "traceback": _trace(cause)[-TRACEBACK_CHARS:],
    }
    return replace(
        sample,
        status=Status.FAILED,
        reward=None,
        rewards={},
        metadata={**sample.metadata, "failure": failure},
    )


def _trace(cause: BaseException | None) -> str:
    if cause is None:
        return ""
    if isinstance(cause, RaisedInWorker):
        return cause.traceback_text
    return "".join(
        traceback.format_exception(
            type(cause), cause, cause.__traceback__, limit=-TRACEBACK_FRAMES, chain=False
        )
    )


def _complete_failure(sample: Sample, function: str) -> Sample:
    """A sample that the generate function itself gave up, in the form of the others."""
    told = sample.metadata.get("failure")
    failure = {
        "class": "generate",
        "function": function,
        "message": str(told or "the generate function returned it as failed"),
        "traceback": "",
    }
    return replace(sample, reward=None, rewards={}, metadata={**sample.metadata, "failure": failure})
