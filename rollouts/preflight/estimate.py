"""What a run will need and do, by arithmetic: memory, samples and steps. No weights are read, only the
headers of their files.

Memory is an estimate: fixed parts are exact (float32 weights, gradients, two AdamW moments), activations are
a formula for Llama-like layers.
"""

import math
from pathlib import Path
from typing import Any, NamedTuple

from rollouts.config.rollout import is_address
from rollouts.config.schema import REFERENCE_FREE, RunConfig
from rollouts.loops.algorithm import needs_reference
from rollouts.models.directories import list_tensors, naming_errors, read_json
from rollouts.models.host_memory import read_free_memory
from rollouts.preflight.findings import Finding, Findings
from rollouts.preflight.rows import PreparedRows, Rows

FLOAT_BYTES = 4


class ModelSize(NamedTuple):
    """What memory depends on."""

    parameters: int
    layers: int
    hidden: int
    inner: int  # width of the feed-forward part
    query: int  # width of all query heads
    key_value: int  # width of all key heads, and of all value heads
    adapter: int = 0  # parameters of model.lora; 0: the model itself trains
    base_bytes: int = 0  # of the model's weights, as model.lora.base keeps them


def read_model_config(model_dir: Path) -> dict[str, Any]:
    """config.json of a model directory, of a model with several parts the text part. Raises ModelError."""
    path = model_dir / "config.json"
    with naming_errors(f"{path} is not the config.json of a model directory"):
        config = read_json(path)
        return config.get("text_config", config)


def read_model_size(model_dir: Path) -> ModelSize | None:
    """From config.json and the headers of the safetensors files; None if either does not say. Raises
    ModelError for a file that is damaged.
    """
    config = read_model_config(model_dir)
    parameters = sum(math.prod(tensor.shape) for tensor in list_tensors(model_dir))
    try:
        hidden, heads, layers = (
            int(config[name]) for name in ("hidden_size", "num_attention_heads", "num_hidden_layers")
        )
        head_dim = int(config.get("head_dim") or hidden // heads)
        inner = int(config.get("intermediate_size") or 4 * hidden)
        key_value = int(config.get("num_key_value_heads") or heads) * head_dim
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None
    return ModelSize(parameters, layers, hidden, inner, heads * head_dim, key_value) if parameters else None


# --- memory -------------------------------------------------------------------------------------------------


def estimate_memory(
    config: RunConfig,
    stage: str,
    lengths: PreparedRows,
    size: ModelSize,
    gpu_bytes: int | None,
    *,
    teacher: ModelSize | None = None,
) -> list[Finding]:
    """What a stage holds at its peak against what is free.

    On a GPU it is the peak of rank 0's, which has the embedded engine, the reference and the teacher too;
    with distributed.cpu_offload another finding says what this machine holds. `gpu_bytes`: free on the
    fullest GPU; None: on the CPU.
    """
    ranks = config.distributed.ranks
    shards = config.distributed.shard_size or ranks
    parts = _other_parts(config, stage, lengths, size, shards)
    if teacher and stage == "rl":
        parts[f"a teacher's weights 4 x {teacher.parameters / 1e6:.4g}M"] = FLOAT_BYTES * teacher.parameters
    limits = ("kl_limit", "kl_ref_limit", "grad_norm_limit")
    undoes = any(getattr(getattr(config, stage), name, 0) for name in limits)
    whole = _trained_parts(size, undoes=undoes)
    if gpu_bytes is None:
        return [_compare(f"{stage}: memory", whole | parts, read_free_memory())]
    subject = f"{stage}: memory of a GPU"
    if not config.distributed.cpu_offload:
        parts = _trained_parts(size, shards, undoes=undoes) | parts
        return [_compare(subject, parts, gpu_bytes)]
    held = {f"{ranks // shards} x {what}": ranks // shards * n for what, n in whole.items()}
    return [_compare(subject, parts, gpu_bytes), _compare(f"{stage}: host memory", held, read_free_memory())]


def _trained_parts(size: ModelSize, shards: int = 1, *, undoes: bool = False) -> dict[str, int]:
    """Bytes of what AdamW trains with, divided among `shards` ranks; with the copy that rl.kl_limit undoes an
    update by.
    """
    weights = FLOAT_BYTES * (size.adapter or size.parameters // shards)
    share = f" / {shards} ranks" if shards > 1 else ""
    return {
        f"the frozen model{share}": size.base_bytes // shards,
        f"adapter 4 x {size.adapter / 1e6:.4g}M"
        if size.adapter
        else f"weights 4 x {size.parameters / 1e6:.4g}M{share}": weights,
        "gradients as much": weights,
        "AdamW twice that": 2 * weights,
        "a copy of weights and moments, to undo an update": undoes * 3 * weights,
    }


def _other_parts(
    config: RunConfig, stage: str, lengths: PreparedRows, size: ModelSize, shards: int
) -> dict[str, int]:
    """Bytes by what else holds them, each with its formula; 0 for what this stage has not."""
    weights, engine = FLOAT_BYTES * size.parameters, config.engine
    section = getattr(config, stage)
    rl, rollout, is_local = config.rl if stage == "rl" else None, config.rollout, engine.kind == "local"
    rows, sampled, copies = 0, 0, False
    if config.eval and stage != "reward_model":
        rows, sampled = engine.max_rows, config.eval.max_new_tokens
    if rl is not None:
        samples = rollout.num_prompts * rollout.samples_per_prompt
        step = rollout.num_prompts * lengths.longest_prompt + samples * rollout.max_new_tokens
        # servers have theirs
        rows = is_local * min(engine.max_rows, max(rows, math.ceil(rollout.over_sampling * samples)))
        sampled = max(sampled, rollout.max_new_tokens)
        copies = is_local and (engine.mode == "copied" or config.distributed.ranks > 1)
    else:
        step = _rows_of_step(stage, section) * (lengths.longest_row or section.max_length)
    # beside an adapter's trainer on one rank the engine has the model already
    engine_base = weights if not size.adapter else size.base_bytes * (config.distributed.ranks > 1)
    compares = needs_reference(rl) if rl else stage == "preference" and section.loss not in REFERENCE_FREE
    length = lengths.longest_prompt + sampled
    # Of one token the backward pass needs what each layer computed; with checkpointing each layer's input and
    # all of one layer.
    layer = FLOAT_BYTES * (6 * size.hidden + 3 * size.query + 4 * size.key_value + 4 * size.inner)
    inputs = FLOAT_BYTES * size.hidden * size.layers
    layers = layer + inputs if config.model.gradient_checkpointing else layer * size.layers
    per_token, tokens = FLOAT_BYTES * 6 * size.hidden + layers, min(section.micro_batch_tokens, step)
    return {
        f"keys and values 8 x {rows} rows x {length} tokens x {size.layers} layers x {size.key_value}": (
            2 * FLOAT_BYTES * rows * length * size.layers * size.key_value
        ),
        "the engine's own weights": copies * (engine_base + FLOAT_BYTES * size.adapter),
        "a critic of the same size": bool(rl and rl.critic)
        * sum(_trained_parts(size._replace(base_bytes=0), shards).values()),
        "a reward model of the same size": bool(rl)
        * sum(not is_address(name) for name in config.rollout.reward_models.values())
        * weights,
        "the average that is published": bool(rl and config.online) * weights,
        "the reference's weights": (compares and not size.adapter) * weights,
        f"activations {tokens} tokens x {per_token / 1024:.4g} KiB": tokens * per_token,
    }


def _rows_of_step(stage: str, section: Any) -> int:
    """Token rows of a step without generation: of a pair both, of a KTO row the mismatched one too."""
    return section.batch_size * (1 if stage == "sft" or section.loss == "mse" else 2)


def _compare(subject: str, parts: dict[str, int], free: int | None) -> Finding:
    total = sum(parts.values())
    text = (
        f"about {_mib(total)} when every sample has its full length, an estimate:"
        f" {', '.join(f'{_mib(count)} {what}' for what, count in parts.items() if count)}"
        f"{'' if free is None else f'; {_mib(free)} are free'}"
    )
    if free is None or total <= free:
        return Finding("ok", subject, text)
    text += ": lower micro_batch_tokens or engine.max_rows, or set model.gradient_checkpointing"
    return Finding("warning", subject, text)


def _mib(count: int) -> str:
    return f"{count / 2**30:.3g} GiB" if count >= 2**28 else f"{count / 2**20:.3g} MiB"


# --- work ---------------------------------------------------------------------------------------------------


def estimate_work(config: RunConfig, stages: list[str], rows: Rows, findings: Findings) -> None:
    """Notes what each stage computes: rows or samples, tokens at most, evaluations."""
    for stage in stages:
        section = getattr(config, stage)
        if not section.steps:  # its epochs could not be counted, for its rows are wrong
            continue
        if stage == "rl":
            drawn, rollout = section.rollout.num_prompts, section.rollout
            each = f"{drawn} prompts x {rollout.samples_per_prompt} samples"
            tokens = (drawn + rollout.replay) * rollout.samples_per_prompt * rollout.max_new_tokens
        else:
            drawn = section.batch_size
            each, tokens = f"{drawn} samples", _rows_of_step(stage, section) * section.max_length
        count = len(rows.list_rows(stage))
        findings.note(
            "ok",
            f"{stage}: work",
            f"{section.steps} steps of {each}"
            f"{f', {section.steps * drawn / count:.3g} times through the rows' if count else ''}; at most"
            f" {tokens} tokens a step, {math.ceil(tokens / section.micro_batch_tokens)} or more micro-batches"
            " at that length",
        )
    if config.eval and stages:
        prompts, samples = len(rows.held_out), config.eval.samples_per_prompt
        findings.note(
            "ok",
            "eval: work",
            f"{prompts} prompts x {samples} samples each time, at most"
            f" {prompts * samples * config.eval.max_new_tokens} tokens",
        )
