"""What the stub engines of benchmarks.driver_stubs and benchmarks.rollout_tail have in common: all but
generating, being cut off, and the load.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import trio

from rollouts.protocols import PauseMode
from rollouts.types import EngineFeatures


class IdleEngine:
    """The calls of an InferenceEngine that cost a stub nothing; weights come from checkpoints, of which only
    the version is kept.
    """

    def __init__(self, name: str, *, context_length: int) -> None:
        self.features = EngineFeatures(
            vocab_size=258,
            context_length=context_length,
            in_memory_update=False,
            update_from_checkpoint=True,
            shares_weights=False,
            keep_pause=False,
            deterministic=False,
            name=name,
        )
        self.version = 0

    async def weight_version(self) -> int:
        await trio.lowlevel.checkpoint()
        return self.version

    async def update_weights_from_checkpoint(self, path: Path, version: int) -> Mapping[str, Any]:
        await trio.lowlevel.checkpoint()
        self.version = version
        return {}

    async def checksum(self) -> str | None:
        await trio.lowlevel.checkpoint()
        return None

    async def pause(self, mode: PauseMode) -> None:
        await trio.lowlevel.checkpoint()

    async def resume(self) -> None:
        await trio.lowlevel.checkpoint()

    async def health(self) -> bool:
        await trio.lowlevel.checkpoint()
        return True

    async def release_memory(self) -> None:
        await trio.lowlevel.checkpoint()

    async def restore_memory(self) -> None:
        await trio.lowlevel.checkpoint()

    async def begin_update(self) -> None:
        await trio.lowlevel.checkpoint()

    def receive_bucket(self, bucket: Sequence[tuple[str, Any]]) -> None:
        raise AssertionError("in_memory_update is False")

    async def finish_update(self, version: int) -> None:
        await trio.lowlevel.checkpoint()

    def statistics(self) -> Mapping[str, float]:
        return {}
