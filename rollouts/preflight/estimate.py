"""What a run will need and do, by arithmetic: memory, samples and steps. No weights are read, only the
headers of their files.

Memory is an estimate: fixed parts are exact (float32 weights, gradients, two AdamW moments), activations are
a formula for Llama-like layers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from safetensors import SafetensorError, safe_open

from rollouts.config.schema import REFERENCE_FREE, RLTrainingConfig, RunConfig, SFTTrainingConfig
from rollouts.errors import ModelError
from rollouts.loops.algorithm import needs_reference
from rollouts.models.host_memory import read_free_memory
from rollouts.preflight.findings import Finding

if TYPE_CHECKING:
    from rollouts.models.devices import DeviceMemory

FLOAT_BYTES = 4


class Lengths(NamedTuple):
    """In tokens; 0: unknown."""

    prompt: int  # the longest that was looked at
    conversation: int


class ModelSize(NamedTuple):
    """What memory depends on."""

    parameters: int
    layers: int
    hidden: int
    inner: int  # width of the feed-forward part
    query: int  # width of all query heads
    key_value: int  # width of all key heads, and of all value heads


def read_model_size(model_dir: Path) -> ModelSize | None:
    """From config.json and the headers of the safetensors files; None if either does not say. Raises
    ModelError for a file that is damaged.
    """
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    config = config.get("text_config", config)
    try:
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        head_dim = int(config.get("head_dim") or hidden // heads)
        inner = int(config.get("intermediate_size") or 4 * hidden)
        key_value = int(config.get("num_key_value_heads") or heads) * head_dim
        layers = int(config["num_hidden_layers"])
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None
    parameters = sum(count_parameters(path) for path in sorted(model_dir.glob("*.safetensors")))
    return ModelSize(parameters, layers, hidden, inner, heads * head_dim, key_value) if parameters else None


def count_parameters(path: Path) -> int:
    """Numbers in a safetensors file, by its header. Raises ModelError if the header is damaged."""
    try:
        with safe_open(path, framework="numpy") as file:
            return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    except (OSError, SafetensorError) as error:
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
    """A finding per stage about its peak against what is free.

    On a GPU it is the peak of rank 0's, which has the embedded engine and the reference too; with
    distributed.cpu_offload another finding says what this machine holds. `device` None: on the CPU.
    """
    if size is None:
        unknown = "not estimated: config.json or the weight files do not say how large the model is"
        return [Finding("ok", "memory", unknown)]
    findings: list[Finding] = []
    ranks, offload = config.distributed.ranks, config.distributed.cpu_offload
    shards, on_cpu = config.distributed.shard_size or max(ranks, 1), device is None or device.kind == "cpu"
    for stage in stages:
        parts = _other_parts(config, stage, lengths, size, shards)
        if on_cpu or not offload:
            parts = _trained_parts(size, 1 if on_cpu else shards) | parts
        free = read_free_memory() if device is None or on_cpu else device.free_bytes
        findings.append(_compare(f"{stage}: memory{'' if on_cpu else ' of a GPU'}", parts, free))
        if offload and not on_cpu:
            copies = ranks // shards
            held = {f"{copies} x {what}": copies * count for what, count in _trained_parts(size).items()}
            findings.append(_compare(f"{stage}: host memory", held, read_free_memory()))
    return findings


def _trained_parts(size: ModelSize, shards: int = 1) -> dict[str, int]:
    """Bytes of what AdamW trains with, divided among `shards` ranks."""
    weights = FLOAT_BYTES * size.parameters // shards
    share = f" / {shards} ranks" if shards > 1 else ""
    named = f"weights 4 x {size.parameters / 1e6:.4g}M{share}"
    return {named: weights, "gradients as much": weights, "AdamW twice that": 2 * weights}


def _other_parts(
    config: RunConfig, stage: str, lengths: Lengths, size: ModelSize, shards: int
) -> dict[str, int]:
    """Bytes by what else holds them, each with its formula."""
    weights = FLOAT_BYTES * size.parameters
    section: Any = getattr(config, stage)
    rl, engine = config.rl if stage == "rl" else None, config.engine
    parts: dict[str, int] = {}
    if engine.kind == "local" or rl is None:  # servers have memory of their own
        rows = engine.max_rows if config.eval and stage != "reward_model" else 0
        sampled = config.eval.max_new_tokens if config.eval else 0
        if rl is not None:
            prompts = math.ceil(rl.rollout.num_prompts * rl.rollout.over_sampling)
            rows = min(engine.max_rows, max(rows, prompts * rl.rollout.samples_per_prompt))
            sampled = max(sampled, rl.rollout.max_new_tokens)
        length = lengths.prompt + sampled
        what = f"keys and values 8 x {rows} rows x {length} tokens x {size.layers} layers x {size.key_value}"
        if rows:
            parts[what] = 2 * FLOAT_BYTES * rows * length * size.layers * size.key_value
    if rl is not None:
        if engine.kind == "local" and (engine.mode == "copied" or config.distributed.ranks > 1):
            parts["the engine's own weights"] = weights
        if rl.critic:
            parts["a critic of the same size"] = sum(_trained_parts(size, shards).values())
        if rl.rollout.reward_model:
            parts["a reward model of the same size"] = weights
    if (rl and needs_reference(rl)) or (stage == "preference" and section.loss not in REFERENCE_FREE):
        parts["the reference's weights"] = weights
    # Of one token the backward pass needs what each layer computed; with checkpointing each layer's input and
    # all of one layer.
    layer = FLOAT_BYTES * (6 * size.hidden + 3 * size.query + 4 * size.key_value + 4 * size.inner)
    inputs = FLOAT_BYTES * size.hidden * size.layers
    layers = layer + inputs if config.model.gradient_checkpointing else layer * size.layers
    per_token = FLOAT_BYTES * 6 * size.hidden + layers
    if rl is not None:
        samples = rl.rollout.num_prompts * rl.rollout.samples_per_prompt
        step = rl.rollout.num_prompts * lengths.prompt + samples * rl.rollout.max_new_tokens
    else:
        step = _rows_of_step(section) * (lengths.conversation or section.max_length)
    tokens = min(section.micro_batch_tokens, step)
    parts[f"activations {tokens} tokens x {per_token / 1024:.4g} KiB"] = tokens * per_token
    return parts


def _rows_of_step(section: Any) -> int:
    """Token rows of a step without generation: of a pair both, of a KTO row the mismatched one too."""
    return section.batch_size * (1 if isinstance(section, SFTTrainingConfig) else 2)


def _compare(subject: str, parts: Mapping[str, int], free: int | None) -> Finding:
    total = sum(parts.values())
    listed = ", ".join(f"{_gib(count)} {what}" for what, count in parts.items())
    text = f"about {_gib(total)} when every sample has its full length, an estimate: {listed}"
    text += "" if free is None else f"; {_gib(free)} are free"
    if free is None or total <= free:
        return Finding("ok", subject, text)
    advice = "lower micro_batch_tokens or engine.max_rows, or set model.gradient_checkpointing"
    return Finding("warning", subject, f"{text}: {advice}")


# --- work ---------------------------------------------------------------------------------------------------


def estimate_work(config: RunConfig, stages: Sequence[str], row_counts: Mapping[str, int]) -> list[Finding]:
    """What each stage computes: rows or samples, tokens at most, evaluations."""
    findings: list[Finding] = []
    evaluations = 1  # before training
    for stage in stages:
        section: Any = getattr(config, stage)
        if isinstance(section, RLTrainingConfig):
            rollout, drawn = section.rollout, section.rollout.num_prompts
            each = f"{drawn} prompts x {rollout.samples_per_prompt} samples"
            tokens = drawn * rollout.samples_per_prompt * rollout.max_new_tokens
        else:
            drawn = section.batch_size
            each, tokens = f"{drawn} samples", _rows_of_step(section) * section.max_length
        rows = row_counts.get(stage, 0)
        epochs = f", {section.steps * drawn / rows:.3g} times through the rows" if rows else ""
        micro_batches = math.ceil(tokens / section.micro_batch_tokens)
        text = f"at most {tokens} tokens a step, {micro_batches} or more micro-batches at that length"
        findings.append(Finding("ok", f"{stage}: work", f"{section.steps} steps of {each}{epochs}; {text}"))
        if stage != "reward_model":  # which generates nothing
            evaluations += 1 + ((section.steps - 1) // section.eval_every if section.eval_every else 0)
    if config.eval and stages:
        rows, samples = row_counts.get("eval", 0), config.eval.samples_per_prompt
        text = f"{evaluations} evaluations of {rows} prompts x {samples} samples, at most"
        text += f" {rows * samples * config.eval.max_new_tokens} tokens each"
        findings.append(Finding("ok", "eval: work", text))
    return findings


def _gib(count: int) -> str:
    return f"{count / 2**30:.3g} GiB" if count >= 2**28 else f"{count / 2**20:.3g} MiB"
