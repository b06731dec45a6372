"""What a model itself computes, and bringing a server to its weights."""

import torch
import transformers

from tests.support.plain_backend import score_completion


def score(path, request, completion):
    """The log-probs that the model in `path` gives to the tokens, by a plain forward pass at the request's
    temperature.
    """
    model = transformers.LlamaForCausalLM.from_pretrained(path, dtype=torch.float32)
    return score_completion(model, request, completion)


async def load(engine, path):
    """The version that `path` has on the engine now."""
    version = await engine.weight_version() + 1
    await engine.pause("wait")
    await engine.update_weights_from_checkpoint(path, version)
    await engine.resume()
    return version
