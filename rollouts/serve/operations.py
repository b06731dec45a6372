"""What the requests of a model do: each takes the open model and the request, and gives what its client is
answered. A refusal (ServiceRefused) leaves everything as it was.

Calls of a run's own backend, by our own clients, are among them, as "call:METHOD". One that fails makes those
behind it fail with EarlierStepFailed until one is reset(), as on a backend in the same process. Files that a
call takes or leaves lie in a folder of its number while the session goes on.
"""

import json
import re
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import trio
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from rollouts import codec
from rollouts.checkpoints.load import check_checkpoint
from rollouts.checkpoints.save import save_checkpoint
from rollouts.errors import (
    BackendError,
    EarlierStepFailed,
    MessageRefused,
    ServiceRefused,
    StepInterrupted,
)
from rollouts.rewards.check import describe, shorten
from rollouts.serve.bodies import LoadWeights, OptimStep, SaveWeights, read_body
from rollouts.serve.losses import choose_loss
from rollouts.serve.store import MSGPACK, PROTOBUF, Result, Row, answer, list_sizes, remove
from rollouts.serve.wire import TARGETS, Datum, encode_train_output, parse_train_request
from rollouts.types import Fields, FloatArray, LossSpec, OptimParams, RolloutBatch
from rollouts.weight_sync.snapshots import export_snapshot

if TYPE_CHECKING:
    from rollouts.serve.models import Model
    from rollouts.serve.service import Service

NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")  # of a checkpoint
KINDS = {  # of checkpoints, by the requests that make them: in their paths, and as the SDK calls them
    "save_weights": ("weights", "training"),
    "save_weights_for_sampler": ("sampler_weights", "sampler"),
    "save_weights_external": ("external_weights", "external"),  # to be downloaded
}
# requests that change the weights: a snapshot may have what they did at once
CHANGES = {
    "optim_step",
    "call:revert",
    "call:optim_step",
    "call:set_weight_version",
    "call:load_weights",
    "call:load",
}
# and those that change the gradient, or keep a copy: bodies are kept until a snapshot has what they did
EFFECTS = CHANGES | {"forward_backward", "call:forward_backward", "call:reset", "call:hold"}
Operation = Callable[["Service", "Model", Row], Awaitable[Result]]


# --- training -----------------------------------------------------------------------------------------------


async def create_model(_: "Service", model: "Model", row: Row) -> Result:
    """It is there."""
    await trio.lowlevel.checkpoint()
    return answer(model_id=model.name)


async def train(service: "Service", model: "Model", row: Row) -> Result:
    """forward_backward, and forward: the loss's sum, and the log-probs of all targets."""
    features = service.features
    request = parse_train_request(
        row["body"],
        vocab_size=features.vocab_size,
        context=features.context_length,
        max_tokens=service.config.request_tokens,
    )
    loss = choose_loss(request)
    if not request.data:
        return Result(encode_train_output([], {"loss:sum": 0.0}), PROTOBUF)
    batch = make_batch(request.data, loss.weights)
    result = await service.train(model.backend, batch, loss.spec, gradient=not request.forward_only)
    if result.loss is None or result.per_token is None:
        raise BackendError(f"{result.skipped}: nothing of this step counts")
    rows = iter(result.per_token.log_probs)
    log_probs: list[FloatArray] = []
    for datum in request.data:
        targets = datum.inputs[TARGETS]
        columns = [next(rows)[1:] for _ in range(targets[0].size)]
        log_probs.append(np.stack(columns, axis=1).reshape(targets.shape))
    return Result(encode_train_output(log_probs, {"loss:sum": result.loss}), PROTOBUF)


def make_batch(data: Sequence[Datum], weights: str) -> RolloutBatch:
    """A row for each target of the datums' tokens: the tokens, and behind them the last target, of which all
    but the first train. weights: the input that multiplies each log-prob.
    """
    tokens: list[Any] = []
    columns: dict[str, list[Any]] = defaultdict(list)
    for datum in data:
        wanted = datum.inputs[TARGETS]
        inputs = {weights: np.ones(wanted.shape), **datum.inputs}
        for k in range(wanted[0].size):
            for name, values in inputs.items():
                kind = np.int64 if name == TARGETS else np.float32
                column = values.reshape(len(values), -1)[:, k].astype(kind)
                columns[name].append(np.append(kind(0), column))
            tokens.append(np.append(datum.tokens, columns[TARGETS][-1][-1]))
    rows: dict[str, Any] = {name: tuple(values) for name, values in columns.items()}
    return RolloutBatch(
        tokens=tuple(tokens),
        loss_masks=tuple(np.arange(len(row)) > 0 for row in tokens),
        targets=rows.pop(TARGETS),
        advantages=rows.pop(weights),
        rollout_log_probs=rows.pop("logprobs", None),
        extras=rows,
    )


async def optim_step(service: "Service", model: "Model", row: Row) -> Result:
    """AdamW with what has accumulated since the last step."""
    seq = row["seq"]
    # a forward_backward since the last step that failed, of which its client did not know when it sent the
    # last one behind it, or sent none
    failed = service.store.value(
        "SELECT id FROM requests AS bad WHERE scope = ?1 AND seq < ?2 AND seq > (SELECT ifnull(MAX(seq), 0)"
        " FROM requests WHERE scope = ?1 AND kind = 'optim_step' AND seq < ?2 AND state IN ('done', 'lost'))"
        " AND state IN ('failed', 'lost') AND kind = 'forward_backward' AND NOT EXISTS (SELECT 1 FROM"
        " requests AS later WHERE later.scope = ?1 AND later.seq > bad.seq AND later.seq < ?2 AND"
        " later.submitted > bad.told AND later.kind = 'forward_backward')",
        model.name, seq,
    )  # fmt: skip
    if failed is not None:
        raise BackendError(
            f"the step of optim_step {seq} lacks the forward_backward {failed}, which failed and said why;"
            " all gradients since the last step are discarded: send the step again"
        )
    body = read_body(row["body"], OptimStep)
    if body.optimizer_params is not None:
        raise ServiceRefused(f"optimizer_params.type={body.optimizer_params.type!r}; there is adam_params")
    params = body.adam_params
    result = await model.backend.optim_step(
        OptimParams(
            lr=params.learning_rate,
            betas=(params.beta1, params.beta2),
            eps=params.eps,
            weight_decay=params.weight_decay,
            max_grad_norm=params.grad_clip_norm or None,
        )
    )
    if result.grad_norm is None:
        raise BackendError(f"{result.skipped}: the weights are as they were")
    return answer(metrics={"grad_norm": result.grad_norm})


# --- checkpoints --------------------------------------------------------------------------------------------


async def save_sampler(service: "Service", model: "Model", row: Row) -> Result:
    """Weights to sample from: under a name, or for one sampling client alone, whose sampler this makes."""
    body = read_body(row["body"], SaveWeights)
    if body.path is not None:
        return await save_named(service, model, row)
    name = f"{model.name.partition(':')[0]}:sample:{body.sampling_session_seq_id}"
    inflight = body.kind == "inflight"
    folder = await export_sampler(service, model, row, name, inflight=inflight)
    if inflight:  # those of this kind sample from the newest
        service.store.run("UPDATE samplers SET folder = ? WHERE model = ? AND inflight", folder, model.name)
    return answer(sampling_session_id=name)


async def export_sampler(
    service: "Service",
    model: "Model",
    row: Row,
    name: str,
    *,
    path: str | None = None,
    inflight: bool = False,
) -> str:
    """The folder with the weights, which can be sampled from by that name."""
    folder = service.folder / "samplers" / row["id"]
    if not folder.exists():
        await export_snapshot(model.backend, folder, model_dir=service.base_path)
    service.store.run(
        "INSERT OR IGNORE INTO samplers (id, session, owner, base, path, folder, model, inflight, created,"
        " used) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?9)",
        name, name.partition(":")[0], model.owner, service.name, path, str(folder), model.name, inflight,
        time.time(),
    )  # fmt: skip
    return str(folder)


async def save_named(service: "Service", model: "Model", row: Row) -> Result:
    """A checkpoint is complete under its tinker:// path, or is not there at all: of weights with the
    optimizer's state; the others as PEFT and transformers read them.
    """
    body, store, (kind, shown_kind) = read_body(row["body"], SaveWeights), service.store, KINDS[row["kind"]]
    name = f"seq-{row['seq']}" if body.path is None else body.path
    if not NAME.fullmatch(name):
        raise ServiceRefused(
            f"path={shorten(name)} is no name of a checkpoint: up to 128 letters, digits, '.', '_' and '-',"
            " and no '.' first"
        )
    path = f"tinker://{model.name}/{kind}/{name}"
    old = store.one("SELECT * FROM checkpoints WHERE path = ?", path)
    if old is not None and old["request"] == row["id"]:
        return answer(path=path)
    if old is not None and not body.overwrite:
        raise ServiceRefused(f"{path} exists; choose another name, delete it, or save with overwrite=True")
    folder = service.folder / "checkpoints" / row["id"] / f"step_{row['seq']}"
    if kind == "weights":
        await save_checkpoint(
            folder, write_model=model.backend.save, state={}, stage=row["id"], step=row["seq"]
        )
    else:
        await export_snapshot(model.backend, folder, model_dir=service.base_path)
    size = sum(list_sizes(folder).values())
    now = time.time()
    expires = None if body.ttl_seconds is None else now + body.ttl_seconds
    store.run(
        "INSERT OR REPLACE INTO checkpoints (path, owner, run, id, kind, folder, created, size, public,"
        " metadata, expires, request, lora) VALUES (?, ?, ?, ?, ?, ?, ?, ?, 0, ?, ?, ?, ?)",
        path, model.owner, model.name, f"{kind}/{name}", shown_kind, str(folder), now, size,
        json.dumps(body.user_metadata), expires, row["id"], json.dumps(model.lora),
    )  # fmt: skip
    if old is not None:
        await remove(Path(old["folder"]).parent)
    return answer(path=path)


async def load_weights(service: "Service", model: "Model", row: Row) -> Result:
    """The model goes on with the weights of a checkpoint, and with its optimizer's state or a fresh one."""
    body, seq = read_body(row["body"], LoadWeights), row["seq"]
    if model.source and model.source["seq"] == seq and model.snapshot >= seq:  # it has been opened so
        return answer(path=body.path, model_id=model.name)
    found = service.find_checkpoint(model.owner, body.path)
    lora = json.loads(found["lora"])
    shape = [{**one, "seed": 0} if one else None for one in (lora, model.lora)]
    if shape[0] != shape[1]:
        raise ServiceRefused(
            f"{body.path} is of {describe_shape(lora)}, {model.name} is {describe_shape(model.lora)}; make"
            " a training client from the checkpoint instead"
        )
    if found["kind"] == "training":
        await trio.to_thread.run_sync(lambda: check_checkpoint(Path(found["folder"]), hashes=True))
    elif body.optimizer:
        raise ServiceRefused(f"{body.path} holds no state of an optimizer; load it without")
    model.source = {"folder": found["folder"], "seq": seq, "optimizer": body.optimizer}
    model.snapshot = -1
    service.store.run(
        "UPDATE models SET source = ?, snapshot = -1 WHERE id = ?", json.dumps(model.source), model.name
    )
    model.reopen = True
    return answer(path=body.path, model_id=model.name)


def describe_shape(lora: Fields | None) -> str:
    """What trains, in words."""
    if lora is None:
        return "a whole model"
    return f"an adapter of rank {lora['rank']} on {', '.join(lora['targets'])}"


# --- calls --------------------------------------------------------------------------------------------------


METHODS: Mapping[str, Sequence[str]] = {  # and the fields of a Call that they take
    "forward_backward": ("batch", "loss"),
    "forward": ("batch",),
    "optim_step": ("params",),
    "set_weight_version": ("version",),
    **dict.fromkeys(("hold", "revert", "reset", "get_weights", "load_weights", "save", "load"), ()),
    "publish": (),  # the weights, as a version, are what the run samples from
    "look": (),  # nothing but how the backend is
    "give_up": (),  # in place of a call that its client could not send
}
# what a run published, the newest first; `path` is the version
PUBLISHED = "SELECT * FROM samplers WHERE model = ? AND path IS NOT NULL ORDER BY rowid DESC"
KEPT = 2  # of these: a request for samples may just have asked for the one before


async def do_call(service: "Service", model: "Model", row: Row) -> Result:
    """What the backend answers. Raises what it raises."""
    backend = model.backend
    try:
        call = codec.decode(row["body"], codec.Call)
        if model.failed and call.method not in ("reset", "look"):
            raise EarlierStepFailed(f"a step before this one failed ({model.failed}); call reset()")
        if call.batch and row["ended"] is None and call.seq_id <= model.interrupted:
            raise StepInterrupted("the step was interrupted before it began, as its client had asked")
        fields = await run_call(service, model, row, call)
    except Exception as error:
        model.failed = model.failed or describe(error)
        raise
    said = codec.Answer(**fields, weight_version=backend.weight_version, statistics=backend.statistics())
    return Result(codec.encode(said), MSGPACK)


async def run_call(service: "Service", model: "Model", row: Row, call: codec.Call) -> dict[str, Any]:
    """Fields of the Answer."""
    backend, method = model.backend, call.method
    arguments: list[Any] = [getattr(call, name) for name in METHODS[method]]
    folder = service.folder / "files" / model.name / str(call.seq_id)
    weights = folder / codec.WEIGHTS
    match method:
        case "forward_backward" | "forward":
            check_batch(service, call.batch, call.loss)
        case "save" | "get_weights":
            await remove(folder)  # of a server that was killed
            folder.mkdir(parents=True)
            if method == "save":
                await backend.save(folder)
            else:
                await trio.to_thread.run_sync(save_file, await backend.get_weights(), weights)
            return {"files": list_sizes(folder)}
        case "load":
            arguments = [folder]
        case "load_weights":
            try:
                arguments = [await trio.to_thread.run_sync(load_file, weights)]
            except (SafetensorError, OSError) as error:
                raise BackendError(f"the weights that were sent cannot be read: {error}") from error
        case "publish":
            await publish(service, model, row, call.version)
            return {}
        case "look":
            return {}
        case "give_up":
            raise MessageRefused("the client could not send it")
        case "reset":
            model.failed = ""
    found = await getattr(backend, method)(*arguments)
    model.held = method == "hold" or (model.held and method != "revert")
    if method == "forward_backward" and call.batch:
        service.meters.trained.inc(int(call.batch.response_lengths.sum()))
        found = codec.pack_result(found)
    return {} if found is None else {method: found}


def check_batch(service: "Service", batch: RolloutBatch | None, loss: LossSpec | None) -> None:
    """Raises BackendError for a batch that this server does not take, and for functions of modules that
    serve.loss_modules does not have.
    """
    lengths, context = [*map(len, batch.tokens)] if batch else [], service.features.context_length
    limit = service.config.request_tokens
    if not lengths or min(lengths) < 1 or max(lengths) > context or sum(lengths) > limit:
        raise BackendError(
            f"a batch with rows of {min(lengths, default=0)} to {max(lengths, default=0)} tokens,"
            f" {sum(lengths)} together; this server takes rows of 1 to {context}, and {limit}"
            " (serve.request_tokens)"
        )
    for text in map(str, (loss.name, *loss.params.values()) if loss else ()):
        if ":" in text and text.partition(":")[0] not in service.config.loss_modules:
            raise BackendError(
                f"loss {text!r}: the module is none of serve.loss_modules, which a server imports"
            )


async def publish(service: "Service", model: "Model", row: Row, version: int) -> None:
    """The weights, as this version, are what the run samples from."""
    name = f"{model.name}:served:{row['seq']}"
    await export_sampler(service, model, row, name, path=str(version))
    for old in service.store.all(f"{PUBLISHED} LIMIT -1 OFFSET {KEPT}", model.name):
        service.store.run("DELETE FROM samplers WHERE id = ?", old["id"])
        await remove(old["folder"])


OPERATIONS: Mapping[str, Operation] = {
    "create_model": create_model,
    "forward_backward": train,
    "forward": train,
    "optim_step": optim_step,
    "save_weights": save_named,
    "save_weights_external": save_named,
    "save_weights_for_sampler": save_sampler,
    "load_weights": load_weights,
}
