"""Python environments of their own for vLLM and SGLang on a CPU, for they pin another transformers, and
SGLang another torch, than the trainer.

Each holds exactly the packages of a list that ships with this package (environment_files/). On a machine with
a GPU install vLLM or SGLang as their own manuals say, and name that Python in `engine.python`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rollouts.errors import ConfigError, EngineSetupError

FILES = Path(__file__).with_name("environment_files")
TORCH = "torch==2.13.0"
STAMP = ".rollouts-complete"  # holds the hash of what was installed; written last
SHOWN_LINES = 15  # of a failed command's output


@dataclass(frozen=True, slots=True)
class Recipe:
    """What an environment consists of, besides torch."""

    requirements: Path  # every package with its version
    unwanted: tuple[str, ...]  # builds for CUDA that break imports where torch is for the CPU
    proof: str  # an import that fails if something is missing
    plugin: str  # a module of ours, a folder of environment_files
    group: str  # of entry points, by which the server loads the plugin
    why: str  # what the plugin lets the server do

    @property
    def entry_points(self) -> str:
        return f"[{self.group}]\n{self.plugin} = {self.plugin}:activate\n"


RECIPES: Mapping[str, Recipe] = {
    "vllm": Recipe(
        FILES / "vllm_cpu.txt",
        ("torchvision", "torchaudio", "torchcodec"),
        "vllm.entrypoints.openai.api_server",
        "vllm_live_head",
        "vllm.general_plugins",
        "lets a tied head follow weight updates",
    ),
    "sglang": Recipe(
        FILES / "sglang_cpu.txt",
        ("torchaudio", "torchcodec"),
        "sglang.srt.entrypoints.http_server",
        "sglang_torch_cpu",
        "sglang.srt.platforms",
        "lets SGLang compute with plain PyTorch",
    ),
}


def install_cpu_environment(
    kind: Literal["vllm", "sglang"], into: Path, *, say: Callable[[str], None] = print
) -> Path:
    """The Python of an environment in directory `into` that serves with vLLM or SGLang on a CPU. One that is
    complete is left alone.

    A list that has changed since installs again over it. torch comes from wherever pip is set up to find it;
    a build for CUDA works as well, it is only larger. Needs 3 to 4 GB of disk. Raises ConfigError for a
    directory that holds something else, EngineSetupError if a step fails.
    """
    recipe = RECIPES[kind]
    python, stamp, wanted = into / "bin" / "python", into / STAMP, compute_fingerprint(recipe)
    if python.exists() and stamp.exists() and stamp.read_text().strip() == wanted:
        say(f"{into} is complete; nothing to do")
        return python
    if into.exists() and not (into.is_dir() and ((into / "pyvenv.cfg").exists() or not any(into.iterdir()))):
        raise ConfigError(
            f"--into {into} holds something that is no Python environment; name a directory that is new or"
            " empty"
        )
    stamp.unlink(missing_ok=True)
    if not python.exists():
        say(f"making an environment in {into}")
        run_command([sys.executable, "-m", "venv", str(into)])
    say(f"installing {TORCH}")
    run_command(
        [str(python), "-m", "pip", "install", "--quiet", "--no-compile", TORCH]
    )  # pip, because it obeys this machine's choice of a build
    say(f"installing the packages of {recipe.requirements}")
    install_packages(python, ["-r", str(recipe.requirements)], say=say)
    say(f"installing the plugin that {recipe.why}")
    write_plugin(recipe, into)
    present = [
        name for name in recipe.unwanted if any(into.glob(f"lib/python*/site-packages/{name}-*.dist-info"))
    ]
    if present:
        say(f"removing {', '.join(present)}")
        run_command([str(python), "-m", "pip", "uninstall", "--quiet", "--yes", *present])
    say(f"trying `import {recipe.proof}`; the first time compiles it and takes a minute")
    run_command([str(python), "-W", "ignore", "-c", f"import {recipe.proof}"])
    stamp.write_text(wanted + "\n")
    say(f'{into} is complete: engine.python = "{python}"')
    return python


def install_packages(python: Path, what: Sequence[str], *, say: Callable[[str], None]) -> None:
    """Installed without their requirements; by uv, many times faster, if there is one and it can reach the
    packages, otherwise by pip.
    """
    uv = find_uv()
    if uv is not None:
        try:
            return run_command(
                [str(uv), "pip", "install", "--quiet", "--python", str(python), "--no-deps", *what]
            )
        except EngineSetupError as error:
            say(f"uv could not; trying pip ({str(error).splitlines()[0]})")
    return run_command([str(python), "-m", "pip", "install", "--quiet", "--no-compile", "--no-deps", *what])


def find_uv() -> Path | None:
    """The uv beside this Python, or on the path."""
    beside = Path(sys.executable).with_name("uv")
    found = str(beside) if beside.exists() else shutil.which("uv")
    return None if found is None else Path(found)


def run_command(argv: Sequence[str]) -> None:
    """Waits for a command. Raises EngineSetupError with the end of what it said if it fails."""
    env = {
        **os.environ,
        "PYTHONDONTWRITEBYTECODE": "",
    }  # the trial import compiles what servers import, or each of their starts would take minutes
    done = subprocess.run(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
        env=env,
    )
    if done.returncode:
        said = "\n".join(done.stdout.splitlines()[-SHOWN_LINES:])
        raise EngineSetupError(
            f"`{' '.join(argv)}` failed with exit code {done.returncode}; once its reason is gone, run the"
            f" same again\n{said}"
        )


def compute_fingerprint(recipe: Recipe) -> str:
    """Changes with anything that is installed: torch, the list, the plugin."""
    parts = [
        TORCH.encode(),
        recipe.requirements.read_bytes(),
        recipe.entry_points.encode(),
        *read_plugin(recipe).values(),
    ]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def read_plugin(recipe: Recipe) -> dict[str, bytes]:
    """The plugin's modules by their path in an environment. Here they are text: nothing here can import
    what they import.
    """
    return {
        f"{recipe.plugin}/{path.stem}": path.read_bytes()
        for path in sorted((FILES / recipe.plugin).glob("*.py.txt"))
    }


def write_plugin(recipe: Recipe, into: Path) -> Path:
    """Where the plugin's modules and its entry point lie now: what an installer would leave."""
    packages = next(into.glob("lib/python*/site-packages"))
    for before in packages.glob(f"{recipe.plugin}-*.dist-info"):
        shutil.rmtree(before)
    info = f"{recipe.plugin}-1.0.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {recipe.plugin.replace('_', '-')}\nVersion: 1.0\n"
    texts = {f"{info}/METADATA": metadata, f"{info}/entry_points.txt": recipe.entry_points}
    contents = {name: text.encode() for name, text in texts.items()} | read_plugin(recipe)
    for name, content in contents.items():
        (packages / name).parent.mkdir(exist_ok=True)
        (packages / name).write_bytes(content)
    return packages
