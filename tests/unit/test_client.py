"""A client of ours and a service in another process: what backend and engine promise, also over a kill."""

import contextlib
import tomllib
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import AsyncMock

import numpy as np
import pytest
import trio

from rollouts.backends.open import open_pytorch_backend
from rollouts.client.engine import open_served_engine
from rollouts.client.service import open_service_client
from rollouts.client.training import TrainingClient
from rollouts.codec import Call, encode
from rollouts.config.model import LoraConfig
from rollouts.config.schema import RLTrainingConfig, SFTTrainingConfig
from rollouts.config.tables import OptimConfig
from rollouts.data.samples import SFTSample
from rollouts.engines.processes import find_free_port
from rollouts.errors import (
    BackendClosed,
    BackendError,
    CheckpointError,
    EarlierStepFailed,
    RequestRefused,
    RolloutsError,
    ServiceFailed,
    ServiceRefused,
)
from rollouts.futures import FutureGroup
from rollouts.loops.sft import run_sft_training
from rollouts.models.load import resolve_model
from rollouts.testing import engine_contracts
from rollouts.testing.torch_contracts import assert_weights_equal, make_batch
from rollouts.types import LossSpec, OptimParams, RolloutBatch
from tests.serve.clients import KEY
from tests.serve.servers import open_forks, open_process
from tests.support.plain_backend import open_engine_of
from tests.support.processes import wait_until
from tests.support.text_tables import cases
from tests.unit.test_loops import MemoryLogger
from tests.unit.test_pytorch_backend import CONTRACT, check_promise
from tests.unit.test_rl_resume import train

OPTIM = OptimConfig(lr=1e-2, schedule="cosine", warmup_steps=3)


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    settings = {"snapshot_s": 5, "loss_modules": ["rollouts.testing.torch_contracts"]}
    with open_forks() as forks, open_process(forks, tmp_path_factory.mktemp("service"), **settings) as server:
        yield server


def open_client(service, key=KEY):
    return open_service_client(service.url, key)


@asynccontextmanager
async def open_training(service, **options):
    async with open_client(service) as client:
        yield await client.create_training_client(**options)


INSIDE = {  # of what only a backend in this process has
    "check_entropies_come_with_log_probs",
    "check_a_loss_without_gradient_leaves_nothing",
    "check_settings_of_a_step_are_of_that_step_alone",
    "check_targets_and_values_of_the_batch_s_own",
}
PROMISES = {name: check for name, check in CONTRACT.items() if name not in INSIDE}


@cases("promise", PROMISES.values(), ids=PROMISES)
async def test_a_run_of_a_service_keeps_the_promises_of_a_backend(promise, service, tmp_path):
    await check_promise(promise, lambda: open_training(service), tmp_path)


BATCHES = [make_batch(seed) for seed in range(20)]
SPEC = LossSpec("importance_sampling", unit="sequences")


@asynccontextmanager
async def open_local(**options):
    """What the service would open."""
    path = resolve_model("tiny:byte")
    settings = {"optim": OPTIM, "total_steps": 20, "autocast": "off", "threads": 1, **options}
    async with open_pytorch_backend(path, **settings) as backend:
        yield backend


@cases("trained: whole_model adapter")
async def test_a_service_killed_amid_pipelined_steps_ends_where_a_backend_here_does(trained, service):
    lora = LoraConfig(rank=4) if trained == "adapter" else None
    async with open_local(seed=7, lora=lora and lora.model_dump()) as backend:
        wanted = await train_all(backend)
    async with open_client(service) as client:
        backend = await client.create_training_client(lora=lora, seed=7, optim=OPTIM, total_steps=20)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(kill_amid, service, backend)
            found = await train_all(backend)
    assert_weights_equal(found, wanted)
    assert backend.statistics()["steps"] == 20


async def train_all(backend):
    """The weights after a step on each batch, all submitted at once; one is undone, and some are sent."""
    sent = await backend.get_weights()
    for index, batch in enumerate(BATCHES):
        if index == 10:
            backend.load_weights(sent)
        if index in (5, 12):
            backend.hold()
        backend.forward_backward(batch, SPEC)
        backend.optim_step()
        if index == 12:
            backend.revert()
    backend.set_weight_version(20)
    return await backend.get_weights()


async def kill_amid(service, backend):
    for steps in (3, 14):
        await wait_until(lambda steps=steps: backend.statistics()["steps"] >= steps)
        await trio.to_thread.run_sync(service.kill_and_start)


# --- what a run serves --------------------------------------------------------------------------------------


@asynccontextmanager
async def open_engine(service):
    async with open_training(service) as training:
        await training.publish(0)
        async with open_served_engine(training) as (engine, _):
            yield engine


PROMISED = (
    *engine_contracts.CHECKS,
    engine_contracts.check_seed_fixes_the_tokens,
    engine_contracts.check_stop_token_ends_and_stays,
)


@cases("promise", PROMISED)
async def test_what_a_run_serves_keeps_the_promises_of_an_engine(promise, service):
    await promise(lambda: open_engine(service))


# --- the loops ----------------------------------------------------------------------------------------------


SFT_CONFIG = SFTTrainingConfig.model_validate(
    {"data": {"kind": "jsonl", "path": "unused.jsonl"}, "steps": 4, "batch_size": 3}
)
RL_CONFIG = RLTrainingConfig.model_validate(
    tomllib.loads("""
steps = 3
kl_limit = 0.5
updates_per_batch = 2
data = [{ kind = "jsonl", path = "unused.jsonl" }]
rollout = { num_prompts = 3, samples_per_prompt = 3, max_new_tokens = 6 }
""")
)
OWN = ("time/", "perf/", "weight_sync/")  # metrics that are of the place


def assert_same_rows(found, wanted):
    """But for what is of the place."""
    for both in zip(found, wanted, strict=True):
        one, other = (
            {name: value for name, value in row.items() if not name.startswith(OWN)} for row in both
        )
        assert one == pytest.approx(other, abs=1e-4, rel=1e-4)


async def test_supervised_training_has_the_metrics_that_it_has_here(service):
    rng = np.random.default_rng(0)
    rows = [SFTSample(rng.integers(0, 256, 9), np.arange(9) > 3) for _ in range(12)]
    async with open_local(optim=OPTIM) as backend:
        wanted = await run_sft_training(backend, rows, SFT_CONFIG, MemoryLogger())
    async with open_training(service, optim=OPTIM, total_steps=20) as backend:
        found = await run_sft_training(backend, rows, SFT_CONFIG, MemoryLogger())
    assert_same_rows(found, wanted)


async def test_reinforcement_learning_has_the_metrics_that_it_has_here(service):
    async with open_local() as backend, open_engine_of(backend, deterministic=True) as engine:
        wanted = await train(backend, engine, RL_CONFIG, sync_weights=AsyncMock(return_value={}))
    async with (
        open_training(service, optim=OPTIM, total_steps=20) as backend,
        open_served_engine(backend) as (engine, publish),
    ):
        await publish(backend, [engine], 0)
        found = await train(backend, engine, RL_CONFIG, sync_weights=publish)
    assert_same_rows(found, wanted)
    assert [row["weight_sync/engines_updated"] for row in found] == [1.0] * 3
    assert max(row["weight_sync/probe_difference/max"] for row in found) < 1e-4


# --- futures, failures, and what is nobody else's -----------------------------------------------------------


async def test_a_call_is_awaited_until_it_is_accepted_and_then_for_its_result(service):
    async with open_training(service) as backend:
        futures = [
            await backend.forward_backward_async(BATCHES[0], SPEC),
            await backend.optim_step_async(OptimParams(lr=1e-2)),
        ]
        forward, optim = await FutureGroup[Any](futures)
        assert forward.loss is not None and optim.step == 1
        before = backend.statistics()
    assert before == {**before, "steps": 1.0, "queued": 0.0}


async def test_a_call_that_is_sent_again_is_the_same_request(service):
    async with open_client(service) as client:
        backend = await client.create_training_client()
        await backend.forward_backward(BATCHES[0], SPEC)
        body = encode(Call(seq_id=backend.next_seq, method="optim_step"))
        path = f"/runs/{backend.run_id}/calls"
        replies = {(await client.connection.ask("POST", path, body)).content for _ in range(3)}
        again = await client.attach(backend.run_id)
        await again.look()
        assert len(replies) == 1 and again.statistics()["steps"] == 1


async def test_who_attaches_to_a_run_goes_on_behind_all_that_was_asked(service):
    with contextlib.suppress(ZeroDivisionError):
        async with open_client(service) as client:
            backend = await client.create_training_client(optim=OPTIM, total_steps=20)
            for batch in BATCHES[:2]:
                await backend.forward_backward_async(batch, SPEC)
                left = await backend.optim_step_async()
            raise ZeroDivisionError
    with pytest.raises(BackendClosed):
        await left
    async with open_client(service) as client:
        again = await client.attach(backend.run_id)
        assert (await again.forward_backward(BATCHES[2], SPEC)).loss is not None
        assert (await again.optim_step()).step == 3


async def test_a_service_that_stays_away_fails_what_is_asked_and_all_behind_it():
    async with open_service_client(f"http://127.0.0.1:{find_free_port()}", KEY, patience_s=0.5) as client:
        backend = TrainingClient("s:train:0", client.connection, 1)
        client.nursery.start_soon(backend.run)
        for future in (backend.hold(), backend.look()):
            with pytest.raises(ServiceFailed, match=r"no answer for 0\.5 s .* patience_s"):
                await future


UNSENDABLE = {"here": {"a": print}, "there": {"a": [1]}}


@cases("refused", UNSENDABLE)
async def test_what_cannot_be_sent_fails_like_a_step_and_the_run_goes_on(refused, service, tmp_path):
    async with open_training(service) as backend:
        bad = backend.forward_backward(BATCHES[0], LossSpec("sft", UNSENDABLE[refused]))
        later = backend.hold()
        with pytest.raises(RolloutsError, match=r"cannot be sent|\$.loss.params"):
            await bad
        with pytest.raises(EarlierStepFailed):
            await later
        await backend.reset()
        with pytest.raises(CheckpointError, match="holds no file"):
            await backend.load(tmp_path / "nothing")
        await backend.reset()
        await backend.hold()


@cases("loss", [LossSpec("os:system"), LossSpec("ppo_clip", {"correction": "os:system"})])
async def test_a_service_imports_no_module_that_a_client_names(loss, service):
    async with open_training(service) as backend:
        with pytest.raises(BackendError, match=r"serve\.loss_modules"):
            await backend.forward_backward(BATCHES[0], loss)


async def test_batches_that_no_model_takes_are_failed_steps(service):
    long = np.zeros(5000, np.int64)
    async with open_training(service) as backend:
        for tokens in ((), (long[:0],), (long,), (long[:4] - 1,)):
            batch = RolloutBatch(tokens=tokens, loss_masks=tuple(np.ones(len(row), bool) for row in tokens))
            with pytest.raises(BackendError, match=r"rows of|has the id -1"):
                await backend.forward_backward(batch, LossSpec("sft"))
            await backend.reset()


@cases("""
path
/runs/nobodys:train:0
/runs/nobodys:train:0/engine
/runs/{run}/files/5/..%2F..%2F..%2Fservice.sqlite
/runs/{run}/files/5/%2Fetc%2Fpasswd
/runs/{run}/files/5/state/../../../../service.sqlite
/runs/{run}/files/5/.hidden
/runs/{run}/files/5/nothing
""")
async def test_paths_lead_to_nothing_but_a_users_own_files(path, service):
    async with open_client(service) as client:
        backend = await client.create_training_client()
        with pytest.raises(ServiceRefused, match=r"there is no|no name of a file"):
            await client.connection.ask("GET", path.format(run=backend.run_id))
        with pytest.raises(ServiceRefused, match="have no holes"):
            await client.connection.ask("PUT", f"/runs/{backend.run_id}/files/9/a?offset=1", b"x")


async def test_a_wrong_key_opens_nothing(service):
    async with open_client(service, "tml-another") as client:
        with pytest.raises(ServiceRefused, match="API key"):
            await client.create_training_client()


async def test_nothing_is_generated_before_something_is_published_and_then_by_the_newest(service):
    async with open_training(service) as backend, open_served_engine(backend) as (engine, sync):
        with pytest.raises(RequestRefused, match="publish"):
            await engine.generate(engine_contracts.make_request())
        assert await engine.weight_version() == -1
        found = []
        for version in (4, 5, 6):
            metrics = await sync(backend, [engine], version)
            answer = await engine.generate(engine_contracts.make_request(temperature=0.0))
            assert answer.weight_versions.tolist() == [version] * len(answer.token_ids)
            found.append((metrics["weight_sync/engines_updated"], tuple(answer.log_probs)))
            await backend.forward_backward(BATCHES[0], LossSpec("sft"))
            await backend.optim_step(OptimParams(lr=1e-2))
        assert [updated for updated, _ in found] == [1.0] * 3 and len({each for _, each in found}) == 3


async def test_a_client_that_hangs_up_frees_its_row(service):
    async with open_training(service) as backend, open_served_engine(backend) as (engine, sync):
        await sync(backend, [engine], 0)
        begun, long = trio.current_time(), engine_contracts.make_request(max_new_tokens=2000)
        await engine.generate(long)
        whole_s = trio.current_time() - begun
        with trio.move_on_after(whole_s / 10):
            await engine.generate(long)
        with trio.fail_after(whole_s / 2):  # a deterministic engine takes none before all others have ended
            await engine.generate(engine_contracts.make_request("b", max_new_tokens=1))
