"""An OpenAI endpoint in front of the engines, at which programs that know nothing of training are trained.

    program ──► request ──► join ──► prompt ──► engine ──► answer ──► the client has it: it trains
                             ├─ after an answer of ours: the ids that are held, extended; from a second
                             │  request that goes on from there, a branch
                             └─ else: another segment, whose history is context

A trajectory has a URL and a key of its own. Its requests join by the longest conversation that ends with an
answer which was sampled here, told by what the client was told: role, content, calls. An assistant turn that
was not sampled here, or was edited, is context.

An answer trains if the client received it in full (all of them for n > 1), or went on from it. One that the
SDK asks for again is sampled once; one that nobody waited for, or whose stream was left, does not train.

A program is a command, or a function in a process of its own. Its environment is the trainer's without what
looks like a secret, and OPENAI_BASE_URL, OPENAI_API_KEY; ROLLOUTS_ROW, a file with the dataset row as JSON,
its prompt among it; ROLLOUTS_REWARD_URL, to which it may post {"reward": number}, or named parts, with its
key: of its newest turn. It ends its trajectory by its end, and is killed, with all that it started, where
something else ends it. A trajectory that a stop cuts begins anew.
"""

import hashlib
import itertools
import json
import math
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from tempfile import NamedTemporaryFile
from typing import Annotated, Any, Literal

import msgspec
import trio

from rollouts.config.rollout import RolloutConfig
from rollouts.environments.episode import End, Episode, MakeFormat, make_agent_generate
from rollouts.environments.protocol import Tool
from rollouts.environments.trajectories import ChatFormat, Node, TurnRecord
from rollouts.environments.turns import add_reward
from rollouts.errors import (
    ConfigError,
    DataError,
    EngineOverloaded,
    EnvironmentFailed,
    ModelError,
    RequestRefused,
    UserFunctionError,
)
from rollouts.generation.continuing import note_progress
from rollouts.messages import checked_messages, parse_tool_arguments
from rollouts.processes.nurseries import open_plain_nursery, run_all
from rollouts.processes.process import open_process
from rollouts.protocols import GenerateFn
from rollouts.rewards.check import check_reward, import_extra
from rollouts.rewards.workers import make_environment
from rollouts.types import ChatMessage, Fields, Function, Texts, encode_json, live

BODY_BYTES = 64 << 20  # of a request
KEEP_ALIVE_S = 3.0  # between comments in a stream that waits; httpx gives up after 5 unless told otherwise
RETRY_S = 10.0  # that an answer is waited for whose client has gone and may ask again; the SDK waits up to 8
PROGRAMS = 64  # at once; further trajectories wait for one to end
TAIL_CHARS = 1000  # of what a program printed, in a message
FUNCTION = re.compile(r"(.+\.py|[\w.]+):[\w.]+")
OUR_CALL = re.compile(r"c\d{8}")  # ids that ChatFormat gives
# what fields may say that are not honoured; null: anything, for they change nothing of what is sampled
ONLY = json.loads("""{
    "frequency_penalty": 0, "logit_bias": {}, "modalities": ["text"],
    "parallel_tool_calls": true, "presence_penalty": 0, "response_format": {"type": "text"},
    "top_logprobs": 0, "metadata": null, "prompt_cache_key": null, "prompt_cache_retention": null,
    "safety_identifier": null, "service_tier": null, "user": null
}""")
MODELS = '{"object": "list", "data": [{"id": "policy", "object": "model", "created": 0, "owned_by": "run"}]}'
StopText = Annotated[str, msgspec.Meta(min_length=1)]


# --- what is asked, and what is told ------------------------------------------------------------------------


class ApiError(Exception):
    """What a client is told instead of an answer: status, message, and where they help param and code."""

    def __str__(self) -> str:
        message, param, code = (*self.args[1:], None, None)[:3]
        error = {"message": message, "type": "invalid_request_error", "param": param, "code": code}
        return encode_json({"error": error})


class ChatRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A request, checked."""

    model: str  # any name: there is one model
    messages: list[Any]
    temperature: float = 1.0
    top_p: float = 1.0
    tools: list[Fields] = []
    tool_choice: Literal["auto", "none"] = "auto"  # none: what the model says is text
    n: Annotated[int, msgspec.Meta(ge=1, le=16)] = 1
    stop: StopText | list[StopText] = []
    seed: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    store: bool = True  # whether the messages may be kept, where they are
    stream: bool = False
    stream_options: Fields = {}


def parse_request(body: bytes, fixed: Fields) -> ChatRequest:
    """The request in a body; `fixed`: fields that can have no other value. Raises ApiError naming the field
    that is unknown, wrong or cannot be honoured.
    """
    try:
        fields = msgspec.json.decode(body, type=Fields).items()
        given = {name: value for name, value in fields if value is not None}
        for name, only in {**ONLY, **fixed}.items():
            if (value := given.pop(name, only)) != only is not None:
                text = "cannot be honoured: answers that train are sampled as the run says; leave it out"
                raise ApiError(400, f"{name}={value!r} {text}", name)
        request = msgspec.convert({**fixed, **given}, ChatRequest)
        request.messages = checked_messages(request.messages, "messages")
    except (ValueError, RecursionError) as error:
        raise ApiError(400, str(error)) from error
    for message in request.messages:
        if message["role"] == "developer":
            message["role"] = "system"
    return request


def extend_key(key: str, message: ChatMessage) -> str:
    """The key of a conversation that goes on with a message.

    Calls are known by their ids where these are ours, so that a client may write their arguments otherwise.
    Thinking does not count: most clients do not send it back.
    """
    calls = [
        call["id"] if OUR_CALL.fullmatch(str(call.get("id"))) else call["function"]
        for call in message.get("tool_calls", ())
    ]
    said = [key, message["role"], message["content"], calls, message.get("tool_call_id")]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


# --- a trajectory -------------------------------------------------------------------------------------------


class Asked:
    """A request under way, or answered."""

    def __init__(self, request: ChatRequest) -> None:
        self.request = request
        self.scope, self.done = trio.CancelScope(), trio.Event()
        self.turns: list[TurnRecord] = []  # its answers, until the client has them
        self.whole: Fields = {}  # what is told
        self.error = ApiError(409, "the trajectory ended, or nobody waited for the answer")  # told without it


@live
class OpenTrajectory:
    """A trajectory that a program plays through the endpoint."""

    episode: Episode  # its turns are the answers that the client has
    make_format: MakeFormat
    nursery: trio.Nursery  # of its requests, and of the program
    begun: int = 0  # turns asked for, of which a limit may have refused some
    end: End = "done"  # what the newest request has come to
    limited: bool = False  # whether a limit refused it
    failure: Exception | None = None  # ends the program
    # where answers serve, and do not train: is awaited with each, an Asked, before it is told
    keep: Function | None = None

    def __post_init__(self) -> None:
        self.context = copy_context()  # of the generate function: what its engine and its record read
        self.key = secrets.token_urlsafe()
        self.asked: dict[bytes, Asked] = {}  # by the body
        self.answers: dict[str, tuple[Node, Asked]] = {}  # by the key of the conversation that they end

    def ask(self, body: bytes, *, again: bool) -> Asked:
        """The request in a body, begun; or the one that the SDK asks `again`. Raises ApiError."""
        asked = self.asked.get(body) if again else None
        if asked is None or (asked.done.is_set() and not asked.whole):
            run = {"temperature": self.episode.sampling.temperature, "top_p": 1}
            asked = Asked(parse_request(body, {} if self.keep else run))
            self.asked[body] = asked
            self.context.run(self.nursery.start_soon, self.work, asked)
        asked.scope.deadline = math.inf
        return asked

    async def work(self, asked: Asked) -> None:
        """Answers a request. What is not the client's fault ends the program."""
        try:
            with asked.scope:
                await self.answer(asked)
                if self.keep:
                    await self.keep(asked)
        except ApiError as error:
            asked.error = error
        except (DataError, EngineOverloaded, LookupError, RequestRefused) as error:
            asked.error = ApiError(429 if isinstance(error, EngineOverloaded) else 400, str(error))
        except Exception as error:
            asked.error = ApiError(400 if isinstance(error, ModelError) else 500, repr(error))
            if not self.keep:
                self.failure = error
                self.nursery.cancel_scope.cancel()
        finally:
            asked.done.set()

    async def answer(self, asked: Asked) -> None:
        request, episode = asked.request, self.episode
        usual = replace(episode.sampling, temperature=request.temperature, top_p=request.top_p)
        form = self.make_format([Tool._make(("", schema, None)) for schema in request.tools])
        if request.tool_choice == "none":
            form = replace(form, read_turn=None)
        keys = [*itertools.accumulate(request.messages, extend_key, initial=json.dumps(form.tools))]
        prompt = self.join(form, request.messages, keys)
        stops = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)
        first, self.begun = self.begun, self.begun + request.n
        if self.begun > episode.config.max_turns and not self.keep:
            self.end, self.limited = "turns", True
            raise ApiError(400, "the turns of rl.rollout.max_turns are used up")
        own = request.max_completion_tokens or request.max_tokens
        most = min(own or usual.max_new_tokens, usual.max_new_tokens)
        sampling, tokenizer = replace(usual, max_new_tokens=most, stop_texts=stops), form.template.tokenizer

        async def sample(index: int) -> Fields:
            draw = "" if request.seed is None else f"{request.seed}/{index}"
            completion = await replace(episode, node=prompt, sampling=sampling).ask(first + index, draw)
            if completion is None:
                self.end, self.limited = "tokens", True
                raise ApiError(400, "the messages leave no room", "messages", "context_length_exceeded")
            node, turn = form.read(prompt, completion)
            said = turn.message  # as the node has it
            for place, call in enumerate(calls := said.get("tool_calls", ())):
                arguments = parse_tool_arguments(call["function"]["arguments"])
                call |= {"index": place, "function": {**call["function"], "arguments": json.dumps(arguments)}}
            for stop in stops:
                said["content"] = said["content"].partition(stop)[0]
            self.end = "done" if node.ended or len(node.token_ids) == own else "tokens"
            self.limited = False
            self.answers[extend_key(keys[-1], said)] = node, asked
            asked.turns.append(TurnRecord(node, turn.text))
            finish = "tool_calls" if calls else "stop" if node.ended else "length"
            choice = {"index": index, "delta" if request.stream else "message": said, "finish_reason": finish}
            if request.logprobs:
                pairs = zip(node.token_ids, completion.log_probs.tolist(), strict=True)
                choice["logprobs"] = {
                    "content": [
                        {"token": tokenizer.decode([token_id]), "logprob": log_prob, "top_logprobs": []}
                        for token_id, log_prob in pairs
                    ]
                }
            return choice

        choices = await run_all(*(partial(sample, index) for index in range(request.n)))
        used, sampled = len(prompt.tokens), sum(len(turn.answer.token_ids) for turn in asked.turns)
        asked.whole = {
            "id": f"chatcmpl-{episode.sample.id}-{self.begun}",
            "object": "chat.completion.chunk" if request.stream else "chat.completion",
            "created": 0,
            "model": request.model,
            "choices": choices,
            "usage": {"prompt_tokens": used, "completion_tokens": sampled, "total_tokens": used + sampled},
        }

    def join(self, form: ChatFormat, messages: Sequence[ChatMessage], keys: Sequence[str]) -> Node:
        """The prompt that the messages come to; keys[i] is that of the first i of them."""
        for count in range(len(messages), 0, -1):
            if keys[count] in self.answers:
                answer, asked = self.answers[keys[count]]
                rest = messages[count:]
                self.receive(asked)
                if all(message["role"] != "assistant" for message in rest):
                    return form.extend(answer, rest)
                return form.begin([*answer.messages, *rest])
        return form.begin(messages)

    def receive(self, asked: Asked) -> None:
        """The client has the answers."""
        self.episode.turns += asked.turns
        asked.turns = []

    def reward(self, body: bytearray) -> None:
        """Adds what the program gives to the newest turn. Raises ApiError."""
        try:
            result = check_reward(msgspec.json.decode(body)["reward"], "reward: the program")
            add_reward(self.episode.turns, result)
        except (ValueError, LookupError, TypeError, UserFunctionError) as error:
            raise ApiError(400, f"{error!r}; post {{'reward': number}} after an answer", "reward") from error


# --- the server ---------------------------------------------------------------------------------------------


class Proxy:
    """The endpoint, an ASGI application. Made by open_proxy."""

    url = ""

    def __init__(self) -> None:
        # by number, "" where there is one alone; None: it has ended; an Event: it will be there
        self.trajectories: dict[str, OpenTrajectory | trio.Event | None] = {}

    async def __call__(self, scope: Fields, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"  # hypercorn goes on without lifespan events
        headers, body, begun = dict(scope["headers"]), bytearray(), False

        async def put(text: str, status: int = 200, *, more: bool = False) -> None:
            nonlocal begun
            if not begun:
                begun = True
                kind = b"application/json" if text.startswith("{") else b"text/event-stream"
                lines = [(b"content-type", kind), (b"retry-after", b"1")]
                await send({"type": "http.response.start", "status": status, "headers": lines})
            await send({"type": "http.response.body", "body": text.encode(), "more_body": more})

        try:
            number, _, path = scope["path"].removeprefix("/e/").partition("/")
            while (event := await receive())["type"] == "http.request":
                body += event["body"]
                if len(body) > BODY_BYTES:
                    raise ApiError(413, f"the request has more than {BODY_BYTES} bytes")
                if not event["more_body"]:
                    break
            while isinstance(trajectory := self.trajectories.get(number), trio.Event):
                await trajectory.wait()
            if trajectory is None:
                status = 409 if number in self.trajectories else 404
                raise ApiError(status, f"trajectory {number} is not open")
            key = f"Bearer {trajectory.key}".encode()
            if not trajectory.key and b"origin" in headers:  # prompts train
                raise ApiError(403, "a web page may not ask without a key: set ROLLOUTS_API_KEY")
            if trajectory.key and not secrets.compare_digest(headers.get(b"authorization", b""), key):
                raise ApiError(401, "the API key is not this trajectory's")
            route = f"{scope['method']} {path}"
            if route == "POST v1/chat/completions":
                retry = headers.get(b"x-stainless-retry-count", b"")
                asked = trajectory.ask(bytes(body), again=retry > b"0")
                await reply(trajectory, asked, RETRY_S if retry else 0.0, receive, put)
            elif route == "POST reward":
                trajectory.reward(body)
                await put("{}")
            elif route in ("GET v1/models", "GET health"):
                await put(MODELS)
            else:
                raise ApiError(404, f"there is no {route}")
        except ApiError as error:
            await put(f"data: {error}\n\n" if begun else str(error), error.args[0])


async def reply(trajectory: OpenTrajectory, asked: Asked, grace_s: float, receive: Any, put: Any) -> None:
    """Tells the answer, which the client has from then on. Raises ApiError.

    If the client goes and does not ask again within grace_s, the engine is told to stop; at once where a
    stream has begun, which no client asks for again.
    """
    stream, last = asked.request.stream, ""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        nursery.cancel_scope.cancel()

    async with open_plain_nursery() as nursery:
        nursery.start_soon(watch)
        while stream and not asked.done.is_set():
            with trio.move_on_after(KEEP_ALIVE_S):
                await asked.done.wait()
                break
            grace_s = 0.0
            await put(": keep-alive\n\n", more=True)
        await asked.done.wait()
        if not asked.whole:
            raise asked.error
        chunks = [
            asked.whole | {"choices": [one | part for one in asked.whole["choices"]], "usage": None}
            for part in ({"finish_reason": None}, {"delta": {}, "logprobs": None})
        ]
        if asked.request.stream_options.get("include_usage"):
            chunks.append(asked.whole | {"choices": []})
        for chunk in chunks if stream else ():
            await put(f"data: {encode_json(chunk)}\n\n", more=True)
        last = "data: [DONE]\n\n" if stream else encode_json(asked.whole)
    if last:
        trajectory.receive(asked)  # before a program that needs no more than this has ended
        await put(last)  # outside: hypercorn says that the client has gone when it has all
    else:
        asked.scope.deadline = trio.current_time() + grace_s


@asynccontextmanager
async def open_http(app: Any, bind: str, until: Any = None) -> AsyncIterator[str]:
    """The URL at which an application answers, until the block ends; or until the async function `until`
    returns and what is in flight then has ended, or 3 s later, which the end of the block waits for.
    """
    from hypercorn.config import Config
    from hypercorn.trio import serve

    # that long hypercorn also holds a connection that its client has closed; clients keep theirs for seconds
    config = Config.from_mapping(bind=bind, errorlog=None, keep_alive_timeout=60, backlog=4096)
    async with trio.open_nursery() if until else open_plain_nursery() as nursery:
        (url,) = await nursery.start(partial(serve, app, config, mode="asgi", shutdown_trigger=until))
        yield url


@asynccontextmanager
async def open_proxy() -> AsyncIterator[Proxy]:
    """An endpoint on a free port of the loopback."""
    proxy = Proxy()
    async with open_http(proxy, "127.0.0.1:0") as proxy.url:
        yield proxy


# --- programs -----------------------------------------------------------------------------------------------


def make_command(agent: str) -> list[str]:
    """The words of a program's process. Raises ValueError for an open quotation."""
    child = [sys.executable, "-m", "rollouts.environments.agent_child", agent]
    return child if FUNCTION.fullmatch(agent) else shlex.split(agent)


def check_agent(agent: str) -> None:
    """Raises ConfigError for a function that a process of its own cannot load, a command that there is not,
    and if the endpoint's server is not installed.
    """
    import_extra("hypercorn", f"the endpoint of rl.rollout.agent={agent!r}", "agents")
    try:
        problem, words = "", make_command(agent)
    except ValueError as error:
        raise ConfigError(f"rl.rollout.agent={agent!r}: {error}") from error
    if not shutil.which(words[0]):
        problem = f"there is no program {words[0]}"
    elif FUNCTION.fullmatch(agent):
        loaded = subprocess.run(words, capture_output=True, text=True, check=False)
        problem = loaded.returncode and loaded.stderr[-TAIL_CHARS:-1]
    if problem:
        raise ConfigError(f"rl.rollout.agent={agent!r}: {problem}")


async def run_program(words: Sequence[str], environment: Texts) -> str:
    """Waits for a program's end; what was wrong with it, or nothing."""
    opening = open_process(words, env=environment, output_bytes=sys.maxsize)
    async with opening as process, open_plain_nursery() as reading:
        reading.start_soon(process.wait_printed_too_much)  # which never is
        if await process.wait_ended() == 0:
            return ""
        process.read_output()
        return f"{process.describe_end()}; the last it printed: {process.read_tail()[-TAIL_CHARS:]!r}"


def make_proxy_generate(proxy: Proxy, make_format: MakeFormat, config: RolloutConfig) -> GenerateFn:
    """A generate function that runs config.agent once for a trajectory, at the endpoint.

    Raises EnvironmentFailed if the program ends with another exit code than 0 before a limit has ended the
    trajectory; and like make_agent_generate.
    """
    places = trio.CapacityLimiter(PROGRAMS)

    async def play(episode: Episode) -> End:
        note_progress(episode.hold())
        number, problem = str(len(proxy.trajectories)), ""
        with NamedTemporaryFile("w", suffix=".json") as file:
            row = {**episode.sample.metadata, "prompt": episode.sample.prompt}
            print(json.dumps(row), file=file, flush=True)
            try:
                async with open_plain_nursery() as nursery:
                    trajectory = proxy.trajectories[number] = OpenTrajectory(episode, make_format, nursery)
                    environment = {
                        **make_environment(),
                        "OPENAI_API_KEY": trajectory.key,
                        "OPENAI_BASE_URL": f"{proxy.url}/e/{number}/v1",
                        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),  # a command's Python may be another
                        "ROLLOUTS_REWARD_URL": f"{proxy.url}/e/{number}/reward",
                        "ROLLOUTS_ROW": file.name,
                        "no_proxy": "127.0.0.1",
                    }
                    problem = await run_program(make_command(config.agent), environment)
            finally:
                proxy.trajectories[number] = None
                for turn in episode.turns:
                    episode.node = turn.answer
        if trajectory.failure:
            raise trajectory.failure
        if not trajectory.limited and (problem or not episode.turns):
            why = problem or "had no answer of the model"
            raise EnvironmentFailed(f"the agent {config.agent!r} of sample {episode.sample.id} {why}")
        return trajectory.end

    return make_agent_generate(make_format, config, open_world=lambda row: places, play=play)
