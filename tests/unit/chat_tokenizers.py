"""Tokenizers small enough to count by hand: one token per byte, one per special token, and whatever merges a
test asks for.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] +"
    " '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%"
    " endif %}"
)


def turn(role: str, content: Any = "", **more) -> Any:
    return {"role": role, "content": content, **more}


TALK = [turn("user", "3+4?"), turn("assistant", "It is 7."), turn("user", "2+2?"), turn("assistant", "4")]

# --- the templates of tests/data/chat_templates -------------------------------------------------------------

TEMPLATES = Path(__file__).parents[1] / "data" / "chat_templates"


class Family(NamedTuple):
    """The tokens that a model family's tokenizer has beside its vocabulary, as words of a text."""

    eos: str
    special: str
    bos: str | None = None
    added: str = ""  # one token each, but not special


CHATML_SPECIAL = "<|endoftext|> <|im_start|> <|im_end|>"
QWEN = Family(
    "<|im_end|>",
    CHATML_SPECIAL,
    added="<tool_call> </tool_call> <tool_response> </tool_response> <think> </think>",
)
GEMMA = Family("<eos>", "<bos> <eos> <start_of_turn> <end_of_turn>", "<bos>")
MISTRAL = Family(
    "</s>",
    "<s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_CALLS] [TOOL_RESULTS]"
    " [/TOOL_RESULTS]",
    "<s>",
)
TOOLS = "calls▁begin calls▁end call▁begin call▁end outputs▁begin outputs▁end output▁begin output▁end sep"
DEEPSEEK = Family(
    "<｜end▁of▁sentence｜>",
    "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜>",
    "<｜begin▁of▁sentence｜>",
    "<｜User｜> <｜Assistant｜> <think> </think> " + " ".join(f"<｜tool▁{name}｜>" for name in TOOLS.split()),
)
FAMILIES = {
    "chatml": Family("<|im_end|>", CHATML_SPECIAL),
    "llama3_1": Family(
        "<|eot_id|>",
        "<|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|eom_id|> <|python_tag|>",
        "<|begin_of_text|>",
    ),
    **dict.fromkeys(("qwen2_5", "qwen3", "qwen3_6"), QWEN),
    **dict.fromkeys(("gemma", "gemma3"), GEMMA),
    **dict.fromkeys(("mistral_v2v3", "mistral_v3_tekken"), MISTRAL),
    **dict.fromkeys(("deepseek_v3", "deepseek_r1_distill"), DEEPSEEK),
    "phi3": Family("<|endoftext|>", "<|endoftext|> <|system|> <|user|> <|assistant|> <|end|>"),
    "phi_4": Family("<|im_end|>", "<|endoftext|> <|im_start|> <|im_sep|> <|im_end|>"),
    "gptoss": Family(
        "<|return|>", "<|start|> <|end|> <|message|> <|channel|> <|call|> <|return|> <|endoftext|>"
    ),
    "plain": Family("</s>", "<s> </s>", "<s>"),
}


def read_template(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text("utf-8")


def byte_tokenizer(
    chat_template: str | None = CHATML, merges: list[tuple[str, str]] | None = None
) -> PreTrainedTokenizerFast:
    """One token per byte of UTF-8 and per special token of ChatML; `merges` are pairs in the byte alphabet,
    where a newline is Ċ and a space Ġ.
    """
    tokenizer = family_tokenizer("chatml", merges=merges)
    tokenizer.chat_template = chat_template
    return tokenizer


def family_tokenizer(name: str, *, merges: list[tuple[str, str]] | None = None) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with the tokens of the template's family, and the template."""
    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges or [])]
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return _make(name, symbols, splitter, decoders.ByteLevel(), merges=merges or [])


def family_sentencepiece(name: str) -> PreTrainedTokenizerFast:
    """One token per character (ASCII), spaces as word marks and one before the text's first word, with the
    family's tokens and template.
    """
    symbols = ["<unk>", "▁", "\n", *map(chr, range(33, 127))]
    marks = {"prepend_scheme": "first"}
    splitter, decoder = pre_tokenizers.Metaspace(**marks), decoders.Metaspace(**marks)
    return _make(name, symbols, splitter, decoder, merges=[], unk_token="<unk>")


def _make(name: str, symbols: Sequence[str], splitter, decoder, **model) -> PreTrainedTokenizerFast:
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
