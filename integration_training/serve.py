"""`rollouts serve CONFIG`: a base model, what trains adapters of it and what samples from them, behind HTTP.

read the config ─► keys ─► base model on the device thread ─► engine ─► what was there before ─► listen
a signal ─► nothing new is taken ─► every model is saved ─► closed

`rollouts serve RUN`: what a run publishes, for OpenAI's clients; loads nothing that trains.

published.json ─► loaded beside the weights in use ─► answers in flight end ─► swapped ─► the next begin
request ─► engine ─► answer, all of it by one publication ─► asked/ ─► told
"""

import argparse
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import trio

from rollouts.checkpoints.follow import follow, load_published
from rollouts.config.load import load_config
from rollouts.config.model import LoraConfig
from rollouts.config.schema import RunConfig
from rollouts.config.serve import ServeConfig
from rollouts.config.tables import OptimConfig
from rollouts.device_thread import open_device_thread
from rollouts.engines.local import open_local_engine
from rollouts.environments.episode import Episode, make_formats
from rollouts.environments.proxy import OpenTrajectory, Proxy, open_http
from rollouts.errors import ConfigError, EngineError
from rollouts.inspect.terminal import say
from rollouts.loops.stopping import Stop, exit_now, open_stop
from rollouts.metrics.jsonl import RecordFile
from rollouts.metrics.spans import SpanRecorder
from rollouts.models.devices import choose_device
from rollouts.models.load import load_hf_model, load_tokenizer, resolve_model, stop_token_ids
from rollouts.preflight.run_directory import lock_run_dir
from rollouts.ranks.launch import Launch, launch_ranks
from rollouts.ranks.meet import OpenRanks, Ranks
from rollouts.rewards.check import import_extra
from rollouts.run_dir import RunDir, list_parts
from rollouts.types import Function, Sample, SamplingParams, Texts

ONE_USER = "owner"  # of the one key
KEY_VARIABLE = "ROLLOUTS_API_KEY"
KEY_PREFIX = "tml-"  # the SDK sends no other


def run_serve(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """The exit code. Serves until a signal. Raises RolloutsError."""
    for module in ("hypercorn", "starlette", "google.protobuf", "prometheus_client"):
        import_extra(module, "rollouts serve", "serve")
    if arguments.config.is_dir():
        trio.run(serve_published, arguments, overrides)
        return 0
    config = load_config(arguments.config, overrides)
    launch = launch_ranks(config, sys.argv)
    trio.run(run_service, config, launch)
    return 0


async def run_service(config: RunConfig, launch: Launch) -> None:
    """Serves until a signal; a rank that does not serve works for rank 0."""
    from integration_training.run import join_ranks, open_other_ranks
    from rollouts.backends.fsdp import serve_rank

    if launch.rank:
        async with join_ranks(launch, config) as opened:
            await serve_rank(opened, config)
        return
    folder, serving = Path(config.output.dir or f"runs/{config.name}"), config.serve or ServeConfig()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    keys = read_keys(serving, folder)
    base_path = await trio.to_thread.run_sync(partial(resolve_model, config.model.name, seed=config.seed))
    async with open_stop(say) as stop, open_other_ranks(launch, config, base_path, stop) as ranks:
        await serve_model(config, serving, folder, keys, base_path, ranks, stop)
    exit_now()


async def serve_model(
    config: RunConfig,
    serving: ServeConfig,
    folder: Path,
    keys: Texts,
    base_path: Path,
    ranks: OpenRanks | None,
    stop: Stop,
) -> None:
    """Opens the base model and what samples from it, and answers until a stop."""
    from rollouts.backends.fsdp import open_fsdp_backend
    from rollouts.backends.open import open_pytorch_backend
    from rollouts.serve.service import open_service

    address, tokenizer = bind_address(serving), load_tokenizer(base_path)
    if ranks is None:
        opening: Any = partial(open_pytorch_backend, device=choose_device(config, local_ranks=1))
    else:
        opening = partial(open_fsdp_backend, channel=ranks.channel, ranks=ranks.ranks)
    open_backend = partial(
        opening,
        autocast="off" if config.deterministic else config.model.autocast,
        threads=config.model.threads,
        deterministic=config.deterministic,
        gradient_checkpointing=config.model.gradient_checkpointing,
        micro_batch_tokens=serving.micro_batch_tokens,
        tokenizer=tokenizer,
    )
    rank = 1 if config.engine.kind == "local" else serving.max_rank
    lora = LoraConfig(rank=rank, base=config.model.lora.base if config.model.lora else "float32").model_dump()
    with (folder / "requests.jsonl").open("a", buffering=1) as rows:
        async with open_backend(base_path, optim=OptimConfig(), total_steps=1, lora=lora) as base:
            open_embedded = partial(
                open_local_engine,
                device_thread=base.device_thread,
                max_rows=config.engine.max_rows,
                deterministic=config.deterministic,
                seed=config.seed,
                autocast_dtype=base.autocast_dtype,
                tokenizer=tokenizer,
            )
            async with (
                open_engine(config, base, base_path, folder, open_embedded) as engine,
                open_service(
                    folder=folder,
                    record=lambda row: print(json.dumps(row), file=rows),
                    config=serving,
                    base=base,
                    base_path=base_path,
                    name=(serving.model_names or [str(base_path)])[0],
                    names=frozenset({*serving.model_names, str(base_path), config.model.name}),
                    engine=engine,
                    open_embedded=open_embedded,
                    tokenizer=tokenizer,
                    open_backend=open_backend,
                    deterministic=config.deterministic,
                    say=say,
                ) as service,
            ):
                await answer_until(stop, service, keys, address)


def bind_address(serving: ServeConfig) -> int:
    """A socket that is bound before a model loads; it listens when all is there. Raises ConfigError."""
    address = socket.socket(socket.AF_INET6 if ":" in serving.host else socket.AF_INET)
    address.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        address.bind((serving.host, serving.port))
    except OSError as error:
        address.close()
        raise ConfigError(
            f"serve.host={serving.host!r} and serve.port={serving.port} cannot be used ({error});"
            " port 0 takes any that is free"
        ) from error
    return address.detach()


async def answer_until(stop: Stop, service: Any, keys: Texts, address: int) -> None:
    """Answers at a socket until a stop; then every model is saved."""
    from rollouts.serve.app import make_app
    from rollouts.serve.evaluate import EVALUATE
    from rollouts.serve.manage import MANAGE, NATIVE
    from rollouts.serve.prometheus import METRICS

    routes = {**MANAGE, **NATIVE, **METRICS, **EVALUATE}
    async with open_http(make_app(service, keys, routes), f"fd://{address}", stop.wait_requested) as url:
        say(f"serving {service.name} at {url} (state in {service.folder})", sys.stdout)
        await stop.wait_requested()
        await service.drain()


@asynccontextmanager
async def open_engine(
    config: RunConfig, base: Any, base_path: Path, folder: Path, open_embedded: Function
) -> AsyncIterator[Any]:
    """What samples from the base model and from adapters by name."""
    from integration_training.opening import open_fleet
    from rollouts.backends.open import load_model

    device, mode, model = base.ranks.device, "shared", base.model
    if config.engine.kind != "local":
        fleet = open_fleet(config, base, base_path, RunDir(folder), device=str(device), spans=SpanRecorder())
        async with fleet as (engine, sync):
            await sync(base, [engine], 0)
            yield engine
        return
    if base.ranks.world_size > 1:  # of the model that trains this rank has a part alone
        lora: Any = {"lora": LoraConfig(rank=1).model_dump()}
        load = partial(load_model, base_path, lora, Ranks(0, 1, 1, device))
        mode, model = "given", await base.device_thread.submit(load)
    async with open_embedded(model, mode=mode, trainer_version=lambda: 0) as engine:
        yield engine


# --- what a run publishes -----------------------------------------------------------------------------------


async def serve_published(arguments: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Answers until a signal, and ends the process; a second one ends it at once. Raises RolloutsError."""
    run_dir, key = RunDir(arguments.config), os.environ.pop(KEY_VARIABLE, "")
    config, proxy = load_config(run_dir.config, overrides), Proxy()
    if not key and arguments.host not in ("127.0.0.1", "::1", "localhost"):
        raise ConfigError(f"--host {arguments.host}: beyond loopback it takes a key in {KEY_VARIABLE}")
    bind = f"fd://{bind_address(ServeConfig(host=arguments.host, port=arguments.port))}"
    lock_run_dir(RunDir(run_dir.asked))  # what is kept has one writer, and so a run one server
    journal = RecordFile(parts := run_dir.asked / "asked.jsonl")

    async def keep(asked: Any) -> None:
        asked.whole["system_fingerprint"] = f"publication-{number}"
        asked.turns = []
        served.asked.clear()
        served.answers.clear()
        if asked.request.store:
            row = {"prompt": asked.request.messages, "time_unix": time.time(), "publication": number}
            await thread.submit(partial(journal.append, f"{json.dumps(row)}\n".encode()))
            for part in list_parts(parts)[:-2]:  # at most 512 MiB are kept
                part.unlink()

    async def answer() -> None:
        async with open_http(proxy, bind, stop.wait_requested) as url:
            say(f"serving {run_dir.root} at {url}", sys.stdout)
        exit_now()

    opened = proxy.trajectories[""] = trio.Event()
    async with (
        open_stop(say) as stop,
        open_device_thread(name="published") as thread,
        trio.open_nursery() as background,
    ):
        background.start_soon(answer)
        newest, path = await take(run_dir.published, 0)
        template = config.model.chat_template
        tokenizer = load_tokenizer(path, chat_template=Path(template) if template else None)
        make_format = make_formats(tokenizer, params=config.model.template_params)
        usual = SamplingParams(max_new_tokens=1 << 60, stop_token_ids=stop_token_ids(tokenizer, path), seed=0)
        model = await thread.submit(partial(load_hf_model, path))
        async with open_local_engine(
            model, device_thread=thread, mode="given", tokenizer=tokenizer
        ) as engine:
            number = newest  # of the weights in use
            while True:
                # of answers: it ends when they have, before the next weights are loaded
                async with trio.open_nursery() as nursery:
                    sample = Sample(id=f"p{number}", prompt="")
                    # each request begins with a node of its own
                    fields: Any = usual, sample, None, [], {}, engine, None, (), None, 0.0
                    episode = Episode(make_format(()), config.rollout, *fields)
                    served = proxy.trajectories[""] = OpenTrajectory(episode, make_format, nursery, keep=keep)
                    served.key = key
                    opened.set()
                    newest, path = await take(run_dir.published, newest)
                    opened = proxy.trajectories[""] = trio.Event()
                try:
                    await engine.update_weights_from_checkpoint(path, newest)
                    number = newest
                except EngineError as error:
                    say(f"publication {newest} is not served: {error}")


async def take(folder: Path, after: int) -> tuple[int, Path]:
    """The number of the next publication that is as it was written, and its directory."""
    while True:
        try:
            after = (await follow(folder, after=after)).publication
            found, path = await trio.to_thread.run_sync(load_published, folder, Path)
            return found.publication, path
        except Exception as error:  # whatever it is, the weights in use are as good as before
            say(f"publication {after} is not served: {error}")
            await trio.sleep(1)


# --- keys ---------------------------------------------------------------------------------------------------


def read_keys(serving: ServeConfig, folder: Path) -> Texts:
    """Users by their keys: of the environment, or of a file that nobody else may read; one is made where
    there is none. Raises ConfigError.
    """
    key, path = os.environ.pop(KEY_VARIABLE, ""), Path(serving.key_file or folder / "keys")
    if key and not serving.key_file:
        lines, source = [f"{ONE_USER} {key}"], KEY_VARIABLE
    else:
        if not serving.key_file and not path.exists():
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                print(ONE_USER, KEY_PREFIX + secrets.token_urlsafe(32), file=file)
            say(f"{path} has the key that clients need (TINKER_API_KEY)", sys.stdout)
        try:
            mode, lines, source = path.stat().st_mode, path.read_text("utf-8").splitlines(), str(path)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"serve.key_file={str(path)!r} cannot be read ({error})") from error
        if mode & 0o077:
            raise ConfigError(f"{path} may be read by others (mode {mode & 0o777:o}); chmod 600 {path}")
    users: dict[str, str] = {}
    for number, words in enumerate(map(str.split, lines), 1):
        if words and not words[0].startswith("#"):
            where = f"{source}, line {number}"
            if len(words) != 2 or words[1] in users:
                raise ConfigError(
                    f"{where}: each line is a user's name and a key of their own, with a space between"
                )
            user, key = words
            if not key.startswith(KEY_PREFIX) or len(key) < len(KEY_PREFIX) + 4:
                raise ConfigError(
                    f"{where}: a key begins with {KEY_PREFIX!r}, which the SDK asks for, and has more behind"
                    " it"
                )
            users[key] = user
    if not users:
        raise ConfigError(f"{path} has no key; each line is a user's name and a key")
    return users
