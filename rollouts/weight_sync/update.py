"""One weight update of many engines at once, each in its own task. No torch, no disk: what loads is an
argument.

    every engine:  close admission ─► pause ─► load ─► set version ─► resume ─► probe ─► commit
                                        └── fails, is silent or is cancelled ──► resume (attempted always) ──► fail
    when all have decided, and one at least has committed:  publish

An engine that fails is out of service and keeps nobody waiting. None is left paused. When the update is
cancelled, or the trainer fails, those that have committed by then are published and the rest is out of
service: whoever serves has the published version.
"""

from __future__ import annotations

import logging
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeVar

import trio

from rollouts.crash_points import reach
from rollouts.errors import BackendError, EngineError, EngineSilent, WeightSyncError
from rollouts.protocols import InferenceEngine
from rollouts.weight_sync.admission import Admission, DirectAdmission
from rollouts.weight_sync.probe import (
    Judge,
    Probe,
    ProbeReply,
    Verified,
    ask_probe,
    check_agreement,
    check_change,
)

T = TypeVar("T")
Phase = Literal["close", "pause", "load", "set_version", "resume", "probe", "commit"]
LoadWeights = Callable[[InferenceEngine], Awaitable[object]]
"""Brings new weights into one paused engine, and names their version."""
LoadTogether = Callable[[Sequence[InferenceEngine]], Awaitable[Mapping[str, Exception | None]]]
"""Brings new weights into several paused engines at once; by engine name what went wrong, None where nothing did."""


@dataclass(frozen=True, slots=True)
class SilenceLimits:
    """Seconds that an engine may spend in each phase without any sign of progress. There is no limit on the
    whole.
    """

    pause: float = 120.0
    load: float = 900.0  # a server that reads a large model from disk says nothing meanwhile
    set_version: float = 60.0
    resume: float = 60.0
    probe: float = 120.0


@dataclass(frozen=True, slots=True)
class EngineUpdate:
    """What became of one engine."""

    name: str
    phase: Phase  # reached last
    error: Exception | None  # why it is out of service; None: it committed
    pause_s: float  # seconds between pause and resume; 0 where there was nothing to load
    reply: ProbeReply | None  # its answer to the probe; None for an engine that shares the trainer's weights
    by_checksum: bool  # only the checksum showed that the weights changed
    phases: tuple[
        tuple[Phase, float, float], ...
    ] = ()  # gone through, in order: when it began, seconds ago at the end of the update, and how long


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What became of all engines, in the order in which they were given."""

    version: int
    engines: tuple[EngineUpdate, ...]

    @property
    def failed(self) -> tuple[EngineUpdate, ...]:
        return tuple(update for update in self.engines if update.error is not None)

    @property
    def verified(self) -> tuple[EngineUpdate, ...]:
        return tuple(update for update in self.engines if update.error is None)

    def describe_failures(self) -> str:
        """One line for each engine that failed: its name, the phase, the error."""
        return "\n".join(
            f"  {update.name}: {update.phase}: {type(update.error).__name__}: {update.error}"
            for update in self.failed
        )

    def metrics(self) -> dict[str, float]:
        """Numbers for a row of metrics; empty when every engine shares the trainer's weights."""
        replies = [update.reply for update in self.verified if update.reply is not None]
        if not replies and not self.failed:
            return {}
        metrics = {
            "time/weight_sync_pause": max(update.pause_s for update in self.engines),
            "weight_sync/engines_updated": float(len(self.verified)),
            "weight_sync/engines_failed": float(len(self.failed)),
            "weight_sync/verified_by_checksum": float(sum(update.by_checksum for update in self.verified)),
        }
        if replies:
            metrics["weight_sync/probe_difference/max"] = max(reply.difference for reply in replies)
        return metrics


class ProbeMemory:
    """What each engine, by name, proved at its first version and at the last few, restarts in between
    included.
    """

    def __init__(self, *, versions: int = 4) -> None:
        self._versions = versions
        self._proven: dict[str, list[Verified]] = {}  # oldest first
        self._doubted: set[str] = (
            set()
        )  # whose last update failed: what they say of their version counts for nothing

    def remember(self, name: str, verified: Verified) -> None:
        """Of one version the longest answer is kept: a later one may have been compared on its beginning
        only.
        """
        for other in self.all(name):
            if other.reply.version == verified.reply.version and len(other.reply.token_ids) > len(
                verified.reply.token_ids
            ):
                verified = replace(verified, reply=other.reply)
        kept = [
            other for other in self._proven.get(name, []) if other.reply.version != verified.reply.version
        ]
        self._proven[name] = [*kept[:1], *kept[1:][-self._versions + 1 :], verified]
        self._doubted.discard(name)

    def doubt(self, name: str) -> None:
        """An update of engine `name` failed: it has to load again, whatever version it reports."""
        self._doubted.add(name)

    def has_proven(self, name: str, version: int) -> bool:
        """Whether `version` is what engine `name` proved last, and no update of it failed since. It may have
        been restarted.
        """
        proven = self.all(name)
        return name not in self._doubted and bool(proven) and proven[-1].reply.version == version

    def all(self, name: str) -> Sequence[Verified]:
        """Everything remembered of engine `name`, oldest first."""
        return self._proven.get(name, ())

    def reply(self, version: int, name: str) -> ProbeReply | None:
        """The longest verified answer of `version`, of equals the engine's own; None when nobody's is
        remembered.
        """
        everyone = [
            verified.reply for proven in (self.all(name), *self._proven.values()) for verified in proven
        ]
        return max(
            (reply for reply in everyone if reply.version == version),
            key=lambda reply: len(reply.token_ids),
            default=None,
        )


@dataclass(frozen=True, slots=True)
class _Plan:
    """What all engines of one update share."""

    version: int
    probe: Probe
    judge: Judge
    memory: ProbeMemory
    digest: str | None
    load: LoadWeights
    gathering: _Gathering | None
    admission: Admission
    limits: SilenceLimits
    read_progress: Callable[[InferenceEngine], Hashable]
    warn: Callable[[str], None]
    stop: Callable[
        [BackendError], None
    ]  # ends the whole update: what failed is the trainer, and no engine is to blame

    def stay_away(self, engine: InferenceEngine) -> None:
        """Nobody waits for `engine` to load with the others."""
        if self.gathering is not None:
            self.gathering.stay_away(engine)


class _Gathering:
    """Engines that load together: when each has come or will not come, the first to have come calls for all.

    There is no limit here on the transfer's silence: only the transport sees whether it moves.
    """

    def __init__(self, engines: Sequence[InferenceEngine], load_together: LoadTogether) -> None:
        self._expected = {engine.features.name for engine in engines}
        self._load_together = load_together
        self._here: dict[str, InferenceEngine] = {}
        self._all_here = trio.Event()
        self._done = trio.Event()
        self._outcomes: Mapping[str, Exception | None] = {}

    def stay_away(self, engine: InferenceEngine) -> None:
        if engine.features.name not in self._here:
            self._settle(engine.features.name)

    def _settle(self, name: str) -> None:
        self._expected.discard(name)
        if not self._expected:
            self._all_here.set()

    async def load(self, engine: InferenceEngine) -> None:
        """Returns when `engine` has the weights. Raises what its transport says of it."""
        name = engine.features.name
        first = not self._here
        self._here[name] = engine
        self._settle(name)
        if first:
            await self._all_here.wait()
            try:
                self._outcomes = await self._load_together(tuple(self._here.values()))
            except Exception as error:  # of the transport as a whole: each engine's
                self._outcomes = dict.fromkeys(self._here, error)
            self._done.set()
        await self._done.wait()
        failure = self._outcomes.get(name, WeightSyncError(f"the transport says nothing of {name}"))
        if failure is not None:
            raise failure


@dataclass(slots=True, eq=False)
class _Run:
    """One engine under way."""

    engine: InferenceEngine
    plan: _Plan
    name: str = field(init=False)
    phase: Phase = "close"
    error: Exception | None = None
    pause_s: float = 0.0
    reply: ProbeReply | None = None
    by_checksum: bool = False
    committed: bool = False
    entered: list[tuple[Phase, float]] = field(
        default_factory=list
    )  # phases with the time, of trio's clock, at which they began
    ended_at: float = 0.0

    def __post_init__(self) -> None:
        self.name = self.engine.features.name

    def enter(self, phase: Phase) -> None:
        self.phase = phase
        self.entered.append((phase, trio.current_time()))

    def outcome(self) -> EngineUpdate:
        now, ends = trio.current_time(), [*(began for _, began in self.entered[1:]), self.ended_at]
        phases: list[tuple[Phase, float, float]] = []
        for (phase, began), end in zip(
            self.entered, ends, strict=False
        ):  # ends has one more where nothing was entered
            phases.append((phase, now - began, end - began))
        return EngineUpdate(
            self.name, self.phase, self.error, self.pause_s, self.reply, self.by_checksum, tuple(phases)
        )


def read_statistics(engine: InferenceEngine) -> Hashable:
    """What moves while an engine makes progress: its statistics, but for those of its connections, which
    health checks move too.
    """
    return tuple(
        sorted((name, value) for name, value in engine.statistics().items() if not name.startswith("http/"))
    )


def log_warning(text: str) -> None:
    logging.getLogger("rollouts").warning("%s", text)


async def sync_weights_to_engines(
    engines: Sequence[InferenceEngine],
    checkpoint_path: Path | None,
    *,
    version: int,
    probe: Probe,
    judge: Judge,
    memory: ProbeMemory | None = None,
    digest: str | None = None,
    admission: Admission | None = None,
    load: LoadWeights | None = None,
    load_together: LoadTogether | None = None,
    limits: SilenceLimits | None = None,
    read_progress: Callable[[InferenceEngine], Hashable] = read_statistics,
    publish: bool = True,
    on_publish: Callable[[], None] = lambda: None,
    warn: Callable[[str], None] = log_warning,
) -> SyncReport:
    """What became of each engine, when all have decided. At least one serves `version` and has proven it, and
    `version` is published.

    All engines at once. Each loads the snapshot `checkpoint_path`, or is given weights by `load`;
    `load_together` is called once, when every engine is paused or out, with those that are paused. `judge`
    tells what the trainer thinks of an answer to `probe`; `memory` holds what engines proved before, and
    learns what they prove now; `digest` is the snapshot's. An engine that reports `version` and proved it
    before is only probed. One that fails is told to `admission.fail` and to `warn`. `on_publish` is called
    right after `admission.publish`. Raises WeightSyncError that lists each engine's failure when nobody could
    be verified; nothing is published then. Raises BackendError at once when the trainer fails (judging, or
    giving weights). Then, and when cancelled, every paused engine is resumed (shielded, `limits.resume` at
    most), those that had not committed are out, and what the others committed is published.
    """
    check_names(engines)
    if load is None and load_together is None and checkpoint_path is None:
        raise WeightSyncError(
            "an update needs a snapshot (checkpoint_path) or a way to load (load, load_together); give one of"
            " them"
        )
    failures: list[BackendError] = []
    nursery_scope = trio.CancelScope()

    def stop(error: BackendError) -> None:
        failures.append(error)
        nursery_scope.cancel()

    plan = _Plan(
        version=version,
        probe=probe,
        judge=judge,
        memory=memory if memory is not None else ProbeMemory(),
        digest=digest,
        load=load or load_from(checkpoint_path, version),
        gathering=_Gathering(engines, load_together) if load_together is not None else None,
        admission=admission if admission is not None else DirectAdmission(),
        limits=limits or SilenceLimits(),
        read_progress=read_progress,
        warn=warn,
        stop=stop,
    )
    runs = [_Run(engine, plan) for engine in engines]
    try:
        with nursery_scope:
            async with trio.open_nursery() as nursery:
                for run in runs:
                    nursery.start_soon(_update_engine, run)
    finally:
        if publish and any(run.committed for run in runs):
            plan.admission.publish(version)
            on_publish()
            reach("sync.published")
    if failures:
        raise failures[0]
    report = SyncReport(version, tuple(run.outcome() for run in runs))
    if not report.verified:
        listed = report.describe_failures() or "  there is no engine that could be reached"
        cause = report.failed[0].error if report.failed else None
        raise WeightSyncError(f"no engine could be brought to weight version {version}:\n{listed}") from cause
    return report


def check_names(engines: Sequence[InferenceEngine]) -> None:
    """Raises WeightSyncError if two engines have one name: what they prove is remembered by it."""
    for name, count in Counter(engine.features.name for engine in engines).items():
        if count > 1:
            raise WeightSyncError(
                f"{count} engines are named {name!r}; names must be unique in an update, give each its own"
                " `name`"
            )


def load_from(checkpoint_path: Path | None, version: int) -> LoadWeights:
    """Loads a snapshot from disk."""

    async def load(engine: InferenceEngine) -> None:
        assert checkpoint_path is not None
        await engine.update_weights_from_checkpoint(checkpoint_path, version)

    return load


# --- one engine ---------------------------------------------------------------------------------------------


async def _update_engine(run: _Run) -> None:
    plan = run.plan
    try:
        await _bring_to_version(run)
        run.enter("commit")
        if not plan.admission.commit(run.engine, plan.version):
            raise WeightSyncError("the engine died, or left, while it was updated")
        run.committed = True
        reach("sync.committed")
    except BackendError as error:
        run.error = error
        plan.admission.fail(
            run.engine,
            WeightSyncError(
                f"the trainer failed during the update to weight version {plan.version}: {error}"
            ),
        )
        plan.stop(error)
    except Exception as error:  # whatever it is, it is this engine's, and the others go on
        run.error = error
        plan.memory.doubt(run.name)
        plan.warn(
            f"engine {run.name} is out of service: the update to weight version {plan.version} failed in"
            f" phase {run.phase}: {type(error).__name__}: {error}"
        )
        plan.admission.fail(run.engine, error)
    finally:
        run.ended_at = trio.current_time()
        plan.stay_away(run.engine)
        if not run.committed and run.error is None:
            plan.admission.fail(
                run.engine,
                WeightSyncError(
                    f"the update to weight version {plan.version} was cancelled in phase {run.phase}"
                ),
            )


async def _bring_to_version(run: _Run) -> None:
    """Returns when the engine has proven the version; what it proved is remembered."""
    plan, engine = run.plan, run.engine
    plan.admission.close_admission(engine)
    if engine.features.shares_weights:
        await _check_version(run)
        return
    if not (plan.memory.has_proven(run.name, plan.version) and await _reports_version(run)):
        plan.memory.doubt(run.name)
        await _replace_weights(run)
    plan.stay_away(engine)
    run.enter("probe")
    request_id = f"probe-{run.name}-v{plan.version}-{uuid.uuid4().hex[:8]}"
    completion = await _watch(
        run, lambda: ask_probe(plan.probe, engine, version=plan.version, request_id=request_id)
    )
    run.reply = await plan.judge(engine, completion)
    check_agreement(run.reply, tolerance=plan.probe.tolerance_of(run.name))
    now = Verified(run.reply, await _read_checksum(run), plan.digest)
    for proven in plan.memory.all(
        run.name
    ):  # a restarted engine may have the weights of any version that it once had
        run.by_checksum = check_change(proven, now)
    plan.memory.remember(run.name, now)


async def _replace_weights(run: _Run) -> None:
    """The engine runs again when this returns or raises, unless it cannot be reached."""
    plan, engine = run.plan, run.engine
    paused_at, resumed = trio.current_time(), False
    try:
        run.enter("pause")
        await _watch(run, lambda: engine.pause("keep" if engine.features.keep_pause else "abort"))
        run.enter("load")
        reach("sync.before_load")
        if plan.gathering is not None:
            await plan.gathering.load(engine)
        else:
            await _watch(run, lambda: plan.load(engine))
        await _check_version(run)
        reach("sync.after_load")
        run.enter("resume")
        await _watch(run, engine.resume)
        resumed = True
    finally:
        if not resumed:
            await _resume_after_failure(run)
        run.pause_s = trio.current_time() - paused_at


async def _resume_after_failure(run: _Run) -> None:
    """Attempts to resume, whatever is being raised or cancelled; ends within the limit. What it raises is a
    warning beside the failure.
    """
    with trio.move_on_after(run.plan.limits.resume) as scope:
        scope.shield = True
        try:
            await run.engine.resume()
        except Exception as error:
            run.plan.warn(
                f"engine {run.name} could not be resumed after its update failed: {type(error).__name__}:"
                f" {error}"
            )
    if scope.cancelled_caught:
        run.plan.warn(
            f"engine {run.name} did not resume within {run.plan.limits.resume:g} s after its update failed"
        )


async def _check_version(run: _Run) -> None:
    run.enter("set_version")
    reported = await _watch(run, run.engine.weight_version)
    if reported != run.plan.version:
        raise WeightSyncError(
            f"the engine reports weight version {reported} after an update to version {run.plan.version}"
        )


async def _reports_version(run: _Run) -> bool:
    run.enter("set_version")
    return await _watch(run, run.engine.weight_version) == run.plan.version


async def _read_checksum(run: _Run) -> str | None:
    """The checksum; None where there is none. Raises WeightSyncError where there was one before: who says
    nothing now may hide old weights.
    """
    if not run.engine.features.checksum:
        return None
    checksum, why, cause = None, "it answered none", None
    try:
        checksum = await _watch(run, run.engine.checksum)
    except EngineError as error:
        why, cause = f"{type(error).__name__}: {error}", error
    if checksum is not None:
        return checksum
    given = [
        verified.reply.version for verified in run.plan.memory.all(run.name) if verified.checksum is not None
    ]
    if given:
        raise WeightSyncError(
            f"the engine gave no checksum of its weights, as it did at version {given[-1]}: {why}"
        ) from cause
    run.plan.warn(f"engine {run.name} gave no checksum of its weights: {why}")
    return None


async def _watch(run: _Run, work: Callable[[], Awaitable[T]]) -> T:
    """What `work` returns. Raises EngineSilent once the phase has shown no progress for as long as its limit
    allows.
    """
    limits: Mapping[Phase, float] = {
        name: getattr(run.plan.limits, name) for name in ("pause", "load", "set_version", "resume", "probe")
    }
    return await watch_progress(
        work,
        silence_s=limits[run.phase],
        read_progress=lambda: run.plan.read_progress(run.engine),
        what=f"engine {run.name}: phase {run.phase}",
    )


async def watch_progress(
    work: Callable[[], Awaitable[T]], *, silence_s: float, read_progress: Callable[[], Hashable], what: str
) -> T:
    """What `work` returns or raises. Looks every `silence_s` seconds: if nothing moved since the last look,
    `work` is cancelled: EngineSilent.
    """
    results: list[T] = []
    failure: Exception | None = None

    async def look() -> None:
        seen = read_progress()
        while True:
            await trio.sleep(silence_s)
            now = read_progress()
            if now == seen:
                scope.cancel()
                return
            seen = now

    async with trio.open_nursery() as nursery:
        with trio.CancelScope() as scope:
            nursery.start_soon(look)
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
