"""The training service with real float32 servers as its engine."""

import numpy as np
import pytest

from tests.serve.clients import MODEL, draw_batches, make_datum
from tests.serve.servers import open_server

from .conftest import ARGS, find_python, save_random_model

pytestmark = pytest.mark.engines
PROMPT = [72, 101, 108, 108, 111]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_what_it_samples_and_scores_has_the_trainers_log_probs(kind, tmp_path):
    """Two adapters, one that has not trained and so is the base, and the base itself, at the same time."""
    save_random_model(tmp_path / "model", seed=1, std=0.2)
    engine = {"kind": kind, "python": str(find_python(kind)), "args": ARGS[kind].split()}
    base = str(tmp_path / "model")
    async with open_server(tmp_path, model=base, engine=engine, model_names=[MODEL]) as client:
        models = [await client.create(seed=seed) for seed in range(3)]
        for seed, model in enumerate(models[:2]):
            for data in draw_batches(4, seed=seed):
                await model.step(data)
        paths = [(await model.save("save_weights_for_sampler", path="end"))["path"] for model in models]
        samplers = [await client.make_sampler(model_path=path) for path in paths]
        samplers.append(await client.make_sampler())
        asked = [
            await client.sample(sampler, PROMPT, 3, prompt_logprobs=True, max_tokens=8, stop=[])
            for sampler in samplers
        ]
        scores = []
        for request, model in zip(asked, [*models, models[2]], strict=True):
            drawn = await client.drawn(request)
            assert [len(row) for row in drawn.tokens] == [8, 8, 8]
            data = [make_datum([*PROMPT, *row]) for row in drawn.tokens]
            own = (await model.accumulate(data, forward_only=True)).log_probs
            for row, log_probs in zip(own, drawn.log_probs, strict=True):
                np.testing.assert_allclose(log_probs, row[len(PROMPT) - 1 :], rtol=0, atol=2e-4)
            np.testing.assert_allclose(
                drawn.prompt_log_probs[1:], own[0][: len(PROMPT) - 1], rtol=0, atol=2e-4
            )
            scores.append(drawn.prompt_log_probs[1:])
    apart = [np.abs(scores[2] - other).max() for other in scores]
    assert min(apart[:2]) > 0.01 and apart[3] < 2e-4, apart  # the adapters are not the base
