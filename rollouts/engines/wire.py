"""What every server's answer must be before it becomes a Completion: decoded into typed records, never
repaired. The records of a server are with its engine; fields that they do not name are ignored.
"""

import math
import re
from collections.abc import Iterable, Sequence
from typing import TypeVar

import msgspec
import numpy as np

from rollouts.errors import ReplyError
from rollouts.types import Completion, FinishReason, GenerateRequest, IntArray

RecordT = TypeVar("RecordT")
SHOWN_BYTES = 200  # of an answer, in an error message
UNKNOWN_VERSION = -1  # weights that were never named
LOWEST_LOG_PROB = -9000.0  # no token is that unlikely; vLLM writes −9999 for NaN, −infinity and none
HIGHEST_LOG_PROB = 1e-3  # rounding may lift a certain token a little above 0
_VERSION = re.compile("0|[1-9][0-9]{0,17}")  # as we write them; all of these fit into int64


class VersionSpan(msgspec.Struct):
    """Output tokens [start, end) that one weight version produced; both servers name versions by strings."""

    version: str
    start: int
    end: int


class ServedModel(msgspec.Struct):
    """Of /v1/models."""

    id: str


def decode_reply(body: bytes, kind: type[RecordT], *, where: str, field: str = "") -> RecordT:
    """The record in a JSON body, or in one field of its object. Raises ReplyError naming `where`, the rule
    that was broken and the beginning of the body; not of a server's settings, among which are its keys.
    """
    try:
        part = msgspec.json.decode(body, type=dict[str, msgspec.Raw])[field] if field else body
        return msgspec.json.decode(part, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError) as error:  # a validation error is the first
        shown = f"{len(body)} bytes" if "/server_info" in where else show(body)
        raise ReplyError(f"{where} answered {shown}: {field} {error}") from error


def make_completion(
    request: GenerateRequest,
    token_ids: Sequence[int],
    log_probs: Sequence[tuple[int, float]],
    spans: Sequence[VersionSpan],
    finish_reason: FinishReason,
    *,
    vocab_size: int,
    where: str,
    ends_at: int | None = None,
    prompt_log_probs: Sequence[float | None] = (),
) -> Completion:
    """The completion that an answer amounts to. Raises ReplyError naming the rule that it breaks.

    `log_probs`: with the ids that they are of. `ends_at`: tokens of prompt and answer at which the server
    ends an answer before its limit; None: it never does.
    """
    count, limit, stops = len(token_ids), request.sampling.max_new_tokens, request.sampling.stop_token_ids
    at_end = ends_at is not None and len(request.prompt_ids) + count >= ends_at
    values = [value for _, value in log_probs]
    scores: list[float] = []
    if request.score_prompt and finish_reason != "abort":
        scores = [0.0, *(math.nan if value is None else value for value in prompt_log_probs[1:])]
    bad_ids = [token for token in token_ids if not 0 <= token < vocab_size]
    bad_log_probs = [
        value for value in (*values, *scores) if not LOWEST_LOG_PROB <= value <= HIGHEST_LOG_PROB
    ]
    rules = {
        f"{count} tokens, more than max_new_tokens={limit}": count > limit,
        f"no token, yet finish reason {finish_reason!r}": not count and finish_reason != "abort",
        f"the {count} tokens are not those of the {len(log_probs)} log-probs": [*token_ids]
        != [token for token, _ in log_probs],
        f"ids {bad_ids[:3]} outside the vocabulary of {vocab_size}": bad_ids,
        f"log-probs {bad_log_probs[:3]}; they must be finite, at least {LOWEST_LOG_PROB:g}, at most 0": (
            bad_log_probs
        ),
        f"{count} tokens, yet finish reason 'length' for max_new_tokens={limit}": (
            finish_reason == "length" and count < limit and not at_end
        ),
        "finish reason 'stop', but the request has no stop token": finish_reason == "stop" and not stops,
        f"{len(scores)} of the prompt's {len(request.prompt_ids)} tokens are scored": (
            scores and len(scores) != len(request.prompt_ids)
        ),
    }
    who = f"{where}, request {request.request_id!r}"
    for rule, broken in rules.items():
        if broken:
            raise ReplyError(f"{who}: {rule}")
    return Completion(
        request_id=request.request_id,
        token_ids=np.asarray(token_ids, np.int64),
        log_probs=np.asarray(values, np.float32),
        weight_versions=expand_spans(spans, count, where=who),
        finish_reason=finish_reason,
        prompt_log_probs=np.asarray(scores, np.float32) if scores else None,
    )


def make_empty_completion(request: GenerateRequest) -> Completion:
    """The answer to a request that was aborted before anything of it could be kept."""
    return make_completion(request, (), (), (), "abort", vocab_size=0, where="aborted")


def expand_spans(spans: Iterable[VersionSpan], count: int, *, where: str) -> IntArray:
    """[count] the version of each token. Raises ReplyError unless the spans follow each other from 0 to
    `count`, versions never falling.
    """
    versions: list[int] = []
    for span in spans:
        version = parse_version(span.version)
        if span.start != len(versions) or not span.start <= span.end <= count or versions[-1:] > [version]:
            raise ReplyError(
                f"{where}: the span {span} does not follow {len(versions)} of {count} tokens of versions"
                f" {sorted(set(versions))}"
            )
        versions += [version] * (span.end - span.start)
    if len(versions) != count:
        raise ReplyError(f"{where}: version spans cover {len(versions)} of {count} tokens")
    return np.asarray(versions, np.int64)


def parse_version(name: str) -> int:
    """The version that a server's name for it means: a decimal number as we write it; anything else,
    "default" above all, are weights we never sent.
    """
    return int(name) if _VERSION.fullmatch(name) else UNKNOWN_VERSION


def show(body: bytes) -> str:
    """The beginning of a body, for an error message."""
    text = body[:SHOWN_BYTES].decode(errors="replace")
    return repr(text) + (f"... ({len(body)} bytes)" if len(body) > SHOWN_BYTES else "")
