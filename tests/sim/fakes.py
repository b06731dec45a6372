"""The parts of a simulated run that are not real: the engines' servers, the model, snapshots and the log."""

from dataclasses import dataclass
from pathlib import Path

import httpx
import trio

from rollouts.engines.http import HttpClient
from rollouts.engines.server import ServerEngine
from rollouts.engines.sglang import ServerInfo, SGLangServer
from rollouts.engines.vllm import VLLMServer
from rollouts.engines.wire import Server
from rollouts.testing.fakes import FakeBackend
from rollouts.types import EngineFeatures
from rollouts.weight_sync.snapshots import Snapshot
from tests.support.fault_server import FaultServer
from tests.support.simulated_process import BadAnswer, compute_log_probs


class SimulatedEngine(ServerEngine):
    """The real engine of a fake server, without handshake and files. Remembers whether somebody tried to
    resume it since it was paused.
    """

    resume_tried = True

    def __init__(self, process, dialect, *, silence_s):
        fake = FaultServer(process, dialect)
        client = HttpClient(
            fake.url, {}, lambda: httpx.AsyncClient(transport=fake.transport(), trust_env=False)
        )
        health_path = "/health" if dialect == "vllm" else "/ready"
        server = Server(client, name=process.name, silence_s=silence_s, health_path=health_path)
        features = EngineFeatures(
            process.vocab_size, process.context_length, name=process.name, checksum=True
        )
        if dialect == "vllm":
            super().__init__(VLLMServer(server, features, "m"))
        else:
            super().__init__(SGLangServer(server, features, ServerInfo(version="0.5.23")))

    async def update_weights_from_checkpoint(self, path, version):
        await self.dialect.load_weights(path, version)
        return {}

    async def pause(self, mode):
        self.resume_tried = False
        await super().pause(mode)

    async def resume(self):
        self.resume_tried = True
        await super().resume()


class SimulatedBackend(FakeBackend):
    """Its weights are a word, another one after every step that is not skipped. `lineage` has the word of
    every version so far.
    """

    def __init__(
        self,
        *,
        step_s,
        lineage,
        name_next,
        check_batch,
    ):
        super().__init__(step_s, 0.0, {})
        self._state["version"] = len(lineage) - 1
        self._name_next = name_next
        self._check_batch = check_batch
        self.lineage = lineage

    @property
    def weights(self):
        return self.lineage[self.weight_version]

    def forward_backward(self, batch, loss):
        self._check_batch(batch)
        return super().forward_backward(batch, loss)

    def forward(self, batch):
        return self._submit(lambda: tuple(compute_log_probs(self.weights, tokens) for tokens in batch.tokens))

    def set_weight_version(self, version):
        assert version == len(self.lineage), (version, self.lineage)
        self.lineage.append(self._name_next(self.lineage))
        return super().set_weight_version(version)


@dataclass(frozen=True, slots=True)
class HeldWord:
    """A copy of a SimulatedBackend's weights."""

    weights: str

    def stream_weights(self, sink):
        raise AssertionError("simulated snapshots read the word")


class SimulatedSnapshots:
    """A SnapshotKeeper whose snapshots are directories that do not exist: their last part says what the
    weights are.
    """

    def __init__(self, export_s):
        self._export_s = export_s
        self._kept: set[Path] = set()
        self.missed: list[Path] = []  # loaded after they were removed

    async def hold(self, backend):
        assert isinstance(backend, SimulatedBackend)
        await trio.lowlevel.checkpoint()
        return HeldWord(backend.weights)

    async def export(self, backend, version):
        assert isinstance(backend, SimulatedBackend | HeldWord)
        weights = backend.weights
        await trio.sleep(self._export_s)
        path = Path("/weights", f"v{version}", weights)
        self._kept.add(path)
        return Snapshot(path, weights, 8)

    async def prune(self, keep):
        await trio.lowlevel.checkpoint()
        self._kept = {path for path in self._kept if path == keep}

    def read(self, path):
        """What a server finds at `path`."""
        if path not in self._kept:
            self.missed.append(path)
            raise BadAnswer(400, f"{path} is gone")
        return path.name


class NoLog:
    async def log_step(self, *row, **more): ...
    async def log_samples(self, stage, step, policy_version, samples): ...
    async def log_evaluation(self, *row): ...
    async def log_spans(self, *row): ...


class RecordingBuffer:
    """A DataBuffer that refuses to hand out a prompt that is out, or to take back one that is not."""

    def __init__(self, buffer, out):
        self.buffer = buffer
        self.out = out

    def get_prompts(self, count):
        prompts = self.buffer.get_prompts(count)
        for prompt in prompts:
            assert prompt.key not in self.out, f"{prompt.key} was drawn twice"
            self.out.add(prompt.key)
        return prompts

    def return_prompts(self, prompts):
        for prompt in prompts:
            assert prompt.key in self.out, f"{prompt.key} was returned without being out"
            self.out.remove(prompt.key)
        self.buffer.return_prompts(prompts)

    def find_prompt(self, prompt_id, epoch):
        return self.buffer.find_prompt(prompt_id, epoch)
