from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollouts.data.bins import compute_round_cost, divide_lengths, fill_bins, spread_over_bins
from rollouts.data.packing import make_micro_batches
from rollouts.data.tries import count_common_of, sort_rows


def answers(
    prompt: np.ndarray, lengths: list[int], rng: np.random.Generator
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Rows that begin with `prompt` and train all of what follows."""
    tokens = [np.concatenate([prompt, rng.integers(0, 50_000, length)]) for length in lengths]
    return tokens, [np.arange(len(row)) >= len(prompt) for row in tokens]


def needed(tokens: list[np.ndarray], masks: list[np.ndarray]) -> dict[int, tuple[int, ...]]:
    """The tokens of each row that are computed: those before its last trained one."""
    return {
        row: tuple(tokens[row][: np.flatnonzero(mask)[-1]].tolist())
        for row, mask in enumerate(masks)
        if mask.any()
    }


def count_beginnings(rows: list[tuple[int, ...]]) -> int:
    """Nodes of the trie of some rows: their different beginnings."""
    return len({row[:end] for row in rows for end in range(1, len(row) + 1)})


# --- against the obvious ------------------------------------------------------------------------------------

ids = st.lists(st.integers(0, 2), min_size=1, max_size=9)
tries = st.lists(
    st.tuples(st.integers(0, 3), ids, st.integers(0, 6), st.integers(0, 2**9 - 1)), min_size=1, max_size=12
)


def make_rows(drawn) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Rows that begin like one of those before them, some equal to it, some a part of it, with any mask that
    spares the first token.
    """
    tokens: list[np.ndarray] = []
    masks: list[np.ndarray] = []
    for like, more, kept, bits in drawn:
        start = tokens[like % len(tokens)][:kept] if tokens else np.zeros(0, np.int64)
        tokens.append(np.concatenate([start, more]).astype(np.int64))
        masks.append(
            np.asarray([place > 0 and bool(bits >> place % 9 & 1) for place in range(len(tokens[-1]))])
        )
    return tokens, masks


@settings(deadline=None)
@given(tries, st.integers(1, 40), st.integers(1, 20), st.integers(1, 3), st.booleans(), st.booleans())
def test_tries_spell_every_row_and_every_trained_token_is_predicted_once(
    drawn, budget, packed_length, ranks, share, free
):
    tokens, masks = make_rows(drawn)
    micros = make_micro_batches(
        tokens,
        masks,
        micro_batch_tokens=budget,
        share_prefix=share,
        padding_free=free,
        ranks=ranks,
        packed_length=packed_length,
        micro_batch_cost=3,
    )
    rows = needed(tokens, masks)
    found: dict[tuple[int, int], list[tuple[int, tuple[int, ...]]]] = {}
    for micro in micros:
        lines, width = micro.input_ids.shape
        longest = max(
            len(rows[row]) for row in micro.rows.tolist()
        )  # which may bring rows along that it begins with, at no cost
        assert micro.computed_tokens <= max(budget, longest)
        assert not free or (lines == 1 and int(np.diff(micro.segments[:, 1:3]).sum()) == width)
        sees = [
            [j <= i < micro.subtree_end[line, j] for j in range(width)]
            for line in range(lines)
            for i in range(width)
        ]
        assert np.all(np.diff(micro.predictors) >= 0)
        assert len({*zip(micro.predictors.tolist(), micro.targets.tolist(), strict=True)}) == len(
            micro.targets
        )
        assert set(micro.token_pairs.tolist()) == set(range(len(micro.targets)))
        if share:  # as few nodes as the rows of each packed row have beginnings
            held = [rows[row] for row in micro.rows.tolist()]
            assert lines > 1 or count_beginnings(held) == width
        for row, position, pair in zip(
            micro.rows[micro.token_rows], micro.token_positions, micro.token_pairs, strict=True
        ):
            place = int(micro.predictors[pair])
            seen = np.flatnonzero(sees[place])
            line = place // width
            assert micro.position_ids[line, seen].tolist() == list(range(len(seen)))
            found.setdefault((int(row), int(position)), []).append(
                (int(micro.targets[pair]), tuple(micro.input_ids[line, seen].tolist()))
            )
    wanted = {
        (row, int(t)): [(int(tokens[row][t]), tuple(tokens[row][:t].tolist()))]
        for row in rows
        for t in np.flatnonzero(masks[row])
    }
    assert found == wanted
    if free or not share:  # else a rank goes without rather than that what begins alike is parted
        assert not rows or len(micros) >= min(ranks, len(rows))


@settings(deadline=None)
@given(tries, st.integers(1, 40), st.booleans())
def test_segments_are_the_unbranched_pieces_and_say_what_a_node_sees(drawn, budget, free):
    tokens, masks = make_rows(drawn)
    for micro in make_micro_batches(
        tokens, masks, micro_batch_tokens=budget, share_prefix=True, padding_free=free, packed_length=12
    ):
        assert micro.segments.tolist() == sorted(micro.segments.tolist())
        for line in range(len(micro.input_ids)):
            pieces = micro.segments[micro.segments[:, 0] == line]
            count = int(pieces[-1, 2])
            assert [0, *pieces[:-1, 2]] == pieces[:, 1].tolist()  # side by side, nothing left out
            sees = np.asarray(
                [[j <= i < micro.subtree_end[line, j] for j in range(count)] for i in range(count)]
            )
            for _, first, last, above in pieces.tolist():
                seen: list[int] = []
                while above >= 0:
                    seen = [*range(*micro.segments[above, 1:3]), *seen]
                    above = int(micro.segments[above, 3])
                for node in range(first, last):
                    assert np.flatnonzero(sees[node]).tolist() == [*seen, *range(first, node + 1)]
            # as long as they can be: one ends where its last node has no child, or several
            depth = micro.position_ids[line]
            children = [
                sum(bool(sees[i][j]) and depth[i] == depth[j] + 1 for i in range(j + 1, count))
                for j in range(count)
            ]
            assert all(children[last - 1] != 1 for _, _, last, _ in pieces.tolist())
            assert all(
                children[node] == 1
                for _, first, last, _ in pieces.tolist()
                for node in range(first, last - 1)
            )


# --- one packed row a micro-batch ---------------------------------------------------------------------------


def test_rows_fill_micro_batches_without_padding():
    """4,000 rows of 1 to 1,999 tokens in budgets of 65,536: at most 1.5 % of room is left over, that of the
    last one included.
    """
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, 50_000, length + 1) for length in rng.integers(1, 2000, 4000)]
    micros = make_micro_batches(
        tokens,
        [np.arange(len(row)) >= 1 for row in tokens],
        micro_batch_tokens=65_536,
        share_prefix=True,
        padding_free=True,
    )
    total = sum(len(row) - 1 for row in tokens)
    shared = total - sum(micro.computed_tokens for micro in micros)
    assert 0 <= shared < 0.001 * total
    assert total / (len(micros) * 65_536) > 0.985


def test_a_chain_of_many_branches_stays_shared():
    """Row k leaves the first row after 10·k tokens, 200 of them: beginnings inside beginnings, more than are
    looked into one by one.
    """
    rng = np.random.default_rng(0)
    trunk = rng.integers(0, 50_000, 2100)
    tokens = [np.concatenate([trunk[: 10 * turn], rng.integers(0, 50_000, 20)]) for turn in range(1, 201)]
    masks = [np.arange(len(row)) >= 1 for row in tokens]
    micros = make_micro_batches(tokens, masks, micro_batch_tokens=3000, share_prefix=True, padding_free=True)
    assert max(micro.computed_tokens for micro in micros) <= 3000
    assert (
        sum(micro.computed_tokens for micro in micros) < 12_000
    )  # 2,000 + 200·19 if all were together; 200·1,000 if none were


# --- ranks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [1, 8])
def test_ranks_get_micro_batches_of_even_cost(group: int):
    rng = np.random.default_rng(0)
    tokens, masks = [], []
    for _ in range(1024 // group):
        lengths = np.clip(rng.lognormal(5, 0.8, group), 20, 1500).astype(int).tolist()
        rows, trained = answers(rng.integers(0, 50_000, 30), lengths, rng)
        tokens, masks = tokens + rows, masks + trained
    micros = make_micro_batches(
        tokens,
        masks,
        micro_batch_tokens=4096,
        share_prefix=True,
        padding_free=True,
        ranks=8,
        attention_cost=1e-5,
    )
    costs = [float(micro.computed_tokens) for micro in micros]
    assert len(micros) % 8 == 0
    assert compute_round_cost(costs, 8) * 8 / sum(costs) < 1.03


def test_items_without_room_are_refused():
    assert spread_over_bins(np.asarray([6, 6, 6]), np.asarray([6.0, 6.0, 6.0]), 2, 10, ranks=1) is None
    found = spread_over_bins(np.asarray([6, 6, 4]), np.asarray([6.0, 6.0, 4.0]), 2, 10, ranks=1)
    assert found is not None and sorted(np.bincount(found, weights=[6, 6, 4]).tolist()) == [6, 10]


# --- bins ---------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.lists(st.integers(1, 30), max_size=40), st.integers(1, 30))
def test_best_fit_equals_the_slow_search(sizes: list[int], capacity: int):
    rooms: list[int] = []
    for size in sorted(sizes, reverse=True):
        fitting = [room for room in rooms if room >= size]
        if fitting:
            rooms.remove(min(fitting))
        rooms.append((min(fitting) if fitting else capacity) - size)
    bins = fill_bins(np.asarray(sizes, np.int64), capacity)
    assert sorted(capacity - np.bincount(bins, weights=sizes)) == sorted(rooms)


@settings(deadline=None)
@given(st.lists(st.integers(1, 40), max_size=40), st.integers(1, 200), st.integers(0, 60))
def test_the_division_is_the_cheapest_by_the_quadratic_recurrence(lengths: list[int], budget: int, cost: int):
    lengths = sorted(lengths, reverse=True)
    best = [0]
    for last in range(1, len(lengths) + 1):
        padded = [(first, (last - first) * lengths[first]) for first in range(last)]
        best.append(
            min(
                best[first] + tokens + cost
                for first, tokens in padded
                if tokens <= budget or first == last - 1
            )
        )
    cuts = divide_lengths(lengths, budget, cost)
    assert [first for first, _ in cuts] == [0, *(last for _, last in cuts[:-1])][: len(cuts)]
    assert all((last - first) * lengths[first] <= budget or last - first == 1 for first, last in cuts)
    assert sum((last - first) * lengths[first] + cost for first, last in cuts) == best[-1]


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=2, max_size=12))
def test_what_two_sorted_rows_share_is_the_least_between_them(rows: list[list[int]]):
    tokens = [np.asarray(row, np.int64) for row in rows]
    found = sort_rows(tokens, np.arange(len(rows)), np.asarray([len(row) for row in rows]), share=True)
    by_place = [rows[number] for number in found.numbers]
    assert by_place == sorted(rows)
    pairs = np.asarray(list(itertools.combinations(range(len(rows)), 2)))
    shared = [
        sum(
            1
            for _ in itertools.takewhile(
                lambda two: two[0] == two[1], zip(by_place[i], by_place[j], strict=False)
            )
        )
        for i, j in pairs
    ]
    assert count_common_of(found, pairs[:, 0], pairs[:, 1]).tolist() == shared
