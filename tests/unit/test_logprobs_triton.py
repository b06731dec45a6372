"""The Triton kernels of the log-prob head: interpreted on the CPU where Triton is installed, compiled where
there is a GPU.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from rollouts.losses import logprobs
from rollouts.losses.logprobs import can_use_triton, linear_logprobs, linear_logprobs_tiled, triton_agrees

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="Triton is not installed: pip install rollouts-rl[test-triton]",
)
CASES: list[dict[str, Any]] = [
    {
        "n": 1,
        "h": 8,
        "v": 5,
        "dtype": "float32",
        "temperature": 1.0,
        "entropy_gradient": False,
        "transposed": False,
    },
    {
        "n": 70,
        "h": 40,
        "v": 201,
        "dtype": "float32",
        "temperature": 0.7,
        "entropy_gradient": False,
        "transposed": False,
    },
    {
        "n": 70,
        "h": 40,
        "v": 201,
        "dtype": "float32",
        "temperature": 0.7,
        "entropy_gradient": True,
        "transposed": True,
    },
    {
        "n": 64,
        "h": 32,
        "v": 128,
        "dtype": "float32",
        "temperature": 2.0,
        "entropy_gradient": True,
        "transposed": False,
    },  # whole blocks
    {
        "n": 130,
        "h": 70,
        "v": 300,
        "dtype": "bfloat16",
        "temperature": 0.7,
        "entropy_gradient": True,
        "transposed": False,
    },
    {
        "n": 130,
        "h": 70,
        "v": 300,
        "dtype": "bfloat16",
        "temperature": 1.0,
        "entropy_gradient": False,
        "transposed": False,
    },
    {
        "n": 30,
        "h": 20,
        "v": 150,
        "dtype": "float16",
        "temperature": 1.0,
        "entropy_gradient": True,
        "transposed": False,
    },
]


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    """What check_triton_head.py found: Triton decides at its import whether it interprets, so it runs in a
    process of its own.
    """
    script = Path(__file__).with_name("check_triton_head.py")
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    command = [sys.executable, str(script), json.dumps(CASES)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@needs_triton
@pytest.mark.parametrize("case", range(len(CASES)))
def test_interpreted_kernels_equal_log_softmax_in_float64(interpreted: dict[str, Any], case: int):
    errors = interpreted["errors"][case]
    rounding = {"float32": 2e-6, "bfloat16": 4e-3, "float16": 5e-4}[
        CASES[case]["dtype"]
    ]  # of the gradients, given in that dtype
    assert errors["values"] < 2e-6  # float32, whatever the inputs are
    assert errors["gradients"] < rounding


@needs_triton
def test_interpreted_kernels_give_nothing_for_nothing_and_do_not_overflow(interpreted: dict[str, Any]):
    assert interpreted["empty"] == [[0], [0]]
    assert interpreted["empty_gradient"] == 0.0
    assert interpreted["large"] < 1e-4  # nats, at logits of up to a thousand


@needs_triton
def test_the_check_of_a_device_lets_right_kernels_pass(interpreted: dict[str, Any]):
    assert interpreted["disagreement"] is None


@needs_triton
def test_the_check_of_a_device_finds_kernels_that_are_wrong(interpreted: dict[str, Any]):
    """The entropy that a broken kernel gives is 1 % too large."""
    assert interpreted["found_broken"].startswith("the entropy of the Triton kernels differ")


def test_without_triton_the_head_runs_tiled_and_says_why(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(
        sys.modules, "rollouts.losses.logprobs_triton", None
    )  # importing it raises ImportError
    triton_agrees.cache_clear()
    with pytest.warns(RuntimeWarning, match="runs tiled on cpu: Triton cannot be imported"):
        assert not triton_agrees(torch.device("cpu"), torch.float32)
    with warnings.catch_warnings():  # asked once
        warnings.simplefilter("error")
        assert not triton_agrees(torch.device("cpu"), torch.float32)
    triton_agrees.cache_clear()


def test_tensors_of_a_cpu_never_take_the_kernels(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(logprobs, "DEVICE_HEAD", "triton")
    hidden, weight, targets = torch.ones(2, 3), torch.ones(4, 3), torch.tensor([0, 3])
    assert not can_use_triton(hidden, weight)
    assert linear_logprobs(hidden, weight, targets).log_probs.tolist() == pytest.approx(
        [-1.3862944] * 2
    )  # ln 1/4


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_compiled_kernels_equal_the_tiled_path(dtype: torch.dtype, entropy_gradient: bool):  # pragma: gpu
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    from rollouts.losses.logprobs_triton import find_disagreement, linear_logprobs_triton

    device = torch.device("cuda", torch.cuda.current_device())
    assert find_disagreement(device, dtype) is None
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3000, 576, generator=generator).to(device, dtype).requires_grad_()
    weight = (
        (torch.randn(49153, 576, generator=generator) / 8).to(device, dtype).requires_grad_()
    )  # no multiple of a block
    targets = torch.randint(0, 49153, (3000,), generator=generator).to(device)
    upstream = torch.randn(2, 3000, generator=generator).to(device)
    found = []
    for run in (linear_logprobs_tiled, linear_logprobs_triton, linear_logprobs_triton):
        result = run(hidden, weight, targets, temperature=0.9, entropy_gradient=entropy_gradient)
        loss = (result.log_probs * upstream[0]).sum() + (
            result.entropy * upstream[1]
        ).sum() * entropy_gradient
        found.append([*result, *torch.autograd.grad(loss, [hidden, weight])])
    tolerance = {torch.bfloat16: 4e-3, torch.float16: 1e-3, torch.float32: 1e-5}[dtype]
    for tiled, fused, again in zip(*found, strict=True):
        assert float((tiled.double() - fused.double()).norm() / tiled.double().norm()) < tolerance
        assert torch.equal(fused, again)  # nothing is summed in an order that chance decides
