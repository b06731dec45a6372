"""Weight updates in memory: the trainer is rank 0 of one process group per engine and broadcasts its weights in flattened buckets.

    trio                                                        backend's device thread (the last bucket: a worker thread)
    join every engine's group, begin its update
    backend.stream_weights(sink) ─────────────────────────────► names of the files ─► one flat tensor a bucket
        one HTTP call an engine: "take this bucket" ◄────────── started from there, then the broadcast to every group at once
        answered when it is loaded, or the deadline ──────────► whoever failed is out, the next bucket goes to the others
    end every update; the answer says who failed

One group an engine, so that a dead one hangs nobody else. Every step has `progress_s` and no longer: HTTP calls by trio, broadcasts by the
group's own deadline. A failed engine's group is torn down and made anew at the next update. Nothing is ever pickled: transports that ship
pickled handles over HTTP (CUDA IPC) are not offered.
"""

from __future__ import annotations

import importlib
import math
import socket
import threading
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, NamedTuple, Protocol, cast

import torch
import torch.distributed
import trio
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from rollouts.engines.sglang import SGLangEngine
from rollouts.engines.vllm import VLLMEngine
from rollouts.errors import EngineError, EngineSilent, WeightSyncError
from rollouts.models.export import FileNames
from rollouts.protocols import InferenceEngine, TrainingBackend

Transport = Callable[[TrainingBackend, Sequence[InferenceEngine], int], Awaitable[Mapping[str, Exception | None]]]
"""Brings the backend's weights to engines under a version; by engine name what went wrong, None where nothing did. Engines are paused."""

BUCKET_BYTES = 256 * 2**20
PROGRESS_S = 120.0
POLL_S = 0.002
CLEANUP_S = 5.0  # for an engine that failed, to be told


class Piece(NamedTuple):
    """Where one tensor lies in a flat bucket."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FlatBucket:
    """Tensors one after the other as bytes; those with wider elements first, so that every one is aligned."""

    pieces: tuple[Piece, ...]
    flat: Tensor  # [bytes] uint8, a copy

    @property
    def dtype_names(self) -> list[str]:
        return [str(piece.dtype).removeprefix("torch.") for piece in self.pieces]

    def tensors(self) -> list[tuple[str, Tensor]]:
        """The tensors, as views of the bytes."""
        found: list[tuple[str, Tensor]] = []
        at = 0
        for name, dtype, shape in self.pieces:
            size = math.prod(shape) * dtype.itemsize
            found.append((name, self.flat[at : at + size].view(dtype).reshape(shape)))
            at += size
        return found


def flatten_tensors(tensors: Sequence[tuple[str, Tensor]], *, dtype: torch.dtype | None, device: torch.device) -> FlatBucket:
    """Copies of all `tensors` in one. `dtype`: what floating-point ones are sent as; None: as they are. At least one."""
    assert tensors, "an empty bucket"
    sent = [(name, tensor.detach().to(device=device, dtype=dtype if dtype and tensor.is_floating_point() else None)) for name, tensor in tensors]
    sent.sort(key=lambda entry: -entry[1].dtype.itemsize)
    pieces = tuple(Piece(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in sent)
    return FlatBucket(pieces, torch.cat([tensor.contiguous().reshape(-1).view(torch.uint8) for _, tensor in sent]))


def split_tensors(tensors: Sequence[tuple[str, Tensor]], *, bucket_bytes: int) -> list[list[tuple[str, Tensor]]]:
    """`tensors` in order, in buckets of at most `bucket_bytes`; a larger tensor alone."""
    buckets: list[list[tuple[str, Tensor]]] = []
    size = 0
    for name, tensor in tensors:
        if not buckets or size + tensor.nbytes > bucket_bytes:
            buckets.append([])
            size = 0
        buckets[-1].append((name, tensor))
        size += tensor.nbytes
    return buckets


class Peer(Protocol):
    """One engine's end of the wire. Failures are EngineError (the server's) or RuntimeError (the group's)."""

    @property
    def name(self) -> str: ...
    @property
    def device(self) -> torch.device:
        """Where buckets must lie to be sent."""
        ...

    async def join(self) -> None:
        """Both ends are in one process group; at once if they are already."""
        ...

    async def begin(self) -> None: ...
    async def receive(self, bucket: FlatBucket, *, version: int, last: bool) -> None:
        """Returns when the server has taken and loaded what `start_sending` sends."""
        ...

    def start_sending(self, bucket: FlatBucket) -> Callable[[], None]:
        """Begins the broadcast; the result waits for its end. Runs on a thread that may block, for progress_s at most."""
        ...

    async def end(self, version: int) -> None: ...
    def break_off(self) -> None:
        """Makes a broadcast that is under way fail. Called from trio, never blocks."""
        ...

    async def leave(self) -> None:
        """Tears the group down on both ends; says nothing of failures."""
        ...


# --- one update --------------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Reply:
    """One engine's answer to one bucket."""

    done: trio.Event = field(default_factory=trio.Event)
    good: bool = False


class _Update:
    """One update of several engines. The sink's half runs on the device thread and never raises: that would fail the backend."""

    def __init__(
        self, peers: Sequence[Peer], version: int, names: FileNames, *, bucket_bytes: int, dtype: torch.dtype | None, progress_s: float
    ) -> None:
        self.outcomes: dict[str, Exception | None] = {peer.name: None for peer in peers}
        self._live = list(peers)
        self._version = version
        self._names = names
        self._bucket_bytes = bucket_bytes
        self._dtype = dtype
        self._progress_s = progress_s
        self._token = trio.lowlevel.current_trio_token()
        self._nursery: trio.Nursery | None = None  # None: nobody waits for this update any more
        self._held: FlatBucket | None = None  # the newest bucket; it may turn out to be the last
        self._failure: Exception | None = None  # of ours, which fails all engines

    async def run(self, backend: TrainingBackend) -> None:
        """Raises WeightSyncError if the trainer's half fails; what engines do wrong is in `outcomes`."""
        async with trio.open_nursery() as nursery:
            for peer in list(self._live):
                nursery.start_soon(self._guard, peer, self._open, "joining its process group")
        if not self._live:
            return
        async with trio.open_nursery() as self._nursery, self._breaking_off():
            try:
                await backend.stream_weights(self.take).result()
                await trio.to_thread.run_sync(self._finish)
            finally:
                self._nursery = None
        if self._failure is not None:
            raise WeightSyncError(f"weights of version {self._version} could not be sent: {self._failure}") from self._failure
        async with trio.open_nursery() as nursery:
            for peer in list(self._live):
                nursery.start_soon(self._guard, peer, lambda peer: peer.end(self._version), "ending the update")

    @asynccontextmanager
    async def _breaking_off(self) -> AsyncIterator[None]:
        """When the body is cancelled, broadcasts under way fail at once: the thread that waits for them cannot be left alone."""
        done = False

        async def watch() -> None:
            try:
                await trio.sleep_forever()
            finally:
                for peer in self._live if not done else ():
                    peer.break_off()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            yield
            done = True
            nursery.cancel_scope.cancel()

    async def _open(self, peer: Peer) -> None:
        await peer.join()
        await peer.begin()

    async def _guard(self, peer: Peer, work: Callable[[Peer], Awaitable[None]], doing: str) -> bool:
        """Whether `work` ended well in time; a peer with which it did not is out of this update."""
        try:
            with trio.fail_after(self._progress_s):
                await work(peer)
        except trio.TooSlowError as error:
            silent = EngineSilent(f"{peer.name} was not done with {doing} after {self._progress_s:g} s")
            silent.__cause__ = error
            self._drop(peer, silent)
        except (EngineError, RuntimeError) as error:
            self._drop(peer, error)
        else:
            return True
        return False

    def _drop(self, peer: Peer, error: Exception) -> None:
        if self.outcomes[peer.name] is None:
            self.outcomes[peer.name] = error
        self._live = [other for other in self._live if other is not peer]
        peer.break_off()

    # --- on the device thread, and for the last bucket on a worker thread

    def take(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        """A WeightSink."""
        self._ours(lambda: self._pass_on(self._names.translate(bucket)))

    def _finish(self) -> None:
        """Sends what is left, the last bucket marked as such."""

        def work() -> None:
            self._pass_on(self._names.rest())
            if self._held is None:
                raise WeightSyncError("the backend streamed no weights")
            self._ship(self._held, last=True)

        self._ours(work)
        self._held = None

    def _ours(self, work: Callable[[], None]) -> None:
        if self._failure is not None or self._nursery is None or not self._live:
            return
        try:
            work()
        except Exception as error:  # raised again where the update is awaited
            self._failure = error

    def _pass_on(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        for part in split_tensors([(name, torch.as_tensor(tensor)) for name, tensor in tensors], bucket_bytes=self._bucket_bytes):
            if self._held is not None:
                self._ship(self._held, last=False)
            if not self._live:
                return
            self._held = flatten_tensors(part, dtype=self._dtype, device=self._live[0].device)

    def _ship(self, bucket: FlatBucket, *, last: bool) -> None:
        replies = trio.from_thread.run_sync(self._ask, bucket, last, trio_token=self._token)
        waits: list[tuple[Peer, Callable[[], None]]] = []
        for peer in list(replies):
            self._blocking(peer, lambda peer=peer: waits.append((peer, peer.start_sending(bucket))))
        for peer, wait in waits:
            self._blocking(peer, wait)
        trio.from_thread.run(self._wait_replies, replies, trio_token=self._token)

    def _blocking(self, peer: Peer, work: Callable[[], object]) -> None:
        try:
            work()
        except (EngineError, RuntimeError) as error:
            trio.from_thread.run_sync(self._drop, peer, error, trio_token=self._token)

    # --- in trio, called from there

    def _ask(self, bucket: FlatBucket, last: bool) -> dict[Peer, _Reply]:
        """Tells every engine that is still with us to take `bucket`."""
        nursery, replies = self._nursery, {peer: _Reply() for peer in self._live}
        if nursery is None:
            return {}
        for peer, reply in replies.items():
            nursery.start_soon(self._tell, peer, bucket, last, reply)
        return replies

    async def _tell(self, peer: Peer, bucket: FlatBucket, last: bool, reply: _Reply) -> None:
        try:
            reply.good = await self._guard(peer, lambda peer: peer.receive(bucket, version=self._version, last=last), "taking a bucket")
        finally:
            reply.done.set()

    async def _wait_replies(self, replies: Mapping[Peer, _Reply]) -> None:
        for reply in replies.values():  # each has its deadline
            await reply.done.wait()


class Broadcast:
    """A Transport with the groups that it keeps from one update to the next. Made by open_sglang_broadcast and open_vllm_broadcast."""

    def __init__(self, make_peer: Callable[[InferenceEngine], Peer], *, bucket_bytes: int, dtype: torch.dtype | None, progress_s: float) -> None:
        self._make_peer = make_peer
        self._bucket_bytes = bucket_bytes
        self._dtype = dtype
        self._progress_s = progress_s
        self._peers: dict[int, tuple[InferenceEngine, Peer]] = {}  # by identity: an engine that was replaced is another
        self._lock = trio.Lock()

    async def __call__(self, backend: TrainingBackend, engines: Sequence[InferenceEngine], version: int) -> Mapping[str, Exception | None]:
        """By engine name what went wrong, None where nothing did. Engines must be paused. Raises WeightSyncError if the trainer's half fails."""
        async with self._lock:
            peers = [self._find_peer(engine) for engine in engines]
            if not peers:
                return {}
            names = FileNames(getattr(backend, "model", None))
            update = _Update(peers, version, names, bucket_bytes=self._bucket_bytes, dtype=self._dtype, progress_s=self._progress_s)
            finished = False
            try:
                await update.run(backend)
                finished = True
            finally:
                failed = [engine for engine in engines if not finished or update.outcomes[engine.features.name] is not None]
                await self._forget(failed)
            return update.outcomes

    def _find_peer(self, engine: InferenceEngine) -> Peer:
        if id(engine) not in self._peers:
            self._peers[id(engine)] = (engine, self._make_peer(engine))
        return self._peers[id(engine)][1]

    async def _forget(self, engines: Sequence[InferenceEngine]) -> None:
        """Tears down the groups of `engines`, with a deadline of its own."""
        peers = [entry[1] for engine in engines if (entry := self._peers.pop(id(engine), None)) is not None]
        for peer in peers:
            peer.break_off()
        with trio.move_on_after(CLEANUP_S, shield=True):
            async with trio.open_nursery() as nursery:
                for peer in peers:
                    nursery.start_soon(peer.leave)

    async def aclose(self) -> None:
        await self._forget([engine for engine, _ in self._peers.values()])


# --- SGLang ------------------------------------------------------------------------------------------------------------------


class SGLangPeer:
    """An SGLang server's end: a torch.distributed group over gloo or NCCL, made without touching the process's default group."""

    def __init__(self, engine: SGLangEngine, *, backend: Literal["gloo", "nccl"], address: str, device: torch.device, progress_s: float) -> None:
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
        return self._engine.features.name

    @property
    def device(self) -> torch.device:
        return self._device

    async def join(self) -> None:
        if self._group is not None:
            return
        if self._engine.data_parallel != 1:
            raise EngineError(
                f"{self.name} has --dp-size {self._engine.data_parallel}; weights in memory reach only servers with 1, or update from disk"
            )
        timeout = timedelta(seconds=self._progress_s)
        size = 1 + self._engine.world_size
        store = listen_for_group(self._address, size, timeout)

        async def ask() -> None:
            await self._engine.join_group(address=self._address, port=store.port, group_name=self._group_name, backend=self._backend)

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
        await self._engine.receive_broadcast(names, bucket.dtype_names, shapes, group_name=self._group_name, version=version, last=last)

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
        for call in (self._engine.end_transfer if self._has_session else None, lambda: self._engine.leave_group(self._group_name)):
            try:
                await call() if call is not None else None
            except EngineError:
                continue  # it is gone, or knows nothing of it: both are what was wanted
        self._has_session = False


def listen_for_group(address: str, size: int, timeout: timedelta) -> Any:
    """A TCPStore on a port of its own, on `address` alone: by itself it would listen on all interfaces, and it asks nobody for a key."""
    family, kind, protocol, _, where = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as listener:
        listener.bind(where)
        listener.listen()
        port = listener.getsockname()[1]
        make = cast(Any, torch.distributed).TCPStore
        return make(address, port, size, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener.detach())


def make_gloo_group(store: Store, name: str, size: int, timeout: timedelta, *, address: str) -> Any:
    """Rank 0 of a group that torch's own helper makes on the other side, which names it so in the store; listens on `address` alone.
    Blocks until all are there.
    """
    found = PrefixStore("cpu/", PrefixStore(f"{name}/", PrefixStore(name, store)))
    kind = cast(Any, torch.distributed).ProcessGroupGloo
    options = kind._Options()
    options._timeout = timeout
    options._devices = [kind.create_device(hostname=address)]
    return kind(found, 0, size, options)


def make_nccl_group(store: Store, name: str, size: int, timeout: timedelta) -> Any:
    """As make_gloo_group; NCCL connects at the first broadcast. Raises WeightSyncError without CUDA. Not run by our tests: needs a GPU."""
    if not torch.cuda.is_available():
        raise WeightSyncError('broadcasts over NCCL need a GPU on the trainer\'s side, and there is none; use backend "gloo" or update from disk')
    found = PrefixStore("cuda/", PrefixStore(f"{name}/", PrefixStore(name, store)))
    kind = cast(Any, torch.distributed).ProcessGroupNCCL
    options = kind.Options()
    options._timeout = timeout
    return kind(found, 0, size, options)


def device_context(device: torch.device) -> torch.device | torch.cuda.device:
    """Makes `device` current on this thread, which may not be the one that owns it."""
    return torch.cuda.device(device) if device.type == "cuda" else device


class Signal:
    """Wakes the thread that waits for a broadcast, whether it has ended or was broken off."""

    def __init__(self) -> None:
        self.broken = False
        self._woken = threading.Event()

    def set(self) -> None:
        """Broken off, for good."""
        self.broken = True
        self._woken.set()

    def wake(self) -> None:
        self._woken.set()

    def wait(self, timeout_s: float) -> None:
        """Returns when woken, or after `timeout_s`. Raises RuntimeError if broken off."""
        self._woken.wait(timeout_s)
        if self.broken:
            raise RuntimeError("the broadcast was broken off")
        self._woken.clear()


def wait_work(work: Any, signal: Signal, timeout_s: float) -> None:
    """Returns when a broadcast over gloo has ended. Raises RuntimeError if it failed, was broken off, or takes longer than `timeout_s`.

    Its memory stays with it until its group's own deadline: a broadcast that was left alone does no harm.
    """
    future = work.get_future()
    future.add_done_callback(lambda _: signal.wake())
    signal.wait(timeout_s)
    if not future.done():
        raise RuntimeError(f"a broadcast did not end within {timeout_s:g} s")
    future.wait()  # raises what went wrong


def record_stream() -> Any:
    """An event after everything that was put on the current CUDA stream."""
    event = torch.cuda.Event()
    event.record()
    return event


def wait_stream(signal: Signal, event: Any, timeout_s: float) -> None:
    """As wait_work, for what `event` comes after. CUDA has no wait with a deadline, and a broadcast to a server that died never ends."""
    deadline = time.monotonic() + timeout_s
    while not event.query():
        signal.wait(POLL_S)
        if time.monotonic() > deadline:
            raise RuntimeError(f"a broadcast did not end within {timeout_s:g} s")


async def run_both(one: Callable[[], Awaitable[None]], other: Callable[[], Awaitable[None]]) -> None:
    """Both at once; the first that fails cancels the other, and its error is raised as it is."""
    errors: list[Exception] = []
    async with trio.open_nursery() as nursery:

        async def guard(work: Callable[[], Awaitable[None]]) -> None:
            try:
                await work()
            except Exception as error:
                errors.append(error)
                nursery.cancel_scope.cancel()

        nursery.start_soon(guard, one)
        nursery.start_soon(guard, other)
    if errors:
        raise errors[0]


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

    backend: "gloo" over the CPU's network, "nccl" between GPUs (not run by our tests: needs a GPU). address: of this machine, as servers
    reach it; groups listen there on ports of their own. dtype: what floating-point weights are sent as; None: as the trainer has them, and
    the server converts. progress_s: what any one step, a bucket included, may take. Groups are kept between updates and torn down at the end.
    Raises WeightSyncError for "nccl" without CUDA.
    """
    if backend == "nccl" and not torch.cuda.is_available():
        raise WeightSyncError('broadcasts over NCCL need a GPU on the trainer\'s side, and there is none; use backend "gloo" or update from disk')
    device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")

    def make_peer(engine: InferenceEngine) -> Peer:
        if not isinstance(engine, SGLangEngine):
            raise WeightSyncError(f"engine {engine.features.name} is no SGLang server; give this transport SGLang engines only")
        return SGLangPeer(engine, backend=backend, address=address, device=device, progress_s=progress_s)

    transport = Broadcast(make_peer, bucket_bytes=bucket_bytes, dtype=dtype, progress_s=progress_s)
    try:
        yield transport
    finally:
        await transport.aclose()


# --- vLLM --------------------------------------------------------------------------------------------------------------------


class VLLMPeer:
    """A vLLM server's end: its weight transfer engine over NCCL. Not run by our tests: needs a GPU on both sides."""

    def __init__(self, engine: VLLMEngine, *, address: str, device: torch.device, progress_s: float) -> None:
        self._engine = engine
        self._address = address
        self._device = device
        self._progress_s = progress_s
        self._group: Any = None
        self._broken = Signal()

    @property
    def name(self) -> str:
        return self._engine.features.name

    @property
    def device(self) -> torch.device:
        return self._device

    async def join(self) -> None:
        if self._group is not None:
            return
        with socket.socket() as listener:  # the server is told the port before the other side listens there
            listener.bind((self._address, 0))
            port = listener.getsockname()[1]
        meeting = {"master_address": self._address, "master_port": port, "world_size": 1 + await self._engine.get_world_size()}

        def connect() -> Any:
            with device_context(self._device):
                return import_vllm_endpoint()(meeting)

        async def ask() -> None:
            await self._engine.init_weight_transfer(meeting | {"rank_offset": 1, "packed": False})

        async def meet() -> None:
            self._group = await trio.to_thread.run_sync(connect, abandon_on_cancel=True)

        await run_both(ask, meet)

    async def begin(self) -> None:
        await self._engine.start_weight_update()

    async def receive(self, bucket: FlatBucket, *, version: int, last: bool) -> None:
        names, shapes = [piece.name for piece in bucket.pieces], [list(piece.shape) for piece in bucket.pieces]
        await self._engine.update_weights({"names": names, "dtype_names": bucket.dtype_names, "shapes": shapes})

    def start_sending(self, bucket: FlatBucket) -> Callable[[], None]:
        group = self._group
        if group is None:
            raise EngineError(f"{self.name} is in no process group")
        with device_context(self._device):
            for _, tensor in bucket.tensors():
                group.broadcast(tensor, src=0, stream=torch.cuda.current_stream())
            sent = record_stream()
        return lambda: wait_stream(self._broken, sent, self._progress_s)

    async def end(self, version: int) -> None:
        await self._engine.finish_weight_update(version)

    def break_off(self) -> None:
        self._broken.set()

    async def leave(self) -> None:
        self.break_off()
        group, self._group = self._group, None
        if group is not None:
            await trio.to_thread.run_sync(group.destroy, abandon_on_cancel=True)


def import_vllm_endpoint() -> Callable[[Mapping[str, Any]], Any]:
    """vLLM's own trainer side of a transfer: a group of rank 0 out of an address, a port and a size. Raises WeightSyncError without vLLM."""
    try:
        module = importlib.import_module("vllm.distributed.weight_transfer.nccl_common")
    except ImportError as error:
        raise WeightSyncError(f"broadcasts to vLLM need vLLM in the trainer's Python as well: {error}; install it or update from disk") from error
    return module.trainer_init


@asynccontextmanager
async def open_vllm_broadcast(
    *, address: str = "127.0.0.1", bucket_bytes: int = BUCKET_BYTES, dtype: torch.dtype | None = None, progress_s: float = PROGRESS_S
) -> AsyncIterator[Broadcast]:
    """A Transport to vLLM servers over NCCL, without a disk in between; see open_sglang_broadcast. Servers are started with
    `--weight-transfer-config '{"backend": "nccl"}'`. Not run by our tests: needs a GPU on both sides, and vLLM in the trainer's Python.

    Raises WeightSyncError without CUDA or without vLLM.
    """
    if not torch.cuda.is_available():
        raise WeightSyncError("broadcasts to vLLM run over NCCL and need a GPU on the trainer's side, and there is none; update from disk")
    import_vllm_endpoint()
    device = torch.device("cuda", torch.cuda.current_device())

    def make_peer(engine: InferenceEngine) -> Peer:
        if not isinstance(engine, VLLMEngine):
            raise WeightSyncError(f"engine {engine.features.name} is no vLLM server; give this transport vLLM engines only")
        return VLLMPeer(engine, address=address, device=device, progress_s=progress_s)

    transport = Broadcast(make_peer, bucket_bytes=bucket_bytes, dtype=dtype, progress_s=progress_s)
    try:
        yield transport
    finally:
        await transport.aclose()
