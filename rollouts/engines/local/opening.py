"""Which way a model is run: the fastest whose log-probs agree with the model's own forward on a probe.

compiled    fast, decoding under torch.compile            the same models on a GPU
fast        the layers taken apart (decoder.py)           Llama-like models with full attention
cached      the model's own forward with its own cache    windows, recurrent states, soft caps, other layouts
recompute   the model's own forward without a cache       any causal model; a token costs a pass over its row
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rollouts.engines.local.decoder import take_apart
from rollouts.engines.local.interface import Decoder, ForwardPath, evaluating, is_exact, tolerance_of
from rollouts.engines.local.whole_model import RecomputeDecoder, WholeModel, make_cached_decoder, take_whole
from rollouts.errors import ModelError
from rollouts.models.limits import find_rotary_limit

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROBE_LENGTHS = (
    13,
    8,
    11,
    5,
    9,
    2,
    12,
    7,
    10,
)  # unlike, so that padding and positions are tried too; as many as a CPU's way with many rows needs
PROBE_STEPS = 5
LONGEST_PROBED_WINDOW = 4096  # positions; a longer prompt would take too long to open with
DEFAULT_CONTEXT = 8192  # tokens, for a config that sets no limit
WINDOW_NAMES = ("sliding_window", "attention_chunk_size", "window_size", "attention_window_size")


@dataclass(frozen=True, slots=True)
class OpenedDecoder:
    """A decoder that agrees with its model, and why no faster one runs."""

    decoder: Decoder[Any]
    path: ForwardPath
    refused: Mapping[ForwardPath, str]  # the faster paths, and what was in their way

    def describe(self) -> str:
        """One line for people."""
        if self.path in ("compiled", "fast"):
            return "the embedded engine runs this model by its fast path"
        ways = {
            "cached": (
                "by the model's own forward pass and cache, which is somewhat slower than the fast path"
            ),
            "recompute": (
                "without a cache: every token costs a forward pass over its whole sequence, so generation"
                " will be very slow"
            ),
        }
        return (
            f"the embedded engine runs this model {ways[self.path]}"
            f" ({'; '.join(f'{path}: {why}' for path, why in self.refused.items())})"
        )


def open_decoder(
    model: PreTrainedModel, *, max_context: int, autocast_dtype: torch.dtype | None = None
) -> OpenedDecoder:
    """The fastest decoder that agrees with the model's own forward to 1e-4 nats (0.25 in half precision) on a
    probe.

    Raises ModelError naming what was in the way of each; and for rotary frequencies that change with the
    length within `max_context`, for there is then no one log-prob to agree with.
    """
    _check_rotary(model.config, max_context=max_context)
    whole = take_whole(model, autocast_dtype)
    ways: dict[ForwardPath, Callable[[], Decoder[Any]]] = {}
    if whole.device.type == "cuda":  # pragma: gpu
        ways["compiled"] = lambda: take_apart(
            model, max_context=max_context, autocast_dtype=autocast_dtype, compiled=True
        )
    ways |= {
        "fast": lambda: take_apart(model, max_context=max_context, autocast_dtype=autocast_dtype),
        "cached": lambda: _open_cached(whole, max_context=max_context),
        "recompute": lambda: RecomputeDecoder(whole),
    }
    refused: dict[ForwardPath, str] = {}
    for path, make in ways.items():
        try:
            decoder = make()
            lengths = (
                (*PROBE_LENGTHS, *_probed_windows(model.config, max_context))
                if path == "cached"
                else PROBE_LENGTHS
            )
            difference = probe_difference(whole, decoder, lengths)
        except ModelError as error:
            refused[path] = str(error)
            continue
        except Exception as error:  # whatever a model raises that is run in a way it was not written for
            refused[path] = f"it does not run: {type(error).__name__}: {error}"
            continue
        tolerance = tolerance_of(decoder.dtype)
        if difference <= tolerance:
            return OpenedDecoder(decoder, path, MappingProxyType(refused))
        refused[path] = (
            f"its log-probs differ from the model's own by {difference:.3g} nats on a probe; the limit is"
            f" {tolerance:g}"
        )
    found = "; ".join(f"{path}: {why}" for path, why in refused.items())
    raise ModelError(
        f"{type(model).__name__} cannot be run exactly by the embedded engine ({found}); use an engine that"
        " serves it"
    )


def _open_cached(whole: WholeModel, *, max_context: int) -> Decoder[Any]:
    """Raises ModelError for chunks of attention too long for a probe: padding moves their borders, which only
    a probe can show to be harmless.
    """
    chunk = getattr(whole.model.config.get_text_config(), "attention_chunk_size", None)
    if chunk is not None and LONGEST_PROBED_WINDOW < chunk < max_context:
        raise ModelError(
            f"config.attention_chunk_size={chunk} is more than the {LONGEST_PROBED_WINDOW} positions that are"
            f" probed and less than the context of {max_context}; lower max_context to {chunk} to use the"
            " cache"
        )
    return make_cached_decoder(whole)


def _probed_windows(config: Any, max_context: int) -> list[int]:
    """Lengths of prompts that leave each kind of window that a row can leave."""
    config = config.get_text_config()
    windows = {getattr(config, name, None) for name in WINDOW_NAMES}
    return sorted(
        window + 2
        for window in windows
        if isinstance(window, int) and 8 < window < min(LONGEST_PROBED_WINDOW + 1, max_context)
    )


def _check_rotary(config: Any, *, max_context: int) -> None:
    limit = find_rotary_limit(config)
    if limit is not None and max_context > limit.tokens:
        raise ModelError(
            f"config.rope_parameters: {limit}, so a token's log-prob would depend on what comes after it; set"
            f" max_context to {limit.tokens} or less"
        )


# --- the probe ----------------------------------------------------------------------------------------------


def probe_difference(whole: WholeModel, decoder: Decoder[Any], lengths: Sequence[int]) -> float:
    """Largest |engine - model| log-prob in nats, over prompts of these lengths and some decoded tokens.

    Of every token of the vocabulary; in half precision of one that the model samples, the mean over its
    distribution: two ways of the same computation differ there by several tenths for some of the tokens that
    are never sampled. Rows join one after the other and one leaves, as they do while generating.
    """
    count, exact = len(lengths), is_exact(decoder.dtype)
    rows = [_probe_ids(length + PROBE_STEPS, row, decoder) for row, length in enumerate(lengths)]
    with evaluating(whole.model), decoder.computing():
        wanted = [_own_log_probs(whole, ids, length) for ids, length in zip(rows, lengths, strict=True)]
        kv = decoder.make_slots(max_rows=count, max_length=max(lengths) + PROBE_STEPS)
        in_slots: list[int] = []  # which row is in each slot
        steps = [0] * count  # tokens of each row that were decoded
        worst: list[Tensor] = []

        def compare(logits: Tensor, members: Sequence[int]) -> None:
            own = torch.stack([wanted[row][steps[row]] for row in members])
            differences = (logits.float().log_softmax(-1) - own).abs()
            worst.append((differences if exact else (own.exp() * differences).sum(-1)).max())

        def join(members: list[int]) -> None:
            longest = max(lengths[row] for row in members)
            kv.reserve(len(in_slots) + len(members), longest)
            ids = torch.stack(
                [
                    torch.nn.functional.pad(rows[row][: lengths[row]], (0, longest - lengths[row]))
                    for row in members
                ]
            )
            slots = torch.arange(len(in_slots), len(in_slots) + len(members), device=ids.device)
            compare(
                decoder.prefill(
                    ids, torch.tensor([lengths[row] for row in members], device=ids.device), slots, kv
                ),
                members,
            )
            in_slots.extend(members)

        def step() -> None:
            positions = torch.tensor([lengths[row] + steps[row] for row in in_slots], device=decoder.device)
            length = int(positions.max()) + 1
            kv.reserve(len(in_slots), length)
            ids = torch.stack([rows[row][lengths[row] + steps[row]] for row in in_slots])
            logits = decoder.decode(ids, positions, kv, length=length)
            for row in in_slots:
                steps[row] += 1
            compare(logits, in_slots)

        join(list(range(1, count)))
        step()
        join([0])
        step()
        step()
        last = in_slots.pop()
        kv.move(len(in_slots), 0, lengths[last] + steps[last])
        in_slots[0] = last
        step()
        return float(torch.stack(worst).max())


def _probe_ids(length: int, row: int, decoder: Decoder[Any]) -> Tensor:
    """Tokens from all over the vocabulary, another order in each row."""
    places = torch.arange(length, device=decoder.device)
    return (places * 7919 + (places * places) % 31 * 131 + row * 613) % decoder.vocab_size


def _own_log_probs(whole: WholeModel, ids: Tensor, length: int) -> Tensor:
    """[PROBE_STEPS + 1, V] after the prompt and after each later token, by the model's plain forward over the
    whole row.
    """
    logits = whole.forward(ids[None], use_cache=False, logits_to_keep=PROBE_STEPS + 1).logits[0]
    return logits[-(PROBE_STEPS + 1) :].float().log_softmax(-1)
