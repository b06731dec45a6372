"""The default generate function: one chat turn. Token ids in, token ids out; text is made from ids, never ids
from the text of a response.
"""

import functools
import hashlib
import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from rollouts.data.chat import NO_PARAMS, ChatTokenizer, TemplateParams, tokenize_prompt
from rollouts.data.rows import parse_tools
from rollouts.protocols import GenerateFn, InferenceEngine
from rollouts.types import EMPTY, Completion, GenerateRequest, IntArray, Sample, SamplingParams, Status

STATUS_OF = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}
CACHED_PROMPTS = 4096  # a prompt of 1000 tokens takes 8 kB


def make_prompt_tokenizer(
    tokenizer: ChatTokenizer, *, params: TemplateParams
) -> Callable[[Sample], IntArray]:
    """From a sample to the token ids of its prompt in the chat template, with the tools of its
    metadata["tools"]; equal ones are tokenized once. Raises like tokenize_prompt.
    """

    @functools.lru_cache(maxsize=CACHED_PROMPTS)
    def tokenize(key: str) -> IntArray:
        prompt, tools = json.loads(key)
        token_ids = tokenize_prompt(
            prompt, tokenizer, params=params, tools=parse_tools(tools, where="the sample's tools")
        )
        token_ids.flags.writeable = False
        return token_ids

    return lambda sample: tokenize(json.dumps([sample.prompt, sample.metadata.get("tools")]))


def make_chat_generate(tokenizer: ChatTokenizer, *, params: TemplateParams = NO_PARAMS) -> GenerateFn:
    """A generate function that answers a prompt (text is one user turn) in the chat template with one
    completion.

    The tools of a prompt are its sample's metadata["tools"]. Given a sample that was aborted when a run
    stopped, it goes on after the tokens there are, with what is left of max_new_tokens; whether those tokens
    are fresh enough is the caller's business. A prompt is tokenized once however many samples it has. The
    function raises DataError and ModelError like tokenize_prompt, RequestRefused and EngineError like the
    engine.
    """
    tokenize = make_prompt_tokenizer(tokenizer, params=params)

    async def chat_generate(sample: Sample, engine: InferenceEngine, sampling: SamplingParams) -> Sample:
        done = sample.response_length if sample.status is Status.ABORTED else 0
        tokens = sample.tokens if done else tokenize(sample)
        if done >= sampling.max_new_tokens:
            return replace(sample, status=Status.TRUNCATED)
        request = GenerateRequest(
            request_id=sample.id,
            prompt_ids=tokens[: len(tokens) - done],
            sampling=sampling,
            # members share their prompt, and so a prefix cache
            affinity="" if sample.group_index is None else f"g{sample.group_index}",
        )
        if done:
            request = ask_for_rest(request, tokens[-done:])
        completion = await engine.generate(request)
        return append_completion(
            sample, tokens, completion, tokenizer, done=done, trains=engine.features.log_probs
        )

    return chat_generate


def append_completion(
    sample: Sample,
    tokens: IntArray,
    completion: Completion,
    tokenizer: ChatTokenizer,
    *,
    done: int = 0,
    trains: bool = True,
) -> Sample:
    """The sample with `tokens`, of which it has sampled the last `done`, and the completion after them; the
    completion trains, the prompt does not. `trains`: whether log-probs are known; tokens without never train.

    The response is what was sampled, decoded without special tokens; the status says how it ended.
    """
    count = len(completion.token_ids)
    if not done:
        blank = dict.fromkeys(("loss_mask", "rollout_log_probs", "weight_versions", "turn_rewards"), EMPTY)
        sample = replace(sample, tokens=tokens, **blank)
    all_tokens = np.append(tokens, completion.token_ids)
    all_mask = np.append(sample.loss_mask, np.full(count, trains))
    response = all_tokens[all_mask] if trains else completion.token_ids
    log_probs = completion.log_probs if trains else np.zeros(count)
    return replace(
        sample,
        tokens=all_tokens,
        loss_mask=all_mask,
        rollout_log_probs=np.append(sample.rollout_log_probs, log_probs),
        weight_versions=np.append(sample.weight_versions, completion.weight_versions),
        turn_rewards=np.append(sample.turn_rewards, np.zeros(count)),
        response=tokenizer.decode(response.tolist(), skip_special_tokens=True),
        status=STATUS_OF[completion.finish_reason],
    )


def ask_for_rest(request: GenerateRequest, token_ids: IntArray) -> GenerateRequest:
    """A request for what comes after `token_ids`, with which `request` was answered."""
    # it begins its random stream anew: with the seed of the first, the second half would repeat its draws
    request_id, sampling = f"{request.request_id}@{len(token_ids)}", request.sampling
    seed = None if sampling.seed is None else compute_request_seed(sampling.seed, request_id)
    return replace(
        request,
        request_id=request_id,
        prompt_ids=np.append(request.prompt_ids, token_ids),
        sampling=replace(sampling, max_new_tokens=sampling.max_new_tokens - len(token_ids), seed=seed),
    )


def compute_request_seed(run_seed: int, sample_id: str) -> int:
    """63 bits that depend on both arguments and nothing else: the same in every process and on every
    machine.
    """
    return int.from_bytes(hashlib.sha256(f"{run_seed}/{sample_id}".encode()).digest()[:8], "big") >> 1
