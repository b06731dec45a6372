"""Broadcasts of weights to vLLM servers, over NCCL. See rollouts.weight_sync.broadcast."""

from __future__ import annotations

import importlib
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import torch
import trio

from rollouts.engines.vllm import VLLMServer
from rollouts.errors import EngineError, WeightSyncError
from rollouts.protocols import InferenceEngine
from rollouts.weight_sync.broadcast import BUCKET_BYTES, PROGRESS_S, Broadcast, Peer
from rollouts.weight_sync.broadcast_waits import Signal, device_context, record_stream, run_both, wait_stream
from rollouts.weight_sync.flat_buckets import FlatBucket


class VLLMPeer:
    """A vLLM server's end: its weight transfer engine over NCCL. Not run by our tests: needs a GPU on both
    sides.
    """

    def __init__(self, engine: VLLMServer, *, address: str, device: torch.device, progress_s: float) -> None:
        self._engine = engine
        self._address = address
        self._device = device
        self._progress_s = progress_s
        self._group: Any = None
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
        with socket.socket() as listener:  # the server is told the port before the other side listens there
            listener.bind((self._address, 0))
            port = listener.getsockname()[1]
        meeting = {
            "master_address": self._address,
            "master_port": port,
            "world_size": 1 + await self._engine.get_world_size(),
        }

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
        names, shapes = (
            [piece.name for piece in bucket.pieces],
            [list(piece.shape) for piece in bucket.pieces],
        )
        await self._engine.update_weights(
            {"names": names, "dtype_names": bucket.dtype_names, "shapes": shapes}
        )

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
    """vLLM's own trainer side of a transfer: a group of rank 0 out of an address, a port and a size. Raises
    WeightSyncError without vLLM.
    """
    try:
        module = importlib.import_module("vllm.distributed.weight_transfer.nccl_common")
    except ImportError as error:
        raise WeightSyncError(
            f"broadcasts to vLLM need vLLM in the trainer's Python as well: {error}; install it or update"
            " from disk"
        ) from error
    return module.trainer_init


@asynccontextmanager
async def open_vllm_broadcast(
    *,
    address: str = "127.0.0.1",
    bucket_bytes: int = BUCKET_BYTES,
    dtype: torch.dtype | None = None,
    progress_s: float = PROGRESS_S,
) -> AsyncIterator[Broadcast]:
    """A Transport to vLLM servers over NCCL, without a disk in between; see open_sglang_broadcast. Servers
    are started with `--weight-transfer-config '{"backend": "nccl"}'`. Not run by our tests: needs a GPU on
    both sides, and vLLM in the trainer's Python.

    Raises WeightSyncError without CUDA or without vLLM.
    """
    if not torch.cuda.is_available():
        raise WeightSyncError(
            "broadcasts to vLLM run over NCCL and need a GPU on the trainer's side, and there is none; update"
            " from disk"
        )
    import_vllm_endpoint()
    device = torch.device("cuda", torch.cuda.current_device())

    def make_peer(engine: InferenceEngine) -> Peer:
        server = getattr(engine, "dialect", None)
        if not isinstance(server, VLLMServer):
            raise WeightSyncError(
                f"engine {engine.features.name} is no vLLM server; give this transport vLLM engines only"
            )
        return VLLMPeer(server, address=address, device=device, progress_s=progress_s)

    transport = Broadcast(make_peer, bucket_bytes=bucket_bytes, dtype=dtype, progress_s=progress_s)
    try:
        yield transport
    finally:
        await transport.aclose()
