"""What the embedded engine keeps of a trajectory between its turns, and when it computes anew."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from rollouts.engines.local import LocalEngine
from rollouts.models.decoding.batch import DecodeBatch, Row, open_decoder
from rollouts.models.decoding.decoder import FastDecoder, WholeModel
from rollouts.models.draws import make_draw
from rollouts.testing.engine_contracts import make_request
from rollouts.types import GenerateRequest
from tests.support.plain_backend import score_completion
from tests.support.text_tables import cases
from tests.unit.test_local_engine import generate_all, make_model, open_engine

TOKENS = 6  # of an answer


def ask(name: str, prompt: list[int]) -> GenerateRequest:
    """A turn of the trajectory before the "#" of its name."""
    request = make_request(name, prompt=tuple(prompt), max_new_tokens=TOKENS)
    return replace(request, trajectory=name.partition("#")[0])


async def take_turns(
    engine: LocalEngine, turn: int, prompts: dict[str, list[int]], model: Any, *, atol: float = 1e-4
) -> list[int]:
    """Tokens computed and taken over for one turn of each trajectory, whose answers are added to the prompts
    and checked against the model.
    """
    before = engine.statistics()
    requests = [ask(f"{name}#{turn}", prompt) for name, prompt in prompts.items()]
    answers = await generate_all(engine, requests)
    for request, prompt in zip(requests, prompts.values(), strict=True):
        answer = answers[request.request_id]
        np.testing.assert_allclose(answer.log_probs, score_completion(model, request, answer), atol=atol)
        prompt += answer.token_ids.tolist()
    after = engine.statistics()
    return [int(after[name] - before[name]) for name in ("prefill_tokens", "prefix_tokens")]


@cases("""
kind  | options         | half
Llama |                 | no
Llama | mode = "copied" | no
Qwen3 | max_rows = 2    | no
Llama |                 | yes
""")
async def test_a_turn_computes_its_new_tokens_and_the_last_one_sampled(kind: str, options: dict, half: bool):
    model, prompts = make_model(kind), {"a": [5, 6, 7, 8], "b": [9], "c": [5, 6, 7, 8, 9, 10, 11]}
    take = partial(take_turns, model=model, atol=0.25 if half else 1e-4)
    options |= {"autocast_dtype": torch.bfloat16} if half else {}
    async with open_engine(model, **options) as engine:
        assert await take(engine, 0, prompts) == [4 + 1 + 7, 0]
        for prompt in prompts.values():
            prompt += [3, 4]
        assert await take(engine, 1, prompts) == [3 * (1 + 2), 12 + 3 * (TOKENS - 1)]
        # nothing new: of each the last token is computed; and one that was written anew from its third token
        prompts["c"][2:4] = [1, 1]
        first = len(prompts["a"]) - 1 + len(prompts["b"]) - 1
        assert await take(engine, 2, prompts) == [2 + len(prompts["c"]) - TOKENS - 2, first + 2]


@cases("""
why        | options
no key     |
exact bits | deterministic = true
update     | mode = "copied"
version    |
memory     |
""")
async def test_nothing_is_taken_over(why: str, options: dict):
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


def test_what_was_kept_first_makes_room():
    whole = WholeModel(make_model(), None)
    decoder = FastDecoder(whole, max_rows=12, max_context=160)
    row_bytes = 2 * 2 * 2 * 8 * (3 + TOKENS - 1) * 4  # layers, keys and values, heads, D, positions, float32
    batch = DecodeBatch(whole, decoder, kept_bytes=2 * row_bytes)

    def run(*requests: GenerateRequest) -> list[Row]:
        rows = [Row(request, make_draw(0, request)) for request in requests]
        with whole.computing():
            batch.admit(rows, 0)
            while batch.rows:
                batch.step(0)
                batch.take_ended()
        return rows

    ended = [run(ask(f"{name}#0", [5, 6, 7]))[0] for name in "xyz"]
    again = [ask(f"{name}#1", [5, 6, 7, *row.token_ids]) for name, row in zip("xyz", ended, strict=True)]
    run(*again)
    assert batch.totals["prefix_tokens"] == 2 * (3 + TOKENS - 1), "of y and z"


def test_a_model_whose_turns_go_on_wrongly_is_run_another_way(monkeypatch: pytest.MonkeyPatch):
    copy_row = FastDecoder.copy_row
    monkeypatch.setattr(FastDecoder, "copy_row", lambda *arguments: 1.01 * copy_row(*arguments))
    opened = open_decoder(make_model(), max_context=160, compiled=False)
    assert opened.path == "cached" and "log-probs differ" in opened.refused["fast"]
