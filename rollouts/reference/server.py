"""A frozen reference on a vLLM or SGLang server that somebody else runs: log-probs of prompts, over HTTP.

    vLLM    POST /v1/completions   prompt: the row's ids up to its last trained one, prompt_logprobs: 0
    SGLang  POST /generate         input_ids: the same, return_logprob, logprob_start_len: 0

Both compute them without the temperature, so only batches at temperature 1 are scored. They are in the
server's dtype: in bfloat16 a log-prob is off by some hundredths of a nat. Written against vLLM 0.32 and
SGLang 0.5.23.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Literal

import msgspec
import numpy as np
import trio

from rollouts.engines.calls import check_status
from rollouts.engines.http import HttpClient, open_http_client
from rollouts.errors import (
    ConfigError,
    DataError,
    EngineError,
    EngineOverloaded,
    EngineSetupError,
    InfrastructureError,
    ReplyError,
)
from rollouts.types import FloatArray, IntArray, RolloutBatch

ServerKind = Literal["vllm", "sglang"]
NO_LOG_PROB = -9999.0  # what vLLM writes for NaN and −infinity
LARGEST = 1e-3  # of a log-prob, after rounding
TRIES = 3  # of one row, when the server is at fault
RETRY_S = 1.0  # before the next, where the server does not say
IN_FLIGHT = 32  # requests at once
SILENCE_S = 600.0  # without a byte, after which an answer is given up


@contextmanager
def _reading(body: bytes, rule: str) -> Iterator[Any]:
    """The JSON of an answer. Raises ReplyError if it is none, or if reading it inside fails."""
    try:
        yield msgspec.json.decode(body)
    except (LookupError, TypeError, ValueError, msgspec.DecodeError) as error:
        raise ReplyError(f"{rule}, and the answer is {body[:200]!r} ({error!r})") from error


class ServerReference:
    """A LogProbScorer on a server. Made by open_server_reference."""

    metrics: Mapping[str, float] = {}

    def __init__(self, client: HttpClient, kind: ServerKind, model: str, vocab_size: int) -> None:
        self._client = client
        self._kind: ServerKind = kind
        self._model = model
        self._vocab_size = vocab_size
        self._limit = trio.CapacityLimiter(IN_FLIGHT)

    async def score(self, batch: RolloutBatch) -> tuple[FloatArray, ...]:
        """[T_i] per row; 0.0 where the loss mask is 0. Rows that train nothing are not sent.

        Raises ConfigError unless batch.temperature is 1; DataError for a token outside the vocabulary or a
        mask on the first token; EngineError when the server fails TRIES times in a row.
        """
        if batch.temperature != 1.0:
            raise ConfigError(
                f"a reference on a server gives log-probs at temperature 1 only, and the batch is at"
                f" {batch.temperature}; sample at rollout.temperature = 1, or set reference.where = 'trainer'"
            )
        needed = [int(np.flatnonzero(mask)[-1]) + 1 if mask.any() else 0 for mask in batch.loss_masks]
        for row, (tokens, mask) in enumerate(zip(batch.tokens, batch.loss_masks, strict=True)):
            if mask[:1].any():
                rule = "which nothing predicts: mask it out"
                raise DataError(f"loss_masks[{row}] trains the first token, {rule}")
            outside = tokens[(tokens < 0) | (tokens >= self._vocab_size)]
            if len(outside):
                vocabulary = f"the reference's vocabulary of {self._vocab_size}"
                raise DataError(f"tokens[{row}] has the id {outside[0]}, outside {vocabulary}")
        rows = [np.zeros(len(tokens), np.float32) for tokens in batch.tokens]

        async def fill(row: int, count: int) -> None:
            found = await self._ask(batch.tokens[row][:count], row)
            rows[row][:count] = np.where(batch.loss_masks[row][:count], found, 0)

        try:
            async with trio.open_nursery() as nursery:
                for row, count in enumerate(needed):
                    if count:
                        nursery.start_soon(fill, row, count)
        except* EngineError as failures:
            raise _first_leaf(failures) from None
        return tuple(rows)

    async def _ask(self, tokens: IntArray, row: int) -> FloatArray:
        ids: list[int] = tokens.tolist()
        path, body = (
            "/v1/completions",
            {  # vLLM generates one token at least
                "model": self._model,
                "prompt": ids,
                "max_tokens": 1,
                "temperature": 1.0,
                "prompt_logprobs": 0,
            },
        )
        if self._kind == "sglang":
            path, body = (
                "/generate",
                {
                    "input_ids": ids,
                    "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
                    "return_logprob": True,
                    "logprob_start_len": 0,
                },
            )
        where = f"{self._client.url}{path}, row {row}"
        for left in reversed(range(TRIES)):
            try:
                async with self._limit:
                    sent = msgspec.json.encode(body)
                    reply = await self._client.request("POST", path, body=sent, silence_s=SILENCE_S)
                check_status(reply, where=where)
                return self._read_log_probs(reply.content, ids, where)
            except InfrastructureError as error:
                if not left:
                    raise
                wait_s = error.retry_after_s if isinstance(error, EngineOverloaded) else None
            await trio.sleep(RETRY_S if wait_s is None else wait_s)
        raise AssertionError("the last try returns or raises")

    def _read_log_probs(self, body: bytes, ids: list[int], where: str) -> FloatArray:
        """[T] of the tokens, 0.0 for the first, which nothing predicts. Raises ReplyError for an answer that
        is not about them, or has a number that is no log-prob.
        """
        rule = f"{where}: each of {len(ids)} tokens must have its log-prob, finite and at most 0"
        with _reading(body, rule) as answer:
            if self._kind == "vllm":
                (choice,) = answer["choices"]
                entries = [
                    {key: one["logprob"] for key, one in (of or {}).items()}
                    for of in choice["prompt_logprobs"]
                ]
            else:
                entries = [{str(of): value} for value, of, _ in answer["meta_info"]["input_token_logprobs"]]
            found = [float(of[str(token)]) for of, token in zip(entries[1:], ids[1:], strict=True)]
            if not all(NO_LOG_PROB < value <= LARGEST for value in found):
                raise ValueError("one is not")
            return np.asarray([0.0, *found], np.float32)


def _first_leaf(group: BaseExceptionGroup) -> BaseException:
    """The first error in a group of groups."""
    error = group.exceptions[0]
    return _first_leaf(error) if isinstance(error, BaseExceptionGroup) else error


@asynccontextmanager
async def open_server_reference(
    url: str, *, kind: ServerKind, vocab_size: int, api_key: str | None = None
) -> AsyncIterator[ServerReference]:
    """The model that the server at `url` serves, as a LogProbScorer.

    Raises EngineSetupError if the server serves several models, and InfrastructureError if it does not
    answer.
    """
    async with open_http_client(url, api_key=api_key) as client:
        where = f"{client.url}/v1/models"
        reply = await client.request("GET", "/v1/models", silence_s=SILENCE_S)
        check_status(reply, where=where)
        with _reading(reply.content, f"{where} must list the models") as answer:
            served = [str(model["id"]) for model in answer["data"]]
        if len(served) != 1:
            raise EngineSetupError(
                f"the server at {client.url} serves {served}; a reference's server serves one model"
            )
        yield ServerReference(client, kind, served[0], vocab_size)
