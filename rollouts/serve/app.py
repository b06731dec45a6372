"""The service as an ASGI application: keys, limits, and Tinker's routes under /api/v1.

    request ─► key ─► body within its limit ─► route ─► typed body ─► an answer, or the id of a request

Every answer has a Content-Length: the SDK takes a 4xx without one for a proxy's and tries again.
"""

import hashlib
import json
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from inspect import isawaitable
from typing import Any

import msgspec
import trio
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from rollouts.config.tables import OptimConfig
from rollouts.errors import MessageRefused, ServiceRefused
from rollouts.reference.server import REALM
from rollouts.rewards.check import describe
from rollouts.serve import bodies
from rollouts.serve.bodies import read_body
from rollouts.serve.models import start_model
from rollouts.serve.sampling import run_sample
from rollouts.serve.service import Service
from rollouts.serve.store import FAILED, JSON, Row
from rollouts.serve.wire import parse_envelope
from rollouts.types import Fields, Function, Texts

KEYLESS = "/files/"  # below it, addresses have a signature instead
# seconds after which a failure of training is told: what was sent behind it, unknowing, has come by then
TELL_S = 0.5
ALPHA = 32.0  # of every adapter, as in Tinker
ATTENTION = re.compile("attn|attention")  # in names of layers that train_attn means; train_mlp: the others
POLL_S = 25.0  # that a poll is held; the SDK gives up after 45
CLIENT_CONFIG = {
    # one chunk of a forward_backward after the other, and all in protobuf: what newer SDKs do by themselves
    "parallel_fwdbwd_chunks": False,
    "proto_write_fwdbwd": True,
    "fwd_via_fwdbwd": True,
    "create_model_via_load_weights": True,
    "sample_cancel_enabled": True,
}
QUEUED = ("optim_step", "save_weights", "save_weights_external", "save_weights_for_sampler")


@dataclass(frozen=True)
class Call:
    """A request of HTTP whose key is good."""

    service: Service
    owner: str
    request: Request
    body: bytes

    def read(self, kind: type[bodies.T]) -> bodies.T:
        """The body, as JSON of that kind. Raises ServiceRefused."""
        return read_body(self.body, kind)

    def find(self, table: str, name: str) -> Row:
        """A session, model, sampler or request of the user. Raises ServiceRefused with 404 for others."""
        return self.service.store.find(table, id=name, owner=self.owner)

    def find_live(self, session: str) -> Row:
        """The user's session that goes on. Raises ServiceRefused with 410 for one that has ended."""
        row = self.find("sessions", session)
        if row["ended"] is not None:
            raise ServiceRefused(f"session {session} has ended; begin another", 410)
        return row

    def submit(self, scope: str, seq: int | None, kind: str) -> tuple[str, bool]:
        """(the id of the request, whether it is new). It is on record when this returns. Raises
        ServiceRefused with 429 where too many of the scope wait.
        """
        store = self.service.store
        known = store.value("SELECT id FROM requests WHERE scope = ? AND seq = ?", scope, seq)
        if known is not None:
            return known, False
        waiting = store.value(
            "SELECT COUNT(*) FROM requests WHERE scope = ? AND state IN ('queued', 'running')", scope
        )
        if waiting >= self.service.config.queue_length:
            raise ServiceRefused(
                f"{waiting} requests of {scope} wait already; send more when some have ended", 429
            )
        name = secrets.token_hex(16)
        store.run(
            "INSERT INTO requests (id, owner, scope, seq, kind, body, state, submitted)"
            " VALUES (?, ?, ?, ?, ?, ?, 'queued', ?)",
            name, self.owner, scope, seq, kind, self.body, time.time(),
        )  # fmt: skip
        self.service.ended[name] = trio.Event()
        return name, True

    def queue(self, model: str, seq: int | None, kind: str) -> Fields:
        """The id of a request of a model, on record; seq None: it is done between others, when its turn
        comes. Raises ServiceRefused for a model that there is not, or that has ended. What else is wrong with
        it is said in its turn: the requests behind would wait for a number that was refused.
        """
        service = self.service
        service.see(self.find("models", model)["session"])
        live = service.models.get(model)
        if live is None:
            raise ServiceRefused(f"the session of {model} has ended", 410)
        name, new = self.submit(model, seq, kind)
        if new and seq is not None and seq < live.next_seq:
            late = ServiceRefused(f"seq_id={seq} comes after {live.next_seq - 1}, which is done")
            service.end_request(name, late)
        elif new:
            live.changed.unpark_all()
        return {"request_id": name, "model_id": model}

    def query(self, name: str, default: int) -> int:
        """A number of the query. Raises ServiceRefused."""
        try:
            return min(max(int(self.request.query_params.get(name, default)), 0), 2**62)
        except ValueError as error:
            raise ServiceRefused(f"{name} in the query must be a whole number: {error}") from error


Handler = Function
"""Takes the call and what its path names; gives an answer's fields, or a Response, at once or awaited."""


HEADERS = {429: {"retry-after": "1"}, 401: {"www-authenticate": REALM}}  # of refusals, by their status


def reply(fields: Any = None, status: int = 200) -> Response:
    """JSON, always with a body."""
    return Response(msgspec.json.encode(fields or {}), status, HEADERS.get(status), JSON)


def refuse(error: ServiceRefused) -> Response:
    """What a client is told instead of an answer."""
    said = {"detail": str(error), "error": str(error), "category": "user", "type": type(error).__name__}
    return reply(said, error.status)


# --- keys ---------------------------------------------------------------------------------------------------


def find_owner(owners: Mapping[bytes, str], request: Request) -> str:
    """The user whose key came with the request. Raises ServiceRefused with 401. Looking up the digest of a
    key takes a time that says nothing of the keys themselves.
    """
    headers = request.headers
    key = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")
    owner = owners.get(hashlib.sha256(key.encode()).digest())
    if owner is None:
        raise ServiceRefused("the API key is none of this server's; it belongs in the header x-api-key", 401)
    return owner


async def read_whole(request: Request, limit: int) -> bytes:
    """The body. Raises ServiceRefused with 413, and 415 for one that is compressed."""
    if request.headers.get("content-encoding", "identity") != "identity":
        raise ServiceRefused("content-encoding is not understood here; send the body as it is", 415)
    body = bytearray()
    async with aclosing(request.stream()) as parts:
        async for part in parts:
            body += part
            if len(body) > limit:
                raise ServiceRefused(f"the body has more than {limit} bytes; send it in parts", 413)
    return bytes(body)


# --- Tinker's routes ----------------------------------------------------------------------------------------


def create_session(call: Call) -> Fields:
    """Begins a session; sent again with the same tag, the same one."""
    call.read(dict)
    tag, store = call.request.headers.get("x-idempotency-key") or secrets.token_hex(16), call.service.store
    store.run(
        "INSERT OR IGNORE INTO sessions (id, owner, tag, created, seen) VALUES (?1, ?2, ?3, ?4, ?4)",
        secrets.token_hex(16), call.owner, tag, time.time(),
    )  # fmt: skip
    named = "SELECT id FROM sessions WHERE owner = ? AND tag = ?"
    return {"session_id": store.value(named, call.owner, tag)}


def beat(call: Call) -> None:
    """A heartbeat."""
    call.service.see(call.find_live(call.read(bodies.InSession).session_id)["id"])


def finish_session(call: Call, session: str) -> None:
    """Ends a session."""
    call.service.end_session(call.find("sessions", session)["id"])


def create_model(call: Call) -> Fields:
    """A new model: an adapter, or with rank 0 the whole model."""
    service, body, lora = call.service, call.read(bodies.CreateModel), None
    service.check_base(body.base_model)
    asked = body.lora_config or bodies.LoraConfig(32)
    if asked.rank:
        base: Any = service.base.trained  # an adapter
        chosen = asked.targets or [
            place
            for place in base.of.places
            if (asked.train_attn if ATTENTION.search(place) else asked.train_mlp)
        ]
        if not chosen:
            raise ServiceRefused(
                "lora_config asks for no layer that an adapter can have here; train_mlp, train_attn"
            )
        seed = secrets.randbits(31) if asked.seed is None else asked.seed
        options = {"alpha": asked.alpha or ALPHA, "dropout": asked.dropout}
        lora = {"rank": asked.rank, "targets": chosen, "seed": seed, **options}
    return begin_model(call, body, lambda: (lora, None))


def load_weights(call: Call) -> Fields:
    """A new model from a checkpoint, or other weights for a model that is there."""
    body = call.read(bodies.LoadWeights)
    if body.session_id is None:
        return call.queue(body.model_id, body.seq_id, "load_weights")

    def choose() -> tuple[Any, Any]:
        found = call.service.find_checkpoint(call.owner, body.path)
        if found["kind"] != "training":
            raise ServiceRefused(
                f"{body.path} is a {found['kind']} checkpoint; training goes on from weights/…"
            )
        source = {"folder": found["folder"], "seq": 0, "optimizer": body.optimizer}
        return json.loads(found["lora"]), source

    return begin_model(call, body, choose)


def begin_model(
    call: Call, body: bodies.CreateModel | bodies.LoadWeights, choose: Callable[[], tuple[Any, Any]]
) -> Fields:
    """A model, which is new unless it has been asked for before: of what `choose` says, (lora, source). What
    it begins with is done by its first request, of seq 0.
    """
    service, session, asked = call.service, str(body.session_id), body.optimizer_config
    call.find_live(session)
    if asked.type != "adamw":
        raise ServiceRefused(f"optimizer_config.type={asked.type!r}; there is 'adamw'")
    try:
        optim = OptimConfig.model_validate(asked.settings).model_dump(mode="json")
    except ValueError as error:
        raise ServiceRefused(f"optimizer_config.settings: {error}") from error
    name = f"{session}:train:{body.model_seq_id}"
    if service.store.one("SELECT 1 FROM models WHERE id = ?", name) is None:
        mine = sum(model.owner == call.owner for model in service.models.values())
        if mine >= service.config.models_per_user:
            raise ServiceRefused(f"{mine} models train already; end a session that is not needed", 429)
        lora, source = choose()
        schedule = {"optim": optim, "total_steps": asked.total_steps}
        service.store.run(
            "INSERT INTO models (id, session, owner, base, lora, metadata, source, optim, snapshot, created,"
            " seen) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, -1, ?9, ?9)",
            name, session, call.owner, service.name,
            *map(json.dumps, (lora, body.user_metadata, source, schedule)),
            time.time(),
        )  # fmt: skip
        start_model(service, name)
    return call.queue(name, 0, "create_model")


def forward_backward(call: Call) -> Fields:
    """In protobuf."""
    model, seq, forward_only = parse_envelope(call.body)
    return call.queue(model, seq, "forward" if forward_only else "forward_backward")


def queue_kind(kind: str, call: Call) -> Fields:
    """Queues a request of a model."""
    body = call.read(bodies.OfModel)
    return call.queue(body.model_id, body.seq_id, kind)


def get_info(call: Call) -> Fields:
    """What a model is."""
    row = call.find("models", call.read(bodies.OfModel).model_id)
    lora, path = json.loads(row["lora"]), str(call.service.base_path)
    return {
        "model_id": row["id"],
        "model_data": {"model_name": row["base"], "arch": None, "tokenizer_id": path},
        "is_lora": lora is not None,
        "lora_rank": lora and lora["rank"],
        "optimizer_config": {"type": "adamw"},
    }


def create_sampler(call: Call) -> Fields:
    """A sampling client."""
    service, body = call.service, call.read(bodies.CreateSampler)
    call.find_live(body.session_id)
    folder, path = None, body.model_path
    if path is not None:
        folder = service.find_checkpoint(call.owner, path)["folder"]
    else:
        service.check_base(body.base_model or "")
    name = f"{body.session_id}:sample:{body.sampling_session_seq_id}"
    service.store.run(
        "INSERT OR IGNORE INTO samplers (id, session, owner, base, path, folder, created, used)"
        " VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?7)",
        name, body.session_id, call.owner, service.name, path, folder, time.time(),
    )  # fmt: skip
    return {"sampling_session_id": name}


def get_sampler(call: Call, sampler: str) -> Fields:
    """What a sampling client samples from."""
    row = call.find("samplers", sampler)
    return {"sampler_id": row["id"], "base_model": row["base"], "model_path": row["path"]}


def asample(call: Call) -> Fields:
    """Begins a request for samples."""
    service, body = call.service, call.read(bodies.Sample)
    sampler = body.sampling_session_id
    service.see(call.find("samplers", sampler)["session"])
    name, new = call.submit(sampler, body.seq_id, "sample")
    if new:
        service.nursery.start_soon(run_sample, service, name)
    return {"request_id": name, "sample_sequence_ids": [f"{name}:{n}" for n in range(body.num_samples)]}


async def retrieve_future(call: Call) -> Response:
    """A request's result; 408 while there is none."""
    name, service = call.read(bodies.OfRequest).request_id, call.service
    call.find("requests", name)
    with trio.move_on_after(POLL_S):
        if name in service.ended:
            await service.ended[name].wait()
        row = call.find("requests", name)
        if row["state"] in FAILED and row["kind"] == "forward_backward":
            await trio.sleep(max(row["ended"] + TELL_S - time.time(), 0.0))
            service.store.run("UPDATE requests SET told = ? WHERE id = ? AND told IS NULL", time.time(), name)
        if row["result"] is None:
            text = f"the result of {name} was kept for {service.config.keep_s:g} s after it was there"
            return reply({"error": text, "category": "user"})
        return Response(row["result"], media_type=row["media"])
    return reply({"type": "try_again", "request_id": name, "queue_state": "active"}, 408)


def cancel_future(call: Call) -> None:
    """Samples that nobody waits for any more are not drawn to their end; training goes on."""
    row = call.find("requests", call.read(bodies.OfRequest).request_id)
    scope = call.service.sampling.get(row["id"])
    if scope is not None:
        scope.cancel()


TINKER: Mapping[str, Handler] = {
    "POST /api/v1/client/config": lambda call: CLIENT_CONFIG,
    "POST /api/v1/client/dynamic_config": lambda call: CLIENT_CONFIG,
    "POST /api/v1/telemetry": lambda call: {"status": "accepted"},  # which nobody reads
    "POST /api/v1/create_session": create_session,
    "POST /api/v1/session_heartbeat": beat,
    "POST /api/v1/sessions/{session}/finish": finish_session,
    "POST /api/v1/create_model": create_model,
    "POST /api/v1/load_weights": load_weights,
    "POST /api/v1/get_info": get_info,
    "POST /api/v1/forward_backward": forward_backward,
    "POST /api/v1/create_sampling_session": create_sampler,
    "GET /api/v1/samplers/{sampler}": get_sampler,
    "POST /api/v1/asample": asample,
    "POST /api/v1/retrieve_future": retrieve_future,
    "POST /api/v1/cancel_future": cancel_future,
    **{f"POST /api/v1/{kind}": partial(queue_kind, kind) for kind in QUEUED},
}


def make_app(service: Service, keys: Texts, routes: Mapping[str, Handler]) -> Starlette:
    """The application. `keys`: users by their keys; `routes`: further ones, by method and path."""
    owners = {hashlib.sha256(key.encode()).digest(): owner for key, owner in keys.items()}

    def make_endpoint(handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            try:
                owner = "" if request.url.path.startswith(KEYLESS) else find_owner(owners, request)
                body = await read_whole(request, service.config.request_bytes)
                found = handler(Call(service, owner, request, body), **request.path_params)
                found = await found if isawaitable(found) else found
                return found if isinstance(found, Response) else reply(found)
            except ServiceRefused as error:
                return refuse(error)
            except MessageRefused as error:
                return refuse(ServiceRefused(str(error), 422))
            except ClientDisconnect:
                return reply(status=400)
            except Exception as error:  # of one user's request: the others go on
                service.say(f"{request.method} {request.url.path}: {describe(error)}")
                return refuse(ServiceRefused("the server failed; its operator is told how", 500))

        return answer

    def miss(call: Call, path: str) -> None:
        raise ServiceRefused(f"there is no {call.request.method} /{path}", 404)

    every = ((*key.split(), handler) for key, handler in {**TINKER, **routes}.items())
    known = [Route(path, make_endpoint(handler), methods=[method]) for method, path, handler in every]
    missing = Route("/{path:path}", make_endpoint(miss), methods=["GET", "POST", "PUT", "DELETE", "PATCH"])
    return Starlette(routes=[*known, missing])
