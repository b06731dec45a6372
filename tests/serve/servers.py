"""Servers to test: in this process, or a process of its own that can be killed."""

import os
import signal
import time
from contextlib import asynccontextmanager, contextmanager
from functools import partial

import tomli_w
import trio

from integration_training.serve import serve_model
from rollouts.config.schema import RunConfig
from rollouts.engines.processes import find_free_port
from rollouts.loops.stopping import Stop
from rollouts.models.load import resolve_model
from tests.serve.clients import KEY, MODEL, USERS, open_client
from tests.support.fork_server import open_fork_server, place_ranks

IMPORTS = [
    "integration_training.serve",
    "transformers.models.llama.modeling_llama",
    "rollouts.serve.manage",
    "hypercorn.trio",
    "rollouts.ranks.meet",
    "rollouts.backends.fsdp",
    "torch.distributed.rendezvous",
]


def make_config(folder, *, model=MODEL, engine=None, **serving):
    """A config of a server whose state is in `folder`/state; `serving` are settings of [serve]."""
    folder.mkdir(parents=True, exist_ok=True)
    return {
        "deterministic": engine is None,
        # in float32 also on a CPU that multiplies bfloat16
        "model": {"name": model, "threads": 1, "autocast": "off"},
        "engine": engine or {},
        "output": {"dir": str(folder / "state")},
        "serve": {"port": find_free_port(), **serving},
    }


def find_url(config):
    """Where it serves."""
    return f"http://127.0.0.1:{config['serve']['port']}"


@asynccontextmanager
async def open_server(folder, *, crash=False, **settings):
    """A client of a server in this process, which ends with the block; after a crash nothing is saved."""
    made = make_config(folder, **settings)
    config, state, stop = RunConfig.model_validate(made), folder / "state", Stop()
    state.mkdir(exist_ok=True)
    base = resolve_model(config.model.name)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_model, config, config.serve, state, USERS, base, None, stop)
        async with open_client(find_url(made)) as client:
            yield client
        if crash:
            nursery.cancel_scope.cancel()
        stop.request()


class ServerProcess:
    """A server that is a process, started again in the same directory as often as one likes."""

    def __init__(self, forks, folder, **settings):
        config = make_config(folder, **settings)
        self.url, self.log, self.config = find_url(config), folder / "log", folder / "serve.toml"
        self.config.write_text(tomli_w.dumps(config))
        self.folder, self._forks, self.pids = folder, forks, list[int]()

    def start(self, ranks=1):
        """Returns before it serves."""
        argv, places = ["serve", str(self.config)], place_ranks(ranks)
        self.pids = self._forks.start(
            argv,
            output=self.log,
            environ={"ROLLOUTS_API_KEY": KEY},
            processes=places,
            limit_s=3600.0,  # a file's tests share it
        )

    def end(self, number=signal.SIGKILL):
        """How it ended of that signal, which all its processes get."""
        for pid in self.pids:
            os.kill(pid, number)
        self.pids = []
        return self._forks.wait()

    def kill_and_start(self):
        """As a machine would that lost its power, but for the disk."""
        self.end()
        self.start()


# what starts servers, its imports made
open_forks = partial(open_fork_server, "rollouts.cli:main", imports=IMPORTS)


@contextmanager
def open_process(forks, folder, *, ranks=1, **settings):
    """A server that has been started; it is gone behind the block."""
    server = ServerProcess(forks, folder, **settings)
    server.start(ranks)
    try:
        yield server
    finally:
        if server.pids:
            server.end()


def wait_text(path, text):
    """Returns when the file holds the text."""
    until = time.monotonic() + 120.0
    while not (path.exists() and text in path.read_text()):
        assert time.monotonic() < until, f"{path} never said {text!r}"
        time.sleep(0.05)
