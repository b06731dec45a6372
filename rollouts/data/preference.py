"""Preference data as training rows: pairs of responses to one prompt, or single responses that are marked
good or bad.

    rows ──prepare_*_mixture──► SampleMixture ──split_held_out──► what trains; what is held out

Every sample gives two token rows that begin with one prompt and end with the last token that trains: chosen
and rejected, or a completion and, after the same prompt, the completion of another prompt, with which KTO
estimates its reference point.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np

from rollouts.data.chat import (
    DEFAULT_OPTIONS,
    ChatTokenizer,
    TemplateOptions,
    compute_loss_mask,
    tokenize_conversation,
)
from rollouts.data.messages import parse_tools
from rollouts.data.mixture import (
    Mixture,
    SampleMixture,
    make_batch_source,
    make_sample_mixture,
    prepare_samples,
    select_samples,
)
from rollouts.data.rows import as_messages
from rollouts.data.sft import NO_TOKENS, SFTSample
from rollouts.errors import DataError, ModelError
from rollouts.types import RolloutBatch

SAME_RESPONSE = "same_response"  # chosen and rejected are one and the same within max_length
HELD_OUT = "held_out_prompt"  # a held-out sample has the same prompt


@dataclass(frozen=True, slots=True, eq=False)
class PairSample:
    """Two responses to one prompt, ready to train. The token rows are equal up to the first token that trains
    in either.
    """

    chosen: SFTSample
    rejected: SFTSample
    row_id: int  # position of its row in the dataset
    margin: float = 0.0  # how much better the chosen response is said to be; reward models read it
    ref_log_probs: tuple[float, ...] | None = (
        None  # nats, of chosen and rejected under a frozen reference; None: not scored
    )

    @property
    def rows(self) -> tuple[SFTSample, SFTSample]:
        return self.chosen, self.rejected


@dataclass(frozen=True, slots=True, eq=False)
class LabelledSample:
    """A response that is marked good or bad, ready to train."""

    completion: SFTSample
    other: SFTSample  # this prompt followed by the completion of another one
    desirable: bool
    row_id: int  # position of its row in the dataset
    ref_log_probs: tuple[float, ...] | None = (
        None  # nats, of completion and, where it is needed, other under a reference; None: not scored
    )

    @property
    def rows(self) -> tuple[SFTSample, SFTSample]:
        return self.completion, self.other


PreferenceSample = PairSample | LabelledSample
S = TypeVar("S", PairSample, LabelledSample)


PreferenceMixture = SampleMixture
make_preference_mixture = make_sample_mixture
select_preference_samples = select_samples


# --- rows → samples -----------------------------------------------------------------------------------------


def prepare_pair_mixture(
    mixture: Mixture,
    tokenizer: ChatTokenizer,
    *,
    max_length: int,
    options: TemplateOptions = DEFAULT_OPTIONS,
    name: str = "preference.data",
) -> SampleMixture[PairSample]:
    """Every row of use "pair" as a sample whose token rows have at most `max_length` tokens; only the
    responses train.

    A longer response is cut on the right if tokens of it remain. A pair is dropped as a whole if one response
    has none left, or if the two are the same then; all of this is counted. Raises DataError naming the row if
    the chat template does not take it, or naming max_length if nothing is left of a source; ModelError for
    the chat template.
    """

    def prepare(row: Mapping[str, Any], row_id: int, where: str) -> tuple[PairSample, int] | str:
        chosen, rejected = (
            _tokenize_response(row, field, row_id, tokenizer, options, where=where)
            for field in ("chosen", "rejected")
        )
        start = _find_start(chosen)
        assert start == _find_start(rejected) and np.array_equal(
            chosen.token_ids[:start], rejected.token_ids[:start]
        ), where
        if start >= max_length:
            return NO_TOKENS
        cut = PairSample(
            _cut(chosen, max_length), _cut(rejected, max_length), row_id, float(row.get("margin", 0.0))
        )
        if np.array_equal(cut.chosen.token_ids, cut.rejected.token_ids):
            return SAME_RESPONSE
        return cut, sum(len(whole.token_ids) > max_length for whole in (chosen, rejected))

    return prepare_samples(mixture, prepare, max_length=max_length, name=name)


def prepare_labelled_mixture(
    mixture: Mixture,
    tokenizer: ChatTokenizer,
    *,
    max_length: int,
    options: TemplateOptions = DEFAULT_OPTIONS,
    name: str = "preference.data",
) -> SampleMixture[LabelledSample]:
    """The same for rows of use "labelled". A sample's `other` row has the completion of the next sample of
    all sources whose prompt is another.

    Raises what prepare_pair_mixture raises, and DataError if all prompts are the same.
    """

    def prepare(row: Mapping[str, Any], row_id: int, where: str) -> tuple[LabelledSample, int] | str:
        whole = _tokenize_response(row, "completion", row_id, tokenizer, options, where=where)
        if _find_start(whole) >= max_length:
            return NO_TOKENS
        return LabelledSample(whole, whole, row["label"], row_id), int(len(whole.token_ids) > max_length)

    prepared = prepare_samples(mixture, prepare, max_length=max_length, name=name)
    samples = prepared.samples
    try:
        others = mismatch_completions([prompt_of(sample) for sample in samples])
    except ValueError as error:
        raise DataError(f"{name}: {error}; use rows of several prompts") from error
    finished = iter(
        [
            _finish_labelled(sample, samples[other], max_length)
            for sample, other in zip(samples, others, strict=True)
        ]
    )
    return replace(prepared, slots=tuple(None if slot is None else next(finished) for slot in prepared.slots))


def mismatch_completions(prompt_ids: Sequence[Hashable]) -> list[int]:
    """For each row the next row, cyclically, whose prompt is another one: its completion after this prompt
    makes a mismatched pair.

    Raises ValueError if all prompts are the same: every completion then matches.
    """
    count = len(prompt_ids)
    if len(set(prompt_ids)) < 2:
        raise ValueError(
            f"{count} rows have {len(set(prompt_ids))} different prompt; mismatched pairs need at least two"
        )
    following = [0] * (2 * count)
    for row in range(2 * count - 2, -1, -1):
        following[row] = (
            row + 1 if prompt_ids[row % count] != prompt_ids[(row + 1) % count] else following[row + 1]
        )
    return [index % count for index in following[:count]]


def _tokenize_response(
    row: Mapping[str, Any],
    field: str,
    row_id: int,
    tokenizer: ChatTokenizer,
    options: TemplateOptions,
    *,
    where: str,
) -> SFTSample:
    """The prompt and the response in `field` up to its last token, on which alone the mask is set."""
    messages = [*as_messages(row["prompt"]), *as_messages(row[field])]
    tools = parse_tools(row.get("tools"), where=f"{where}: tools")
    try:
        conversation = tokenize_conversation(
            messages, tokenizer, train_on="last", options=options, tools=tools
        )
        mask = compute_loss_mask(conversation, "last")
    except (DataError, ModelError) as error:
        raise type(error)(f"{where}: {field}: {error}") from error
    end = int(np.flatnonzero(mask)[-1]) + 1
    return SFTSample(conversation.token_ids[:end], mask[:end], row_id)


def _find_start(row: SFTSample) -> int:
    return int(np.argmax(row.loss_mask))


def _cut(row: SFTSample, max_length: int) -> SFTSample:
    return replace(row, token_ids=row.token_ids[:max_length], loss_mask=row.loss_mask[:max_length])


def _finish_labelled(sample: LabelledSample, other: LabelledSample, max_length: int) -> LabelledSample:
    prompt, response = sample.completion, other.completion
    start, from_there = _find_start(prompt), _find_start(response)
    mismatched = SFTSample(
        np.concatenate([prompt.token_ids[:start], response.token_ids[from_there:]]),
        np.concatenate([prompt.loss_mask[:start], response.loss_mask[from_there:]]),
        prompt.row_id,
    )
    return replace(sample, completion=_cut(prompt, max_length), other=_cut(mismatched, max_length))


def prompt_of(sample: PreferenceSample) -> bytes:
    """The token ids before the response: equal for samples of one prompt, and for no others."""
    row = sample.rows[0]
    return row.token_ids[: _find_start(row)].tobytes()


def count_labels(samples: Sequence[LabelledSample]) -> tuple[int, int]:
    """(desirable, undesirable) samples."""
    desirable = sum(sample.desirable for sample in samples)
    return desirable, len(samples) - desirable


# --- held out, drawn, batched -------------------------------------------------------------------------------


def split_held_out(
    mixture: SampleMixture[S], count: int, *, name: str = "preference"
) -> tuple[SampleMixture[S], tuple[S, ...]]:
    """(what trains, the held-out samples): `count` samples off the ends of the sources, from each in
    proportion to its size.

    Samples whose prompt is held out do not train either; they are counted as dropped. Raises DataError naming
    `name`.held_out if a source has none left.
    """
    if count == 0:
        return mixture, ()
    starts = np.cumsum([0, *(source.size for source in mixture.sources)]).tolist()
    parts = [list(mixture.slots[begin:end]) for begin, end in pairwise(starts)]
    sizes = [sum(slot is not None for slot in part) for part in parts]
    held_out: list[S] = []
    for part, share in zip(parts, _share_out(min(count, sum(sizes)), sizes), strict=True):
        places = [place for place, slot in enumerate(part) if slot is not None][-share:] if share else []
        held_out += [slot for place in places if (slot := part[place]) is not None]
        for place in reversed(places):
            del part[place]
    asked = {prompt_of(sample) for sample in held_out}
    kept = [[slot for slot in part if slot is None or prompt_of(slot) not in asked] for part in parts]
    for part, source in zip(kept, mixture.sources, strict=True):
        if not any(slot is not None for slot in part):
            which = f" of {source.name}" if len(kept) > 1 else ""
            raise DataError(
                f"{name}.held_out={count} of {sum(sizes)} samples, and all others with the same prompts:"
                f" none{which} is left to train on"
            )
    same_prompt = sum(sizes) - len(held_out) - sum(slot is not None for part in kept for slot in part)
    dropped = {**mixture.dropped, HELD_OUT: same_prompt} if same_prompt else mixture.dropped
    sources = [
        make_batch_source(source.name, source.weight, part)
        for source, part in zip(mixture.sources, kept, strict=True)
    ]
    return replace(
        mixture, slots=tuple(slot for part in kept for slot in part), sources=tuple(sources), dropped=dropped
    ), tuple(held_out)


def _share_out(count: int, sizes: Sequence[int]) -> list[int]:
    """`count` in the proportions of `sizes`, rounded: the sum is exact, no share is above its size."""
    ends = np.cumsum(sizes).astype(np.int64)
    rounded = [int(end) * count // int(ends[-1]) for end in ends]
    return [end - begin for begin, end in zip([0, *rounded[:-1]], rounded, strict=True)]


def make_preference_batch(samples: Sequence[PreferenceSample], *, rows_per_sample: int = 2) -> RolloutBatch:
    """Tokens and masks of the samples' rows, those of one sample after each other: chosen and rejected in
    turn. With one row per sample its first.
    """
    rows = [row for sample in samples for row in sample.rows[:rows_per_sample]]
    return RolloutBatch(
        tokens=tuple(row.token_ids for row in rows), loss_masks=tuple(row.loss_mask for row in rows)
    )
