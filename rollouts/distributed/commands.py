"""Commands that rank 0 sends to the others: a name, JSON values and arrays, as one header and the arrays' own
bytes.

    header bytes (u32) │ header: msgpack [name, fields, [[array name, dtype, shape], …]] │ pad │ array │ pad │ array …

Each array begins at a multiple of 64, so that a view into the buffer is as good as an array of its own.
Nothing is ever pickled, and arrays are copied neither into the message nor out of it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from rollouts.errors import ControlError

PREFIX = struct.Struct("<I")  # bytes of the header
ALIGNMENT = 64
DTYPES = frozenset(
    np.dtype(code).newbyteorder("<").str
    for code in ("?", "b", "B", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8")
)
MOST_DIMS = 32  # numpy's own limit, of the oldest version that may be installed


@dataclass(frozen=True, slots=True, eq=False)
class Command:
    """What the ranks shall do next."""

    name: str
    fields: Mapping[str, Any] = field(default_factory=dict)  # JSON values; a tuple arrives as a list
    arrays: Mapping[str, np.ndarray] = field(
        default_factory=dict
    )  # booleans, integers, floats; read-only where they arrive


class _ArrayHead(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    name: str
    dtype: str
    shape: tuple[int, ...]


class _Head(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    name: str
    fields: dict[str, Any]
    arrays: list[_ArrayHead]


_HEAD_DECODER = msgspec.msgpack.Decoder(_Head)


def encode_command(command: Command) -> list[memoryview]:
    """The message, in pieces to be sent one after the other.

    The pieces share the memory of contiguous arrays: these must not be changed until they are sent. Raises
    ControlError naming the field or array that cannot cross.
    """
    heads: list[_ArrayHead] = []
    for name, array in command.arrays.items():
        if not isinstance(array, np.ndarray) or array.dtype.str not in DTYPES or array.ndim > MOST_DIMS:
            kind = (
                f"an array of {array.dtype}, {array.ndim} dimensions"
                if isinstance(array, np.ndarray)
                else f"a {type(array).__name__}"
            )
            raise ControlError(
                f"command {command.name!r}: array {name!r} is {kind}; numpy arrays of booleans, integers or"
                " floats can be sent"
            )
        heads.append(_ArrayHead(name, array.dtype.str, array.shape))
    try:
        for name, value in command.fields.items():
            _check_json(value, f"command {command.name!r}: field {name!r}")
        header = msgspec.msgpack.encode(_Head(command.name, dict(command.fields), heads))
    except (
        TypeError,
        ValueError,
        OverflowError,
        RecursionError,
    ) as error:  # a lone surrogate is a ValueError
        raise ControlError(f"command {command.name!r} cannot be sent: {error}") from error
    pieces = [memoryview(PREFIX.pack(len(header)) + header)]
    at = pieces[0].nbytes
    for array in command.arrays.values():
        pad = -at % ALIGNMENT
        pieces += [memoryview(bytes(pad)), np.ascontiguousarray(array).reshape(-1).view(np.uint8).data]
        at += pad + array.nbytes
    return [piece for piece in pieces if piece.nbytes]


def decode_command(message: bytes | memoryview) -> Command:
    """The command in a whole message. Its arrays are read-only views of the message.

    Raises ControlError for bytes that are no command: cut, too long, malformed, an impossible array.
    """
    view = memoryview(message).toreadonly()
    if view.nbytes < PREFIX.size:
        raise ControlError(f"a command of {view.nbytes} bytes has no header")
    start = PREFIX.size + PREFIX.unpack_from(view)[0]
    if start > view.nbytes:
        raise ControlError(f"a command of {view.nbytes} bytes with a header up to byte {start} is cut")
    try:
        head = _HEAD_DECODER.decode(view[PREFIX.size : start])
    except (
        msgspec.DecodeError,
        UnicodeDecodeError,
        RecursionError,
    ) as error:  # a validation error is a DecodeError
        raise ControlError(f"a command of {view.nbytes} bytes has a malformed header: {error}") from error
    arrays: dict[str, np.ndarray] = {}
    at = start
    for array_head in head.arrays:
        at += -at % ALIGNMENT
        array, at = _read_array(view, at, array_head, head.name)
        if arrays.setdefault(array_head.name, array) is not array:
            raise ControlError(f"command {head.name!r} has two arrays {array_head.name!r}")
    if at != view.nbytes:
        raise ControlError(f"command {head.name!r} has {view.nbytes} bytes, but its header says {at}")
    return Command(head.name, head.fields, arrays)


def _read_array(view: memoryview, at: int, head: _ArrayHead, command: str) -> tuple[np.ndarray, int]:
    """The array that begins at byte `at`, and where it ends."""
    who = f"command {command!r}: array {head.name!r}"
    if head.dtype not in DTYPES:
        raise ControlError(f"{who} has dtype {head.dtype[:40]!r}, which is none of {sorted(DTYPES)}")
    if len(head.shape) > MOST_DIMS or any(size < 0 for size in head.shape):
        raise ControlError(f"{who} has the shape {str(head.shape)[:200]}")
    dtype = np.dtype(head.dtype)
    end = at + math.prod(head.shape) * dtype.itemsize
    if end > view.nbytes:
        raise ControlError(
            f"{who} ends at byte {end} of {view.nbytes}: the command is cut, or the shape"
            f" {str(head.shape)[:200]} is wrong"
        )
    try:
        return np.frombuffer(view[at:end], dtype).reshape(head.shape), end
    except (ValueError, OverflowError) as error:  # empty, but with a size that numpy cannot hold
        raise ControlError(f"{who} has the shape {str(head.shape)[:200]}: {error}") from error


def _check_json(value: Any, where: str) -> None:
    """Raises ControlError unless `value` is what JSON knows; types that encode to it by themselves (enums,
    numpy's numbers) are refused too.
    """
    if value is None or type(value) in (str, bool, int, float):
        return
    if isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            _check_json(inner, f"{where}[{index}]")
    elif isinstance(value, dict) and all(type(key) is str for key in value):
        for key, inner in value.items():
            _check_json(inner, f"{where}.{key}")
    else:
        kind = type(value).__name__ + (" with keys that are no text" if isinstance(value, dict) else "")
        raise ControlError(
            f"{where} is {str(value)[:80]!r}, a {kind}; text, numbers, booleans, None, lists and dicts can be"
            " sent"
        )
