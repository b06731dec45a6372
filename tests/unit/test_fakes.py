"""The fakes keep the promises of the protocols that they stand for."""

from contextlib import asynccontextmanager
from functools import partial

import numpy as np
import pytest
import trio

from rollouts.errors import BackendClosed, BackendError, EarlierStepFailed, EngineError
from rollouts.testing import engine_contracts, torch_contracts
from rollouts.testing.engine_contracts import make_request
from rollouts.testing.fakes import ScriptedEngine, ScriptedReply, open_fake_backend
from rollouts.types import LossSpec, RolloutBatch
from tests.support.text_tables import cases

BATCH = RolloutBatch(
    tokens=(np.arange(4), np.arange(3)), loss_masks=(np.array([0, 0, 1, 1], bool), np.array([0, 1, 1], bool))
)


# --- engine -------------------------------------------------------------------------------------------------


@asynccontextmanager
async def open_engine(**options):
    engine = ScriptedEngine(lambda request: ScriptedReply("abc", token_s=1.0), **options)
    yield engine
    engine.close()


@cases("check", engine_contracts.CHECKS)
async def test_the_engine_keeps_the_contract(check, autojump_clock):
    await check(open_engine)


@cases("""
mode  | tokens | ended_at
abort | a      | 2
wait  | abc    | 3
keep  | abc    | 13.5
""")
async def test_a_pause_falls_between_two_tokens(mode, tokens, ended_at: float, autojump_clock):
    async with open_engine() as engine:
        async with engine_contracts.asked(engine, make_request()) as answers:
            await trio.sleep(1.5)
            await engine.pause(mode)
            await trio.sleep_until(12)
            assert ("a" in answers) == (ended_at < 12)
            engine.set_version(5)
            await engine.resume()
        assert answers["a"].token_ids.tolist() == [*map(ord, tokens)]
        assert answers["a"].weight_versions.tolist() == ([0, 5, 5] if mode == "keep" else [0] * len(tokens))
        assert trio.current_time() == pytest.approx(max(ended_at, 12), abs=0.5)


async def test_weights_arrive_in_buckets_or_from_disk(tmp_path):
    await engine_contracts.check_update_in_memory(open_engine, [("weight", None)])
    async with open_engine() as engine, open_fake_backend() as backend:
        await engine.begin_update()
        await backend.stream_weights(engine.receive_bucket)
        await engine.finish_update(1)
        assert engine.received == ["weight"]
        assert await engine.update_weights_from_checkpoint(tmp_path, 2) == {"version": 2}
        with pytest.raises(EngineError, match="is not a directory"):
            await engine.update_weights_from_checkpoint(tmp_path / "none", 3)
        assert await engine.weight_version() == 2


# --- backend ------------------------------------------------------------------------------------------------


@cases("""
settings                         | denominator
                                 | 4
unit = "sequences"               | 2
unit = "constant", constant = 9.0 | 9
""")
async def test_the_backend_counts_the_unit_of_the_loss(settings: dict, denominator: float):
    loss = LossSpec("sft", **settings)
    async with open_fake_backend() as backend:
        result = await backend.forward_backward(BATCH, loss)
        assert result.denominator == denominator and backend.batches == [BATCH]
        assert [row.tolist() for row in await backend.forward(BATCH)] == [[0, 0, -1, -1], [0, -1, -1]]


async def test_the_backends_futures_keep_the_contract(autojump_clock):
    await torch_contracts.check_futures(partial(open_fake_backend, step_s=10))
    assert trio.current_time() == 40


async def test_the_backends_revert_keeps_the_contract():
    await torch_contracts.check_an_undone_update_leaves_no_trace(open_fake_backend)


async def test_steps_after_a_failed_one_fail_until_reset_and_an_unheard_failure_is_raised():
    failures = {0: BackendError("out of memory"), 4: BackendError("lost")}
    with pytest.raises(BackendError, match="lost"):  # noqa: PT012
        async with open_fake_backend(failures=failures) as backend:
            steps = backend.optim_step(), backend.optim_step()
            for step, kind in zip(steps, (BackendError, EarlierStepFailed), strict=True):
                with pytest.raises(kind, match="out of memory"):
                    await step
            await backend.reset()
            assert (await backend.optim_step()).step == 1
            backend.optim_step()
    with pytest.raises(BackendClosed):
        backend.optim_step()
