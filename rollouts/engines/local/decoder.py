"""The forward pass of a Llama-like model over slots: whole prompts, or one token per row.

It calls the model's own submodules and never changes the model, so that a trainer may use the same object.
What it leaves out of the model's own forward (masks, caches, output records) costs more than the arithmetic
on small models. `open_decoder` proves on a probe that both forwards agree.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from rollouts.engines.local.interface import inferring
from rollouts.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# On a CPU in float32 a product of few rows with a weight costs the libraries as much again to bring the
# weight into their own order. oneDNN reads its first factor as it lies, so the weight comes first and the
# result lies in columns: 1.3 to 1.8 times as fast for 12 to 64 rows.
COLUMN_ROWS = 8  # below, the plain product is faster
TRANSPOSE_BLOCK = 512  # tokens of the vocabulary

LENGTH_BLOCK, ROW_BLOCK = 64, 8  # positions and rows by which slots grow

ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj"}
ATTENTION_EXTRAS = {"q_norm", "k_norm", "rotary_emb"}
LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}


Linear = Callable[[nn.Module, Tensor], Tensor]


class GatedMLP(NamedTuple):
    """The submodules of a feed-forward block."""

    gate: nn.Module
    up: nn.Module
    down: nn.Module
    activation: nn.Module


@dataclass(frozen=True, slots=True)
class Layer:
    """The submodules of one decoder layer."""

    input_norm: nn.Module
    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    o_proj: nn.Module
    q_norm: nn.Module | None  # over each head's D values, where the model has it
    k_norm: nn.Module | None
    mlp_norm: nn.Module
    mlp: nn.Module
    gated_mlp: GatedMLP | None  # its parts, where it is down(activation(gate(x)) * up(x))


# --- keys and values ----------------------------------------------------------------------------------------


class KVSlots:
    """Per layer one buffer of keys and one of values, [slots, K, capacity, D]: K key-value heads, D the size
    of a head.

    Everything past a row's own length is stale but finite (buffers start as zeros), so a mask is enough to
    leave it out.
    """

    keeps_prefixes = True

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        max_rows: int,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.max_rows = max_rows
        self.max_length = max_length
        self._shape = (num_kv_heads, head_dim)
        self._num_layers = num_layers
        self._options = {"dtype": dtype, "device": device}
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    @property
    def rows(self) -> int:
        return self.keys[0].shape[0] if self.keys else 0

    @property
    def capacity(self) -> int:
        return self.keys[0].shape[2] if self.keys else 0

    @property
    def num_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in (*self.keys, *self.values))

    def reserve(self, rows: int, length: int) -> None:
        """Makes room for `rows` slots of `length` positions, with half as much again, so that growing is
        rare; contents stay.
        """
        assert rows <= self.max_rows and length <= self.max_length, (rows, length)
        if rows <= self.rows and length <= self.capacity:
            return
        rows = self.rows if rows <= self.rows else _grown(self.rows, rows, ROW_BLOCK, self.max_rows)
        length = (
            self.capacity
            if length <= self.capacity
            else _grown(self.capacity, length, LENGTH_BLOCK, self.max_length)
        )
        kv_heads, head_dim = self._shape
        for buffers in (self.keys, self.values):
            for layer in range(self._num_layers):
                grown = torch.zeros(rows, kv_heads, length, head_dim, **self._options)
                if grown.is_cuda:  # pragma: gpu
                    torch._dynamo.mark_static_address(grown)  # a recorded step writes to it in place
                if layer < len(buffers):
                    held = buffers[layer]
                    grown[: held.shape[0], :, : held.shape[2]] = held
                    buffers[layer] = grown
                else:
                    buffers.append(grown)

    def write_prompts(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Positions 0..S-1 of the given slots."""
        self.keys[layer][slots, :, : keys.shape[2]] = keys.to(self.keys[layer].dtype)
        self.values[layer][slots, :, : values.shape[2]] = values.to(self.values[layer].dtype)

    def write_tokens(self, layer: int, places: Tensor, keys: Tensor, values: Tensor) -> None:
        """One position of each of B rows: keys and values [B, K, D], at `places` [B * K] of `find_places`."""
        for buffer, new in ((self.keys[layer], keys), (self.values[layer], values)):
            buffer.view(-1, buffer.shape[-1]).index_copy_(
                0, places, new.reshape(-1, buffer.shape[-1]).to(buffer.dtype)
            )

    def find_places(self, positions: Tensor) -> Tensor:
        """Where in a layer's buffer, in units of D values, each head of slots 0..B-1 has its `positions` [B]:
        [B * K].
        """
        heads = torch.arange(len(positions) * self._shape[0], device=positions.device).view(
            len(positions), -1
        )
        return (heads * self.capacity + positions[:, None]).view(-1)

    def copy(self, sources: Tensor, targets: Tensor, length: int) -> None:
        """The first `length` positions of each source slot, into the target slot beside it."""
        for buffer in (*self.keys, *self.values):
            buffer[targets, :, :length] = buffer[sources, :, :length]

    def move(self, source: int, target: int, length: int) -> None:
        """One row's first `length` positions, into another slot."""
        for buffer in (*self.keys, *self.values):
            buffer[target, :, :length] = buffer[source, :, :length]

    def drop(self) -> None:
        """Gives the memory back."""
        self.keys.clear()
        self.values.clear()


def _grown(held: int, wanted: int, block: int, limit: int) -> int:
    target = max(wanted, held + held // 2)
    return min(limit, -(-target // block) * block)


# --- the forward pass ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FastDecoder:
    """A model taken apart. H query heads, K key-value heads, D values per head, V vocabulary."""

    embed: nn.Embedding
    rotary: nn.Module
    layers: tuple[Layer, ...]
    norm: nn.Module
    lm_head: nn.Linear
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scaling: float  # of the attention scores
    autocast_dtype: torch.dtype | None
    compiled: bool = False  # decode steps run under torch.compile

    @property
    def device(self) -> torch.device:
        return self.embed.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.autocast_dtype or self.embed.weight.dtype

    @property
    def vocab_size(self) -> int:
        return min(self.embed.num_embeddings, self.lm_head.out_features)

    def make_slots(self, *, max_rows: int, max_length: int) -> KVSlots:
        """Empty slots of this model's shape."""
        return KVSlots(
            num_layers=len(self.layers),
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            max_rows=max_rows,
            max_length=max_length,
            dtype=self.dtype,
            device=self.device,
        )

    def computing(self) -> AbstractContextManager[None]:
        return inferring(self.device, self.autocast_dtype)

    def prefill(self, ids: Tensor, lengths: Tensor, slots: Tensor, kv: KVSlots) -> Tensor:
        """Logits [N, V] after the last token of each prompt; its keys and values go to `slots` [N].

        ids [N, S] is right-padded; lengths [N] counts the real tokens. Causal attention keeps the padding out
        of what comes before it.
        """
        states = self.embed(ids)
        cos, sin = self._rotation(states, torch.arange(ids.shape[1], device=ids.device)[None])
        for index, layer in enumerate(self.layers):
            queries, keys, values = self._project(
                layer, layer.input_norm(states), _linear, shape=(len(ids), -1)
            )
            queries, keys = self._rotate(queries, keys, cos, sin)
            keys, values = keys.transpose(1, 2), values.transpose(1, 2)  # [N, K, S, D]
            kv.write_prompts(index, slots, keys, values)
            attended = scaled_dot_product_attention(
                queries.transpose(1, 2).to(values.dtype),
                keys.to(values.dtype),
                values,
                is_causal=True,
                scale=self.scaling,
                enable_gqa=self.num_heads != self.num_kv_heads,
            )
            states = states + layer.o_proj(attended.transpose(1, 2).flatten(2))
            states = states + layer.mlp(layer.mlp_norm(states))
        last = states[torch.arange(len(ids), device=ids.device), lengths - 1]
        return self.lm_head(self.norm(last))

    def decode(self, ids: Tensor, positions: Tensor, kv: KVSlots, *, length: int) -> Tensor:
        """Logits [B, V] after one more token in each of slots 0..B-1, whose keys and values are added at
        `positions` [B].

        `length` is 1 + the largest position. The query heads of one key-value head share its keys as if they
        were query positions, so nothing is repeated in memory.
        """
        if not self.compiled:
            return self._decode(ids, positions, kv, length)
        count = len(ids)  # pragma: gpu
        rows = min(kv.max_rows, round_up(count))
        length = min(kv.max_length, max(LENGTH_BLOCK, round_up(length)))
        kv.reserve(rows, length)
        ids, positions = (pad(column, (0, rows - count)) for column in (ids, positions))
        return compile_decode()(self, ids, positions, kv, length)[:count]

    def _decode(self, ids: Tensor, positions: Tensor, kv: KVSlots, length: int) -> Tensor:
        count = len(ids)
        places = kv.find_places(positions)
        by_columns = (
            self.device.type == "cpu"
            and self.dtype == torch.float32
            and count >= COLUMN_ROWS
            and _has_onednn()
        )
        linear = _linear_by_columns if by_columns else _linear
        states = self.embed(ids)
        states = states.t().contiguous().t() if by_columns else states
        cos, sin = self._rotation(states, positions[:, None])
        mask = torch.zeros(count, length, dtype=self.dtype, device=ids.device)
        mask = mask.masked_fill_(torch.arange(length, device=ids.device) > positions[:, None], float("-inf"))[
            :, None, None
        ]
        for index, layer in enumerate(self.layers):
            queries, keys, values = self._project(layer, layer.input_norm(states), linear, shape=(-1, 1))
            queries, keys = self._rotate(queries, keys, cos, sin)
            kv.write_tokens(index, places, keys[:, 0], values[:, 0])
            layer_keys, layer_values = kv.keys[index], kv.values[index]
            attended = scaled_dot_product_attention(
                queries.to(layer_keys.dtype).view(count, self.num_kv_heads, -1, self.head_dim),
                layer_keys[:count, :, :length],
                layer_values[:count, :, :length],
                attn_mask=mask,
                scale=self.scaling,
            )
            states = states + linear(layer.o_proj, attended.reshape(count, -1))
            states = states + _feed_forward(layer, layer.mlp_norm(states), linear)
        logits = linear(self.lm_head, self.norm(states))
        return _transpose_in_blocks(logits) if by_columns else logits

    def _rotation(self, states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [N, S, 1, D] of the positions [N, S]; half of the sines is negated, as `_rotate`
        wants it.
        """
        cos, sin = self.rotary(states, positions)
        first, second = sin.chunk(2, dim=-1)
        return cos[:, :, None], torch.cat((-first, second), dim=-1)[:, :, None]

    def _project(
        self, layer: Layer, states: Tensor, linear: Linear, *, shape: tuple[int, int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [N, S, H, D], keys and values [N, S, K, D] of the states; shape = (N, S), one may be -1."""
        key_heads = (*shape, self.num_kv_heads, self.head_dim)
        queries = linear(layer.q_proj, states).view(*shape, self.num_heads, self.head_dim)
        keys = linear(layer.k_proj, states).view(key_heads)
        if layer.q_norm is not None and layer.k_norm is not None:
            queries, keys = layer.q_norm(queries), layer.k_norm(keys)
        return queries, keys, linear(layer.v_proj, states).view(key_heads)

    def _rotate(self, queries: Tensor, keys: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Both [N, S, heads, D], turned by their positions."""
        both = torch.cat((queries, keys), dim=2)
        both = both * cos + both.roll(self.head_dim // 2, dims=-1) * sin
        return both[:, :, : self.num_heads], both[:, :, self.num_heads :]


@cache
def compile_decode() -> Callable[..., Tensor]:  # pragma: gpu
    """FastDecoder._decode under torch.compile, which records it in CUDA graphs: one for each size of a batch,
    so sizes are rounded up to powers of two. Rows that this adds write to slots that no row has.
    """
    return torch.compile(FastDecoder._decode, mode="reduce-overhead", dynamic=True)


def round_up(value: int) -> int:
    """The next power of two."""
    return 1 << (value - 1).bit_length()


def _linear(module: nn.Module, states: Tensor) -> Tensor:
    return module(states)


def _linear_by_columns(module: nn.Module, states: Tensor) -> Tensor:
    """module(states) for states [B, in] in any order of memory; the result's transpose is contiguous."""
    if type(module) is not nn.Linear or module._forward_hooks or module._forward_pre_hooks:
        return module(states)
    columns = torch.ops.mkldnn._linear_pointwise(
        module.weight, states, None, "none", [], ""
    )  # weight @ states.t()
    return columns.t() if module.bias is None else columns.add_(module.bias[:, None]).t()


@cache
def _has_onednn() -> bool:
    """Whether this torch multiplies by oneDNN; the operator is the one that its compiler uses."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _transpose_in_blocks(logits: Tensor) -> Tensor:
    """The same [B, V], by rows in memory. In blocks that stay in the cache, for which torch's own copy takes
    up to three times as long.
    """
    rows = torch.empty(logits.shape, dtype=logits.dtype)
    for start in range(0, logits.shape[1], TRANSPOSE_BLOCK):
        rows[:, start : start + TRANSPOSE_BLOCK] = logits[:, start : start + TRANSPOSE_BLOCK]
    return rows


def _feed_forward(layer: Layer, states: Tensor, linear: Linear) -> Tensor:
    if layer.gated_mlp is None:  # experts want [N, S, hidden]
        return layer.mlp(states.contiguous()[None])[0]
    gate, up, down, activation = layer.gated_mlp
    return linear(down, activation(linear(gate, states)) * linear(up, states))


def take_apart(
    model: PreTrainedModel,
    *,
    max_context: int,
    autocast_dtype: torch.dtype | None = None,
    compiled: bool = False,
) -> FastDecoder:
    """The decoder of a Llama-like model, not yet proved to agree with the model's own forward.

    Raises ModelError for what it cannot run: no Llama-like layers, attention that is not full, a capped or
    non-linear head, dropout.
    """
    config: Any = model.config
    _check_config(config, max_context=max_context)
    body = getattr(model, "model", None)
    layers = getattr(body, "layers", None)
    embed, rotary, norm = (getattr(body, name, None) for name in ("embed_tokens", "rotary_emb", "norm"))
    head = getattr(model, "lm_head", None)
    if (
        not isinstance(layers, nn.ModuleList)
        or not isinstance(embed, nn.Embedding)
        or rotary is None
        or norm is None
    ):
        raise ModelError(
            f"{type(model).__name__} has no model.layers, embed_tokens, rotary_emb and norm as a Llama has"
        )
    if not isinstance(head, nn.Linear):
        raise ModelError(
            f"{type(model).__name__}.lm_head is a {type(head).__name__}; the fast path needs a linear head"
        )
    if any(getattr(module, "jitter_noise", None) for module in model.modules()):
        raise ModelError(
            f"{type(model).__name__} has routers with jitter_noise, which the fast path would leave on while"
            " the model trains"
        )
    if any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules()):
        raise ModelError(
            f"{type(model).__name__} has dropout layers, which the fast path would leave on while the model"
            " trains; set dropout to 0"
        )
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    parts = tuple(_take_layer_apart(layer, index) for index, layer in enumerate(layers))
    return FastDecoder(
        embed=embed,
        rotary=rotary,
        layers=parts,
        norm=norm,
        lm_head=head,
        num_heads=config.num_attention_heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim=head_dim,
        scaling=float(getattr(layers[0].self_attn, "scaling", head_dim**-0.5)),
        autocast_dtype=autocast_dtype,
        compiled=compiled,
    )


def _check_config(config: Any, *, max_context: int) -> None:
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds - {"full_attention", "sliding_attention"}:
        raise ModelError(f"config.layer_types has {sorted(kinds)}; the fast path has full attention only")
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    windowed = "sliding_attention" in kinds or (
        window is not None and getattr(config, "layer_types", None) is None
    )
    if windowed and (window is None or window < max_context):
        raise ModelError(
            f"config.sliding_window={window} is shorter than the context of {max_context} tokens; the fast"
            f" path has full attention only (with max_context={window} no row would leave the window)"
        )
    for name in ("final_logit_softcapping", "attn_logit_softcapping"):
        if getattr(config, name, None) is not None:
            raise ModelError(f"config.{name}={getattr(config, name)}; the fast path has no soft-capping")


def _take_layer_apart(layer: nn.Module, index: int) -> Layer:
    names = {name for name, _ in layer.named_children()}
    inner = (
        {name for name, _ in layer.get_submodule("self_attn").named_children()}
        if "self_attn" in names
        else set()
    )
    if names != LAYER_PARTS or not inner >= ATTENTION_PARTS or inner - ATTENTION_PARTS - ATTENTION_EXTRAS:
        raise ModelError(
            f"layer {index} has the parts {sorted(names)} with attention parts {sorted(inner)}; the fast path"
            f" runs layers of {sorted(LAYER_PARTS)} with {sorted(ATTENTION_PARTS)}"
        )
    part = layer.get_submodule
    return Layer(
        input_norm=part("input_layernorm"),
        q_proj=part("self_attn.q_proj"),
        k_proj=part("self_attn.k_proj"),
        v_proj=part("self_attn.v_proj"),
        o_proj=part("self_attn.o_proj"),
        q_norm=part("self_attn.q_norm") if "q_norm" in inner else None,
        k_norm=part("self_attn.k_norm") if "k_norm" in inner else None,
        mlp_norm=part("post_attention_layernorm"),
        mlp=part("mlp"),
        gated_mlp=_take_mlp_apart(part("mlp")),
    )


def _take_mlp_apart(mlp: nn.Module) -> GatedMLP | None:
    parts = dict(mlp.named_children())
    if set(parts) != {"gate_proj", "up_proj", "down_proj", "act_fn"}:
        return None
    return GatedMLP(parts["gate_proj"], parts["up_proj"], parts["down_proj"], parts["act_fn"])
