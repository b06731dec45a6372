"""The engines of vLLM and SGLang on real servers: what both promise."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import numpy as np
import pytest

from rollouts.engines.server import ServerEngine
from rollouts.errors import EngineSetupError
from rollouts.testing import engine_contracts
from rollouts.testing.engine_contracts import LONG, asked, disturb, make_request, update_frozen
from tests.support.text_tables import cases

from .conftest import CONTEXT_LENGTH, open_engine
from .model_checks import load, score

pytestmark = pytest.mark.engines
Open = Callable[..., AbstractAsyncContextManager[ServerEngine]]


@pytest.fixture
def open_(server):
    return lambda **changes: open_engine(server, **changes)


@cases("check", [*engine_contracts.CHECKS, *engine_contracts.MODEL_CHECKS])
async def test_contract(check, open_):
    await check(open_)


async def test_updates_show_in_version_log_probs_and_checksum(open_, snapshots):
    await engine_contracts.check_update_from_checkpoint(open_, *snapshots)


async def test_frozen_request_comes_back_whole_with_two_versions(open_, snapshots):
    await engine_contracts.check_keep_pause_spans_two_versions(open_, snapshots[1])


async def test_bad_snapshots_change_nothing(open_, snapshots, tmp_path):
    await engine_contracts.check_bad_snapshots_change_nothing(open_, snapshots[1], tmp_path)


def assert_models_own(path, request, answer, which=..., *, atol=2e-4):
    """These log-probs are those of the model in `path` at the temperature that was sampled with."""
    np.testing.assert_allclose(answer.log_probs[which], score(path, request, answer)[which], atol=atol)


@cases("temperatures", [(0.0,), (0.5,), (1.0,), (2.0,), (0.0, 0.5, 1.5)])
async def test_log_probs_are_the_models_own_at_its_temperature(temperatures, open_, snapshots):
    """Also where several are in one batch; greedy ones are those of temperature 1."""
    requests = [
        make_request(f"t{temperature}", max_new_tokens=24, temperature=temperature, seed=3)
        for temperature in temperatures
    ]
    async with open_() as engine:
        await load(engine, snapshots[0])
        async with asked(engine, *requests) as answers:
            pass
    for request in requests:
        assert_models_own(snapshots[0], request, answers[request.request_id])


async def test_tokens_after_a_frozen_update_are_the_new_models_own(open_, snapshots):
    """Scored by the new weights over everything before: keys and values of the old weights would show."""
    paths = [*snapshots]  # what the engine serves, and what it is brought to next
    async with open_() as engine:
        await load(engine, paths[0])

        async def update(answers):
            paths.reverse()
            await update_frozen(engine, paths[0], answers)

        answer = await disturb(engine, update)
    request = make_request("long", max_new_tokens=LONG)
    new = answer.weight_versions == answer.weight_versions[-1]
    assert_models_own(paths[1], request, answer, ~new, atol=5e-4)
    assert_models_own(paths[0], request, answer, new, atol=5e-4)


async def test_abort_all_answers_frozen_requests_with_what_they_have(open_, server):
    async with open_() as engine:

        async def freeze_and_abort(_):
            await engine.pause("keep")
            await engine.abort_all()
            await engine.resume()

        answer = await disturb(engine, freeze_and_abort)
        assert answer.finish_reason == "abort"
        least = 1 if server.kind == "vllm" else 0  # SGLang keeps its tokens by fifties
        assert least <= len(answer.token_ids) < LONG
        assert len((await engine.generate(make_request())).token_ids) == 4


async def test_server_left_paused_serves_who_comes_next(open_):
    async with open_() as engine:
        await engine.pause("keep")
    async with open_() as engine:
        assert len((await engine.generate(make_request())).token_ids) == 4


@cases(
    "changes, rule",
    [
        ({"api_key": "wrong"}, "api.key"),
        ({"api_key": None}, "api.key"),
        ({"vocab_size": 50_000}, "the same model"),
        ({"context_length": CONTEXT_LENGTH + 1}, f"--(max-model-len|context-length) {CONTEXT_LENGTH + 1}"),
    ],
)
async def test_opening_with_what_does_not_fit_names_the_flag(changes, rule, server):
    with pytest.raises(EngineSetupError, match=rule) as raised:
        async with open_engine(server, **changes):
            pass
    assert server.api_key not in str(raised.value)
