"""SFT rows: cut without losing what trains, counted when dropped, and drawn in an order that needs no state."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

from rollouts.data.chat import TemplateOptions
from rollouts.data.mixture import select_sft_batch
from rollouts.data.sft import SFTSample, make_sft_batch, prepare_sft_rows
from rollouts.errors import DataError, ModelError
from tests.unit.chat_tokenizers import byte_tokenizer, family_tokenizer

# In ChatML with one token per byte a one-letter question takes 9 tokens and the assistant's header 11: the
# answer begins at 20.
SHORT = {"prompt": "q", "answer": "ab"}  # 20 + a, b, end + newline = 24 tokens, 3 of them train
LONG = {"prompt": "q", "answer": "abcdefghij"}  # 20 + 11 + 1 = 32 tokens
LATE = {"prompt": "q" * 30, "answer": "ab"}  # the answer begins at 49


def test_a_row_that_fits_is_whole():
    data = prepare_sft_rows([SHORT], byte_tokenizer(), max_length=24)
    (sample,) = data.samples
    assert (len(sample.token_ids), np.flatnonzero(sample.loss_mask).tolist()) == (24, [20, 21, 22])
    assert (data.truncated, data.dropped) == (0, {})


def test_a_long_row_is_cut_while_something_trains():
    data = prepare_sft_rows([SHORT, LONG], byte_tokenizer(), max_length=24)
    assert data.truncated == 1
    assert np.flatnonzero(data.samples[1].loss_mask).tolist() == [20, 21, 22, 23]


def test_a_row_whose_answer_lies_behind_max_length_is_dropped_and_counted():
    data = prepare_sft_rows([LATE, SHORT, LATE], byte_tokenizer(), max_length=24)
    assert [sample.row_id for sample in data.samples] == [1]
    assert (data.truncated, data.dropped) == (0, {"no_trained_tokens": 2})


def test_one_trained_token_is_enough_and_none_is_not():
    assert len(prepare_sft_rows([SHORT], byte_tokenizer(), max_length=21).samples) == 1
    with pytest.raises(
        DataError,
        match=(
            r"sft\.data: none of 1 rows has a token to train on within max_length=20 \(the longest has 24"
            r" tokens\)"
        ),
    ):
        prepare_sft_rows([SHORT], byte_tokenizer(), max_length=20)


def test_only_the_last_answer_trains_when_asked():
    row = {
        "messages": [{"role": role, "content": "x"} for role in ("user", "assistant", "user", "assistant")]
    }
    all_turns, last = (
        prepare_sft_rows([row], byte_tokenizer(), max_length=99, train_on=choice).samples[0]
        for choice in ("all", "last")
    )
    assert np.flatnonzero(all_turns.loss_mask).tolist() == [20, 21, 43, 44]
    assert np.flatnonzero(last.loss_mask).tolist() == [43, 44]


def test_the_tools_of_a_row_are_written_and_do_not_train():
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    for tools in ([tool], json.dumps([tool])):
        (sample,) = prepare_sft_rows(
            [SHORT | {"tools": tools}], family_tokenizer("qwen2_5"), max_length=2048
        ).samples
        assert '"name": "f"' in family_tokenizer("qwen2_5").decode(sample.token_ids)
        assert sample.loss_mask.sum() == 3
    for nothing in (None, []):
        (sample,) = prepare_sft_rows([SHORT | {"tools": nothing}], byte_tokenizer(), max_length=99).samples
        assert len(sample.token_ids) == 24
    with pytest.raises(
        DataError, match=r"sft\.data: row 0: the row has tools, and the chat template does not write them"
    ):
        prepare_sft_rows([SHORT | {"tools": [tool]}], byte_tokenizer(), max_length=99)
    with pytest.raises(DataError, match=r"sft\.data: row 0: tools\[0\] is 'f'; a tool is an object"):
        prepare_sft_rows([SHORT | {"tools": ["f"]}], byte_tokenizer(), max_length=99)


def test_thinking_is_kept_or_dropped_by_choice():
    row = {"prompt": "q", "answer": "<think>hm</think>\n\nab"}
    kept, dropped = (
        prepare_sft_rows(
            [row], byte_tokenizer(), max_length=99, options=TemplateOptions(thinking=choice)
        ).samples[0]
        for choice in ("keep", "drop")
    )
    assert (
        kept.loss_mask.sum() == 7 + 2 + 8 + 2 + 2 + 1
    )  # <think>, hm, </think>, two line ends, ab, the end token
    assert np.flatnonzero(dropped.loss_mask).tolist() == [20, 21, 22]


def test_a_bad_row_is_named():
    with pytest.raises(DataError, match=r"sft\.data: row 1: no `messages` and no `answer`"):
        prepare_sft_rows([SHORT, {"prompt": "q"}], byte_tokenizer(), max_length=99)
    with pytest.raises(DataError, match=r"sft\.data: row 0: message 0 is an assistant turn"):
        prepare_sft_rows(
            [{"messages": [{"role": "assistant", "content": "a"}]}], byte_tokenizer(), max_length=99
        )
    with pytest.raises(ModelError, match=r"sft\.data: row 0: the tokenizer has no chat template"):
        prepare_sft_rows([SHORT], byte_tokenizer(None), max_length=99)


# --- batches ------------------------------------------------------------------------------------------------


def test_a_batch_has_tokens_and_masks_and_nothing_else():
    data = prepare_sft_rows([SHORT, LONG], byte_tokenizer(), max_length=99)
    batch = make_sft_batch(data.samples)
    assert [len(row) for row in batch.tokens] == [24, 32]
    assert batch.response_lengths.tolist() == [3, 11]
    assert batch.rewards is None
    assert batch.advantages is None
    assert batch.rollout_log_probs is None


def test_an_sft_sample_needs_no_tokenizer():
    sample = SFTSample(np.array([5, 6]), np.array([False, True]), 0)
    assert len(make_sft_batch([sample])) == 1


@pytest.mark.parametrize(("num_rows", "batch_size"), [(10, 3), (7, 7), (3, 8), (1, 4)])
def test_every_row_comes_once_an_epoch(num_rows, batch_size):
    drawn = [row for step in range(2 * num_rows) for row in select_sft_batch(num_rows, batch_size, step, 0)]
    epochs = [drawn[start : start + num_rows] for start in range(0, len(drawn), num_rows)]
    assert len(epochs) == 2 * batch_size
    for epoch in epochs:
        assert Counter(epoch) == Counter(range(num_rows))


def test_epochs_and_seeds_have_orders_of_their_own():
    first, second = select_sft_batch(50, 50, 0, 0), select_sft_batch(50, 50, 1, 0)
    assert first != second
    assert first != select_sft_batch(50, 50, 0, 1)
    assert first != sorted(first)
    assert select_sft_batch(50, 50, 0, -1) != first


def test_a_step_can_be_asked_for_alone_and_again():
    in_order = [select_sft_batch(10, 4, step, 3) for step in range(9)]
    assert [select_sft_batch(10, 4, step, 3) for step in reversed(range(9))] == in_order[::-1]


def test_another_process_draws_the_same_rows():
    code = (
        "from rollouts.data.mixture import select_sft_batch; print([select_sft_batch(10, 4, step, 3) for step"
        " in (0, 5)])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert answer.strip() == str([select_sft_batch(10, 4, step, 3) for step in (0, 5)])


def test_the_order_sorts_raw_draws_of_philox():
    draws = np.random.Philox(key=np.array([3, 0], np.uint64)).random_raw(10)
    assert select_sft_batch(10, 10, 0, 3) == sorted(range(10), key=lambda row: draws[row])


def test_the_order_is_the_one_that_older_checkpoints_were_trained_with():
    assert [select_sft_batch(10, 4, step, 3) for step in range(3)] == [
        [6, 1, 8, 5],
        [2, 7, 9, 4],
        [3, 0, 9, 7],
    ]
