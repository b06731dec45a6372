"""The probe: a fixed list of tokens that the trainer and every engine score as a prompt.

the engine's log-probs ──► agree with the trainer's within the tolerance?
                       └─► differ from what the same engine said before, where the weights differ?
"""

import uuid
from typing import NamedTuple

import numpy as np

from rollouts.errors import WeightSyncError
from rollouts.protocols import InferenceEngine, TrainingBackend
from rollouts.types import FloatArray, GenerateRequest, IntArray, RolloutBatch, SamplingParams

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
    (log_probs,) = await backend.forward(RolloutBatch(tokens=(probe.tokens,), loss_masks=(mask,)))
    return log_probs


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
    both checksums are known they decide, because an engine with varying arithmetic scores old weights anew.
    """
    if None not in (previous.digest, now.digest):
        differ = previous.digest != now.digest
    else:
        moved = np.abs(previous.trainer_log_probs - now.trainer_log_probs).max()
        differ = bool(moved > NOTICEABLE)
    same = np.array_equal(previous.engine_log_probs, now.engine_log_probs)
    how = "scores the probe exactly as before"
    if None not in (previous.checksum, now.checksum):
        same, how = previous.checksum == now.checksum, f"still has the checksum {now.checksum}"
    if previous.version != now.version and differ and same:
        raise WeightSyncError(
            f"the engine reports version {now.version} but {how}, as at version {previous.version}, although"
            " the trainer's weights differ: it still serves the old weights"
        )
