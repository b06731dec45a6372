"""Who may ask for what: keys on every route, and nothing of other users', by whatever name."""

import json
import os
import socket
from string import Template
from typing import Any

import httpx
import pytest

from integration_training.serve import read_keys, serve_model
from rollouts.config.schema import RunConfig
from rollouts.config.serve import ServeConfig
from rollouts.errors import ConfigError
from rollouts.loops.stopping import Stop
from rollouts.serve.app import KEYLESS, TINKER
from rollouts.serve.manage import MANAGE
from tests.serve.clients import KEY, draw_batches
from tests.serve.servers import make_config
from tests.support.text_tables import cases, read_cells

(DATA,) = draw_batches(1)
ROUTES = [
    *TINKER,
    *(route for route in MANAGE if KEYLESS not in route),
    "GET /nothing/here",
    "POST /api/v1/no_such_route",
]


async def test_every_route_asks_for_a_key_that_is_known(server):
    """Also one that is not there: nobody learns what there is."""
    wrong = [{"x-api-key": "tml-wrong"}, {"authorization": f"Bearer {KEY}x"}, {"x-api-key": "é".encode()}]
    async with httpx.AsyncClient(base_url=server) as http:
        for route in ROUTES:
            method, path = route.translate({ord("{"): None, ord("}"): None}).split()
            for headers in ({}, *wrong):
                reply = await http.request(method, path, headers=headers)
                assert (reply.status_code, reply.json()["category"]) == (401, "user"), route
                assert int(reply.headers["content-length"]) == len(reply.content) > 0
        for headers in ({"x-api-key": KEY}, {"authorization": f"Bearer {KEY}"}):
            reply = await http.get("/api/v1/healthz", headers=headers)
            assert reply.json() == {"status": "ok"}


async def refused(client, method, path, **options):
    """It is told 404, as for a name that there never was."""
    reply = await client.ask(method, path, **options)
    assert reply.status_code == 404, (path, reply.status_code, reply.text)


POSTS = Template("""
session_heartbeat | {"session_id": "$mine"}
create_model | {"session_id": "$mine", "model_seq_id": 1, "base_model": "tiny:byte"}
create_sampling_session | {"session_id": "$mine", "sampling_session_seq_id": 1, "base_model": "tiny:byte"}
create_sampling_session | {"session_id": "$theirs", "sampling_session_seq_id": 1, "model_path": "$path"}
load_weights | {"session_id": "$theirs", "model_seq_id": 5, "path": "$path"}
load_weights | {"session_id": "$mine", "model_seq_id": 0, "path": "$path"}
load_weights | {"model_id": "$run", "seq_id": 9, "path": "$path"}
get_info | {"model_id": "$run", "seq_id": 9}
optim_step | {"model_id": "$run", "seq_id": 9}
save_weights | {"model_id": "$run", "seq_id": 9}
save_weights_external | {"model_id": "$run", "seq_id": 9}
save_weights_for_sampler | {"model_id": "$run", "seq_id": 9}
retrieve_future | {"request_id": "$request"}
retrieve_future | {"request_id": "$drawn"}
cancel_future | {"request_id": "$drawn"}
weights_info | {"tinker_path": "$path"}
asample | {"sampling_session_id": "$sampler", "seq_id": 0, "prompt": {"chunks": []}, "sampling_params": {}}
""")


async def test_what_is_another_users_is_not_there(client, other, model):
    await model.step(DATA)
    request = await model.send(DATA, forward_only=True)
    path = (await model.save(path="mine"))["path"]
    external = (await model.save("save_weights_external", path="mine"))["path"]
    sampler = await client.make_sampler()
    drawn = await client.sample(sampler, [1, 2], max_tokens=2)
    run, name = f"training_runs/{model.name}", model.name
    for where in f"""
        GET samplers/{sampler}
        GET {run}
        GET {run}/checkpoints
        DELETE {run}/checkpoints/weights/mine
        POST {run}/checkpoints/weights/mine/publish
        DELETE {run}/checkpoints/weights/mine/publish
        GET {run}/checkpoints/external_weights/mine/external_weights_urls
        GET {run}/checkpoints/external_weights/mine/archive
        GET sessions/{client.session}
        POST sessions/{client.session}/finish
        GET /runs/{name}/requests/{request}/status
        GET /runs/{name}/queue/stats
    """.strip().splitlines():
        await refused(other, *where.split())
    asked = {"run": name, "path": path, "request": request, "drawn": drawn, "sampler": sampler}
    for where, body in read_cells(POSTS.substitute(asked, mine=client.session, theirs=other.session)):
        await refused(other, "POST", where, json=json.loads(body))
    await refused(other, "PUT", f"{run}/checkpoints/weights/mine/ttl", json={"ttl_seconds": 1})
    # and where users' own are listed
    own = await other.create()
    for where in ("training_runs", "sessions", "checkpoints"):
        text = (await other.ask("GET", where)).text
        assert name not in text and client.session not in text and path not in text
    # a number of the other's request, by the name of one's own model
    await refused(other, "GET", f"/runs/{own.name}/requests/{request}/status")
    await other.fails(await own.submit("load_weights", path=path), "there is no checkpoint")
    # nothing of it has changed anything
    assert (await client.post("weights_info", {"tinker_path": external}))["is_lora"]
    assert (await client.get(run))["last_checkpoint"]["expires_at"] is None


async def test_a_published_checkpoint_is_read_by_all_and_changed_by_its_owner_alone(client, other, model):
    await model.step(DATA)
    path = (await model.save(path="open"))["path"]
    where = f"training_runs/{model.name}/checkpoints/weights/open"
    assert (await client.ask("POST", f"{where}/publish")).status_code == 200
    assert await (await other.load(path)).probe() == await model.probe()
    for method, more in (("DELETE", ""), ("DELETE", "/publish"), ("PUT", "/ttl")):
        assert (await other.ask(method, where + more, content=b"{}")).status_code in (403, 404)
    await client.ask("DELETE", f"{where}/publish")
    await refused(other, "POST", "weights_info", json={"tinker_path": path})


async def test_downloads_have_a_signature_for_one_file_and_a_time(client, model):
    await model.step(DATA)
    await model.save("save_weights_external", path="out")
    where = f"training_runs/{model.name}/checkpoints/external_weights/out"
    urls = (await client.get(f"{where}/external_weights_urls"))["urls"]
    assert {"adapter_config.json", "adapter_model.safetensors"} <= set(urls)
    assert "manifest.json" not in urls and "state" not in urls
    url, archive = urls["adapter_config.json"], await client.ask("GET", f"{where}/archive")
    until = int(httpx.URL(url).params["until"])
    async with httpx.AsyncClient() as http:
        assert (await http.get(url)).json()["r"] == 4
        for wrong in [
            url.replace("adapter_config.json", "adapter_model.safetensors"),
            url.replace("adapter_config.json", "manifest.json"),
            url.replace("adapter_config.json", "..%2F..%2Fservice.sqlite"),
            *(url.replace(str(until), other) for other in (str(until + 1), "0", "9" * 5000, "x")),
            url[:-1],
            f"{url[:-1]}%C3%A9",
            url.partition("?")[0],
        ]:
            reply = await http.get(wrong)
            assert reply.status_code in (403, 404), (wrong, reply.status_code)
        assert (await http.get(archive.headers["location"])).content[:19] == b"adapter_config.json"
        await client.ask("DELETE", where)
        assert (await http.get(url)).status_code == 403


# --- the file of keys ---------------------------------------------------------------------------------------


@pytest.fixture
def users(tmp_path, monkeypatch):
    """An empty file of keys; none is in the environment."""
    monkeypatch.delenv("ROLLOUTS_API_KEY", raising=False)
    path = tmp_path / "users"
    path.touch(0o600)
    return path


def read_users(path):
    return read_keys(ServeConfig(key_file=str(path)), path.parent)


def test_a_file_of_keys_is_made_for_its_owner_alone(tmp_path, users, capsys):
    made = read_keys(ServeConfig(), tmp_path)
    assert (tmp_path / "keys").stat().st_mode & 0o777 == 0o600
    (key,) = made
    assert key.startswith("tml-") and len(key) > 40 and made[key] == "owner"
    assert key not in capsys.readouterr().out
    assert read_keys(ServeConfig(), tmp_path) == made


def test_the_environments_key_leaves_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("ROLLOUTS_API_KEY", "tml-from-here")
    assert read_keys(ServeConfig(), tmp_path) == {"tml-from-here": "owner"}
    assert "ROLLOUTS_API_KEY" not in os.environ
    assert not (tmp_path / "keys").exists()


@cases(r"""
text | says
"" | has no key
"# nobody\n\n" | has no key
"ann" | line 1: each line is
"# two\nann tml-key-1 more" | line 2: each line is
"ann tml-key-1\nbob tml-key-1" | line 2: each line is
"ann secret-key" | line 1: a key begins with 'tml-'
"ann tml-" | line 1: a key begins with 'tml-'
"ann \udcff" | cannot be read
""")
def test_a_wrong_line_of_keys_is_named(users, text: Any, says):
    users.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=says):
        read_users(users)


def test_keys_that_others_may_read_or_that_are_not_there_are_refused(users):
    users.write_text("ann tml-key-1\nbob tml-key-2\n")
    assert read_users(users) == {"tml-key-1": "ann", "tml-key-2": "bob"}
    users.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_users(users)
    users.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        read_users(users)


async def test_a_port_that_is_taken_is_told_before_a_model_loads(tmp_path):
    config = RunConfig.model_validate(make_config(tmp_path))
    said = pytest.raises(ConfigError, match=f"serve.port={config.serve.port} cannot be used.*in use")
    with socket.create_server(("127.0.0.1", config.serve.port)), said:
        await serve_model(config, config.serve, tmp_path, {}, tmp_path / "no_model", None, Stop())
