"""How old a sample is in weight versions, and groups that wait for a later batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rollouts.data.data_buffer import PromptRow
from rollouts.types import JSONValue, Sample, SampleGroup

ARRAYS = ("tokens", "loss_mask", "rollout_log_probs", "weight_versions")


@dataclass(frozen=True, slots=True)
class HeldGroup:
    """A finished group that passed the filters after its batch was full."""

    group: SampleGroup
    prompt: PromptRow


def compute_lag(samples: Iterable[Sample], policy_version: int) -> int:
    """policy_version − the oldest weight version of any token that trains; 0 if none does."""
    oldest = [sample.oldest_version for sample in samples]
    return max((policy_version - version for version in oldest if version is not None), default=0)


def encode_held_group(held: HeldGroup) -> dict[str, JSONValue]:
    """A held group as JSON; log-probs survive exactly, because every float32 is a float64."""
    return {
        "group_index": held.group.group_index,
        "prompt_id": held.prompt.prompt_id,
        "epoch": held.prompt.epoch,
        "samples": [_encode_sample(sample) for sample in held.group.samples],
    }


def decode_held_group(record: Mapping[str, JSONValue], prompt: PromptRow) -> HeldGroup:
    """The inverse of encode_held_group. Raises ValueError naming the field of a sample that is wrong."""
    samples = tuple(_decode_sample(sample) for sample in record["samples"])
    return HeldGroup(SampleGroup(int(record["group_index"]), prompt.prompt_id, samples), prompt)


def _encode_sample(sample: Sample) -> dict[str, JSONValue]:
    return {
        "id": sample.id,
        "prompt": sample.prompt if isinstance(sample.prompt, str) else [dict(message) for message in sample.prompt],
        "response": sample.response,
        **{name: getattr(sample, name).tolist() for name in ARRAYS},
        "reward": sample.reward,
        "rewards": dict(sample.rewards),
        "group_index": sample.group_index,
        "status": sample.status.value,
        "metadata": dict(sample.metadata),
    }


def _decode_sample(record: Mapping[str, JSONValue]) -> Sample:
    return Sample(**record)
