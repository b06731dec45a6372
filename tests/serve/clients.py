"""A client of the service, in the protocol's own bytes: what the SDK would send, and what it would not."""

import itertools
from contextlib import asynccontextmanager
from typing import NamedTuple

import httpx
import numpy as np
import trio
from prometheus_client.parser import text_string_to_metric_families

from rollouts.serve.wire import MESSAGES

KEY, OTHER_KEY = "tml-test-key", "tml-another-key"
USERS = {KEY: "ann", OTHER_KEY: "bob"}
MODEL = "tiny:byte"
ADAM = {"learning_rate": 1e-2}
LIMIT_S = 400.0  # for anything that is waited for, among it the start of a real server
CONNECT_S = 0.1  # between tries of a server that is being started


def make_datum(tokens, **inputs):
    """One sequence, shifted; by default cross-entropy of every token, weight 1."""
    ids = np.asarray(tokens, np.int64)
    given = {"target_tokens": ids[1:], "weights": np.ones(len(ids) - 1, np.float32)}
    return {"tokens": ids[:-1], **given, **{name: np.asarray(value) for name, value in inputs.items()}}


def draw_batches(count, *, seed=0):
    """Batches of two random sequences."""
    rng = np.random.default_rng(seed)
    return [[make_datum(rng.integers(0, 200, rng.integers(4, 12))) for _ in "ab"] for _ in range(count)]


def encode_train(
    model,
    seq,
    data,
    loss="cross_entropy",
    *,
    config=(),
    **options,
):
    """A ForwardBackwardRequest. options: forward_only."""
    message = MESSAGES["Train"](model_id=model, seq_id=seq, loss_fn=loss, **options)
    for key, value in dict(config).items():
        setting = message.config_v2.add(key=key).value
        setattr(setting, "text" if isinstance(value, str) else "number", value)
    for one in data:
        datum = message.data.add()
        datum.chunks.add().text.tokens = np.asarray(one["tokens"], "<i4").tobytes()
        for name, values in one.items():
            if name != "tokens":
                tensor = datum.inputs.add(key=name).value
                whole = values.dtype.kind == "i"
                tensor.dtype = 2 if whole else 1
                tensor.dense = values.astype("<i8" if whole else "<f4").tobytes()
                tensor.shape.extend(values.shape)
    return message.SerializeToString()


class Trained(NamedTuple):
    """A ForwardBackwardOutput."""

    loss: float
    log_probs: list[np.ndarray]  # [N] or [N, K] of each datum


def decode_trained(content):
    """Of the bytes of a result."""
    message = MESSAGES["Trained"].FromString(content)
    found = []
    for record in message.outputs:
        (field,) = record.fields
        values = np.frombuffer(field.value.data, "<f4")
        ends = np.frombuffer(field.value.offsets, "<i8") // 4
        rows = [values[a:b] for a, b in itertools.pairwise(ends)]
        trailing = tuple(field.value.trailing_shape)
        found += [row.reshape(-1, *trailing) for row in rows]
    return Trained({one.key: one.value for one in message.metrics}["loss:sum"], found)


class Sampled(NamedTuple):
    """A SampleResponse."""

    tokens: list[list[int]]
    log_probs: list[np.ndarray]
    prompt_log_probs: np.ndarray


def decode_sampled(content):
    """Of the bytes of a result."""
    message = MESSAGES["Samples"].FromString(content)
    tokens = [np.frombuffer(one.tokens, "<i4").tolist() for one in message.sequences]
    log_probs = [np.frombuffer(one.logprobs, "<f4") for one in message.sequences]
    return Sampled(tokens, log_probs, np.frombuffer(message.prompt_logprobs, "<f4"))


def read_good(reply):
    """It is an answer without an error."""
    assert reply.status_code == 200, (reply.status_code, reply.text)
    return reply


class Client:
    """A user with a session; a lost connection, 408 and 429 are tried again, as by the SDK."""

    def __init__(self, http):
        self.http, self.url = http, str(http.base_url).rstrip("/")
        self.session, self._numbers = "", itertools.count()

    async def ask(self, method, path, *, once=False, **options):
        """The answer, whatever it says; below /api/v1 where the path has no slash first."""
        path = path if path.startswith("/") else f"/api/v1/{path}"
        with trio.fail_after(LIMIT_S):
            while True:
                try:
                    reply = await self.http.request(method, path, **options)
                    if once or reply.status_code not in (408, 429):
                        return reply
                except httpx.TransportError:
                    pass
                await trio.sleep(CONNECT_S)

    async def get(self, path):
        """The fields of the answer, which must be good."""
        return read_good(await self.ask("GET", path)).json()

    async def post(self, path, body=None):
        """The fields of the answer, which must be good."""
        raw = {"content": body} if isinstance(body, bytes) else {"json": body or {}}
        return read_good(await self.ask("POST", path, **raw)).json()

    async def read_metrics(self):
        """Every sample of Prometheus, by its name and the values of its labels."""
        text = read_good(await self.ask("GET", "/metrics")).text
        return {
            (sample.name, *sample.labels.values()): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    async def begin(self):
        """Another session of the user."""
        client = Client(self.http)
        client.session = (await self.post("create_session", {"tags": []}))["session_id"]
        return client

    def name_model(self, number=None, **fields):
        """What a request for a model begins with; by default a new one."""
        number = next(self._numbers) if number is None else number
        return {"session_id": self.session, "model_seq_id": number, **fields}

    async def result(self, request):
        """What a request came to: fields, or bytes of protobuf. It has not failed."""
        reply = read_good(await self.ask("POST", "retrieve_future", json={"request_id": request}))
        if reply.headers["content-type"] == "application/x-protobuf":
            return reply.content
        assert "error" not in reply.json(), reply.text
        return reply.json()

    async def fails(self, request, says):
        """A request has come to an error of the user's own, which says this."""
        found = await self.post("retrieve_future", {"request_id": request})
        assert found["category"] == "user" and says in found["error"], (found, says)

    async def create(self, *, seed=7):
        """A model."""
        lora = {"rank": 4, "seed": seed}
        made = await self.post("create_model", self.name_model(base_model=MODEL, lora_config=lora))
        await self.result(made["request_id"])
        return Trainee(self, made["model_id"])

    async def load(self, path, *, optimizer=True):
        """A model from a checkpoint."""
        made = await self.post("load_weights", self.name_model(path=path, optimizer=optimizer))
        return Trainee(self, (await self.result(made["request_id"]))["model_id"])

    async def sample(self, sampler, prompt, n=1, *, seq=None, **params):
        """The id of a request for samples."""
        body = {
            "sampling_session_id": sampler, "seq_id": next(self._numbers) if seq is None else seq,
            "num_samples": n, "prompt_logprobs": params.pop("prompt_logprobs", False),
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [*prompt]}]}, "sampling_params": params,
        }  # fmt: skip
        return (await self.post("asample", body))["request_id"]

    async def draw(self, *request, **params):
        """The samples."""
        return await self.drawn(await self.sample(*request, **params))

    async def drawn(self, request):
        """The samples of a request."""
        return decode_sampled(await self.result(request))

    async def make_sampler(self, **of):
        """The name of a sampler of the base model, or of a model_path."""
        of = of or {"base_model": MODEL}
        body = {"session_id": self.session, "sampling_session_seq_id": next(self._numbers), **of}
        return (await self.post("create_sampling_session", body))["sampling_session_id"]


@asynccontextmanager
async def open_client(url, key=KEY, **options):
    """A user with a session, when it serves. options: of httpx.AsyncClient."""
    headers = {"x-api-key": key} | options.pop("headers", {})
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=LIMIT_S, **options) as http:
        yield await Client(http).begin()


class Trainee:
    """A model, and the last number of its requests."""

    def __init__(self, client, name):
        self.client, self.name, self.seq = client, name, 0

    def take(self):
        """The next number."""
        self.seq += 1
        return self.seq

    async def submit(self, kind, /, seq=None, **fields):
        """The id of a request in JSON."""
        body = {"model_id": self.name, "seq_id": self.take() if seq is None else seq, **fields}
        return (await self.client.post(kind, body))["request_id"]

    async def send(self, data, *loss, seq=None, **options):
        """The id of a forward_backward."""
        body = encode_train(self.name, self.take() if seq is None else seq, data, *loss, **options)
        return (await self.client.post("forward_backward", body))["request_id"]

    async def optim(self, seq=None):
        """The id of a step of the optimizer."""
        return await self.submit("optim_step", seq, adam_params=ADAM)

    async def accumulate(self, *data, **options):
        """A forward_backward, awaited."""
        return decode_trained(await self.client.result(await self.send(*data, **options)))

    async def step(self, data):
        """The loss of a forward_backward; with the step of the optimizer, awaited."""
        sent, stepped = await self.send(data), await self.optim()
        await self.client.result(stepped)
        return decode_trained(await self.client.result(sent)).loss

    async def probe(self):
        """Log-probs of some tokens: what the weights are."""
        found = await self.accumulate([make_datum(range(3, 40, 3))], forward_only=True)
        return found.log_probs[0].tolist()

    async def save(self, kind="save_weights", /, **fields):
        """The answer of a save."""
        return await self.client.result(await self.submit(kind, **fields))
