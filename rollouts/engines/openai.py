"""OpenAIEngine: any endpoint with POST /v1/completions as an InferenceEngine for evaluation. Nothing it
answers can train.

With a tokenizer, text goes out and comes back, as hosted endpoints want it: the ids of an answer are its text
tokenized again, so they may differ from those that were sampled, and the stop token is missing. Without one,
ids go out and come back ("return_token_ids"): vLLM and servers like it.

Chat endpoints are left out: they put a template of their own around what is token ids here. Log-probs are
NaN, which no Sample accepts; versions are −1.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import httpx
import msgspec
import numpy as np

from rollouts.engines.http import open_http_client, split_url
from rollouts.engines.server import EngineServer
from rollouts.engines.wire import UNKNOWN_VERSION, decode_reply
from rollouts.errors import (
    EngineError,
    EngineSetupError,
    InfrastructureError,
    ReplyError,
    RequestRefused,
)
from rollouts.protocols import PauseMode
from rollouts.types import Completion, EngineFeatures, EngineLoad, FinishReason, GenerateRequest

if TYPE_CHECKING:
    import torch

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


class _Choice(msgspec.Struct, frozen=True):
    text: str
    finish_reason: str
    token_ids: list[int] | None = None


class _Completions(msgspec.Struct, frozen=True):
    choices: list[_Choice]


class OpenAIEngine:
    """One endpoint. Made by open_openai_engine."""

    def __init__(
        self, server: EngineServer, features: EngineFeatures, *, model: str, tokenizer: TextTokenizer | None
    ) -> None:
        self.features = features
        self._server = server
        self._model = model
        self._tokenizer = tokenizer

    async def generate(self, request: GenerateRequest) -> Completion:
        """One completion without log-probs. Raises RequestRefused, EngineError."""
        return await self._server.run(request, self.features, self._ask)

    async def _ask(self, request: GenerateRequest, server_id: str) -> Completion:
        body = make_completions_body(request, model=self._model, tokenizer=self._tokenizer)
        reply = await self._server.call("POST", "/v1/completions", body)
        return parse_completions(
            reply, request, self._tokenizer, vocab_size=self.features.vocab_size, where=self.features.name
        )

    async def pause(self, mode: PauseMode) -> None:
        """Admits nothing until resume(). Raises EngineError for "keep"."""
        self._server.check_open()
        if mode == "keep":
            raise EngineError(f'{self.features.name} cannot freeze requests; pause("wait") or pause("abort")')
        self._server.close_gate(frozen=False)
        if mode == "abort":
            await self._server.cancel_all()
        else:
            await self._server.wait_answered(self._server.sent())

    async def resume(self) -> None:
        self._server.check_open()
        self._server.open_gate()

    async def abort_all(self) -> None:
        self._server.check_open()
        await self._server.cancel_all()

    async def weight_version(self) -> int:
        self._server.check_open()
        return UNKNOWN_VERSION

    async def checksum(self) -> str | None:
        self._server.check_open()
        return None

    async def health(self) -> bool:
        try:
            await self._server.call("GET", "/v1/models")
        except EngineError:
            return False
        return True

    async def load(self) -> EngineLoad:
        """What we sent and what waits here: of others the endpoint says nothing."""
        counts = self._server.statistics()
        return EngineLoad(running=int(counts["running"]), waiting=int(counts["waiting"]))

    async def update_weights_from_checkpoint(self, path: Path, version: int) -> Mapping[str, Any]:
        raise self._no_updates()

    async def begin_update(self) -> None:
        raise self._no_updates()

    def receive_bucket(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        raise self._no_updates()

    async def finish_update(self, version: int) -> None:
        raise self._no_updates()

    async def release_memory(self) -> None:
        raise self._no_memory()

    async def restore_memory(self) -> None:
        raise self._no_memory()

    def _no_updates(self) -> EngineError:
        return EngineError(
            f"{self.features.name} takes no weights; train with engine.kind local, vllm or sglang"
        )

    def _no_memory(self) -> EngineError:
        return EngineError(f"{self.features.name} gives no memory back; features.frees_memory is False")

    def statistics(self) -> Mapping[str, float]:
        return self._server.statistics()


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
    reply = decode_reply(body, _Completions, where=where)
    if len(reply.choices) != 1:
        raise ReplyError(f"{who}: {len(reply.choices)} choices instead of one")
    choice = reply.choices[0]
    if choice.finish_reason == "content_filter":
        raise RequestRefused(f"{who}: the endpoint's content filter withheld the answer")
    token_ids = (
        choice.token_ids
        if tokenizer is None
        else list(tokenizer.encode(choice.text, add_special_tokens=False))
    )
    if token_ids is None:
        raise ReplyError(
            f"{who}: the answer has no token_ids; this endpoint speaks text: open the engine with tokenizer=…"
        )
    limit = request.sampling.max_new_tokens
    if (
        tokenizer is None and len(token_ids) > limit
    ):  # text, tokenized again, may have more tokens than it was made of
        raise ReplyError(f"{who}: {len(token_ids)} tokens, more than max_new_tokens={limit}")
    for index, token in enumerate(token_ids):
        if not 0 <= token < vocab_size:
            raise ReplyError(f"{who}: token {index} has id {token}, outside the vocabulary of {vocab_size}")
    return Completion(
        request_id=request.request_id,
        token_ids=np.asarray(token_ids, np.int64),
        log_probs=np.full(len(token_ids), np.nan, np.float32),
        weight_versions=np.full(len(token_ids), UNKNOWN_VERSION, np.int64),
        finish_reason=_parse_finish_reason(choice.finish_reason, who),
    )


def _parse_finish_reason(text: str, who: str) -> FinishReason:
    if text == "stop":
        return "stop"
    if text == "length":
        return "length"
    raise ReplyError(f"{who}: finish reason {text!r}; known are stop and length")


# --- opening ------------------------------------------------------------------------------------------------


@asynccontextmanager
async def open_openai_engine(
    url: str,
    *,
    model: str,
    name: str = "",
    api_key: str | None = None,
    silence_s: float = 600.0,
    vocab_size: int,
    context_length: int,
    tokenizer: TextTokenizer | None = None,
    transport: Callable[[], httpx.AsyncBaseTransport] | None = None,
) -> AsyncIterator[OpenAIEngine]:
    """The engine behind `url`, without its /v1, until the block ends.

    `silence_s`: an endpoint says nothing while it generates, so this bounds a whole answer. `vocab_size`,
    `context_length`: of the model, since no endpoint tells them. `tokenizer`: for endpoints that speak text.
    `transport`: how requests travel; None: HTTP. Raises EngineSetupError for a url or a key that cannot be
    used and for a key or a model that the endpoint does not know; EngineUnreachable, EngineSilent.
    """
    name = name or f"openai-{split_url(url).netloc}"
    features = EngineFeatures(
        vocab_size=vocab_size,
        context_length=context_length,
        in_memory_update=False,
        update_from_checkpoint=False,
        shares_weights=False,
        keep_pause=False,
        deterministic=False,
        name=name,
        seeds=False,
        version_spans=False,
        log_probs=False,
        frees_memory=False,
        gaps=GAPS if tokenizer is None else GAPS + TEXT_GAPS,
    )
    async with open_http_client(url, api_key=api_key, transport=transport) as client:
        server = EngineServer(client, name=name, silence_s=silence_s)
        try:
            await _check_served(server, model)
            yield OpenAIEngine(server, features, model=model, tokenizer=tokenizer)
        finally:
            server.close()


class _Served(msgspec.Struct, frozen=True):
    id: str


class _Models(msgspec.Struct, frozen=True):
    data: list[_Served]


async def _check_served(server: EngineServer, model: str) -> None:
    try:
        body = await server.call("GET", "/v1/models")
    except InfrastructureError:
        raise
    except EngineError as error:
        raise EngineSetupError(
            f"{server.name} does not tell its models: {error}; check url and api_key"
        ) from error
    names = [served.id for served in decode_reply(body, _Models, where=server.name).data]
    if model not in names:
        raise EngineSetupError(
            f"{server.name} does not serve {model!r}; it has {', '.join(names[:10]) or 'nothing'}"
        )
