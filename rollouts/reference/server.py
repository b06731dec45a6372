"""A frozen reference on a server that somebody else runs, over HTTP.

    vLLM      POST /v1/completions   prompt: the row's ids up to its last trained one, prompt_logprobs: 0
    SGLang    POST /generate         input_ids: the same, return_logprob, logprob_start_len: 0
    rollouts  POST /references/…/score   rows of a batch, their masks and temperature

vLLM and SGLang compute log-probs without the temperature, so only batches at temperature 1 are scored. They
are in the server's dtype: in bfloat16 a log-prob is off by some hundredths of a nat. Written against vLLM
0.32 and SGLang 0.5.23. `rollouts serve` gives what a FrozenReference gives here, and reward models' scores.
"""

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Literal

import msgspec
import numpy as np
import trio

from rollouts.engines.http import open_http_client
from rollouts.engines.wire import Server, decode_reply, show
from rollouts.errors import (
    ConfigError,
    DataError,
    EngineSetupError,
    InfrastructureError,
    ReplyError,
)
from rollouts.models.directories import ModelHead
from rollouts.processes.nurseries import run_all
from rollouts.types import BoolArray, Fields, FloatArray, FloatRows, IntArray, RolloutBatch, T, live

ServerKind = Literal["vllm", "sglang", "rollouts"]
REALM = "rollouts"  # that a training service names in www-authenticate to a call without a key
NO_LOG_PROB = -9999.0  # what vLLM writes for NaN and −infinity
LARGEST = 1e-3  # of a log-prob, after rounding
TRIES = 3  # of one row, when the server is at fault
RETRY_S = 1.0  # before the next, where the server does not say
IN_FLIGHT = 32  # requests at once
SILENCE_S = 600.0  # without a byte, after which an answer is given up


@live
class ServerReference:
    """A LogProbScorer on a server. Made by open_server_reference."""

    _server: Server
    _kind: ServerKind
    _model: str
    _vocab_size: int
    _limit: trio.CapacityLimiter  # of requests at once

    async def score(self, batch: RolloutBatch) -> FloatRows:
        """[T_i] per row; 0.0 where the loss mask is 0. Rows that train nothing are not sent.

        Raises ConfigError unless batch.temperature is 1; DataError for a token outside the vocabulary or a
        mask on the first token; EngineError when the server fails TRIES times in a row.
        """
        if batch.temperature != 1.0:
            raise ConfigError(
                f"a reference on a server gives log-probs at temperature 1 only, and the batch is at"
                f" {batch.temperature}; sample at rl.rollout.temperature = 1, or let this process"
                " score: reference.where = 'trainer', or the teacher's directory"
            )
        for row, (tokens, mask) in enumerate(zip(batch.tokens, batch.loss_masks, strict=True)):
            if mask[:1].any():
                raise DataError(
                    f"loss_masks[{row}] trains the first token, which nothing predicts: mask it out"
                )
            outside = tokens[(tokens < 0) | (tokens >= self._vocab_size)]
            if len(outside):
                raise DataError(
                    f"tokens[{row}] has the id {outside[0]}, outside the reference's vocabulary of"
                    f" {self._vocab_size}"
                )
        rows = [np.zeros(len(tokens), np.float32) for tokens in batch.tokens]

        async def fill(row: int, count: int) -> None:
            log_probs = await ask_again(partial(self._ask, batch.tokens[row][:count].tolist()))
            rows[row][:count] = np.where(batch.loss_masks[row][:count], log_probs, 0)

        trained = [np.flatnonzero(mask) for mask in batch.loss_masks]
        await run_all(*(partial(fill, row, at[-1] + 1) for row, at in enumerate(trained) if len(at)))
        return tuple(rows)

    async def _ask(self, ids: list[int]) -> list[float]:
        """[T] of the tokens, 0.0 for the first, which nothing predicts. Raises ReplyError for an answer that
        is not about these tokens, or has a number that is no log-prob.
        """
        if self._kind == "vllm":
            path, body = "/v1/completions", {"model": self._model, "prompt": ids, "temperature": 1.0}
            body |= {"max_tokens": 1, "prompt_logprobs": 0}  # it generates one token at least
        else:
            path, body = "/generate", {"input_ids": ids, "return_logprob": True, "logprob_start_len": 0}
            body["sampling_params"] = {"max_new_tokens": 0, "temperature": 1.0}

        async with self._limit:
            reply = await self._server.call("POST", path, body)
        try:
            answer = msgspec.json.decode(reply)
            if self._kind == "vllm":
                entries = answer["choices"][0]["prompt_logprobs"][1:]
                found = [of[str(token)]["logprob"] for of, token in zip(entries, ids[1:], strict=True)]
            else:
                entries = answer["meta_info"]["input_token_logprobs"][1:]
                found = [{of: value}[token] for (value, of, _), token in zip(entries, ids[1:], strict=True)]
            if not all(NO_LOG_PROB < value <= LARGEST for value in found):
                raise ValueError("one is not")
        except (LookupError, TypeError, ValueError) as error:
            raise ReplyError(
                f"{self._server.name}: each of {len(ids)} tokens must have its log-prob, finite and at most"
                f" 0, and the answer is {show(reply)} ({error!r})"
            ) from error
        return [0.0, *found]


async def ask_again(ask: Callable[[], Awaitable[T]]) -> T:
    """What `ask()` returns, asked up to TRIES times while the server is at fault."""
    for _ in range(TRIES - 1):
        try:
            return await ask()
        except InfrastructureError as error:
            wait_s = getattr(error, "retry_after_s", None)  # of an EngineOverloaded
        await trio.sleep(RETRY_S if wait_s is None else wait_s)
    return await ask()


# --- on a training service ----------------------------------------------------------------------------------


class Served(msgspec.Struct, frozen=True):
    """What a training service says of a reference."""

    head: ModelHead
    vocabulary: str  # digest_vocabulary of its tokenizer
    max_tokens: int  # of one request


def digest_vocabulary(tokenizer: Any) -> str:
    """Equal for tokenizers with the same tokens."""
    return hashlib.sha256(msgspec.json.encode(sorted(tokenizer.get_vocab().items()))).hexdigest()


@live
class ServiceReference:
    """A LogProbScorer on a training service. Made by open_server_reference."""

    _server: Server
    _about: Served

    async def score(self, batch: RolloutBatch) -> FloatRows:
        """[T_i] per row; 0.0 where the loss mask is 0. Of a reward model the scores of a batch of
        make_score_batch. Raises EngineError for rows that the service refuses, and when it fails TRIES times
        in a row.
        """
        rows = [*zip(batch.tokens, batch.loss_masks, strict=True)]
        step = max(self._about.max_tokens // max(map(len, batch.tokens), default=1), 1)
        found = []
        for start in range(0, len(rows), step):
            found += await ask_again(partial(self._ask, rows[start : start + step], batch.temperature))
        return tuple(found)

    async def _ask(self, rows: Sequence[tuple[IntArray, BoolArray]], temperature: float) -> list[FloatArray]:
        """The values of some rows. Raises ReplyError for an answer that is not about them."""
        if self._about.head == "scalar":  # of what is before the one token that trains
            body: Any = {"tokens": [row[: mask.argmax()].tolist() for row, mask in rows]}
            counts, kind, field = [1] * len(rows), list[float], "scores"
        else:
            tokens, masks = ([one.tolist() for one in column] for column in zip(*rows, strict=True))
            body = {"tokens": tokens, "masks": masks, "temperature": temperature}
            counts, kind, field = [*map(len, tokens)], list[list[float]], "log_probs"
        reply, where = await self._server.call("POST", "/score", body), f"{self._server.name}/score"
        values: Any = decode_reply(reply, kind, field=field, where=where)
        if [*map(np.size, values)] != counts:
            raise ReplyError(f"{where}: {len(rows)} rows were sent, and the answer is {show(reply)}")
        pairs = zip(values, rows, strict=True)
        return [np.where(mask, np.asarray(one, np.float32), np.float32(0)) for one, (_, mask) in pairs]


@asynccontextmanager
async def open_server_reference(
    url: str, *, kind: ServerKind, vocab_size: int, api_key: str | None = None
) -> AsyncIterator[ServerReference | ServiceReference]:
    """The model that the server at `url` serves, as a LogProbScorer.

    Raises EngineSetupError if the server serves several models, EngineError for a key or a name that a
    training service does not have, and InfrastructureError if it does not answer.
    """
    async with open_http_client(url, api_key=api_key) as client:
        server = Server(client, name=client.url, silence_s=SILENCE_S, health_path="/health")
        if kind == "rollouts":
            yield ServiceReference(server, await server.read("", Served))
            return
        served = await server.read("/v1/models", list[Fields], "data")
        if len(served) != 1:
            raise EngineSetupError(
                f"the server at {client.url} serves {len(served)} models; a reference's server serves one"
            )
        yield ServerReference(
            server, kind, str(served[0].get("id")), vocab_size, trio.CapacityLimiter(IN_FLIGHT)
        )
