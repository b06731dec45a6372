"""Python environments of their own for vLLM and SGLang on a CPU, for they pin another transformers, and
SGLang another torch, than the trainer.

Each holds exactly the packages of a list that ships with this package, and a plugin of ours:
environment_files/KIND/{requirements.txt,site-packages}. vLLM's lets a tied head follow weight updates,
SGLang's lets it compute with plain PyTorch. On a machine with a GPU install vLLM or SGLang as their own
manuals say, and name that Python in `engine.python`.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Literal

from rollouts.errors import ConfigError, EngineSetupError
from rollouts.protocols import Say

FILES = Path(__file__).with_name("environment_files")
TORCH = "torch==2.13.0"
PROOFS = {"vllm": "vllm.entrypoints.openai.api_server", "sglang": "sglang.srt.entrypoints.http_server"}
STAMP = ".rollouts-complete"  # holds the hash of what was installed; written last
SHOWN_LINES = 15  # of a failed command's output


def install_cpu_environment(kind: Literal["vllm", "sglang"], into: Path, *, say: Say = print) -> Path:
    """The Python of an environment in directory `into` that serves with vLLM or SGLang on a CPU. One that is
    complete is left alone.

    A list that has changed since installs again over it. torch comes from wherever pip is set up to find it;
    a build for CUDA works as well, it is only larger. Needs 3 to 4 GB of disk. Raises ConfigError for a
    directory that holds something else, EngineSetupError if a step fails.
    """
    files, python, stamp = FILES / kind, into / "bin" / "python", into / STAMP
    installed = [TORCH.encode(), *(path.read_bytes() for path in sorted(files.rglob("*")) if path.is_file())]
    wanted = hashlib.sha256(b"\0".join(installed)).hexdigest()
    if python.exists() and stamp.exists() and stamp.read_text() == wanted:
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
        run_command(sys.executable, "-m", "venv", str(into))
    for what in ([TORCH], ["--no-deps", "-r", str(files / "requirements.txt")]):
        say(f"installing {what[-1]}")
        run_command(str(python), "-m", "pip", "install", "--quiet", "--no-compile", *what)
    (packages,) = into.glob("lib/python*/site-packages")
    # our modules are text here: nothing can import what they import
    shutil.copytree(
        files / "site-packages",
        packages,
        copy_function=lambda source, target: shutil.copyfile(source, target.replace(".py.txt", ".py")),
        dirs_exist_ok=True,
    )
    say(f"trying `import {PROOFS[kind]}`; the first time compiles it and takes a minute")
    run_command(str(python), "-W", "ignore", "-c", f"import {PROOFS[kind]}")
    stamp.write_text(wanted)
    say(f'{into} is complete: engine.python = "{python}"')
    return python


def run_command(*argv: str) -> None:
    """Waits for a command. Raises EngineSetupError with the end of what it said if it fails."""
    # the trial import compiles what servers import, or each of their starts would take minutes
    try:
        subprocess.check_output(
            argv,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": ""},
        )
    except subprocess.CalledProcessError as error:
        said = "\n".join(error.output.splitlines()[-SHOWN_LINES:])
        raise EngineSetupError(
            f"`{' '.join(argv)}` failed with exit code {error.returncode}; once its reason is gone, run the"
            f" same again\n{said}"
        ) from error
