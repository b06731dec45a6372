"""A frozen reference on a vLLM or SGLang server that somebody else runs: log-probs of prompts, over HTTP.

    row of tokens, up to its last trained one ──► vLLM    POST /v1/completions   prompt: ids, prompt_logprobs: 0 (of the tokens themselves)
                                                  SGLang  POST /generate         input_ids, return_logprob, logprob_start_len: 0

Both compute them without the temperature, so only batches at temperature 1 are scored. They are in the
server's dtype: in bfloat16 a log-prob is off by some hundredths of a nat; measure it with
rollouts.reference.quantize.measure_kl_bias. Written against vLLM 0.32 and SGLang 0.5.23.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Literal

import msgspec
import numpy as np
import trio

from rollouts.engines.http import HttpClient, open_http_client
from rollouts.engines.server import check_status
from rollouts.engines.wire import decode_reply
from rollouts.errors import (
    ConfigError,
    DataError,
    EngineOverloaded,
    EngineSetupError,
    InfrastructureError,
    ReplyError,
)
from rollouts.reference.messages import check_log_probs
from rollouts.types import FloatArray, IntArray, RolloutBatch

ServerKind = Literal["vllm", "sglang"]
NO_LOG_PROB = -9999.0  # what vLLM writes for NaN and −infinity
TRIES = 3  # of one row, when the server is at fault
RETRY_S = 1.0  # before the next, where the server does not say


# --- the servers' dialects ----------------------------------------------------------------------------------


class _PromptLogProb(msgspec.Struct, frozen=True):
    logprob: float


class _Choice(msgspec.Struct, frozen=True):
    prompt_logprobs: list[dict[str, _PromptLogProb] | None]


class _Completions(msgspec.Struct, frozen=True):
    choices: list[_Choice]


class _Meta(msgspec.Struct, frozen=True):
    input_token_logprobs: list[tuple[float | None, int, str | None]]


class _Generated(msgspec.Struct, frozen=True):
    meta_info: _Meta


class _Served(msgspec.Struct, frozen=True):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct, frozen=True):
    data: list[_Served]


def make_request(kind: ServerKind, tokens: IntArray, *, model: str) -> tuple[str, dict[str, Any]]:
    """The path and the body that ask for the log-probs of `tokens`."""
    if kind == "vllm":
        # it generates one token at least
        return "/v1/completions", {
            "model": model,
            "prompt": tokens.tolist(),
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": 0,
        }
    return "/generate", {
        "input_ids": tokens.tolist(),
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }


def parse_log_probs(kind: ServerKind, body: bytes, tokens: IntArray, *, where: str) -> FloatArray:
    """[T] of `tokens`, 0.0 for the first, which nothing predicts. Raises ReplyError for an answer that is not
    about them.
    """
    if kind == "vllm":
        choices = decode_reply(body, _Completions, where=where).choices
        if len(choices) != 1:
            raise ReplyError(f"{where}: {len(choices)} choices instead of one")
        found = [
            _find_log_prob(entry, int(token), where)
            for entry, token in zip(choices[0].prompt_logprobs, tokens, strict=False)
        ]
        count = len(choices[0].prompt_logprobs)
    else:
        triples = decode_reply(body, _Generated, where=where).meta_info.input_token_logprobs
        unlike = [
            index
            for index, (triple, token) in enumerate(zip(triples, tokens, strict=False))
            if triple[1] != token
        ]
        if unlike:
            raise ReplyError(
                f"{where}: the log-prob at position {unlike[0]} is of token {triples[unlike[0]][1]}, sent was"
                f" {tokens[unlike[0]]}"
            )
        found, count = [triple[0] for triple in triples], len(triples)
    if count != len(tokens) or any(value is None for value in found[1:]):
        raise ReplyError(
            f"{where}: {sum(value is not None for value in found)} log-probs for {len(tokens)} tokens; all"
            " but the first have one"
        )
    return np.asarray([0.0, *found[1:]], np.float32)


def _find_log_prob(entry: Mapping[str, _PromptLogProb] | None, token: int, where: str) -> float | None:
    if entry is None:
        return None
    if str(token) not in entry:
        raise ReplyError(f"{where}: a log-prob of the tokens {sorted(entry)[:5]}, sent was {token}")
    value = entry[str(token)].logprob
    if value <= NO_LOG_PROB:
        raise ReplyError(
            f"{where}: the server has no log-prob of token {token}: it wrote {value}, which stands for"
            " NaN too"
        )
    return value


# --- the scorer ---------------------------------------------------------------------------------------------


class HttpReference:
    """A LogProbScorer on a server. Made by open_http_reference."""

    metrics: Mapping[str, float] = {}

    def __init__(
        self,
        client: HttpClient,
        *,
        kind: ServerKind,
        model: str,
        vocab_size: int,
        longest: int | None,
        in_flight: int,
        silence_s: float,
    ):
        """`longest`: tokens that the server takes, prompt and answer; None: unknown. `in_flight`: requests at
        once.
        """
        self._client = client
        self._kind: ServerKind = kind
        self._model = model
        self._vocab_size = vocab_size
        self._longest = longest
        self._limit = trio.CapacityLimiter(in_flight)
        self._silence_s = silence_s

    async def score(self, batch: RolloutBatch) -> tuple[FloatArray, ...]:
        """[T_i] per row; 0.0 where the loss mask is 0. Rows that train nothing are not sent.

        Raises ConfigError unless batch.temperature is 1; DataError for a token outside the vocabulary or a
        mask on the first token; EngineError when the server fails TRIES times in a row; ScoringError for
        numbers that are no log-probs.
        """
        if batch.temperature != 1.0:
            raise ConfigError(
                f"a reference on a {self._kind} server gives log-probs at temperature 1 only, and the batch"
                f" is at {batch.temperature}; sample at rollout.temperature = 1, or open the reference here"
                " or in a process"
            )
        rows = [np.zeros(len(tokens), np.float32) for tokens in batch.tokens]
        needed = [int(np.flatnonzero(mask)[-1]) + 1 if mask.any() else 0 for mask in batch.loss_masks]
        for row, count in enumerate(needed):
            self._check_row(row, batch, count)
        failures: list[Exception] = []
        async with trio.open_nursery() as nursery:

            async def fill(row: int) -> None:
                try:
                    log_probs = await self._ask(batch.tokens[row][: needed[row]], row)
                except Exception as error:
                    failures.append(error)
                    nursery.cancel_scope.cancel()
                    return
                mask = batch.loss_masks[row][: needed[row]]
                rows[row][: needed[row]][mask] = log_probs[mask]

            for row in range(len(rows)):
                if needed[row]:
                    nursery.start_soon(fill, row)
        if failures:
            raise failures[0]
        check_log_probs(rows, batch, where=self._client.url)
        return tuple(rows)

    def _check_row(self, row: int, batch: RolloutBatch, needed: int) -> None:
        tokens, mask = batch.tokens[row][:needed], batch.loss_masks[row]
        if needed and mask[0]:
            raise DataError(
                f"loss_masks[{row}] trains the first token; nothing comes before it to predict it from: mask"
                " it out"
            )
        outside = tokens[(tokens < 0) | (tokens >= self._vocab_size)]
        if len(outside):
            raise DataError(
                f"tokens[{row}] has the id {outside[0]}, outside the reference's vocabulary of"
                f" {self._vocab_size}"
            )
        most = (
            None if self._longest is None else self._longest - 1
        )  # one is left for the token that vLLM generates
        if most is not None and needed > most:
            raise EngineSetupError(
                f"row {row} has {needed} tokens, and the reference at {self._client.url} takes at most"
                f" {most}; start it with a longer context (vLLM --max-model-len, SGLang --context-length)"
            )

    async def _ask(self, tokens: IntArray, row: int) -> FloatArray:
        path, body = make_request(self._kind, tokens, model=self._model)
        where = f"{self._client.url}{path}, row {row}"
        encoded = msgspec.json.encode(body)
        for left in reversed(range(TRIES)):
            try:
                async with self._limit:
                    reply = await self._client.request("POST", path, body=encoded, silence_s=self._silence_s)
                check_status(reply, where=where)
                return parse_log_probs(self._kind, reply.body, tokens, where=where)
            except InfrastructureError as error:
                if not left:
                    raise
                pause_s = error.retry_after_s if isinstance(error, EngineOverloaded) else None
            await trio.sleep(RETRY_S if pause_s is None else pause_s)
        raise AssertionError("the last try returns or raises")


@asynccontextmanager
async def open_http_reference(
    url: str,
    *,
    kind: ServerKind,
    vocab_size: int,
    model: str = "policy",
    api_key: str | None = None,
    in_flight: int = 32,
    silence_s: float = 600.0,
) -> AsyncIterator[HttpReference]:
    """The model that the server at `url` serves as `model`, as a LogProbScorer.

    `silence_s`: seconds without a byte after which an answer is given up. Raises EngineSetupError if the
    server serves no such model, and InfrastructureError if it does not answer.
    """
    if vocab_size < 1 or in_flight < 1:
        raise ConfigError(
            f"vocab_size={vocab_size} and in_flight={in_flight} of a reference on a server must be at least 1"
        )
    async with open_http_client(url, api_key=api_key) as client:
        reply = await client.request("GET", "/v1/models", silence_s=silence_s)
        check_status(reply, where=f"{client.url}/v1/models")
        served = {
            entry.id: entry.max_model_len
            for entry in decode_reply(reply.body, _Models, where=f"{client.url}/v1/models").data
        }
        if model not in served:
            raise EngineSetupError(
                f"the server at {client.url} serves {sorted(served)}, not {model!r}; give the name of its"
                " reference model"
            )
        options: dict[str, Any] = {
            "kind": kind,
            "model": model,
            "vocab_size": vocab_size,
            "longest": served[model],
        }
        yield HttpReference(client, **options, in_flight=in_flight, silence_s=silence_s)
