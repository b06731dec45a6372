"""How old a sample is in weight versions, and groups that wait for a later batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rollouts.data.data_buffer import PromptRow
from rollouts.generation.rollouts import make_samples
from rollouts.types import JSONValue, Sample, SampleGroup, Status

ARRAYS = ("tokens", "loss_mask", "rollout_log_probs", "weight_versions")


@dataclass(frozen=True, slots=True)
class HeldGroup:
    """A finished group that passed the filters after its batch was full."""

    group: SampleGroup
    prompt: PromptRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """How far one sample of a group has come: pending → partial → generated → scored."""

    pending: Sample  # as it was before anything was generated
    partial: Sample | None = None  # aborted, with the tokens that it goes on from
    segments: tuple[Sample, ...] = ()  # generated; empty: not yet
    scored: bool = False  # nothing is left to do for it alone: it has its reward, or has failed
    generate_s: float = 0.0
    reward_s: float | None = None  # None: not scored by itself

    @property
    def samples(self) -> tuple[Sample, ...]:
        """What there is of it that may train: its segments, or the tokens it goes on from."""
        there = self.segments or (() if self.partial is None else (self.partial,))
        return tuple(sample for sample in there if sample.status is not Status.FAILED)

    @property
    def has_begun(self) -> bool:
        return bool(self.segments) or self.partial is not None


@dataclass(frozen=True, slots=True)
class UnfinishedGroup:
    """A group that still ran when its batch was full; a later call goes on from here."""

    group_index: int
    prompt: PromptRow
    members: tuple[Member, ...]  # in launch order


def find_oldest_version(samples: Iterable[Sample]) -> int | None:
    """The oldest weight version of any token that trains; None if none does."""
    return min(
        (version for sample in samples if (version := sample.oldest_version) is not None), default=None
    )


def compute_lag(samples: Iterable[Sample], policy_version: int) -> int:
    """policy_version − the oldest weight version of any token that trains, at least 0; 0 if none does."""
    oldest = find_oldest_version(samples)
    return 0 if oldest is None else max(0, policy_version - oldest)


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


def encode_unfinished_group(group: UnfinishedGroup) -> dict[str, JSONValue]:
    """An unfinished group as JSON, exactly. Pending samples are made of the prompt again, so they are left
    out.
    """
    return {
        "group_index": group.group_index,
        "prompt_id": group.prompt.prompt_id,
        "epoch": group.prompt.epoch,
        "members": [_encode_member(member) for member in group.members],
    }


def decode_unfinished_group(record: Mapping[str, JSONValue], prompt: PromptRow) -> UnfinishedGroup:
    """The inverse of encode_unfinished_group. Raises ValueError naming the field of a sample that is
    wrong.
    """
    group_index, records = int(record["group_index"]), record["members"]
    pending = make_samples(group_index, prompt, len(records))
    members = tuple(_decode_member(member, sample) for member, sample in zip(records, pending, strict=True))
    return UnfinishedGroup(group_index, prompt, members)


def _encode_member(member: Member) -> dict[str, JSONValue]:
    return {
        "partial": None if member.partial is None else _encode_sample(member.partial),
        "segments": [_encode_sample(sample) for sample in member.segments],
        "scored": member.scored,
        "generate_s": member.generate_s,
        "reward_s": member.reward_s,
    }


def _decode_member(record: Mapping[str, JSONValue], pending: Sample) -> Member:
    return Member(
        pending=pending,
        partial=None if record["partial"] is None else _decode_sample(record["partial"]),
        segments=tuple(_decode_sample(sample) for sample in record["segments"]),
        scored=bool(record["scored"]),
        generate_s=float(record["generate_s"]),
        reward_s=None if record["reward_s"] is None else float(record["reward_s"]),
    )


def _encode_sample(sample: Sample) -> dict[str, JSONValue]:
    return {
        "id": sample.id,
        "prompt": (
            sample.prompt if isinstance(sample.prompt, str) else [dict(message) for message in sample.prompt]
        ),
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
