"""A run's publications behind HTTP, as OpenAI's clients see them, and what is kept of what they ask."""

import json
import os
import signal
import subprocess
import sys
from argparse import Namespace
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import httpx
import openai
import pytest
import tomli_w
import trio
import trio.testing

from integration_training import serve as module
from integration_training.serve import serve_published
from rollouts.checkpoints.follow import open_publisher
from rollouts.engines.processes import find_free_port
from rollouts.environments.proxy import open_http
from rollouts.errors import ConfigError, RunDirError
from rollouts.metrics import jsonl
from rollouts.models.load import load_hf_model, resolve_model
from rollouts.weight_sync.snapshots import HeldWeights, export_snapshot
from tests.serve.servers import open_forks, wait_text
from tests.support.text_tables import cases, read_cells
from tests.unit.test_trajectories import TOOL

MODEL = "tiny:llama"
ASK = [{"role": "user", "content": "Say something."}]

# the SDK leaves its generators to the collector when it has read the end of a stream
pytestmark = pytest.mark.filterwarnings("ignore:Async generator:ResourceWarning")


@pytest.fixture
def run(tmp_path):
    """A run that has published nothing."""
    (tmp_path / "config.toml").write_text(tomli_w.dumps({"model": {"name": MODEL}}))
    return tmp_path


async def publish(run, seed: int = 0, *, model=MODEL, damage=False):
    """The number of a publication of random weights."""
    path = await trio.to_thread.run_sync(partial(resolve_model, model, seed=seed))
    weights = await trio.to_thread.run_sync(load_hf_model, path)
    source = HeldWeights(weights, [list(weights.named_parameters())])

    async def write(folder):
        await export_snapshot(source, folder, model_dir=path)
        if damage:
            file = folder / "model.safetensors"
            file.write_bytes(bytes(file.stat().st_size))

    publisher = await open_publisher(run / "published", keep_s=0.0)
    return (await publisher.publish(write, seed)).publication


class Served:
    """A server in this process, which serves `run`."""

    def __init__(self, run, monkeypatch):
        self.run, self.lines, self.said = run, list[str](), trio.Event()
        monkeypatch.setattr(module, "say", self.say)

    def say(self, text, file=None):
        self.lines.append(text)
        self.said.set()
        self.said = trio.Event()

    async def wait_said(self, text):
        while not any(text in line for line in self.lines):
            await self.said.wait()

    @asynccontextmanager
    async def open(self, *, key="unused"):
        with trio.fail_after(300):
            async with trio.open_nursery() as nursery:
                arguments = Namespace(config=self.run, host="127.0.0.1", port=0)
                nursery.start_soon(serve_published, arguments, ())
                await self.wait_said("serving")
                self.url = self.lines[0].split()[-1]
                client = openai.AsyncOpenAI(
                    base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=300
                )
                async with client as self.client:
                    client._platform = "Linux"  # else it asks for it in a thread
                    yield self
                nursery.cancel_scope.cancel()

    async def ask(self, messages: Any = ASK, *, max_tokens=8, temperature=0.0, **fields):
        ask: Any = self.client.chat.completions.create
        return await ask(
            model="any", messages=messages, max_tokens=max_tokens, temperature=temperature, **fields
        )

    async def wait_publication(self, number: int):
        """The greedy answer of a publication, once it is served."""
        while (answer := await self.ask(store=False)).system_fingerprint != f"publication-{number}":
            pass
        return answer.choices[0].message.content

    def asked(self):
        parts = sorted((self.run / "asked").glob("*.jsonl"))
        return [json.loads(line) for part in parts for line in part.read_text().splitlines()]


async def test_an_answer_names_its_publication_and_the_messages_are_kept(run, monkeypatch):
    await publish(run)
    async with Served(run, monkeypatch).open() as at:
        answer = await at.ask(n=2, seed=1, temperature=1.0, top_p=0.9, stop=["~"])
        again = await at.ask(n=2, seed=1, temperature=1.0, top_p=0.9, stop=["~"], store=False)
        assert answer.system_fingerprint == "publication-1" and answer.usage.completion_tokens == 16
        texts, same = ([choice.message.content for choice in one.choices] for one in (answer, again))
        assert texts == same and texts[0] != texts[1]
        await at.ask([{"role": "developer", "content": "Be brief."}, *ASK], store=True)
        first, second = at.asked()
        assert (first["prompt"], first["publication"]) == (ASK, 1) and first["time_unix"] > 1e9
        assert second["prompt"] == [{"role": "system", "content": "Be brief."}, *ASK]
        assert [model.id async for model in at.client.models.list()] == ["policy"]
        async with httpx.AsyncClient() as plain:
            assert (await plain.get(f"{at.url}/health")).status_code == 200


async def test_a_stream_says_what_an_answer_says(run, monkeypatch):
    await publish(run)
    async with Served(run, monkeypatch).open() as at:
        answer = await at.ask()
        chunks = [one async for one in await at.ask(stream=True, stream_options={"include_usage": True})]
        assert {one.system_fingerprint for one in chunks} == {"publication-1"}
        told = "".join(choice.delta.content or "" for one in chunks for choice in one.choices)
        assert told == answer.choices[0].message.content and chunks[-1].usage == answer.usage
        assert len(at.asked()) == 2


async def test_requests_wait_for_the_first_publication(run, monkeypatch):
    async with Served(run, monkeypatch).open() as at, trio.open_nursery() as nursery:
        nursery.start_soon(at.wait_publication, 1)
        assert at.asked() == []
        await publish(run)


async def test_no_answer_fails_or_is_of_two_publications(run, monkeypatch):
    """While one is published after the other, and one again, requests never cease."""
    await publish(run, 0)
    answers, greedy = [], {}

    async def ask_on(number):
        """Until the last publication has answered."""
        newest = 0
        while newest < 3:
            answer = await at.ask(max_tokens=24, n=number)
            newest = int(answer.system_fingerprint.removeprefix("publication-"))
            answers.extend((newest, choice.message.content) for choice in answer.choices)

    async with Served(run, monkeypatch).open() as at:
        await at.wait_publication(1)
        async with trio.open_nursery() as nursery:
            for number in (1, 2, 3):
                nursery.start_soon(ask_on, number)
            await publish(run, 1)
            await at.wait_publication(2)
            while 2 not in dict(answers):
                await at.ask()
            publisher = await open_publisher(run / "published")
            await publisher.publish_again(1)
        for number in (3, 4):
            greedy[number] = (await at.ask(max_tokens=24)).choices[0].message.content
            if number == 3:
                await publish(run, 1)
                await at.wait_publication(4)
    assert {number for number, _ in answers} == {1, 2, 3} and greedy[3] != greedy[4]
    texts = {1: greedy[3], 2: greedy[4], 3: greedy[3]}
    assert {text for number, text in answers if text != texts[number]} == set()
    asked = {row["publication"] for row in at.asked()}
    assert asked >= {1, 2, 3}


@cases("""
damage | model      | said
yes    | tiny:llama | model.safetensors is missing or not as it was written
no     | tiny:qwen3 | cannot be loaded as weights of LlamaForCausalLM
""")
async def test_a_publication_that_does_not_load_is_said_and_passed_over(
    damage: bool, model, said, run, monkeypatch
):
    await publish(run, 0)
    async with Served(run, monkeypatch).open() as at:
        first = await at.wait_publication(1)
        await publish(run, 1, damage=damage, model=model)
        await at.wait_said("publication 2 is not served")
        assert said in at.lines[-1]
        answer = await at.ask()
        assert (answer.system_fingerprint, answer.choices[0].message.content) == ("publication-1", first)
        await publish(run, 1)
        assert await at.wait_publication(3) != first


REFUSED = """
{ | 400 | truncated
{"model": "m"} | 400 | messages
{"model": "m", "messages": []} | 400 | empty list
{"model": "m", "messages": [{"role": "user"}]} | 400 | no content
{"model": "m", "messages": [{"role": "user", "content": "a"}], "temperature": -1} | 400 | temperature=-1
{"model": "m", "messages": [{"role": "user", "content": "a"}], "top_p": 2} | 400 | top_p=2
{"model": "m", "messages": [{"role": "user", "content": "a"}], "n": 99} | 400 | $.n
{"model": "m", "messages": [{"role": "user", "content": "a"}], "logit_bias": {"5": 1}} | 400 | logit_bias
{"model": "m", "messages": [{"role": "user", "content": "a"}], "max_token": 1} | 400 | max_token
{"model": "m", "messages": [{"role": "user", "content": "LONG"}]} | 400 | no room
"""


async def test_what_cannot_be_answered_is_refused_in_openais_form(run, monkeypatch):
    await publish(run)
    monkeypatch.setenv("ROLLOUTS_API_KEY", "secret")
    good = {"authorization": "Bearer secret"}
    async with Served(run, monkeypatch).open(key="secret") as at, httpx.AsyncClient(timeout=300) as plain:

        async def check(status, said, method="POST", path="/v1/chat/completions", headers=good, body="{}"):
            reply = await plain.request(method, at.url + path, content=body, headers=headers)
            error = reply.json()["error"]
            assert reply.status_code == status and said in error["message"], reply.text
            assert {*error} == {"message", "type", "param", "code"}

        for body, status, said in read_cells(REFUSED):
            await check(int(status), said, body=body.replace("LONG", 9000 * "long"))
        await check(404, "no GET", method="GET")
        await check(404, "no POST v2", path="/v2")
        tools = json.dumps({"model": "m", "messages": ASK, "tools": [TOOL]})
        await check(400, "does not say how their calls are read", body=tools)
        for wrong in ({}, {"authorization": "Bearer wrong"}):
            await check(401, "key", headers=wrong)
        assert at.asked() == []
        assert (await at.ask()).system_fingerprint == "publication-1"


async def test_without_a_key_a_web_page_may_not_ask(run, monkeypatch):
    await publish(run)
    body = json.dumps({"model": "m", "messages": ASK, "max_tokens": 1})
    async with Served(run, monkeypatch).open() as at, httpx.AsyncClient(timeout=300) as plain:
        for headers, status in (({"origin": "http://page"}, 403), ({}, 200)):
            reply = await plain.post(at.url + "/v1/chat/completions", content=body, headers=headers)
            assert reply.status_code == status and len(at.asked()) == (status == 200)


async def test_an_address_beyond_loopback_takes_a_key(run, monkeypatch):
    monkeypatch.delenv("ROLLOUTS_API_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"--host 0\.0\.0\.0: beyond loopback it takes a key"):
        await serve_published(Namespace(config=run, host="0.0.0.0", port=0), ())


async def test_of_what_was_asked_the_newest_parts_are_kept(run, monkeypatch):
    monkeypatch.setattr(jsonl, "PART_BYTES", 300)  # three rows
    await publish(run)
    async with Served(run, monkeypatch).open() as at:
        for number in range(14):
            await at.ask([{"role": "user", "content": str(number)}], max_tokens=1)
        names = sorted(path.name for path in (run / "asked").glob("*.jsonl"))
        assert len(names) == 2 and "asked.jsonl" not in names
        kept = [int(row["prompt"][0]["content"]) for row in at.asked()]
        assert kept == [*range(kept[0], 14)] and 0 < kept[0] < 12


async def test_what_is_in_flight_ends_before_the_server():
    begun, stop, go_on = trio.Event(), trio.Event(), trio.Event()

    async def app(scope, receive, send):
        assert scope["type"] == "http"
        begun.set()
        await go_on.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"whole"})

    async def end():
        await begun.wait()
        stop.set()
        await trio.testing.wait_all_tasks_blocked()
        go_on.set()

    with trio.fail_after(60):
        async with httpx.AsyncClient() as plain:
            async with open_http(app, "127.0.0.1:0", stop.wait) as url, trio.open_nursery() as nursery:
                nursery.start_soon(end)
                assert (await plain.get(url)).text == "whole"
            with pytest.raises(httpx.ConnectError):
                await plain.get(url)


@pytest.fixture(scope="module")
def forks():
    with open_forks() as forks:
        yield forks


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("published", [True, False])
async def test_a_signal_ends_the_process_with_0(published, number, run, forks):
    if published:
        await publish(run)
    port, log = find_free_port(), run / "log"
    (pid,) = forks.start(["serve", str(run), "--port", str(port)], output=log)
    wait_text(log, f"serving {run} at http://127.0.0.1:{port}")
    if published:
        async with httpx.AsyncClient(timeout=300) as plain:
            assert (await plain.get(f"http://127.0.0.1:{port}/health")).status_code == 200
    os.kill(pid, number)
    ended = forks.wait()
    assert (ended.returncode, ended.leftover) == (0, ()), log.read_text()


def test_what_serves_loads_nothing_that_trains():
    script = "import sys, integration_training.serve; print(*sys.modules)"
    command = [sys.executable, "-c", script]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert [name for name in loaded if name.startswith("rollouts.backends")] == []


async def test_a_run_is_served_by_one_process(run, monkeypatch):
    """Two would write over what the other keeps."""
    async with Served(run, monkeypatch).open():
        with pytest.raises(RunDirError, match=r"asked"):
            await serve_published(Namespace(config=run, host="127.0.0.1", port=0), ())
