"""Conversations as token ids, with the exact span of what each assistant turn teaches.

A chat template is a program: it may add a system prompt, strip text, or change earlier turns once later ones
follow. So spans are found by rendering, never by searching for the content: what the template adds between
"prompt of turn k" and "conversation up to turn k" is turn k.

    <|im_start|>user\\n3+4?<|im_end|>\\n<|im_start|>assistant\\n7<|im_end|>\\n
    └────────────── prompt of the turn ──────────────────────┘└─ span ─┘└ neither
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Literal, cast

import numpy as np

from rollouts.data.chat_templates import (
    DEFAULT_OPTIONS,
    ChatTokenizer,
    Template,
    TemplateOptions,
    Tools,
    make_template,
)
from rollouts.data.messages import parse_messages
from rollouts.data.rows import says_something
from rollouts.errors import DataError, ModelError
from rollouts.types import BoolArray, ChatMessage, IntArray


@dataclass(frozen=True, slots=True)
class MessageSpan:
    """What one assistant turn teaches: token_ids[start:end], from after the generation prompt to its end
    token, both the turn's own.
    """

    role: str
    index: int  # position of the turn in the conversation
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class TokenizedConversation:
    """A conversation as the chat template writes it."""

    token_ids: IntArray  # [T]
    spans: tuple[MessageSpan, ...]  # of the assistant turns asked for, in order


TrainOn = Literal["all", "last"]


def render_prompt(
    prompt: str | Sequence[ChatMessage],
    tokenizer: ChatTokenizer,
    *,
    options: TemplateOptions = DEFAULT_OPTIONS,
    tools: Tools | None = None,
) -> str:
    """The text that a model continues: `prompt` (text is one user turn) in the chat template, with the header
    of the assistant's turn.

    Raises ModelError if the tokenizer has no chat template or it does not read a parameter, DataError if the
    template refuses the messages or leaves out their tool calls or the tools.
    """
    turns = [ChatMessage(role="user", content=prompt)] if isinstance(prompt, str) else list(prompt)
    messages = parse_messages(turns, where="the prompt")
    return make_template(messages, tokenizer, options, tools).render(messages, add_generation_prompt=True)


def tokenize_prompt(
    prompt: str | Sequence[ChatMessage],
    tokenizer: ChatTokenizer,
    *,
    options: TemplateOptions = DEFAULT_OPTIONS,
    tools: Tools | None = None,
) -> IntArray:
    """Token ids [T] of `render_prompt`. Special tokens come from the template alone."""
    text = render_prompt(prompt, tokenizer, options=options, tools=tools)
    return np.asarray(tokenizer.encode(text, add_special_tokens=False), np.int64)


def tokenize_conversation(
    messages: Sequence[ChatMessage],
    tokenizer: ChatTokenizer,
    *,
    train_on: TrainOn = "all",
    options: TemplateOptions = DEFAULT_OPTIONS,
    tools: Tools | None = None,
) -> TokenizedConversation:
    """The token ids of the whole conversation, and the spans of the assistant turns that train, all or the
    last: content and end token.

    A span is what the model is to write after the prompt that generation gives it: thinking, content and tool
    calls as the template writes them. The header of a turn and what the template writes after the end token
    (a newline) are in no span. Turns that do not train may be written as the template likes; some templates
    rewrite earlier turns, and then only the last can train. Raises ModelError if the template is missing,
    writes a turn that trains otherwise than it was generated, or ends it without a special token; DataError
    if the template refuses the messages or leaves out a part of what trains, there is no assistant turn, a
    turn that trains says nothing, or it begins or ends within a token.
    """
    if not messages:
        raise DataError("the conversation has no messages")
    messages = parse_messages(list(messages), where="messages")
    template = make_template(messages, tokenizer, options, tools)
    text = template.render(messages)
    turns = _choose_turns(messages, train_on)
    marks = [mark for turn in turns for mark in _find_turn(messages, turn, text, template)]
    token_ids, token_marks = _tokenize_with_marks(text, marks, tokenizer, turns)
    spans = tuple(
        MessageSpan("assistant", turn, start, end)
        for turn, start, end in zip(turns, token_marks[::2], token_marks[1::2], strict=True)
    )
    return TokenizedConversation(np.asarray(token_ids, np.int64), spans)


def compute_loss_mask(conversation: TokenizedConversation) -> BoolArray:
    """[T] 1 in the spans."""
    mask = np.zeros(len(conversation.token_ids), np.bool_)
    for span in conversation.spans:
        mask[span.start : span.end] = True
    return mask


def _choose_turns(messages: Sequence[ChatMessage], train_on: TrainOn) -> list[int]:
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise DataError("the conversation has no assistant turn to train on")
    chosen = turns if train_on == "all" else turns[-1:]
    for turn in chosen:
        if turn == 0:
            raise DataError(
                "message 0 is an assistant turn; a conversation begins with a system or user turn"
            )
        if not says_something(messages[turn]):
            raise DataError(
                f"message {turn} is an assistant turn that says nothing: no content, no thinking, no tool"
                " calls; leave the row out"
            )
    return chosen


# --- spans --------------------------------------------------------------------------------------------------


def _find_turn(messages: Sequence[ChatMessage], turn: int, text: str, template: Template) -> tuple[int, int]:
    """(start, end) in characters of what turn `turn` teaches."""
    prompt = template.render(messages[:turn], add_generation_prompt=True)
    is_last = turn == len(messages) - 1
    ended = text if is_last else template.render(messages[: turn + 1])
    if not ended.startswith(prompt):
        raise ModelError(
            f"the chat template writes another header before message {turn} than it does for generation"
            f" ({_first_difference(prompt, ended)}); what trains would not be what the model is asked for;"
            " use another chat template"
        )
    body = ended[len(prompt) :]
    end = _find_end(body, messages, turn, template)
    if end is None:
        raise ModelError(
            f"the chat template ends message {turn} with {body[-20:]!r}, not with a special token; a model"
            " trained on that never learns to stop; use a template that ends the assistant's turn"
        )
    trained = prompt + body[:end]
    if not text.startswith(trained):
        raise ModelError(
            f"the chat template rewrites messages up to {turn} when later turns follow"
            f" ({_first_difference(trained, text)}); such a conversation cannot train on all turns at once:"
            ' set sft.train_on = "last", with one row per answer'
        )
    part = _find_unwritten(messages, turn, prompt, ended, template)
    if part is not None:
        raise DataError(
            f"the chat template does not write the {part} of message {turn}, so it would not train"
            f" ({_first_difference(messages[turn]['content'].strip(), body.lstrip())}); change the row"
            " (remove it there), or set model.chat_template to one that does"
        )
    return len(prompt), len(trained)


def _find_unwritten(
    messages: Sequence[ChatMessage], turn: int, prompt: str, ended: str, template: Template
) -> str | None:
    """What the template leaves out of the turn: thinking, or content beside tool calls, that could be changed
    without changing what it writes; content that does not stand whole in it, white space aside.
    """
    message = messages[turn]
    content = message["content"]
    parts = {"reasoning_content": "thinking (reasoning_content)"}
    if message.get("tool_calls"):
        parts["content"] = "content beside its tool calls"
    for key, part in parts.items():
        value = str(message.get(key, "")).strip()
        other = cast(ChatMessage, message | {key: f"{value} {value}"})
        if value and template.render([*messages[:turn], other]) == ended:
            return part
    wanted, given, written = ("".join(text.split()) for text in (content, prompt, ended[len(prompt) :]))
    # it may begin in the prompt, but for its last character: some prompts open the thinking, or close it
    if wanted in given[max(0, len(given) - len(wanted) + 1) :] + written:
        return None
    thinks = content.lstrip().startswith("<think>")
    return "thinking at the beginning of the content" if thinks else "content as it is"


def _find_end(body: str, messages: Sequence[ChatMessage], turn: int, template: Template) -> int | None:
    """Where the end token of the turn ends in what was written after its prompt; None if it ends without one.

    What follows the content, or the tool calls, must be special tokens and white space alone. If there are
    several, as after a tool call or where a template closes the conversation too, the one that ends a plain
    answer in this place is meant, otherwise the first. Some tokenizers end a turn with an added token that is
    not marked as special; it must be that one.
    """
    added = list(template.tokenizer.added_tokens_decoder.values())
    special = _match_any([*template.tokenizer.all_special_tokens, *(t.content for t in added if t.special)])
    content = messages[turn]["content"].strip()
    begin = body.find(content) + len(content) if content in body else 0
    tail = _find_tail(body, begin, special)
    if len(tail) == 1:
        return tail[0].end()
    every = _match_any([*template.tokenizer.all_special_tokens, *(t.content for t in added)])
    usual = _find_usual_end(messages[:turn], template, every)
    chosen = [found for found in tail or _find_tail(body, begin, every) if found.group() == usual] or tail
    return chosen[0].end() if chosen else None


def _match_any(tokens: Iterable[str]) -> str:
    """A pattern of any of the tokens, the longest first."""
    texts = sorted({token for token in tokens if token.strip()}, key=len, reverse=True)
    return "|".join(map(re.escape, texts)) or "(?!)"


def _find_tail(body: str, begin: int, token: str) -> list[re.Match[str]]:
    """The tokens that end body[begin:], with nothing but white space between and after them."""
    run = re.compile(rf"(?:(?:{token})\s*)+\Z").search(body, begin)
    return list(re.compile(token).finditer(body, run.start())) if run else []


def _find_usual_end(before: Sequence[ChatMessage], template: Template, token: str) -> str | None:
    """The token that the template writes after a plain answer to the messages `before`; None if it refuses
    one there.
    """
    answer = ChatMessage(role="assistant", content="plain answer")
    try:
        rest = template.render([*before, answer]).rpartition(answer["content"])[2]
    except DataError:
        return None
    found = re.match(rf"\s*({token})", rest)
    return found[1] if found else None


def _first_difference(first: str, second: str) -> str:
    pairs = enumerate(zip(first, second, strict=False))
    at = next((index for index, (a, b) in pairs if a != b), min(len(first), len(second)))
    return f"at character {at}: {first[at : at + 20]!r} against {second[at : at + 20]!r}"


# --- tokens -------------------------------------------------------------------------------------------------


def _tokenize_with_marks(
    text: str, marks: Sequence[int], tokenizer: ChatTokenizer, turns: Sequence[int]
) -> tuple[list[int], list[int]]:
    """(token ids of the whole text, the token position of every character position in `marks`).

    Raises DataError if a mark lies within a token.
    """

    def encode(piece: str) -> list[int]:
        return list(tokenizer.encode(piece, add_special_tokens=False))

    token_ids = encode(text)
    pieces = [encode(text[begin:end]) for begin, end in pairwise([0, *marks, len(text)])]
    positions = list(accumulate(map(len, pieces)))[:-1]
    # Some tokenizers put a space before the first word of any text, so that pieces differ where the whole
    # does not. Then prefixes are compared; those before a later turn always, for generation gets one piece.
    are_pieces = list(chain.from_iterable(pieces)) == token_ids
    for number, mark in enumerate(marks):
        if are_pieces and (number == 0 or number % 2):
            continue
        prefix = encode(text[:mark])
        if token_ids[: len(prefix)] != prefix:
            edge = "ends" if number % 2 else "begins"
            raise DataError(
                f"message {turns[number // 2]} {edge} within a token (near"
                f" {text[max(0, mark - 10) : mark + 10]!r}): the model would never be asked for it that way;"
                " strip white space from both ends of the content, or use a template, or parameters of it,"
                " with another header"
            )
        positions[number] = len(prefix)
    return token_ids, positions
