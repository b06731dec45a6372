"""An SGLang server as an InferenceEngine: token ids in; token ids, log-probs and each token's version out.

The prefix cache is salted by opened engine and weight version (`extra_key`), and flushed by an update.
pause("keep") is "retract": what is in flight is computed anew under the next weights.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import uuid
from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import trio

from rollouts.engines.calls import Server
from rollouts.engines.http import Transport
from rollouts.engines.server import (
    LOADING,
    NEVER_NAMED,
    Dialect,
    ServerEngine,
    find_shapes,
    open_server_engine,
    refuse_settings,
    setup_errors,
)
from rollouts.engines.sglang_wire import (
    Checksums,
    Model,
    ModelInfo,
    RankLoad,
    ServerInfo,
    Update,
    make_generate_body,
    parse_generate_reply,
)
from rollouts.engines.wire import decode_reply
from rollouts.errors import EngineError, InfrastructureError, ReplyError
from rollouts.protocols import PauseMode
from rollouts.types import Completion, EngineFeatures, EngineLoad, GenerateRequest, SamplingParams

OLDEST_VERSION = (0, 5, 20)  # the first whose answers say which version produced which token
RESERVED = 2  # tokens of its context that the server leaves empty: it lowers max_new_tokens without a word
LEAST_ANSWER = 4  # tokens that fit after a prompt of max_req_input_len
# to tell the server that nobody waits for an answer any more; it would find out by itself in some seconds
CANCEL_GRACE_S = 1.0
COLD = 1e-3  # a temperature at which the likeliest token is as good as certain


class SGLangServer(Dialect):
    """The Dialect of one SGLang server, and its own calls for transfers of weights in memory."""

    def __init__(
        self,
        server: Server,
        features: EngineFeatures,
        *,
        info: ServerInfo,
        shapes: Mapping[str, tuple[int, ...]] | None,
        ends_at: int | None,
        version: str,
    ) -> None:
        """`ends_at`: tokens of prompt and answer at which the server ends an answer, some before its context
        is full. `version`: its name for its weights.
        """
        self.name = server.name
        self.shapes = shapes
        self.world_size = info.tp_size * info.pp_size  # processes that hold weights
        self.data_parallel = info.dp_size  # copies of the model; an update in memory reaches only one
        # the weights too where the server keeps a copy of them
        self._tags = {"tags": ["kv_cache", "weights"] if info.enable_weights_cpu_backup else ["kv_cache"]}
        self._server = server
        self._vocab_size = features.vocab_size
        self._ends_at = ends_at
        # what an earlier run cached under the same version was computed by other weights
        self._own = uuid.uuid4().hex[:16]
        self._salt = f"{self._own}-v{version}"

    # --- requests

    async def ask(self, request: GenerateRequest, server_id: str) -> Completion:
        body = make_generate_body(request, server_id, salt=self._salt)
        try:
            answer = await self._server.call("POST", "/generate", body, silence_s=math.inf)
        except trio.Cancelled:
            with trio.move_on_after(CANCEL_GRACE_S, shield=True), suppress(EngineError):
                await self.abort([server_id])  # the closed connection says the same, a little later
            raise
        where = f"{self.name}: POST /generate"
        return parse_generate_reply(
            answer, request, server_id, vocab_size=self._vocab_size, where=where, ends_at=self._ends_at
        )

    async def read_work(self) -> Hashable:
        return await self._read_loads()

    async def abort(self, server_ids: list[str]) -> None:
        for server_id in server_ids:
            await self._server.control("/abort_request", {"rid": server_id})

    async def freeze(self, mode: PauseMode) -> None:
        """What is in flight is computed anew under the next weights."""
        await self._server.control("/pause_generation", {"mode": "retract"})

    async def thaw(self) -> None:
        await self._server.control("/continue_generation", {"torch_empty_cache": False})

    async def load(self) -> EngineLoad:
        loads = await self._read_loads()
        usages = [rank.token_usage for rank in loads if rank.token_usage is not None]
        return EngineLoad(
            running=sum(rank.num_running_reqs for rank in loads),
            waiting=sum(rank.num_waiting_reqs for rank in loads),
            cache_usage=sum(usages) / len(usages) if usages else None,
        )

    async def _read_loads(self) -> tuple[RankLoad, ...]:
        return await self._server.read_field("/v1/loads", "loads", tuple[RankLoad, ...])

    # --- weights

    async def load_weights(self, path: Path, version: int) -> None:
        """The server calls its model by that path from then on."""
        await self._check_info_again()
        body = {"model_path": str(path), "weight_version": str(version), "flush_cache": True}
        await self._update("/update_weights_from_disk", body | {"torch_empty_cache": False})
        self._salt = f"{self._own}-v{version}"

    async def _check_info_again(self) -> None:
        """A server whose weights were never named has just been started, perhaps by somebody else."""
        if await self.read_version_name() == NEVER_NAMED:
            await read_server_info(self._server)

    async def read_version_name(self) -> str:
        return (await self._server.read("/model_info", ModelInfo)).weight_version

    async def checksum(self) -> str | None:
        """A sha256 of the checksums of all ranks."""
        answer = await self._server.control("/weights_checker", {"action": "checksum"})
        found = decode_reply(answer, Checksums, where=f"{self.name}: POST /weights_checker")
        if not found.success or not found.ranks or not all(rank.checksums for rank in found.ranks):
            raise ReplyError(f"{self.name}: POST /weights_checker gave no checksums")
        sums = json.dumps([rank.checksums for rank in found.ranks], sort_keys=True)
        return hashlib.sha256(sums.encode()).hexdigest()

    # --- weights in memory: the server's side of weight_sync.broadcast_sglang

    async def join_group(self, *, address: str, port: int, group_name: str, backend: str) -> None:
        """Returns when the server has joined the trainer's process group: ranks 1 to world_size, the trainer
        being 0.
        """
        where = {"master_address": address, "master_port": port, "group_name": group_name, "backend": backend}
        ranks = {"rank_offset": 1, "world_size": 1 + self.world_size}
        await self._update("/init_weights_update_group", where | ranks)

    async def leave_group(self, group_name: str) -> None:
        await self._update("/destroy_weights_update_group", {"group_name": group_name})

    async def begin_transfer(self) -> bool:
        """Whether the server has sessions (from 0.5.21 on). One that an update before left open is closed
        first.

        Until the last bucket names them, its weights have no version: a transfer that breaks off leaves some
        old and some new.
        """
        await self._check_info_again()
        await self._update("/update_weight_version", {"new_version": LOADING, "abort_all_requests": False})
        for may_be_open in (True, False):
            try:
                await self._server.control("/begin_weight_update", {"selector": "all"})
                break
            except InfrastructureError:
                raise
            except EngineError as error:
                if " gave 404" in str(error):
                    return False
                if not may_be_open or "already open" not in str(error):
                    raise
                await self.end_transfer()
        return True

    async def receive_broadcast(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        *,
        group_name: str,
        version: int,
        last: bool,
    ) -> None:
        """Returns when the server has taken one flattened bucket out of the group and loaded it. The last one
        names the version.
        """
        body: dict[str, Any] = {
            "names": list(names),
            "dtypes": list(dtypes),
            "shapes": [list(shape) for shape in shapes],
            "group_name": group_name,
            "load_format": "flattened_bucket",
            "flush_cache": last,
        }
        named = {"weight_version": str(version)} if last else {}
        await self._update("/update_weights_from_distributed", body | named)
        if last:
            self._salt = f"{self._own}-v{version}"

    async def end_transfer(self) -> None:
        await self._update("/end_weight_update", {})

    async def _update(self, path: str, body: Mapping[str, Any]) -> None:
        where = f"{self.name}: POST {path}"
        answer = decode_reply(await self._server.control(path, body), Update, where=where)
        if not answer.success:
            raise EngineError(f"{where} failed: {answer.message}")

    # --- memory

    async def release_memory(self) -> None:
        await self._server.control("/release_memory_occupation", self._tags)

    async def restore_memory(self) -> None:
        await self._server.control("/resume_memory_occupation", self._tags)


SGLangEngine = ServerEngine


# --- opening ------------------------------------------------------------------------------------------------


def open_sglang_engine(
    url: str,
    *,
    name: str = "",
    api_key: str | None = None,
    silence_s: float = 60.0,
    vocab_size: int,
    context_length: int | None = None,
    transport: Transport | None = None,
) -> AbstractAsyncContextManager[SGLangEngine]:
    """The SGLang server at `url`, which is ours alone from now on: if somebody left it paused, it goes on.

    name: what errors and metrics call it; "sglang-host:port" unless given. api_key: what the server was
    started with (`--api-key`). silence_s: seconds without an answer and without progress after which an
    answer is given up. vocab_size: the trainer's. context_length: what a request may need; the server's own
    if None. Raises EngineSetupError, naming what to set, for a server whose answers would falsify training or
    that refuses the key; InfrastructureError if it does not answer.
    """
    return open_server_engine(
        url,
        lambda server: _shake_hands(server, vocab_size, context_length),
        kind="sglang",
        name=name,
        health_path="/ready",  # /health would generate a token, which takes a second and a row
        api_key=api_key,
        silence_s=silence_s,
        transport=transport,
    )


async def _shake_hands(
    server: Server, vocab_size: int, context_length: int | None
) -> tuple[EngineFeatures, SGLangServer]:
    who = server.name
    with setup_errors("is it SGLang 0.5.20 or later, and api_key its --api-key, without an --admin-api-key?"):
        model = await server.read("/model_info", ModelInfo)
        await server.control("/continue_generation", {"torch_empty_cache": False})
        models = await server.read_field("/v1/models", "data", list[Model])
    info = await read_server_info(server)
    served = read_vocab_size(Path(model.model_path))
    longest = models[0].max_model_len if models else 0
    needed = context_length or longest
    refuse_settings(
        who,
        {
            f"serves {model.model_path} as an embedding model; start it without --is-embedding": (
                not model.is_generation
            ),
            f"serves {model.model_path} with {served} token ids, the trainer's model has {vocab_size}; serve"
            " the same model": served not in (None, vocab_size),
            f"has a context of {longest} tokens, needed are {needed}; start it with"
            f" --context-length {needed}": (needed > longest),
        },
    )
    features = EngineFeatures(
        vocab_size=vocab_size,
        context_length=needed,
        deterministic=info.enable_deterministic_inference,
        name=who,
        seeds=info.enable_deterministic_inference,
        checksum=True,
        frees_memory=info.enable_memory_saver,
        gaps=list_gaps(info, knows_vocab=served is not None),
    )
    least = info.max_req_input_len
    dialect = SGLangServer(
        server,
        features,
        info=info,
        shapes=await trio.to_thread.run_sync(find_shapes, Path(model.model_path)),
        ends_at=longest - RESERVED if least is None else least + LEAST_ANSWER,
        version=model.weight_version,
    )
    await _check_temperature(dialect)
    return features, dialect


async def _check_temperature(dialect: SGLangServer) -> None:
    """Raises EngineSetupError for log-probs that leave the request's temperature out: no reply says so, it is
    an environment variable of the server. The likeliest token is nearly certain when it is cold, unless some
    are equally likely, as they may be in 16 bits.
    """
    sampling = SamplingParams(max_new_tokens=1, temperature=COLD)
    request = GenerateRequest(request_id="handshake", prompt_ids=np.asarray([1]), sampling=sampling)
    log_prob = float((await dialect.ask(request, uuid.uuid4().hex)).log_probs[0])
    refuse_settings(
        dialect.name,
        {
            f"gives log-probs of the unscaled distribution ({log_prob:.3g} at temperature {COLD:g}), not of"
            " the one sampled from; start it without SGLANG_RETURN_ORIGINAL_LOGPROB": log_prob < -1.5,
        },
    )


async def read_server_info(server: Server) -> ServerInfo:
    """The server's settings. Raises EngineSetupError for those that would falsify training."""
    info = await server.read("/server_info", ServerInfo)
    numbers = tuple(int(part) for part in re.findall(r"\d+", info.version)[:3])
    lowest = min(info.speculative_accept_threshold_single, info.speculative_accept_threshold_acc)
    refuse_settings(
        server.name,
        {
            f"runs SGLang {info.version}, which does not say which weights produced which token; install"
            f" {'.'.join(map(str, OLDEST_VERSION))} or later": numbers < OLDEST_VERSION,
            "watermarks what it samples, so its log-probs are of another distribution; start it without"
            " --enable-watermark": info.enable_watermark,
            f"accepts speculated tokens at a threshold of {lowest}, so it does not sample from the"
            " model; start it with --speculative-accept-threshold-single 1.0"
            " --speculative-accept-threshold-acc 1.0": (info.speculative_algorithm and lowest < 1.0),
        },
    )
    return info


def list_gaps(info: ServerInfo, *, knows_vocab: bool) -> tuple[str, ...]:
    """A sentence for each thing that this server cannot do."""
    gaps = {
        "A request with stop tokens ends at the model's own end-of-text tokens as well.": True,
        "A request's seed is ignored: the server was started without --enable-deterministic-inference, which"
        " not all backends have.": not info.enable_deterministic_inference,
        "Memory is not given back: the server was started without --enable-memory-saver.": (
            not info.enable_memory_saver
        ),
        "Releasing memory keeps the weights: the server was started without --enable-weights-cpu-backup.": (
            info.enable_memory_saver and not info.enable_weights_cpu_backup
        ),
        "The server does not say how many token ids its model has, and its config.json cannot be read from"
        " here; the trainer's number is taken.": not knows_vocab,
    }
    return tuple(gap for gap, is_there in gaps.items() if is_there)


def read_vocab_size(model: Path) -> int | None:
    """`vocab_size` in the config.json of a model directory; None if it cannot be read from this machine."""
    with suppress(OSError, ValueError, AttributeError):
        config = json.loads((model / "config.json").read_bytes())
        size = config.get("text_config", config).get("vocab_size")
        return size if isinstance(size, int) else None
    return None
