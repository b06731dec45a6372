"""Scores of whole sequences from a model with a scalar head: a batch in which each row trains one token more
than the sequence has.

A backend gives the value at the position before a trained token. What a model says of a whole sequence is
said at its last token, so a row is the sequence with any token behind it, which nobody computes: only what
predicts it is.
"""

from collections.abc import Sequence

import numpy as np

from rollouts.errors import DataError
from rollouts.types import FloatArray, IntArray, RolloutBatch


def make_score_batch(sequences: Sequence[IntArray]) -> RolloutBatch:
    """One row per sequence [T_i], of T_i + 1 tokens, masked in at the last alone; backend.forward then gives
    scores, for read_scores.

    For a gradient: with g [B] = dL/dscore,
    `dataclasses.replace(batch, advantages=broadcast_advantages(-g, batch.loss_masks))` and
    LossSpec("linear", unit="constant", constant=1.0) give that of L. Raises DataError if a sequence is empty.
    """
    for row, sequence in enumerate(sequences):
        if len(sequence) == 0:
            raise DataError(f"sequences[{row}] has no token, so there is nothing to score; leave it out")
    return RolloutBatch(
        tokens=tuple(np.append(sequence, sequence[-1]) for sequence in sequences),  # an id that the model has
        loss_masks=tuple(np.arange(len(sequence) + 1) == len(sequence) for sequence in sequences),
    )


def read_scores(values: Sequence[FloatArray], batch: RolloutBatch) -> FloatArray:
    """[B] the score of each row, from backend.forward's values [T_i]. Raises DataError if a row does not
    train exactly one token, ValueError if there are not as many values as rows.
    """
    for row in np.flatnonzero(batch.response_lengths != 1):
        raise DataError(
            f"batch.loss_masks[{row}] trains {batch.response_lengths[row]} tokens, and a score is of one;"
            " make the batch with make_score_batch"
        )
    kept = [row[mask] for row, mask in zip(values, batch.loss_masks, strict=True)]
    return np.concatenate([np.zeros(0), *kept], dtype=np.float32)
