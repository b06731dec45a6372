"""The endpoint as the openai SDK sees it, and that what trains is what the engine took in and gave out."""

import itertools
import json
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import trio

from rollouts.config.rollout import RolloutConfig
from rollouts.environments import proxy as module
from rollouts.environments.episode import Episode, make_formats
from rollouts.environments.proxy import OpenTrajectory, open_proxy
from rollouts.environments.turns import finish_trajectory
from rollouts.errors import EngineOverloaded, FleetDown
from rollouts.processes.nurseries import open_plain_nursery
from rollouts.testing.fakes import ScriptedEngine, ScriptedReply
from rollouts.types import EngineFeatures
from tests.support.text_tables import cases
from tests.unit.chat_tokenizers import family_tokenizer, turn
from tests.unit.program_runs import SAMPLE, SAMPLING, make_format
from tests.unit.test_trajectories import (
    MERGES,
    READS,
    RESPONSE_TEMPLATES,
    TOOL,
    check_exact,
    complete,
    sample_turn,
)

# the SDK leaves its generators to the collector when it has read the end of a stream
pytestmark = pytest.mark.filterwarnings("ignore:Async generator:ResourceWarning")

ASK = [turn("user", "Please add.")]
ADD = 'add{"a": 1,  "b": 2}'


class Endpoint:
    """A trajectory that nothing but a test plays, and the engine that answers it."""

    features = EngineFeatures(vocab_size=10_000, context_length=10_000)

    def __init__(self, generate):
        self.sample, self.given = generate, []

    async def generate(self, request):
        answer = await self.sample(request)
        self.given.append((request.prompt_ids.tolist(), answer))
        return answer

    async def ask(self, messages=ASK, **fields):
        return await self.client.chat.completions.create(model="any", messages=messages, **fields)

    async def go_on(self, answer, question="and?", **fields):
        said = answer.choices[0].message.model_dump()  # with null for all that OpenAI has beside
        return await self.ask([*ASK, said, turn("user", question)], **fields)

    def check_samples(self):
        """What all that was answered gives."""
        samples = finish_trajectory(self.trajectory.episode, self.trajectory.end)
        check_exact(self.given, samples)
        return samples

    @asynccontextmanager
    async def open(self, *, proxy=None, form=make_format, retries=0, **settings):
        """Raises what ended the trajectory."""
        node = form(()).begin([turn("user", "?")])
        record = dict.fromkeys(("restarts", "resumed", "time/tools", "time/all"), 0)
        fields = SAMPLING, SAMPLE, node, [], record, self, None, (), None, trio.current_time()
        async with proxy or open_proxy() as opened, open_plain_nursery() as nursery:
            episode = Episode(form(()), RolloutConfig(**settings), *fields)
            number = str(len(opened.trajectories))
            self.trajectory = opened.trajectories[number] = OpenTrajectory(episode, form, nursery)
            self.url = f"{opened.url}/e/{number}"
            self.key = self.trajectory.key
            self.client = openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=self.key, max_retries=retries)
            async with self.client:
                self.client._platform = "Linux"  # else it asks for it in a thread
                yield self
        if self.trajectory.failure:
            raise self.trajectory.failure


def open_endpoint(*texts, token_s=0.0, **options):
    """An endpoint whose model says the texts, over and over. An error is raised instead."""
    replies = itertools.cycle(
        ScriptedReply(one, token_s) if isinstance(one, str) else ScriptedReply("", error=one) for one in texts
    )
    engine = ScriptedEngine(lambda request: next(replies))
    endpoint = Endpoint(engine.generate)
    endpoint.engine = engine
    return endpoint.open(**options)


@cases("""
text  | fields                   | told | reason | end    | …
hällo | {"user": "me", "top_p": 1, "temperature": 1.0, "stop": null} | hällo | stop | done |
abcd  | {"max_completion_tokens": 3} | abc | length | done | the client's limit is none of the trajectory's
abcdefghijklmno | {"max_tokens": 900} | abcdefghi | length | tokens | what is left after a prompt of 29
""")
async def test_an_answer_ends_as_it_should(text, fields: Any, told, reason, end, autojump_clock):
    async with open_endpoint(text, max_trajectory_tokens=38) as at:
        answer = await at.ask(extra_body=fields)
        (choice,) = answer.choices
        assert (choice.message.content, choice.finish_reason, answer.model) == (told, reason, "any")
        assert at.trajectory.end == end
        (sample,), usage = at.check_samples(), answer.usage
        assert usage.total_tokens == len(sample.tokens) == usage.prompt_tokens + sample.response_length


@cases("""
stop         | trained
","          | ab,
["x", ", c"] | ab, c
""")
async def test_an_answer_ends_where_a_text_that_stops_it_is_complete(stop: Any, trained):
    async with open_endpoint("ab, cd") as at:
        answer = await at.ask(stop=stop)
        (choice,) = answer.choices
        assert (choice.message.content, choice.finish_reason) == ("ab", "stop")
        await at.go_on(answer, stop=stop)
        (sample,) = at.check_samples()
        assert bytes(sample.tokens[sample.loss_mask].tolist()) == 2 * trained.encode()


async def test_a_stream_says_what_an_answer_says(autojump_clock):
    async with open_endpoint("so:" + ADD) as at:
        answer = await at.ask(tools=[TOOL])
        options = {"stream_options": {"include_usage": True}, "tools": [TOOL]}
        async with at.client.chat.completions.stream(model="m", messages=ASK, **options) as stream:
            chunks = [event.chunk async for event in stream if event.type == "chunk"]
            joined = await stream.get_final_completion()
        assert [len(chunk.choices) for chunk in chunks] == [1, 1, 0]
        for whole in (answer, joined):
            (choice,) = whole.choices
            assert (choice.message.content, choice.finish_reason) == ("so:", "tool_calls")
            assert json.loads(choice.message.tool_calls[0].function.arguments) == {"a": 1, "b": 2}
            assert whole.usage.completion_tokens == 24
        assert [model.id async for model in at.client.models.list()] == ["policy"]


async def test_log_probs_are_of_single_tokens(autojump_clock):
    tokenizer = family_tokenizer("qwen2_5")
    ids = tokenizer.encode("ä€ x", add_special_tokens=False)

    async def sample(request):
        await trio.lowlevel.checkpoint()
        return complete(ids, np.random.default_rng(0), ended=False)

    async with Endpoint(sample).open(form=make_formats(tokenizer)) as at:
        entries = (await at.ask(logprobs=True, top_logprobs=0)).choices[0].logprobs.content
        assert len(entries) == 7
        assert [entries[-1].token, entries[-2].token] == ["x", " "]
        assert [entry.logprob for entry in entries] == at.given[0][1].log_probs.tolist()


async def test_a_stream_that_waits_says_so_in_comments(autojump_clock):
    async with open_endpoint("a" * 10, token_s=1.0) as at, httpx.AsyncClient() as plain:
        headers = {"Authorization": f"Bearer {at.key}"}
        request = {"json": {"model": "m", "messages": ASK, "stream": True}, "headers": headers}
        async with plain.stream("POST", f"{at.url}/v1/chat/completions", **request) as answer:
            lines = [line[:6] async for line in answer.aiter_lines() if line]
        # eleven tokens take 11 s, in which comments come after 3, 6 and 9
        assert lines == [": keep"] * 3 + ["data: "] * 3


async def test_calls_of_a_turn_are_told_apart_and_known_again(autojump_clock):
    async with open_endpoint(ADD + ADD, "ok") as at:
        said = (await at.ask(tools=[TOOL])).choices[0].message.model_dump()
        ids = [one["id"] for one in said["tool_calls"]]
        assert len({*ids}) == 2
        said["tool_calls"][1]["function"]["arguments"] = '{ "b": 2, "a": 1 }'  # as a client may write them
        results = [turn("tool", "3", tool_call_id=one) for one in ids]
        assert (await at.ask([*ASK, said, *results], tools=[TOOL])).choices[0].message.content == "ok"
        assert len(at.check_samples()) == 1


async def test_a_call_is_text_where_the_client_wants_none(autojump_clock):
    async with open_endpoint(ADD, "ok") as at:
        answer = await at.ask(tools=[TOOL], tool_choice="none")
        (choice,) = answer.choices
        said = choice.message
        assert (said.content, said.tool_calls, choice.finish_reason) == (ADD, None, "stop")
        await at.go_on(answer, tools=[TOOL])
        assert len(at.check_samples()) == 1


async def test_n_answers_and_branches_share_what_came_before(autojump_clock):
    async with open_endpoint("a", "b", "c") as at:
        answer = await at.ask(n=3)
        assert [choice.message.content for choice in answer.choices] == ["a", "b", "c"]
        await at.go_on(answer)
        await at.go_on(answer, "or?")
        # b; c; a and what follows; and of the last branch what is new
        assert sorted(one.response_length for one in at.check_samples()) == [2, 2, 2, 4]


async def test_equal_seeds_draw_equal_numbers(autojump_clock):
    async with open_endpoint("abcd") as at:
        for seed in (5, 5, 6, openai.NOT_GIVEN, openai.NOT_GIVEN):
            await at.ask(seed=seed)
        drawn = [tuple(told.log_probs) for _, told in at.given]
        assert drawn[0] == drawn[1] and len({*drawn}) == 4


@cases("""
field | value | said | settings | end
frequency_penalty | 0.5 | | | done
logit_bias | {"5": 1} | | | done
response_format | {"type": "json_object"} | | | done
tool_choice | "required" | | | done
parallel_tool_calls | false | | | done
top_p | 0.9 | | | done
temperature | 0 | sampled | | done
n | 17 | | | done
n | 3 | max_turns | max_turns = 2 | turns
stop | [""] | | | done
reasoning_effort | "low" | unknown | | done
messages | [] | | | done
messages | [{"role": "user", "content": "long"}] | length_exceeded | max_trajectory_tokens = 9 | tokens
messages | [{"role": "user", "content": [{"type": "image_url"}]}] | image_url | | done
tools | 3 | | | done
""")
async def test_what_cannot_be_is_refused_by_name(
    field, value: Any, said, settings: dict, end, autojump_clock
):
    async with open_endpoint("a", **settings) as at:
        with pytest.raises(openai.BadRequestError) as told:
            await at.ask(extra_body={field: value})
        assert (said or field) in f"{told.value} {told.value.code}"
        assert (told.value.status_code, at.trajectory.end, at.given) == (400, end, [])


async def test_a_developer_is_a_system_and_text_may_come_in_parts(autojump_clock):
    async with open_endpoint("a") as at:
        parts = [{"type": "text", "text": text} for text in ("Please", " add.")]
        for system, content in (("developer", parts), ("system", "Please add.")):
            await at.ask([turn(system, "Briefly."), turn("user", content)])
        assert at.given[0][0] == at.given[1][0]


@cases("""
path    | key   | status
/e/0/v1 | wrong | 401
/e/9/v1 |       | 404
/e/0/v2 |       | 404
/e/1/v1 |       | 409
/e/0/v1 |       | 413
""")
async def test_errors_have_openais_form(path, key, status: int, autojump_clock, monkeypatch):
    monkeypatch.setattr(module, "BODY_BYTES", 1000)
    async with open_proxy() as proxy, open_endpoint("a", proxy=nullcontext(proxy)) as at:
        proxy.trajectories["1"] = None
        at.client = at.client.with_options(base_url=proxy.url + path, api_key=key or at.key)
        with pytest.raises(openai.APIStatusError) as told:
            await at.ask([turn("user", "x" * (1000 if status == 413 else 1))])
        assert told.value.status_code == status
        assert {*told.value.response.json()["error"]} == {"message", "type", "param", "code"}


async def test_an_engine_that_is_full_is_asked_again(autojump_clock):
    async with open_endpoint(EngineOverloaded("full"), "a", retries=1) as at:
        assert (await at.ask()).choices[0].message.content == "a"
        at.client = at.client.with_options(max_retries=0)
        with pytest.raises(openai.RateLimitError) as told:
            await at.ask()
        assert told.value.response.headers["retry-after"] == "1"


async def test_what_is_nobodys_fault_ends_the_trajectory(autojump_clock):
    with pytest.raises(FleetDown):
        async with open_endpoint(FleetDown("down")) as at:
            await at.ask()


async def test_an_error_after_a_stream_has_begun_is_told_in_it(autojump_clock):
    async with open_endpoint("aaaaaaaa", token_s=1.0) as at:
        answer = await at.ask(stream=True)
        (asked,) = at.trajectory.asked.values()
        asked.scope.cancel()
        with pytest.raises(openai.APIError, match="nobody waited"):
            async for _ in answer:
                pass


async def test_a_request_that_the_sdk_repeats_is_sampled_once(autojump_clock):
    async with open_endpoint("aa", "b", token_s=1.0, retries=2) as at:
        answer = await at.ask(timeout=1.5)  # of 3 s
        assert answer.choices[0].message.content == "aa"
        at.check_samples()
        assert (await at.ask()).choices[0].message.content == "b"  # that is another sample


@cases("""
stream | after_s | held_s | …
no     | 2       | 10     | the SDK may ask again
yes    | 2       | 10     | and here, as long as nothing was told
yes    | 4       | 0      | once a stream has begun it does not
""")
async def test_what_no_client_waits_for_does_not_train(
    stream: bool, after_s: float, held_s: float, autojump_clock
):
    async with open_endpoint("a" * 100, "b", token_s=1.0) as at:
        with trio.move_on_after(after_s):
            async for _ in await at.ask(stream=stream):
                pass
        await trio.sleep(max(held_s - 1, 0.1))
        assert at.engine.in_flight == (held_s > 0)
        await trio.sleep(2)
        assert (at.engine.in_flight, at.given) == (0, [])
        await at.ask()
        assert at.check_samples()[0].response == "b"


async def test_what_the_client_edited_and_other_tools_begin_another_segment(autojump_clock):
    async with open_endpoint("one", "two", "three") as at:
        answer = await at.ask()
        answer.choices[0].message.content = "One!"
        answer = await at.go_on(answer)
        await at.go_on(answer, tools=[TOOL])
        samples = at.check_samples()
        assert [one.response_length for one in samples] == [4, 4, 6]
        assert b"One!" in bytes((samples[1].tokens[~samples[1].loss_mask] % 256).tolist())


@cases("""
posted              | status | rewards | parts
1                   | 200    | 0.5 1   |
{"a": 1, "b": 0.25} | 200    | 0.5 1.25 | a = 1, b = 0.25
"good"              | 400    | 0.5     |
{}                  | 400    | 0.5     |
""")
async def test_rewards_that_a_program_posts_are_its_newest_turns(
    posted: Any, status: int, rewards: list[float], parts: dict, autojump_clock
):
    async with open_endpoint("a") as at, httpx.AsyncClient() as plain:

        async def post(value):
            headers = {"Authorization": f"Bearer {at.key}"}
            return (await plain.post(f"{at.url}/reward", json={"reward": value}, headers=headers)).status_code

        assert await post(1) == 400  # nothing was said yet
        answer = await at.ask()
        assert await post(0.5) == 200
        await at.go_on(answer)
        assert await post(posted) == status
        (sample,) = at.check_samples()
        assert (sample.reward, sample.rewards) == (sum(rewards), parts)
        assert sample.turn_rewards[sample.turn_rewards != 0].tolist() == rewards


# --- tokens, in the templates of other families -------------------------------------------------------------


@cases("history", ["template", "extend"])
@cases("name: chatml qwen2_5 qwen3 gptoss llama3_1 mistral_v3_tekken")
async def test_what_trains_is_what_the_engine_took_in_and_gave_out(name, history, autojump_clock):
    """Of six trajectories at once, in each of which two agents speak at once."""
    tokenizer = family_tokenizer(name, merges=MERGES)
    reads = RESPONSE_TEMPLATES.get(READS[name])
    form = make_formats(tokenizer, read_turn=reads, history=history)

    async def run(seed):
        rng = np.random.default_rng(seed)

        async def sample(request):
            await trio.sleep(rng.random())
            return sample_turn(name, tokenizer, rng)

        tools = {"tools": [TOOL]} if reads else {}
        async with Endpoint(sample).open(proxy=nullcontext(proxy), form=form) as at:
            async with trio.open_nursery() as agents:
                for agent in ("one", "two"):
                    agents.start_soon(converse, at, agent, tools, rng)
            at.check_samples()

    async with open_proxy() as proxy, trio.open_nursery() as nursery:
        for seed in range(6):
            nursery.start_soon(run, seed)


async def converse(at, name, tools, rng):
    """Goes on from the newest answer, or from any before it, streamed or not; never says the same twice."""
    ends = [[turn("system", "You may add.")]]
    for count in range(6):
        said = ends[rng.integers(len(ends)) if rng.random() < 0.3 else -1]
        calls = said[-1].get("tool_calls") or ()
        news = [turn("tool", f"{count} {name}", tool_call_id=one["id"]) for one in calls]
        said = [*said, *(news or [turn("user", f"And {count} {name}?")])]
        if rng.random() < 0.5:
            async with at.client.chat.completions.stream(model="m", messages=said, **tools) as stream:
                async for _ in stream:
                    pass
                # get_final_completion raises where a limit cut the answer
                message = stream.current_completion_snapshot.choices[0].message
        else:
            message = (await at.ask(said, **tools)).choices[0].message
        ends.append([*said, message.model_dump()])
