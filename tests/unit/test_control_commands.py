"""Commands as bytes: what arrives is what was sent, and bytes that are no command are refused with a typed
error, whatever they are.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from rollouts.distributed.commands import ALIGNMENT, DTYPES, Command, decode_command, encode_command
from rollouts.errors import ControlError

NUMBERS = st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)
ARRAYS = st.sampled_from(sorted(DTYPES)).flatmap(
    lambda dtype: st_numpy.arrays(
        np.dtype(dtype), st_numpy.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)
    )
)
COMMANDS = st.builds(
    Command,
    st.text(max_size=10),
    st.dictionaries(st.text(max_size=5), JSON, max_size=4),
    st.dictionaries(st.text(max_size=5), ARRAYS, max_size=4),
)
EXAMPLE = Command(
    "forward_backward",
    {"step": 3, "loss": {"name": "grpo", "clip": 0.2, "units": ["tokens", None, True]}},
    {
        "tokens": np.arange(6, dtype=np.int64).reshape(2, 3),
        "nothing": np.zeros((0, 7), np.float32),
        "scale": np.array(0.5, np.float16),
    },
)


def encode(command: Command) -> bytes:
    return b"".join(encode_command(command))


def forge(head: Any, body: bytes = b"") -> bytes:
    """A message with that header, and arrays that begin where they should."""
    header = msgspec.msgpack.encode(head)
    message = struct.pack("<I", len(header)) + header
    return message + bytes(-len(message) % ALIGNMENT) + body if body else message


@given(COMMANDS)
@settings(deadline=None)
def test_what_arrives_is_what_was_sent(command: Command):
    arrived = decode_command(encode(command))
    assert (arrived.name, arrived.fields) == (command.name, command.fields)
    assert list(arrived.arrays) == list(command.arrays)
    for name, array in command.arrays.items():
        assert arrived.arrays[name].dtype == array.dtype
        assert arrived.arrays[name].shape == array.shape
        assert arrived.arrays[name].tobytes() == array.tobytes()


def test_a_command_that_is_cut_at_any_byte_or_has_one_too_many_is_refused():
    message = encode(EXAMPLE)
    for size in range(len(message)):
        with pytest.raises(ControlError):
            decode_command(message[:size])
    with pytest.raises(
        ControlError, match=rf"has {len(message) + 1} bytes, but its header says {len(message)}"
    ):
        decode_command(message + b"\0")


@given(st.data())
@settings(deadline=None, max_examples=300)
def test_a_changed_byte_gives_another_command_or_a_typed_error(data: st.DataObject):
    message = bytearray(encode(EXAMPLE))
    message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    try:
        arrived = decode_command(bytes(message))
    except ControlError:
        return
    assert sum(array.nbytes for array in arrived.arrays.values()) <= len(message)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (b"", "a command of 0 bytes has no header"),
        (b"\xff\xff\xff\xff", "a header up to byte 4294967299 is cut"),
        (struct.pack("<I", 3) + b"\xc1\xc1\xc1", "malformed header"),
        (struct.pack("<I", 10**6) + b"\x91" * 10**6, "malformed header"),
        (forge(7), "malformed header"),
        (forge({"name": "x"}), "malformed header"),
        (forge(["x", {}]), "malformed header"),
        (forge(["x", {}, [], 1]), "malformed header"),
        (forge(["x", [], []]), "malformed header"),
        (forge(["x", {1: 2}, []]), "malformed header"),
        (forge(["x", {}, [["a", "<f4", [1.5]]]]), "malformed header"),
        (forge(["x", {}, [["a", "<f4", [2**70 % 2**64 + 2**63]]]]), "ends at byte"),
        (forge(["x", {}, [["a", "|O", [1]]]], bytes(8)), "dtype '|O', which is none of"),
        (forge(["x", {}, [["a", ">f4", [1]]]], bytes(4)), "dtype '>f4', which is none of"),
        (forge(["x", {}, [["a", "f4,f4", [1]]]], bytes(8)), "dtype 'f4,f4', which is none of"),
        (forge(["x", {}, [["a", "<f4", [-1]]]], bytes(4)), "has the shape"),
        (forge(["x", {}, [["a", "<f4", [-1, -1]]]], bytes(4)), "has the shape"),
        (forge(["x", {}, [["a", "<f4", [1] * 33]]], bytes(4)), "has the shape"),
        (forge(["x", {}, [["a", "<f4", [2**40, 2**40]]]], bytes(4)), "ends at byte"),
        (forge(["x", {}, [["a", "<f4", [2**62, 0, 2**62]]]], bytes(4)), "has the shape"),
        (forge(["x", {}, [["a", "|u1", [1]], ["a", "|u1", [1]]]], bytes(65)), "has two arrays 'a'"),
    ],
)
def test_a_header_that_lies_is_refused(message: bytes, reason: str):
    with pytest.raises(ControlError) as caught:
        decode_command(message)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"path": Path("x")}, "field 'path' is 'x', a PosixPath"),
        ({"a": {"b": [1, {2}]}}, r"field 'a'.b[1] is '{2}', a set"),
        ({"lr": np.float64(0.5)}, "field 'lr' is '0.5', a float64"),
        ({"raw": b"x"}, "a bytes"),
        ({"steps": {1: 2}}, "a dict with keys that are no text"),
        ({"seed": 2**64}, "cannot be sent"),
        ({"text": "\ud800"}, "cannot be sent"),
    ],
)
def test_a_field_that_json_does_not_know_is_named(fields: dict[str, Any], reason: str):
    with pytest.raises(ControlError) as caught:
        encode_command(Command("open", fields))
    assert reason in str(caught.value)


def test_a_field_without_end_is_refused():
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(ControlError, match="cannot be sent"):
        encode_command(Command("open", {"endless": endless}))


@pytest.mark.parametrize(
    "array",
    [
        np.array(["a"]),
        np.array([None]),
        np.zeros(2, ">i4"),
        np.zeros(2, np.complex64),
        np.zeros(1, "f4,f4"),
        [1, 2],
    ],
)
def test_an_array_of_something_else_is_refused(array: Any):
    with pytest.raises(ControlError, match="command 'open': array 'a' is"):
        encode_command(Command("open", {}, {"a": array}))


def test_a_tuple_arrives_as_a_list_and_numbers_that_json_lacks_arrive_too():
    fields = decode_command(encode(Command("x", {"shape": (1, 2), "inf": -math.inf, "nan": math.nan}))).fields
    assert fields["shape"] == [1, 2] and fields["inf"] == -math.inf and math.isnan(fields["nan"])


def test_arrays_are_copied_neither_in_nor_out_and_cannot_be_written_where_they_arrive():
    tokens, rewards = np.arange(1001), np.ones(3)
    pieces = encode_command(Command("x", {}, {"tokens": tokens, "rewards": rewards}))
    assert [np.shares_memory(np.frombuffer(piece, np.uint8), tokens) for piece in pieces] == [
        False,
        False,
        True,
        False,
        False,
    ]
    buffer = np.frombuffer(b"".join(pieces), np.uint8).copy()
    start = buffer.ctypes.data
    for array in decode_command(buffer.data).arrays.values():
        assert np.shares_memory(array, buffer) and not array.flags.writeable
        assert (array.ctypes.data - start) % ALIGNMENT == 0


def test_an_array_that_is_not_contiguous_arrives_whole():
    table = np.arange(12).reshape(3, 4)
    arrived = decode_command(encode(Command("x", {}, {"columns": table[:, ::2], "turned": table.T}))).arrays
    assert arrived["columns"].tolist() == [[0, 2], [4, 6], [8, 10]]
    assert arrived["turned"].tolist() == table.T.tolist()
