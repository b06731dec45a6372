"""A loss computed again from recorded arrays, in float64."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollouts.errors import RecordError, RolloutsError
from rollouts.losses import LossInputs, resolve_loss, wants_entropy_gradient
from rollouts.types import LossSpec

Columns = Mapping[str, NDArray[Any]]  # [T] of one row, by name
FIELDS = {  # of LossInputs, by the column that holds them
    "mu": "rollout_log_probs",
    "advantage": "advantages",
    "old": "old_log_probs",
    "ref": "ref_log_probs",
    "value": "old_values",
    "return": "returns",
}
CHUNK_TOKENS = 1 << 19  # padded, of rows that are computed at once
CHOOSE_AMONG_MICRO_BATCH = ("clip_cov", "kl_cov")


class Recomputed(NamedTuple):
    """What a loss came to over the rows of an update."""

    total: float  # before the denominator
    counted: float  # of the loss's unit
    slopes: NDArray[np.float64]  # [B] sum over a row's tokens of |d total / d log-prob|


def check_replayable(spec: LossSpec) -> None:
    """Raises RecordError, naming it, for a loss that needs more than the record has; ConfigError and
    PlugInError as resolve_loss.
    """
    whole = spec.params.get("cov_fraction") == 1 and {"log_prob_mean", "advantage_mean"} <= set(spec.params)
    if spec.name in CHOOSE_AMONG_MICRO_BATCH and not whole:
        raise RecordError(
            f"loss {spec.name!r} chooses among the tokens of a micro-batch, and the record does not say how"
            " batches were divided; it replays with cov_fraction = 1 and both means given"
        )
    if wants_entropy_gradient(spec.name, spec.params) or spec.params.get("policy_entropy_fraction", 1) != 1:
        raise RecordError(
            f"loss {spec.name!r} with a term of the entropy: that of each token is not in the record"
        )


def recompute(spec: LossSpec, rows: Sequence[Columns]) -> Recomputed:
    """The loss over all rows, with its gradient by log-prob. Raises RecordError where the loss fails on what
    is recorded.

    A function of the user is taken to be what a loss must be: the same however rows are put together.
    """
    loss_fn = resolve_loss(spec.name)
    total, count = 0.0, 0.0
    slopes = np.zeros(len(rows))
    for chosen in chunk_rows([len(row["mask"]) for row in rows]):
        inputs, log_probs = make_inputs([rows[index] for index in chosen])
        try:
            output = loss_fn(inputs, unit=spec.unit, **spec.params)
            output.sum.backward()
        except Exception as error:
            if isinstance(error, RolloutsError) or ":" in spec.name:
                raise RecordError(
                    f"loss {spec.name!r} fails on what is recorded: {type(error).__name__}: {error}"
                ) from error
            raise
        total += float(output.sum.detach())
        count += float(output.count)
        assert log_probs.grad is not None
        slopes[chosen] = log_probs.grad.abs().sum(dim=-1).numpy()
    return Recomputed(total, count, slopes)


def chunk_rows(lengths: Sequence[int]) -> Iterator[list[int]]:
    """All rows, those of like length together, as many at once as CHUNK_TOKENS allow when padded."""
    chunk: list[int] = []
    for index in np.argsort(lengths, kind="stable").tolist():
        if chunk and (len(chunk) + 1) * lengths[index] > CHUNK_TOKENS:
            yield chunk
            chunk = []
        chunk.append(index)
    if chunk:
        yield chunk


def make_inputs(rows: Sequence[Columns]) -> tuple[LossInputs, Tensor]:
    """The inputs of a loss in float64, [B, T] right-padded, and their log-probs, whose gradient is wanted."""
    shape = len(rows), max(len(row["mask"]) for row in rows)

    def pad(name: str) -> Tensor:
        padded = np.zeros(shape)
        for index, row in enumerate(rows):
            padded[index, : len(row[name])] = row[name]
        return torch.from_numpy(padded)

    log_probs = pad("log_prob").requires_grad_()
    fields: dict[str, Any] = {field: pad(name) for name, field in FIELDS.items() if name in rows[0]}
    return LossInputs(log_probs=log_probs, mask=pad("mask") > 0, **fields), log_probs
