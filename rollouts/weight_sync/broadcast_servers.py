"""The servers' ends of broadcasts: SGLang over gloo or NCCL, vLLM over NCCL. See
rollouts.weight_sync.broadcast.
"""

import importlib
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, cast

import torch
import torch.distributed
import trio
from torch.distributed.distributed_c10d import PrefixStore, Store
from trio.to_thread import run_sync as run_in_thread

from rollouts.engines.processes import HOST, find_free_port
from rollouts.engines.sglang import SGLangServer
from rollouts.engines.vllm import VLLMServer
from rollouts.errors import EngineError, WeightSyncError
from rollouts.processes.nurseries import run_all
from rollouts.protocols import InferenceEngine
from rollouts.ranks.meet import host_store
from rollouts.weight_sync.broadcast import BUCKET_BYTES, PROGRESS_S, Broadcast, Peer
from rollouts.weight_sync.flat_buckets import FlatBucket

Wire = Literal["gloo", "nccl"]
POLL_S = 0.002
# vLLM's own trainer side: a group of rank 0 out of an address, a port and a size
VLLM_ENDPOINT = "vllm.distributed.weight_transfer.nccl_common"


async def run_on(device: torch.device, work: Callable[[], Any]) -> Any:
    """What `work` returns, in a thread whose device is `device`. Abandoned by a cancellation: a thread that
    waits for a dead server ends by its group's deadline.
    """

    def run() -> Any:
        with torch.cuda.device(device) if device.type == "cuda" else device:
            return work()

    return await run_in_thread(run, abandon_on_cancel=True)


async def wait_sent(is_done: Callable[[], bool]) -> None:
    """Returns when `is_done`. By polling, which a cancellation ends: gloo and CUDA have no wait that can be
    broken off.
    """
    while not is_done():  # noqa: ASYNC110
        await trio.sleep(POLL_S)


@dataclass(eq=False)
class SGLangPeer:
    """A Peer of an SGLang server: a torch.distributed group, made without touching the process's default
    group.
    """

    server: SGLangServer
    wire: Wire
    device: torch.device
    timeout: timedelta  # of every operation of the group
    _group: Any = None
    _has_session: bool = False

    def __post_init__(self) -> None:
        self.name = self.server.name
        self._group_name = f"rollouts-{uuid.uuid4().hex}"

    async def begin(self) -> None:
        if self._group is None:
            await self._join()
        self._has_session = await self.server.begin_transfer()

    async def _join(self) -> None:
        name, info = self._group_name, self.server.info
        if info.dp_size != 1:
            raise EngineError(
                f"{self.name} has --dp-size {info.dp_size}; weights in memory reach only servers with"
                " 1, or update from disk"
            )
        size = 1 + info.tp_size * info.pp_size  # the server's processes that hold weights
        store = host_store(HOST, self.timeout, size)
        meeting = {
            "master_address": HOST,
            "master_port": store.port,
            "group_name": name,
            "backend": self.wire,
            "rank_offset": 1,
            "world_size": size,
        }

        async def meet() -> None:
            self._group = await run_on(
                self.device, lambda: make_group(store, name, size, self.timeout, wire=self.wire)
            )

        await run_all(lambda: self.server.join_group(meeting), meet)

    async def send(self, bucket: FlatBucket, *, version: int, last: bool) -> None:
        info = {**bucket.describe(), "group_name": self._group_name}
        await run_all(
            lambda: self.server.receive_broadcast(info, version=version, last=last),
            lambda: self._broadcast(bucket.flat),
        )

    async def _broadcast(self, flat: torch.Tensor) -> None:
        options = torch.distributed.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, self.timeout
        work = await run_on(self.device, lambda: self._group.broadcast([flat], options))
        await wait_sent(work.is_completed)
        if self.wire == "gloo":
            work.wait()  # raises what went wrong
        elif (failure := work.exception()) is not None:
            raise RuntimeError(f"a broadcast failed: {failure}")

    async def end(self, version: int) -> None:
        if self._has_session:
            await self.server.end_transfer()
            self._has_session = False

    async def leave(self) -> None:
        groups, self._group = [self._group], None
        if groups[0] is not None:  # its last reference is dropped in the thread, where that waits for gloo
            await run_in_thread(lambda: groups.pop().abort(), abandon_on_cancel=True)
        with suppress(EngineError):  # it is gone, or knows nothing of it: both are what was wanted
            await self.end(0)
        with suppress(EngineError):
            await self.server.leave_group(self._group_name)


def make_group(store: Store, name: str, size: int, timeout: timedelta, *, wire: Wire) -> Any:
    """Rank 0 of a group that torch's own helper makes on the other side, which names it so in the store.

    gloo listens on the loopback interface alone and blocks until all are there; NCCL connects at the first
    broadcast (not run by our tests: needs a GPU).
    """
    distributed = cast(Any, torch.distributed)
    if wire == "gloo":
        kind, prefix = distributed.ProcessGroupGloo, "cpu/"
        options = kind._Options()
        options._devices = [kind.create_device(hostname=HOST)]
    else:
        kind, prefix = distributed.ProcessGroupNCCL, "cuda/"
        options = kind.Options()
    options._timeout = timeout
    found = PrefixStore(prefix, PrefixStore(f"{name}/", PrefixStore(name, store)))
    return kind(found, 0, size, options)


@dataclass(eq=False)
class VLLMPeer:
    """A Peer of a vLLM server: its weight transfer engine over NCCL. Not run by our tests: needs a GPU on
    both sides.
    """

    server: VLLMServer
    device: torch.device
    _group: Any = None

    def __post_init__(self) -> None:
        self.name = self.server.name

    async def begin(self) -> None:
        if self._group is None:
            await self._join()
        await self.server.start_weight_update()

    async def _join(self) -> None:
        size = 1 + await self.server.get_world_size()
        # the server is told the port before the other side listens there
        meeting = {"master_address": HOST, "master_port": find_free_port(), "world_size": size}

        async def meet() -> None:
            self._group = await run_on(self.device, lambda: import_vllm_endpoint().trainer_init(meeting))

        options = {"rank_offset": 1, "packed": False}
        await run_all(lambda: self.server.init_weight_transfer(meeting | options), meet)

    async def send(self, bucket: FlatBucket, *, version: int, last: bool) -> None:
        def start() -> Any:
            for _, tensor in bucket.tensors:
                self._group.broadcast(tensor, src=0, stream=torch.cuda.current_stream())
            sent = torch.cuda.Event()
            sent.record()
            return sent

        async def broadcast() -> None:
            await wait_sent((await run_on(self.device, start)).query)

        info = bucket.describe()
        info["dtype_names"] = info.pop("dtypes")
        await run_all(lambda: self.server.update_weights(info), broadcast)

    async def end(self, version: int) -> None:
        await self.server.finish_weight_update(version)

    async def leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            await run_in_thread(group.destroy, abandon_on_cancel=True)


def import_vllm_endpoint() -> Any:
    """The module of vLLM's own trainer side. Raises WeightSyncError without vLLM."""
    try:
        return importlib.import_module(VLLM_ENDPOINT)
    except ImportError as error:
        raise WeightSyncError(
            f"broadcasts to vLLM need vLLM in the trainer's Python as well: {error}; install it or update"
            " from disk"
        ) from error


@asynccontextmanager
async def open_broadcast(
    kind: Literal["sglang", "vllm"] = "sglang",
    *,
    wire: Wire = "gloo",
    bucket_bytes: int = BUCKET_BYTES,
    dtype: torch.dtype | None = None,
    progress_s: float = PROGRESS_S,
) -> AsyncIterator[Broadcast]:
    """A Transport to servers of one kind without a disk in between.

    wire: to SGLang "gloo" over the CPU's network or "nccl" between GPUs; to vLLM always NCCL, its servers
    started with `--weight-transfer-config '{"backend": "nccl"}'` (NCCL is not run by our tests: needs a GPU).
    Groups listen on ports of their own, on the loopback interface. dtype: what
    floating-point weights are sent as; None: as the trainer has them, and the server converts. progress_s:
    what any one step, a bucket included, may take. Groups are kept between updates and torn down at the end.
    Raises WeightSyncError for NCCL without CUDA, and for vLLM without its package.
    """
    nccl = kind == "vllm" or wire == "nccl"
    if nccl and not torch.cuda.is_available():
        raise WeightSyncError(
            "broadcasts over NCCL need a GPU on the trainer's side, and there is none; update from"
            " disk, or SGLang servers over gloo"
        )
    if kind == "vllm":
        import_vllm_endpoint()
    device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")

    def make_peer(engine: InferenceEngine) -> Peer:
        server = getattr(engine, "dialect", None)
        if kind == "sglang" and isinstance(server, SGLangServer):
            return SGLangPeer(server, wire, device, timedelta(seconds=progress_s))
        if kind == "vllm" and isinstance(server, VLLMServer):
            return VLLMPeer(server, device)
        raise WeightSyncError(
            f"engine {engine.features.name} is no {kind} server; give this transport {kind} servers only"
        )

    async with aclosing(
        Broadcast(make_peer, bucket_bytes=bucket_bytes, dtype=dtype, progress_s=progress_s)
    ) as transport:
        yield transport
