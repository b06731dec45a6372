"""Which way a model is run: the fastest whose log-probs agree with the model's own forward on a probe.

compiled    fast, decoding under torch.compile            the same models on a GPU
fast        the layers taken apart (decoder.py)           Llama-like models with full attention
cached      the model's own forward with its own cache    windows, recurrent states, soft caps, other layouts
recompute   the model's own forward without a cache       any causal model; a token costs a pass over its row
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np
import torch

from rollouts.errors import ModelError
from rollouts.models.decoding.batch import DecodeBatch, Decoder, Row
from rollouts.models.decoding.decoder import FastDecoder
from rollouts.models.decoding.whole_model import CachedDecoder, RecomputeDecoder, WholeModel
from rollouts.models.draws import make_draw
from rollouts.models.limits import find_rotary_limit
from rollouts.types import GenerateRequest, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ForwardPath = Literal["compiled", "fast", "cached", "recompute"]
PATHS: tuple[ForwardPath, ...] = get_args(ForwardPath)
# Unlike, so that padding and positions are tried; more than a CPU's way with many rows needs; and equal ones,
# which are one prompt: computed once for two rows, and taken over by the first row, which comes late.
PROBE_LENGTHS = (13, 8, 11, 5, 9, 2, 12, 7, 10, 8, 13)
PROBE_STEPS = (6, 7, 8)  # tokens of the rows, by turns, so that rows leave while others are decoded
LONGEST_PROBED_WINDOW = 4096  # positions; a longer prompt would take too long to open with
DEFAULT_CONTEXT = 8192  # tokens, for a config that sets no limit
WINDOW_NAMES = ("sliding_window", "attention_chunk_size", "window_size", "attention_window_size")
# nats by which two ways of one computation may differ by rounding: in float32 and float64 for every token;
# in half precision in the mean over a row, for bfloat16 keeps 8 bits: some tokens differ by several tenths
TOLERANCE, HALF_TOLERANCE = 1e-4, 0.25
COSTS = {
    "cached": "by the model's own forward pass and cache, which is somewhat slower than the fast path",
    "recompute": "without a cache: a token costs a forward pass over its whole sequence, which is very slow",
}


class OpenedDecoder(NamedTuple):
    """A decoder that agrees with its model, and why no faster one runs."""

    whole: WholeModel
    decoder: Decoder
    path: ForwardPath
    refused: Mapping[ForwardPath, str]  # the faster paths, and what was in their way

    def describe(self) -> str:
        """One line for people."""
        reasons = "; ".join(f"{path}: {why}" for path, why in self.refused.items())
        how = f"{COSTS[self.path]} ({reasons})" if self.path in COSTS else "by its fast path"
        return f"the embedded engine runs this model {how}"


def open_decoder(
    model: PreTrainedModel,
    *,
    max_context: int,
    max_rows: int = 128,
    autocast_dtype: torch.dtype | None = None,
    compiled: bool = True,
) -> OpenedDecoder:
    """The fastest decoder whose log-probs agree with the model's own forward on a probe (see TOLERANCE).
    Without `compiled` none that a compiler makes, which takes minutes.

    Raises ModelError naming what was in the way of each; and for rotary frequencies that change with the
    length within `max_context`, for there is then no one log-prob to agree with.
    """
    limit = find_rotary_limit(model.config)
    if limit is not None and max_context > limit.tokens:
        raise ModelError(
            f"config.rope_parameters: {limit}, so a token's log-prob would depend on what comes after it; set"
            f" max_context to {limit.tokens} or less"
        )
    whole = WholeModel(model, autocast_dtype)
    config: Any = model.config.get_text_config()
    windows = {getattr(config, name, None) for name in WINDOW_NAMES}  # a prompt leaves each
    longest = min(LONGEST_PROBED_WINDOW + 1, max_context)
    beyond = [window + 2 for window in windows if isinstance(window, int) and 8 < window < longest]
    chunk = getattr(config, "attention_chunk_size", None) or 0

    def make(path: ForwardPath) -> Decoder:
        if path == "recompute":
            return RecomputeDecoder(whole)
        if path != "cached":
            rows = max(max_rows, len(PROBE_LENGTHS))
            return FastDecoder(whole, max_rows=rows, max_context=max_context, compiled=path == "compiled")
        if LONGEST_PROBED_WINDOW < chunk < max_context:
            # padding moves the borders of chunks, which only a probe can show to be harmless
            raise ModelError(
                f"config.attention_chunk_size={chunk} is more than the {LONGEST_PROBED_WINDOW} positions that"
                f" are probed and less than the context of {max_context}; lower max_context to {chunk}"
            )
        return CachedDecoder(whole)

    tolerance, refused = TOLERANCE if whole.is_exact else HALF_TOLERANCE, dict[ForwardPath, str]()
    for path in PATHS if compiled and whole.device.type == "cuda" else PATHS[1:]:
        try:
            decoder = make(path)
            lengths = (*PROBE_LENGTHS, *sorted(beyond)) if path == "cached" else PROBE_LENGTHS
            difference = probe_difference(whole, decoder, lengths)
            if difference <= tolerance:
                return OpenedDecoder(whole, decoder, path, refused)
            refused[path] = (
                f"its log-probs differ from the model's own by {difference:.3g} nats on a probe; the limit is"
                f" {tolerance:g}"
            )
        except ModelError as error:
            refused[path] = str(error)
        except Exception as error:  # whatever a model raises that is run in a way it was not written for
            refused[path] = f"it does not run: {type(error).__name__}: {error}"
    found = "; ".join(f"{path}: {why}" for path, why in refused.items())
    name = type(model).__name__
    raise ModelError(f"{name} cannot be run exactly here ({found}); use an engine that serves it")


def probe_difference(whole: WholeModel, decoder: Decoder, lengths: Sequence[int]) -> float:
    """Largest |engine - model| log-prob in nats of the tokens that the decoder generates after prompts of
    these lengths; in half precision the largest mean of a row.

    Rows join one after the other and leave, as they do while generating; the model scores each by itself.
    """
    rows: list[Row] = []
    for index, length in enumerate(lengths):
        places = np.arange(length)
        prompt = (places * 7919 + (places * places) % 31 * 131 + length * 613) % whole.vocab_size
        sampling = SamplingParams(max_new_tokens=PROBE_STEPS[index % len(PROBE_STEPS)])
        request = GenerateRequest(request_id=str(index), prompt_ids=prompt, sampling=sampling)
        rows.append(Row(request, make_draw(0, request)))
    batch = DecodeBatch(whole, decoder)
    worst: list[float] = []
    with whole.computing():
        batch.admit(rows[1:], 0)
        batch.step(0)
        batch.admit(rows[:1], 0)
        while batch.rows:
            batch.step(0)
            batch.take_ended()
        for row in rows:
            prompt = row.request.prompt_ids
            own = whole.score(np.concatenate([prompt, row.token_ids]))[len(prompt) :]
            differences = np.abs(own - row.log_probs)
            worst.append(differences.max() if whole.is_exact else differences.mean())
    batch.reset()
    return float(np.max(worst))  # NaN if one is
