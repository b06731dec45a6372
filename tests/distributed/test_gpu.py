"""FSDP on a GPU, over NCCL with one rank, is the backend of one process on the same GPU: losses, gradients,
weights; make test-gpu.
"""

import pytest
import torch

from rollouts.backends.fsdp import open_fsdp_backend
from rollouts.backends.open import open_pytorch_backend
from rollouts.config.tables import OptimConfig
from rollouts.models.load import resolve_model
from rollouts.models.sharded import get_local
from rollouts.ranks.channel import NoOtherRanks
from rollouts.testing.torch_contracts import make_batch
from tests.distributed.one_rank import GRPO, open_one_rank, train
from tests.support.plain_backend import compute_difference
from tests.support.text_tables import cases, read_cells, read_params

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings(
        "default"
    ),  # of CUDA's, NCCL's and the compiler's own code, which differ from machine to machine
]
OPTIONS = {"optim": OptimConfig(lr=1e-4), "total_steps": 10, "micro_batch_tokens": 64}
TOLERANCE = {"off": 1e-4, "bfloat16": 3e-2}  # of norms: sums in another order; products of 8 bits
CASES = {
    name: read_params(options)
    for name, options in read_cells("""
        float32                               |
        bfloat16                              | autocast = "bfloat16"
        checkpointing                         | gradient_checkpointing = true
        compile                               | compile_backend = "inductor"
        compile and checkpointing in bfloat16 | compile_backend = "inductor", gradient_checkpointing = true, \
autocast = "bfloat16"
        reduce each micro-batch               | reduce_each_micro_batch = true
        offload                               | cpu_offload = true
        all                                   | autocast = "bfloat16", gradient_checkpointing = true, \
compile_backend = "inductor", cpu_offload = true, reduce_each_micro_batch = true
    """)
}


@pytest.fixture
def path():
    return resolve_model("tiny:llama")


def assert_same(found, wanted, tolerance):
    assert found.losses == pytest.approx(wanted.losses, rel=tolerance, abs=tolerance)
    assert found.norms == pytest.approx(wanted.norms, rel=tolerance)
    assert compute_difference(found.gradient, wanted.gradient) <= tolerance
    assert compute_difference(found.weights, wanted.weights) <= tolerance


async def train_alone(path, **options):
    async with open_pytorch_backend(
        path, device="cuda", **OPTIONS, **{"autocast": "off", **options}
    ) as backend:
        return await train(backend)


@cases("case", CASES)
async def test_a_rank_on_a_gpu_trains_as_one_process_there(case, path):
    options = {"autocast": "off", **CASES[case]}
    wanted = await train_alone(path, autocast=options["autocast"])
    async with (
        open_one_rank("cuda") as ranks,
        open_fsdp_backend(path, channel=NoOtherRanks(), ranks=ranks, **OPTIONS, **options) as backend,
    ):
        found = await train(backend)
        places = {get_local(parameter).device.type for parameter in backend.model.parameters()}
    assert_same(found, wanted, TOLERANCE[options["autocast"]])
    assert places == {"cpu" if options.get("cpu_offload") else "cuda"}


@cases("cpu_offload: no yes")
async def test_what_is_saved_on_a_gpu_goes_on_with_the_same_weights_and_moments(
    cpu_offload: bool, path, tmp_path
):
    """Saved after three steps; both backends take a fourth. The moments lie where the weights do."""

    async def step(backend):
        await backend.forward_backward(make_batch(3), GRPO)
        await backend.optim_step()
        moments = {
            value.to_local().device.type
            for state in backend.trainer.optimizer.state.values()
            for name, value in state.items()
            if name != "step"
        }
        assert moments == {"cpu" if cpu_offload else "cuda"}
        return await backend.get_weights()

    async with open_one_rank("cuda") as ranks:
        after = []
        for loads in (False, True):
            options = {**OPTIONS, "autocast": "off", "cpu_offload": cpu_offload}
            async with open_fsdp_backend(path, channel=NoOtherRanks(), ranks=ranks, **options) as backend:
                if loads:
                    await backend.load(tmp_path)
                else:
                    await train(backend)
                    await backend.save(tmp_path)
                after.append(await step(backend))
    assert compute_difference(*after) <= 1e-5
