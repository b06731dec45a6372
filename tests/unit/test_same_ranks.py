"""What differs between ranks is found by the first name, and said with ranks, hosts and both values.
tests.distributed has real ranks.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rollouts.backends.same_ranks import Told, find_difference
from rollouts.backends.sharded_capture import UNKNOWN, has_room
from rollouts.models import digests
from rollouts.models.digests import BLOCK_BYTES, BLOCKS, WHOLE_BYTES, compute_model_digests

LARGE = WHOLE_BYTES + 10 * 2**20


def make_model(folder: Path, size: int = 100) -> Path:
    """Files of a model as far as they are compared; the weights are zeros behind a header of 100 bytes."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    with (folder / "model.safetensors").open("wb") as file:
        file.write((100).to_bytes(8, "little") + bytes(100))
        file.truncate(size)
    return folder


def change(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"x")


def test_equal_directories_have_equal_digests_wherever_they_lie(tmp_path):
    one, other = make_model(tmp_path / "one", LARGE), make_model(tmp_path / "other", LARGE)
    assert compute_model_digests(one) == compute_model_digests(other)
    (other / "README.md").write_text("not read by a rank")
    assert compute_model_digests(one) == compute_model_digests(other)


@pytest.mark.parametrize("at", [0, 50, 107, LARGE - 1, (LARGE - BLOCK_BYTES) * 5 // (BLOCKS - 1)])
def test_a_byte_of_the_header_the_ends_or_a_sampled_block_is_noticed(tmp_path, at):
    one, other = make_model(tmp_path / "one", LARGE), make_model(tmp_path / "other", LARGE)
    change(other / "model.safetensors", at)
    found = compute_model_digests(other)
    assert found["config.json"] == compute_model_digests(one)["config.json"]
    assert found["model.safetensors"] != compute_model_digests(one)["model.safetensors"]


def test_every_byte_of_a_small_file_and_every_size_of_a_large_one_is_noticed(tmp_path):
    assert (
        len(
            {
                make_digest(tmp_path / str(at), WHOLE_BYTES, at)
                for at in (0, 4321, WHOLE_BYTES // 2 + 1, WHOLE_BYTES - 1)
            }
        )
        == 4
    )
    assert make_digest(tmp_path / "long", LARGE, 0) != make_digest(tmp_path / "longer", LARGE + 1, 0)


def make_digest(folder: Path, size: int, at: int) -> str:
    change(make_model(folder, size) / "model.safetensors", at)
    return compute_model_digests(folder)["model.safetensors"]


def test_what_is_read_of_a_large_file_is_bounded_and_a_header_that_lies_is_no_harm(tmp_path):
    for header in (0, 10**6, 2**63 - 1):
        blocks = list(digests._choose_blocks(100 * 10**9, header=header))
        assert sum(count for _, count in blocks) <= WHOLE_BYTES + BLOCKS * BLOCK_BYTES
        assert blocks[-1] == (100 * 10**9 - BLOCK_BYTES, BLOCK_BYTES), "the end"
    (make_model(tmp_path / "model", LARGE) / "model.safetensors").write_bytes(b"\xff" * LARGE)
    assert compute_model_digests(tmp_path / "model")["model.safetensors"].startswith(f"{LARGE}:")


def test_the_shards_of_an_index_are_compared_and_a_missing_one_has_no_digest(tmp_path):
    model = make_model(tmp_path / "model")
    (model / "model.safetensors").rename(model / "a.safetensors")
    (model / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}})
    )
    assert sorted(compute_model_digests(model)) == [
        "a.safetensors",
        "config.json",
        "model.safetensors.index.json",
    ]


def test_the_first_name_that_differs_is_found_with_all_ranks_that_differ_from_rank_0():
    first, same = (Told(rank, "a", {"x": "1", "y": "1"}) for rank in (0, 1))
    told = [first, same, Told(2, "b", {"x": "1"}), Told(3, "b", {"x": "1", "y": "2", "z": ""})]
    assert find_difference(told[:2]) is None
    assert find_difference(told) == ("y", told[0], told[2], [told[2], told[3]])
    assert find_difference([told[0], told[3]]) == ("y", told[0], told[3], [told[3]])


@pytest.mark.parametrize(
    ("told", "room"),
    [
        ([[1, 250, 100], [1, 250, 100]], True),  # one machine: 1.25 · 200
        ([[1, 260, 100], [1, 249, 100]], False),  # the least that a rank sees counts
        ([[1, 250, 200], [2, 125, 100]], True),
        ([[1, 10_000, 200], [2, 124, 100]], False),  # another machine is short
        ([[1, UNKNOWN, 200], [2, 125, 100]], True),  # nobody knows
    ],
)
def test_there_is_room_where_every_machine_has_a_quarter_more_than_its_ranks_need(told, room):
    assert has_room(np.array(told, dtype=np.float64)) is room
