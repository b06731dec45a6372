"""Records as bytes, for what crosses processes: msgpack, its arrays as dtype, shape and bytes.

record ─► msgpack ─► checked by the annotations of the record ─► record

Nothing is unpickled, and no class is made that an annotation does not name.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import field, fields, replace
from typing import Any, Literal, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollouts.errors import MessageRefused
from rollouts.types import (
    EngineFeatures,
    Fields,
    FloatRows,
    ForwardBackwardResult,
    LossSpec,
    Metric,
    Metrics,
    Numbers,
    OptimParams,
    OptimStepResult,
    RolloutBatch,
    T,
    record,
)

ARRAY = 1  # the number of msgpack's extension: the length of the head, the head, the values
Head = tuple[Literal["<i8", "<i4", "<f4", "<f8", "|b1"], tuple[int, ...]]  # dtype and shape
METRIC_KINDS: Fields = {kind.__name__: kind for kind in get_args(Metric)}


def encode(value: object) -> bytes:
    """The value as decode() takes it. Raises MessageRefused for a part that may not cross."""
    try:
        return msgspec.msgpack.encode(value, enc_hook=_encode_part)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise MessageRefused(f"a {type(value).__name__} cannot be sent: {error}") from error


def _encode_part(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        head = msgspec.msgpack.encode((value.dtype.str, value.shape))
        return msgspec.msgpack.Ext(ARRAY, bytes([len(head)]) + head + value.tobytes())
    if isinstance(value, np.generic):
        return value.item()
    return dict(value)


def decode(message: bytes, kind: type[T], *, max_axes: int = 1) -> T:
    """The record of this class. Its arrays are copies, which may be written to, of max_axes axes at most.

    Raises MessageRefused naming the field that is missing or wrong.
    """

    def check(annotation: Any, value: Any) -> NDArray[Any]:
        if not isinstance(value, np.ndarray):
            raise ValueError("expected an array")
        wanted = np.dtype(get_args(get_args(annotation)[1])[0])
        if value.dtype.kind != wanted.kind or value.ndim > max_axes:
            raise ValueError(
                f"array of {value.dtype} with {value.ndim} axes; expected {wanted}, {max_axes} at most"
            )
        return value.astype(wanted, copy=False)

    try:
        return msgspec.msgpack.decode(message, type=kind, dec_hook=check, ext_hook=_decode_array)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        raise MessageRefused(f"the message is no {kind.__name__}: {error}") from error


def _decode_array(code: int, content: memoryview) -> NDArray[Any]:
    if code != ARRAY or not content:
        raise ValueError(f"extension {code} with {len(content)} bytes is no array")
    start = 1 + content[0]
    dtype, shape = msgspec.msgpack.decode(content[1:start], type=Head)
    stored = "|u1" if dtype == "|b1" else dtype  # every byte but 0 is True
    return np.frombuffer(content[start:], stored).astype(dtype).reshape(shape)


# --- what a service and its client say to each other --------------------------------------------------------


PART = r"[\w-][\w.-]{0,127}"
FILE_NAME = re.compile(rf"({PART}/){{0,3}}{PART}", re.ASCII)  # of a file that a call takes or leaves
WEIGHTS = "weights.safetensors"  # the one of weights alone
BLOCK = 8 << 20  # bytes of a file that cross at once


@record
class Call:
    """One call of a TrainingBackend at a distance."""

    seq_id: int  # calls of a run are done in its order, each once
    method: str
    interrupted: int = -1  # calls up to this one that compute, and have not begun, are not to begin
    batch: RolloutBatch | None = None
    loss: LossSpec | None = None
    params: OptimParams | None = None
    version: int = 0


@record
class Forwarded(ForwardBackwardResult):
    """A ForwardBackwardResult as it crosses."""

    metrics: Any  # what pack_metrics gives


@record
class Answer:
    """What a call came to, in the field of its method, and how the backend is after it."""

    forward_backward: Forwarded | None = None
    forward: FloatRows | None = None
    optim_step: OptimStepResult | None = None
    files: Mapping[str, int] = field(default_factory=dict)  # to be fetched: sizes in bytes, by name
    weight_version: int
    statistics: Numbers


@record
class RunState:
    """Where a run is, and what it samples from."""

    next_seq: int  # of its next call
    features: EngineFeatures
    version: int  # of what was published last; −1: nothing was
    exact: bool  # engine and trainer compute in float32


def pack_metrics(metrics: Metrics) -> dict[str, tuple[str, tuple[float, ...]]]:
    """The name of each one's class, and its numbers."""
    return {name: (type(one).__name__, tuple(map(float, one))) for name, one in metrics.items()}


def unpack_metrics(packed: Mapping[str, tuple[str, Sequence[float]]]) -> dict[str, Metric]:
    """What pack_metrics was given."""
    return {name: METRIC_KINDS[kind](*numbers) for name, (kind, numbers) in packed.items()}


def pack_result(result: ForwardBackwardResult) -> ForwardBackwardResult:
    """As it crosses."""
    packed: Any = pack_metrics(result.metrics)
    return replace(result, metrics=packed)


def unpack_result(sent: Forwarded) -> ForwardBackwardResult:
    """What pack_result was given."""
    values: Fields = {one.name: getattr(sent, one.name) for one in fields(sent)}
    return ForwardBackwardResult(**{**values, "metrics": unpack_metrics(sent.metrics)})
