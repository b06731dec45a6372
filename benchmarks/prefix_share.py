"""Forward and backward of a group whose prompt is computed once, against the same with the prompt computed
for every sample; both are ours.

    python -m benchmarks.prefix_share [--quick] [--rounds 1] [--threads N]

SmolLM2-135M in float32, groups of n samples with prompts of P and
completions of C tokens, P/C/n of 128/64/8, 256/256/8 and 1024/256/8. Both sides are packed without padding,
at most 4,096 tokens a micro-batch, logits for completions only, and take turns A B B A. The loss is Σ w·log p
over the completions, with random w. Gradients of all parameters are compared before anything is timed.

Ideal: the ratio of operations, 6 for each weight and token (those of the head: for each completion token) and
12·layers·heads·size for each pair of a query and a key. Metrics of each shape: `speedup` (CPU time: threads
wait for each other where the machine has other work), `speedup_wall`, `ideal`, `fraction_of_ideal` = speedup
/ ideal; `min_fraction_of_ideal` and `min_speedup` over all shapes; `gradient_error`, the largest relative
difference of a parameter's gradient; `peak_bytes_shared` (last shape): what a pass holds at most beside the
weights. Targets: min_fraction_of_ideal >= 0.85,
min_speedup >= 1.0, gradient_error <= 1e-4. --quick: the first shape, one round.
"""

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness import Turn, compute_ratio, finish, make_parser, take_turns
from rollouts.data.packing import MicroBatch, make_micro_batches
from rollouts.models.forward_plan import ForwardPlan, compute_micro_batch_outputs, plan_forward
from rollouts.models.load import load_hf_model, resolve_model
from rollouts.types import BoolArray, IntArray

SHAPES = ((128, 64, 8), (256, 256, 8), (1024, 256, 8))
MICRO_BATCH_TOKENS = 4096
TARGETS = {"min_fraction_of_ideal": ">= 0.85", "min_speedup": ">= 1.0", "gradient_error": "<= 0.0001"}
PEER = "ours with share_prefix off"


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Group:
    """One prompt and n completions."""

    tokens: Sequence[IntArray]
    masks: Sequence[BoolArray]
    weights: Tensor  # [n, P + C] of each token's log-prob in the loss

    def pack(self, *, share_prefix: bool) -> list[MicroBatch]:
        """The group in micro-batches."""
        options: dict[str, Any] = {"share_prefix": share_prefix, "padding_free": True}
        return make_micro_batches(self.tokens, self.masks, micro_batch_tokens=MICRO_BATCH_TOKENS, **options)


def make_group(prompt: int, completion: int, samples: int, vocab_size: int) -> Group:
    """Random tokens; every completion begins with another one."""
    rng = np.random.default_rng(0)
    start = rng.integers(0, vocab_size, prompt)
    rest = [
        np.concatenate([[first], rng.integers(0, vocab_size, completion - 1)])
        for first in rng.permutation(vocab_size)[:samples]
    ]
    masks = [np.arange(prompt + completion) >= prompt] * samples
    weights = torch.from_numpy(rng.standard_normal((samples, prompt + completion)).astype(np.float32))
    return Group([np.concatenate([start, one]) for one in rest], masks, weights)


def run_pass(model: Any, plan: ForwardPlan, group: Group, micro_batches: Sequence[MicroBatch]) -> None:
    """Adds the group's gradient."""
    for part in micro_batches:
        found = compute_micro_batch_outputs(model, part, plan=plan, temperature=1.0)
        weights = group.weights[
            torch.from_numpy(part.rows[part.token_rows]), torch.from_numpy(part.token_positions)
        ]
        (found.log_probs[torch.from_numpy(part.token_pairs)] * weights).sum().backward()


def take_gradients(model: Any) -> dict[str, Tensor]:
    """Every gradient, which the model then has no more."""
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found


def compare_gradients(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest relative difference, ‖a − b‖ / ‖b‖, of a parameter's gradient."""
    return max(float((ours[name] - gradient).norm() / gradient.norm()) for name, gradient in theirs.items())


def count_operations(model: Any, micro_batches: Sequence[MicroBatch]) -> float:
    """Of forward and backward, as the module's first lines say."""
    config = model.config
    head = config.vocab_size * config.hidden_size
    linear = sum(
        module.weight.numel() for module in model.model.modules() if isinstance(module, torch.nn.Linear)
    )
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = config.num_attention_heads * size
    total = 0.0
    for part in micro_batches:
        pairs = float((part.position_ids + 1).sum())
        total += (
            6 * linear * part.computed_tokens
            + 6 * head * len(part.predictors)
            + 12 * config.num_hidden_layers * width * pairs
        )
    return total


def measure_peak(model: Any, plan: ForwardPlan, group: Group, micro_batches: Sequence[MicroBatch]) -> float:
    """Bytes that tensors made in one pass hold at most at a time, by torch's own record of allocations."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        run_pass(model, plan, group, micro_batches)
    model.zero_grad(set_to_none=True)
    held = peak = 0
    events: Any = record.profiler.kineto_results.events()  # pyright: ignore[reportOptionalMemberAccess]
    for event in events:
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return float(peak)


def measure_shape(
    model: Any, plan: ForwardPlan, shape: tuple[int, int, int], rounds: int
) -> dict[str, float]:
    """Metrics of one shape."""
    group = make_group(*shape, model.config.vocab_size)
    shared, unshared = group.pack(share_prefix=True), group.pack(share_prefix=False)
    gradients: list[dict[str, Tensor]] = []
    for micro_batches in (shared, unshared):  # also the warm-up
        run_pass(model, plan, group, micro_batches)
        gradients.append(take_gradients(model))
    error = compare_gradients(*gradients)
    assert error <= 1e-4, f"gradients differ by {error:.1e}"
    del gradients

    def run(micro_batches: Sequence[MicroBatch]) -> None:
        run_pass(model, plan, group, micro_batches)
        model.zero_grad(set_to_none=True)

    turns: tuple[list[Turn], list[Turn]] = take_turns(
        lambda: run(shared), lambda: run(unshared), rounds=rounds
    )
    speedup = compute_ratio(*([turn.cpu_s for turn in side] for side in turns))
    wall = compute_ratio(*([turn.wall_s for turn in side] for side in turns))
    ideal = count_operations(model, unshared) / count_operations(model, shared)
    name = "_".join(map(str, shape))
    print(
        f"{name}: {speedup} times as fast (wall {wall}), ideal {ideal:.2f}, gradient error {error:.1e}",
        flush=True,
    )
    numbers = {
        "speedup": speedup.median,
        "speedup_wall": wall.median,
        "ideal": ideal,
        "fraction_of_ideal": speedup.median / ideal,
    }
    return {**{f"{key}_{name}": value for key, value in numbers.items()}, "gradient_error": error}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints; exit status 1 if a target is missed."""
    parser = make_parser(__doc__, quick="the first shape, one round")
    parser.add_argument("--rounds", type=int, default=1, help="of A B B A for each shape")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    model = load_hf_model(resolve_model("bundled:smollm2-135m-instruct"))
    plan = plan_forward(model)
    assert plan.choose_layout(max(prompt + completion for prompt, completion, _ in SHAPES)) == "packed", (
        plan.reason
    )
    shapes = SHAPES[:1] if options.quick else SHAPES
    metrics: dict[str, float | str | None] = {"gradient_error": 0.0}
    for shape in shapes:
        found = measure_shape(model, plan, shape, 1 if options.quick else options.rounds)
        metrics |= {
            **found,
            "gradient_error": max(found["gradient_error"], float(metrics["gradient_error"] or 0.0)),
        }
    for key in ("fraction_of_ideal", "speedup"):
        metrics[f"min_{key}"] = min(
            float(metrics[f"{key}_{'_'.join(map(str, shape))}"] or 0.0) for shape in shapes
        )
    if not options.quick:
        group = make_group(*shapes[-1], model.config.vocab_size)
        metrics["peak_bytes_shared"] = measure_peak(model, plan, group, group.pack(share_prefix=True))
    metrics["threads"] = options.threads
    return finish("prefix_share", peer=PEER, metrics=metrics, targets=TARGETS)


if __name__ == "__main__":
    sys.exit(main())
