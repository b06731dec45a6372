"""Packed rows: each token is predicted from what precedes it, micro-batches are full, shared beginnings
are computed once.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollouts.data.packing import compute_round_cost, make_micro_batches, spread_to_rows
from tests.support.text_tables import cases


def row(*ids):
    return np.asarray(ids, np.int64)


def mask(text):
    return np.asarray([character == "1" for character in text])


def pack(tokens, masks, budget=99, *, share=True, packed=True, **options):
    return make_micro_batches(
        tokens, masks, micro_batch_tokens=budget, share_prefix=share, padding_free=packed, **options
    )


def test_a_shared_prompt_is_computed_once_and_every_response_sees_it_and_itself():
    (micro,) = pack([row(1, 2, 7, 8, 9), row(1, 2, 5, 6)], [mask("00111"), mask("0011")])
    assert micro.input_ids.tolist() == [[1, 2, 5, 7, 8]]  # the last trained token of a row is only a target
    assert micro.position_ids.tolist() == [[0, 1, 2, 2, 3]]
    assert micro.subtree_end.tolist() == [[5, 5, 3, 5, 5]]
    assert not micro.causal
    assert micro.computed_tokens == 5


def test_skipped_rows_are_left_out():
    tokens, masks = [row(1, 2), row(1, 3)], [mask("01")] * 2
    (micro,) = pack(tokens, masks, packed=False, skip_rows=np.asarray([True, False]))
    assert micro.rows.tolist() == [1]
    assert pack(tokens, masks, skip_rows=np.ones(2, bool)) == []
    np.testing.assert_equal(spread_to_rows([micro], [np.ones(1, np.float32)], tokens), [[0, 0], [0, 1]])


def test_a_trained_first_token_is_refused_by_its_row():
    with pytest.raises(ValueError, match=r"loss_masks\[1\] trains the first token"):
        pack([row(1, 2), row(3, 4)], [mask("01"), mask("11")])


# --- against the obvious ------------------------------------------------------------------------------------

ids = st.lists(st.integers(0, 2), min_size=1, max_size=9)
tries = st.lists(
    st.tuples(st.integers(0, 3), ids, st.integers(0, 6), st.integers(0, 2**9 - 1)), min_size=1, max_size=12
)


def make_rows(drawn):
    """Rows that begin like one of those before them, some equal to it, some a part of it, with any mask that
    spares the first token.
    """
    tokens = []
    for like, more, kept, _ in drawn:
        start = tokens[like % len(tokens)][:kept] if tokens else []
        tokens.append(row(*start, *more))
    masks = [
        np.asarray([place > 0 and bool(bits >> place % 9 & 1) for place in range(len(ids))])
        for ids, (*_, bits) in zip(tokens, drawn, strict=True)
    ]
    return tokens, masks


@settings(deadline=None)
@given(tries, st.integers(1, 40), st.integers(1, 3), st.booleans(), st.booleans(), st.booleans())
def test_every_trained_token_or_its_target_is_predicted_once_from_exactly_what_precedes_it(
    drawn, budget, ranks, share, packed, targeted
):
    tokens, masks = make_rows(drawn)
    targets = [(ids * 7 + np.arange(len(ids)) + r) % 9 for r, ids in enumerate(tokens)] if targeted else None
    options = {"ranks": ranks, "micro_batch_cost": 3, "targets": targets}
    micros = pack(tokens, masks, budget, share=share, packed=packed, **options)
    rows = {r: tuple(tokens[r][: np.flatnonzero(m)[-1]]) for r, m in enumerate(masks) if m.any()}
    found = []
    for micro in micros:
        lines, width = micro.input_ids.shape
        held = [rows[r] for r in micro.rows.tolist()]
        assert micro.computed_tokens <= max(budget, *map(len, held))
        assert np.all(np.diff(micro.predictors) >= 0)
        assert len({*zip(micro.predictors, micro.targets, strict=True)}) == len(micro.targets)
        if packed:  # as few nodes as the rows have beginnings
            beginnings = [one[:end] for one in held for end in range(1, len(one) + 1)]
            assert (lines, width) == (1, len(set(beginnings) if share else beginnings))
        for r, t, pair in zip(
            micro.rows[micro.token_rows], micro.token_positions, micro.token_pairs, strict=True
        ):
            line, node = divmod(int(micro.predictors[pair]), width)
            seen = [j for j in range(node + 1) if micro.causal or node < micro.subtree_end[line, j]]
            assert micro.position_ids[line, seen].tolist() == list(range(len(seen)))
            found.append((r, t, micro.targets[pair], micro.input_ids[line, seen].tolist()))
    wanted = targets or tokens
    assert sorted(found) == [
        (r, t, wanted[r][t], tokens[r][:t].tolist()) for r in rows for t in np.flatnonzero(masks[r])
    ]
    assert not rows or len(micros) >= min(ranks, len(rows))


# --- how full and how even ----------------------------------------------------------------------------------


def test_rows_fill_micro_batches_without_padding():
    """4,000 rows of 1 to 1,999 tokens in budgets of 65,536: at most 1.5 % of room is left over, that of the
    last one included.
    """
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, 50_000, length + 1) for length in rng.integers(1, 2000, 4000)]
    micros = pack(tokens, [np.arange(len(one)) >= 1 for one in tokens], 65_536)
    total = sum(map(len, tokens)) - 4000
    assert 0 <= total - sum(micro.computed_tokens for micro in micros) < 0.001 * total
    assert total / (len(micros) * 65_536) > 0.985


def test_a_chain_of_many_branches_stays_shared():
    """Row k leaves the first row after 10·k tokens, 200 of them: beginnings inside beginnings."""
    rng = np.random.default_rng(0)
    trunk = rng.integers(0, 50_000, 2100)
    tokens = [np.concatenate([trunk[: 10 * turn], rng.integers(0, 50_000, 20)]) for turn in range(1, 201)]
    micros = pack(tokens, [np.arange(len(one)) >= 1 for one in tokens], 3000)
    computed = [micro.computed_tokens for micro in micros]
    # 2,000 + 200·19 if all were together; 200·1,000 if none were
    assert max(computed) <= 3000 and sum(computed) < 12_000


@cases("group: 1 8")
def test_ranks_get_micro_batches_of_even_cost(group: int):
    rng = np.random.default_rng(0)
    tokens = []
    for _ in range(1024 // group):
        prompt = rng.integers(0, 50_000, 30)
        lengths = np.clip(rng.lognormal(5, 0.8, group), 20, 1500).astype(int)
        tokens += [np.concatenate([prompt, rng.integers(0, 50_000, length)]) for length in lengths]
    masks = [np.arange(len(one)) >= 30 for one in tokens]
    micros = pack(tokens, masks, 4096, ranks=8, attention_cost=1e-5)
    costs = [micro.computed_tokens for micro in micros]
    assert len(micros) % 8 == 0
    assert compute_round_cost(costs, 8) * 8 / sum(costs) < 1.03
