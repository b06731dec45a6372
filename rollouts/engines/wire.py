"""What every server's answer must be before it becomes a Completion: decoded into typed records, never
repaired.

A server's dialect (its msgspec records) lives with its engine; what all answers must obey is here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import TypeVar

import msgspec
import numpy as np

from rollouts.errors import ReplyError
from rollouts.types import Completion, FinishReason, GenerateRequest

RecordT = TypeVar("RecordT")
SHOWN_BYTES = 200  # of an answer, in an error message
UNKNOWN_VERSION = -1  # weights that were never named
LOWEST_LOG_PROB = -1e4  # no sampled token is that unlikely: what is below stands for −infinity, or for none
_VERSION = re.compile("0|[1-9][0-9]{0,17}")  # as we write them; all of these fit into int64


class VersionSpan(msgspec.Struct, frozen=True):
    """Output tokens [start, end) that one weight version produced; both servers name versions by strings."""

    version: str
    start: int
    end: int


def decode_reply(body: bytes, kind: type[RecordT], *, where: str, show_body: bool = True) -> RecordT:
    """The record in a JSON body. Raises ReplyError naming `where`, the rule that was broken and, with
    `show_body`, the beginning of the body.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # a validation error is a DecodeError
        raise ReplyError(
            f"{where} answered {show(body) if show_body else f'{len(body)} bytes'}: {error}"
        ) from error


def make_completion(
    request: GenerateRequest,
    token_ids: Sequence[int],
    log_probs: Sequence[float],
    spans: Sequence[VersionSpan],
    finish_reason: FinishReason,
    *,
    vocab_size: int,
    where: str,
    ends_at: int | None = None,
    prompt_log_probs: Sequence[float | None] = (),
) -> Completion:
    """The completion that an answer amounts to. Raises ReplyError when it cannot be one: an id outside the
    vocabulary, more tokens than were asked for, none at all without an abort, "length" before the limit,
    "stop" though no token was to stop it, a log-prob that is missing, above 0, NaN, infinite or as good as
    that, spans that are not the tokens.

    `ends_at`: tokens of prompt and answer at which the server ends an answer before its limit; None: it never
    does.
    """
    count = len(token_ids)
    who = f"{where}, request {request.request_id!r}"
    if count > request.sampling.max_new_tokens:
        raise ReplyError(f"{who}: {count} tokens, more than max_new_tokens={request.sampling.max_new_tokens}")
    if not count and finish_reason != "abort":
        raise ReplyError(f"{who}: no token, yet finish reason {finish_reason!r}")
    if len(log_probs) != count:
        raise ReplyError(f"{who}: {len(log_probs)} log-probs for {count} tokens")
    for index, token in enumerate(token_ids):
        if not 0 <= token < vocab_size:
            raise ReplyError(f"{who}: token {index} has id {token}, outside the vocabulary of {vocab_size}")
    for index, value in enumerate(log_probs):
        if (
            not math.isfinite(value) or not LOWEST_LOG_PROB <= value <= 1e-3
        ):  # rounding may lift a certain token a little above 0
            raise ReplyError(
                f"{who}: the log-prob of token {index} is {value}; it must be finite, at least"
                f" {LOWEST_LOG_PROB:g} and at most 0"
            )
    versions = expand_spans(spans, count, where=who)
    short = count < request.sampling.max_new_tokens and (
        ends_at is None or len(request.prompt_ids) + count < ends_at
    )
    if finish_reason == "length" and short:
        raise ReplyError(
            f"{who}: {count} tokens, yet finish reason 'length' for"
            f" max_new_tokens={request.sampling.max_new_tokens}"
        )
    if finish_reason == "stop" and not request.sampling.stop_token_ids:
        raise ReplyError(f"{who}: finish reason 'stop', but the request has no stop token")
    scores = None
    if request.score_prompt and finish_reason != "abort":
        values = [math.nan if value is None else value for value in prompt_log_probs]
        if len(values) != len(request.prompt_ids) or not all(map(math.isfinite, values[1:])):
            raise ReplyError(f"{who}: the prompt's {len(request.prompt_ids)} tokens are scored {values}")
        scores = np.asarray([0.0, *values[1:]], np.float32)
    return Completion(
        request_id=request.request_id,
        token_ids=np.asarray(token_ids, np.int64),
        log_probs=np.asarray(log_probs, np.float32),
        weight_versions=versions,
        finish_reason=finish_reason,
        prompt_log_probs=scores,
    )


def make_empty_completion(request: GenerateRequest) -> Completion:
    """The answer to a request that was aborted before anything of it could be kept."""
    none = np.zeros(0, np.int64)
    return Completion(
        request_id=request.request_id,
        token_ids=none,
        log_probs=np.zeros(0, np.float32),
        weight_versions=none,
        finish_reason="abort",
    )


def expand_spans(spans: Iterable[VersionSpan], count: int, *, where: str) -> np.ndarray:
    """[count] the version of each token. Raises ReplyError unless the spans follow each other from 0 to
    `count`, versions never falling.
    """
    versions = np.full(count, UNKNOWN_VERSION, np.int64)
    at = 0
    for span in spans:
        if span.start != at or span.end < span.start or span.end > count:
            raise ReplyError(
                f"{where}: the version span {span.start}..{span.end} does not follow {at} within {count}"
                " tokens"
            )
        version = parse_version(span.version)
        if at and version < versions[at - 1]:
            raise ReplyError(
                f"{where}: token {at} is of version {version}, the one before it of {versions[at - 1]}"
            )
        versions[span.start : span.end] = version
        at = span.end
    if at != count:
        raise ReplyError(f"{where}: version spans cover {at} of {count} tokens")
    return versions


def parse_version(name: str) -> int:
    """The version that a server's name for it means: a decimal number as we write it; anything else,
    "default" above all, are weights we never sent.
    """
    return int(name) if _VERSION.fullmatch(name) else UNKNOWN_VERSION


def show(body: bytes) -> str:
    """The beginning of a body, for an error message."""
    text = body[:SHOWN_BYTES].decode(errors="replace")
    return repr(text) + (f"... ({len(body)} bytes)" if len(body) > SHOWN_BYTES else "")
