"""What the manager and the synchronous tier share: a prompt's samples, when a group trains, samples as a
batch. Loads neither trio nor torch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import msgspec
import numpy as np

from rollouts.data.data_buffer import PromptRow
from rollouts.types import (
    BoolArray,
    FilterDecision,
    IntArray,
    JSONObject,
    JSONValue,
    RolloutBatch,
    Sample,
    Status,
    number_trajectories,
)


class PromptSource(Protocol):
    """Where prompts are drawn from, and what takes them back: a DataBuffer, which always has as many as are
    asked for, or a stream, which may have none until AsyncRolloutManager.note_prompts is called.
    """

    def get_prompts(self, count: int) -> list[PromptRow]: ...
    def return_prompts(self, prompts: Sequence[PromptRow]) -> None: ...


def make_samples(group_index: int, prompt: PromptRow, count: int) -> list[Sample]:
    """Pending samples g00000012-s000, -s001, …: sorted by id they are in launch order. The row's other fields
    become their metadata, with the prompt's id and epoch.
    """
    rest = {key: value for key, value in prompt.row.items() if key != "prompt"}
    own = {"prompt_id": prompt.prompt_id, "epoch": prompt.epoch}
    return [
        Sample(
            id=f"g{group_index:08d}-s{index:03d}",
            # copies: its siblings and later epochs do not see what a function changes in a sample
            prompt=msgspec.to_builtins(prompt.row["prompt"]),
            group_index=group_index,
            metadata={**msgspec.to_builtins(rest), **own},
        )
        for index in range(count)
    ]


def check_enough(left: int, size: int) -> FilterDecision:
    """Keeps a group of `size` trajectories of which `left` did not fail: one alone has nothing to be compared
    with.
    """
    if left >= min(2, size):
        return FilterDecision(keep=True)
    return FilterDecision(False, "failed_samples", f"{size - left} of {size} samples failed")


# --- samples as arrays --------------------------------------------------------------------------------------


def extract_sample_fields(samples: Sequence[Sample]) -> RolloutBatch:
    """The columns of the samples, in their order: B rows, of which `rewards` and `group_indices` are None if
    no sample has one, `turn_rewards` if all are 0, `trajectory_tokens` if no trajectory has several segments.
    Raises ValueError naming the first sample without a reward (or group) if others have one.
    """

    def rows(name: str) -> Any:
        return tuple(getattr(sample, name) for sample in samples)

    def column(name: str, dtype: Any) -> Any:
        values = rows(name)
        if values.count(None) == len(values) > 0:
            return None
        if None in values:
            raise ValueError(
                f"sample {samples[values.index(None)].id} has no {name} and other samples of the batch do;"
                " give all of them one, or leave it out"
            )
        return np.asarray(values, dtype)

    numbers, trajectory_tokens, turn_rewards = number_trajectories(samples), None, rows("turn_rewards")
    counts = np.bincount(numbers, [sample.response_length for sample in samples])
    if len(counts) < len(samples):
        sizes = zip(samples, counts.clip(1)[numbers], strict=True)
        trajectory_tokens = tuple(np.full(len(one.tokens), count, np.float32) for one, count in sizes)
    return RolloutBatch(
        tokens=rows("tokens"),
        loss_masks=rows("loss_mask"),
        rewards=column("reward", np.float32),
        rollout_log_probs=rows("rollout_log_probs"),
        weight_versions=rows("weight_versions"),
        group_indices=column("group_index", np.int64),
        turn_rewards=turn_rewards if any(map(np.any, turn_rewards)) else None,
        trajectory_tokens=trajectory_tokens,
    )


def compute_response_lengths(loss_masks: Sequence[BoolArray]) -> IntArray:
    """[B] number of tokens that train in each row. No rows give an empty array."""
    return np.asarray([np.count_nonzero(mask) for mask in loss_masks], np.int64)


def build_batch_metadata(samples: Sequence[Sample], **added: JSONValue) -> tuple[JSONObject, ...]:
    """One new dict per sample: its metadata and what is added, such as `step` and `epoch`, in place of what
    the sample has under these names.
    """
    return tuple({**sample.metadata, **added} for sample in samples)


def convert_to_batch(samples: Iterable[Sample], *, temperature: float = 1.0) -> RolloutBatch:
    """One row per sample, in their order, with the samples themselves behind the rows.

    temperature: that the samples were drawn at; 0 is greedy, whose log-probs are at 1. Samples without any
    reward give a batch for supervised training. Raises ValueError, naming the sample, if one is pending or
    failed, or if only some have a reward or a group; a zero in place of a failed sample's reward would move
    the mean of its whole group.
    """
    rows = tuple(samples)
    for sample in rows:
        if sample.status in (Status.PENDING, Status.FAILED):
            raise ValueError(
                f"sample {sample.id} is {sample.status}; only what was generated and scored can train: leave"
                " it out of the batch"
            )
    return replace(
        extract_sample_fields(rows),
        metadata=build_batch_metadata(rows),
        temperature=temperature or 1.0,
        samples=rows,
    )
