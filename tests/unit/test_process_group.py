"""What one rank alone can show; tests.distributed has what several do."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import numpy as np
import pytest

from rollouts.distributed.launch import Launch
from rollouts.distributed.process_group import (
    AgreedFailure,
    Ranks,
    all_gather_bytes,
    all_gather_floats,
    broadcast_bytes,
    close_ranks,
    describe_failure,
    gather_bytes,
    hear_failure,
    init_ranks,
    run_agreed,
    scatter_bytes,
)
from rollouts.errors import BackendError, ConfigError

ALONE = Launch(rank=0, world_size=1, local_rank=0, local_world_size=1, master_addr="127.0.0.1", restart=0)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with socket.socket() as probe, pytest.MonkeyPatch.context() as patch:
        probe.bind(("127.0.0.1", 0))
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        patch.setenv("MASTER_PORT", str(probe.getsockname()[1]))
        probe.close()
        yield init_ranks(ALONE, device="cpu", timeout_s=20)
        close_ranks()


def test_numbers_and_bytes_come_back(ranks: Ranks):
    np.testing.assert_array_equal(all_gather_floats(ranks, [1.5, 2.0**53 - 1]), [[1.5, 2.0**53 - 1]])
    for data in (b"", b"\x00a\xff"):
        assert broadcast_bytes(ranks, data) == data
        assert scatter_bytes(ranks, [data]) == data
        assert gather_bytes(ranks, data) == all_gather_bytes(ranks, data) == [data]
    assert (ranks.num_shards, ranks.shard, ranks.first_replica) == (1, 0, True)


def test_agreed_work_gives_its_value_and_numbers(ranks: Ranks):
    value, numbers = run_agreed(ranks, lambda: "done", lambda value: (float(len(value)), 7.0), count=2)
    assert value == "done"
    assert numbers.tolist() == [[4.0, 7.0]]


def test_a_failure_is_agreed_on_as_it_is(ranks: Ranks):
    def fail() -> None:
        raise ZeroDivisionError("on purpose")

    with pytest.raises(AgreedFailure) as caught:
        run_agreed(ranks, fail)
    assert isinstance(caught.value.error, ZeroDivisionError)


def test_others_hear_of_an_error_by_rank_and_of_a_full_disk_as_one():
    heard = hear_failure(3, describe_failure(ValueError("no such row")))
    assert isinstance(heard, BackendError)
    assert str(heard) == "rank 3 failed: ValueError: no such row"
    full = hear_failure(1, describe_failure(OSError(28, "No space left on device", "/x")))
    assert isinstance(full, OSError)
    assert full.errno == 28
    assert "rank 1 failed" in str(full)


def test_shards_must_divide_the_ranks():
    with pytest.raises(ConfigError, match=r"distributed\.shard_size=2 does not divide 3 ranks"):
        init_ranks(Launch(0, 3, 0, 3, "127.0.0.1", 0), device="cpu", shard_size=2)
