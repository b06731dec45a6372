"""The forward pass of a Llama-like model with its own keys and values: whole prompts, or one token per row.

It calls the model's own submodules and never changes the model, so that a trainer may use the same object.
What it leaves out of the model's own forward (masks, caches, output records) costs more than the arithmetic
on small models. `open_decoder` proves on a probe that both forwards agree.

Where that is not possible, two decoders made of the model's own forward pass:

CachedDecoder      one token per row and step, with the model's own cache
RecomputeDecoder   the whole sequence of every row at every step, for every causal model
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence

from rollouts.errors import ModelError
from rollouts.losses.logprobs import widen
from rollouts.models.devices import autocast, unrounded
from rollouts.models.draws import sample_tokens
from rollouts.models.forward_plan import OWN_TILE, decoder_answers
from rollouts.models.layers import evaluation_mode, uncompiled
from rollouts.models.lora import Adapter, route_all, use_adapters
from rollouts.models.packed_attention import register_packed_attention
from rollouts.types import Fields, GenerateRequest, IntArray, TokenScores

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# On a CPU in float32 a product of few rows with a weight costs the libraries as much again to bring the
# weight into their own order. oneDNN reads its first factor as it lies, so the weight comes first and the
# result lies in columns: 1.3 to 1.8 times as fast for 12 to 64 rows.
COLUMN_ROWS = 8  # below, the plain product is faster
TRANSPOSE_BLOCK = 512  # tokens of the vocabulary
SHORTEST = 64  # positions of a recorded step

# of a body, its layers and their attention
PARTS = """embed_tokens layers norm rotary_emb self_attn mlp input_layernorm post_attention_layernorm
    q_proj k_proj v_proj o_proj q_norm k_norm"""
SOFT_CAPS = ("final_logit_softcapping", "attn_logit_softcapping")
MLP_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}


class FastDecoder:
    """A model taken apart, and the keys and values of its rows. H query heads, K key-value heads, D values
    per head, V vocabulary.

    Per layer a buffer of keys and values, [2, rows, K, capacity, D]. Everything past a row's own length
    is stale but finite (buffers start as zeros), so a mask is enough to leave it out.
    """

    def __init__(
        self, whole: "WholeModel", *, max_rows: int, max_context: int, compiled: bool = False
    ) -> None:
        """Raises ModelError for what it cannot run: no Llama-like layers, attention that is not full, capped
        logits.
        """
        model = whole.model
        _check(model, max_context=max_context)
        self._whole, self._body, self._head = whole, model.model, model.lm_head
        attention = self._body.layers[0].self_attn
        self._head_dim, self._scaling = attention.head_dim, attention.scaling
        self._num_kv_heads = attention.k_proj.out_features // self._head_dim
        self._normed = "q_norm" in _children(attention)  # over each head's D values
        # down(act(gate) * up)
        self._gated = [_children(layer.mlp) == MLP_PARTS for layer in self._body.layers]
        # by the operators that torch's compiler uses
        known = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        ordered = known and whole.device.type == "cpu" and whole.dtype == torch.float32
        self._by_columns, self._packs = ordered and whole.is_exact, ordered and not whole.is_exact
        self._packed: dict[tuple[nn.Linear, ...], tuple[list[int], Tensor]] = {}
        self._version: int | None = None  # of the weights that are packed
        self.mixes = all(self._gated)  # experts are handed all rows as one
        self._max_rows, self._max_context, self._compiled = max_rows, max_context, compiled
        self.drop()

    def prefill(self, prompts: Sequence[IntArray], kept: Sequence[Tensor] = ()) -> Tensor:
        """Logits [N, V] after each of N prompts, whose rows are added to those that are there, by the model's
        own layers.

        Prompts are padded on the right; causal attention keeps the padding out of what comes before it.
        `kept` may have the keys and values of each prompt's first positions, as copy_row gives them: only the
        others are computed. What is kept is padded on the left, which the mask hides.
        """
        from transformers import DynamicCache

        starts = [states.shape[3] for states in kept] or [0] * len(prompts)
        new = [self._whole.to_device(prompt[start:]) for prompt, start in zip(prompts, starts, strict=True)]
        ids, first, most = pad_sequence(new, batch_first=True), self._rows, max(starts)
        (count, length), self._rows = ids.shape, first + len(new)
        self._reserve(self._rows, most + length + 1)
        kv, places = self._kv, list(enumerate(starts, first)) if kept else [(slice(first, self._rows), 0)]

        class Slots(DynamicCache):
            """Writes keys and values [N, K, S, D] where this decoder has them."""

            def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> Any:
                found = super().update(keys, values, layer) if kept else (keys, values)
                for buffer, states in zip(kv[layer], found, strict=True):
                    for (row, start), part in zip(places, states if kept else [states], strict=True):
                        buffer[row, ..., : start + length, :] = part[..., most - start :, :]
                return found

        cache, options = Slots(), dict[str, Tensor]()
        if kept:
            padded = torch.stack([pad(states, (0, 0, most - states.shape[3], 0)) for states in kept], 2)
            for layer, (keys, values) in enumerate(padded):
                DynamicCache.update(cache, keys, values, layer)
            positions = torch.arange(-most, length, device=ids.device) + torch.tensor(starts).to(ids)[:, None]
            options = {"attention_mask": (positions >= 0).long(), "position_ids": positions[:, most:]}
        with uncompiled(self._body):
            body = self._body(input_ids=ids, past_key_values=cache, use_cache=True, **options)
        last = [len(each) - 1 for each in new]
        return self._head(body.last_hidden_state[[*range(count)], last])

    def copy_row(self, row: int, length: int) -> Tensor:
        """The keys and values of its first `length` positions, [layers, 2, K, length, D]."""
        return torch.stack([buffers[:, row, :, :length] for buffers in self._kv])

    def decode(self, ids: IntArray, positions: IntArray) -> Tensor:
        """Logits [B, V] after one more token of every row, ids [B] at positions [B]."""
        count, length, step = len(ids), int(positions.max()) + 1, FastDecoder._decode
        if self._compiled:  # pragma: gpu
            length = min(self._max_context, max(SHORTEST, _round_up(length)))
            more = min(self._max_rows, _round_up(count)) - count
            ids, positions, step = np.pad(ids, (0, more)), np.pad(positions, (0, more)), _compile_decode()
        self._reserve(len(ids), length)
        return step(self, self._whole.to_device(ids), self._whole.to_device(positions), length)[:count]

    def _decode(self, ids: Tensor, positions: Tensor, length: int) -> Tensor:
        count, by_columns = len(ids), self._by_columns and len(ids) >= COLUMN_ROWS
        linear = self._multiply
        states = self._body.embed_tokens(ids)
        states = states.t().contiguous().t() if by_columns else states
        cos, sin = (part[0, :, None] for part in self._body.rotary_emb(states, positions[None]))  # [B, 1, D]
        attend: Any = scaled_dot_product_attention
        attend = attend if ids.is_cuda else unrounded(attend)
        half = self._head_dim // 2
        sin = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
        hidden = torch.arange(length, device=ids.device) > positions[:, None, None, None]
        mask = torch.where(hidden, float("-inf"), 0.0).to(self._whole.dtype)
        # where the positions are in a layer's buffer, in units of D values
        heads = torch.arange(count * self._num_kv_heads, device=ids.device).view(count, -1)
        places = (heads * self._kv[0].shape[3] + positions[:, None]).view(-1)
        for layer, gated, buffers in zip(self._body.layers, self._gated, self._kv, strict=True):
            attention, normed = layer.self_attn, layer.input_layernorm(states)
            three = linear(normed, attention.q_proj, attention.k_proj, attention.v_proj)
            queries, keys, values = (part.view(count, -1, self._head_dim) for part in three)
            if self._normed:
                queries, keys = attention.q_norm(queries), attention.k_norm(keys)
            both = torch.cat((queries, keys), dim=1)
            both = both * cos + both.roll(half, dims=-1) * sin
            queries, keys = both.split((queries.shape[1], keys.shape[1]), dim=1)
            for buffer, new in zip(buffers, (keys, values), strict=True):
                new = new.reshape(-1, self._head_dim).to(buffer.dtype)
                buffer.view(-1, self._head_dim).index_copy_(0, places, new)
            # the query heads of one key-value head share its keys as if they were query positions, so nothing
            # is repeated in memory
            queries = queries.to(buffers.dtype).view(count, self._num_kv_heads, -1, self._head_dim)
            keys, values = buffers[:, :count, :, :length]
            attended = attend(queries, keys, values, attn_mask=mask, scale=self._scaling)
            states = states + linear(attended.reshape(count, -1), attention.o_proj)[0]
            mlp, normed = layer.mlp, layer.post_attention_layernorm(states)
            if gated:
                gate, up = linear(normed, mlp.gate_proj, mlp.up_proj)
                # float32 where there are adapters, which are added to it
                fed = linear((mlp.act_fn(gate) * up).to(states.dtype), mlp.down_proj)[0]
            else:
                fed = mlp(normed.contiguous()[None])[0]  # experts want [N, S, hidden]
            states = states + fed
        if not by_columns:
            return self._head(self._body.norm(states))
        logits = linear(self._body.norm(states), self._head)[0]
        # by rows in memory, in blocks that stay in the cache: torch's own copy takes up to three times as
        # long
        rows = torch.empty(logits.shape, dtype=logits.dtype)
        for start in range(0, logits.shape[1], TRANSPOSE_BLOCK):
            rows[:, start : start + TRANSPOSE_BLOCK] = logits[:, start : start + TRANSPOSE_BLOCK]
        return rows

    def _multiply(self, states: Tensor, *parts: Any) -> list[Tensor]:
        """part(states) of each, for states [B, in] in any order of memory: by columns, so that the results'
        transposes are contiguous, or by packed weights, which give bfloat16.
        """
        plainly = not self._packs and not (self._by_columns and len(states) >= COLUMN_ROWS)
        if plainly or any(type(part) is not nn.Linear or part._forward_pre_hooks for part in parts):
            return [part(states) for part in parts]
        product, plain = torch.ops.mkldnn._linear_pointwise, (None, "none", [], "")
        if self._packs:
            if parts not in self._packed:
                whole = torch.cat([part.weight.detach().bfloat16() for part in parts])
                self._packed[parts] = _count_changes(parts), torch.ops.mkldnn._reorder_linear_weight(whole)
            both = product(states.bfloat16(), self._packed[parts][1], *plain)
            outputs = both.split([len(part.weight) for part in parts], dim=1)
        else:
            outputs = [product(part.weight, states, *plain).t() for part in parts]  # weight @ states.t()
        found = []
        for part, output in zip(parts, outputs, strict=True):
            output = output if part.bias is None else output + part.bias
            for hook in part._forward_hooks.values():  # what adapters add
                changed = hook(part, (states,), output)
                output = output if changed is None else changed
            found.append(output)
        return found

    def note_weights(self, version: int | None) -> None:
        """To be called when others may have changed weights: what is packed of them is forgotten if one was,
        or if the version has changed, for torch counts no step of a fused optimizer. None: forgets it anyway.
        """
        changed = any(_count_changes(parts) != count for parts, (count, _) in self._packed.items())
        if changed or version is None or version != self._version:
            self._packed.clear()
        self._version = version

    def select(self, rows: IntArray, length: int) -> None:
        """Row i is from now on what row rows[i] was, up to `length` positions; there are no others."""
        self._rows = len(rows)
        self._reserve(self._rows, length)
        moved = np.flatnonzero(rows != np.arange(len(rows)))
        targets, sources = self._whole.to_device(moved), self._whole.to_device(rows[moved])
        for buffers in self._kv if len(moved) else ():
            buffers[:, targets, :, :length] = buffers[:, sources, :, :length]

    def drop(self) -> None:
        """Forgets all rows and gives their memory back."""
        empty = torch.zeros(
            (2, 0, self._num_kv_heads, 0, self._head_dim), dtype=self._whole.dtype, device=self._whole.device
        )
        self._kv = [empty] * len(self._body.layers)  # of each layer
        self._rows = 0  # in use

    def _reserve(self, rows: int, length: int) -> None:
        """Makes room for rows of `length` positions, with half as much again, so that growing is rare."""
        _, held_rows, _, held_length, _ = self._kv[0].shape
        wanted = ((held_rows, rows, self._max_rows), (held_length, length, self._max_context))
        more_rows, more_length = (
            max(need, min(limit, held * 3 // 2)) - held if need > held else 0 for held, need, limit in wanted
        )
        for index, buffers in enumerate(self._kv) if more_rows or more_length else ():
            self._kv[index] = pad(buffers, (0, 0, 0, more_length, 0, 0, 0, more_rows))
            if buffers.is_cuda:  # pragma: gpu
                torch._dynamo.mark_static_address(self._kv[index])  # a recorded step writes to it


@cache
def _compile_decode() -> Callable[..., Tensor]:  # pragma: gpu
    """FastDecoder._decode under torch.compile, which records it in CUDA graphs: one for each size of a batch,
    so sizes are rounded up to powers of two. Rows that this adds write where no row is.
    """
    return torch.compile(FastDecoder._decode, mode="reduce-overhead", dynamic=True)


def _round_up(value: int) -> int:
    """The next power of two."""
    return 1 << (value - 1).bit_length()


def _count_changes(parts: Iterable[nn.Linear]) -> list[int]:
    """What is another list after a change of their weights, in place or by other memory."""
    return [number for part in parts for number in (part.weight.data_ptr(), part.weight._version)]


def _check(model: Any, *, max_context: int) -> None:
    """Raises ModelError for what the probe may not show: attention that is not full, caps of large logits,
    and what is there beside the parts that are run, for it may do nothing only at first.
    """
    config, layers = model.config, model.model.layers
    kinds = {*(getattr(config, "layer_types", None) or ())}
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    windowed = "sliding_attention" in kinds or (window and not kinds)
    caps = [name for name in SOFT_CAPS if getattr(config, name, None) is not None]
    modules = (model.model, *layers, *(layer.self_attn for layer in layers))
    others = {name for module in modules for name in _children(module)} - {*PARTS.split()}
    rules = {
        f"config.layer_types has {sorted(kinds)}": kinds - {"full_attention", "sliding_attention"},
        f"config.sliding_window={window} is shorter than the context of {max_context} tokens (with"
        f" max_context={window} no row would leave it)": windowed and (window or 0) < max_context,
        f"config has {caps}": caps,
        f"the model has the parts {sorted(others)}": others,
    }
    for rule, broken in rules.items():
        if broken:
            raise ModelError(f"{rule}; the fast path runs a Llama's parts, with full attention only")


def _children(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


# --- the model's own forward --------------------------------------------------------------------------------


CACHE_NAMES = ("past_key_values", "cache_params")  # what models call their cache
# Of a request's stream, the part from which its prompt's tokens are drawn: its answer never comes so far.
# There the j-th of those at a place has the number j · 2³² + place, however many are drawn.
PROMPT_DRAWS = 1 << 62


class WholeModel:
    """A model, what its forward takes, and in which precision it runs."""

    def __init__(
        self,
        model: "PreTrainedModel",
        autocast_dtype: torch.dtype | None,
        adapter: Adapter | None = None,
    ) -> None:
        self.model, self.adapter = model, adapter
        self.parameters = frozenset(inspect.signature(model.forward).parameters)
        self.vocab_size: int = model.config.get_text_config().vocab_size
        self.device = next(model.parameters()).device
        self.dtype = autocast_dtype if autocast_dtype and self.device.type != "cpu" else model.dtype
        # to rounding, for every token
        self.is_exact = (autocast_dtype or model.dtype) in (torch.float32, torch.float64)
        self._autocast_dtype = autocast_dtype
        register_packed_attention()  # whose attention is unrounded

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Inference mode, with the model as it is when log-probs are computed. One for many steps: a GPU's
        autocast converts the weights once per context.
        """
        routing = use_adapters(self.model, route_all(self.adapter))
        casting = autocast(self._autocast_dtype, self.device)
        with torch.inference_mode(), casting, evaluation_mode(self.model), routing:
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

    def read_logits(self, ids: IntArray) -> Iterator[tuple[IntArray, Tensor]]:
        """Logits [N, V] after each token of a row but its last, with the places of these: some at a time, for
        those of a long row would not fit.
        """
        count, tile, decoder = len(ids) - 1, max(OWN_TILE // self.vocab_size, 1), self.model.get_decoder()
        if count <= tile or decoder is self.model or "logits_to_keep" not in self.parameters:
            if count:
                yield np.arange(count), self.forward(ids[None], use_cache=False).logits[0, :-1]
            return
        with uncompiled(self.model):
            answer = decoder(input_ids=self.to_device(ids[None]), use_cache=False)
        for places in np.split(np.arange(count), range(tile, count, tile)):
            with decoder_answers(self.model, answer):
                logits = self.forward(ids[None], use_cache=False, logits_to_keep=places).logits[0]
            yield places, logits


def score_prompt(whole: WholeModel, request: GenerateRequest, draw: NDArray[np.void]) -> Fields:
    """The fields of a Completion that answer what the request asks of its prompt. `draw`: how it samples; see
    rollouts.models.draws.
    """
    ids, targets, most = request.prompt_ids, request.prompt_targets, request.prompt_top
    wanted = np.column_stack([ids[1:], *([] if targets is None else targets.T)])
    count, width = wanted.shape
    edges = [1, width, width + most]  # the columns: its own tokens, the targets, the likeliest, the drawn
    shape = (count, width + most + request.prompt_draws)
    tokens, values = np.empty(shape, np.int64), np.empty(shape, np.float32)
    for places, logits in whole.read_logits(ids):
        log_probs = widen(logits).log_softmax(-1)
        found = torch.cat([whole.to_device(wanted[places].clip(0)), log_probs.topk(most).indices], 1)
        tokens[places, : edges[2]] = found.cpu()
        values[places, : edges[2]] = log_probs.gather(1, found).cpu()
        draws = np.full(len(logits), draw)
        for index in range(request.prompt_draws):
            draws["drawn"] = places + (PROMPT_DRAWS + (index << 32))
            at = places, edges[2] + index
            tokens[at], values[at], _ = sample_tokens(logits, draws)
    own, scored, top, drawn = map(TokenScores, *(np.split(each, edges, axis=1) for each in (tokens, values)))
    return {
        "prompt_log_probs": np.append(np.float32(0), own.log_probs) if request.score_prompt else None,
        "prompt_targets": None if targets is None else np.where(targets < 0, np.nan, scored.log_probs),
        "prompt_top": top if most else None,
        "prompt_draws": drawn if request.prompt_draws else None,
    }


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
        self._whole, self._name, self.mixes = whole, names[0], False
        self._cache: Any = None  # of transformers; made by the first prompt
        self._width = 0  # positions of the cache, padding included

    def prefill(self, prompts: Sequence[IntArray]) -> Tensor:
        """One forward pass for each run of prompts of one length."""
        found = []
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
            return
        for holder, key in _find_states(self._cache):
            holder[key] = holder[key].index_select(0, self._whole.to_device(rows))

    def drop(self) -> None:
        self._cache = None


def _find_states(cache: Any) -> list[tuple[dict[Any, Any], Any]]:
    """Where the tensors of the cache are held, rows first: a dictionary and a key of it."""
    holders = []
    for layer in cache.layers:
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
    """The model's own forward over whole sequences, one after the other. It holds no rows."""

    mixes = False

    def __init__(self, whole: WholeModel) -> None:
        self._whole = whole

    def prefill(self, rows: Sequence[IntArray]) -> Tensor:
        """[N, V] after the last token of each row, whether of its prompt or decoded."""
        outputs = (self._whole.forward(row[None], use_cache=False, logits_to_keep=1) for row in rows)
        return torch.cat([output.logits[:, -1] for output in outputs])

    def select(self, rows: IntArray, length: int) -> None:
        """Nothing to move."""

    def drop(self) -> None:
        """Nothing to forget."""
