"""SFT rows: cut without losing what trains, counted when dropped, drawn in an order without state."""

import json
from typing import Any

import numpy as np
import pytest

from rollouts.data.mixture import make_mixture, select_samples
from rollouts.data.samples import prepare_sft_mixture
from rollouts.errors import DataError, ModelError
from tests.support.text_tables import cases
from tests.unit.chat_tokenizers import byte_tokenizer, family_tokenizer

# In ChatML with one token per byte a one-letter question takes 9 tokens and the assistant's header 11: the
# answer begins at 20.
SHORT = {"prompt": "q", "answer": "ab"}  # 20 + a, b, end + newline = 24 tokens, 3 of them train
ROWS = {
    "short": SHORT,
    "long": {"prompt": "q", "answer": "abcdefghij"},  # 20 + 11 + 1 = 32 tokens
    "late": {"prompt": "q" * 30, "answer": "ab"},  # the answer begins at 49
}


def prepare(rows, tokenizer=None, *, max_length=99):
    return prepare_sft_mixture(make_mixture(rows), tokenizer or byte_tokenizer(), max_length=max_length)


# a row that fits is whole, a long one is cut while something trains, a late answer is dropped
@cases("""
rows            | trained                          | truncated | dropped
short           | [[20, 21, 22]]                   | 0         |
short long      | [[20, 21, 22], [20, 21, 22, 23]] | 1         |
late short late | [[20, 21, 22]]                   | 0         | no_trained_tokens = 2
""")
def test_rows_have_at_most_max_length_tokens(rows, trained: Any, truncated: int, dropped: dict):
    data = prepare([ROWS[name] for name in rows.split()], max_length=24)
    assert [np.flatnonzero(one.loss_mask).tolist() for one in data.samples] == trained
    assert (data.truncated, data.dropped) == (truncated, dropped)
    assert {len(one.token_ids) for one in data.samples} == {24}


def test_the_tools_of_a_row_are_written_and_do_not_train():
    tool = json.loads('{"type": "function", "function": {"name": "f", "parameters": {}}}')
    tokenizer = family_tokenizer("qwen2_5")
    rows = [SHORT | {"tools": tools} for tools in ([tool], json.dumps([tool]))]
    for sample in prepare(rows, tokenizer, max_length=2048).samples:
        assert '"name": "f"' in tokenizer.decode(sample.token_ids)
        assert sample.loss_mask.sum() == 3
    for nothing in (None, []):
        (sample,) = prepare([SHORT | {"tools": nothing}]).samples
        assert len(sample.token_ids) == 24
    said = r"sft\.data: row 0: the row has tools, and the chat template does not write them"
    with pytest.raises(DataError, match=said):
        prepare([SHORT | {"tools": [tool]}])
    with pytest.raises(DataError, match=r"sft\.data: row 0: tools\[0\] is 'f'; a tool is an object"):
        prepare([SHORT | {"tools": ["f"]}])


@cases("""
row             | message
{"prompt": "q"} | no `messages` and no `answer`
{"messages": [{"role": "assistant", "content": "a"}]} | message 0 is an assistant turn
""")
def test_a_bad_row_is_named(row: Any, message):
    with pytest.raises(DataError, match=rf"sft\.data: row 1: {message}"):
        prepare([None, row])


def test_a_missing_template_is_named_with_the_row_that_needs_it():
    with pytest.raises(ModelError, match=r"sft\.data: row 1: the tokenizer has no chat template"):
        prepare([None, SHORT], byte_tokenizer(None))


# --- batches ------------------------------------------------------------------------------------------------


def test_the_order_is_the_one_that_older_checkpoints_were_trained_with():
    found = [select_samples(make_mixture(range(10)), 4, step, 3) for step in range(3)]
    assert found == json.loads("[[6, 1, 8, 5], [2, 7, 9, 4], [3, 0, 9, 7]]")
