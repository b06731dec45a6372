"""The synchronous tier on a model: completions of small batches, and log-probs of padded rows."""

import json
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rollouts.advantages import broadcast_advantages
from rollouts.errors import ModelError, RequestRefused, UserFunctionError
from rollouts.generation.rollouts import make_sync_chat_generate
from rollouts.losses import LOSSES
from rollouts.models.forward_plan import ForwardPlan
from rollouts.models.padded import compute_token_log_probs, make_loss_inputs, pad_rows
from rollouts.models.sampling import sample_completions
from rollouts.models.tokenizers import make_byte_tokenizer
from rollouts.testing.engine_contracts import make_request
from rollouts.types import RolloutBatch, SamplingParams, Status
from tests.support.made_updates import floats
from tests.support.plain_backend import (
    assert_gradients_close,
    score_completion,
    score_plainly,
    take_gradients,
)
from tests.support.text_tables import cases
from tests.unit.test_sync_tier import next_batch

SHAPE = json.loads("""{"vocab_size": 259, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 32, "max_position_embeddings": 64, "bos_token_id": 257, "eos_token_id": 258}""")


def make_model(kind="llama"):
    """A random model. gpt2: positions are learned, and dropout is on; mamba: recurrent, so that padding
    before a prompt would change its state; openai-gpt: takes no cache.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SHAPE))
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn(parameter.shape) * 0.4)
    return model.eval()


# --- completions of a model ---------------------------------------------------------------------------------


def make_requests(*prompts, **sampling):
    named = enumerate(prompts)
    return [make_request(f"r{at}", prompt=one, max_new_tokens=6, **sampling) for at, one in named]


RAGGED = json.loads("[[65], [1, 2, 3, 4, 5, 6, 7], [200, 100, 50]]")


@cases("kind: llama gpt2 openai-gpt mamba")
def test_log_probs_are_those_of_the_distribution_drawn_from_whatever_the_neighbours_and_the_cache(kind):
    model, requests = make_model(kind), make_requests(*RAGGED, RAGGED[0], temperature=0.8)
    together = sample_completions(model, requests, seed=3, weight_version=5)
    other = sample_completions(model, requests[:1], seed=4)[0]
    alone = [sample_completions(model, [request], seed=3)[0] for request in reversed(requests)][::-1]
    for request, one, two in zip(requests, together, alone, strict=True):
        np.testing.assert_array_equal(one.token_ids, two.token_ids)
        wanted = score_completion(model, request, one)
        np.testing.assert_allclose([one.log_probs, two.log_probs], [wanted] * 2, atol=1e-4)
        assert (one.weight_versions.tolist(), one.finish_reason) == ([5] * 6, "length")
    # another id or another seed draws other tokens
    assert len({tuple(one.token_ids) for one in (together[0], together[-1], other)}) == 3


def test_dropout_is_off_while_sampling_and_on_again_after():
    model = make_model("gpt2")
    expected = sample_completions(model, make_requests(*RAGGED))
    model.train()
    model.transformer.drop.eval()  # the user's own choice stays
    assert repr(sample_completions(model, make_requests(*RAGGED))) == repr(expected)
    assert model.training and model.transformer.h[0].training and not model.transformer.drop.training


def test_requests_that_cannot_be_answered_are_refused():
    model = make_model()
    assert sample_completions(model, []) == []
    for requests, says in (
        (make_requests([1] * 60), "60 prompt tokens and max_new_tokens=6 make 66; the context is 64"),
        (make_requests([259]), r"holds \[259\]; the vocabulary is 0\.\.258"),
        (make_requests([1]) * 2, "request 'r0' is there twice"),
    ):
        with pytest.raises(RequestRefused, match=says):
            sample_completions(model, requests)


def test_a_model_of_nan_is_an_error_not_a_token():
    model = make_model()
    model.model.norm.weight.data.fill_(float("nan"))
    with pytest.raises(ModelError, match=r"cannot be run exactly here .*logits are not finite"):
        sample_completions(model, make_requests([65]))


def test_a_chat_generator_answers_in_the_chat_template():
    tokenizer, sampling = make_byte_tokenizer(), SamplingParams(max_new_tokens=3)
    complete = partial(sample_completions, make_model(), seed=0)
    batch = next_batch(make_sync_chat_generate(complete, tokenizer, sampling))
    prompt = tokenizer.decode(batch.tokens[0][:-3].tolist())
    assert prompt == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    assert batch.response_lengths.tolist() == [3] * 4 and batch.samples[0].status is Status.TRUNCATED

    def reverse(requests):
        return complete(requests)[::-1]

    with pytest.raises(UserFunctionError, match="reverse must answer one completion per request, in their"):
        next_batch(make_sync_chat_generate(reverse, tokenizer, sampling))


# --- padded log-probs ---------------------------------------------------------------------------------------


def make_batch():
    """Two rows of different length; the second has a masked token between trained ones."""
    masks = [np.asarray([one == "1" for one in row]) for row in ("00101", "011")]
    return RolloutBatch(
        tokens=(np.arange(65, 70), np.arange(70, 73)),
        loss_masks=tuple(masks),
        rollout_log_probs=floats([-5.0] * 5, [-5.0] * 3),
        temperature=0.7,
    )


@cases("""
kind  | head
llama | "whole"
gpt2  | "whole"
mamba | "whole"
llama | "linear"
gpt2  | "linear"
gpt2  | "own"
""")
def test_padded_log_probs_entropies_and_gradients_are_those_of_each_row_alone(kind, head: Any):
    model, batch = make_model(kind), make_batch()
    weights = torch.tensor(json.loads("[[0, 0, 2.0, 0, -1.0], [0, 0.5, 3.0, 0, 0]]"))

    def differentiate(log_probs, entropies):
        model.zero_grad()
        (log_probs * weights + entropies * weights.flip(0, 1) * (weights != 0)).sum().backward()
        return take_gradients(model)

    expected = score_plainly(model, batch)
    gradients = differentiate(*expected)

    plan = None if head == "whole" else ForwardPlan(layout="rows", head=head)
    padded = pad_rows(batch.tokens), pad_rows(batch.loss_masks)
    score = partial(compute_token_log_probs, model, *padded, temperature=0.7, plan=plan)
    assert not score().entropy.requires_grad
    result = score(entropy_gradient=True)
    torch.testing.assert_close(tuple(result), expected, atol=1e-4, rtol=1e-4)
    assert_gradients_close(differentiate(*result), gradients, 1e-4)


def test_a_batch_becomes_the_inputs_of_every_loss():
    model, batch = make_model(), make_batch()
    with torch.no_grad():
        log_probs = make_loss_inputs(model, batch).log_probs.numpy()
    own = tuple(row[: len(tokens)] for row, tokens in zip(log_probs, batch.tokens, strict=True))
    advantages = broadcast_advantages([2.0, -0.5], batch.loss_masks)
    batch = replace(batch, rollout_log_probs=own, advantages=advantages, returns=advantages)
    inputs = make_loss_inputs(model, batch)
    assert inputs.ref_log_probs is None and inputs.old_log_probs is None and inputs.old_values is None
    assert not inputs.entropy.requires_grad
    # the ratio is 1 on every token: -(2 + 2) for the first row, +(0.5 + 0.5) for the second, over 4 tokens
    for name, loss in LOSSES.items():
        total, count, _ = loss(inputs, unit="tokens")
        total.backward(retain_graph=True)
        assert count == 4
        if name in ("ppo_clip", "importance_sampling", "gspo"):
            assert float(total.detach()) == pytest.approx(-3.0, abs=1e-5)
