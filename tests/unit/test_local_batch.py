"""The embedded engine's parts: arithmetic, turns on the device thread, staged weights."""

import numpy as np
import pytest
import torch
import trio

from rollouts.engines.local.weights import StagedWeights
from rollouts.models.decoding import decoder
from rollouts.models.decoding.batch import DecodeBatch, Row
from rollouts.models.decoding.decoder import WholeModel
from rollouts.models.draws import make_draw
from rollouts.testing.engine_contracts import make_request
from tests.support.plain_backend import score_completion
from tests.support.text_tables import cases
from tests.unit.test_local_engine import generate_all, make_model, make_requests, open_engine


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
                np.testing.assert_allclose(
                    answer.log_probs, score_completion(model.cpu(), request, answer), atol=1e-4
                )
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
    batch = DecodeBatch(whole, decoder.FastDecoder(whole, max_rows=12, max_context=160))
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
        assert steps[-1] < 99, "the others were not served before the generation had ended"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updates_take_turns_in_two_memories(dtype: torch.dtype):
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
