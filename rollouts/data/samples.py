"""Rows as training samples: tokenized once, cut to length without losing what trains.

    rows ──prepare_sft_mixture──► Mixture
    rows ──prepare_preference_mixture──► Mixture ──split_held_out──► what trains; what is held out

Every preference sample gives two token rows that begin with one prompt and end with the last token that
trains: chosen and rejected, or a completion and, after the same prompt, the completion of another prompt,
with which KTO estimates its reference point.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from rollouts.data.chat import (
    NO_PARAMS,
    ChatTokenizer,
    TemplateParams,
    TrainOn,
    tokenize_conversation,
)
from rollouts.data.mixture import Mixture, Source
from rollouts.data.rows import Messages, Row, RowUse, naming, parse_tools, row_to_conversation
from rollouts.errors import DataError
from rollouts.types import BoolArray, IntArray, RolloutBatch

NO_TOKENS = "no_trained_tokens"  # max_length ends before the first token that trains
SAME_RESPONSE = "same_response"  # chosen and rejected are one and the same within max_length
HELD_OUT = "held_out_prompt"  # a held-out sample has the same prompt


class SFTSample(NamedTuple):
    """One conversation, ready to train."""

    token_ids: IntArray  # [T]
    loss_mask: BoolArray  # [T] 1 where the token trains; at least one does, the first never

    def cut(self, max_length: int) -> "SFTSample":
        """Its first tokens."""
        return SFTSample(self.token_ids[:max_length], self.loss_mask[:max_length])


class PreferenceSample(NamedTuple):
    """Two responses to one prompt, or one that is marked good or bad, or has a score, ready to train."""

    # chosen and rejected; or the completion and, after the same prompt, that of another one. They are equal
    # up to the first token that trains in either. Of a scored response there is one
    rows: tuple[SFTSample, ...]
    margin: float = 0.0  # how much better the chosen response is said to be, or the score; of reward models
    desirable: bool | None = None  # the mark of the completion; None: a pair
    # nats, of the rows that are scored under a frozen reference; None: not scored
    ref_log_probs: tuple[float, ...] | None = None


def prepare_samples(
    mixture: Mixture[Row], prepare: Callable[[Row], tuple[Any, int] | str], *, max_length: int, name: str
) -> Mixture[Any]:
    """The samples of all rows. `prepare(row)` gives a sample and how many of its token rows are cut,
    or the reason for which it is dropped; then it takes no place.

    Raises DataError and ModelError naming the row, DataError naming max_length if a source has nothing left.
    """
    sources = []
    dropped = Counter()
    truncated = 0
    for index, source in enumerate(mixture.sources):
        key = f"{name}.{index}" if len(mixture.sources) > 1 else name
        slots = []
        reasons = Counter()
        for row_id, row in enumerate(source.rows):
            if row is None:
                slots.append(None)
                continue
            with naming(f"{key}: row {row_id}"):
                answer = prepare(row)
            if isinstance(answer, str):
                reasons[answer] += 1
            else:
                slots.append(answer[0])
                truncated += answer[1]
        sources.append(Source(source.name, source.weight, tuple(slots)))
        if not sources[-1].good:
            counts = ", ".join(f"{reason}: {count}" for reason, count in reasons.items()) or "there is none"
            raise DataError(
                f"{key}: none of {reasons.total()} rows can train ({counts}); raise"
                f" {name.partition('.')[0]}.max_length={max_length}, or use other rows"
            )
        dropped += reasons
    return Mixture(tuple(sources), truncated, dropped)


# --- conversations ------------------------------------------------------------------------------------------


def prepare_sft_mixture(
    mixture: Mixture[Row],
    tokenizer: ChatTokenizer,
    *,
    max_length: int,
    train_on: TrainOn = "all",
    params: TemplateParams = NO_PARAMS,
) -> Mixture[SFTSample]:
    """Every row as a sample of at most `max_length` tokens, in the rows' order. Tools are row["tools"].

    A longer row is cut on the right if tokens that train remain, and dropped otherwise ("no_trained_tokens");
    both are counted. Raises as prepare_samples.
    """

    def prepare(row: Row) -> tuple[SFTSample, int] | str:
        whole = _tokenize_row(row_to_conversation(row), row, tokenizer, train_on, params)
        sample = whole.cut(max_length)
        return (sample, len(whole.token_ids) > max_length) if sample.loss_mask.any() else NO_TOKENS

    return prepare_samples(mixture, prepare, max_length=max_length, name="sft.data")


def _tokenize_row(
    messages: Messages,
    row: Row,
    tokenizer: ChatTokenizer,
    train_on: TrainOn,
    params: TemplateParams,
) -> SFTSample:
    """The messages, with the row's tools, as one sample, whole."""
    tools = parse_tools(row.get("tools"))
    found = tokenize_conversation(messages, tokenizer, train_on=train_on, params=params, tools=tools)
    mask = np.zeros(len(found.token_ids), np.bool_)
    for span in found.spans:
        mask[span] = True
    assert not mask[0], "the first token has nothing before it to be predicted from"
    return SFTSample(found.token_ids, mask)


def make_sft_batch(samples: Sequence[SFTSample]) -> RolloutBatch:
    """What one SFT step consumes: tokens and loss masks, no rewards and no log-probs."""
    return RolloutBatch(
        tokens=tuple(sample.token_ids for sample in samples),
        loss_masks=tuple(sample.loss_mask for sample in samples),
    )


# --- preferences --------------------------------------------------------------------------------------------


def prepare_preference_mixture(
    mixture: Mixture[Row],
    tokenizer: ChatTokenizer,
    *,
    use: RowUse,
    max_length: int,
    params: TemplateParams = NO_PARAMS,
    name: str = "preference.data",
) -> Mixture[PreferenceSample]:
    """Every row of use "pair", "labelled" or "scored" as a sample whose token rows have at most `max_length`
    tokens; only the responses train. The second row of a labelled sample has the completion of the next row
    of all sources whose prompt is another.

    A longer response is cut on the right if tokens of it remain. A sample is dropped as a whole if a response
    has none left, a pair also if the two are the same then; all of this is counted. Raises as
    prepare_samples, and DataError if all prompts of labelled rows are the same.
    """
    fields = columns = ("chosen", "rejected") if use == "pair" else ("completion",)
    if use == "labelled":
        rows, columns = mixture.samples, (*fields, "the completion of another row")
        with naming(name):
            others = mismatch_completions([json.dumps(row["prompt"], sort_keys=True) for row in rows])
        mixture = mixture.with_samples(
            {**row, columns[1]: rows[other]["completion"]} for row, other in zip(rows, others, strict=True)
        )

    def prepare(row: Row) -> tuple[PreferenceSample, int] | str:
        whole = []
        for field in columns:
            with naming(field):
                sample = _tokenize_row([*row["prompt"], *row[field]], row, tokenizer, "last", params)
            whole.append(sample.cut(int(np.flatnonzero(sample.loss_mask)[-1]) + 1))
        cut = tuple(response.cut(max_length) for response in whole)
        assert len({response.token_ids[~response.loss_mask].tobytes() for response in whole}) == 1
        if not cut[0].loss_mask.any():
            return NO_TOKENS
        if use == "pair" and np.array_equal(cut[0].token_ids, cut[1].token_ids):
            return SAME_RESPONSE
        margin = float(row["score"] if use == "scored" else row.get("margin") or 0.0)
        desirable = row["label"] if use == "labelled" else None
        num_cut = sum(len(response.token_ids) > max_length for response in whole[: len(fields)])
        return PreferenceSample(cut, margin, desirable), num_cut

    return prepare_samples(mixture, prepare, max_length=max_length, name=name)


def mismatch_completions(prompt_ids: Sequence[Hashable]) -> list[int]:
    """For each row the next row, cyclically, whose prompt is another one: its completion after this prompt
    makes a mismatched pair.

    Raises DataError if all prompts are the same: every completion then matches.
    """
    count, different = len(prompt_ids), len(set(prompt_ids))
    if different < 2:
        raise DataError(
            f"{count} rows have {different} different prompt; mismatched pairs need at least two; use rows of"
            " several prompts"
        )
    # rows before which another prompt stands, the last row being before the first
    changes = np.flatnonzero([prompt_ids[row - 1] != prompt_ids[row] for row in range(count)])
    following = np.searchsorted(changes, np.arange(count), side="right")
    return changes[following % len(changes)].tolist()


def prompt_of(sample: PreferenceSample) -> bytes:
    """The token ids before the response: equal for samples of one prompt, and for no others."""
    return sample.rows[0].token_ids[~sample.rows[0].loss_mask].tobytes()


def measure_scores(samples: Sequence[PreferenceSample]) -> tuple[float, float]:
    """(mean, standard deviation) of the scores. Raises DataError unless they differ and are of one size."""
    scores = np.asarray([sample.margin for sample in samples])
    mean, std = float(scores.mean()), float(scores.std())
    if not 0 < std < math.inf:
        raise DataError(f"reward_model.data: the deviation of the scores is {std}; they must differ")
    return mean, std


# --- held out, batched --------------------------------------------------------------------------------------


def split_held_out(
    mixture: Mixture[PreferenceSample], count: int, *, name: str = "preference"
) -> tuple[Mixture[PreferenceSample], tuple[PreferenceSample, ...]]:
    """(what trains, the held-out samples): `count` samples off the ends of the sources, from each in
    proportion to its size.

    Samples whose prompt is held out do not train either; they are counted as dropped. Raises DataError naming
    `name`.held_out if a source has none left.
    """
    total, held_out = len(mixture.samples), list[PreferenceSample]()
    ends = accumulate(len(source.good) for source in mixture.sources)
    for source, end in zip(mixture.sources, ends, strict=True):
        share = end * min(count, total) // total - len(held_out)  # rounded so that the sum is exact
        held_out += source.good[len(source.good) - share :]
    asked = set(map(prompt_of, held_out))
    training = mixture.keep(
        lambda sample: prompt_of(sample) not in asked,
        f"{name}.held_out={count} of {total} samples, and all others with the same prompts: none{{}} is left"
        " to train on",
    )
    if same_prompt := total - len(held_out) - len(training.samples):
        training = replace(training, dropped={**mixture.dropped, HELD_OUT: same_prompt})
    return training, tuple(held_out)


def make_preference_batch(samples: Sequence[PreferenceSample], *, rows_per_sample: int) -> RolloutBatch:
    """Tokens and masks of the samples' rows, those of one sample after each other: chosen and rejected in
    turn. With one row per sample its first.
    """
    return make_sft_batch([row for sample in samples for row in sample.rows[:rows_per_sample]])
