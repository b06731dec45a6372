"""What can be asked about sessions, runs and checkpoints, and done to checkpoints; downloads; the queue; and
the routes of our own clients, beside Tinker's.

A download needs no key: its address has a signature of the file and of the time when it ends.

files ─► POST calls ─► the run's queue, as "call:METHOD" ─► retrieve_future ─► files
POST generate ─► the engine, with what the run published last ─► the completion
"""

import hashlib
import hmac
import json
import secrets
import tarfile
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import trio
from starlette.requests import ClientDisconnect
from starlette.responses import FileResponse, RedirectResponse, Response, StreamingResponse

from rollouts import codec
from rollouts.errors import EngineError, RequestRefused, ServiceRefused
from rollouts.processes.nurseries import open_plain_nursery
from rollouts.serve import bodies
from rollouts.serve.app import ATTENTION, KEYLESS, Call, Fields, Handler
from rollouts.serve.operations import METHODS, PUBLISHED
from rollouts.serve.sampling import generate_all
from rollouts.serve.service import Service
from rollouts.serve.store import FAILED, MSGPACK, Row, list_sizes, remove
from rollouts.types import GenerateRequest

LINK_S = 3600.0  # that an address of a download is good for
BLOCK = 1 << 20
ARCHIVE = "archive.tar"


def say_time(seconds: float) -> datetime:
    """Of a time in a row; in JSON it is as RFC 3339 has it."""
    return datetime.fromtimestamp(seconds, UTC)


# --- rows, as the SDK reads them ----------------------------------------------------------------------------


TIMES = ("time", "expires_at", "last_request_time", "submitted", "begun", "ended")
SHOWN: Mapping[str, Callable[[Any], object]] = {  # what becomes of a column that is not NULL
    **dict.fromkeys(TIMES, say_time),
    "user_metadata": json.loads,
    "public": bool,
    "is_lora": bool,
    "lora_rank": lambda lora: (json.loads(lora) or {}).get("rank"),
}
SESSIONS = "SELECT id FROM sessions"
CHECKPOINTS = """
    SELECT id AS checkpoint_id, kind AS checkpoint_type, created AS time, path AS tinker_path,
        size AS size_bytes, public, metadata AS user_metadata, expires AS expires_at
    FROM checkpoints"""
RUNS = """
    SELECT id AS training_run_id, base AS base_model, owner AS model_owner, lora <> 'null' AS is_lora,
        lora AS lora_rank, metadata AS user_metadata,
        ifnull((SELECT MAX(submitted) FROM requests WHERE scope = models.id), seen) AS last_request_time
    FROM models"""
STATUS = """
    SELECT id AS request_id, scope AS run_id, seq AS seq_id, kind,
        iif(state = 'lost', 'failed', state) AS state, submitted, begun, ended,
        (SELECT COUNT(*) FROM requests AS other WHERE other.scope = own.scope AND other.seq < own.seq
            AND other.ended IS NULL AND own.ended IS NULL) AS ahead,
        coalesce(begun, ended, ?1) - submitted AS queued_s,
        ifnull(ifnull(ended, ?1) - begun, 0.0) AS running_s
    FROM requests AS own"""


def show(row: Row) -> Fields:
    """The row of one of these."""
    return {
        name: SHOWN[name](value) if name in SHOWN and value is not None else value
        for name, value in dict(row).items()
    }


def show_run(call: Call, row: Row) -> Fields:
    """With its newest checkpoints."""
    shown, store = show(row), call.service.store
    newest = f"{CHECKPOINTS} WHERE run = ? AND kind = ? ORDER BY created DESC"
    for name, kind in {"last_checkpoint": "training", "last_sampler_checkpoint": "sampler"}.items():
        found = store.one(newest, shown["training_run_id"], kind)
        shown[name] = found and show(found)
    return shown


# --- runs, checkpoints, sessions ----------------------------------------------------------------------------


def list_own(name: str, rows: str, show_one: Callable[[Call, Row], object], call: Call) -> Fields:
    """Some of a user's, the newest first, and where they are among all."""
    limit, offset = min(call.query("limit", 20), 1000), call.query("offset", 0)
    store, own = call.service.store, f"{rows} WHERE owner = ?"
    total = store.value(f"SELECT COUNT(*) FROM ({own})", call.owner)
    found = store.all(f"{own} ORDER BY created DESC LIMIT ? OFFSET ?", call.owner, limit, offset)
    cursor = {"offset": offset, "limit": limit, "total_count": total}
    return {name: [show_one(call, row) for row in found], "cursor": cursor}


def get_capabilities(call: Call) -> Fields:
    """Which models there are."""
    service = call.service
    about = {"max_context_length": service.features.context_length, "trainable": True, "sampleable": True}
    names = sorted(service.names, key=lambda name: name != service.name)
    return {"supported_models": [{"model_name": name, **about} for name in names]}


def get_run(call: Call, run: str) -> Fields:
    """A run."""
    (row,) = call.service.store.all(f"{RUNS} WHERE id = ?", call.find("models", run)["id"])
    return show_run(call, row)


def list_run_checkpoints(call: Call, run: str) -> Fields:
    """Those of a run."""
    call.find("models", run)
    rows = call.service.store.all(f"{CHECKPOINTS} WHERE run = ? ORDER BY created", run)
    return {"checkpoints": [*map(show, rows)]}


def find_own(call: Call, run: str, kind: str, name: str) -> Row:
    """A checkpoint of this user. Raises ServiceRefused."""
    path = f"tinker://{run}/{kind}/{name}"
    row = call.service.find_checkpoint(call.owner, path)
    if row["owner"] != call.owner:
        raise ServiceRefused(f"{path} is another user's", 403)
    return row


async def delete_checkpoint(call: Call, **named: str) -> None:
    """It is gone."""
    await call.service.delete_checkpoint(find_own(call, **named))


def set_expiry(call: Call, **named: str) -> None:
    """It goes by itself, or stays."""
    seconds, path = call.read(bodies.TimeToLive).ttl_seconds, find_own(call, **named)["path"]
    expires = None if seconds is None else time.time() + seconds
    call.service.store.run("UPDATE checkpoints SET expires = ? WHERE path = ?", expires, path)


def publish(call: Call, **named: str) -> None:
    """Every user may read it, or none but its owner."""
    public, path = call.request.method == "POST", find_own(call, **named)["path"]
    call.service.store.run("UPDATE checkpoints SET public = ? WHERE path = ?", public, path)


def get_weights_info(call: Call) -> Fields:
    """What a checkpoint is of."""
    row = call.service.find_checkpoint(call.owner, call.read(bodies.OfPath).tinker_path)
    lora = json.loads(row["lora"])
    about: Fields = {"base_model": call.service.name, "is_lora": lora is not None}
    if lora is not None:
        attention = [bool(ATTENTION.search(place)) for place in lora["targets"]]
        parts = {"train_attn": any(attention), "train_mlp": not all(attention), "train_unembed": False}
        about |= {"lora_rank": lora["rank"], **parts}
    return about


def get_session(call: Call, session: str) -> Fields:
    """What a session has made."""
    call.find("sessions", session)
    return {
        key: [
            row["id"] for row in call.service.store.all(f"SELECT id FROM {table} WHERE session = ?", session)
        ]
        for key, table in {"training_run_ids": "models", "sampler_ids": "samplers"}.items()
    }


# --- downloads ----------------------------------------------------------------------------------------------


def make_link(service: Service, path: str, until: object) -> str:
    """The address of a file of a checkpoint, without the host."""
    signed = hmac.new(service.secret, f"{until}:{path}".encode(), hashlib.sha256).hexdigest()
    return f"{KEYLESS}{quote(path)}?until={until}&signature={signed}"


def list_files(row: Row) -> dict[str, Path]:
    """What a client loads, by name: not the state of training, nor our own notes."""
    files = sorted(file for file in Path(row["folder"]).iterdir() if file.is_file())
    return {file.name: file for file in files if file.name != "manifest.json"}


def get_urls(call: Call, **named: str) -> Fields:
    """An address for each file, and for all in one."""
    row, until = find_own(call, **named), int(time.time() + LINK_S)
    base, request = str(call.request.base_url).rstrip("/"), row["request"]
    urls = {
        name: base + make_link(call.service, f"{request}/{name}", until)
        for name in (*list_files(row), ARCHIVE)
    }
    return {"urls": urls, "expires": say_time(until)}


def get_archive(call: Call, **named: str) -> Response:
    """The address of all files in one."""
    found = get_urls(call, **named)
    return RedirectResponse(found["urls"][ARCHIVE], 302, {"expires": found["expires"].isoformat()})


def send_file(call: Call, request: str, file: str) -> Response:
    """A file whose address is signed. Raises ServiceRefused."""
    until = call.request.query_params.get("until", "")
    good = make_link(call.service, f"{request}/{file}", until).partition("?")[2]
    signed = secrets.compare_digest(good.encode(), call.request.url.query.encode())
    row = signed and call.service.store.one("SELECT * FROM checkpoints WHERE request = ?", request)
    if not row or int(until) < time.time():
        raise ServiceRefused("the address is not, or no longer, good; ask for another", 403)
    files = list_files(row)
    if file == ARCHIVE:
        return StreamingResponse(stream_archive([*files.values()]), media_type="application/x-tar")
    return FileResponse(files[file])


async def stream_archive(files: list[Path]) -> AsyncIterator[bytes]:
    """A tar of files, one after the other."""
    for path in files:
        entry = tarfile.TarInfo(path.name)
        entry.size = path.stat().st_size
        yield entry.tobuf()
        async with await trio.open_file(path, "rb") as file:
            while block := await file.read(BLOCK):
                yield block
        yield bytes(-entry.size % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)


# --- the queue ----------------------------------------------------------------------------------------------


def get_status(call: Call, run: str, request: str) -> Fields:
    """Where one request is, and why it has failed."""
    store = call.service.store
    row = store.find("requests", id=request, scope=run, owner=call.owner)
    said = json.loads(row["result"] or b"{}") if row["state"] in FAILED else {}
    (shown,) = map(show, store.all(f"{STATUS} WHERE id = ?2", time.time(), request))
    return {**shown, **said}


def get_queue(call: Call, run: str) -> Fields:
    """What waits of a run, and how long things take."""
    service = call.service
    call.find("models", run)
    rows = service.store.all(
        "SELECT id, state, submitted FROM requests WHERE scope = ? AND ended IS NULL ORDER BY seq", run
    )
    kinds = service.store.all(
        "SELECT kind, COUNT(*) AS count, AVG(ended - begun) AS seconds_mean, MAX(ended - begun) AS"
        " seconds_max, AVG(begun - submitted) AS queued_s_mean FROM requests WHERE scope = ? AND begun IS NOT"
        " NULL AND ended IS NOT NULL GROUP BY kind",
        run,
    )
    live = service.models.get(run)
    return {
        "run_id": run,
        "depth": len(rows),
        **{state: [row["id"] for row in rows if row["state"] == state] for state in ("running", "queued")},
        "waits_for_seq_id": live.next_seq if live and rows and not live.busy else None,
        "oldest_s": time.time() - rows[0]["submitted"] if rows else 0.0,
        "in_memory": live in service.loaded,
        "kinds": {row["kind"]: dict(row) for row in kinds},
    }


CHECKPOINT = "/api/v1/training_runs/{run}/checkpoints/{kind}/{name}"
MANAGE: Mapping[str, Handler] = {
    f"GET {KEYLESS}{{request}}/{{file}}": send_file,
    "GET /api/v1/healthz": lambda call: {"status": "ok"},
    "GET /api/v1/get_server_capabilities": get_capabilities,
    "GET /api/v1/training_runs": partial(list_own, "training_runs", RUNS, show_run),
    "GET /api/v1/training_runs/{run}": get_run,
    "GET /api/v1/training_runs/{run}/checkpoints": list_run_checkpoints,
    "GET /api/v1/checkpoints": partial(list_own, "checkpoints", CHECKPOINTS, lambda _, row: show(row)),
    f"DELETE {CHECKPOINT}": delete_checkpoint,
    f"PUT {CHECKPOINT}/ttl": set_expiry,
    f"POST {CHECKPOINT}/publish": publish,
    f"DELETE {CHECKPOINT}/publish": publish,
    f"GET {CHECKPOINT}/external_weights_urls": get_urls,
    f"GET {CHECKPOINT}/archive": get_archive,
    "POST /api/v1/weights_info": get_weights_info,
    "GET /api/v1/sessions": partial(list_own, "sessions", SESSIONS, lambda _, row: row["id"]),
    "GET /api/v1/sessions/{session}": get_session,
    "GET /runs/{run}/requests/{request}/status": get_status,
    "GET /runs/{run}/queue/stats": get_queue,
}


# --- our own clients: a run call by call, its files, and what it published ----------------------------------


def get_state(call: Call, run: str) -> Response:
    """Where somebody goes on who did not begin the run, and what samples."""
    service, row = call.service, find_published(call, run)
    state = codec.RunState(
        next_seq=service.store.value("SELECT ifnull(MAX(seq), 0) + 1 FROM requests WHERE scope = ?", run),
        features=service.features,
        version=int(row["path"]) if row else -1,
        exact=service.base.autocast_dtype is None and service.features.name == "local",
    )
    return Response(codec.encode(state), media_type=MSGPACK)


def find_published(call: Call, run: str) -> Row | None:
    """What the run published last. Raises ServiceRefused for a run that is not this user's."""
    call.find("models", run)
    return call.service.store.one(PUBLISHED, run)


def submit_call(call: Call, run: str) -> Fields:
    """Queues a call; sent again, it is the same request."""
    message, service = codec.decode(call.body, codec.Call), call.service
    if message.method not in METHODS:
        raise ServiceRefused(f"there is no method {message.method!r}; there is {', '.join(METHODS)}")
    queued = call.queue(run, message.seq_id, f"call:{message.method}")
    service.models[run].interrupted = max(service.models[run].interrupted, message.interrupted)
    return queued


def find_file(call: Call, run: str, seq: int, file: str | None = None) -> Path:
    """A file of a call, or their folder: not beside snapshots, of which only the newest stays. Raises
    ServiceRefused.
    """
    call.find("models", run)
    if file is not None and not codec.FILE_NAME.fullmatch(file):
        raise ServiceRefused(f"{file!r:.80} is no name of a file")
    return call.service.folder / "files" / run / str(seq) / (file or "")


async def read_file(call: Call, **where: Any) -> Response:
    """A block of a file, from `offset` on."""
    path = find_file(call, **where)
    try:
        async with await trio.open_file(path, "rb") as file:
            await file.seek(call.query("offset", 0))
            return Response(await file.read(codec.BLOCK), media_type="application/octet-stream")
    except OSError as error:
        raise ServiceRefused(f"there is no file {path.name!r} any more; make it again", 404) from error


async def write_file(call: Call, run: str, **where: Any) -> None:
    """A block of a file, to `offset`, for a call that is yet to come."""
    path, offset = find_file(call, run, **where), call.query("offset", 0)
    limit = call.service.config.upload_bytes
    known = path.stat().st_size if path.exists() else 0
    held = sum(list_sizes(call.service.folder / "files" / run).values())
    if offset > known or held + len(call.body) > limit:
        raise ServiceRefused(
            f"offset={offset} of a file of {known} bytes, with {held} bytes of this run here already; files"
            f" have no holes, and serve.upload_bytes is {limit}",
            413,
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    async with await trio.open_file(path, "r+b" if known else "wb") as file:
        await file.seek(offset)
        await file.write(call.body)


async def delete_files(call: Call, **where: Any) -> None:
    """Those of a call are gone."""
    await remove(find_file(call, **where))


# --- routes: samples ----------------------------------------------------------------------------------------


async def generate(call: Call, run: str) -> Response:
    """A completion by what the run published last. A client that hangs up frees its row."""
    service, row, asked = call.service, find_published(call, run), codec.decode(call.body, GenerateRequest)
    if row is None:
        raise ServiceRefused("nothing has been published; call publish(version) first")

    async def cancel_when_gone() -> None:
        while (await call.request.receive())["type"] != "http.disconnect":
            pass
        nursery.cancel_scope.cancel()

    try:
        async with (
            open_plain_nursery() as nursery,
            service.sampling_places,
            service.samplers.lease(row["folder"]) as (loaded,),
        ):
            nursery.start_soon(cancel_when_gone)
            own = f"{run}/{asked.request_id}"  # ids are of a run alone
            (found,) = await generate_all(service, loaded, [replace(asked, request_id=own)])
            versions = np.full(len(found.token_ids), int(row["path"]), np.int64)
            answer = replace(found, request_id=asked.request_id, weight_versions=versions)
            return Response(codec.encode(answer), media_type=MSGPACK)
    except EngineError as error:
        raise ServiceRefused(str(error), 400 if isinstance(error, RequestRefused) else 503) from error
    raise ClientDisconnect


NATIVE = {
    "GET /runs/{run}": get_state,
    "POST /runs/{run}/calls": submit_call,
    "GET /runs/{run}/files/{seq:int}/{file:path}": read_file,
    "PUT /runs/{run}/files/{seq:int}/{file:path}": write_file,
    "DELETE /runs/{run}/files/{seq:int}": delete_files,
    "POST /runs/{run}/generate": generate,
}
