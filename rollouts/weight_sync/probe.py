"""The probe: a fixed request whose answer shows which weights an engine really serves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rollouts.errors import WeightSyncError
from rollouts.protocols import InferenceEngine, TrainingBackend
from rollouts.types import FloatArray, GenerateRequest, IntArray, RolloutBatch, SamplingParams

NOTICEABLE = 1e-5  # nats; a smaller move of the trainer may be lost in an engine's rounding


@dataclass(frozen=True, slots=True)
class Probe:
    """What is asked, and how far engine and trainer may differ in their log-probs."""

    prompt_ids: IntArray  # [prompt length]
    tolerance: float  # nats; float32 engines agree to 1e-4, bfloat16 ones to about 5e-2
    num_tokens: int = 4  # greedy tokens of the answer


@dataclass(frozen=True, slots=True)
class ProbeReply:
    """One engine's answer and what the trainer thinks of the same tokens."""

    version: int
    token_ids: IntArray  # [n]
    engine_log_probs: FloatArray  # [n] nats
    trainer_log_probs: FloatArray  # [n] nats

    @property
    def difference(self) -> float:
        """Largest |engine − trainer| in nats."""
        return float(np.abs(self.engine_log_probs - self.trainer_log_probs).max())


async def ask_probe(probe: Probe, backend: TrainingBackend, engine: InferenceEngine, *, version: int, engine_index: int) -> ProbeReply:
    """The engine's greedy answer, scored by the trainer. Raises WeightSyncError if the answer carries another version."""
    sampling = SamplingParams(max_new_tokens=probe.num_tokens, temperature=0.0)
    request = GenerateRequest(request_id=f"probe-e{engine_index}-v{version}", prompt_ids=probe.prompt_ids, sampling=sampling)
    completion = await engine.generate(request)
    if not len(completion.token_ids) or (completion.weight_versions != version).any():
        found = sorted(set(completion.weight_versions.tolist()))
        raise WeightSyncError(f"engine {engine_index} answered the probe with weight versions {found} after an update to version {version}")
    tokens = np.concatenate([probe.prompt_ids, completion.token_ids])
    mask = np.arange(len(tokens)) >= len(probe.prompt_ids)
    (row,) = await backend.forward(RolloutBatch(tokens=(tokens,), loss_masks=(mask,))).result()
    return ProbeReply(version, completion.token_ids, completion.log_probs, row[mask])


def check_probe(reply: ProbeReply, previous: ProbeReply | None, *, tolerance: float, engine_index: int) -> None:
    """Raises WeightSyncError unless the engine agrees with the trainer and, where the trainer's answer moved, the engine's moved too."""
    if not reply.difference <= tolerance:
        raise WeightSyncError(
            f"engine {engine_index} at version {reply.version} differs from the trainer by {reply.difference:.3g} nats on the probe; "
            f"the tolerance is {tolerance:.3g}: it does not serve the weights that were sent"
        )
    if previous is None or not np.array_equal(previous.token_ids, reply.token_ids):
        return
    trainer_moved = float(np.abs(previous.trainer_log_probs - reply.trainer_log_probs).max()) > NOTICEABLE
    if trainer_moved and np.array_equal(previous.engine_log_probs, reply.engine_log_probs):
        raise WeightSyncError(
            f"engine {engine_index} says version {reply.version} but answers the probe exactly as at version {previous.version}, "
            "while the trainer's weights changed: it still serves the old weights"
        )


def make_probe_prompt(vocab_size: int, length: int = 8) -> IntArray:
    """Ids spread evenly over the vocabulary: any model has an opinion about them."""
    return np.linspace(0, vocab_size - 1, num=length + 2, dtype=np.int64)[1:-1]


def previous_reply(replies: Sequence[ProbeReply], engine_index: int) -> ProbeReply | None:
    """The reply of the update before, if there was one."""
    return replies[engine_index] if engine_index < len(replies) else None
