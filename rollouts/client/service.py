"""A client of a training service: the runs that it trains, each in a session, which heartbeats keep.

open_service_client ─► create_training_client ─► a run of a session of ours
                   └─► attach(run_id)         ─► a run that another client began
left well: everything queued is waited for, and our sessions end, with their runs; checkpoints stay
left by an error, or killed: runs go on for the time that a session may be silent, for attach
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import field

import trio

from rollouts.client.training import Connection, TrainingClient
from rollouts.config.model import LoraConfig
from rollouts.config.tables import OptimConfig
from rollouts.engines.http import open_http_client
from rollouts.errors import ConfigError, RolloutsError
from rollouts.processes.nurseries import open_plain_nursery
from rollouts.types import live

KEYS = ("ROLLOUTS_API_KEY", "TINKER_API_KEY")  # variables of the environment
BEAT_S = 10.0


@live
class ServiceClient:
    """A service and what this client has there. Made by open_service_client."""

    connection: Connection
    nursery: trio.Nursery
    _sessions: list[str] = field(default_factory=list)  # ours
    clients: list[TrainingClient] = field(default_factory=list)

    async def list_models(self) -> list[str]:
        """Names of the base models that there are, the usual one first."""
        reply = await self.connection.ask("GET", "/api/v1/get_server_capabilities")
        return [model["model_name"] for model in reply.json()["supported_models"]]

    async def create_training_client(
        self,
        base_model: str | None = None,
        lora: LoraConfig | None = None,
        seed: int = 0,
        *,
        optim: OptimConfig | None = None,
        total_steps: int = 1,
    ) -> TrainingClient:
        """A new run: of an adapter, or without `lora` of the whole model. optim, total_steps: of steps that
        bring no OptimParams, as of a backend in this process. Raises ConfigError, and what the service says.
        """
        if lora is not None and lora.init_from:
            raise ConfigError(
                f"lora.init_from={lora.init_from!r} is on this machine; load its weights into the run instead"
            )
        begun = await self.connection.post("/api/v1/create_session")
        self._sessions.append(begun["session_id"])
        asked = (
            {"rank": 0} if lora is None else lora.model_dump(include={"rank", "alpha", "targets", "dropout"})
        )
        await self.connection.post(
            "/api/v1/create_model",
            session_id=begun["session_id"],
            model_seq_id=0,
            base_model=base_model or (await self.list_models())[0],
            lora_config={**asked, "seed": seed},
            optimizer_config={
                "settings": (optim or OptimConfig()).model_dump(mode="json"),
                "total_steps": total_steps,
            },
        )
        return await self.attach(f"{begun['session_id']}:train:0")

    async def attach(self, run_id: str) -> TrainingClient:
        """A run that is there, behind all that was asked of it. Nobody else may call it from then on."""
        client = TrainingClient(run_id, self.connection, (await self.connection.read_run(run_id)).next_seq)
        self.clients.append(client)
        self.nursery.start_soon(client.run)
        self.nursery.start_soon(self._beat, run_id.partition(":")[0])
        await client.look()
        return client

    async def _beat(self, session: str) -> None:
        while True:
            with suppress(RolloutsError):  # calls say what is wrong
                await self.connection.post("/api/v1/session_heartbeat", session_id=session)
            await trio.sleep(BEAT_S)

    async def close(self) -> None:
        """Waits for what is queued and ends our sessions. Raises the failure that nobody awaited; several as
        a group.
        """
        errors = [error for client in self.clients for error in await client.drain()]
        for session in self._sessions:
            with suppress(RolloutsError):  # a session without a heart ends by itself
                await self.connection.post(f"/api/v1/sessions/{session}/finish")
        if errors:
            group = ExceptionGroup("calls to the service failed, unawaited", errors)
            raise group if errors[1:] else errors[0]


@asynccontextmanager
async def open_service_client(
    url: str, api_key: str | None = None, *, patience_s: float = 300.0
) -> AsyncIterator[ServiceClient]:
    """A client of the service at `url`. api_key: of the environment where it is not given. patience_s: how
    long the service may be away, as when it is started again, before a call fails. Raises ConfigError without
    a key, EngineSetupError for a url that is none.
    """
    key = api_key or next(filter(None, map(os.environ.get, KEYS)), None)
    if key is None:
        raise ConfigError(f"there is no key for {url}; pass api_key, or set {' or '.join(KEYS)}")
    async with (
        open_http_client(url, api_key=key) as http,
        open_plain_nursery() as nursery,
    ):
        client = ServiceClient(Connection(http, patience_s), nursery)
        try:
            yield client
            await client.close()
        finally:
            for training in client.clients:
                training.drop()
