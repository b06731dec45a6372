"""Adapters on disk: a directory as `peft` writes and reads it, and base.json, which names the model.

    adapter_config.json         rank, alpha, targets
    adapter_model.safetensors   the matrices, float32
    base.json                   the base model's directory, and the digests of its files

What another program wrote is read if it computes what we compute; if its config asks for more, it is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from rollouts.config.model import LoraConfig
from rollouts.errors import ModelError
from rollouts.models.directories import ADAPTER_CONFIG, ModelHead, naming_errors
from rollouts.models.lora import PREFIX, Adapter, make_adapter, merge_adapter, prepare_places
from rollouts.models.safetensors_file import write_safetensors
from rollouts.models.scalar_head import HEAD, HEAD_WEIGHT, get_scalar_weight, has_scalar_head
from rollouts.models.sharded import make_meta_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WEIGHTS_FILE, BASE_FILE = "adapter_model.safetensors", "base.json"
MEASURED = ("score_mean", "score_std")  # what the stage reward_model adds to a model's config
NAMES_SHOWN = 3
HEADS = {HEAD, "classifier"}  # what PEFT saves of a model that scores: whichever the model has
# settings of PEFT that change nothing of what an adapter computes once it is there, and those that are read
HARMLESS = {
    "auto_mapping", "base_model_name_or_path", "inference_mode", "init_lora_weights", "lora_dropout",
    "megatron_core", "peft_type", "peft_version", "qalora_group_size", "revision", "task_type",
    "r", "lora_alpha", "target_modules", "target_parameters", "modules_to_save", "fan_in_fan_out",
}  # fmt: skip


def write_adapter(adapter: Adapter, path: Path, weights: Mapping[str, Tensor]) -> None:
    """The directory `path`, with these values of the adapter's weights. Not atomic, not synced. Raises
    OSError.
    """
    write_adapter_config(adapter, path)
    write_safetensors(path / WEIGHTS_FILE, weights)


def write_adapter_config(adapter: Adapter, path: Path) -> None:
    """All of an adapter's directory but its weights. Raises OSError."""
    path.mkdir(parents=True, exist_ok=True)
    of = adapter.of
    stacks = sorted(name for name in adapter.pairs if of.places[name].experts)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if adapter.head is None else "SEQ_CLS",
        "base_model_name_or_path": str(of.base),
        "inference_mode": True,
        "r": adapter.config.rank,
        "lora_alpha": adapter.config.alpha,
        "lora_dropout": adapter.config.dropout,
        "bias": "none",
        "fan_in_fan_out": any(of.places[name].turned for name in adapter.pairs.keys() - stacks),
        "target_modules": adapter.target_modules,
        "target_parameters": stacks or None,
        "modules_to_save": None if adapter.head is None else [HEAD],
    }
    # of a reward model of scores
    measured = {name: one for name in MEASURED if (one := getattr(of.model_config, name, None)) is not None}
    base = {"path": str(of.base), "files": dict(of.digests), "config": measured}
    for name, content in ((ADAPTER_CONFIG, config), (BASE_FILE, base)):
        (path / name).write_text(json.dumps(content, indent=1) + "\n", "utf-8")


def read_adapter_config(path: Path) -> LoraConfig:
    """What an adapter's directory says of it. Raises ModelError if that cannot be read, or asks for what is
    not computed here.
    """
    file = path / ADAPTER_CONFIG
    with naming_errors(f"{file} cannot be read"):
        config: dict[str, Any] = json.loads(file.read_text("utf-8"))
        odd = {name: value for name, value in config.items() if value and name not in HARMLESS}
        if odd.pop("bias", "none") != "none":
            odd["bias"] = config["bias"]
        scaled = odd.pop("use_rslora", False)
        if config["peft_type"] != "LORA" or odd or set(config.get("modules_to_save") or ()) - HEADS:
            raise ModelError(
                f"{file} asks for {odd or config.get('modules_to_save')} (peft_type={config['peft_type']!r}),"
                " which is not computed here; use a plain LoRA adapter"
            )
        modules, rank = config.get("target_modules") or (), config["r"]
        targets = [modules] if isinstance(modules, str) else [*modules]
        return LoraConfig(
            rank=rank,
            # of rsLoRA: alpha / √rank
            alpha=float(config["lora_alpha"]) * (rank**0.5 if scaled else 1),
            targets=sorted({*targets, *(config.get("target_parameters") or ())}),
        )


def load_adapter(adapter: Adapter, path: Path) -> None:
    """Gives the adapter the weights in a directory. Raises ModelError, before anything is changed, for one of
    another base, rank, alpha or targets.
    """
    config, own = read_adapter_config(path), adapter.config
    for name in ("rank", "alpha"):
        if getattr(config, name) != getattr(own, name):
            raise ModelError(
                f"{path} has {name} {getattr(config, name):g}, and model.lora.{name}={getattr(own, name):g};"
                " set it to the former"
            )
    base = read_base(path)
    if base.files is not None and base.files != adapter.of.digests:
        raise ModelError(
            f"{path} is an adapter of the model that was at {base.path}; that at {adapter.of.base} has other"
            " files (base.json has their digests); use the model that it was trained on"
        )
    found, weights = read_adapter_weights(path), adapter.weights
    head = PREFIX + HEAD_WEIGHT
    if adapter.head is None:
        found.pop(head, None)
    else:
        found.setdefault(head, adapter.head)  # a new one, as it is
    wrong = sorted(
        name
        for name in {*found, *weights}
        if name not in found or name not in weights or found[name].shape != weights[name].shape
    )
    if wrong:
        raise ModelError(
            f"{path} and model.lora.targets={own.targets} do not fit: {len(wrong)} weights are of one of them"
            f" only or of another shape, {', '.join(wrong[:NAMES_SHOWN])}; its own targets are"
            f" {config.targets}"
        )
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(found[name])


def read_adapter_weights(path: Path) -> dict[str, Tensor]:
    """Every matrix by its name in the file. Raises ModelError."""
    with naming_errors(f"{path / WEIGHTS_FILE} cannot be read"):
        return load_file(path / WEIGHTS_FILE)


def count_adapter(config: LoraConfig, base: Path) -> int:
    """Parameters of an adapter of the model in `base`, of which no weights are loaded. Raises ModelError
    unless the config, and the adapter that it starts from, fit that model.
    """
    model = make_meta_model(base, dtype=torch.float32, head="tokens")
    prepare_places(model, base)
    adapter = make_adapter(model, config)
    if config.init_from:
        load_adapter(adapter, Path(config.init_from))
    return sum(weight.numel() for weight in adapter.weights.values())


def find_head(path: Path) -> ModelHead:
    """Which head the model with the adapter in `path` has. Raises ModelError."""
    return "scalar" if PREFIX + HEAD_WEIGHT in read_adapter_weights(path) else "tokens"


class Base(NamedTuple):
    """What an adapter's directory says of its model."""

    path: Path
    files: Mapping[str, str] | None = None  # their digests; None: another program wrote it
    config: Mapping[str, Any] = {}  # what its training added to the model's config


def read_base(path: Path) -> Base:
    """Raises ModelError."""
    with naming_errors(f"{path} cannot be read as an adapter"):
        if (path / BASE_FILE).is_file():
            content = json.loads((path / BASE_FILE).read_text("utf-8"))
            return Base(Path(content["path"]), content["files"], content["config"])
        return Base(Path(json.loads((path / ADAPTER_CONFIG).read_text("utf-8"))["base_model_name_or_path"]))


def read_adapter(model: PreTrainedModel, path: Path, *, scalar: bool = False) -> Adapter:
    """A new adapter of a model with prepare_places, as a directory has it. Raises ModelError."""
    adapter = make_adapter(model, read_adapter_config(path), scalar=scalar)
    load_adapter(adapter, path)
    return adapter


def apply_adapter(model: PreTrainedModel, path: Path) -> None:
    """Adds the adapter in `path`, and its scalar head where both have one, to the weights of its model.
    Raises ModelError.
    """
    base = read_base(path)
    prepare_places(model, base.path)
    adapter = read_adapter(model, path, scalar=has_scalar_head(model) and find_head(path) == "scalar")
    merge_adapter(adapter)
    if adapter.head is not None:
        with torch.no_grad():
            get_scalar_weight(model).copy_(adapter.head)
    model.config.update(dict(base.config))
