"""A running server as an InferenceEngine. What vLLM and SGLang do differently is in a Dialect; what is the
same is here.

    generate   check, gate, in-flight table (EngineServer) ──► dialect.ask ──► Completion
    pause      gate closed, everyone answered (abort, wait) or left in flight (keep), then the server frozen
    update     the snapshot checked against the server's model, then dialect.load_weights; pause first
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import trio

from rollouts.engines.server import EngineServer
from rollouts.engines.snapshot import check_same_model, read_tensor_shapes
from rollouts.errors import EngineError, SnapshotError
from rollouts.protocols import PauseMode
from rollouts.types import Completion, EngineFeatures, EngineLoad, GenerateRequest

if TYPE_CHECKING:
    import torch


class Dialect(Protocol):
    """What one kind of server is asked, and how. Everything raises EngineError."""

    name: str
    health_path: str
    shapes: Mapping[str, tuple[int, ...]] | None  # of the server's model; None: they cannot be read from here

    async def ask(self, request: GenerateRequest, server_id: str) -> Completion: ...
    async def abort(self, server_ids: list[str]) -> None: ...
    async def freeze(self, mode: PauseMode) -> None:
        """The server generates nothing until thaw()."""
        ...

    async def thaw(self) -> None: ...
    async def read_version(self) -> int: ...
    async def checksum(self) -> str | None: ...
    async def load(self) -> EngineLoad: ...
    async def load_weights(self, path: Path, version: int) -> None:
        """The snapshot in `path` is loaded and bears `version`."""
        ...

    async def release_memory(self, *, paused: bool, in_flight: bool) -> None: ...
    async def restore_memory(self, *, paused: bool) -> None: ...


class ServerEngine:
    """One server. Made by open_vllm_engine and open_sglang_engine."""

    def __init__(self, server: EngineServer, features: EngineFeatures, dialect: Dialect) -> None:
        self.features = features
        self.dialect = dialect
        self.server = server
        self._updates = 0

    async def generate(self, request: GenerateRequest) -> Completion:
        """One completion. Cancelling the caller frees its row. Raises RequestRefused, EngineClosed,
        InfrastructureError.
        """
        return await self.server.run(request, self.features, self.dialect.ask)

    # --- flow

    async def pause(self, mode: PauseMode) -> None:
        """Closes the gate here, then stops the server. Returns when nothing is generated any more. If it
        fails, the gate is as it was.
        """
        server = self.server
        server.check_open()
        with server.pausing():
            if mode == "wait":  # a server's own "wait" keeps what it has queued
                frozen = server.paused
                server.close_gate(frozen=False)
                if frozen:
                    await self.dialect.thaw()  # what an earlier pause froze has to finish
                await server.wait_answered(server.sent())
            else:
                server.close_gate()
                if mode == "abort":
                    await server.abort(self.dialect.abort)
            await self.dialect.freeze(mode)
            server.close_gate()

    async def resume(self) -> None:
        """Requests in flight go on and waiting ones are sent, also if it fails: see EngineServer.resuming."""
        with self.server.resuming():
            await self.dialect.thaw()

    async def abort_all(self) -> None:
        self.server.check_open()
        await self.server.abort(self.dialect.abort)

    # --- weights

    async def weight_version(self) -> int:
        """The version whose weights it serves; −1 while it serves weights that were never named."""
        return await self.dialect.read_version()

    async def checksum(self) -> str | None:
        """A fingerprint of all weights, in the server's own names and shapes."""
        return await self.dialect.checksum()

    async def update_weights_from_checkpoint(self, path: Path, version: int) -> Mapping[str, Any]:
        """Loads a directory of safetensors, which the server must see under the same path, as `version`.
        Pause first, in any mode; requests frozen by pause("keep") go on with the new weights.

        Raises EngineError, with nothing sent, for a directory that is damaged or of another model (loading a
        cut file, a server would end), and if the server fails; WeightVersionError if the server names another
        version afterwards; EngineSetupError for a server that came back with settings that would falsify
        training.
        """
        path = path.absolute()
        try:
            shapes = await trio.to_thread.run_sync(read_tensor_shapes, path)
            if self.dialect.shapes is not None:
                check_same_model(shapes, self.dialect.shapes, path=path)
        except SnapshotError as error:
            raise EngineError(f"{self.features.name} was sent nothing: {error}") from error
        await self.dialect.load_weights(path, version)
        self._updates += 1
        return {"version": version, "tensors": len(shapes)}

    async def begin_update(self) -> NoReturn:
        self._refuse_buckets()

    def receive_bucket(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> NoReturn:
        self._refuse_buckets()

    async def finish_update(self, version: int) -> NoReturn:
        self._refuse_buckets()

    def _refuse_buckets(self) -> NoReturn:
        raise EngineError(
            f"{self.features.name} takes no buckets from this process; update it from a checkpoint, or by"
            " weight_sync.broadcast"
        )

    # --- the rest

    async def health(self) -> bool:
        return await self.server.health(self.dialect.health_path)

    async def load(self) -> EngineLoad:
        return await self.dialect.load()

    async def release_memory(self) -> None:
        """Gives memory back. Pause first. Raises EngineError where the server cannot."""
        await self.dialect.release_memory(paused=self.server.paused, in_flight=bool(self.server.sent()))

    async def restore_memory(self) -> None:
        """Weights and an empty cache are there again; the engine is as paused as it was."""
        await self.dialect.restore_memory(paused=self.server.paused)

    def statistics(self) -> Mapping[str, float]:
        return self.server.statistics() | {"updates": float(self._updates)}


def find_shapes(model: Path) -> dict[str, tuple[int, ...]] | None:
    """Shapes of the model that a server was started with; None if it lies on another machine or in another
    format.
    """
    try:
        return read_tensor_shapes(model)
    except SnapshotError:
        return None
