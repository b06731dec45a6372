"""Adapters that train in one pass over their model, each as if it had been alone."""

from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from rollouts.backends.together import Asked, forward_backward_together
from rollouts.data.packing import join_packed_rows, make_micro_batches
from rollouts.errors import (
    BackendError,
    DenominatorMismatch,
    EarlierStepFailed,
    StepInterrupted,
    UserFunctionError,
)
from rollouts.models.forward_plan import compute_micro_batch_outputs
from rollouts.models.lora import use_adapters
from rollouts.testing.torch_contracts import HERE, SFT, STEP, assert_weights_equal, make_batch, raised_by
from rollouts.types import ForwardBackwardResult, LossSpec
from tests.distributed.train_program import SPECS, make_rollouts
from tests.support.adapters import randomize
from tests.support.plain_backend import compute_difference
from tests.support.text_tables import cases
from tests.unit.test_lora_backend import open_backend

NAN = LossSpec(f"{HERE}:nan_loss")
LORAS = [
    {"rank": 2},
    {"rank": 8, "targets": ["c_attn", "mlp.c_proj"]},
    {"rank": 4, "alpha": 3.0},
    {"rank": 8, "targets": ["c_fc"]},
]
TRACED = replace(SPECS["grpo"], per_token=True)


@asynccontextmanager
async def open_adapters(model="gpt2", *, loras=LORAS, **options):
    """Backends of random adapters of one model."""
    async with AsyncExitStack() as stack:
        backends = []
        for seed, lora in enumerate(loras):
            beside = {"beside": backends[0]} if backends else {}
            opened = open_backend(model, lora=lora, **options, **beside)
            backends.append(await stack.enter_async_context(opened))
            randomize(backends[-1].trainer.adapter, seed)
        yield backends


def count_passes(backend):
    """The micro-batches that the model computes from now on."""
    found = []
    backend.model.get_decoder().register_forward_pre_hook(
        lambda module, inputs, options: found.append(options["input_ids"].shape), with_kwargs=True
    )
    return found


def ask(backends):
    """SFT, each of a batch of its own."""
    return [Asked(one, make_batch(number), SFT) for number, one in enumerate(backends)]


async def step_alone(backend, batch, loss):
    """The result of its forward_backward, and a step."""
    found = await backend.forward_backward(batch, loss)
    await backend.optim_step(STEP)
    return found


def assert_same(found, wanted):
    """Results to 1e-5."""
    assert (found.denominator, found.skipped) == (wanted.denominator, wanted.skipped)
    assert found.loss == pytest.approx(wanted.loss, rel=1e-5, abs=1e-6)
    assert found.metrics.keys() == wanted.metrics.keys()
    for name, metric in wanted.metrics.items():
        assert found.metrics[name] == pytest.approx(metric, rel=1e-4, abs=1e-5), name
    assert (found.per_token is None) == (wanted.per_token is None)
    for name in ("log_probs", "slopes", "weights") if wanted.per_token else ():
        for ours, theirs in zip(*(getattr(one.per_token, name) for one in (found, wanted)), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5)


@cases("budget", [8192, 70], ids=["one pass", "several"])
async def test_results_and_weights_are_those_that_each_gives_alone(budget):
    """Of unlike ranks, places, lengths and losses, some with several micro-batches; over three steps."""
    specs = [SFT, TRACED, LossSpec("reinforce", unit="sequences"), SPECS["grpo"]]
    options = {"micro_batch_tokens": budget}
    async with open_adapters(**options) as alone, open_adapters(**options) as joined:
        shapes = count_passes(joined[0])
        for step in range(3):
            batches = [make_rollouts(4 * step + number) for number in range(4)]
            asked = [Asked(*one) for one in zip(joined, batches, specs, strict=True)]
            answers = await forward_backward_together(asked)
            for backend, found, *one in zip(joined, answers, alone, batches, specs, strict=True):
                await backend.optim_step(STEP)
                assert_same(found, await step_alone(*one))
        largest = max(len(row) for row in make_rollouts(0).tokens)
        assert all(shape[0] == 1 and shape[1] <= max(budget, largest + 60) for shape in shapes)
        assert (len(shapes) == 3) == (budget == 8192)
        for one, other in zip(alone, joined, strict=True):
            assert compute_difference(await other.get_weights(), await one.get_weights()) < 1e-5
            ours, theirs = ({**one.statistics(), "queued": 0} for one in (other, one))
            assert ours == theirs and ours["batches_as_packed"] == 3


@cases("kind", ["tiny:llama", "tiny:byte", "tiny:qwen3"])
async def test_gradients_of_other_models_are_those_that_each_gives_alone(kind):
    """Which accumulate; a loss without gradient adds nothing."""
    loras = [{"rank": rank} for rank in (2, 8, 4)]
    found = []
    for together in (False, True):
        async with open_adapters(kind, loras=loras, gradient_checkpointing=kind == "tiny:llama") as backends:
            asked = ask(backends)
            for some in (asked, [Asked(one, make_batch(9), SFT, False) for one in backends], asked):
                if together:
                    await forward_backward_together(some)
                    continue
                for backend, batch, loss, gradient in some:
                    await (backend.forward_backward if gradient else backend.compute_loss)(batch, loss)
            found.append(
                [{name: one.grad for name, one in backend.trained.weights.items()} for backend in backends]
            )
    for one, other in zip(*found, strict=True):
        assert compute_difference(other, one) < 1e-5 and all(grad.any() for grad in one.values())


async def test_what_is_not_alike_runs_one_after_the_other_in_the_job():
    """Another temperature, dropout, or no gradient; a critic; and experts take one adapter at a time."""
    loras = [{"rank": 4}, {"rank": 4, "dropout": 0.5}, {"rank": 2}, {"rank": 2}]
    async with open_adapters(loras=loras) as backends:
        shapes = count_passes(backends[0])
        batches = [make_batch(0), make_batch(0), make_batch(0, temperature=0.7), make_batch(0)]
        flags = [True, True, True, False]
        asked = [Asked(*one, SFT, flag) for *one, flag in zip(backends, batches, flags, strict=True)]
        answers = await forward_backward_together(asked)
        assert len(shapes) == 4 and all(one.loss > 0 for one in answers)
        wanted = await backends[2].compute_loss(batches[2], SFT)
        assert wanted.loss == answers[2].loss
    async with open_adapters("tiny:moe", loras=[{"rank": 2}, {"rank": 4}]) as backends:
        asked = ask(backends)
        for (backend, batch, *_), answer in zip(asked, await forward_backward_together(asked), strict=True):
            assert answer.loss == (await backend.compute_loss(batch, SFT)).loss
    async with open_adapters("tiny:byte", loras=[{"rank": 2}, {"rank": 4}], head="scalar") as backends:
        asked = [Asked(one, make_rollouts(0), SPECS["value"]) for one in backends]
        assert all(isinstance(one, ForwardBackwardResult) for one in await forward_backward_together(asked))


BAD = {
    "raising_loss": (LossSpec(f"{HERE}:raising_loss"), UserFunctionError),
    "miscounting_loss": (LossSpec(f"{HERE}:miscounting_loss"), DenominatorMismatch),
    "no such loss": (LossSpec("nothing"), Exception),
    "no such id": (SFT, BackendError),
    "nan_loss": (NAN, "the loss is nan"),
    "infinite_gradient_loss": (LossSpec(f"{HERE}:infinite_gradient_loss"), None),
    "weights that are not finite": (SFT, "the loss is nan"),
}


@cases("bad", BAD)
async def test_what_is_bad_of_one_is_not_felt_by_the_others(bad):
    """Their results, gradients and steps are those that they have without it; it can go on after reset()."""
    loss, kind = BAD[bad]
    batch = make_batch(1)
    if bad == "no such id":
        batch = replace(batch, tokens=(batch.tokens[0] + 300, *batch.tokens[1:]))
    async with open_adapters() as alone, open_adapters() as joined:
        before = await joined[1].get_weights()
        if bad == "weights that are not finite":
            await joined[1].load_weights({name: one * torch.nan for name, one in before.items()})
        asked = ask(joined)
        asked[1] = Asked(joined[1], batch, loss)
        answers = await forward_backward_together(asked)
        steps = [backend.optim_step(STEP) for backend in joined]
        for number in (0, 2, 3):
            assert_same(answers[number], await step_alone(alone[number], make_batch(number), SFT))
            assert (await steps[number]).skipped is None
            weights = [await one[number].get_weights() for one in (joined, alone)]
            assert compute_difference(*weights) < 1e-5
        answer = answers[1]
        if isinstance(kind, type):
            assert isinstance(answer, kind)
            again = await forward_backward_together(ask(joined))
            assert [isinstance(one, EarlierStepFailed) for one in again] == [False, True, False, False]
            assert isinstance(await raised_by(steps[1]), EarlierStepFailed)
        else:
            assert answer.skipped == kind
            assert (await steps[1]).skipped == (kind or "the gradient norm is nan")
        await joined[1].reset()
        await joined[1].load_weights(before)
        found = await forward_backward_together(ask(joined))
        assert_same(found[1], await alone[1].forward_backward(make_batch(1), SFT))


async def test_a_pass_that_fails_is_the_failure_of_those_in_it(monkeypatch):
    """Those of another pass of the job have their answers."""
    async with open_adapters() as backends:
        forward = backends[0].trainer.compute_outputs
        asked = ask(backends)
        for number in (2, 3):
            asked[number] = asked[number]._replace(batch=make_batch(number, temperature=0.5))

        def run_out(micro_batch, temperature, spec=None):
            if temperature == 1.0:
                raise torch.OutOfMemoryError("no room")
            return forward(micro_batch, temperature, spec)

        for backend in backends:
            monkeypatch.setattr(backend.trainer, "compute_outputs", run_out)
        answers = await forward_backward_together(asked)
        assert [isinstance(one, torch.OutOfMemoryError) for one in answers] == [True, True, False, False]
        monkeypatch.undo()
        for backend in backends[:2]:
            await raised_by(backend.optim_step(STEP), EarlierStepFailed)
            await backend.reset()
        await forward_backward_together(asked)
        for backend in backends:
            assert (await backend.optim_step(STEP)).skipped is None


async def test_an_interruption_is_of_all_and_leaves_their_weights():
    async with open_adapters() as backends:
        before = [await one.get_weights() for one in backends]
        future = forward_backward_together(ask(backends))
        backends[0].interrupt()
        assert all(isinstance(one, StepInterrupted) for one in await future)
        for backend, weights in zip(backends, before, strict=True):
            await backend.reset()
            assert_weights_equal(await backend.get_weights(), weights)


@cases("align", [1, 16])
async def test_joined_rows_have_the_log_probs_that_each_has_alone(align):
    """Padded to multiples or not, with rows that branch and rows that do not."""
    async with open_adapters(loras=[{"rank": 2}, {"rank": 4}, {"rank": 8}]) as backends:
        model, plan = backends[0].model, backends[0].trainer.find_plan()
        parts = [
            make_micro_batches(
                batch.tokens, batch.loss_masks, micro_batch_tokens=8192, share_prefix=True, padding_free=True
            )[0]
            for batch in (make_batch(0), make_batch(1, groups=1, size=1), make_rollouts(3))
        ]
        row, slices = join_packed_rows(parts, align=align)
        assert [one.start % align for one in slices] == [0, 0, 0] and row.fences == (
            slices[1].start,
            slices[2].start,
        )
        adapters = [backend.trainer.adapter for backend in backends]
        options = {"plan": plan, "temperature": 1.0}
        with torch.no_grad():
            with use_adapters(model, list(zip(adapters, slices, strict=True))):
                found = compute_micro_batch_outputs(model, row, **options).log_probs
            for part, adapter, own in zip(
                parts, adapters, found.split([len(one.targets) for one in parts]), strict=True
            ):
                with use_adapters(model, [(adapter, None)]):
                    wanted = compute_micro_batch_outputs(model, part, **options).log_probs
                torch.testing.assert_close(own, wanted, rtol=1e-5, atol=1e-5)
