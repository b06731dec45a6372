"""Sampling from logits, against slow numpy versions."""

import numpy as np
import torch
from numpy.testing import assert_allclose

from rollouts.models.draws import DRAW_DTYPE, compute_uniforms, make_draw, sample_tokens
from rollouts.testing.engine_contracts import make_request
from tests.support.text_tables import cases

MASK = 2**64 - 1


def make_draws(rows, **settings):
    requests = (make_request(f"row{row}", **settings) for row in range(rows))
    return np.array([make_draw(0, request) for request in requests], DRAW_DTYPE)


def slow_mix(value):
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & MASK
    return value ^ (value >> 31)


def slow_log_probs(logits, temperature, top_k, top_p):
    """One row; -inf outside the kept set."""
    scaled = logits.astype(np.float64) / temperature
    order = np.argsort(-scaled, kind="stable")
    if top_k:
        order = order[:top_k]
    probs = np.exp(scaled[order]) / np.exp(scaled[order]).sum()
    kept = order[: int(np.searchsorted(np.cumsum(probs), top_p - 1e-12) + 1)]
    result = np.full(len(logits), -np.inf)
    result[kept] = scaled[kept] - np.log(np.exp(scaled[kept]).sum())
    return result


def test_uniforms_are_a_function_of_key_and_count():
    keys = np.array([[3, 7], [2**63 + 5, 1], [3, 8]], np.uint64)
    drawn = np.array([0, 5, 2**40], np.uint64)
    expected = []
    for (first, second), count in zip(keys.tolist(), drawn.tolist(), strict=True):
        bits = slow_mix(slow_mix((first + count * 0x9E3779B97F4A7C15) & MASK) ^ second)
        expected.append((bits >> 11) / 2**53)
    assert compute_uniforms(keys, drawn).tolist() == expected


@cases("vocab: 2 97 49152")
def test_the_token_is_the_one_whose_share_of_the_running_sum_holds_the_uniform(vocab: int):
    logits = torch.randn(40, vocab, generator=torch.Generator().manual_seed(vocab)) * 2
    draws = make_draws(40)
    sampled = sample_tokens(logits, draws)
    edges = np.cumsum(torch.softmax(logits.double(), -1).numpy(), axis=1)
    uniforms = compute_uniforms(draws["key"], draws["drawn"])
    for row, token in enumerate(sampled.token_ids.tolist()):
        below = edges[row, token - 1] if token else 0.0
        assert below - 1e-5 <= uniforms[row] <= edges[row, token] + 1e-5
    expected = torch.log_softmax(logits, -1).numpy()[np.arange(40), sampled.token_ids]
    assert_allclose(sampled.log_probs, expected, atol=2e-6)
    assert sampled.log_probs.dtype == np.float32


@cases("""
temperature | top_k | top_p
0.7         | 0     | 1.0
1.3         | 5     | 1.0
0.8         | 12    | 0.7
1.0         | 1     | 1.0
1.0         | 0     | 1e-6
1.0         | 500   | 0.9
""")
def test_log_probs_are_of_the_renormalised_distribution(temperature: float, top_k: int, top_p: float):
    logits = torch.randn(50, 211, generator=torch.Generator().manual_seed(1)) * 3
    sampled = sample_tokens(logits, make_draws(50, temperature=temperature, top_k=top_k, top_p=top_p))
    for row in range(50):
        expected = slow_log_probs(logits[row].numpy(), temperature, top_k, top_p)
        assert abs(expected[sampled.token_ids[row]] - sampled.log_probs[row]) < 1e-5, row


def test_greedy_takes_the_first_largest_and_reports_temperature_one():
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [5.0, 0.0, 0.0, 0.0]])
    sampled = sample_tokens(logits, make_draws(2, temperature=0.0, top_p=0.1, top_k=1))
    assert sampled.token_ids.tolist() == [1, 0]
    expected = torch.log_softmax(logits, -1)[[0, 1], [1, 0]]
    assert_allclose(sampled.log_probs, expected.numpy(), atol=1e-6)


@cases("bad: nan inf")
def test_logits_that_are_not_finite_show_in_the_log_prob(bad: float):
    logits = torch.zeros(2, 30)
    logits[1, 3] = bad
    assert np.isfinite(sample_tokens(logits, make_draws(2)).log_probs).tolist() == [True, False]
