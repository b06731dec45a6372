"""Measures of policies and of what they write, against numbers worked by hand and slow versions."""

import itertools
import json
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from rollouts.errors import NotEnoughSamples
from rollouts.evaluation.diversity import compute_distinct_n, compute_self_bleu
from rollouts.evaluation.evaluate import EvaluationResult, evaluate
from rollouts.evaluation.intervals import compare_policies, compute_bootstrap_interval
from rollouts.evaluation.pass_at_k import compute_pass_at_k
from rollouts.evaluation.policy_metrics import compute_entropy, compute_policy_divergence, measure_responses
from rollouts.generation.generate import make_chat_generate
from rollouts.testing.fakes import ScriptedEngine
from rollouts.types import Mean, RolloutBatch, Sample, SamplingParams, Status
from tests.support.fake_tokenizer import FakeTokenizer
from tests.support.text_tables import cases


def logs(*rows):
    return torch.tensor(rows, dtype=torch.float64).log()


# --- pass@k -------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.integers(1, 7).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(case):
    n, c, k = case
    subsets = [*itertools.combinations([True] * c + [False] * (n - c), k)]
    assert compute_pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


# --- distributions ------------------------------------------------------------------------------------------


def test_divergences_and_entropies_match_the_numbers_worked_by_hand():
    found = compute_policy_divergence(logs([0.5, 0.3, 0.2]), logs([0.4, 0.4, 0.2]))
    ref_entropy = -(0.8 * math.log(0.4) + 0.2 * math.log(0.2))
    expected = json.loads("""{"kl": 0.025267154, "reverse_kl": 0.025815, "jsd": 0.006367,
        "entropy": 1.029653014}""") | {"ref_entropy": ref_entropy}
    assert {name: getattr(found, name).value for name in expected} == pytest.approx(expected, abs=5e-7)
    assert found.top1_agreement == Mean(1.0, 1.0)


def test_entropy_runs_from_zero_to_log_v_and_bears_impossible_tokens():
    found = compute_entropy(torch.tensor([[0.0, -math.inf], [3.0, 3.0], [0.0, 50.0]]))
    assert found.tolist() == pytest.approx([0.0, math.log(2), 0.0], abs=1e-6)
    assert compute_entropy(logs([0.5, 0.3, 0.2]), temperature=1e6).item() == pytest.approx(math.log(3))


# --- diversity ----------------------------------------------------------------------------------------------


def test_distinct_n_counts_different_n_grams_over_all():
    shares = [compute_distinct_n(["abab", "abc", ""], n) for n in (1, 2, 4, 5)]  # of letters
    assert shares == [pytest.approx(3 / 7), pytest.approx(3 / 5), 1.0, None]  # of two: ab ba ab, ab bc


def slow_bleu(hypothesis, references):
    """By the definition, one response and one order at a time."""

    def count(text, n):
        return Counter(tuple(text[at : at + n]) for at in range(len(text) - n + 1))

    if not hypothesis:
        return 0.0
    precisions = []
    for n in range(1, min(4, len(hypothesis)) + 1):
        grams = count(hypothesis, n)
        matched = sum(min(k, max(count(one, n)[gram] for one in references)) for gram, k in grams.items())
        precisions.append((matched or 0.1) / grams.total())
    closest = min((abs(len(one) - len(hypothesis)), len(one)) for one in references)[1]
    return min(1.0, math.exp(1 - closest / len(hypothesis))) * math.prod(precisions) ** (1 / len(precisions))


def test_bleu_matches_the_number_worked_by_hand():
    # of letters; in common are a and b of three, ab of two, and no 3-gram, which counts 0.1 of one
    assert compute_self_bleu(["abc", "abx"]) == pytest.approx((2 / 3 * 1 / 2 * 0.1) ** (1 / 3))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=2, max_size=5))
def test_self_bleu_is_the_mean_of_bleu_against_all_others(responses):
    slow = [slow_bleu(one, responses[:i] + responses[i + 1 :]) for i, one in enumerate(responses)]
    assert compute_self_bleu(responses) == pytest.approx(sum(slow) / len(slow), abs=1e-12)


# --- intervals ----------------------------------------------------------------------------------------------


def test_an_interval_of_zeros_and_ones_is_that_of_the_binomial():
    values = [1.0] * 300 + [0.0] * 700
    found = compute_bootstrap_interval(values, seed=0)
    half = 1.959964 * math.sqrt(0.3 * 0.7 / 1000)
    assert found.mean == pytest.approx(0.3)
    assert [found.low, found.high] == pytest.approx([0.3 - half, 0.3 + half], abs=0.002)
    assert compute_bootstrap_interval(values, seed=0) == found


def test_pairing_by_prompt_sees_a_difference_that_hard_prompts_would_hide():
    generator = np.random.default_rng(0)
    difficulty = generator.normal(scale=5.0, size=100)
    first, second = difficulty, difficulty + 0.2 + generator.normal(scale=0.1, size=100)
    found = compare_policies(first, second, seed=0)
    assert found.difference.mean == pytest.approx((second - first).mean())
    assert 0.15 < found.difference.low < found.difference.high < 0.25
    assert found.second_is_better == 1.0
    assert found.first.high > found.second.low  # the means' own intervals overlap
    assert found.num_prompts == 100


@cases(r"""
function                   | arguments            | options                    | named
compute_bootstrap_interval | [[1.0, NaN]]         | seed = 0                   | values\[1\] is nan
compute_bootstrap_interval | [[]]                 | seed = 0                   | shape \(0,\)
compute_bootstrap_interval | [[1.0]]              | seed = 0, confidence = 1.0 | confidence=1\.0
compare_policies           | [[1.0, 2.0], [1.0]] | seed = 0 | 2 values of the first policy, 1 of the second
compute_pass_at_k          | [4, 5, 1]            |                            | must
compute_pass_at_k          | [4, 1, 5]            |                            | must
compute_pass_at_k          | [4, 1, 0]            |                            | must
compute_distinct_n         | [["a"], 0]           |                            | n=0
compute_self_bleu          | [[[1]]]              |                            | 1 responses
""")
def test_what_cannot_be_estimated_is_named(function, arguments: Any, options: dict, named):
    with pytest.raises(ValueError, match=named):
        globals()[function](*arguments, **options)


ROWS = [{"prompt": number, "answer": number} for number in "0123456789"]


async def reward(sample):
    if sample.metadata["answer"] == "3":
        await trio.sleep(90)
        raise ValueError("no idea")
    return float(int(sample.metadata["answer"]) % 2 == 0)


async def run(rows):
    return await evaluate(
        rows,
        ScriptedEngine(),
        generate=make_chat_generate(FakeTokenizer()),
        reward=reward,
        sampling=SamplingParams(max_new_tokens=8, temperature=0.0, stop_token_ids=(257,)),
        reward_timeout_s=99,
    )


async def test_a_failed_sample_is_named_and_counted_and_is_not_part_of_the_mean(autojump_clock, caplog):
    result = await run(ROWS)
    assert [sample.metadata["answer"] for sample in result.samples] == [*"0123456789"]
    assert result.samples[3].status is Status.FAILED
    assert caplog.messages == ["nothing has moved on for 60 s; samples under way: 1, eval-g00000003-s000"]
    metrics = result.metrics("sums")
    assert [result.mean_reward, metrics["eval/sums/avg@1"]] == pytest.approx([5 / 9] * 2)
    names = ("prompts", "failed", "truncated/frac", "response_length/mean")  # of "ok" and the stop token
    assert [metrics[f"eval/sums/{name}"] for name in names] == [10, 1, 0, 3]


def read(size, rewards, responses=""):
    """The metrics of prompts with so many samples each; - stands for the reward of one that failed."""
    values = [None if word == "-" else float(word) for word in rewards.replace(",", "").split()]
    pairs = itertools.zip_longest(values, responses.split("|"), fillvalue="")
    samples = (
        Sample(id=f"{at}", prompt="?", reward=of, response=text) for at, (of, text) in enumerate(pairs)
    )
    found = EvaluationResult(tuple(samples), size, len(values) // size).metrics("m")
    return {name.removeprefix("eval/m/"): value for name, value in found.items()}


def test_pass_at_k_is_over_the_prompts_with_k_scored_samples():
    found = read(4, "1 0 0 0, 1 1 - 0, - - - 0")
    assert found["pass@2"] == pytest.approx((1 / 2 + 1) / 2)  # 1 − C(3,2)/C(4,2) and 1 − C(1,2)/C(3,2)
    assert found["pass@4"] == 1.0
    assert found["avg@4"] == pytest.approx(3 / 8)
    assert "pass@2" not in read(4, 3 * "0.5 0.5 0.5 0.5 ")  # nothing passes where rewards are not 0 and 1


def test_a_majority_votes_with_the_number_that_a_response_ends_with_or_its_text():
    # 5 has two votes, blue two; of 1, 2 and 3 the first wins; in the last prompt a sample failed
    found = read(3, "1 0 0, 1 0 1, 0 1 1, 1 1 -", "4|it is 5|5.0| Blue|red|blue |1|2|3|4|it is 5|5.0")
    assert found["maj@3"] == pytest.approx(1 / 3)
    assert "maj@3" not in read(3, "1 1 1", "1|2|3")  # nobody agrees: there is nothing to compare


def test_bounds_of_the_mean_reward_are_of_the_means_of_prompts():
    found = read(2, "1 1, 0 -, - -, 1 0")
    wanted = compute_bootstrap_interval([1.0, 0.0, 0.5], seed=0)
    assert (found["avg@2/low"], found["avg@2/high"]) == (wanted.low, wanted.high)


def test_responses_are_measured_over_their_own_tokens_together():
    tokens = np.array([[9, 1, 2], [9, 9, 1]])
    batch = RolloutBatch(tokens=tuple(tokens), loss_masks=tuple(tokens < 9))
    log_probs, entropies = np.array(
        json.loads("[[[0, -0.5, -1], [0, 0, -1.5]], [[0, 0.5, 0.25], [0, 0, 0]]]")
    )
    found = measure_responses(batch, (tuple(log_probs), tuple(entropies), tuple(log_probs - 0.5)))
    bleu = math.sqrt(1 / 2 * 0.1), math.exp(1 - 2)  # of 1 2, of which only 1 is common; of 1, which is short
    wanted = {"perplexity": math.e, "entropy": 0.25, "distinct_1": 2 / 3, "distinct_2": 1, "kl": 0.5}
    assert found == pytest.approx({**wanted, "self_bleu": sum(bleu) / 2})


async def test_too_many_failures_are_an_error_and_not_a_mean(autojump_clock):
    with pytest.raises(NotEnoughSamples, match="1 of 2 held-out samples failed"):
        await run(ROWS[3:5])
