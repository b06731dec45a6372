"""Weight updates in memory: the trainer is rank 0 of one process group per engine and broadcasts its weights
in flattened buckets.

    backend's device thread                                  trio
                                                             join every engine's group, begin its update
    stream_weights(sink) ─► names of the files ─► flat bucket
        waits, so that one bucket exists at a time ────────► to every engine at once:
                                                               HTTP "take this bucket" and the broadcast
        goes on with those engines that have it ◄─────────── each done, failed or out of time
                                                             end every update; errors by engine name

One group an engine, so that a dead one hangs nobody else. Every step has `progress_s` and no longer. A failed
engine's group is torn down and made anew at the next update. Nothing is ever pickled: transports that ship
pickled handles over HTTP (CUDA IPC) are not offered.
"""

import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Protocol

import torch
import trio

from rollouts.errors import EngineError, EngineSilent, WeightSyncError
from rollouts.models.export import Bucket, FileNames
from rollouts.protocols import InferenceEngine, TrainingBackend
from rollouts.weight_sync.flat_buckets import FlatBucket, flatten_tensors, split_buckets

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

    async def begin(self) -> None:
        """Both ends are in one process group, kept between updates, and the server expects weights."""
        ...

    async def send(self, bucket: FlatBucket, *, version: int, last: bool) -> None:
        """Returns when the server has taken and loaded the bucket. May be cancelled."""
        ...

    async def end(self, version: int) -> None: ...
    async def leave(self) -> None:
        """Tears the group down on both ends; says nothing of failures."""
        ...


@dataclass(slots=True, eq=False)
class _Update:
    """One update of several engines. The sink runs on the device thread and never raises: that would fail the
    backend.
    """

    live: list[Peer]
    version: int
    names: FileNames
    settings: "Broadcast"
    errors: dict[str, Exception] = field(default_factory=dict)  # of engines that are out, by name
    token: trio.lowlevel.TrioToken = field(default_factory=trio.lowlevel.current_trio_token)
    nursery: trio.Nursery | None = None  # None: nobody waits for this update any more
    held: FlatBucket | None = None  # the newest bucket, which may turn out to be the last
    failure: Exception | None = None  # of the trainer's half, which fails all engines

    async def run(self, backend: TrainingBackend) -> None:
        """Raises WeightSyncError if the trainer's half fails; what engines do wrong is in `errors`."""
        await self._ask_each("joining its process group", lambda peer: peer.begin())
        if not self.live:
            return
        async with trio.open_nursery() as self.nursery:
            try:
                await backend.stream_weights(self.take)
                await trio.to_thread.run_sync(self.take, [])  # what no bucket took along
                self._guarded(self.names.check_complete)
                if self.held is not None:
                    await self._send(self.held, last=True)
            finally:
                self.nursery = None
        if self.held is None and self.live and self.failure is None:
            self.failure = WeightSyncError("the backend streamed no weights")
        if self.failure is not None:
            raise WeightSyncError(
                f"weights of version {self.version} could not be sent: {self.failure}"
            ) from self.failure
        await self._ask_each("ending the update", lambda peer: peer.end(self.version))

    def take(self, bucket: Bucket) -> None:
        """A WeightSink."""
        self._guarded(lambda: self._pass_on(self.names.translate(bucket)))

    def _guarded(self, work: Callable[[], None]) -> None:
        if self.failure is not None or self.nursery is None or not self.live:
            return
        try:
            work()
        except Exception as error:  # raised where the update is awaited
            self.failure = error

    def _pass_on(self, tensors: Bucket) -> None:
        """Flattens the tensors and sends all buckets but the newest. In a thread."""
        plain = [(name, torch.as_tensor(tensor)) for name, tensor in tensors]
        for part in split_buckets(plain, self.settings.bucket_bytes):
            if self.held is not None:
                sent = threading.Event()
                trio.from_thread.run_sync(self._start_sending, self.held, sent, trio_token=self.token)
                sent.wait()
            if not self.live:
                return
            self.held = flatten_tensors(part, dtype=self.settings.dtype, device=self.live[0].device)

    def _start_sending(self, bucket: FlatBucket, sent: threading.Event) -> None:
        async def send() -> None:
            try:
                await self._send(bucket, last=False)
            finally:
                sent.set()

        if self.nursery is None:
            sent.set()
        else:
            self.nursery.start_soon(send)

    async def _send(self, bucket: FlatBucket, *, last: bool) -> None:
        await self._ask_each(
            "taking a bucket", lambda peer: peer.send(bucket, version=self.version, last=last)
        )

    async def _ask_each(self, doing: str, work: Callable[[Peer], Awaitable[None]]) -> None:
        """Awaits `work` of every engine that is still in the update; one that fails, or is late, is out."""

        async def ask(peer: Peer) -> None:
            limit_s = self.settings.progress_s
            try:
                with trio.fail_after(limit_s):
                    await work(peer)
            except trio.TooSlowError as late:
                silent = EngineSilent(f"{peer.name} was not done with {doing} after {limit_s:g} s")
                silent.__cause__ = late
                self.errors[peer.name] = silent
            except (EngineError, RuntimeError) as error:
                self.errors[peer.name] = error

        async with trio.open_nursery() as nursery:
            for peer in self.live:
                nursery.start_soon(ask, peer)
        self.live = [peer for peer in self.live if peer.name not in self.errors]


@dataclass(eq=False)
class Broadcast:
    """A Transport with the groups that it keeps from one update to the next. Made by open_broadcast."""

    make_peer: Callable[[InferenceEngine], Peer]
    _: KW_ONLY
    bucket_bytes: int
    dtype: torch.dtype | None = None
    progress_s: float
    # by the engine: one that was replaced is another
    _peers: dict[InferenceEngine, Peer] = field(default_factory=dict)

    async def __call__(
        self, backend: TrainingBackend, engines: Sequence[InferenceEngine], version: int
    ) -> Mapping[str, Exception]:
        """By engine name what went wrong, where something did. Engines must be paused, and this is called for
        one update at a time. Raises WeightSyncError if the trainer's half fails.
        """
        for engine in engines:
            if engine not in self._peers:
                self._peers[engine] = self.make_peer(engine)
        update = _Update(
            [self._peers[engine] for engine in engines],
            version,
            await trio.to_thread.run_sync(FileNames, getattr(backend, "model", None)),
            self,
        )
        failed = engines
        try:
            await update.run(backend)
            failed = [one for one in engines if one.features.name in update.errors]
        finally:
            await self._forget(failed)
        return update.errors

    async def _forget(self, engines: Sequence[InferenceEngine]) -> None:
        """Tears down the groups of `engines`, with a deadline of its own."""
        with trio.move_on_after(CLEANUP_S, shield=True):
            async with trio.open_nursery() as nursery:
                for engine in engines:
                    nursery.start_soon(self._peers.pop(engine).leave)

    async def aclose(self) -> None:
        await self._forget([*self._peers])
