"""One token per row from logits, by inverse transform over a counter-based stream: a row's draws depend on
its key and count alone.
"""

import hashlib
import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from rollouts.types import FloatArray, GenerateRequest, IntArray, TokenScores

# How each row samples, one record per row. `drawn` is t: the number of tokens the row has drawn so far.
DRAW_DTYPE = np.dtype(
    [("key", "u8", 2), ("drawn", "u8"), ("temperature", "f4"), ("top_p", "f4"), ("top_k", "i8")]
)

LARGEST_INVERSE_TEMPERATURE = 1e30  # 0 * inf would be NaN at the largest logit
BLOCK = 256  # near the root of usual vocabularies, most of which it or its half divides
FIRST_CANDIDATES = 1024  # of top-p; a whole-vocabulary sort costs 50 times as much and is rarely needed


class Sampled(NamedTuple):
    """What was drawn for each row."""

    token_ids: IntArray  # [B]
    # [B] nats, of the distribution drawn from; at temperature 0 of the one at temperature 1
    log_probs: FloatArray
    top: TokenScores  # [B, K] of that distribution the likeliest; −infinity: the filters left it out


def make_draw(seed: int, request: GenerateRequest) -> NDArray[np.void]:
    """One record of DRAW_DTYPE, at the start of the request's stream, whose key is made of `seed` and the
    request's own seed or else its id.
    """
    sampling = request.sampling
    own = f"id/{request.request_id}" if sampling.seed is None else f"seed/{sampling.seed}"
    digest = hashlib.blake2b(f"{seed}/{own}".encode(), digest_size=16).digest()
    key = np.frombuffer(digest, "<u8")
    return np.array((key, 0, sampling.temperature, sampling.top_p, sampling.top_k), DRAW_DTYPE)


def compute_uniforms(keys: NDArray[np.uint64], drawn: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Uniform numbers [B] in [0, 1) with 53 bits, a function of (key [B, 2], drawn [B]) alone.

    Two rounds of the splitmix64 finaliser (Steele et al. 2014), one per half of the key, so that streams of
    different keys do not become shifted copies of each other.
    """
    first = _mix(keys[:, 0] + drawn * np.uint64(0x9E3779B97F4A7C15))
    bits = _mix(first ^ keys[:, 1])
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def sample_tokens(logits: Tensor, draws: NDArray[np.void], *, top: int = 0) -> Sampled:
    """One token per row of logits [B, V], and its `top` likeliest ones. Each record of `draws` (DRAW_DTYPE)
    describes its row; the caller advances `drawn`.

    The order of the filters is temperature, top-k, top-p on what top-k left; log-probs are of the
    renormalised distribution. At temperature 0 the first largest logit is taken and the filters do not apply.
    A NaN among a row's logits, or a +inf, makes its log-prob NaN: check it.
    """
    logits, device = logits.float(), logits.device
    greedy = draws["temperature"] == 0
    temperature = np.where(greedy, 1.0, draws["temperature"].astype(np.float64))
    inverse = np.minimum(1 / temperature, LARGEST_INVERSE_TEMPERATURE).astype(np.float32)
    scale = torch.from_numpy(inverse[:, None]).to(device)
    limited = (draws["top_p"] < 1) | ((draws["top_k"] > 0) & (draws["top_k"] < logits.shape[1]))
    filtered = np.flatnonzero(~greedy & limited)
    if len(filtered):
        rows = torch.from_numpy(filtered).to(device)
        scaled = (logits[rows] - logits[rows].amax(-1, keepdim=True)) * scale[rows]
        keep = find_top(scaled, draws["top_k"][filtered], draws["top_p"][filtered].astype(np.float64))
        logits = logits.index_copy(0, rows, logits[rows].masked_fill(~keep, float("-inf")))
    largest = logits.amax(-1, keepdim=True)
    weights = logits - largest
    if (inverse != 1).any():
        weights.mul_(scale)
    weights.exp_()
    uniforms = torch.from_numpy(compute_uniforms(draws["key"], draws["drawn"]))
    ids, totals = _invert(weights, uniforms.to(device, non_blocking=True))
    if greedy.any():
        rows = torch.from_numpy(np.flatnonzero(greedy)).to(device)
        ids[rows] = logits[rows].argmax(-1)
    found = torch.cat([ids[:, None], logits.topk(top).indices], 1) if top else ids[:, None]
    chosen = logits.gather(1, found) - largest
    chosen = chosen * scale - totals.log().float()[:, None]
    tokens, log_probs = found.cpu().numpy(), chosen.cpu().numpy()
    return Sampled(tokens[:, 0], log_probs[:, 0], TokenScores(tokens[:, 1:], log_probs[:, 1:]))


def find_top(
    scaled: Tensor,
    top_k: NDArray[np.int64],
    top_p: NDArray[np.float64],
    *,
    candidates: int = FIRST_CANDIDATES,
) -> Tensor:
    """[B, V] true in each row's kept set: the top_k largest, of these the fewest whose mass reaches top_p, at
    least one.

    scaled [B, V]: logits below the row's largest, over the temperature; one top_k (0: all) and top_p per row.
    """
    device, vocab = scaled.device, scaled.shape[1]
    rows = (np.where(top_k > 0, np.minimum(top_k, vocab), vocab), top_p)
    limits, mass = (torch.from_numpy(values).to(device)[:, None] for values in rows)
    candidates = min(vocab, max(candidates, int(top_k.max())))
    values, ids = scaled.topk(candidates, dim=-1)
    inside = torch.arange(candidates, device=device) < limits
    weights = values.double().exp() * inside
    cut = limits > candidates  # those without a top-k
    total = torch.where(cut, scaled.exp().sum(-1, keepdim=True), weights.sum(-1, keepdim=True))
    reached = weights.cumsum(-1) / total  # share of the top-k mass up to and with each candidate
    if (cut & (reached[:, -1:] < mass)).any():
        return find_top(scaled, top_k, top_p, candidates=vocab)
    before = pad(reached, (1, -1))
    keep = inside & ((before < mass) | (mass >= 1))
    return torch.zeros_like(scaled, dtype=torch.bool).scatter_(1, ids, keep)


def _invert(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """For each row of weights [B, V] the first index at which their running sum exceeds uniform * total, and
    the total; uniforms [B] and totals [B] are float64.

    In two levels, blocks then one block's tokens: a running sum over the whole vocabulary would cost as much
    as the exponentials.
    """
    vocab = weights.shape[1]
    size = math.gcd(vocab, BLOCK)
    if size < BLOCK // 4:
        size = BLOCK
        weights = pad(weights, (0, -vocab % size))
    blocks = weights.view(len(weights), -1, size)
    block_edges = blocks.sum(-1).double().cumsum(-1)
    block, rest = _first_above(block_edges, uniforms)
    inner_edges = blocks[torch.arange(len(weights), device=weights.device), block].double().cumsum(-1)
    inner, _ = _first_above(inner_edges, rest)
    return (block * size + inner).clamp_(max=vocab - 1), block_edges[:, -1]  # NaN leads anywhere


def _first_above(edges: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Index [B] of the first of the edges [B, N] above uniform * last edge, and how far into that step the
    target lies, in [0, 1).
    """
    total = edges[:, -1]
    # rounding may reach the total itself
    target = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))[:, None]
    index = torch.searchsorted(edges, target, right=True).clamp_(max=edges.shape[1] - 1)
    before, after = (pad(edges, (1, 0)).gather(1, at) for at in (index, index + 1))
    return index[:, 0], ((target - before) / (after - before))[:, 0]
