"""Brings engines to the trainer's weights after a step, and engines that come back to the weights that the
others serve.

    loop ──► WeightSync(backend, engines, version) ─► snapshot, or buckets in memory ─► sync_weights_to_engines ─► published
    keep_engines_current ◄── stale engines, one by one ─► revive: the published snapshot ─► commit or fail
                                   one lock: an engine is never updated by both, and a revival under way gives way to the loop

What is remembered: the published version and where its weights lie; what each engine proved last; the
verified answers of the last versions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import trio

from rollouts.crash_points import reach
from rollouts.errors import BackendError, SnapshotError, WeightSyncError
from rollouts.metrics.spans import SpanRecorder
from rollouts.protocols import InferenceEngine, TrainingBackend, WeightSink
from rollouts.types import Completion
from rollouts.weight_sync.admission import Admission, DirectAdmission, UpdatedFleet, list_engines
from rollouts.weight_sync.probe import (
    AnsweringBackend,
    Judge,
    Probe,
    ProbeReply,
    ask_trainer,
    judge_by_answers,
    judge_by_stored,
    judge_by_trainer,
)
from rollouts.weight_sync.update import (
    LoadWeights,
    ProbeMemory,
    SilenceLimits,
    SyncReport,
    load_from,
    log_warning,
    sync_weights_to_engines,
)

__all__ = ["Snapshot", "SnapshotKeeper", "SyncReport", "Transport", "WeightSync", "sync_weights_to_engines"]

RETRY_BASE_S, RETRY_CAP_S = 1.0, 60.0  # between two tries of an update that reached nobody

Transport = Callable[
    [TrainingBackend, Sequence[InferenceEngine], int], Awaitable[Mapping[str, Exception | None]]
]
"""Brings the trainer's weights into paused engines, in memory, as a version; by engine name what went wrong, None where nothing did."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Weights on disk."""

    path: Path
    digest: str  # equal for equal weights
    weight_bytes: int


class Streamed(Protocol):
    """Weights that are being handed over."""

    async def result(self) -> None: ...


class WeightSource(Protocol):
    """What has weights to hand over: a TrainingBackend, or a copy of its weights."""

    def stream_weights(self, sink: WeightSink) -> Streamed: ...


class SnapshotKeeper(Protocol):
    """Writes snapshots and removes them. `disk.DiskSnapshots` is one."""

    async def hold(self, backend: TrainingBackend) -> WeightSource | None:
        """A copy of the weights that export() takes in the trainer's place; None where there is no room for
        one.
        """
        ...

    async def export(self, backend: WeightSource, version: int) -> Snapshot:
        """The trainer's weights as `version`. One that it made before is verified and given again."""
        ...

    def open_reader(self, path: Path) -> AbstractContextManager[Path]:
        """Keeps the snapshot from being pruned. Raises SnapshotError if it is gone."""
        ...

    async def prune(self, keep: Path) -> None:
        """Removes every other snapshot that nobody reads."""
        ...


@dataclass(frozen=True, slots=True)
class Published:
    """What the engines serve."""

    version: int
    snapshot: Snapshot | None  # None: the weights went in memory, and no engine needs them from disk


@dataclass(slots=True)
class _Update:
    """An update by the loop, over all its tries."""

    backend: TrainingBackend
    version: int
    released: trio.Event | None  # set once the trainer may change its weights
    judge: Judge
    source: WeightSource  # what snapshots are written from

    @property
    def is_released(self) -> bool:
        return self.released is not None and self.released.is_set()


class WeightSync:
    """Updates engines, revives those that come back, and remembers what they proved. One for a run.

    An engine that shares the trainer's parameters has nothing to load: only its version is checked. Others
    are given the weights by `transport` if there is one; else in memory where they can take them so; else
    from a snapshot in `snapshot_dir` (or `keeper`'s). With a transport a snapshot is written all the same,
    once the engines serve again: restarted ones load it. `admission` is the fleet; without one engines are
    asked directly, and one that fails ends the run, for nobody could keep requests from it.
    """

    def __init__(
        self,
        probe: Probe,
        *,
        snapshot_dir: Path | None = None,
        snapshot_dtype: str | None = None,
        model_dir: Path | None = None,
        keeper: SnapshotKeeper | None = None,
        admission: Admission | None = None,
        transport: Transport | None = None,
        limits: SilenceLimits | None = None,
        max_revivals: int = 6,
        patience_s: float = 600.0,
        warn: Callable[[str], None] = log_warning,
        spans: SpanRecorder | None = None,
    ) -> None:
        """`snapshot_dtype`: "bfloat16" for engines that serve it; None: as the trainer has the weights.
        `model_dir`: where the files come from that a server wants beside weights. `max_revivals`: failed ones
        in a row after which an engine waits for the next update. `patience_s`: how long an update that
        reached nobody waits for engines that come back, while keep_engines_current runs. `spans` is told how
        long each engine took.
        """
        self.probe = probe
        self.memory = ProbeMemory()
        self.published: Published | None = None
        self._keeper = keeper
        if keeper is None and snapshot_dir is not None:
            from rollouts.weight_sync.disk import DiskSnapshots

            self._keeper = DiskSnapshots(snapshot_dir, dtype=snapshot_dtype, model_dir=model_dir, warn=warn)
        self._admission = admission or DirectAdmission()
        self._transport = transport
        self._limits = limits
        self._max_revivals = max_revivals
        self._warn = warn
        self._spans = spans
        self._lock = trio.Lock()
        self._failed_revivals: Counter[str] = Counter()
        self._streamed_bytes = 0  # in memory, since the run began
        self._patience_s = patience_s
        self._keeping = 0  # tasks in keep_engines_current
        self._syncing = 0  # updates by the loop, waiting for an engine included
        self._left_to_sync: dict[
            str, InferenceEngine
        ] = {}  # announced during such an update: it takes them in
        self._reviving = trio.CancelScope()  # around the last revival
        self._arrived = trio.Event()  # set and replaced whenever a stale engine is announced

    async def __call__(
        self,
        backend: TrainingBackend,
        engines: Sequence[InferenceEngine],
        version: int,
        *,
        released: trio.Event | None = None,
    ) -> Mapping[str, float]:
        """Metrics of the update; every engine that serves has proven `version`. Raises WeightSyncError when
        none has, listing each failure.

        `released` is set as soon as the trainer may change its weights: where all engines load from disk and
        a copy of the weights fits into memory, before the snapshot is written; else not before the end, when
        whoever waits for it finds this call returned.

        Without a fleet one failure is enough to raise. SnapshotError when the snapshot cannot be written or
        is damaged; BackendError when the trainer fails: then too nobody serves what was not proven. A revival
        under way is cancelled: this update takes its engine in.
        """
        self._syncing += 1
        self._reviving.cancel()
        published_before = self.published
        try:
            update = _Update(backend, version, released, judge_by_trainer(self.probe, backend), backend)
            return await self._sync_patiently(update, engines)
        finally:
            self._syncing -= 1
            left, self._left_to_sync = self._left_to_sync, {}
            if self.published is published_before:  # else the publication has announced whoever is stale
                self._announce_again(left.values())

    def _announce_again(self, engines: Iterable[InferenceEngine]) -> None:
        for engine in engines:
            if isinstance(self._admission, UpdatedFleet) and self._admission.needs_update(engine):
                self._admission.fail(
                    engine, WeightSyncError("the weight update that was to take it in came to nothing")
                )

    async def _sync_patiently(
        self, update: _Update, engines: Sequence[InferenceEngine]
    ) -> Mapping[str, float]:
        give_up_at, wait_s = trio.current_time() + self._patience_s, RETRY_BASE_S
        while True:
            arrived = self._arrived  # taken before the attempt: whoever comes back during it counts
            try:
                async with self._lock:
                    return await self._sync(update, engines)
            except SnapshotError:
                raise
            except WeightSyncError as error:
                if not self._keeping:
                    raise
                self._warn(
                    f"{error}\nThe update waits for an engine that comes back, for"
                    f" {give_up_at - trio.current_time():.0f} s at most."
                )
                with trio.move_on_at(give_up_at) as waiting:
                    await arrived.wait()
                    await trio.sleep(wait_s)
                if waiting.cancelled_caught:
                    raise
                wait_s = min(RETRY_CAP_S, 2 * wait_s)

    async def _sync(self, update: _Update, engines: Sequence[InferenceEngine]) -> Mapping[str, float]:
        reach("sync.begin")
        version = update.version
        members = list_engines(engines, self._admission)
        streamed_before = self._streamed_bytes
        snapshot = None
        if self._need_disk(members):
            if not any(
                engine.features.in_memory_update for engine in members
            ):  # such a one is given the trainer's own weights, later
                await self._release(update)
            snapshot = await self._export(update.source, version)
        report = await self._update(update, members, snapshot)
        if snapshot is None and isinstance(self._admission, UpdatedFleet) and self._keeper is not None:
            await self._release(update, is_judged=True)
            snapshot = await self._keeper.export(update.source, version)
            self.published = Published(version, snapshot)
        if snapshot is not None and self._keeper is not None:
            await self._keeper.prune(snapshot.path)
        metrics = report.metrics()
        if metrics:
            sent = (
                self._streamed_bytes
                - streamed_before
                + (snapshot.weight_bytes if snapshot is not None else 0)
            )
            metrics["weight_sync/bytes"] = float(sent)
        return metrics

    # --- one update

    def _need_disk(self, engines: Sequence[InferenceEngine]) -> bool:
        return self._transport is None and any(_loads_from_disk(engine) for engine in engines)

    async def _release(self, update: _Update, *, is_judged: bool = False) -> None:
        """Lets the trainer go on, if what is wanted of it can be had beforehand: its weights, and unless
        `is_judged` its answer to the probe.
        """
        if update.released is None or update.is_released or self._keeper is None:
            return
        if not is_judged:
            answers = (
                await ask_trainer(self.probe, update.backend)
                if isinstance(update.backend, AnsweringBackend)
                else None
            )
            if (
                answers is None
                # or there are too many near ties to foresee: the trainer judges what the engines say, and
                # waits for it
            ):
                return
            update.judge = judge_by_answers(answers, tolerance_of=self.probe.tolerance_of)
        held = await self._keeper.hold(update.backend)
        if held is None:
            return
        update.source = held
        update.released.set()

    async def _export(self, source: WeightSource, version: int) -> Snapshot:
        if self._keeper is None:
            raise WeightSyncError("an engine loads weights only from disk; give WeightSync a snapshot_dir")
        return await self._keeper.export(source, version)

    async def _update(
        self, update: _Update, engines: Sequence[InferenceEngine], snapshot: Snapshot | None
    ) -> SyncReport:
        backend, version, transport = update.backend, update.version, self._transport

        def note_publication() -> (
            None
        ):  # in the same moment as the fleet, also where the update is cancelled after some have committed
            self.published = Published(version, snapshot)
            self._failed_revivals.clear()

        with self._reading(snapshot):
            report = await self._bring_to(
                engines,
                version,
                snapshot,
                judge=update.judge,
                load=self._stream_or_load(backend, version, snapshot, check=update.is_released),
                load_together=(
                    None if transport is None else lambda paused: transport(backend, paused, version)
                ),
                on_publish=note_publication,
            )
        if report.failed and isinstance(self._admission, DirectAdmission):
            raise WeightSyncError(
                f"weight version {version} did not reach every engine, and nobody keeps requests from the"
                f" others:\n{report.describe_failures()}"
            ) from report.failed[0].error
        return report

    async def _bring_to(
        self,
        engines: Sequence[InferenceEngine],
        version: int,
        snapshot: Snapshot | None,
        *,
        judge: Judge,
        **options: Any,
    ) -> SyncReport:
        """`snapshot` is being read: see _reading."""
        report = await sync_weights_to_engines(
            engines,
            snapshot.path if snapshot is not None else None,
            version=version,
            probe=self.probe,
            judge=judge,
            memory=self.memory,
            digest=snapshot.digest if snapshot is not None else None,
            admission=self._admission,
            limits=self._limits,
            warn=self._warn,
            **options,
        )
        if self._spans is not None:
            record_update(self._spans, report)
        return report

    def _reading(self, snapshot: Snapshot | None) -> AbstractContextManager[object]:
        return (
            self._keeper.open_reader(snapshot.path)
            if snapshot is not None and self._keeper is not None
            else nullcontext()
        )

    def _stream_or_load(
        self, backend: TrainingBackend, version: int, snapshot: Snapshot | None, *, check: bool = False
    ) -> LoadWeights:
        """In memory where an engine takes weights so, else from the snapshot. `check`: only while the trainer
        has that version.
        """
        from_disk = load_from(snapshot.path if snapshot is not None else None, version)

        async def load(engine: InferenceEngine) -> None:
            if not engine.features.in_memory_update:
                await from_disk(engine)
                return
            self._streamed_bytes += await stream_into(backend, engine, version, check=check)

        return load

    # --- engines that come back

    async def revive(self, backend: TrainingBackend, engine: InferenceEngine) -> None:
        """`engine` serves the published version and has proven it, by a verified answer of that version or,
        where none is remembered, by the trainer while it still has those weights.

        Raises WeightSyncError when it does not, after `admission.fail` and `warn` were told; when nothing is
        published yet, which nobody is told, for the first publication is announced to all; and when an update
        by the loop came in between, which takes the engine in.
        """
        async with self._lock:
            if self.published is None:
                raise WeightSyncError(
                    f"engine {engine.features.name} cannot be revived: no weight version is published yet"
                )
            done = await self._revive_unless_overtaken(backend, engine, self.published)
        if not done:
            raise WeightSyncError(
                f"the revival of engine {engine.features.name} gave way to a weight update, which takes it in"
            )

    async def _revive_unless_overtaken(
        self, backend: TrainingBackend, engine: InferenceEngine, published: Published
    ) -> bool:
        """Whether `engine` was revived; False when an update by the loop wants the lock."""
        with trio.CancelScope() as self._reviving:
            if self._syncing:
                self._reviving.cancel()
            await trio.lowlevel.checkpoint()
            await self._revive(backend, engine, published)
            return True
        return False

    async def _revive(self, backend: TrainingBackend, engine: InferenceEngine, published: Published) -> None:
        with ExitStack() as reading:
            try:
                judge, load = self._plan_revival(backend, engine, published)
                reading.enter_context(self._reading(published.snapshot))
            except WeightSyncError as error:  # nothing has begun, so nobody else would tell the fleet
                self._warn(f"engine {engine.features.name} cannot be revived: {error}")
                self._admission.fail(engine, error)
                raise
            await self._bring_to(
                [engine], published.version, published.snapshot, judge=judge, load=load, publish=False
            )

    def _plan_revival(
        self, backend: TrainingBackend, engine: InferenceEngine, published: Published
    ) -> tuple[Judge, LoadWeights]:
        """Who judges, and how the weights come. Raises WeightSyncError where nobody has the weights or can
        tell them any more.
        """
        snapshot, version, trainer_has = (
            published.snapshot,
            published.version,
            backend.weight_version == published.version,
        )
        stored = self.memory.reply(version, engine.features.name)
        if stored is not None:
            judge = judge_by_stored(stored, tolerance_of=self.probe.tolerance_of)
        elif trainer_has:
            judge = judge_while(backend, version, judge_by_trainer(self.probe, backend))
        else:
            raise WeightSyncError(
                f"no verified answer of version {version} is remembered, and the trainer is at"
                f" {backend.weight_version}"
            )
        if snapshot is not None:
            return judge, load_from(snapshot.path, version)
        if trainer_has and engine.features.in_memory_update:
            return judge, self._stream_or_load(backend, version, None, check=True)
        raise WeightSyncError(
            f"there is no snapshot of version {version}, and it cannot come from the trainer's memory; the"
            " next update takes it in"
        )

    async def keep_engines_current(self, backend: TrainingBackend, fleet: UpdatedFleet) -> None:
        """Revives every engine that the fleet announces as stale and that still is when its turn comes, one
        after the other; ends when the fleet closes.

        A failure is a warning: the fleet announces the engine again, later. After `max_revivals` in a row it
        waits for the next update, which tries it in any case. Before the first publication nobody is revived:
        it announces whoever is stale. An update by the loop cancels the revival under way.
        """
        self._keeping += 1
        try:
            async for engine in fleet.stale_members:
                arrived, self._arrived = self._arrived, trio.Event()
                arrived.set()
                await self._try_to_revive(backend, engine, fleet)
        finally:
            self._keeping -= 1

    async def _try_to_revive(
        self, backend: TrainingBackend, engine: InferenceEngine, fleet: UpdatedFleet
    ) -> None:
        """Revives `engine` if, when its turn comes, it still needs that."""
        name = engine.features.name
        async with self._lock:
            if self._syncing:
                self._left_to_sync[name] = engine
                return
            if (
                self.published is None
                or self._failed_revivals[name] >= self._max_revivals
                or not fleet.needs_update(engine)
            ):
                return
            try:
                if await self._revive_unless_overtaken(backend, engine, self.published):
                    del self._failed_revivals[name]
            except WeightSyncError as error:
                self._failed_revivals[name] += 1
                if self._failed_revivals[name] >= self._max_revivals:
                    self._warn(
                        f"engine {name} could not be revived; it waits for the next weight update: {error}"
                    )
            except BackendError as error:  # the loop meets it too, and decides
                self._warn(f"engine {name} could not be revived, for the trainer failed: {error}")


def record_update(spans: SpanRecorder, report: SyncReport) -> None:
    """A span for the whole update of each engine, one for its pause, and one for each phase in which it has
    something to do.
    """
    now = spans.now_unix()
    for update in report.engines:
        begins = {phase: ago_s for phase, ago_s, _ in update.phases}
        if not begins.keys() & {"pause", "probe"}:  # nothing was done: it shares the trainer's weights
            continue
        whole_s = update.phases[0][1] - update.phases[-1][1] + update.phases[-1][2]
        spans.add("weight_sync", update.name, update.phases[0][1], whole_s, now_unix=now)
        if "pause" in begins:
            spans.add("weight_sync_pause", update.name, begins["pause"], update.pause_s, now_unix=now)
        for phase, ago_s, seconds in update.phases:
            if phase in ("load", "probe"):
                spans.add(f"weight_sync_{phase}", update.name, ago_s, seconds, now_unix=now)


def judge_while(backend: TrainingBackend, version: int, judge: Judge) -> Judge:
    """`judge`, for as long as the trainer has the weights of `version`. Raises WeightSyncError when it has
    others, before or after the judgement.
    """

    async def judge_if_current(engine: InferenceEngine, completion: Completion) -> ProbeReply:
        check_trainer_version(backend, version)
        reply = await judge(engine, completion)
        check_trainer_version(backend, version)
        return reply

    return judge_if_current


def check_trainer_version(backend: TrainingBackend, version: int) -> None:
    """Raises WeightSyncError if the trainer has moved on from `version`."""
    if backend.weight_version != version:
        raise WeightSyncError(
            f"the trainer has moved on to version {backend.weight_version}, and cannot tell or give version"
            f" {version} any more"
        )


def _loads_from_disk(engine: InferenceEngine) -> bool:
    return not engine.features.shares_weights and not engine.features.in_memory_update


async def stream_into(
    backend: TrainingBackend, engine: InferenceEngine, version: int, *, check: bool = False
) -> int:
    """How many bytes the engine was given, bucket by bucket, as `version`. Raises what the engine raises; the
    backend goes on working.

    `check`: WeightSyncError, before the weights are named, if the trainer is not at `version` any more.
    """
    sizes: list[int] = []
    failures: list[Exception] = []

    def sink(bucket: Sequence[tuple[str, Any]]) -> None:
        if failures:
            return
        try:
            engine.receive_bucket(bucket)
            sizes.append(sum(tensor.nbytes for _, tensor in bucket))
        except (
            Exception
        ) as error:  # raised below: an error in a sink would fail the backend and every step after
            failures.append(error)

    await engine.begin_update()
    await backend.stream_weights(sink).result()
    if failures:
        raise failures[0]
    if check:
        check_trainer_version(backend, version)
    await engine.finish_update(version)
    return sum(sizes)
