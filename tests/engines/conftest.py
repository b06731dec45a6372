"""Real servers for the tests marked `engines`: each is started once, serves a tiny model of random weights,
and ends with the tests.
"""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
import torch
import transformers

from rollouts.engines.processes import (
    HEALTH_PATHS,
    EngineCommand,
    find_free_port,
    make_arguments,
    make_environment,
)
from rollouts.engines.sglang import open_sglang_engine
from rollouts.engines.vllm import open_vllm_engine
from rollouts.models.load import resolve_model

ROOT = Path(__file__).parents[2]
START_S = 400.0
CONTEXT_LENGTH = 2048
VOCAB_SIZE = 259  # of the byte tokenizer

ARGS = {
    "vllm": f"--dtype float32 --max-model-len {CONTEXT_LENGTH}",
    # Its log names each request, which tests count.
    "sglang": f"--dtype float32 --context-length {CONTEXT_LENGTH} --max-running-requests 32"
    " --log-level-http info",
}
Kind = Literal["vllm", "sglang"]
Snapshots = tuple[Path, Path]


@dataclass(frozen=True, slots=True)
class RunningServer:
    kind: Kind
    url: str
    api_key: str
    log: Path
    pid: int  # of its process group too


def open_engine(server, **changes):
    opened = open_vllm_engine if server.kind == "vllm" else open_sglang_engine
    return opened(server.url, **({"api_key": server.api_key, "vocab_size": VOCAB_SIZE} | changes))


def find_python(kind):
    """The Python of an environment that has such a server; the test is skipped where there is none."""
    variable = f"ROLLOUTS_{kind.upper()}_PYTHON"
    named = os.environ.get(variable)
    path = Path(named or ROOT / f".venv-{kind}/bin/python")
    if not path.exists():
        fail_or_skip = pytest.fail if named else pytest.skip
        fail_or_skip(f"no {kind}: {path} does not exist; {variable} names a Python that has it")
    return path


@pytest.fixture(scope="session")
def snapshots(tmp_path_factory):
    """Two models of one shape and different weights, with a tokenizer: the first is what servers are started
    with. The weights are large enough for log-probs that tell one token from another.
    """
    first, second = (tmp_path_factory.mktemp("snapshots") / f"seed{seed}" for seed in (1, 2))
    save_random_model(first, seed=1, std=0.2)
    save_random_model(second, seed=2, std=0.2)
    return first, second


def save_random_model(path, *, seed, std):
    """A Llama over bytes whose weights have this deviation. Heads of 32, below which the servers' CPU kernels
    do not go.
    """
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=4096,
        initializer_range=std,
        tie_word_embeddings=False,
        bos_token_id=257,
        eos_token_id=258,
        pad_token_id=256,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    for file in resolve_model("tiny:llama").iterdir():
        if "token" in file.name or file.suffix == ".jinja":
            shutil.copy(file, path / file.name)


@contextlib.contextmanager
def run_server(kind, model, folder, *flags, lora=None, **environment):
    """A server on a CPU, in a process group that is killed in the end. Its log and key are in `folder`."""
    port, api_key = find_free_port(), secrets.token_hex(16)
    keys, log = folder / "keys.yaml", folder / "server.log"
    keys.touch(mode=0o600)
    keys.write_text(f'api-key: "{api_key}"\n')
    command = EngineCommand(kind, find_python(kind), model, (*ARGS[kind].split(), *flags), lora)
    words = make_arguments(command, port=port, key_file=keys)
    env = make_environment(command, os.environ, threads=1) | {"HF_HUB_OFFLINE": "1"}
    env |= {"VLLM_API_KEY": api_key, "VLLM_NO_USAGE_STATS": "1"} | environment
    with log.open("wb") as output:
        process = subprocess.Popen(
            words, stdout=output, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_ready(process, url + HEALTH_PATHS[kind], log)
        yield RunningServer(kind, url, api_key, log, process.pid)
    finally:
        process.send_signal(signal.SIGTERM)  # its children end with it; what does not is killed
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_ready(process, url, log):
    deadline = time.monotonic() + START_S
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as reply:
            if reply.status == 200:
                return
        if process.poll() is not None or time.monotonic() > deadline:
            tail = log.read_text(errors="replace")[-2000:]
            pytest.fail(
                f"the server did not come up (exit status {process.returncode}); its log ends with:\n{tail}"
            )
        time.sleep(0.5)


@pytest.fixture(scope="session")
def vllm_server(snapshots, tmp_path_factory):
    with run_server("vllm", snapshots[0], tmp_path_factory.mktemp("vllm")) as server:
        yield server


@pytest.fixture(scope="session")
def sglang_server(snapshots, tmp_path_factory):
    with run_server("sglang", snapshots[0], tmp_path_factory.mktemp("sglang")) as server:
        yield server


@pytest.fixture(params=["vllm", "sglang"])
def server(request):
    return request.getfixturevalue(f"{request.param}_server")
