"""Environments for servers: what is installed in which order, when nothing is, and what the packaged files
hold.
"""

import importlib.metadata
import sys
from pathlib import Path

import pytest

from rollouts.engines import environments
from rollouts.engines.environments import FILES, STAMP, install_cpu_environment, run_command
from rollouts.errors import ConfigError, EngineSetupError
from tests.support.text_tables import cases
from tests.unit.run_rows import read_command

PACKAGES = "lib/python3.11/site-packages"


class Recorder:
    """Stands for running commands: keeps them, makes what `venv` would, and fails where told. Calling
    install() installs into `into`.
    """

    def __init__(self, into: Path, monkeypatch: pytest.MonkeyPatch):
        self.into = into
        self.fails_at = "nothing"
        self.commands: list[str] = []
        monkeypatch.setattr(environments, "run_command", self.run)

    def run(self, *argv: str):
        line = " ".join(argv)
        self.commands.append(line)
        if self.fails_at in line:
            raise EngineSetupError(f"`{line}` failed")
        if "-m venv" in line:
            for folder in ("bin", PACKAGES):
                (self.into / folder).mkdir(parents=True)
            (self.into / "bin" / "python").touch()
            (self.into / "pyvenv.cfg").touch()

    def install(self, kind: str = "vllm") -> list[str]:
        """What it said; `commands` are those of this installation."""
        said = []
        self.commands.clear()
        install_cpu_environment(kind, self.into, say=said.append)
        return said


@pytest.fixture
def env(tmp_path, monkeypatch) -> Recorder:
    return Recorder(tmp_path / "env", monkeypatch)


def test_vllm_is_installed_after_torch_and_without_what_it_would_drag_in(env):
    python = env.into / "bin" / "python"
    assert env.install()[-1].endswith(f'engine.python = "{python}"')
    pip = f"{python} -m pip install --quiet --no-compile"
    assert env.commands == [
        f"{sys.executable} -m venv {env.into}",
        f"{pip} torch==2.13.0",
        f"{pip} --no-deps -r {FILES / 'vllm' / 'requirements.txt'}",
        f"{python} -W ignore -c import vllm.entrypoints.openai.api_server",
    ]


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
    assert len(env.commands) == 3, "all but making it"


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
    names = {line.partition("==")[0] for line in lines}
    assert "torch" not in names, "it is installed first, as this machine builds it"
    assert not any(name.startswith("nvidia-c") for name in names), "nothing of CUDA"
    assert not names & {"torchaudio", "torchcodec"}
    env.install(kind)
    found = importlib.metadata.distributions(path=[str(env.into / PACKAGES)])
    points = {(point.group, point.value) for one in found for point in one.entry_points}
    assert points == {(group, f"{module}:activate")}
    assert (env.into / PACKAGES / module / "__init__.py").exists()
