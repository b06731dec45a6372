"""Layers under torch.compile: the numbers of the layers as they are written, few programs, and an engine that
runs none of them.
"""

import json

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from rollouts.backends.compiled import compile_and_prove
from rollouts.backends.open import open_pytorch_backend
from rollouts.config.schema import RunConfig
from rollouts.config.tables import OptimConfig
from rollouts.errors import ConfigError, ModelError
from rollouts.models.devices import rounding_products
from rollouts.models.forward_plan import plan_forward
from rollouts.models.layers import compile_layers
from rollouts.models.load import resolve_model
from rollouts.models.packed_attention import register_packed_attention
from rollouts.testing.engine_contracts import make_request
from rollouts.testing.torch_contracts import SFT, make_batch
from tests.support.plain_backend import assert_gradients_close, load_tiny, take_gradients
from tests.support.text_tables import cases
from tests.unit.test_local_engine import open_engine

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor"
    ),  # torch hides it while it compiles, where it is no error
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),  # the compiler's own imports
]
TOLERANCE = 1e-5  # of the norm: float32 sums in another order; 1e-6 was seen


@pytest.fixture(autouse=True)
def _algorithms():
    """As torch starts: an earlier test may have left this process deterministic, which compiles nothing."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    yield
    torch.use_deterministic_algorithms(before)


def refuse(program, inputs):
    """A compiler that fails."""
    raise OSError("no compiler here")


def add_a_little(program, inputs):
    """A compiler whose programs are wrong."""
    return lambda *arguments: [
        output * 1.01 if isinstance(output, Tensor) else output for output in program.forward(*arguments)
    ]


async def train(path, **options):
    """Losses and gradient norms of three batches, and the gradient of a fourth."""
    losses, norms = [], []
    async with open_pytorch_backend(
        path, optim=OptimConfig(lr=1e-3), total_steps=9, threads=1, autocast="off", micro_batch_tokens=64,
        **options,
    ) as backend:  # fmt: skip
        for step in range(4):
            result = await backend.forward_backward(make_batch(step, groups=1 + step % 3), SFT)
            losses.append(result.loss)
            if step < 3:
                norms.append((await backend.optim_step()).grad_norm)
        return losses, norms, take_gradients(backend.model)


@pytest.mark.slow
@cases("""
kind  | checkpointing
llama | no
gemma | yes
""")
async def test_compiled_layers_give_the_losses_and_gradients_of_plain_ones(kind, checkpointing: bool):
    path = resolve_model(f"tiny:{kind}")
    found = await train(path, compile_backend="aot_eager", gradient_checkpointing=checkpointing)
    wanted = await train(path)
    for numbers, others in zip(found[:2], wanted[:2], strict=True):
        assert numbers == pytest.approx(others, rel=TOLERANCE)
    assert_gradients_close(found[2], wanted[2], TOLERANCE)


def test_batches_of_changing_lengths_need_no_more_programs():
    register_packed_attention()  # as every engine and packed batch does
    model, counting = load_tiny("gemma"), CompileCounter()
    assert compile_layers(model, backend=counting) == model.config.num_hidden_layers
    made = []
    for shape in json.loads("[[1, 7], [2, 9], [1, 33], [3, 12], [4, 50], [1, 90], [5, 8], [2, 2]]"):
        model(input_ids=torch.ones(shape, dtype=torch.int64), use_cache=False).logits.sum().backward()
        made.append(counting.frame_count)
    # one sequence and several, each for layers with a window and without
    assert 2 <= made[1] == made[-1] <= 4


def test_compiled_layers_round_their_products_as_plain_ones_do():
    model, cpu = load_tiny("llama"), torch.device("cpu")
    register_packed_attention()
    ids = torch.arange(34).view(2, 17)

    def run() -> tuple[Tensor, dict[str, Tensor]]:
        model.zero_grad()
        with rounding_products(torch.bfloat16, cpu):
            logits = model(input_ids=ids, use_cache=False).logits
            logits.log_softmax(-1)[..., 3].sum().backward()
        return logits.detach(), take_gradients(model)

    logits, gradients = run()
    compile_layers(model, backend="aot_eager")
    found, again = run()
    torch.testing.assert_close(found, logits, rtol=0.02, atol=0.02)
    assert_gradients_close(again, gradients, 0.02)


@cases("kind: llama gemma")
async def test_the_embedded_engine_shares_a_compiled_model_without_its_programs(kind):
    """By the fast path and by the model's own cache: the tokens are those of the model as it is written."""
    plain, compiled = (load_tiny(kind) for _ in range(2))
    compile_layers(compiled, backend=refuse)
    request = make_request(prompt=(*range(5, 12),), max_new_tokens=6, temperature=0.0)
    found = []
    for model in (plain, compiled):
        async with open_engine(model, max_rows=2) as engine:
            assert engine.path == ("fast" if kind == "llama" else "cached")
            found.append(await engine.generate(request))
    assert found[0].token_ids.tolist() == found[1].token_ids.tolist()
    assert found[0].log_probs == pytest.approx(found[1].log_probs, abs=1e-6)
    with pytest.raises(Exception, match="no compiler here"):  # the model is compiled still
        compiled(input_ids=torch.ones((1, 7), dtype=torch.int64), use_cache=False)


def test_a_compiler_that_fails_and_one_that_is_wrong_are_named():
    for backend, message in (
        (refuse, r"torch\.compile fails .*no compiler here"),
        (add_a_little, "differ from the model's"),
    ):
        model = load_tiny("llama")
        with pytest.raises(ModelError, match=message):
            compile_and_prove(model, plan_forward(model), None, backend=backend)
    with pytest.raises(ModelError, match="no layers that repeat"):
        compile_layers(torch.nn.Linear(1, 1), backend=refuse)  # pyright: ignore[reportArgumentType]


def test_deterministic_mode_compiles_nothing():
    with pytest.raises(ValueError, match=r"model\.compile=true with deterministic=true"):
        RunConfig.model_validate({"deterministic": True, "model": {"compile": True}})
    model = load_tiny("llama")
    torch.use_deterministic_algorithms(True)
    with pytest.raises(ConfigError, match=r"model\.compile=true with deterministic=true"):
        compile_layers(model, backend=refuse)
