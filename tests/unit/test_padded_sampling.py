"""The synchronous tier on a model: completions of small batches, and log-probs of padded rows."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rollouts.advantages import broadcast_advantages
from rollouts.errors import (
    ModelError,
    RequestRefused,
    UserFunctionError,
)
from rollouts.generation.rollouts import (
    generate_rollout_batches,
    make_sync_chat_generate,
)
from rollouts.losses import LOSSES
from rollouts.models.log_probs import ForwardPlan
from rollouts.models.padded import compute_token_log_probs, make_loss_inputs, pad_rows
from rollouts.models.sampling import sample_completions
from rollouts.models.tokenizers import make_byte_tokenizer
from rollouts.types import (
    Completion,
    GenerateRequest,
    RolloutBatch,
    SamplingParams,
    Status,
)
from tests.unit.test_sync_tier import batches_of_two, make_buffer, reward_length

# --- completions of a model ---------------------------------------------------------------------------------


def make_model(kind: str = "llama", seed: int = 0) -> Any:
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        MambaConfig,
        MambaForCausalLM,
        OpenAIGPTConfig,
        OpenAIGPTLMHeadModel,
    )

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if kind == "llama":
            model: Any = LlamaForCausalLM(
                LlamaConfig(
                    vocab_size=259,
                    hidden_size=16,
                    intermediate_size=32,
                    num_hidden_layers=2,
                    num_attention_heads=2,
                    num_key_value_heads=1,
                    max_position_embeddings=64,
                    tie_word_embeddings=True,
                    bos_token_id=257,
                    eos_token_id=258,
                    pad_token_id=256,
                )
            )
        elif kind == "gpt2":  # positions are learned, and dropout is on
            model = GPT2LMHeadModel(
                GPT2Config(
                    vocab_size=259,
                    n_embd=16,
                    n_layer=2,
                    n_head=2,
                    n_positions=64,
                    bos_token_id=257,
                    eos_token_id=258,
                )
            )
        elif kind == "mamba":  # recurrent: padding before a prompt would change its state
            model = MambaForCausalLM(
                MambaConfig(vocab_size=259, hidden_size=16, state_size=4, num_hidden_layers=2)
            )
        else:  # takes no cache
            model = OpenAIGPTLMHeadModel(
                OpenAIGPTConfig(vocab_size=259, n_embd=16, n_layer=2, n_head=2, n_positions=64)
            )
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.copy_(torch.randn(parameter.shape) * 0.4)
    return model.eval()


def make_requests(*prompts: list[int], **sampling: Any) -> list[GenerateRequest]:
    params = SamplingParams(**{"max_new_tokens": 6, **sampling})
    return [
        GenerateRequest(request_id=f"r{index}", prompt_ids=np.asarray(prompt), sampling=params)
        for index, prompt in enumerate(prompts)
    ]


RAGGED = ([65], [1, 2, 3, 4, 5, 6, 7], [200, 100, 50])


def slow_log_probs(model: Any, prompt: list[int], completion: Completion, temperature: float) -> list[float]:
    """One whole forward pass per token, one sequence at a time."""
    ids, values = list(prompt), []
    for token in completion.token_ids.tolist():
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0, -1].double() / temperature
        values.append(float(torch.log_softmax(logits, -1)[token]))
        ids.append(token)
    return values


@pytest.mark.parametrize("kind", ["llama", "gpt2", "openai-gpt", "mamba"])
def test_log_probs_are_those_of_the_distribution_drawn_from_whatever_the_padding(kind: str):
    model = make_model(kind)
    completions = sample_completions(model, make_requests(*RAGGED, temperature=0.8), seed=3, weight_version=5)
    for prompt, completion in zip(RAGGED, completions, strict=True):
        assert completion.log_probs.tolist() == pytest.approx(
            slow_log_probs(model, prompt, completion, 0.8), abs=1e-4
        )
        assert completion.weight_versions.tolist() == [5] * 6
        assert completion.finish_reason == "length"


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_cache_and_the_neighbours_change_nothing(kind: str):
    model, requests = make_model(kind), make_requests(*RAGGED)
    together = sample_completions(model, requests, seed=1)
    without_cache = sample_completions(model, requests, seed=1, use_cache=False)
    alone = [sample_completions(model, [request], seed=1)[0] for request in reversed(requests)][::-1]
    for one, two, three in zip(together, without_cache, alone, strict=True):
        assert one.token_ids.tolist() == two.token_ids.tolist() == three.token_ids.tolist()
        assert one.log_probs == pytest.approx(two.log_probs, abs=1e-4)


def test_a_seed_and_an_id_fix_the_draws():
    model, requests = make_model(), make_requests([65], [65])
    first, second = sample_completions(model, requests, seed=1)
    assert first.token_ids.tolist() != second.token_ids.tolist()
    assert sample_completions(model, requests, seed=1)[0].token_ids.tolist() == first.token_ids.tolist()
    assert sample_completions(model, requests, seed=2)[0].token_ids.tolist() != first.token_ids.tolist()


def test_dropout_is_off_while_sampling_and_on_again_after():
    model = make_model("gpt2")
    expected = sample_completions(model, make_requests(*RAGGED))
    model.train()
    model.transformer.drop.eval()  # the user's own choice stays
    completions = sample_completions(model, make_requests(*RAGGED))
    assert [c.log_probs.tolist() for c in completions] == [c.log_probs.tolist() for c in expected]
    assert model.training and model.transformer.h[0].training and not model.transformer.drop.training


def test_requests_that_cannot_be_answered_are_refused():
    model = make_model()
    assert sample_completions(model, []) == []
    with pytest.raises(
        RequestRefused, match="60 prompt tokens and max_new_tokens=6 make 66; the context is 64"
    ):
        sample_completions(model, make_requests([1] * 60))
    with pytest.raises(RequestRefused, match=r"holds 259; the vocabulary is 0\.\.258"):
        sample_completions(model, make_requests([259]))
    with pytest.raises(RequestRefused, match="request 'r0' is there twice"):
        sample_completions(model, make_requests([1]) * 2)


def test_a_model_of_nan_is_an_error_not_a_token():
    model = make_model()
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(ModelError, match="request 'r0': the model's distribution of token 0 is not finite"):
        sample_completions(model, make_requests([65]))


def test_a_chat_generator_answers_in_the_chat_template():
    model, tokenizer = make_model(), make_byte_tokenizer()
    sampling = SamplingParams(max_new_tokens=3)
    generate = make_sync_chat_generate(
        functools.partial(sample_completions, model, seed=0), tokenizer, sampling
    )
    batch = next(
        generate_rollout_batches(
            make_buffer(), generate, num_prompts=1, samples_per_prompt=2, reward_fn=lambda sample: 1.0
        )
    )
    assert (
        tokenizer.decode(batch.tokens[0][:-3].tolist())
        == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    )
    assert batch.response_lengths.tolist() == [3, 3]
    assert batch.samples[0].status is Status.TRUNCATED


def test_completions_of_other_requests_are_refused():
    def reverse(requests: list[GenerateRequest]) -> list[Completion]:
        return sample_completions(make_model(), requests)[::-1]

    generate = make_sync_chat_generate(reverse, make_byte_tokenizer(), SamplingParams(max_new_tokens=2))
    with pytest.raises(
        UserFunctionError,
        match="reverse must answer one completion per request, in their order and with their ids",
    ):
        next(batches_of_two(make_buffer(), generate, reward_fn=reward_length))


# --- padded log-probs ---------------------------------------------------------------------------------------


def make_batch() -> RolloutBatch:
    """Two rows of different length; the second has a masked token between trained ones."""
    return RolloutBatch(
        tokens=(np.asarray([65, 66, 67, 68, 69]), np.asarray([70, 71, 72])),
        loss_masks=(np.asarray([0, 0, 1, 0, 1], np.bool_), np.asarray([0, 1, 1], np.bool_)),
        rollout_log_probs=tuple(np.full(count, -5.0, np.float32) for count in (5, 3)),
        temperature=0.7,
    )


@pytest.mark.parametrize(
    ("kind", "head"),
    [
        ("llama", None),
        ("gpt2", None),
        ("mamba", None),
        ("llama", "linear"),
        ("gpt2", "linear"),
        ("gpt2", "own"),
    ],
)
def test_padded_log_probs_and_gradients_are_those_of_each_row_alone(kind: str, head: Any):
    model, batch = make_model(kind), make_batch()
    weights = torch.tensor([[0, 0, 2.0, 0, -1.0], [0, 0.5, 3.0, 0, 0]])
    expected = torch.zeros(2, 5)
    for row, tokens in enumerate(batch.tokens):
        logits = model(input_ids=torch.from_numpy(tokens)[None]).logits[0, :-1] / 0.7
        values = torch.log_softmax(logits, -1)[torch.arange(len(tokens) - 1), torch.from_numpy(tokens[1:])]
        expected[row, 1 : len(tokens)] = values * torch.from_numpy(batch.loss_masks[row][1:])
    (expected * weights).sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()

    plan = None if head is None else ForwardPlan(layout="rows", head=head)
    result = compute_token_log_probs(
        model, pad_rows(batch.tokens), pad_rows(batch.loss_masks), temperature=0.7, plan=plan
    )
    (result.log_probs * weights).sum().backward()
    torch.testing.assert_close(result.log_probs.detach(), expected.detach(), atol=1e-4, rtol=1e-4)
    mine = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert len(mine) == len(gradients)
    for one, two in zip(mine, gradients, strict=True):
        torch.testing.assert_close(one, two, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(("kind", "head"), [("llama", None), ("llama", "linear"), ("gpt2", "own")])
def test_entropy_has_a_gradient_when_it_is_asked_for(kind: str, head: Any):
    model, batch = make_model(kind), make_batch()
    row = torch.from_numpy(batch.tokens[0])[None]
    log_probs = torch.log_softmax(
        model(input_ids=row).logits[0, [1, 3]] / 0.7, -1
    )  # what predicts the trained tokens 2 and 4
    expected = -(log_probs.exp() * log_probs).sum(-1)
    (expected * torch.tensor([2.0, -1.0])).sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()

    plan = None if head is None else ForwardPlan(layout="rows", head=head)
    arguments = (model, pad_rows(batch.tokens), pad_rows(batch.loss_masks))
    assert not compute_token_log_probs(*arguments, temperature=0.7, plan=plan).entropy.requires_grad
    entropy = compute_token_log_probs(*arguments, temperature=0.7, plan=plan, entropy_gradient=True).entropy
    torch.testing.assert_close(entropy.detach()[0, [2, 4]], expected.detach(), atol=1e-4, rtol=1e-4)
    (entropy * torch.tensor([[0, 0, 2.0, 0, -1.0], [0, 0, 0, 0, 0]])).sum().backward()
    mine = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    for one, two in zip(mine, gradients, strict=True):
        torch.testing.assert_close(one, two, atol=1e-3, rtol=1e-3)
    assert max(float(one.abs().max()) for one in mine) > 1e-2


def test_a_batch_becomes_the_inputs_of_every_loss():
    model, batch = make_model(), make_batch()
    with torch.no_grad():
        log_probs = make_loss_inputs(model, batch).log_probs.numpy()
    own = tuple(row[: len(tokens)] for row, tokens in zip(log_probs, batch.tokens, strict=True))
    advantages = broadcast_advantages([2.0, -0.5], batch.loss_masks)
    batch = replace(batch, rollout_log_probs=own, advantages=advantages, returns=advantages)
    inputs = make_loss_inputs(model, batch)
    assert inputs.ref_log_probs is None and inputs.old_log_probs is None and inputs.old_values is None
    assert inputs.entropy is not None and not inputs.entropy.requires_grad
    # the ratio is 1 on every token: -(2 + 2) for the first row, +(0.5 + 0.5) for the second, over 4 tokens
    for name, loss in LOSSES.items():
        total, count, _ = loss(inputs, unit="tokens")
        total.backward(retain_graph=True)
        assert count == 4
        if name in ("ppo_clip", "importance_sampling", "gspo"):
            assert float(total.detach()) == pytest.approx(-3.0, abs=1e-5)
