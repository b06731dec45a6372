"""Updates that need the trainer only at their beginning: what is copied, what the trainer says beforehand,
and what the engines serve in the end.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trio
from safetensors.torch import load_file

from rollouts.backends.open import open_pytorch_backend
from rollouts.config.schema import OptimConfig
from rollouts.device_thread import open_device_thread
from rollouts.engines.local import open_local_engine
from rollouts.errors import BackendError, WeightSyncError
from rollouts.models.greedy import complete_greedily
from rollouts.models.load import load_hf_model
from rollouts.models.tiny import make_tiny
from rollouts.types import Completion, GenerateRequest, LossSpec, RolloutBatch, SamplingParams
from rollouts.weight_sync import disk
from rollouts.weight_sync.disk import DiskSnapshots, export_snapshot, hold_weights
from rollouts.weight_sync.probe import (
    LEAST_AGREED,
    Probe,
    TrainerAnswer,
    ask_probe,
    ask_trainer,
    check_agreement,
    compare_with_answers,
    judge_by_answers,
    make_probe_prompt,
)
from rollouts.weight_sync.sync import Snapshot, WeightSource, WeightSync
from tests.unit.test_weight_sync import FleetWorld, InMemoryServer, Trainer, disk_only, log_probs_of

BATCH = RolloutBatch(tokens=(np.arange(1, 25),), loss_masks=(np.arange(24) >= 4,))
KINDS = (
    "byte",
    "llama",
    "qwen3",
    "gemma",
    "mamba",
    "moe",
)  # byte, llama, gemma and mamba have tied embeddings
PLENTY = 1 << 40


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(autouse=True)
def plenty_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "read_free_memory", lambda: PLENTY)


def open_backend(path: Path) -> Any:
    return open_pytorch_backend(path, optim=OptimConfig(lr=1e-2), total_steps=10, threads=1, autocast="off")


async def take_step(backend: Any) -> None:
    backend.forward_backward(BATCH, LossSpec("sft"))
    await backend.optim_step().result()
    await backend.set_weight_version(backend.weight_version + 1).result()


def read_files(path: Path) -> dict[str, bytes]:
    """Of a snapshot, without the manifest, which has its version and the time."""
    return {
        file.name: file.read_bytes() for file in path.iterdir() if file.name.startswith(("model", "config"))
    }


# --- what the trainer says beforehand -----------------------------------------------------------------------


def say_greedily(model: Any, prompt_ids: np.ndarray, count: int) -> tuple[list[int], np.ndarray]:
    """The obvious loop: the most likely token, and all log-probs, of a model that is shown everything so far."""
    ids, rows = prompt_ids.tolist(), []
    for _ in range(count):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].double()
        rows.append((logits - torch.logsumexp(logits, 0)).numpy())
        ids.append(int(logits.argmax()))
    return ids[len(prompt_ids) :], np.stack(rows)


@pytest.mark.parametrize("kind", KINDS)
async def test_the_trainers_own_answer_is_the_argmax_of_its_logits(kind: str, cache: Path):
    path, prompt_ids = make_tiny(kind, 0, cache), make_probe_prompt(250)
    tokens, expected = say_greedily(load_hf_model(path), prompt_ids, 6)
    async with open_backend(path) as backend:
        rows = await backend.complete_greedily(prompt_ids, 6).result()
        assert rows.shape == expected.shape and rows.dtype == np.float32
        assert rows.argmax(-1).tolist() == tokens
        np.testing.assert_allclose(rows, expected, atol=2e-5)
        before = rows
        await take_step(backend)
        assert np.abs(await backend.complete_greedily(prompt_ids, 6).result() - before).max() > 1e-3, (
            "it answers with the weights that it has"
        )


async def test_the_answer_is_in_the_precision_that_training_computes_in(cache: Path):
    path, prompt_ids = make_tiny("llama", 0, cache), make_probe_prompt(250)
    model = load_hf_model(path)
    exact = complete_greedily(model, prompt_ids, 4)
    rough = complete_greedily(model, prompt_ids, 4, autocast_dtype=torch.bfloat16)
    assert rough.dtype == np.float32
    assert 1e-4 < np.abs(exact[0] - rough[0]).max() < 0.1


# --- the copy -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_snapshot_of_held_weights_is_that_of_the_trainer_byte_for_byte_also_when_it_has_stepped_on(
    kind: str, dtype: torch.dtype | None, cache: Path, tmp_path: Path
):
    async with open_backend(make_tiny(kind, 0, cache)) as backend:
        await take_step(backend)
        expected = await export_snapshot(backend, tmp_path / "a/v1", dtype=dtype)
        held = await hold_weights(backend, dtype=dtype)
        await take_step(backend)
        assert held is not None
        written = await export_snapshot(held, tmp_path / "b/v1", dtype=dtype)
        moved = await export_snapshot(backend, tmp_path / "c/v1", dtype=dtype)
    assert written.digest == expected.digest != moved.digest
    assert written.weight_bytes == expected.weight_bytes
    assert read_files(tmp_path / "b/v1") == read_files(tmp_path / "a/v1")


async def test_a_copy_is_made_where_half_as_much_again_is_free_and_nowhere_else(
    cache: Path, monkeypatch: pytest.MonkeyPatch
):
    async with open_backend(make_tiny("llama", 0, cache)) as backend:
        needed = sum(parameter.nbytes for parameter in backend.model.parameters())
        for free, dtype, is_made in [
            (None, None, True),
            (int(1.5 * needed), None, True),
            (int(1.5 * needed) - 2, None, False),
            (int(0.75 * needed), torch.bfloat16, True),
            (int(0.75 * needed) - 2, torch.bfloat16, False),
        ]:
            monkeypatch.setattr(disk, "read_free_memory", lambda free=free: free)
            assert (await hold_weights(backend, dtype=dtype) is not None) is is_made, (free, dtype)


# --- who is believed without the trainer --------------------------------------------------------------------


def make_answer(*rows: Sequence[float]) -> TrainerAnswer:
    """Of log-probs, which here need not add up to anything."""
    log_probs = np.asarray(rows, np.float32)
    return TrainerAnswer(log_probs.argmax(-1), log_probs)


def say(tokens: Sequence[int], log_probs: Sequence[float]) -> Completion:
    return Completion(
        request_id="probe", token_ids=np.asarray(tokens, np.int64), log_probs=np.asarray(log_probs, np.float32),
        weight_versions=np.full(len(tokens), 7), finish_reason="length",
    )  # fmt: skip


SURE = (-0.1, -3.0, -4.0)  # token 0
TIED = (-0.7, -0.715, -5.0)  # tokens 0 and 1, 0.015 apart: no more than two tolerances of 0.01
CLOSE = (-0.7, -0.721, -5.0)  # 0.021 apart


def test_an_answer_that_is_the_trainers_is_compared_to_its_end():
    reply = compare_with_answers(
        [make_answer(*[SURE] * 6)], say([0] * 6, [-0.1] * 5 + [-0.105]), tolerance=0.01
    )
    assert (reply.version, reply.token_ids.tolist(), reply.full_token_ids) == (7, [0] * 6, None)
    assert reply.difference == pytest.approx(0.005, abs=1e-6)


def test_an_answer_that_takes_the_other_of_two_tied_tokens_is_compared_to_there():
    answer = make_answer(*[SURE] * 4, TIED, SURE)
    reply = compare_with_answers([answer], say([0, 0, 0, 0, 1, 2], [-0.1] * 4 + [-0.7, -9.0]), tolerance=0.01)
    assert reply.token_ids.tolist() == [0, 0, 0, 0, 1], "what follows the other token is another text"
    np.testing.assert_allclose(reply.trainer_log_probs, [-0.1] * 4 + [-0.715])
    assert reply.difference == pytest.approx(0.015, abs=1e-6)
    assert reply.full_token_ids is not None and reply.full_token_ids.tolist() == [
        0,
        0,
        0,
        0,
        1,
        2,
    ], "all of it tells whether the engine moved"


def test_an_answer_that_parts_where_nothing_was_tied_is_refused():
    with pytest.raises(
        WeightSyncError,
        match=r"token 1 at position 4, where the trainer at version 7 would say 0 \(0\.021 nats apart\)",
    ):
        compare_with_answers(
            [make_answer(*[SURE] * 4, CLOSE, SURE)], say([0, 0, 0, 0, 1, 2], [-0.1] * 6), tolerance=0.01
        )


def test_an_early_tie_is_followed_by_the_answer_that_goes_on_from_there():
    first = make_answer(SURE, TIED, *[SURE] * 4)
    other = TrainerAnswer(
        np.asarray([0, 1, 2, 2, 2, 2]), np.asarray([SURE, TIED, *[(-5.0, -5.0, -0.2)] * 4], np.float32)
    )
    said = say([0, 1, 2, 2, 2, 2], [-0.1, -0.715] + [-0.2] * 4)
    assert compare_with_answers([first, other], said, tolerance=0.01).difference == pytest.approx(
        0.0, abs=1e-6
    )
    with pytest.raises(
        WeightSyncError, match=f"of which 2 can be compared .*at least {LEAST_AGREED} are needed"
    ):
        compare_with_answers([first], said, tolerance=0.01)


@pytest.mark.parametrize("token", [3, -1, 10**9])
def test_a_token_that_the_trainer_does_not_have_is_refused(token: int):
    with pytest.raises(WeightSyncError, match="outside the trainer's vocabulary of 3"):
        compare_with_answers(
            [make_answer(*[SURE] * 6)], say([0, 0, 0, 0, token, 0], [-0.1] * 6), tolerance=0.01
        )


def test_an_answer_of_too_few_tokens_proves_nothing():
    with pytest.raises(WeightSyncError, match="has 3 tokens, of which 3 can be compared"):
        compare_with_answers([make_answer(*[SURE] * 6)], say([0, 0, 0], [-0.1] * 3), tolerance=0.01)
    assert (
        len(
            compare_with_answers(
                [make_answer(*[SURE] * 3)], say([0, 0, 0], [-0.1] * 3), tolerance=0.01
            ).token_ids
        )
        == 3
    ), "all there is"


def test_a_trainer_that_has_no_number_is_agreed_with_by_nobody():
    rows = np.asarray([SURE] * 4, np.float32)
    rows[2, 0] = np.nan
    answer = TrainerAnswer(np.zeros(4, np.int64), rows)
    reply = compare_with_answers([answer], say([0] * 4, [-0.1] * 4), tolerance=0.01)
    with pytest.raises(WeightSyncError, match="nan"):
        check_agreement(reply, tolerance=0.01)


class TiedTrainer:
    """A model of three tokens that is torn between 0 and 1 at one place, wherever it starts."""

    def __init__(self, place: int) -> None:
        self.place = place
        self.asked: list[list[int]] = []

    def complete_greedily(self, prompt_ids: np.ndarray, count: int) -> Any:
        self.asked.append(prompt_ids.tolist())
        said = len(prompt_ids) - 2
        rows = np.asarray(
            [TIED if said + index == self.place else SURE for index in range(count)], np.float32
        )

        class Future:
            async def result(self) -> np.ndarray:
                await trio.lowlevel.checkpoint()
                return rows

        return Future()


@pytest.mark.parametrize(
    ("place", "asked"), [(0, [[8, 9], [8, 9, 1]]), (2, [[8, 9], [8, 9, 0, 0, 1]]), (3, [[8, 9]])]
)
async def test_the_trainer_is_asked_again_for_each_early_tie(place: int, asked: list[list[int]]):
    trainer = TiedTrainer(place)
    answers = await ask_trainer(Probe(np.asarray([8, 9]), 0.01, num_tokens=6), trainer)
    assert trainer.asked == asked
    assert answers is not None
    assert [answer.token_ids.tolist() for answer in answers] == [
        [0] * 6,
        [*[0] * place, 1, *[0] * (5 - place)],
    ][: len(asked)]
    for answer in answers:
        np.testing.assert_array_equal(answer.log_probs[place], np.asarray(TIED, np.float32))
        assert answer.log_probs.shape == (6, 3)


class TornTrainer:
    """A model of `vocab` tokens that has no preference among the first `torn` of them, at any place."""

    def __init__(self, torn: int, vocab: int = 40) -> None:
        self.row = np.full(vocab, -9.0, np.float32)
        self.row[:torn] = -np.log(torn)

    def complete_greedily(self, prompt_ids: np.ndarray, count: int) -> Any:
        rows = np.tile(self.row, (count, 1))

        class Future:
            async def result(self) -> np.ndarray:
                await trio.lowlevel.checkpoint()
                return rows

        return Future()


async def test_an_engine_may_take_any_token_of_a_tie_and_again_after_it():
    answers = await ask_trainer(Probe(np.asarray([8, 9]), 0.01, num_tokens=6), TornTrainer(3))
    assert answers is not None and len(answers) == 27, "three places of three tokens"
    for said in itertools.product(range(3), repeat=4):
        reply = compare_with_answers(answers, say([*said, 0, 0], [-np.log(3)] * 6), tolerance=0.01)
        assert len(reply.token_ids) >= LEAST_AGREED and reply.difference < 1e-6


async def test_a_trainer_with_too_many_early_ties_does_not_say_beforehand():
    assert await ask_trainer(Probe(np.asarray([8, 9]), 0.01, num_tokens=6), TornTrainer(4)) is None, (
        "64 answers"
    )


@asynccontextmanager
async def open_pair(path: Path) -> AsyncIterator[tuple[Any, Any]]:
    """A trainer, and an engine with a copy of its weights."""
    async with (
        open_backend(path) as backend,
        open_device_thread(name="engine", torch_threads=1) as thread,
        open_local_engine(backend.model, device_thread=thread, mode="copied", max_rows=8) as engine,
    ):
        yield backend, engine


async def judge_engine(backend: Any, engine: Any, probe: Probe, version: int) -> float:
    """The difference between the engine and the trainer, as an update finds it. Raises what an update would
    raise.
    """
    answers = await ask_trainer(probe, backend)
    assert answers is not None
    judge = judge_by_answers(answers, tolerance_of=probe.tolerance_of)
    reply = await judge(
        engine, await ask_probe(probe, engine, version=version, request_id=f"probe-{trio.current_time()}")
    )
    check_agreement(reply, tolerance=probe.tolerance)
    assert len(reply.token_ids) >= LEAST_AGREED
    return reply.difference


@pytest.mark.parametrize("kind", ["byte", "qwen3", "gemma"])
async def test_an_honest_engine_is_believed_whatever_it_is_asked_and_one_with_the_old_weights_never(
    kind: str, cache: Path
):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 250, size=rng.integers(1, 20)) for _ in range(12)]
    async with open_pair(make_tiny(kind, 0, cache)) as (backend, engine):
        for prompt in prompts:
            assert await judge_engine(backend, engine, Probe(prompt, 1e-3, num_tokens=8), 0) < 1e-4
        await take_step(backend)
        for prompt in prompts:
            with pytest.raises(WeightSyncError, match="does not serve the weights that were sent"):
                await judge_engine(backend, engine, Probe(prompt, 1e-3, num_tokens=8), 0)


# --- the update ---------------------------------------------------------------------------------------------


class StepsOn:
    """A SnapshotKeeper whose trainer has taken a step on before anything is written, if it was released by
    then.
    """

    def __init__(self, backend: Any, folder: Path, *, dtype: str | None = None) -> None:
        self.snapshots = DiskSnapshots(folder, dtype=dtype)
        self.backend = backend
        self.released = trio.Event()
        self.sources: list[WeightSource] = []
        self.steps = 0

    async def hold(self, backend: Any) -> Any:
        assert not self.released.is_set()
        return await self.snapshots.hold(backend)

    async def export(self, backend: WeightSource, version: int) -> Snapshot:
        self.sources.append(backend)
        if self.released.is_set():
            await take_step(self.backend)
            self.steps += 1
        return await self.snapshots.export(backend, version)

    def open_reader(self, path: Path) -> Any:
        return self.snapshots.open_reader(path)

    async def prune(self, keep: Path) -> None:
        await self.snapshots.prune(keep)


def refuse_forward(backend: Any) -> Any:
    """The backend, as one that an update may ask for nothing that takes a forward pass of its rows."""

    class NoForward:
        def __getattr__(self, name: str) -> Any:
            assert name != "forward", "the trainer was asked for log-probs after it was released"
            return getattr(backend, name)

        def complete_greedily(
            self, prompt_ids: np.ndarray, count: int
        ) -> Any:  # where isinstance looks for it
            return backend.complete_greedily(prompt_ids, count)

    return NoForward()


@pytest.mark.parametrize("kind", ["byte", "moe"])
async def test_the_trainer_steps_on_while_its_weights_are_written_and_the_engine_serves_what_they_were(
    kind: str, cache: Path, tmp_path: Path
):
    async with open_pair(make_tiny(kind, 0, cache)) as (backend, engine):
        probe = Probe(make_probe_prompt(engine.features.vocab_size), 1e-3)
        await take_step(backend)
        wanted = {name: tensor.clone() for name, tensor in (await backend.get_weights().result()).items()}
        answer = await backend.complete_greedily(probe.prompt_ids, 8).result()
        keeper = StepsOn(backend, tmp_path / "weights")
        sync = WeightSync(probe, keeper=keeper)
        metrics = await sync(refuse_forward(backend), [disk_only(engine)], 1, released=keeper.released)
        assert keeper.released.is_set() and keeper.steps == 1 and backend.weight_version == 2
        assert keeper.sources != [backend] and metrics["weight_sync/probe_difference/max"] < 1e-4
        served = dict(engine._own_model.named_parameters())
        assert set(served) == set(wanted)
        for name, tensor in wanted.items():
            assert torch.equal(served[name], tensor), name
        now = await backend.get_weights().result()
        assert any(not torch.equal(now[name], tensor) for name, tensor in wanted.items()), (
            "the trainer has gone on"
        )
        sampling = SamplingParams(max_new_tokens=8, temperature=0.0)
        said = await engine.generate(
            GenerateRequest(request_id="r", prompt_ids=probe.prompt_ids, sampling=sampling)
        )
        assert said.token_ids.tolist() == answer.argmax(-1).tolist() and set(
            said.weight_versions.tolist()
        ) == {1}
        np.testing.assert_allclose(said.log_probs, answer.max(-1), atol=1e-4)


async def test_without_room_for_a_copy_the_trainer_is_kept_until_the_end(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(disk, "read_free_memory", lambda: 1000)
    async with open_pair(make_tiny("byte", 0, cache)) as (backend, engine):
        await take_step(backend)
        keeper = StepsOn(backend, tmp_path / "weights")
        sync = WeightSync(Probe(make_probe_prompt(engine.features.vocab_size), 1e-3), keeper=keeper)
        metrics = await sync(backend, [disk_only(engine)], 1, released=keeper.released)
        assert not keeper.released.is_set() and keeper.steps == 0 and keeper.sources == [backend]
        assert metrics["weight_sync/probe_difference/max"] < 1e-4 and await engine.weight_version() == 1
        written = load_file(tmp_path / "weights/v1/model.safetensors")
        for name, tensor in (await backend.get_weights().result()).items():
            assert torch.equal(written[name], tensor), name


async def test_an_engine_that_takes_weights_in_memory_keeps_the_trainer_until_it_has_proven_them(
    cache: Path, tmp_path: Path
):
    async with open_pair(make_tiny("byte", 0, cache)) as (backend, engine):
        await take_step(backend)
        keeper = StepsOn(backend, tmp_path / "weights")
        sync = WeightSync(Probe(make_probe_prompt(engine.features.vocab_size), 1e-3), keeper=keeper)
        await sync(backend, [engine], 1, released=keeper.released)
        assert not keeper.released.is_set() and keeper.sources == []
        for name, tensor in (await backend.get_weights().result()).items():
            assert torch.equal(dict(engine._own_model.named_parameters())[name], tensor), name


async def test_an_engine_that_keeps_the_old_weights_is_caught_without_the_trainer(
    cache: Path, tmp_path: Path
):
    async with open_pair(make_tiny("byte", 0, cache)) as (backend, engine):
        deaf, versions = disk_only(engine), list[int]()

        async def take_nothing(path: Path, version: int) -> dict[str, Any]:
            versions.append(version)
            await engine.begin_update()
            await engine_stream_old(engine, old)
            await engine.finish_update(version)
            return {}

        old = {name: tensor.clone() for name, tensor in (await backend.get_weights().result()).items()}
        deaf.update_weights_from_checkpoint = take_nothing
        await take_step(backend)
        keeper = StepsOn(backend, tmp_path / "weights")
        sync = WeightSync(Probe(make_probe_prompt(engine.features.vocab_size), 1e-3), keeper=keeper)
        with pytest.raises(WeightSyncError, match="does not serve the weights that were sent"):
            await sync(refuse_forward(backend), [deaf], 1, released=keeper.released)
        assert keeper.released.is_set() and versions == [1]


async def engine_stream_old(engine: Any, weights: dict[str, torch.Tensor]) -> None:
    await trio.lowlevel.checkpoint()
    engine.receive_bucket(list(weights.items()))


# --- over a fleet, in virtual time --------------------------------------------------------------------------


class AnsweringTrainer(Trainer):
    """A trainer that can say beforehand what its engines will: tokens 0, 1, 2, …"""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0
        self.fails = False

    def complete_greedily(self, prompt_ids: np.ndarray, count: int) -> Any:
        self.asked += 1
        fails, rows = self.fails, np.full((count, 50), -30.0, np.float32)
        rows[np.arange(count), np.arange(count)] = log_probs_of(self.weights, range(count))

        class Future:
            async def result(self) -> np.ndarray:
                await trio.sleep(1)
                if fails:
                    raise BackendError("out of memory")
                return rows

        return Future()


class HeldNumber:
    def __init__(self, weights: float) -> None:
        self.weights = weights


class ReleasingWorld(FleetWorld):
    """A fleet of three, and a trainer that is gone as soon as it may."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.trainer = AnsweringTrainer()
        self.released_at: list[float] = []

        async def hold(trainer: Any) -> HeldNumber:
            await trio.sleep(0.5)
            return HeldNumber(trainer.weights)

        self.keeper.hold = hold  # pyright: ignore[reportAttributeAccessIssue]

    async def step(self, weights: float) -> Mapping[str, float]:
        version, released = self.trainer.step(weights), trio.Event()

        async def leave() -> None:
            await released.wait()
            self.released_at.append(trio.current_time())
            self.trainer.step(weights + 70)  # 0.07 nats away; the tolerance is 0.01

        failure: Exception | None = None
        metrics: Mapping[str, float] = {}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(leave)
            try:
                metrics = await self.sync(self.trainer, [self.fleet], version, released=released)
            except (
                WeightSyncError,
                BackendError,
            ) as error:  # raised below, outside the nursery, which would wrap it in a group
                failure = error
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure
        return metrics


async def test_a_fleet_is_brought_to_the_weights_that_the_trainer_had(autojump_clock):
    world = ReleasingWorld()
    began = trio.current_time()
    metrics = await world.step(3.0)
    assert [at - began for at in world.released_at] == [1.5], "0.5 s for the copy, 1 s for the answer"
    assert (
        metrics["weight_sync/engines_updated"] == 3.0 and metrics["weight_sync/probe_difference/max"] == 0.0
    )
    assert [(server.weights, server.version) for server in world.servers] == [(3.0, 1)] * 3
    assert world.trainer.batches == [] and world.trainer.weight_version == 2
    assert world.fleet.events[-1] == ("publish", 1)


async def test_an_update_that_reached_nobody_is_tried_again_without_the_trainer(autojump_clock):
    world = ReleasingWorld(patience_s=500.0)
    for server in world.servers:
        server.faults["load"] = ["fail"]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.sync.keep_engines_current, world.trainer, world.fleet)
        metrics = await world.step(3.0)
        world.fleet.send.close()
    assert "waits for an engine that comes back" in world.warnings[-1]
    assert metrics["weight_sync/engines_updated"] == 3.0
    assert [(server.weights, server.version) for server in world.servers] == [(3.0, 1)] * 3
    assert world.trainer.asked == 1 and world.trainer.batches == [] and len(world.released_at) == 1


async def test_engines_that_take_weights_in_memory_keep_the_trainer_also_beside_such_as_load_from_disk(
    autojump_clock,
):
    world = ReleasingWorld()
    world.servers[0] = InMemoryServer("a", world.trainer, in_memory=True)

    def stream_weights(sink: Any) -> Any:
        class Future:
            async def result(self) -> None:
                await trio.sleep(1)
                sink([("w", np.asarray([world.trainer.weights]))])

        return Future()

    world.trainer.stream_weights = stream_weights
    metrics = await world.step(3.0)
    assert world.released_at == [] and metrics["weight_sync/engines_updated"] == 3.0
    assert [(server.weights, server.version) for server in world.servers] == [(3.0, 1)] * 3


async def test_a_trainer_that_fails_before_the_release_ends_the_update_as_itself(autojump_clock):
    world = ReleasingWorld()
    world.trainer.fails = True
    with pytest.raises(BackendError, match="out of memory"):
        await world.step(3.0)
    assert world.released_at == [] and world.fleet.events == []


async def test_an_engine_that_keeps_the_old_weights_leaves_alone(autojump_clock):
    world = ReleasingWorld()
    await world.step(3.0)
    world.servers[1].deaf = True
    metrics = await world.step(90.0)
    assert (metrics["weight_sync/engines_updated"], metrics["weight_sync/engines_failed"]) == (2.0, 1.0)
    assert world.fleet.those("fail") == ["b"] and world.trainer.batches == []
