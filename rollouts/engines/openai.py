"""OpenAIEngine: any endpoint with POST /v1/completions as an InferenceEngine for evaluation. Nothing it
answers can train.

With a tokenizer, text goes out and comes back, as hosted endpoints want it: the ids of an answer are its text
tokenized again, so they may differ from those that were sampled, and the stop token is missing. Without one,
ids go out and come back ("return_token_ids"): vLLM and servers like it.

Chat endpoints are left out: they put a template of their own around what is token ids here. Log-probs are
NaN, which no Sample accepts; versions are −1.
"""

from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np

from rollouts.engines.server import Dialect, ServerEngine, open_server_engine
from rollouts.engines.wire import (
    UNKNOWN_VERSION,
    ServedModel,
    Server,
    decode_reply,
    refuse_settings,
    setup_errors,
)
from rollouts.errors import ReplyError, RequestRefused
from rollouts.types import Completion, EngineFeatures, Fields, GenerateRequest, live

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_STOPS = 4  # stop strings that the API takes
GAPS = (
    "no log-probs of the distribution sampled from: for evaluation only",
    "no weight versions, no updates: whoever runs the endpoint decides what it serves",
    'pause("keep") is refused: requests cannot be frozen',
    "a seed is passed on and promises nothing",
    "an abort closes the connection, and what was generated is lost",
)
TEXT_GAPS = (
    *GAPS,
    "answers are tokenized again from text: their ids need not be those sampled, and lack the stop token",
    "top_k is refused: the API has none",
)


class _Choice(msgspec.Struct):
    text: str
    finish_reason: Literal["stop", "length", "content_filter"]
    token_ids: list[int] | None = None


@live
class OpenAIServer(Dialect):
    """The Dialect of an endpoint that nobody controls."""

    model: str
    tokenizer: "PreTrainedTokenizerBase | None"
    abort_grace_s = 0.0

    async def ask(self, request: GenerateRequest, server_id: str) -> Completion:
        """Its log-probs are NaN. Raises RequestRefused for what the API cannot say in text (a top_k, more
        than 4 stop tokens) and if a filter withheld the answer; ReplyError.
        """
        if request.asks_of_prompt or request.top_log_probs:
            raise RequestRefused(f"request {request.request_id!r} asks for log-probs, which the API has not")
        answer = await self.server.call("POST", "/v1/completions", self._make_body(request))
        who = f"{self.server.name}, request {request.request_id!r}"
        choices = decode_reply(answer, list[_Choice], field="choices", where=who)
        if len(choices) != 1:
            raise ReplyError(f"{who}: {len(choices)} choices instead of one")
        (choice,), limit = choices, request.sampling.max_new_tokens
        if choice.finish_reason == "content_filter":
            raise RequestRefused(f"{who}: the endpoint's content filter withheld the answer")
        ids, vocab_size = choice.token_ids, self.features.vocab_size
        if self.tokenizer:
            ids = self.tokenizer.encode(choice.text, add_special_tokens=False)
        elif ids is None or len(ids) > limit:  # text, tokenized again, may have more than it was made of
            raise ReplyError(
                f"{who}: {len(ids or ())} token_ids for max_new_tokens={limit}; one that speaks text needs a"
                " tokenizer"
            )
        if outside := [token for token in ids if not 0 <= token < vocab_size]:
            raise ReplyError(f"{who}: ids {outside[:3]} outside the vocabulary of {vocab_size}")
        return Completion(
            request_id=request.request_id,
            token_ids=np.asarray(ids, np.int64),
            log_probs=np.full(len(ids), np.nan, np.float32),
            weight_versions=np.full(len(ids), UNKNOWN_VERSION, np.int64),
            finish_reason=choice.finish_reason,
        )

    def _make_body(self, request: GenerateRequest) -> Fields:
        sampling, prompt = request.sampling, request.prompt_ids.tolist()
        top_k, stops, stop_texts = sampling.top_k, sampling.stop_token_ids, sampling.stop_texts
        body: Fields = {
            "model": self.model,
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
        }
        if sampling.seed is not None:
            body["seed"] = sampling.seed & (2**63 - 1)
        if not self.tokenizer:
            body |= {"prompt": prompt, "return_token_ids": True, "stop_token_ids": stops}
            asked = {"top_k": top_k, "stop": stop_texts}
            return body | {name: value for name, value in asked.items() if value}
        if top_k or len(stops) + len(stop_texts) > MAX_STOPS:
            raise RequestRefused(
                f"request {request.request_id!r} has top_k={top_k}, {len(stops)} stop tokens and"
                f" {len(stop_texts)} stop texts; the API has no top_k (set sampling.top_k = 0) and takes"
                f" {MAX_STOPS} stops"
            )
        body["prompt"], *texts = (
            self.tokenizer.decode(ids, skip_special_tokens=False)
            for ids in (prompt, *([token] for token in stops))
        )
        texts += stop_texts
        return body | ({"stop": texts} if texts else {})


def open_openai_engine(
    url: str,
    *,
    model: str,
    context_length: int,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    **options: Any,
) -> AbstractAsyncContextManager[ServerEngine]:
    """The engine behind `url`, without its /v1, until the block ends.

    An endpoint says nothing while it generates, so `silence_s` (600 unless given) bounds a whole answer.
    `vocab_size`, `context_length`: of the model, since no endpoint tells them. `tokenizer`: for endpoints
    that speak text. Options are those of open_server_engine. Raises EngineSetupError for a url or a key that
    cannot be used and for a key or a model that the endpoint does not know; EngineUnreachable, EngineSilent.
    """

    async def shake_hands(server: Server, vocab_size: int, _: object) -> OpenAIServer:
        with setup_errors("check url and api_key"):
            served = [one.id for one in await server.read("/v1/models", list[ServedModel], "data")]
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
            gaps=TEXT_GAPS if tokenizer else GAPS,
        )
        return OpenAIServer(server, features, model, tokenizer)

    options = {"silence_s": 600.0} | options
    return open_server_engine(shake_hands, "openai", "/v1/models", url, **options)
