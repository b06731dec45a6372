"""What a run will need and do, by arithmetic: memory, disk, samples and steps. No weights are read, only the
heads of their files.

Memory is an estimate: fixed parts are exact (float32 weights, gradients, two AdamW moments), activations are
a formula for Llama-like layers.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollouts.config.schema import (
    PreferenceTrainingConfig,
    RewardModelTrainingConfig,
    RLTrainingConfig,
    RunConfig,
    SFTTrainingConfig,
)
from rollouts.errors import ModelError
from rollouts.loops.algorithm import count_updates, needs_reference
from rollouts.models.host_memory import read_free_memory
from rollouts.preflight.findings import Finding

if TYPE_CHECKING:
    from rollouts.models.devices import DeviceMemory

TrainingSection = SFTTrainingConfig | RLTrainingConfig | PreferenceTrainingConfig | RewardModelTrainingConfig
FLOAT_BYTES = 4
LARGEST_HEAD_BYTES = 100 << 20  # of a safetensors file's list of tensors, by its format


@dataclass(frozen=True, slots=True)
class Lengths:
    """In tokens; 0: unknown."""

    prompt: int  # the longest that was looked at
    conversation: int


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What memory depends on."""

    parameters: int
    layers: int
    hidden: int
    inner: int  # width of the feed-forward part
    query: int  # width of all query heads
    key_value: int  # width of all key heads, and of all value heads


def read_model_size(model_dir: Path) -> ModelSize | None:
    """From config.json and the heads of the safetensors files; None if either does not say. Raises ModelError
    for a file that is damaged.
    """
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    config = config.get("text_config", config)
    try:
        hidden, heads, layers = (
            int(config["hidden_size"]),
            int(config["num_attention_heads"]),
            int(config["num_hidden_layers"]),
        )
        head_dim = int(config.get("head_dim") or hidden // heads)
        inner = int(config.get("intermediate_size") or 4 * hidden)
        key_value = int(config.get("num_key_value_heads") or heads) * head_dim
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None
    parameters = sum(count_parameters(path) for path in sorted(model_dir.glob("*.safetensors")))
    return ModelSize(parameters, layers, hidden, inner, heads * head_dim, key_value) if parameters else None


def count_parameters(path: Path) -> int:
    """Numbers in a safetensors file, by its head. Raises ModelError if the head is damaged."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > LARGEST_HEAD_BYTES:
                raise ValueError(f"a head of {length} bytes")
            head: dict[str, Any] = json.loads(file.read(length))
        return sum(math.prod(tensor["shape"]) for name, tensor in head.items() if name != "__metadata__")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{path} is no safetensors file ({error}); copy the model directory again"
        ) from error


# --- memory -------------------------------------------------------------------------------------------------


def estimate_memory(
    config: RunConfig,
    stages: Sequence[str],
    lengths: Lengths,
    size: ModelSize | None,
    *,
    device: DeviceMemory | None = None,
) -> list[Finding]:
    """A finding per stage about its peak against what is free, and one about checkpoints against the disk.

    On a GPU it is the peak of rank 0's, which has the embedded engine and the reference too; with
    distributed.cpu_offload another finding says what this machine holds. `device`: where the run computes;
    None: on the CPU.
    """
    if size is None:
        return [
            Finding(
                "ok",
                "memory",
                "not estimated: config.json or the weight files do not say how large the model is",
            )
        ]
    findings: list[Finding] = []
    for stage in stages:
        if device is None or device.kind == "cpu":
            parts = _trained_parts(size) | _other_parts(config, stage, lengths, size)
            findings.append(_compare_memory(f"{stage}: memory", parts, read_free_memory()))
        else:
            findings += _estimate_gpu(config, stage, lengths, size, device.free_bytes)
    return [*findings, estimate_disk(config, stages, size)]


def _estimate_gpu(
    config: RunConfig, stage: str, lengths: Lengths, size: ModelSize, free: int | None
) -> list[Finding]:
    ranks = config.distributed.ranks
    shards = config.distributed.shard_size or ranks
    subject, others = f"{stage}: memory of a GPU", _other_parts(config, stage, lengths, size)
    if not config.distributed.cpu_offload:
        return [
            _compare_memory(
                subject,
                _trained_parts(size, f" / {shards} ranks" if shards > 1 else "", shards) | others,
                free,
            )
        ]
    copies = ranks // shards
    held = {
        f"{copies} x {what}" if copies > 1 else what: copies * count
        for what, count in _trained_parts(size).items()
    }
    return [
        _compare_memory(subject, others, free),
        _compare_memory(f"{stage}: host memory", held, read_free_memory()),
    ]


def _trained_parts(size: ModelSize, share: str = "", shards: int = 1) -> dict[str, int]:
    """Bytes of what AdamW trains with, divided among `shards` ranks; `share` says so."""
    weights = FLOAT_BYTES * size.parameters // shards
    return {
        f"weights 4 x {size.parameters / 1e6:.4g}M{share}": weights,
        "gradients as much": weights,
        "AdamW twice that": 2 * weights,
    }


def _other_parts(config: RunConfig, stage: str, lengths: Lengths, size: ModelSize) -> dict[str, int]:
    """Bytes by what else holds them, each with its formula."""
    weights = FLOAT_BYTES * size.parameters
    parts: dict[str, int] = {}
    section = getattr(config, stage)
    served = stage == "rl" and config.engine.kind != "local"  # servers have memory of their own
    rows = 0 if served else min(config.engine.max_rows, _rows_at_once(config, stage))
    sampled = _sampled_tokens(config, stage)
    if rows and sampled:
        length = lengths.prompt + sampled
        cached = 2 * FLOAT_BYTES * rows * length * size.layers * size.key_value
        parts[
            f"keys and values 8 x {rows} rows x {length} tokens x {size.layers} layers x {size.key_value}"
        ] = cached
    if (
        stage == "rl"
        and config.engine.kind == "local"
        and (config.engine.mode == "copied" or config.distributed.ranks > 1)
    ):
        parts["the engine's own weights"] = weights
    if stage == "rl" and config.rl and needs_reference(config.rl):
        parts["the reference's weights"] = weights
    if stage == "rl" and config.rl:
        shards = config.distributed.shard_size or max(config.distributed.ranks, 1)
        parts |= (
            {"a critic of the same size": sum(_trained_parts(size, shards=shards).values())}
            if config.rl.critic
            else {}
        )
        parts |= {"a reward model of the same size": weights} if config.rl.rollout.reward_model else {}
    if stage == "preference" and config.preference and config.preference.reference != "none":
        parts["the reference's weights"] = weights
    per_token = _activation_bytes(size, checkpointing=config.model.gradient_checkpointing)
    tokens = min(section.micro_batch_tokens, _tokens_of_step(section, lengths))
    parts[f"activations {tokens} tokens x {per_token / 1024:.4g} KiB"] = tokens * per_token
    return parts


def _activation_bytes(size: ModelSize, *, checkpointing: bool) -> int:
    """Of one token: what the backward pass needs of each layer, or with checkpointing the input of each and
    all of one.
    """
    layer = FLOAT_BYTES * (6 * size.hidden + 3 * size.query + 4 * size.key_value + 4 * size.inner)
    ends = FLOAT_BYTES * 6 * size.hidden
    return ends + (layer + FLOAT_BYTES * size.hidden * size.layers if checkpointing else layer * size.layers)


def _rows_at_once(config: RunConfig, stage: str) -> int:
    held_out = (
        config.engine.max_rows if config.eval and stage != "reward_model" else 0
    )  # which generates nothing
    if stage == "rl" and config.rl:
        rollout = config.rl.rollout
        return max(
            held_out, math.ceil(rollout.num_prompts * rollout.over_sampling) * rollout.samples_per_prompt
        )
    return held_out


def _sampled_tokens(config: RunConfig, stage: str) -> int:
    in_training = config.rl.rollout.max_new_tokens if stage == "rl" and config.rl else 0
    return max(in_training, config.eval.max_new_tokens if config.eval else 0)


def _tokens_of_step(section: TrainingSection, lengths: Lengths) -> int:
    if not isinstance(section, RLTrainingConfig):
        rows = section.batch_size * (
            1 if isinstance(section, SFTTrainingConfig) else 2
        )  # of a pair both; of a KTO row the mismatched one too
        return rows * (lengths.conversation or section.max_length)
    rollout = section.rollout
    return (
        rollout.num_prompts * lengths.prompt
        + rollout.num_prompts * rollout.samples_per_prompt * rollout.max_new_tokens
    )


def _compare_memory(subject: str, parts: Mapping[str, int], free: int | None) -> Finding:
    total = sum(parts.values())
    listed = ", ".join(f"{_gib(count)} {what}" for what, count in parts.items())
    too_much = free is not None and total > free
    known = "" if free is None else f"; {_gib(free)} are free"
    known += (
        ": lower micro_batch_tokens or engine.max_rows, or set model.gradient_checkpointing"
        if too_much
        else ""
    )
    text = f"about {_gib(total)} when every sample has its full length, an estimate: {listed}{known}"
    return Finding("warning" if too_much else "ok", subject, text)


# --- disk ---------------------------------------------------------------------------------------------------


def estimate_disk(config: RunConfig, stages: Sequence[str], size: ModelSize) -> Finding:
    """Checkpoints that stay, and the room for them."""
    one = 3 * FLOAT_BYTES * size.parameters
    sizes = {
        stage: 2 * one if stage == "rl" and config.rl and config.rl.critic else one for stage in stages
    }  # a policy's holds its critic
    every, keep = config.output.checkpoint_every, config.output.keep_checkpoints
    written = {stage: math.ceil(getattr(config, stage).steps / every) if every else 1 for stage in stages}
    kept = {stage: min(count, keep) if keep else count for stage, count in written.items()}
    needed = sum(sizes[stage] * count for stage, count in kept.items()) + max(
        sizes.values(), default=one
    )  # the next is written before one goes
    root = Path(config.output.dir or f"runs/{config.name}").absolute()
    free = shutil.disk_usage(next(folder for folder in (root, *root.parents) if folder.exists())).free
    beside = ", twice that with a critic" if one not in sizes.values() or len(set(sizes.values())) > 1 else ""
    each = f"{_gib(one)} each (weights and AdamW's moments{beside})"
    text = (
        f"{sum(written.values())} written, {sum(kept.values())} kept, {each}, {_gib(needed)} at most;"
        f" {_gib(free)} are free on disk"
    )
    advice = "; set output.keep_checkpoints, or name another --output.dir" if needed > free else ""
    return Finding("warning" if needed > free else "ok", "checkpoints", text + advice)


# --- work ---------------------------------------------------------------------------------------------------


def estimate_work(config: RunConfig, stages: Sequence[str], row_counts: Mapping[str, int]) -> list[Finding]:
    """What each stage computes: samples, tokens at most, optimizer steps, evaluations."""
    findings: list[Finding] = []
    if config.sft and "sft" in stages:
        findings.append(Finding("ok", "sft: work", _describe_sft(config.sft, row_counts.get("sft", 0))))
    if config.rl and "rl" in stages:
        findings.append(Finding("ok", "rl: work", _describe_rl(config.rl, row_counts.get("rl", 0))))
    if config.preference and "preference" in stages:
        findings.append(
            Finding(
                "ok", "preference: work", _describe_pairs(config.preference, row_counts.get("preference", 0))
            )
        )
    if config.reward_model and "reward_model" in stages:
        findings.append(
            Finding(
                "ok",
                "reward_model: work",
                _describe_pairs(config.reward_model, row_counts.get("reward_model", 0)),
            )
        )
    if config.eval and stages:
        findings.append(
            Finding("ok", "eval: work", _describe_evaluations(config, stages, row_counts.get("eval", 0)))
        )
    return findings


def _describe_sft(sft: SFTTrainingConfig, rows: int) -> str:
    tokens = sft.batch_size * sft.max_length
    epochs = f", {sft.steps * sft.batch_size / rows:.3g} times through the rows" if rows else ""
    return (
        f"{sft.steps} optimizer steps of {sft.batch_size} conversations{epochs}; at most {tokens} tokens and "
        f"{math.ceil(tokens / sft.micro_batch_tokens)} or more micro-batches a step at that length"
    )


def _describe_pairs(section: PreferenceTrainingConfig | RewardModelTrainingConfig, rows: int) -> str:
    epochs = f", {section.steps * section.batch_size / rows:.3g} times through the rows" if rows else ""
    tokens = 2 * section.batch_size * section.max_length
    return (
        f"{section.steps} optimizer steps of {section.batch_size} samples of two rows{epochs}; at most"
        f" {tokens} tokens a step, each computed without gradient first and then with it"
    )


def _describe_rl(rl: RLTrainingConfig, rows: int) -> str:
    rollout = rl.rollout
    samples = rollout.num_prompts * rollout.samples_per_prompt
    launched = math.ceil(rollout.num_prompts * rollout.over_sampling) * rollout.samples_per_prompt
    tokens = samples * rollout.max_new_tokens
    epochs = f", {rl.steps * rollout.num_prompts / rows:.3g} times through the rows or more" if rows else ""
    extra = f" ({launched} launched)" if launched > samples else ""
    in_all = (
        f"{rl.steps * count_updates(rl)} optimizer steps and {rl.steps // rl.sync_every} updates of the"
        " engine in all"
    )
    return (
        f"{rl.steps} steps of {rollout.num_prompts} prompts x {rollout.samples_per_prompt} samples ="
        f" {samples}{extra}{epochs}; at most {tokens} tokens sampled,"
        f" {math.ceil(tokens / rl.micro_batch_tokens)} or more micro-batches at that length a step; {in_all}"
    )


def _describe_evaluations(config: RunConfig, stages: Sequence[str], rows: int) -> str:
    assert config.eval is not None
    between = 0
    stages = [stage for stage in stages if stage != "reward_model"]  # which generates nothing
    for stage in stages:
        section = getattr(config, stage)
        between += (section.steps - 1) // section.eval_every if section.eval_every else 0
    total = between + 1 + len(stages)  # before training, and at the end of every stage
    samples = rows * config.eval.samples_per_prompt
    tokens = samples * config.eval.max_new_tokens
    return (
        f"{total} evaluations of {rows} prompts x {config.eval.samples_per_prompt} samples, at most {tokens}"
        " tokens each"
    )


def _gib(count: int) -> str:
    return f"{count / 2**30:.3g} GiB" if count >= 2**28 else f"{count / 2**20:.3g} MiB"
