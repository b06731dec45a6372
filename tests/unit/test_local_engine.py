"""The embedded engine on tiny models, against the model's own forward pass."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import trio
import trio.testing
from safetensors.torch import save_file

from rollouts.device_thread import open_device_thread
from rollouts.engines.local import LocalEngine, open_local_engine
from rollouts.engines.local.kv_slots import KVSlots
from rollouts.errors import EngineClosed, EngineError, ModelError, RequestRefused, WeightVersionError
from rollouts.testing import engine_contracts
from rollouts.testing.engine_contracts import make_request
from rollouts.testing.fakes import ScriptedEngine
from rollouts.types import Completion, GenerateRequest

VOCAB = 101
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 160,
    "initializer_range": 0.3,  # else all tokens are about as likely and mistakes would not show
}


def make_model(kind: str = "Llama", **changes: Any) -> Any:
    """A random model of that family; the same every time."""
    with torch.random.fork_rng():
        torch.manual_seed(changes.pop("seed", 0))
        config = getattr(transformers, f"{kind}Config")(**{**SHAPE, **changes})
        return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


@asynccontextmanager
async def open_engine(
    model: Any = None, *, mode: Any = "shared", **options: Any
) -> AsyncIterator[LocalEngine]:
    options = {"trainer_version": lambda: 0, "max_rows": 8, **options}
    async with (
        open_device_thread(name="test", torch_threads=1) as thread,
        open_local_engine(
            make_model() if model is None else model, device_thread=thread, mode=mode, **options
        ) as engine,
    ):
        yield engine


async def generate_all(engine: LocalEngine, requests: list[GenerateRequest]) -> dict[str, Completion]:
    answers: dict[str, Completion] = {}

    async def ask(request: GenerateRequest) -> None:
        answers[request.request_id] = await engine.generate(request)

    async with trio.open_nursery() as nursery:
        for request in requests:
            nursery.start_soon(ask, request)
    return answers


def score(model: Any, request: GenerateRequest, completion: Completion) -> np.ndarray:
    """The model's own log-probs of the completion at temperature 1."""
    ids = torch.from_numpy(np.concatenate([request.prompt_ids, completion.token_ids]))
    with torch.no_grad():
        log_probs = model(ids[None], use_cache=False).logits[0].float().log_softmax(-1)
    start = len(request.prompt_ids)
    return log_probs[start - 1 : -1].gather(1, ids[start:, None])[:, 0].numpy()


def make_requests(count: int) -> list[GenerateRequest]:
    """Prompts of lengths 1..6, each shared by several requests, and responses of lengths 1..40."""
    rng = np.random.default_rng(3)
    prompts = [tuple(rng.integers(0, VOCAB, length).tolist()) for length in (1, 6, 3, 2, 5, 4)]
    return [
        make_request(f"r{i:03}", prompt=prompts[i // 3 % 6], max_new_tokens=int(rng.integers(1, 40)))
        for i in range(count)
    ]


def after_steps(engine: LocalEngine, steps: int, action: Callable[[], Awaitable[object]]) -> None:
    """Once `steps` more decode steps are done, the device waits until `action` has run and every task is
    blocked.
    """
    token = trio.lowlevel.current_trio_token()
    batch, plain, count = engine._batch, engine._batch.step, 0

    async def act() -> None:
        await action()
        await trio.testing.wait_all_tasks_blocked()

    def step(version: int) -> None:
        nonlocal count
        plain(version)
        count += 1
        if count == steps:
            trio.from_thread.run(act, trio_token=token)

    batch.step = step  # pyright: ignore[reportAttributeAccessIssue]


# --- exactness ----------------------------------------------------------------------------------------------

MODELS: list[tuple[str, dict[str, Any]]] = [
    ("Llama", {}),
    (
        "Llama",
        {
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "head_dim": 16,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    ("Qwen2", {}),
    ("Qwen3", {"head_dim": 8}),
    ("Mistral", {"sliding_window": 4096}),
    ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1000.0}}),
]


@pytest.mark.parametrize(("kind", "changes"), MODELS)
async def test_log_probs_are_the_models_own_through_joins_and_compaction(kind: str, changes: dict[str, Any]):
    model, requests = make_model(kind, **changes), make_requests(36)
    async with open_engine(model, max_rows=7) as engine:
        answers = await generate_all(engine, requests)
        statistics = engine.statistics()
    for request in requests:
        completion = answers[request.request_id]
        assert len(completion.token_ids) == request.sampling.max_new_tokens
        assert completion.finish_reason == "length"
        np.testing.assert_allclose(completion.log_probs, score(model, request, completion), atol=1e-4)
    assert statistics["moved_rows"] > 5
    assert statistics["prefill_tokens_saved"] > 0


async def test_greedy_tokens_are_those_of_the_plain_loop():
    model = make_model()
    ids = torch.tensor([[4, 8, 15]])
    with torch.no_grad():
        for _ in range(12):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    async with open_engine(model) as engine:
        completion = await engine.generate(
            make_request(prompt=(4, 8, 15), max_new_tokens=12, temperature=0.0)
        )
    assert completion.token_ids.tolist() == ids[0, 3:].tolist()


async def test_log_probs_follow_the_temperature():
    model = make_model()
    request = make_request(max_new_tokens=20, temperature=0.5)
    async with open_engine(model) as engine:
        completion = await engine.generate(request)
    ids = torch.from_numpy(np.concatenate([request.prompt_ids, completion.token_ids]))
    with torch.no_grad():
        log_probs = (model(ids[None]).logits[0, 2:-1] / 0.5).log_softmax(-1)
    np.testing.assert_allclose(
        completion.log_probs, log_probs.gather(1, ids[3:, None])[:, 0].numpy(), atol=1e-4
    )


async def test_a_stop_token_ends_the_completion_and_belongs_to_it():
    model = make_model()
    async with open_engine(model) as engine:
        whole = await engine.generate(make_request(max_new_tokens=30, seed=1))
        stop = int(whole.token_ids[9])
        cut = await engine.generate(make_request(max_new_tokens=30, seed=1, stop_token_ids=(stop,)))
    first = whole.token_ids.tolist().index(stop)
    assert cut.token_ids.tolist() == whole.token_ids[: first + 1].tolist()
    assert cut.finish_reason == "stop"


async def test_a_requests_tokens_do_not_depend_on_its_neighbours():
    requests = make_requests(20)
    async with open_engine(max_rows=16) as engine:
        together = await generate_all(engine, requests)
    async with open_engine(max_rows=1) as engine:
        for request in requests[::4]:
            alone = await engine.generate(request)
            assert alone.token_ids.tolist() == together[request.request_id].token_ids.tolist()
            np.testing.assert_allclose(alone.log_probs, together[request.request_id].log_probs, atol=1e-4)


async def test_samples_of_one_prompt_differ_and_compute_it_once():
    requests = [make_request(str(i), prompt=(1, 2, 3, 4, 5), max_new_tokens=10) for i in range(6)]
    async with open_engine() as engine:
        answers = await generate_all(engine, requests)
        statistics = engine.statistics()
    assert len({tuple(answer.token_ids.tolist()) for answer in answers.values()}) == 6
    assert statistics["prefill_tokens"] == 5
    assert statistics["prefill_tokens_saved"] == 25


async def test_a_late_request_copies_the_prompt_of_an_active_row():
    model = make_model()
    early, late = (
        make_request("early", prompt=(7, 8, 9, 10), max_new_tokens=60),
        make_request("late", prompt=(7, 8, 9, 10), max_new_tokens=9),
    )
    answers: dict[str, Completion] = {}
    async with open_engine(model) as engine, trio.open_nursery() as nursery:

        async def ask(request: GenerateRequest) -> None:
            answers[request.request_id] = await engine.generate(request)

        async def ask_late() -> None:
            nursery.start_soon(ask, late)

        after_steps(engine, 10, ask_late)
        await ask(early)
        statistics = engine.statistics()
    assert statistics["prefill_tokens"] == 4
    assert statistics["prefill_tokens_saved"] == 3  # the last token of the prompt is decoded, for its logits
    np.testing.assert_allclose(answers["late"].log_probs, score(model, late, answers["late"]), atol=1e-4)
    assert statistics["decode_rows"] == 59 + 9


async def test_long_prompts_are_computed_in_chunks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rollouts.engines.local.batch.PREFILL_TOKENS", 40)
    model = make_model()
    requests = [
        make_request(str(n), prompt=tuple(range(1, n)), max_new_tokens=3) for n in (60, 4, 30, 12, 13, 25)
    ]
    async with open_engine(model) as engine:
        answers = await generate_all(engine, requests)
    for request in requests:
        np.testing.assert_allclose(
            answers[request.request_id].log_probs,
            score(model, request, answers[request.request_id]),
            atol=1e-4,
        )


async def test_autocast_stays_near_float32():
    model = make_model()
    request = make_request(max_new_tokens=20)
    async with open_engine(model, autocast_dtype=torch.bfloat16) as engine:
        completion = await engine.generate(request)
        assert engine._batch.kv.keys[0].dtype == torch.bfloat16
    assert np.abs(completion.log_probs - score(model, request, completion)).max() < 0.25
    assert model.lm_head.weight.dtype == torch.float32


async def test_a_copy_in_another_dtype_leaves_the_model_alone():
    model = make_model()
    async with open_engine(model, mode="copied", copy_dtype=torch.float64) as engine:
        request = make_request(max_new_tokens=10)
        completion = await engine.generate(request)
    np.testing.assert_allclose(completion.log_probs, score(model, request, completion), atol=1e-4)
    assert model.lm_head.weight.dtype == torch.float32


async def test_the_trainers_model_is_left_as_it_was():
    model = make_model().train()
    model.model.layers[1].eval()
    before = {
        name: (value.clone(), value._version) for name, value in model.state_dict(keep_vars=True).items()
    }
    flags = [module.training for module in model.modules()]
    config = model.config.to_dict()
    async with open_engine(model) as engine:
        await generate_all(engine, make_requests(6))
    assert [module.training for module in model.modules()] == flags
    assert model.config.to_dict() == config
    for name, value in model.state_dict(keep_vars=True).items():
        assert value.requires_grad and value.grad is None
        assert torch.equal(value, before[name][0]) and value._version == before[name][1]
    model(
        torch.tensor([[1, 2]]), labels=torch.tensor([[1, 2]])
    ).loss.backward()  # nothing of inference mode was left in it


# --- many at once -------------------------------------------------------------------------------------------


async def test_never_more_rows_than_allowed_and_a_freed_row_is_used_at_once():
    requests = [make_request(str(i), prompt=(i + 1, 2), max_new_tokens=10) for i in range(12)]
    async with open_engine(max_rows=4) as engine:
        await generate_all(engine, requests)
        statistics = engine.statistics()
        assert engine._batch.kv.rows <= 4
    assert (
        statistics["decode_steps"] == 3 * 9
    )  # three waves of four; each row's first token comes from its prompt
    assert statistics["decode_rows"] == 12 * 9


async def test_deterministic_runs_give_the_same_bits_in_any_order_of_submission():
    results: list[dict[str, Completion]] = []
    for order in (1, -1):
        requests = make_requests(30)[::order]
        async with open_engine(deterministic=True, max_rows=8, seed=7) as engine:
            assert engine.features.deterministic
            first = await generate_all(engine, requests)
            second = await generate_all(
                engine, [replace(request, request_id=f"x{request.request_id}") for request in requests]
            )
            results.append({**first, **second})
    assert results[0].keys() == results[1].keys()
    for request_id, completion in results[0].items():
        assert completion.token_ids.tolist() == results[1][request_id].token_ids.tolist()
        assert completion.log_probs.tobytes() == results[1][request_id].log_probs.tobytes()


async def test_deterministic_lists_are_sorted_and_not_joined_by_latecomers():
    admitted: list[str] = []
    async with open_engine(deterministic=True, max_rows=2) as engine, trio.open_nursery() as nursery:
        plain = engine._batch.admit

        def admit(rows: Any, version: int) -> None:
            admitted.append(" ".join(row.request.request_id for row in rows))
            plain(rows, version)

        engine._batch.admit = admit  # pyright: ignore[reportAttributeAccessIssue]

        async def ask_late() -> None:
            nursery.start_soon(engine.generate, make_request("a-late", max_new_tokens=2))

        after_steps(engine, 1, ask_late)
        for name, length in (("d", 5), ("b", 8), ("c", 5), ("e", 5)):
            nursery.start_soon(engine.generate, make_request(name, max_new_tokens=length))
    assert admitted == [
        "b c",
        "d",
        "e",
        "a-late",
    ]  # a row at a time as rows get free; the latecomer when the list is done


async def test_another_seed_gives_other_tokens():
    tokens = []
    for seed in (0, 0, 1):
        async with open_engine(seed=seed) as engine:
            tokens.append((await engine.generate(make_request(max_new_tokens=20))).token_ids.tolist())
    assert tokens[0] == tokens[1] != tokens[2]


# --- leaving early ------------------------------------------------------------------------------------------


async def test_a_cancelled_caller_frees_its_row_before_the_next_step():
    async with open_engine() as engine:
        with trio.CancelScope() as scope:

            async def cancel() -> None:
                scope.cancel()

            after_steps(engine, 3, cancel)
            await engine.generate(make_request(max_new_tokens=100))
        assert scope.cancelled_caught
        after = await engine.generate(make_request("b", max_new_tokens=2))
        statistics = engine.statistics()
    assert len(after.token_ids) == 2
    assert statistics["decode_rows"] == 3 + 1
    assert statistics["wasted_tokens"] == 4


async def test_a_cancelled_caller_frees_its_place_in_the_queue():
    async with open_engine(max_rows=1) as engine, trio.open_nursery() as nursery:

        async def ask_second_and_leave() -> None:
            with trio.CancelScope() as scope:
                nursery.start_soon(cancel_when_blocked, scope)
                await engine.generate(make_request("second", max_new_tokens=100))

        async def cancel_when_blocked(scope: trio.CancelScope) -> None:
            await trio.lowlevel.checkpoint()
            assert engine.statistics()["waiting"] == 1
            scope.cancel()

        async def start_second() -> None:
            nursery.start_soon(ask_second_and_leave)

        after_steps(engine, 1, start_second)
        await engine.generate(make_request("first", max_new_tokens=5))
        assert engine.statistics()["waiting"] == 0
        assert engine.statistics()["generated_tokens"] == 5


async def test_pause_abort_returns_what_there_is():
    answers: dict[str, Completion] = {}
    async with open_engine(max_rows=1) as engine, trio.open_nursery() as nursery:

        async def ask(name: str) -> None:
            answers[name] = await engine.generate(make_request(name, max_new_tokens=100))

        async def pause() -> None:
            nursery.start_soon(engine.pause, "abort")

        after_steps(engine, 5, pause)
        nursery.start_soon(ask, "active")
        await trio.lowlevel.checkpoint()
        nursery.start_soon(ask, "queued")
    assert (answers["active"].finish_reason, len(answers["active"].token_ids)) == ("abort", 6)
    assert (answers["queued"].finish_reason, len(answers["queued"].token_ids)) == ("abort", 0)
    assert engine.statistics()["requests_aborted"] == 2


async def test_pause_wait_lets_active_rows_finish_and_admits_no_other():
    answers: dict[str, Completion] = {}
    async with open_engine(max_rows=1) as engine, trio.open_nursery() as nursery:

        async def ask(name: str, tokens: int) -> None:
            answers[name] = await engine.generate(make_request(name, max_new_tokens=tokens))

        async def pause_and_look() -> None:
            await engine.pause("wait")
            await trio.testing.wait_all_tasks_blocked()  # the caller wakes at the same moment
            assert list(answers) == ["active"]
            assert engine.statistics()["waiting"] == 1
            await engine.resume()

        async def pause() -> None:
            nursery.start_soon(pause_and_look)

        after_steps(engine, 2, pause)
        nursery.start_soon(ask, "active", 12)
        await trio.lowlevel.checkpoint()
        nursery.start_soon(ask, "queued", 3)
    assert len(answers["active"].token_ids) == 12
    assert len(answers["queued"].token_ids) == 3


async def test_pause_keep_freezes_and_resume_goes_on_as_if_nothing_had_happened():
    request = make_request(max_new_tokens=25)
    async with open_engine() as engine:
        expected = await engine.generate(request)
        async with trio.open_nursery() as nursery:

            async def freeze() -> None:
                await engine.pause("keep")
                before = engine.statistics()["generated_tokens"]
                with pytest.raises(EngineError, match="release_memory with 1 active"):
                    await engine.release_memory()
                assert engine.statistics()["generated_tokens"] == before
                await engine.resume()

            async def start() -> None:
                nursery.start_soon(freeze)

            after_steps(engine, 7, start)
            completion = await engine.generate(request)
    assert completion.token_ids.tolist() == expected.token_ids.tolist()
    np.testing.assert_allclose(completion.log_probs, expected.log_probs, atol=1e-6)


async def test_frozen_requests_can_still_be_aborted():
    async with open_engine() as engine, trio.open_nursery() as nursery:

        async def freeze_then_abort() -> None:
            await engine.pause("keep")
            await engine.abort_all()

        async def start() -> None:
            nursery.start_soon(freeze_then_abort)

        after_steps(engine, 4, start)
        completion = await engine.generate(make_request(max_new_tokens=90))
    assert (completion.finish_reason, len(completion.token_ids)) == ("abort", 5)


# --- weights ------------------------------------------------------------------------------------------------


async def send(engine: LocalEngine, weights: Mapping[str, torch.Tensor], version: int) -> None:
    await engine.begin_update()
    items = list(weights.items())
    for start in range(0, len(items), 4):
        engine.receive_bucket(items[start : start + 4])
    await engine.finish_update(version)


async def test_a_copied_engine_follows_the_trainer_only_when_told():
    model, other = make_model(), make_model(seed=1)
    request = make_request(max_new_tokens=15)
    async with open_engine(model, mode="copied", trainer_version=lambda: 3) as engine:
        assert await engine.weight_version() == 3
        assert engine.features.in_memory_update and not engine.features.shares_weights
        with torch.no_grad():
            for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
                mine.copy_(theirs)
        unaware = await engine.generate(request)
        await send(engine, model.state_dict(), 4)
        aware = await engine.generate(request)
    assert unaware.weight_versions.tolist() == [3] * 15
    assert aware.weight_versions.tolist() == [4] * 15
    assert np.abs(unaware.log_probs - score(model, request, unaware)).max() > 0.1
    np.testing.assert_allclose(aware.log_probs, score(model, request, aware), atol=1e-4)


async def test_a_given_model_is_no_copy_and_follows_updates():
    model, other = make_model(), make_model(seed=1)
    request = make_request(max_new_tokens=15)
    async with open_engine(model, mode="given") as engine:
        assert engine.features.in_memory_update and not engine.features.shares_weights
        before = await engine.generate(request)
        np.testing.assert_allclose(before.log_probs, score(model, request, before), atol=1e-4)
        await send(engine, other.state_dict(), 4)
        after = await engine.generate(request)
        assert await engine.weight_version() == 4
    np.testing.assert_allclose(after.log_probs, score(other, request, after), atol=1e-4)
    assert torch.equal(model.lm_head.weight, other.lm_head.weight)


async def test_tied_weights_may_come_under_either_name():
    model = make_model(tie_word_embeddings=True)
    other = make_model(tie_word_embeddings=True, seed=1)
    weights = {name: value for name, value in other.state_dict().items() if name != "lm_head.weight"}
    async with open_engine(model, mode="copied") as engine:
        await send(engine, weights, 1)
        request = make_request()
        completion = await engine.generate(request)
    np.testing.assert_allclose(completion.log_probs, score(other, request, completion), atol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda w: {**w, "model.extra": torch.zeros(2)},
            "'model.extra', which the engine's model does not have",
        ),
        (
            lambda w: {**w, "model.norm.weight": torch.zeros(3)},
            r"'model.norm.weight' of shape \[3\]; the engine's is \[32\]",
        ),
        (
            lambda w: {k: v for k, v in w.items() if k != "model.norm.weight"},
            r"lacks 1 of .* \['model.norm.weight'\]; nothing was changed",
        ),
    ],
)
async def test_an_update_that_does_not_fit_changes_nothing(change: Callable[[dict], dict], message: str):
    model = make_model()
    request = make_request(max_new_tokens=10)
    async with open_engine(model, mode="copied") as engine:
        with pytest.raises(EngineError, match=message):
            await send(engine, change(dict(make_model(seed=1).state_dict())), 1)
        await engine.resume()  # gives the update up
        with pytest.raises(EngineError, match="without begin_update"):
            await engine.finish_update(1)
        completion = await engine.generate(request)
        assert await engine.weight_version() == 0
    np.testing.assert_allclose(completion.log_probs, score(model, request, completion), atol=1e-4)


async def test_weights_are_loaded_from_a_checkpoint(tmp_path: Path):
    other = make_model(seed=1)
    other.save_pretrained(tmp_path)
    request = make_request(max_new_tokens=10)
    async with open_engine(mode="copied") as engine:
        assert (await engine.update_weights_from_checkpoint(tmp_path, 5))["version"] == 5
        completion = await engine.generate(request)
    assert set(completion.weight_versions.tolist()) == {5}
    np.testing.assert_allclose(completion.log_probs, score(other, request, completion), atol=1e-4)


async def test_weights_are_loaded_from_a_sharded_checkpoint(tmp_path: Path):
    other = make_model(seed=1)
    other.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    async with open_engine(mode="copied") as engine:
        await engine.update_weights_from_checkpoint(tmp_path, 1)
        request = make_request()
        completion = await engine.generate(request)
    np.testing.assert_allclose(completion.log_probs, score(other, request, completion), atol=1e-4)


async def test_a_damaged_checkpoint_is_named_and_changes_nothing(tmp_path: Path):
    model = make_model()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"not safetensors")
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / "model.safetensors.index.json").write_text("{}")
    (tmp_path / "partial").mkdir()
    save_file({"model.norm.weight": torch.zeros(32)}, tmp_path / "partial" / "model.safetensors")
    async with open_engine(model, mode="copied") as engine:
        for name, message in (
            ("none", "holds no"),
            ("damaged", "cannot be read"),
            ("index", "not an index"),
            ("partial", "lacks"),
        ):
            with pytest.raises(EngineError, match=message):
                await engine.update_weights_from_checkpoint(tmp_path / name, 1)
        request = make_request()
        completion = await engine.generate(request)  # the engine had paused itself, and goes on
    np.testing.assert_allclose(completion.log_probs, score(model, request, completion), atol=1e-4)
    assert set(completion.weight_versions.tolist()) == {0}


async def test_an_update_in_flight_is_seen_token_by_token_and_prompts_of_old_weights_are_not_reused():
    other = make_model(seed=1)
    late = make_request("late", prompt=(5, 6, 7), max_new_tokens=8)
    answers: dict[str, Completion] = {}
    async with open_engine(mode="copied") as engine, trio.open_nursery() as nursery:

        async def ask(request: GenerateRequest) -> None:
            answers[request.request_id] = await engine.generate(request)

        async def update() -> None:
            await send(engine, other.state_dict(), 1)  # pauses by itself
            nursery.start_soon(ask, late)

        async def start() -> None:
            nursery.start_soon(update)

        after_steps(engine, 6, start)
        nursery.start_soon(ask, make_request("early", prompt=(5, 6, 7), max_new_tokens=40))
    assert answers["early"].weight_versions.tolist() == [0] * 7 + [1] * 33
    assert answers["late"].weight_versions.tolist() == [1] * 8
    np.testing.assert_allclose(answers["late"].log_probs, score(other, late, answers["late"]), atol=1e-4)


async def test_a_shared_engine_has_the_trainers_weights_and_version():
    model, version = make_model(), 0
    request = make_request(max_new_tokens=10)
    async with open_engine(model, trainer_version=lambda: version) as engine:
        await engine.generate(request)
        with torch.no_grad():
            model.lm_head.weight.mul_(0.5)
        version = 1
        completion = await engine.generate(request)
        assert await engine.weight_version() == 1
        with pytest.raises(WeightVersionError, match="update to version 7 of an engine that shares"):
            await engine.update_weights_from_checkpoint(Path("unused"), 7)
        assert (await engine.update_weights_from_checkpoint(Path("unused"), 1))["version"] == 1
        with pytest.raises(EngineError, match="mode='copied'"):
            await engine.begin_update()
    assert completion.weight_versions.tolist() == [1] * 10
    np.testing.assert_allclose(completion.log_probs, score(model, request, completion), atol=1e-4)


# --- failures -----------------------------------------------------------------------------------------------


async def test_a_device_failure_reaches_every_caller_and_the_engine_goes_on():
    failures: list[EngineError] = []
    async with open_engine(max_rows=2) as engine:
        plain = engine._batch.step

        def fail(version: int) -> None:
            raise RuntimeError("out of memory")

        async def ask(name: str) -> None:
            with pytest.raises(EngineError, match=f"{name}.*out of memory") as caught:
                await engine.generate(make_request(name))
            failures.append(caught.value)

        engine._batch.step = fail  # pyright: ignore[reportAttributeAccessIssue]
        async with trio.open_nursery() as nursery:
            for index in range(4):
                nursery.start_soon(ask, f"r{index}")
        engine._batch.step = plain  # pyright: ignore[reportAttributeAccessIssue]
        assert await engine.health()
        assert len((await engine.generate(make_request())).token_ids) == 4
    assert len(failures) == 4
    assert all(isinstance(failure.__cause__, RuntimeError) for failure in failures)


async def test_weights_that_are_not_finite_are_an_error_until_good_ones_come():
    model = make_model()
    good = model.model.norm.weight.detach().clone()
    async with open_engine(model) as engine:
        with torch.no_grad():
            model.model.norm.weight.fill_(float("nan"))
        with pytest.raises(EngineError, match="logits are not finite in 1 of 1 rows"):
            await engine.generate(make_request())
        with torch.no_grad():
            model.model.norm.weight.copy_(good)
        request = make_request()
        completion = await engine.generate(request)
    np.testing.assert_allclose(completion.log_probs, score(model, request, completion), atol=1e-4)


async def test_closing_answers_everyone():
    async with trio.open_nursery() as nursery:

        async def ask() -> None:
            with pytest.raises(EngineClosed, match="'a'"):
                await engine.generate(make_request(max_new_tokens=100))

        async with open_engine() as engine:
            await engine.pause("keep")
            nursery.start_soon(ask)
            await trio.testing.wait_all_tasks_blocked()
    with pytest.raises(EngineClosed):
        await engine.resume()


async def test_a_pause_that_waits_ends_when_the_engine_closes():
    async with trio.open_nursery() as nursery:

        async def pause() -> None:
            with pytest.raises(EngineClosed):
                await engine.pause("wait")

        async def ask() -> None:
            with pytest.raises(EngineClosed):
                await engine.generate(make_request(max_new_tokens=100))

        async with open_engine() as engine:
            pausing = trio.Event()

            async def start() -> None:
                nursery.start_soon(pause)
                pausing.set()

            after_steps(engine, 2, start)
            nursery.start_soon(ask)
            await pausing.wait()


async def test_an_error_inside_is_raised_as_it_is():
    with pytest.raises(ZeroDivisionError):
        async with open_engine():
            raise ZeroDivisionError


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (make_request(prompt=()), r"prompt_ids has shape \(0,\)"),
        (replace(make_request(), prompt_ids=np.array([[1]])), r"prompt_ids has shape \(1, 1\)"),
        (replace(make_request(), prompt_ids=np.array([1.0])), "prompt_ids has dtype float64"),
        (make_request(prompt=(1, VOCAB)), f"prompt_ids holds {VOCAB}; the vocabulary is 0..{VOCAB - 1}"),
        (make_request(prompt=(-1,)), "prompt_ids holds -1"),
        (
            make_request(max_new_tokens=158),
            "3 prompt tokens and max_new_tokens=158 make 161; the context is 160",
        ),
        (make_request(max_new_tokens=0), "max_new_tokens=0"),
        (make_request(temperature=-1.0), "temperature=-1"),
        (make_request(temperature=float("nan")), "temperature=nan"),
        (make_request(top_p=0.0), "top_p=0"),
        (make_request(top_p=1.1), "top_p=1.1"),
        (make_request(top_k=-1), "top_k=-1"),
    ],
)
async def test_a_bad_request_is_refused_by_field_value_and_rule(request_: GenerateRequest, message: str):
    async with open_engine() as engine:
        with pytest.raises(RequestRefused, match=message):
            await engine.generate(request_)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trainer_version": None}, "needs trainer_version"),
        ({"copy_dtype": torch.bfloat16}, "no copy"),
        ({"max_rows": 0}, "max_rows=0"),
        ({"max_context": 161}, "max_context=161"),
    ],
)
async def test_settings_that_do_not_fit_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(EngineError, match=message):
        async with open_engine(**options):
            pass


def double_head(model: Any) -> None:
    model.lm_head.register_forward_hook(
        lambda module, inputs, output: output * 2
    )  # the model's own forward has it too: fine


def odd_forward(model: Any) -> None:
    plain = model.model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        output = plain(*args, **kwargs)
        output.last_hidden_state = output.last_hidden_state * 2
        return output

    model.model.forward = forward


def no_linear_head(model: Any) -> None:
    model.lm_head = torch.nn.Sequential(model.lm_head)


def dropout(model: Any) -> None:
    model.model.layers[0].mlp.act_fn = torch.nn.Sequential(torch.nn.SiLU(), torch.nn.Dropout(0.1)).eval()


def broken(model: Any) -> None:
    model.model.layers[1].self_attn.v_proj = torch.nn.Linear(32, 7)


def sees_the_future(model: Any) -> None:
    for layer in model.model.layers:
        plain = layer.self_attn.forward

        def forward(*args: Any, plain: Any = plain, **kwargs: Any) -> Any:
            return plain(*args, **{**kwargs, "attention_mask": torch.zeros(1, 1, 1, 1)})

        layer.self_attn.forward = forward


@pytest.mark.parametrize(
    ("kind", "changes", "alter", "reason"),
    [
        ("Mistral", {"sliding_window": 64}, None, "sliding_window=64 is shorter than the context of 160"),
        ("Gemma2", {"head_dim": 8}, None, "final_logit_softcapping=30.0"),
        ("Llama", {"final_logit_softcapping": 30.0}, None, "final_logit_softcapping=30.0"),
        ("Olmo2", {}, None, "parts"),
        ("Llama", {}, odd_forward, "differ from the model's own by"),
        ("Llama", {}, no_linear_head, "lm_head is a Sequential"),
        ("Llama", {}, dropout, "has dropout layers"),
    ],
)
async def test_a_model_that_is_not_llama_like_runs_by_its_own_forward(
    kind: str, changes: dict[str, Any], alter: Any, reason: str
):
    model = make_model(kind, **changes)
    if alter is not None:
        alter(model)
    requests = make_requests(8)
    async with open_engine(model, max_rows=3) as engine:
        answers = await generate_all(engine, requests)
        assert engine.path == "cached"
        assert re.search(reason, engine.describe())
        assert engine.statistics()["fast_path"] == 0.0
    for request in requests:
        np.testing.assert_allclose(
            answers[request.request_id].log_probs,
            score(model, request, answers[request.request_id]),
            atol=1e-4,
        )


async def test_a_model_whose_cache_does_not_fit_its_layers_is_recomputed():
    model = make_model("Llama", layer_types=["full_attention", "linear_attention"])
    request = make_request(max_new_tokens=10)
    async with open_engine(model) as engine:
        completion = await engine.generate(request)
        assert engine.path == "recompute"
        assert "very slow" in engine.describe() and "full attention only" in engine.describe()
    np.testing.assert_allclose(completion.log_probs, score(model, request, completion), atol=1e-4)


@pytest.mark.parametrize(
    ("alter", "message"),
    [
        (
            broken,
            (
                "fast: it does not run: RuntimeError.*cached: it does not run: RuntimeError.*recompute: it"
                " does not run: RuntimeError"
            ),
        ),
        (
            sees_the_future,
            (
                "fast: its log-probs differ.*cached: .*recompute: its log-probs differ from the model's own"
                " by .* nats"
            ),
        ),
    ],
)
async def test_a_model_that_no_way_runs_exactly_is_refused_with_all_the_reasons(alter: Any, message: str):
    model = make_model()
    alter(model)
    with pytest.raises(ModelError, match=message):
        async with open_engine(model):
            pass


async def test_rotary_frequencies_that_change_within_the_context_are_refused():
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    rope = {
        "rope_type": "longrope",
        "factor": 2.0,
        "rope_theta": 1e4,
        "original_max_position_embeddings": 80,
        **factors,
    }
    model = make_model("Llama", rope_parameters=rope)
    with pytest.raises(
        ModelError, match=r"rope_type='longrope' changes.*beyond 80 tokens.*set max_context to 80 or less"
    ):
        async with open_engine(model):
            pass
    async with open_engine(model, max_context=80) as engine:
        assert engine.path == "fast"


async def test_hooks_on_projections_are_obeyed():
    model = make_model()
    double_head(model)
    request = make_request(max_new_tokens=10)
    async with open_engine(model) as engine:
        completion = await engine.generate(request)
    np.testing.assert_allclose(completion.log_probs, score(model, request, completion), atol=1e-4)


# --- memory -------------------------------------------------------------------------------------------------


async def test_memory_is_released_when_idle_and_comes_back_with_the_next_request():
    async with open_engine() as engine:
        await engine.generate(make_request())
        assert engine.statistics()["kv_bytes"] > 0
        await engine.release_memory()
        assert engine.statistics()["kv_bytes"] == 0
        await engine.restore_memory()
        assert len((await engine.generate(make_request())).token_ids) == 4


def test_slots_grow_and_keep_their_contents():
    kv = KVSlots(
        num_layers=2,
        num_kv_heads=1,
        head_dim=2,
        max_rows=20,
        max_length=300,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    kv.reserve(3, 10)
    assert (kv.rows, kv.capacity) == (8, 64)
    filled = torch.arange(20.0).view(1, 1, 10, 2)
    kv.write_prompts(1, torch.tensor([2]), filled, -filled)
    kv.reserve(9, 65)
    assert (kv.rows, kv.capacity) == (16, 128)  # half as much again, in blocks
    assert torch.equal(kv.keys[1][2, :, :10], filled[0])
    assert torch.equal(kv.values[1][2, :, :10], -filled[0])
    assert kv.keys[1].sum() == filled.sum()
    kv.move(2, 0, 10)
    kv.copy(torch.tensor([0, 0]), torch.tensor([5, 6]), 4)
    assert torch.equal(kv.values[1][6, :, :4], -filled[0, :, :4])
    kv.reserve(20, 300)
    assert (kv.rows, kv.capacity, kv.num_bytes) == (20, 300, 2 * 2 * 20 * 300 * 2 * 4)


# --- the contract -------------------------------------------------------------------------------------------


@asynccontextmanager
async def open_scripted() -> AsyncIterator[ScriptedEngine]:
    engine = ScriptedEngine()
    yield engine
    engine.close()


def open_shared() -> Any:
    return open_engine()


def open_copied() -> Any:
    return open_engine(mode="copied", deterministic=True)


def open_roomy_shared() -> Any:
    return open_engine(make_model(max_position_embeddings=2048))


def open_roomy_copied() -> Any:
    return open_engine(make_model(max_position_embeddings=2048), mode="copied")


@pytest.mark.parametrize("opener", [open_scripted, open_shared, open_copied])
@pytest.mark.parametrize("check", engine_contracts.CHECKS)
async def test_engines_keep_the_contract(check: Callable[[Any], Awaitable[None]], opener: Any):
    await check(opener)


@pytest.mark.parametrize("opener", [open_roomy_shared, open_roomy_copied])
@pytest.mark.parametrize("check", engine_contracts.MODEL_CHECKS)
async def test_embedded_engines_keep_the_contract_of_engines_with_a_model(
    check: Callable[[Any], Awaitable[None]], opener: Any
):
    await check(opener)


@pytest.mark.parametrize("opener", [open_scripted, open_shared, open_copied])
async def test_engines_update_in_memory_as_the_contract_says(opener: Any):
    await engine_contracts.check_update_in_memory(opener, list(make_model(seed=1).state_dict().items()))


async def test_a_shared_engine_keeps_the_trainers_version(tmp_path: Path):
    await engine_contracts.check_shared_engine_keeps_the_trainers_version(open_shared, tmp_path)


async def test_a_deterministic_engine_goes_on_after_a_cancelled_list_longer_than_its_rows():
    async with open_engine(deterministic=True, max_rows=2) as engine:
        with trio.move_on_after(0.05):
            async with trio.open_nursery() as nursery:
                for request in make_requests(6):
                    nursery.start_soon(engine.generate, request)
        with trio.fail_after(20):
            completion = await engine.generate(replace(make_requests(1)[0], request_id="later"))
        assert len(completion.token_ids) > 0
