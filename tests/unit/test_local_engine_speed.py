"""What makes the embedded engine fast: recorded decode steps, products by columns, fused norms, and turns on
the device thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import trio

from rollouts.device_thread import open_device_thread
from rollouts.engines.local import decoder as decoder_file
from rollouts.engines.local import open_local_engine
from rollouts.engines.local.batch import SHARED_STEPS, DecodeBatch, Row
from rollouts.engines.local.decoder import FastDecoder, is_rms_norm, rms_norm, take_apart
from rollouts.engines.local.graphs import RecordedDecoder, Step, record_on_gpu, round_up
from rollouts.models.draws import stream_key
from rollouts.testing.engine_contracts import make_request
from tests.unit.test_local_engine import VOCAB, generate_all, make_model, make_requests, open_engine


class FakeRecorder:
    """Records by keeping the step, and counts. A recording on a GPU would go on reading the memory that it
    saw.
    """

    def __init__(self) -> None:
        self.recorded = 0
        self.replayed = 0

    def __call__(self, step: Step) -> Step:
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            step()

        return replay


def take_model_apart(model: Any = None) -> FastDecoder:
    return take_apart(make_model() if model is None else model, max_context=160)


def make_batch(decoder: Any, *, max_rows: int = 12) -> DecodeBatch:
    return DecodeBatch(decoder, max_rows=max_rows, max_context=160)


def make_rows(count: int) -> list[Row]:
    return [Row(request, stream_key(0, request.request_id, None)) for request in make_requests(count)]


def run_to_end(batch: DecodeBatch, rows: list[Row], *, max_rows: int = 12) -> dict[str, list[int]]:
    """Tokens by request; as many rows at once as there may be."""
    waiting, tokens = list(rows), dict[str, list[int]]()
    while waiting or batch.rows:
        free = max_rows - len(batch.rows)
        admitted, waiting = waiting[:free], waiting[free:]
        finished = batch.run(
            admit=admitted,
            remove=(),
            version=0,
            decode=True,
            interrupted=lambda: False,
            others_wait=lambda: False,
        )
        tokens.update({row.request.request_id: row.token_ids for row in finished})
    return tokens


def one_step(decoder: RecordedDecoder, batch: DecodeBatch) -> None:
    with decoder.computing():
        batch.step(0)


def start_rows(decoder: RecordedDecoder, batch: DecodeBatch, count: int) -> None:
    """That many rows of 3 prompt tokens and 1 drawn one."""
    requests = [make_request(f"s{i}", prompt=(i + 1, 2, 3), max_new_tokens=150) for i in range(count)]
    with decoder.computing():
        batch.admit([Row(request, stream_key(0, request.request_id, None)) for request in requests], 0)


# --- recorded steps -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "least", "parts", "limit", "size"),
    [(1, 1, 4, 99, 1), (5, 1, 4, 99, 6), (9, 1, 4, 99, 12), (17, 1, 4, 99, 24), (64, 1, 4, 99, 64), (65, 1, 4, 99, 96), (97, 1, 4, 99, 99),
     (3, 64, 8, 9999, 64), (513, 64, 8, 9999, 640), (1025, 64, 8, 9999, 1280), (100, 64, 8, 120, 120)],
)  # fmt: skip
def test_sizes_are_few_and_at_most_a_third_too_large(
    value: int, least: int, parts: int, limit: int, size: int
):
    assert round_up(value, least, parts=parts, limit=limit) == size


def test_replayed_steps_draw_the_tokens_of_the_plain_ones():
    recorder = FakeRecorder()
    plain = run_to_end(make_batch(take_model_apart()), make_rows(30))
    assert run_to_end(make_batch(RecordedDecoder(take_model_apart(), recorder)), make_rows(30)) == plain
    assert recorder.recorded < recorder.replayed / 3


def test_rows_that_pad_a_recording_leave_the_others_alone():
    plain, recorded = take_model_apart(), RecordedDecoder(take_model_apart(), FakeRecorder())
    logits: list[list[torch.Tensor]] = []
    for decoder in (plain, recorded, recorded):  # the third has slots of its own
        kv = decoder.make_slots(max_rows=12, max_length=160)
        with decoder.computing():
            kv.reserve(5, 4)
            ids = torch.arange(15).view(5, 3)
            decoder.prefill(ids, torch.full((5,), 3), torch.arange(5), kv)
            steps = [
                decoder.decode(torch.arange(5), torch.full((5,), place), kv, length=place + 1).clone()
                for place in (3, 4, 5)
            ]
        logits.append(steps)
    assert logits[1][0].shape == (5, VOCAB)
    for found in logits[1:]:
        torch.testing.assert_close(found, logits[0], rtol=1e-5, atol=1e-5)


def test_recordings_are_made_again_when_keys_and_values_move():
    recorder = FakeRecorder()
    decoder = RecordedDecoder(take_model_apart(), recorder)
    batch = make_batch(decoder)
    start_rows(decoder, batch, 2)
    for _ in range(3):
        one_step(decoder, batch)
    assert recorder.recorded == 1
    start_rows(decoder, batch, 9)  # more rows than the buffers hold: they are allocated anew
    one_step(decoder, batch)
    batch.remove(batch.rows[2:])
    one_step(decoder, batch)
    assert recorder.recorded == 3  # of 12 rows, and of 2 again
    batch.reset()
    start_rows(decoder, batch, 2)
    one_step(decoder, batch)
    assert recorder.recorded == 4


def test_recordings_outlive_an_update_in_place_but_not_weights_that_moved():
    recorder, model = FakeRecorder(), make_model()
    decoder = RecordedDecoder(take_model_apart(model), recorder)
    batch = make_batch(decoder)
    start_rows(decoder, batch, 2)
    one_step(decoder, batch)
    weight = model.model.layers[1].mlp.up_proj.weight
    with torch.no_grad():
        weight.mul_(1.5)
    one_step(decoder, batch)
    assert recorder.recorded == 1
    held = weight.data  # so that no other tensor takes its place
    weight.data = held.clone()
    one_step(decoder, batch)
    assert recorder.recorded == 2


def raising(step: Step) -> Step:
    raise RuntimeError("operation not permitted when stream is capturing")


def doing_nothing(step: Step) -> Step:
    return lambda: None


@pytest.mark.parametrize(
    ("recorder", "why"), [(raising, "not permitted"), (doing_nothing, "differ by nan nats")]
)
def test_steps_stay_eager_when_a_recording_fails_or_differs(recorder: Callable[[Step], Step], why: str):
    plain = run_to_end(make_batch(take_model_apart()), make_rows(9))
    batch = make_batch(RecordedDecoder(take_model_apart(), recorder))
    with pytest.warns(RuntimeWarning, match=why):  # once
        assert run_to_end(batch, make_rows(9)) == plain


def test_nothing_is_recorded_on_a_cpu():
    decoder = take_model_apart()
    assert record_on_gpu(decoder) is decoder


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
async def test_cuda_graphs_answer_as_the_model_does_and_see_updates(
    autocast: torch.dtype | None,
):  # pragma: gpu
    model = make_model().cuda()
    requests = make_requests(30)
    async with (
        open_device_thread(name="test") as thread,
        open_local_engine(
            model,
            device_thread=thread,
            mode="shared",
            trainer_version=lambda: 0,
            max_rows=12,
            autocast_dtype=autocast,
        ) as engine,
    ):
        for scale in (1.0, 0.5):
            await thread.submit(lambda scale=scale: model.model.layers[0].mlp.up_proj.weight.data.mul_(scale))
            answers = await generate_all(engine, requests)
            for request in requests:
                answer = answers[request.request_id]
                ids = torch.from_numpy(np.concatenate([request.prompt_ids, answer.token_ids])).cuda()
                with torch.no_grad(), torch.autocast("cuda", autocast, enabled=autocast is not None):
                    log_probs = model(ids[None], use_cache=False).logits[0].float().log_softmax(-1)
                start = len(request.prompt_ids)
                own = log_probs[start - 1 : -1].gather(1, ids[start:, None])[:, 0].cpu().numpy()
                assert np.abs(own - answer.log_probs).max() < (1e-4 if autocast is None else 0.25)
        decoder = engine._batch.decoder
        assert isinstance(decoder, RecordedDecoder)
        assert decoder._recordings


# --- arithmetic on a CPU ------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("by_columns", [False, True])
def test_a_product_by_columns_is_the_layers_own(bias: bool, by_columns: bool):
    layer = torch.nn.Linear(24, 40, bias=bias)
    states = torch.randn(9, 24)
    states = states.t().contiguous().t() if by_columns else states
    with torch.inference_mode():
        found = decoder_file._linear_by_columns(layer, states)
        torch.testing.assert_close(found, layer(states), rtol=1e-5, atol=1e-6)
    assert found.t().is_contiguous()


async def test_without_onednn_rows_of_many_requests_are_as_exact(monkeypatch: pytest.MonkeyPatch):
    async with open_engine(max_rows=12) as engine:
        wanted = await generate_all(engine, make_requests(20))
    monkeypatch.setattr(decoder_file, "_has_onednn", lambda: False)
    async with open_engine(max_rows=12) as engine:
        found = await generate_all(engine, make_requests(20))
    for name, answer in wanted.items():
        assert found[name].token_ids.tolist() == answer.token_ids.tolist()
        np.testing.assert_allclose(found[name].log_probs, answer.log_probs, atol=1e-4)


def test_the_fused_norm_computes_what_the_modules_do():
    norm = make_model("Qwen3", head_dim=8).model.layers[0].self_attn.q_norm
    with torch.inference_mode():
        norm.weight.copy_(torch.linspace(0.5, 2, 8))
        states = torch.randn(5, 3, 8)
        assert is_rms_norm(norm)
        torch.testing.assert_close(rms_norm(norm, states), norm(states))


def test_a_norm_of_another_formula_is_not_taken_for_a_plain_one():
    assert not is_rms_norm(make_model("Gemma", head_dim=8).model.norm)  # its weight is added to 1


# --- turns on the device thread -----------------------------------------------------------------------------


@pytest.mark.parametrize(("others_wait", "steps"), [(True, SHARED_STEPS), (False, 32)])
def test_a_job_is_shorter_while_others_wait(others_wait: bool, steps: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rollouts.engines.local.batch.JOB_SECONDS", 1e9)
    monkeypatch.setattr("rollouts.engines.local.batch.SHARED_SECONDS", 1e9)
    batch = make_batch(take_model_apart())
    row = Row(make_request("r", max_new_tokens=100), stream_key(0, "r", None))
    batch.run(
        admit=[row],
        remove=(),
        version=0,
        decode=True,
        interrupted=lambda: False,
        others_wait=lambda: others_wait,
    )
    assert batch.counters.decode_steps == steps


def test_a_job_that_is_out_of_time_still_makes_a_step(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rollouts.engines.local.batch.SHARED_SECONDS", 0.0)
    batch = make_batch(take_model_apart())
    row = Row(make_request("r", max_new_tokens=100), stream_key(0, "r", None))
    batch.run(
        admit=[row], remove=(), version=0, decode=True, interrupted=lambda: False, others_wait=lambda: True
    )
    assert batch.counters.decode_steps == 1


async def test_the_device_thread_tells_its_job_whether_others_wait():
    submitted = threading.Event()
    async with open_device_thread(name="test") as thread:

        def look() -> bool:
            assert submitted.wait(10)
            return thread.has_queued()

        first = thread.submit(look)
        last = thread.submit(thread.has_queued)
        submitted.set()
        assert (await first.result(), await last.result()) == (True, False)


async def test_work_of_others_runs_between_the_steps_of_a_long_generation():
    """Each of them waits for a few steps at most, and the generation goes on between them."""
    async with (
        open_device_thread(name="test", torch_threads=1) as thread,
        open_local_engine(
            make_model(), device_thread=thread, mode="shared", trainer_version=lambda: 0, max_rows=2
        ) as engine,
    ):
        steps: list[float] = []

        def look() -> None:
            steps.append(engine._batch.counters.decode_steps)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.generate, make_request("long", max_new_tokens=100))
            while engine.statistics()["decode_steps"] == 0:
                await thread.submit(lambda: None)
            for _ in range(5):
                await thread.submit(look)
        waited = np.diff(steps)
        assert waited.max() <= 32
        assert steps[-1] < 99, "the others were not served before the generation had ended"
