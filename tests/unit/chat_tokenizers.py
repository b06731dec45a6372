"""Tokenizers small enough to count by hand: one token per byte, one per special token, and whatever merges a
test asks for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] +"
    " '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%"
    " endif %}"
)
# of SmolLM2-135M-Instruct, as published: a default system prompt, otherwise ChatML
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{"
    " '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n'"
    " }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{%"
    " endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_tokenizer(
    chat_template: str | None = CHATML, merges: list[tuple[str, str]] | None = None
) -> PreTrainedTokenizerFast:
    """One token per byte of UTF-8; `merges` are pairs in the byte alphabet, where a newline is Ċ and a space
    Ġ.
    """
    symbols = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    symbols += ["".join(pair) for pair in merges or []]
    tokenizer = _byte_level(symbols, merges or [])
    return _finish(tokenizer, chat_template)


def _byte_level(symbols: Sequence[str], merges: list[tuple[str, str]]) -> Tokenizer:
    tokenizer = Tokenizer(
        models.BPE(vocab={symbol: index for index, symbol in enumerate(symbols)}, merges=merges)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _characters(special: Sequence[str], *, prepend: str) -> Tokenizer:
    symbols = [*special, "<unk>", "▁", "\n", *map(chr, range(33, 127))]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={symbol: index for index, symbol in enumerate(symbols)}, merges=[], unk_token="<unk>"
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=prepend)
    return tokenizer


def _finish(tokenizer: Tokenizer, chat_template: str | None) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.chat_template = chat_template
    return fast


# --- the templates of tests/data/chat_templates -------------------------------------------------------------

TEMPLATES = Path(__file__).parents[1] / "data" / "chat_templates"


@dataclass(frozen=True)
class Family:
    """The tokens that a model family's tokenizer has beside its vocabulary."""

    eos: str
    special: tuple[str, ...]
    bos: str | None = None
    added: tuple[str, ...] = ()  # one token each, but not special


def family(eos: str, special: str, bos: str | None = None, added: str = "") -> Family:
    """A family whose tokens are words of a text."""
    return Family(eos, tuple(special.split()), bos, tuple(added.split()))


CHATML_SPECIAL = "<|endoftext|> <|im_start|> <|im_end|>"
QWEN = family(
    "<|im_end|>",
    CHATML_SPECIAL,
    added="<tool_call> </tool_call> <tool_response> </tool_response> <think> </think>",
)
GEMMA = family("<eos>", "<bos> <eos> <start_of_turn> <end_of_turn>", "<bos>")
MISTRAL = family(
    "</s>",
    "<s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_CALLS] [TOOL_RESULTS]"
    " [/TOOL_RESULTS]",
    "<s>",
)
TOOLS = "calls▁begin calls▁end call▁begin call▁end outputs▁begin outputs▁end output▁begin output▁end sep"
DEEPSEEK = family(
    "<｜end▁of▁sentence｜>",
    "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜>",
    "<｜begin▁of▁sentence｜>",
    "<｜User｜> <｜Assistant｜> <think> </think> " + " ".join(f"<｜tool▁{name}｜>" for name in TOOLS.split()),
)
FAMILIES = {
    "chatml": family("<|im_end|>", CHATML_SPECIAL),
    "llama3_1": family(
        "<|eot_id|>",
        "<|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|eom_id|> <|python_tag|>",
        "<|begin_of_text|>",
    ),
    **dict.fromkeys(("qwen2_5", "qwen3", "qwen3_6"), QWEN),
    **dict.fromkeys(("gemma", "gemma3"), GEMMA),
    **dict.fromkeys(("mistral_v2v3", "mistral_v3_tekken"), MISTRAL),
    **dict.fromkeys(("deepseek_v3", "deepseek_r1_distill"), DEEPSEEK),
    "phi3": family("<|endoftext|>", "<|endoftext|> <|system|> <|user|> <|assistant|> <|end|>"),
    "phi_4": family("<|im_end|>", "<|endoftext|> <|im_start|> <|im_sep|> <|im_end|>"),
    "gptoss": family(
        "<|return|>", "<|start|> <|end|> <|message|> <|channel|> <|call|> <|return|> <|endoftext|>"
    ),
    "plain": family("</s>", "<s> </s>", "<s>"),
}


def read_template(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text("utf-8")


def family_tokenizer(name: str, *, merges: list[tuple[str, str]] | None = None) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with the tokens of the template's family, and the template."""
    family = FAMILIES[name]
    symbols = [*family.special, *family.added, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    symbols += ["".join(pair) for pair in merges or []]
    return _finish_family(_byte_level(symbols, merges or []), family, name)


def family_sentencepiece(name: str) -> PreTrainedTokenizerFast:
    """One token per character (ASCII), spaces as word marks and one before the text's first word, with the
    family's tokens and template.
    """
    family = FAMILIES[name]
    return _finish_family(_characters([*family.special, *family.added], prepend="first"), family, name)


def _finish_family(tokenizer: Tokenizer, family: Family, name: str) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in family.special]
    )
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in family.added])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=family.eos, bos_token=family.bos, pad_token=family.special[0]
    )
    fast.chat_template = read_template(name)
    return fast
