"""What a run has published, as an InferenceEngine, and what publishes and proves it.

sync(version) ─► publish, in the order of the run's calls ─► probe by engine and trainer ─► proven
generate ─► POST generate ─► an answer of the version that was published when it was asked
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from rollouts.client.training import TrainingClient
from rollouts.codec import decode, encode
from rollouts.engines.server import Dialect, ServerEngine
from rollouts.engines.wire import Server
from rollouts.errors import EngineUnreachable, RequestRefused, RolloutsError, ServiceRefused
from rollouts.protocols import InferenceEngine, TrainingBackend
from rollouts.types import Completion, EngineFeatures, GenerateRequest, live
from rollouts.weight_sync.sync import WeightSync, choose_tolerance
from rollouts.weight_sync.update import make_probe

ANSWER_S = 3600.0  # that a completion may take
GAPS = (
    "an aborted request is answered without the tokens that were there",
    'what is in flight over pause("keep") goes on, with the weights that it began with',
)


@live
class RunDialect(Dialect):
    """The Dialect of a service, about one run."""

    training: TrainingClient
    abort_grace_s = 0.0

    async def ask(self, request: GenerateRequest, server_id: str) -> Completion:
        """Asked again while the service is away. Raises RequestRefused, EngineUnreachable."""
        path = f"/runs/{self.training.run_id}/generate"
        try:
            reply = await self.training.connection.ask("POST", path, encode(request), silence_s=ANSWER_S)
        except RolloutsError as error:
            kind = RequestRefused if isinstance(error, ServiceRefused) else EngineUnreachable
            raise kind(str(error)) from error
        return decode(reply.content, Completion)

    async def read_version_name(self) -> str:
        """Of what was published last."""
        return str((await self.training.connection.read_run(self.training.run_id)).version)


@asynccontextmanager
async def open_served_engine(training: TrainingClient) -> AsyncIterator[tuple[ServerEngine, WeightSync]]:
    """The engine that serves what `training` publishes, and the SyncWeights that publishes. Raises what the
    service says.
    """
    state = await training.connection.read_run(training.run_id)
    own = state.features
    features = EngineFeatures(
        own.vocab_size,
        own.context_length,
        update_from_checkpoint=False,
        name="served",
        seeds=own.seeds,
        version_spans=False,
        log_probs=own.log_probs,
        frees_memory=False,
        gaps=(*own.gaps, *GAPS),
    )

    async def publish(
        backend: TrainingBackend, engines: Sequence[InferenceEngine], version: int
    ) -> Mapping[str, Exception]:
        await training.publish(version)
        return {}

    server = Server(training.connection.http, features.name, ANSWER_S, "/api/v1/healthz")
    engine = ServerEngine(RunDialect(server, features, training))
    probe = make_probe(features.vocab_size, tolerance=choose_tolerance(exact=state.exact))
    try:
        yield engine, WeightSync(probe, transport=publish)
    finally:
        engine.close()
