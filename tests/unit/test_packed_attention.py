"""Attention of a packed row is that of a dense mask, forward and backward, and no sequence feels another."""

import functools
import json

import numpy as np
import pytest
import torch

from rollouts.data.packing import spread_to_rows
from rollouts.errors import ModelError
from rollouts.models.forward_plan import compute_micro_batch_outputs, plan_forward
from rollouts.models.packed_attention import (
    SMALL_TILE,
    TILE,
    PackedRow,
    attend_packed,
    find_pieces,
    make_block_mask,
    register_packed_attention,
)
from rollouts.types import IntArray
from tests.support.plain_backend import load_tiny
from tests.support.text_tables import cases
from tests.unit.test_packing import pack

Tree = tuple[IntArray, IntArray]


def make_tree(rng, levels, longest):
    """subtree_end and depths of a random tree: a run of nodes, and below it two or three smaller trees."""
    length = int(rng.integers(1, longest + 1))
    children = [make_tree(rng, levels - 1, longest) for _ in range(int(rng.integers(2, 4)))] if levels else []
    ends, depths = put_side_by_side(children)
    run = np.arange(length)
    return np.append(run * 0 + length + len(ends), ends + length), np.append(run, depths + length)


def put_side_by_side(trees):
    ends, depths = np.zeros((2, 0), np.int64)
    for tree_ends, tree_depths in trees:
        ends, depths = np.append(ends, tree_ends + len(ends)), np.append(depths, tree_depths)
    return ends, depths


def see_densely(ends, depths, window=None):
    """[S, S] by the definition."""
    i, j = np.arange(len(ends))[:, None], np.arange(len(ends))[None, :]
    seen = (j <= i) & (i < ends[j])
    return torch.from_numpy(seen if window is None else seen & (depths[i] - depths[j] < window))


attend_densely = functools.partial(torch.nn.functional.scaled_dot_product_attention, enable_gqa=True)


def draw_heads(count, *, seed=0, size=8, dtype=torch.float64):
    """query [1, 4, S, size], key and value [1, 2, S, size]."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(1, heads, count, size) for heads in (4, 2, 2)]
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


@cases("tile", [SMALL_TILE, 11, TILE])
@cases("window", [None, 1, 3, 20])
@cases("seed: 0 1 2 3")
def test_output_and_gradients_are_those_of_a_dense_mask(seed: int, window, tile):
    rng, longest = np.random.default_rng(seed), 25 if tile > SMALL_TILE else 9
    ends, depths = put_side_by_side([make_tree(rng, levels, longest) for levels in rng.permutation(3)])
    tensors = query, key, value = draw_heads(len(ends), seed=seed)
    row = PackedRow(ends, depths, tile)
    output = attend_packed(query, key, value, row, window=window, scale=0.3).transpose(1, 2)
    expected = attend_densely(query, key, value, see_densely(ends, depths, window), scale=0.3)
    weights = torch.from_numpy(rng.normal(size=output.shape))
    grads = [torch.autograd.grad(one, tensors, weights) for one in (output, expected)]
    torch.testing.assert_close((output, *grads[0]), (expected, *grads[1]), atol=1e-12, rtol=0)


def trees(*, longest, count=2, levels=2):
    return put_side_by_side(
        [make_tree(np.random.default_rng(seed), levels, longest) for seed in range(count)]
    )


@cases(
    "tree, tile, window, spare",
    [
        # of each triangle or masked square at most the whole
        (trees(longest=9), SMALL_TILE, None, SMALL_TILE),
        (trees(longest=200), TILE, None, TILE),
        # at the edge of a window masked squares of four tiles
        ((np.full(4096, 4096), np.arange(4096)), TILE, 600, 8 * TILE),
    ],
)
def test_every_visible_pair_is_in_one_piece_and_few_others_are_computed(tree, tile, window, spare):
    times = np.zeros((len(tree[0]),) * 2, np.int64)
    computed = 0
    for piece in find_pieces(PackedRow(*tree, tile), window, torch.float32):
        square = np.ones_like(times[piece.queries, piece.keys], np.bool_)
        computed += square.size
        if piece.mask is not None:
            assert square.size <= (4 * tile) ** 2
            square = piece.mask.numpy() == 0
        times[piece.queries, piece.keys] += np.tril(square) if piece.causal else square
    visible = see_densely(*tree, window).numpy()
    np.testing.assert_array_equal(times, visible)
    assert computed <= visible.sum() + spare * len(times)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@cases("window", [None, 3])
def test_flex_attention_with_our_blocks_is_the_dense_mask(window):
    """As an accelerator would compute it, but not compiled."""
    from torch.nn.attention.flex_attention import flex_attention

    ends, depths = trees(longest=20, count=3, levels=1)
    blocks = make_block_mask(PackedRow(ends, depths), window, torch.device("cpu"))
    query, key, value = (tensor.detach() for tensor in draw_heads(len(ends), dtype=torch.float32))
    found = flex_attention(query, key, value, block_mask=blocks, scale=0.3, enable_gqa=True)
    expected = attend_densely(query, key, value, see_densely(ends, depths, window), scale=0.3)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.gpu
@cases("window", [None, 40])
@cases("dtype, allowed", [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
def test_the_kernel_of_an_accelerator_is_the_dense_mask(dtype, allowed, window):
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    ends, depths = trees(longest=150, count=3, levels=1)
    exact = [tensor.detach().cuda().requires_grad_() for tensor in draw_heads(len(ends), size=64)]
    tensors = query, key, value = [tensor.detach().to(dtype).requires_grad_() for tensor in exact]
    row = PackedRow(ends, depths)
    output = attend_packed(query, key, value, row, window=window, scale=0.125).transpose(1, 2)
    expected = attend_densely(*exact, see_densely(ends, depths, window).cuda(), scale=0.125)
    weights = torch.randn_like(expected)
    found_all = output, *torch.autograd.grad(output, tensors, weights.to(dtype))
    wanted_all = expected, *torch.autograd.grad(expected, exact, weights)
    for found, wanted in zip(found_all, wanted_all, strict=True):
        assert float((found.double() - wanted).norm() / wanted.norm()) < allowed


# --- in a model ---------------------------------------------------------------------------------------------


@cases("share_prefix: yes no")
def test_another_sequence_changes_no_bit(share_prefix: bool):
    model = load_tiny("llama")
    plan, rng = plan_forward(model), np.random.default_rng(0)
    rows = [np.append(255, rng.integers(0, 250, 29))]  # nothing shared with the others
    for prompt, answers in json.loads("[[150, [40, 60, 8]], [9, [5, 5, 7]]]"):
        start = rng.integers(0, 250, prompt)
        rows += [np.append(start, rng.integers(0, 250, length)) for length in answers]
    masks = [np.arange(len(row)) > 0 for row in rows]
    computed, found = sum(map(len, rows)) - len(rows), []  # last tokens predict nothing
    for _ in range(2):
        (micro,) = pack(rows, masks, 8192, share=share_prefix)
        assert micro.input_ids.shape == (1, computed - (2 * 150 + 2 * 9 if share_prefix else 0))
        log_probs = compute_micro_batch_outputs(model, micro, plan=plan, temperature=1.0).log_probs
        found.append(spread_to_rows([micro], [log_probs.detach().numpy()], rows))
        rows[0] = np.append(255, rng.integers(0, 250, 29))
    (own, *others), (own_after, *others_after) = found
    assert (own[1:] != own_after[1:]).all()
    np.testing.assert_equal(others, others_after)


def test_a_model_attends_as_before_where_no_packed_row_is_given():
    model, ids = load_tiny("qwen3"), torch.arange(40)[None]
    register_packed_attention()
    with torch.no_grad():
        found = model(input_ids=ids, use_cache=False).logits
        model.set_attn_implementation("eager")
        torch.testing.assert_close(found, model(input_ids=ids, use_cache=False).logits, atol=1e-4, rtol=0)


@cases("""
count | option  | message
6     | softcap | packed rows knows no softcap
6     | dropout | packed rows knows no dropout
5     | scaling | not those of one packed row of 6 nodes
""")
def test_a_layer_that_wants_what_packed_rows_have_not_is_refused(count: int, option, message):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    register_packed_attention()
    row = {"packed_row": PackedRow(np.full(6, 6), np.arange(6)), option: 0.1}
    with pytest.raises(ValueError, match=message):
        ALL_ATTENTION_FUNCTIONS["sdpa"](torch.nn.Module(), *draw_heads(count), None, **row)


def test_a_plan_whose_attention_forgets_the_packed_row_falls_back():
    """A decoder that drops the argument would attend to everything: the proof sees it, and padded
    rows take its place.
    """
    model = load_tiny("llama")
    proved = plan_forward(model)
    assert proved.choose_layout(100) == "packed"
    decoder = model.get_decoder()

    def forget(*inputs, forward=decoder.forward, packed_row=None, **options):
        return forward(*inputs, **options)

    decoder.forward = forget
    plan = plan_forward(model)
    assert plan.choose_layout(100) == "rows" and "did not take the packed row" in plan.reason
    rows = [np.arange(2, 9), np.asarray([2, 3, 4, 9, 8])]
    (micro,) = pack(rows, [np.arange(len(row)) > 2 for row in rows])
    with pytest.raises(ModelError, match="something has replaced transformers' 'sdpa'"):
        compute_micro_batch_outputs(model, micro, plan=proved, temperature=1.0)
