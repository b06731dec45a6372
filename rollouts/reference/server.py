"""A frozen reference on a vLLM or SGLang server that somebody else runs: log-probs of prompts, over HTTP.

    vLLM    POST /v1/completions   prompt: the row's ids up to its last trained one, prompt_logprobs: 0
    SGLang  POST /generate         input_ids: the same, return_logprob, logprob_start_len: 0

Both compute them without the temperature, so only batches at temperature 1 are scored. They are in the
server's dtype: in bfloat16 a log-prob is off by some hundredths of a nat. Written against vLLM 0.32 and
SGLang 0.5.23.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Literal

import msgspec
import numpy as np
import trio

from rollouts.engines.calls import check_status
from rollouts.engines.http import HttpClient, open_http_client
from rollouts.engines.wire import decode_reply
from rollouts.errors import (
    ConfigError,
    DataError,
    EngineError,
    EngineOverloaded,
    EngineSetupError,
    InfrastructureError,
    ReplyError,
)
from rollouts.types import BoolArray, FloatArray, IntArray, RolloutBatch

ServerKind = Literal["vllm", "sglang"]
NO_LOG_PROB = -9999.0  # what vLLM writes for NaN and −infinity
LARGEST = 1e-3  # of a log-prob, after rounding
TRIES = 3  # of one row, when the server is at fault
RETRY_S = 1.0  # before the next, where the server does not say
IN_FLIGHT = 32  # requests at once
SILENCE_S = 600.0  # without a byte, after which an answer is given up


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
    ids = tokens.tolist()
    if kind == "vllm":  # it generates one token at least
        options = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        return "/v1/completions", {"model": model, "prompt": ids, **options}
    options = {"return_logprob": True, "logprob_start_len": 0}
    sampling = {"max_new_tokens": 0, "temperature": 1.0}
    return "/generate", {"input_ids": ids, "sampling_params": sampling, **options}


def parse_log_probs(kind: ServerKind, body: bytes, tokens: IntArray, *, where: str) -> FloatArray:
    """[T] of `tokens`, 0.0 for the first, which nothing predicts. Raises ReplyError for an answer that is not
    about them, or has a number that is no log-prob.
    """
    by_token: list[dict[int, float | None]]  # of each position
    if kind == "vllm":
        choices = decode_reply(body, _Completions, where=where).choices
        entries = choices[0].prompt_logprobs if len(choices) == 1 else []
        by_token = [{int(token): one.logprob for token, one in (entry or {}).items()} for entry in entries]
    else:
        triples = decode_reply(body, _Generated, where=where).meta_info.input_token_logprobs
        by_token = [{token: value} for value, token, _ in triples]
    if len(by_token) != len(tokens):
        raise ReplyError(f"{where}: {len(by_token)} log-probs for {len(tokens)} tokens")
    log_probs = np.zeros(len(tokens), np.float32)
    for index, token in enumerate(tokens[1:].tolist(), 1):
        value = by_token[index].get(token)
        if value is None or not NO_LOG_PROB < value <= LARGEST:
            raise ReplyError(
                f"{where}: position {index} has {by_token[index]} for token {token}; its log-prob must be"
                " there, finite and at most 0"
            )
        log_probs[index] = value
    return log_probs


class ServerReference:
    """A LogProbScorer on a server. Made by open_server_reference."""

    metrics: Mapping[str, float] = {}

    def __init__(
        self, client: HttpClient, kind: ServerKind, model: str, *, vocab_size: int, longest: int | None
    ) -> None:
        """`longest`: tokens that the server takes, prompt and answer; None: it does not say."""
        self._client = client
        self._kind: ServerKind = kind
        self._model = model
        self._vocab_size = vocab_size
        self._longest = longest
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
        for row, count in enumerate(needed):
            self._check_row(row, batch.tokens[row][:count], batch.loss_masks[row])
        rows = [np.zeros(len(tokens), np.float32) for tokens in batch.tokens]

        async def fill(row: int) -> None:
            mask = batch.loss_masks[row][: needed[row]]
            rows[row][: needed[row]] = np.where(mask, await self._ask(batch.tokens[row][: len(mask)], row), 0)

        try:
            async with trio.open_nursery() as nursery:
                for row in np.flatnonzero(needed).tolist():
                    nursery.start_soon(fill, row)
        except* EngineError as failures:
            raise first_leaf(failures) from None
        return tuple(rows)

    def _check_row(self, row: int, tokens: IntArray, mask: BoolArray) -> None:
        if len(tokens) and mask[0]:
            raise DataError(f"loss_masks[{row}] trains the first token, which nothing predicts: mask it out")
        outside = tokens[(tokens < 0) | (tokens >= self._vocab_size)]
        if len(outside):
            raise DataError(
                f"tokens[{row}] has the id {outside[0]}, outside the reference's vocabulary of"
                f" {self._vocab_size}"
            )
        if self._longest is not None and len(tokens) >= self._longest:  # vLLM generates one token
            raise EngineSetupError(
                f"row {row} has {len(tokens)} tokens, and the reference at {self._client.url} takes at most"
                f" {self._longest - 1}; start it with a longer context"
            )

    async def _ask(self, tokens: IntArray, row: int) -> FloatArray:
        path, body = make_request(self._kind, tokens, model=self._model)
        where = f"{self._client.url}{path}, row {row}"
        encoded = msgspec.json.encode(body)
        for left in reversed(range(TRIES)):
            try:
                async with self._limit:
                    reply = await self._client.request("POST", path, body=encoded, silence_s=SILENCE_S)
                check_status(reply, where=where)
                return parse_log_probs(self._kind, reply.content, tokens, where=where)
            except InfrastructureError as error:
                if not left:
                    raise
                wait_s = error.retry_after_s if isinstance(error, EngineOverloaded) else None
            await trio.sleep(RETRY_S if wait_s is None else wait_s)
        raise AssertionError("the last try returns or raises")


def first_leaf(group: BaseExceptionGroup) -> BaseException:
    """The first error in a group of groups."""
    error = group.exceptions[0]
    return first_leaf(error) if isinstance(error, BaseExceptionGroup) else error


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
        served = decode_reply(reply.content, _Models, where=where).data
        if len(served) != 1:
            raise EngineSetupError(
                f"the server at {client.url} serves {[model.id for model in served]}; a reference's server"
                " serves one model"
            )
        longest = served[0].max_model_len
        yield ServerReference(client, kind, served[0].id, vocab_size=vocab_size, longest=longest)
