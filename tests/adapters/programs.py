"""Programs of other Pythons that the tests of adapters run, which `make test-adapters` installs."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FOLDER = Path(__file__).parent
OPENENV, VERIFIERS = (FOLDER.parents[1] / f".venv-{name}/bin/python" for name in ("openenv", "verifiers"))


@contextmanager
def run_server(python: Path | str, file: str) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """A program of this folder that ends with the block, and the port that it prints."""
    with subprocess.Popen([python, FOLDER / file], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline()), process
        finally:
            process.kill()
