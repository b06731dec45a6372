"""LoRA adapters as the weights of a version, over a fake of each server."""

import json
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from safetensors.numpy import save_file
from trio.testing import wait_all_tasks_blocked

from rollouts.engines.fleet import open_fleet
from rollouts.engines.fleet_members import Member
from rollouts.engines.processes import EngineCommand, make_arguments, make_environment
from rollouts.errors import EngineError, RequestRefused, WeightSyncError
from rollouts.testing.engine_contracts import LONG, at_work, make_request
from rollouts.weight_sync.update import (
    ProvenVersions,
    SilenceLimits,
    UpdatePlan,
    make_probe,
    sync_weights_to_engines,
)
from tests.support.fault_plan import StaleWeights
from tests.support.fault_server import DialectName
from tests.support.simulated_process import compute_log_probs, read_snapshot, weights_log_prob
from tests.support.text_tables import cases
from tests.unit.server_engines import BOTH, open_both, strike, update, write_snapshot

LORA = {"vllm": {"lora_config": {"max_lora_rank": 8}}, "sglang": {"enable_lora": True, "max_lora_rank": 8}}


def open_lora(dialect, **options):
    return open_both(dialect, settings=LORA[dialect], context_length=4096, **options)


def write_adapter(path, value=1.0, *, rank=8):
    path.mkdir()
    save_file({"lora_A": np.full(2, value, np.float32)}, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps({"r": rank}))
    return path


async def assert_serves(engine, path, version, *, name="", request_id="a"):
    """By the name of the adapter in `path`, or as the engine's version."""
    request = replace(make_request(request_id), adapter=name)
    answer = await engine.generate(request)
    assert answer.weight_versions.tolist() == [version] * 4
    weights, tokens = read_snapshot(path), answer.token_ids.tolist()
    expected = [weights_log_prob(weights, position, token) for position, token in enumerate(tokens, 3)]
    assert answer.log_probs.tolist() == pytest.approx(expected)


@BOTH
async def test_what_is_in_flight_when_an_adapter_comes_or_goes_is_cut_with_the_version_it_began_with(
    dialect, tmp_path, autojump_clock
):
    paths = [write_snapshot(tmp_path / "v0")]
    paths += [write_adapter(tmp_path / f"v{version}", version) for version in (1, 2)]
    paths += [write_snapshot(tmp_path / "v3", 3.0), write_adapter(tmp_path / "v4", 4.0)]
    async with open_lora(dialect) as (server, engine):
        assert engine.features.max_adapter_rank == 8
        await update(engine, paths[0], 0)
        for version in range(1, 5):
            async with at_work(engine) as answers:
                await engine.pause("keep")
                await engine.update_weights_from_checkpoint(paths[version], version)
                await engine.resume()
            cut = answers["long"]
            frozen = dialect == "sglang" and version in (1, 4)  # under whole weights; it loses its tokens
            assert cut.finish_reason == "abort" and len(cut.token_ids) < LONG
            assert {*cut.weight_versions.tolist()} == (set() if frozen else {version - 1})
            await assert_serves(engine, paths[version], version)
            is_adapter = version != 3
            assert len(server.process.adapters) <= 1  # those before are gone
            assert engine.features.checksum == (not is_adapter)
            assert (await engine.checksum() is None) == is_adapter


@BOTH
async def test_an_adapter_that_cannot_be_served_leaves_the_one_before(dialect, tmp_path, autojump_clock):
    fits, large = write_adapter(tmp_path / "fits"), write_adapter(tmp_path / "large", rank=9)
    (write_adapter(tmp_path / "empty") / "adapter_model.safetensors").unlink()
    async with open_lora(dialect) as (_, engine):
        await update(engine, fits, 1)
        with pytest.raises(EngineError, match="LoRA rank 9 is greater than max_lora_rank 8"):
            await update(engine, large, 2)
        with pytest.raises(EngineError, match=r"holds neither"):
            await update(engine, tmp_path / "empty", 2)
        with pytest.raises(EngineError, match=r"call pause\(\)"):
            await engine.update_weights_from_checkpoint(fits, 2)
        await assert_serves(engine, fits, 1)


@cases("""
dialect | settings | named
vllm | {} | --enable-lora
vllm | {"lora_config": {"max_lora_rank": 8}, "updating": false} | VLLM_ALLOW_RUNTIME_LORA_UPDATING=1
sglang | {} | --enable-lora
sglang | {"enable_lora": true} | --max-lora-rank
""")
async def test_a_server_without_adapters_is_sent_none(dialect, settings: Any, named, tmp_path):
    async with open_both(dialect, settings=settings) as (server, engine):
        assert engine.features.max_adapter_rank == 0
        with pytest.raises(EngineError, match=f"cannot load the adapter .*{named}"):
            await update(engine, write_adapter(tmp_path / "a"), 1)
        assert server.process.loads == 0


@BOTH
async def test_a_server_that_lost_its_adapter_fails_and_is_given_it_again(dialect, tmp_path, autojump_clock):
    adapter = write_adapter(tmp_path / "a")
    async with open_lora(dialect) as (server, engine):
        await update(engine, adapter, 1)
        await server.process.restart()
        with pytest.raises(EngineError) as raised:
            await engine.generate(make_request())
        assert not isinstance(raised.value, RequestRefused)  # the request is as good as any
        assert await engine.weight_version() == -1
        await update(engine, adapter, 1)
        await assert_serves(engine, adapter, 1)


async def test_what_a_trainer_before_left_in_a_server_is_unloaded(tmp_path, autojump_clock):
    first, second = write_adapter(tmp_path / "a"), write_adapter(tmp_path / "b", 2.0)
    async with open_lora("sglang") as (server, engine):
        await update(engine, first, 1)
        server.process.adapters["the user's own"] = "weights"
        async with server.open_engine() as again:
            await update(again, second, 1)
            await assert_serves(again, second, 1)
        assert len(server.process.adapters) == 2


# --- adapters by name --------------------------------------------------------------------------------------


@BOTH
async def test_adapters_by_name_are_served_at_once_beside_the_one_that_is_the_version(
    dialect, tmp_path, autojump_clock
):
    """And stay when that is exchanged."""
    paths = {name: write_adapter(tmp_path / name, ord(name)) for name in "abcdx"}
    async with open_lora(dialect) as (server, engine):
        for name in "abc":
            await engine.add_adapter(name, paths[name])
        for version, path in enumerate([write_snapshot(tmp_path / "v0"), paths["d"], paths["x"]]):
            await update(engine, path, version)
            unnamed = [""]
            if dialect == "vllm" and version == 0:
                unnamed = []
                with pytest.raises(RequestRefused, match="names no adapter while the server has some"):
                    await engine.generate(make_request())
            async with trio.open_nursery() as nursery:
                for name in ("a", "b", "c", *unnamed):
                    serves = partial(assert_serves, name=name, request_id=f"r{name}")
                    nursery.start_soon(serves, engine, paths.get(name, path), version)
        await engine.remove_adapter("b")
        assert len(server.process.adapters) == 3
        with pytest.raises(RequestRefused, match=r"adapter='b'; the engine has \['a', 'c'\]"):
            await assert_serves(engine, paths["b"], 2, name="b")
        await engine.add_adapter("b", paths["d"])
        await assert_serves(engine, paths["d"], 2, name="b")


@BOTH
async def test_an_adapter_that_requests_use_is_not_removed(dialect, tmp_path, autojump_clock):
    async with open_lora(dialect) as (_, engine):
        await engine.add_adapter("a", write_adapter(tmp_path / "a"))
        long = replace(make_request("long", max_new_tokens=9), adapter="a")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.generate, long)
            await wait_all_tasks_blocked()
            with pytest.raises(EngineError, match=r"has \['a'\], and \['long'\] in flight use it"):
                await engine.remove_adapter("a")
        await engine.remove_adapter("a")
        with pytest.raises(EngineError, match=r"remove_adapter\('a'\): the engine has \[\]"):
            await engine.remove_adapter("a")


@BOTH
async def test_a_server_that_was_started_again_or_away_is_given_the_adapter_once_by_who_names_it(
    dialect, tmp_path, autojump_clock
):
    path = write_adapter(tmp_path / "a")
    async with open_lora(dialect) as (server, engine):
        for add_first in (True, False):
            if add_first:
                await engine.add_adapter("a", path)
                await assert_serves(engine, path, -1, name="a")
            server.process.crash()
            if not add_first:
                await engine.add_adapter("a", path)
            await server.process.restart()
            loads = server.process.loads
            async with trio.open_nursery() as nursery:
                for request_id in ("r0", "r1", "r2"):
                    ask = partial(assert_serves, name="a", request_id=request_id)
                    nursery.start_soon(ask, engine, path, -1)
            assert (server.process.loads, len(server.process.adapters)) == (loads + 1, 1)
            await engine.remove_adapter("a")


@BOTH
async def test_what_cannot_be_served_by_name_is_refused_and_the_name_stays_free(dialect, tmp_path):
    fits, large = write_adapter(tmp_path / "fits"), write_adapter(tmp_path / "large", rank=9)
    async with open_lora(dialect) as (_, engine):
        with pytest.raises(EngineError, match="LoRA rank 9 is greater than max_lora_rank 8"):
            await engine.add_adapter("a", large)
        await engine.add_adapter("a", fits)
        for name in ("", "a"):
            with pytest.raises(EngineError, match="the name must be new, and not empty"):
                await engine.add_adapter(name, fits)
        for asked in ({"prompt_targets": np.ones((2, 1), np.int64)}, {"prompt_draws": 1}):
            with pytest.raises(RequestRefused, match="only an embedded engine has them"):
                await engine.generate(replace(make_request(), **asked))
    async with open_both(dialect) as (_, engine):
        with pytest.raises(EngineError, match=r"cannot load the adapter .*--enable-lora"):
            await engine.add_adapter("a", fits)


@BOTH
async def test_every_member_of_a_fleet_has_the_adapters_who_joins_or_comes_back_too(
    dialect, tmp_path, autojump_clock
):
    weights, large = write_snapshot(tmp_path / "v0"), write_adapter(tmp_path / "large", rank=9)
    paths = {name: write_adapter(tmp_path / name, ord(name)) for name in "ab"}

    async def bring(engine):
        fleet.close_admission(engine)
        await update(engine, weights, 0)
        assert fleet.commit(engine, 0)

    async with AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(open_lora(dialect, name=name)) for name in "xyz"]
        servers, engines = zip(*opened, strict=True)
        members = [Member(engine, server.process.restart) for server, engine in opened]
        fleet = await stack.enter_async_context(open_fleet(members[:2], warn=lambda text: None))
        for engine in engines[:2]:
            await bring(engine)
        fleet.publish(0)
        with pytest.raises(EngineError, match="LoRA rank 9"):
            await fleet.add_adapter("a", large)
        servers[0].process.crash()
        for name, path in paths.items():
            await fleet.add_adapter(name, path)
        await fleet.join(members[2])
        await servers[0].process.restart()
        for engine in engines:
            await bring(engine)
        async with trio.open_nursery() as nursery:
            for index in range(36):  # so many that each server is asked for both
                name = "ab"[index % 2]
                ask = partial(assert_serves, name=name, request_id=f"r{index}")
                nursery.start_soon(ask, fleet, paths[name], 0)
            await wait_all_tasks_blocked()
            with pytest.raises(EngineError, match="in flight use it"):
                await fleet.remove_adapter("a")
        assert [len(server.process.adapters) for server in servers] == [2, 2, 2]
        await fleet.remove_adapter("a")
        assert [len(server.process.adapters) for server in servers] == [1, 1, 1]
        with pytest.raises(RequestRefused, match=r"adapter='a'; the engine has \['b'\]"):
            await assert_serves(fleet, paths["a"], 0, name="a")


# --- the proof ----------------------------------------------------------------------------------------------


def make_plan(path, version, proven):
    probe, weights = make_probe(300, tolerance=1e-3), read_snapshot(path)

    async def load(engine):
        return await engine.update_weights_from_checkpoint(path, version)

    expected = compute_log_probs(weights, probe.tokens)
    return UpdatePlan(version, probe, expected, load, weights, proven, None, SilenceLimits(), print, None)


@BOTH
async def test_versions_are_proven_by_the_probe_over_adapters_whole_weights_and_a_restart(dialect, tmp_path):
    paths = [write_snapshot(tmp_path / "v0"), *(write_adapter(tmp_path / f"v{v}", v) for v in (1, 2))]
    paths += [paths[2], write_snapshot(tmp_path / "v4", 4.0)]
    proven = ProvenVersions()
    async with open_lora(dialect) as (server, engine):
        for version, path in enumerate(paths):
            if version == 3:
                await server.process.restart()  # between two updates, and comes back without an adapter
                await sync_weights_to_engines([engine], make_plan(path, 2, proven))
            await sync_weights_to_engines([engine], make_plan(path, version, proven))
            await assert_serves(engine, path, version)


@BOTH
async def test_a_server_that_says_yes_and_keeps_the_adapter_before_is_found_out(dialect, tmp_path):
    first, second = (write_adapter(tmp_path / str(value), value) for value in (1.0, 2.0))
    proven = ProvenVersions()
    async with open_lora(dialect) as (server, engine):
        await sync_weights_to_engines([engine], make_plan(first, 1, proven))
        strike(server, StaleWeights(), update=True)
        with pytest.raises(WeightSyncError, match="does not serve the weights that were sent"):
            await sync_weights_to_engines([engine], make_plan(second, 2, proven))
        # a change that is too small for the tolerance, which the checksum of the base says nothing about
        strike(server, StaleWeights(), update=True)
        plan = make_plan(second, 3, proven)
        plan = plan._replace(probe=plan.probe._replace(tolerance=9.0))
        with pytest.raises(WeightSyncError, match="scores the probe exactly as before"):
            await sync_weights_to_engines([engine], plan)
        await sync_weights_to_engines([engine], make_plan(second, 4, proven))


# --- servers that are started -------------------------------------------------------------------------------


@cases("""
kind | args | words
vllm | --device cpu | --max-loras 1 --max-lora-rank 16
vllm | --device cpu --max_lora_rank 64 | --max-loras 1
sglang | --device cuda | --max-loras-per-batch 8 --max-lora-rank 9
sglang | --device cpu --lora-backend triton --max-loras-per-batch 3 | --max-lora-rank 9
sglang | --device cpu --max-lora-rank 32 | --max-loras-per-batch 8 --lora-backend torch_native
""")
def test_a_started_server_gets_what_adapters_need_unless_the_user_says_it(kind: DialectName, args, words):
    plain = EngineCommand(kind, Path("/v/python"), Path("/m"), tuple(args.split()))
    with_lora = plain._replace(lora=(9, ["q", "v"]))
    before, after = (make_arguments(one, port=1, key_file=Path("k")) for one in (plain, with_lora))
    own = len(args.split())
    modules = ["--lora-target-modules", "q", "v"]
    assert after == (*before[:-own], "--enable-lora", *words.split(), *modules, *args.split())
    envs = [make_environment(one, {}, threads=1) for one in (plain, with_lora)]
    updating = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"} if kind == "vllm" else {}
    assert envs[1] == envs[0] | updating
