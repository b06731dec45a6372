"""Batches of rollouts without an event loop: plain functions for a notebook or a script. Loads neither trio
nor torch.

    DataBuffer ─► samples ─► generate_fn ─► reward_fn ─► transforms ─► filter_fn ─► P groups ─► RolloutBatch
        ▲                                                              │ too few: draw again
        └── everything that an unfinished batch drew, in the order it came ◄── an error ───┘

Everything runs in the calling thread, one round after the other. What over-samples, carries unfinished
samples over, bounds staleness and keeps account of failures is AsyncRolloutManager.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from rollouts.data.chat import DEFAULT_OPTIONS, TemplateOptions, tokenize_prompt
from rollouts.data.data_buffer import PromptRow
from rollouts.data.messages import parse_tools
from rollouts.errors import ConfigError, NotEnoughSamples, PlugInError, RolloutsError, UserFunctionError
from rollouts.generation.generate import STATUS_OF, GenerationTokenizer
from rollouts.protocols import RewardValue
from rollouts.rewards.check import (
    apply_reward,
    check_decision,
    check_reward,
    describe,
    function_name,
    is_async,
    shorten,
)
from rollouts.types import (
    BoolArray,
    Completion,
    FilterDecision,
    FloatArray,
    GenerateRequest,
    IntArray,
    JSONValue,
    RolloutBatch,
    Sample,
    SampleGroup,
    SamplingParams,
    Status,
)

GenerateBatchFn = Callable[[list[Sample]], Sequence[Sample]]
SampleTransform = Callable[[list[Sample]], Sequence[Sample]]
CompleteFn = Callable[[list[GenerateRequest]], Sequence[Completion]]
FINISHED = (Status.COMPLETED, Status.TRUNCATED, Status.FAILED)
FAILED_SAMPLES = "failed_samples"
ResultT = TypeVar("ResultT")


class PromptSource(Protocol):
    """Where prompts are drawn from, and what takes them back: a DataBuffer."""

    def get_prompts(self, count: int) -> list[PromptRow]: ...
    def return_prompts(self, prompts: Sequence[PromptRow]) -> None: ...


# --- batches without end ------------------------------------------------------------------------------------


def generate_rollout_batches(
    data_buffer: PromptSource,
    generate_fn: GenerateBatchFn,
    *,
    num_prompts: int,
    samples_per_prompt: int,
    reward_fn: Callable[[Sample], RewardValue] | None = None,
    filter_fn: Callable[[SampleGroup], bool | FilterDecision] | None = None,
    transforms: Sequence[SampleTransform] = (),
    temperature: float = 1.0,
    max_attempts: int = 20,
    first_group_index: int = 0,
) -> Iterator[RolloutBatch]:
    """Batches without end, each of `num_prompts` (P) groups of `samples_per_prompt` (G) samples; a group that
    lost failed ones is smaller.

    Each round draws the prompts that are missing, and calls `generate_fn` once with all their pending
    samples. It answers one finished sample per sample, of the same id, in any order; one that it gave up has
    status failed. `reward_fn` then scores each sample (without it, generate_fn sets the reward), `transforms`
    see the round as one list, and `filter_fn` sees what is left of each group. A group with fewer than two
    samples left (of G > 1) is dropped. Nothing is drawn before the first next().

    temperature: that generate_fn samples at; written into the batch, and the trainer divides its logits by
    it. max_attempts: a batch may draw num_prompts * max_attempts groups, or else NotEnoughSamples is raised.
    first_group_index: of the first group drawn; ids of samples are made from it. To go on after an earlier
    iterator, give a number above the group indices of its batches: equal ids draw equal random numbers.

    Raises ConfigError for numbers below 1 and for a sample without a reward, PlugInError for an async
    function; UserFunctionError, naming the function and the sample, if a function raises or its answer is not
    one (errors that this package raises inside generate_fn rise as they are). Whatever is raised, the prompts
    that the unfinished batch drew are back in front of the buffer, in order, and the iterator is over.
    """
    for name, number in (
        ("num_prompts", num_prompts),
        ("samples_per_prompt", samples_per_prompt),
        ("max_attempts", max_attempts),
    ):
        if number < 1:
            raise ConfigError(f"{name}={number} must be at least 1")
    for function in (generate_fn, reward_fn, filter_fn, *transforms):
        _check_is_plain(function)
    recipe = _Recipe(generate_fn, reward_fn, filter_fn, tuple(transforms), samples_per_prompt)
    return _generate(
        data_buffer, recipe, num_prompts, num_prompts * max_attempts, temperature, first_group_index
    )


@dataclass(frozen=True, slots=True)
class _Recipe:
    """What is done to the samples of every round."""

    generate_fn: GenerateBatchFn
    reward_fn: Callable[[Sample], RewardValue] | None
    filter_fn: Callable[[SampleGroup], bool | FilterDecision] | None
    transforms: tuple[SampleTransform, ...]
    samples_per_prompt: int


@dataclass(slots=True)
class _Draft:
    """A batch in the making."""

    drawn: list[PromptRow] = field(default_factory=list)  # in the order drawn
    groups: list[SampleGroup] = field(default_factory=list)  # that train
    dropped: Counter[str] = field(default_factory=Counter)  # by reason


def _generate(
    data_buffer: PromptSource,
    recipe: _Recipe,
    num_prompts: int,
    draw_limit: int,
    temperature: float,
    group_index: int,
) -> Iterator[RolloutBatch]:
    while True:
        draft = _Draft()
        try:
            while len(draft.groups) < num_prompts:
                count = min(num_prompts - len(draft.groups), draw_limit - len(draft.drawn))
                if count == 0:
                    raise _not_enough(draft, num_prompts, draw_limit)
                prompts = data_buffer.get_prompts(count)
                draft.drawn += prompts
                _run_round(draft, prompts, recipe, group_index)
                group_index += count
            batch = convert_to_batch(
                [sample for group in draft.groups for sample in group.samples], temperature=temperature
            )
        except BaseException:  # an interrupted notebook cell too: nothing that was drawn is lost
            data_buffer.return_prompts(draft.drawn)
            raise
        yield batch


def _not_enough(draft: _Draft, num_prompts: int, draw_limit: int) -> NotEnoughSamples:
    reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(draft.dropped.items()))
    return NotEnoughSamples(
        f"{len(draft.groups)} of num_prompts={num_prompts} groups were kept of {len(draft.drawn)} drawn"
        f" ({reasons}), and max_attempts={draw_limit // num_prompts} allows no more; loosen the filter, use"
        " easier or harder prompts, or raise max_attempts"
    )


def _run_round(draft: _Draft, prompts: Sequence[PromptRow], recipe: _Recipe, first_group_index: int) -> None:
    """Adds the groups of `prompts` to the draft, as kept or as dropped."""
    indices = range(first_group_index, first_group_index + len(prompts))
    pending = [
        sample
        for index, prompt in zip(indices, prompts, strict=True)
        for sample in make_samples(index, prompt, recipe.samples_per_prompt)
    ]
    samples = [
        sample
        for sample in generate_samples(recipe.generate_fn, pending)
        if sample.status is not Status.FAILED
    ]
    samples = _score_samples(recipe.reward_fn, samples)
    samples = [
        sample
        for sample in apply_sample_transforms(samples, recipe.transforms)
        if sample.status is not Status.FAILED
    ]
    for index, prompt in zip(indices, prompts, strict=True):
        group = SampleGroup(
            index, prompt.prompt_id, tuple(sample for sample in samples if sample.group_index == index)
        )
        decision = _decide(recipe, group)
        if decision.keep:
            draft.groups.append(group)
        else:
            draft.dropped[decision.reason] += 1


def _score_samples(
    reward_fn: Callable[[Sample], RewardValue] | None, samples: Sequence[Sample]
) -> list[Sample]:
    if reward_fn is not None:
        return [score_sample(reward_fn, sample) for sample in samples]
    for sample in samples:
        if sample.reward is None:
            raise ConfigError(f"sample {sample.id} has no reward: pass reward_fn, or let generate_fn set it")
    return list(samples)


def _decide(recipe: _Recipe, group: SampleGroup) -> FilterDecision:
    if len(group.samples) < min(
        2, recipe.samples_per_prompt
    ):  # one sample alone has nothing to be compared with
        return FilterDecision(keep=False, reason=FAILED_SAMPLES)
    if recipe.filter_fn is None:
        return FilterDecision(keep=True)
    where = (
        f"filter {function_name(recipe.filter_fn)} on group {group.group_index} (prompt {group.prompt_id})"
    )
    return check_decision(_call(recipe.filter_fn, group, where=where), function_name(recipe.filter_fn), where)


# --- one step of a round ------------------------------------------------------------------------------------


def make_samples(group_index: int, prompt: PromptRow, count: int) -> list[Sample]:
    """Pending samples g00000012-s000, -s001, …: sorted by id they are in launch order. The row's other fields
    become their metadata.
    """
    rest = {key: value for key, value in prompt.row.items() if key != "prompt"}
    own = {
        "prompt_id": prompt.prompt_id,
        "epoch": prompt.epoch,
    }  # in place of fields of the row that have these names
    return [
        Sample(
            id=f"g{group_index:08d}-s{index:03d}",
            prompt=_copy(prompt.row["prompt"]),
            group_index=group_index,
            metadata={**_copy(rest), **own},
        )
        for index in range(count)
    ]


def _copy(value: Any) -> Any:
    """JSON values of one's own: what a function changes in one sample is not seen by its siblings, nor by
    later epochs.
    """
    if isinstance(value, Mapping):
        return {key: _copy(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_copy(inner) for inner in value]
    return value


def generate_samples(generate_fn: GenerateBatchFn, samples: Sequence[Sample]) -> list[Sample]:
    """What `generate_fn` made of pending samples, in their order and with their group indices; each is
    completed, truncated or failed.

    Raises UserFunctionError, naming function and sample, if it raises or answers anything but one such sample
    per id; errors of this package rise as they are.
    """
    if not samples:
        return []
    where = f"generate function {function_name(generate_fn)} on samples {samples[0].id} to {samples[-1].id}"
    try:
        answer = generate_fn(list(samples))
    except RolloutsError:
        raise
    except Exception as error:
        raise UserFunctionError(f"{where} raised {describe(error)}") from error
    by_id = {sample.id: sample for sample in _check_samples(answer, where)}
    for sample in samples:
        if sample.id not in by_id:
            raise UserFunctionError(
                f"{where} returned no sample {sample.id}; a sample that could not be generated has status"
                " failed"
            )
    if len(by_id) > len(samples):
        extra = next(iter(by_id.keys() - {sample.id for sample in samples}))
        raise UserFunctionError(
            f"{where} returned a sample {extra!r} that it was not given; samples keep their ids"
        )
    ordered = [(by_id[sample.id], sample.group_index) for sample in samples]
    return [
        sample if sample.group_index == index else replace(sample, group_index=index)
        for sample, index in ordered
    ]


def score_sample(reward_fn: Callable[[Sample], RewardValue], sample: Sample) -> Sample:
    """The sample with its reward: a finite number, a mapping of named parts whose sum is the reward, or a
    RewardResult.

    Raises UserFunctionError, naming function and sample, if reward_fn raises or answers anything else, NaN
    and None included.
    """
    where = f"reward function {function_name(reward_fn)} on sample {sample.id}"
    return apply_reward(sample, check_reward(_call(reward_fn, sample, where=where), where))


def apply_sample_transforms(samples: Iterable[Sample], transforms: Sequence[SampleTransform]) -> list[Sample]:
    """The samples after each of `transforms` in turn, every one a function from a list of samples to a list
    of samples.

    A transform may change samples, reorder them, leave some out and add some, as long as ids stay unique and
    group indices are among those it was given; None of group_index counts as one. Raises UserFunctionError,
    naming the transform and the sample, if it raises or breaks that.
    """
    current = list(samples)
    for transform in transforms:
        _check_is_plain(transform)
        named = f", the first of them {current[0].id}" if current else ""
        where = f"transform {function_name(transform)} on {len(current)} samples{named}"
        groups = {sample.group_index for sample in current}
        answer = _check_samples(_call(transform, list(current), where=where), where)
        stray = next((sample for sample in answer if sample.group_index not in groups), None)
        if stray is not None:
            raise UserFunctionError(
                f"{where} returned sample {stray.id} with group_index={stray.group_index}; it was given no"
                " such group"
            )
        current = answer
    return current


def _check_samples(answer: object, where: str) -> list[Sample]:
    """A user's answer as samples of different ids, each of them finished."""
    if not isinstance(answer, Sequence) or not all(isinstance(sample, Sample) for sample in answer):
        raise UserFunctionError(f"{where} returned {shorten(answer)}; it must return a list of Samples")
    ids: set[str] = set()
    for sample in answer:
        if sample.id in ids:
            raise UserFunctionError(f"{where} returned sample {sample.id} twice; ids are unique")
        if sample.status not in FINISHED:
            raise UserFunctionError(
                f"{where} returned sample {sample.id} as {sample.status}; set completed, truncated or failed"
            )
        ids.add(sample.id)
    return list(answer)


def _call(function: Callable[[Any], ResultT], argument: object, *, where: str) -> ResultT:
    try:
        return function(argument)
    except Exception as error:
        raise UserFunctionError(f"{where} raised {describe(error)}") from error


def _check_is_plain(function: Callable[..., Any] | None) -> None:
    if function is not None and is_async(function):
        raise PlugInError(
            f"{function_name(function)} is async; these calls run plain functions: drop the async, or use"
            " AsyncRolloutManager"
        )


# --- generating ---------------------------------------------------------------------------------------------


def make_sync_chat_generate(
    complete: CompleteFn,
    tokenizer: GenerationTokenizer,
    sampling: SamplingParams,
    *,
    options: TemplateOptions = DEFAULT_OPTIONS,
) -> GenerateBatchFn:
    """A generate_fn that answers each prompt (text is one user turn) in the chat template with one
    completion.

    The tools of a prompt are its sample's metadata["tools"]; `options` is what the template is told beside
    the messages. `complete` turns requests, whose ids are those of the samples, into completions in the same
    order, for example functools.partial(rollouts.models.sampling.sample_completions, model). The function
    raises DataError and ModelError like tokenize_prompt, what `complete` raises, and UserFunctionError if its
    completions are not those of the requests.
    """

    def tokenize(sample: Sample) -> IntArray:
        tools = parse_tools(sample.metadata.get("tools"), where=f"the tools of sample {sample.id}")
        return tokenize_prompt(sample.prompt, tokenizer, options=options, tools=tools)

    def chat_generate(samples: list[Sample]) -> list[Sample]:
        prompts = [tokenize(sample) for sample in samples]
        requests = [
            GenerateRequest(request_id=one.id, prompt_ids=ids, sampling=sampling)
            for one, ids in zip(samples, prompts, strict=True)
        ]
        completions = complete(requests)
        if [completion.request_id for completion in completions] != [
            request.request_id for request in requests
        ]:
            raise UserFunctionError(
                f"{function_name(complete)} must answer one completion per request, in their order and with"
                " their ids"
            )
        return [append_completion(*row, tokenizer) for row in zip(samples, prompts, completions, strict=True)]

    return chat_generate


def append_completion(
    sample: Sample, prompt_ids: IntArray, completion: Completion, tokenizer: GenerationTokenizer
) -> Sample:
    """The sample with prompt_ids [prompt length] and the completion as its tokens; the completion trains, the
    prompt does not.

    The response is the decoded completion without special tokens; the status says how it ended.
    """
    prompt, count = len(prompt_ids), len(completion.token_ids)
    return replace(
        sample,
        tokens=np.concatenate([prompt_ids, completion.token_ids]),
        loss_mask=np.arange(prompt + count) >= prompt,
        rollout_log_probs=np.concatenate([np.zeros(prompt, np.float32), completion.log_probs]),
        weight_versions=np.concatenate([np.full(prompt, -1), completion.weight_versions]),
        response=str(tokenizer.decode(completion.token_ids.tolist(), skip_special_tokens=True)),
        status=STATUS_OF[completion.finish_reason],
    )


# --- samples as arrays --------------------------------------------------------------------------------------


class SampleFields(NamedTuple):
    """The columns of B samples; token-level ones are ragged, one array [T_i] per sample."""

    tokens: tuple[IntArray, ...]
    loss_masks: tuple[BoolArray, ...]
    rewards: FloatArray | None  # [B]; None if no sample has one
    rollout_log_probs: tuple[FloatArray, ...]  # nats; 0 where the mask is 0
    weight_versions: tuple[IntArray, ...]  # -1 where the mask is 0
    group_indices: IntArray | None  # [B]; None if no sample has one


def extract_sample_fields(samples: Sequence[Sample]) -> SampleFields:
    """The columns of the samples, in their order. Raises ValueError naming the first sample without a reward
    (or group) if others have one.
    """
    rewards, groups = _column(samples, "reward"), _column(samples, "group_index")
    return SampleFields(
        tokens=tuple(sample.tokens for sample in samples),
        loss_masks=tuple(sample.loss_mask for sample in samples),
        rewards=None if rewards is None else np.asarray(rewards, np.float32),
        rollout_log_probs=tuple(sample.rollout_log_probs for sample in samples),
        weight_versions=tuple(sample.weight_versions for sample in samples),
        group_indices=None if groups is None else np.asarray(groups, np.int64),
    )


def _column(samples: Sequence[Sample], name: str) -> list[Any] | None:
    values = [getattr(sample, name) for sample in samples]
    missing = [sample.id for sample, value in zip(samples, values, strict=True) if value is None]
    if missing and len(missing) == len(values):
        return None
    if missing:
        raise ValueError(
            f"sample {missing[0]} has no {name} and other samples of the batch do; give all of them one, or"
            " leave it out"
        )
    return values


def compute_response_lengths(loss_masks: Sequence[BoolArray]) -> IntArray:
    """[B] number of tokens that train in each row. No rows give an empty array."""
    return np.asarray([int(np.count_nonzero(mask)) for mask in loss_masks], np.int64)


def build_batch_metadata(
    samples: Sequence[Sample], *, step: int | None = None, epoch: int | None = None
) -> tuple[dict[str, JSONValue], ...]:
    """One new dict per sample: its metadata and, where given, `step` and `epoch` under these names, in place
    of what the sample has there.
    """
    added = {name: number for name, number in (("step", step), ("epoch", epoch)) if number is not None}
    return tuple({**sample.metadata, **added} for sample in samples)


def convert_to_batch(
    samples: Iterable[Sample], *, temperature: float = 1.0, step: int | None = None, epoch: int | None = None
) -> RolloutBatch:
    """One row per sample, in their order, with the samples themselves behind the rows.

    temperature: that the samples were drawn at; 0 is greedy, whose log-probs are at 1. Samples without any
    reward give a batch for supervised training. Raises ValueError, naming the sample, if one is pending or
    failed, or if only some have a reward or a group; a zero in place of a failed sample's reward would move
    the mean of its whole group.
    """
    rows = tuple(samples)
    unfit = next((sample for sample in rows if sample.status in (Status.PENDING, Status.FAILED)), None)
    if unfit is not None:
        raise ValueError(
            f"sample {unfit.id} is {unfit.status}; only what was generated and scored can train: leave it out"
            " of the batch"
        )
    fields = extract_sample_fields(rows)
    return RolloutBatch(
        tokens=fields.tokens,
        loss_masks=fields.loss_masks,
        rewards=fields.rewards,
        metadata=build_batch_metadata(rows, step=step, epoch=epoch),
        rollout_log_probs=fields.rollout_log_probs,
        group_indices=fields.group_indices,
        weight_versions=fields.weight_versions,
        temperature=temperature or 1.0,
        samples=rows,
    )
