"""The embedded engine: new weights, failures, which way a model is run, its parts, and what it keeps of a
trajectory between its turns.
"""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import trio
import trio.testing
from numpy.testing import assert_allclose

from rollouts.engines.local.weights import StagedWeights
from rollouts.errors import EngineError, ModelError, RequestRefused
from rollouts.models.decoding import decoder
from rollouts.models.decoding.batch import DecodeBatch, Row, open_decoder
from rollouts.models.decoding.decoder import FastDecoder, WholeModel
from rollouts.models.devices import measure_rounding
from rollouts.models.draws import make_draw
from rollouts.testing.engine_contracts import check_bad_snapshots_change_nothing, make_request
from tests.support.plain_backend import score_completion
from tests.support.text_tables import cases
from tests.unit.test_local_engine import (
    after_steps,
    check_exact,
    generate_all,
    make_model,
    make_requests,
    open_engine,
)

# --- weights ------------------------------------------------------------------------------------------------


async def send(engine, weights, version):
    await engine.begin_update()
    items = list(weights.items())
    for start in range(0, len(items), 4):
        engine.receive_bucket(items[start : start + 4])
    await engine.finish_update(version)


async def test_a_copied_engine_follows_the_trainer_only_when_told():
    model, request = make_model(), make_request(max_new_tokens=15)
    async with open_engine(model, mode="copied", trainer_version=lambda: 3) as engine:
        assert await engine.weight_version() == 3
        assert engine.features.in_memory_update and not engine.features.shares_weights
        model.load_state_dict(make_model(seed=1).state_dict())
        unaware = await engine.generate(request)
        await send(engine, model.state_dict(), 4)
        aware = await engine.generate(request)
    assert unaware.weight_versions.tolist() == [3] * 15
    assert aware.weight_versions.tolist() == [4] * 15
    assert np.abs(unaware.log_probs - score_completion(model, request, unaware)).max() > 0.1
    assert_allclose(aware.log_probs, score_completion(model, request, aware), atol=1e-4)


async def test_tied_weights_may_come_under_either_name():
    model = make_model(tie_word_embeddings=True)
    other = make_model(tie_word_embeddings=True, seed=1)
    weights = {name: value for name, value in other.state_dict().items() if name != "lm_head.weight"}
    async with open_engine(model, mode="copied") as engine:
        await send(engine, weights, 1)
        await check_exact(engine, other, [make_request()])


@cases(r"""
name              | size | message
model.extra       | 2 | 'model.extra' of shape \[2\], which the engine's model does not have
model.norm.weight | 3 | 'model.norm.weight' of shape \[3\], which the engine's model has of shape \[32\]
model.norm.weight | 0 | lacks 1 of .* \['model.norm.weight'\]; nothing was changed
""")
async def test_an_update_that_does_not_fit_changes_nothing(name, size: int, message):
    model = make_model()
    weights = {**make_model(seed=1).state_dict(), name: torch.zeros(size)}
    if not size:
        del weights[name]
    async with open_engine(model, mode="copied") as engine:
        with pytest.raises(EngineError, match=message):
            await send(engine, weights, 1)
        await engine.resume()  # gives the update up
        with pytest.raises(EngineError, match="without begin_update"):
            await engine.finish_update(1)
        await check_exact(engine, model, [make_request(max_new_tokens=10)])
        assert await engine.weight_version() == 0


async def test_bad_snapshots_change_nothing(tmp_path):
    make_model(seed=1).save_pretrained(tmp_path / "good")
    (tmp_path / "bad").mkdir()
    paths = (tmp_path / "good", tmp_path / "bad")
    await check_bad_snapshots_change_nothing(lambda: open_engine(mode="copied"), *paths)


async def test_an_update_in_flight_is_seen_token_by_token_and_prompts_of_old_weights_are_not_reused():
    other = make_model(seed=1)
    late = make_request("late", prompt=(5, 6, 7), max_new_tokens=8)
    early = make_request("early", prompt=(5, 6, 7), max_new_tokens=40)
    async with open_engine(mode="copied") as engine, trio.open_nursery() as nursery:

        async def update():
            await send(engine, other.state_dict(), 1)  # pauses by itself
            await check_exact(engine, other, [late])

        async def start():
            nursery.start_soon(update)

        after_steps(engine, 6, start)
        assert (await engine.generate(early)).weight_versions.tolist() == [0] * 7 + [1] * 33


# --- failures -----------------------------------------------------------------------------------------------


async def test_a_device_failure_reaches_every_caller_and_the_engine_goes_on():
    failures = []
    async with open_engine(max_rows=2) as engine:
        plain = engine._batch.step

        def fail(version):
            raise RuntimeError("out of memory")

        async def ask(name):
            with pytest.raises(EngineError, match=f"{name}.*out of memory") as caught:
                await engine.generate(make_request(name))
            failures.append(caught.value)

        engine._batch.step = fail  # pyright: ignore[reportAttributeAccessIssue]
        async with trio.open_nursery() as nursery:
            for index in range(4):
                nursery.start_soon(ask, f"r{index}")
        engine._batch.step = plain  # pyright: ignore[reportAttributeAccessIssue]
        assert await engine.health()
        model = engine._batch.whole.model.model
        good = model.norm.weight.detach().clone()
        with torch.no_grad():
            model.norm.weight.fill_(float("nan"))
        with pytest.raises(EngineError, match="logits are not finite in 1 of 1 rows"):
            await engine.generate(make_request())
        with torch.no_grad():
            model.norm.weight.copy_(good)
        assert len((await engine.generate(make_request())).token_ids) == 4
    assert len(failures) == 4
    assert all(isinstance(failure.__cause__, RuntimeError) for failure in failures)


@cases(r"""
changes                | message
prompt = []            | prompt_ids has shape \(0,\)
prompt = [1, 101]      | prompt_ids holds \[101\]; the vocabulary is 0..100
max_new_tokens = 158   | max_new_tokens=158 make 161; the context is 160
temperature = nan      | temperature=nan
top_p = 1.1            | top_p=1.1
top_k = -1             | top_k=-1
""")
async def test_a_bad_request_is_refused_by_field_value_and_rule(changes: dict, message):
    async with open_engine() as engine:
        with pytest.raises(RequestRefused, match=message):
            await engine.generate(make_request(**changes))


@cases("""
options                   | message
{"trainer_version": null} | needs trainer_version
{"max_rows": 0}           | max_rows=0
{"max_context": 161}      | max_context=161
""")
async def test_settings_that_do_not_fit_are_refused(options: Any, message):
    with pytest.raises(EngineError, match=message):
        async with open_engine(**options):
            pass


def odd_forward(model):
    plain = model.model.forward

    def forward(*args, **kwargs):
        output = plain(*args, **kwargs)
        output.last_hidden_state = output.last_hidden_state * 2
        return output

    model.model.forward = forward


def broken(model):
    model.model.layers[1].self_attn.v_proj = torch.nn.Linear(32, 7)


def sees_the_future(model):
    for layer in model.model.layers:
        plain = layer.self_attn.forward

        def forward(*args, plain=plain, **kwargs):
            return plain(*args, **{**kwargs, "attention_mask": torch.zeros(1, 1, 1, 1)})

        layer.self_attn.forward = forward


@cases("""
kind    | changes                           | reason
Mistral | sliding_window = 64               | sliding_window=64 is shorter than the context of 160
Gemma2  | head_dim = 8                      | config has .'final_logit_softcapping'
Llama   | final_logit_softcapping = 30.0    | config has .'final_logit_softcapping'
Olmo2   |                                   | parts
Llama   |                                   | differ from the model's own by
""")
async def test_a_model_that_is_not_llama_like_runs_by_its_own_forward(kind, changes: dict, reason):
    model = make_model(kind, **changes)
    if reason.startswith("differ"):
        odd_forward(model)
    async with open_engine(model, max_rows=3) as engine:
        await check_exact(engine, model, make_requests(8))
        assert engine.path == "cached"
        assert re.search(reason, engine.describe())
        assert engine.statistics()["fast_path"] == 0.0


async def test_a_model_whose_cache_does_not_fit_its_layers_is_recomputed():
    model = make_model("Llama", layer_types=["full_attention", "linear_attention"])
    async with open_engine(model) as engine:
        await check_exact(engine, model, [make_request(max_new_tokens=10)])
        assert engine.path == "recompute"
        assert "very slow" in engine.describe() and "full attention only" in engine.describe()


FAILS = "fast: it does not run: RuntimeError.*cached: it does not run: RuntimeError.*recompute: it does not"
DIFFERS = (
    "fast: its log-probs differ.*cached: .*recompute: its log-probs differ from the model's own by .* nats"
)


@cases("alter, message", [(broken, FAILS), (sees_the_future, DIFFERS)])
async def test_a_model_that_no_way_runs_exactly_is_refused_with_all_the_reasons(alter, message):
    model = make_model()
    alter(model)
    with pytest.raises(ModelError, match=message):
        async with open_engine(model):
            pass


# --- arithmetic, turns on the device thread, staged weights -------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
async def test_compiled_steps_answer_as_the_model_does_and_see_updates():  # pragma: gpu
    model = make_model().cuda()
    async with open_engine(model, max_rows=12) as engine:
        assert engine.path == "compiled"
        for scale in (1.0, 0.5):
            model.model.layers[0].mlp.up_proj.weight.data.mul_(scale)
            answers = await generate_all(engine, make_requests(30))
            for request in make_requests(30):
                answer = answers[request.request_id]
                assert_allclose(answer.log_probs, score_completion(model.cpu(), request, answer), atol=1e-4)
            model.cuda()


@cases("""
others_wait | seconds | steps
yes         | 1e9     | 4
no          | 1e9     | 32
yes         | 0       | 1
""")
def test_a_job_is_shorter_while_others_wait_and_makes_a_step_in_any_case(
    others_wait: bool, seconds: float, steps: int, monkeypatch
):
    monkeypatch.setattr("rollouts.models.decoding.batch.ALONE", (32, seconds))
    monkeypatch.setattr("rollouts.models.decoding.batch.SHARED", (4, seconds))
    whole, request = WholeModel(make_model(), None), make_request(max_new_tokens=100)
    batch = DecodeBatch(whole, decoder.FastDecoder(whole, max_rows=12, max_context=160), "fast", {})
    batch.run(
        admit=[Row(request, make_draw(0, request))],
        version=0,
        decode=True,
        interrupted=lambda: False,
        others_wait=lambda: others_wait,
    )
    assert batch.totals["decode_steps"] == steps


async def test_work_of_others_runs_between_the_steps_of_a_long_generation():
    """Each of them waits for a few steps at most, and the generation goes on between them."""
    async with open_engine(max_rows=2) as engine, trio.open_nursery() as nursery:
        thread, steps = engine._device_thread, []
        nursery.start_soon(engine.generate, make_request("long", max_new_tokens=100))
        while engine.statistics()["decode_steps"] == 0:
            await thread.submit(lambda: None)
        for _ in range(5):
            await thread.submit(lambda: steps.append(engine.statistics()["decode_steps"]))
        assert np.diff(steps).max() <= 32
        assert steps[-1] < 99  # else the others were not served before the generation had ended


@pytest.mark.skipif(not measure_rounding()[0], reason="this CPU multiplies no bfloat16")
@pytest.mark.parametrize("change", ["none", "step", "swapped twice"])
def test_packed_weights_are_those_of_now(change: str):
    model = make_model("Qwen2", initializer_range=0.1)  # whose products have biases
    whole = WholeModel(model, torch.bfloat16)
    batch = DecodeBatch(whole, FastDecoder(whole, max_rows=12, max_context=160), "fast", {})

    def decode(packs: bool) -> torch.Tensor:
        assert isinstance(batch.decoder, FastDecoder) and batch.decoder._packs
        with whole.computing(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(batch.decoder, "_packs", packs)
            batch.decoder.drop()
            batch.decoder.prefill([np.arange(1, 9)] * 3)
            return batch.decoder.decode(np.array([3, 4, 5]), np.full(3, 8))

    before = decode(True)
    if change == "step":
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        model(input_ids=torch.tensor([[1, 2, 3]])).logits.sum().backward()
        optimizer.step()
        never = dict.fromkeys(("interrupted", "others_wait"), lambda: False)
        batch.run(admit=[], version=1, decode=False, **never)
    for seed in (1, 2) if change == "swapped twice" else ():  # the first memory again
        weights = StagedWeights(model)
        weights.begin()
        weights.add(list(make_model("Qwen2", seed=seed, initializer_range=0.1).state_dict().items()))
        weights.apply()
        batch.note_new_weights()
    after, rounded = decode(True), decode(False)
    assert after.dtype == torch.float32
    assert 0 < (after - rounded).abs().max() < 0.02 * rounded.abs().max()
    assert (change == "none") == torch.equal(before, after)


@cases("dtype", [torch.float32, torch.bfloat16])
def test_updates_take_turns_in_two_memories(dtype):
    model = torch.nn.Linear(2, 3)
    staged, seen = StagedWeights(model), []
    for number in (9.0, 1.0, 9.0, 2.0, 9.0, 3.0):
        staged.begin()
        staged.add(
            [(name, torch.full_like(one, number, dtype=dtype)) for name, one in model.named_parameters()]
        )
        if number != 9.0:  # that one is given up, and changes nothing
            staged.apply()
            assert bool((model.weight == number).all()) and model.weight.dtype == torch.float32
            seen.append(model.weight.data_ptr())
    assert seen[0] == seen[2] != seen[1]


# --- what is kept between the turns of a trajectory ---------------------------------------------------------


TOKENS = 6  # of an answer


async def take_turns(engine, turn, prompts, model):
    """Tokens computed and taken over for one turn of each trajectory, whose answers are added to the prompts
    and checked against the model.
    """
    before = engine.statistics()
    requests = [
        replace(make_request(f"{name}#{turn}", prompt=tuple(prompt), max_new_tokens=TOKENS), trajectory=name)
        for name, prompt in prompts.items()
    ]
    answers = await generate_all(engine, requests)
    for request, prompt in zip(requests, prompts.values(), strict=True):
        answer = answers[request.request_id]
        assert_allclose(answer.log_probs, score_completion(model, request, answer), atol=1e-4)
        prompt += answer.token_ids.tolist()
    after = engine.statistics()
    return [int(after[name] - before[name]) for name in ("prefill_tokens", "prefix_tokens")]


@cases("""
kind  | options
Llama | mode = "copied"
Qwen3 | max_rows = 2
""")
async def test_a_turn_computes_its_new_tokens_and_the_last_one_sampled(kind, options: dict):
    model, prompts = make_model(kind), {"a": [5, 6, 7, 8], "b": [9], "c": [*range(5, 12)]}
    async with open_engine(model, **options) as engine:
        assert await take_turns(engine, 0, prompts, model) == [4 + 1 + 7, 0]
        for prompt in prompts.values():
            prompt += [3, 4]
        assert await take_turns(engine, 1, prompts, model) == [3 * (1 + 2), 12 + 3 * (TOKENS - 1)]
        # nothing new: of each the last token is computed; and one that was written anew from its third token
        prompts["c"][2:4] = [1, 1]
        first = len(prompts["a"]) - 1 + len(prompts["b"]) - 1
        assert await take_turns(engine, 2, prompts, model) == [2 + len(prompts["c"]) - TOKENS - 2, first + 2]


@cases("""
why        | options
no key     |
exact bits | deterministic = true
update     | mode = "copied"
version    |
memory     |
""")
async def test_nothing_is_taken_over(why, options: dict):
    model, version = make_model(), [0]
    async with open_engine(model, trainer_version=lambda: version[0], **options) as engine:
        prompts = {"" if why == "no key" else "a": [5, 6, 7]}
        await take_turns(engine, 0, prompts, model)
        version[0] += why == "version"
        if why == "memory":
            await engine.release_memory()
        if why == "update":  # to the version that it has, with other weights
            model = make_model(seed=1)
            await engine.begin_update()
            engine.receive_bucket(list(model.state_dict().items()))
            await engine.finish_update(0)
        assert await take_turns(engine, 1, prompts, model) == [3 + TOKENS, 0]


async def test_what_was_kept_first_makes_room(monkeypatch):
    row_bytes = 2 * 2 * 2 * 8 * (3 + TOKENS - 1) * 4  # layers, keys and values, heads, D, positions, float32
    monkeypatch.setattr("rollouts.engines.local.engine.KEPT_BYTES", 2 * row_bytes)
    model, prompts = make_model(), {name: [5, 6, 7] for name in "xyz"}
    async with open_engine(model) as engine:
        for name, prompt in prompts.items():
            await take_turns(engine, 0, {name: prompt}, model)
        taken = 3 + TOKENS - 1
        assert await take_turns(engine, 1, prompts, model) == [taken + 1 + 2, 2 * taken]  # of y and z


def test_a_model_whose_turns_go_on_wrongly_is_run_another_way(monkeypatch):
    copy_row = FastDecoder.copy_row
    monkeypatch.setattr(FastDecoder, "copy_row", lambda *arguments: 1.01 * copy_row(*arguments))
    opened = open_decoder(make_model(), max_context=160, compiled=False)
    assert opened.path == "cached" and "log-probs differ" in opened.refused["fast"]
