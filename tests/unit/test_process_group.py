"""What one rank alone can show; tests.distributed has what several do."""

from __future__ import annotations

import datetime as dt
import socket
from collections.abc import Iterator

import numpy as np
import pytest
import trio
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  (documented there)

from rollouts.distributed import process_group
from rollouts.distributed.launch import Launch
from rollouts.distributed.process_group import (
    AgreedFailure,
    Meeting,
    Ranks,
    all_gather_bytes,
    all_gather_floats,
    broadcast_bytes,
    close_ranks,
    describe_failure,
    gather_bytes,
    hear_failure,
    init_ranks,
    meet_ranks,
    run_agreed,
    scatter_bytes,
)
from rollouts.errors import BackendError, ConfigError, RankLost

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


# --- a store that outlives the ranks ------------------------------------------------------------------------


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> list[TCPStore]:
    """Three connections, for as many ranks, to one store that torchrun keeps over all starts."""
    first = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=dt.timedelta(seconds=60))
    others = [
        TCPStore("127.0.0.1", first.port, is_master=False, timeout=dt.timedelta(seconds=60)) for _ in range(2)
    ]
    stores = [first, *others]
    monkeypatch.setattr(
        process_group,
        "rendezvous",
        lambda url, rank, world_size, **_: iter([(stores[rank], rank, world_size)]),
    )
    return stores


def place(rank: int, world_size: int = 3) -> Launch:
    """On machines of their own, whose launchers count for themselves."""
    return Launch(rank, world_size, 0, 1, "127.0.0.1", 0)


async def meet(word: bytes) -> list[Meeting]:
    """What three ranks find."""
    found: dict[int, Meeting] = {}

    def come(rank: int) -> None:
        found[rank] = meet_ranks(place(rank), word=word, timeout_s=60, connect_timeout_s=60)

    with trio.fail_after(120):
        async with trio.open_nursery() as nursery:
            for rank in range(3):
                nursery.start_soon(trio.to_thread.run_sync, come, rank)
    return [found[rank] for rank in range(3)]


async def test_ranks_that_are_started_again_find_nothing_of_those_before(stores: list[TCPStore]):
    for word in (b"first", b"second"):
        met = await meet(word)
        assert [one.words for one in met] == [(word,) * 3] * 3
        assert not met[1].store.check(["meeting/0/all"])
        met[0].store.set("meeting/0/all", "1")
        assert met[1].store.get("meeting/0/all") == b"1", "one part for all of them"


@pytest.mark.parametrize("alone", [0, 1])
async def test_a_rank_that_comes_before_the_others_waits_for_live_ones(stores: list[TCPStore], alone: int):
    await meet(b"first")
    with pytest.raises(
        RankLost, match=rf"rank {1 - alone} was lost during start-up: it did not come to .* within 0\.5 s"
    ):
        await trio.to_thread.run_sync(lambda: meet_ranks(place(alone), timeout_s=0.5, connect_timeout_s=0.5))
    assert [one.words for one in await meet(b"after that")] == [(b"after that",) * 3] * 3
