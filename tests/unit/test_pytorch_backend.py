"""The backend on one process: losses, gradients and log-probs of plain forwards, optimizer steps, files."""

import dataclasses
import inspect
import json
import re
import time

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from rollouts import errors
from rollouts.config.tables import OptimConfig
from rollouts.engines.local.engine import open_local_engine
from rollouts.errors import BackendError
from rollouts.loops.updates import work_metrics
from rollouts.losses import LossOutput
from rollouts.losses.inputs import reduce_loss
from rollouts.models.devices import measure_rounding
from rollouts.models.layers import make_probing_directions
from rollouts.testing import torch_contracts as contract
from rollouts.testing.engine_contracts import make_request
from rollouts.testing.torch_contracts import SFT, assert_weights_equal, make_batch
from rollouts.types import LossSpec, Mean, OptimParams
from tests.support import backend_checks, plain_backend
from tests.support.plain_backend import assert_gradients_close, score_completion, take_gradients
from tests.support.text_tables import cases, read_cells, read_params

torch.set_num_threads(1)
SEEN = []


def make_model(seed=0):
    torch.manual_seed(seed)
    # log-probs differ by nats, so that errors show
    sizes = "vocab_size = 64, hidden_size = 32, intermediate_size = 64, num_hidden_layers = 2, \
num_attention_heads = 4, num_key_value_heads = 2, max_position_embeddings = 128, tie_word_embeddings = true, \
initializer_range = 0.2"
    return LlamaForCausalLM(LlamaConfig(**read_params(sizes))).eval()


def open_backend(**options):
    return plain_backend.open_backend(make_model(), **options)


FORMS = {
    name: read_params(options)
    for name, options in read_cells("""
        one padded micro-batch         | share_prefix = false, micro_batch_tokens = 10_000
        a micro-batch per row          | share_prefix = false, micro_batch_tokens = 1
        some micro-batches             | share_prefix = false, micro_batch_tokens = 30
        shared prefix                  | share_prefix = true, micro_batch_tokens = 10_000
        shared prefix in micro-batches | share_prefix = true, micro_batch_tokens = 24
    """)
}
SPECS = {
    "tokens": LossSpec("reinforce"),
    "sequences": LossSpec("reinforce", unit="sequences"),
    "entropy": LossSpec("reinforce", {"entropy_coef": 0.5}, unit="sequence_sums"),
}


@cases("spec", SPECS.values(), ids=SPECS)
@cases("form", FORMS)
async def test_loss_and_gradients_are_those_of_a_plain_forward_of_each_row(form, spec):
    batch, plain = make_batch(temperature=0.7), make_model()
    wanted, denominator = plain_backend.compute_plain_loss(plain, batch, spec)
    async with open_backend(**FORMS[form]) as backend:
        result = await backend.forward_backward(batch, spec)
        found = take_gradients(backend.model)
    assert (result.loss, result.denominator) == (pytest.approx(wanted, abs=1e-5), denominator)
    assert_gradients_close(found, take_gradients(plain))


def watching_loss(inputs, *, unit):
    """Keeps what it was given."""
    SEEN.append(inputs)
    total, count = reduce_loss(-inputs.log_probs, inputs.mask, unit)
    return LossOutput(total, count, {"rows": Mean(float(len(inputs.mask)), 1.0)})


@cases("share: no yes")
async def test_a_loss_sees_right_padded_rows_whatever_the_packing(share: bool):
    SEEN.clear()
    batch = make_batch()
    async with open_backend(share_prefix=share) as backend:
        result = await backend.forward_backward(batch, LossSpec(f"{__name__}:watching_loss"))
    (inputs,) = SEEN
    assert inputs.old_log_probs is None and inputs.ref_log_probs is None
    fields = {"loss_masks": "mask", "advantages": "advantages", "rollout_log_probs": "rollout_log_probs"}
    for ours, name in fields.items():
        seen = getattr(inputs, name)
        assert seen.shape == inputs.log_probs.shape == inputs.entropy.shape
        assert sorted(seen.tolist()) == sorted(plain_backend.stack(getattr(batch, ours)).tolist())
    assert result.metrics["rows"] == Mean(9.0, 1.0)


async def test_a_constant_unit_divides_by_its_constant():
    batch = make_batch()
    async with open_backend() as backend:
        by_tokens = await backend.forward_backward(batch, SFT)
        constant = await backend.forward_backward(batch, LossSpec("sft", unit="constant", constant=7.0))
        assert constant.denominator == 7.0
        assert constant.loss * 7 == pytest.approx(by_tokens.loss * batch.response_lengths.sum(), rel=1e-5)
        with pytest.raises(BackendError, match="constant=None"):
            await backend.forward_backward(batch, LossSpec("sft", unit="constant"))


async def test_the_schedule_sets_the_learning_rate_unless_it_is_given():
    optim, rates = OptimConfig(lr=1e-2, schedule="linear", warmup_steps=2), []
    async with open_backend(optim=optim, total_steps=4) as backend:
        for params in (None, None, None, OptimParams(lr=0.5), None):
            await backend.forward_backward(make_batch(), SFT)
            rates.append((await backend.optim_step(params)).lr)
    # warm-up to the peak at the second step, then a line to 0 at the fourth
    assert rates == pytest.approx([5e-3, 1e-2, 5e-3, 0.5, 0.0])


@cases("""
params                 | message
betas = [0.9, 1.0]     | betas is [0.9, 1.0]; it must be two numbers in [0, 1)
eps = 0.0              | eps is 0.0; it must be a finite number, at least 1e-38
eps = nan              | eps is nan
weight_decay = -1.0    | weight_decay is -1.0; it must be a finite number, at least 0
weight_decay = inf     | weight_decay is inf
""")
def test_settings_that_adamw_cannot_use_are_named(params: dict, message):
    with pytest.raises(ValueError, match=re.escape(f"OptimParams.{message}")):
        OptimParams(lr=0.1, **params)


async def test_results_say_how_long_the_work_took_and_how_much_was_to_be_done_before_it():
    async with open_backend() as backend:
        began = time.perf_counter()
        submitted = [(backend.forward_backward(make_batch(), SFT), backend.optim_step()) for _ in range(3)]
        found = work_metrics([(await forward, await optim) for forward, optim in submitted])
    assert found.pop("perf/trainer_queue/max") == 5  # three of the one and two of the other
    assert min(found.values()) > 0 and sum(found.values()) < time.perf_counter() - began


async def test_bfloat16_autocast_stays_close_to_float32():
    batch, rows, losses, products = make_batch(), [], [], []

    def note(*_):
        products.append(torch.backends.mkldnn.matmul.fp32_precision)

    for dtype in (None, torch.bfloat16):
        async with open_backend(autocast_dtype=dtype) as backend:
            rows.append(np.concatenate(await backend.forward(batch)))
            backend.model.get_decoder().register_forward_hook(note)
            backend.model.get_input_embeddings().weight.register_post_accumulate_grad_hook(note)
            losses.append((await backend.forward_backward(batch, SFT)).loss)
            assert all(parameter.grad.dtype == torch.float32 for parameter in backend.model.parameters())
    assert losses[0] == pytest.approx(losses[1], abs=0.05)
    assert np.abs(rows[0] - rows[1]).max() < 0.3
    assert products == ["none"] * 2 + ["bf16"] * 2  # forward and backward
    assert torch.backends.mkldnn.matmul.fp32_precision == "none"  # as it was


@pytest.mark.skipif(not measure_rounding()[0], reason="this CPU multiplies no bfloat16")
async def test_an_engine_with_its_weights_sees_each_step_though_no_version_is_named():
    """As while SFT evaluates: what the engine packed of the weights is packed anew."""
    async with open_backend(autocast_dtype=torch.bfloat16) as backend:
        options = {"mode": "shared", "trainer_version": lambda: 0, "autocast_dtype": torch.bfloat16}
        async with open_local_engine(backend.model, device_thread=backend.device_thread, **options) as engine:
            request = make_request(prompt=(3, 4), max_new_tokens=9)
            before = await engine.generate(request)
            await backend.forward_backward(make_batch(), SFT)
            await backend.optim_step(OptimParams(lr=0.1))
            after = await engine.generate(request)
        own = score_completion(backend.model, request, after)
    assert np.abs(after.log_probs - own).mean() < 0.25 < np.abs(before.log_probs - own).mean()


@cases("share: no yes")
async def test_hidden_states_are_those_of_a_plain_forward_of_each_row(share: bool):
    batch = make_batch()
    async with open_backend(share_prefix=share) as backend:
        found = (await backend.forward_with_entropy(batch, project=True))[2:]
        for row, (tokens, mask) in enumerate(zip(batch.tokens, batch.loss_masks, strict=True)):
            with torch.no_grad():
                states = backend.model.get_decoder()(torch.from_numpy(tokens)[None]).last_hidden_state[0]
            wanted = (make_probing_directions(states) @ states[np.flatnonzero(mask) - 1].T).numpy()
            own = np.asarray([rows[row][mask] for rows in found])
            # but for the unit, the size of all states of the micro-batch
            np.testing.assert_allclose(own / np.linalg.norm(own), wanted / np.linalg.norm(wanted), atol=1e-5)


async def test_a_tied_weight_may_be_loaded_under_both_names():
    async with open_backend() as backend:
        weights = await backend.get_weights()
        await backend.load_weights(weights | {"lm_head.weight": weights["model.embed_tokens.weight"]})
        assert_weights_equal(await backend.get_weights(), weights)


async def test_a_checkpoint_is_a_hugging_face_directory_and_safetensors(tmp_path):
    async with open_backend() as backend:
        await contract.train(backend)
        await backend.save(tmp_path)
        weights = await backend.get_weights()
    loaded = LlamaForCausalLM.from_pretrained(str(tmp_path))
    assert_weights_equal(dict(loaded.named_parameters()), weights)
    state = load_file(tmp_path / "state/optimizer.safetensors")
    assert {key.partition("/")[0] for key in state} == {"rng", "step", "exp_avg", "exp_avg_sq"}
    assert json.loads((tmp_path / "state/backend.json").read_text())["steps"] == 1


async def test_a_checkpoint_before_the_first_step_can_be_loaded(tmp_path):
    async with open_backend() as backend:
        await backend.save(tmp_path)
        await backend.forward_backward(make_batch(), SFT)
        await backend.load(tmp_path)
        with pytest.raises(BackendError, match="no gradient"):
            await backend.optim_step()


CONTRACT = {
    name: check
    for name, check in {**vars(contract), **vars(backend_checks)}.items()
    if name.startswith("check_")
}


async def check_promise(promise, opener, folder):
    await promise(opener, *([folder] if "folder" in inspect.signature(promise).parameters else []))


@cases("promise", CONTRACT.values(), ids=CONTRACT)
async def test_contract(promise, tmp_path):
    await check_promise(promise, open_backend, tmp_path)


# --- what users saw -----------------------------------------------------------------------------------------


@cases("""
field   | token
tokens  | 64
targets | -1
""")
async def test_a_token_outside_the_vocabulary_is_named_by_its_row(field, token: int):
    batch = make_batch()
    rows = *batch.tokens[:-1], np.full_like(batch.tokens[-1], token)
    async with open_backend() as backend:
        failing = backend.forward_backward(dataclasses.replace(batch, **{field: rows}), SFT)
        error = await contract.raised_by(failing, BackendError)
    assert f"batch.{field}[8] has the id {token}; the model's ids are 0 to 63" in str(error)


def odd_loss(inputs, *, unit, kind):
    """A user's loss that raises KeyError, answers with something else, or forgets its gradient."""
    detached = LossOutput(inputs.log_probs.detach().sum(), 1, {})
    return {"none": None, "axes": LossOutput(inputs.log_probs, 1, {}), "detached": detached}[kind]


@cases(r"""
kind     | error             | message
wrong    | UserFunctionError | raised KeyError: 'wrong' \(.*test_pytorch_backend.py, line \d+\)
none     | UserFunctionError | answered with None; it must be a LossOutput
axes     | UserFunctionError | answered with LossOutput.* a sum without axes
detached | BackendError      | returned a sum without gradient
""")
async def test_a_users_loss_that_raises_or_gives_no_loss_is_named(kind, error, message):
    async with open_backend() as backend:
        with pytest.raises(getattr(errors, error), match=f"odd_loss' {message}"):
            await backend.forward_backward(make_batch(), LossSpec(f"{__name__}:odd_loss", {"kind": kind}))
