"""What a real server computes against what the model itself does, the same for each kind of server.
`open_engine` opens one that serves it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import numpy as np
import torch
import transformers
import trio

from rollouts.protocols import InferenceEngine
from rollouts.testing.engine_contracts import LONG, disturb, make_request, update_frozen
from rollouts.types import Completion, GenerateRequest

OpenEngine = Callable[[], AbstractAsyncContextManager[InferenceEngine]]


def score(path: Path, request: GenerateRequest, completion: Completion) -> np.ndarray:
    """The log-probs that the model in `path` gives to the tokens, by a plain forward pass at the request's
    temperature.
    """
    model = transformers.LlamaForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokens = torch.tensor([[*request.prompt_ids.tolist(), *completion.token_ids.tolist()]])
    with torch.no_grad():
        logits = model(tokens).logits[0, len(request.prompt_ids) - 1 : -1]
    log_probs = torch.log_softmax(logits / (request.sampling.temperature or 1.0), -1)
    return log_probs.gather(1, tokens[0, len(request.prompt_ids) :, None])[:, 0].numpy()


async def load(engine: InferenceEngine, path: Path) -> int:
    """The version that `path` has on the engine now."""
    version = await engine.weight_version() + 1
    await engine.pause("wait")
    await engine.update_weights_from_checkpoint(path, version)
    await engine.resume()
    return version


async def check_log_probs(
    open_engine: OpenEngine, path: Path, request: GenerateRequest, *, atol: float
) -> None:
    """They are those of the model in `path` at the temperature that was sampled with."""
    async with open_engine() as engine:
        await load(engine, path)
        completion = await engine.generate(request)
    np.testing.assert_allclose(completion.log_probs, score(path, request, completion), atol=atol)


async def check_greedy_beside_sampled(open_engine: OpenEngine, path: Path, *, atol: float) -> None:
    """Requests of several temperatures in one batch have each its own log-probs; greedy ones those of
    temperature 1.
    """
    answers: dict[float, Completion] = {}
    async with open_engine() as engine:
        await load(engine, path)

        async def ask(temperature: float) -> None:
            answers[temperature] = await engine.generate(
                make_request(f"t{temperature}", max_new_tokens=24, temperature=temperature)
            )

        async with trio.open_nursery() as nursery:
            for temperature in (0.0, 0.5, 1.5):
                nursery.start_soon(ask, temperature)
    for temperature, completion in answers.items():
        request = make_request(max_new_tokens=24, temperature=temperature)
        np.testing.assert_allclose(completion.log_probs, score(path, request, completion), atol=atol)


async def check_tokens_after_a_frozen_update(
    open_engine: OpenEngine, first: Path, second: Path, *, atol: float
) -> None:
    """The new part is scored by the new weights over everything before it: keys and values of the old weights
    would show.
    """
    paths = [first, second]  # what the engine serves, and what it is brought to next
    async with open_engine() as engine:
        await load(engine, first)

        async def update(answers: list[Completion]) -> None:
            paths.reverse()
            await update_frozen(engine, paths[0], answers)

        completion = await disturb(engine, update)
    request, new = (
        make_request("long", max_new_tokens=LONG),
        completion.weight_versions == completion.weight_versions[-1],
    )
    np.testing.assert_allclose(
        completion.log_probs[~new], score(paths[1], request, completion)[~new], atol=atol
    )
    np.testing.assert_allclose(
        completion.log_probs[new], score(paths[0], request, completion)[new], atol=atol
    )
