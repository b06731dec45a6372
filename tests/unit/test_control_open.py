"""Opening the control channel over loopback, and what a process does by default when it has lost a rank."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import trio

from rollouts.distributed.commands import Command
from rollouts.distributed.control import ControlHub, ControlLink, Launch, _choose_host, open_control
from rollouts.errors import ControlError, RankLost

SOON_S = 60.0


def make_launch(
    rank: int, world_size: int, *, local_world_size: int | None = None, master_addr: str = "localhost"
) -> Launch:
    local = local_world_size or world_size
    return Launch(
        rank, world_size, local_rank=rank % local, local_world_size=local, master_addr=master_addr, restart=0
    )


class Shared:
    """What rank 0 tells all."""

    def __init__(self) -> None:
        self.told = trio.Event()
        self.data = b""

    async def __call__(self, data: bytes | None) -> bytes:
        if data is not None:
            self.data = data
            self.told.set()
        await self.told.wait()
        return self.data


@pytest.mark.parametrize("local_world_size", [3, 1])  # 1: as on three nodes
async def test_arrays_of_many_megabytes_reach_every_rank_over_sockets(local_world_size: int):
    share, got = Shared(), list[bool]()
    values = np.arange(2**22)  # 32 MiB

    async def run_rank(rank: int) -> None:
        async with open_control(
            make_launch(rank, 3, local_world_size=local_world_size), share=share, on_lost=pytest.fail
        ) as control:
            if isinstance(control, ControlLink):
                async for command in control:
                    got.append(
                        command.fields == {"n": len(got) // 2}
                        and np.array_equal(command.arrays["values"], values)
                    )
                return
            for number in range(3):
                control.send(Command("step", {"n": number}, {"values": values}))

    with trio.fail_after(SOON_S):
        async with trio.open_nursery() as nursery:
            for rank in range(3):
                nursery.start_soon(run_rank, rank)
    assert len(got) == 6 and all(got)


async def test_one_rank_alone_shares_nothing():
    async with open_control(
        make_launch(0, 1), share=lambda data: pytest.fail("nobody to share with")
    ) as control:
        assert isinstance(control, ControlHub)
        control.send(Command("x"))


async def test_a_rank_that_cannot_reach_rank_0_names_it():
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listeners[0].socket.getsockname()[1]
    await listeners[0].aclose()
    lost: list[RankLost] = []

    async def share(data: bytes | None) -> bytes:
        return b"\x93\xa9127.0.0.1\xcd" + port.to_bytes(2, "big") + b"\xc4\x01k"

    with pytest.raises(
        RankLost, match=f"rank 0 was lost during start-up: no connection to 127.0.0.1 port {port}"
    ):
        async with open_control(make_launch(1, 2), share=share, on_lost=lost.append):
            pytest.fail("the body must not begin")
    assert [one.rank for one in lost] == [0]


@pytest.mark.parametrize("shared", [b"", b"\x93", b"\x92\xa1a\x01", b"\xc1", b"hello"])
async def test_an_address_that_is_none_is_refused(shared: bytes):
    async def share(data: bytes | None) -> bytes:
        return shared

    with pytest.raises(ControlError, match="what rank 0 shared is no address"):
        async with open_control(make_launch(1, 2), share=share):
            pytest.fail("the body must not begin")


async def test_rank_0_stops_listening_when_the_address_cannot_be_shared():
    async def share(data: bytes | None) -> bytes:
        raise OSError("the process group is broken")

    with pytest.raises(OSError, match="process group"):
        async with open_control(make_launch(0, 2), share=share):
            pytest.fail(
                "the body must not begin"
            )  # a listener left open would be a ResourceWarning, which is an error here


async def test_rank_0_listens_where_master_addr_is_reached():
    assert await _choose_host(make_launch(0, 4, master_addr="no-such-node.invalid")) == "127.0.0.1", (
        "nobody else asks"
    )
    assert await _choose_host(make_launch(0, 4, local_world_size=2, master_addr="127.0.0.1")) == "127.0.0.1"
    assert await _choose_host(make_launch(0, 4, local_world_size=2, master_addr="localhost")) in (
        "127.0.0.1",
        "::1",
    )


def test_ranks_whose_run_was_stopped_by_force_on_request_have_not_failed():
    script = """
from rollouts.distributed.control import end_after_rank_0
from rollouts.distributed.hub import STOPPED
from rollouts.errors import RankLost
end_after_rank_0(RankLost(0, "save of step 7", STOPPED))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    said = (
        "rollouts: rank 0 was stopped during save of step 7: a requested stop did not end in time, so it ends"
        " by force; this process ends too\n"
    )
    assert (done.returncode, done.stderr) == (0, said)


def test_a_process_that_has_lost_a_rank_says_so_in_one_line_and_exits_with_75():
    script = """
from rollouts.distributed.control import exit_on_lost
from rollouts.errors import RankLost
print("what was printed before", end="")
try:
    exit_on_lost(RankLost(3, "save of step 7", "ValueError: two\\nlines"))
finally:
    print("not this")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (
        done.stderr
        == "rollouts: rank 3 was lost during save of step 7: ValueError: two lines; this process ends too\n"
    )
    assert (done.returncode, done.stdout) == (75, "what was printed before")
