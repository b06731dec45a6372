"""Per-token arrays on disk: what is written is read back; what was removed or damaged is said."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rollouts.errors import RecordError, StorageError
from rollouts.metrics import token_shards
from rollouts.metrics.contributions import UpdateRecord
from rollouts.metrics.token_shards import (
    TokenShards,
    list_shards,
    read_token_arrays,
)
from rollouts.run_dir import RunDir
from tests.support.made_updates import floats, make_update


def write(root: Path, update: UpdateRecord) -> list[dict[str, Any]]:
    """The rows that name the arrays, as far as a reader needs them."""
    shards = TokenShards(RunDir(root), attempt=1, limit_bytes=1 << 20)
    places = shards.write("rl", update)
    shards.close()
    return [
        {"step": 1, "update": 0, "row": row, "id": sample.id, **place._asdict()}
        for row, (sample, place) in enumerate(zip(update.batch.samples, places, strict=True))
    ]


def test_what_was_written_is_read_back_column_by_column(tmp_path: Path):
    update, more = make_update(), floats([0, -0.5, -0.25], [0, -4.0])
    names = ("old_log_probs", "ref_log_probs", "old_values", "returns")
    batch = dataclasses.replace(update.batch, **dict.fromkeys(names, more))
    rows, traced = write(tmp_path, dataclasses.replace(update, batch=batch)), update.forward.per_token
    assert traced is not None
    columns = {"tokens": batch.tokens, "mask": batch.loss_masks, "version": batch.weight_versions}
    columns |= {"mu": batch.rollout_log_probs, "log_prob": traced.log_probs, "slope": traced.slopes}
    columns |= {"weight": traced.weights, "advantage": batch.advantages}
    columns |= dict.fromkeys(("old", "ref", "value", "return"), more)
    kinds = {"tokens": "<i4", "mask": "|u1", "version": "<i4"}
    assert [row["length"] for row in rows] == [3, 2]
    for index in (1, 0):
        found = read_token_arrays(RunDir(tmp_path), rows[index])
        assert list(found) == list(columns)
        for name, values in found.items():
            assert values.dtype == np.dtype(kinds.get(name, "<f4")), name
            np.testing.assert_array_equal(values, columns[name][index], err_msg=name)


@pytest.mark.parametrize("at", [0, 13, 40, -1])
def test_a_bit_that_flipped_is_found_wherever_it_is(tmp_path: Path, at: int):
    run_dir = RunDir(tmp_path)
    row = write(tmp_path, make_update())[1]
    path = run_dir.tokens / row["shard"]
    data = bytearray(path.read_bytes())
    data[row["offset"] + at if at >= 0 else -1] ^= 0x10
    path.write_bytes(data)
    with pytest.raises(RecordError, match=f"{row['shard']}.* is damaged"):
        read_token_arrays(run_dir, row)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({}, "is damaged"),
        ({"offset": 3}, "is damaged"),
        ({"offset": 1 << 40}, "is damaged"),
        ({"row": 0, "offset": 0, "length": 3}, "'a', not 'b'"),
        ({"shard": "rl-2-000000.bin"}, r"rl-2-000000\.bin of step 1, update 0, row 1 was removed"),
        ({"shard": None}, "has no per-token arrays"),
        ({"shard": "../config.toml"}, "no name of one"),
        ({"shard": "/etc/passwd"}, "no name of one"),
        ({"shard": "rl-1-000000.bin/../../x"}, "no name of one"),
    ],
)
def test_a_row_whose_arrays_are_cut_removed_or_elsewhere_is_refused(
    tmp_path: Path, changes: dict[str, Any], match: str
):
    run_dir = RunDir(tmp_path)
    row = write(tmp_path, make_update())[1]
    path = run_dir.tokens / row["shard"]
    os.truncate(path, path.stat().st_size - 1)
    changed = {key: value for key, value in (row | changes).items() if value is not None}
    with pytest.raises(RecordError, match=match):
        read_token_arrays(run_dir, changed)


def made_of(*blocks: bytes) -> Any:
    """An update of these blocks, as the patched encode_blocks has it."""
    return SimpleNamespace(blocks=blocks, batch=SimpleNamespace(tokens=[[0]] * len(blocks)))


@pytest.fixture
def made_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_shards, "encode_blocks", lambda update: update.blocks)


@pytest.mark.usefixtures("made_blocks")
def test_the_newest_shards_stay_within_the_limit_and_the_oldest_go(tmp_path: Path):
    run_dir = RunDir(tmp_path)
    shards = TokenShards(run_dir, attempt=1, limit_bytes=8000)  # of 1000 bytes each
    block = b"x" * 300
    names = [place.shard for _ in range(50) for place in shards.write("rl", made_of(block, block))]
    shards.close()
    assert names == sorted(names) and len(set(names)) == 25, (
        "a shard takes no more once it has 1000 bytes: four blocks"
    )
    kept = list_shards(run_dir.tokens)
    assert [path.name for path in kept] == sorted(set(names))[-len(kept) :]
    assert sum(path.stat().st_size for path in kept) == 7200, (
        "six of 1200 bytes: a seventh would be more than 8000"
    )


@pytest.mark.usefixtures("made_blocks")
def test_what_a_disk_refuses_leaves_the_shard_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run_dir = RunDir(tmp_path)
    shards = TokenShards(run_dir, attempt=1, limit_bytes=1 << 20)
    shards.write("rl", made_of(b"a" * 100))
    real = os.write

    def full(file: int, data: Any) -> int:
        if len(data) < 50:
            raise OSError(28, "No space left on device")
        return real(file, data[:60])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(StorageError, match="No space left"):
            shards.write("rl", made_of(b"b" * 100))
    [place] = shards.write("rl", made_of(b"c" * 100))
    shards.close()
    assert [path.read_bytes() for path in list_shards(run_dir.tokens)] == [b"a" * 100, b"c" * 100]
    assert place.offset == 0, "nothing is appended to a shard of which something may be left"
