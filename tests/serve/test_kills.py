"""Servers that end in the middle of their work and are started again, and answers that are lost."""

import json

import httpx
import numpy as np
import pytest
import trio

from rollouts.serve.store import open_store
from tests.serve.clients import decode_sampled, decode_trained, draw_batches
from tests.serve.kills import live, run_kills
from tests.serve.servers import open_client, open_server

ONE, TWO, THREE, FOUR = draw_batches(4, seed=2)


@pytest.mark.slow
async def test_nothing_is_lost_or_done_twice_by_kills_at_any_instant(forks, tmp_path):
    """`python -m tests.serve.kills 100 1` does it a hundred times."""
    assert await run_kills(forks, tmp_path, kills=6, seed=7) == []


async def test_a_server_goes_on_in_the_middle_of_a_gradient(model, tmp_path):
    """Weights, moments, gradient and answers are those of one that never ended."""
    plain = model
    await plain.step(ONE)
    two, three = [(await plain.accumulate(data)).loss for data in (TWO, THREE)]
    norm, probe = await plain.client.result(await plain.optim()), await plain.probe()
    async with open_server(tmp_path, crash=True) as client:
        model = await client.create()
        await model.step(ONE)
        first = await model.send(TWO)
        assert decode_trained(await client.result(first)).loss == two
        waiting = await model.send(FOUR, seq=6)  # what is before it has not come
    async with open_server(tmp_path) as again:
        model.client = again
        assert decode_trained(await again.result(first)).loss == two
        assert (await model.accumulate(THREE)).loss == three
        assert await again.result(await model.optim()) == norm
        assert decode_trained(await again.result(waiting)).loss
        model.take()
        assert await model.probe() == probe
        assert await model.send(TWO, seq=3) == first  # a request of before is known
        unknown = await again.ask("POST", "retrieve_future", json={"request_id": "0" * 32})
        assert unknown.status_code == 404


async def test_weights_that_were_loaded_in_place_are_there_after_the_end(tmp_path):
    async with open_server(tmp_path, crash=True) as client:
        model = await client.create()
        await model.step(ONE)
        probe = await model.probe()
        path = (await model.save(path="x"))["path"]
        await model.step(TWO)
        dropped = await model.send(THREE)  # a gradient that is not of the loaded weights
        await client.result(await model.submit("load_weights", path=path, optimizer=True))
        assert await model.probe() == probe
        await client.result(dropped)
        await model.step(FOUR)
        after = await model.probe()
    async with open_server(tmp_path) as again:
        model.client = again
        assert await model.probe() == after
        # as one that began from the checkpoint
        other = await again.load(path)
        await other.step(FOUR)
        assert await other.probe() == after


async def test_weights_loaded_without_the_optimizers_state_begin_with_a_fresh_one(client, model):
    for data in (ONE, TWO):
        await model.step(data)
    path, probes = (await model.save(path="x"))["path"], []
    for optimizer in (True, False):
        other = await client.load(path, optimizer=optimizer)
        await other.step(THREE)
        probes.append(await other.probe())
        await client.result(await model.submit("load_weights", path=path, optimizer=optimizer))
        await model.step(THREE)
        assert await model.probe() == probes[-1]  # in place, too
    assert probes[0] != probes[1]


async def test_samples_without_a_seed_are_drawn_again_as_they_were(tmp_path):
    """A server that ended while it drew them has nothing but the request."""
    prompt, sampling = {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]}, {"max_tokens": 8, "stop": []}
    async with open_server(tmp_path) as client:
        sampler = await client.make_sampler()
        sent = [await client.sample(sampler, [5, 6], 2, **sampling) for _ in range(2)]
        drawn = [decode_sampled(await client.result(one)).tokens for one in sent]
    assert len({str(one) for pair in drawn for one in pair}) == 4  # each draws its own
    body = {"prompt": prompt, "sampling_params": sampling, "num_samples": 2, "sampling_session_id": sampler}
    with open_store(tmp_path / "state/service.sqlite") as store:
        begun = "UPDATE requests SET state = 'running', result = NULL, media = NULL, ended = NULL, body = ?"
        for one in sent:
            store.run(f"{begun} WHERE id = ?", json.dumps(body).encode(), one)
    async with open_server(tmp_path) as again:
        assert [decode_sampled(await again.result(one)).tokens for one in sent] == drawn


# --- answers that are lost ----------------------------------------------------------------------------------


class LosingTransport(httpx.AsyncHTTPTransport):
    """The server does what it is asked, and every third answer does not arrive; none is asked for once."""

    def __init__(self):
        super().__init__()
        self.paths = list[str]()  # of what was asked

    async def handle_async_request(self, request):
        reply = await super().handle_async_request(request)
        self.paths.append(request.url.path)
        if len(self.paths) % 3:
            return reply
        await reply.aread()
        await reply.aclose()
        raise httpx.ReadError("lost", request=request)


async def test_lost_answers_are_asked_for_again_and_nothing_is_done_twice(tmp_path):
    transport = LosingTransport()
    async with open_server(tmp_path) as client:
        wanted = await live(client)
        async with open_client(
            client.url, headers={"x-idempotency-key": "life"}, transport=transport
        ) as other:
            assert (await live(other)).seen == wanted.seen
    lost = {path.rsplit("/", 1)[1] for path in transport.paths[2::3]}
    assert {"forward_backward", "optim_step", "retrieve_future"} <= lost
    with open_store(tmp_path / "state/service.sqlite") as store:
        count = "SELECT COUNT(*) FROM requests WHERE scope LIKE ?"
        ours, theirs = (store.value(count, f"{one.session}:%") for one in (client, other))
        assert ours == theirs == store.value(count, "%") / 2


# httpx leaves the iterator of a body to the collector when a request is cancelled while it is sent
@pytest.mark.filterwarnings("ignore:.*httpx._content.ByteStream:ResourceWarning")
async def test_a_client_that_dies_while_it_waits_disturbs_nobody(server, client, model):
    async with open_client(server) as dying:
        dead = await dying.create()
        sent = [await dead.send(ONE) for _ in range(10)]
        async with trio.open_nursery() as nursery:
            for one in sent:
                nursery.start_soon(dying.result, one)
            await trio.sleep(0.02)
            nursery.cancel_scope.cancel()
    assert np.isfinite([await model.step(data) for data in (ONE, TWO)]).all()
    # what it had sent is done, for whoever asks with its key
    assert len({decode_trained(await client.result(one)).loss for one in sent}) == 1
