"""What the embedded engine keeps of a trajectory between its turns, and when it computes anew."""

from dataclasses import replace

import numpy as np

from rollouts.engines.local import LocalEngine
from rollouts.models.decoding.batch import open_decoder
from rollouts.models.decoding.decoder import FastDecoder
from rollouts.testing.engine_contracts import make_request
from tests.support.plain_backend import score_completion
from tests.support.text_tables import cases
from tests.unit.test_local_engine import generate_all, make_model, open_engine

TOKENS = 6  # of an answer


async def take_turns(engine: LocalEngine, turn: int, prompts: dict[str, list[int]], model) -> list[int]:
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
        np.testing.assert_allclose(answer.log_probs, score_completion(model, request, answer), atol=1e-4)
        prompt += answer.token_ids.tolist()
    after = engine.statistics()
    return [int(after[name] - before[name]) for name in ("prefill_tokens", "prefix_tokens")]


@cases("""
kind  | options
Llama | mode = "copied"
Qwen3 | max_rows = 2
""")
async def test_a_turn_computes_its_new_tokens_and_the_last_one_sampled(kind, options: dict):
    model, prompts = make_model(kind), {"a": [5, 6, 7, 8], "b": [9], "c": [5, 6, 7, 8, 9, 10, 11]}
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
        assert await take_turns(engine, 1, prompts, model) == [taken + 1 + 2, 2 * taken], "of y and z"


def test_a_model_whose_turns_go_on_wrongly_is_run_another_way(monkeypatch):
    copy_row = FastDecoder.copy_row
    monkeypatch.setattr(FastDecoder, "copy_row", lambda *arguments: 1.01 * copy_row(*arguments))
    opened = open_decoder(make_model(), max_context=160, compiled=False)
    assert opened.path == "cached" and "log-probs differ" in opened.refused["fast"]
