"""The unmodified SDK, and the cookbook's own programs, against a server of ours: `make test-tinker`."""

import itertools
import json
import os
import subprocess
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio

from rollouts.models.load import resolve_model
from tests import ROOT
from tests.serve.clients import KEY, MODEL
from tests.serve.servers import open_forks, open_process, wait_text
from tests.support.text_tables import cases, read_cells

pytestmark = pytest.mark.tinker
PYTHON = ROOT / ".venv-tinker/bin/python"
PROGRAM = str(Path(__file__).with_name("sdk_program.py"))
LIMIT_S = 200


def run_python(*arguments, url, folder):
    """What it printed. It has ended well."""
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "ROLLOUTS"))
    }
    environ |= {
        "TINKER_API_KEY": KEY, "TINKER_BASE_URL": url, "HF_HUB_OFFLINE": "1", "TINKER_TELEMETRY": "0",
        "HOME": str(folder), "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    done = subprocess.run(
        [str(PYTHON), "-W", "ignore", *arguments],
        cwd=folder, env=environ, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{arguments}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return done.stdout


def run_program(name, *arguments, url, folder):
    """What a function of sdk_program saw."""
    return json.loads(run_python(PROGRAM, name, *arguments, url=url, folder=folder).splitlines()[-1])


@pytest.fixture(scope="module")
def forks():
    with open_forks() as forks:
        yield forks


@pytest.fixture(scope="module")
def server(forks, tmp_path_factory):
    with open_process(forks, tmp_path_factory.mktemp("served")) as server:
        wait_text(server.log, "serving")
        yield server


@pytest.fixture
def run(server, tmp_path):
    return partial(run_program, url=server.url, folder=tmp_path)


def test_the_sdk_trains_in_a_pipeline(run):
    seen = run("train")
    assert seen["losses"] == pytest.approx(seen["sums"], rel=1e-5)  # minus the sum of the log-probs that came
    assert seen["awaited_twice"] == seen["losses"]
    assert len(set(seen["norms"])) == 4
    assert (seen["rank"], len(seen["tokenizer"])) == (4, 2)
    assert seen["custom"][0] == pytest.approx(seen["custom"][1])


def test_the_sdk_saves_loads_and_lists(run):
    seen = run("checkpoints")
    assert (seen["same"], seen["with_optimizer"], seen["fresh"]) == (True, True, False)
    assert seen["listed"] == ["sampler_weights/one", "weights/one"]
    assert seen["taken"][0] == "RequestFailedError"
    assert "exists" in seen["taken"][1]
    assert "there is no checkpoint" in seen["gone"][1]
    assert (seen["info"], seen["sampler"]) == ({"a": "b"}, True)
    assert str(resolve_model(MODEL)) in seen["models"]


def test_the_sdk_samples(run):
    seen = run("sample")
    assert (seen["same"], seen["apart"], seen["many"]) == (True, 3, 100)
    assert seen["gap"] < 1e-4
    assert seen["stopped"] == [True, "stop"]
    assert (seen["scores"][0], seen["scores"][1] < 1e-4) == (3, True)


def test_the_sdk_is_told_what_is_wrong_and_goes_on(run):
    seen = run("errors")
    for name, kind, says in read_cells("""
        model    | BadRequestError     | is not served here
        key      | AuthenticationError | none of this server's
        loss     | RequestFailedError  | is not known
        missing  | RequestFailedError  | lacks 'advantages'
        length   | RequestFailedError  | has shape
        rate_nan | RequestFailedError  | learning_rate
        nothing  | RequestFailedError  | gradient
        path     | NotFoundError       | there is no checkpoint
    """):
        assert (seen[name][0], says in seen[name][1]) == (kind, True), (name, seen[name])
    assert (seen["unchanged"], seen["goes_on"]) == (True, True)
    assert seen["pipelined"] == ["RequestFailedError", True, "RequestFailedError"]


# --- faults -------------------------------------------------------------------------------------------------


async def test_the_sdk_goes_on_when_the_server_is_killed_and_started_again(run, tmp_path):
    wanted = await trio.to_thread.run_sync(run, "long", str(tmp_path / "burst"))
    found, burst = [], tmp_path / "killed"
    with open_forks() as forks, open_process(forks, tmp_path / "server", snapshot_s=0.2) as killed:
        wait_text(killed.log, "serving")

        async def live():
            live = partial(run, "long", str(burst), url=killed.url)
            found.append(await trio.to_thread.run_sync(live))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(live)
            for number in (0, 2, 3):
                await trio.to_thread.run_sync(wait_text, burst, str(number))
                await trio.to_thread.run_sync(killed.kill_and_start)
    assert found == [wanted]


@asynccontextmanager
async def open_losing_proxy(url):
    """An address before the server's at which each seventh answer is lost, and those that were."""
    host, _, port = url.removeprefix("http://").partition(":")
    lost, answers = [], itertools.count(1)

    async def relay(source, target):
        async for part in source:
            await target.send_all(part)

    async def serve(client):
        async with (
            client,
            await trio.open_tcp_stream(host, int(port)) as upstream,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(relay, client, upstream)
            async for part in upstream:
                if next(answers) % 7 == 0:
                    lost.append(part)
                    break
                await client.send_all(part)
            nursery.cancel_scope.cancel()

    async def serve_well(client):
        try:
            await serve(client)
        except* (trio.BrokenResourceError, trio.ClosedResourceError, OSError):
            pass

    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(partial(trio.serve_tcp, serve_well, 0, host="127.0.0.1"))
        yield f"http://127.0.0.1:{listener.socket.getsockname()[1]}", lost
        nursery.cancel_scope.cancel()


async def test_the_sdk_asks_again_for_answers_that_are_lost(server, run, tmp_path):
    live = partial(run, "long", str(tmp_path / "burst"))
    wanted = await trio.to_thread.run_sync(live)
    async with open_losing_proxy(server.url) as (url, lost):
        assert await trio.to_thread.run_sync(partial(live, url=url)) == wanted
    assert len(lost) > 5


# --- the cookbook -------------------------------------------------------------------------------------------

COOKBOOK = {
    "chat_sl": "dataset={example} batch_size=2 max_length=256 lora_rank=4 max_steps=3 save_every=2",
    "math_rl": "env=arithmetic group_size=4 groups_per_batch=3 max_tokens=5 lora_rank=4 max_steps=2"
    " save_every=1 eval_every=0 loss_fn=importance_sampling",
}


@cases("recipe", COOKBOOK)
def test_a_recipe_of_the_cookbook_runs_to_its_end(server, tmp_path, recipe):
    (example,) = PYTHON.parents[1].glob(
        "lib/*/site-packages/tinker_cookbook/example_data/conversations.jsonl"
    )
    log = tmp_path / "log"
    options = COOKBOOK[recipe].format(example=example).split()
    options += [f"model_name={resolve_model(MODEL)}", "renderer_name=role_colon", f"log_path={log}"]
    run_python("-m", f"tinker_cookbook.recipes.{recipe}.train", *options, url=server.url, folder=tmp_path)
    rows = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    assert len([row for row in rows if "progress/batch" in row or "step" in row]) >= 2
    if recipe == "math_rl":  # the trainer's log-probs of what the sampler drew
        assert all(abs(row.get("optim/kl_sample_train_v1", 0.0)) < 1e-3 for row in rows)
    else:
        assert rows[-1]["train_mean_nll"] > 0
