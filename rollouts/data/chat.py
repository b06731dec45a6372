"""Conversations as token ids, with the exact span of what each assistant turn teaches.

A chat template is a program: it may add a system prompt, strip text, or change earlier turns once later ones follow. So spans are found by
rendering, never by searching for the content: what the template adds between "prompt of turn k" and "conversation up to turn k" is turn k.

    <|im_start|>user\\n3+4?<|im_end|>\\n<|im_start|>assistant\\n7<|im_end|>\\n
    └────────────── prompt of the turn ──────────────────────┘└─ span ─┘└ neither
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from rollouts.errors import DataError, ModelError
from rollouts.types import BoolArray, ChatMessage, IntArray


class ChatTokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used here."""

    chat_template: Any
    all_special_tokens: Any

    @property
    def added_tokens_decoder(self) -> Any: ...  # id → AddedToken

    def apply_chat_template(self, conversation: Any, *, tokenize: bool = ..., add_generation_prompt: bool = ...) -> Any: ...
    def encode(self, text: str, *, add_special_tokens: bool = ...) -> Any: ...


@dataclass(frozen=True, slots=True)
class MessageSpan:
    """What one assistant turn teaches: token_ids[start:end], from after the generation prompt to its end token, both the turn's own."""

    role: str
    index: int  # position of the turn in the conversation
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class TokenizedConversation:
    """A conversation as the chat template writes it."""

    token_ids: IntArray  # [T]
    spans: tuple[MessageSpan, ...]  # of the assistant turns asked for, in order


TrainOn = Literal["all", "last"] | Sequence[int]


def render_prompt(prompt: str | Sequence[ChatMessage], tokenizer: ChatTokenizer) -> str:
    """The text that a model continues: `prompt` (text is one user turn) in the chat template, with the header of the assistant's turn.

    Raises ModelError if the tokenizer has no chat template, DataError if the template refuses the messages.
    """
    messages = [ChatMessage(role="user", content=prompt)] if isinstance(prompt, str) else list(prompt)
    return _render(messages, tokenizer, add_generation_prompt=True)


def tokenize_prompt(prompt: str | Sequence[ChatMessage], tokenizer: ChatTokenizer) -> IntArray:
    """Token ids [T] of `render_prompt`. Special tokens come from the template alone."""
    return np.asarray(tokenizer.encode(render_prompt(prompt, tokenizer), add_special_tokens=False), np.int64)


def tokenize_conversation(messages: Sequence[ChatMessage], tokenizer: ChatTokenizer, *, train_on: TrainOn = "all") -> TokenizedConversation:
    """The token ids of the whole conversation, and the spans of the assistant turns that `train_on` names: content and end token.

    The header of a turn and what the template writes after the end token (a newline) are in no span. Turns that do not train may be
    written as the template likes; some templates rewrite earlier turns, and then only the last can train.
    Raises ModelError if the template is missing, writes a turn that trains otherwise than it was generated, or ends it without a special
    token; DataError if the template refuses the messages, train_on names no assistant turn, or a turn begins or ends within a token.
    """
    if not messages:
        raise DataError("the conversation has no messages")
    text = _render(messages, tokenizer, add_generation_prompt=False)
    special = _special_texts(tokenizer)
    turns = _choose_turns([index for index, message in enumerate(messages) if message["role"] == "assistant"], train_on)
    bounds = [_find_turn(messages, turn, text, tokenizer, special) for turn in turns]
    marks = [position for pair in bounds for position in pair]
    token_ids, token_marks = _tokenize_with_marks(text, marks, lambda piece: list(tokenizer.encode(piece, add_special_tokens=False)), turns)
    spans = tuple(
        MessageSpan("assistant", turn, start, end) for turn, start, end in zip(turns, token_marks[::2], token_marks[1::2], strict=True)
    )
    return TokenizedConversation(np.asarray(token_ids, np.int64), spans)


def compute_loss_mask(conversation: TokenizedConversation, train_on: TrainOn = "all") -> BoolArray:
    """[T] 1 in the spans of the chosen assistant turns: all there are, the last, or those at the given positions in the conversation.

    Raises DataError if there is no assistant turn, or a position is not one.
    """
    spans = {span.index: span for span in conversation.spans}
    mask = np.zeros(len(conversation.token_ids), np.bool_)
    for index in _choose_turns(list(spans), train_on):
        mask[spans[index].start : spans[index].end] = True
    return mask


def _choose_turns(turns: list[int], train_on: TrainOn) -> list[int]:
    if not turns:
        raise DataError("the conversation has no assistant turn to train on")
    if train_on == "all":
        return turns
    if train_on == "last":
        return turns[-1:]
    chosen = sorted({int(index) for index in train_on})
    wrong = [index for index in chosen if index not in turns]
    if wrong or not chosen:
        raise DataError(f"train_on={chosen}; it must name assistant turns by their position in the conversation: {', '.join(map(str, turns))}")
    return chosen


# --- rendering ---------------------------------------------------------------------------------------------------------------


def _render(messages: Sequence[ChatMessage], tokenizer: ChatTokenizer, *, add_generation_prompt: bool) -> str:
    if not tokenizer.chat_template:
        raise ModelError("the tokenizer has no chat template; use an instruct model, or put chat_template.jinja into the model directory")
    try:
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=add_generation_prompt)
    except Exception as error:  # a template raises what its author chose, and jinja adds its own
        roles = ", ".join(message["role"] for message in messages)
        raise DataError(f"the chat template refuses messages with the roles {roles}: {type(error).__name__}: {error}") from error
    assert isinstance(text, str), type(text)
    return text


def _special_texts(tokenizer: ChatTokenizer) -> tuple[str, ...]:
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    return tuple(dict.fromkeys(text for text in [*tokenizer.all_special_tokens, *added] if text))


def _find_turn(messages: Sequence[ChatMessage], turn: int, text: str, tokenizer: ChatTokenizer, special: tuple[str, ...]) -> tuple[int, int]:
    """(start, end) in characters of what turn `turn` teaches."""
    if turn == 0:
        raise DataError("message 0 is an assistant turn; a conversation begins with a system or user turn")
    prompt = _render(messages[:turn], tokenizer, add_generation_prompt=True)
    ended = text if turn == len(messages) - 1 else _render(messages[: turn + 1], tokenizer, add_generation_prompt=False)
    if not text.startswith(ended):
        raise ModelError(
            f"the chat template rewrites messages up to {turn} when later turns follow ({_first_difference(ended, text)}); such a conversation "
            "cannot train on all turns at once: set sft.train_on = \"last\", with one row per answer"
        )
    if not ended.startswith(prompt):
        raise ModelError(
            f"the chat template writes another header before message {turn} than it does for generation ({_first_difference(prompt, ended)}); "
            "what trains would not be what the model is asked for; use another chat template"
        )
    body = ended[len(prompt) :]
    end = _find_end(body, messages[turn]["content"].strip(), special)
    if end is None:
        raise ModelError(
            f"the chat template ends message {turn} with {body[-20:]!r}, not with a special token; a model trained on that never learns to stop; "
            "use a template that ends the assistant's turn"
        )
    return len(prompt), len(prompt) + end


def _find_end(body: str, content: str, special: tuple[str, ...]) -> int | None:
    """Where the first special token after the content ends, if nothing but white space and special tokens follows it."""
    after_content = body.find(content) + len(content) if content in body else 0
    ends = [(at, -len(token)) for token in special if (at := body.find(token, after_content)) >= 0]
    if not ends:
        return None
    at, negative_length = min(ends)  # the longer of two that begin together
    rest = body[at - negative_length :]
    for token in special:
        rest = rest.replace(token, "")
    return None if rest.strip() else at - negative_length


def _first_difference(first: str, second: str) -> str:
    position = next((at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))
    return f"at character {position}: {first[position : position + 20]!r} against {second[position : position + 20]!r}"


# --- tokens ------------------------------------------------------------------------------------------------------------------


def _tokenize_with_marks(
    text: str, marks: Sequence[int], encode: Callable[[str], list[int]], turns: Sequence[int]
) -> tuple[list[int], list[int]]:
    """(token ids of the whole text, the token position of every character position in `marks`).

    Raises DataError if a mark lies within a token.
    """
    token_ids = encode(text)
    pieces = [encode(text[start:end]) for start, end in zip([0, *marks], [*marks, len(text)], strict=True)]
    if [token for piece in pieces for token in piece] == token_ids:
        return token_ids, np.cumsum([len(piece) for piece in pieces])[:-1].tolist()
    # Some tokenizers put a space before the first word of any text, so pieces differ where the whole does not: compare prefixes instead.
    token_marks: list[int] = []
    for number, mark in enumerate(marks):
        prefix = encode(text[:mark])
        if token_ids[: len(prefix)] != prefix:
            edge = "begins" if number % 2 == 0 else "ends"
            raise DataError(
                f"message {turns[number // 2]} {edge} within a token (near {text[max(0, mark - 10) : mark + 10]!r}): the model would never be asked "
                "for it that way; strip white space from both ends of the content"
            )
        token_marks.append(len(prefix))
    return token_ids, token_marks
