"""The default generate function: one chat turn. Token ids in, token ids out; text is made from ids, never ids from the text of a response."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from rollouts.data.chat import ChatTokenizer, tokenize_prompt
from rollouts.protocols import GenerateFn, InferenceEngine
from rollouts.types import ChatMessage, Completion, FinishReason, GenerateRequest, IntArray, Sample, SamplingParams, Status

STATUS_OF: dict[FinishReason, Status] = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}
CACHED_PROMPTS = 4096  # a prompt of 1000 tokens takes 8 kB


class GenerationTokenizer(ChatTokenizer, Protocol):
    """A chat tokenizer that can also read."""

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = ...) -> Any: ...


def make_chat_generate(tokenizer: GenerationTokenizer) -> GenerateFn:
    """A generate function that answers a prompt (text is one user turn) in the chat template with one completion.

    Given a sample that was aborted, it goes on after the tokens there are, with what is left of max_new_tokens; whether those tokens are
    fresh enough is the caller's business. A prompt is tokenized once however many samples it has.
    The function raises DataError and ModelError like tokenize_prompt, RequestRefused and EngineError like the engine.
    """

    @functools.lru_cache(maxsize=CACHED_PROMPTS)
    def tokenize(prompt: str | tuple[tuple[str, str], ...]) -> IntArray:
        messages = prompt if isinstance(prompt, str) else [ChatMessage(role=role, content=content) for role, content in prompt]
        token_ids = tokenize_prompt(messages, tokenizer)
        token_ids.flags.writeable = False
        return token_ids

    def decode(token_ids: Sequence[int]) -> str:
        return str(tokenizer.decode(token_ids, skip_special_tokens=True))

    async def chat_generate(sample: Sample, engine: InferenceEngine, sampling: SamplingParams) -> Sample:
        continued = sample.status is Status.ABORTED and bool(sample.loss_mask.any())
        if not continued:
            sample = _start(sample, tokenize(_hashable(sample.prompt)))
        request = _make_request(sample, sampling)
        if request is None:
            return replace(sample, status=Status.TRUNCATED)
        completion = await engine.generate(request)
        sample = _append(sample, completion)
        return replace(sample, response=decode(sample.tokens[sample.loss_mask].tolist()))

    return chat_generate


def compute_request_seed(run_seed: int, sample_id: str) -> int:
    """63 bits that depend on both arguments and nothing else: the same in every process and on every machine."""
    digest = hashlib.sha256(f"{run_seed}/{sample_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _hashable(prompt: str | tuple[ChatMessage, ...]) -> str | tuple[tuple[str, str], ...]:
    return prompt if isinstance(prompt, str) else tuple((message["role"], message["content"]) for message in prompt)


def _start(sample: Sample, prompt_ids: IntArray) -> Sample:
    """The sample with nothing but its prompt."""
    blank = np.zeros(0)
    return replace(sample, tokens=prompt_ids, loss_mask=blank, rollout_log_probs=blank, weight_versions=blank, response="", status=Status.PENDING)


def _make_request(sample: Sample, sampling: SamplingParams) -> GenerateRequest | None:
    """What the engine is asked to do after the tokens there are; None if there is nothing left to sample."""
    done = sample.response_length
    if done == 0:
        return GenerateRequest(request_id=sample.id, prompt_ids=sample.tokens, sampling=sampling)
    if done >= sampling.max_new_tokens:
        return None
    # a new request begins its random stream anew: with the seed of the first, the second half would repeat its draws
    request_id = f"{sample.id}@{done}"
    seed = None if sampling.seed is None else compute_request_seed(sampling.seed, request_id)
    rest = replace(sampling, max_new_tokens=sampling.max_new_tokens - done, seed=seed)
    return GenerateRequest(request_id=request_id, prompt_ids=sample.tokens, sampling=rest)


def _append(sample: Sample, completion: Completion) -> Sample:
    """The sample with the tokens of a completion at its end, each of which trains."""
    count = len(completion.token_ids)
    return replace(
        sample,
        tokens=np.concatenate([sample.tokens, completion.token_ids]),
        loss_mask=np.concatenate([sample.loss_mask, np.ones(count, np.bool_)]),
        rollout_log_probs=np.concatenate([sample.rollout_log_probs, completion.log_probs]),
        weight_versions=np.concatenate([sample.weight_versions, completion.weight_versions]),
        status=STATUS_OF[completion.finish_reason],
    )
