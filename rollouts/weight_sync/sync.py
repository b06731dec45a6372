"""One weight update of every engine: close admission → pause → load → set version → resume → probe → commit."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import trio

from rollouts.errors import WeightSyncError
from rollouts.protocols import InferenceEngine, TrainingBackend
from rollouts.weight_sync.disk import export_snapshot
from rollouts.weight_sync.probe import Probe, ProbeReply, ask_probe, check_probe, previous_reply


class WeightSync:
    """Updates engines and remembers the last probe replies, against which the next update must show a change.

    An engine that shares the trainer's parameters has nothing to load: only its version is checked. Others take the weights in memory
    where they can, from a snapshot on disk otherwise. `snapshot_dir` is needed only for the latter.
    """

    def __init__(self, probe: Probe, *, snapshot_dir: Path | None = None) -> None:
        self.probe = probe
        self.snapshot_dir = snapshot_dir
        self.replies: list[ProbeReply] = []

    async def __call__(self, backend: TrainingBackend, engines: Sequence[InferenceEngine], version: int) -> Mapping[str, float]:
        """Metrics of the update. Raises WeightSyncError naming the engine when it cannot be verified; nothing is committed then."""
        replies: list[ProbeReply] = []
        pause_s = 0.0
        for index, engine in enumerate(engines):
            if not engine.features.shares_weights:
                pause_s += await self._load(backend, engine, version)
            reported = await engine.weight_version()
            if reported != version:
                raise WeightSyncError(f"engine {index} reports weight version {reported} after an update to version {version}")
            if not engine.features.shares_weights:
                reply = await ask_probe(self.probe, backend, engine, version=version, engine_index=index)
                check_probe(reply, previous_reply(self.replies, index), tolerance=self.probe.tolerance, engine_index=index)
                replies.append(reply)
        self.replies = replies
        if not replies:
            return {}
        return {"time/weight_sync_pause": pause_s, "weight_sync/probe_difference/max": max(reply.difference for reply in replies)}

    async def _load(self, backend: TrainingBackend, engine: InferenceEngine, version: int) -> float:
        """Seconds for which the engine was paused."""
        snapshot: Path | None = None
        if not engine.features.in_memory_update:
            if self.snapshot_dir is None:
                raise WeightSyncError("an engine loads weights only from disk; give WeightSync a snapshot_dir")
            snapshot = await export_snapshot(backend, self.snapshot_dir / f"v{version}")
        started = trio.current_time()
        await engine.pause("wait")
        if snapshot is None:
            await engine.begin_update()
            await backend.stream_weights(engine.receive_bucket).result()
            await engine.finish_update(version)
        else:
            await engine.update_weights_from_checkpoint(snapshot, version)
        await engine.resume()
        if snapshot is not None:
            self._remove_older_snapshots(snapshot)
        return trio.current_time() - started

    def _remove_older_snapshots(self, newest: Path) -> None:
        for path in newest.parent.glob("v*"):
            if path != newest:
                shutil.rmtree(path)
