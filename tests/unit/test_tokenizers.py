"""Tokenizers of every kind: what each needs before a run, which tokens end its answers, and whether its ids
fit the model.
"""

import pytest

from rollouts.data.chat import tokenize_conversation
from rollouts.errors import ModelError
from rollouts.models.load import check_tokenizer_fits, find_turn_end_ids, load_tokenizer, stop_token_ids
from tests.support.text_tables import cases
from tests.unit.chat_tokenizers import (
    CHATML,
    FAMILIES,
    TALK,
    TEMPLATES,
    byte_tokenizer,
    family_sentencepiece,
    family_tokenizer,
    read_template,
)
from tests.unit.test_models import edit_json


def save(tokenizer, folder):
    tokenizer.save_pretrained(folder)
    return folder


# --- loading ------------------------------------------------------------------------------------------------


def test_a_template_from_a_file_takes_the_place_of_the_own_one_or_of_none(tmp_path):
    folder = save(byte_tokenizer(), tmp_path / "model")
    assert load_tokenizer(folder).chat_template == CHATML
    given = load_tokenizer(folder, chat_template=TEMPLATES / "chatml.jinja")
    assert given.chat_template == read_template("chatml")
    bare = byte_tokenizer(None)
    bare.eos_token = "<|endoftext|>"
    folder = save(bare, tmp_path / "base")
    wanted = r"has no chat template; use an instruction-tuned model, set model\.chat_template, or put"
    with pytest.raises(ModelError, match=wanted):
        load_tokenizer(folder)
    tokenizer = load_tokenizer(folder, chat_template=TEMPLATES / "plain.jinja")
    conversation = tokenize_conversation(TALK[:2], tokenizer)
    (span,) = conversation.spans
    assert tokenizer.decode(conversation.token_ids[span]) == " It is 7.<|endoftext|>"
    assert stop_token_ids(tokenizer, folder) == (0,)


def test_a_tokenizer_whose_answers_nothing_could_end_is_refused_unless_a_config_names_a_stop(tmp_path):
    folder = save(byte_tokenizer(CHATML.replace("<|im_end|>", "")), tmp_path / "named")
    edit_json(folder / "tokenizer_config.json", eos_token=None)
    (folder / "generation_config.json").write_text('{"eos_token_id": [1]}')
    assert stop_token_ids(load_tokenizer(folder), folder) == (1,)
    (folder / "generation_config.json").unlink()
    message = r"no end token, its chat template ends turns with text.*set eos_token in its tokenizer_config"
    with pytest.raises(ModelError, match=message):
        load_tokenizer(folder)


# --- stops --------------------------------------------------------------------------------------------------


TURN_ENDS = """
chatml              | <|im_end|>
llama3_1            | <|eot_id|>
qwen3               | <|im_end|>
qwen3_6             | <|im_end|>
gemma               | <end_of_turn>
gemma3              | <end_of_turn>
mistral_v2v3        | </s>
deepseek_v3         | <｜end▁of▁sentence｜>
deepseek_r1_distill | <｜end▁of▁sentence｜>
phi3                | <|end|>
phi_4               | <|im_end|>
gptoss              | <|call|> <|return|>
plain               | </s>
"""


@cases("line", TURN_ENDS.strip().splitlines())
def test_the_tokens_that_end_a_turn_are_found_by_writing_one(line):
    name, _, ends = line.partition("|")
    for make in (family_tokenizer, family_sentencepiece):
        tokenizer = make(name.strip())
        found = tokenizer.convert_ids_to_tokens(list(find_turn_end_ids(tokenizer)))
        assert sorted(map(str, found)) == ends.split()


@cases("name: gemma phi3")
def test_generation_stops_where_sft_teaches_it_to(name, tmp_path):
    folder = save(family_tokenizer(name), tmp_path / "model")
    tokenizer = load_tokenizer(folder)
    conversation = tokenize_conversation(TALK[:2], tokenizer)
    last_taught = int(conversation.token_ids[conversation.spans[0].stop - 1])
    assert tokenizer.eos_token == FAMILIES[name].eos and last_taught != tokenizer.eos_token_id
    assert {*stop_token_ids(tokenizer, folder)} == {tokenizer.eos_token_id, last_taught}


def test_a_template_that_ends_with_text_or_refuses_names_no_end():
    for template in (CHATML.replace("<|im_end|>", "."), "{{ raise_exception('no') }}", None):
        assert find_turn_end_ids(byte_tokenizer(template)) == set()


# --- vocabularies -------------------------------------------------------------------------------------------


def test_a_padded_vocabulary_is_fine_and_a_smaller_one_is_not():
    tokenizer = byte_tokenizer()  # 3 special tokens and 256 bytes: ids 0 to 258
    for size in (259, 320):
        check_tokenizer_fits(tokenizer, size, "model.name")
    wanted = r"model\.name: the tokenizer's ids reach 258, the model's vocabulary has 258 \(0 to 257\); the"
    with pytest.raises(ModelError, match=wanted) as caught:
        check_tokenizer_fits(tokenizer, 258, "model.name")
    assert "'Ń' with id 258" in str(caught.value)  # the last of the byte alphabet
