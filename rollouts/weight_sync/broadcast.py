"""Weight updates in memory: the trainer is rank 0 of one process group per engine and broadcasts its weights
in flattened buckets.

    trio                                                    backend's device thread (last bucket: a worker)
    join every engine's group, begin its update
    backend.stream_weights(sink) ─────────────────────────► names of the files ─► one flat tensor a bucket
        one HTTP call an engine: "take this bucket" ◄────── starts it, then broadcasts to every group at once
        answered when it is loaded, or the deadline ──────► a failed engine is out of the next buckets
    end every update; the answer says which engines failed

One group an engine, so that a dead one hangs nobody else. Every step has `progress_s` and no longer: HTTP
calls by trio, broadcasts by the group's own deadline. A failed engine's group is torn down and made anew at
the next update. Nothing is ever pickled: transports that ship pickled handles over HTTP (CUDA IPC) are not
offered.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
import trio
from torch import Tensor

from rollouts.errors import EngineError, EngineSilent, WeightSyncError
from rollouts.models.export import FileNames
from rollouts.protocols import InferenceEngine, TrainingBackend
from rollouts.weight_sync.flat_buckets import FlatBucket, flatten_tensors, split_tensors

BUCKET_BYTES = 256 * 2**20
PROGRESS_S = 120.0
CLEANUP_S = 5.0  # for an engine that failed, to be told


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
        """Begins the broadcast; the result waits for its end. Runs on a thread that may block, for progress_s
        at most.
        """
        ...

    async def end(self, version: int) -> None: ...
    def break_off(self) -> None:
        """Makes a broadcast that is under way fail. Called from trio, never blocks."""
        ...

    async def leave(self) -> None:
        """Tears the group down on both ends; says nothing of failures."""
        ...


# --- one update ---------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Reply:
    """One engine's answer to one bucket."""

    done: trio.Event = field(default_factory=trio.Event)
    good: bool = False


class _Update:
    """One update of several engines. The sink's half runs on the device thread and never raises: that would
    fail the backend.
    """

    def __init__(
        self,
        peers: Sequence[Peer],
        version: int,
        names: FileNames,
        *,
        bucket_bytes: int,
        dtype: torch.dtype | None,
        progress_s: float,
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
            raise WeightSyncError(
                f"weights of version {self._version} could not be sent: {self._failure}"
            ) from self._failure
        async with trio.open_nursery() as nursery:
            for peer in list(self._live):
                nursery.start_soon(
                    self._guard, peer, lambda peer: peer.end(self._version), "ending the update"
                )

    @asynccontextmanager
    async def _breaking_off(self) -> AsyncIterator[None]:
        """When the body is cancelled, broadcasts under way fail at once: the thread that waits for them
        cannot be left alone.
        """
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
        for part in split_tensors(
            [(name, torch.as_tensor(tensor)) for name, tensor in tensors], bucket_bytes=self._bucket_bytes
        ):
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
            reply.good = await self._guard(
                peer, lambda peer: peer.receive(bucket, version=self._version, last=last), "taking a bucket"
            )
        finally:
            reply.done.set()

    async def _wait_replies(self, replies: Mapping[Peer, _Reply]) -> None:
        for reply in replies.values():  # each has its deadline
            await reply.done.wait()


class Broadcast:
    """A Transport with the groups that it keeps from one update to the next. Made by open_sglang_broadcast
    and open_vllm_broadcast.
    """

    def __init__(
        self,
        make_peer: Callable[[InferenceEngine], Peer],
        *,
        bucket_bytes: int,
        dtype: torch.dtype | None,
        progress_s: float,
    ) -> None:
        self._make_peer = make_peer
        self._bucket_bytes = bucket_bytes
        self._dtype = dtype
        self._progress_s = progress_s
        self._peers: dict[
            int, tuple[InferenceEngine, Peer]
        ] = {}  # by identity: an engine that was replaced is another
        self._lock = trio.Lock()

    async def __call__(
        self, backend: TrainingBackend, engines: Sequence[InferenceEngine], version: int
    ) -> Mapping[str, Exception | None]:
        """By engine name what went wrong, None where nothing did. Engines must be paused. Raises
        WeightSyncError if the trainer's half fails.
        """
        async with self._lock:
            peers = [self._find_peer(engine) for engine in engines]
            if not peers:
                return {}
            names = FileNames(getattr(backend, "model", None))
            update = _Update(
                peers,
                version,
                names,
                bucket_bytes=self._bucket_bytes,
                dtype=self._dtype,
                progress_s=self._progress_s,
            )
            finished = False
            try:
                await update.run(backend)
                finished = True
            finally:
                failed = [
                    engine
                    for engine in engines
                    if not finished or update.outcomes[engine.features.name] is not None
                ]
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
