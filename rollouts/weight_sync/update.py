"""One weight update of many engines at once, each in its own task. No torch, no disk.

    every engine:  close admission ─► pause ─► load ─► set version ─► resume ─► probe ─► commit
                                        └── fails, is silent or is cancelled ──► resume, in any case ──► fail
    when all have decided, and at least one has committed:  publish

An engine that fails serves nobody and delays nobody. When the update is cancelled, or the trainer fails, the
version is published if an engine has committed it; the other engines are out of service.

The probe: a fixed list of tokens that the trainer and every engine score as a prompt.

the engine's log-probs ──► agree with the trainer's within the tolerance?
                       └─► differ from what the same engine said before, where the weights differ?
"""

import logging
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import numpy as np
import trio

from rollouts.crash_points import reach
from rollouts.engines.fleet import Fleet
from rollouts.engines.wire import START_S, ask_watched
from rollouts.errors import BackendError, EngineError, WeightSyncError
from rollouts.metrics.spans import SpanRecorder
from rollouts.processes.nurseries import run_all
from rollouts.protocols import InferenceEngine, Say, TrainingBackend
from rollouts.types import (
    FloatArray,
    GenerateRequest,
    IntArray,
    Numbers,
    RolloutBatch,
    SamplingParams,
    T,
    live,
)

# --- the probe ----------------------------------------------------------------------------------------------


PROBE_TOKENS = 16
NOTICEABLE = 1e-5  # nats; an engine's rounding may hide a smaller change of the trainer's log-probs


class Probe(NamedTuple):
    """What is scored, and how far engine and trainer may differ."""

    tokens: IntArray  # [T], at least 2
    tolerance: float  # nats, of the mean over the tokens


class Proof(NamedTuple):
    """What an engine said at a version that it has proven."""

    version: int
    engine_log_probs: FloatArray  # [T] nats
    trainer_log_probs: FloatArray  # [T] nats
    checksum: str | None  # of the engine's weights, where it gives one
    digest: str | None  # of the snapshot that it loaded; None: the weights came in memory
    partial: bool = False  # the checksum: it is of some weights

    @property
    def difference(self) -> float:
        """Mean |engine − trainer| in nats over the tokens after the first; NaN if either has one."""
        return float(np.abs(self.engine_log_probs - self.trainer_log_probs)[1:].mean())


def make_probe(vocab_size: int, *, tolerance: float) -> Probe:
    """A probe of ids spread evenly over the vocabulary."""
    return Probe(np.linspace(0, vocab_size - 1, num=PROBE_TOKENS + 2, dtype=np.int64)[1:-1], tolerance)


async def score_by_trainer(probe: Probe, backend: TrainingBackend) -> FloatArray:
    """[T] the trainer's log-probs of the probe, 0 for the first token. Raises BackendError."""
    mask = np.arange(len(probe.tokens)) > 0
    return (await backend.forward(RolloutBatch(tokens=(probe.tokens,), loss_masks=(mask,))))[0]


async def score_by_engine(probe: Probe, engine: InferenceEngine, version: int) -> FloatArray:
    """[T] the engine's log-probs of the probe, 0 for the first token. Raises WeightSyncError if it does not
    score the probe, or answers with another version; what the engine raises.
    """
    request = GenerateRequest(
        request_id=f"probe-{engine.features.name}-v{version}-{uuid.uuid4().hex[:8]}",
        prompt_ids=probe.tokens,
        sampling=SamplingParams(max_new_tokens=1),
        score_prompt=True,
    )
    completion = await engine.generate(request)
    log_probs, versions = completion.prompt_log_probs, completion.weight_versions.tolist()
    if log_probs is None or log_probs.shape != probe.tokens.shape or not versions:
        raise WeightSyncError(
            f"the engine did not score the probe ({completion.finish_reason}); its weights cannot be verified"
        )
    if versions != [version]:
        raise WeightSyncError(f"the engine scored the probe with version {versions[0]} instead of {version}")
    return log_probs


def check_agreement(proof: Proof, *, tolerance: float) -> None:
    """Raises WeightSyncError unless engine and trainer agree on the probe."""
    if not proof.difference <= tolerance:  # NaN is no agreement
        raise WeightSyncError(
            f"the engine at version {proof.version} differs from the trainer by {proof.difference:.3g} nats"
            f" on the probe; the tolerance is {tolerance:.3g}: it does not serve the weights that were sent"
        )


def check_change(previous: Proof, now: Proof) -> None:
    """Raises WeightSyncError if the weights differ from those of `previous` and the engine does not show it.

    The weights differ when the snapshots do or, without snapshots, when the trainer's log-probs moved. Where
    both checksums are known they decide, because an engine with varying arithmetic scores old weights anew;
    but that some weights are the same, as a merged adapter leaves some, says nothing.
    """
    if None not in (previous.digest, now.digest):
        differ = previous.digest != now.digest
    else:
        differ = np.abs(previous.trainer_log_probs - now.trainer_log_probs).max() > NOTICEABLE
    same = np.array_equal(previous.engine_log_probs, now.engine_log_probs)
    how = "scores the probe exactly as before"
    says = not now.partial or previous.checksum != now.checksum
    if says and None not in (previous.checksum, now.checksum):
        same, how = previous.checksum == now.checksum, f"still has the checksum {now.checksum}"
    if previous.version != now.version and differ and same:
        raise WeightSyncError(
            f"the engine reports version {now.version} but {how}, as at version {previous.version}, although"
            " the trainer's weights differ: it still serves the old weights"
        )


# --- one update ---------------------------------------------------------------------------------------------


LoadTogether = Callable[[Sequence[InferenceEngine]], Awaitable[Mapping[str, Exception]]]
"""Loads new weights into several paused engines at once; by engine name the error of each that failed."""
log_warning = logging.getLogger("rollouts").warning
KEPT_PROOFS = 4  # of each engine: its first version and the last ones


class SilenceLimits(NamedTuple):
    """Seconds that an engine may spend in each phase without progress. The whole update has no limit."""

    pause: float = 120.0
    load: float = 900.0  # a server says nothing while it reads a large model from disk
    set_version: float = 60.0
    resume: float = 60.0
    probe: float = START_S  # it may be the first request of a server


class ProvenVersions:
    """What each engine, by name, proved at its first version and at the last few; restarts keep it."""

    def __init__(self) -> None:
        self.proofs: dict[str, list[Proof]] = {}  # oldest first
        self.holds: dict[str, int] = {}  # the version proven last, unless an update failed since

    def add(self, name: str, proof: Proof) -> None:
        kept = [other for other in self.proofs.get(name, ()) if other.version != proof.version]
        self.proofs[name] = [*kept[:1], *kept[1:][2 - KEPT_PROOFS :], proof]
        self.holds[name] = proof.version


class UpdatePlan(NamedTuple):
    """What all engines of one update share."""

    version: int
    probe: Probe
    expected: FloatArray  # [T] the trainer's log-probs of the probe at `version`
    # loads new weights into one paused engine and names their version
    load: Callable[[InferenceEngine], Awaitable[object]]
    digest: str | None  # of the snapshot that is loaded
    proven: ProvenVersions
    fleet: Fleet | None  # None: no answer can be held back and no engine taken out
    limits: SilenceLimits
    warn: Say
    spans: SpanRecorder | None
    load_together: LoadTogether | None = None  # used in place of `load`, once all engines are paused or out


async def sync_weights_to_engines(
    engines: Sequence[InferenceEngine],
    plan: UpdatePlan,
    *,
    publish: Callable[[], None] = lambda: None,
) -> "list[EngineUpdate]":
    """What became of each engine, when all have decided. At least one has proven the version, which
    `publish` was called for.

    An engine that reports the version and proved it before is only probed. Raises WeightSyncError that lists
    every failure when no engine could be verified. Raises BackendError at once when the trainer fails. Then,
    and when cancelled, every paused engine is resumed (shielded, `limits.resume` at most) and those that had
    not committed are out of service.
    """
    for name, count in Counter(engine.features.name for engine in engines).items():
        if count > 1:
            raise WeightSyncError(f"{count} engines are named {name!r}; give each a `name` of its own")
    sender, receiver = trio.open_memory_channel[InferenceEngine](len(engines))
    loaded, errors = trio.Event(), dict[str, Exception]()
    updates = [EngineUpdate(engine, plan, sender.clone(), loaded, errors) for engine in engines]
    sender.close()

    async def load_together() -> None:
        """As soon as each engine is paused, or will not come. The transport limits its own silence."""
        paused = [engine async for engine in receiver]
        if paused and plan.load_together:
            try:
                errors.update(await plan.load_together(paused))
            except Exception as error:  # of the transport as a whole
                errors.update(dict.fromkeys([engine.features.name for engine in paused], error))
            loaded.set()

    try:
        await run_all(*(update.run for update in updates), load_together)
    finally:
        committed = any(update.committed for update in updates)
        if committed:
            publish()
    if not committed:
        listed = describe_failures(updates) or "  there is no engine that could be reached"
        raise WeightSyncError(
            f"no engine could be brought to weight version {plan.version}:\n{listed}"
        ) from (updates[0].error if updates else None)
    return updates


def describe_failures(updates: "Sequence[EngineUpdate]") -> str:
    """One line for each engine that failed: its name, the phase, the error."""
    return "\n".join(
        f"  {update.name}: {update.phase}: {type(update.error).__name__}: {update.error}"
        for update in updates
        if not update.committed
    )


def compute_sync_metrics(updates: "Sequence[EngineUpdate]") -> Numbers:
    """Numbers for a row of metrics; empty when every engine shares the trainer's weights."""
    failed = sum(not update.committed for update in updates)
    differences = [update.proof.difference for update in updates if update.committed and update.proof]
    if not differences and not failed:
        return {}
    metrics = {
        "time/weight_sync_pause": max(update.pause_s for update in updates),
        "weight_sync/engines_updated": len(updates) - failed,
        "weight_sync/engines_failed": failed,
    }
    if differences:
        metrics["weight_sync/probe_difference/max"] = max(differences)
    return metrics


@live
class EngineUpdate:
    """One engine on its way to the version, and what became of it."""

    engine: InferenceEngine
    plan: UpdatePlan
    # takes it once it is paused, to be loaded with the others; closed when it will not come any more
    paused: trio.MemorySendChannel[InferenceEngine]
    loaded: trio.Event  # all those together, but for the errors by name
    load_errors: Mapping[str, Exception]
    phase: str = "close"  # reached last: a field of SilenceLimits, or commit
    error: Exception | None = None  # why it is out of service
    committed: bool = False
    pause_s: float = 0.0  # seconds between pause and resume; 0 where there was nothing to load
    proof: Proof | None = None  # None for an engine that shares the trainer's weights

    @property
    def name(self) -> str:
        return self.engine.features.name

    async def run(self) -> None:
        """Commits or fails the engine. Raises BackendError when the trainer failed, and nothing else."""
        plan, fleet = self.plan, self.plan.fleet
        if fleet:
            fleet.close_admission(self.engine)
        try:
            with self._measure(""):
                await self._bring_to_version()
            self.phase = "commit"
            if fleet and not fleet.commit(self.engine, plan.version):
                raise WeightSyncError("the engine died, or left, while it was updated")
            self.committed = True
            reach("sync.committed")
        except BackendError as error:
            self.error = WeightSyncError(f"the trainer failed during the update: {error}")
            raise
        except Exception as error:  # whatever it is, it is this engine's, and the others go on
            self.error = error
            plan.warn(
                f"engine {self.name} is out of service: the update to weight version {plan.version} failed in"
                f" phase {self.phase}: {type(error).__name__}: {error}"
            )
        finally:
            self.paused.close()
            if not self.committed and fleet:
                fleet.fail(
                    self.engine,
                    self.error or WeightSyncError(f"the update was cancelled in phase {self.phase}"),
                )

    async def _bring_to_version(self) -> None:
        """Returns when the engine has proven the version."""
        engine, plan = self.engine, self.plan
        if engine.features.shares_weights:
            await self._check_version()
            return
        held = plan.proven.holds.pop(self.name, None)  # until it has proven what it has now
        if held != plan.version or (await self._watch("set_version", engine.weight_version) != plan.version):
            await self._replace_weights()
        self.paused.close()
        with self._measure("_probe"):
            scored = await self._watch("probe", lambda: score_by_engine(plan.probe, engine, plan.version))
            checksum = await self._read_checksum() if engine.features.checksum else None
        proof = Proof(
            plan.version, scored, plan.expected, checksum, plan.digest, engine.features.partial_checksum
        )
        check_agreement(proof, tolerance=plan.probe.tolerance)
        for previous in plan.proven.proofs.get(self.name, ()):  # a restart may bring back any of them
            check_change(previous, proof)
        plan.proven.add(self.name, proof)
        self.proof = proof

    async def _replace_weights(self) -> None:
        """The engine runs again when this returns or raises, unless it cannot be reached."""
        engine, paused_at = self.engine, trio.current_time()
        with self._measure("_pause"):
            try:
                await self._watch(
                    "pause", lambda: engine.pause("keep" if engine.features.keep_pause else "abort")
                )
                reach("sync.before_load")
                with self._measure("_load"):
                    if self.plan.load_together:
                        self.phase = "load"
                        self.paused.send_nowait(engine)
                        self.paused.close()
                        await self.loaded.wait()
                        if error := self.load_errors.get(self.name):
                            raise error
                    else:
                        await self._watch("load", lambda: self.plan.load(engine))
                await self._check_version()
                reach("sync.after_load")
                await self._watch("resume", engine.resume)
            except BaseException:
                await self._resume_anyway()
                raise
            finally:
                self.pause_s = trio.current_time() - paused_at

    async def _resume_anyway(self) -> None:
        """Attempts to resume whatever is being raised or cancelled; its own failure is a warning."""
        limit_s = self.plan.limits.resume
        why = f"it did not answer within {limit_s:g} s"
        with trio.move_on_after(limit_s, shield=True):
            try:
                await self.engine.resume()
                return
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
        self.plan.warn(f"engine {self.name} was not resumed after its update failed: {why}")

    async def _check_version(self) -> None:
        reported = await self._watch("set_version", self.engine.weight_version)
        if reported != self.plan.version:
            raise WeightSyncError(
                f"the engine reports weight version {reported} after an update to version {self.plan.version}"
            )

    async def _read_checksum(self) -> str | None:
        """The checksum; None, with a warning, from an engine that never gave one. Raises WeightSyncError if
        it gave one before.
        """
        why, cause = "it answered none", None
        try:
            checksum = await self._watch("probe", self.engine.checksum)
            if checksum is not None:
                return checksum
        except EngineError as error:
            why, cause = f"{type(error).__name__}: {error}", error
        proofs = self.plan.proven.proofs.get(self.name, ())
        if any(proof.checksum is not None for proof in proofs):
            raise WeightSyncError(
                f"the engine gave no checksum of its weights, as it did before: {why}"
            ) from cause
        self.plan.warn(f"engine {self.name} gave no checksum of its weights: {why}")
        return None

    async def _watch(self, phase: str, work: Callable[[], Awaitable[T]]) -> T:
        """What `work` returns, under the phase's limit on the silence of the engine's statistics, which move
        while it makes progress.
        """
        self.phase = phase
        seen = dict(self.engine.statistics())

        async def moved() -> bool:
            nonlocal seen
            await trio.lowlevel.checkpoint()
            before, seen = seen, dict(self.engine.statistics())
            return seen != before

        where = f"engine {self.name}: phase {phase}"
        return await ask_watched(work, moved, silence_s=getattr(self.plan.limits, phase), where=where)

    def _measure(self, part: str) -> AbstractContextManager[None]:
        """Makes the block a span of the engine; of one that shares the trainer's weights, none."""
        if not self.plan.spans or self.engine.features.shares_weights:
            return nullcontext()
        return self.plan.spans.measure(f"weight_sync{part}", self.name)
