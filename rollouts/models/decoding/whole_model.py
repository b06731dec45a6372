"""A causal language model of transformers and its own forward pass, and two decoders made of it.

CachedDecoder      one token per row and step, with the model's own cache
RecomputeDecoder   the whole sequence of every row at every step, for every causal model
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from rollouts.errors import ModelError
from rollouts.models.layers import evaluation_mode, uncompiled
from rollouts.models.log_probs import score_logits
from rollouts.types import FloatArray, IntArray

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CACHE_NAMES = ("past_key_values", "cache_params")  # what models call their cache


class WholeModel:
    """A model, what its forward takes, and in which precision it runs."""

    def __init__(self, model: PreTrainedModel, autocast_dtype: torch.dtype | None) -> None:
        self.model = model
        self.parameters = frozenset(inspect.signature(model.forward).parameters)
        self.vocab_size = int(model.config.get_text_config().vocab_size)
        self.device = next(model.parameters()).device
        self.dtype = autocast_dtype or model.dtype
        self.is_exact = self.dtype in (torch.float32, torch.float64)  # to rounding, for every token
        self._autocast_dtype = autocast_dtype

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Inference mode, with the model as it is when log-probs are computed. One for many steps: autocast
        converts the weights once per context.
        """
        dtype = self._autocast_dtype
        autocast = torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None)
        with torch.inference_mode(), autocast, evaluation_mode(self.model):
            yield

    def to_device(self, values: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(np.array(values)).to(self.device)  # a copy: it may be read-only

    def forward(self, ids: IntArray, **arguments: Any) -> Any:
        """The model's output for ids [N, S], with those of the arguments that its forward has."""
        known = {
            name: self.to_device(value) if isinstance(value, np.ndarray) else value
            for name, value in arguments.items()
            if name in self.parameters and value is not None
        }
        with uncompiled(self.model):
            return self.model(input_ids=self.to_device(ids), **known)

    def score(self, ids: IntArray) -> FloatArray:
        """[T] log-probs of a row's tokens at temperature 1, 0 for the first. For a few tokens."""
        logits = self.forward(ids[None], use_cache=False).logits[0, :-1]
        scored, _ = score_logits(logits, self.to_device(ids[1:]), 1.0)
        return np.concatenate([np.zeros(1, np.float32), scored.float().cpu().numpy()])


class CachedDecoder:
    """The model's own forward with its own cache.

    All rows end at the right: before a row that is shorter than the cache is wide lies padding, which the
    mask hides. States without a time axis (convolutions, recurrent states) need no alignment. Prompts are
    computed in groups of equal length, so nothing is padded while a recurrent state is built.
    """

    def __init__(self, whole: WholeModel) -> None:
        """Raises ModelError for a model whose forward takes no cache that we know."""
        names = [name for name in CACHE_NAMES if name in whole.parameters]
        if not names:
            raise ModelError(f"its forward takes neither of {list(CACHE_NAMES)}")
        self._whole, self._name = whole, names[0]
        self._cache: Any = None  # of transformers; made by the first prompt
        self._width = 0  # positions of the cache, padding included

    def prefill(self, prompts: Sequence[IntArray]) -> Tensor:
        """One forward pass for each run of prompts of one length."""
        found: list[Tensor] = []
        for length, run in groupby(prompts, key=len):
            output = self._whole.forward(np.stack(list(run)), use_cache=True, logits_to_keep=1)
            found.append(output.logits[:, -1])
            cache = getattr(output, self._name)
            if self._cache is None:
                self._cache, self._width = cache, length
                continue
            self._width = max(self._width, length)
            for each in (self._cache, cache):
                _set_width(each, self._width)
            for (own, key), (new, _) in zip(_find_states(self._cache), _find_states(cache), strict=True):
                own[key] = torch.cat([own[key], new[key]])
        return torch.cat(found)

    def decode(self, ids: IntArray, positions: IntArray) -> Tensor:
        self._width = int(positions.max())
        _set_width(self._cache, self._width)
        # the mask hides the padding before short rows; recurrent layers alone take none
        mask = np.arange(self._width + 1) >= self._width - positions[:, None]
        attends = any(isinstance(getattr(layer, "keys", None), Tensor) for layer in self._cache.layers)
        output = self._whole.forward(
            ids[:, None],
            attention_mask=mask.astype(np.int64) if attends else None,
            position_ids=positions[:, None],
            use_cache=True,
            **{self._name: self._cache},
        )
        self._width += 1
        return output.logits[:, -1]

    def select(self, rows: IntArray, length: int) -> None:
        if not len(rows):
            self.drop()
        for holder, key in _find_states(self._cache):
            holder[key] = holder[key].index_select(0, self._whole.to_device(rows))

    def drop(self) -> None:
        self._cache = None


def _find_states(cache: Any) -> list[tuple[dict[Any, Any], Any]]:
    """Where the tensors of the cache are held, rows first: a dictionary and a key of it."""
    holders: list[tuple[dict[Any, Any], Any]] = []
    for layer in cache.layers if cache is not None else ():
        holders += [(vars(layer), "keys"), (vars(layer), "values")]
        for states in (getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {})):
            holders += [(states, index) for index in states]
    return [(holder, key) for holder, key in holders if isinstance(holder.get(key), Tensor)]


def _set_width(cache: Any, width: int) -> None:
    """Cuts positions on the left, or adds masked ones, until every row has `width` of them. A layer with a
    window keeps one position fewer than its window.
    """
    for layer in cache.layers:
        if not isinstance(getattr(layer, "keys", None), Tensor):
            continue
        kept = width
        if layer.is_sliding:
            kept, layer.cumulative_length = min(width, layer.sliding_window - 1), width
        if more := kept - layer.keys.shape[-2]:
            layer.keys, layer.values = (pad(states, (0, 0, more, 0)) for states in (layer.keys, layer.values))


class RecomputeDecoder:
    """The model's own forward over whole sequences, one after the other."""

    def __init__(self, whole: WholeModel) -> None:
        self._whole = whole
        self._rows: list[list[int]] = []  # tokens

    def prefill(self, prompts: Sequence[IntArray]) -> Tensor:
        rows = [prompt.tolist() for prompt in prompts]
        self._rows += rows
        return self._compute_logits(rows)

    def decode(self, ids: IntArray, positions: IntArray) -> Tensor:
        for row, token in zip(self._rows, ids.tolist(), strict=True):
            row.append(token)
        return self._compute_logits(self._rows)

    def select(self, rows: IntArray, length: int) -> None:
        self._rows = [list(self._rows[row]) for row in rows]

    def drop(self) -> None:
        self._rows = []

    def _compute_logits(self, rows: Sequence[list[int]]) -> Tensor:
        """[N, V] after the last token of each row."""
        outputs = (self._whole.forward(np.array([row]), use_cache=False, logits_to_keep=1) for row in rows)
        return torch.cat([output.logits[:, -1] for output in outputs])
