"""What a server gives to each: places in memory, time, requests that wait; and what is said beyond it."""

import signal
import time

import pytest
import trio

from rollouts.errors import StorageError
from rollouts.serve import service as services
from tests.serve.clients import (
    MODEL,
    OTHER_KEY,
    decode_sampled,
    decode_trained,
    draw_batches,
    make_datum,
)
from tests.serve.servers import open_client, open_process, open_server

SETTINGS = {"request_tokens": 100}
LOADED = "rollouts_models", "in_memory"
DATA, *_ = BATCHES = draw_batches(4)


async def test_three_models_share_one_place_in_memory(model, tmp_path):
    """All end, none waits for the others' end, and each has the numbers of one that was alone."""
    losses, probe = [await model.step(data) for data in BATCHES], await model.probe()
    async with open_server(tmp_path, loaded_models=1) as client:
        models = [await client.create() for _ in range(3)]
        order = []

        async def live(model):
            for data, loss in zip(BATCHES, losses, strict=True):
                assert await model.step(data) == loss
                order.append(model)
            assert await model.probe() == probe

        async with trio.open_nursery() as nursery:
            for one in models:
                nursery.start_soon(live, one)
        assert (await client.read_metrics())[LOADED] == 1
    for end in range(3, len(order) + 1, 3):  # as many steps each, but for those under way
        counts = [order[:end].count(one) for one in models]
        assert max(counts) - min(counts) <= 2, order


async def test_a_model_with_much_to_do_leaves_its_place_to_others(tmp_path):
    async with open_server(tmp_path, loaded_models=1) as client:
        greedy, modest = await client.create(), await client.create()
        for data in draw_batches(30):
            await greedy.send(data)
            last = await greedy.optim()
        await modest.step(DATA)
        status = await client.get(f"/runs/{greedy.name}/requests/{last}/status")
        assert status["ended"] is None  # else the modest one waited for all of the other's
        await client.result(last)


async def wait_unloaded(client):
    with trio.fail_after(60):
        while (await client.read_metrics())[LOADED]:  # noqa: ASYNC110
            await trio.sleep(0.01)


async def test_an_idle_model_waits_on_disk_with_the_gradient_that_it_has(tmp_path):
    one, two, three, _ = BATCHES
    async with open_server(tmp_path, idle_s=0.05) as client:
        plain, model = await client.create(), await client.create()
        await plain.step(one)
        await plain.accumulate(two)
        await plain.step(three)
        probe = await plain.probe()
        await model.step(one)
        for data in (two, three):
            await wait_unloaded(client)
            await model.accumulate(data)
        await wait_unloaded(client)
        await client.result(await model.optim())
        assert await model.probe() == probe


async def test_a_model_from_a_checkpoint_does_without_it(tmp_path):
    """It is deleted, and the model leaves memory before it has done anything."""
    async with open_server(tmp_path, idle_s=0.05) as client:
        model = await client.create()
        await model.step(DATA)
        probe, path = await model.probe(), (await model.save(path="x"))["path"]
        others = [await client.load(path, optimizer=optimizer) for optimizer in (True, False)]
        where = f"training_runs/{model.name}/checkpoints/weights/x"
        assert (await client.ask("DELETE", where)).status_code == 200
        for _ in range(2):
            await wait_unloaded(client)
            assert [await other.probe() for other in others] == [probe, probe]


# --- sessions -----------------------------------------------------------------------------------------------


async def test_a_session_without_a_sign_of_life_ends_and_its_models_with_it(tmp_path, monkeypatch):
    monkeypatch.setattr(services, "SWEEP_S", 0.05)
    async with open_server(tmp_path, session_s=3.0) as beating:
        silent = await beating.begin()
        gone, there = await silent.create(), await beating.create()
        path = (await gone.save(path="kept"))["path"]
        waiting = await gone.send(DATA, seq=9)  # what is before it never comes
        with trio.fail_after(60):
            while (await beating.read_metrics())["rollouts_clients", "sessions"] > 1:
                await beating.post("session_heartbeat", {"session_id": beating.session})
                await trio.sleep(0.1)
        await silent.fails(waiting, "has ended")
        for where, body in (
            ("session_heartbeat", {"session_id": silent.session}),
            ("optim_step", {"model_id": gone.name, "seq_id": 1}),
            ("create_model", silent.name_model(base_model=MODEL)),
        ):
            assert (await silent.ask("POST", where, json=body)).status_code == 410
        await there.step(DATA)
        await beating.load(path)  # checkpoints stay


async def test_a_session_that_is_finished_leaves_nothing_running(tmp_path):
    async with open_server(tmp_path) as client:
        model, sampler = await client.create(), await client.make_sampler()
        sent = [await model.send(DATA) for _ in range(20)]
        drawn = await client.sample(sampler, [1], 2, max_tokens=200, stop=[])
        finish = f"sessions/{client.session}/finish"
        await client.post(finish, {"reason": {"type": "success"}})
        for request in (sent[-1], drawn):
            await client.fails(request, "has ended")
        await wait_unloaded(client)
        metrics = await client.read_metrics()
        assert not metrics["rollouts_engine", "running"]
        assert not any(name == "rollouts_requests" for name, *_ in metrics)  # none has not ended
        heartbeat = await client.ask("POST", "session_heartbeat", json={"session_id": client.session})
        assert heartbeat.status_code == 410
        await client.post(finish)  # once more is nothing


async def test_models_beyond_a_users_share_wait_for_the_end_of_others(tmp_path):
    async with open_server(tmp_path, models_per_user=2) as ann, open_client(ann.url, OTHER_KEY) as bob:
        for _ in range(2):
            await ann.create()
        reply = await ann.ask("POST", "create_model", json=ann.name_model(base_model=MODEL), once=True)
        assert (reply.status_code, reply.headers["retry-after"]) == (429, "1")
        again = ann.name_model(1, base_model=MODEL)
        assert await ann.post("create_model", again)  # one that is there may be asked for again
        await bob.create()
        await ann.post(f"sessions/{ann.session}/finish")
        await (await ann.begin()).create()


# --- requests -----------------------------------------------------------------------------------------------


async def test_requests_beyond_the_queue_are_told_when_to_come_again(tmp_path):
    async with open_server(tmp_path, queue_length=20) as client:
        model, other = await client.create(), await client.create()
        sent = {seq: await model.send(DATA, seq=seq) for seq in range(2, 22)}
        body = {"model_id": model.name, "seq_id": 22}
        reply = await client.ask("POST", "optim_step", json=body, once=True)
        assert (reply.status_code, reply.headers["retry-after"]) == (429, "1")
        assert "20 requests" in reply.json()["detail"]
        assert await model.send(DATA, seq=5) == sent[5]  # one that waits already may be asked for again
        await other.step(DATA)  # the queue is its own


async def test_a_thousand_requests_wait_and_are_done(client, model):
    sampler = await client.make_sampler()
    sent = [await model.send([make_datum([1, 2])], forward_only=True) for _ in range(500)]
    drawn = [await client.sample(sampler, [1, 2], max_tokens=1) for _ in range(500)]
    assert len({decode_trained(await client.result(one)).loss for one in sent}) == 1
    for one in drawn:
        assert len(decode_sampled(await client.result(one)).tokens) == 1


async def test_what_was_kept_for_its_time_is_forgotten_and_that_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(services, "SWEEP_S", 0.05)
    async with open_server(tmp_path, keep_s=0.2) as client:
        model, sampler = await client.create(), await client.make_sampler()
        for request in (await model.send(DATA), await client.sample(sampler, [1], max_tokens=1)):
            asked, said = {"request_id": request}, ""
            with trio.fail_after(60):
                while "was kept for 0.2 s" not in said:
                    said = (await client.ask("POST", "retrieve_future", json=asked)).text
        # and the model goes on with what it did
        await client.result(await model.optim())


async def test_a_context_and_a_requests_tokens_have_an_end(client, model):
    sampler, capabilities = await client.make_sampler(), await client.get("get_server_capabilities")
    context = capabilities["supported_models"][0]["max_context_length"]
    await client.fails(await model.send([make_datum([1] * (context + 2))]), f"context holds {context}")
    await client.fails(await model.send([make_datum([1] * 52)] * 2), "more than 100 targets")
    for prompt, params in (([1] * context, {}), ([1], {"max_tokens": context})):
        await client.fails(await client.sample(sampler, prompt, **params), f"context holds {context}")
    found = await client.draw(sampler, [1] * (context - 1), stop=[])
    assert len(found.tokens[0]) == 1  # without max_tokens to the end of the context


# --- the end ------------------------------------------------------------------------------------------------


def end_in_time(server):
    started = time.monotonic()
    ended = server.end(signal.SIGTERM)
    assert (ended.returncode, ended.leftover) == (0, ()), server.log.read_text()
    assert time.monotonic() - started < 25


async def test_a_stop_while_models_train_saves_them_and_ends_in_time(forks, tmp_path):
    batches = draw_batches(20)
    with open_process(forks, tmp_path) as server:
        async with open_client(server.url) as client:
            models = [await client.create() for _ in range(2)]
            sent = [[(await one.send(data), await one.optim()) for data in batches] for one in models]
            await client.result(sent[0][2][1])
            await trio.to_thread.run_sync(end_in_time, server)
            (saved,) = (server.folder / "state/models" / models[0].name).glob("step_*")
            assert int(saved.name[5:]) >= 6  # what it had done is saved
            server.start()
            losses = [
                [decode_trained(await client.result(request)).loss for request, _ in one] for one in sent
            ]
            assert losses[0] == losses[1]
            await trio.to_thread.run_sync(end_in_time, server)


def test_a_stop_while_it_starts_ends_in_time(forks, tmp_path):
    for after_s in (0.0, 0.2, 1.0):
        with open_process(forks, tmp_path / str(after_s)) as server:
            time.sleep(after_s)
            # before anybody listens for signals it ends of it
            assert server.end(signal.SIGTERM).returncode in (0, -signal.SIGTERM)


async def test_two_servers_do_not_share_a_directory(tmp_path):
    async with open_server(tmp_path) as client:
        refused = pytest.RaisesExc(StorageError, match=r"does another server use it\?")
        with pytest.RaisesGroup(refused, flatten_subgroups=True):
            async with open_server(tmp_path):
                pass
        assert await client.create()  # and the first goes on
