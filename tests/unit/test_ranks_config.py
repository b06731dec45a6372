"""Which ranks a config may ask for, and when the program starts itself again under torchrun."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rollouts.config.load import check_same_config, check_same_run, dump_config, load_config
from rollouts.config.schema import RunConfig
from rollouts.config.tables import DistributedConfig, EngineConfig, ModelConfig, OptimConfig
from rollouts.errors import ConfigError
from rollouts.preflight.ranks import check_ranks, choose_relaunch
from rollouts.ranks.launch import Launch


def config_of(**settings: int) -> RunConfig:
    return RunConfig(distributed=DistributedConfig(**settings))


def launch_of(world_size: int, local_world_size: int | None = None) -> Launch:
    return Launch(
        rank=0,
        world_size=world_size,
        local_rank=0,
        local_world_size=local_world_size or world_size,
        master_addr="localhost",
        restart=0,
    )


def test_a_program_that_is_asked_for_two_ranks_starts_itself_under_torchrun_with_the_same_arguments():
    argv = ["train.py", "--config", "a b.toml", "--distributed.ranks", "2"]
    command = choose_relaunch(config_of(ranks=2), {}, argv)
    assert command is not None
    assert command[:3] == [sys.executable, "-m", "torch.distributed.run"]
    assert {"--nproc-per-node=2", "--max-restarts=0"} <= set(command)
    assert command[-len(argv) :] == argv


def test_one_rank_and_a_rank_that_a_launcher_started_stay_what_they_are():
    assert choose_relaunch(config_of(ranks=1), {}, ["train.py"]) is None
    assert choose_relaunch(config_of(ranks=2), {"WORLD_SIZE": "2"}, ["train.py"]) is None


def test_a_launcher_that_started_another_number_is_refused_with_both_numbers():
    with pytest.raises(
        ConfigError,
        match=r"distributed.ranks=4, but the launcher has started 2 on this machine.*--nproc-per-node=4",
    ):
        check_ranks(config_of(ranks=4), launch_of(2))


def test_what_only_ranks_do_is_refused_to_a_process_that_trains_alone():
    config = RunConfig(distributed=DistributedConfig(cpu_offload=True))
    check_ranks(config, launch_of(2))
    with pytest.raises(ConfigError, match=r"distributed\.cpu_offload=true, but one process trains alone"):
        check_ranks(config, launch_of(1))


async def test_offloading_to_host_memory_is_refused_to_ranks_on_cpus():
    from rollouts.backends.fsdp import open_fsdp_backend
    from rollouts.ranks.channel import NoOtherRanks
    from tests.distributed.one_rank import open_one_rank

    async with open_one_rank("cpu") as ranks:
        with pytest.raises(ConfigError, match=r"distributed\.cpu_offload=true, but the ranks train on CPUs"):
            async with open_fsdp_backend(
                Path(),
                channel=NoOtherRanks(),
                ranks=ranks,
                optim=OptimConfig(),
                total_steps=1,
                cpu_offload=True,
            ):
                pass


@pytest.mark.parametrize("shard_size", [4, 12])
def test_groups_that_do_not_divide_the_ranks_are_refused_naming_those_that_do(shard_size: int):
    with pytest.raises(
        ConfigError,
        match=rf"distributed.shard_size={shard_size} does not divide the 6 ranks .* use 1 or 2 or 3 or 6",
    ):
        check_ranks(config_of(shard_size=shard_size), launch_of(6))
    for fits in (0, 3, 6):
        check_ranks(config_of(shard_size=fits), launch_of(6))
    check_ranks(config_of(ranks=4, shard_size=2), launch_of(1), dry_run=True)


# --- every rank has the same config -------------------------------------------------------------------------


def test_a_rank_with_another_config_is_refused_naming_the_setting_and_both_values():
    with pytest.raises(
        ConfigError, match=r"model.threads: 2 here, 1 on rank 0; start all ranks with the same config"
    ):
        check_same_config(
            RunConfig(model=ModelConfig(threads=2)),
            dump_config(RunConfig(model=ModelConfig(threads=1))),
            whose="rank 0",
        )


def test_a_table_that_only_one_rank_has_is_a_difference(tmp_path: Path):
    path = tmp_path / "run.toml"
    path.write_text('[sft]\nsteps = 3\ndata = { kind = "jsonl", path = "sft.jsonl" }\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"sft\..* unset here, .* on rank 0"):
        check_same_config(RunConfig(), dump_config(load_config(path)), whose="rank 0")


def test_a_run_may_go_on_with_another_number_of_ranks_but_not_with_another_seed():
    for deterministic in (False, True):
        check_same_run(
            RunConfig(deterministic=deterministic),
            RunConfig(deterministic=deterministic, distributed=DistributedConfig(ranks=2)),
        )
    with pytest.raises(Exception, match="seed"):
        check_same_run(RunConfig(), RunConfig(seed=1, engine=EngineConfig()))
