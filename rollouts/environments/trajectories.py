"""A conversation as the tokens that an engine took in and gave out. Ids are only ever appended.

    begin ──► prompt ──► read ──► answer ──► extend ──► prompt ──► read ──► answer …
                                               └─ the template rewrites what is held: another segment begins

What follows an answer is cut out of a rendering of the real conversation, in which a mark stands for each
part of an assistant turn: so what a tokenizer, or a parser and a template, would write otherwise than it was
sampled changes nothing that is held.
"""

import json
import re
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from rollouts.config.plugins import load_function
from rollouts.data.chat import (
    NO_PARAMS,
    ChatTokenizer,
    Template,
    TemplateParams,
    Tools,
    make_template,
    match_added,
)
from rollouts.environments.protocol import Turn
from rollouts.errors import ConfigError, DataError, ModelError
from rollouts.messages import checked_message
from rollouts.types import (
    ChatMessage,
    Completion,
    Fields,
    FloatArray,
    IntArray,
    JSONObject,
    Numbers,
    Sample,
)

ReadTurn = Callable[[str], Fields]
"""From the text of a turn, special tokens and all, to a message. Raises ValueError for what does not read."""
ResponseTemplate = ReadTurn | Fields
"""How a turn is read back: by a function, or by a response template in transformers' format."""
History = Literal["template", "extend"]
"""What a conversation holds where the chat template would rewrite it: see ChatFormat.extend."""


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A point of a conversation, and the tokens between it and the point before."""

    parent: "Node | None"
    messages: tuple[ChatMessage, ...]  # the conversation so far
    token_ids: IntArray  # [n] added here
    log_probs: FloatArray | float = 0.0  # [n] nats; of a prompt 0
    versions: IntArray | int = -1  # [n] weights that sampled the token; of a prompt -1
    text: str = ""  # of a prompt: all of it, as rendered with marks
    fresh: bool = False  # the tokens are a whole prompt: a segment begins
    sampled: bool = False  # an answer, which trains
    ended: bool = True  # False: an answer that a limit of tokens cut

    def path(self, *, whole: bool = False) -> "list[Node]":
        """The nodes of the segment up to this one; of all segments with `whole`."""
        nodes: list[Node] = [self]
        while nodes[-1].parent and (whole or not nodes[-1].fresh):
            nodes.append(nodes[-1].parent)
        return nodes[::-1]

    @property
    def tokens(self) -> IntArray:
        """[T] all of the segment up to here: what an engine is given."""
        return np.concatenate([node.token_ids for node in self.path()])


@dataclass(frozen=True)
class ChatFormat:
    """How a conversation is written in a chat template, and read back. Made by make_chat_format."""

    template: Template
    tools: Tools  # what a turn may call
    read_turn: ResponseTemplate | None  # None: a turn is its text
    history: History
    writes_calls: bool  # else a turn that calls is its text in the history, and results are the user's turns

    # --- writing ---

    def begin(self, messages: Sequence[ChatMessage]) -> Node:
        """The prompt of a conversation. Raises DataError if the template refuses it, or neither writes the
        tools nor finds them described in a message.
        """
        said = "\n".join(message["content"] for message in messages)
        for tool in self.tools if self.template.tools is None else ():
            if (name := tool["function"]["name"]) not in said:
                raise DataError(
                    f"the chat template does not write the tools, and no message of the prompt names {name};"
                    " describe it in the system prompt, or set model.chat_template to one that writes tools"
                )
        return self._start(None, tuple(messages))

    def extend(self, node: Node, messages: Sequence[ChatMessage]) -> Node:
        """The prompt after an answer and what follows it.

        With history "template" another segment begins where the template would write what is held otherwise:
        drops thinking, moves the tools, writes another end. With "extend" only where it leaves the answer
        out. Raises DataError if the template refuses the messages.
        """
        assert node.sampled and node.parent is not None, "only an answer is extended"
        if not self.writes_calls:
            messages = [
                ChatMessage(role="user", content=one["content"]) if one["role"] == "tool" else one
                for one in messages
            ]
        index, prompt, together = len(node.messages) - 1, node.parent.text, (*node.messages, *messages)
        marked = _mark(together)
        text = self.template.render(marked, add_generation_prompt=True)
        begin = _find_turn(text, index)
        last = self._decode(node.token_ids[-1:]) if node.ended else ""
        end = self._find_end(text[begin:], node, last) if begin else None
        if end is None:
            return self._start(node, together)
        has_end = bool(self._special.fullmatch(last))
        if self.history == "template":
            turn, written = node.messages[index], text[len(prompt) : begin + end.end()]
            written = written.replace(_name(index, "r"), turn.get("reasoning_content", ""))
            written = written.replace(_name(index, "c"), turn["content"])
            sampled = self._decode(node.token_ids) + ("" if has_end else end[0])
            # no way of writing the parts of a turn changes its added tokens
            same = self._added.findall(written) == self._added.findall(sampled)
            if not (same and text.startswith(prompt)):
                return self._start(node, together)
        token_ids = self._encode(text, begin + end.start(), marked, index + 1)
        # encoding began with the end token, so that what follows it is not the beginning of a text
        return Node(node, together, token_ids[has_end:], text=text)

    def _start(self, parent: Node | None, messages: tuple[ChatMessage, ...]) -> Node:
        token_ids = self._encode(self.template.render(messages, add_generation_prompt=True), 0, messages, 0)
        return Node(parent, messages, token_ids, text=self.render_marked(messages), fresh=True)

    def render_marked(self, messages: Sequence[ChatMessage]) -> str:
        """The prompt of a conversation, with marks in place of what assistant turns say."""
        return self.template.render(_mark(messages), add_generation_prompt=True)

    def _find_end(self, rest: str, node: Node, last: str) -> re.Match[str] | None:
        """The end token in what a rendering has after the last mark of the answer, whose last token that was
        sampled is `last`.
        """
        index = len(node.messages) - 1
        alone = self.template.render(_mark(node.messages))
        tail = alone[_find_turn(alone, index) :]
        ends = list(self._special.finditer(tail))
        meant = next((end for end in ends if end[0] == last), ends[-1] if ends else None)
        if meant is not None and rest.startswith(tail[: meant.end()]):
            return meant
        return self._special.search(rest)

    def _encode(self, text: str, first: int, messages: Sequence[ChatMessage], own: int) -> IntArray:
        """Token ids of text[first:], which the template wrote of `messages`. A content of messages[own:] that
        holds the text of a special token is encoded by itself, so that it becomes none.
        """
        encode: Any = partial(self.template.tokenizer.encode, add_special_tokens=False)
        token_ids = []
        for index in range(own, len(messages)):
            content = messages[index]["content"]
            if not self._special.search(content):
                continue
            marked = [*messages]
            mark = _name(index, "s")
            marked[index] = {**messages[index], "content": content.replace(content.strip(), mark, 1)}
            before, found, after = self.template.render(marked, add_generation_prompt=True).partition(mark)
            begin, end = len(before), len(text) - len(after)
            if not found:
                continue  # the template does not write it
            if begin < first or text[:begin] != before or text[end:] != after:
                raise DataError(
                    f"message {index} holds the text of a special token ({content[:60]!r}), and the chat"
                    " template does not write it in one place; take that text out of it"
                )
            token_ids += encode(text[first:begin])
            token_ids += encode(text[begin:end], split_special_tokens=True)
            first = end
        return np.asarray([*token_ids, *encode(text[first:])], np.int64)

    def _decode(self, token_ids: IntArray, *, skip: bool = False) -> str:
        return self.template.tokenizer.decode(token_ids.tolist(), skip_special_tokens=skip)

    # --- what the tokenizer has beside text ---

    @cached_property
    def _special(self) -> re.Pattern[str]:
        return match_added(self.template.tokenizer, lambda token: token.special)

    @cached_property
    def _added(self) -> re.Pattern[str]:
        return match_added(self.template.tokenizer, lambda token: True)

    # --- reading ---

    def read(self, node: Node, completion: Completion) -> tuple[Node, Turn]:
        """What was sampled after a prompt, appended and read back."""
        ended = completion.finish_reason == "stop"
        raw, text = self._decode(completion.token_ids), self._decode(completion.token_ids, skip=True)
        as_text = ChatMessage(role="assistant", content=text)
        message, unreadable = as_text, ""
        if self.read_turn is not None and ended:
            try:
                parsed = self._parse(raw, node)
                if self.writes_calls and parsed.get("tool_calls"):
                    # some templates write one call at most
                    self.template.render(_mark((*node.messages, parsed)))
                message = parsed
            except (ValueError, DataError) as error:
                unreadable = str(error)
        return Node(
            node,
            (*node.messages, as_text if message.get("tool_calls") and not self.writes_calls else message),
            completion.token_ids,
            completion.log_probs,
            completion.weight_versions,
            sampled=True,
            ended=ended,
        ), Turn(message=message, text=text, complete=ended, unreadable=unreadable)

    def _parse(self, text: str, node: Node) -> ChatMessage:
        """The message that a text means, its calls with ids of ours. Raises ValueError."""
        index = len(node.messages)
        if callable(self.read_turn):
            parsed = self.read_turn(text)
        else:
            header = node.text.removeprefix(self.template.render(_mark(node.messages)))
            tokenizer: Any = self.template.tokenizer
            try:
                parsed = tokenizer.parse_response(text, self.read_turn, prefix=header, tools=list(self.tools))
            except Exception as error:  # a response template takes what it reads apart as it comes
                raise ValueError(str(error)) from error
        message = checked_message({"content": "", **parsed, "role": "assistant"})
        if calls := message.get("tool_calls"):
            # nine letters and digits, which is the form that Mistral's templates want; other turns' differ
            message["tool_calls"] = [
                {**call, "id": f"c{zlib.crc32(f'{index}/{place}/{text}'.encode()) % 10**8:08d}"}
                for place, call in enumerate(calls)
            ]
        return message


def load_response_template(name: str) -> ResponseTemplate | None:
    """What rl.rollout.response_template means: a name of response_templates.json, a JSON file, or a function.
    None for an empty one. Raises PlugInError, ConfigError.
    """
    known = json.loads(Path(__file__).with_name("response_templates.json").read_text("utf-8"))
    if not name:
        return None
    if not name.endswith(".json"):
        return load_function(name, role="response_template", built_in=known)
    try:
        return json.loads(Path(name).expanduser().read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"response_template={name!r} is no JSON file that can be read: {error}") from error


def make_chat_format(
    tokenizer: ChatTokenizer,
    *,
    params: TemplateParams = NO_PARAMS,
    tools: Tools = (),
    read_turn: ResponseTemplate | None = None,
    history: History = "template",
) -> ChatFormat:
    """The format of conversations with these tools. `read_turn`: a function, or a response template in
    transformers' format; None: the tokenizer's own, where it has one, else a turn is its text.

    Where the template does not write tools, prompts must describe them; where it does not write calls and
    their results, these are texts. Raises ModelError if there is no chat template or it does not read a
    parameter, and where there are tools and nothing says how their calls are read.
    """
    question = ChatMessage(role="user", content="?")
    own = read_turn if read_turn is not None else getattr(tokenizer, "response_template", None)
    if tools and own is None:
        raise ModelError(
            "there are tools, and the tokenizer does not say how their calls are read; set"
            " rl.rollout.response_template, for most models to 'hermes'"
        )
    make = partial(ChatFormat, tools=tools, read_turn=own, history=history)
    if tools:
        name, call_id = tools[0]["function"]["name"], "c00010000"
        call = {"type": "function", "id": call_id, "function": {"name": name, "arguments": {}}}
        asks = ChatMessage(role="assistant", content="", tool_calls=[call])
        answers = ChatMessage(role="tool", content="zq1tqz", tool_call_id=call_id, name=name)
        called = [question, asks, answers]
        for written in (tools, None):
            with suppress(DataError):
                template = make_template(called, tokenizer, params, written)
                if "zq1tqz" in template.render(called):
                    return make(template, writes_calls=True)
        with suppress(DataError):
            return make(make_template([question], tokenizer, params, tools), writes_calls=False)
    return make(make_template([question], tokenizer, params, None), writes_calls=False)


# --- marks --------------------------------------------------------------------------------------------------


def _name(index: int, part: str) -> str:
    return f"zq{index}{part}qz"


def _mark(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """The messages with a mark in place of each part of an assistant turn: its thinking, its content, and the
    arguments of its calls.
    """
    marked = []
    for index, message in enumerate(messages):
        turn: Any = dict(message)
        if message["role"] == "assistant":
            calls = turn.get("tool_calls", ())
            if turn.get("reasoning_content"):
                turn["reasoning_content"] = _name(index, "r")
            if turn["content"].strip() or not calls:
                turn["content"] = _name(index, "c")
            if calls:
                turn["tool_calls"] = [
                    {**call, "function": {**call["function"], "arguments": {"q": _name(index, f"a{place}")}}}
                    for place, call in enumerate(calls)
                ]
        marked.append(turn)
    return marked


def _find_turn(text: str, index: int) -> int:
    """Where the last mark of a turn ends; 0 if it has none."""
    return max((found.end() for found in re.finditer(_name(index, r"(?:r|c|a\d+)"), text)), default=0)


# --- as samples ---------------------------------------------------------------------------------------------


class TurnRecord(NamedTuple):
    """A turn of the model, and what came of it."""

    answer: Node
    text: str = ""  # special tokens left out
    reward: float | None = None  # None: nothing rewarded it
    rewards: Numbers = {}  # its named parts
    calls: Sequence[JSONObject] = ()  # name, outcome and time/call of each, in seconds
    metadata: JSONObject = {}


def collect_segments(turns: Sequence[TurnRecord], sample: Sample) -> tuple[Sample, ...]:
    """One sample for each segment of a trajectory, in the order of their ends. A sampled token trains in the
    first that has it. Ids, status and response are those of `sample`.
    """
    inner = {node for turn in turns for node in turn.answer.path()[:-1]}
    rewards = {turn.answer: turn.reward or 0.0 for turn in turns}
    trained = set()
    segments = []
    for leaf in [turn.answer for turn in turns if turn.answer not in inner]:
        path = leaf.path()
        new = [node.sampled and node not in trained for node in path]
        ends = np.cumsum([len(node.token_ids) for node in path])
        turn_rewards = np.zeros(ends[-1], np.float32)
        for end, node, trains in zip(ends, path, new, strict=True):
            if trains and len(node.token_ids):
                turn_rewards[end - 1] = rewards.get(node, 0.0)
        trained.update(path)
        segments.append(_join_nodes(sample, path, new, turn_rewards=turn_rewards))
    return tuple(segments)


def _join_nodes(sample: Sample, nodes: Sequence[Node], trains: Sequence[bool], **fields: Any) -> Sample:
    """The sample with the tokens of the nodes, of which those that train have log-probs and versions."""
    rows = [np.broadcast_arrays(node.token_ids, node.log_probs, node.versions) for node in nodes]
    tokens, log_probs, versions = map(np.concatenate, zip(*rows, strict=True))
    mask = np.repeat(trains, [len(ids) for ids, *_ in rows])
    return replace(
        sample,
        tokens=tokens,
        loss_mask=mask,
        rollout_log_probs=log_probs * mask,
        weight_versions=np.where(mask, versions, -1),
        **fields,
    )


def pack_trajectory(
    node: Node, turns: Sequence[TurnRecord], rest: Completion | None, sample: Sample
) -> tuple[Sample, JSONObject]:
    """The sample with every token up to `node`, all segments one after the other, and of the turn that was
    cut; and where they belong, as JSON for unpack_trajectory.
    """
    chain = node.path(whole=True)
    places = {one: index for index, one in enumerate(chain)}
    layout = {
        "nodes": [
            [len(one.token_ids), len(one.messages), one.fresh, one.sampled, one.ended] for one in chain
        ],
        "held_messages": [dict(message) for message in node.messages],
        "held_turns": [[places[turn.answer], *turn[1:]] for turn in turns],
    }
    if rest is not None:
        cut = rest.token_ids, rest.log_probs, rest.weight_versions
        chain.append(Node(node, node.messages, *cut, sampled=True))
    return _join_nodes(sample, chain, [one.sampled for one in chain]), layout


def unpack_trajectory(
    form: ChatFormat, sample: Sample, layout: JSONObject
) -> tuple[Node, list[TurnRecord], Completion | None]:
    """The inverse of pack_trajectory."""
    chain = []
    messages, first = tuple(layout["held_messages"]), 0
    for count, said, fresh, sampled, ended in layout["nodes"]:
        span = slice(first, first := first + count)
        chain.append(
            Node(
                chain[-1] if chain else None,
                messages[:said],
                sample.tokens[span],
                sample.rollout_log_probs[span],
                sample.weight_versions[span],
                "" if sampled else form.render_marked(messages[:said]),
                fresh,
                sampled,
                ended,
            )
        )
    turns = [TurnRecord(chain[place], *rest) for place, *rest in layout["held_turns"]]
    if first == len(sample.tokens):
        return chain[-1], turns, None
    rest = Completion(
        request_id=sample.id,
        token_ids=sample.tokens[first:],
        log_probs=sample.rollout_log_probs[first:],
        weight_versions=sample.weight_versions[first:],
        finish_reason="abort",
    )
    return chain[-1], turns, rest
