"""What went into each update of the weights: its per-token arrays in tokens/, addressed by (file, offset)
from a row of contributions.jsonl for each trained sample, and a line of updates.log.

    training loop ──UpdateRecord──► log_step ──► tokens/*.bin, contributions.jsonl, updates.log

    tokens/STAGE-ATTEMPT-NNNNNN.bin  =  block, block, …
    block  =  bytes u64 | crc32 u32 | that many bytes of safetensors           little-endian

The safetensors hold one tensor [T] a column; the CRC is of the sample's id, then of them. A shard is only
appended to, by one attempt; the oldest shards are removed when all together are larger than the limit.

Arrays, rows and lines are made where they are written, off the event loop.
"""

import functools
import json
import logging
import math
import os
import re
import struct
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError

from rollouts.errors import RecordError
from rollouts.messages import drop_none
from rollouts.metric_kinds import metric_values
from rollouts.metrics.jsonl import AppendedFile
from rollouts.metrics.record import encode_rows
from rollouts.run_dir import RunDir
from rollouts.types import (
    LOSS_FIELDS,
    Fields,
    FloatArray,
    FloatRows,
    ForwardBackwardResult,
    OptimStepResult,
    RolloutBatch,
)

Array = NDArray[Any]
SHARD_BYTES = 64 << 20
SHARDS_AT_LEAST = 8  # that the limit holds, so that the removal of the oldest takes a small part
SHARD_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*-[1-9][0-9]*-[0-9]{6,}\.bin")
PREFIX = struct.Struct("<QI")
BLOCK_BYTES_MAX = 1 << 30  # more is damage: a row of thirty million tokens
TYPES = {"tokens": "<i4", "mask": "|u1", "version": "<i4"}  # of columns; the others are <f4


TIME_FORM = "%Y-%m-%dT%H:%M:%SZ"  # of updates.log


class UpdateRecord(NamedTuple):
    """One optimizer update, as the record is told of it."""

    update: int  # index within the step, from 0
    batch: RolloutBatch  # what it was made of
    forward: ForwardBackwardResult
    optim: OptimStepResult
    kl_coef: float | None = None  # β of the KL term; None where there is none
    part: str = ""  # what was updated, where a stage trains more than the policy: "critic"
    contributes: bool = False  # its rows go to contributions.jsonl: those of a policy, with advantages


# --- blocks -------------------------------------------------------------------------------------------------


def encode_blocks(update: UpdateRecord) -> Iterator[bytes]:
    """The block of each row of the update's batch."""
    columns = collect_columns(update)
    ids = [sample.id for sample in update.batch.samples] or [""] * len(update.batch.tokens)
    names = tuple(columns)
    for id_, *row in zip(ids, *columns.values(), strict=True):
        head, places = _lay_out(names, len(row[0]))
        kinds = ((row[place], TYPES.get(names[place], "<f4")) for place in places)
        body = b"".join((head, *(np.asarray(values, kind).tobytes() for values, kind in kinds)))
        yield PREFIX.pack(len(body), zlib.crc32(body, zlib.crc32(id_.encode()))) + body


@functools.lru_cache(4096)
def _lay_out(names: tuple[str, ...], length: int) -> tuple[bytes, Sequence[int]]:
    """What safetensors of [length] of each column begin with, and in which order they hold the columns: the
    library takes eight times as long to make one as to append these bytes.
    """
    blank = safetensors.numpy.save({name: np.zeros(length, TYPES.get(name, "<f4")) for name in names})
    end = 8 + int.from_bytes(blank[:8], "little")
    found = json.loads(blank[8:end])
    return blank[:end], sorted(range(len(names)), key=lambda place: found[names[place]]["data_offsets"])


def collect_columns(update: UpdateRecord) -> dict[str, Sequence[Array]]:
    """[T_i] per row of each column that the update has."""
    batch, traced = update.batch, update.forward.per_token
    columns = {
        "tokens": batch.tokens,
        "mask": batch.loss_masks,
        "version": batch.weight_versions or [np.full(len(row), -1) for row in batch.tokens],
        "log_prob": traced and traced.log_probs,
        "slope": traced and traced.slopes,
        "weight": traced and traced.weights,
        "turn_reward": batch.turn_rewards,
        **{name: getattr(batch, field) for name, field in LOSS_FIELDS.items()},
    }
    return drop_none(columns)


# --- reading ------------------------------------------------------------------------------------------------


def read_token_arrays(run_dir: RunDir, row: Fields) -> Mapping[str, Array]:
    """The per-token arrays [T] of a row of contributions.jsonl, by column: docs/run_directory.md lists them.

    Raises RecordError where none were kept, where the shard was removed to make room, and where it is
    damaged.
    """
    shard, offset = row.get("shard"), row.get("offset")
    what = f"step {row.get('step')}, update {row.get('update')}, row {row.get('row')}"
    if not isinstance(shard, str) or not isinstance(offset, int):
        raise RecordError(f"{what} has no per-token arrays: the disk refused them")
    if SHARD_NAME.fullmatch(shard) is None:
        raise RecordError(f"{what} names the shard {shard!r}, which is no name of one; the row is damaged")
    path = run_dir.tokens / shard
    try:
        with path.open("rb") as file:
            file.seek(offset)
            size, crc = PREFIX.unpack(file.read(PREFIX.size))
            body = file.read(min(size, BLOCK_BYTES_MAX))
        sample_id = row.get("id", "")
        if len(body) != size or zlib.crc32(body, zlib.crc32(sample_id.encode())) != crc:
            raise ValueError(f"no block of the sample {sample_id!r} with the checksum that was written")
        return safetensors.numpy.load(body)
    except FileNotFoundError as error:
        raise RecordError(
            f"{path} of {what} was removed: arrays of the newest steps are kept; ask for a later step"
        ) from error
    except (OSError, ValueError, struct.error, SafetensorError) as error:
        raise RecordError(f"{path} at {offset} is damaged, or cannot be read ({error})") from error


# --- writing ------------------------------------------------------------------------------------------------


class TokenShards:
    """The shards that one attempt writes. Its methods block: call them from one thread at a time, off the
    event loop.
    """

    def __init__(self, run_dir: RunDir, *, attempt: int, limit_bytes: int) -> None:
        """limit_bytes: of all shards together, those of earlier attempts included; an update's own may go
        beyond until it is written.
        """
        self._folder, self._attempt, self._limit = run_dir.tokens, attempt, limit_bytes
        self._shard, self._next = None, 0  # the one that grows
        self._refused = False  # whether that was said

    def write(self, stage: str, update: UpdateRecord) -> dict[str, Iterable[Any]]:
        """Appends the arrays of an update and says where those of each row lie, by column of their row; then
        removes the oldest shards beyond the limit. Empty where no arrays are kept.

        Where the disk refuses, what had been appended of the blocks is cut off again; it is said once.
        """
        if not self._limit:
            return {}
        blocks = list(encode_blocks(update))
        try:
            shard = self._open_shard(stage)
            begin = shard.end
            try:
                shard.append(b"".join(blocks))
            except OSError:
                self.close()  # nothing is appended to what may be left
                raise
            sizes = {path: path.stat().st_size for path in list_shards(self._folder)}
            for path in list(sizes):
                if sum(sizes.values()) > self._limit and path != shard.path:
                    path.unlink()
                    del sizes[path]
        except OSError as error:
            if not self._refused:
                logging.getLogger("rollouts").warning(
                    "warning: per-token arrays are refused by %s (%s); free space; the arrays of these steps"
                    " are left out",
                    self._folder,
                    error,
                )
            self._refused = True
            return {}
        self._refused = False
        return {
            "shard": [shard.path.name] * len(blocks),
            "offset": accumulate(map(len, blocks), initial=begin),
            "length": map(len, update.batch.tokens),
        }

    def close(self) -> None:
        """Flushes the shard to the device; one that refuses shows its damage to who reads it."""
        if self._shard:
            with suppress(OSError):
                self._shard.close()
        self._shard = None

    def _open_shard(self, stage: str) -> AppendedFile:
        """The stage's shard: the one that is open, or the next where it is full or of another stage, or
        somebody has removed it.
        """
        name, shard = f"{stage}-{self._attempt}-", self._shard
        if (
            shard
            and shard.path.name.startswith(name)
            and shard.end < min(SHARD_BYTES, self._limit // SHARDS_AT_LEAST)
            and os.fstat(shard.descriptor).st_nlink
        ):
            return shard
        self.close()
        self._folder.mkdir(exist_ok=True)
        while (path := self._folder / f"{name}{self._next:06d}.bin").exists():
            self._next += 1
        self._shard = AppendedFile(path, os.O_EXCL | os.O_NOFOLLOW)
        return self._shard


def list_shards(folder: Path) -> list[Path]:
    """The shards in a directory, oldest first: by attempt, then by number, which goes on over the stages of
    an attempt.
    """
    shards = (path for path in folder.iterdir() if SHARD_NAME.fullmatch(path.name))
    return sorted(shards, key=lambda path: (*map(int, path.stem.split("-")[-2:]), path.name))


# --- rows of contributions.jsonl ----------------------------------------------------------------------------


def encode_contributions(head: Fields, update: UpdateRecord, places: Mapping[str, Iterable[Any]]) -> bytes:
    """The rows of the update as lines, in the order of the batch; none of an update that has none.

    `places`: columns that say where the arrays of every row lie, as TokenShards has them, or empty where no
    arrays are kept. Shares of an update that changed nothing are 0; where a backend gives no per-token arrays
    they are absent. See docs/run_directory.md.

    Raises MetricError for a reward that is not finite.
    """
    if not update.contributes:
        return b""
    batch, forward, traced = update.batch, update.forward, update.forward.per_token
    skipped = forward.skipped or update.optim.skipped
    weights, shares, rewards = None, None, repeat(None)
    if skipped is not None:
        shares = np.zeros(len(batch))
    elif traced is not None:
        weights = _sum_rows(traced.weights) / np.maximum(batch.response_lengths, 1)
        sums = _sum_rows([np.abs(row) for row in traced.slopes])
        total = float(sums.sum())
        # 0 for all where no slope is, or one is not finite: such an update changes nothing
        shares = sums / total if 0 < total < math.inf else np.zeros(len(batch))
    if batch.rewards is not None:  # with the digits of samples.jsonl where they are the samples' own
        own, trained = [sample.reward for sample in batch.samples], batch.rewards
        rewards = own if np.array_equal(np.asarray(own, np.float32), trained) else trained.tolist()
    assert batch.group_indices is not None, "a policy trains on groups"
    columns = {
        "id": [sample.id for sample in batch.samples] or repeat(None),
        "group_index": batch.group_indices.tolist(),
        "row": range(len(batch)),
        "advantage": _list_finite(batch.mean_advantages),
        "weight": _list_finite(weights),
        "share": _list_finite(shares),
        "tokens": batch.response_lengths.tolist(),
        "reward": rewards,
        "rewards": [dict(sample.rewards) or None for sample in batch.samples] or repeat(None),
        "kl": _list_finite(_measure_kls(batch, traced.kls if traced else ())),
        **places,
    }
    shared = {
        **head,
        "update": update.update,
        "loss": forward.loss,
        "denominator": forward.denominator,
        "kl_coef": update.kl_coef,
        "lr": update.optim.lr,
        "grad_norm": update.optim.grad_norm,
        "clipped": update.optim.clipped,
        "skipped": skipped,
    }
    return encode_rows(
        [
            drop_none(shared | dict(zip(columns, values, strict=True)))
            for values in zip(*columns.values(), strict=False)
        ]
    )


def _measure_kls(batch: RolloutBatch, exact: FloatRows) -> NDArray[np.float64] | None:
    """[B] the KL of each row to the reference, exact or by k1, nats; None without a reference."""
    if exact:
        return _sum_rows(exact)
    own, others = batch.old_log_probs or batch.rollout_log_probs, batch.ref_log_probs
    return _sum_rows(list(map(np.subtract, own, others))) if own and others else None


def _sum_rows(rows: Sequence[FloatArray]) -> NDArray[np.float64]:
    """[B] sums, in float32. By BLAS, row by row, which touches each value once and asks for no memory: this
    is most of what a row costs.
    """
    ones = np.ones(max(map(len, rows), default=0), np.float32)
    return np.fromiter((np.vdot(row, ones[: len(row)]) for row in rows), np.float64, len(rows))


def _list_finite(values: Array | None) -> Iterable[float | None]:
    """A column; None for a number that is not finite, which JSON cannot say, and where there are none."""
    if values is None:
        return repeat(None)
    return [value if math.isfinite(value) else None for value in values.tolist()]


# --- the audit log ------------------------------------------------------------------------------------------


def format_update(head: Fields, update: UpdateRecord) -> str:
    """The line of an update, without its newline. head: of a row, as make_head gives it.

    Names and values in columns, so that it reads by eye and splits at spaces; a value that the update does
    not have is "-".
    """
    forward, optim = update.forward, update.optim
    metrics = metric_values(forward.metrics)
    skipped = forward.skipped or optim.skipped
    clipping = "-"  # there was no step to clip
    if optim.skipped is None and optim.grad_norm is not None:
        clipping = "clipped" if optim.clipped else "whole"

    def show(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    return (
        f"{time.strftime(TIME_FORM, time.gmtime(head['time_unix']))}"
        f"  attempt {head['attempt']:<2d}  {head['stage'] + ('.' + update.part if update.part else ''):<12s}"
        f"  step {head['step']:>6d}  update {update.update:>3d}  version {head['policy_version'] + 1:>6d}"
        f"  loss {show(forward.loss, '+.6e'):>13s}  kl {show(metrics.get('kl/ref'), '+.3e'):>10s}"
        f"  beta {show(update.kl_coef, '.3e'):>9s}"
        f"  grad_norm {show(optim.grad_norm, '.3e'):>9s} {clipping:<7s}  lr {optim.lr:.3e}"
        f"  samples {len(update.batch):>5d}"
        f"  zero_advantage {int(metrics.get('advantage/skipped_rows') or 0):>5d}"
        f"  tokens {int(update.batch.response_lengths.sum()):>8d}"
        + ("" if skipped is None else f"  skipped: {' '.join(skipped.split())}")
    )
