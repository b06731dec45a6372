"""Training through the service is training by the backend, whatever way the requests come."""

import json
import math
import random
import time
from itertools import permutations

import numpy as np
import pytest
import trio
from safetensors.torch import load_file

from rollouts.models.load import resolve_model
from rollouts.serve.app import TELL_S
from rollouts.serve.store import open_store
from rollouts.testing.torch_contracts import assert_weights_equal
from rollouts.types import LossSpec, OptimParams, RolloutBatch
from tests.serve.clients import ADAM, KEY, MODEL, OTHER_KEY, decode_trained, draw_batches, make_datum
from tests.serve.servers import open_client, open_server
from tests.support.adapters import open_trained
from tests.support.text_tables import read_cells

SUM = LossSpec("linear", unit="constant", constant=1.0, per_token=True)
STEP = OptimParams(
    lr=ADAM["learning_rate"], betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0, max_grad_norm=None
)
BAD = [make_datum([1, 2, 3]) | {"weights": np.ones(1, np.float32)}]


def read_state(folder):
    """Weights and moments of a checkpoint."""
    files = [*folder.rglob("*.safetensors")]
    assert len(files) == 2, files
    return {
        f"{path.name}/{name}": value
        for path in files
        for name, value in load_file(path).items()
        if not name.startswith("rng/")
    }  # torch's own generator, of which nothing here draws


async def train_directly(batches, folder):
    """The losses of the same training by the backend alone, which is saved to the folder."""
    path, losses, options = resolve_model(MODEL), [], {"seed": 7, "micro_batch_tokens": 8192}
    async with open_trained(path, lora={"alpha": 32.0}, deterministic=True, **options) as backend:
        for data in batches:
            rows = tuple(np.append(one["tokens"], one["target_tokens"][-1]) for one in data)
            masks = tuple(np.arange(len(row)) > 0 for row in rows)
            weights = tuple(mask.astype(np.float32) for mask in masks)
            batch = RolloutBatch(tokens=rows, loss_masks=masks, advantages=weights)
            losses.append((await backend.forward_backward(batch, SUM)).loss)
            await backend.optim_step(STEP)
        await backend.save(folder)
    return losses


async def test_a_model_has_the_bits_of_one_that_the_backend_trains_without_a_server(tmp_path):
    batches, folder = draw_batches(4), tmp_path / "direct"
    folder.mkdir()
    losses, found = await train_directly(batches, folder), []
    async with open_server(tmp_path) as client:
        model = await client.create()
        other = await client.create(seed=8)  # beside it, and none of its business
        for data in batches:
            found.append(await model.step(data))
            await other.step(data)
        await model.save(path="end")
        (saved,) = (tmp_path / "state/checkpoints").rglob("step_*")
    assert found == losses
    assert_weights_equal(read_state(saved), read_state(folder))


async def test_losses_and_gradients_are_those_of_the_formula(client, model):
    """A plain step of size lr·gradient is not there with AdamW; its first step's moments are the gradient."""
    await model.step(draw_batches(1, seed=3)[0])  # B is not 0 any more
    path, tokens = (await model.save())["path"], [3, 9, 27, 81, 5]
    (lp,) = (await model.accumulate([make_datum(tokens)], forward_only=True)).log_probs
    q = lp + np.array([0.3, -0.5, 0.0, 0.1], np.float32)
    a = np.array([1.0, -2.0, 0.5, 0.0], np.float32)
    r = np.exp(lp - q)

    async def train(loss, **inputs):
        fresh = await client.load(path)
        found = await fresh.accumulate([make_datum(tokens, **inputs)], loss)
        stepped = await client.result(await fresh.optim())
        return found.loss, stepped["metrics"]["grad_norm"], await fresh.probe()

    # ppo: r = e^−0.3 = 0.74 with A > 0 is below the clip: the ratio itself counts. r = e^0.5 = 1.65, A < 0
    # is above it: the ratio itself counts there, too, as min takes the worse
    for loss, values, slopes in [
        ("cross_entropy", -a * lp, -a),
        ("importance_sampling", -r * a, -a * r),
        ("ppo", -np.minimum(r * a, r.clip(0.8, 1.2) * a), -a * r),
        ("cispo", -r.clip(0, 4) * lp * a, -a * r.clip(0, 4)),
        ("dro", -a * lp + 0.025 * (lp - q) ** 2, -a + 0.05 * (lp - q)),
    ]:
        inputs = {"weights": a} if loss == "cross_entropy" else {"logprobs": q, "advantages": a}
        found, norm, probe = await train(loss, **inputs)
        assert found == pytest.approx(values.sum(), abs=1e-5), loss
        # the slope by each log-prob, given as weights, has the same gradient
        _, same_norm, same_probe = await train("cross_entropy", weights=-slopes)
        assert norm == pytest.approx(same_norm, rel=1e-5), loss
        assert probe == pytest.approx(same_probe, abs=1e-4), loss


async def test_several_targets_of_a_token_are_scored_each(model):
    targets = np.array([[6, 1], [7, 2], [8, 3]])
    weights = np.array([[1, 0.5], [0, 0.25], [2, -1]], np.float32)
    both, first, second = [
        await model.accumulate(
            [make_datum([5, 6, 7, 0], target_tokens=targets[:, k], weights=weights[:, k])], forward_only=True
        )
        for k in (slice(None), 0, 1)
    ]
    assert both.log_probs[0].shape == (3, 2)
    assert np.allclose(both.log_probs[0].T, [first.log_probs[0], second.log_probs[0]], atol=1e-5)
    assert both.loss == pytest.approx(-(weights * both.log_probs[0]).sum(), abs=1e-4)


async def test_sampled_log_probs_are_the_trainers(client, model):
    for data in draw_batches(3):
        await model.step(data)
    saved = await model.save("save_weights_for_sampler", sampling_session_seq_id=9)
    sampler, prompt = saved["sampling_session_id"], [5, 6, 7]
    options = {"max_tokens": 8, "seed": 1, "stop": []}
    found = await client.draw(sampler, prompt, 3, prompt_logprobs=True, **options)
    assert len({tuple(one) for one in found.tokens}) > 1  # each sequence has its own stream
    rows = [make_datum([*prompt, *one]) for one in found.tokens]
    scored = (await model.accumulate(rows, forward_only=True)).log_probs
    for ours, theirs in zip(found.log_probs, scored, strict=True):
        assert np.abs(ours - theirs[len(prompt) - 1 :]).max() < 1e-4
    assert math.isnan(found.prompt_log_probs[0])
    assert np.abs(found.prompt_log_probs[1:] - scored[0][: len(prompt) - 1]).max() < 1e-4
    # the same seed draws the same, and its weights stay those of their time
    await model.step(draw_batches(1, seed=5)[0])
    assert (await client.draw(sampler, prompt, 3, **options)).tokens == found.tokens


# --- order --------------------------------------------------------------------------------------------------


async def test_requests_run_by_their_numbers_in_whatever_order_they_come(client, model):
    batches, plain, ids = draw_batches(6), await client.create(), dict[int, str]()
    losses = [await plain.step(data) for data in batches]
    for seq in random.Random(1).sample(range(12), 12):
        ids[seq] = await (model.optim(seq + 1) if seq % 2 else model.send(batches[seq // 2], seq=seq + 1))
    model.seq = 12
    assert [decode_trained(await client.result(ids[seq])).loss for seq in range(0, 12, 2)] == losses
    assert await model.probe() == await plain.probe()


async def test_a_request_waits_for_those_before_it_that_have_not_come(client, model):
    (data,) = draw_batches(1)
    third = await model.send(data, seq=3)
    await model.send(data, seq=1)
    stats = f"/runs/{model.name}/queue/stats"
    while (seen := await client.get(stats))["waits_for_seq_id"] != 2:
        await trio.lowlevel.checkpoint()
    assert seen["queued"] == [third]
    where = f"/runs/{model.name}/requests/{third}/status"
    assert (await client.get(where))["state"] == "queued"
    await model.optim(seq=2)
    assert decode_trained(await client.result(third)).loss
    assert (await client.get(where))["state"] == "done"


async def test_a_request_that_comes_many_times_runs_once(client, model):
    batches, plain = draw_batches(3), await client.create()
    for data in batches:
        await plain.step(data)
        for call, arguments in ((model.send, (data,)), (model.optim, ())):
            seq, ids = model.take(), set()

            async def repeat(call=call, arguments=arguments, seq=seq, ids=ids):
                for _ in range(3):
                    ids.add(await call(*arguments, seq=seq))

            async with trio.open_nursery() as nursery:
                for _ in range(5):
                    nursery.start_soon(repeat)
            (one,) = ids
            await client.result(one)
            assert await call(*arguments, seq=seq) == one  # also when it is done
    assert await model.probe() == await plain.probe()
    of, sampler = client.name_model(base_model=MODEL), await client.make_sampler()
    made = [await client.post("create_model", of) for _ in range(2)]
    drawn = [await client.sample(sampler, [1, 2], 2, seq=0, max_tokens=4) for _ in range(2)]
    # two saves of a number, which differ in what the SDK changes when it asks again
    kind = "save_weights_for_sampler"
    saves = [await model.submit(kind, 9, sampling_session_seq_id=number) for number in (4, 5)]
    for first, second in (made, drawn, saves):
        assert first == second


async def test_a_session_is_begun_once_for_a_tag_and_a_user(server):
    sessions = []
    for key in (KEY, KEY, OTHER_KEY):
        async with open_client(server, key, headers={"x-idempotency-key": "one"}) as client:
            sessions.append(client.session)
    first, again, others = sessions
    assert first == again != others


# --- failures -----------------------------------------------------------------------------------------------


async def test_a_failed_forward_backward_spoils_its_step_and_no_other(client, model):
    (good, more), plain = draw_batches(2), await client.create()
    # sent before anything was told: the step behind it is not what its client meant
    for order in permutations([BAD, good]):
        sent = [await model.send(data) for data in order]
        spoilt, bad = await model.optim(), sent[order.index(BAD)]
        await client.fails(bad, "shape")
        await client.fails(spoilt, f"lacks the forward_backward {bad}")
    # all gradients of it are gone, and the next step is whole
    await model.step(more)
    await plain.step(more)
    assert await model.probe() == await plain.probe()


async def test_a_step_counts_that_was_begun_again_after_the_failure_was_told(client, model):
    (good, more), plain = draw_batches(2), await client.create()
    await model.send(good)
    await client.fails(await model.send(BAD), "shape")
    await model.step(more)
    # a refusal left the gradient before it as it was
    await plain.send(good)
    await plain.step(more)
    assert await model.probe() == await plain.probe()


async def test_a_step_without_another_forward_backward_after_the_failure_fails(client, model):
    (good,) = draw_batches(1)
    await model.send(good)
    await client.fails(await model.send(BAD), "shape")
    before = await model.probe()  # a forward is no answer to it
    await client.fails(await model.optim(), "lacks the forward_backward")
    assert await model.probe() == before
    await model.step(good)  # and then all is well
    assert await model.probe() != before


async def test_a_failure_is_told_only_when_what_was_sent_without_knowing_has_come(tmp_path):
    async with open_server(tmp_path) as client:
        request = await (await client.create()).send(BAD)
        await client.fails(request, "shape")
        first = time.time()  # which counts, when it is told again
        await client.fails(request, "shape")
    with open_store(tmp_path / "state/service.sqlite") as store:
        row = store.one("SELECT ended, told FROM requests WHERE id = ?", request)
    assert row is not None and row["ended"] + TELL_S <= row["told"] <= first


REFUSED = r"""
optim_step | {"adam_params": {"learning_rate": -1.0}} | learning_rate
optim_step | {"adam_params": {"learning_rate": "x"}} | learning_rate
optim_step | {"adam_params": {"beta1": 1.5}} | beta1
optim_step | {"optimizer_params": {"type": "dimuon"}} | dimuon
optim_step | {"adam_params": {"learning_rate": 0.01}} | gradient
save_weights | {"path": "a/b"} | no name of a checkpoint
save_weights | {"path": "../x"} | no name of a checkpoint
save_weights | {"path": ".."} | no name of a checkpoint
save_weights | {"path": "x\n"} | no name of a checkpoint
save_weights | {"path": 5} | path
save_weights_for_sampler | {"path": "a\u0000b"} | no name of a checkpoint
save_weights_for_sampler | {"kind": "other"} | kind
save_weights | {"path": "x", "ttl_seconds": -1} | ttl_seconds
load_weights | {"path": "tinker://nobody:train:0/weights/x"} | there is no checkpoint
load_weights | {"path": "/etc/passwd"} | there is no checkpoint
"""


async def test_a_request_that_is_refused_says_why_and_changes_nothing(client, model):
    before = await model.probe()
    for kind, fields, says in read_cells(REFUSED):
        await client.fails(await model.submit(kind, **json.loads(fields)), says)
    await client.fails(await model.submit("save_weights", path="x" * 200), "no name of a checkpoint")
    assert await model.probe() == before
