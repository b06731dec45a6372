"""The endpoint as the openai SDK sees it, and that what trains is what the engine took in and gave out."""

import json
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import trio

from rollouts.environments import proxy as module
from rollouts.environments.episode import make_formats
from rollouts.environments.proxy import open_proxy
from rollouts.errors import EngineOverloaded, FleetDown
from rollouts.types import Completion, EngineFeatures, GenerateRequest
from tests.support.text_tables import cases
from tests.unit.chat_tokenizers import family_tokenizer
from tests.unit.proxy_clients import ADD, ASK, TOKENIZER, Endpoint, Model, call, open_endpoint
from tests.unit.test_trajectories import (
    MERGES,
    READS,
    RESPONSE_TEMPLATES,
    TOOL,
    check_exact,
    sample_turn,
)

# the SDK leaves its generators to the collector when it has read the end of a stream
pytestmark = pytest.mark.filterwarnings("ignore:Async generator:ResourceWarning")


def ask(client: openai.AsyncOpenAI, messages: Any = ASK, **fields: Any) -> Any:
    return client.chat.completions.create(model="any", messages=messages, **fields)


def check_trains_what_was_sampled(endpoint: Endpoint, model: Model) -> None:
    check_exact([(request.prompt_ids.tolist(), told) for request, told in model.given], endpoint.samples())


async def test_an_answer_has_all_that_openai_documents(autojump_clock):
    async with open_endpoint(Model("hällo")) as endpoint, endpoint.client() as client:
        answer = await ask(client)
        (choice,) = answer.choices
        assert (choice.message.role, choice.message.content) == ("assistant", "hällo")
        assert (choice.finish_reason, choice.message.tool_calls, answer.model) == ("stop", None, "any")
        prompt = len(endpoint.samples()[0].tokens) - 7
        assert answer.usage.model_dump(exclude_none=True) == {
            "prompt_tokens": prompt,
            "completion_tokens": 7,  # six bytes and the end
            "total_tokens": prompt + 7,
        }
        assert [model.id async for model in client.models.list()] == ["policy"]


async def test_a_stream_says_what_an_answer_says(autojump_clock):
    model = Model("so:" + call(1, 2), "ok")
    async with open_endpoint(model) as endpoint, endpoint.client() as client:
        whole = await ask(client, tools=[ADD], seed=3)
        stream = await ask(client, tools=[ADD], seed=3, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        *_, last, usage = chunks
        assert (last.choices[0].finish_reason, usage.choices, usage.usage.total_tokens > 0) == ("stop", [], True)
        assert all(chunk.usage is None for chunk in chunks[:-1])
        model.given.clear()
        async with client.chat.completions.stream(model="any", messages=ASK, tools=[ADD]) as helped:
            async for _ in helped:
                pass
            joined = (await helped.get_final_completion()).choices[0]
        asked = whole.choices[0]
        assert joined.message.content == asked.message.content == "so:"
        assert joined.finish_reason == asked.finish_reason == "tool_calls"
        functions = [one.message.tool_calls[0].function for one in (joined, asked)]
        assert json.loads(functions[0].arguments) == json.loads(functions[1].arguments) == {"a": 1, "b": 2}
        assert all([chunk.choices async for chunk in await ask(client, stream=True)])


async def test_a_stream_that_waits_says_so_in_comments(autojump_clock):
    async with open_endpoint(Model("a" * 10, token_s=1.0)) as endpoint, httpx.AsyncClient() as client:
        body, key = {"model": "m", "messages": ASK, "stream": True}, endpoint.trajectory.key
        async with client.stream(
            "POST", f"{endpoint.url}/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"}
        ) as answer:
            assert answer.headers["content-type"] == "text/event-stream"
            lines = [line async for line in answer.aiter_lines() if line]
        # eleven tokens take 11 s, in which comments come after 3, 6 and 9
        assert lines[:3] == [": keep-alive"] * 3
        assert [line[:6] for line in lines[3:]] == ["data: "] * 3
        assert lines[-1] == "data: [DONE]"


async def test_the_model_may_call_several_tools_at_once(autojump_clock):
    model = Model(call(1, 2) + call(3, 4), "ok")
    async with open_endpoint(model) as endpoint, endpoint.client() as client:
        first = (await ask(client, tools=[ADD])).choices[0].message
        ids = [one.id for one in first.tool_calls]
        assert len({*ids}) == 2
        results = [{"role": "tool", "tool_call_id": one, "content": "3"} for one in ids]
        # as a client echoes it: with nulls, and arguments that it has written otherwise
        echo = first.model_dump()
        assert {echo[name] for name in ("refusal", "audio", "annotations", "function_call")} == {None}
        echo["tool_calls"][1]["function"]["arguments"] = '{ "b": 4, "a": 3 }'
        last = await ask(client, [*ASK, echo, *results], tools=[ADD])
        assert last.choices[0].message.content == "ok"
        assert len(endpoint.samples()) == 1
        check_trains_what_was_sampled(endpoint, model)


async def test_n_answers_are_siblings_that_all_train(autojump_clock):
    model = Model("a", "b", "c")
    async with open_endpoint(model) as endpoint, endpoint.client() as client:
        answer = await ask(client, n=3)
        assert [choice.message.content for choice in answer.choices] == ["a", "b", "c"]
        echo = answer.choices[1].message.model_dump()
        await ask(client, [*ASK, echo, {"role": "user", "content": "and?"}])
        samples = endpoint.samples()
        assert [one.response_length for one in samples] == [2, 2, 4]  # a, c, b and a, each with its end
        check_trains_what_was_sampled(endpoint, model)


async def test_equal_seeds_draw_equal_numbers(autojump_clock):
    model = Model("a")
    async with open_endpoint(model) as endpoint, endpoint.client() as client:
        for seed in (5, 5, 6, openai.NOT_GIVEN, openai.NOT_GIVEN):
            await ask(client, seed=seed)
        seeds = [request.sampling.seed for request, _ in model.given]
        assert seeds[0] == seeds[1]
        assert len({*seeds}) == 4


async def test_a_token_that_stops_is_sampled_and_not_told(autojump_clock):
    model = Model("line\nmore")
    async with open_endpoint(model) as endpoint, endpoint.client() as client:
        message = (choice := (await ask(client, stop=["\n"])).choices[0]).message
        assert (message.content, choice.finish_reason) == ("line", "stop")
        await ask(client, [*ASK, message.model_dump(), {"role": "user", "content": "and?"}], stop="\n")
        assert len(endpoint.samples()) == 1
        check_trains_what_was_sampled(endpoint, model)


@cases("""
asked | told | reason | end    | …
3     | abc  | length | done   | the client's own limit is none of the trajectory's
900   | 200  | length | tokens | the run's, of one answer
0     | 200  | length | tokens | none of its own
""")
async def test_an_answer_is_cut_at_the_lowest_limit(asked: int, told: str, reason: str, end: str, autojump_clock):
    async with open_endpoint(Model("abc" * 100)) as endpoint, endpoint.client() as client:
        choice = (await ask(client, max_completion_tokens=asked or openai.NOT_GIVEN)).choices[0]
        assert choice.finish_reason == reason
        assert choice.message.content == told or len(choice.message.content) == int(told)
        assert endpoint.trajectory.end == end


async def test_what_is_left_of_a_trajectory_cuts_and_then_refuses(autojump_clock):
    prompt = len(TOKENIZER.apply_chat_template(ASK, add_generation_prompt=True)["input_ids"])
    async with open_endpoint(Model("a" * 50), max_trajectory_tokens=prompt + 9) as endpoint:
        async with endpoint.client() as client:
            choice = (await ask(client, max_tokens=40)).choices[0]
            assert (choice.finish_reason, choice.message.content) == ("length", "a" * 9)
            with pytest.raises(openai.BadRequestError) as refusal:
                await ask(client, [*ASK, choice.message.model_dump(), *ASK])
            assert refusal.value.code == "context_length_exceeded"
        assert endpoint.trajectory.end == "tokens"


async def test_turns_beyond_the_limit_are_refused(autojump_clock):
    async with open_endpoint(Model("a"), max_turns=2) as endpoint, endpoint.client() as client:
        await ask(client, n=2)
        with pytest.raises(openai.BadRequestError) as refusal:
            await ask(client)
        assert (refusal.value.code, endpoint.trajectory.end) == ("max_turns", "turns")


@cases("""
field               | value                         | …
frequency_penalty   | 0.5                           |
presence_penalty    | -1                            |
logit_bias          | {"5": 1}                      |
response_format     | {"type": "json_object"}       |
tool_choice         | "required"                    |
tool_choice         | {"type": "function", "function": {"name": "add"}} |
parallel_tool_calls | false                         |
top_p               | 0.9                           |
temperature         | 0                             | the run's is 1
logprobs            | true                          |
modalities          | ["text", "audio"]             |
n                   | 17                            |
stop                | "two bytes"                   |
seed                | "x"                           |
reasoning_effort    | "low"                         | as any that is unknown
messages            | []                            |
messages            | [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}] |
messages            | [{"role": "user"}]            |
tools               | 3                             |
""")
async def test_what_cannot_be_honoured_is_refused_by_name(field: str, value: Any, autojump_clock):
    model = Model("a")
    async with open_endpoint(model) as endpoint, endpoint.client() as client:
        with pytest.raises(openai.BadRequestError, match=field) as refusal:
            await ask(client, extra_body={field: value})
        assert refusal.value.type == "invalid_request_error"
        assert not model.given


async def test_what_changes_nothing_is_accepted(autojump_clock):
    model = Model("a")
    neutral = {name: value for name, value in module.ONLY.items() if value is not None}
    ignored = {name: "x" for name, value in module.ONLY.items() if value is None}
    async with open_endpoint(model) as endpoint, endpoint.client() as client:
        parts = [{"type": "text", "text": "Ad"}, {"type": "text", "text": "d."}]
        said = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
        await ask(client, said, extra_body=neutral | ignored | {"temperature": 1.0, "stop": None})
        await ask(client, [{"role": "system", "content": "Be brief."}, *ASK])
        first, second = (request.prompt_ids.tolist() for request, _ in model.given)
        assert first == second


async def test_every_error_has_openais_form(autojump_clock):
    model = Model("a")
    async with open_endpoint(model) as endpoint, endpoint.client() as client:
        key, away = endpoint.trajectory.key, endpoint.proxy.url
        endpoint.proxy.trajectories["ended"] = None
        for changed, error in (
            ({"api_key": "wrong"}, openai.AuthenticationError),
            ({"base_url": f"{away}/e/17/v1"}, openai.NotFoundError),
            ({"base_url": f"{away}/e/ended/v1"}, openai.ConflictError),
            ({"base_url": f"{endpoint.url}/v2"}, openai.NotFoundError),
        ):
            async with endpoint.client(**changed) as other:
                with pytest.raises(error) as told:
                    await ask(other)
                assert told.value.body.keys() == {"message", "type", "param", "code"}
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {key}"}) as plain:
            answer = await plain.post(f"{endpoint.url}/v1/chat/completions", content=b"{")
            assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
        assert not model.given
        await ask(client)


async def test_a_body_that_is_too_large_is_refused(autojump_clock, monkeypatch):
    monkeypatch.setattr(module, "BODY_BYTES", 100_000)
    async with open_endpoint(Model("a")) as endpoint, endpoint.client() as client:
        with pytest.raises(openai.APIStatusError) as told:
            await ask(client, [{"role": "user", "content": "x" * 100_000}])
        assert told.value.status_code == 413


async def test_an_engine_that_is_full_is_asked_again(autojump_clock):
    model = Model(EngineOverloaded("full"), "a")
    async with open_endpoint(model) as endpoint:
        async with endpoint.client() as client:
            with pytest.raises(openai.RateLimitError) as told:
                await ask(client)
            assert told.value.response.headers["retry-after"] == "1"
        model = endpoint.trajectory.episode.engine = Model(EngineOverloaded("full"), "a")
        async with endpoint.client(max_retries=1) as client:
            began = trio.current_time()
            assert (await ask(client)).choices[0].message.content == "a"
            assert trio.current_time() - began == pytest.approx(1.0, abs=0.3)


async def test_what_is_nobodys_fault_ends_the_trajectory(autojump_clock):
    with pytest.raises(FleetDown):
        async with open_endpoint(Model(FleetDown("down"))) as endpoint, endpoint.client() as client:
            await ask(client)


async def test_an_error_after_a_stream_has_begun_is_told_in_it(autojump_clock):
    async with open_endpoint(Model("aaaaaaaa", token_s=1.0)) as endpoint, endpoint.client() as client:

        async def overload() -> None:
            await trio.sleep(4)
            for asked in endpoint.trajectory.asked.values():
                asked.scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(overload)
            with pytest.raises(openai.APIError, match="nobody waited"):
                async for _ in await ask(client, stream=True):
                    pass


# --- clients that go -----------------------------------------------------------------------------------------


async def test_a_request_that_the_sdk_repeats_is_sampled_once(autojump_clock):
    model = Model("aa", "b", token_s=1.0)
    async with open_endpoint(model) as endpoint:
        async with endpoint.client(timeout=1.5, max_retries=2) as client:
            assert (await ask(client)).choices[0].message.content == "aa"  # took 3 s
        assert len(model.given) == 1
        check_trains_what_was_sampled(endpoint, model)
        async with endpoint.client() as client:  # asked by itself, the same is another sample
            assert (await ask(client)).choices[0].message.content == "b"


@cases("""
stream | after_s | held_s | …
no     | 2       | 10     | the SDK may ask again
yes    | 2       | 10     | and here, as long as nothing was told
yes    | 4       | 0      | once a stream has begun it does not
""")
async def test_a_client_that_goes_ends_its_request(
    stream: bool, after_s: float, held_s: float, autojump_clock
):
    model = Model("a" * 100, token_s=1.0)
    async with open_endpoint(model) as endpoint, endpoint.client() as client:
        with trio.move_on_after(after_s):
            async for _ in await ask(client, stream=stream):
                pass
        if held_s:
            await trio.sleep(held_s - 1)
            assert model.in_flight == 1
        await trio.sleep(2)
        assert (model.in_flight, model.given, endpoint.trajectory.episode.turns) == (0, [], [])


async def test_an_answer_that_no_client_received_does_not_train(autojump_clock):
    model = Model("a", "b", token_s=1.0)
    async with open_endpoint(model) as endpoint, endpoint.client() as client:
        with trio.move_on_after(1.0):
            await ask(client)
        await trio.sleep(3)
        answer = (await ask(client)).choices[0].message
        assert answer.content == "b"
        assert len(model.given) == 2
        (sample,) = endpoint.samples()
        check_exact([(model.given[1][0].prompt_ids.tolist(), model.given[1][1])], (sample,))


async def test_new_weights_in_mid_answer_are_told_apart(autojump_clock):
    model = Model("abcd", token_s=1.0)
    async with open_endpoint(model) as endpoint, endpoint.client() as client:
        async with trio.open_nursery() as nursery:

            async def update() -> None:
                await trio.sleep(2.5)
                await model.pause("keep")
                model.set_version(1)
                await model.resume()

            nursery.start_soon(update)
            stream = await ask(client, stream=True)
            assert [chunk async for chunk in stream][-1].choices[0].finish_reason == "stop"
        versions = endpoint.samples()[0].weight_versions
        assert versions[versions >= 0].tolist() == [0, 0, 1, 1, 1]


# --- the tree ------------------------------------------------------------------------------------------------


async def test_an_answer_that_the_client_edited_is_context(autojump_clock):
    model = Model("one", "two")
    async with open_endpoint(model) as endpoint, endpoint.client() as client:
        await ask(client)
        edited = [{"role": "assistant", "content": "One!"}, {"role": "user", "content": "and?"}]
        await ask(client, [*ASK, *edited])
        first, second = endpoint.samples()
        assert (first.response_length, second.response_length) == (4, 4)
        assert "One!" in TOKENIZER.decode(second.tokens[~second.loss_mask].tolist())
        check_trains_what_was_sampled(endpoint, model)


async def test_two_requests_that_go_on_from_one_answer_are_branches(autojump_clock):
    model = Model("one", "two", "three")
    async with open_endpoint(model) as endpoint, endpoint.client() as client:
        said = (await ask(client)).choices[0].message.model_dump()
        for question in ("and?", "else?"):
            await ask(client, [*ASK, said, {"role": "user", "content": question}])
        first, second = endpoint.samples()
        shared = len(model.given[0][0].prompt_ids) + 4
        assert first.tokens[:shared].tolist() == second.tokens[:shared].tolist()
        assert (first.response_length, second.response_length) == (8, 6)  # "one" trains in the first
        check_trains_what_was_sampled(endpoint, model)


async def test_other_tools_begin_another_segment(autojump_clock):
    model = Model("one")
    async with open_endpoint(model) as endpoint, endpoint.client() as client:
        said = (await ask(client, tools=[ADD])).choices[0].message.model_dump()
        await ask(client, [*ASK, said, *ASK])
        assert ["add" in TOKENIZER.decode(one.tokens.tolist()) for one in endpoint.samples()] == [True, False]
        check_trains_what_was_sampled(endpoint, model)


async def test_trajectories_and_agents_at_once_do_not_meet(autojump_clock):
    async def speak(client: openai.AsyncOpenAI, name: str) -> None:
        said: list[Any] = [{"role": "user", "content": name}]
        for _ in range(4):
            message = (await ask(client, said)).choices[0].message
            said += [message.model_dump(), {"role": "user", "content": f"{name}?"}]

    async with open_proxy() as proxy, trio.open_nursery() as nursery:

        async def play(*names: str) -> None:
            model = Model("a", "bb", "ccc", token_s=0.1)
            async with open_endpoint(model, proxy=proxy) as endpoint, endpoint.client() as client:
                async with trio.open_nursery() as agents:
                    for name in names:
                        agents.start_soon(speak, client, name)
                assert len(endpoint.samples()) == len(names)
                check_trains_what_was_sampled(endpoint, model)

        nursery.start_soon(play, "one")
        nursery.start_soon(play, "two", "three")


@cases("""
posted              | status | reward | parts           | …
1                   | 200    | 1.5    |                 |
{"a": 1, "b": 0.25} | 200    | 1.75   | a = 1, b = 0.25 |
"good"              | 400    | 0.5    |                 |
{}                  | 400    | 0.5    |                 |
""")
async def test_rewards_that_a_program_posts_are_its_newest_turns(
    posted: Any, status: int, reward: float, parts: dict, autojump_clock
):
    async with open_endpoint(Model("a")) as endpoint, endpoint.client() as client:
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {endpoint.trajectory.key}"}) as plain:

            async def post(value: Any) -> int:
                return (await plain.post(f"{endpoint.url}/reward", json={"reward": value})).status_code

            assert await post(1) == 400  # nothing was said yet
            said = (await ask(client)).choices[0].message.model_dump()
            assert await post(0.5) == 200
            await ask(client, [*ASK, said, *ASK])
            assert await post(posted) == status
        (sample,) = endpoint.samples()
        assert (sample.reward, sample.rewards) == (reward, parts)
        turns = sample.metadata["trajectory"]["turns"]
        assert [turn.get("reward") for turn in turns] == [0.5, reward - 0.5 or None]
        assert sample.turn_rewards[sample.turn_rewards != 0].tolist() == [0.5, *[reward - 0.5] * (reward != 0.5)]


# --- tokens, in the templates of other families -------------------------------------------------------------


class Dice:
    """An engine that samples turns as a policy early in training does."""

    def __init__(self, name: str, tokenizer: Any, seed: int) -> None:
        self.name, self.tokenizer, self.rng = name, tokenizer, np.random.default_rng(seed)
        self.features = EngineFeatures(vocab_size=10_000, context_length=10_000)
        self.given: list[tuple[list[int], Completion]] = []

    async def generate(self, request: GenerateRequest) -> Completion:
        await trio.lowlevel.checkpoint()
        self.given.append((request.prompt_ids.tolist(), sample_turn(self.name, self.tokenizer, self.rng)))
        return self.given[-1][1]


@pytest.mark.parametrize("history", ["template", "extend"])
@pytest.mark.parametrize("name", ["chatml", "qwen2_5", "qwen3", "gptoss", "llama3_1", "mistral_v3_tekken"])
async def test_what_trains_is_what_the_engine_took_in_and_gave_out(name: str, history: Any, autojump_clock):
    tokenizer = family_tokenizer(name, merges=MERGES)
    reads = READS[name] and RESPONSE_TEMPLATES[READS[name]]
    make_format = make_formats(tokenizer, read_turn=reads, history=history)
    tools = {"tools": [TOOL]} if reads else {}
    async with open_proxy() as proxy:
        for seed in range(8):
            dice, rng = Dice(name, tokenizer, seed), np.random.default_rng(seed)
            async with open_endpoint(dice, proxy=proxy, make_format=make_format) as endpoint:
                async with endpoint.client() as client:
                    await converse(client, tools, rng)
                check_exact(dice.given, endpoint.samples())


async def converse(client: openai.AsyncOpenAI, tools: Any, rng: np.random.Generator) -> None:
    """Goes on from the newest answer, or from any before it, streamed or not; never says the same twice."""
    ends: list[list[Any]] = [[{"role": "system", "content": "You may add."}]]
    for count in range(6):
        said = ends[rng.integers(len(ends)) if rng.random() < 0.3 else -1]
        news: Any = [
            {"role": "tool", "tool_call_id": one["id"], "content": f"{count} bananas"}
            for one in said[-1].get("tool_calls") or ()
        ]
        said = [*said, *(news or [{"role": "user", "content": f"And {count}?"}])]
        if rng.random() < 0.5:
            async with client.chat.completions.stream(model="m", messages=said, **tools) as stream:
                async for _ in stream:
                    pass
                message = (await stream.get_final_completion()).choices[0].message
        else:
            message = (await ask(client, said, **tools)).choices[0].message
        ends.append([*said, message.model_dump()])
