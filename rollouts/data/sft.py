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
from rollouts.data.messages import parse_tools
from rollouts.data.mixture import (
    Mixture,
    SampleMixture,
    make_mixture,
    make_sample_mixture,
    prepare_samples,
    select_samples,
)
from rollouts.data.rows import row_to_conversation
from rollouts.errors import DataError, ModelError
from rollouts.types import BoolArray, IntArray, RolloutBatch

NO_TOKENS = "no_trained_tokens"  # max_length ends before the first token that trains


@dataclass(frozen=True, slots=True, eq=False)
class SFTSample:
    """One conversation, ready to train."""

    token_ids: IntArray  # [T]
    loss_mask: BoolArray  # [T] 1 where the token trains; at least one does, the first never
    row_id: int  # position of its row in the dataset


SFTMixture = SampleMixture
make_sft_mixture = make_sample_mixture
select_sft_samples = select_samples


def prepare_sft_rows(
    rows: Sequence[Mapping[str, Any] | None], tokenizer: ChatTokenizer, **settings: Any
) -> SampleMixture[SFTSample]:
    """prepare_sft_mixture of one source of these rows, where None is a hole."""
    return prepare_sft_mixture(make_mixture(rows), tokenizer, **settings)


def prepare_sft_mixture(
    mixture: Mixture,
    tokenizer: ChatTokenizer,
    *,
    max_length: int,
    train_on: TrainOn = "all",
    options: TemplateOptions = DEFAULT_OPTIONS,
    name: str = "sft.data",
) -> SampleMixture[SFTSample]:
    """Every row as a sample of at most `max_length` tokens, in the rows' order. Tools are row["tools"].

    A longer row is cut on the right if tokens that train remain, and dropped otherwise ("no_trained_tokens");
    both are counted. Raises DataError naming the row if it is no conversation, or naming max_length if
    nothing is left of a source; ModelError for the chat template.
    """

    def prepare(row: Mapping[str, Any], row_id: int, where: str) -> tuple[SFTSample, int] | str:
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
        if not loss_mask[:max_length].any():
            return NO_TOKENS
        sample = SFTSample(conversation.token_ids[:max_length], loss_mask[:max_length], row_id)
        return sample, int(len(loss_mask) > max_length)

    return prepare_samples(mixture, prepare, max_length=max_length, name=name)


def make_sft_batch(samples: Sequence[SFTSample]) -> RolloutBatch:
    """What one SFT step consumes: tokens and loss masks, no rewards and no log-probs."""
    return RolloutBatch(
        tokens=tuple(sample.token_ids for sample in samples),
        loss_masks=tuple(sample.loss_mask for sample in samples),
    )
