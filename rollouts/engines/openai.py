"""OpenAIEngine: any endpoint with POST /v1/completions as an InferenceEngine for evaluation. Nothing it
answers can train.

With a tokenizer, text goes out and comes back, as hosted endpoints want it: the ids of an answer are its text
tokenized again, so they may differ from those that were sampled, and the stop token is missing. Without one,
ids go out and come back ("return_token_ids"): vLLM and servers like it.

Chat endpoints are left out: they put a template of their own around what is token ids here. Log-probs are
NaN, which no Sample accepts; versions are −1.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Any, Literal, Protocol

import numpy as np

from rollouts.engines.calls import Server
from rollouts.engines.http import Transport
from rollouts.engines.server import (
    Dialect,
    ServerEngine,
    open_server_engine,
    refuse_settings,
    setup_errors,
)
from rollouts.engines.wire import UNKNOWN_VERSION, Record, decode_field
from rollouts.errors import ReplyError, RequestRefused
from rollouts.types import Completion, EngineFeatures, GenerateRequest

MAX_STOPS = 4  # stop strings that the API takes
GAPS = (
    "no log-probs of the distribution sampled from: for evaluation only",
    "no weight versions, no updates: whoever runs the endpoint decides what it serves",
    'pause("keep") is refused: requests cannot be frozen',
    "a seed is passed on and promises nothing",
    "an abort closes the connection, and what was generated is lost",
)
TEXT_GAPS = (
    (
        "answers are tokenized again from text: their ids need not be those that were sampled, and the stop"
        " token is not among them"
    ),
    "top_k is refused: the API has none",
)


class TextTokenizer(Protocol):
    """What turns ids into the text that an endpoint takes, and back."""

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = ...) -> Any: ...
    def encode(self, text: str, *, add_special_tokens: bool = ...) -> Any: ...


class _Choice(Record, frozen=True):
    text: str
    finish_reason: Literal["stop", "length", "content_filter"]
    token_ids: list[int] | None = None


class OpenAIServer(Dialect):
    """The Dialect of an endpoint that nobody controls."""

    abort_grace_s = 0.0

    def __init__(
        self, server: Server, *, model: str, vocab_size: int, tokenizer: TextTokenizer | None
    ) -> None:
        self._server = server
        self._model = model
        self._vocab_size = vocab_size
        self._tokenizer = tokenizer

    async def ask(self, request: GenerateRequest, server_id: str) -> Completion:
        body = make_completions_body(request, model=self._model, tokenizer=self._tokenizer)
        reply = await self._server.call("POST", "/v1/completions", body)
        name = self._server.name
        return parse_completions(reply, request, self._tokenizer, vocab_size=self._vocab_size, where=name)


OpenAIEngine = ServerEngine


def make_completions_body(
    request: GenerateRequest, *, model: str, tokenizer: TextTokenizer | None
) -> dict[str, Any]:
    """What /v1/completions is sent. Raises RequestRefused for what the API cannot say in text: a top_k, more
    than 4 stop tokens.
    """
    sampling = request.sampling
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
    }
    if sampling.seed is not None:
        body["seed"] = sampling.seed & (2**63 - 1)
    if tokenizer is None:
        body |= {
            "prompt": request.prompt_ids.tolist(),
            "return_token_ids": True,
            "stop_token_ids": list(sampling.stop_token_ids),
        }
        return body | ({"top_k": sampling.top_k} if sampling.top_k else {})
    if sampling.top_k:
        raise RequestRefused(
            f"request {request.request_id!r}: top_k={sampling.top_k}, and the API has none; set"
            " sampling.top_k = 0"
        )
    if len(sampling.stop_token_ids) > MAX_STOPS:
        raise RequestRefused(
            f"request {request.request_id!r}: {len(sampling.stop_token_ids)} stop tokens; the API takes"
            f" {MAX_STOPS}"
        )
    body["prompt"] = str(tokenizer.decode(request.prompt_ids.tolist(), skip_special_tokens=False))
    stops = [str(tokenizer.decode([token], skip_special_tokens=False)) for token in sampling.stop_token_ids]
    return body | ({"stop": stops} if stops else {})


def parse_completions(
    body: bytes, request: GenerateRequest, tokenizer: TextTokenizer | None, *, vocab_size: int, where: str
) -> Completion:
    """The completion in an answer of /v1/completions, its log-probs NaN. Raises ReplyError; RequestRefused if
    a filter withheld the answer.
    """
    who = f"{where}, request {request.request_id!r}"
    choices = decode_field(body, "choices", list[_Choice], where=where)
    if len(choices) != 1:
        raise ReplyError(f"{who}: {len(choices)} choices instead of one")
    choice, limit = choices[0], request.sampling.max_new_tokens
    if choice.finish_reason == "content_filter":
        raise RequestRefused(f"{who}: the endpoint's content filter withheld the answer")
    ids = choice.token_ids
    if tokenizer is not None:
        ids = list(tokenizer.encode(choice.text, add_special_tokens=False))
    elif ids is None or len(ids) > limit:  # text, tokenized again, may have more tokens than it was made of
        raise ReplyError(
            f"{who}: {len(ids or ())} token_ids for max_new_tokens={limit}; one that speaks text needs a"
            " tokenizer"
        )
    outside = [token for token in ids if not 0 <= token < vocab_size]
    if outside:
        raise ReplyError(f"{who}: ids {outside[:3]} outside the vocabulary of {vocab_size}")
    return Completion(
        request_id=request.request_id,
        token_ids=np.asarray(ids, np.int64),
        log_probs=np.full(len(ids), np.nan, np.float32),
        weight_versions=np.full(len(ids), UNKNOWN_VERSION, np.int64),
        finish_reason=choice.finish_reason,
    )


# --- opening ------------------------------------------------------------------------------------------------


def open_openai_engine(
    url: str,
    *,
    model: str,
    name: str = "",
    api_key: str | None = None,
    silence_s: float = 600.0,
    vocab_size: int,
    context_length: int,
    tokenizer: TextTokenizer | None = None,
    transport: Transport | None = None,
) -> AbstractAsyncContextManager[ServerEngine]:
    """The engine behind `url`, without its /v1, until the block ends.

    `silence_s`: an endpoint says nothing while it generates, so this bounds a whole answer. `vocab_size`,
    `context_length`: of the model, since no endpoint tells them. `tokenizer`: for endpoints that speak text.
    `transport`: how requests travel; None: HTTP. Raises EngineSetupError for a url or a key that cannot be
    used and for a key or a model that the endpoint does not know; EngineUnreachable, EngineSilent.
    """

    async def shake_hands(server: Server) -> tuple[EngineFeatures, OpenAIServer]:
        with setup_errors("check url and api_key"):
            served = [one.id for one in await server.read_field("/v1/models", "data", list[_Served])]
        refuse_settings(server.name, {f"does not serve {model!r}; it has {served[:10]}": model not in served})
        features = EngineFeatures(
            vocab_size=vocab_size,
            context_length=context_length,
            update_from_checkpoint=False,
            keep_pause=False,
            name=server.name,
            seeds=False,
            version_spans=False,
            log_probs=False,
            frees_memory=False,
            gaps=GAPS if tokenizer is None else GAPS + TEXT_GAPS,
        )
        dialect = OpenAIServer(server, model=model, vocab_size=vocab_size, tokenizer=tokenizer)
        return features, dialect

    return open_server_engine(
        url,
        shake_hands,
        kind="openai",
        name=name,
        health_path="/v1/models",
        api_key=api_key,
        silence_s=silence_s,
        transport=transport,
    )


class _Served(Record, frozen=True):
    id: str
