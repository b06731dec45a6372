"""Weight updates of vLLM and SGLang servers, by snapshots and in memory, over a fake of each."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from rollouts.errors import EngineError, EngineSetupError, WeightVersionError
from rollouts.testing.engine_contracts import (
    check_bad_snapshots_change_nothing,
    check_keep_pause_spans_two_versions,
    check_update_from_checkpoint,
)
from rollouts.weight_sync.broadcast import VLLMPeer, flatten_tensors
from tests.support.fault_plan import UPDATE_PHASES, UpdateFails, WrongVersion
from tests.support.fault_server import Reply
from tests.support.text_tables import cases, read_params
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
@cases("phase", [phase for phase in UPDATE_PHASES if phase != "probe"])
async def test_a_phase_of_an_update_fails_and_the_next_update_works(dialect, phase, snapshot, autojump_clock):
    async with open_both(dialect) as (server, engine):
        strike(server, UpdateFails(phase), update=True)
        with pytest.raises(EngineError):
            await update(engine, snapshot, 7)
        if phase in ("load", "set_version"):
            assert await engine.weight_version() == -1  # what may be in pieces bears no version
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


async def test_transfers_to_vllm_go_out_in_the_servers_shape(monkeypatch):
    async def run_on(device, work):
        return SimpleNamespace(query=lambda: True)  # the group, and what is sent in it, needs a GPU

    monkeypatch.setattr("rollouts.weight_sync.broadcast.run_on", run_on)
    config, cpu = {"weight_transfer_config": {"backend": "nccl"}}, torch.device("cpu")
    async with open_both("vllm", settings=config) as (server, engine):
        steps = "/init_weight_transfer_engine /start_weight_update /update_weights /finish_weight_update"
        server.overrides |= {step: {} for step in steps.split()} | {"/get_world_size": {"world_size": 2}}
        peer = VLLMPeer(engine.dialect, cpu)
        with pytest.raises(EngineError, match="pause"):
            await peer.begin()
        await engine.pause("keep")
        await peer.begin()
        assert await engine.weight_version() == -1
        bucket = flatten_tensors([("a", torch.zeros(2))], dtype=None, device=cpu)
        await peer.send(bucket, version=3, last=True)
        await peer.end(3)
        assert await engine.weight_version() == 3
        sent = dict(server.calls)
        info = sent["/init_weight_transfer_engine"]["init_info"]
        assert info.pop("master_port") and info == read_params(
            'master_address = "127.0.0.1", world_size = 3, rank_offset = 1, packed = false'
        )
        wanted = read_params('names = ["a"], dtype_names = ["float32"], shapes = [[2]]')
        assert sent["/update_weights"] == {"update_info": wanted}
    for backend in (None, {"backend": "ipc"}):
        async with open_both("vllm", settings={"weight_transfer_config": backend}) as (_, engine):
            with pytest.raises(EngineSetupError, match="nccl"):
                await VLLMPeer(engine.dialect, cpu).begin()


async def test_transfers_to_sglang_have_no_version_while_they_are_under_way():
    async with open_both("sglang") as (server, engine):
        dialect = engine.dialect
        server.overrides["/end_weight_update"] = Reply(status=400)  # no session is open
        for step in ("/begin_weight_update", "/update_weights_from_distributed"):
            server.overrides[step] = {"success": True}
        assert await dialect.begin_transfer()
        # one left open is closed
        assert server.paths()[-2:] == ["/end_weight_update", "/begin_weight_update"]
        assert await engine.weight_version() == -1
        info = read_params('names = ["w"], dtypes = ["float32"], shapes = [[2]], group_name = "g"')
        receive = partial(dialect.receive_broadcast, info, version=3)
        await receive(last=True)
        assert server.calls[-1][1]["weight_version"] == "3"
        server.overrides["/begin_weight_update"] = Reply(status=404)
        assert not await dialect.begin_transfer()  # a server without sessions
        server.overrides["/update_weights_from_distributed"] = {"success": False, "message": "no group"}
        with pytest.raises(EngineError, match="no group"):
            await receive(last=False)
