"""Weights broadcast to engines: what is sent, who is out when something fails, and that no failure holds the
trainer's thread.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors
import torch
import torch.distributed
import trio
from torch import Tensor
from torch.distributed.distributed_c10d import (
    Backend,
    PrefixStore,
    _new_process_group_helper,
    _world,
    destroy_process_group,
)

from rollouts.device_thread import DeviceThread, open_device_thread
from rollouts.errors import EngineError, EngineSilent, EngineUnreachable, WeightSyncError
from rollouts.models.load import load_hf_model, resolve_model
from rollouts.weight_sync.broadcast import Broadcast
from rollouts.weight_sync.broadcast_sglang import listen_for_group, make_gloo_group, open_sglang_broadcast
from rollouts.weight_sync.broadcast_vllm import open_vllm_broadcast
from rollouts.weight_sync.broadcast_waits import Signal, run_both, wait_work
from rollouts.weight_sync.flat_buckets import FlatBucket, flatten_tensors, split_tensors

CPU = torch.device("cpu")
WEIGHTS = {f"w{index}": torch.arange(4, dtype=torch.float32) + index for index in range(6)}  # 16 bytes each


class ThreadBackend:
    """Streams `buckets` on a device thread, as backends do; `streamed` counts those that the sink has let go
    of.
    """

    def __init__(self, thread: DeviceThread, buckets: Sequence[dict[str, Tensor]]) -> None:
        self.thread = thread
        self.buckets = buckets
        self.streamed = 0

    def stream_weights(self, sink: Callable[[Sequence[tuple[str, Tensor]]], None]) -> Any:
        def work() -> None:
            for bucket in self.buckets:
                sink(list(bucket.items()))
                self.streamed += 1

        return self.thread.submit(work)


@asynccontextmanager
async def open_backend(buckets: Sequence[dict[str, Tensor]] = (WEIGHTS,)) -> AsyncIterator[Any]:
    async with open_device_thread(name="trainer", torch_threads=1) as thread:
        yield ThreadBackend(thread, buckets)


class FakePeer:
    """Takes what it is sent. `fails`: what happens in the step of that name instead; "hang" waits for
    ever.
    """

    device = CPU

    def __init__(self, name: str, **fails: Exception | str) -> None:
        self.name = name
        self.fails = fails
        self.log: list[str] = []
        self.taken: dict[str, Tensor] = {}
        self.sent: list[Tensor] = []
        self.signal = Signal()

    async def _step(self, step: str, note: str = "") -> None:
        self.log.append(step + note)
        fault = self.fails.get(step)
        if isinstance(fault, Exception):
            raise fault
        if fault == "hang":
            await trio.sleep_forever()

    async def join(self) -> None:
        if "join" not in self.log:
            await self._step("join")

    async def begin(self) -> None:
        await self._step("begin")

    async def receive(self, bucket: FlatBucket, *, version: int, last: bool) -> None:
        await self._step("receive", f" v{version} last" if last else "")
        self.taken |= {name: tensor.clone() for name, tensor in bucket.tensors()}

    def start_sending(self, bucket: FlatBucket) -> Callable[[], None]:
        fault = self.fails.get("send")
        if isinstance(fault, Exception):
            raise fault
        if fault == "hang":
            return lambda: self.signal.wait(60)
        return lambda: self.sent.append(bucket.flat)

    async def end(self, version: int) -> None:
        await self._step("end", f" v{version}")

    def break_off(self) -> None:
        self.signal.set()

    async def leave(self) -> None:
        self.log.append("leave")


class Fleet:
    """Engines by name, and the peers that a transport made of them, newest last."""

    def __init__(self, **scripts: dict[str, Any]) -> None:
        self.engines: Any = [SimpleNamespace(features=SimpleNamespace(name=name)) for name in scripts]
        self.scripts = scripts
        self.peers: dict[str, list[FakePeer]] = {name: [] for name in scripts}

    def make_peer(self, engine: Any) -> FakePeer:
        name = engine.features.name
        self.peers[name].append(FakePeer(name, **self.scripts[name]))
        return self.peers[name][-1]

    def transport(self, *, bucket_bytes: int = 32, progress_s: float = 30.0) -> Broadcast:
        return Broadcast(self.make_peer, bucket_bytes=bucket_bytes, dtype=None, progress_s=progress_s)


def assert_whole(peer: FakePeer, weights: dict[str, Tensor] = WEIGHTS) -> None:
    assert peer.taken.keys() == weights.keys()
    assert all(torch.equal(peer.taken[name], tensor) for name, tensor in weights.items())


# --- buckets ------------------------------------------------------------------------------------------------


def test_flat_bucket_gives_its_tensors_back_whatever_their_types():
    tensors = [
        ("bytes", torch.tensor([1, 2, 3], dtype=torch.uint8)),
        ("halves", torch.tensor([[1.5], [2.5]], dtype=torch.bfloat16)),
        ("turned", torch.arange(6, dtype=torch.float32).reshape(2, 3).T),  # not contiguous
        ("one", torch.tensor(7.0)),
    ]
    bucket = flatten_tensors(tensors, dtype=None, device=CPU)
    assert [piece.name for piece in bucket.pieces] == [
        "turned",
        "one",
        "halves",
        "bytes",
    ]  # wide first: 24 + 4 + 4 + 3 bytes, each aligned
    assert len(bucket.flat) == 35
    assert bucket.dtype_names == ["float32", "float32", "bfloat16", "uint8"]
    back = dict(bucket.tensors())
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors)


def test_flat_bucket_is_a_copy_in_the_type_that_is_sent():
    weight, count = torch.tensor([1.0, 2.0]), torch.tensor([3])
    bucket = flatten_tensors([("weight", weight), ("count", count)], dtype=torch.bfloat16, device=CPU)
    weight.zero_()
    assert {name: (tensor.dtype, tensor.tolist()) for name, tensor in bucket.tensors()} == {
        "weight": (torch.bfloat16, [1.0, 2.0]), "count": (torch.int64, [3]),
    }  # fmt: skip


def test_buckets_are_full_and_a_large_tensor_is_alone():
    sizes = [16, 16, 8, 100, 4, 28]
    parts = split_tensors(
        [(str(size), torch.zeros(size, dtype=torch.uint8)) for size in sizes], bucket_bytes=32
    )
    assert [[tensor.nbytes for _, tensor in part] for part in parts] == [[16, 16], [8], [100], [4, 28]]


# --- one update ---------------------------------------------------------------------------------------------


async def test_every_engine_gets_every_weight_and_the_version_with_the_last():
    fleet = Fleet(a={}, b={})
    async with open_backend([dict(list(WEIGHTS.items())[:3]), dict(list(WEIGHTS.items())[3:])]) as backend:
        transport = fleet.transport()
        assert await transport(backend, fleet.engines, 5) == {"a": None, "b": None}
        for (peer,) in fleet.peers.values():
            assert_whole(peer)
            # two tensors fit: 2 + 1 of the first bucket, 2 + 1 of the second
            assert peer.log == ["join", "begin", "receive", "receive", "receive", "receive v5 last", "end v5"]
            assert [len(flat) for flat in peer.sent] == [32, 16, 32, 16]
        assert await transport(backend, fleet.engines, 6) == {"a": None, "b": None}
        assert fleet.peers["a"][0].log[7:] == [
            "begin",
            "receive",
            "receive",
            "receive",
            "receive v6 last",
            "end v6",
        ]  # in the group it had
        await transport.aclose()
    assert [peer.log[-1] for (peer,) in fleet.peers.values()] == ["leave", "leave"]


@pytest.mark.parametrize("step", ["join", "begin", "receive", "send", "end"])
async def test_engine_that_fails_is_reported_and_the_others_go_on(step: str):
    error = RuntimeError("connection closed by peer") if step == "send" else EngineUnreachable("b is gone")
    fleet = Fleet(a={}, b={step: error}, c={})
    async with open_backend() as backend:
        transport = fleet.transport()
        assert await transport(backend, fleet.engines, 1) == {"a": None, "b": error, "c": None}
        assert_whole(fleet.peers["a"][0])
        assert_whole(fleet.peers["c"][0])
        assert fleet.peers["b"][0].log[-1] == "leave"
        fleet.scripts["b"] = {}  # it comes back
        assert await transport(backend, fleet.engines, 2) == {"a": None, "b": None, "c": None}
        assert fleet.peers["b"][1].log[:2] == ["join", "begin"]  # in a new group
        assert_whole(fleet.peers["b"][1])


@pytest.mark.parametrize("step", ["join", "begin", "receive", "send", "end"])
async def test_engine_that_hangs_costs_the_deadline_and_nobody_else(step: str):
    fleet = Fleet(a={}, b={step: "hang"} | ({"receive": "hang"} if step == "send" else {}))
    async with open_backend() as backend:
        outcome = await fleet.transport(progress_s=0.2)(backend, fleet.engines, 1)
        assert outcome["a"] is None
        assert isinstance(outcome["b"], EngineSilent)
        assert "b was not done with" in str(outcome["b"])
        assert_whole(fleet.peers["a"][0])
        assert backend.streamed == 1


async def test_server_that_refuses_a_bucket_frees_the_thread_that_is_sending_it():
    # the broadcast alone would wait for a minute: the refusal breaks it off
    fleet = Fleet(a={}, b={"send": "hang", "receive": EngineError("b knows no such group")})
    async with open_backend() as backend:
        started = time.monotonic()
        outcome = await fleet.transport()(backend, fleet.engines, 1)
        assert time.monotonic() - started < 30
        assert str(outcome["b"]) == "b knows no such group"
        assert_whole(fleet.peers["a"][0])


async def test_nothing_is_streamed_when_nobody_is_there():
    fleet = Fleet(a={"begin": EngineUnreachable("a is gone")})
    async with open_backend() as backend:
        assert list(await fleet.transport()(backend, fleet.engines, 1)) == ["a"]
        assert backend.streamed == 0
        assert await fleet.transport()(backend, [], 1) == {}


async def test_failure_on_the_trainers_side_is_a_weight_sync_error_and_the_backend_goes_on():
    fleet = Fleet(a={})
    async with open_backend([]) as backend:
        transport = fleet.transport()
        with pytest.raises(
            WeightSyncError, match="version 3 could not be sent: the backend streamed no weights"
        ):
            await transport(backend, fleet.engines, 3)
        assert fleet.peers["a"][0].log[-1] == "leave"
        backend.buckets = [WEIGHTS]
        assert await transport(backend, fleet.engines, 3) == {"a": None}


async def test_cancelled_update_lets_the_trainers_thread_go_and_leaves_no_group():
    fleet = Fleet(a={"receive": "hang", "send": "hang"})
    async with open_backend([WEIGHTS, WEIGHTS]) as backend:
        transport = fleet.transport()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(transport, backend, fleet.engines, 1)
            while "receive" not in fleet.peers["a"][-1].log if fleet.peers["a"] else True:
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        assert fleet.peers["a"][0].log[-1] == "leave"
        fleet.scripts["a"] = {}
        assert await transport(backend, fleet.engines, 2) == {"a": None}  # the thread is free
        assert_whole(fleet.peers["a"][1])


async def test_update_cancelled_in_its_last_bucket_does_not_wait_for_an_engine_that_hangs():
    fleet = Fleet(a={"receive": "hang", "send": "hang"})  # which would hold the thread for a minute
    begun_s = time.monotonic()
    async with open_backend() as backend:
        with trio.move_on_after(0.3) as scope:
            await fleet.transport(bucket_bytes=10_000)(backend, fleet.engines, 1)
    assert scope.cancelled_caught
    assert time.monotonic() - begun_s < 10


def listening_addresses() -> set[str]:
    """Addresses, in the system's hexadecimal, on which this process listens."""
    inodes = {
        link[8:-1] for link in map(read_link, Path("/proc/self/fd").iterdir()) if link.startswith("socket:[")
    }
    lines = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]
    ]
    return {line[1].split(":")[0] for line in lines if line[3] == "0A" and line[9] in inodes}


def read_link(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:
        return ""


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="reads Linux's table of sockets")
def test_nobody_outside_this_machine_reaches_a_groups_ports():
    timeout, before = timedelta(seconds=5), listening_addresses()
    store = listen_for_group("127.0.0.1", 1, timeout)
    group = make_gloo_group(store, "g", 1, timeout, address="127.0.0.1")
    try:
        assert listening_addresses() - before <= {"0100007F"}
        assert "0100007F" in listening_addresses()
    finally:
        group.abort()


async def test_weights_go_out_under_the_names_that_model_files_have():
    # the model holds the experts of a layer in one tensor, its files have three tensors for each of them
    path = resolve_model("tiny:moe", seed=0)
    model = load_hf_model(path)
    fleet = Fleet(a={})
    async with open_backend([dict(model.named_parameters())]) as backend:
        backend.model = model
        assert await fleet.transport(bucket_bytes=50_000)(backend, fleet.engines, 1) == {"a": None}
    with safetensors.safe_open(path / "model.safetensors", "pt") as file:  # pyright: ignore[reportPrivateImportUsage]
        assert_whole(fleet.peers["a"][0], {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118


async def test_first_failure_of_two_cancels_the_other():
    async def fail() -> None:
        raise EngineError("no")

    with pytest.raises(EngineError, match="no"):
        await run_both(fail, trio.sleep_forever)


# --- gloo ---------------------------------------------------------------------------------------------------


def open_gloo_pair(name: str, *, timeout: timedelta) -> Callable[[], tuple[Any, Any]]:
    """Both ends of a group: ours, and one that torch's helper makes, as a server does."""
    store = listen_for_group("127.0.0.1", 2, timeout)
    other = torch.distributed.TCPStore("127.0.0.1", store.port, 2, is_master=False, timeout=timeout)  # pyright: ignore[reportPrivateImportUsage]
    ends: dict[str, Any] = {}

    def make_theirs() -> None:
        ends["theirs"], _ = _new_process_group_helper(
            2,
            1,
            [],
            Backend("gloo"),
            PrefixStore(name, other),
            group_name=name,
            timeout=timeout,  # pyright: ignore[reportArgumentType]
        )
        _world.pg_group_ranks[ends["theirs"]] = {0: 0, 1: 1}

    def make_ours() -> None:
        ends["ours"] = make_gloo_group(store, name, 2, timeout, address="127.0.0.1")

    async def meet() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.to_thread.run_sync, make_theirs)
            nursery.start_soon(trio.to_thread.run_sync, make_ours)

    trio.run(meet)
    return lambda: (ends["ours"], ends["theirs"])


def broadcast(group: Any, tensor: Tensor, timeout: timedelta) -> Any:
    options = torch.distributed.BroadcastOptions()
    options.rootRank, options.rootTensor, options.timeout = 0, 0, timeout
    return group.broadcast([tensor], options)


def test_bytes_reach_a_group_that_torchs_own_helper_made():
    ours, theirs = open_gloo_pair("pair-bytes", timeout=timedelta(seconds=20))()
    sent, received = torch.arange(100, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
    work = broadcast(ours, sent, timedelta(seconds=20))
    broadcast(theirs, received, timedelta(seconds=20)).wait()
    wait_work(work, Signal(), 20)
    assert torch.equal(sent, received)
    destroy_process_group(theirs)


def test_broadcast_that_nobody_takes_ends_at_its_deadline_or_when_it_is_broken_off():
    ours, theirs = open_gloo_pair("pair-silent", timeout=timedelta(seconds=20))()
    large = torch.zeros(64 * 2**20, dtype=torch.uint8)  # more than a socket's buffer takes
    work = broadcast(ours, large, timedelta(seconds=1))
    broken = Signal()
    broken.set()
    with pytest.raises(RuntimeError, match="broken off"):
        wait_work(work, broken, 20)
    with pytest.raises(RuntimeError, match=r"Timed out|timed out|closed"):
        wait_work(work, Signal(), 20)
    destroy_process_group(theirs)


# --- what cannot be -----------------------------------------------------------------------------------------


async def test_nccl_without_a_gpu_is_refused_with_a_way_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(WeightSyncError, match='use backend "gloo" or update from disk'):
        async with open_sglang_broadcast(backend="nccl"):
            pass
    with pytest.raises(WeightSyncError, match="need a GPU on the trainer's side"):
        async with open_vllm_broadcast():
            pass


async def test_engine_of_another_kind_is_refused():
    fleet = Fleet(a={})
    async with open_backend() as backend, open_sglang_broadcast() as transport:
        with pytest.raises(WeightSyncError, match="engine a is no SGLang server"):
            await transport(backend, fleet.engines, 1)
