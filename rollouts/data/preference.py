"""Preference data as training rows: pairs of responses to one prompt, or single responses that are marked
good or bad.

    rows ──prepare_*_mixture──► Mixture ──split_held_out──► what trains; what is held out

Every sample gives two token rows that begin with one prompt and end with the last token that trains: chosen
and rejected, or a completion and, after the same prompt, the completion of another prompt, with which KTO
estimates its reference point.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TypeVar

import numpy as np

from rollouts.data.chat import (
    DEFAULT_OPTIONS,
    ChatTokenizer,
    TemplateOptions,
    compute_loss_mask,
    tokenize_conversation,
)
from rollouts.data.messages import naming, parse_tools
from rollouts.data.mixture import Mixture
from rollouts.data.rows import Row
from rollouts.data.sft import NO_TOKENS, SFTSample, make_sft_batch, prepare_samples
from rollouts.errors import DataError
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
    # nats, of chosen and rejected under a frozen reference; None: not scored
    ref_log_probs: tuple[float, ...] | None = None

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
    # nats, of completion and, where it is needed, other under a reference; None: not scored
    ref_log_probs: tuple[float, ...] | None = None

    @property
    def rows(self) -> tuple[SFTSample, SFTSample]:
        return self.completion, self.other


PreferenceSample = PairSample | LabelledSample
S = TypeVar("S", PairSample, LabelledSample)


# --- rows → samples -----------------------------------------------------------------------------------------


def prepare_pair_mixture(
    mixture: Mixture[Row],
    tokenizer: ChatTokenizer,
    *,
    max_length: int,
    options: TemplateOptions = DEFAULT_OPTIONS,
    name: str = "preference.data",
) -> Mixture[PairSample]:
    """Every row of use "pair" as a sample whose token rows have at most `max_length` tokens; only the
    responses train.

    A longer response is cut on the right if tokens of it remain. A pair is dropped as a whole if one response
    has none left, or if the two are the same then; all of this is counted. Raises as prepare_samples.
    """

    def prepare(row: Row, row_id: int) -> tuple[PairSample, int] | str:
        whole = [_tokenize_response(row, at, row_id, tokenizer, options) for at in ("chosen", "rejected")]
        assert len({_find_prompt(response) for response in whole}) == 1, row_id
        chosen, rejected = (response.cut(max_length) for response in whole)
        if not chosen.loss_mask.any():
            return NO_TOKENS
        if np.array_equal(chosen.token_ids, rejected.token_ids):
            return SAME_RESPONSE
        sample = PairSample(chosen, rejected, row_id, float(row.get("margin") or 0.0))
        return sample, sum(len(response.token_ids) > max_length for response in whole)

    return prepare_samples(mixture, prepare, max_length=max_length, name=name)


def prepare_labelled_mixture(
    mixture: Mixture[Row],
    tokenizer: ChatTokenizer,
    *,
    max_length: int,
    options: TemplateOptions = DEFAULT_OPTIONS,
    name: str = "preference.data",
) -> Mixture[LabelledSample]:
    """The same for rows of use "labelled". A sample's `other` row has the completion of the next sample of
    all sources whose prompt is another.

    Raises what prepare_pair_mixture raises, and DataError if all prompts are the same.
    """

    def prepare(row: Row, row_id: int) -> tuple[LabelledSample, int] | str:
        whole = _tokenize_response(row, "completion", row_id, tokenizer, options)
        if not whole.loss_mask[:max_length].any():
            return NO_TOKENS
        return LabelledSample(whole, whole, row["label"], row_id), int(len(whole.token_ids) > max_length)

    prepared = prepare_samples(mixture, prepare, max_length=max_length, name=name)
    samples = prepared.samples
    try:
        others = mismatch_completions([prompt_of(sample) for sample in samples])
    except ValueError as error:
        raise DataError(f"{name}: {error}; use rows of several prompts") from error
    finished: list[LabelledSample] = []
    for sample, other in zip(samples, others, strict=True):
        own, response = sample.completion, samples[other].completion
        start = len(response.token_ids) - int(response.loss_mask.sum())
        token_ids = np.concatenate([own.token_ids[~own.loss_mask], response.token_ids[start:]])
        mismatched = SFTSample(
            token_ids, np.arange(len(token_ids)) >= int((~own.loss_mask).sum()), own.row_id
        )
        finished.append(replace(sample, completion=own.cut(max_length), other=mismatched.cut(max_length)))
    return prepared.with_samples(finished)


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
        differ = prompt_ids[row % count] != prompt_ids[(row + 1) % count]
        following[row] = row + 1 if differ else following[row + 1]
    return [index % count for index in following[:count]]


def _tokenize_response(
    row: Row, field: str, row_id: int, tokenizer: ChatTokenizer, options: TemplateOptions
) -> SFTSample:
    """The prompt and the response in `field` up to its last token, on which alone the mask is set."""
    tools = parse_tools(row.get("tools"), where="tools")
    with naming(field):
        conversation = tokenize_conversation(
            [*row["prompt"], *row[field]], tokenizer, train_on="last", options=options, tools=tools
        )
    whole = SFTSample(conversation.token_ids, compute_loss_mask(conversation), row_id)
    return whole.cut(conversation.spans[-1].end)


def _find_prompt(row: SFTSample) -> bytes:
    return row.token_ids[~row.loss_mask].tobytes()


def prompt_of(sample: PreferenceSample) -> bytes:
    """The token ids before the response: equal for samples of one prompt, and for no others."""
    return _find_prompt(sample.rows[0])


def count_labels(samples: Sequence[LabelledSample]) -> tuple[int, int]:
    """(desirable, undesirable) samples."""
    desirable = sum(sample.desirable for sample in samples)
    return desirable, len(samples) - desirable


# --- held out, batched --------------------------------------------------------------------------------------


def split_held_out(
    mixture: Mixture[S], count: int, *, name: str = "preference"
) -> tuple[Mixture[S], tuple[S, ...]]:
    """(what trains, the held-out samples): `count` samples off the ends of the sources, from each in
    proportion to its size.

    Samples whose prompt is held out do not train either; they are counted as dropped. Raises DataError naming
    `name`.held_out if a source has none left.
    """
    total = len(mixture.samples)
    held_out: list[S] = []
    for source, end in zip(
        mixture.sources, accumulate(len(source.good) for source in mixture.sources), strict=True
    ):
        share = end * min(count, total) // total - len(held_out)  # rounded so that the sum is exact
        held_out += source.good[len(source.good) - share :]
    asked = {prompt_of(sample) for sample in held_out}
    kept = [
        replace(source, rows=tuple(row for row in source.rows if row is None or prompt_of(row) not in asked))
        for source in mixture.sources
    ]
    empty = next((source.name for source in kept if not source.good), None)
    if empty is not None:
        which = f" of {empty}" if len(kept) > 1 else ""
        raise DataError(
            f"{name}.held_out={count} of {total} samples, and all others with the same prompts: none{which}"
            " is left to train on"
        )
    same_prompt = total - len(held_out) - sum(len(source.good) for source in kept)
    dropped = {**mixture.dropped, HELD_OUT: same_prompt} if same_prompt else mixture.dropped
    return replace(mixture, sources=tuple(kept), dropped=dropped), tuple(held_out)


def make_preference_batch(samples: Sequence[PreferenceSample], *, rows_per_sample: int = 2) -> RolloutBatch:
    """Tokens and masks of the samples' rows, those of one sample after each other: chosen and rejected in
    turn. With one row per sample its first.
    """
    return make_sft_batch([row for sample in samples for row in sample.rows[:rows_per_sample]])
