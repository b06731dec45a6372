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
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, linear

from rollouts.config.model import ALL_LINEAR, LoraConfig
from rollouts.errors import ModelError
from rollouts.models.devices import find_device
from rollouts.models.directories import compute_model_digests
from rollouts.models.scalar_head import HEAD, HEAD_WEIGHT, get_scalar_weight, has_scalar_head
from rollouts.models.sharded import reshard

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


@dataclass(eq=False)
class Adapter:
    """What trains, or has trained."""

    config: LoraConfig
    of: Adapters  # its model's
    pairs: Mapping[str, Pair]  # by place
    head: nn.Parameter | None  # [1, H], of a critic or a reward model

    @cached_property
    def weights(self) -> dict[str, nn.Parameter]:
        """Every parameter by its name in PEFT's files."""
        found: dict[str, nn.Parameter] = {}
        for name, pair in self.pairs.items():
            path = self.of.places[name].path
            # PEFT wraps a module once for each of its stacks, so the first is the innermost
            stacks = [other for other in self.pairs if self.of.places[other].path == path]
            inner = "base_layer." * (len(stacks) - 1 - stacks.index(name))
            for kind, weight in zip("AB", pair, strict=True):
                found[f"{PREFIX}{path}.{inner}lora_{kind}.weight"] = weight
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


Routes = Sequence[tuple[Adapter, Tensor | None]]
"""Active adapters, each with the rows [N] of the layers' input that go through it; None: all."""


@dataclass(eq=False)
class Adapters:
    """What a model knows of adapters."""

    base: Path  # the model's directory
    digests: Mapping[str, str]  # of its files
    model_config: Any  # transformers'
    places: Mapping[str, Place]
    active: Routes = ()
    training: bool = False  # whether dropout is on
    hooked: set[str] = field(default_factory=set[str])  # places that look at `active`
    reached: set[str] = field(default_factory=set[str])  # places whose adapter has been added


def prepare_places(model: PreTrainedModel, base: Path) -> None:
    """Notes where adapters of the model in the directory `base` may go, while it has its weights as they were
    loaded. Raises ModelError if a file of the directory cannot be read.
    """
    heads: Any = (model.get_output_embeddings(), getattr(model, HEAD, None))
    places: dict[str, Place] = {}
    for path, module in model.named_modules():
        conv = type(module).__name__ == "Conv1D"  # a linear layer of GPT-2's
        for name, weight in module.named_parameters(recurse=False):
            if EXPERTS in path and weight.ndim == 3:
                turned = bool(getattr(module, "is_transposed", False))
                rows, columns = weight.shape[:0:-1] if turned else weight.shape[1:]
                places[f"{path}.{name}"] = Place(module, path, name, len(weight), rows, columns, turned)
            elif name == "weight" and (conv or isinstance(module, nn.Linear)) and module not in heads:
                rows, columns = weight.shape[::-1] if conv else weight.shape
                places[path] = Place(module, path, name, None, rows, columns, conv)
    setattr(model, ADAPTERS, Adapters(base, compute_model_digests(base), model.config, places))


def find_adapters(model: nn.Module) -> Adapters | None:
    """What the model knows of adapters; None: it may not have any."""
    return getattr(model, ADAPTERS, None)


def check_places(adapter: Adapter, model: nn.Module) -> None:
    """Raises ModelError for an adapter of another model, which would do nothing in this one."""
    if adapter.of is not find_adapters(model):
        raise ModelError(f"it is an adapter of another model, the one of {adapter.of.base}")


def choose_places(model: nn.Module, targets: Sequence[str]) -> list[str]:
    """The places that the targets name, by the rule of PEFT: a whole name, or the end of one behind a dot.
    Raises ModelError for a target that names none.
    """
    places: Mapping[str, Place] = getattr(model, ADAPTERS).places
    chosen: set[str] = set()
    for target in targets:
        found = {name for name in places if target == ALL_LINEAR or f".{name}".endswith(f".{target}")}
        if not found:
            ends = ", ".join(sorted({name.rpartition(".")[2] for name in places}))
            raise ModelError(
                f"model.lora.targets has {target!r}, which is no linear layer or stack of experts of"
                f" {type(model).__name__}; it has {ends}"
            )
        chosen |= found
    return [name for name in places if name in chosen]


def make_adapter(
    model: PreTrainedModel, config: LoraConfig, *, seed: int = 0, scalar: bool = False
) -> Adapter:
    """A new adapter of a model with prepare_places, which changes nothing until it is used and trained: A as
    PEFT draws it, by `seed` alone, B 0. scalar: with a head for one number, the model's own or else 0.

    Each rank of several has all of it. Raises ModelError as choose_places.
    """
    adapters = find_adapters(model)
    if adapters is None:
        raise ModelError("the model was loaded without room for adapters; open its backend with `lora`")
    generator, dtype, device = torch.Generator().manual_seed(seed), model.dtype, find_device(model)
    pairs: dict[str, Pair] = {}
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
    for adapter, rows in adapters.active:
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
    if adapters is None:
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
    pairs = {name: Pair(*map(_freeze_copy, pair)) for name, pair in adapter.pairs.items()}
    return replace(adapter, pairs=pairs, head=None if adapter.head is None else _freeze_copy(adapter.head))


def _freeze_copy(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight.detach().clone(), requires_grad=False)


def route_all(adapter: Adapter | None) -> Routes:
    """Every row through one adapter; None: the model as it is."""
    return [] if adapter is None else [(adapter, None)]


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
