"""What every server's answer must be before it becomes a Completion: decoded into typed records, never repaired.

A server's dialect (its msgspec records) lives with its engine; what all answers must obey is here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TypeVar

import msgspec
import numpy as np

from rollouts.errors import ReplyError
from rollouts.types import Completion, FinishReason, GenerateRequest

RecordT = TypeVar("RecordT")
SHOWN_BYTES = 200  # of an answer, in an error message
UNKNOWN_VERSION = -1  # weights that were never named


class VersionSpan(msgspec.Struct, frozen=True):
    """Output tokens [start, end) that one weight version produced; both servers name versions by strings."""

    version: str
    start: int
    end: int


def decode_reply(body: bytes, kind: type[RecordT], *, where: str) -> RecordT:
    """The record in a JSON body. Raises ReplyError naming `where`, the rule that was broken and the beginning of the body."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # a validation error is a DecodeError
        raise ReplyError(f"{where} answered {show(body)}: {error}") from error


def make_completion(
    request: GenerateRequest,
    token_ids: Sequence[int],
    log_probs: Sequence[float],
    spans: Sequence[VersionSpan],
    finish_reason: FinishReason,
    *,
    vocab_size: int,
    where: str,
) -> Completion:
    """The completion that an answer amounts to. Raises ReplyError when it cannot be one: an id outside the vocabulary, more tokens than
    were asked for, none at all without an abort, a log-prob that is missing, above 0, NaN or infinite, spans that are not the tokens.
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
        if not math.isfinite(value) or value > 1e-3:  # rounding may lift a certain token a little above 0
            raise ReplyError(f"{who}: the log-prob of token {index} is {value}; it must be finite and at most 0")
    return Completion(
        request_id=request.request_id,
        token_ids=np.asarray(token_ids, np.int64),
        log_probs=np.asarray(log_probs, np.float32),
        weight_versions=expand_spans(spans, count, where=who),
        finish_reason=finish_reason,
    )


def expand_spans(spans: Iterable[VersionSpan], count: int, *, where: str) -> np.ndarray:
    """[count] the version of each token. Raises ReplyError unless the spans follow each other from 0 to `count`, versions never falling."""
    versions = np.full(count, UNKNOWN_VERSION, np.int64)
    at = 0
    for span in spans:
        if span.start != at or span.end < span.start or span.end > count:
            raise ReplyError(f"{where}: the version span {span.start}..{span.end} does not follow {at} within {count} tokens")
        version = parse_version(span.version)
        if at and version < versions[at - 1]:
            raise ReplyError(f"{where}: token {at} is of version {version}, the one before it of {versions[at - 1]}")
        versions[span.start : span.end] = version
        at = span.end
    if at != count:
        raise ReplyError(f"{where}: version spans cover {at} of {count} tokens")
    return versions


def parse_version(name: str) -> int:
    """The version that a server's name for it means: a decimal number; anything else, "default" above all, are weights we never sent."""
    return int(name) if name.isascii() and name.isdecimal() else UNKNOWN_VERSION


def show(body: bytes) -> str:
    """The beginning of a body, for an error message."""
    text = body[:SHOWN_BYTES].decode(errors="replace")
    return repr(text) + (f"... ({len(body)} bytes)" if len(body) > SHOWN_BYTES else "")
