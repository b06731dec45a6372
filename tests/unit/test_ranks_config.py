"""Which ranks a config may ask for, and when the program starts itself again under torchrun."""

import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from rollouts.backends.fsdp import open_fsdp_backend
from rollouts.config.load import check_same_config, dump_config, load_config
from rollouts.config.model import ModelConfig
from rollouts.config.schema import RunConfig
from rollouts.config.tables import DistributedConfig, OptimConfig
from rollouts.errors import ConfigError
from rollouts.ranks.channel import NoOtherRanks
from rollouts.ranks.launch import Launch, check_ranks, choose_relaunch
from tests.distributed.one_rank import open_one_rank
from tests.support.text_tables import cases


def config_of(**settings):
    return RunConfig(distributed=DistributedConfig(**settings))


def launch_of(world_size):
    return Launch(0, world_size, 0, world_size, "localhost", restart=0)


def test_only_a_program_that_is_asked_for_ranks_starts_itself_under_torchrun_with_the_same_arguments():
    argv = ["train.py", "--config", "a b.toml", "--distributed.ranks", "2"]
    command = choose_relaunch(config_of(ranks=2), {}, argv)
    assert command[:3] == [sys.executable, "-m", "torch.distributed.run"]
    assert {"--nproc-per-node=2", "--max-restarts=0"} <= set(command)
    assert command[-len(argv) :] == argv
    assert choose_relaunch(config_of(ranks=1), {}, argv) is None
    assert choose_relaunch(config_of(ranks=2), {"WORLD_SIZE": "2"}, argv) is None


# settings | ranks that were started | what is said; nothing where it fits
@cases("""
setting         | world_size | said
ranks=4         | 2 | distributed.ranks=4, but the launcher has started 2 on this machine.*--nproc-per-node=4
cpu_offload=1   | 1 | distributed.cpu_offload=true, but one process trains alone
cpu_offload=1   | 2 |
shard_size=4    | 6 | distributed.shard_size=4 does not divide the 6 ranks .* use 1 or 2 or 3 or 6
shard_size=12   | 6 | distributed.shard_size=12 does not divide the 6 ranks
shard_size=0    | 6 |
shard_size=3    | 6 |
""")
def test_ranks_that_do_not_fit_are_refused_with_both_numbers(setting, world_size: int, said):
    name, _, number = setting.partition("=")
    value = True if name == "cpu_offload" else int(number)
    with pytest.raises(ConfigError, match=said) if said else nullcontext():
        check_ranks(config_of(**{name: value}), launch_of(world_size))
    check_ranks(config_of(ranks=4, shard_size=2), launch_of(1), dry_run=True)


async def test_offloading_to_host_memory_is_refused_to_ranks_on_cpus():
    options = {"channel": NoOtherRanks(), "optim": OptimConfig(), "total_steps": 1, "cpu_offload": True}
    async with open_one_rank("cpu") as ranks:
        with pytest.raises(ConfigError, match=r"distributed\.cpu_offload=true, but the ranks train on CPUs"):
            async with open_fsdp_backend(Path(), ranks=ranks, **options):
                pass


# --- every rank has the same config -------------------------------------------------------------------------

SFT = """
sft = { steps = 3, data = { kind = "jsonl", path = "sft.jsonl" } }
"""


@cases("theirs, said", [("model.threads = 1", "model.threads: 2 here, 1 on"), (SFT, r"sft\..* unset here, ")])
def test_a_rank_with_another_config_is_refused_naming_the_setting_and_both_values(tmp_path, theirs, said):
    (tmp_path / "run.toml").write_text(theirs)
    ours = RunConfig(model=ModelConfig(threads=2)) if "model" in theirs else RunConfig()
    dumped = dump_config(load_config(tmp_path / "run.toml"))
    with pytest.raises(ConfigError, match=f"{said}.* rank 0; start all ranks with the same config"):
        check_same_config(ours, dumped)
