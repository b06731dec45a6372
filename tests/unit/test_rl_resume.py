"""A run whose algorithm changes on the way, under a KL controller, stopped and resumed: bit for bit the run
that was not stopped.
"""

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollouts.backends.open import open_pytorch_backend
from rollouts.config.schema import RLTrainingConfig
from rollouts.config.tables import OptimConfig
from rollouts.data.data_buffer import DataBuffer
from rollouts.engines.local import open_local_engine
from rollouts.errors import ConfigError
from rollouts.generation.async_rollout_manager import AsyncRolloutManager
from rollouts.generation.generate import make_chat_generate
from rollouts.loops.algorithm import LoopState, count_updates, decode_loop_state
from rollouts.loops.rl import run_rl_training
from rollouts.loops.steps import EncodeState, StepHooks
from rollouts.models.load import resolve_model
from rollouts.reference.score import open_frozen_reference
from rollouts.testing.fakes import open_fake_backend
from rollouts.types import Sample, SamplingParams
from tests.support.compare_runs import comparable
from tests.support.fake_tokenizer import FakeTokenizer
from tests.support.text_tables import cases

CONFIG = RLTrainingConfig.model_validate(
    tomllib.loads("""
steps = 6
kl_coef = 0.1
kl_control = "proportional(target=0.05, horizon=50)"
updates_per_batch = 2
minibatches = 2
data = [{ kind = "jsonl", path = "unused.jsonl" }]
rollout = { num_prompts = 3, samples_per_prompt = 3, max_new_tokens = 6 }
optim = { lr = 1e-2, schedule = "cosine" }
changes = [{ from_step = 4, loss = "gspo", normalise_by = "sequences", advantage = "centred" }]
""")
)


class Rows:
    """A MetricsLogger that keeps the rows, without what a clock measured."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.samples: list[tuple[str, str]] = []

    async def log_step(self, stage: str, step: int, policy_version: int, metrics: Any, **rows: Any) -> None:
        self.steps.append(comparable(metrics))

    async def log_samples(
        self, stage: str, step: int, policy_version: int, samples: Sequence[Sample]
    ) -> None:
        self.samples += [(sample.id, sample.response) for sample in samples]


async def reward_low_bytes(sample: Sample) -> float:
    return float((sample.tokens[sample.loss_mask] < 128).mean())


async def run(
    model: Path, folder: Path, *, config: RLTrainingConfig = CONFIG, resume_from: int = 0, stop_after: int = 0
) -> tuple[Rows, dict[str, np.ndarray], LoopState]:
    """The rows of the steps that ran, the weights after them, and the state of the loop. Reads and writes
    step_N in `folder`.
    """
    rows = Rows()
    buffer = DataBuffer([{"prompt": f"prompt {number}"} for number in range(7)], seed=5)
    options: dict[str, Any] = {"threads": 1, "autocast": "off", "deterministic": True}
    async with (
        open_pytorch_backend(
            model, optim=config.optim, total_steps=config.steps * count_updates(config), **options
        ) as backend,
        open_frozen_reference(model, device_thread=backend.device_thread) as reference,
        open_local_engine(
            backend.model,
            device_thread=backend.device_thread,
            mode="shared",
            trainer_version=lambda: backend.weight_version,
            deterministic=True,
        ) as engine,
    ):
        manager = AsyncRolloutManager(
            buffer, engine, generate=make_chat_generate(FakeTokenizer()), config=config.rollout,
            reward=reward_low_bytes, filters=(), seed=5,
            sampling=SamplingParams(max_new_tokens=6, stop_token_ids=(257,)),
            policy_version=lambda: backend.weight_version, max_staleness=0,
        )  # fmt: skip
        state = LoopState(config.kl_coef)
        if resume_from:
            saved = json.loads((folder / f"step_{resume_from}.json").read_text())
            await backend.load(folder / f"step_{resume_from}")
            buffer.load_state_dict(saved["buffer"])
            manager.load_state_dict(saved["manager"])
            state = decode_loop_state(saved["loop"])

        def hold_state() -> EncodeState:
            if stop_after and len(rows.steps) == stop_after:
                hooks.stop.request()
            drawn, rollouts, loop = buffer.state_dict(), manager.snapshot(), asdict(state)
            return lambda: {"buffer": drawn, "manager": rollouts(), "loop": loop}

        async def save(step: int, encode: EncodeState) -> None:
            await backend.save(folder / f"step_{step}")
            (folder / f"step_{step}.json").write_text(json.dumps(encode()))

        async def sync(backend: Any, engines: Sequence[Any], version: int) -> Mapping[str, float]:
            return {}

        hooks = StepHooks(hold_state=hold_state, save=save)
        arguments: dict[str, Any] = {"reference": reference, "seed": 5, "state": state, "hooks": hooks}
        arguments |= {"sync_weights": sync, "completed_steps": resume_from}
        await run_rl_training(backend, buffer, manager, [engine], config, rows, **arguments)
        weights = {name: value.float().numpy() for name, value in (await backend.get_weights()).items()}
    return rows, weights, state


async def test_a_run_stopped_beside_a_change_of_algorithm_goes_on_as_the_run_that_was_not_stopped(
    tmp_path: Path,
):
    model = resolve_model("tiny:byte", seed=1)
    folders = {stop_after: tmp_path / f"stopped_{stop_after}" for stop_after in (0, 3, 4)}
    for folder in folders.values():
        folder.mkdir()
    whole, weights, state = await run(model, folders[0])
    coefficients = [row["kl/coef"] for row in whole.steps]
    assert len(set(coefficients)) == 6, "the controller moved it in every step"
    assert [row["algorithm/change"] for row in whole.steps] == [0, 0, 0, 1, 1, 1]
    assert [row["optim/updates"] for row in whole.steps] == [4] * 6
    for stop_after in (3, 4):
        first, _, at_stop = await run(model, folders[stop_after], stop_after=stop_after)
        assert at_stop.kl_coef == coefficients[stop_after]
        rest, resumed_weights, resumed_state = await run(model, folders[stop_after], resume_from=stop_after)
        assert [len(rows.steps) for rows in (first, rest)] == [stop_after, 6 - stop_after]
        assert first.steps + rest.steps == whole.steps
        assert first.samples + rest.samples == whole.samples
        assert bits(resumed_weights) == bits(weights)
        assert resumed_state == state


def bits(weights: Mapping[str, np.ndarray]) -> dict[str, bytes]:
    return {name: value.tobytes() for name, value in weights.items()}


@cases("""
lr   | limit | trained_lr
10.0 | 0.1   | 0.0
0.01 | 9.0   | 0.01
""")
async def test_updates_beyond_the_kl_limit_change_no_weight_and_the_run_goes_on(
    tmp_path: Path, lr: float, limit: float, trained_lr: float
):
    """A rate of 10 wrecks the model at once: all is undone, and the weights end as with a rate of 0. What no
    update exceeds changes no bit.
    """
    model, found = resolve_model("tiny:byte", seed=1), list[Any]()
    for rate, kl_limit in ((lr, limit), (trained_lr, 0.0)):
        changes = {"steps": 3, "kl_limit": kl_limit, "optim": OptimConfig.model_construct(lr=rate)}
        found.append(await run(model, tmp_path, config=CONFIG.model_copy(update=changes)))
    (rows, weights, _), (_, expected, _) = found
    assert bits(weights) == bits(expected)
    undone = float(lr > 1)
    assert [row["optim/undone"] for row in rows.steps] == [undone] * 3
    assert [row["optim/updates"] for row in rows.steps] == [4 - 3 * undone] * 3
    assert all((row["kl/update"] > limit) == undone for row in rows.steps)


async def test_a_resumed_run_under_a_controller_must_be_given_its_coefficient(tmp_path: Path):
    unused: Any = None
    said = r"rl\.kl_control='proportional.*' after 3 steps needs the coefficient it had come to; pass state="
    async with open_fake_backend() as backend:
        with pytest.raises(ConfigError, match=said):
            await run_rl_training(
                backend, unused, unused, [], CONFIG, Rows(), sync_weights=unused, completed_steps=3
            )
