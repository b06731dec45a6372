"""Inference servers that this process starts, watches, restarts and never leaves behind.

    open_engine_processes ──► vLLM or SGLang on 127.0.0.1, each with a port and a key of this run
        ready: the health path answers, our key is accepted, no key is not
        wait_exited(): why a server ended · restart(): the same port and key again
    leaving the context, or the end of this process by any signal: nothing of a server is left

The key never stands in a command line. vLLM reads it from its environment; SGLang only from flags or a YAML
file, so it gets a file that its owner alone may read and that is gone once the server is up. SGLang also
prints it into its log: logs are readable by their owner only, and it is blotted out in messages.
"""

from __future__ import annotations

import os
import secrets
import socket
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import trio

from rollouts.engines.http import open_http_client
from rollouts.errors import ConfigError, EngineSetupError, InfrastructureError
from rollouts.processes.nurseries import run_all
from rollouts.processes.process import Process, open_process

MODULES = {"vllm": "vllm.entrypoints.openai.api_server", "sglang": "sglang.launch_server"}
HEALTH_PATHS = {"vllm": "/health", "sglang": "/ready"}  # SGLang's /health generates a token, for a second
KEYED_PATH = "/v1/models"  # answered by both at once, and only with the key
SERVED_NAME = "policy"
HOST = "127.0.0.1"
ASK_S = (0.05, 0.5)  # between two questions whether a server is up: at first, and later
ANSWER_S = 10.0  # for one such answer
START_S = 600.0  # for a server to be ready
STOP_S = 10.0  # for one to end by itself
TAIL_LINES = 20  # of a server's log in messages
# The trainer's own: a server that finds torchrun's variables believes to be one of its ranks, and another
# environment's modules break it.
NOT_INHERITED = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK"),
    *("ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "VLLM_API_KEY"),
)
Flags = dict[str, str | None]  # names and values; None for a switch


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """What to start, without what differs between servers: port, key, share of the machine."""

    kind: Literal["vllm", "sglang"]
    python: Path  # the Python that has vLLM or SGLang installed
    model: Path  # a Hugging Face model directory
    args: tuple[str, ...] = ()  # the user's own flags, appended last


class EngineProcess:
    """One server: its address, and what happens to its process. Made by open_engine_processes."""

    def __init__(
        self, name: str, command: EngineCommand, env: Mapping[str, str], log_path: Path, key_file: Path
    ) -> None:
        self.name = name
        self.log_path = log_path
        self.port = find_free_port()
        self.url = f"http://{HOST}:{self.port}"
        self.api_key = secrets.token_hex(32)
        self.starts = 0
        self.pid = 0  # of the server process that was started last; its workers are below it
        self._command = command
        self._env = env
        self._key_file = key_file
        self._process: Process | None = None  # the one that was started last
        self._life = AsyncExitStack()  # ends it

    async def wait_exited(self) -> str:
        """Why the server ended, with the last lines of its log; waits until nothing of it is left."""
        assert self._process is not None, "not started"
        process = self._process
        await process.wait_ended()
        return f"{self._describe_end(process)}\n{self._read_tail(process)}"

    async def stop(self) -> None:
        """Ends the server: SIGTERM, and after the grace SIGKILL for its whole tree. Not to be interrupted.
        Raises EngineError if it stays.
        """
        with trio.CancelScope(shield=True):
            if self._process is not None:
                self._process.terminate()
                with trio.move_on_after(STOP_S + 1.0):
                    await self._process.wait_ended()
            await self._life.aclose()

    async def restart(self) -> None:
        """Stops what is left and starts the server again on the same port with the same key; returns when it
        is ready. Raises EngineSetupError if it does not become ready.
        """
        await self.stop()
        env = dict(self._env)
        if self._command.kind == "vllm":
            env["VLLM_API_KEY"] = self.api_key
        else:
            self._key_file.touch(mode=0o600)
            self._key_file.write_text(f'api-key: "{self.api_key}"\n')
        self.starts += 1
        opening = open_process(
            make_arguments(self._command, port=self.port, key_file=self._key_file),
            env=env,
            log=self.log_path,
            headline=f"start {self.starts} of {self.name}",
            grace_s=STOP_S,
        )
        try:
            process = self._process = await self._life.enter_async_context(opening)
            await self._wait_ready(process)
        finally:
            self._key_file.unlink(missing_ok=True)

    async def _wait_ready(self, process: Process) -> None:
        state = "starting"
        with trio.move_on_after(START_S):
            async with trio.open_nursery() as nursery:

                async def notice_end() -> None:
                    await process.wait_ended()
                    nursery.cancel_scope.cancel()

                nursery.start_soon(notice_end)
                await process.wait_started()
                self.pid = process.pid
                # Nothing tells when a server is up, so it is asked again and again.
                pause_s, longest_s = ASK_S
                path = HEALTH_PATHS[self._command.kind]
                while (state := await ask_ready(self.url, self.api_key, health_path=path)) == "starting":
                    await trio.sleep(pause_s)
                    pause_s = min(2 * pause_s, longest_s)
                nursery.cancel_scope.cancel()
        if state == "ready" and not process.has_ended:
            return
        what = f"{self.name} was not ready after {START_S:g} s"
        if state == "foreign":
            what = f"another server answers at {self.url}; start again"
        elif process.has_ended:
            what = f"{self._describe_end(process)} before it was ready"
        raise EngineSetupError(
            f"{what}; what it said last is the reason, or set engine.python and engine.args otherwise\n"
            f"{self._read_tail(process)}"
        )

    def _describe_end(self, process: Process) -> str:
        return f"{self.name} (pid {process.pid}) {process.describe_end()}"

    def _read_tail(self, process: Process) -> str:
        """The last lines of this start's log and where it is, without the key."""
        lines = process.read_tail().replace(self.api_key, "<key>").splitlines()[-TAIL_LINES:]
        return "\n".join([f"last lines of {self.log_path}:", *lines])


@asynccontextmanager
async def open_engine_processes(
    command: EngineCommand, *, count: int, log_dir: Path
) -> AsyncIterator[tuple[EngineProcess, ...]]:
    """`count` servers that answer, each with a port, a key and a log (`log_dir/vllm-0.log`, appended to) of
    its own.

    All start at once and share the processor's cores. On leaving each has STOP_S to end by itself. Raises
    ConfigError for arguments that contradict what training needs, EngineSetupError with the end of the log
    when one does not get ready in START_S: the others are stopped then.
    """
    check_command(command)
    log_dir.mkdir(parents=True, exist_ok=True)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = None if runs_on_gpu(command) else max(1, cores // count)
    env = make_environment(command, os.environ, threads=threads)
    with tempfile.TemporaryDirectory(prefix="rollouts-engines-") as secret_dir:
        processes = [
            EngineProcess(name, command, env, log_dir / f"{name}.log", Path(secret_dir) / f"{name}.yaml")
            for name in (f"{command.kind}-{index}" for index in range(count))
        ]
        try:
            await run_all(*(process.restart for process in processes))
            yield tuple(processes)
        finally:
            with trio.CancelScope(shield=True):
                await run_all(*(process.stop for process in processes))


async def ask_ready(url: str, api_key: str, *, health_path: str) -> Literal["ready", "starting", "foreign"]:
    """Whether the server there is up, takes our key and takes nobody without it ("ready"), or is up and not
    ours ("foreign").
    """
    with trio.move_on_after(ANSWER_S), suppress(InfrastructureError):
        async with (
            open_http_client(url) as anybody,
            open_http_client(url, api_key=api_key) as we,
        ):
            if (await we.request("GET", health_path)).status_code == 200:
                with_key = (await we.request("GET", KEYED_PATH)).status_code
                without = (await anybody.request("GET", KEYED_PATH)).status_code
                if (with_key, without) == (200, 401):
                    return "ready"
                if with_key in (200, 401, 403):
                    return "foreign"
    return "starting"


def make_arguments(command: EngineCommand, *, port: int, key_file: Path) -> tuple[str, ...]:
    """The server's whole command line, without a secret in it."""
    fixed, defaults = list_flags(command)
    fixed["--port"] = str(port)
    if command.kind == "sglang":
        fixed["--config"] = str(key_file)
    own = dict(split_flags(command.args))
    flags = fixed | {name: value for name, value in defaults.items() if name not in own}
    words = [str(command.python), "-m", MODULES[command.kind]]
    for name, value in flags.items():
        words += [name] if value is None else [name, value]
    return (*words, *command.args)


def list_flags(command: EngineCommand) -> tuple[Flags, Flags]:
    """What a user may not change, but for port and key, and what a user's own flag replaces."""
    on_cpu = not runs_on_gpu(command)
    if command.kind == "vllm":
        fixed: Flags = {
            "--model": str(command.model),
            # of the distribution sampled from: after temperature and top-p
            "--logprobs-mode": "processed_logprobs",
            "--enable-scale-out": None,  # opens the endpoint for token ids
        }
        defaults: Flags = {"--disable-uvicorn-access-log": None}  # a line for every request otherwise
        if on_cpu:
            # with it, a request's seed ends a server on a CPU: see vllm.rewinds_generators
            defaults["--no-enable-chunked-prefill"] = None
            defaults["--enforce-eager"] = None  # compiling takes minutes on a few cores
    else:
        fixed, defaults = {"--model-path": str(command.model)}, {"--log-level-http": "warning"}
        if on_cpu:
            # it would spin on a core that others need, and size its cache by all of the machine's memory
            fixed |= {"--device": "cpu", "--sleep-on-idle": None}
            defaults |= {"--attention-backend": "torch_native", "--max-total-tokens": "16384"}
    return fixed | {"--host": HOST, "--served-model-name": SERVED_NAME}, defaults


def check_command(command: EngineCommand) -> None:
    """Raises ConfigError for a Python that is not there, and for a flag of the user's that contradicts one
    that is set here.
    """
    if not os.access(command.python, os.X_OK):
        install = f"python -m rollouts engines install-{command.kind}-cpu"
        raise ConfigError(
            f"engine.python={command.python} is not there or cannot be executed; `{install}` makes one for a"
            " CPU, or name another"
        )
    ours = ("--port", "--api-key", *(("--config", "--admin-api-key") if command.kind == "sglang" else ()))
    fixed: Flags = {**dict.fromkeys(ours, "chosen for each run"), **list_flags(command)[0]}
    if command.kind == "sglang":
        fixed["--model"] = str(command.model)
    for name, value in split_flags(command.args):
        for flag, needed in fixed.items():
            # argparse takes the beginning of a flag for the flag; "--no-x" is the opposite of "--x".
            meant = (len(name) > 2 and flag.startswith(name)) or name == f"--no-{flag[2:]}"
            if meant and (name, value) != (flag, needed) and name not in fixed.keys() - {flag}:
                raise ConfigError(
                    f"engine.args has `{name} {value or ''}`, but training needs `{flag} {needed or ''}`;"
                    " leave it out"
                )


def split_flags(args: Sequence[str]) -> list[tuple[str, str | None]]:
    """(flag with dashes for underscores, its value or None) in order; words that follow a flag's value belong
    to it and are dropped.
    """
    flags: list[tuple[str, str | None]] = []
    for word in args:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            flags.append((name.replace("_", "-"), value if equals else None))
        elif flags and flags[-1][1] is None:
            flags[-1] = (flags[-1][0], word)
    return flags


def runs_on_gpu(command: EngineCommand) -> bool:
    """Whether the server will: what the user says with --device, otherwise whether this machine has an NVIDIA
    driver.
    """
    device = dict(split_flags(command.args)).get("--device")
    return Path("/dev/nvidiactl").exists() if device is None else not device.startswith("cpu")


def make_environment(
    command: EngineCommand, inherited: Mapping[str, str], *, threads: int | None
) -> dict[str, str]:
    """The server's environment: what is inherited, without the trainer's own, with what it needs. `threads`:
    its share of the cores on a CPU.
    """
    env = {
        name: value
        for name, value in inherited.items()
        if name not in NOT_INHERITED and not name.startswith("TORCHELASTIC_")
    }
    # compilers and ninja of its own environment
    env["PATH"] = f"{command.python.parent.absolute()}{os.pathsep}{env.get('PATH', os.defpath)}"
    # thousands of modules: compiled anew at each start, in each of its processes, they take minutes
    env["PYTHONDONTWRITEBYTECODE"] = ""
    env["PYTHONUNBUFFERED"] = "1"  # so that the log of a server that is killed is whole
    if threads is not None:
        env["OMP_NUM_THREADS"] = str(threads)
    if command.kind == "vllm":
        env["VLLM_SERVER_DEV_MODE"] = "1"  # opens pausing and weight updates
        env["VLLM_HOST_IP"] = HOST  # its processes would talk through the machine's network address
        env.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
        if threads is not None:  # bound, all servers would take the same cores, and the trainer's too
            env.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    return env


def find_free_port() -> int:
    """A port on the loopback interface that nobody had a moment ago."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]
