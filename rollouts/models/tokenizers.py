"""What a run needs of a tokenizer beside its directory: a template that compiles, the ids that end a turn,
ids within the model's vocabulary.

And a tokenizer that needs no files: one token per byte.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError, TemplateSyntaxError

from rollouts.data.chat import NO_PARAMS, find_end, make_template
from rollouts.errors import DataError, ModelError
from rollouts.models.directories import naming_errors
from rollouts.types import ChatMessage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

PAD_TOKEN, START_TOKEN, END_TOKEN = "<pad>", "<|im_start|>", "<|im_end|>"
PAD_ID, START_ID, END_ID = 256, 257, 258  # after the 256 bytes
# what a template raises: its author's own refusals, and what its expressions meet in the messages
TEMPLATE_ERRORS = (TemplateError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
CALL = {"type": "function", "id": "abcdef123", "function": {"name": "name", "arguments": {"key": "value"}}}
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
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    except TemplateSyntaxError as error:
        raise ModelError(
            f"{where}: the chat template is no Jinja: line {error.lineno}: {error.message}"
        ) from error
    except TEMPLATE_ERRORS:  # the rows will show whether it takes theirs
        return


def find_turn_end_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Ids of the tokens with which the chat template ends a plain answer, and a tool call where it writes
    one. Found by writing both, with a system turn before them where it refuses them without one.

    Empty if there is no template, it refuses them, or it ends them with text.
    """
    ends: set[str] = set()
    for answer in ({"content": "plain answer"}, {"content": "", "tool_calls": [CALL]}):
        for system in ([], [ChatMessage(role="system", content="system")]):
            with suppress(DataError, ModelError):
                question = ChatMessage(role="user", content="question")
                messages = [*system, question, {"role": "assistant", **answer}]
                template = make_template(messages, tokenizer, NO_PARAMS, None)
                prompt = template.render(messages[:-1], add_generation_prompt=True)
                body = template.render(messages).removeprefix(prompt)
                end = find_end(body, messages, len(messages) - 1, template)
                ends |= {end[0]} if end else set()
                break
    ids: list[Any] = [tokenizer.convert_tokens_to_ids(end) for end in ends]
    return tuple(sorted(one for one in ids if one not in (None, tokenizer.unk_token_id)))


# --- vocabularies -------------------------------------------------------------------------------------------


def check_tokenizer_fits(tokenizer: PreTrainedTokenizerBase, size: int, where: str) -> None:
    """Raises ModelError, beginning with `where`, unless every id that the tokenizer can give is one of the
    `size` that the model has an embedding for. A vocabulary larger than the tokenizer is usual (padded), and
    fine.
    """
    vocabulary = tokenizer.get_vocab()
    outside = sorted((token_id, token) for token, token_id in vocabulary.items() if token_id >= size)
    if outside:
        first_id, token = outside[0]
        raise ModelError(
            f"{where}: the tokenizer's ids reach {outside[-1][0]}, the model's vocabulary has {size} (0 to"
            f" {size - 1}); the first token outside is {token!r} with id {first_id}; use the tokenizer that"
            " came with the model"
        )
