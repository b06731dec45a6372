"""Broadcasts of weights to SGLang servers, over gloo or NCCL. See rollouts.weight_sync.broadcast."""

from __future__ import annotations

import socket
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any, Literal, cast

import torch
import torch.distributed
import trio
from torch.distributed.distributed_c10d import PrefixStore, Store

from rollouts.engines.sglang import SGLangServer
from rollouts.errors import EngineError, WeightSyncError
from rollouts.protocols import InferenceEngine
from rollouts.weight_sync.broadcast import BUCKET_BYTES, PROGRESS_S, Broadcast, Peer
from rollouts.weight_sync.broadcast_waits import (
    Signal,
    device_context,
    record_stream,
    run_both,
    wait_stream,
    wait_work,
)
from rollouts.weight_sync.flat_buckets import FlatBucket


class SGLangPeer:
    """An SGLang server's end: a torch.distributed group over gloo or NCCL, made without touching the
    process's default group.
    """

    def __init__(
        self,
        engine: SGLangServer,
        *,
        backend: Literal["gloo", "nccl"],
        address: str,
        device: torch.device,
        progress_s: float,
    ) -> None:
        self._engine = engine
        self._backend = backend
        self._address = address
        self._device = device
        self._progress_s = progress_s
        self._group_name = f"rollouts-{uuid.uuid4().hex}"
        self._group: Any = None
        self._has_session = False
        self._broken = Signal()

    @property
    def name(self) -> str:
        return self._engine.name

    @property
    def device(self) -> torch.device:
        return self._device

    async def join(self) -> None:
        if self._group is not None:
            return
        if self._engine.data_parallel != 1:
            raise EngineError(
                f"{self.name} has --dp-size {self._engine.data_parallel}; weights in memory reach only"
                " servers with 1, or update from disk"
            )
        timeout = timedelta(seconds=self._progress_s)
        size = 1 + self._engine.world_size
        store = listen_for_group(self._address, size, timeout)

        async def ask() -> None:
            await self._engine.join_group(
                address=self._address, port=store.port, group_name=self._group_name, backend=self._backend
            )

        async def meet() -> None:
            def make() -> Any:
                if self._backend == "nccl":
                    return make_nccl_group(store, self._group_name, size, timeout)
                return make_gloo_group(store, self._group_name, size, timeout, address=self._address)

            # abandoned if the server refuses: it then waits for nobody, until its own deadline
            self._group = await trio.to_thread.run_sync(make, abandon_on_cancel=True)

        await run_both(ask, meet)

    async def begin(self) -> None:
        self._has_session = await self._engine.begin_transfer()

    async def receive(self, bucket: FlatBucket, *, version: int, last: bool) -> None:
        names, shapes = [piece.name for piece in bucket.pieces], [piece.shape for piece in bucket.pieces]
        await self._engine.receive_broadcast(
            names, bucket.dtype_names, shapes, group_name=self._group_name, version=version, last=last
        )

    def start_sending(self, bucket: FlatBucket) -> Callable[[], None]:
        options = torch.distributed.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = timedelta(seconds=self._progress_s)
        group = self._group
        if group is None:
            raise EngineError(f"{self.name} is in no process group")
        with device_context(self._device):
            work = group.broadcast([bucket.flat], options)
            if self._device.type == "cuda":
                work.wait()  # of this stream for NCCL's: the thread goes on
                sent = record_stream()
                return lambda: wait_stream(self._broken, sent, self._progress_s)
        return lambda: wait_work(work, self._broken, self._progress_s)

    async def end(self, version: int) -> None:
        if self._has_session:
            await self._engine.end_transfer()
            self._has_session = False

    def break_off(self) -> None:
        self._broken.set()

    async def leave(self) -> None:
        self.break_off()
        group, self._group = self._group, None
        if group is not None:
            await trio.to_thread.run_sync(group.abort, abandon_on_cancel=True)
        for call in (
            self._engine.end_transfer if self._has_session else None,
            lambda: self._engine.leave_group(self._group_name),
        ):
            try:
                await call() if call is not None else None
            except EngineError:
                continue  # it is gone, or knows nothing of it: both are what was wanted
        self._has_session = False


def listen_for_group(address: str, size: int, timeout: timedelta) -> Any:
    """A TCPStore on a port of its own, on `address` alone: by itself it would listen on all interfaces, and
    it asks nobody for a key.
    """
    family, kind, protocol, _, where = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as listener:
        listener.bind(where)
        listener.listen()
        port = listener.getsockname()[1]
        make = cast(Any, torch.distributed).TCPStore
        return make(
            address,
            port,
            size,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


def make_gloo_group(store: Store, name: str, size: int, timeout: timedelta, *, address: str) -> Any:
    """Rank 0 of a group that torch's own helper makes on the other side, which names it so in the store;
    listens on `address` alone. Blocks until all are there.
    """
    found = PrefixStore("cpu/", PrefixStore(f"{name}/", PrefixStore(name, store)))
    kind = cast(Any, torch.distributed).ProcessGroupGloo
    options = kind._Options()
    options._timeout = timeout
    options._devices = [kind.create_device(hostname=address)]
    return kind(found, 0, size, options)


def make_nccl_group(store: Store, name: str, size: int, timeout: timedelta) -> Any:
    """As make_gloo_group; NCCL connects at the first broadcast. Raises WeightSyncError without CUDA. Not run
    by our tests: needs a GPU.
    """
    if not torch.cuda.is_available():
        raise WeightSyncError(
            'broadcasts over NCCL need a GPU on the trainer\'s side, and there is none; use backend "gloo" or'
            " update from disk"
        )
    found = PrefixStore("cuda/", PrefixStore(f"{name}/", PrefixStore(name, store)))
    kind = cast(Any, torch.distributed).ProcessGroupNCCL
    options = kind.Options()
    options._timeout = timeout
    return kind(found, 0, size, options)


@asynccontextmanager
async def open_sglang_broadcast(
    *,
    backend: Literal["gloo", "nccl"] = "gloo",
    address: str = "127.0.0.1",
    bucket_bytes: int = BUCKET_BYTES,
    dtype: torch.dtype | None = None,
    progress_s: float = PROGRESS_S,
) -> AsyncIterator[Broadcast]:
    """A Transport to SGLang servers without a disk in between.

    backend: "gloo" over the CPU's network, "nccl" between GPUs (not run by our tests: needs a GPU). address:
    of this machine, as servers reach it; groups listen there on ports of their own. dtype: what
    floating-point weights are sent as; None: as the trainer has them, and the server converts. progress_s:
    what any one step, a bucket included, may take. Groups are kept between updates and torn down at the end.
    Raises WeightSyncError for "nccl" without CUDA.
    """
    if backend == "nccl" and not torch.cuda.is_available():
        raise WeightSyncError(
            'broadcasts over NCCL need a GPU on the trainer\'s side, and there is none; use backend "gloo" or'
            " update from disk"
        )
    device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")

    def make_peer(engine: InferenceEngine) -> Peer:
        server = getattr(engine, "dialect", None)
        if not isinstance(server, SGLangServer):
            raise WeightSyncError(
                f"engine {engine.features.name} is no SGLang server; give this transport SGLang engines only"
            )
        return SGLangPeer(server, backend=backend, address=address, device=device, progress_s=progress_s)

    transport = Broadcast(make_peer, bucket_bytes=bucket_bytes, dtype=dtype, progress_s=progress_s)
    try:
        yield transport
    finally:
        await transport.aclose()
