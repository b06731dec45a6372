"""A row of samples.jsonl: texts, and beside them at most 700 bytes."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rollouts.metrics.record import encode_row, make_head
from rollouts.metrics.sample_rows import encode_sample_rows, shorten_failure
from rollouts.types import Sample, Status

HEAD = make_head("eval-preference", 1_000_000, 1_000_000, 999, 1_700_000_000.123)
ROW_BYTES = 700  # what docs/run_directory.md promises

finite = st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | finite | st.text(max_size=300),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=20), inner, max_size=5),
    max_leaves=20,
)
failures = st.fixed_dictionaries(
    dict.fromkeys(("class", "function", "message", "traceback"), st.text(max_size=3000))
)
samples = st.builds(
    Sample,
    id=st.text(st.characters(codec="ascii", categories=["L", "N", "P"]), min_size=1, max_size=40),
    prompt=st.text(max_size=2000),
    response=st.text(max_size=2000),
    tokens=st.just(np.arange(100_000)),
    loss_mask=st.just(np.ones(100_000)),
    weight_versions=st.just(np.full(100_000, 1_000_000)),
    reward=st.none() | finite,
    rewards=st.dictionaries(st.text(max_size=60), finite, max_size=40),
    group_index=st.just(99_999_999),
    status=st.just(Status.TRUNCATED),
    metadata=st.dictionaries(st.text(max_size=60), values, max_size=30),
)


@settings(max_examples=150, deadline=None)
@given(sample=samples, failure=st.none() | failures | values)
def test_a_row_is_at_most_700_bytes_beside_its_texts(sample: Sample, failure: Any):
    metadata = sample.metadata | ({} if failure is None else {"failure": failure})
    row = json.loads(encode_sample_rows(HEAD, [dataclasses.replace(sample, metadata=metadata)]))
    kept: dict[str, Any] = row.get("metadata", {})
    texts: dict[str, Any] = {"prompt": "", "response": ""}
    if "failure" in kept:
        texts["metadata"] = kept | {"failure": {}}
    assert len(encode_row(row | texts)) <= ROW_BYTES
    assert row["id"] == sample.id
    assert len(row.get("rewards", {})) + row.get("rewards_cut", 0) == len(sample.rewards), "kept or counted"
    assert len(kept) + row.get("metadata_cut", 0) == len(metadata), "each key is kept or counted"
    assert [key for key in metadata if key in kept and key != "failure"] == [
        key for key in kept if key != "failure"
    ]
    assert ("failure" in kept) == ("failure" in metadata)


def test_a_failure_keeps_its_four_texts_each_cut():
    texts = {"class": "reward", "function": "f", "message": "m"}
    cut = 2000 * "y" + "… (3000 characters)"
    failure = {**texts, "traceback": 3000 * "y", "more": "z"}
    assert shorten_failure(failure) == {**texts, "traceback": cut}
    assert shorten_failure(3000 * "y") == cut
