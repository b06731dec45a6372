"""A fleet of servers with weight sync as a config describes them, for a run: servers, engines, fleet, probe,
transport, revival.
"""

import json
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import trio

from rollouts.config.tables import EngineConfig
from rollouts.engines.fleet import Fleet
from rollouts.engines.open import DOWN_LIMIT_S, open_server_fleet
from rollouts.engines.processes import split_flags
from rollouts.metrics.spans import SpanRecorder
from rollouts.processes.nurseries import open_plain_nursery
from rollouts.protocols import InferenceEngine, SyncWeights, TrainingBackend
from rollouts.weight_sync.broadcast_servers import open_broadcast
from rollouts.weight_sync.probe import make_probe
from rollouts.weight_sync.snapshots import DiskSnapshots
from rollouts.weight_sync.sync import WeightSync

EXACT_TOLERANCE = 1e-3  # nats between engine and trainer on the probe, both in float32
HALF_TOLERANCE = 0.2  # where one of them computes in 16 bits: unlikely tokens differ by more than likely ones


def choose_tolerance(*, exact: bool) -> float:
    """How far engine and trainer may differ on the probe, in nats: less when both compute in float32."""
    return EXACT_TOLERANCE if exact else HALF_TOLERANCE


@asynccontextmanager
async def open_synced_fleet(
    config: EngineConfig,
    backend: TrainingBackend,
    model_path: Path,
    *,
    vocab_size: int,
    trainer_exact: bool,
    device: str,
    log_dir: Path,
    snapshot_dir: Path,
    seed: int,
    warn: Callable[[str], None],
    spans: SpanRecorder | None = None,
) -> AsyncIterator[tuple[Fleet, SyncWeights]]:
    """A fleet of servers that holds the trainer's weights, and the function that brings it to a version.

    An engine that comes back during the run is brought to the published version by itself. `trainer_exact`:
    the trainer computes in float32. `device`: where it computes. `spans` is told how long each engine's
    updates took. Raises what open_server_fleet raises, WeightSyncError for a transport that this machine
    cannot run.
    """
    dtype = find_served_dtype(config, model_path)
    probe = make_probe(vocab_size, tolerance=choose_tolerance(exact=trainer_exact and dtype == "float32"))
    keeper = DiskSnapshots(
        snapshot_dir, dtype=None if dtype == "float32" else dtype, model_dir=model_path, warn=warn
    )
    open_transport: Any = nullcontext()
    if config.transport != "disk":
        sent_as = None if dtype is None else getattr(torch, dtype)
        kind = "vllm" if config.kind == "vllm" else "sglang"
        open_transport = open_broadcast(kind, wire=choose_wire(config, device), dtype=sent_as)
    opening = open_server_fleet(
        config, model_path, vocab_size=vocab_size, log_dir=log_dir, seed=seed, warn=warn
    )
    async with opening as fleet, open_transport as transport, open_plain_nursery() as nursery:
        sync = WeightSync(
            probe,
            keeper=keeper,
            fleet=fleet,
            transport=transport,
            patience_s=DOWN_LIMIT_S,
            warn=warn,
            spans=spans,
        )
        nursery.start_soon(sync.keep_engines_current)
        yield fleet, partial(_sync_members, sync, fleet)


async def _sync_members(
    sync: WeightSync,
    fleet: Fleet,
    backend: TrainingBackend,
    engines: Sequence[InferenceEngine],
    version: int,
    *,
    released: trio.Event | None = None,
) -> Mapping[str, float]:
    """A SyncWeights: waits for a member that can be updated, and has the fleet's statistics as metrics."""
    await fleet.wait_members_for_update()
    metrics = await sync(backend, engines, version, released=released)
    return {**metrics, **{make_metric_name(key): value for key, value in fleet.statistics().items()}}


def make_metric_name(name: str) -> str:
    """A statistic's name as a metric may be called: engine/vllm-0/state is engine/vllm_0/state, a class
    becomes engine_unreachable.
    """
    return re.sub(r"[^a-z0-9_/]", "_", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())


def choose_wire(config: EngineConfig, device: str) -> Literal["gloo", "nccl"]:
    """What carries weights to SGLang servers: NCCL from a GPU, unless the run starts them for a CPU; gloo
    takes tensors of either side.
    """
    served_by_cpu = (dict(split_flags(config.args)).get("--device") or "").startswith("cpu")
    return "nccl" if torch.device(device).type == "cuda" and not served_by_cpu else "gloo"


def find_served_dtype(config: EngineConfig, model_path: Path) -> str | None:
    """What the servers compute in: --dtype of engine.args, or the 16 bits of the model's config.json; None
    where a server chooses 16 bits by itself.
    """
    asked = dict(split_flags(config.args)).get("--dtype")
    if asked not in (None, "auto"):
        return {"float": "float32", "half": "float16"}.get(str(asked), asked)
    settings = json.loads((model_path / "config.json").read_text("utf-8"))
    stored = str(settings.get("dtype") or settings.get("torch_dtype") or "float32").removeprefix("torch.")
    return stored if stored in ("bfloat16", "float16") else None
