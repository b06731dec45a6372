"""Weight updates of vLLM and SGLang servers, by snapshots and in memory, over a fake of each."""

from functools import partial
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from rollouts.engines.sglang import SGLangServer
from rollouts.engines.vllm import VLLMServer
from rollouts.errors import EngineError, EngineSetupError, WeightVersionError
from rollouts.testing.engine_contracts import (
    check_bad_snapshots_change_nothing,
    check_keep_pause_spans_two_versions,
    check_update_from_checkpoint,
)
from tests.support.fault_plan import UPDATE_PHASES, UpdateFails, WrongVersion
from tests.support.fault_server import Reply
from tests.support.text_tables import cases
from tests.unit.server_engines import BOTH, open_both, open_engine, strike, update, write_snapshot


@pytest.fixture
def snapshot(tmp_path):
    return write_snapshot(tmp_path / "v7")


@BOTH
async def test_updates_keep_the_contract(dialect, tmp_path, autojump_clock):
    first, second = (write_snapshot(tmp_path / str(value), value) for value in (1.0, 2.0))
    (tmp_path / "bad").mkdir()
    opened = partial(open_engine, dialect, context_length=4096)
    await check_update_from_checkpoint(opened, first, second)
    await check_keep_pause_spans_two_versions(opened, second)
    await check_bad_snapshots_change_nothing(opened, second, tmp_path / "bad")


@BOTH
@pytest.mark.parametrize("phase", [phase for phase in UPDATE_PHASES if phase != "probe"])
async def test_a_phase_of_an_update_fails_and_the_next_update_works(dialect, phase, snapshot, autojump_clock):
    async with open_both(dialect) as (server, engine):
        strike(server, UpdateFails(phase), update=True)
        with pytest.raises(EngineError):
            await update(engine, snapshot, 7)
        if phase in ("load", "set_version"):
            assert await engine.weight_version() == -1, "what may be in pieces bears no version"
        await update(engine, snapshot, 8)
        assert await engine.weight_version() == 8


@cases("""
dialect | safe                                                                              | once
vllm   | /is_paused /weight_info /pause /resume /update_weight_version /reset_prefix_cache | /collective_rpc
sglang | /model_info /pause_generation /continue_generation | /update_weights_from_disk
""")
async def test_one_503_fails_no_update_if_the_call_is_safe_to_repeat(
    dialect, safe, once, snapshot, autojump_clock
):
    left = safe.split()
    async with open_both(dialect) as (server, engine):
        respond = server.respond

        async def busy_at_first(target, *request):
            if (asked := target.partition("?")[0]) in left:
                left.remove(asked)
                return Reply(status=503)
            return await respond(target, *request)

        server.respond = busy_at_first
        await update(engine, snapshot, 7)
        assert await engine.weight_version() == 7 and server.process.paused is None and not left
        left.append(once)
        with pytest.raises(EngineError, match=f"{once} gave 503"):
            await update(engine, snapshot, 8)
        assert await engine.weight_version() == (-1 if dialect == "vllm" else 7)


async def test_another_version_than_the_one_given_is_an_error(snapshot):
    async with open_both("vllm") as (server, engine):
        strike(server, WrongVersion(), update=True)
        with pytest.raises(WeightVersionError, match="given version 7 and says 6"):
            await update(engine, snapshot, 7)


async def test_a_cache_that_is_not_reset_fails_the_update_and_leaves_no_version(snapshot):
    async with open_both("vllm") as (server, engine):
        server.overrides["/reset_prefix_cache"] = {"success": False}
        with pytest.raises(EngineError, match="prefix cache"):
            await update(engine, snapshot, 7)
        assert await engine.weight_version() == -1


@BOTH
async def test_a_snapshot_of_another_model_is_not_sent(dialect, tmp_path):
    base, other = write_snapshot(tmp_path / "base"), tmp_path / "other"
    other.mkdir()
    save_file({"another": np.zeros(3, np.float32)}, other / "model.safetensors")
    async with open_both(dialect, model=str(base)) as (server, engine):
        await engine.pause("abort")
        with pytest.raises(EngineError, match="was sent nothing"):
            await engine.update_weights_from_checkpoint(other, 7)
        assert server.process.loads == 0
        with pytest.raises(EngineError, match=r"weight_sync\.broadcast"):
            await engine.begin_update()


@cases("""
dialect | settings | named
vllm | {"model_config": {"model": "m", "max_model_len": 256, "logprobs_mode": "raw"}} | processed_logprobs
sglang | {"enable_watermark": true} | --enable-watermark
""")
async def test_a_server_that_came_back_with_other_settings_is_not_updated(
    dialect, settings: Any, named, snapshot
):
    async with open_both(dialect) as (server, engine):
        server.settings = settings
        with pytest.raises(EngineSetupError, match=named):
            await update(engine, snapshot, 7)
        assert server.process.loads == 0


async def test_transfers_to_vllm_go_out_in_the_servers_shape():
    config = {"weight_transfer_config": {"backend": "nccl"}}
    async with open_both("vllm", settings=config) as (server, engine):
        steps = (
            "/init_weight_transfer_engine",
            "/start_weight_update",
            "/update_weights",
            "/finish_weight_update",
        )
        server.overrides |= {step: {} for step in steps} | {"/get_world_size": {"world_size": 2}}
        dialect = engine.dialect
        assert isinstance(dialect, VLLMServer)
        assert await dialect.get_world_size() == 2
        await dialect.init_weight_transfer({"master_port": 1})
        with pytest.raises(EngineError, match="pause"):
            await dialect.start_weight_update()
        await engine.pause("keep")
        await dialect.start_weight_update()
        assert await engine.weight_version() == -1
        await dialect.update_weights({"names": ["a"]})
        await dialect.finish_weight_update(3)
        assert await engine.weight_version() == 3
        sent = dict(server.calls)
        assert sent[steps[0]] == {"init_info": {"master_port": 1}}
        assert sent[steps[2]] == {"update_info": {"names": ["a"]}}
    for backend in (None, {"backend": "ipc"}):
        async with open_both("vllm", settings={"weight_transfer_config": backend}) as (_, engine):
            assert isinstance(engine.dialect, VLLMServer)
            with pytest.raises(EngineSetupError, match="nccl"):
                await engine.dialect.init_weight_transfer({})


async def test_transfers_to_sglang_have_no_version_while_they_are_under_way():
    async with open_both("sglang") as (server, engine):
        dialect = engine.dialect
        assert isinstance(dialect, SGLangServer)
        server.overrides |= {
            "/begin_weight_update": {"success": True},
            "/end_weight_update": Reply(status=400),  # no session is open
            "/update_weights_from_distributed": {"success": True},
        }
        assert await dialect.begin_transfer()
        assert server.paths()[-2:] == ["/end_weight_update", "/begin_weight_update"], (
            "one left open is closed"
        )
        assert await engine.weight_version() == -1
        info = {"names": ["w"], "dtypes": ["float32"], "shapes": [(2,)], "group_name": "g"}
        receive = partial(dialect.receive_broadcast, info, version=3)
        await receive(last=True)
        assert server.calls[-1][1]["weight_version"] == "3"
        server.overrides["/begin_weight_update"] = Reply(status=404)
        assert not await dialect.begin_transfer(), "a server without sessions"
        server.overrides["/update_weights_from_distributed"] = {"success": False, "message": "no group"}
        with pytest.raises(EngineError, match="no group"):
            await receive(last=False)
