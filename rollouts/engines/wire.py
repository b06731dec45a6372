"""What every server's answer must be before it becomes a Completion: decoded into typed records, never
repaired. The records of a server are with its engine; fields that they do not name are ignored.

Calls to a server: what a status means, how long an answer is awaited, and what its settings may not be.

What lies in a directory of safetensors, read without torch: enough to refuse it before a server is told to
load it. A server that fails in the middle of a load has its weights in pieces, and dies at the next request.

The LoRA adapters that requests to a server, or to a fleet of them, may name.
"""

import math
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import trio

from rollouts.engines.http import HttpClient
from rollouts.errors import (
    EngineError,
    EngineOverloaded,
    EngineSetupError,
    EngineSilent,
    InfrastructureError,
    ModelError,
    ReplyError,
    RequestRefused,
)
from rollouts.models.directories import list_tensors
from rollouts.models.limits import check_unused
from rollouts.processes.nurseries import run_all
from rollouts.types import Completion, FinishReason, GenerateRequest, IntArray, T, TokenScores, live

# at each place log-probs, None for −infinity, with their tokens and maybe more
Places = Iterable[Iterable[tuple[Any, ...]] | None]
SHOWN_BYTES = 600  # of an answer, in an error message
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


def decode_reply(body: bytes, kind: type[T], *, where: str, field: str = "") -> T:
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
    top: Places = (),
    prompt_top: Places = (),
) -> Completion:
    """The completion that an answer amounts to. Raises ReplyError naming the rule that it breaks.

    `log_probs`: with the ids that they are of. `ends_at`: tokens of prompt and answer at which the server
    ends an answer before its limit; None: it never does. `top`, `prompt_top`: what is listed of each token of
    the answer, and of the prompt's but its first.
    """
    sampling = request.sampling
    count, limit, stops = len(token_ids), sampling.max_new_tokens, sampling.stop_token_ids
    most = request.prompt_top * (finish_reason != "abort")
    at_end = ends_at is not None and len(request.prompt_ids) + count >= ends_at
    values, scores = [value for _, value in log_probs], list[float]()
    if request.score_prompt and finish_reason != "abort":
        scores = [0.0, *(math.nan if value is None else value for value in prompt_log_probs[1:])]
    bad_ids = [token for token in token_ids if not 0 <= token < vocab_size]
    bad = [value for value in (*values, *scores) if not LOWEST_LOG_PROB <= value <= HIGHEST_LOG_PROB]
    rules = {
        f"{count} tokens, more than max_new_tokens={limit}": count > limit,
        f"no token, yet finish reason {finish_reason!r}": not count and finish_reason != "abort",
        f"the {count} tokens are not those of the {len(log_probs)} log-probs": [*token_ids]
        != [token for token, _ in log_probs],
        f"ids {bad_ids[:3]} outside the vocabulary of {vocab_size}": bad_ids,
        f"log-probs {bad[:3]}; they must be finite, at least {LOWEST_LOG_PROB:g}, at most 0": bad,
        f"{count} tokens, yet finish reason 'length' for max_new_tokens={limit}": (
            finish_reason == "length" and count < limit and not at_end
        ),
        "finish reason 'stop', but the request has no stop token and no stop text": (
            finish_reason == "stop" and not stops and not sampling.stop_texts
        ),
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
        top_log_probs=rank_tokens(top, request.top_log_probs, count, where=who),
        prompt_top=rank_tokens(prompt_top, most, len(request.prompt_ids) - 1, where=who),
    )


def rank_tokens(places: Places, most: int, count: int, *, where: str) -> TokenScores | None:
    """The `most` likeliest of the tokens that are listed at each of `count` places; None where none are asked
    for. Raises ReplyError where there are too few.
    """
    if not most:
        return None
    listed = [[(-math.inf if one is None else one, token) for one, token, *_ in at or ()] for at in places]
    try:
        ranked = np.array([sorted(at, reverse=True)[:most] for at in listed], float)
        values, ids = ranked.reshape(count, most, 2).transpose(2, 0, 1)
    except ValueError as error:
        raise ReplyError(f"{where}: there are no {most} tokens at each of {count} places") from error
    values = np.where(values < LOWEST_LOG_PROB, -math.inf, values)
    return TokenScores(ids.astype(np.int64), values.astype(np.float32))


def make_empty_completion(request: GenerateRequest) -> Completion:
    """The answer to a request that was aborted before anything of it could be kept."""
    return make_completion(request, (), (), (), "abort", vocab_size=0, where="aborted")


def expand_spans(spans: Iterable[VersionSpan], count: int, *, where: str) -> IntArray:
    """[count] the version of each token. Raises ReplyError unless the spans follow each other from 0 to
    `count`, versions never falling.
    """
    versions = []
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


# --- calls --------------------------------------------------------------------------------------------------


START_S = 600.0  # for a server to be ready, and for its first answer, for which it may have to compile
REPEAT_S = 1.0  # before a control call is sent for the third time
HEALTH_S = 10.0  # for the answer to whether a server is well; less where silence_s is


@live
class Server:
    """Calls to one server."""

    client: HttpClient
    name: str
    silence_s: float  # seconds without a byte, and without progress, after which an answer is given up
    health_path: str
    cold: bool = True  # it has generated nothing since it was opened or came back: all may take START_S

    async def call(
        self, method: str, path: str, body: Any = None, *, silence_s: float | None = None
    ) -> bytes:
        """The body of a 2xx answer. `body` is sent as JSON. Raises what `check_status` raises,
        EngineUnreachable, EngineSilent, ReplyError.
        """
        sent = None if body is None else msgspec.json.encode(body)
        silence_s = silence_s or max(self.silence_s, self.cold * START_S)
        reply = await self.client.request(method, path, body=sent, silence_s=silence_s)
        check_status(reply, where=f"{self.name}: {method} {path}")
        return reply.content

    async def read(self, path: str, kind: type[T], field: str = "") -> T:
        """The record in the answer to GET `path`, or in one field of it. Like every call that only reads, it
        is repeated as `control` says. Raises as call, and ReplyError.
        """
        answer = await _repeat(lambda: self.call("GET", path))
        return decode_reply(answer, kind, field=field, where=f"{self.name}: GET {path}")

    async def control(
        self, path: str, body: Any = None, kind: Any = None, field: str = "", *, repeats: bool = False
    ) -> Any:
        """What `read` returns, of a POST that may take long, awaited for as long as the server is well; None
        without a `kind`. A refusal is EngineError: a control call carries no request at fault.

        repeats: the call is sent again at once, and a third time REPEAT_S later, when the server or the way
        to it fails (5xx, 408, 429, a broken connection, a cut answer): a single 503 of a proxy must not take
        the only server out of service. It is for calls that leave the server the same however often they
        arrive, since one that gave 500 may have been carried out: pausing and resuming, naming the weights,
        resetting a cache, aborting given requests, a checksum. It is not for calls in which the trainer
        takes part (transfers of weights in memory), that count (sleep, wake up), or that take minutes
        (loading: what failed it would fail it again, and the next update repeats it). After a silence
        nothing is repeated.
        """
        where = f"{self.name}: POST {path}"

        async def ask() -> bytes:
            return await ask_watched(
                lambda: self.call("POST", path, body, silence_s=math.inf),
                self.health,
                silence_s=self.silence_s,
                where=where,
            )

        try:
            reply = await (_repeat(ask) if repeats else ask())
        except RequestRefused as error:
            raise EngineError(str(error)) from error
        return None if kind is None else decode_reply(reply, kind, field=field, where=where)

    async def health(self) -> bool:
        """Whether the health path gives 2xx within HEALTH_S."""
        with suppress(EngineError):
            await self.call("GET", self.health_path, silence_s=min(self.silence_s, HEALTH_S))
            return True
        return False


async def _repeat(ask: Callable[[], Awaitable[T]]) -> T:
    """What `ask()` returns, asked up to three times. Raises what the last one raises, and EngineSilent and
    what is no InfrastructureError at once.
    """
    for wait_s in (0.0, REPEAT_S):
        try:
            return await ask()
        except EngineSilent:
            raise
        except InfrastructureError:
            await trio.sleep(wait_s)
    return await ask()


async def ask_watched(
    ask: Callable[[], Awaitable[T]],
    works: Callable[[], Awaitable[bool]],
    *,
    silence_s: float,
    where: str,
    way_out: str = "",
) -> T:
    """What `ask()` returns. Every `silence_s` a task beside it asks whether the server `works()`; if not,
    `ask()` is cancelled. Raises what both raise, and EngineSilent.
    """
    answers = []

    async def wait_answer() -> None:
        answers.append(await ask())
        answered.cancel()

    async def watch() -> None:
        while True:
            await trio.sleep(silence_s)
            if not await works():
                raise EngineSilent(f"{where}: no answer and no progress for {silence_s:g} s{way_out}")

    with trio.CancelScope() as answered:
        await run_all(wait_answer, watch)
    return answers[0]


def check_status(reply: httpx.Response, *, where: str) -> None:
    """Raises unless the status is 2xx: EngineOverloaded for 429 and 503, InfrastructureError for 5xx and 408,
    RequestRefused for other 4xx.

    401, 403, 404 and redirects are EngineError: they are about the server's address, key and version, and no
    other request will fare better.
    """
    if reply.is_success:
        return
    status, text = reply.status_code, f"{where} gave {reply.status_code}: {show(reply.content)}"
    if status in (429, 503):
        value = reply.headers.get("retry-after", "").strip()  # seconds; dates are ignored
        seconds = float(value) if value.isascii() and value.isdecimal() else None
        raise EngineOverloaded(text, retry_after_s=seconds)
    if status >= 500 or status == 408:  # it waited for the request in vain; a proxy says so for its server
        raise InfrastructureError(text)
    if status in (401, 403, 404) or status < 400:
        raise EngineError(text)
    raise RequestRefused(text)


@contextmanager
def setup_errors(way_out: str) -> Iterator[None]:
    """A refusal or a reply of another kind inside becomes EngineSetupError with the way out; a server that is
    gone or busy stays what it is.
    """
    try:
        yield
    except EngineError as error:
        if isinstance(error, EngineSetupError | InfrastructureError) and not isinstance(error, ReplyError):
            raise
        raise EngineSetupError(f"{error}; {way_out}") from error


def refuse_settings(name: str, rules: Mapping[str, object]) -> None:
    """Raises EngineSetupError with the first sentence about a server whose value is true."""
    for sentence in list_true(rules):
        raise EngineSetupError(f"{name} {sentence}")


def list_true(sentences: Mapping[str, object]) -> tuple[str, ...]:
    """The sentences whose values are true."""
    return tuple(sentence for sentence, is_true in sentences.items() if is_true)


# --- what a directory holds ---------------------------------------------------------------------------------


TensorShapes = Mapping[str, tuple[int, ...]]


def read_tensor_shapes(path: Path) -> TensorShapes:
    """Name → shape of every tensor in a model directory. Raises ModelError as list_tensors."""
    return {tensor.name: tensor.shape for tensor in list_tensors(path)}


async def find_tensor_shapes(path: str) -> TensorShapes | None:
    """Those of the model that a server was started with; None if it lies on another machine or in another
    format.
    """
    with suppress(ModelError):
        return await trio.to_thread.run_sync(read_tensor_shapes, Path(path))
    return None


def check_same_model(shapes: TensorShapes, expected: TensorShapes, *, path: Path) -> None:
    """Raises ModelError unless `shapes` are those of the model `expected`. A tied output layer may be
    missing, and so may rotary frequencies, which old checkpoints carry and nobody loads.
    """
    for name, _ in sorted(shapes.items() ^ expected.items()):
        here, there = shapes.get(name), expected.get(name)
        may_lack = name == "lm_head.weight" or name.endswith(".inv_freq")
        if not (may_lack and None in (here, there)):
            raise ModelError(
                f"{path}: the tensor {name} has the shape {here}; the model that the server was started with"
                f" has {there} (None: it is not there)"
            )


# --- adapters by name ---------------------------------------------------------------------------------------


ADAPTER_PREFIX = "rollouts-v"  # of the names of adapters that we load


def make_adapter_name(version: object) -> str:
    """A name that the server has never heard."""
    return f"{ADAPTER_PREFIX}{version}-{uuid.uuid4().hex}"


@live
class NamedAdapters:
    """Directories of PEFT by name. They come and go one after the other."""

    paths: dict[str, Path] = field(default_factory=dict)
    changing: trio.Lock = field(default_factory=trio.Lock)

    @asynccontextmanager
    async def adding(self, name: str, path: Path) -> AsyncIterator[None]:
        """It may be named, unless the block raises. Raises EngineError for a name that is taken, or empty."""
        async with self.changing:
            if not name or name in self.paths:
                raise EngineError(f"add_adapter({name!r}): the name must be new, and not empty")
            self.paths[name] = path.absolute()
            try:
                yield
            except BaseException:
                del self.paths[name]
                raise

    @asynccontextmanager
    async def removing(self, name: str, requests: Iterable[GenerateRequest]) -> AsyncIterator[None]:
        """It may not be named any more. Raises EngineError as check_unused, of the requests in flight."""
        async with self.changing:
            check_unused(name, self.paths, requests)
            del self.paths[name]
            yield
