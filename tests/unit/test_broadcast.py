"""Weights broadcast to engines: what is sent, who is out when something fails, and that no failure holds the
trainer's thread.
"""

import json
from contextlib import asynccontextmanager
from datetime import timedelta
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed
import trio
from safetensors.torch import load_file
from torch.distributed.distributed_c10d import (
    Backend,
    PrefixStore,
    _new_process_group_helper,
    _world,
    destroy_process_group,
)

from rollouts.device_thread import open_device_thread
from rollouts.errors import EngineSilent, WeightSyncError
from rollouts.models.export import split_buckets
from rollouts.models.load import load_hf_model, resolve_model
from rollouts.ranks.meet import host_store
from rollouts.testing.torch_contracts import assert_weights_equal
from rollouts.weight_sync.broadcast import Broadcast, SGLangPeer, flatten_tensors, make_group, open_broadcast
from tests.support.text_tables import cases, read_error

CPU = torch.device("cpu")
WEIGHTS = {f"w{index}": torch.arange(4, dtype=torch.float32) + index for index in range(6)}  # 16 bytes each


@asynccontextmanager
async def open_backend(*buckets):
    """Streams `buckets` on a device thread, as backends do."""

    def stream_weights(sink):
        return thread.submit(lambda: [sink([*bucket.items()]) for bucket in backend.buckets])

    async with open_device_thread(name="trainer", torch_threads=1) as thread:
        backend = SimpleNamespace(buckets=buckets, stream_weights=stream_weights)
        yield backend


class FakeEngine:
    def __init__(self, name):
        self.features = SimpleNamespace(name=name)


class FakePeer:
    """Takes what it is sent. `fails`: what happens in the step of that name; "hang" waits for ever."""

    def __init__(self, fails):
        self.fails = fails
        self.log = []
        self.taken = {}
        self.reached = trio.Event()  # the step that hangs

    async def _step(self, step, note=""):
        self.log.append(step + note)
        await trio.lowlevel.checkpoint()
        fault = self.fails.get(step)
        if isinstance(fault, Exception):
            raise fault
        if fault == "hang":
            self.reached.set()
            await trio.sleep_forever()

    async def begin(self):
        await self._step("begin")

    async def send(self, bucket, *, version, last):
        await self._step("send", f" {len(bucket.flat)}" + f" v{version}" * last)
        self.taken |= {name: tensor.clone() for name, tensor in bucket.tensors}

    async def end(self, version):
        await self._step("end", f" v{version}")

    async def leave(self):
        self.log.append("leave")


class Fleet:
    """Engines by name with the faults of each, and the peers that a transport made of them, newest last."""

    def __init__(self, **faults):
        self.engines = [FakeEngine(name) for name in faults]
        self.faults = faults
        self.peers = {name: [] for name in faults}

    def transport(self, *, bucket_bytes=32, progress_s=60.0):
        def make_peer(engine):
            name = engine.features.name
            self.peers[name].append(FakePeer(self.faults[name]))
            return self.peers[name][-1]

        return Broadcast(make_peer, CPU, bucket_bytes=bucket_bytes, progress_s=progress_s)


def test_a_flat_bucket_is_an_aligned_copy_in_the_type_that_is_sent():
    turned = torch.arange(6, dtype=torch.float32).reshape(2, 3).T  # not contiguous
    tensors = {"bytes": torch.arange(3, dtype=torch.uint8), "turned": turned, "count": torch.tensor(7)}
    wanted = {name: tensor.clone() for name, tensor in tensors.items()}
    made = {
        dtype: flatten_tensors([*tensors.items()], dtype=dtype, device=CPU)
        for dtype in (None, torch.bfloat16)
    }
    assert made[None].describe() == json.loads("""{"names": ["count", "turned", "bytes"],
        "dtypes": ["int64", "float32", "uint8"], "shapes": [[], [3, 2], [3]]}""")
    assert len(made[None].flat) == 8 + 24 + 3
    turned.zero_()
    for dtype, bucket in made.items():
        found = dict(bucket.tensors)
        assert (found["turned"].dtype, found["count"].dtype) == (dtype or torch.float32, torch.int64)
        assert all(torch.equal(found[name], tensor.to(found[name].dtype)) for name, tensor in wanted.items())


def test_buckets_are_full_of_one_dtype_and_a_large_tensor_is_alone():
    tensors = [(str(size), torch.zeros(size, dtype=torch.uint8)) for size in (16, 16, 8, 100, 4, 28)]
    parts = split_buckets([*tensors, ("float", torch.zeros(1))], 32)
    assert [[tensor.nbytes for _, tensor in part] for part in parts] == [[16, 16], [8], [100], [4, 28], [4]]


async def test_every_engine_gets_every_weight_and_the_version_with_the_last():
    fleet, names = Fleet(a={}, b={}), list(WEIGHTS.items())
    async with open_backend(dict(names[:3]), dict(names[3:])) as backend:
        transport = fleet.transport()
        for version in (5, 6):  # the second time with the peers of the first
            assert await transport(backend, fleet.engines, version) == {}  # nobody failed
            for (peer,) in fleet.peers.values():
                assert_weights_equal(peer.taken, WEIGHTS)
                sent = ["send 32", "send 16", "send 32", f"send 16 v{version}"]
                assert peer.log[-6:] == ["begin", *sent, f"end v{version}"]
        assert await transport(backend, [], 7) == {}
        await transport.aclose()
    assert [peer.log[-1] for (peer,) in fleet.peers.values()] == ["leave", "leave"]


@cases("kind: EngineUnreachable RuntimeError hang")
@cases("step: begin send end")
async def test_an_engine_that_fails_or_hangs_is_reported_and_the_others_go_on(step, kind):
    hangs = kind == "hang"
    fault = kind if hangs else read_error(kind)
    fleet = Fleet(a={}, b={step: fault}, c={})
    async with open_backend(WEIGHTS) as backend:
        transport = fleet.transport(progress_s=2.0 if hangs else 60.0)
        errors = await transport(backend, fleet.engines, 1)
        assert list(errors) == ["b"]
        assert "b was not done with" in str(errors["b"]) if hangs else errors["b"] is fault
        assert isinstance(errors["b"], EngineSilent) == hangs
        assert_weights_equal(fleet.peers["a"][0].taken, WEIGHTS)
        assert fleet.peers["b"][0].log[-1] == "leave"
        fleet.faults["b"] = {}  # it comes back, in a new group
        assert await transport(backend, fleet.engines, 2) == {}
        assert_weights_equal(fleet.peers["b"][1].taken, WEIGHTS)


async def test_a_failure_on_the_trainers_side_is_a_weight_sync_error_and_the_backend_goes_on():
    fleet = Fleet(a={})
    async with open_backend() as backend:
        transport = fleet.transport()
        unsendable = [{"w": torch.zeros(2, dtype=torch.complex64)}, {"w": object()}]
        for buckets, says in (([], "streamed no weights"), (unsendable, "")):
            backend.buckets = buckets
            with pytest.raises(WeightSyncError, match=f"version 3 could not be sent: .*{says}"):
                await transport(backend, fleet.engines, 3)
            assert fleet.peers["a"][-1].log[-1] == "leave"
        backend.buckets = [WEIGHTS]
        assert await transport(backend, fleet.engines, 3) == {}


@cases("bucket_bytes: 32 10000")  # cut in a bucket that others follow, and in the last
async def test_a_cancelled_update_lets_the_trainers_thread_go_and_leaves_no_group(bucket_bytes: int):
    fleet = Fleet(a={"send": "hang"})
    async with open_backend(WEIGHTS) as backend:
        transport = fleet.transport(bucket_bytes=bucket_bytes, progress_s=600.0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(transport, backend, fleet.engines, 1)
            while not fleet.peers["a"]:  # noqa: ASYNC110
                await trio.sleep(0.001)
            await fleet.peers["a"][0].reached.wait()
            nursery.cancel_scope.cancel()
        assert fleet.peers["a"][0].log[-1] == "leave"
        fleet.faults["a"] = {}
        assert await transport(backend, fleet.engines, 2) == {}  # the thread is free
        assert_weights_equal(fleet.peers["a"][1].taken, WEIGHTS)


async def test_weights_go_out_under_the_names_that_model_files_have():
    # the model holds the experts of a layer in one tensor, its files have three tensors for each of them
    path = resolve_model("tiny:moe", seed=0)
    fleet, model = Fleet(a={}), load_hf_model(path)
    async with open_backend(dict(model.named_parameters())) as backend:
        backend.model = model
        await fleet.transport(bucket_bytes=50_000)(backend, fleet.engines, 1)
    assert_weights_equal(fleet.peers["a"][0].taken, load_file(path / "model.safetensors"))


# --- over gloo ----------------------------------------------------------------------------------------------


class FakeServer:
    """What SGLangPeer asks of an SGLang server, whose other end of the group torch's own helper makes. It
    takes nothing while `frozen`.
    """

    info = SimpleNamespace(dp_size=1, tp_size=1, pp_size=1)
    frozen = False

    async def update(self, path, info):
        if path == "/destroy_weights_update_group":
            destroy_process_group(self.group)
            return
        assert path == "/init_weights_update_group"
        timeout = timedelta(seconds=60)
        address, port, group_name, backend, *ranks = info.values()
        assert ranks == [1, 2]  # its own, and of how many

        def make():
            store = torch.distributed.TCPStore(address, port, 2, is_master=False, timeout=timeout)
            group, _ = _new_process_group_helper(
                2, 1, [], Backend(backend), PrefixStore(group_name, store),
                group_name=group_name, timeout=timeout,
            )  # fmt: skip
            _world.pg_group_ranks[group] = {0: 0, 1: 1}
            return group

        self.group = await trio.to_thread.run_sync(make)

    async def begin_transfer(self):
        return False

    async def receive_broadcast(self, info, **more):
        if self.frozen:
            await trio.sleep_forever()
        self.received = torch.zeros(24, dtype=torch.uint8)
        options = torch.distributed.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        work = self.group.broadcast([self.received], options)
        await trio.to_thread.run_sync(work.wait)


async def test_bytes_reach_a_server_and_one_that_takes_nothing_can_be_given_up():
    server = FakeServer()
    peer = SGLangPeer(server, "gloo", CPU, timedelta(seconds=8))
    await peer.begin()
    bucket = flatten_tensors([("w", torch.arange(6.0))], dtype=None, device=CPU)
    await peer.send(bucket, version=1, last=True)
    assert torch.equal(server.received, bucket.flat)
    server.frozen = True
    large = flatten_tensors([("w", torch.zeros(2**26))], dtype=None, device=CPU)  # too large for a socket
    with trio.move_on_after(0.5) as scope:
        await peer.send(large, version=2, last=True)
    assert scope.cancelled_caught
    async with trio.open_nursery() as nursery:
        nursery.start_soon(peer.leave)  # as long as the group's deadline, in a thread
        started = trio.current_time()
        await trio.sleep(0.1)
        assert trio.current_time() - started < 4  # trio goes on meanwhile


def read_listening():
    """Addresses on which this process listens."""
    connections = psutil.Process().net_connections()
    return {one.laddr.ip for one in connections if one.status == psutil.CONN_LISTEN}


def test_nobody_outside_this_machine_reaches_a_groups_ports():
    timeout, before = timedelta(seconds=60), read_listening()
    store = host_store("127.0.0.1", timeout, 1)
    group = make_group(store, "g", 1, timeout, wire="gloo")
    try:
        assert read_listening() - before <= {"127.0.0.1"} <= read_listening()
    finally:
        group.abort()


# --- what cannot be -----------------------------------------------------------------------------------------


@cases("""
options
wire = "nccl"
kind = "vllm"
""")
async def test_nccl_without_a_gpu_is_refused_with_a_way_out(monkeypatch, options: dict):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(WeightSyncError, match=r"need a GPU on the trainer's side.*update from disk"):
        async with open_broadcast(**options):
            pass


async def test_an_engine_of_another_kind_is_refused():
    async with open_backend(WEIGHTS) as backend, open_broadcast() as transport:
        with pytest.raises(WeightSyncError, match="engine a is no sglang server"):
            await transport(backend, Fleet(a={}).engines, 1)
