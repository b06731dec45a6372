"""Brings engines to the trainer's weights after a step, and engines that come back to the published weights.

    loop ──► WeightSync(backend, engines, version) ─► snapshot, or buckets in memory ─► update ─► published
    keep_engines_current ◄── stale engines, one by one ─► the published snapshot ─► commit or fail

One lock orders both; the loop's update cancels a revival under way.

It remembers the published version with its snapshot and the trainer's log-probs of the probe, and what each
engine proved.

A run opens it with its fleet as the config describes them: servers, engines, fleet, probe, transport,
revival.
"""

import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import trio

from rollouts.config.tables import EngineConfig
from rollouts.crash_points import reach
from rollouts.engines.fleet import Fleet
from rollouts.engines.processes import DOWN_LIMIT_S, open_server_fleet, split_flags
from rollouts.errors import SnapshotError, WeightSyncError
from rollouts.metrics.spans import SpanRecorder
from rollouts.models.directories import read_json
from rollouts.models.export import Bucket
from rollouts.models.lora import Adapter
from rollouts.processes.nurseries import open_plain_nursery
from rollouts.protocols import InferenceEngine, Say, SyncWeights, TrainingBackend
from rollouts.types import FloatArray, Numbers, live
from rollouts.weight_sync.broadcast import open_broadcast
from rollouts.weight_sync.snapshots import DiskSnapshots, Snapshot, WeightSource, find_trained, stream_guarded
from rollouts.weight_sync.update import (
    EngineUpdate,
    Probe,
    ProvenVersions,
    SilenceLimits,
    UpdatePlan,
    compute_sync_metrics,
    describe_failures,
    log_warning,
    make_probe,
    score_by_trainer,
    sync_weights_to_engines,
)

MAX_REVIVALS = 6  # failures in a row after which an engine waits for the next update
RETRY_BASE_S, RETRY_CAP_S = 1.0, 60.0  # between two tries of an update that reached no engine

Transport = Callable[[TrainingBackend, Sequence[InferenceEngine], int], Awaitable[Mapping[str, Exception]]]
"""Sends the trainer's weights to paused engines in memory, as a version; errors by engine name."""


class Published(NamedTuple):
    """What the engines serve."""

    version: int
    expected: FloatArray  # [T] the trainer's log-probs of the probe
    snapshot: Snapshot | None = None  # None: the weights went in memory, and no engine needs them from disk


@dataclass
class _Step:
    """The weights of one call by the loop, over all its tries."""

    backend: TrainingBackend
    target: Published
    source: WeightSource  # the trainer, or a copy of its weights once the trainer is released
    released: trio.Event | None  # set once the trainer may change its weights


@live
class WeightSync:
    """Updates engines, revives those that come back, and remembers what they proved. One for a run.

    An engine that shares the trainer's parameters loads nothing: only its version is checked. The others are
    given the weights by `transport` if there is one, else in memory where they support it, else from a
    snapshot of `keeper`. With a transport a snapshot is written once the engines serve again: restarted ones
    load it. Without a fleet, a single engine that fails raises WeightSyncError.
    """

    probe: Probe
    _: KW_ONLY
    keeper: DiskSnapshots | None = None
    fleet: Fleet | None = None
    transport: Transport | None = None
    limits: SilenceLimits | None = None
    # how long an update that reached no engine waits for one, while keep_engines_current runs
    patience_s: float = 600.0
    warn: Say = log_warning
    spans: SpanRecorder | None = None

    def __post_init__(self) -> None:
        self.published: Published | None = None
        self._make_plan = partial(
            UpdatePlan,
            probe=self.probe,
            proven=ProvenVersions(),
            fleet=self.fleet,
            limits=self.limits or SilenceLimits(),
            warn=self.warn,
            spans=self.spans,
        )
        self._lock = trio.Lock()
        self._failed_revivals = Counter[str]()
        self._keeping = 0  # tasks in keep_engines_current
        self._syncing = 0  # calls by the loop
        self._left_to_sync: dict[str, InferenceEngine] = {}  # announced as stale during such a call
        self._reviving = trio.CancelScope()  # around the last revival
        self._arrived = trio.Event()  # set and replaced whenever a stale engine is announced

    async def __call__(
        self,
        backend: TrainingBackend,
        engines: Sequence[InferenceEngine],
        version: int,
        *,
        released: trio.Event | None = None,
    ) -> Numbers:
        """Metrics of the update; every engine that serves has proven `version`.

        `released` is set once the trainer may change its weights: before the snapshot is written, where all
        engines load from disk and a copy of the weights fits into memory. A revival under way is cancelled:
        this update takes its engine in. Raises WeightSyncError listing each failure when no engine has proven
        the version, or without a fleet when one has not; SnapshotError when the snapshot cannot be written or
        is damaged; BackendError when the trainer fails. No engine serves what was not proven then.
        """
        self._syncing += 1
        self._reviving.cancel()
        published_before = self.published
        try:
            shared = engines and all(engine.features.shares_weights for engine in engines)
            expected = np.zeros(0, np.float32) if shared else await score_by_trainer(self.probe, backend)
            step = _Step(backend, Published(version, expected), backend, released)
            return await self._sync_patiently(step, engines)
        finally:
            self._syncing -= 1
            left, self._left_to_sync = self._left_to_sync, {}
            for engine in left.values() if self.published is published_before else ():
                if self.fleet and self.fleet.needs_update(engine):  # it announces it again
                    self.fleet.fail(engine, WeightSyncError("the update that was to include it failed"))

    async def _sync_patiently(self, step: _Step, engines: Sequence[InferenceEngine]) -> Numbers:
        give_up_at, wait_s = trio.current_time() + self.patience_s, RETRY_BASE_S
        while True:
            arrived = self._arrived  # before the attempt, so that an engine that comes back during it counts
            try:
                async with self._lock:
                    return await self._sync(step, engines)
            except SnapshotError:
                raise
            except WeightSyncError as error:
                if not self._keeping:
                    raise
                self.warn(
                    f"{error}\nThe update waits for an engine that comes back, for"
                    f" {give_up_at - trio.current_time():.0f} s at most."
                )
                with trio.move_on_at(give_up_at) as waiting:
                    await arrived.wait()
                    await trio.sleep(wait_s)
                if waiting.cancelled_caught:
                    raise
                wait_s = min(RETRY_CAP_S, 2 * wait_s)

    async def _sync(self, step: _Step, engines: Sequence[InferenceEngine]) -> Numbers:
        reach("sync.begin")
        members = []
        for engine in engines:
            members += self.fleet.members_for_update() if self.fleet and engine is self.fleet else [engine]
        in_memory = [one.features.in_memory_update for one in members if not one.features.shares_weights]
        target = step.target
        if not self.transport and not all(in_memory):
            if not any(in_memory):
                await self._release(step)
            target = await self._export(step)
        sizes = []
        updates = await self._update(step, target, members, sizes)
        if not target.snapshot and self.fleet and self.keeper:
            await self._release(step)
            self.published = target = await self._export(step)
        metrics = compute_sync_metrics(updates)
        if target.snapshot and self.keeper:
            await self.keeper.prune(target.snapshot.path)
            sizes.append(target.snapshot.weight_bytes)
        return {**metrics, "weight_sync/bytes": sum(sizes)} if metrics else {}

    async def _export(self, step: _Step) -> Published:
        if not self.keeper:
            raise WeightSyncError("an engine loads weights only from disk; give WeightSync a keeper")
        return step.target._replace(snapshot=await self.keeper.export(step.source, step.target.version))

    async def _release(self, step: _Step) -> None:
        """Lets the trainer go on, if there is room for a copy of its weights."""
        if step.released is None or step.released.is_set() or not self.keeper:
            return
        if held := await self.keeper.hold(step.backend):
            step.source = held
            step.released.set()

    async def _update(
        self, step: _Step, target: Published, engines: Sequence[InferenceEngine], sizes: list[int]
    ) -> list[EngineUpdate]:
        """What became of each engine; `sizes` gets the bytes that each was given in memory."""

        transport = self.transport

        def publish() -> None:  # also where the update is cancelled after some have committed
            if self.fleet:
                self.fleet.publish(target.version)
            self.published = target
            self._failed_revivals.clear()
            reach("sync.published")

        async def load(engine: InferenceEngine) -> None:
            if engine.features.in_memory_update:
                sizes.append(await stream_into(step.source, engine, target.version))
            else:
                await _load_snapshot(target, engine)

        plan = self._make_plan(
            version=target.version,
            expected=target.expected,
            load=load,
            load_together=transport and (lambda paused: transport(step.backend, paused, target.version)),
            digest=target.snapshot and target.snapshot.digest,
        )
        updates = await sync_weights_to_engines(engines, plan, publish=publish)
        failures = describe_failures(updates)
        if failures and not self.fleet:
            raise WeightSyncError(
                f"weight version {target.version} did not reach every engine, and there is no fleet that"
                f" would keep requests from the others:\n{failures}"
            ) from next(update.error for update in updates if not update.committed)
        return updates

    # --- engines that come back

    async def keep_engines_current(self) -> None:
        """Revives every engine that the fleet announces as stale and that still is when its turn comes, one
        after the other; ends when the fleet closes.

        A failure is a warning: the fleet announces the engine again, later. After MAX_REVIVALS in a row it
        waits for the next update, which tries it in any case. Before the first publication nothing is
        revived: it announces every stale engine. An update by the loop cancels the revival under way.
        """
        assert self.fleet, "only a fleet announces engines"
        self._keeping += 1
        try:
            async for engine in self.fleet.stale_members:
                arrived, self._arrived = self._arrived, trio.Event()
                arrived.set()
                async with self._lock:
                    if self._syncing:
                        self._left_to_sync[engine.features.name] = engine
                    elif self.fleet.needs_update(engine):
                        await self._revive(engine)
        finally:
            self._keeping -= 1

    async def _revive(self, engine: InferenceEngine) -> None:
        """Brings `engine` to the published version, unless it failed too often or the loop's update cancels
        it.
        """
        name, published = engine.features.name, self.published
        if not published or self._failed_revivals[name] >= MAX_REVIVALS:
            return
        plan = self._make_plan(
            version=published.version,
            expected=published.expected,
            load=partial(_load_snapshot, published),
            digest=published.snapshot and published.snapshot.digest,
        )
        try:
            with trio.CancelScope() as self._reviving:
                await sync_weights_to_engines([engine], plan)
                del self._failed_revivals[name]
        except WeightSyncError as error:  # the fleet and `warn` were told
            self._failed_revivals[name] += 1
            if self._failed_revivals[name] >= MAX_REVIVALS:
                self.warn(f"engine {name} could not be revived; it waits for the next weight update: {error}")


async def _load_snapshot(published: Published, engine: InferenceEngine) -> None:
    if not published.snapshot:
        raise WeightSyncError(
            f"there is no snapshot of version {published.version}; wait for the next update"
        )
    await engine.update_weights_from_checkpoint(published.snapshot.path, published.version)


async def stream_into(source: WeightSource, engine: InferenceEngine, version: int) -> int:
    """How many bytes the engine was given, bucket by bucket, as `version`. Raises what the engine raises; the
    backend goes on working.
    """
    sizes = []

    def receive(bucket: Bucket) -> None:
        engine.receive_bucket(bucket)
        sizes.append(sum(tensor.nbytes for _, tensor in bucket))

    await engine.begin_update()
    await stream_guarded(source, receive)
    await engine.finish_update(version)
    return sum(sizes)


# --- opened for a run ---------------------------------------------------------------------------------------


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
    warn: Say,
    spans: SpanRecorder,
) -> AsyncIterator[tuple[Fleet, SyncWeights]]:
    """A fleet of servers that holds the trainer's weights, and the function that brings it to a version.

    An engine that comes back during the run is brought to the published version by itself. `trainer_exact`:
    the trainer computes in float32. `device`: where it computes. `spans` is told how long each engine's
    updates took. Raises what open_server_fleet raises, WeightSyncError for a transport that this machine
    cannot run.
    """
    dtype, adapter = find_served_dtype(config, model_path), find_trained(backend)
    exact, lora, open_transport = trainer_exact and dtype == torch.float32, None, nullcontext()
    rank = 0  # of an adapter
    if isinstance(adapter, Adapter):  # a small file
        rank = adapter.config.rank
        lora = rank, adapter.target_modules
        exact = exact and adapter.config.base == "float32"  # the servers' base is not packed
    elif config.transport != "disk":
        assert config.kind != "local"
        # what carries weights to SGLang servers; gloo takes tensors of either side
        on_cpu = (dict(split_flags(config.args)).get("--device") or "").startswith("cpu")
        wire = "nccl" if torch.device(device).type == "cuda" and not on_cpu else "gloo"
        open_transport = open_broadcast(config.kind, wire=wire, dtype=dtype)
    async with (
        open_server_fleet(
            config, model_path, vocab_size=vocab_size, log_dir=log_dir, seed=seed, warn=warn, lora=lora
        ) as fleet,
        open_transport as transport,
        open_plain_nursery() as nursery,
    ):
        if merge := fleet.features.max_adapter_rank < rank:
            warn(
                f"the engines serve no LoRA adapters of rank {rank}, so whole weights are sent, with the"
                " adapter merged"
            )
        stored = None if dtype == torch.float32 else dtype
        keeper = DiskSnapshots(snapshot_dir, dtype=stored, model_dir=model_path, merge=merge, warn=warn)
        sync = WeightSync(
            make_probe(vocab_size, tolerance=choose_tolerance(exact=exact)),
            keeper=keeper,
            fleet=fleet,
            transport=transport,
            patience_s=DOWN_LIMIT_S,
            warn=warn,
            spans=spans,
        )
        nursery.start_soon(sync.keep_engines_current)
        yield fleet, partial(sync_members, fleet, sync)


async def sync_members(fleet: Fleet, sync: WeightSync, *step: Any, **options: Any) -> Numbers:
    """Waits for a member that can be updated, and has the fleet's statistics as metrics."""
    await fleet.wait_members_for_update()
    return {
        **(await sync(*step, **options)),
        **{make_metric_name(key): value for key, value in fleet.statistics().items()},
    }


def make_metric_name(name: str) -> str:
    """A statistic's name as a metric may be called: engine/vllm-0/state is engine/vllm_0/state, a class
    becomes engine_unreachable.
    """
    return re.sub(r"[^a-z0-9_/]", "_", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())


DTYPES = ("float32", "bfloat16", "float16")


def find_served_dtype(config: EngineConfig, model_path: Path) -> torch.dtype | None:
    """What the servers compute in: --dtype of engine.args, or the 16 bits of the model's config.json; None
    where a server chooses 16 bits by itself. Raises WeightSyncError for a --dtype that snapshots do not have.
    """
    asked = dict(split_flags(config.args)).get("--dtype")
    if asked in (None, "auto"):
        settings = read_json(model_path / "config.json")
        stored = str(settings.get("dtype") or settings.get("torch_dtype")).removeprefix("torch.")
        return getattr(torch, stored) if stored in ("bfloat16", "float16") else None
    name = {"float": "float32", "half": "float16"}.get(asked, asked)
    if name not in DTYPES:
        raise WeightSyncError(f"engines serve no dtype {name!r}; use one of {', '.join(DTYPES)}")
    return getattr(torch, name)
