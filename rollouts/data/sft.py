"""Conversations as training rows: tokenized once, cut to length without losing what trains, drawn in an order
that needs no state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollouts.data.chat import (
    DEFAULT_OPTIONS,
    ChatTokenizer,
    TemplateOptions,
    TrainOn,
    compute_loss_mask,
    tokenize_conversation,
)
from rollouts.data.datasets import row_to_conversation
from rollouts.data.messages import parse_tools
from rollouts.data.mixture import BatchSource, Mixture, make_batch_source, make_slots, select_mixture_batch
from rollouts.errors import DataError, ModelError
from rollouts.types import BoolArray, IntArray, RolloutBatch


@dataclass(frozen=True, slots=True, eq=False)
class SFTSample:
    """One conversation, ready to train."""

    token_ids: IntArray  # [T]
    loss_mask: BoolArray  # [T] 1 where the token trains; at least one does, the first never
    row_id: int  # position of its row in the dataset


@dataclass(frozen=True, slots=True)
class SFTData:
    """The rows that train, and what became of the others."""

    samples: tuple[SFTSample, ...]
    truncated: int  # samples cut at max_length; the tokens after it do not train
    dropped: Mapping[
        str, int
    ]  # reason → rows left out; "no_trained_tokens": max_length ends before the first token that trains


def prepare_sft_rows(
    rows: Sequence[Mapping[str, Any] | None],
    tokenizer: ChatTokenizer,
    *,
    max_length: int,
    train_on: TrainOn = "all",
    options: TemplateOptions = DEFAULT_OPTIONS,
    name: str = "sft.data",
) -> SFTData:
    """Every row as a sample of at most `max_length` tokens, in the rows' order; holes (None) are passed over.
    Tools are row["tools"].

    A longer row is cut on the right if tokens that train remain, and dropped otherwise; both are counted.
    Raises DataError naming the row if it is no conversation, or naming max_length if nothing is left;
    ModelError for the chat template.
    """
    samples: list[SFTSample] = []
    truncated = dropped = longest = 0
    present = [(row_id, row) for row_id, row in enumerate(rows) if row is not None]
    for row_id, row in present:
        sample = _prepare_row(row, row_id, tokenizer, train_on, options, where=f"{name}: row {row_id}")
        longest = max(longest, len(sample.token_ids))
        cut = SFTSample(sample.token_ids[:max_length], sample.loss_mask[:max_length], row_id)
        if not cut.loss_mask.any():
            dropped += 1
            continue
        truncated += len(sample.token_ids) > max_length
        samples.append(cut)
    if not samples:
        raise DataError(
            f"{name}: none of {len(present)} rows has a token to train on within max_length={max_length} (the"
            f" longest has {longest} tokens); raise sft.max_length"
        )
    assert len(samples) + dropped == len(present), "a row was lost"
    return SFTData(tuple(samples), truncated, {"no_trained_tokens": dropped} if dropped else {})


@dataclass(frozen=True, slots=True)
class SFTMixture:
    """The samples of all sources, one source after the other, and what the order of their draws depends on."""

    slots: tuple[SFTSample | None, ...]  # None: a malformed row, which keeps its place and is never drawn
    sources: tuple[BatchSource, ...]
    truncated: int  # as in SFTData
    dropped: Mapping[str, int]  # as in SFTData


def prepare_sft_mixture(
    mixture: Mixture,
    tokenizer: ChatTokenizer,
    *,
    max_length: int,
    train_on: TrainOn = "all",
    options: TemplateOptions = DEFAULT_OPTIONS,
    name: str = "sft.data",
) -> SFTMixture:
    """Every source through `prepare_sft_rows`. Raises what that raises."""
    slots: list[SFTSample | None] = []
    sources: list[BatchSource] = []
    parts: list[SFTData] = []
    for index, source in enumerate(mixture.sources):
        key = f"{name}.{index}" if len(mixture.sources) > 1 else name
        prepared = prepare_sft_rows(
            source.rows, tokenizer, max_length=max_length, train_on=train_on, options=options, name=key
        )
        own = make_slots(source.rows, {sample.row_id: sample for sample in prepared.samples})
        slots += own
        sources.append(make_batch_source(source.name, source.weight, own))
        parts.append(prepared)
    dropped = sum(sum(part.dropped.values()) for part in parts)
    truncated = sum(part.truncated for part in parts)
    return SFTMixture(
        tuple(slots), tuple(sources), truncated, {"no_trained_tokens": dropped} if dropped else {}
    )


def select_sft_samples(mixture: SFTMixture, batch_size: int, step: int, seed: int) -> list[SFTSample]:
    """The samples of the step after `step` completed ones; see select_mixture_batch."""
    chosen = [mixture.slots[row] for row in select_mixture_batch(mixture.sources, batch_size, step, seed)]
    samples = [sample for sample in chosen if sample is not None]
    assert len(samples) == len(chosen), "a hole was drawn"
    return samples


def make_sft_mixture(samples: Sequence[SFTSample]) -> SFTMixture:
    """One source of these samples."""
    return SFTMixture(tuple(samples), (make_batch_source("", 1.0, samples),), 0, {})


def _prepare_row(
    row: Mapping[str, Any],
    row_id: int,
    tokenizer: ChatTokenizer,
    train_on: TrainOn,
    options: TemplateOptions,
    *,
    where: str,
) -> SFTSample:
    messages = row_to_conversation(row, where=where)
    tools = parse_tools(row.get("tools"), where=f"{where}: tools")
    try:
        conversation = tokenize_conversation(
            messages, tokenizer, train_on=train_on, options=options, tools=tools
        )
        loss_mask = compute_loss_mask(conversation, train_on)
    except (DataError, ModelError) as error:
        raise type(error)(f"{where}: {error}") from error
    assert not loss_mask[0], "the first token has nothing before it to be predicted from"
    return SFTSample(conversation.token_ids, loss_mask, row_id)


def make_sft_batch(samples: Sequence[SFTSample]) -> RolloutBatch:
    """What one SFT step consumes: tokens and loss masks, no rewards and no log-probs."""
    return RolloutBatch(
        tokens=tuple(sample.token_ids for sample in samples),
        loss_masks=tuple(sample.loss_mask for sample in samples),
    )
