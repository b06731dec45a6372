"""The model's own forward as a decoder, for models that cannot be taken apart.

    CachedDecoder      one token per row and step, with the model's own cache
    RecomputeDecoder   the whole sequence of every row at every step, for every causal model

In the cache all rows end at the right: a row of L positions in a cache of width C has C - L positions of
padding before it, which the mask hides. States without a time axis (convolutions, recurrent states) need no
alignment. Prompts are computed in groups of equal length, so nothing is ever padded while a recurrent state
is built.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from rollouts.engines.local.interface import evaluating, inferring
from rollouts.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RECOMPUTE_TOKENS = 8192  # padded tokens of one forward pass
CACHE_NAMES = ("past_key_values", "cache_params")  # how models call their cache


@dataclass(frozen=True, slots=True)
class WholeModel:
    """A model and what its forward takes."""

    model: PreTrainedModel
    parameters: frozenset[str]  # of forward
    vocab_size: int
    autocast_dtype: torch.dtype | None

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return self.autocast_dtype or next(
            value.dtype for value in self.model.parameters() if value.is_floating_point()
        )

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Inference mode with the model in evaluation mode, as it is when log-probs are computed."""
        with inferring(self.device, self.autocast_dtype), evaluating(self.model):
            yield

    def forward(self, ids: Tensor, **arguments: Any) -> Any:
        """The model's output, with those of the arguments that its forward has."""
        known = {
            name: value for name, value in arguments.items() if name in self.parameters and value is not None
        }
        return self.model(input_ids=ids, **known)

    def logits_at(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Logits [N, V] after `lengths` [N] tokens of each row of ids [N, S], which are right-padded; without
        a cache.

        A causal model cannot see the padding from where it is read, be it attention or recurrence.
        """
        rows = torch.arange(len(ids), device=ids.device)
        kept, columns = torch.unique(lengths - 1, return_inverse=True)
        if "logits_to_keep" not in self.parameters:
            return self.forward(ids, use_cache=False).logits[rows, lengths - 1]
        return self.forward(ids, use_cache=False, logits_to_keep=kept).logits[rows, columns]


def take_whole(model: PreTrainedModel, autocast_dtype: torch.dtype | None) -> WholeModel:
    """The model as it is. Raises ModelError if nothing tells the size of its vocabulary."""
    config: Any = model.config.get_text_config()
    sizes = (_rows_of(model.get_input_embeddings()), _rows_of(model.get_output_embeddings()))
    known = [size for size in sizes if size] or [
        size for size in [getattr(config, "vocab_size", None)] if size
    ]
    if not known:
        raise ModelError(
            f"{type(model).__name__} has neither token embeddings nor config.vocab_size; is it a causal"
            " language model?"
        )
    parameters = frozenset(inspect.signature(model.forward).parameters)
    return WholeModel(model, parameters, min(known), autocast_dtype)


def _rows_of(module: Any) -> int | None:
    """Tokens of an embedding or of an output head."""
    weight = getattr(module, "weight", None)
    return int(weight.shape[0]) if isinstance(weight, Tensor) and weight.ndim == 2 else None


@dataclass(frozen=True, slots=True)
class WholeDecoder:
    """What the two ways of running a whole model have in common."""

    whole: WholeModel

    @property
    def device(self) -> torch.device:
        return self.whole.device

    @property
    def dtype(self) -> torch.dtype:
        return self.whole.dtype

    @property
    def vocab_size(self) -> int:
        return self.whole.vocab_size

    def computing(self) -> Any:
        return self.whole.computing()


# --- with the model's own cache -----------------------------------------------------------------------------


class CacheSlots:
    """The model's own cache with one row per slot, all rows ending at the right, and how long each row is."""

    keeps_prefixes = False

    def __init__(self, *, max_rows: int, max_length: int) -> None:
        self.max_rows = max_rows
        self.max_length = max_length
        self.lengths = np.zeros(max_rows, np.int64)
        self.cache: Any = None  # of transformers; made by the first prompt
        self.width = 0  # positions of the cache, padding included
        self._rows = 0  # reserved

    @property
    def num_bytes(self) -> int:
        return sum(part.get().nbytes for part in self.parts())

    def reserve(self, rows: int, length: int) -> None:
        """Slots 0..rows-1 can be written. Positions are added as they come."""
        assert rows <= self.max_rows and length <= self.max_length, (rows, length)
        self._rows = rows

    def write(self, slots: Sequence[int], cache: Any, length: int) -> None:
        """The rows of a cache of `length` positions, without padding, go to the slots."""
        check_cache(cache)
        if self.cache is None:
            self._start(cache, length)
        else:
            self._resize(self._rows, max(length, self.width))
        for own, new in zip(self.parts(), _parts_of(cache), strict=True):
            states, values = own.get(), new.get()
            if own.has_time:
                states[slots, ..., states.shape[-2] - values.shape[-2] :, :] = values.to(states.dtype)
            else:
                states[slots] = values.to(states.dtype)
        self.lengths[list(slots)] = length

    def trim(self, rows: int) -> None:
        """Rows 0..rows-1 stay, in as few positions as the longest needs."""
        self._resize(rows, int(self.lengths[:rows].max()))
        self._rows = rows

    def grew(self, rows: int) -> None:
        """The model has put one position more into the cache of every row."""
        self.lengths[:rows] += 1
        self.width += 1

    def copy(self, sources: Tensor, targets: Tensor, length: int) -> None:
        """Whole rows: what is copied is as long as its source."""
        for part in self.parts():
            states = part.get()
            states[targets] = states[sources]
        self.lengths[targets.cpu().numpy()] = self.lengths[sources.cpu().numpy()]

    def move(self, source: int, target: int, length: int) -> None:
        assert self.lengths[source] == length, (self.lengths[source], length)
        for part in self.parts():
            states = part.get()
            states[target] = states[source]
        self.lengths[target] = length

    def drop(self) -> None:
        self.cache = None
        self.width = 0
        self._rows = 0

    def _start(self, cache: Any, length: int) -> None:
        """An empty cache like this one, of the reserved rows."""
        self.cache = cache.__class__.__new__(cache.__class__)
        self.cache.__dict__.update(cache.__dict__)
        self.cache.layers = [_shallow_copy(layer) for layer in cache.layers]
        self.width = length
        for part in self.parts():
            states = part.get()
            part.set(states.new_zeros(self._rows, *states.shape[1:]))

    def _resize(self, rows: int, width: int) -> None:
        """Rows are cut or added at the end, positions at the left. What is added is zero and masked, or
        written next.
        """
        if self.cache is None:
            return
        for part in self.parts():
            states = part.get()[:rows]
            if rows > len(states):
                states = torch.cat([states, states.new_zeros(rows - len(states), *states.shape[1:])])
            if part.has_time and part.width_of(width) != states.shape[-2]:
                states = _end_in(states, part.width_of(width))
            part.set(states)
        for layer in self.cache.layers:
            if hasattr(layer, "cumulative_length"):
                layer.cumulative_length = width
        self.width = width

    def parts(self) -> list[_Part]:
        """The tensors of the cache."""
        return [] if self.cache is None else _parts_of(self.cache)


@dataclass(frozen=True, slots=True)
class _Part:
    """One tensor of a cache layer, rows first."""

    holder: Any  # the layer, or the dictionary of its states
    name: str | int
    has_time: bool  # positions are its last axis but one
    window: int | None = None  # of which it keeps one position fewer

    def get(self) -> Tensor:
        return (
            self.holder[self.name] if isinstance(self.holder, dict) else getattr(self.holder, str(self.name))
        )

    def set(self, value: Tensor) -> None:
        if isinstance(self.holder, dict):
            self.holder[self.name] = value
        else:
            setattr(self.holder, str(self.name), value)

    def width_of(self, width: int) -> int:
        """How many of `width` positions it keeps."""
        return width if self.window is None else min(width, self.window - 1)


def _end_in(states: Tensor, width: int) -> Tensor:
    """The last `width` positions of states [B, …, S, D], with zeros before them where there are fewer."""
    held = states.shape[-2]
    return states[..., held - width :, :] if held >= width else pad(states, (0, 0, width - held, 0))


def _parts_of(cache: Any) -> list[_Part]:
    return [part for layer in cache.layers for part in _parts_of_layer(layer)]


def _parts_of_layer(layer: Any) -> list[_Part]:
    parts: list[_Part] = []
    if isinstance(getattr(layer, "keys", None), Tensor):
        window = getattr(layer, "sliding_window", None)
        parts += [_Part(layer, name, has_time=True, window=window) for name in ("keys", "values")]
    for states in (getattr(layer, "conv_states", None) or {}, getattr(layer, "recurrent_states", None) or {}):
        parts += [
            _Part(states, index, has_time=False) for index, value in states.items() if value is not None
        ]
    return parts


def _shallow_copy(layer: Any) -> Any:
    copied = layer.__class__.__new__(layer.__class__)
    copied.__dict__.update(
        {name: dict(value) if isinstance(value, dict) else value for name, value in layer.__dict__.items()}
    )
    return copied


def check_cache(cache: Any) -> None:
    """Raises ModelError for a cache whose rows we do not know how to align."""
    from transformers import cache_utils

    known = (
        cache_utils.DynamicLayer,
        cache_utils.DynamicSlidingWindowLayer,
        cache_utils.LinearAttentionLayer,
        cache_utils.LinearAttentionAndFullAttentionLayer,
        cache_utils.LinearAttentionAndSlidingWindowAttentionLayer,
        cache_utils.DummyLayer,
    )
    if type(cache) is not cache_utils.DynamicCache:
        raise ModelError(f"its cache is a {type(cache).__name__}, not a DynamicCache")
    unknown = sorted({type(layer).__name__ for layer in cache.layers if type(layer) not in known})
    if unknown:
        raise ModelError(f"its cache has layers of {unknown}, whose rows cannot be aligned")


@dataclass(frozen=True, slots=True)
class CachedDecoder(WholeDecoder):
    """The model's own forward with its own cache."""

    cache_name: str  # of forward's argument and of its output

    def make_slots(self, *, max_rows: int, max_length: int) -> CacheSlots:
        return CacheSlots(max_rows=max_rows, max_length=max_length)

    def prefill(self, ids: Tensor, lengths: Tensor, slots: Tensor, kv: CacheSlots) -> Tensor:
        """Logits [N, V] after each prompt: one forward pass for each length, the longest first."""
        row_lengths, row_slots = np.asarray(lengths.tolist()), np.asarray(slots.tolist())
        found: list[Tensor] = []
        order: list[int] = []
        for length in sorted(set(row_lengths.tolist()), reverse=True):
            rows = np.flatnonzero(row_lengths == length)
            output = self.whole.forward(ids[rows.tolist(), :length], use_cache=True, logits_to_keep=1)
            kv.write(row_slots[rows].tolist(), getattr(output, self.cache_name), length)
            found.append(output.logits[:, -1])
            order += rows.tolist()
        return torch.cat(found)[torch.as_tensor(np.argsort(order), device=ids.device)]

    def decode(self, ids: Tensor, positions: Tensor, kv: CacheSlots, *, length: int) -> Tensor:
        """Logits [B, V] after one more token per row. The mask hides the padding before short rows."""
        count = len(ids)
        kv.trim(count)
        assert kv.width == length - 1, (kv.width, length)
        mask = None
        if any(part.has_time for part in kv.parts()):
            mask = (torch.arange(length, device=ids.device) >= kv.width - positions[:, None]).long()
        output = self.whole.forward(
            ids[:, None],
            attention_mask=mask,
            position_ids=positions[:, None],
            use_cache=True,
            **{self.cache_name: kv.cache},
        )
        kv.grew(count)
        return output.logits[:, -1]


def make_cached_decoder(whole: WholeModel) -> CachedDecoder:
    """Raises ModelError for a model whose forward takes no cache that we know."""
    names = [name for name in CACHE_NAMES if name in whole.parameters]
    if not names:
        raise ModelError(f"its forward takes neither of {list(CACHE_NAMES)}")
    return CachedDecoder(whole, names[0])


# --- without a cache ----------------------------------------------------------------------------------------


class TokenSlots:
    """The tokens of every row."""

    keeps_prefixes = True

    def __init__(self, *, max_rows: int, max_length: int, device: torch.device) -> None:
        self.max_rows = max_rows
        self.max_length = max_length
        self.ids = torch.zeros(0, 0, dtype=torch.int64, device=device)  # [slots, capacity]

    @property
    def num_bytes(self) -> int:
        return self.ids.nbytes

    def reserve(self, rows: int, length: int) -> None:
        assert rows <= self.max_rows and length <= self.max_length, (rows, length)
        held_rows, held_length = self.ids.shape
        if rows > held_rows or length > held_length:
            length = (
                held_length if length <= held_length else min(self.max_length, max(length, 2 * held_length))
            )
            self.ids = pad(self.ids, (0, length - held_length, 0, max(0, rows - held_rows)))

    def copy(self, sources: Tensor, targets: Tensor, length: int) -> None:
        self.ids[targets, :length] = self.ids[sources, :length]

    def move(self, source: int, target: int, length: int) -> None:
        self.ids[target, :length] = self.ids[source, :length]

    def drop(self) -> None:
        self.ids = self.ids.new_zeros(0, 0)


@dataclass(frozen=True, slots=True)
class RecomputeDecoder(WholeDecoder):
    """The model's own forward over the whole sequences, right-padded, at every step."""

    def make_slots(self, *, max_rows: int, max_length: int) -> TokenSlots:
        return TokenSlots(max_rows=max_rows, max_length=max_length, device=self.device)

    def prefill(self, ids: Tensor, lengths: Tensor, slots: Tensor, kv: TokenSlots) -> Tensor:
        kv.ids[slots, : ids.shape[1]] = ids
        return self.whole.logits_at(ids, lengths)

    def decode(self, ids: Tensor, positions: Tensor, kv: TokenSlots, *, length: int) -> Tensor:
        """Logits [B, V]; rows go through the model in chunks of at most RECOMPUTE_TOKENS padded tokens."""
        count = len(ids)
        kv.ids[torch.arange(count, device=ids.device), positions] = ids
        rows = max(1, RECOMPUTE_TOKENS // length)
        chunks = [slice(start, min(start + rows, count)) for start in range(0, count, rows)]
        return torch.cat(
            [self.whole.logits_at(kv.ids[chunk, :length], positions[chunk] + 1) for chunk in chunks]
        )
