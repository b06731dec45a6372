"""Inference servers that this process starts, watches, restarts and never leaves behind.

    open_engine_processes ──► vLLM or SGLang on 127.0.0.1, each with a port and a key of this run
        ready: the health path answers, our key is accepted, and nobody without it
        wait_exited(): why a server ended · restart(): the same port and key again
    leaving the context, or the end of this process by any signal: nothing of a server is left

The key never stands in a command line. vLLM reads it from its environment; SGLang only from flags or a YAML
file, so it gets a file that its owner alone may read and that is gone once the server is up. SGLang also
prints it into its log: logs are readable by their owner only, and it is blotted out in messages.
"""

import importlib.util
import os
import re
import secrets
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import field
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import trio

from rollouts.config.tables import EngineConfig
from rollouts.engines.fleet import Fleet, open_fleet
from rollouts.engines.fleet_members import Member
from rollouts.engines.http import open_http_client
from rollouts.engines.sglang import open_sglang_engine
from rollouts.engines.vllm import open_vllm_engine
from rollouts.engines.wire import START_S
from rollouts.errors import ConfigError, EngineSetupError, InfrastructureError
from rollouts.processes.nurseries import run_all
from rollouts.processes.process import Process, open_process
from rollouts.protocols import Say
from rollouts.types import Texts, live

MODULES = {"vllm": "vllm.entrypoints.openai.api_server", "sglang": "sglang.launch_server"}
HEALTH_PATHS = {"vllm": "/health", "sglang": "/ready"}  # SGLang's /health generates a token, for a second
KEYED_PATH = "/v1/models"  # answered by both at once, and only with the key
HOST = "127.0.0.1"
ASK_S = 0.2  # between two questions whether a server is up
ANSWER_S = 10.0  # for one such answer
STOP_S = 10.0  # for one to end by itself
TAIL_LINES = 20  # of a server's log in messages
FIXED_FOR_ALL = f" --host {HOST} --served-model-name policy"
# What a user may not change. vLLM's log-probs are those of the distribution sampled from, after temperature
# and top-p; scale-out opens the endpoint for token ids. SGLang would spin on a core that others need.
FIXED = {
    "vllm": "--model {model} --logprobs-mode processed_logprobs --enable-scale-out" + FIXED_FOR_ALL,
    "sglang": "--model-path {model}" + FIXED_FOR_ALL,
    "sglang cpu": "--device cpu --sleep-on-idle",
}
# What a user's own flag replaces. A request's seed ends a vLLM server on a CPU that computes prompts in
# parts; compiling takes minutes on a few cores. SGLang would size its cache by all of the machine's memory.
DEFAULTS = {
    "vllm": "--disable-uvicorn-access-log --max-logprobs 128",
    "vllm cpu": "--no-enable-chunked-prefill --enforce-eager",
    "sglang": "--log-level-http warning",
    "sglang cpu": "--attention-backend torch_native --max-total-tokens 16384",
}
CHOSEN = {"vllm": "--port --api-key", "sglang": "--port --api-key --config --admin-api-key"}  # for each run
# The trainer's own: a server that finds torchrun's variables believes to be one of its ranks, and another
# environment's modules break it.
NOT_INHERITED = re.compile(
    "(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_.*"
    "|PYTHON(PATH|HOME)|VIRTUAL_ENV|VLLM_API_KEY"
)
LORA = {  # for adapters; SGLang counts as one that there is none
    "vllm": "--enable-lora --max-loras 1",
    "sglang": "--enable-lora --max-loras-per-batch 8",
    "sglang cpu": "--lora-backend torch_native",
}
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
MAX_CONCURRENCY = 256  # requests in flight per server
DOWN_LIMIT_S = 900.0  # without any server in service
SILENCE_S = 120.0  # without an answer and without progress, after which a server is suspected


class EngineCommand(NamedTuple):
    """What to start, without what differs between servers: port, key, share of the machine."""

    kind: Literal["vllm", "sglang"]
    python: Path  # the Python that has vLLM or SGLang installed
    model: Path  # a Hugging Face model directory
    args: tuple[str, ...] = ()  # the user's own flags, appended last
    # greatest rank and modules of adapters, of which one is served at a time; None: it has none
    lora: tuple[int, Sequence[str]] | None = None


def find_free_port() -> int:
    """A port on the loopback interface that nobody had a moment ago."""
    with socket.create_server((HOST, 0)) as probe:
        return probe.getsockname()[1]


@live
class EngineProcess:
    """One server: its address, and what happens to its process. Made by open_engine_processes."""

    name: str
    command: EngineCommand
    env: Texts
    log_path: Path
    key_file: Path
    port: int = field(default_factory=find_free_port)
    api_key: str = field(default_factory=lambda: secrets.token_hex(32))
    starts: int = 0
    process: Process | None = None  # the one that was started last; the server's workers are below it
    _life: AsyncExitStack = field(default_factory=AsyncExitStack)  # ends it

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    async def wait_exited(self) -> str:
        """Why the server ended, with the last lines of its log; waits until nothing of it is left."""
        process = self.process
        assert process, "not started"
        await process.wait_ended()
        return self._describe_end(process)

    async def stop(self) -> None:
        """Ends the server: SIGTERM, and after the grace SIGKILL for its whole tree. Not to be interrupted.
        Raises EngineError if it stays.
        """
        with trio.CancelScope(shield=True):
            if self.process:
                self.process.terminate()
                with trio.move_on_after(STOP_S + 1.0):
                    await self.process.wait_ended()
            await self._life.aclose()

    async def restart(self) -> None:
        """Stops what is left and starts the server again on the same port with the same key; returns when it
        is ready. Raises EngineSetupError if it does not become ready.
        """
        await self.stop()
        env = dict(self.env)
        if self.command.kind == "vllm":
            env["VLLM_API_KEY"] = self.api_key
        else:
            self.key_file.touch(mode=0o600)
            self.key_file.write_text(f'api-key: "{self.api_key}"\n')
        self.starts += 1
        opening = open_process(
            make_arguments(self.command, port=self.port, key_file=self.key_file),
            env=env,
            log=self.log_path,
            headline=f"start {self.starts} of {self.name}",
            grace_s=STOP_S,
        )
        try:
            self.process = await self._life.enter_async_context(opening)
            await self._wait_ready(self.process)
        finally:
            self.key_file.unlink(missing_ok=True)

    async def _wait_ready(self, process: Process) -> None:
        with trio.move_on_after(START_S):
            # Nothing tells when a server is up, so it is asked again and again.
            while not process.has_ended:
                state = await ask_ready(self.url, self.api_key, HEALTH_PATHS[self.command.kind])
                if state == "ready":
                    return
                if state == "foreign":
                    raise EngineSetupError(f"another server answers at {self.url}; start again")
                with trio.move_on_after(ASK_S):
                    await process.wait_ended()
        why = "ended before it was ready" if process.has_ended else f"was not ready after {START_S:g} s"
        raise EngineSetupError(
            f"{self.name} {why}; what it said last is the reason, or set engine.python and engine.args"
            f" otherwise\n{self._describe_end(process)}"
        )

    def _describe_end(self, process: Process) -> str:
        """How it ended, with the last lines of this start's log, without the key."""
        lines = process.read_tail().replace(self.api_key, "<key>").splitlines()[-TAIL_LINES:]
        how = f"{self.name} (pid {process.pid}) {process.describe_end() if process.has_ended else 'runs'}"
        return "\n".join([f"{how}; last lines of {self.log_path}:", *lines])


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
    threads = None if runs_on_gpu(command.args) else max(1, len(os.sched_getaffinity(0)) // count)
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


async def ask_ready(url: str, api_key: str, health_path: str) -> Literal["ready", "starting", "foreign"]:
    """Whether the server there is up, takes our key and takes nobody without it ("ready"), or is up and not
    ours ("foreign").
    """
    with trio.move_on_after(ANSWER_S), suppress(InfrastructureError):
        async with open_http_client(url) as anybody, open_http_client(url, api_key=api_key) as we:
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
    own = dict(split_flags(command.args))
    flags = list_flags(command, FIXED) | {"--port": str(port)}
    if command.kind == "sglang":
        flags["--config"] = str(key_file)
    defaults, (rank, modules) = list_flags(command, DEFAULTS), command.lora or (0, ())
    if rank:
        if command.kind == "vllm":  # it has some ranks only
            rank = min((one for one in VLLM_RANKS if one >= rank), default=rank)
        defaults |= list_flags(command, LORA) | {"--max-lora-rank": str(rank)}
    flags |= {name: value for name, value in defaults.items() if name not in own}
    words = [word for flag in flags.items() for word in flag if word is not None]
    if rank and "--lora-target-modules" not in own:
        # vLLM would adapt the head too, and then ends when it scores a prompt among other requests
        words += ["--lora-target-modules", *modules]
    return (str(command.python), "-m", MODULES[command.kind], *words, *command.args)


def list_flags(command: EngineCommand, table: Texts) -> dict[str, str | None]:
    """The flags of the table for this kind of server where it runs: names and values, None for a switch."""
    text = table[command.kind]
    if not runs_on_gpu(command.args):
        text += " " + table.get(f"{command.kind} cpu", "")
    return dict(split_flags([word.format(model=command.model) for word in text.split()]))


def check_command(command: EngineCommand) -> None:
    """Raises ConfigError for a flag of the user's that contradicts one that is set here."""
    fixed = list_flags(command, FIXED) | dict.fromkeys(CHOSEN[command.kind].split(), "chosen for each run")
    fixed["--model"] = str(command.model)
    for name, value in split_flags(command.args):
        for flag, needed in fixed.items():
            # argparse takes the beginning of a flag for the flag; "--no-x" is the opposite of "--x"
            meant = flag.startswith(name) or name == f"--no-{flag[2:]}"
            if meant and (name, value) != (flag, needed) and name not in fixed.keys() - {flag}:
                raise ConfigError(
                    f"engine.args has `{name} {value or ''}`, but training needs `{flag} {needed or ''}`;"
                    " leave it out"
                )


def split_flags(args: Sequence[str]) -> list[tuple[str, str | None]]:
    """(flag with dashes for underscores, its value or None) in order; words that follow a flag's value belong
    to it and are dropped.
    """
    flags = []
    for word in args:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            flags.append((name.replace("_", "-"), value if equals else None))
        elif flags and flags[-1][1] is None:
            flags[-1] = (flags[-1][0], word)
    return flags


def runs_on_gpu(args: Sequence[str]) -> bool:
    """Whether a server will: what the user says with --device, otherwise whether this machine has an NVIDIA
    driver.
    """
    device = dict(split_flags(args)).get("--device")
    return Path("/dev/nvidiactl").exists() if device is None else not device.startswith("cpu")


def make_environment(command: EngineCommand, inherited: Texts, *, threads: int | None) -> Texts:
    """The server's environment: what is inherited, without the trainer's own, with what it needs. `threads`:
    its share of the cores on a CPU.
    """
    env = {name: value for name, value in inherited.items() if not NOT_INHERITED.fullmatch(name)}
    env |= {
        # compilers and ninja of its own environment
        "PATH": f"{command.python.parent.absolute()}{os.pathsep}{env.get('PATH', os.defpath)}",
        # thousands of modules: compiled anew at each start, in each of its processes, they take minutes
        "PYTHONDONTWRITEBYTECODE": "",
        "PYTHONUNBUFFERED": "1",  # so that the log of a server that is killed is whole
    }
    if threads:
        env["OMP_NUM_THREADS"] = str(threads)
    if command.kind == "vllm":
        env["VLLM_SERVER_DEV_MODE"] = "1"  # opens pausing and weight updates
        if command.lora:
            env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        env["VLLM_HOST_IP"] = HOST  # its processes would talk through the machine's network address
        env.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
        if threads:  # bound, all servers would take the same cores, and the trainer's too
            env.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    return env


# --- a fleet as a config describes it: started here, or running already ------------------------------------


def find_server_python(config: EngineConfig) -> Path:
    """The Python that servers are started with. Raises ConfigError, saying how to make one."""
    if config.python:
        path = Path(config.python).expanduser()
        if not os.access(path, os.X_OK) or path.is_dir():
            raise ConfigError(
                f"engine.python={config.python!r} is no program; give the Python of an environment that has"
                f" {config.kind}"
            )
        return path.absolute()  # not resolved: a virtual environment is known by the name of its link
    beside = Path(f".venv-{config.kind}") / "bin" / "python"
    if beside.exists():
        return beside.absolute()
    if importlib.util.find_spec(config.kind):
        return Path(sys.executable)
    raise ConfigError(
        f"engine.kind={config.kind!r} but {beside} does not exist and this Python has no {config.kind}; set"
        f" engine.python to one that has, or make one: python -m rollouts engines install-{config.kind}-cpu"
    )


def read_api_key(kind: str) -> str | None:
    """The key of servers that run already: VLLM_API_KEY or SGLANG_API_KEY; None where that is not set."""
    return os.environ.get(f"{kind.upper()}_API_KEY") or None


@asynccontextmanager
async def open_server_fleet(
    config: EngineConfig,
    model_path: Path,
    *,
    vocab_size: int,
    log_dir: Path,
    seed: int,
    warn: Say,
    lora: tuple[int, Sequence[str]] | None,
) -> AsyncIterator[Fleet]:
    """The fleet, every engine of it stale: only a verified weight update puts one into service.

    `model_path`: what started servers load first, also when they are started again. `lora`: the rank of the
    adapters that they are to serve, one at a time, and the names of the modules that these change. Their logs
    go to `log_dir`. Raises ConfigError and EngineSetupError; everything that was started has ended when this
    leaves.
    """
    assert config.kind != "local", "an embedded engine is opened by rollouts.engines.local"
    opener = open_vllm_engine if config.kind == "vllm" else open_sglang_engine
    open_engine = partial(opener, silence_s=SILENCE_S, vocab_size=vocab_size)
    async with AsyncExitStack() as stack:
        enter, key = stack.enter_async_context, read_api_key(config.kind)
        members = [Member(await enter(open_engine(url, api_key=key))) for url in config.urls]
        if not members:
            python, args = find_server_python(config), tuple(config.args)
            command = EngineCommand(config.kind, python, model_path, args, lora)
            for process in await enter(open_engine_processes(command, count=config.count, log_dir=log_dir)):
                engine = await enter(open_engine(process.url, api_key=process.api_key, name=process.name))
                members.append(Member(engine, process.restart, process.wait_exited))
        yield await enter(
            open_fleet(
                members, max_concurrency=MAX_CONCURRENCY, down_limit_s=DOWN_LIMIT_S, seed=seed, warn=warn
            )
        )
