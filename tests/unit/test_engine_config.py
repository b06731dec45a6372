"""Servers as a config describes them: what is refused before anything starts, and what they are told."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rollouts.config.tables import EngineConfig
from rollouts.engines.open import find_server_python
from rollouts.errors import ConfigError
from rollouts.weight_sync.sync import choose_tolerance, find_served_dtype, make_metric_name
from tests.support.text_tables import cases


@pytest.fixture
def elsewhere(tmp_path, monkeypatch) -> Path:
    """A working directory without any server's environment."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@cases("""
settings                                         | rule
urls = ["http://127.0.0.1:8101"]                 | kind='local' starts no server
count = 2                                        | kind='local' starts no server
kind = "vllm", urls = ["http://a"], count = 2    | count is for servers that this run starts
kind = "vllm", urls = ["http://a", "http://a"]   | 'http://a' is named twice; leave one out
kind = "sglang", urls = ["127.0.0.1:30000"]      | String should match pattern .*https
""")
def test_settings_that_contradict_each_other_are_refused(settings: dict, rule):
    with pytest.raises(ValueError, match=rule):
        EngineConfig(**settings)


def test_a_missing_environment_is_refused_with_the_command_that_makes_it(elsewhere):
    with pytest.raises(
        ConfigError, match=r"\.venv-sglang/bin/python does not exist.*rollouts engines install-sglang-cpu"
    ):
        find_server_python(EngineConfig(kind="sglang"))
    with pytest.raises(ConfigError, match=r"engine\.python='nowhere' is no program"):
        find_server_python(EngineConfig(kind="vllm", python="nowhere"))


def test_an_environment_beside_the_run_is_found_and_a_named_one_comes_first(elsewhere):
    beside = elsewhere / ".venv-vllm" / "bin" / "python"
    beside.parent.mkdir(parents=True)
    beside.symlink_to(sys.executable)
    assert find_server_python(EngineConfig(kind="vllm")) == beside, (
        "by the name of its link, or it would not be that environment"
    )
    assert find_server_python(EngineConfig(kind="vllm", python=sys.executable)) == Path(sys.executable)


@cases("""
stored   | setting | served
bfloat16 | auto    | "bfloat16"
float32  | auto    | null
         | auto    | null
bfloat16 | float32 | "float32"
""")
def test_weights_are_written_as_the_servers_compute(tmp_path, stored, setting, served: Any):
    (tmp_path / "config.json").write_text(json.dumps({"dtype": stored} if stored else {}))
    found = find_served_dtype(EngineConfig(kind="vllm", args=["--dtype", setting]), tmp_path)
    assert found == (served and getattr(torch, served))


def test_sixteen_bits_on_either_side_widen_the_tolerance():
    assert choose_tolerance(exact=True) == 1e-3
    assert choose_tolerance(exact=False) == 0.2


def test_statistics_of_a_fleet_have_names_that_metrics_may_have():
    assert make_metric_name("engine/vllm-127.0.0.1:8101/state") == "engine/vllm_127_0_0_1_8101/state"
    assert make_metric_name("fleet/failures/EngineUnreachable") == "fleet/failures/engine_unreachable"
