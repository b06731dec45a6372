"""LoRA: small matrices that train beside a model's own, which do not (Hu et al. 2021, arXiv 2106.09685).

    linear layer       y = x·Wᵀ + alpha/rank · (x·Aᵀ)·Bᵀ          A [rank, in], B [out, rank], B begins as 0
    stack of experts   W[e] + alpha/rank · B[e]·A[e] in place of W[e], made each time that the layer runs

The model stays what it is: a layer is called by the name that it had, its weights keep their names and their
bits, and FSDP, packing, saving and loading see no difference. An adapter lies beside it, and a layer adds
those that are active when it runs:

    prepare_places(model) ─► make_adapter(model, …) ─► use_adapters(model, [(adapter, rows)]): inside, the
                                           rows of a batch go through their own adapter; none: the base

Any number of adapters share a model. Adapters come and go at any time. What `peft` would wrap, name and
compute is what we do, so that either reads the other's directories. It is not used itself: its layers take
the place of the model's, which would rename every weight; rows with adapters of their own cannot train in
it; and under FSDP its parameters could not come and go.

A directory is as `peft` writes and reads it, and base.json, which names the model:

    adapter_config.json         rank, alpha, targets
    adapter_model.safetensors   the matrices, float32
    base.json                   the base model's directory, and the digests of its files

What another program wrote is read if it computes what we compute; if its config asks for more, it is refused.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Union

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import dropout, linear

from rollouts.config.model import ALL_LINEAR, LoraConfig
from rollouts.errors import ModelError
from rollouts.models.devices import find_device
from rollouts.models.directories import (
    ADAPTER_CONFIG,
    ModelHead,
    compute_model_digests,
    naming_errors,
    read_json,
    write_json,
)
from rollouts.models.layers import HEAD, HEAD_WEIGHT, get_scalar_weight, has_scalar_head
from rollouts.models.sharded import make_meta_model, reshard
from rollouts.types import Texts, live

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PREFIX = "base_model.model."  # before each name in an adapter's file
ADAPTERS = "_rollouts_adapters"  # attribute of a model
EXPERTS = "expert"  # part of the names of modules whose weights of three axes are stacks of matrices


class Place(NamedTuple):
    """A weight that adapters may add to."""

    module: nn.Module
    path: str  # of the module
    weight: str  # the module's attribute
    experts: int | None  # matrices of a stack; None: a linear layer
    rows: int  # out
    columns: int  # in
    turned: bool  # whether the weight is kept as [in, out]


class Pair(NamedTuple):
    """An adapter's matrices at one place."""

    a: nn.Parameter  # [rank, in], of a stack [experts · rank, in]
    b: nn.Parameter  # [out, rank], of a stack [out, rank · experts]


@live
class Adapter:
    """What trains, or has trained."""

    config: LoraConfig
    of: "Adapters"  # its model's
    pairs: Mapping[str, Pair]  # by place
    head: nn.Parameter | None  # [1, H], of a critic or a reward model

    @cached_property
    def weights(self) -> dict[str, nn.Parameter]:
        """Every parameter by its name in PEFT's files."""
        found = {}
        for name, pair in self.pairs.items():
            path = self.of.places[name].path
            # PEFT wraps a module once for each of its stacks, so the first is the innermost
            stacks = [other for other in self.pairs if self.of.places[other].path == path]
            module = f"{PREFIX}{path}.{'base_layer.' * (len(stacks) - 1 - stacks.index(name))}"
            found |= {f"{module}lora_A.weight": pair.a, f"{module}lora_B.weight": pair.b}
        return found if self.head is None else found | {PREFIX + HEAD_WEIGHT: self.head}

    @property
    def scale(self) -> float:
        return self.config.alpha / self.config.rank

    @property
    def target_modules(self) -> list[str]:
        """The linear layers, by the ends of their names where these mean no others."""
        linears = {name for name, place in self.of.places.items() if place.experts is None}
        own = linears & self.pairs.keys()
        ends = {name.rpartition(".")[2] for name in own}
        meant = {name for name in linears if name.rpartition(".")[2] in ends}
        return sorted(ends if meant == own else own)

    def compute_delta(self, name: str) -> Tensor:
        """What is added to the weight of a place, laid out as it is."""
        (a, b), place = self.pairs[name], self.of.places[name]
        if place.experts is None:
            delta = b @ a
        else:
            stacked = b.view(place.rows, -1, place.experts).permute(2, 0, 1)
            delta = stacked @ a.view(place.experts, -1, place.columns)
        return self.scale * (delta.transpose(-2, -1) if place.turned else delta)


Trained = Union["PreTrainedModel", "Adapter"]
"""What training is about."""
Routes = Sequence[tuple[Adapter, Tensor | slice | None]]
"""Active adapters, each with the rows [N] of the layers' input that go through it; None: all. Slices are of
the tokens of a packed row, [1, S, …]: one behind the other, all of them.
"""


@live
class Adapters:
    """What a model knows of adapters."""

    base: Path  # the model's directory
    digests: Texts  # of its files
    model_config: Any  # transformers'
    places: Mapping[str, Place]
    active: Routes = ()
    training: bool = False  # whether dropout is on
    hooked: set[str] = field(default_factory=set[str])  # places that look at `active`
    reached: set[str] = field(default_factory=set[str])  # places whose adapter has been added


def prepare_places(model: "PreTrainedModel", base: Path) -> None:
    """Notes where adapters of the model in the directory `base` may go, while it has its weights as they were
    loaded. Raises ModelError if a file of the directory cannot be read.
    """
    heads: Any = (model.get_output_embeddings(), getattr(model, HEAD, None))
    places: dict[str, Place] = {}
    for path, module in model.named_modules():
        conv = type(module).__name__ == "Conv1D"  # a linear layer of GPT-2's
        for name, weight in module.named_parameters(recurse=False):
            stack = EXPERTS in path and weight.ndim == 3
            linears = name == "weight" and (conv or isinstance(module, nn.Linear)) and module not in heads
            if stack or linears:
                turned = bool(getattr(module, "is_transposed", False)) if stack else conv
                rows, columns = (weight.mT if turned else weight).shape[-2:]
                experts, place = (len(weight), f"{path}.{name}") if stack else (None, path)
                places[place] = Place(module, path, name, experts, rows, columns, turned)
    setattr(model, ADAPTERS, Adapters(base, compute_model_digests(base), model.config, places))


def find_adapters(model: nn.Module) -> Adapters | None:
    """What the model knows of adapters; None: it may not have any."""
    return getattr(model, ADAPTERS, None)


def choose_places(model: nn.Module, targets: Sequence[str]) -> list[str]:
    """The places that the targets name, by the rule of PEFT: a whole name, or the end of one behind a dot.
    Raises ModelError for a target that names none.
    """
    places: Mapping[str, Place] = getattr(model, ADAPTERS).places
    chosen = set[str]()
    for target in targets:
        found = {name for name in places if target == ALL_LINEAR or f".{name}".endswith(f".{target}")}
        if not found:
            raise ModelError(
                f"model.lora.targets has {target!r}, which is no linear layer or stack of experts of"
                f" {type(model).__name__}; it has"
                f" {', '.join(sorted({name.rpartition('.')[2] for name in places}))}"
            )
        chosen |= found
    return [name for name in places if name in chosen]


def make_adapter(
    model: "PreTrainedModel", config: LoraConfig, *, seed: int = 0, scalar: bool = False
) -> Adapter:
    """A new adapter of a model with prepare_places, which changes nothing until it is used and trained: A as
    PEFT draws it, by `seed` alone, B 0. scalar: with a head for one number, the model's own or else 0.

    Each rank of several has all of it. Raises ModelError as choose_places.
    """
    adapters = find_adapters(model)
    if not adapters:
        raise ModelError("the model was loaded without room for adapters; open its backend with `lora`")
    generator, dtype, device = torch.Generator().manual_seed(seed), model.dtype, find_device(model)
    pairs = {}
    for name in choose_places(model, config.targets):
        place = adapters.places[name]
        rank, bound = config.rank * (place.experts or 1), 1 / math.sqrt(place.columns)
        a = torch.empty((rank, place.columns), dtype=dtype).uniform_(-bound, bound, generator=generator)
        b = torch.zeros((place.rows, rank), dtype=dtype)
        pairs[name] = Pair(nn.Parameter(a.to(device)), nn.Parameter(b.to(device)))
    head = None
    if scalar:
        width = model.config.get_text_config().hidden_size
        own = get_scalar_weight(model).detach() if has_scalar_head(model) else torch.zeros((1, width))
        head = nn.Parameter(own.to(device, dtype, copy=True))
    return Adapter(config, adapters, pairs, head)


def _hook(adapters: Adapters, name: str) -> None:
    module: Any
    module, _, attribute, experts, *_ = adapters.places[name]
    if experts is None:
        module.register_forward_hook(partial(_add_to_output, adapters, name))
        return
    kept: Any = getattr(type(module), attribute, None)  # a property, of quantised weights

    def read(self: nn.Module) -> Tensor:
        weight: Any = kept.fget(self) if kept else self._parameters[attribute]
        for adapter, rows in adapters.active:
            if name in adapter.pairs:
                if rows is not None:
                    raise ModelError(f"{name} takes one adapter at a time; leave experts out of its targets")
                weight = weight + adapter.compute_delta(name)
        return weight

    module.__class__ = type(type(module).__name__, (type(module),), {attribute: property(read)})


def _add_to_output(
    adapters: Adapters, name: str, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor
) -> Tensor:
    adapters.reached.add(name)
    if sizes := [rows.stop - rows.start for _, rows in adapters.active if isinstance(rows, slice)]:
        parts = [*output.split(sizes, -2)]
        for index, states in enumerate(inputs[0].split(sizes, -2)):
            adapter, _ = adapters.active[index]
            if pair := adapter.pairs.get(name):
                parts[index] = parts[index] + linear(linear(states, pair.a) * adapter.scale, pair.b)
        return torch.cat(parts, -2)
    for adapter, rows in adapters.active:
        assert not isinstance(rows, slice)
        if pair := adapter.pairs.get(name):
            states = inputs[0] if rows is None else inputs[0][rows]
            if adapters.training and adapter.config.dropout:
                states = dropout(states, adapter.config.dropout)
            delta = linear(linear(states, pair.a), pair.b) * adapter.scale
            output = output + delta if rows is None else output.index_add(0, rows, delta.to(output.dtype))
    return output


def check_reached(adapter: Adapter) -> None:
    """Raises ModelError, after a forward pass, for a layer that does not run as a module: its adapter would
    neither count nor train. Of experts some may have had no token.
    """
    left = [name for name in adapter.pairs.keys() - adapter.of.reached if EXPERTS not in name]
    if left:
        raise ModelError(
            f"the adapter of {min(left)} (and {len(left) - 1} more) had no effect: the model reads the weight"
            " of that layer without running it; leave it out of model.lora.targets"
        )


@contextmanager
def use_adapters(model: nn.Module, routes: Routes, *, training: bool = False) -> Iterator[None]:
    """Inside, these adapters of the model are active, and no others; with their dropout, if `training`."""
    adapters = find_adapters(model)
    if not adapters:
        yield
        return
    for adapter, _ in routes:
        for name in adapter.pairs.keys() - adapters.hooked:
            adapters.hooked.add(name)
            _hook(adapters, name)
    before = adapters.active, adapters.training
    adapters.active, adapters.training = routes, training
    try:
        yield
    finally:
        adapters.active, adapters.training = before


def list_trained(trained: nn.Module | Adapter) -> dict[str, nn.Parameter]:
    """The parameters of a model, sharded ones as their shards, or of an adapter, by name."""
    if isinstance(trained, Adapter):
        return trained.weights
    reshard(trained)
    return dict(trained.named_parameters())


def copy_adapter(adapter: Adapter) -> Adapter:
    """The same values in memory of its own, which does not train."""
    own = replace(adapter, pairs=deepcopy(adapter.pairs), head=deepcopy(adapter.head))
    for weight in own.weights.values():
        weight.requires_grad_(False)
    return own


def route_all(adapter: Adapter | None) -> Routes:
    """Every row through one adapter; None: the model as it is."""
    return [(adapter, None)] if adapter else []


def find_scalar_weight(model: nn.Module) -> Tensor:
    """The weight [1, H] of the scalar head that counts: the active adapter's, or the model's own."""
    adapters = find_adapters(model)
    for adapter, _ in adapters.active if adapters else ():
        if adapter.head is not None:
            return adapter.head
    return get_scalar_weight(model)


@torch.no_grad()
def merge_adapter(adapter: Adapter) -> None:
    """Adds the adapter to the weights of its model, in place and in their precision."""
    for name in adapter.pairs:
        place = adapter.of.places[name]
        weight = place.module._parameters[place.weight]
        assert weight is not None, f"{name} is quantised"
        weight.add_(adapter.compute_delta(name))


# --- on disk ------------------------------------------------------------------------------------------------


WEIGHTS_FILE, BASE_FILE = "adapter_model.safetensors", "base.json"
MEASURED = ("score_mean", "score_std")  # what the stage reward_model adds to a model's config
NAMES_SHOWN = 3
HEADS = {HEAD, "classifier"}  # what PEFT saves of a model that scores: whichever the model has
# settings of PEFT that change nothing of what an adapter computes once it is there, and those that are read
HARMLESS = """auto_mapping base_model_name_or_path inference_mode init_lora_weights lora_dropout
    megatron_core peft_type peft_version qalora_group_size revision task_type
    r lora_alpha target_modules target_parameters modules_to_save fan_in_fan_out"""


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
        write_json(path / name, content)


def read_adapter_config(path: Path) -> LoraConfig:
    """What an adapter's directory says of it. Raises ModelError if that cannot be read, or asks for what is
    not computed here.
    """
    file = path / ADAPTER_CONFIG
    with naming_errors(f"{file} cannot be read"):
        config = read_json(file)
        odd = {name: value for name, value in config.items() if value and name not in HARMLESS.split()}
        if config.get("bias") == "none":
            del odd["bias"]
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
            content = read_json(path / BASE_FILE)
            return Base(Path(content["path"]), content["files"], content["config"])
        return Base(Path(read_json(path / ADAPTER_CONFIG)["base_model_name_or_path"]))


def read_adapter(model: "PreTrainedModel", path: Path, *, scalar: bool = False) -> Adapter:
    """A new adapter of a model with prepare_places, as a directory has it. Raises ModelError."""
    adapter = make_adapter(model, read_adapter_config(path), scalar=scalar)
    load_adapter(adapter, path)
    return adapter


def apply_adapter(model: "PreTrainedModel", path: Path) -> None:
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
