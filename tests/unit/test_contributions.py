"""Rows of contributions.jsonl and lines of updates.log, made from an update of two rows."""

import dataclasses
import json
import os
from types import SimpleNamespace

import numpy as np
import pytest

from rollouts.errors import RecordError
from rollouts.metrics import token_shards
from rollouts.metrics.record import make_head
from rollouts.metrics.token_shards import (
    TokenShards,
    encode_contributions,
    format_update,
    list_shards,
    read_token_arrays,
)
from rollouts.run_dir import RunDir
from rollouts.types import ForwardBackwardResult, OptimStepResult, Total
from tests.support.made_updates import floats, make_update
from tests.support.text_tables import cases


def read_back(update, **places):
    """The rows that are written, without a head."""
    return [json.loads(line) for line in encode_contributions({}, update, places).splitlines()]


def write_line(update):
    return format_update(make_head("rl", 12, 11, 2, 0.0), update)


def test_a_row_says_which_sample_with_which_advantage_weight_and_share():
    # advantage (0.5 + 1.5) / 2, weight (1 + 0.5) / 2, share (0.125 + 0.25) / (0.125 + 0.25 + 0.375)
    places = {"shard": 2 * ["rl-1-000000.bin"], "offset": [0, 160], "length": [3, 2]}
    assert read_back(make_update(), **places) == json.loads("""[
    {"update": 1, "id": "a", "group_index": 4, "row": 0, "advantage": 1.0, "weight": 0.75, "share": 0.5,
     "tokens": 2, "reward": 1.0, "loss": -0.0625, "denominator": 3.0,
     "kl_coef": 0.05, "lr": 3e-4, "grad_norm": 2.5, "clipped": true,
     "shard": "rl-1-000000.bin", "offset": 0, "length": 3},
    {"update": 1, "id": "b", "group_index": 4, "row": 1, "advantage": -2.0, "weight": 2.0, "share": 0.5,
     "tokens": 1, "reward": -0.5, "loss": -0.0625, "denominator": 3.0,
     "kl_coef": 0.05, "lr": 3e-4, "grad_norm": 2.5, "clipped": true,
     "shard": "rl-1-000000.bin", "offset": 160, "length": 2} ]""")


def test_a_row_has_the_parts_of_its_reward_and_its_kl_to_the_reference():
    update = make_update()
    samples = [dataclasses.replace(one, rewards={"vote": 1.0, "short": 0.5}) for one in update.batch.samples]
    # of row a 0.25 + 0.5, of row b -0.125
    own = floats([0, -1.0, -0.5], [0, -2.0])
    reference = floats([0, -1.25, -1.0], [0, -1.875])
    batch = dataclasses.replace(
        update.batch, samples=samples, old_log_probs=own, rollout_log_probs=own, ref_log_probs=reference
    )
    rows = read_back(make_update(batch=batch))
    assert [row["kl"] for row in rows] == [0.75, -0.125]
    assert [row["rewards"] for row in rows] == 2 * [{"vote": 1.0, "short": 0.5}]


def test_without_arrays_a_row_names_no_shard_and_without_traces_it_has_neither_weight_nor_share():
    rows = read_back(make_update(forward=dataclasses.replace(make_update().forward, per_token=None)))
    assert [set(row) & {"shard", "offset", "length", "weight", "share"} for row in rows] == [set(), set()]
    assert [row["advantage"] for row in rows] == [1.0, -2.0]


SKIPPED = {
    "forward": ForwardBackwardResult(loss=None, denominator=3.0, metrics={}, skipped="the loss is nan"),
    "optim": OptimStepResult(step=7, lr=3e-4, grad_norm=None, clipped=False, skipped="the norm is inf"),
}


@cases("part, loss", [("forward", None), ("optim", -0.0625)])
def test_a_skipped_update_has_a_row_for_every_sample_says_why_and_gives_nobody_a_share(part, loss):
    update, skipped = make_update(**{part: SKIPPED[part]}), SKIPPED[part].skipped
    rows = read_back(update)
    assert [(row["share"], row.get("loss"), row["denominator"]) for row in rows] == 2 * [(0.0, loss, 3.0)]
    assert not any("weight" in row for row in rows)
    assert all(row["skipped"] == skipped for row in rows)
    words = write_line(update).split()
    assert (words[words.index("grad_norm") + 1 :][:2] == ["-", "-"]) == (update.optim.grad_norm is None)


COLUMNS = "step update version loss kl beta grad_norm lr samples zero_advantage tokens"


def test_lines_are_aligned_and_what_an_update_has_not_is_a_dash():
    update = make_update()
    forward = ForwardBackwardResult(loss=1.0, denominator=1.0, metrics={"advantage/skipped_rows": Total(1.0)})
    optim = OptimStepResult(step=1, lr=1e-5, grad_norm=0.1, clipped=False)
    bare = make_update(update=0, forward=forward, kl_coef=None, optim=optim)
    lines = [write_line(one) for one in (update, bare, update._replace(part="critic", contributes=False))]
    for word in COLUMNS.split():
        assert len({line.index(f"{word} ") for line in lines}) == 1, word
    for part in ("kl          -", "beta         -", "zero_advantage     1", "whole"):
        assert part in lines[1]
    assert lines[2].split()[3] == "rl.critic"


def write(root, update):
    """The rows that name the arrays, as far as a reader needs them."""
    shards = TokenShards(RunDir(root), attempt=1, limit_bytes=1 << 20)
    places = shards.write("rl", update)
    shards.close()
    return [
        {"step": 1, "update": 0, "row": row, "id": sample.id, **dict(zip(places, place, strict=True))}
        for row, (sample, *place) in enumerate(zip(update.batch.samples, *places.values(), strict=False))
    ]


def test_what_was_written_is_read_back_column_by_column(tmp_path):
    update, more = make_update(), floats([0, -0.5, -0.25], [0, -4.0])
    names = ("old_log_probs", "ref_log_probs", "old_values", "returns")
    batch = dataclasses.replace(update.batch, **dict.fromkeys(names, more))
    rows, traced = write(tmp_path, update._replace(batch=batch)), update.forward.per_token
    columns = dict.fromkeys(("old", "ref", "value", "return"), more)
    columns |= {"tokens": batch.tokens, "mask": batch.loss_masks, "version": batch.weight_versions}
    columns |= {"mu": batch.rollout_log_probs, "advantage": batch.advantages}
    columns |= {"log_prob": traced.log_probs, "slope": traced.slopes, "weight": traced.weights}
    kinds = {"tokens": "<i4", "mask": "|u1", "version": "<i4"}
    assert [row["length"] for row in rows] == [3, 2]
    for index in (1, 0):
        found = read_token_arrays(RunDir(tmp_path), rows[index])
        assert found.keys() == columns.keys()
        for name, values in found.items():
            assert values.dtype == np.dtype(kinds.get(name, "<f4")), name
            np.testing.assert_array_equal(values, columns[name][index], err_msg=name)


@cases("at: 0 13 40 -1")
def test_a_bit_that_flipped_is_found_wherever_it_is(tmp_path, at: int):
    run_dir = RunDir(tmp_path)
    row = write(tmp_path, make_update())[1]
    path = run_dir.tokens / row["shard"]
    data = bytearray(path.read_bytes())
    data[row["offset"] + at if at >= 0 else -1] ^= 0x10
    path.write_bytes(data)
    with pytest.raises(RecordError, match=f"{row['shard']}.* is damaged"):
        read_token_arrays(run_dir, row)


# what another row says; "": nothing
@cases(r"""
changes | match
 | is damaged
offset = 3 | is damaged
offset = 1099511627776 | is damaged
row = 0, offset = 0, length = 3 | no block of the sample 'b'
shard = "rl-2-000000.bin" | rl-2-000000\.bin of step 1, update 0, row 1 was removed
shard = "" | has no per-token arrays
shard = "../config.toml" | no name of one
shard = "/etc/passwd" | no name of one
shard = "rl-1-000000.bin/../../x" | no name of one
""")
def test_a_row_whose_arrays_are_cut_removed_or_elsewhere_is_refused(tmp_path, changes: dict, match):
    run_dir = RunDir(tmp_path)
    row = write(tmp_path, make_update())[1]
    path = run_dir.tokens / row["shard"]
    os.truncate(path, path.stat().st_size - 1)
    changed = {key: value for key, value in (row | changes).items() if value != ""}
    with pytest.raises(RecordError, match=match):
        read_token_arrays(run_dir, changed)


def made_of(*blocks):
    """An update of these blocks, as the patched encode_blocks has it."""
    return SimpleNamespace(blocks=blocks, batch=SimpleNamespace(tokens=[[0]] * len(blocks)))


@pytest.fixture
def made_blocks(monkeypatch):
    monkeypatch.setattr(token_shards, "encode_blocks", lambda update: update.blocks)


@pytest.mark.usefixtures("made_blocks")
def test_the_newest_shards_stay_within_the_limit_and_the_oldest_go(tmp_path):
    run_dir = RunDir(tmp_path)
    shards = TokenShards(run_dir, attempt=1, limit_bytes=8000)  # of 1000 bytes each
    block = b"x" * 300
    names = [name for _ in range(50) for name in shards.write("rl", made_of(block, block))["shard"]]
    shards.close()
    # a shard takes no more once it has 1000 bytes: four blocks
    assert names == sorted(names) and len(set(names)) == 25
    kept = list_shards(run_dir.tokens)
    assert [path.name for path in kept] == sorted(set(names))[-len(kept) :]
    # six of 1200 bytes: a seventh would be more than 8000
    assert sum(path.stat().st_size for path in kept) == 7200


@pytest.mark.usefixtures("made_blocks")
def test_what_a_disk_refuses_leaves_the_shard_as_it_was(tmp_path, monkeypatch, caplog):
    run_dir = RunDir(tmp_path)
    shards = TokenShards(run_dir, attempt=1, limit_bytes=1 << 20)
    shards.write("rl", made_of(b"a" * 100))
    real = os.write

    def full(file, data):
        if len(data) < 50:
            raise OSError(28, "No space left on device")
        return real(file, data[:60])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        assert shards.write("rl", made_of(b"b" * 100)) == {}
    assert "No space left" in caplog.text
    offset, *_ = shards.write("rl", made_of(b"c" * 100))["offset"]
    shards.close()
    assert [path.read_bytes() for path in list_shards(run_dir.tokens)] == [b"a" * 100, b"c" * 100]
    assert offset == 0  # nothing is appended to a shard of which something may be left
