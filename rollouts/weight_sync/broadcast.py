"""Weight updates in memory: the trainer is rank 0 of one process group per engine and broadcasts its weights
in flattened buckets.

    backend's device thread                                  trio
                                                             join every engine's group, begin its update
    stream_weights(sink) ─► names of the files ─► flat bucket
        waits, so that one bucket exists at a time ────────► to every engine at once:
                                                               HTTP "take this bucket" and the broadcast
        goes on with those engines that have it ◄─────────── each done, failed or out of time
                                                             end every update; errors by engine name

One group an engine, so that a dead one hangs nobody else. Every step has PROGRESS_S and no longer. A failed
engine's group is torn down and made anew at the next update. Nothing is ever pickled: transports that ship
pickled handles over HTTP (CUDA IPC) are not offered.

The servers' ends: SGLang over gloo or NCCL, vLLM over NCCL.
"""

import importlib
import threading
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import field
from datetime import timedelta
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.distributed
import trio
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from trio.to_thread import run_sync as run_in_thread

from rollouts.engines.processes import HOST, find_free_port
from rollouts.engines.sglang import SGLangServer
from rollouts.engines.vllm import VLLMServer
from rollouts.errors import BackendError, EngineError, EngineSetupError, EngineSilent, WeightSyncError
from rollouts.models.export import Bucket, FileNames, split_buckets
from rollouts.processes.nurseries import open_plain_nursery, run_all
from rollouts.protocols import InferenceEngine, TrainingBackend
from rollouts.ranks.meet import host_store
from rollouts.types import live
from rollouts.weight_sync.snapshots import stream_guarded

BUCKET_BYTES = 256 * 2**20
PROGRESS_S = 120.0
CLEANUP_S = 5.0  # for an engine that failed, to be told
Wire = Literal["gloo", "nccl"]
POLL_S = 0.002
# vLLM's own trainer side: a group of rank 0 out of an address, a port and a size
VLLM_ENDPOINT = "vllm.distributed.weight_transfer.nccl_common"


# --- what is sent at once -----------------------------------------------------------------------------------


class FlatBucket(NamedTuple):
    """Tensors one after the other as bytes."""

    flat: Tensor  # [bytes] uint8, a copy
    tensors: Bucket  # views of it, wider elements first, so that each is aligned

    def describe(self) -> dict[str, list[Any]]:
        """The names, dtypes and shapes of the tensors, as servers are told them."""
        names, tensors = zip(*self.tensors, strict=True)
        return {
            "names": [*names],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors],
            "shapes": [list(tensor.shape) for tensor in tensors],
        }


def flatten_tensors(tensors: Bucket, *, dtype: torch.dtype | None, device: torch.device) -> FlatBucket:
    """A copy of all `tensors`, of which there is one at least. `dtype`: of floating-point ones; None: as they
    are.
    """
    sent = [
        (name, one.detach().to(device, dtype if one.is_floating_point() else None)) for name, one in tensors
    ]
    sent.sort(key=lambda entry: -entry[1].dtype.itemsize)
    flat = torch.cat([one.contiguous().reshape(-1).view(torch.uint8) for _, one in sent])
    parts = zip(flat.split([one.nbytes for _, one in sent]), sent, strict=True)
    return FlatBucket(flat, [(name, part.view(one.dtype).reshape(one.shape)) for part, (name, one) in parts])


# --- engines' ends of the wire ------------------------------------------------------------------------------


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


@live
class SGLangPeer:
    """A Peer of an SGLang server: a torch.distributed group, made without touching the process's default
    group.
    """

    dialect: SGLangServer
    wire: Wire
    device: torch.device
    timeout: timedelta  # of every operation of the group
    _group_name: str = field(default_factory=lambda: f"rollouts-{uuid.uuid4().hex}")
    _group: Any = None
    _has_session: bool = False

    async def begin(self) -> None:
        if not self._group:
            await self._join()
        self._has_session = await self.dialect.begin_transfer()

    async def _join(self) -> None:
        name, info = self._group_name, self.dialect.info
        if info.dp_size != 1:
            raise EngineError(
                f"{self.dialect.server.name} has --dp-size {info.dp_size}; weights in memory reach only"
                " servers with 1, or update from disk"
            )
        size = 1 + info.tp_size * info.pp_size  # the server's processes that hold weights
        store = host_store(HOST, self.timeout, size)
        meeting = {  # where, and the server's first rank
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

        await run_all(lambda: self.dialect.update("/init_weights_update_group", meeting), meet)

    async def send(self, bucket: FlatBucket, *, version: int, last: bool) -> None:
        info = {**bucket.describe(), "group_name": self._group_name}
        options = torch.distributed.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, self.timeout

        async def broadcast() -> None:
            work = await run_on(self.device, lambda: self._group.broadcast([bucket.flat], options))
            await wait_sent(work.is_completed)
            if self.wire == "gloo":
                work.wait()  # raises what went wrong
            elif failure := work.exception():
                raise RuntimeError(f"a broadcast failed: {failure}")

        await run_all(lambda: self.dialect.receive_broadcast(info, version=version, last=last), broadcast)

    async def end(self, version: int) -> None:
        if self._has_session:
            await self.dialect.update("/end_weight_update", {})
            self._has_session = False

    async def leave(self) -> None:
        groups, self._group = [self._group], None
        if groups[0]:  # its last reference is dropped in the thread, where that waits for gloo
            await run_in_thread(lambda: groups.pop().abort(), abandon_on_cancel=True)
        with suppress(EngineError):  # it is gone, or knows nothing of it: both are what was wanted
            await self.end(0)
        with suppress(EngineError):
            await self.dialect.update("/destroy_weights_update_group", {"group_name": self._group_name})


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


@live
class VLLMPeer:
    """A Peer of a vLLM server: its weight transfer engine over NCCL. Not run by our tests: needs a GPU on
    both sides.
    """

    dialect: VLLMServer
    device: torch.device
    _group: Any = None

    async def begin(self) -> None:
        if not self._group:
            await self._join()
        await self.dialect.begin()
        await self.dialect.server.control("/start_weight_update")

    async def _join(self) -> None:
        server, kind = self.dialect.server, self.dialect.transfer_backend
        if kind in (None, "ipc"):  # "ipc" wants pickles over HTTP
            raise EngineSetupError(
                f"{server.name} has the transfer backend {kind}; start it with"
                """ --weight-transfer-config '{"backend": "nccl"}'"""
            )
        size = 1 + await server.read("/get_world_size", int, "world_size")  # its workers are a rank each
        # the server is told the port before the other side listens there
        meeting = {"master_address": HOST, "master_port": find_free_port(), "world_size": size}
        told = {"init_info": meeting | {"rank_offset": 1, "packed": False}}

        async def meet() -> None:
            self._group = await run_on(self.device, lambda: import_vllm_endpoint().trainer_init(meeting))

        await run_all(lambda: server.control("/init_weight_transfer_engine", told), meet)

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
        server = self.dialect.server
        await run_all(lambda: server.control("/update_weights", {"update_info": info}), broadcast)

    async def end(self, version: int) -> None:
        await self.dialect.server.control("/finish_weight_update", {})
        await self.dialect.commit(version)

    async def leave(self) -> None:
        group, self._group = self._group, None
        if group:
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


Peer = SGLangPeer | VLLMPeer
"""One engine's end of the wire. Failures are EngineError (the server's) or RuntimeError (the group's).

begin: both ends are in one process group, kept between updates, and the server expects weights. send returns
when the server has taken and loaded the bucket, and may be cancelled. leave tears the group down on both
ends, and says nothing of failures.
"""

# --- the trainer's end --------------------------------------------------------------------------------------


@live
class Broadcast:
    """A Transport with the groups that it keeps from one update to the next. Made by open_broadcast."""

    make_peer: Callable[[InferenceEngine], Peer]
    device: torch.device  # where buckets must lie to be sent
    bucket_bytes: int
    progress_s: float
    dtype: torch.dtype | None = None
    # by the engine: one that was replaced is another
    _peers: dict[InferenceEngine, Peer] = field(default_factory=dict)

    async def __call__(
        self, backend: TrainingBackend, engines: Sequence[InferenceEngine], version: int
    ) -> Mapping[str, Exception]:
        """By engine name what went wrong, where something did. Engines must be paused, and this is called for
        one update at a time. Raises BackendError or WeightSyncError if the trainer's half fails.
        """
        for engine in engines:
            if engine not in self._peers:
                self._peers[engine] = self.make_peer(engine)
        working = {engine.features.name: self._peers[engine] for engine in engines}
        errors: dict[str, Exception] = {}
        failed = engines

        async def ask_each(doing: str, work: Callable[[Peer], Awaitable[None]]) -> None:
            """Awaits `work` of every engine that is still working; one that fails, or is late, is out."""

            async def ask(name: str, peer: Peer) -> None:
                try:
                    with trio.move_on_after(self.progress_s) as limit:
                        await work(peer)
                    if limit.cancelled_caught:
                        raise EngineSilent(f"{name} was not done with {doing} after {self.progress_s:g} s")
                except (EngineError, RuntimeError) as error:
                    errors[name] = error
                    del working[name]

            async with trio.open_nursery() as nursery:
                for entry in [*working.items()]:
                    nursery.start_soon(ask, *entry)

        try:
            await ask_each("joining its process group", lambda peer: peer.begin())
            if working:
                await self._stream(backend, version, working, ask_each)
            await ask_each("ending the update", lambda peer: peer.end(version))
            failed = [engine for engine in engines if engine.features.name in errors]
        except BackendError:
            raise
        except Exception as error:
            raise WeightSyncError(f"weights of version {version} could not be sent: {error}") from error
        finally:
            await self._forget(failed)
        return errors

    async def _stream(
        self,
        backend: TrainingBackend,
        version: int,
        working: Mapping[str, Peer],
        ask_each: Callable[[str, Callable[[Peer], Awaitable[None]]], Awaitable[None]],
    ) -> None:
        """Sends all weights, each bucket when the next is complete, and the last as the last."""
        held: FlatBucket | None = None  # the newest bucket, which may turn out to be the last
        sent, token = threading.Event(), trio.lowlevel.current_trio_token()

        async def send(bucket: FlatBucket, last: bool) -> None:
            try:
                await ask_each("taking a bucket", lambda peer: peer.send(bucket, version=version, last=last))
            finally:
                sent.set()

        def take(bucket: Bucket) -> None:
            nonlocal held
            for part in split_buckets(names.translate(bucket), self.bucket_bytes):
                if held:
                    sent.clear()
                    trio.from_thread.run_sync(nursery.start_soon, send, held, False, trio_token=token)
                    sent.wait()
                if working:
                    held = flatten_tensors(part, dtype=self.dtype, device=self.device)

        names = await run_in_thread(FileNames, getattr(backend, "model", None))
        async with open_plain_nursery() as nursery:
            await stream_guarded(backend, take)
            await run_in_thread(take, [])  # what no bucket took along
            names.check_complete()
            if held:
                await send(held, last=True)
            elif working:
                raise WeightSyncError("the backend streamed no weights")

    async def _forget(self, engines: Sequence[InferenceEngine]) -> None:
        """Tears down the groups of `engines`, with a deadline of its own."""
        with trio.move_on_after(CLEANUP_S, shield=True):
            await run_all(*(self._peers.pop(engine).leave for engine in engines))

    async def aclose(self) -> None:
        await self._forget([*self._peers])


@asynccontextmanager
async def open_broadcast(
    kind: Literal["sglang", "vllm"] = "sglang",
    *,
    wire: Wire = "gloo",
    bucket_bytes: int = BUCKET_BYTES,
    dtype: torch.dtype | None = None,
) -> AsyncIterator[Broadcast]:
    """A Transport to servers of one kind without a disk in between.

    wire: to SGLang "gloo" over the CPU's network or "nccl" between GPUs; to vLLM always NCCL, its servers
    started with `--weight-transfer-config '{"backend": "nccl"}'` (NCCL is not run by our tests: needs a GPU).
    Groups listen on ports of their own, on the loopback interface. dtype: what floating-point weights are
    sent as; None: as the trainer has them, and the server converts. Any one step, a bucket included, may take
    PROGRESS_S. Groups are kept between updates and torn down at the end. Raises WeightSyncError for NCCL
    without CUDA, and for vLLM without its package.
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
            return SGLangPeer(server, wire, device, timedelta(seconds=PROGRESS_S))
        if kind == "vllm" and isinstance(server, VLLMServer):
            return VLLMPeer(server, device)
        raise WeightSyncError(
            f"engine {engine.features.name} is no {kind} server; give this transport {kind} servers only"
        )

    async with aclosing(Broadcast(make_peer, device, bucket_bytes, PROGRESS_S, dtype)) as transport:
        yield transport
