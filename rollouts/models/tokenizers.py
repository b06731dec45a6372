"""What a run needs of a tokenizer beside its directory: a template that compiles, the ids that end a turn,
ids within the model's vocabulary.

And a tokenizer that needs no files: one token per byte.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError, TemplateSyntaxError

from rollouts.errors import ModelError
from rollouts.models.quiet import naming_errors

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

PAD_TOKEN, START_TOKEN, END_TOKEN = "<pad>", "<|im_start|>", "<|im_end|>"
PAD_ID, START_ID, END_ID = 256, 257, 258  # after the 256 bytes
# what a template raises: its author's own refusals, and what its expressions meet in the messages
TEMPLATE_ERRORS = (TemplateError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{%"
    " endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose ids 0 to 255 are the bytes of UTF-8, followed by <pad>, <|im_start|> and <|im_end|>
    (which ends a turn).

    Any text decodes to itself; ids that are not valid UTF-8 decode to replacement characters. Has a ChatML
    chat template.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocabulary = {character: byte for byte, character in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in (PAD_TOKEN, START_TOKEN, END_TOKEN)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD_TOKEN,
        bos_token=START_TOKEN,
        eos_token=END_TOKEN,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


# --- chat templates -----------------------------------------------------------------------------------------


def read_chat_template(path: Path) -> str:
    """The text of a Jinja file. Raises ModelError if it cannot be read or is empty."""
    way_out = "give the path of a Jinja file"
    with naming_errors(f"the chat template {path} cannot be read", way_out):
        text = path.read_text("utf-8")
    if not text.strip():
        raise ModelError(f"the chat template {path} is empty; {way_out}")
    return text


def check_chat_template_compiles(tokenizer: PreTrainedTokenizerBase, where: str) -> None:
    """Raises ModelError, beginning with `where` and naming the line, if the chat template is no Jinja. What
    it refuses is not looked at.
    """
    try:
        _write_turns(tokenizer, [{"role": "user", "content": "a"}])
    except TemplateSyntaxError as error:
        raise ModelError(
            f"{where}: the chat template is no Jinja: line {error.lineno}: {error.message}"
        ) from error
    except TEMPLATE_ERRORS:  # the rows will show whether it takes theirs
        return


def find_turn_end_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Ids of the tokens with which the chat template ends a plain answer, and a tool call where it writes
    one. Found by writing both.

    Empty if there is no template, it refuses them, or it ends them with text.
    """
    if not tokenizer.chat_template:
        return ()
    tokens = tokenizer.added_tokens_decoder.values()
    special = {*map(str, tokenizer.all_special_tokens), *(token.content for token in tokens if token.special)}
    added = {*special, *(token.content for token in tokens)}
    answer = "plain answer"
    _, written, tail = _answer(tokenizer, content=answer).rpartition(answer)
    begun = [token for token in added if written and token.strip() and tail.lstrip().startswith(token)]
    plain_end = max(begun, key=len, default=None)
    # longer ones first, as a regular expression takes the first that fits
    one = "|".join(map(re.escape, sorted(filter(str.strip, special), key=len, reverse=True)))
    run = re.search(rf"(?:(?:{one})\s*)+\Z", _call_a_tool(tokenizer)) if one else None
    last = re.findall(one, run.group()) if run else []
    call_end = plain_end if plain_end in last else next(iter(last), None)
    ends = {plain_end, call_end} - {None}
    ids: list[Any] = [tokenizer.convert_tokens_to_ids(str(end)) for end in ends]
    return tuple(sorted(one for one in ids if one not in (None, tokenizer.unk_token_id)))


def _call_a_tool(tokenizer: PreTrainedTokenizerBase) -> str:
    """A tool call in the chat template; empty if it refuses or leaves out what is called."""
    for arguments in ({"key": "zqvalue"}, '{"key": "zqvalue"}'):
        call = {"type": "function", "id": "abcdef123", "function": {"name": "zqname", "arguments": arguments}}
        written = _answer(tokenizer, content="", tool_calls=[call])
        if "zqname" in written and "zqvalue" in written:
            return written
    return ""


def _answer(tokenizer: PreTrainedTokenizerBase, **answer: Any) -> str:
    """A question and this answer in the chat template; empty if it refuses them, with and without a system
    turn before them.
    """
    turns = [{"role": "user", "content": "question"}, {"role": "assistant", **answer}]
    for system in ([], [{"role": "system", "content": "system"}]):
        with suppress(*TEMPLATE_ERRORS):
            return _write_turns(tokenizer, [*system, *turns])
    return ""


def _write_turns(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]]) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False))


# --- vocabularies -------------------------------------------------------------------------------------------


def check_tokenizer_fits(
    tokenizer: PreTrainedTokenizerBase, model_config: Mapping[str, Any], where: str
) -> None:
    """Raises ModelError, beginning with `where`, unless every id that the tokenizer can give is one that the
    model has an embedding for.

    `model_config` is the content of config.json, of its language model. A vocabulary larger than the
    tokenizer is usual (padded), and fine.
    """
    size, vocabulary = model_config["vocab_size"], tokenizer.get_vocab()
    outside = sorted((token_id, token) for token, token_id in vocabulary.items() if token_id >= size)
    if outside:
        first_id, token = outside[0]
        raise ModelError(
            f"{where}: the tokenizer's ids reach {outside[-1][0]}, the model's vocabulary has {size} (0 to"
            f" {size - 1}); the first token outside is {token!r} with id {first_id}; use the tokenizer that"
            " came with the model"
        )
