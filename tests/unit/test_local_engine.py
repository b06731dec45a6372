"""The embedded engine on tiny models, against the model's own forward pass."""

from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
import trio
from trio.testing import wait_all_tasks_blocked

from rollouts.device_thread import open_device_thread
from rollouts.engines.local import open_local_engine
from rollouts.errors import WeightVersionError
from rollouts.testing import engine_contracts
from rollouts.testing.engine_contracts import asked, make_request
from rollouts.types import SamplingParams
from tests.support.plain_backend import score_completion
from tests.support.text_tables import cases, read_params

VOCAB = 101
# with a smaller initializer_range all tokens are about as likely and mistakes would not show
SHAPE = read_params(
    """vocab_size = 101, hidden_size = 32, intermediate_size = 48, num_hidden_layers = 2,
    num_attention_heads = 4, num_key_value_heads = 2, max_position_embeddings = 160, bos_token_id = 1,
    eos_token_id = 2, pad_token_id = 0, initializer_range = 0.3""".replace("\n", "")
)


def make_model(kind="Llama", *, seed=0, **changes):
    """A random model of that family; the same every time."""
    model_class = getattr(transformers, "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return model_class(model_class.config_class(**{**SHAPE, **changes})).eval()


@asynccontextmanager
async def open_engine(model=None, *, mode="shared", **options):
    options = {"trainer_version": lambda: 0, "max_rows": 8, **options}
    async with (
        open_device_thread(name="test", torch_threads=1) as thread,
        open_local_engine(
            make_model() if model is None else model, device_thread=thread, mode=mode, **options
        ) as engine,
    ):
        yield engine


async def generate_all(engine, requests):
    async with asked(engine, *requests) as answers:
        pass
    return answers


async def check_exact(engine, model, requests, atol=1e-4):
    """Every answer is whole, with the model's own log-probs."""
    answers = await generate_all(engine, requests)
    for request in requests:
        completion = answers[request.request_id]
        assert len(completion.token_ids) == request.sampling.max_new_tokens
        np.testing.assert_allclose(
            completion.log_probs, score_completion(model, request, completion), atol=atol
        )


def make_requests(count):
    """Prompts of lengths 1..24, each shared by several requests, and responses of lengths 1..24."""
    rng = np.random.default_rng(3)
    prompts = [tuple(rng.integers(0, VOCAB, length).tolist()) for length in (1, 24, 3, 9, 5, 14)]
    return [
        make_request(f"r{i:03}", prompt=prompts[i // 3 % 6], max_new_tokens=int(rng.integers(1, 25)))
        for i in range(count)
    ]


def after_steps(engine, steps, action):
    """Once `steps` more decode steps are done, the device waits until `action` has run and every task is
    blocked.
    """
    token = trio.lowlevel.current_trio_token()
    batch, plain, count = engine._batch, engine._batch.step, 0

    async def act():
        await action()
        await wait_all_tasks_blocked()

    def step(version):
        nonlocal count
        plain(version)
        count += 1
        if count == steps:
            trio.from_thread.run(act, trio_token=token)

    batch.step = step  # pyright: ignore[reportAttributeAccessIssue]


# --- exactness ----------------------------------------------------------------------------------------------


@cases("""
kind    | changes
Llama   |
Llama   | num_key_value_heads = 4, tie_word_embeddings = true, head_dim = 16, \
attention_bias = true, mlp_bias = true
Qwen2   |
Qwen3   | head_dim = 8
Mistral | sliding_window = 4096
Llama   | rope_parameters = { rope_type = "linear", factor = 2.0, rope_theta = 1000.0 }
""")
async def test_log_probs_are_the_models_own_through_joins_and_compaction(kind, changes: dict):
    model = make_model(kind, **changes)
    async with open_engine(model, max_rows=7) as engine:
        await check_exact(engine, model, make_requests(36))


@cases("""
mode   | dtype    | atol
shared | bfloat16 | 0.25
copied |          | 1e-4
given  |          | 1e-4
""")
async def test_other_precisions_stay_near_and_leave_the_model_alone(mode, dtype, atol: float):
    model = make_model()
    requests = [make_request(max_new_tokens=20), make_request("b", max_new_tokens=20, temperature=0.5)]
    dtype = getattr(torch, dtype) if dtype else None
    async with open_engine(model, mode=mode, autocast_dtype=dtype) as engine:
        await check_exact(engine, model, requests, atol)
    assert model.lm_head.weight.dtype == torch.float32


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


async def test_samples_of_one_prompt_differ_and_compute_it_once():
    requests = [make_request(str(i), prompt=(1, 2, 3, 4, 5), max_new_tokens=10) for i in range(6)]
    async with open_engine() as engine:
        answers = await generate_all(engine, requests)
        assert engine.statistics()["prefill_tokens"] == 5
    assert len({tuple(answer.token_ids.tolist()) for answer in answers.values()}) == 6


async def test_a_late_request_copies_the_prompt_of_an_active_row():
    model = make_model()
    late = make_request("late", prompt=(7, 8, 9, 10), max_new_tokens=9)
    async with open_engine(model) as engine, trio.open_nursery() as nursery:

        async def ask_late():
            nursery.start_soon(check_exact, engine, model, [late])

        after_steps(engine, 10, ask_late)
        await engine.generate(replace(late, request_id="early", sampling=SamplingParams(max_new_tokens=60)))
        statistics = engine.statistics()
    assert (statistics["prefill_tokens"], statistics["decode_rows"]) == (4, 59 + 9)


async def test_the_trainers_model_is_left_as_it_was():
    model = make_model().train()
    model.model.layers[1].eval()

    def look():
        weights = model.state_dict(keep_vars=True).items()
        versions = [(name, value._version, value.grad, value.sum().item()) for name, value in weights]
        return versions, [module.training for module in model.modules()], model.config.to_dict()

    before = look()
    async with open_engine(model) as engine:
        await generate_all(engine, make_requests(6))
    assert look() == before
    ids = torch.tensor([[1, 2]])
    model(ids, labels=ids).loss.backward()  # nothing of inference mode was left in it


# --- many at once -------------------------------------------------------------------------------------------


async def test_deterministic_lists_are_sorted_and_not_joined_by_latecomers():
    admitted = []
    async with open_engine(deterministic=True, max_rows=2) as engine, trio.open_nursery() as nursery:
        plain = engine._batch.admit

        def admit(rows, version):
            admitted.append(" ".join(row.request.request_id for row in rows))
            plain(rows, version)

        engine._batch.admit = admit  # pyright: ignore[reportAttributeAccessIssue]

        async def ask_late():
            nursery.start_soon(engine.generate, make_request("a-late", max_new_tokens=2))

        after_steps(engine, 1, ask_late)
        for name, length in (("d", 5), ("b", 8), ("c", 5), ("e", 5)):
            nursery.start_soon(engine.generate, make_request(name, max_new_tokens=length))
    # a row at a time as rows get free; the latecomer when the list is done
    assert admitted == ["b c", "d", "e", "a-late"]


# --- leaving early ------------------------------------------------------------------------------------------


async def test_a_cancelled_caller_frees_its_row_before_the_next_step():
    async with open_engine() as engine:
        with trio.CancelScope() as scope:

            async def cancel():
                scope.cancel()

            after_steps(engine, 3, cancel)
            await engine.generate(make_request(max_new_tokens=100))
        assert scope.cancelled_caught
        after = await engine.generate(make_request("b", max_new_tokens=2))
        statistics = engine.statistics()
    assert len(after.token_ids) == 2
    assert statistics["decode_rows"] == 3 + 1


# --- the contract -------------------------------------------------------------------------------------------


every_engine = cases(
    "opener", [open_engine, lambda: open_engine(mode="copied", deterministic=True)], ids=["shared", "copied"]
)


@every_engine
@cases("check", engine_contracts.CHECKS)
async def test_engines_keep_the_contract(check, opener):
    await check(opener)


@cases("mode: shared copied")
@cases("check", engine_contracts.MODEL_CHECKS)
async def test_embedded_engines_keep_the_contract_of_engines_with_a_model(check, mode):
    await check(lambda: open_engine(make_model(max_position_embeddings=2048), mode=mode))


@every_engine
async def test_engines_update_in_memory_as_the_contract_says(opener):
    await engine_contracts.check_update_in_memory(opener, list(make_model(seed=1).state_dict().items()))


async def test_a_shared_engine_takes_no_other_version_than_the_trainers():
    async with open_engine() as engine:
        await engine.update_weights_from_checkpoint(Path(), 0)
        with pytest.raises(WeightVersionError):
            await engine.update_weights_from_checkpoint(Path(), 1)


async def test_a_deterministic_engine_goes_on_after_a_cancelled_list_longer_than_its_rows():
    async with open_engine(deterministic=True, max_rows=2) as engine:
        with trio.move_on_after(0.05):
            async with trio.open_nursery() as nursery:
                for request in make_requests(6):
                    nursery.start_soon(engine.generate, request)
        with trio.fail_after(20):
            completion = await engine.generate(replace(make_requests(1)[0], request_id="later"))
        assert len(completion.token_ids) > 0
