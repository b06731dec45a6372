"""Sampling from the base model and from what users have trained, each request beside the others.

    asample ─► on record ─► its sampler's weights in the engine ─► n sequences ─► encoded ─► collected

Weights are loaded when they are first sampled from, and the least recently used make room.
"""

import hashlib
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import trio

from rollouts.errors import EngineError, RequestRefused, ServiceRefused
from rollouts.models.directories import is_adapter
from rollouts.models.load import load_hf_model
from rollouts.processes.nurseries import run_all
from rollouts.protocols import InferenceEngine
from rollouts.reference.cache import ModelSize, ReferenceCache
from rollouts.rewards.check import describe
from rollouts.serve.bodies import Prompt, Sample, read_body
from rollouts.serve.store import BEGIN, PROTOBUF, Result, Row
from rollouts.serve.wire import check_ids, encode_samples, parse_targets
from rollouts.types import Completion, Fields, GenerateRequest, IntArray, SamplingParams

if TYPE_CHECKING:
    from rollouts.serve.service import Service


class Loaded(NamedTuple):
    """Weights that can be sampled from."""

    engine: InferenceEngine
    adapter: str  # its name there; empty: the engine's own weights


def make_sampler_cache(service: "Service") -> ReferenceCache[Loaded]:
    """Weights by their directories."""

    async def measure(folder: str) -> ModelSize:
        files = [*Path(folder).glob("*.safetensors")]
        if not files:
            raise ServiceRefused("the sampler's weights are gone: make another sampling client", 410)
        size = sum(file.stat().st_size for file in files)
        return ModelSize(size, size)

    return ReferenceCache(service.config.sampler_bytes, measure, partial(open_weights, service))


@asynccontextmanager
async def open_weights(service: "Service", folder: str) -> AsyncIterator[Loaded]:
    """An adapter in the engine, or an engine of a whole model's own."""
    path = Path(folder)
    if is_adapter(path):
        await service.engine.add_adapter(folder, path)
        yield Loaded(service.engine, folder)
        await service.engine.remove_adapter(folder)
        return
    closing = trio.Event()

    async def serve(task_status: trio.TaskStatus[InferenceEngine]) -> None:
        model = await service.base.device_thread.submit(lambda: load_hf_model(path))
        async with service.open_embedded(model, mode="given") as engine:
            task_status.started(engine)
            await closing.wait()

    # in a task of its own: who opens it need not be who closes it
    engine = await service.nursery.start(serve)
    try:
        yield Loaded(engine, "")
    finally:
        closing.set()


async def run_sample(service: "Service", name: str) -> None:
    """Does a request for samples, and what became of it is on record."""
    row = service.store.find("requests", id=name)
    found: Result | Exception = ServiceRefused("the request was cancelled, or its session has ended")
    with trio.CancelScope() as service.sampling[name]:
        try:
            async with service.sampling_places:
                service.store.run(BEGIN, time.time(), name)
                found = await sample(service, row)
        except (RequestRefused, ServiceRefused) as error:
            found = ServiceRefused(str(error))
        except Exception as error:
            service.say(f"a sample of {row['scope']}: {describe(error)}")
            found = error
    del service.sampling[name]
    service.end_request(name, found)


async def sample(service: "Service", request: Row) -> Result:
    """The sequences, in order, and what was asked of the prompt. Raises ServiceRefused, RequestRefused."""
    body, row = read_body(request["body"], Sample), service.store.find("samplers", id=request["scope"])
    service.store.run("UPDATE samplers SET used = ? WHERE id = ?", time.time(), row["id"])
    prompt = read_prompt(body.prompt, service.features.vocab_size)
    requests = make_requests(service, request["id"], body, prompt)
    own: Any = nullcontext([Loaded(service.engine, "")])
    async with service.samplers.lease(row["folder"]) if row["folder"] else own as (loaded,):
        found = await generate_all(service, loaded, requests)
    last, targets = body.prompt_logprobs_last_n, body.target_prompt_logprobs
    return Result(encode_samples(found, last=last, targets=targets), PROTOBUF)


async def generate_all(
    service: "Service", loaded: Loaded, requests: Sequence[GenerateRequest]
) -> list[Completion]:
    """What the engine answers, all at the same time. Raises EngineError for an answer that was cut short."""
    found: list[Completion] = await run_all(
        *(partial(loaded.engine.generate, replace(one, adapter=loaded.adapter)) for one in requests)
    )
    service.meters.sampled.inc(sum(len(one.token_ids) for one in found))
    if any(one.finish_reason == "abort" for one in found):
        raise EngineError("the engine was told to stop; ask again")
    return found


def read_prompt(prompt: Prompt, vocab_size: int) -> IntArray:
    """[T] the tokens of all chunks. Raises ServiceRefused for what is no text, for none, and for wrong
    ids.
    """
    other = next((chunk.type for chunk in prompt.chunks if chunk.tokens is None), None)
    if other is not None:
        raise ServiceRefused(f"the prompt has a chunk of type {other!r}; the model takes text alone")
    found = np.asarray([one for chunk in prompt.chunks for one in chunk.tokens or ()], np.int64)
    if not found.size:
        raise ServiceRefused("the prompt is empty; it must have a token at least")
    check_ids(found, vocab_size, "the prompt")
    return found


def make_requests(service: "Service", name: str, body: Sample, prompt: IntArray) -> list[GenerateRequest]:
    """One for each sequence; the first asks what is to be known of the prompt. A seed gives each sequence its
    own, and without one the request's name does, so that a server that begins again draws the same.
    """
    asked = body.sampling_params
    room = service.features.context_length - len(prompt)
    if room < 1 or (asked.max_tokens or 0) > room:
        raise ServiceRefused(
            f"the prompt has {len(prompt)} tokens and max_tokens is {asked.max_tokens}; the context holds"
            f" {service.features.context_length}"
        )
    stops = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []
    ids = [stop for stop in stops if isinstance(stop, int)]
    targets = body.target_prompt_logprobs
    if targets is not None:
        targets = parse_targets(targets, len(prompt))
        check_ids(targets[targets != -1], service.features.vocab_size, "target_prompt_logprobs")
    of_prompt: Fields = {
        "score_prompt": bool(body.prompt_logprobs),
        "prompt_top": body.topk_prompt_logprobs,
        "prompt_targets": targets,
        "prompt_draws": body.prompt_alt_tokens_k,
    }
    sampling = SamplingParams(
        max_new_tokens=asked.max_tokens or room,
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=max(asked.top_k, 0),
        stop_token_ids=service.stop_ids if asked.stop is None else tuple(ids),
        stop_texts=tuple(stop for stop in stops if isinstance(stop, str)),
    )

    keys = (
        f"{name if asked.seed is None else asked.seed}/{index}".encode() for index in range(body.num_samples)
    )
    seeds = [int.from_bytes(hashlib.sha256(key).digest()[:7]) for key in keys]
    return [
        GenerateRequest(
            request_id=f"{name}:{index}",
            prompt_ids=prompt,
            sampling=replace(sampling, seed=seed),
            top_log_probs=body.topk_sample_logprobs,
            **({} if index else of_prompt),
        )
        for index, seed in enumerate(seeds)
    ]
