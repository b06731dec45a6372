"""A row of samples.jsonl: texts, and beside them at most 700 bytes."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rollouts.metrics.record import encode_row, make_head
from rollouts.metrics.sample_rows import (
    encode_sample_rows,
    shorten_failure,
)
from rollouts.types import Sample, Status

HEAD = make_head("eval-preference", 1_000_000, 1_000_000, 999, 1_700_000_000.123)
ROW_BYTES = 700  # what docs/run_directory.md promises

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=300),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=20), inner, max_size=5),
    max_leaves=20,
)
failures = st.fixed_dictionaries(
    {name: st.text(max_size=3000) for name in ("class", "function", "message", "traceback")}
)
finite = st.floats(allow_nan=False, allow_infinity=False)


def make_rows(samples: list[Sample]) -> list[dict[str, Any]]:
    """What the lines say."""
    data = encode_sample_rows(HEAD, samples)
    assert not data or data.endswith(b"\n")
    return [json.loads(line) for line in data.splitlines()]


def count_beside_texts(row: dict[str, Any]) -> int:
    """Bytes of a row's JSON without what is in prompt, response and the failure."""
    metadata = row.get("metadata", {})
    metadata = metadata | ({"failure": {}} if "failure" in metadata else {})
    return len(
        encode_row(row | {"prompt": "", "response": ""} | ({"metadata": metadata} if metadata else {}))
    )


@settings(max_examples=150, deadline=None)
@given(
    sample_id=st.text(st.characters(codec="ascii", categories=["L", "N", "P"]), min_size=1, max_size=40),
    texts=st.tuples(st.text(max_size=2000), st.text(max_size=2000)),
    rewards=st.dictionaries(st.text(max_size=60), finite, max_size=40),
    metadata=st.dictionaries(st.text(max_size=60), values, max_size=30),
    failure=st.none() | failures | values,
    reward=st.none() | finite,
)
def test_a_row_is_at_most_700_bytes_beside_its_texts(
    sample_id: str,
    texts: tuple[str, str],
    rewards: dict[str, float],
    metadata: dict[str, Any],
    failure: Any,
    reward: float | None,
):
    if failure is not None:
        metadata["failure"] = failure
    sample = Sample(
        id=sample_id,
        prompt=texts[0],
        response=texts[1],
        tokens=np.arange(100_000),
        loss_mask=np.ones(100_000),
        weight_versions=np.full(100_000, 1_000_000),
        reward=reward,
        rewards=rewards,
        group_index=99_999_999,
        status=Status.TRUNCATED,
        metadata=metadata,
    )
    [row] = make_rows([sample])
    assert count_beside_texts(row) <= ROW_BYTES
    assert json.loads(encode_row(row))["id"] == sample_id
    others = {key: value for key, value in row.get("metadata", {}).items() if key != "failure"}
    assert len(row.get("rewards", {})) + row.get("rewards_cut", 0) == len(rewards), (
        "each part is kept or counted"
    )
    assert len(others) + row.get("metadata_cut", 0) == len(metadata) - ("failure" in metadata), (
        "each key is kept or counted"
    )
    assert [key for key in metadata if key in others] == list(others), "in their order"
    assert ("failure" in row.get("metadata", {})) == ("failure" in metadata)


def test_a_failure_keeps_its_four_texts_each_cut():
    failure = {"class": "reward", "function": "f", "message": "m", "traceback": 3000 * "y", "more": "z"}
    assert shorten_failure(failure) == {
        "class": "reward",
        "function": "f",
        "message": "m",
        "traceback": 2000 * "y" + "… (3000 characters)",
    }
    assert shorten_failure(3000 * "y") == 2000 * "y" + "… (3000 characters)"
