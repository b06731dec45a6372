"""Tinker's protobuf messages: what forward_backward is sent, and what it and sampling answer.

The schema is proto2 for what is proto3 on the other side: the bytes are the same, and a field that is absent
is told from a zero. A map is a list of entries, an enum an int32. Arrays are little-endian.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from numpy.typing import NDArray

from rollouts.errors import ServiceRefused
from rollouts.types import Completion, Fields, FloatArray, IntArray, Numbers

SCHEMA = """
Train model_id:1:s seq_id:2:i data:3:*Datum loss_fn:4:s config:5:*Number forward_only:6:b config_v2:7:*Setting
Number key:1:s value:2:d
Setting key:1:s value:2:Value
Value number:1:d text:2:s
Datum chunks:1:*Chunk inputs:2:*Input
Chunk text:1:Text image:2:Other dmel:3:Other
Text tokens:1:y
Other data:1:y
Input key:1:s value:2:Tensor
Tensor dense:1:y sparse:2:Sparse dtype:3:i shape:4:*l
Sparse values:1:y crow:2:y col:3:y
Trained kind:1:s outputs:2:*Record metrics:3:*Number
Record kind:1:s fields:2:*Field num_datums:3:l
Field key:1:s value:2:Batched
Batched data:1:y offsets:2:y dtype:3:i trailing_shape:4:*l
Samples sequences:1:*Sequence prompt_logprobs:2:y topk:3:Topk cache_hits:4:i targets:5:Tensor drawn:6:Drawn
Sequence stop_reason:1:i tokens:2:y logprobs:3:y topk:4:Topk
Topk ids:1:y logprobs:2:y k:3:u length:4:u
Drawn tokens:1:Tensor logprobs:2:Tensor
"""
TYPES = {"d": 1, "l": 3, "i": 5, "b": 8, "s": 9, "y": 12, "u": 13}  # of protobuf; 11 is a message
DTYPES = {1: "<f4", 2: "<i8", 3: "<i4"}
FLOAT32, INT64 = 1, 2
TARGETS = "target_tokens"
WIDE = (TARGETS, "weights")  # inputs that may have K values for each token
NO_LOG_PROB = -99999.0  # of an empty cell of Topk, whose id is 0


def _make_messages() -> Fields:
    package = "rollouts.tinker"
    file = FileDescriptorProto(name="rollouts_tinker.proto", package=package, syntax="proto2")
    names: list[str] = []
    for line in SCHEMA.strip().splitlines():
        name, *fields = line.split()
        names.append(name)
        message = file.message_type.add(name=name)
        for field, number, kind in (one.split(":") for one in fields):
            of = kind.lstrip("*")
            made: Any = message.field.add(name=field, number=int(number), label=3 if of != kind else 1)
            made.type = TYPES.get(of, 11)
            if of not in TYPES:
                made.type_name = f".{package}.{of}"
    pool = DescriptorPool()
    pool.Add(file)
    return {name: GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}")) for name in names}


MESSAGES = _make_messages()


# --- forward_backward ---------------------------------------------------------------------------------------


class Datum(NamedTuple):
    """One sequence of a request."""

    tokens: IntArray  # [N] that go in
    inputs: Mapping[str, NDArray[Any]]  # of the loss, by name: [N], or [N, K]


class TrainRequest(NamedTuple):
    """What forward_backward is asked for."""

    data: Sequence[Datum]
    loss: str
    settings: Mapping[str, float | str]  # of the loss
    forward_only: bool


def parse_envelope(body: bytes) -> tuple[str, int, bool]:
    """(model_id, seq_id, forward_only) of a request; what else it holds is looked at in its turn. Raises
    ServiceRefused for bytes that are no request.
    """
    message = _parse("Train", body)
    return message.model_id, message.seq_id, message.forward_only


def _parse(kind: str, body: bytes) -> Any:
    try:
        return MESSAGES[kind].FromString(body)
    except DecodeError as error:
        raise ServiceRefused(f"the body is no protobuf {kind}: {error}") from error


def parse_train_request(body: bytes, *, vocab_size: int, context: int, max_tokens: int) -> TrainRequest:
    """The request, its tokens and arrays checked. Raises ServiceRefused naming the datum and the field."""
    message = _parse("Train", body)
    settings: Fields = {one.key: one.value for one in message.config}
    for one in message.config_v2:
        settings[one.key] = one.value.text if one.value.HasField("text") else one.value.number
    data: list[Datum] = []
    total = 0
    for index, datum in enumerate(message.data):
        where = f"data[{index}]"
        tokens = join_chunks(datum.chunks, where)
        check_ids(tokens, vocab_size, f"{where}.model_input")
        inputs: dict[str, NDArray[Any]] = {}
        targets = None
        # the targets first: they bound what the others may hold
        for one in sorted(datum.inputs, key=lambda one: one.key != TARGETS):
            name, of = one.key, f"{where}.loss_fn_inputs[{one.key!r}]"
            values = inputs[name] = parse_tensor(one.value, of)
            if name == TARGETS:
                targets = values
                check_ids(targets, vocab_size, of)
            if targets is None:
                break
            shape = (len(tokens), *targets.shape[1:2]) if name in WIDE else (len(tokens),)
            if values.shape != shape or 0 in shape:
                raise ServiceRefused(
                    f"{of} has shape {[*values.shape]}; of {len(tokens)} tokens it must be {[*shape]}"
                )
        if targets is None:
            raise ServiceRefused(f"{where} has no loss_fn_inputs['target_tokens']; every loss needs them")
        if len(tokens) > context:
            raise ServiceRefused(f"{where} has {len(tokens)} tokens; the model's context holds {context}")
        total += targets.size
        if total > max_tokens:
            raise ServiceRefused(f"the request has more than {max_tokens} targets; send it in parts")
        data.append(Datum(tokens, inputs))
    return TrainRequest(data, message.loss_fn, settings, message.forward_only)


def join_chunks(chunks: Sequence[Any], where: str) -> IntArray:
    """The tokens of all chunks. Raises ServiceRefused for one that is no text, and for none at all."""
    found = b"".join(chunk.text.tokens for chunk in chunks)
    if not all(chunk.HasField("text") for chunk in chunks) or not found or len(found) % 4:
        raise ServiceRefused(f"{where}: the model takes text alone, and at least one token of it")
    return np.frombuffer(found, "<i4").astype(np.int64)


def check_ids(ids: IntArray, vocab_size: int, where: str) -> None:
    """Raises ServiceRefused naming an id that is not the model's."""
    wrong = ids[(ids < 0) | (ids >= vocab_size)] if ids.dtype.kind in "iu" else ids.ravel()[:1]
    if wrong.size:
        raise ServiceRefused(
            f"{where} has the token id {wrong[0]}; the model's are whole numbers from 0 to {vocab_size - 1}"
        )


def parse_tensor(tensor: Any, where: str) -> NDArray[Any]:
    """The array, finite. Raises ServiceRefused for bytes that do not fit its dtype and shape."""
    try:
        dtype, shape = np.dtype(DTYPES[tensor.dtype]), tuple(tensor.shape)
        if not tensor.HasField("sparse"):
            values = np.frombuffer(tensor.dense, dtype).reshape(shape or -1)
        else:
            # a list of cells may stand for more than memory holds
            if len(shape) != 2 or min(shape) < 0 or math.prod(shape) > 2**24:
                raise ValueError(f"a sparse tensor of shape {shape}")
            values = np.zeros(shape, dtype)
            rows, columns = (np.frombuffer(of, "<i8") for of in (tensor.sparse.crow, tensor.sparse.col))
            values[find_cells(rows, columns, shape)] = np.frombuffer(tensor.sparse.values, dtype)
    except (KeyError, ValueError, IndexError, OverflowError) as error:
        raise ServiceRefused(f"{where} is no array of float32 or int64: {error}") from error
    if not np.isfinite(values).all():
        raise ServiceRefused(f"{where} holds a value that is not finite")
    return values.astype(np.int64 if dtype.kind == "i" else np.float32)


def encode_train_output(rows: Sequence[FloatArray], metrics: Numbers) -> bytes:
    """A ForwardBackwardOutput with the log-probs [N] or [N, K] of each datum, and metrics, whose names must
    be name:reduction with one colon.
    """
    output = MESSAGES["Trained"](kind="ArrayRecord")
    for name, value in metrics.items():
        assert name.count(":") == 1, name
        output.metrics.add(key=name, value=value)
    # datums of another K begin another record
    for trailing, group in groupby(rows, key=lambda row: row.shape[1:]):
        parts = [row.astype("<f4").tobytes() for row in group]
        batched = output.outputs.add(num_datums=len(parts)).fields.add(key="logprobs").value
        batched.data = b"".join(parts)
        batched.offsets = np.cumsum([0, *map(len, parts)]).astype("<i8").tobytes()
        batched.dtype = FLOAT32
        batched.trailing_shape.extend(trailing)
    return output.SerializeToString()


# --- samples ------------------------------------------------------------------------------------------------


def parse_targets(asked: Any, length: int) -> IntArray:
    """[length − 1, K] ids to score in place of a prompt's tokens, −1 for nothing, of a TensorData in JSON.
    Raises ServiceRefused.
    """
    try:
        rows, columns = asked.shape
        if rows != length - 1 or not 0 < columns <= 1024:
            raise ValueError(f"shape {asked.shape} for a prompt of {length} tokens")
        if asked.sparse_crow_indices is None:
            return np.asarray(asked.data, np.int64).reshape(rows, columns)
        found = np.full((rows, columns), -1, np.int64)
        found[find_cells(asked.sparse_crow_indices, asked.sparse_col_indices, asked.shape)] = asked.data
        return found
    except (TypeError, ValueError, IndexError, OverflowError) as error:
        raise ServiceRefused(f"target_prompt_logprobs is no tensor [prompt − 1, K]: {error}") from error


def find_cells(rows: Any, columns: Any, shape: Any) -> tuple[IntArray, IntArray]:
    """(row, column) of each value of a sparse tensor, of the pointers of its rows and the columns. Raises
    ValueError.
    """
    rows, columns = np.asarray(rows, np.int64), np.asarray(columns, np.int64)
    end = len(columns)
    if len(rows) != shape[0] + 1 or rows.tolist() != [0, *np.sort(rows)[1:-1].clip(0, end), end]:
        raise ValueError(f"the pointers of {shape[0]} rows do not fit {end} values")
    if np.any(columns < 0):
        raise ValueError("a column is below 0")
    return np.repeat(np.arange(shape[0]), np.diff(rows)), columns


def encode_samples(completions: Sequence[Completion], *, last: int | None, targets: Any = None) -> bytes:
    """A SampleResponse; what was asked of the prompt is in the first completion. last: of the prompt only so
    many tokens are scored. targets: the TensorData of parse_targets, whose layout the answer has.
    """
    response, first = MESSAGES["Samples"](), completions[0]

    def hide(scores: NDArray[Any]) -> NDArray[Any]:
        scores[: 1 if last is None else len(scores) - last] = np.nan
        return scores

    for one in completions:
        made = response.sequences.add(stop_reason=0 if one.finish_reason == "stop" else 1)
        made.tokens = one.token_ids.astype("<i4").tobytes()
        made.logprobs = one.log_probs.astype("<f4").tobytes()
        if one.top_log_probs is not None:
            _fill_top(made.topk, *one.top_log_probs)
    if first.prompt_log_probs is not None:
        response.prompt_logprobs = hide(first.prompt_log_probs.astype("<f4")).tobytes()
    if first.prompt_top is not None:
        ids, log_probs = (np.pad(of, ((1, 0), (0, 0))) for of in first.prompt_top)
        _fill_top(response.topk, ids, hide(log_probs))
    if first.prompt_targets is not None:
        _fill_tensor(response.targets, first.prompt_targets)
        if targets.sparse_crow_indices is not None:
            sparse, of = (targets.sparse_crow_indices, targets.sparse_col_indices), response.targets.sparse
            of.crow, of.col = (np.asarray(one, "<i8").tobytes() for one in sparse)
            of.values = first.prompt_targets[find_cells(*sparse, targets.shape)].astype("<f4").tobytes()
            response.targets.ClearField("dense")
    if first.prompt_draws is not None:
        _fill_tensor(response.drawn.tokens, first.prompt_draws.token_ids)
        _fill_tensor(response.drawn.logprobs, first.prompt_draws.log_probs)
    return response.SerializeToString()


def _fill_tensor(tensor: Any, values: NDArray[Any]) -> None:
    tensor.dtype = INT64 if values.dtype.kind == "i" else FLOAT32
    tensor.dense = values.astype(DTYPES[tensor.dtype]).tobytes()
    tensor.shape.extend(values.shape)


def _fill_top(message: Any, ids: NDArray[Any], log_probs: NDArray[Any]) -> None:
    empty = ~np.isfinite(log_probs)
    message.length, message.k = ids.shape
    message.ids = np.where(empty, 0, ids).astype("<i4").tobytes()
    message.logprobs = np.where(empty, NO_LOG_PROB, log_probs).astype("<f4").tobytes()
