"""What Prometheus reads of a service."""

from tests.serve.servers import open_server


async def test_what_was_done_is_counted_and_what_is_held_is_shown(tmp_path):
    async with open_server(tmp_path) as client:
        before = await client.read_metrics()
        assert before["rollouts_models", "in_memory"] == 0
        assert before["rollouts_sampled_tokens_total",] == 0
        model, sampler = await client.create(), await client.make_sampler()
        await client.draw(sampler, [5, 6, 7], 2, max_tokens=3, stop=[])
        await client.fails(await model.submit("save_weights", path="../x"), "")
        after = await client.read_metrics()
        reply = await client.ask("GET", "/metrics", headers={"x-api-key": "tml-wrong"})
    assert after["rollouts_models", "in_memory"] == after["rollouts_clients", "sessions"] == 1
    assert after["rollouts_clients", "samplers"] == 1
    assert after["rollouts_sampled_tokens_total",] == 6
    for kind, state in (("create_model", "done"), ("sample", "done"), ("save_weights", "failed")):
        assert after["rollouts_request_seconds_count", kind, state] == 1
        assert after["rollouts_request_queued_seconds_count", kind] == 1
    assert after["rollouts_engine", "running"] == after["rollouts_references", "bytes"] == 0
    assert after["process_resident_memory_bytes",] > 1e6
    assert ("rollouts_trainer", "queued") in after and ("rollouts_sampler_weights", "bytes") in after
    # only who has a key may look
    assert (reply.status_code, reply.headers["www-authenticate"]) == (401, "rollouts")
