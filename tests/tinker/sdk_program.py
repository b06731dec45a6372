"""What a user of the unmodified SDK does; run by its own Python: sdk_program.py NAME [PATH]. The last line
that it prints is JSON: what it saw.
"""

import asyncio
import json
import math
import sys
import time
from pathlib import Path

import numpy as np
import tinker
from tinker import types

STEP = types.AdamParams(learning_rate=1e-2)


def make_datum(tokens, **inputs):
    given = {"target_tokens": np.asarray(tokens[1:]), "weights": np.ones(len(tokens) - 1, np.float32)}
    return types.Datum(model_input=types.ModelInput.from_ints([*tokens[:-1]]), loss_fn_inputs=given | inputs)


def draw_batch(seed):
    return [make_datum(row) for row in np.random.default_rng(seed).integers(0, 200, (2, 8)).tolist()]


def open_trainer(service, model, **options):
    return service.create_lora_training_client(model, rank=4, seed=1, **options).result()


def step(trainer, seed=0):
    """Both requests, of which the first is not awaited."""
    return trainer.forward_backward(draw_batch(seed), "cross_entropy"), trainer.optim_step(STEP)


def probe(trainer):
    output = trainer.forward([make_datum(list(range(3, 40, 3)))], "cross_entropy").result()
    return [float(x) for x in output.loss_fn_outputs[0]["logprobs"].data]


def catch(call):
    """The name of the error that it raises, and its message."""
    started = time.monotonic()
    try:
        return ["none", str(call())[:80]]
    except tinker.TinkerError as error:
        assert time.monotonic() - started < 30
        return [type(error).__name__, str(error)]


def train(service, model):
    """Submits everything at once, in the classic form and in that of two awaits."""
    trainer = open_trainer(service, model)
    sent = [step(trainer, seed) for seed in range(4)]
    outputs = [one.result() for one, _ in reversed(sent)][::-1]
    norms = [one.result().metrics["grad_norm"] for _, one in sent]
    sums = [-sum(float(sum(row["logprobs"].data)) for row in one.loss_fn_outputs) for one in outputs]

    async def twice():
        again = await service.create_lora_training_client_async(model, rank=4, seed=1)
        losses = []
        for seed in range(4):
            future = await again.forward_backward_async(draw_batch(seed), "cross_entropy")
            stepped = await again.optim_step_async(STEP)
            losses.append((await future).metrics["loss:sum"])
            await stepped
        return losses

    def square(data, log_probs):
        loss = sum((one**2).sum() for one in log_probs)
        return loss, {"squares": float(loss)}

    custom = trainer.forward_backward_custom(draw_batch(0), square).result()
    return {
        "losses": [one.metrics["loss:sum"] for one in outputs],
        "sums": sums,
        "norms": norms,
        "awaited_twice": asyncio.run(twice()),
        "tokenizer": trainer.get_tokenizer().encode("ab"),
        "rank": trainer.get_info().lora_rank,
        "custom": [custom.metrics["loss:sum"], custom.metrics["squares"]],
    }


def checkpoints(service, model):
    trainer = open_trainer(service, model, user_metadata={"a": "b"})
    step(trainer)
    path = trainer.save_state("one").result().path
    named = trainer.save_weights_for_sampler("one").result().path
    with_optimizer = service.create_training_client_from_state_with_optimizer(path).result()
    fresh = service.create_training_client_from_state(path).result()
    same = probe(with_optimizer) == probe(fresh) == probe(trainer)
    for one in (trainer, with_optimizer, fresh):
        step(one, 1)
    rest = service.create_rest_client()
    run = trainer.model_id
    listed = sorted(one.checkpoint_id for one in rest.list_checkpoints(run).result().checkpoints)
    taken = catch(lambda: trainer.save_state("one").result())
    rest.delete_checkpoint(run, "weights/one").result()
    return {
        "same": same,
        "with_optimizer": probe(with_optimizer) == probe(trainer),
        "fresh": probe(fresh) == probe(trainer),
        "listed": listed,
        "taken": taken,
        "gone": catch(lambda: service.create_training_client_from_state(path).result()),
        "info": rest.get_training_run(run).result().user_metadata,
        "models": [one.model_name for one in service.get_server_capabilities().supported_models],
        "sampler": service.create_sampling_client(model_path=named).result().get_base_model() == model,
    }


def sample(service, model):
    trainer = open_trainer(service, model)
    step(trainer)
    sampler = trainer.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput(
        chunks=[types.EncodedTextChunk(tokens=[5, 6]), types.EncodedTextChunk(tokens=[7])]
    )
    params = types.SamplingParams(max_tokens=6, seed=3, stop=[])
    first, again = (
        sampler.sample(prompt, 3, params, include_prompt_logprobs=True).result() for _ in range(2)
    )
    tokens = [one.tokens for one in first.sequences]
    rows = [make_datum([5, 6, 7, *one]) for one in tokens]
    trained = trainer.forward(rows, "cross_entropy").result().loss_fn_outputs
    trained = [np.asarray(row["logprobs"].data) for row in trained]
    gaps = [
        np.abs(row[2:] - np.asarray(one.logprobs)).max()
        for row, one in zip(trained, first.sequences, strict=True)
    ]
    stop = tokens[0][2]
    stopping = types.SamplingParams(max_tokens=6, seed=3, stop=[stop])
    (stopped,) = sampler.sample(prompt, 1, stopping).result().sequences
    scores = sampler.compute_logprobs(prompt).result()
    many = [sampler.sample(prompt, 1, types.SamplingParams(max_tokens=2)) for _ in range(100)]
    return {
        "same": tokens == [one.tokens for one in again.sequences],
        "apart": len({tuple(one) for one in tokens}),
        "gap": float(max(gaps)),
        "stopped": [stopped.tokens == tokens[0][: tokens[0].index(stop) + 1], str(stopped.stop_reason)],
        "scores": [len(scores), float(np.abs(np.asarray(scores[1:]) - trained[0][:2]).max())],
        "many": sum(len(one.result().sequences) for one in many),
    }


def errors(service, model):
    trainer = open_trainer(service, model)
    before, six = probe(trainer), np.zeros(7, np.float32)

    def send(loss="cross_entropy", **inputs):
        return trainer.forward_backward([make_datum([*range(8)], **inputs)], loss).result()

    stranger = tinker.ServiceClient(api_key="tml-wrong")
    seen = {
        "model": catch(lambda: service.create_lora_training_client("nobody/nothing", rank=4).result()),
        "key": catch(lambda: stranger.create_lora_training_client(model, rank=4).result()),
        "rate_nan": catch(lambda: trainer.optim_step(types.AdamParams(learning_rate=math.nan)).result()),
        "nothing": catch(lambda: trainer.optim_step(STEP).result()),
        "loss": catch(lambda: send("no_such_loss")),
        "missing": catch(lambda: send("ppo", logprobs=six)),
        "length": catch(lambda: send(weights=six[:3])),
        "path": catch(
            lambda: service.create_sampling_client(model_path="tinker://x:train:0/weights/y").result()
        ),
    }
    seen["unchanged"] = probe(trainer) == before
    twin = open_trainer(service, model)
    for one in (trainer, twin):
        step(one)
    seen["goes_on"] = probe(trainer) == probe(twin)
    bad = trainer.forward_backward([make_datum([1, 2], weights=np.ones(5, np.float32))], "cross_entropy")
    after, spoilt = step(trainer)
    told = catch(bad.result)[0]
    seen["pipelined"] = [told, after.result().metrics["loss:sum"] > 0, catch(spoilt.result)[0]]
    return seen


def long(service, model, path):
    """Trains for a while, in bursts, and says after each that it has: the server may be killed between."""
    trainer, losses = open_trainer(service, model), []
    for burst in range(4):
        sent = [step(trainer, 3 * burst + k) for k in range(3)]
        Path(path).write_text(str(burst))
        losses += [one.result().metrics["loss:sum"] for one, _ in sent]
        for _, one in sent:
            one.result()
    sampler = trainer.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=6, seed=3, stop=[])
    drawn = sampler.sample(types.ModelInput.from_ints([1, 2]), 2, params).result()
    return {"losses": losses, "probe": probe(trainer), "samples": [one.tokens for one in drawn.sequences]}


def main():
    name, *rest = sys.argv[1:]
    with tinker.ServiceClient() as service:
        model = service.get_server_capabilities().supported_models[0].model_name
        print(json.dumps(globals()[name](service, model, *rest)))


if __name__ == "__main__":
    main()
