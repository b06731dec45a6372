"""Per-token arrays on disk: what is written is read back; what was removed or damaged is said."""

from __future__ import annotations

import dataclasses
import json
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollouts.errors import RecordError, StorageError
from rollouts.metrics.contributions import UpdateRecord
from rollouts.metrics.token_shards import (
    MAGIC,
    PREFIX,
    Block,
    TokenShards,
    decode_block,
    encode_blocks,
    list_shards,
    read_token_arrays,
)
from rollouts.run_dir import RunDir
from rollouts.types import ForwardBackwardResult, OptimStepResult, RolloutBatch, Sample, TokenArrays

LENGTHS = (3, 1, 6)


def make_update(**fields: Any) -> UpdateRecord:
    rng = np.random.default_rng(0)

    def column() -> Any:
        return tuple(rng.normal(size=n).astype(np.float32) for n in LENGTHS)

    tokens = tuple(rng.integers(0, 150_000, n) for n in LENGTHS)
    masks = tuple(np.arange(n) >= 1 for n in LENGTHS)
    whole = zip(tokens, masks, strict=True)
    batch = RolloutBatch(
        tokens=tokens,
        loss_masks=masks,
        rollout_log_probs=column(),
        advantages=column(),
        weight_versions=tuple(np.where(mask, 17, -1) for mask in masks),
        samples=tuple(
            Sample(id=f"s{row}", prompt="p", tokens=ids, loss_mask=mask)
            for row, (ids, mask) in enumerate(whole)
        ),
        **{name: column() for name in fields.pop("more", ())},
    )
    traced = TokenArrays(log_probs=column(), slopes=column(), weights=column())
    forward = ForwardBackwardResult(
        loss=0.0, denominator=1.0, metrics={}, per_token=fields.pop("per_token", traced)
    )
    return UpdateRecord(
        update=0,
        batch=batch,
        forward=forward,
        optim=OptimStepResult(step=1, lr=0.1, grad_norm=1.0, clipped=False),
        contributes=True,
    )


def write(
    run_dir: RunDir, update: UpdateRecord, *, limit_bytes: int = 1 << 20, attempt: int = 1
) -> list[dict[str, Any]]:
    """The rows that name the arrays, as far as a reader needs them."""
    run_dir.root.mkdir(exist_ok=True)
    shards = TokenShards(run_dir, attempt=attempt, limit_bytes=limit_bytes)
    places = shards.write("rl", encode_blocks(update))
    shards.close()
    samples = update.batch.samples
    return [
        {
            "step": 1,
            "update": 0,
            "row": row,
            "id": samples[row].id,
            "shard": place.shard,
            "offset": place.offset,
            "length": place.length,
        }
        for row, place in enumerate(places)
    ]


def test_what_was_written_is_read_back_column_by_column(tmp_path: Path):
    update = make_update(more=("old_log_probs", "ref_log_probs", "old_values", "returns"))
    batch, traced = update.batch, update.forward.per_token
    assert traced is not None
    rows = write(RunDir(tmp_path / "run"), update)
    wanted: dict[str, Any] = {
        "tokens": batch.tokens,
        "mask": batch.loss_masks,
        "version": batch.weight_versions,
        "mu": batch.rollout_log_probs,
        "log_prob": traced.log_probs,
        "slope": traced.slopes,
        "weight": traced.weights,
        "advantage": batch.advantages,
        "old": batch.old_log_probs,
        "ref": batch.ref_log_probs,
        "value": batch.old_values,
        "return": batch.returns,
    }
    kinds = {"tokens": "<i4", "mask": "|u1", "version": "<i4"}
    assert [row["length"] for row in rows] == list(LENGTHS)
    for index in (2, 0, 1):
        found = read_token_arrays(RunDir(tmp_path / "run"), rows[index])
        assert list(found) == list(wanted)
        for name, values in found.items():
            assert values.dtype == np.dtype(kinds.get(name, "<f4")), name
            np.testing.assert_array_equal(values, wanted[name][index], err_msg=name)


def levels(mask: Any, inside: float, outside: float) -> Any:
    return np.where(mask, np.float32(inside), np.float32(outside)).astype(np.float32)


@pytest.mark.parametrize("at", [0, 5, 13, 40, 300, -1])
def test_a_bit_that_flipped_is_found_wherever_it_is(tmp_path: Path, at: int):
    run_dir = RunDir(tmp_path / "run")
    row = write(run_dir, make_update())[2]
    path = run_dir.tokens / row["shard"]
    data = bytearray(path.read_bytes())
    data[row["offset"] + at if at >= 0 else -1] ^= 0x10
    path.write_bytes(data)
    with pytest.raises(RecordError, match=f"{row['shard']}.* is damaged"):
        read_token_arrays(run_dir, row)


def test_a_cut_shard_a_wrong_offset_and_another_samples_block_are_damage(tmp_path: Path):
    run_dir = RunDir(tmp_path / "run")
    first, _, last = write(run_dir, make_update())
    path = run_dir.tokens / last["shard"]
    os.truncate(path, path.stat().st_size - 1)
    for row in (last, first | {"offset": 3}, first | {"offset": 1 << 40}):
        with pytest.raises(RecordError, match="is damaged"):
            read_token_arrays(run_dir, row)
    with pytest.raises(RecordError, match="'s0', not 's9'"):
        read_token_arrays(run_dir, first | {"id": "s9"})


def test_a_removed_shard_is_named_with_the_setting_that_keeps_more(tmp_path: Path):
    run_dir = RunDir(tmp_path / "run")
    row = write(run_dir, make_update())[0]
    (run_dir.tokens / row["shard"]).unlink()
    with pytest.raises(RecordError, match=r"rl-1-000000\.bin of step 1, update 0, row 0 was removed"):
        read_token_arrays(run_dir, row)


def test_a_row_without_arrays_and_one_that_names_another_file_are_refused(tmp_path: Path):
    run_dir = RunDir(tmp_path / "run")
    row = write(run_dir, make_update())[0]
    with pytest.raises(RecordError, match="has no per-token arrays"):
        read_token_arrays(run_dir, {key: value for key, value in row.items() if key != "shard"})
    for shard in ("../config.toml", "/etc/passwd", "rl-1-000000.bin/../../x"):
        with pytest.raises(RecordError, match="no name of one"):
            read_token_arrays(run_dir, row | {"shard": shard})


def test_the_newest_shards_stay_within_the_limit_and_the_oldest_go(tmp_path: Path):
    run_dir = RunDir(tmp_path)
    shards = TokenShards(run_dir, attempt=1, limit_bytes=8000)  # of 1000 bytes each
    block = Block(b"x" * 300, 1)
    names = [place.shard for _ in range(50) for place in shards.write("rl", [block, block])]
    shards.close()
    assert names == sorted(names) and len(set(names)) == 25, (
        "a shard takes no more once it has 1000 bytes: four blocks"
    )
    kept = list_shards(run_dir.tokens)
    assert [path.name for path in kept] == sorted(set(names))[-len(kept) :]
    assert sum(path.stat().st_size for path in kept) == 7200, (
        "six of 1200 bytes: a seventh would be more than 8000"
    )


def test_what_a_disk_refuses_leaves_the_shard_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run_dir = RunDir(tmp_path)
    shards = TokenShards(run_dir, attempt=1, limit_bytes=1 << 20)
    shards.write("rl", [Block(b"a" * 100, 1)])
    real = os.write

    def full(file: int, data: Any) -> int:
        if len(data) < 50:
            raise OSError(28, "No space left on device")
        return real(file, data[:60])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(StorageError, match="No space left"):
            shards.write("rl", [Block(b"b" * 100, 1)])
    [place] = shards.write("rl", [Block(b"c" * 100, 1)])
    shards.close()
    assert [path.read_bytes() for path in list_shards(run_dir.tokens)] == [b"a" * 100, b"c" * 100]
    assert place.offset == 0, "nothing is appended to a shard of which something may be left"


def test_a_block_of_a_later_version_with_an_unknown_type_is_refused(tmp_path: Path):
    header = json.dumps({"id": "s", "length": 2, "columns": [["tokens", "<O8"]]}).encode()
    data = (
        PREFIX.pack(MAGIC, len(header), 16, zlib.crc32(b"\0" * 16, zlib.crc32(header))) + header + b"\0" * 16
    )
    with pytest.raises(RecordError, match="later version has written column 'tokens' of type '<O8'"):
        decode_block(data, where="here")


def test_a_column_of_one_value_within_the_mask_and_one_without_takes_no_bytes(tmp_path: Path):
    update = make_update()
    levels = [np.where(mask, -0.125, 0.0).astype(np.float32) for mask in update.batch.loss_masks]
    batch = dataclasses.replace(update.batch, advantages=tuple(levels))
    flat = dataclasses.replace(update, batch=batch)
    payloads = [[PREFIX.unpack_from(block.data)[2] for block in encode_blocks(one)] for one in (update, flat)]
    assert np.subtract(*payloads).tolist() == [4 * 3, 0, 4 * 6], "a row of one token had one value before"
    for row, expected in zip(write(RunDir(tmp_path / "run"), flat), levels, strict=True):
        found = read_token_arrays(RunDir(tmp_path / "run"), row)["advantage"]
        assert found.tobytes() == expected.tobytes()
