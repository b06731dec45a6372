"""Records that cross processes as bytes: what comes back, and what is refused."""

import contextlib
import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from msgspec import msgpack

from rollouts.codec import Answer, Call, decode, encode, pack_result, unpack_result
from rollouts.errors import MessageRefused
from rollouts.testing.torch_contracts import make_batch
from rollouts.types import (
    Completion,
    EffectiveShare,
    ExplainedVariance,
    ForwardBackwardResult,
    GenerateRequest,
    LossSpec,
    Max,
    Mean,
    Min,
    OptimParams,
    RolloutBatch,
    Sample,
    SamplingParams,
    TokenArrays,
    Total,
)
from tests.support.text_tables import cases

NUMBERS = st.floats(width=32)
METRICS = st.one_of(
    *(
        st.tuples(*[NUMBERS] * len(kind._fields)).map(lambda values, kind=kind: kind(*values))
        for kind in (Mean, Total, Max, Min, EffectiveShare, ExplainedVariance)
    )
)


def assert_same(found, wanted):
    """Of the same classes, to the bit."""
    assert type(found) is type(wanted)
    if dataclasses.is_dataclass(wanted):
        for one in dataclasses.fields(wanted):
            assert_same(getattr(found, one.name), getattr(wanted, one.name))
    elif isinstance(wanted, dict | tuple):
        assert len(found) == len(wanted)
        for one, other in zip(
            *((*each.items(),) if isinstance(each, dict) else each for each in (found, wanted)), strict=True
        ):
            assert_same(one, other)
    elif isinstance(wanted, np.ndarray):
        assert found.dtype == wanted.dtype and found.flags.writeable
        np.testing.assert_array_equal(found, wanted)
    else:
        assert found == wanted or (found != found and wanted != wanted)


@st.composite
def batches(draw) -> RolloutBatch:
    lengths = draw(st.lists(st.integers(0, 5), max_size=4))

    def rows(dtype):
        return tuple(draw(arrays.arrays(dtype, length)) for length in lengths)

    return RolloutBatch(
        tokens=rows(np.int64),
        loss_masks=rows(np.bool_),
        advantages=draw(st.none() | st.just(rows(np.float32))),
        targets=draw(st.none() | st.just(rows(np.int64))),
        extras={"weights": rows(np.float32)} if draw(st.booleans()) else {},
        temperature=draw(st.floats(0.1, 2.0)),
    )


@settings(deadline=None)
@given(
    batches(),
    st.dictionaries(st.text(), st.one_of(st.integers(-9, 9), st.floats(), st.booleans(), st.text())),
)
def test_a_call_comes_back_as_it_was(batch, params):
    call = Call(
        seq_id=3,
        method="x",
        batch=batch,
        loss=LossSpec("sft", params),
        params=OptimParams(lr=0.5, betas=(0.1, 0.2)),
    )
    assert_same(decode(encode(call), Call), call)


@settings(deadline=None)
@given(st.dictionaries(st.text(), METRICS), arrays.arrays(np.float32, st.integers(0, 5)))
def test_a_result_comes_back_with_the_classes_of_its_metrics(metrics, row):
    seen = TokenArrays(log_probs=(row,), slopes=(row,), weights=(row,))
    result = ForwardBackwardResult(loss=1.5, denominator=2.0, metrics=metrics, per_token=seen, seconds=0.25)
    answer = Answer(forward_backward=pack_result(result), weight_version=1, statistics={"steps": 1.0})
    assert_same(unpack_result(decode(encode(answer), Answer).forward_backward), result)


def test_samples_and_completions_come_back():
    prompt = ({"role": "user", "content": "hi"},)
    sample = Sample(id="a", prompt=prompt, tokens=[1, 2], loss_mask=[0, 1], metadata={"a": [None, {"b": 1}]})
    found = decode(encode(dataclasses.replace(make_batch(), samples=(sample,))), RolloutBatch).samples[0]
    assert (found.prompt, found.metadata, found.status) == (sample.prompt, sample.metadata, sample.status)
    ids, log_probs = np.arange(3), np.zeros(3, np.float32)
    request = GenerateRequest(request_id="r", prompt_ids=ids, sampling=SamplingParams(max_new_tokens=2))
    answer = Completion(
        request_id="r", token_ids=ids, log_probs=log_probs, weight_versions=ids, finish_reason="stop"
    )
    assert_same(decode(encode(request), GenerateRequest), request)
    assert_same(decode(encode(answer), Completion), answer)


CALL = {"seq_id": 1, "method": "x"}


def pack_array(dtype: str, *shape: int) -> bytes:
    """A Call whose batch has an array of eight bytes that says this as its first row."""
    head = msgpack.encode((dtype, shape))
    array = msgpack.Ext(1, bytes([len(head)]) + head + b"x" * 8)
    return msgpack.encode(CALL | {"batch": {"tokens": [array], "loss_masks": [array]}})


HOSTILE = {
    "nothing": (b"", "truncated"),
    "not msgpack": (b"\xc1", "Call"),
    "a list of four billion": (b"\x83\xa5batch\x81\xa6tokens\xdd\xff\xff\xff\xff", "truncated"),
    "a thousand lists": (b"\x91" * 5000 + b"\xc0", "Expected `object`"),
    "a field missing": (encode({"seq_id": 1}), "method"),
    "a field of another kind": (encode({"seq_id": "1", "method": "x"}), r"\$.seq_id"),
    "a pickled array": (pack_array("|O", 1), "Invalid enum value '|O'"),
    "other bytes than its shape says": (pack_array("<i8", 2), "reshape"),
    "an array of many axes": (pack_array("<i8", *[1] * 40), "axes"),
    "a head that is longer than all": (
        msgpack.encode({"batch": msgpack.Ext(1, b"\xff\x00")}), "Call",
    ),
    "another extension": (
        msgpack.encode({"batch": {"tokens": [msgpack.Ext(7, b"x")]}}),
        "extension 7",
    ),
    "fractions for ids": (pack_array("<f8", 1), r"\$.batch.tokens"),
    "numbers for an array": (
        encode(CALL | {"batch": {"tokens": [[1]]}}), "expected an array",
    ),
    "masks for other rows": (
        encode(CALL | {"batch": {"tokens": [np.arange(2)], "loss_masks": []}}),
        "loss_masks has 0 rows",
    ),
    "a list as a loss's parameter": (
        encode(CALL | {"loss": {"name": "x", "params": {"a": [1]}}}), r"\$.loss.params",
    ),
}  # fmt: skip


@cases("hostile", HOSTILE)
def test_what_is_no_call_is_refused_by_name(hostile):
    message, said = HOSTILE[hostile]
    with pytest.raises(MessageRefused, match=said):
        decode(message, Call)


@settings(deadline=None)
@given(st.binary(max_size=60), st.integers(0, 400))
def test_damaged_bytes_are_refused_or_are_another_call(noise, start):
    message = bytearray(encode(Call(seq_id=1, method="x", batch=make_batch(groups=1, size=1))))
    message[start : start + len(noise)] = noise
    with contextlib.suppress(MessageRefused):
        assert isinstance(decode(bytes(message), Call), Call)


@cases("value: function plain_object huge_number")
def test_what_may_not_cross_is_refused_before_it_is_sent(value):
    values = {"function": print, "plain_object": object(), "huge_number": 2**80}
    with pytest.raises(MessageRefused, match="cannot be sent"):
        encode({"a": values[value]})
