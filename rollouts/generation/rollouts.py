"""Batches of rollouts without an event loop: plain functions for a notebook or a script. Loads neither trio
nor torch.

    DataBuffer ─► samples ─► generate_fn ─► reward_fn ─► transforms ─► filter_fn ─► P groups ─► RolloutBatch
        ▲                                                              │ too few: draw again
        └── everything that an unfinished batch drew, in the order it came ◄── an error ───┘

Everything runs in the calling thread, one round after the other. What over-samples, carries unfinished
samples over, bounds staleness and keeps account of failures is AsyncRolloutManager.
"""

# ruff: noqa: I001  (names that are exported again stand together)

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rollouts.data.chat import NO_PARAMS, ChatTokenizer, TemplateParams
from rollouts.data.data_buffer import PromptRow
from rollouts.errors import NotEnoughSamples, PlugInError, RolloutsError, UserFunctionError, require
from rollouts.generation.generate import (
    append_completion as append_completion,
    make_prompt_tokenizer,
)
from rollouts.generation.samples import (
    PromptSource,
    build_batch_metadata as build_batch_metadata,
    check_enough,
    compute_response_lengths as compute_response_lengths,
    convert_to_batch as convert_to_batch,
    extract_sample_fields as extract_sample_fields,
    make_samples as make_samples,
)
from rollouts.protocols import RewardValue
from rollouts.rewards.check import (
    check_decision,
    check_reward,
    describe,
    function_name,
    is_async,
    reward_trajectory,
    shorten,
)
from rollouts.types import (
    Completion,
    FilterDecision,
    Function,
    GenerateRequest,
    RolloutBatch,
    Sample,
    SampleGroup,
    SamplingParams,
    Status,
)

GenerateBatchFn = Callable[[list[Sample]], Sequence[Sample]]
ScoreFn = Callable[[Sample], RewardValue]
SyncFilter = Callable[[SampleGroup], bool | FilterDecision]
SampleTransform = Callable[[list[Sample]], Sequence[Sample]]
CompleteFn = Callable[[list[GenerateRequest]], Sequence[Completion]]
FINISHED = (Status.COMPLETED, Status.TRUNCATED, Status.FAILED)


def generate_rollout_batches(
    data_buffer: PromptSource,
    generate_fn: GenerateBatchFn,
    *,
    num_prompts: int,
    samples_per_prompt: int,
    reward_fn: ScoreFn | None = None,
    filter_fn: SyncFilter | None = None,
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
    functions, sizes = (generate_fn, reward_fn, filter_fn), (num_prompts, samples_per_prompt, max_attempts)
    for name, size in zip(("num_prompts", "samples_per_prompt", "max_attempts"), sizes, strict=True):
        require(size >= 1, f"{name}={size} must be at least 1")
    for function in (*functions, *transforms):
        _check_is_plain(function)

    fill_batch = partial(_fill_batch, data_buffer, *functions, transforms, *sizes)

    def batches() -> Iterator[RolloutBatch]:
        first = first_group_index
        while True:
            drawn = []
            try:
                batch = convert_to_batch(fill_batch(first, drawn), temperature=temperature)
            except BaseException:  # an interrupted notebook cell too: nothing that was drawn is lost
                data_buffer.return_prompts(drawn)
                raise
            first += len(drawn)
            yield batch

    return batches()


def _fill_batch(
    data_buffer: PromptSource,
    generate_fn: GenerateBatchFn,
    reward_fn: ScoreFn | None,
    filter_fn: SyncFilter | None,
    transforms: Sequence[SampleTransform],
    num_prompts: int,
    samples_per_prompt: int,
    max_attempts: int,
    first: int,
    drawn: list[PromptRow],
) -> list[Sample]:
    """The samples of `num_prompts` groups that train, numbered from `first`; every prompt drawn for them is
    added to `drawn`.
    """
    kept = []
    dropped = Counter()
    while len(kept) < num_prompts:
        count = min(num_prompts - len(kept), num_prompts * max_attempts - len(drawn))
        if count == 0:
            reasons = ", ".join(f"{reason} {number}" for reason, number in sorted(dropped.items()))
            raise NotEnoughSamples(
                f"{len(kept)} of num_prompts={num_prompts} groups were kept of {len(drawn)} drawn"
                f" ({reasons}), and max_attempts={max_attempts} allows no more; loosen the filter, use"
                " easier or harder prompts, or raise max_attempts"
            )
        prompts = [*enumerate(data_buffer.get_prompts(count), first + len(drawn))]
        drawn += [prompt for _, prompt in prompts]
        pending = (make_samples(index, prompt, samples_per_prompt) for index, prompt in prompts)
        samples = generate_samples(generate_fn, [*itertools.chain(*pending)])
        samples = [one for one in samples if one.status is not Status.FAILED]
        if reward_fn is not None:
            samples = [score_sample(reward_fn, sample) for sample in samples]
        for one in samples:
            said = f"sample {one.id} has no reward: pass reward_fn, or let generate_fn set it"
            require(one.reward is not None, said)
        samples = apply_sample_transforms(samples, transforms)
        for index, prompt in prompts:
            own = (one for one in samples if one.group_index == index)
            left = tuple(one for one in own if one.status is not Status.FAILED)
            decision = check_enough(len(left), samples_per_prompt)
            if decision.keep and filter_fn is not None:
                name = function_name(filter_fn)
                where = f"filter {name} on group {index} (prompt {prompt.prompt_id})"
                group = SampleGroup(index, prompt.prompt_id, left)
                decision = check_decision(_call(filter_fn, group, where=where), name, where)
            if decision.keep:
                kept.append(left)
            else:
                dropped[decision.reason] += 1
    return [sample for group in kept for sample in group]


# --- one step of a round ------------------------------------------------------------------------------------


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
    odd = by_id.keys() ^ {sample.id for sample in samples}
    if odd:
        raise UserFunctionError(
            f"{where} returned {'a' if min(odd) in by_id else 'no'} sample {min(odd)}; it must answer every"
            " sample under its own id, and one that could not be generated with status failed"
        )
    return [replace(by_id[sample.id], group_index=sample.group_index) for sample in samples]


def score_sample(reward_fn: ScoreFn, sample: Sample) -> Sample:
    """The sample with its reward: a finite number, a mapping of named parts whose sum is the reward, or a
    RewardResult. The rewards of its turns are added.

    Raises UserFunctionError, naming function and sample, if reward_fn raises or answers anything else, NaN
    and None included.
    """
    where = f"reward function {function_name(reward_fn)} on sample {sample.id}"
    (scored,) = reward_trajectory([sample], check_reward(_call(reward_fn, sample, where=where), where))
    return scored


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
        current = _check_samples(_call(transform, list(current), where=where), where)
        for sample in current:
            if sample.group_index not in groups:
                raise UserFunctionError(
                    f"{where} returned sample {sample.id} with group_index={sample.group_index}; it was given"
                    " no such group"
                )
    return current


def make_sync_chat_generate(
    complete: CompleteFn,
    tokenizer: ChatTokenizer,
    sampling: SamplingParams,
    *,
    params: TemplateParams = NO_PARAMS,
) -> GenerateBatchFn:
    """A generate_fn that answers each prompt (text is one user turn) in the chat template with one
    completion.

    The tools of a prompt are its sample's metadata["tools"]; `params` is what the template is told beside
    the messages. `complete` turns requests, whose ids are those of the samples, into completions in the same
    order, for example functools.partial(rollouts.models.sampling.sample_completions, model). The function
    raises DataError and ModelError like tokenize_prompt, what `complete` raises, and UserFunctionError if its
    completions are not those of the requests.
    """
    tokenize = make_prompt_tokenizer(tokenizer, params=params)

    def chat_generate(samples: list[Sample]) -> list[Sample]:
        requests = [
            GenerateRequest(request_id=sample.id, prompt_ids=tokenize(sample), sampling=sampling)
            for sample in samples
        ]
        completions = complete(requests)
        if [one.request_id for one in completions] != [one.request_id for one in requests]:
            raise UserFunctionError(
                f"{function_name(complete)} must answer one completion per request, in their order and with"
                " their ids"
            )
        return [
            append_completion(sample, request.prompt_ids, completion, tokenizer)
            for sample, request, completion in zip(samples, requests, completions, strict=True)
        ]

    return chat_generate


# --- what users' functions answer ---------------------------------------------------------------------------


def _check_samples(answer: object, where: str) -> list[Sample]:
    """A user's answer as samples of different ids, each of them finished."""
    if not isinstance(answer, Sequence) or not all(isinstance(sample, Sample) for sample in answer):
        raise UserFunctionError(f"{where} returned {shorten(answer)}; it must return a list of Samples")
    ids = set()
    for sample in answer:
        if sample.id in ids:
            raise UserFunctionError(f"{where} returned sample {sample.id} twice; ids are unique")
        if sample.status not in FINISHED:
            raise UserFunctionError(
                f"{where} returned sample {sample.id} as {sample.status}; set completed, truncated or failed"
            )
        ids.add(sample.id)
    return list(answer)


def _call(function: Callable[[Any], object], argument: object, *, where: str) -> object:
    try:
        return function(argument)
    except Exception as error:
        raise UserFunctionError(f"{where} raised {describe(error)}") from error


def _check_is_plain(function: Function | None) -> None:
    if function is not None and is_async(function):
        raise PlugInError(
            f"{function_name(function)} is async; these calls run plain functions: drop the async, or use"
            " AsyncRolloutManager"
        )
