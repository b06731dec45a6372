"""An update counts only when the engine proves it, and an engine that fails harms no other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from safetensors.torch import load_file

from rollouts.backends.open import open_pytorch_backend
from rollouts.config.schema import OptimConfig
from rollouts.device_thread import open_device_thread
from rollouts.engines.fleet import Member, open_fleet
from rollouts.engines.local import open_local_engine
from rollouts.errors import BackendError, EngineSilent, EngineUnreachable, SnapshotError, WeightSyncError
from rollouts.models.load import resolve_model
from rollouts.testing.fakes import ScriptedEngine, open_fake_backend
from rollouts.types import (
    Completion,
    EngineFeatures,
    EngineLoad,
    GenerateRequest,
    LossSpec,
    RolloutBatch,
    SamplingParams,
)
from rollouts.weight_sync.disk import export_snapshot
from rollouts.weight_sync.probe import (
    Probe,
    ProbeReply,
    Verified,
    check_agreement,
    check_change,
    compare_with_stored,
    judge_by_stored,
    judge_by_trainer,
    make_probe_prompt,
)
from rollouts.weight_sync.snapshots import list_snapshots
from rollouts.weight_sync.sync import Snapshot, WeightSync
from rollouts.weight_sync.update import (
    ProbeMemory,
    SilenceLimits,
    SyncReport,
    sync_weights_to_engines,
    watch_progress,
)

PROBE = Probe(make_probe_prompt(50), 1e-2)
LIMITS = SilenceLimits(pause=10, load=100, set_version=5, resume=5, probe=20)
PHASES = ("pause", "load", "set_version", "resume", "probe")
NAMES = ("a", "b", "c")


# --- fakes in virtual time ----------------------------------------------------------------------------------


def log_probs_of(weights: float, token_ids: Sequence[int]) -> np.ndarray:
    """What a model, whose weights are one number, thinks of an answer."""
    return np.asarray(
        [-1 - 0.001 * weights - 0.01 * position for position in range(len(token_ids))], np.float32
    )


class Trainer:
    """A backend of which weight sync uses two things: the version, and what it thinks of answers."""

    def __init__(self) -> None:
        self.weights = 0.0
        self.weight_version = 0
        self.batches: list[RolloutBatch] = []

    def forward(self, batch: RolloutBatch) -> Any:
        self.batches.append(batch)
        weights = self.weights

        class Future:
            async def result(self):
                await trio.sleep(1)
                return tuple(
                    np.where(mask, padded(mask, weights), np.float32(0)) for mask in batch.loss_masks
                )

        return Future()

    def step(self, weights: float) -> int:
        self.weights, self.weight_version = weights, self.weight_version + 1
        return self.weight_version


def padded(mask: np.ndarray, weights: float) -> np.ndarray:
    values = np.zeros(len(mask), np.float32)
    values[mask] = log_probs_of(weights, range(int(mask.sum())))
    return values


class Server:
    """An engine whose weights are a number. `faults` names, by phase, what becomes of the next calls: "fail",
    "hang", "" for nothing.
    """

    def __init__(
        self,
        name: str,
        trainer: Trainer,
        *,
        keep_pause: bool = True,
        checksum: bool = False,
        in_memory: bool = False,
    ) -> None:
        self.features = EngineFeatures(
            50, 512, in_memory, True, False, keep_pause, False, name=name, checksum=checksum
        )
        self.trainer = trainer
        self.weights = 0.0
        self.version = -1
        self.paused = False
        self.calls: list[str] = []
        self.faults: dict[str, list[str]] = {}
        self.load_s = 1.0
        self.read = 0.0  # what statistics say of a load
        self.deaf = False  # answers 200 and keeps the old weights
        self.noise = 0.0
        self.token_ids = list(range(PROBE.num_tokens))

    async def phase(self, name: str) -> None:
        self.calls.append(name)
        await trio.sleep(0.1)
        fault = self.faults[name].pop(0) if self.faults.get(name) else ""
        if fault == "hang":
            await trio.sleep_forever()
        if fault == "fail":
            raise EngineUnreachable(f"{self.features.name} is gone")

    async def pause(self, mode: str) -> None:
        self.paused = True
        self.mode = mode
        await self.phase("pause")

    async def resume(self) -> None:
        await self.phase("resume")
        self.paused = False

    async def update_weights_from_checkpoint(self, path: Path, version: int) -> Mapping[str, Any]:
        assert self.paused
        await self.phase("load")
        for _ in range(10):
            await trio.sleep(self.load_s / 10)
            self.read += 1
        if not self.deaf:
            self.weights = float(path.name.removeprefix("w"))
        self.version = version
        return {}

    async def weight_version(self) -> int:
        await self.phase("set_version")
        return self.version

    async def generate(self, request: GenerateRequest) -> Completion:
        assert not self.paused
        await self.phase("probe")
        self.noise *= -1
        return Completion(
            request_id=request.request_id,
            token_ids=np.asarray(self.token_ids),
            log_probs=log_probs_of(self.weights, self.token_ids) + np.float32(self.noise),
            weight_versions=np.full(len(self.token_ids), self.version),
            finish_reason="length",
        )

    async def health(self) -> bool:
        await trio.sleep(0.1)
        return True

    async def load(self) -> EngineLoad:
        await trio.sleep(0.1)
        return EngineLoad(running=0, waiting=0)

    async def checksum(self) -> str | None:
        await self.phase("checksum")
        return f"sum of {self.weights}"

    def statistics(self) -> Mapping[str, float]:
        return {"read": self.read, "http/opened": trio.current_time()}


class Admissions:
    """An Admission that keeps a record."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.dead: set[str] = set()

    def close_admission(self, engine: Any) -> None:
        self.events.append(("close", engine.features.name))

    def commit(self, engine: Any, version: int) -> bool:
        self.events.append(("commit", engine.features.name, version))
        return engine.features.name not in self.dead

    def fail(self, engine: Any, error: Exception) -> None:
        self.events.append(("fail", engine.features.name))

    def publish(self, version: int) -> None:
        self.events.append(("publish", version))

    def those(self, kind: str) -> list[Any]:
        return [event[1] for event in self.events if event[0] == kind]


class World:
    """A trainer, three servers and what an update needs of them."""

    def __init__(self, **server: Any) -> None:
        self.trainer = Trainer()
        self.servers = [Server(name, self.trainer, **server) for name in NAMES]
        self.admission = Admissions()
        self.memory = ProbeMemory()
        self.warnings: list[str] = []

    async def update(self, version: int, weights: float, **options: Any) -> SyncReport:
        self.trainer.weights, self.trainer.weight_version = weights, version
        return await sync_weights_to_engines(
            self.servers,  # pyright: ignore[reportArgumentType]
            Path(f"w{weights}"),
            version=version,
            probe=PROBE,
            judge=judge_by_trainer(PROBE, self.trainer),  # pyright: ignore[reportArgumentType]
            memory=self.memory,
            digest=f"digest of {weights}",
            admission=self.admission,
            limits=LIMITS,
            warn=self.warnings.append,
            **options,
        )


# --- every engine proves itself, or leaves ------------------------------------------------------------------


async def test_every_engine_goes_through_all_phases_and_then_the_version_is_published(autojump_clock):
    world = World()
    report = await world.update(1, 3.0)
    for server in world.servers:
        assert server.calls == ["pause", "load", "set_version", "resume", "probe"]
        assert (server.weights, server.version, server.paused) == (3.0, 1, False)
    assert sorted(world.admission.those("close")) == list(NAMES)
    assert sorted(world.admission.those("commit")) == list(NAMES)
    assert world.admission.events[-1] == ("publish", 1)
    assert report.metrics() == {
        "time/weight_sync_pause": pytest.approx(1.4),  # 0.1 s a call and 1 s for the load
        "weight_sync/engines_updated": 3.0,
        "weight_sync/engines_failed": 0.0,
        "weight_sync/verified_by_checksum": 0.0,
        "weight_sync/probe_difference/max": 0.0,
    }


@pytest.mark.parametrize("fault", ["fail", "hang"])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("index", range(3))
async def test_an_engine_that_fails_in_any_phase_leaves_alone(
    autojump_clock, index: int, phase: str, fault: str
):
    world = World()
    await world.update(1, 3.0)
    world.admission.events.clear()
    broken = world.servers[index]
    broken.faults[phase] = [fault]
    report = await world.update(2, 4.0)
    others = [name for name in NAMES if name != NAMES[index]]
    assert [server.paused for server in world.servers] == [False] * 3
    assert sorted(world.admission.those("commit")) == others
    assert world.admission.those("fail") == [NAMES[index]]
    assert world.admission.events[-1] == ("publish", 2)
    (failed,) = report.failed
    assert (failed.name, failed.phase, type(failed.error)) == (
        NAMES[index],
        phase,
        EngineSilent if fault == "hang" else EngineUnreachable,
    )
    assert report.metrics()["weight_sync/engines_failed"] == 1.0
    assert report.metrics()["weight_sync/engines_updated"] == 2.0
    assert len(world.warnings) == 1
    assert f"engine {NAMES[index]} is out of service" in world.warnings[0]
    assert f"failed in phase {phase}" in world.warnings[0]

    world.admission.events.clear()  # and the next update brings it back
    assert (await world.update(3, 5.0)).failed == ()
    assert broken.weights == 5.0


@pytest.mark.parametrize("phase", PHASES)
async def test_an_engine_that_cannot_be_resumed_holds_nobody_up(autojump_clock, phase: str):
    world = World()
    world.servers[1].faults = {phase: ["fail"], "resume": ["fail", "hang"] if phase == "resume" else ["hang"]}
    with trio.fail_after(30):
        report = await world.update(1, 3.0)
    assert [update.name for update in report.failed] == ["b"]
    assert sorted(world.admission.those("commit")) == ["a", "c"]


async def test_an_engine_that_died_before_its_commit_has_failed(autojump_clock):
    world = World()
    world.admission.dead = {"c"}
    report = await world.update(1, 3.0)
    assert [(update.name, update.phase) for update in report.failed] == [("c", "commit")]
    assert world.admission.those("fail") == ["c"]
    assert world.admission.events[-1] == ("publish", 1)


async def test_when_nobody_is_verified_nothing_is_published_and_each_failure_is_named(autojump_clock):
    world = World()
    for server, phase in zip(world.servers, ("pause", "load", "probe"), strict=True):
        server.faults[phase] = ["fail"]
    with pytest.raises(WeightSyncError) as caught:
        await world.update(4, 3.0)
    assert [line.split(": ")[:2] for line in str(caught.value).splitlines()[1:]] == [
        ["  a", "pause"],
        ["  b", "load"],
        ["  c", "probe"],
    ]
    assert world.admission.those("publish") == []
    assert sorted(world.admission.those("fail")) == list(NAMES)


async def test_an_update_of_nobody_is_an_error(autojump_clock):
    world = World()
    world.servers = []
    with pytest.raises(WeightSyncError, match="no engine that could be reached"):
        await world.update(1, 3.0)


@pytest.mark.parametrize("phase", PHASES)
async def test_a_cancelled_update_leaves_nobody_paused_and_nobody_half_admitted(autojump_clock, phase: str):
    world = World()
    for server in world.servers:
        server.faults[phase] = ["hang"]
    with trio.move_on_after(4.0) as scope:
        await world.update(1, 3.0)
    assert scope.cancelled_caught
    assert [server.paused for server in world.servers] == [False] * 3
    assert sorted(world.admission.those("fail")) == list(NAMES)
    assert world.admission.those("commit") == world.admission.those("publish") == []


async def test_a_cancelled_update_waits_for_a_resume_only_so_long(autojump_clock):
    world = World()
    for server in world.servers:
        server.faults = {"load": ["hang"], "resume": ["hang"]}
    started = trio.current_time()
    with trio.move_on_after(4.0):
        await world.update(1, 3.0)
    assert trio.current_time() - started == pytest.approx(4.0 + LIMITS.resume)


async def test_a_load_that_makes_progress_may_take_any_time_and_a_silent_one_may_not(autojump_clock):
    world = World()
    world.servers[0].load_s = 900.0  # says something every 90 s; the limit is 100 s of silence
    world.servers[1].load_s = 2500.0
    report = await world.update(1, 3.0)
    assert [update.name for update in report.failed] == ["b"]
    assert str(report.failed[0].error) == "engine b: phase load took more than 100 s without any progress"
    assert report.engines[0].pause_s > 900


async def test_work_that_fails_under_watch_raises_what_it_raised(autojump_clock):
    async def fail() -> None:
        await trio.sleep(1)
        raise ValueError("as it is, in no group")

    with pytest.raises(ValueError, match="in no group"):
        await watch_progress(fail, silence_s=5, read_progress=lambda: 0, what="it")


async def test_an_update_that_was_done_already_is_only_probed(autojump_clock):
    world = World()
    await world.update(1, 3.0)
    for server in world.servers:
        server.calls.clear()
    world.servers[2].version = 0  # restarted meanwhile, say
    assert (await world.update(1, 3.0)).failed == ()
    assert world.servers[0].calls == ["set_version", "probe"]
    assert world.servers[2].calls == ["set_version", "pause", "load", "set_version", "resume", "probe"]


async def test_requests_in_flight_are_kept_only_where_the_engine_can(autojump_clock):
    world = World(keep_pause=False)
    await world.update(1, 3.0)
    assert {server.mode for server in world.servers} == {"abort"}
    world = World()
    await world.update(1, 3.0)
    assert {server.mode for server in world.servers} == {"keep"}


async def test_equal_answers_are_scored_by_the_trainer_once(autojump_clock):
    world = World()
    await world.update(1, 3.0)
    assert [len(batch) for batch in world.trainer.batches] == [1]
    (row, mask) = world.trainer.batches[0].tokens[0], world.trainer.batches[0].loss_masks[0]
    assert row[~mask].tolist() == PROBE.prompt_ids.tolist()
    assert row[mask].tolist() == list(range(16))


async def test_answers_that_come_while_the_trainer_computes_are_scored_in_one_batch(autojump_clock):
    world = World()
    for index, server in enumerate(world.servers):
        server.token_ids = [index] * 16
        server.load_s = 1.0 + 0.3 * index  # the trainer takes 1 s
    assert (await world.update(1, 3.0)).failed == ()
    assert [[int(row[-1]) for row in batch.tokens] for batch in world.trainer.batches] == [[0], [1, 2]]


# --- what counts as proof -----------------------------------------------------------------------------------


async def test_an_engine_that_keeps_the_old_weights_is_caught_within_the_tolerance(autojump_clock):
    world = World()
    await world.update(1, 3.0)
    world.servers[1].deaf = True
    report = await world.update(2, 3.5)  # 0.0005 nats away; the tolerance is 0.01
    assert [(update.name, update.phase) for update in report.failed] == [("b", "probe")]
    assert "answers the probe exactly as at version 1, though the trainer's weights are others" in str(
        report.failed[0].error
    )


async def test_an_engine_that_keeps_the_old_weights_and_computes_noisily_is_caught_by_its_checksum(
    autojump_clock,
):
    world = World(checksum=True)
    for server in world.servers:
        server.noise = 1e-4
    await world.update(1, 3.0)
    world.servers[1].deaf = True
    report = await world.update(2, 3.5)
    assert [update.name for update in report.failed] == ["b"]
    assert "has the checksum sum of 3.0 that it had at version 1" in str(report.failed[0].error)


async def test_a_checksum_proves_a_change_that_the_answer_does_not_show(autojump_clock):
    world = World(checksum=True)
    await world.update(1, 3.0)
    report = await world.update(2, 3.0 + 1e-7)  # a move that float32 log-probs lose
    assert report.failed == ()
    assert report.metrics()["weight_sync/verified_by_checksum"] == 3.0


async def test_without_a_checksum_a_change_that_shows_nowhere_is_no_proof(autojump_clock):
    world = World()
    await world.update(1, 3.0)
    with pytest.raises(WeightSyncError, match="still serves the old weights"):
        await world.update(2, 3.0 + 1e-7)


async def test_an_engine_that_gave_a_checksum_once_has_to_give_it_always(autojump_clock):
    world = World(checksum=True)
    world.servers[0].faults["checksum"] = ["fail"]
    assert (await world.update(1, 3.0)).failed == ()  # it never gave one
    assert "a gave no checksum" in world.warnings[0]
    world.servers[1].faults["checksum"] = ["fail"]
    world.servers[0].faults["checksum"] = ["fail"]
    report = await world.update(2, 4.0)
    assert [update.name for update in report.failed] == ["b"]
    assert (
        "the engine gave no checksum of its weights, as it did at version 1: EngineUnreachable: b is gone"
        in str(report.failed[0].error)
    )


async def test_weights_that_did_not_change_need_no_proof_of_change(autojump_clock):
    world = World(checksum=True)
    await world.update(1, 3.0)
    assert (await world.update(2, 3.0)).failed == ()


async def test_an_engine_that_reports_another_version_has_failed(autojump_clock):
    world = World()

    async def forget(path: Path, version: int) -> Mapping[str, Any]:
        world.servers[0].weights = 3.0
        return {}

    world.servers[0].update_weights_from_checkpoint = forget  # pyright: ignore[reportAttributeAccessIssue]
    report = await world.update(1, 3.0)
    assert [(update.name, update.phase) for update in report.failed] == [("a", "set_version")]
    assert "reports weight version -1 after an update to version 1" in str(report.failed[0].error)


async def test_an_engine_whose_answer_carries_another_version_has_failed(autojump_clock):
    world = World()

    async def claim() -> int:
        return 1

    async def load_nothing(path: Path, version: int) -> Mapping[str, Any]:
        return {}

    world.servers[0].weight_version = claim  # pyright: ignore[reportAttributeAccessIssue]
    world.servers[0].update_weights_from_checkpoint = load_nothing  # pyright: ignore[reportAttributeAccessIssue]
    report = await world.update(1, 3.0)
    assert [(update.name, update.phase) for update in report.failed] == [("a", "probe")]
    assert "answered with weight versions [-1] after an update to version 1" in str(report.failed[0].error)


async def test_an_engine_with_other_weights_has_failed(autojump_clock):
    world = World()
    world.servers[2].deaf = True
    report = await world.update(1, 30.0)  # 0.03 nats from what it kept
    assert [update.name for update in report.failed] == ["c"]
    assert "differs from the trainer by 0.03 nats on the probe; the tolerance is 0.01" in str(
        report.failed[0].error
    )


async def test_an_engine_that_answers_nothing_has_failed(autojump_clock):
    world = World()
    world.servers[2].token_ids = []
    report = await world.update(1, 3.0)
    assert "the answer to the probe is empty" in str(report.failed[0].error)


def reply(
    version: int, engine: list[float], trainer: list[float], tokens: Sequence[int] = (4, 5)
) -> ProbeReply:
    return ProbeReply(
        version, np.asarray(tokens), np.asarray(engine, np.float32), np.asarray(trainer, np.float32)
    )


def test_an_engine_that_differs_from_the_trainer_is_refused():
    with pytest.raises(WeightSyncError, match=r"engine at version 2 differs from the trainer by 0\.5 nats"):
        check_agreement(reply(2, [-1, -2], [-1, -2.5]), tolerance=1e-3)


def test_a_nan_from_an_engine_is_no_agreement():
    with pytest.raises(WeightSyncError):
        check_agreement(reply(2, [-1, math.nan], [-1, -2]), tolerance=1e-3)


def test_a_nan_from_the_trainer_is_no_agreement():
    with pytest.raises(WeightSyncError):
        check_agreement(reply(2, [-1, -2], [-1, math.nan]), tolerance=1e-3)


def in_memory(reply: ProbeReply) -> Verified:
    return Verified(reply, None, None)


def test_an_engine_that_answers_as_before_while_the_trainer_moved_still_has_the_old_weights():
    before, after = reply(1, [-1, -2], [-1, -2]), reply(2, [-1, -2], [-1, -2.0005])
    with pytest.raises(WeightSyncError, match="still serves the old weights"):
        check_change(in_memory(before), in_memory(after))


def test_the_same_answer_is_right_when_the_trainer_did_not_move():
    assert not check_change(in_memory(reply(1, [-1, -2], [-1, -2])), in_memory(reply(2, [-1, -2], [-1, -2])))


def test_engines_of_another_dtype_have_a_tolerance_of_their_own():
    probe = Probe(make_probe_prompt(50), 1e-3, tolerances={"half": 5e-2})
    assert (probe.tolerance_of("half"), probe.tolerance_of("full")) == (5e-2, 1e-3)


def test_the_probe_prompt_lies_inside_the_vocabulary():
    prompt = make_probe_prompt(50)
    assert len(prompt) == 8
    assert prompt.min() > 0
    assert prompt.max() < 49


# --- against a stored answer --------------------------------------------------------------------------------


def answer(tokens: Sequence[int], log_probs: Sequence[float]) -> Completion:
    versions = np.full(len(tokens), 7)
    return Completion(
        request_id="p",
        token_ids=np.asarray(tokens),
        log_probs=np.asarray(log_probs, np.float32),
        weight_versions=versions,
        finish_reason="length",
    )


STORED = reply(7, [-1, -2, -1, -1, -1, -1], [-1.0, -2.0, -1.0, -1.0, -2.0, -1.0], tokens=(4, 5, 6, 7, 8, 9))


def test_an_equal_answer_is_compared_on_all_tokens():
    compared = compare_with_stored(
        STORED, answer((4, 5, 6, 7, 8, 9), (-1, -2, -1.25, -1, -2, -1)), tolerance=0.01
    )
    assert compared.token_ids.tolist() == [4, 5, 6, 7, 8, 9]
    assert compared.difference == pytest.approx(0.25)


def test_an_answer_that_parts_at_a_near_tie_is_compared_up_to_there():
    compared = compare_with_stored(
        STORED, answer((4, 5, 6, 7, 3, 3), (-1, -2, -1, -1, -2.015, -1)), tolerance=0.01
    )
    assert compared.token_ids.tolist() == [4, 5, 6, 7]


def test_an_answer_that_parts_where_there_was_no_tie_is_of_other_weights():
    with pytest.raises(
        WeightSyncError, match="with token 3 at position 4, where version 7 was verified with token 8"
    ):
        compare_with_stored(STORED, answer((4, 5, 6, 7, 3, 3), (-1, -2, -1, -1, -1.5, -1)), tolerance=0.01)


@pytest.mark.parametrize("tokens", [(9, 5, 6, 7, 8, 9), (4, 5, 6, 9, 9, 9), (4, 5, 6), (4,)])
def test_an_answer_of_which_too_few_tokens_agree_proves_nothing(tokens: tuple[int, ...]):
    with pytest.raises(WeightSyncError, match="at least 4 are needed to prove its weights"):
        compare_with_stored(STORED, answer(tokens, (-1, -2, -1, -1, -2, -1)[: len(tokens)]), tolerance=0.01)


def test_a_short_verified_answer_has_to_be_given_whole():
    stored = reply(7, [-1, -2], [-1.0, -2.0], tokens=(4, 5))
    assert compare_with_stored(stored, answer((4, 5), (-1, -2)), tolerance=0.01).token_ids.tolist() == [4, 5]
    with pytest.raises(WeightSyncError, match="at least 2 are needed"):
        compare_with_stored(stored, answer((4, 9), (-1, -2)), tolerance=0.01)


async def test_a_revived_engine_that_still_serves_old_weights_is_caught_where_its_answer_parts_at_a_tie(
    autojump_clock,
):
    """Four tokens agree with the stored answer within the tolerance, the fifth is a near tie: only the answer
    as a whole shows the old weights.
    """
    old_tokens, new_tokens = (4, 5, 6, 7, 3, 3), (4, 5, 6, 7, 8, 9)
    memory, tolerance = ProbeMemory(), 0.05
    log_probs = np.asarray([-1, -2, -1, -1, -2, -1], np.float32)
    old = ProbeReply(6, np.asarray(old_tokens), log_probs, log_probs)
    new = ProbeReply(7, np.asarray(new_tokens), log_probs + np.float32(0.01), log_probs + np.float32(0.01))
    memory.remember("a", Verified(old, None, "digest of 6"))
    memory.remember("b", Verified(new, None, "digest of 7"))
    server: Any = Server("a", Trainer())

    async def generate(request: GenerateRequest) -> Completion:
        await trio.lowlevel.checkpoint()
        return replace(answer(old_tokens, log_probs.tolist()), weight_versions=np.full(6, server.version))

    server.generate = generate
    judge = judge_by_stored(new, tolerance_of=lambda name: tolerance)
    with pytest.raises(WeightSyncError, match="says version 7 but answers the probe exactly as at version 6"):
        await sync_weights_to_engines(
            [server],
            Path("w7"),
            version=7,
            probe=PROBE,
            judge=judge,
            memory=memory,
            digest="digest of 7",
            warn=lambda text: None,
        )


def test_a_shorter_answer_never_replaces_a_longer_one_of_its_version():
    memory = ProbeMemory()
    memory.remember("a", Verified(STORED, "sum", "digest"))
    short = compare_with_stored(
        STORED, answer((4, 5, 6, 7, 3, 3), (-1, -2, -1, -1, -2.015, -1)), tolerance=0.01
    )
    memory.remember("b", Verified(short, "sum", "digest"))
    assert memory.reply(7, "b") is STORED
    memory.remember("a", Verified(short, "sum 2", "digest"))
    assert memory.all("a") == [Verified(STORED, "sum 2", "digest")]


# --- weights that come to all at once -----------------------------------------------------------------------


class Broadcast:
    """A transfer to many engines in memory; `outcome` says what becomes of an engine by name."""

    def __init__(self, weights: float, version: int, **outcome: Exception) -> None:
        self.weights, self.version, self.outcome = weights, version, outcome
        self.given: list[str] = []

    async def __call__(self, engines: Sequence[Any]) -> Mapping[str, Exception | None]:
        assert all(engine.paused for engine in engines)
        self.given += [engine.features.name for engine in engines]
        await trio.sleep(1)
        for engine in engines:
            engine.weights, engine.version = self.weights, self.version
        return {engine.features.name: self.outcome.get(engine.features.name) for engine in engines}


async def test_a_transfer_to_all_waits_for_those_that_pause_and_not_for_those_that_fail(autojump_clock):
    world = World()
    world.servers[0].faults["pause"] = ["fail"]
    broadcast = Broadcast(3.0, 1, b=EngineUnreachable("b is gone"))
    report = await world.update(1, 3.0, load_together=broadcast)
    assert sorted(broadcast.given) == ["b", "c"]
    assert [(update.name, update.phase) for update in report.failed] == [("a", "pause"), ("b", "load")]
    assert [server.paused for server in world.servers] == [False] * 3


async def test_a_transfer_to_all_leaves_those_out_that_have_the_weights(autojump_clock):
    world = World()
    await world.update(1, 3.0)
    world.servers[1].version = 0
    broadcast = Broadcast(3.0, 1)
    assert (await world.update(1, 3.0, load_together=broadcast)).failed == ()
    assert broadcast.given == ["b"]


async def test_a_transfer_that_fails_as_a_whole_fails_every_engine_and_leaves_none_paused(autojump_clock):
    async def fail(engines: Sequence[Any]) -> Mapping[str, Exception | None]:
        raise EngineUnreachable("the group fell apart")

    world = World()
    with pytest.raises(WeightSyncError, match="the group fell apart"):
        await world.update(1, 3.0, load_together=fail)
    assert [server.paused for server in world.servers] == [False] * 3


# --- engines that come back ---------------------------------------------------------------------------------


class Keeper:
    """Snapshots that take no disk: w3.5 holds the weights 3.5."""

    def __init__(self) -> None:
        self.read: list[str] = []
        self.pruned: list[str] = []

    async def export(self, backend: Any, version: int) -> Snapshot:
        await trio.sleep(1)
        return Snapshot(Path(f"w{backend.weights}"), f"digest of {backend.weights}", 1000)

    @contextmanager
    def open_reader(self, path: Path):
        self.read.append(path.name)
        yield path

    async def prune(self, keep: Path) -> None:
        self.pruned.append(keep.name)


class FakeFleet(Admissions):
    """Announces an engine again when an update of it has failed."""

    def __init__(self, servers: Sequence[Server]) -> None:
        super().__init__()
        self.servers = servers
        self.serving: set[str] = set()
        self.send, self.stale_members = trio.open_memory_channel[Any](math.inf)

    def members_for_update(self) -> tuple[Any, ...]:
        return tuple(self.servers)

    on_fail: Any = staticmethod(lambda: None)

    def needs_update(self, engine: Any) -> bool:
        return engine.features.name not in self.serving

    def commit(self, engine: Any, version: int) -> bool:
        self.serving.add(engine.features.name)
        return super().commit(engine, version)

    def fail(self, engine: Any, error: Exception) -> None:
        super().fail(engine, error)
        self.serving.discard(engine.features.name)
        self.on_fail()
        self.send.send_nowait(engine)


class FleetWorld:
    """A WeightSync over a fleet of three."""

    def __init__(self, **options: Any) -> None:
        self.trainer: Any = Trainer()
        self.servers: Any = [Server(name, self.trainer) for name in NAMES]
        self.fleet: Any = FakeFleet(self.servers)
        self.keeper = Keeper()
        self.warnings: list[str] = []
        self.sync = WeightSync(
            PROBE,
            keeper=self.keeper,
            admission=self.fleet,
            limits=LIMITS,
            warn=self.warnings.append,
            **options,
        )

    async def step(self, weights: float) -> Mapping[str, float]:
        version = self.trainer.step(weights)
        return await self.sync(self.trainer, [self.fleet], version)

    async def move_on(self, after_s: float) -> None:
        await trio.sleep(after_s)
        self.trainer.weight_version += 1

    def restart(self, server: Server) -> None:
        server.version, server.weights = -1, 0.0
        self.fleet.serving.discard(server.features.name)
        server.calls.clear()
        self.fleet.events.clear()


async def test_a_fleet_is_updated_through_its_members(autojump_clock):
    world = FleetWorld()
    metrics = await world.step(3.0)
    assert metrics["weight_sync/engines_updated"] == 3.0
    assert metrics["weight_sync/bytes"] == 1000.0
    assert world.keeper.pruned == ["w3.0"]


async def test_one_engine_of_a_fleet_may_fail_and_one_without_a_fleet_may_not(autojump_clock):
    world = FleetWorld()
    world.servers[0].faults["load"] = ["fail"]
    assert (await world.step(3.0))["weight_sync/engines_failed"] == 1.0
    sync = WeightSync(PROBE, keeper=world.keeper, limits=LIMITS)
    world.servers[0].faults["load"] = ["fail"]
    with pytest.raises(
        WeightSyncError, match=r"did not reach every engine(.|\n)*a: load: EngineUnreachable: a is gone"
    ):
        await sync(world.trainer, world.servers, 1)


async def test_a_restarted_engine_is_brought_to_the_published_weights(autojump_clock):
    world = FleetWorld()
    await world.step(3.0)
    world.restart(world.servers[1])
    await world.sync.revive(world.trainer, world.servers[1])
    assert (world.servers[1].weights, world.servers[1].version) == (3.0, 1)
    assert world.fleet.events == [("close", "b"), ("commit", "b", 1)]  # nothing is published anew
    assert world.keeper.read == ["w3.0", "w3.0"]


async def test_a_restarted_engine_is_judged_by_a_verified_answer_when_the_trainer_has_moved_on(
    autojump_clock,
):
    world = FleetWorld()
    await world.step(3.0)
    world.restart(world.servers[1])
    world.trainer.step(80.0)
    asked = len(world.trainer.batches)
    await world.sync.revive(world.trainer, world.servers[1])
    assert len(world.trainer.batches) == asked
    assert world.servers[1].weights == 3.0
    assert world.fleet.those("commit") == ["b"]


async def test_a_restarted_engine_that_serves_base_weights_under_the_published_version_is_caught(
    autojump_clock,
):
    world = FleetWorld()
    await world.step(30.0)
    world.restart(world.servers[1])
    world.servers[1].deaf = True
    world.trainer.step(80.0)
    with pytest.raises(WeightSyncError, match=r"b: probe: .*differs from the trainer by 0\.03"):
        await world.sync.revive(world.trainer, world.servers[1])
    assert world.fleet.events == [("close", "b"), ("fail", "b")]


async def test_a_restarted_engine_that_serves_base_weights_within_the_tolerance_is_caught(autojump_clock):
    world = FleetWorld()
    await world.step(0.0)  # what a server starts with
    for weights in (1.0, 2.0, 3.0, 4.0, 5.0, 6.0):  # 0.006 nats away at last; the tolerance is 0.01
        await world.step(weights)
    world.restart(world.servers[1])
    world.servers[1].deaf = True
    with pytest.raises(WeightSyncError, match="says version 7 but answers the probe exactly as at version 1"):
        await world.sync.revive(world.trainer, world.servers[1])
    world.servers[1].deaf = False
    await world.sync.revive(world.trainer, world.servers[1])


async def test_nobody_is_revived_before_there_is_something_to_serve(autojump_clock):
    world = FleetWorld()
    with pytest.raises(WeightSyncError, match="no weight version is published yet"):
        await world.sync.revive(world.trainer, world.servers[0])


async def test_stale_engines_are_revived_as_they_are_announced_and_given_up_until_the_next_update(
    autojump_clock,
):
    world = FleetWorld(max_revivals=3)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.sync.keep_engines_current, world.trainer, world.fleet)
        world.fleet.send.send_nowait(world.servers[0])  # before the first update: it includes everyone
        await world.step(3.0)
        world.restart(world.servers[2])
        world.servers[2].faults["load"] = ["fail"] * 5
        world.fleet.send.send_nowait(world.servers[2])
        await trio.sleep(1000)
        assert world.servers[2].calls.count("load") == 3
        assert "it waits for the next weight update" in world.warnings[-1]
        world.restart(world.servers[0])
        world.fleet.send.send_nowait(world.servers[0])
        await trio.sleep(1000)
        assert world.fleet.events == [("close", "a"), ("commit", "a", 1)]
        world.servers[2].faults.clear()
        assert (await world.step(4.0))["weight_sync/engines_updated"] == 3.0
        world.fleet.send.close()  # and the task ends with the fleet


async def test_an_update_that_reaches_nobody_waits_for_an_engine_that_comes_back(autojump_clock):
    world = FleetWorld(patience_s=50.0)
    await world.step(3.0)
    servers, world.fleet.servers = world.fleet.servers, ()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.sync.keep_engines_current, world.trainer, world.fleet)
        nursery.start_soon(world.step, 4.0)
        await trio.sleep(20)
        assert "no engine that could be reached" in world.warnings[0]
        world.restart(servers[1])
        world.fleet.servers = servers[1:2]
        world.fleet.send.send_nowait(servers[1])
        await trio.sleep(20)
        assert (servers[1].weights, servers[1].version) == (4.0, 2)
        assert world.fleet.events[-1] == ("publish", 2)

        world.fleet.servers = ()
        started = trio.current_time()
        with pytest.raises(WeightSyncError, match="no engine that could be reached"):
            await world.step(5.0)
        assert trio.current_time() - started == pytest.approx(50.0)
        world.fleet.send.close()


async def test_a_hung_revival_gives_way_to_the_update_which_takes_its_engine_in(autojump_clock):
    world = FleetWorld()
    await world.step(3.0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.sync.keep_engines_current, world.trainer, world.fleet)
        world.restart(world.servers[0])
        world.servers[0].faults["load"] = ["hang"]
        world.fleet.send.send_nowait(world.servers[0])
        await trio.sleep(10)
        started = trio.current_time()
        assert (await world.step(4.0))["weight_sync/engines_updated"] == 3.0
        assert trio.current_time() - started < 10
        once = ["pause", "load", "set_version", "resume", "probe"]
        assert world.servers[0].calls == [
            "set_version",
            "pause",
            "load",
            "resume",
            *once,
        ]  # never both at once, never left paused
        assert world.fleet.those("fail") == ["a"]
        assert world.servers[0].weights == 4.0
        await trio.sleep(100)  # its announcement by that failure comes to nothing: it serves
        assert world.servers[0].calls == ["set_version", "pause", "load", "resume", *once]
        world.fleet.send.close()


async def test_a_revival_that_an_update_overtakes_says_so(autojump_clock):
    world = FleetWorld()
    await world.step(3.0)
    world.restart(world.servers[0])
    world.servers[0].load_s = 50.0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: started_step(world, after_s=10))
        with pytest.raises(WeightSyncError, match="the revival of engine a gave way to a weight update"):
            await world.sync.revive(world.trainer, world.servers[0])
        assert trio.current_time() < 30
    assert world.servers[0].weights == 4.0


async def started_step(world: FleetWorld, *, after_s: float) -> None:
    await trio.sleep(after_s)
    await world.step(4.0)


async def test_an_engine_that_serves_when_its_turn_comes_is_left_alone(autojump_clock):
    world = FleetWorld()
    await world.step(3.0)
    world.fleet.events.clear()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.sync.keep_engines_current, world.trainer, world.fleet)
        world.fleet.send.send_nowait(world.servers[1])
        await trio.sleep(100)
        assert world.fleet.events == []
        world.fleet.send.close()


async def test_a_revival_is_not_judged_by_a_trainer_that_moves_on_meanwhile(autojump_clock):
    world = FleetWorld()
    await world.step(3.0)
    world.restart(world.servers[1])
    world.servers[1].load_s = 20.0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.sync.revive, world.trainer, world.servers[1])
        await trio.sleep(10)
        world.trainer.step(80.0)
    assert world.fleet.those("commit") == ["b"]
    assert world.servers[1].weights == 3.0

    world.sync.memory = (
        ProbeMemory()
    )  # nobody remembers an answer: only the trainer could tell, and it has other weights
    world.restart(world.servers[1])
    with pytest.raises(
        WeightSyncError, match="no verified answer of version 1 is remembered, and the trainer is at 2"
    ):
        await world.sync.revive(world.trainer, world.servers[1])
    assert world.fleet.events == [("fail", "b")]
    assert "engine b cannot be revived" in world.warnings[-1]

    world.trainer.weight_version = 1  # it seems to have them, and moves on while the engine loads
    world.restart(world.servers[1])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.move_on, 10.0)
        with pytest.raises(WeightSyncError, match="the trainer has moved on to version 2"):
            await world.sync.revive(world.trainer, world.servers[1])
    assert world.fleet.events == [("close", "b"), ("fail", "b")]


class InMemoryServer(Server):
    """Takes weights bucket by bucket."""

    async def begin_update(self) -> None:
        await self.phase("load")

    def receive_bucket(self, bucket: Sequence[tuple[str, np.ndarray]]) -> None:
        self.new = float(bucket[0][1][0])

    async def finish_update(self, version: int) -> None:
        await trio.lowlevel.checkpoint()
        self.weights, self.version = self.new, version


async def test_new_weights_are_never_given_under_an_old_version(autojump_clock):
    trainer: Any = Trainer()

    def stream_weights(sink: Any) -> Any:
        class Future:
            async def result(self) -> None:
                await trio.sleep(10)
                sink([("w", np.asarray([trainer.weights]))])

        return Future()

    trainer.stream_weights = stream_weights
    servers: Any = [InMemoryServer(name, trainer, in_memory=True) for name in NAMES]
    fleet: Any = FakeFleet(servers)
    warnings: list[str] = []
    sync = WeightSync(PROBE, admission=fleet, limits=LIMITS, warn=warnings.append)
    await sync(trainer, [fleet], trainer.step(1.0))
    servers[1].version, servers[1].weights = -1, 0.0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(take_step, trainer, 5.0)
        with pytest.raises(WeightSyncError, match="the trainer has moved on to version 2"):
            await sync.revive(trainer, servers[1])
    assert servers[1].version == -1
    with pytest.raises(WeightSyncError, match="there is no snapshot of version 1"):
        await sync.revive(trainer, servers[1])
    assert (await sync(trainer, [fleet], 2))["weight_sync/engines_updated"] == 3.0
    servers[1].version, servers[1].weights = -1, 0.0
    await sync.revive(trainer, servers[1])  # the trainer still has them
    assert (servers[1].version, servers[1].weights) == (2, 2.0)


async def take_step(trainer: Any, after_s: float) -> None:
    await trio.sleep(after_s)
    trainer.step(2.0)


async def test_a_revival_that_cannot_begin_is_tried_again(autojump_clock):
    world = FleetWorld()
    await world.step(3.0)
    opened, world.keeper.open_reader = world.keeper.open_reader, fail_to_open  # pyright: ignore[reportAttributeAccessIssue]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.sync.keep_engines_current, world.trainer, world.fleet)
        world.restart(world.servers[1])
        world.fleet.on_fail = lambda: setattr(world.keeper, "open_reader", opened)
        world.fleet.send.send_nowait(world.servers[1])
        await trio.sleep(100)
        assert world.fleet.events == [("fail", "b"), ("close", "b"), ("commit", "b", 1)]
        assert world.warnings == ["engine b cannot be revived: the disk is away"]
        world.fleet.send.close()


def fail_to_open(path: Path) -> Any:
    raise SnapshotError("the disk is away")


# --- the trainer's own failure, cancellation ----------------------------------------------------------------


class BrokenFuture:
    async def result(self) -> None:
        await trio.sleep(0.1)
        raise BackendError("out of memory")


async def test_a_failure_of_the_trainer_ends_the_update_at_once_as_itself(autojump_clock):
    world = FleetWorld()
    await world.step(3.0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.sync.keep_engines_current, world.trainer, world.fleet)
        real, world.trainer.forward = world.trainer.forward, lambda batch: BrokenFuture()
        world.servers[2].load_s = 50.0
        started, said = trio.current_time(), len(world.warnings)
        with pytest.raises(BackendError, match="out of memory"):
            await world.step(4.0)
        assert trio.current_time() - started < 10
        assert len(world.warnings) == said  # no engine is blamed
        assert [server.paused for server in world.servers] == [False] * 3
        assert world.fleet.serving == set()
        assert world.sync.published is not None and world.sync.published.version == 1
        world.trainer.forward = real
        nursery.cancel_scope.cancel()


async def test_an_update_that_is_cancelled_after_some_have_committed_is_published(autojump_clock):
    trainer: Any = Trainer()
    servers: Any = [Server(name, trainer) for name in "ab"]
    warnings: list[str] = []
    async with open_fleet([Member(server) for server in servers], warn=warnings.append) as fleet:
        sync = WeightSync(PROBE, keeper=Keeper(), admission=fleet, limits=LIMITS, warn=warnings.append)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sync.keep_engines_current, trainer, fleet)
            await sync(trainer, [fleet], trainer.step(3.0))
            servers[1].load_s = 50.0
            with trio.move_on_after(10):
                await sync(trainer, [fleet], trainer.step(4.0))
            assert fleet.published_version == 2
            values = fleet.statistics()
            assert (values["engine/a/state"], values["engine/a/version"], values["fleet/serving"]) == (
                0.0,
                2.0,
                1.0,
            )
            await trio.sleep(100)  # and the other follows, out of the new snapshot
            values = fleet.statistics()
            assert (values["engine/b/version"], values["fleet/serving"], servers[1].weights) == (
                2.0,
                2.0,
                4.0,
            )
            nursery.cancel_scope.cancel()


async def test_an_engine_that_joins_or_fails_during_the_first_update_serves_in_the_end(autojump_clock):
    trainer: Any = Trainer()
    servers: Any = [Server(name, trainer) for name in NAMES]
    servers[0].load_s = 50.0
    servers[1].faults["pause"] = ["fail"]  # its announcement comes before there is anything to serve
    warnings: list[str] = []
    async with open_fleet([Member(server) for server in servers[:2]], warn=warnings.append) as fleet:
        sync = WeightSync(PROBE, keeper=Keeper(), admission=fleet, limits=LIMITS, warn=warnings.append)

        async def join() -> None:
            await trio.sleep(10)
            await fleet.join(Member(servers[2]))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(sync.keep_engines_current, trainer, fleet)
            nursery.start_soon(join)
            await sync(trainer, [fleet], 0)
            await trio.sleep(200)
            assert fleet.statistics()["fleet/serving"] == 3.0
            nursery.cancel_scope.cancel()


async def test_an_update_that_reaches_nobody_is_tried_with_growing_pauses(autojump_clock):
    world = FleetWorld(patience_s=300.0)
    for server in world.servers:
        server.faults["pause"] = ["fail"] * 1000
    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.sync.keep_engines_current, world.trainer, world.fleet)
        with pytest.raises(WeightSyncError):
            await world.step(3.0)
        assert 5 <= world.servers[0].calls.count("pause") <= 10
        nursery.cancel_scope.cancel()


async def test_engines_of_one_name_are_refused():
    world = World()
    world.servers[1] = Server("a", world.trainer)
    with pytest.raises(WeightSyncError, match="2 engines are named 'a'"):
        await world.update(1, 3.0)
    assert world.admission.events == []


# --- transport ----------------------------------------------------------------------------------------------


async def test_after_a_transfer_in_memory_there_is_a_snapshot_for_those_that_restart(autojump_clock):
    async def transport(backend: Any, engines: Sequence[Any], version: int) -> Mapping[str, Exception | None]:
        return await Broadcast(backend.weights, version)(engines)

    world = FleetWorld(transport=transport)
    await world.step(3.0)
    assert world.servers[0].calls.count("load") == 0
    world.restart(world.servers[0])
    await world.sync.revive(world.trainer, world.servers[0])
    assert world.servers[0].calls.count("load") == 1
    assert world.servers[0].weights == 3.0


# --- with the fleet -----------------------------------------------------------------------------------------


async def test_a_fleet_serves_what_was_proven_and_an_engine_that_failed_returns_by_itself(autojump_clock):
    trainer: Any = Trainer()
    servers: Any = [Server(name, trainer) for name in NAMES]
    warnings: list[str] = []
    sampling = SamplingParams(max_new_tokens=4)

    async with open_fleet([Member(server) for server in servers], warn=warnings.append) as fleet:
        sync = WeightSync(PROBE, keeper=Keeper(), admission=fleet, limits=LIMITS, warn=warnings.append)

        async def ask(count: int) -> set[int]:
            """The versions in the answers to so many requests at once."""
            versions: set[int] = set()

            async def ask_one(index: int) -> None:
                completion = await fleet.generate(
                    GenerateRequest(
                        request_id=f"{trio.current_time()}-{index}",
                        prompt_ids=PROBE.prompt_ids,
                        sampling=sampling,
                    )
                )
                versions.update(completion.weight_versions.tolist())

            async with trio.open_nursery() as nursery:
                for index in range(count):
                    nursery.start_soon(ask_one, index)
            return versions

        async with trio.open_nursery() as nursery:
            nursery.start_soon(sync.keep_engines_current, trainer, fleet)
            await sync(trainer, [fleet], trainer.step(3.0))
            assert fleet.published_version == 1
            assert await ask(9) == {1}

            servers[1].faults["load"] = ["fail"]
            metrics = await sync(trainer, [fleet], trainer.step(4.0))
            assert (metrics["weight_sync/engines_updated"], metrics["weight_sync/engines_failed"]) == (
                2.0,
                1.0,
            )
            assert servers[1].version == 1
            assert await ask(9) == {2}  # nothing comes from the one that failed

            trainer.step(5.0)  # the trainer is ahead when it returns
            await trio.sleep(100)
            assert (servers[1].weights, servers[1].version) == (4.0, 2)
            assert fleet.statistics()["fleet/serving"] == 3.0
            nursery.cancel_scope.cancel()


# --- with the embedded engine -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return resolve_model("tiny:byte", cache_dir=tmp_path_factory.mktemp("models"))


BATCH = RolloutBatch(tokens=(np.arange(1, 9),), loss_masks=(np.arange(8) >= 4,))
OPTIM = OptimConfig(lr=1e-2)


def open_backend(model_path: Path):
    return open_pytorch_backend(model_path, optim=OPTIM, total_steps=10, threads=1, autocast="off")


async def test_a_shared_engine_that_reports_another_version_is_refused():
    async with open_fake_backend() as backend:
        sync = WeightSync(Probe(make_probe_prompt(256), 10.0))
        with pytest.raises(WeightSyncError, match="reports weight version 0 after an update to version 4"):
            await sync(backend, [ScriptedEngine(shares_weights=True)], 4)


async def test_a_shared_engine_has_nothing_to_load():
    async with open_fake_backend() as backend:
        engine = ScriptedEngine(shares_weights=True, version=2)
        assert await WeightSync(Probe(make_probe_prompt(256), 10.0))(backend, [engine], 2) == {}
        assert engine.requests == []


async def test_a_copied_engine_follows_the_trainer_in_memory(model_path: Path):
    async with (
        open_backend(model_path) as backend,
        open_device_thread(name="engine", torch_threads=1) as thread,
        open_local_engine(backend.model, device_thread=thread, mode="copied", max_rows=4) as engine,
    ):
        sync = WeightSync(Probe(make_probe_prompt(engine.features.vocab_size), 1e-3))
        await sync(backend, [engine], 0)
        before = sync.memory.reply(0, "local")
        backend.forward_backward(BATCH, LossSpec("sft"))
        await backend.optim_step().result()
        await backend.set_weight_version(1).result()
        metrics = await sync(backend, [engine], 1)
        assert await engine.weight_version() == 1
        assert metrics["weight_sync/probe_difference/max"] < 1e-4
        assert metrics["weight_sync/bytes"] == sum(
            parameter.nbytes for parameter in backend.model.parameters()
        )
        after = sync.memory.reply(1, "local")
        assert before is not None
        assert after is not None
        assert not after.same_answer(before)


async def test_an_engine_that_says_the_version_without_the_weights_is_caught(model_path: Path):
    async with (
        open_backend(model_path) as backend,
        open_device_thread(name="engine", torch_threads=1) as thread,
        open_local_engine(backend.model, device_thread=thread, mode="copied", max_rows=4) as engine,
    ):
        sync = WeightSync(Probe(make_probe_prompt(engine.features.vocab_size), 1e-3))
        await sync(backend, [engine], 0)
        old_weights = await backend.get_weights()
        backend.forward_backward(BATCH, LossSpec("sft"))
        await backend.optim_step().result()

        class StaleStream:
            """A backend whose stream sends what it had before."""

            def __getattr__(self, name):
                return getattr(backend, name)

            def stream_weights(self, sink):
                return backend.device_thread.submit(lambda: sink(list(old_weights.items())))

        with pytest.raises(WeightSyncError, match="differs from the trainer"):
            await sync(StaleStream(), [engine], 1)  # pyright: ignore[reportArgumentType]


async def test_an_engine_that_refuses_a_bucket_fails_and_the_backend_goes_on(model_path: Path):
    other = resolve_model("tiny:qwen3", cache_dir=model_path.parent)
    async with (
        open_backend(model_path) as backend,
        open_backend(other) as another,
        open_device_thread(name="engine", torch_threads=1) as thread,
        open_local_engine(another.model, device_thread=thread, mode="copied", max_rows=4) as engine,
    ):
        with pytest.raises(WeightSyncError, match="local: load: EngineError: weight update has"):
            await WeightSync(Probe(make_probe_prompt(200), 1e-3))(backend, [engine], 0)
        await backend.forward(BATCH).result()


class DiskOnlyEngine:
    """An engine that has no transfer in memory."""

    def __init__(self, engine):
        self._engine = engine
        have = engine.features
        self.features = EngineFeatures(
            have.vocab_size, have.context_length, False, True, False, have.keep_pause, have.deterministic
        )

    def __getattr__(self, name):
        return getattr(self._engine, name)


def disk_only(engine: Any) -> Any:
    return DiskOnlyEngine(engine)


async def test_an_engine_that_loads_only_from_disk_gets_a_snapshot_and_older_ones_go(
    model_path: Path, tmp_path: Path
):
    folder = tmp_path / "weights"
    async with (
        open_backend(model_path) as backend,
        open_device_thread(name="engine", torch_threads=1) as thread,
        open_local_engine(backend.model, device_thread=thread, mode="copied", max_rows=4) as engine,
    ):
        sync = WeightSync(Probe(make_probe_prompt(engine.features.vocab_size), 1e-3), snapshot_dir=folder)
        await sync(backend, [disk_only(engine)], 0)
        backend.forward_backward(BATCH, LossSpec("sft"))
        await backend.optim_step().result()
        metrics = await sync(backend, [disk_only(engine)], 1)
        assert [path.name for path in folder.iterdir()] == ["v1"]
        assert metrics["weight_sync/bytes"] == (folder / "v1/model.safetensors").stat().st_size
        with pytest.raises(WeightSyncError, match="snapshot_dir"):
            await WeightSync(sync.probe)(backend, [disk_only(engine)], 2)

        file = folder / "v1/model.safetensors"
        file.write_bytes(file.read_bytes()[:-1])
        with pytest.raises(SnapshotError, match=r"model\.safetensors has \d+ bytes; the manifest says"):
            await sync(backend, [disk_only(engine)], 1)


async def test_after_a_restart_what_the_killed_run_left_is_never_served(model_path: Path, tmp_path: Path):
    folder = tmp_path / "weights"
    async with (
        open_backend(model_path) as backend,
        open_device_thread(name="engine", torch_threads=1) as thread,
        open_local_engine(backend.model, device_thread=thread, mode="copied", max_rows=4) as engine,
    ):
        for version in (1, 2, 3):
            await export_snapshot(backend, folder / f"v{version}")
        backend.forward_backward(
            BATCH, LossSpec("sft")
        )  # the run resumes at version 2 with other weights than it once had there
        await backend.optim_step().result()
        sync = WeightSync(Probe(make_probe_prompt(engine.features.vocab_size), 1e-3), snapshot_dir=folder)
        metrics = await sync(backend, [disk_only(engine)], 2)
        assert metrics["weight_sync/probe_difference/max"] < 1e-4
        assert list_snapshots(folder) == [(2, folder / "v2-2")]
        await sync(backend, [disk_only(engine)], 2)
        assert list_snapshots(folder) == [(2, folder / "v2-2")]


async def test_a_snapshot_holds_every_parameter_and_is_never_rewritten(model_path: Path, tmp_path: Path):
    async with open_backend(model_path) as backend:
        await export_snapshot(backend, tmp_path / "v3")
        weights = load_file(tmp_path / "v3/model.safetensors")
        assert set(weights) == {name for name, _ in backend.model.named_parameters()}
        backend.forward_backward(BATCH, LossSpec("sft"))
        await backend.optim_step().result()
        await export_snapshot(backend, tmp_path / "v3")
        kept = load_file(tmp_path / "v3/model.safetensors")
        assert all((kept[name] == weights[name]).all() for name in weights)
