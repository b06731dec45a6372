"""Tokenizers small enough to count by hand: one token per byte, one per special token, and whatever merges a
test asks for.
"""

import tomllib
from pathlib import Path
from typing import NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] +"
    " '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%"
    " endif %}"
)


def turn(role, content="", **more):
    return {"role": role, "content": content, **more}


TALK = [turn("user", "3+4?"), turn("assistant", "It is 7."), turn("user", "2+2?"), turn("assistant", "4")]

# --- the templates of tests/data/chat_templates -------------------------------------------------------------

TEMPLATES = Path(__file__).parents[1] / "data/chat_templates"


class Family(NamedTuple):
    """The tokens that a model family's tokenizer has beside its vocabulary, as words of a text."""

    eos: str
    special: str
    bos: str | None = None
    added: str = ""  # one token each, but not special


# by the names of their templates
FAMILIES = {
    name: Family(**family)
    for names, family in tomllib.loads("""
["chatml"]
eos = "<|im_end|>"
special = "<|endoftext|> <|im_start|> <|im_end|>"
["llama3_1"]
eos = "<|eot_id|>"
special = "<|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|eom_id|> <|python_tag|>"
bos = "<|begin_of_text|>"
["qwen2_5 qwen3 qwen3_6"]
eos = "<|im_end|>"
special = "<|endoftext|> <|im_start|> <|im_end|>"
added = "<tool_call> </tool_call> <tool_response> </tool_response> <think> </think>"
["gemma gemma3"]
eos = "<eos>"
special = "<bos> <eos> <start_of_turn> <end_of_turn>"
bos = "<bos>"
["mistral_v2v3 mistral_v3_tekken"]
eos = "</s>"
special = '''<s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_CALLS] [TOOL_RESULTS]
[/TOOL_RESULTS]'''
bos = "<s>"
["deepseek_v3 deepseek_r1_distill"]
eos = "<｜end▁of▁sentence｜>"
special = "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜>"
bos = "<｜begin▁of▁sentence｜>"
added = '''<｜User｜> <｜Assistant｜> <think> </think> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜>
<｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜>
<｜tool▁output▁begin｜> <｜tool▁output▁end｜> <｜tool▁sep｜>'''
["phi3"]
eos = "<|endoftext|>"
special = "<|endoftext|> <|system|> <|user|> <|assistant|> <|end|>"
["phi_4"]
eos = "<|im_end|>"
special = "<|endoftext|> <|im_start|> <|im_sep|> <|im_end|>"
["gptoss"]
eos = "<|return|>"
special = "<|start|> <|end|> <|message|> <|channel|> <|call|> <|return|> <|endoftext|>"
["plain"]
eos = "</s>"
special = "<s> </s>"
bos = "<s>"
""").items()
    for name in names.split()
}


def read_template(name):
    return (TEMPLATES / f"{name}.jinja").read_text()


def byte_tokenizer(chat_template=CHATML, merges=None):
    """One token per byte of UTF-8 and per special token of ChatML; `merges` are pairs in the byte alphabet,
    where a newline is Ċ and a space Ġ.
    """
    tokenizer = family_tokenizer("chatml", merges=merges)
    tokenizer.chat_template = chat_template
    return tokenizer


def family_tokenizer(name, *, merges=None):
    """A byte-level tokenizer with the tokens of the template's family, and the template."""
    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges or [])]
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return _make(name, symbols, splitter, decoders.ByteLevel(), merges=merges or [])


def family_sentencepiece(name):
    """One token per character (ASCII), spaces as word marks and one before the text's first word, with the
    family's tokens and template.
    """
    symbols = ["<unk>", "▁", "\n", *map(chr, range(33, 127))]
    marks = {"prepend_scheme": "first"}
    splitter, decoder = pre_tokenizers.Metaspace(**marks), decoders.Metaspace(**marks)
    return _make(name, symbols, splitter, decoder, merges=[], unk_token="<unk>")


def _make(name, symbols, splitter, decoder, **model):
    family = FAMILIES[name]
    special, added = family.special.split(), family.added.split()
    vocab = {symbol: index for index, symbol in enumerate([*special, *added, *symbols])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, **model))
    tokenizer.pre_tokenizer, tokenizer.decoder = splitter, decoder
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=family.eos, bos_token=family.bos, pad_token=special[0]
    )
    fast.chat_template = read_template(name)
    return fast
