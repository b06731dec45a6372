"""Mixtures: exact proportions at every draw, sources with orders of their own, exact resume."""

import json
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollouts.config.tables import DataSourceConfig
from rollouts.data.data_buffer import DataBuffer
from rollouts.data.datasets import exclude_prompts, load_sources
from rollouts.data.mixture import Mixture, Source, select_samples
from rollouts.errors import DataError
from tests.support.text_tables import cases, write_jsonl


def make_mixture(**sizes_and_weights):
    sources = (
        Source(name, weight, tuple({"prompt": f"{name} {index}"} for index in range(size)))
        for name, (size, weight) in sizes_and_weights.items()
    )
    return Mixture(tuple(sources))


THREE = make_mixture(a=(5, 0.5), b=(3, 0.3), c=(4, 0.2))


# --- the buffer ---------------------------------------------------------------------------------------------


OPERATIONS = st.lists(
    st.tuples(
        st.integers(0, 6),
        st.sets(st.integers(0, 5)),
        st.one_of(st.none(), st.tuples(*[st.sampled_from([0.0, 0.1, 0.25, 1.0])] * 3)),
    ),
    max_size=6,
)


@given(
    st.tuples(*[st.integers(1, 5)] * 3),
    st.tuples(*[st.sampled_from([0.1, 0.3, 1.0, 7.0])] * 3),
    OPERATIONS,
    OPERATIONS,
    st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_saving_at_any_point_leaves_the_future_unchanged(sizes, weights, past, future, shuffle):
    def play(buffer, operations):
        stream = []
        for count, give_back, new_weights in operations:
            if new_weights and any(new_weights):
                buffer.set_weights(dict(zip("abc", new_weights, strict=True)))
            drawn = buffer.get_prompts(count)
            stream += drawn
            buffer.return_prompts([drawn[index] for index in sorted(give_back) if index < count])
        return stream

    a, b, c = zip(sizes, weights, strict=True)
    mixture = make_mixture(a=a, b=b, c=c)
    buffer = DataBuffer(mixture, seed=3, shuffle=shuffle)
    play(buffer, past)
    restored = DataBuffer(mixture, seed=4)
    restored.load_state_dict(json.loads(json.dumps(buffer.state_dict())))
    assert restored.state_dict() == buffer.state_dict()
    future.append((12, set(), None))
    assert play(restored, future) == play(buffer, future)
    assert restored.statistics() == buffer.statistics()


def test_statistics_are_of_every_source_and_the_epoch_is_the_lowest():
    buffer = DataBuffer(THREE, seed=1)
    buffer.get_prompts(10)
    buffer.return_prompts(buffer.get_prompts(1))
    assert buffer.statistics() == json.loads("""{
        "epoch": 0, "drawn": 11, "returned": 1,
        "source/a/epoch": 1, "source/a/drawn": 6, "source/a/share": 0.5,
        "source/b/epoch": 0, "source/b/drawn": 3, "source/b/share": 0.3,
        "source/c/epoch": 0, "source/c/drawn": 2, "source/c/share": 0.2
    }""")
    assert buffer.drawn_by_source() == {"a": 6, "b": 3, "c": 2}
    assert len(buffer) == 12


# --- weights that change ------------------------------------------------------------------------------------


def test_a_small_source_has_its_turns_when_weights_change_before_every_batch():
    buffer = DataBuffer(make_mixture(big=(50, 1.0), small=(50, 1.0)), seed=1)
    expected = 0.0
    for step in range(200):
        share = 0.05 + step / 1_000_000
        buffer.set_weights({"big": 1 - share, "small": share})
        buffer.get_prompts(8)
        expected += 8 * share
        assert abs(buffer.drawn_by_source()["small"] - expected) < 1 + 1e-3
    assert buffer.drawn_by_source()["small"] == 80


@cases("""
weights
a = 1, b = 1
a = 1, b = 1, c = -1
""")
def test_weights_that_are_not_of_the_sources_are_refused(weights: dict):
    buffer = DataBuffer(THREE, seed=0)
    with pytest.raises(DataError, match="are not for the sources a, b, c"):
        buffer.set_weights(weights)
    assert buffer.weights == {"a": 0.5, "b": 0.3, "c": 0.2}


# --- SFT ----------------------------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(st.integers(1, 6), st.sampled_from([0.1, 0.25, 0.3, 1.0, 3.0])), min_size=1, max_size=4
    ),
    st.integers(1, 7),
)
@settings(max_examples=60, deadline=None)
def test_sft_batches_have_the_exact_proportions_and_whole_epochs(parts, batch_size):
    sources = (
        Source(str(owner), weight, tuple((owner, row) for row in range(size)))
        for owner, (size, weight) in enumerate(parts)
    )
    mixture = Mixture(tuple(sources))
    steps = [select_samples(mixture, batch_size, step, 5) for step in range(12)]
    assert [select_samples(mixture, batch_size, step, 5) for step in reversed(range(12))] == steps[::-1]
    drawn = [row for rows in steps for row in rows]
    weights = [Fraction(str(weight)) for _, weight in parts]
    counts = [0] * len(parts)
    for turn, (owner, _) in enumerate(drawn, start=1):
        counts[owner] += 1
        for count, weight in zip(counts, weights, strict=True):
            assert abs(count - weight / sum(weights) * turn) < 1, (turn, counts)
    for index, (size, _) in enumerate(parts):
        rows = [row for owner, row in drawn if owner == index]
        for epoch in range(len(rows) // size):
            assert sorted(rows[epoch * size :][:size]) == [*range(size)]


# --- loading ------------------------------------------------------------------------------------------------


def write(tmp_path, name, *rows):
    path = write_jsonl(tmp_path / f"{name}.jsonl", *rows)
    return DataSourceConfig(kind="jsonl", path=str(path), weight=2.0)


def test_what_is_wrong_with_one_of_several_sources_is_named_by_its_number(tmp_path):
    good = write(tmp_path, "good", {"prompt": "x"})
    with pytest.raises(DataError, match=r"^rl\.data\.1: 1 of 1 rows is malformed"):
        load_sources([good, write(tmp_path, "bad", {"promt": "x"})], name="rl.data")
    with pytest.raises(DataError, match=r"^rl\.data\.1\.path='none': there is no such file"):
        load_sources([good, DataSourceConfig(kind="jsonl", path="none")], name="rl.data")


def test_a_field_called_source_is_refused_only_in_a_mixture(tmp_path):
    rows = [{"prompt": "x", "source": "web"}]
    named, other = write(tmp_path, "named", *rows), write(tmp_path, "other", {"prompt": "y"})
    assert load_sources([named], name="rl.data").sources[0].rows == tuple(rows)
    said = r'rl\.data\.1 \(named\): its rows have a field source.*columns\.NAME = "source"'
    with pytest.raises(DataError, match=said):
        load_sources([other, named], name="rl.data")
    renamed = named.model_copy(update={"columns": {"origin": "source"}})
    (row,) = load_sources([other, renamed], name="rl.data").sources[1].rows
    assert row == {"origin": "web", "prompt": "x"}


def test_held_out_prompts_leave_every_source_and_an_emptied_one_is_named():
    mixture = make_mixture(a=(2, 1.0), b=(1, 1.0))
    kept, removed = exclude_prompts(mixture, [{"prompt": "A 0"}], name="rl.data")
    assert [source.rows for source in kept.sources] == [({"prompt": "a 1"},), mixture.sources[1].rows]
    assert removed == 1
    said = r"rl\.data has no row left from b: all of its prompts are held out by eval\.data"
    with pytest.raises(DataError, match=said):
        exclude_prompts(mixture, [{"prompt": "b 0"}], name="rl.data")
