"""What a trainer and a reference model in a process of its own say to each other, over one unix socket.

frame: bytes of the message (u64) · message: a Command of rollouts.distributed.commands (name, JSON fields,
arrays)

trainer → child   load    path, dtype, device, micro_batch_tokens, torch_threads; a probe batch, or none
child → trainer   loaded  metrics, said (lines for the log)
trainer → child   score   id; a batch
child → trainer   scored  id; log_probs, all rows one after the other
child → trainer   failed  id; error (its class), message
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from rollouts.distributed.commands import Command, encode_command
from rollouts.errors import ScoringError
from rollouts.types import FloatArray, RolloutBatch

LENGTH = struct.Struct("<Q")
MOST_BYTES = 1 << 40  # of one message; more is no message


def encode_frame(command: Command) -> list[memoryview]:
    """The pieces of a frame, to be sent one after the other. Raises ControlError for fields that cannot
    cross.
    """
    pieces = encode_command(command)
    return [memoryview(LENGTH.pack(sum(piece.nbytes for piece in pieces))), *pieces]


def encode_batch(batch: RolloutBatch) -> dict[str, np.ndarray]:
    """What scoring needs of a batch, as arrays."""
    empty = np.zeros(0, np.int64)
    return {
        "lengths": np.asarray([len(row) for row in batch.tokens], np.int64),
        "tokens": np.concatenate([empty, *batch.tokens]).astype(np.int64),
        "loss_mask": np.concatenate([empty.astype(bool), *batch.loss_masks]),
        "temperature": np.asarray([batch.temperature], np.float64),
    }


def decode_batch(arrays: Mapping[str, np.ndarray]) -> RolloutBatch:
    """The batch again."""
    cuts = np.cumsum(arrays["lengths"])[:-1]
    count = len(arrays["lengths"])
    return RolloutBatch(
        tokens=tuple(np.split(arrays["tokens"].copy(), cuts)[:count]),
        loss_masks=tuple(np.split(arrays["loss_mask"], cuts)[:count]),
        temperature=float(arrays["temperature"][0]),
    )


def decode_scores(answer: Command, batch: RolloutBatch) -> tuple[FloatArray, ...]:
    """[T_i] per row of the batch that was asked about. Raises ScoringError for numbers that are not its
    log-probs.
    """
    values = answer.arrays.get("log_probs")
    wanted = sum(len(row) for row in batch.tokens)
    if values is None or values.dtype != np.float32 or values.shape != (wanted,):
        raise ScoringError(
            f"the reference process answered with {answer.name!r} and no {wanted} log-probs in float32"
        )
    rows = np.split(values.copy(), np.cumsum([len(row) for row in batch.tokens])[:-1])[: len(batch)]
    check_log_probs(rows, batch, where="the reference process")
    return tuple(rows)


def check_log_probs(rows: list[FloatArray], batch: RolloutBatch, *, where: str) -> None:
    """Raises ScoringError for a trained token whose log-prob is NaN, infinite or above 0 by more than
    rounding.
    """
    for index, (row, mask) in enumerate(zip(rows, batch.loss_masks, strict=True)):
        wrong = np.flatnonzero(mask & ~(np.isfinite(row) & (row <= 1e-3)))
        if len(wrong):
            raise ScoringError(
                f"{where} gave the log-prob {row[wrong[0]]} for token {wrong[0]} of row {index}; it must be"
                " finite and at most 0"
            )


def read_fields(command: Command, **kinds: type) -> dict[str, Any]:
    """The named fields. Raises ScoringError for one that is missing or of another type."""
    for name, kind in kinds.items():
        if not isinstance(command.fields.get(name), kind):
            raise ScoringError(
                f"the reference process said {command.name!r} with {name}={command.fields.get(name)!r}, which"
                f" is no {kind.__name__}"
            )
    return {name: command.fields[name] for name in kinds}
