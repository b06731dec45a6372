"""Conversations as training rows: tokenized once, cut to length without losing what trains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rollouts.data.chat import (
    DEFAULT_OPTIONS,
    ChatTokenizer,
    TemplateOptions,
    TrainOn,
    compute_loss_mask,
    tokenize_conversation,
)
from rollouts.data.mixture import Mixture, Source
from rollouts.data.rows import Row, naming, parse_tools, row_to_conversation
from rollouts.errors import DataError
from rollouts.types import BoolArray, IntArray, RolloutBatch

S = TypeVar("S")
NO_TOKENS = "no_trained_tokens"  # max_length ends before the first token that trains


@dataclass(frozen=True, slots=True, eq=False)
class SFTSample:
    """One conversation, ready to train."""

    token_ids: IntArray  # [T]
    loss_mask: BoolArray  # [T] 1 where the token trains; at least one does, the first never
    row_id: int  # position of its row in the dataset

    def cut(self, max_length: int) -> SFTSample:
        """Its first tokens."""
        return SFTSample(self.token_ids[:max_length], self.loss_mask[:max_length], self.row_id)


def prepare_samples(
    mixture: Mixture[Row], prepare: Callable[[Row, int], tuple[S, int] | str], *, max_length: int, name: str
) -> Mixture[S]:
    """The samples of all rows. `prepare(row, row id)` gives a sample and how many of its token rows are cut,
    or the reason for which it is dropped; then it takes no place.

    Raises DataError and ModelError naming the row, DataError naming max_length if a source has nothing left.
    """
    sources: list[Source[S]] = []
    dropped: Counter[str] = Counter()
    truncated = 0
    for index, source in enumerate(mixture.sources):
        key = f"{name}.{index}" if len(mixture.sources) > 1 else name
        slots: list[S | None] = []
        reasons: Counter[str] = Counter()
        for row_id, row in enumerate(source.rows):
            if row is None:
                slots.append(None)
                continue
            with naming(f"{key}: row {row_id}"):
                answer = prepare(row, row_id)
            if isinstance(answer, str):
                reasons[answer] += 1
            else:
                slots.append(answer[0])
                truncated += answer[1]
        sources.append(Source(source.name, source.weight, tuple(slots)))
        if not sources[-1].good:
            counts = ", ".join(f"{reason}: {count}" for reason, count in reasons.items()) or "there is none"
            advice = f"raise {name.partition('.')[0]}.max_length={max_length}, or use other rows"
            raise DataError(f"{key}: none of {reasons.total()} rows can train ({counts}); {advice}")
        dropped += reasons
    return Mixture(tuple(sources), truncated, dict(dropped))


def prepare_sft_mixture(
    mixture: Mixture[Row],
    tokenizer: ChatTokenizer,
    *,
    max_length: int,
    train_on: TrainOn = "all",
    options: TemplateOptions = DEFAULT_OPTIONS,
    name: str = "sft.data",
) -> Mixture[SFTSample]:
    """Every row as a sample of at most `max_length` tokens, in the rows' order. Tools are row["tools"].

    A longer row is cut on the right if tokens that train remain, and dropped otherwise ("no_trained_tokens");
    both are counted. Raises as prepare_samples.
    """

    def prepare(row: Row, row_id: int) -> tuple[SFTSample, int] | str:
        conversation = tokenize_conversation(
            row_to_conversation(row),
            tokenizer,
            train_on=train_on,
            options=options,
            tools=parse_tools(row.get("tools"), where="tools"),
        )
        whole = SFTSample(conversation.token_ids, compute_loss_mask(conversation), row_id)
        assert not whole.loss_mask[0], "the first token has nothing before it to be predicted from"
        sample = whole.cut(max_length)
        return (sample, int(len(whole.token_ids) > max_length)) if sample.loss_mask.any() else NO_TOKENS

    return prepare_samples(mixture, prepare, max_length=max_length, name=name)


def make_sft_batch(samples: Sequence[SFTSample]) -> RolloutBatch:
    """What one SFT step consumes: tokens and loss masks, no rewards and no log-probs."""
    return RolloutBatch(
        tokens=tuple(sample.token_ids for sample in samples),
        loss_masks=tuple(sample.loss_mask for sample in samples),
    )
