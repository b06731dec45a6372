"""One weight update of many engines at once, each in its own task. No torch, no disk.

    every engine:  close admission ─► pause ─► load ─► set version ─► resume ─► probe ─► commit
                                        └── fails, is silent or is cancelled ──► resume, in any case ──► fail
    when all have decided, and at least one has committed:  publish

An engine that fails serves nobody and delays nobody. When the update is cancelled, or the trainer fails, the
version is published if an engine has committed it; the other engines are out of service.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeVar, runtime_checkable

import trio

from rollouts.crash_points import reach
from rollouts.errors import BackendError, EngineError, EngineSilent, WeightSyncError
from rollouts.protocols import InferenceEngine
from rollouts.types import FloatArray
from rollouts.weight_sync.probe import Probe, Proof, check_agreement, check_change, score_by_engine

T = TypeVar("T")
Phase = Literal["close", "pause", "load", "set_version", "resume", "probe", "commit"]
LoadWeights = Callable[[InferenceEngine], Awaitable[object]]
"""Loads new weights into one paused engine and names their version."""
LoadTogether = Callable[[Sequence[InferenceEngine]], Awaitable[Mapping[str, Exception | None]]]
"""Loads new weights into several paused engines at once; by engine name its error, None for success."""
KEPT_PROOFS = 4  # of each engine: its first version and the last ones


class Admission(Protocol):
    """Decides which engine gets requests. A fleet is one."""

    def close_admission(self, engine: InferenceEngine) -> None:
        """Sends no new requests to `engine`, and holds its answers back until commit or fail."""
        ...

    def commit(self, engine: InferenceEngine, version: int) -> bool:
        """`engine` has proven `version`: it gets requests again, and held answers are delivered. False if it
        died meanwhile.
        """
        ...

    def fail(self, engine: InferenceEngine, error: Exception) -> None:
        """`engine` is out of service until an update succeeds; held answers are discarded and asked
        elsewhere.
        """
        ...

    def publish(self, version: int) -> None:
        """Every engine was updated or taken out, and at least one serves `version`."""
        ...


@runtime_checkable
class UpdatedFleet(Admission, Protocol):
    """An Admission that knows its engines and announces those that need an update."""

    def members_for_update(self) -> tuple[InferenceEngine, ...]: ...

    def needs_update(self, engine: InferenceEngine) -> bool:
        """Whether `engine` is up and out of service until an update succeeds."""
        ...

    @property
    def stale_members(self) -> trio.MemoryReceiveChannel[InferenceEngine]: ...


class DirectAdmission:
    """Admission of engines that are asked directly: no answer can be held back and no engine taken out."""

    def close_admission(self, engine: InferenceEngine) -> None: ...
    def commit(self, engine: InferenceEngine, version: int) -> bool:
        return True

    def fail(self, engine: InferenceEngine, error: Exception) -> None: ...
    def publish(self, version: int) -> None: ...


@dataclass(frozen=True, slots=True)
class SilenceLimits:
    """Seconds that an engine may spend in each phase without progress. The whole update has no limit."""

    pause: float = 120.0
    load: float = 900.0  # a server says nothing while it reads a large model from disk
    set_version: float = 60.0
    resume: float = 60.0
    probe: float = 120.0


def log_warning(text: str) -> None:
    logging.getLogger("rollouts").warning("%s", text)


@dataclass(slots=True, eq=False)
class EngineUpdate:
    """What became of one engine."""

    name: str
    phase: Phase = "close"  # reached last
    error: Exception | None = None  # why it is out of service
    committed: bool = False
    pause_s: float = 0.0  # seconds between pause and resume; 0 where there was nothing to load
    proof: Proof | None = None  # None for an engine that shares the trainer's weights
    began: list[tuple[Phase, float]] = field(default_factory=list)  # phases and when they began, trio's clock
    ended_at: float = 0.0

    def enter(self, phase: Phase) -> None:
        self.phase = phase
        self.began.append((phase, trio.current_time()))


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What became of all engines, in the order in which they were given."""

    version: int
    engines: tuple[EngineUpdate, ...]

    @property
    def failed(self) -> tuple[EngineUpdate, ...]:
        return tuple(update for update in self.engines if not update.committed)

    def describe_failures(self) -> str:
        """One line for each engine that failed: its name, the phase, the error."""
        return "\n".join(
            f"  {update.name}: {update.phase}: {type(update.error).__name__}: {update.error}"
            for update in self.failed
        )

    def metrics(self) -> dict[str, float]:
        """Numbers for a row of metrics; empty when every engine shares the trainer's weights."""
        proofs = [update.proof for update in self.engines if update.committed and update.proof is not None]
        if not proofs and not self.failed:
            return {}
        metrics = {
            "time/weight_sync_pause": max(update.pause_s for update in self.engines),
            "weight_sync/engines_updated": float(len(self.engines) - len(self.failed)),
            "weight_sync/engines_failed": float(len(self.failed)),
        }
        if proofs:
            metrics["weight_sync/probe_difference/max"] = max(proof.difference for proof in proofs)
        return metrics


class ProvenVersions:
    """What each engine, by name, proved at its first version and at the last few; restarts keep it."""

    def __init__(self) -> None:
        self._proofs: dict[str, list[Proof]] = {}  # oldest first
        self._doubted: set[str] = set()  # engines whose last update failed

    def all(self, name: str) -> Sequence[Proof]:
        """Everything remembered of engine `name`, oldest first."""
        return self._proofs.get(name, ())

    def add(self, name: str, proof: Proof) -> None:
        kept = [other for other in self.all(name) if other.version != proof.version]
        self._proofs[name] = [*kept[:1], *kept[1:][2 - KEPT_PROOFS :], proof]
        self._doubted.discard(name)

    def doubt(self, name: str) -> None:
        """Engine `name` has to load again, whatever version it reports."""
        self._doubted.add(name)

    def has_proven(self, name: str, version: int) -> bool:
        """Whether engine `name` proved `version` last and no update of it failed since."""
        proofs = self.all(name)
        return name not in self._doubted and bool(proofs) and proofs[-1].version == version


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatePlan:
    """What all engines of one update share."""

    version: int
    probe: Probe
    expected: FloatArray  # [T] the trainer's log-probs of the probe at `version`
    load: LoadWeights
    load_together: LoadTogether | None = None  # used in place of `load`, once all engines are paused or out
    digest: str | None = None  # of the snapshot that is loaded
    proven: ProvenVersions = field(default_factory=ProvenVersions)
    admission: Admission = field(default_factory=DirectAdmission)
    limits: SilenceLimits = field(default_factory=SilenceLimits)
    warn: Callable[[str], None] = log_warning


async def sync_weights_to_engines(
    engines: Sequence[InferenceEngine],
    plan: UpdatePlan,
    *,
    publish: bool = True,
    on_publish: Callable[[], None] = lambda: None,
) -> SyncReport:
    """What became of each engine, when all have decided. At least one has proven the version, which is
    published.

    An engine that reports the version and proved it before is only probed. A failure goes to
    `admission.fail` and to `warn`. `on_publish` is called right after `admission.publish`. Raises
    WeightSyncError that lists every failure when no engine could be verified: nothing is published then.
    Raises BackendError at once when the trainer fails. Then, and when cancelled, every paused engine is
    resumed (shielded, `limits.resume` at most) and those that had not committed are out of service.
    """
    for name, count in Counter(engine.features.name for engine in engines).items():
        if count > 1:
            raise WeightSyncError(f"{count} engines are named {name!r}; give each a `name` of its own")
    updates = [EngineUpdate(engine.features.name) for engine in engines]
    gathering = None if plan.load_together is None else _Gathering(engines, plan.load_together)
    trainer_failures: list[BackendError] = []
    try:
        async with trio.open_nursery() as nursery:

            async def update_engine(run: _Run) -> None:
                try:
                    await _update_engine(run)
                except BackendError as error:
                    trainer_failures.append(error)
                    nursery.cancel_scope.cancel()

            for engine, update in zip(engines, updates, strict=True):
                nursery.start_soon(update_engine, _Run(engine, plan, gathering, update))
    finally:
        if publish and any(update.committed for update in updates):
            plan.admission.publish(plan.version)
            on_publish()
            reach("sync.published")
    if trainer_failures:
        raise trainer_failures[0]
    report = SyncReport(plan.version, tuple(updates))
    if len(report.failed) == len(updates):
        listed = report.describe_failures() or "  there is no engine that could be reached"
        cause = updates[0].error if updates else None
        raise WeightSyncError(
            f"no engine could be brought to weight version {plan.version}:\n{listed}"
        ) from cause
    return report


class _Gathering:
    """Engines that load together, as soon as each is paused or will not come. The transport limits its own
    silence.
    """

    def __init__(self, engines: Sequence[InferenceEngine], load_together: LoadTogether) -> None:
        self._expected = {engine.features.name for engine in engines}
        self._load_together = load_together
        self._here: dict[str, InferenceEngine] = {}
        self._all_here, self._done = trio.Event(), trio.Event()
        self._outcomes: Mapping[str, Exception | None] = {}

    def leave(self, name: str) -> None:
        """Nobody waits for engine `name` any more."""
        self._expected.discard(name)
        if not self._expected:
            self._all_here.set()

    async def load(self, engine: InferenceEngine) -> None:
        """Returns when `engine` has the weights. Raises its error."""
        name, first = engine.features.name, not self._here
        self._here[name] = engine
        self.leave(name)
        if first:
            await self._all_here.wait()
            try:
                self._outcomes = await self._load_together(tuple(self._here.values()))
            except Exception as error:  # of the transport as a whole
                self._outcomes = dict.fromkeys(self._here, error)
            self._done.set()
        await self._done.wait()
        failure = self._outcomes.get(name, WeightSyncError(f"the transport says nothing of {name}"))
        if failure is not None:
            raise failure


# --- one engine ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Run:
    """One engine, on its way to the version."""

    engine: InferenceEngine
    plan: UpdatePlan
    gathering: _Gathering | None
    update: EngineUpdate

    def leave_gathering(self) -> None:
        if self.gathering is not None:
            self.gathering.leave(self.update.name)

    async def watch(self, work: Callable[[], Awaitable[T]]) -> T:
        """What `work` returns, under the silence limit of the phase."""
        return await watch_progress(
            work,
            silence_s=getattr(self.plan.limits, self.update.phase),
            read_progress=lambda: read_progress(self.engine),
            what=f"engine {self.update.name}: phase {self.update.phase}",
        )


async def _update_engine(run: _Run) -> None:
    """Commits or fails the engine. Raises BackendError when the trainer failed, and nothing else."""
    engine, plan, update = run.engine, run.plan, run.update
    plan.admission.close_admission(engine)
    try:
        await _bring_to_version(run)
        update.enter("commit")
        if not plan.admission.commit(engine, plan.version):
            raise WeightSyncError("the engine died, or left, while it was updated")
        update.committed = True
        reach("sync.committed")
    except BackendError as error:
        update.error = WeightSyncError(f"the trainer failed during the update: {error}")
        raise
    except Exception as error:  # whatever it is, it is this engine's, and the others go on
        update.error = error
        plan.proven.doubt(update.name)
        plan.warn(
            f"engine {update.name} is out of service: the update to weight version {plan.version} failed in"
            f" phase {update.phase}: {type(error).__name__}: {error}"
        )
    finally:
        update.ended_at = trio.current_time()
        run.leave_gathering()
        if not update.committed:
            cancelled = WeightSyncError(f"the update was cancelled in phase {update.phase}")
            plan.admission.fail(engine, update.error or cancelled)


async def _bring_to_version(run: _Run) -> None:
    """Returns when the engine has proven the version."""
    engine, plan, update = run.engine, run.plan, run.update
    if engine.features.shares_weights:
        await _check_version(run)
        return
    loaded = plan.proven.has_proven(update.name, plan.version)
    if loaded:
        update.enter("set_version")
        loaded = await run.watch(engine.weight_version) == plan.version
    if not loaded:
        plan.proven.doubt(update.name)
        await _replace_weights(run)
    run.leave_gathering()
    update.enter("probe")
    scored = await run.watch(lambda: score_by_engine(plan.probe, engine, version=plan.version))
    checksum = await _read_checksum(run) if engine.features.checksum else None
    proof = Proof(plan.version, scored, plan.expected, checksum, plan.digest)
    check_agreement(proof, tolerance=plan.probe.tolerance)
    for previous in plan.proven.all(update.name):  # a restart may bring back any earlier version's weights
        check_change(previous, proof)
    plan.proven.add(update.name, proof)
    update.proof = proof


async def _replace_weights(run: _Run) -> None:
    """The engine runs again when this returns or raises, unless it cannot be reached."""
    engine, update = run.engine, run.update
    paused_at, resumed = trio.current_time(), False
    try:
        update.enter("pause")
        await run.watch(lambda: engine.pause("keep" if engine.features.keep_pause else "abort"))
        update.enter("load")
        reach("sync.before_load")
        if run.gathering is not None:
            await run.gathering.load(engine)
        else:
            await run.watch(lambda: run.plan.load(engine))
        await _check_version(run)
        reach("sync.after_load")
        update.enter("resume")
        await run.watch(engine.resume)
        resumed = True
    finally:
        if not resumed:
            await _resume_after_failure(run)
        update.pause_s = trio.current_time() - paused_at


async def _resume_after_failure(run: _Run) -> None:
    """Attempts to resume whatever is being raised or cancelled; its own failure is a warning."""
    plan, limit_s = run.plan, run.plan.limits.resume
    what = f"engine {run.update.name} was not resumed after its update failed"
    with trio.move_on_after(limit_s, shield=True) as scope:
        try:
            await run.engine.resume()
        except Exception as error:
            plan.warn(f"{what}: {type(error).__name__}: {error}")
    if scope.cancelled_caught:
        plan.warn(f"{what}: it did not answer within {limit_s:g} s")


async def _check_version(run: _Run) -> None:
    run.update.enter("set_version")
    reported = await run.watch(run.engine.weight_version)
    if reported != run.plan.version:
        raise WeightSyncError(
            f"the engine reports weight version {reported} after an update to version {run.plan.version}"
        )


async def _read_checksum(run: _Run) -> str | None:
    """The checksum; None, with a warning, from an engine that never gave one. Raises WeightSyncError if it
    gave one before.
    """
    checksum, why, cause = None, "it answered none", None
    try:
        checksum = await run.watch(run.engine.checksum)
    except EngineError as error:
        why, cause = f"{type(error).__name__}: {error}", error
    if checksum is not None:
        return checksum
    given = [proof.version for proof in run.plan.proven.all(run.update.name) if proof.checksum is not None]
    if given:
        raise WeightSyncError(
            f"the engine gave no checksum of its weights, as it did at version {given[-1]}: {why}"
        ) from cause
    run.plan.warn(f"engine {run.update.name} gave no checksum of its weights: {why}")
    return None


def read_progress(engine: InferenceEngine) -> Hashable:
    """An engine's statistics, which move while it makes progress; those of its connections are left out,
    because health checks move them too.
    """
    return tuple(
        sorted((name, value) for name, value in engine.statistics().items() if not name.startswith("http/"))
    )


async def watch_progress(
    work: Callable[[], Awaitable[T]], *, silence_s: float, read_progress: Callable[[], Hashable], what: str
) -> T:
    """What `work` returns or raises. Raises EngineSilent when `read_progress` gives the same value twice,
    `silence_s` seconds apart.
    """
    results: list[T] = []
    failure: Exception | None = None

    async def look(scope: trio.CancelScope) -> None:
        seen: Hashable = read_progress()
        while True:
            await trio.sleep(silence_s)
            now = read_progress()
            if now == seen:
                scope.cancel()
                return
            seen = now

    async with trio.open_nursery() as nursery:
        with trio.CancelScope() as scope:
            nursery.start_soon(look, scope)
            try:
                results.append(await work())
            except Exception as error:  # kept from the nursery, which would put it into a group
                failure = error
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
    if not results:
        raise EngineSilent(f"{what} took more than {silence_s:g} s without any progress")
    return results[0]
