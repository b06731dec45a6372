"""Weight updates of vLLM and SGLang servers, by snapshots and in memory, over a fake of each."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from rollouts.engines.sglang import SGLangServer
from rollouts.engines.vllm import VLLMServer
from rollouts.errors import (
    EngineError,
    EngineSetupError,
    WeightVersionError,
)
from rollouts.testing.engine_contracts import (
    check_bad_snapshots_change_nothing,
    check_keep_pause_spans_two_versions,
    check_update_from_checkpoint,
)
from tests.support.fault_plan import (
    UPDATE_PHASES,
    UpdateFails,
    WrongVersion,
)
from tests.support.fault_server import Reply
from tests.unit.server_engines import (
    BOTH,
    VLLM_MODEL,
    open_both,
    open_engine,
    strike,
    update,
    write_snapshot,
)


@BOTH
async def test_updates_keep_the_contract(dialect, tmp_path: Path, autojump_clock):
    first, second = (write_snapshot(tmp_path / str(value), value) for value in (1.0, 2.0))
    (tmp_path / "bad").mkdir()
    opened = partial(open_engine, dialect, context_length=4096)
    await check_update_from_checkpoint(opened, first, second)
    await check_keep_pause_spans_two_versions(opened, second)
    await check_bad_snapshots_change_nothing(opened, second, tmp_path / "bad")


@BOTH
@pytest.mark.parametrize("phase", [phase for phase in UPDATE_PHASES if phase != "probe"])
async def test_a_phase_of_an_update_fails_and_the_next_update_works(
    dialect, phase, tmp_path: Path, autojump_clock
):
    path = write_snapshot(tmp_path / "v7")
    async with open_both(dialect) as (server, engine):
        strike(server, UpdateFails(phase), update=True)
        with pytest.raises(EngineError):
            await update(engine, path, 7)
        if phase in ("load", "set_version"):
            assert await engine.weight_version() == -1, "what may be in pieces bears no version"
        await update(engine, path, 8)
        assert await engine.weight_version() == 8


@pytest.mark.parametrize(
    ("dialect", "phase"),
    [
        ("vllm", "pause"),
        ("vllm", "set_version"),
        ("vllm", "resume"),
        ("sglang", "pause"),
        ("sglang", "resume"),
    ],
)
async def test_one_500_of_a_control_call_does_not_fail_the_update(
    dialect, phase, tmp_path: Path, autojump_clock
):
    async with open_both(dialect) as (server, engine):
        strike(server, UpdateFails(phase, "once"), update=True)
        await update(engine, write_snapshot(tmp_path / "v7"), 7)
        assert [fault.what for fault in server.process.struck] == [UpdateFails(phase, "once")]
        assert await engine.weight_version() == 7 and server.process.paused is None


@pytest.mark.parametrize(
    ("path", "calls"),
    [
        *(("/pause", 3), ("/resume", 3), ("/update_weight_version", 3), ("/reset_prefix_cache", 3)),
        *(("/collective_rpc", 1), ("/start_weight_update", 1), ("/weight_info", 3)),
    ],
)
async def test_only_calls_that_are_safe_to_repeat_are_repeated(path, calls, tmp_path: Path, autojump_clock):
    async with open_both("vllm") as (server, engine):
        server.overrides[path] = Reply(b"busy", status=503)
        steps = [
            partial(engine.pause, "keep"),
            partial(engine.update_weights_from_checkpoint, write_snapshot(tmp_path / "v7"), 7),
            engine.resume,
        ]
        if path == "/start_weight_update":
            assert isinstance(engine.dialect, VLLMServer)
            steps[1] = engine.dialect.start_weight_update

        async def take_steps() -> None:
            for step in steps:
                await step()

        with pytest.raises(EngineError, match="busy"):
            await take_steps()
        assert len(server.paths(path)) == calls


async def test_another_version_than_the_one_given_is_an_error(tmp_path: Path):
    async with open_both("vllm") as (server, engine):
        strike(server, WrongVersion(), update=True)
        with pytest.raises(WeightVersionError, match="given version 7 and says 6"):
            await update(engine, write_snapshot(tmp_path / "v7"), 7)


async def test_a_cache_that_is_not_reset_fails_the_update_and_leaves_no_version(tmp_path: Path):
    async with open_both("vllm") as (server, engine):
        server.overrides["/reset_prefix_cache"] = {"success": False}
        with pytest.raises(EngineError, match="prefix cache"):
            await update(engine, write_snapshot(tmp_path / "v7"), 7)
        assert await engine.weight_version() == -1


@BOTH
async def test_a_snapshot_of_another_model_is_not_sent(dialect, tmp_path: Path):
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


@pytest.mark.parametrize(
    ("dialect", "settings", "named"),
    [
        ("vllm", {"model_config": VLLM_MODEL | {"logprobs_mode": "raw_logprobs"}}, "processed_logprobs"),
        ("sglang", {"enable_watermark": True}, "--enable-watermark"),
    ],
)
async def test_a_server_that_came_back_with_other_settings_is_not_updated(
    dialect, settings, named, tmp_path: Path
):
    async with open_both(dialect) as (server, engine):
        server.settings = settings
        with pytest.raises(EngineSetupError, match=named):
            await update(engine, write_snapshot(tmp_path / "v7"), 7)
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
        receive = partial(dialect.receive_broadcast, ["w"], ["float32"], [(2,)], group_name="g", version=3)
        await receive(last=True)
        assert server.calls[-1][1]["weight_version"] == "3"
        server.overrides["/begin_weight_update"] = Reply(status=404)
        assert not await dialect.begin_transfer(), "a server without sessions"
        server.overrides["/update_weights_from_distributed"] = {"success": False, "message": "no group"}
        with pytest.raises(EngineError, match="no group"):
            await receive(last=False)
