"""The bytes of Tinker's protobuf: read and written as the SDK does, and refused where they are nonsense."""

from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollouts.errors import ServiceRefused
from rollouts.serve.bodies import CreateModel, OptimStep, Sample, Tensor, read_body
from rollouts.serve.losses import choose_loss
from rollouts.serve.wire import (
    MESSAGES,
    encode_samples,
    encode_train_output,
    parse_envelope,
    parse_targets,
    parse_tensor,
    parse_train_request,
)
from rollouts.types import Completion
from tests.serve.clients import encode_train, make_datum
from tests.support.text_tables import cases

# what the SDK's own code makes of: model "s:train:0", seq 1, tokens [5, 6], targets [6, 7], weights [0, 1],
# cross_entropy, settings a 0.5 and b "x"
REQUEST = bytes.fromhex(
    "0a09733a747261696e3a3010011a540a0c0a0a0a08050000000600000012280a0d7461726765745f746f6b656e7312170a100600000000"
    "00000007000000000000001802220102121a0a0777656967687473120f0a08000000000000803f1801220102220d63726f73735f656e74"
    "726f70792a0c0a016111000000000000e03f3a0e0a0161120909000000000000e03f3a080a01621203120178"
)
TRAINED = bytes.fromhex(  # log-probs [[-1, -1.5], [-0.5]], loss:sum 2.5
    "0a0b41727261795265636f7264123a12360a086c6f6770726f6273122a0a0c000080bf0000c0bf000000bf121800000000000000000800"
    "0000000000000c00000000000000180118021a130a086c6f73733a73756d110000000000000440"
)
SAMPLED = bytes.fromhex(  # [10, 11] with log-probs [-.5, -.25], cut by its length; of the prompt [NaN, -1]
    "0a16080112080a0000000b0000001a08000000bf000080be12080000c07f000080bf"
)
parse = partial(parse_train_request, vocab_size=200, context=16, max_tokens=40)


def test_a_request_of_the_sdk_is_read():
    assert parse_envelope(REQUEST) == ("s:train:0", 1, False)
    (datum,), *rest = parse(REQUEST)
    assert rest == ["cross_entropy", {"a": 0.5, "b": "x"}, False]
    assert datum.tokens.tolist() == [5, 6]
    assert {name: (values.tolist(), values.dtype.str) for name, values in datum.inputs.items()} == {
        "target_tokens": ([6, 7], "<i8"),
        "weights": ([0.0, 1.0], "<f4"),
    }


def test_answers_are_the_bytes_that_the_sdk_reads():
    rows = [np.array([-1, -1.5], np.float32), np.array([-0.5], np.float32)]
    fields = MESSAGES["Trained"]
    # the order of fields in bytes is free; those of a map's entries are the SDK's too
    assert fields.FromString(encode_train_output(rows, {"loss:sum": 2.5})) == fields.FromString(TRAINED)
    completion = Completion(
        token_ids=np.array([10, 11]),
        log_probs=np.array([-0.5, -0.25], np.float32),
        finish_reason="length",
        request_id="",
        weight_versions=np.zeros(2, np.int64),
        prompt_log_probs=np.array([0, -1], np.float32),
    )
    assert encode_samples([completion], last=None) == SAMPLED


def test_datums_of_another_number_of_targets_are_in_a_record_of_their_own():
    rows = [np.zeros(2, np.float32), np.ones((3, 2), np.float32), np.full((1, 2), 2, np.float32)]
    records = MESSAGES["Trained"].FromString(encode_train_output(rows, {})).outputs
    assert [one.num_datums for one in records] == [1, 2]
    second = records[1].fields[0].value
    assert np.frombuffer(second.data, "<f4").tolist() == [1.0] * 6 + [2.0] * 2
    assert (np.frombuffer(second.offsets, "<i8").tolist(), [*second.trailing_shape]) == ([0, 24, 32], [2])


def make_sparse(**changed):
    """The protocol's own example: [4, 50] with a 1 in row 1, column 3."""
    tensor = MESSAGES["Tensor"](dtype=2, shape=changed.pop("shape", [4, 50]))
    given = {"values": [1], "crow": [0, 0, 1, 1, 1], "col": [3]} | changed
    for name, values in given.items():
        setattr(tensor.sparse, name, np.asarray(values, "<i8").tobytes())
    return tensor


def test_sparse_tensors_are_zero_where_they_list_nothing():
    wanted = np.zeros((4, 50), np.int64)
    wanted[1, 3] = 1
    assert np.array_equal(parse_tensor(make_sparse(), "x"), wanted)


@cases("""
changed
{"shape": [-4, 50]}
{"shape": [4]}
{"shape": [1099511627776, 1099511627776]}
{"shape": [4611686018427387904, 4]}
{"crow": [0, 1]}
{"crow": [0, 0, 2, 2, 2]}
{"crow": [0, 0, -1, 1, 1]}
{"crow": [0, 0, 1152921504606846976, 1152921504606846976, 1152921504606846976]}
{"col": [50]}
{"col": [-1]}
{"values": []}
{"values": [1, 2, 3]}
{"crow": []}
{"crow": [0, 0, 1073741824, 1073741824, 1]}
""")
def test_sparse_tensors_that_do_not_fit_are_refused(changed: Any):
    with pytest.raises(ServiceRefused, match="x is no array"):
        parse_tensor(make_sparse(**changed), "x")


GOOD = make_datum(range(5))


@cases(r"""
changed | says
{"tokens": [0, 1, 2, 200]} | data\[0\].model_input has the token id 200
{"tokens": [0, 1, 2, -1]} | data\[0\].model_input has the token id -1
{"tokens": []} | at least one token
{"target_tokens": [0, 1, 2, -7]} | has the token id -7
{"target_tokens": [1.5, 1.5, 1.5, 1.5]} | has the token id 1.5
{"target_tokens": [[[0, 0]], [[0, 0]], [[0, 0]], [[0, 0]]]} | has shape
{"target_tokens": [[], [], [], []], "weights": [[], [], [], []]} | has shape
{"weights": [0, 0, 0]} | 'weights'\] has shape \[3\]; of 4 tokens it must be \[4\]
{"weights": [[0, 0], [0, 0], [0, 0], [0, 0]]} | must be \[4\]
{"weights": [NaN, NaN, NaN, NaN]} | not finite
{"advantages": [Infinity, 0, 0, 0]} | not finite
{"advantages": [[0, 0], [0, 0], [0, 0], [0, 0]]} | must be \[4\]
""")
def test_a_datum_that_makes_no_sense_is_refused_by_name(changed: Any, says):
    kinds = {"weights": np.float32, "advantages": np.float32}
    arrays = {name: np.asarray(values, kinds.get(name)) for name, values in changed.items()}
    with pytest.raises(ServiceRefused, match=says):
        parse(encode_train("m", 1, [GOOD | arrays]))


def test_a_datum_longer_than_the_context_is_refused():
    parse(encode_train("m", 1, [make_datum(range(17))]))
    with pytest.raises(ServiceRefused, match="context holds 16"):
        parse(encode_train("m", 1, [make_datum(range(18))]))


def test_more_tokens_than_a_request_may_have_are_refused():
    parse(encode_train("m", 1, [GOOD] * 10))
    with pytest.raises(ServiceRefused, match="more than 40 targets"):
        parse(encode_train("m", 1, [GOOD] * 11))


def test_chunks_that_are_no_text_and_no_targets_are_refused():
    message = MESSAGES["Train"].FromString(encode_train("m", 1, [GOOD]))
    message.data[0].chunks.add().image.data = b"png"
    with pytest.raises(ServiceRefused, match="text alone"):
        parse(message.SerializeToString())
    message.data[0].ClearField("chunks")
    message.data[0].chunks.add().text.tokens = b"123"  # less than one token
    with pytest.raises(ServiceRefused):
        parse(message.SerializeToString())
    message.data[0].ClearField("inputs")
    with pytest.raises(ServiceRefused):
        parse(message.SerializeToString())


def try_all(body):
    choose_loss(parse(body))
    parse_envelope(body)


def refuses_or_takes(call, *arguments):
    with suppress(ServiceRefused):
        call(*arguments)


@given(st.binary(max_size=300))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_taken_or_refused(body):
    refuses_or_takes(try_all, body)
    for kind in (OptimStep, CreateModel, Sample):
        refuses_or_takes(read_body, body, kind)


@given(
    st.lists(st.tuples(st.integers(0, len(REQUEST) - 1), st.integers(0, 255)), max_size=4),
    st.integers(0, 200),
)
@settings(max_examples=500, deadline=None)
def test_a_request_with_wrong_bytes_is_taken_or_refused(changes, end):
    body = bytearray(REQUEST)
    for place, value in changes:
        body[place] = value
    refuses_or_takes(try_all, bytes(body))
    refuses_or_takes(parse_envelope, bytes(body))
    refuses_or_takes(try_all, bytes(body[:end]))


shapes = st.lists(st.sampled_from([-1, 0, 1, 2, 3, 1 << 31, 1 << 62]), max_size=3)
numbers = st.lists(st.sampled_from([-(1 << 62), -1, 0, 1, 2, 3, 1 << 40, 1 << 62]), max_size=4)


@given(shapes, numbers, numbers, numbers, st.integers(0, 5), st.booleans())
@settings(max_examples=500, deadline=None)
def test_any_tensor_is_taken_or_refused(shape, values, crow, col, dtype, sparse):
    tensor = MESSAGES["Tensor"](dtype=dtype, shape=shape)
    if sparse:
        tensor.sparse.values, tensor.sparse.crow, tensor.sparse.col = (
            np.asarray(one, "<i8").tobytes() for one in (values, crow, col)
        )
    else:
        tensor.dense = np.asarray(values, "<i8").tobytes()
    refuses_or_takes(parse_tensor, tensor, "x")


@given(shapes, numbers, st.none() | numbers, st.none() | numbers)
@settings(max_examples=300, deadline=None)
def test_any_targets_of_a_prompt_are_taken_or_refused(shape, data, crow, col):
    refuses_or_takes(parse_targets, Tensor(data, shape, crow, col), 3)
