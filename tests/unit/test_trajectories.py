"""What trains is, token by token, what an engine took in and gave out, in every chat template."""

import itertools
import json
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import rollouts.environments
from rollouts.data.chat import tokenize_conversation
from rollouts.environments.trajectories import (
    TurnRecord,
    collect_segments,
    make_chat_format,
    pack_trajectory,
    unpack_trajectory,
)
from rollouts.errors import DataError, RolloutsError
from rollouts.types import Completion, Sample
from tests.support.text_tables import cases, read_cells
from tests.unit.chat_tokenizers import family_sentencepiece, family_tokenizer, turn

RESPONSE_TEMPLATES = json.loads(
    (Path(rollouts.environments.__file__).parent / "response_templates.json").read_text("utf-8")
)
TOOL = json.loads("""{
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"]
        }
    }
}""")
READS = dict(
    read_cells("""
        chatml              |
        qwen2_5             | hermes
        qwen3               | hermes
        qwen3_6             | qwen3_xml
        llama3_1            | llama3
        mistral_v3_tekken   | mistral
        gemma3              |
        deepseek_v3         | deepseek_v3
        deepseek_r1_distill |
        gptoss              | gptoss
        phi_4               |
    """)
)  # how a family's turns are read; families without tools have a text
CALLS = {  # two sums, as the family writes a turn that calls; the arguments are spaced as no template would
    "hermes": '<tool_call>\n{{"name": "add", "arguments": {{"a":{a},  "b": {b}}}}}\n</tool_call>',
    "qwen3_xml": "<tool_call>\n<function=add>\n<parameter=a>\n{a}\n</parameter>\n<parameter=b>{b}"
    "</parameter>\n</function>\n</tool_call>",
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
MERGES = [*map(tuple, ("12", "34", "an", "ĊĊ", "Ġa"))]


def make_format(name, tokenizer, *, history="template"):
    template = RESPONSE_TEMPLATES.get(READS[name])
    return make_chat_format(tokenizer, tools=[TOOL] if template else [], read_turn=template, history=history)


def complete(token_ids, rng, *, ended):
    count = len(token_ids)
    return Completion(
        request_id="x",
        token_ids=np.asarray(token_ids, np.int64),
        log_probs=-rng.random(count).astype(np.float32) - 0.01,
        weight_versions=rng.integers(0, 3, count),
        finish_reason="stop" if ended else "length",
    )


def split_oddly(text, tokenizer, rng):
    """Ids of a text as a model may sample them: cut anywhere, so that merges are missed."""
    special = "|".join(re.escape(token.content) for token in tokenizer.added_tokens_decoder.values())
    inside = {at for found in re.finditer(special, text) for at in range(found.start() + 1, found.end())}
    cuts = sorted({0, len(text), *rng.integers(0, len(text) + 1, 4).tolist()} - inside)
    parts = (text[begin:end] for begin, end in itertools.pairwise(cuts))
    return [token for part in parts for token in tokenizer.encode(part, add_special_tokens=False)]


def find_end(name, tokenizer):
    """The token that ends a turn without a call."""
    return {"gptoss": "<|return|>", "gemma3": "<end_of_turn>"}.get(name, tokenizer.eos_token)


def sample_turn(name, tokenizer, rng):
    """A turn as a policy early in training writes one: a call, a text, or any tokens at all; some are cut."""
    reads, kind = READS[name], rng.integers(4)
    numbers = {"a": int(rng.integers(100)), "b": int(rng.integers(100))}
    end = find_end(name, tokenizer)
    text = THINKS.get(name, "").format(**numbers) if rng.random() < 0.7 else ""
    if kind == 0 and reads:
        text += CALLS[reads].format(**numbers)
        end = "<|call|>" if name == "gptoss" else end
    elif kind <= 2:
        text += SAYS.get(name, "{text}").format(
            text=["12 bananas\n\n", " 34\ttabs", "", "so <|im_end|>?"][rng.integers(4)]
        )
    ids = split_oddly(text, tokenizer, rng)
    if kind == 3:
        plain = sorted(set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids))
        ids = rng.choice(plain, 12).tolist()
    elif rng.random() < 0.1:
        return complete(ids[: 1 + len(ids) // 2] or [5], rng, ended=False)
    return complete([*ids, tokenizer.convert_tokens_to_ids(end)], rng, ended=True)


Exchange = tuple[list[int], Completion]  # what the engine took in and gave out


def converse(name, form, tokenizer, rng):
    node = form.begin([turn("user", "What is 12+34? You may add.")])
    exchanges, answers = [], []
    for _ in range(4):
        completion = sample_turn(name, tokenizer, rng)
        exchanges.append((node.tokens.tolist(), completion))
        answer, read = form.read(node, completion)
        answers.append(answer)
        calls = read.message.get("tool_calls", [])
        news = [
            turn("tool", f"{rng.integers(99)} bananas", tool_call_id=one["id"], name="add") for one in calls
        ]
        node = form.extend(answer, news or [turn("user", f"And {rng.integers(99)}?")])
    return exchanges, answers


def check_exact(exchanges, segments):
    """Every completion trains once, after exactly what the engine had before it."""
    for prompt, completion in exchanges:
        whole = [*prompt, *completion.token_ids]
        span = slice(len(prompt), len(whole))
        places = [
            segment
            for segment in segments
            if segment.tokens[: span.stop].tolist() == whole and segment.loss_mask[span].all()
        ]
        assert len(places) == 1  # else a completion trains where the engine had another prompt, or not at all
        assert (places[0].rollout_log_probs[span] == completion.log_probs).all()
        assert (places[0].weight_versions[span] == completion.weight_versions).all()
    trained = sum(len(completion.token_ids) for _, completion in exchanges)
    assert sum(segment.response_length for segment in segments) == trained
    for segment in segments:
        assert (segment.weight_versions[~segment.loss_mask] == -1).all()


SAMPLE = Sample(id="x", prompt="?")


def as_segments(answers):
    return collect_segments([*map(TurnRecord, answers)], SAMPLE)


TOKENIZERS = {
    "bytes": lambda name: family_tokenizer(name, merges=MERGES),
    "sentencepiece": family_sentencepiece,
}


@cases("history: template extend")
@cases("kind", TOKENIZERS)
@cases("name", READS)
def test_what_trains_is_what_the_engine_took_in_and_gave_out(name, kind, history):
    tokenizer = TOKENIZERS[kind](name)
    form = make_format(name, tokenizer, history=history)
    for seed in range(100):
        exchanges, answers = converse(name, form, tokenizer, np.random.default_rng(seed))
        check_exact(exchanges, as_segments(answers))


def test_encoding_the_history_again_trains_other_tokens_in_every_template():
    """The usual way: every prompt, and in the end what trains, is the messages rendered and encoded."""
    for name in READS:
        tokenizer, same = family_tokenizer(name, merges=MERGES), []
        form = make_format(name, tokenizer)

        def extend(answer, news, form=form):
            return form.begin([*answer.messages, *news])

        naive = SimpleNamespace(begin=form.begin, read=form.read, extend=extend)
        for seed in range(20):
            with suppress(AssertionError, RolloutsError):
                exchanges, answers = converse(name, naive, tokenizer, np.random.default_rng(seed))
                whole = tokenize_conversation(answers[-1].messages, tokenizer, tools=form.template.tools)
                mask = np.zeros(len(whole.token_ids), bool)
                for span in whole.spans:
                    mask[span] = True
                check_exact(exchanges, (replace(SAMPLE, tokens=whole.token_ids, loss_mask=mask),))
                same.append(seed)
        assert len(same) <= 10, name


def say(form, text, end, *, after=None, ended=True):
    """The answer that is the tokenizer's own encoding of a text, to a question if not `after` more, and how
    it reads.
    """
    ids = form.template.tokenizer.encode(text + (end if ended else ""), add_special_tokens=False)
    completion = complete(ids, np.random.default_rng(0), ended=ended)
    return form.read(after or form.begin([turn("user", "add")]), completion)


# what follows an answer: a tool's result, or a user's turn; and the segments of a trajectory that goes on so
@cases("""
name              | thinks | after_tool | after_user | …
qwen2_5           | no     | 1          | 1          |
qwen3             | yes    | 1          | 2          | thinking goes with the next question
qwen3             | no     | 1          | 1          |
llama3_1          | no     | 1          | 1          |
mistral_v3_tekken | no     | 1          | 2          | the tools move to the last question
gptoss            | no     | 1          | 2          | the token that ends it becomes another one
deepseek_v3       | no     | 1          | 1          |
gemma3            | no     | 1          | 1          |
chatml            | no     | 1          | 1          |
""")
def test_a_segment_begins_where_the_template_rewrites_what_is_held(
    name, thinks: bool, after_tool: int, after_user: int
):
    form = make_format(name, family_tokenizer(name))
    end = find_end(name, form.template.tokenizer)
    text = (THINKS[name] if thinks else "") + SAYS.get(name, "{text}").format(text="ok")
    first, _ = say(form, text, end)
    second, _ = say(form, text, end, after=form.extend(first, [turn("user", "and?")]))
    assert len(as_segments([first, second])) == after_user
    if reads := READS[name]:
        called, read = say(form, CALLS[reads].format(a=12, b=34), "<|call|>" if name == "gptoss" else end)
        assert read.message["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 12, "b": 34}}
        result = turn("tool", "46", tool_call_id=read.message["tool_calls"][0]["id"], name="add")
        last, _ = say(form, text, end, after=form.extend(called, [result]))
        assert len(as_segments([called, last])) == after_tool
        extended = make_format(name, form.template.tokenizer, history="extend")
        again = extended.extend(first, [turn("user", "and?")])
        kept = again.tokens[: len(first.tokens)]
        assert not again.fresh and (kept == first.tokens).all()  # extend keeps what was sampled


@cases("name: chatml qwen2_5 llama3_1 gemma3 deepseek_v3 phi_4")
def test_what_is_appended_is_what_the_template_writes(name):
    tokenizer = family_tokenizer(name, merges=MERGES)
    form = make_format(name, tokenizer)
    end = find_end(name, tokenizer)
    messages, node = [turn("user", "add")], form.begin([turn("user", "add")])
    for text in ("12 bananas", "34", "x"):
        answer, read = say(form, text, end, after=node)
        messages += [read.message, turn("user", " 5 apples ")]
        node = form.extend(answer, messages[-1:])
    whole = form.template.render(messages, add_generation_prompt=True)
    assert node.tokens.tolist() == tokenizer.encode(whole, add_special_tokens=False)


def test_an_answer_that_a_limit_cut_gets_its_end_token_masked():
    tokenizer = family_tokenizer("qwen2_5")
    form = make_format("qwen2_5", tokenizer)
    answer, read = say(form, "so far", "", ended=False)
    node = form.extend(answer, [turn("user", "go on")])
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert not read.complete and node.token_ids[0] == end
    last, _ = say(form, "ok", "<|im_end|>", after=node)
    (segment,) = as_segments([answer, last])
    begin = len(answer.tokens)
    assert segment.tokens[begin] == end and not segment.loss_mask[begin]


@cases("kind", TOKENIZERS)
@cases("name", READS)
def test_special_tokens_in_what_the_world_says_become_no_special_id(name, kind):
    tokenizer = TOKENIZERS[kind](name)
    form = make_format(name, tokenizer)
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    attack = "a" + "b".join(special) + "c"
    answer, _ = say(form, "ok", tokenizer.eos_token, after=form.begin([turn("user", f"add {attack}")]))
    plain, _ = say(form, "ok", tokenizer.eos_token)
    for role in ("tool", "user") if READS[name] else ("user",):
        fields = {"tool_call_id": "c00010000", "name": "add"} if role == "tool" else {}
        try:
            calm = form.extend(plain, [turn(role, "abc", **fields)])
            node = form.extend(answer, [turn(role, attack, **fields)])
        except DataError:
            continue  # a tool's turn without a call before it
        count, calm_count = (np.isin(one.tokens, tokenizer.all_special_ids).sum() for one in (node, calm))
        assert count == calm_count
        assert kind != "bytes" or attack in tokenizer.decode(node.tokens.tolist())


@cases(r"""
text | said
\n{"name": "add", "arguments": {"a": 1\n | could not parse
{"name": "add", "arguments": {}}</tool_call><tool_call>no | could not parse
{"arguments": {"a": 1}} | missing key 'name'
{"name": "", "arguments": {}} | must be text that is not empty
{"name": "add", "arguments": [1]} | it must be an object
["add"] | cannot index into list
{"name": "add", "arguments": {"a": NaN}} | JSON has no such number
""")
def test_a_call_that_cannot_be_read_is_a_turn_of_text_that_says_why(text, said):
    text = f"<tool_call>{text}</tool_call>".replace(r"\n", "\n")
    answer, read = say(make_format("qwen2_5", family_tokenizer("qwen2_5")), text, "<|im_end|>")
    assert said in read.unreadable
    assert read.message == turn("assistant", text)
    assert answer.messages[-1]["content"] == text


def test_a_call_inside_thinking_is_no_call():
    form = make_format("qwen3", family_tokenizer("qwen3"))
    _, read = say(form, "<think>" + CALLS["hermes"].format(a=1, b=2) + "</think>7", "<|im_end|>")
    assert "tool_calls" not in read.message and read.message["content"] == "7"


def test_two_calls_where_the_template_writes_one_cannot_be_read():
    form = make_chat_format(
        family_tokenizer("llama3_1"),
        tools=[TOOL],
        read_turn=lambda text: {"tool_calls": [{"function": {"name": "add", "arguments": {}}}] * 2},
    )
    _, read = say(form, "x", "<|eot_id|>")
    assert "refuses messages" in read.unreadable


def test_a_template_without_a_place_for_tools_wants_them_described():
    plain = family_tokenizer("chatml")
    form = make_chat_format(plain, tools=[TOOL], read_turn=RESPONSE_TEMPLATES["hermes"])
    with pytest.raises(DataError, match="no message of the prompt names add"):
        form.begin([turn("user", "What is 1+2?")])
    node = form.begin([turn("system", "Call add."), turn("user", "What is 1+2?")])
    text = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    answer, read = say(form, text, "<|im_end|>", after=node)
    assert read.message["tool_calls"][0]["function"]["name"] == "add"
    assert answer.messages[-1] == turn("assistant", text)  # the history has it as text
    node = form.extend(answer, [turn("tool", "3", tool_call_id="c1", name="add")])
    assert plain.decode(node.token_ids.tolist()) == "\n<|im_start|>user\n3<|im_end|>\n<|im_start|>assistant\n"


@cases("name: qwen3 mistral_v3_tekken deepseek_v3")
def test_a_trajectory_goes_on_from_what_was_held(name):
    """Held after each turn, as JSON, and with a cut answer: the same tokens, segments and next prompt."""
    tokenizer = family_tokenizer(name, merges=MERGES)
    form = make_format(name, tokenizer)
    for seed in range(20):
        rng = np.random.default_rng(seed)
        _, answers = converse(name, form, tokenizer, rng)
        if answers[-1].messages[-1].get("tool_calls"):
            continue  # a tool's result would have to follow
        turns = [TurnRecord(answer, f"turn {index}", float(index)) for index, answer in enumerate(answers)]
        node = form.extend(answers[-1], [turn("user", "And?")])
        sample, layout = pack_trajectory(node, turns, complete([5, 6, 7], rng, ended=False), SAMPLE)
        again, held, rest = unpack_trajectory(form, sample, json.loads(json.dumps(layout)))
        assert rest.token_ids.tolist() == [5, 6, 7]
        assert (again.tokens.tolist(), again.text) == (node.tokens.tolist(), node.text)
        for one, other in zip(*(collect_segments(of, SAMPLE) for of in (turns, held)), strict=True):
            for field in ("tokens", "loss_mask", "rollout_log_probs", "weight_versions", "turn_rewards"):
                np.testing.assert_array_equal(getattr(one, field), getattr(other, field))
