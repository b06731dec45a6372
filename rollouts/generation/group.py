"""How one group comes about: generate → reward for each sample at once, then group reward and filters when the last of them is done.

    prompt ──► G members in one nursery ──► those that did not fail ──► group reward ──► filters ──► ClosedGroup
               generate, then reward        fewer than 2: failed_samples

What users, data and engines do wrong ends in the record of a sample or of the group; only cancellation and our own bugs leave as exceptions.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import trio

from rollouts.data.data_buffer import PromptRow
from rollouts.errors import (
    ConfigError,
    DataError,
    EngineClosed,
    EngineError,
    RequestRefused,
    RewardCrashed,
    RewardTimeout,
    RolloutsError,
    UserFunctionError,
    WeightVersionError,
)
from rollouts.generation.generate import compute_request_seed
from rollouts.generation.rollouts import FAILED_SAMPLES, make_samples
from rollouts.protocols import FilterFn, GenerateFn, GroupRewardFn, InferenceEngine, RewardFn
from rollouts.rewards.call import call_filter, call_generate, call_group_reward, call_reward
from rollouts.rewards.check import apply_reward, function_name
from rollouts.rewards.worker_messages import RaisedInWorker
from rollouts.types import FilterDecision, Sample, SampleGroup, SamplingParams, Status

MAX_STARTS = 8  # of one sample whose engine keeps aborting it; after that it has failed
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
    may_continue: Callable[[Sample], bool]  # whether the tokens of an aborted sample are fresh enough to go on from


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


async def run_group(plan: GroupPlan, group_index: int, prompt: PromptRow) -> ClosedGroup:
    """The group of a prompt when the last of its members is done. Raises only Cancelled."""
    samples = make_samples(group_index, prompt, plan.samples_per_prompt)
    members: list[Trajectory | None] = [None] * len(samples)
    fatal: list[RolloutsError] = []

    async def run_member(index: int) -> None:
        try:
            members[index] = await make_trajectory(plan, samples[index])
        except RolloutsError as error:
            fatal.append(error)
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for index in range(len(samples)):
            nursery.start_soon(run_member, index)
    if fatal:
        return ClosedGroup(group_index=group_index, prompt=prompt, error=fatal[0])
    trajectories = tuple(member for member in members if member is not None)
    assert len(trajectories) == len(samples), "a member ended without a trajectory"
    try:
        return await close_group(plan, ClosedGroup(group_index=group_index, prompt=prompt, trajectories=trajectories))
    except RolloutsError as error:
        return ClosedGroup(group_index=group_index, prompt=prompt, error=error)


# --- one member --------------------------------------------------------------------------------------------------------------


async def make_trajectory(plan: GroupPlan, sample: Sample) -> Trajectory:
    """A generated and scored trajectory, or the sample as failed. Raises what stops the whole call: EngineClosed, ModelError, ConfigError."""
    started = trio.current_time()
    try:
        segments = await generate_trajectory(plan, sample)
    except RolloutsError as error:
        failed = fail_sample(sample, error, classify_generate_error(error), function_name(plan.generate))
        return Trajectory((failed,), trio.current_time() - started, None)
    generated = trio.current_time()
    last = segments[-1]
    if last.status is Status.FAILED:
        return Trajectory((_complete_failure(last, function_name(plan.generate)),), generated - started, None)
    if plan.reward is not None:
        segments = await score_trajectory(plan.reward, segments, plan)
        return Trajectory(segments, generated - started, trio.current_time() - generated)
    if plan.group_reward is None:
        if last.reward is None:
            raise ConfigError(f"sample {last.id} has no reward: pass reward or group_reward, or let the generate function set it")
        segments = tuple(replace(segment, reward=last.reward) for segment in segments)
    return Trajectory(segments, generated - started, None)


async def generate_trajectory(plan: GroupPlan, sample: Sample) -> tuple[Sample, ...]:
    """The segments; a sample that the engine aborted goes on where it stopped if its tokens are fresh enough, or else starts again."""
    sampling = replace(plan.sampling, seed=compute_request_seed(plan.seed, sample.id))
    start = sample
    for _ in range(MAX_STARTS):
        segments = await call_generate(plan.generate, start, plan.engine, sampling, limiter=plan.limiter)
        last = segments[-1]
        if last.status is not Status.ABORTED:
            return segments
        start = last if len(segments) == 1 and plan.may_continue(last) else sample
    raise EngineError(f"sample {sample.id} was aborted by its engine {MAX_STARTS} times; find out who calls abort_all() or pause('abort')")


async def score_trajectory(reward: RewardFn, segments: tuple[Sample, ...], plan: GroupPlan) -> tuple[Sample, ...]:
    """The segments with the reward of the last one, or that one as failed."""
    last = segments[-1]
    try:
        result = await call_reward(reward, last, timeout_s=plan.reward_timeout_s, limiter=plan.limiter)
    except UserFunctionError as error:
        return (fail_sample(last, error, classify_reward_error(error), function_name(reward)),)
    return tuple(apply_reward(segment, result) for segment in segments)


# --- the group ---------------------------------------------------------------------------------------------------------------


async def close_group(plan: GroupPlan, closed: ClosedGroup) -> ClosedGroup:
    """The group without its failed samples, scored together and filtered. Raises UserFunctionError if a filter does not answer, or not in time."""
    closed = _without_failed(closed)
    if closed.decision.keep and plan.group_reward is not None:
        closed = _without_failed(await score_group(plan.group_reward, closed, plan))
    if not closed.decision.keep:
        return closed
    for filter_ in plan.filters:
        decision = await call_filter(filter_, closed.group, timeout_s=plan.reward_timeout_s, limiter=plan.limiter)
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
    """The group with one reward per trajectory, given to its last segment and shared by the others; all of them failed if that fails."""
    finished = [trajectory for trajectory in closed.trajectories if not trajectory.failed]
    ends = [trajectory.segments[-1] for trajectory in finished]
    try:
        results = await call_group_reward(group_reward, ends, timeout_s=plan.reward_timeout_s, limiter=plan.limiter)
    except UserFunctionError as error:
        name = function_name(group_reward)
        failed = [replace(t, segments=(fail_sample(t.segments[-1], error, classify_reward_error(error), name),)) for t in finished]
        return replace(closed, trajectories=(*failed, *(t for t in closed.trajectories if t.failed)))
    scored = {
        trajectory.segments[-1].id: replace(trajectory, segments=tuple(apply_reward(segment, result) for segment in trajectory.segments))
        for trajectory, result in zip(finished, results, strict=True)
    }
    return replace(closed, trajectories=tuple(scored.get(t.segments[-1].id, t) for t in closed.trajectories))


# --- failures ----------------------------------------------------------------------------------------------------------------


def classify_generate_error(error: RolloutsError) -> str:
    """The class that a failed sample is counted under. Raises `error` itself if it is not one sample's but everybody's."""
    if isinstance(error, UserFunctionError):
        return "generate"
    if isinstance(error, RequestRefused | DataError):
        return "data"
    if isinstance(error, EngineError) and not isinstance(error, EngineClosed | WeightVersionError):
        return "engine"
    raise error


def classify_reward_error(error: UserFunctionError) -> str:
    """The class that a sample is counted under whose reward function did not answer."""
    if isinstance(error, RewardTimeout):
        return "reward_timeout"
    return "reward_crashed" if isinstance(error, RewardCrashed) else "reward"


def fail_sample(sample: Sample, error: RolloutsError, failure_class: str, function: str) -> Sample:
    """The sample as failed, without a reward; metadata["failure"] has class, function, message and the last frames of the traceback.

    The traceback is of what a function, the data or the engine raised; empty when none did: a time-out, a crash, an answer that is no reward.
    """
    cause = error.__cause__ or (None if isinstance(error, UserFunctionError) else error)
    failure = {"class": failure_class, "function": function, "message": str(error), "traceback": _trace(cause)[-TRACEBACK_CHARS:]}
    return replace(sample, status=Status.FAILED, reward=None, rewards={}, metadata={**sample.metadata, "failure": failure})


def _trace(cause: BaseException | None) -> str:
    if cause is None:
        return ""
    if isinstance(cause, RaisedInWorker):
        return cause.traceback_text
    return "".join(traceback.format_exception(type(cause), cause, cause.__traceback__, limit=-TRACEBACK_FRAMES, chain=False))


def _complete_failure(sample: Sample, function: str) -> Sample:
    """A sample that the generate function itself gave up, in the form of the others."""
    told = sample.metadata.get("failure")
    failure = {"class": "generate", "function": function, "message": str(told or "the generate function returned it as failed"), "traceback": ""}
    return replace(sample, reward=None, rewards={}, metadata={**sample.metadata, "failure": failure})
