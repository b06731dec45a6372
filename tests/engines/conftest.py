"""Real servers for the tests marked `engines`: each is started once, serves a tiny model of random weights, and ends with the tests."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers

from rollouts.models.load import resolve_model

ROOT = Path(__file__).parents[2]
START_S = 400.0
CONTEXT_LENGTH = 1024
VOCAB_SIZE = 259  # of the byte tokenizer


@dataclass(frozen=True, slots=True)
class RunningServer:
    url: str
    api_key: str
    log: Path


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """The Python of an environment that has vLLM; the test is skipped where there is none."""
    named = os.environ.get("ROLLOUTS_VLLM_PYTHON", "")
    path = Path(named) if named else ROOT / ".venv-vllm" / "bin" / "python"
    if not path.exists():
        if named:
            pytest.fail(f"ROLLOUTS_VLLM_PYTHON={named} does not exist")
        pytest.skip(f"no vLLM: {path} does not exist and ROLLOUTS_VLLM_PYTHON, a Python that has it, is not set")
    return path


@pytest.fixture(scope="session")
def snapshots(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models of one shape and different weights, with a tokenizer: the first is what servers are started with.

    Heads of 32, below which the servers' CPU kernels do not go, and weights large enough for log-probs that tell one token from another.
    """
    tokenizer = resolve_model("tiny:llama", seed=0)
    paths = []
    for seed in (1, 2):
        path = tmp_path_factory.mktemp("snapshots") / f"seed{seed}"
        torch.manual_seed(seed)
        config = transformers.LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            max_position_embeddings=2048,
            initializer_range=0.2,
            tie_word_embeddings=False,
            bos_token_id=257,
            eos_token_id=258,
            pad_token_id=256,
        )
        transformers.LlamaForCausalLM(config).save_pretrained(path)
        for file in tokenizer.iterdir():
            if "token" in file.name or file.suffix == ".jinja":
                shutil.copy(file, path / file.name)
        paths.append(path)
    return paths[0], paths[1]


@contextlib.contextmanager
def run_server(command: Sequence[str], *, port: int, environment: dict[str, str], api_key: str, log: Path) -> Iterator[RunningServer]:
    """A server that answers GET /health, in a process group of its own that is killed in the end."""
    env = os.environ | {"PYTHONDONTWRITEBYTECODE": ""} | environment
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=env, start_new_session=True)
    try:
        _wait_healthy(process, port, log)
        yield RunningServer(f"http://127.0.0.1:{port}", api_key, log)
    finally:
        process.send_signal(signal.SIGTERM)  # its children end with it; what does not is killed
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_healthy(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as reply:
            if reply.status == 200:
                return
        if process.poll() is not None or time.monotonic() > deadline:
            tail = log.read_text(errors="replace")[-2000:]
            pytest.fail(f"the server did not come up (exit status {process.returncode}); its log ends with:\n{tail}")
        time.sleep(0.5)


def find_free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextlib.contextmanager
def run_vllm(python: Path, model: Path, log: Path, *flags: str, dev_mode: bool = True) -> Iterator[RunningServer]:
    """A vLLM server on a CPU."""
    port, api_key = find_free_port(), secrets.token_hex(16)
    command = [
        str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1", "--port", str(port),
        "--served-model-name", "policy", "--max-model-len", str(CONTEXT_LENGTH), "--dtype", "float32", "--enforce-eager", *flags,
    ]  # fmt: skip
    environment = {
        "VLLM_SERVER_DEV_MODE": str(int(dev_mode)),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_API_KEY": api_key,
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    with run_server(command, port=port, environment=environment, api_key=api_key, log=log) as server:
        yield server


@pytest.fixture(scope="session")
def vllm_server(vllm_python: Path, snapshots: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A vLLM server with the settings that training needs."""
    log = tmp_path_factory.mktemp("vllm") / "server.log"
    with run_vllm(vllm_python, snapshots[0], log, "--logprobs-mode", "processed_logprobs", "--enable-scale-out") as server:
        yield server
