"""A real SGLang server for the tests marked `engines`: started once, ended with the tests. Import the fixtures where they are used."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from .conftest import CONTEXT_LENGTH, ROOT, START_S, find_free_port


@dataclass(frozen=True, slots=True)
class SGLangServer:
    url: str
    api_key: str
    admin_key: str  # the api_key, unless it was started with another one
    log: Path
    pid: int  # of its process group too


SHARED = pytest.StashKey[SGLangServer]()


@pytest.fixture(scope="session")
def sglang_python() -> Path:
    """The Python of an environment that has SGLang; the test is skipped where there is none."""
    named = os.environ.get("ROLLOUTS_SGLANG_PYTHON", "")
    path = Path(named) if named else ROOT / ".venv-sglang" / "bin" / "python"
    if not path.exists():
        if named:
            pytest.fail(f"ROLLOUTS_SGLANG_PYTHON={named} does not exist")
        pytest.skip(f"no SGLang: {path} does not exist and ROLLOUTS_SGLANG_PYTHON, a Python that has it, is not set")
    return path


@contextlib.contextmanager
def run_sglang(
    python: Path, model: Path, folder: Path, *flags: str, admin_key: str = "", environment: dict[str, str] | None = None
) -> Iterator[SGLangServer]:
    """A server on a CPU in a process group of its own, which is killed in the end. Its keys are in a file that only we can read."""
    port, api_key = find_free_port(), secrets.token_hex(16)
    keys, log = folder / "keys.yaml", folder / "server.log"
    keys.touch(mode=0o600)
    keys.write_text(f'api-key: "{api_key}"\n' + (f'admin-api-key: "{admin_key}"\n' if admin_key else ""))
    command = [
        str(python), "-m", "sglang.launch_server", "--model-path", str(model), "--host", "127.0.0.1", "--port", str(port), "--device", "cpu",
        "--attention-backend", "torch_native", "--dtype", "float32", "--context-length", str(CONTEXT_LENGTH), "--max-total-tokens", "16384",
        "--max-running-requests", "32", "--sleep-on-idle", "--config", str(keys), *flags,
    ]  # fmt: skip
    settings = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""} | (environment or {})
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | settings, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_ready(process, url, log)
        yield SGLangServer(url, api_key, admin_key or api_key, log, process.pid)
    finally:
        process.send_signal(signal.SIGTERM)  # its children end with it; what does not is killed
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/ready", timeout=5) as reply:
            if reply.status == 200:
                return
        if process.poll() is not None or time.monotonic() > deadline:
            tail = log.read_text(errors="replace")[-2000:]
            pytest.fail(f"the server did not come up (exit status {process.returncode}); its log ends with:\n{tail}")
        time.sleep(0.5)


@pytest.fixture(scope="session")
def sglang_server(
    sglang_python: Path, snapshots: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> SGLangServer:
    """One server for all files: pytest keeps a fixture that several of them import once for each."""
    if SHARED not in pytestconfig.stash:
        stack = contextlib.ExitStack()
        pytestconfig.add_cleanup(stack.close)
        pytestconfig.stash[SHARED] = stack.enter_context(run_sglang(sglang_python, snapshots[0], tmp_path_factory.mktemp("sglang")))
    return pytestconfig.stash[SHARED]
