"""What the embedded engine says of a prompt, and of tokens that it did not sample."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rollouts.errors import RequestRefused
from rollouts.models.decoding import decoder
from rollouts.models.draws import find_top
from rollouts.models.lora import route_all, use_adapters
from rollouts.testing.engine_contracts import make_request
from tests.support.plain_backend import load_tiny
from tests.support.text_tables import cases
from tests.unit.test_local_engine import VOCAB, generate_all, make_model, open_engine
from tests.unit.test_lora_engine import open_named

PROMPT = tuple((place * 37) % 97 for place in range(23))
TARGETS = np.stack([np.arange(22) % 5, np.full(22, -1), np.arange(22, 0, -1)], axis=1)


def score_all(model, ids, temperature=1.0):
    """[T − 1, V] log-probs after each token of a row but the last."""
    with torch.no_grad():
        logits = model(torch.as_tensor(ids)[None], use_cache=False).logits[0, :-1]
    return (logits / temperature).log_softmax(-1)


def check_scores(found, scores):
    """The log-probs are those that `scores` has of the tokens."""
    wanted = scores.gather(1, torch.from_numpy(found.token_ids)).numpy()
    np.testing.assert_allclose(found.log_probs, wanted, atol=1e-4)
    assert (found.token_ids.dtype, found.log_probs.dtype) == (np.int64, np.float32)


def check_prompt(model, answer):
    """All that REQUEST asks of its places."""
    scores = score_all(model, PROMPT)
    own = scores.gather(1, torch.tensor(PROMPT)[1:, None])[:, 0]
    np.testing.assert_allclose(answer.prompt_log_probs, [0.0, *own.tolist()], atol=1e-4)
    targets = scores.gather(1, torch.from_numpy(TARGETS.clip(0))).numpy()
    np.testing.assert_allclose(answer.prompt_targets, np.where(TARGETS < 0, np.nan, targets), atol=1e-4)
    assert answer.prompt_targets.dtype == np.float32
    np.testing.assert_allclose(answer.prompt_top.log_probs, scores.topk(4).values, atol=1e-4)
    check_scores(answer.prompt_top, scores)
    check_scores(answer.prompt_draws, score_all(model, PROMPT, 0.6))


REQUEST = replace(
    make_request(prompt=PROMPT, temperature=0.6, seed=5),
    score_prompt=True,
    prompt_top=4,
    prompt_targets=TARGETS,
    prompt_draws=2,
)


@cases("kind: llama qwen3 gemma mamba moe")
async def test_a_prompt_is_scored_as_by_the_models_own_logits_a_few_places_at_a_time(kind, monkeypatch):
    model, seen = load_tiny(kind), list[int]()
    async with open_engine(model) as engine:
        hook = model.lm_head.register_forward_hook(lambda *of: seen.append(of[2].shape[:-1].numel()))
        whole = await engine.generate(REQUEST)
        monkeypatch.setattr(decoder, "OWN_TILE", 5 * engine.features.vocab_size)
        at_once = seen.index(len(PROMPT))
        parts = await engine.generate(REQUEST)
        assert max(seen[at_once + 1 :]) == 5
    hook.remove()
    for answer in (whole, parts):
        check_prompt(model, answer)


async def test_what_was_not_asked_for_is_none_and_a_prompt_of_one_token_has_no_places():
    one = replace(REQUEST, prompt_ids=np.array([3]), prompt_targets=np.zeros((0, 3), np.int64))
    async with open_engine() as engine:
        plain, single = await engine.generate(make_request()), await engine.generate(one)
    names = "prompt_log_probs", "top_log_probs", "prompt_top", "prompt_targets", "prompt_draws"
    assert [getattr(plain, name) for name in names] == [None] * 5
    assert single.prompt_log_probs.tolist() == [0.0]
    assert single.prompt_targets.shape == (0, 3) and single.prompt_draws.token_ids.shape == (0, 2)


async def test_a_prompt_is_scored_by_the_adapter_that_its_request_names():
    async with open_named("llama", "ab") as (engine, model, adapters):
        requests = [replace(REQUEST, request_id=name, adapter=name) for name in ("a", "b")]
        for name, answer in (await generate_all(engine, requests)).items():
            with use_adapters(model, route_all(adapters[name])):
                check_prompt(model, answer)


# --- tokens drawn at every place ----------------------------------------------------------------------------


async def test_tokens_drawn_at_the_places_of_a_prompt_have_the_distribution_of_its_temperature():
    """4,000 at each place: shares to three deviations in all but few cells."""
    model, count = make_model(), 4000
    request = replace(make_request(prompt=PROMPT[:4], temperature=0.7), prompt_draws=100)
    async with open_engine(model) as engine:
        answers = await generate_all(engine, [replace(request, request_id=str(each)) for each in range(40)])
    drawn = np.concatenate([one.prompt_draws.token_ids for one in answers.values()], 1)
    for tokens, probs in zip(drawn, score_all(model, PROMPT[:4], 0.7).exp().numpy(), strict=True):
        shares = np.bincount(tokens, minlength=VOCAB) / count
        assert (np.abs(shares - probs) <= 3 * np.sqrt(probs * (1 - probs) / count) + 1e-3).mean() > 0.97
    one, two, _ = drawn
    assert (one[:-1] == two[1:]).mean() < 0.5  # places do not share a stream


async def test_a_seed_repeats_what_is_drawn_more_begin_with_the_fewer_and_the_answer_is_the_same():
    requests = [replace(REQUEST, request_id=str(count), prompt_draws=count) for count in (0, 2, 5)]
    other = replace(REQUEST, request_id="other", sampling=replace(REQUEST.sampling, seed=6))
    async with open_engine() as engine:
        answers = await generate_all(engine, [*requests, other])
        again = (await engine.generate(requests[2])).prompt_draws
    none, two, five, others = (answers[name].prompt_draws for name in ("0", "2", "5", "other"))
    assert none is None
    assert again.token_ids.tolist() == five.token_ids.tolist()
    assert two.token_ids.tolist() == five.token_ids[:, :2].tolist() != others.token_ids.tolist()
    assert len({tuple(answers[name].token_ids) for name in ("0", "2", "5")}) == 1


# --- tokens that were not sampled ---------------------------------------------------------------------------


@cases("""
temperature | top_k | top_p
1.0         | 0     | 1.0
0.7         | 3     | 1.0
1.3         | 0     | 0.8
0.0         | 2     | 0.5
""")
async def test_the_likeliest_are_of_the_distribution_that_the_log_prob_is_of(
    temperature: float, top_k: int, top_p: float
):
    """Rows beside each other ask for none, five or seven."""
    model, sampling = make_model(), {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    requests = [
        replace(make_request(str(k), prompt=PROMPT, max_new_tokens=9, **sampling), top_log_probs=k)
        for k in (0, 5, 7)
    ]
    async with open_engine(model) as engine:
        answers = await generate_all(engine, requests)
    assert answers["0"].top_log_probs is None
    for k in (5, 7):
        answer, top = answers[str(k)], answers[str(k)].top_log_probs
        assert top.token_ids.shape == top.log_probs.shape == (9, k)
        scores = score_all(model, [*PROMPT, *answer.token_ids], temperature or 1.0)[-9:]
        if temperature:
            kept = find_top(scores - scores.amax(-1, keepdim=True), np.full(9, top_k), np.full(9, top_p))
            scores = scores.masked_fill(~kept, -torch.inf).log_softmax(-1)
        check_scores(top, scores)
        np.testing.assert_allclose(top.log_probs, scores.topk(k).values, atol=1e-4)
        own = scores.gather(1, torch.from_numpy(answer.token_ids)[:, None])[:, 0]
        np.testing.assert_allclose(answer.log_probs, own, atol=1e-4)


@cases("""
changes | named
{"top_log_probs": -1} | top_log_probs, prompt_top, prompt_draws are \\(-1, 0, 0\\)
{"prompt_top": 102} | each is an integer from 0 to 101
{"prompt_draws": 1.5} | \\(0, 0, 1.5\\)
{"prompt_targets": [1, 2]} | must be integers \\[2, K\\]
{"prompt_targets": [[1], [2], [3]]} | a row for each token of the prompt but its first
{"prompt_targets": [[1], [101]]} | each −1 or in the vocabulary; the vocabulary is 0..100
{"prompt_targets": [[1], [-2]]} | each −1 or in the vocabulary
{"prompt_targets": [[1.0], [2.0]]} | must be integers
""")
async def test_what_cannot_be_answered_is_refused_by_name(changes: Any, named):
    if "prompt_targets" in changes:
        changes["prompt_targets"] = np.array(changes["prompt_targets"])
    async with open_engine() as engine:
        with pytest.raises(RequestRefused, match=named):
            await engine.generate(replace(make_request(), **changes))
