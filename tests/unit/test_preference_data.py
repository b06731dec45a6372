"""Preference rows: one shape for every usual one, both responses after the same prompt, nothing lost without
a count.
"""

import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts.data.mixture import Mixture, Source, make_mixture
from rollouts.data.rows import parse_row
from rollouts.data.samples import (
    mismatch_completions,
    prepare_preference_mixture,
    prepare_sft_mixture,
    prompt_of,
    split_held_out,
)
from rollouts.errors import DataError
from tests.support.text_tables import cases
from tests.unit.chat_tokenizers import byte_tokenizer, family_tokenizer, turn

ASK, GOOD, BAD = turn("user", "q"), turn("assistant", "ab"), turn("assistant", "c")
SPLIT = {"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]}
# In ChatML with one token per byte a one-letter question takes 9 tokens and the assistant's header 11: the
# answer begins at 20.
PAIR = {"prompt": "q", "chosen": "ab", "rejected": "c"}  # 20 + a, b, end = 23 tokens; 20 + c, end = 22


def prepare(use, *rows, tokenizer=None, max_length=99):
    mixture = make_mixture([parse_row(row, use) for row in rows])
    return prepare_preference_mixture(mixture, tokenizer or byte_tokenizer(), use=use, max_length=max_length)


# --- shapes -------------------------------------------------------------------------------------------------


def read_row(text):
    """A row as JSON, with the turns by their names."""
    return json.loads(re.sub("ASK|GOOD|BAD", lambda name: json.dumps(globals()[name[0]]), text))


@cases("""
row
{"prompt": "q", "chosen": "ab", "rejected": "c"}
{"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]}
{"prompt": [ASK], "chosen": "ab", "rejected": [BAD]}
{"prompt": [ASK], "chosen": GOOD, "rejected": BAD}
{"chosen": [ASK, GOOD], "rejected": [ASK, BAD]}
{"prompt": "q", "chosen": [ASK, GOOD], "rejected": [ASK, BAD]}
{"prompt": [ASK], "chosen": [ASK, GOOD], "rejected": [ASK, BAD]}
{"prompt": null, "chosen": [ASK, GOOD], "rejected": [ASK, BAD]}
""")
def test_every_usual_shape_of_a_pair_means_the_same(row):
    assert parse_row(read_row(row), "pair") == SPLIT
    whole = {"completion": [ASK, GOOD], "label": False}
    assert parse_row(whole, "labelled") == whole | {"prompt": [ASK], "completion": [GOOD]}


@cases("""
form | row                             | said
pair | {"chosen": "a", "rejectd": "b"} | rejectd? Then set columns.rejected = "rejectd"
pair | {"chosen": "a", "rejected": "b"} | then chosen must be a whole conversation as chat
pair | {"prompt": "q", "chosen": " ", "rejected": "c"} | chosen is empty
pair | {"prompt": " ", "chosen": "ab", "rejected": "c"} | prompt is empty
pair | {"chosen": [ASK], "rejected": [ASK, BAD]} | chosen ends with a turn of the role user
pair | {"chosen": [ASK, GOOD], "rejected": [ASK, BAD, ASK, BAD]} | differ in message 1 already
pair | {"prompt": "o", "chosen": [ASK, GOOD], "rejected": [ASK, BAD]} | not with the row's prompt
pair | {"prompt": "q", "chosen": "ab", "rejected": "c", "margin": true} | margin is True; it
labelled | {"prompt": "q", "completion": "a"} | a KTO row has a prompt, a completion and a label
labelled | {"prompt": "q", "completion": "a", "label": 1} | label is 1; it must be true for a good
labelled | {"prompt": "q", "completion": "", "label": true} | completion is empty
labelled | {"completion": "a", "label": true} | then completion must be a whole conversation
""")
def test_a_malformed_row_says_what_is_wrong_with_it(form, row, said):
    with pytest.raises(DataError) as caught:
        parse_row(read_row(row), form)
    assert said in str(caught.value)


# --- tokens -------------------------------------------------------------------------------------------------


def test_the_response_trains_as_the_last_turn_of_an_sft_row_does():
    conversation = [ASK, GOOD, ASK, BAD]
    row = {"chosen": conversation, "rejected": [*conversation[:-1], GOOD]}
    for tokenizer in (byte_tokenizer(), *map(family_tokenizer, ("qwen3", "llama3_1", "gemma"))):
        (sample,) = prepare("pair", row, tokenizer=tokenizer, max_length=999).samples
        (whole,) = prepare_sft_mixture(
            make_mixture([{"messages": conversation}]), tokenizer, max_length=999, train_on="last"
        ).samples
        end = np.flatnonzero(whole.loss_mask)[-1] + 1
        np.testing.assert_array_equal(sample.rows[0], (whole.token_ids[:end], whole.loss_mask[:end]))


def test_a_pair_falls_as_a_whole_and_by_reason():
    late, same = PAIR | {"prompt": "q" * 30}, PAIR | {"rejected": "ab"}
    cut = PAIR | {"chosen": "xyz1", "rejected": "xyz2"}  # one and the same within 23 tokens
    data = prepare("pair", PAIR, late, same, cut, max_length=23)
    answers = [byte_tokenizer().decode(row.token_ids[20:]) for row in data.samples[0].rows]
    assert answers == ["ab<|im_end|>", "c<|im_end|>"]
    assert data.dropped == {"no_trained_tokens": 1, "same_response": 2}


def test_a_mismatched_row_is_the_prompt_with_the_next_completion_of_another_prompt():
    rows = """[{"prompt": "q", "completion": "ab", "label": true},
        {"prompt": "q", "completion": "c", "label": false},
        {"prompt": "rr", "completion": "def", "label": true}]"""
    data = prepare("labelled", *json.loads(rows))
    wanted = json.loads("""[["q", "def", [20, 21, 22, 23]], ["q", "def", [20, 21, 22, 23]],
        ["rr", "ab", [21, 22, 23]]]""")
    for sample, (prompt, answer, trained) in zip(data.samples, wanted, strict=True):
        text = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>"
        assert byte_tokenizer().decode(sample.rows[1].token_ids) == text
        assert np.flatnonzero(sample.rows[1].loss_mask).tolist() == trained
    assert [sample.desirable for sample in data.samples] == [True, False, True]


# --- held out, drawn, batched -------------------------------------------------------------------------------


def numbered(*prompts):
    return [{**PAIR, "prompt": str(prompt)} for prompt in prompts]


def numbers_of(samples):
    """The prompts of numbered pairs."""
    return [int(byte_tokenizer().decode(sample.rows[0].token_ids[6:7])) for sample in samples]


def test_held_out_pairs_come_off_the_end_and_their_prompts_do_not_train():
    training, held_out = split_held_out(prepare("pair", *numbered(5, 1, 2, 3, 4, 5)), 2)
    assert numbers_of(held_out) == [4, 5]
    assert numbers_of(training.samples) == [1, 2, 3]
    assert training.dropped == {"held_out_prompt": 1}


def test_every_source_gives_its_share_of_what_is_held_out():
    rows = [parse_row(row, "pair") for row in numbered(*range(9))]
    sources = (Source("a", 1.0, tuple(rows[:6])), Source("b", 1.0, (*rows[6:8], None, rows[8])))
    data = prepare_preference_mixture(Mixture(sources), byte_tokenizer(), use="pair", max_length=99)
    training, held_out = split_held_out(data, 3)
    assert numbers_of(held_out) == [4, 5, 8]
    assert {len(prompt_of(sample)) for sample in held_out} == {160}
    assert [len(source.rows) for source in training.sources] == [4, 3]
    assert training.sources[1].rows[2] is None
    assert len(training.samples) + len(held_out) == 9


@given(st.lists(st.integers(0, 3), min_size=2, max_size=12).filter(lambda ids: len(set(ids)) > 1))
def test_mismatched_completions_are_the_nearest_that_follow(ids):
    count = len(ids)
    slow = [
        next((row + ahead) % count for ahead in range(1, count) if ids[(row + ahead) % count] != ids[row])
        for row in range(count)
    ]
    assert mismatch_completions(ids) == slow
    with pytest.raises(DataError, match="3 rows have 1 different prompt"):
        mismatch_completions(["a", "a", "a"])
