"""Conversations as token ids, with the exact span of what each assistant turn teaches.

A chat template is a program: it may add a system prompt, strip text, or change earlier turns once later ones
follow. So spans are found by rendering, never by searching for the content: what the template adds between
"prompt of turn k" and "conversation up to turn k" is turn k.

    <|im_start|>user\\n3+4?<|im_end|>\\n<|im_start|>assistant\\n7<|im_end|>\\n
    └────────────── prompt of the turn ──────────────────────┘└─ span ─┘└ neither
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np

from rollouts.data.chat_templates import (
    DEFAULT_OPTIONS,
    ChatTokenizer,
    Template,
    TemplateOptions,
    Tools,
    make_template,
    render,
)
from rollouts.data.messages import parse_messages
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


TrainOn = Literal["all", "last"] | Sequence[int]


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
    messages = (
        [ChatMessage(role="user", content=prompt)]
        if isinstance(prompt, str)
        else parse_messages(list(prompt), where="the prompt")
    )
    template = make_template(messages, tokenizer, options, tools)
    return render(messages, template, add_generation_prompt=True)


def tokenize_prompt(
    prompt: str | Sequence[ChatMessage],
    tokenizer: ChatTokenizer,
    *,
    options: TemplateOptions = DEFAULT_OPTIONS,
    tools: Tools | None = None,
) -> IntArray:
    """Token ids [T] of `render_prompt`. Special tokens come from the template alone."""
    return np.asarray(
        tokenizer.encode(
            render_prompt(prompt, tokenizer, options=options, tools=tools), add_special_tokens=False
        ),
        np.int64,
    )


def tokenize_conversation(
    messages: Sequence[ChatMessage],
    tokenizer: ChatTokenizer,
    *,
    train_on: TrainOn = "all",
    options: TemplateOptions = DEFAULT_OPTIONS,
    tools: Tools | None = None,
) -> TokenizedConversation:
    """The token ids of the whole conversation, and the spans of the assistant turns that `train_on` names:
    content and end token.

    A span is what the model is to write after the prompt that generation gives it: thinking, content and tool
    calls as the template writes them. The header of a turn and what the template writes after the end token
    (a newline) are in no span. Turns that do not train may be written as the template likes; some templates
    rewrite earlier turns, and then only the last can train. Raises ModelError if the template is missing,
    writes a turn that trains otherwise than it was generated, or ends it without a special token; DataError
    if the template refuses the messages or leaves out a part of what trains, train_on names no assistant
    turn, a turn that trains says nothing, or it begins or ends within a token.
    """
    if not messages:
        raise DataError("the conversation has no messages")
    messages = parse_messages(list(messages), where="messages")
    template = make_template(messages, tokenizer, options, tools)
    text = render(messages, template, add_generation_prompt=False)
    turns = _choose_turns(
        [index for index, message in enumerate(messages) if message["role"] == "assistant"], train_on
    )
    for turn in turns:
        _check_turn_says_something(messages[turn], turn)
    bounds = [_find_turn(messages, turn, text, template) for turn in turns]
    marks = [position for pair in bounds for position in pair]
    token_ids, token_marks = _tokenize_with_marks(
        text, marks, lambda piece: list(tokenizer.encode(piece, add_special_tokens=False)), turns
    )
    spans = tuple(
        MessageSpan("assistant", turn, start, end)
        for turn, start, end in zip(turns, token_marks[::2], token_marks[1::2], strict=True)
    )
    return TokenizedConversation(np.asarray(token_ids, np.int64), spans)


def compute_loss_mask(conversation: TokenizedConversation, train_on: TrainOn = "all") -> BoolArray:
    """[T] 1 in the spans of the chosen assistant turns: all there are, the last, or those at the given
    positions in the conversation.

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
        raise DataError(
            f"train_on={chosen}; it must name assistant turns by their position in the conversation:"
            f" {', '.join(map(str, turns))}"
        )
    return chosen


def _check_turn_says_something(message: ChatMessage, index: int) -> None:
    said = (message["content"], str(message.get("reasoning_content", "")))
    if not message.get("tool_calls") and not any(text.strip() for text in said):
        raise DataError(
            f"message {index} is an assistant turn that says nothing: no content, no thinking, no tool calls;"
            " leave the row out"
        )


# --- spans --------------------------------------------------------------------------------------------------


def _special_texts(tokenizer: ChatTokenizer) -> tuple[str, ...]:
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    return tuple(dict.fromkeys(text for text in [*tokenizer.all_special_tokens, *added] if text))


def _added_texts(tokenizer: ChatTokenizer) -> tuple[str, ...]:
    return tuple(token.content for token in tokenizer.added_tokens_decoder.values() if token.content.strip())


def _find_turn(messages: Sequence[ChatMessage], turn: int, text: str, template: Template) -> tuple[int, int]:
    """(start, end) in characters of what turn `turn` teaches."""
    if turn == 0:
        raise DataError("message 0 is an assistant turn; a conversation begins with a system or user turn")
    prompt = render(messages[:turn], template, add_generation_prompt=True)
    ended = (
        text
        if turn == len(messages) - 1
        else render(messages[: turn + 1], template, add_generation_prompt=False)
    )
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
    trained = ended[: len(prompt) + end]
    if not text.startswith(trained):
        raise ModelError(
            f"the chat template rewrites messages up to {turn} when later turns follow"
            f" ({_first_difference(trained, text)}); such a conversation cannot train on all turns at once:"
            ' set sft.train_on = "last", with one row per answer'
        )
    _check_turn_is_written(messages, turn, prompt, ended, template)
    return len(prompt), len(trained)


def _check_turn_is_written(
    messages: Sequence[ChatMessage], turn: int, prompt: str, ended: str, template: Template
) -> None:
    """Raises DataError if the template leaves out content, or thinking could be changed without changing what
    the template writes.
    """
    message = messages[turn]
    parts = {"reasoning_content": "thinking (reasoning_content)"}
    if message.get("tool_calls"):
        parts["content"] = "content beside its tool calls"
    for key, name in parts.items():
        value = str(message.get(key, "")).strip()
        if not value:
            continue
        other = cast(ChatMessage, message | {key: f"{value} {value}"})
        if render([*messages[:turn], other], template, add_generation_prompt=False) == ended:
            raise DataError(
                f"the chat template does not write the {name} of message {turn}, so it would not train;"
                " remove it from the row, or set model.chat_template to one that does"
            )
    _check_content_is_written(message["content"], turn, prompt, ended[len(prompt) :])


def _check_content_is_written(content: str, turn: int, prompt: str, body: str) -> None:
    """Raises DataError unless the turn's content stands whole in what the template writes for it, white space
    aside.

    It may begin in the prompt: some generation prompts open the thinking, or close it.
    """
    wanted, before, written = ("".join(text.split()) for text in (content, prompt, body))
    given = (
        before[len(before) - min(len(before), len(wanted) - 1) :] if wanted else ""
    )  # at least one character is the turn's own
    if wanted in given + written:
        return
    thinks = content.lstrip().startswith("<think>")
    part = "thinking at the beginning of the content" if thinks else "content as it is"
    difference = _first_difference(content.strip(), body.lstrip())
    raise DataError(
        f"the chat template does not write the {part} of message {turn}, so it would not train"
        f" ({difference}); change the row, or set model.chat_template to one that does"
    )


def _find_end(body: str, messages: Sequence[ChatMessage], turn: int, template: Template) -> int | None:
    """Where the end token of the turn ends in what was written after its prompt; None if it ends without one.

    What follows the content, or the tool calls, must be special tokens and white space alone. If there are
    several, as after a tool call or where a template closes the conversation too, the one that ends a plain
    answer in this place is meant, otherwise the first.
    """
    content = messages[turn]["content"].strip()
    after_content = body.find(content) + len(content) if content in body else 0
    tail = _find_tail(body, after_content, _special_texts(template.tokenizer))
    if len(tail) == 1:
        return tail[0][1]
    usual = _find_usual_end(messages, turn, template)
    if not tail:  # some tokenizers end a turn with an added token that is not marked as special
        tail = [
            found
            for found in _find_tail(body, after_content, _added_texts(template.tokenizer))
            if body[found[0] : found[1]] == usual
        ]
    ends = [end for start, end in tail if body[start:end] == usual] or [end for _, end in tail]
    return ends[0] if ends else None


def _find_tail(body: str, begin: int, tokens: Sequence[str]) -> list[tuple[int, int]]:
    """(start, end) of the tokens that stand, with nothing but white space between and after them, at the end
    of body[begin:].
    """
    if not tokens:
        return []
    one = "|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True))
    run = re.search(rf"(?:(?:{one})\s*)+\Z", body[begin:])
    if run is None:
        return []
    offset = begin + run.start()
    return [(offset + found.start(), offset + found.end()) for found in re.finditer(one, run.group())]


def _find_usual_end(messages: Sequence[ChatMessage], turn: int, template: Template) -> str | None:
    """The added token that the template writes after a plain answer in the place of turn `turn`; None if it
    refuses one there.
    """
    answer = "plain answer"
    try:
        text = render(
            [*messages[:turn], ChatMessage(role="assistant", content=answer)],
            template,
            add_generation_prompt=False,
        )
    except DataError:
        return None
    rest = text.rpartition(answer)[2]
    tokens = {*_special_texts(template.tokenizer), *_added_texts(template.tokenizer)}
    starts = [(at, -len(token), token) for token in tokens if (at := rest.find(token)) >= 0]
    if not starts:
        return None
    at, _, token = min(starts)
    return None if rest[:at].strip() else token


def _first_difference(first: str, second: str) -> str:
    position = next(
        (at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
        min(len(first), len(second)),
    )
    return (
        f"at character {position}: {first[position : position + 20]!r} against"
        f" {second[position : position + 20]!r}"
    )


# --- tokens -------------------------------------------------------------------------------------------------


def _tokenize_with_marks(
    text: str, marks: Sequence[int], encode: Callable[[str], list[int]], turns: Sequence[int]
) -> tuple[list[int], list[int]]:
    """(token ids of the whole text, the token position of every character position in `marks`).

    Raises DataError if a mark lies within a token.
    """
    token_ids = encode(text)
    pieces = [encode(text[start:end]) for start, end in zip([0, *marks], [*marks, len(text)], strict=True)]
    if [token for piece in pieces for token in piece] == token_ids:
        positions = np.cumsum([len(piece) for piece in pieces])[:-1].tolist()
        later_starts = zip(
            marks[2::2], positions[2::2], strict=True
        )  # generation gets all before a turn in one piece; the first has been seen
        if all(encode(text[:mark]) == token_ids[:position] for mark, position in later_starts):
            return token_ids, positions
    # Some tokenizers put a space before the first word of any text, so pieces differ where the whole does
    # not: compare prefixes instead.
    token_marks: list[int] = []
    for number, mark in enumerate(marks):
        prefix = encode(text[:mark])
        if token_ids[: len(prefix)] != prefix:
            edge = "begins" if number % 2 == 0 else "ends"
            raise DataError(
                f"message {turns[number // 2]} {edge} within a token (near"
                f" {text[max(0, mark - 10) : mark + 10]!r}): the model would never be asked for it that way;"
                " strip white space from both ends of the content, or use a template, or parameters of it,"
                " with another header"
            )
        token_marks.append(len(prefix))
    return token_ids, token_marks
