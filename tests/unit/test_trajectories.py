"""What trains is, token by token, what an engine took in and gave out, in every chat template."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rollouts.environments
from rollouts.environments.trajectories import (
    ChatFormat,
    Node,
    TurnRecord,
    collect_segments,
    make_chat_format,
)
from rollouts.types import Completion, Sample
from tests.unit.chat_tokenizers import family_sentencepiece, family_tokenizer, turn

RESPONSE_TEMPLATES = json.loads(
    (Path(rollouts.environments.__file__).parent / "response_templates.json").read_text("utf-8")
)
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
READS = {  # how a family's turns are read; families without tools have a text
    "chatml": None,
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "qwen3_6": "qwen3_xml",
    "llama3_1": "llama3",
    "mistral_v3_tekken": "mistral",
    "gemma3": None,
    "deepseek_v3": "deepseek_v3",
    "deepseek_r1_distill": None,
    "gptoss": "gptoss",
    "phi_4": None,
}
CALLS = {  # two sums, as the family writes a turn that calls; the arguments are spaced as no template would
    "hermes": '<tool_call>\n{{"name": "add", "arguments": {{"a":{a},  "b": {b}}}}}\n</tool_call>',
    "qwen3_xml": "<tool_call>\n<function=add>\n<parameter=a>\n{a}\n</parameter>\n<parameter=b>{b}</parameter>\n"
    "</function>\n</tool_call>",
    "llama3": '{{"name": "add", "parameters": {{"a":{a},  "b": {b}}}}}',
    "mistral": '[TOOL_CALLS][{{"name": "add", "arguments": {{"a":{a},  "b": {b}}}}}]',
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
    '{{"a":{a},  "b": {b}}}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "gptoss": '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{{"a":{a},  "b": {b}}}',
}
THINKS = {
    "qwen3": "<think>\nhm {a}\n</think>\n\n",
    "gptoss": "<|channel|>analysis<|message|>hm {a}<|end|><|start|>assistant",
}
SAYS = {"gptoss": "<|channel|>final<|message|>{text}"}
MERGES = [("1", "2"), ("3", "4"), ("a", "n"), ("Ċ", "Ċ"), ("Ġ", "a")]


def make_format(name: str, tokenizer: Any, *, history: Any = "template") -> ChatFormat:
    reads = READS[name]
    return make_chat_format(
        tokenizer,
        tools=[TOOL] if reads else [],
        read_turn=RESPONSE_TEMPLATES[reads] if reads else None,
        history=history,
    )


def complete(token_ids: list[int], rng: Any, *, ended: bool) -> Completion:
    count = len(token_ids)
    return Completion(
        request_id="x",
        token_ids=np.asarray(token_ids, np.int64),
        log_probs=-rng.random(count).astype(np.float32) - 0.01,
        weight_versions=rng.integers(0, 3, count),
        finish_reason="stop" if ended else "length",
    )


def split_oddly(text: str, tokenizer: Any, rng: Any) -> list[int]:
    """Ids of a text as a model may sample them: cut anywhere, so that merges are missed."""
    cuts = sorted({0, len(text), *rng.integers(0, len(text) + 1, 4).tolist()})
    special = [token.content for token in tokenizer.added_tokens_decoder.values()]
    inside = {
        at
        for one in special
        for begin in range(len(text))
        if text.startswith(one, begin)
        for at in range(begin + 1, begin + len(one))
    }
    cuts = [cut for cut in cuts if cut not in inside]
    return [
        i
        for a, b in zip(cuts, cuts[1:], strict=False)
        for i in tokenizer.encode(text[a:b], add_special_tokens=False)
    ]


def sample_turn(name: str, tokenizer: Any, rng: Any) -> Completion:
    """A turn as a policy early in training writes one: a call, a text, or any tokens at all; some are cut."""
    reads, kind = READS[name], rng.integers(4)
    numbers = {"a": int(rng.integers(100)), "b": int(rng.integers(100))}
    end = {"gptoss": "<|return|>", "gemma3": "<end_of_turn>"}.get(name, tokenizer.eos_token)
    text = THINKS.get(name, "").format(**numbers) if rng.random() < 0.7 else ""
    if kind == 0 and reads:
        text += CALLS[reads].format(**numbers)
        end = "<|call|>" if name == "gptoss" else end
    elif kind <= 2:
        text += SAYS.get(name, "{text}").format(
            text=["12 bananas\n\n", " 34\ttabs", "", "so <|im_end|>?"][rng.integers(4)]
        )
    else:
        plain = sorted(set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids))
        ids = rng.choice(plain, 12).tolist()
        return complete([*ids, tokenizer.convert_tokens_to_ids(end)], rng, ended=True)
    ids = split_oddly(text, tokenizer, rng)
    if rng.random() < 0.1:
        return complete(ids[: 1 + len(ids) // 2] or [5], rng, ended=False)
    return complete([*ids, tokenizer.convert_tokens_to_ids(end)], rng, ended=True)


Exchange = tuple[list[int], Completion]  # what the engine took in and gave out


def converse(
    name: str, form: ChatFormat, tokenizer: Any, rng: Any, turns: int = 4
) -> tuple[list[Exchange], list[Node]]:
    node = form.begin([turn("user", "What is 12+34? You may add.")])
    exchanges: list[Exchange] = []
    answers: list[Node] = []
    for _ in range(turns):
        completion = sample_turn(name, tokenizer, rng)
        exchanges.append((node.tokens.tolist(), completion))
        answer, read = form.read(node, completion)
        answers.append(answer)
        calls = read.message.get("tool_calls", [])
        news = [
            turn("tool", f"{rng.integers(99)} bananas", tool_call_id=call["id"], name="add") for call in calls
        ]
        node = form.extend(answer, news or [turn("user", f"And {rng.integers(99)}?")])
    return exchanges, answers


def check_exact(exchanges: list[Exchange], segments: tuple[Sample, ...]) -> None:
    """Every completion trains once, after exactly what the engine had before it."""
    trained = 0
    for prompt, completion in exchanges:
        begin, count = len(prompt), len(completion.token_ids)
        places = [
            segment
            for segment in segments
            if segment.tokens[:begin].tolist() == prompt
            and segment.tokens[begin : begin + count].tolist() == completion.token_ids.tolist()
            and segment.loss_mask[begin : begin + count].all()
        ]
        assert len(places) == 1, "a completion trains where the engine had another prompt, or not at all"
        span = slice(begin, begin + count)
        assert (places[0].rollout_log_probs[span] == completion.log_probs).all()
        assert (places[0].weight_versions[span] == completion.weight_versions).all()
        trained += count
    assert sum(segment.response_length for segment in segments) == trained
    for segment in segments:
        assert (segment.weight_versions[~segment.loss_mask] == -1).all()


def as_segments(answers: list[Node]) -> tuple[Sample, ...]:
    return collect_segments([TurnRecord(answer) for answer in answers], Sample(id="x", prompt="?"))


TOKENIZERS: dict[str, Callable[[str], Any]] = {
    "bytes": lambda name: family_tokenizer(name, merges=MERGES),
    "sentencepiece": family_sentencepiece,
}


@pytest.mark.parametrize("history", ["template", "extend"])
@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("name", READS)
def test_what_trains_is_what_the_engine_took_in_and_gave_out(name: str, kind: str, history: str) -> None:
    tokenizer = TOKENIZERS[kind](name)
    form = make_format(name, tokenizer, history=history)
    for seed in range(100):
        exchanges, answers = converse(name, form, tokenizer, np.random.default_rng(seed))
        check_exact(exchanges, as_segments(answers))
