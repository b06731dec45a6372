"""A training step of ours against TRL's GRPOTrainer's own: the same rollouts, loss, clipping, AdamW and
micro-batches, in float32.

    python -m benchmarks.train_step [--quick] [--rounds 3] [--micro-batch-rows 32]

SmolLM2-135M, 4 groups of 8, prompts of 64 tokens, responses lognormal around 40 and at most 64. Each side is
a process of its own, and they take turns A B B A. TRL's trainer runs its own loop (compute_loss, backward,
clipping, fused AdamW) and is given the rollouts where it would generate; it pads, and computes a group's
prompt once for each of its samples. We take micro-batches of as many tokens as TRL's have.

First, both gradients of the same batch are compared, with old log-probs that are not the policy's own.
Metrics: `speedup` (wall) and `cpu_ratio`, TRL's step / ours; `peak_rss_ratio`, ours / TRL's after loading;
`sharing_gain`, our step with sharing of prompts off / ours; `skipping_gain`, ours / our step with one group
of four whose rewards are equal, which we skip; `fraction_of_gemm`: operations that the step needs (6 for each
weight and token, each prompt once, the head on responses only) per second, of those of matrix products of the
model's shapes, measured in the same run. TRL's process takes 13 GiB. Targets: speedup >= 2.0, peak_rss_ratio
<= 0.6, gradient_error <= 1e-4. Without TRL only our own numbers are there.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.e2e.children import Child, open_child
from benchmarks.e2e.step_batch import (
    GROUPS,
    LONGEST,
    MAX_GRAD_NORM,
    PROMPT_LENGTH,
    SAMPLES,
    StepBatch,
    make_step_batch,
)
from benchmarks.harness import Turn, compute_ratio, finish, make_parser
from rollouts.models.load import load_hf_model, resolve_model

PEER = "trl GRPOTrainer"
TARGETS = {"speedup": ">= 2.0", "peak_rss_ratio": "<= 0.6", "gradient_error": "<= 0.0001"}


@dataclass(frozen=True, slots=True)
class Setting:
    """What children are started with."""

    model: Path
    folder: Path
    threads: int
    micro_batch_rows: int

    def ours(self, batch: Path, *flags: str) -> list[str]:
        tokens = self.micro_batch_rows * (PROMPT_LENGTH + LONGEST)
        common = ["--model", str(self.model), "--batch", str(batch), "--threads", str(self.threads)]
        return [*common, "--micro-batch-tokens", str(tokens), *flags]

    def trl(self, batch: Path) -> list[str]:
        common = ["--model", str(self.model), "--batch", str(batch), "--threads", str(self.threads)]
        return [*common, "--micro-batch-rows", str(self.micro_batch_rows)]


def open_ours(setting: Setting, name: str, batch: Path, *flags: str) -> Any:
    return open_child(
        "benchmarks.e2e.step_ours", setting.ours(batch, *flags), log=setting.folder / f"{name}.log"
    )


def open_trl(setting: Setting, name: str, batch: Path) -> Any:
    return open_child("benchmarks.e2e.step_trl", setting.trl(batch), log=setting.folder / f"{name}.log")


def compare_gradients(ours: Path, trl: Path, norm_limit: float) -> float:
    """|ours, clipped - TRL's| / |TRL's| over all parameters; a tied head counts once."""
    from safetensors import safe_open

    with safe_open(ours, "pt") as own, safe_open(trl, "pt") as peer:
        names = sorted(own.keys())
        assert names == sorted(peer.keys()), sorted(set(own.keys()) ^ set(peer.keys()))
        norm = sum(float(own.get_tensor(name).double().square().sum()) for name in names) ** 0.5
        scale = min(1.0, norm_limit / (norm + 1e-6))
        wrong = sum(
            float((own.get_tensor(name).double() * scale - peer.get_tensor(name).double()).square().sum())
            for name in names
        )
        right = sum(float(peer.get_tensor(name).double().square().sum()) for name in names)
    return (wrong / right) ** 0.5


def check_gradients(setting: Setting, batch: Path) -> float:
    """Old log-probs are written into the batch's file, then both sides give their gradient of it."""
    ours, trl = setting.folder / "ours.safetensors", setting.folder / "trl.safetensors"
    with open_ours(setting, "check-ours", batch, "--share-prefix") as child:
        child.ask(do="old_log_probs")
        if find_spec("trl") is None:
            return float("nan")
        child.ask(do="gradients", path=str(ours))
    with open_trl(setting, "check-trl", batch) as child:
        child.ask(do="step", path=str(trl))
    error = compare_gradients(ours, trl, MAX_GRAD_NORM)
    ours.unlink()
    trl.unlink()
    assert error <= 1e-4, f"the gradients differ by {error:.2g}; no time is compared"
    return error


def count_flops(model: Any, batch: StepBatch) -> float:
    """What the step needs: 6 operations for each weight of the layers and token, prompts once per group, and
    of the head and trained token.
    """
    head = model.get_output_embeddings().weight.numel()
    layers = sum(parameter.numel() for parameter in model.get_decoder().layers.parameters())
    responses = float(batch.lengths.sum())
    return 6.0 * (layers * (GROUPS * PROMPT_LENGTH + responses) + head * responses)


def measure_gemm(model: Any, *, tokens: int, threads: int) -> float:
    """Operations per second of float32 products of one layer's shapes, `tokens` rows at a time: forward,
    gradient of input and of weight.
    """
    torch.set_num_threads(threads)
    config = model.config
    hidden, inner = config.hidden_size, config.intermediate_size
    states, wide = torch.randn(tokens, hidden), torch.randn(tokens, inner)
    weight, grad = torch.randn(inner, hidden), torch.randn(tokens, inner)
    outputs = torch.empty(tokens, inner), torch.empty(tokens, hidden), torch.empty(inner, hidden)
    best = 0.0
    for _ in range(5):
        started = time.perf_counter()
        for _ in range(10):
            torch.mm(states, weight.T, out=outputs[0])
            torch.mm(wide, weight, out=outputs[1])
            torch.mm(grad.T, states, out=outputs[2])
        best = max(best, 10 * 3 * 2.0 * tokens * hidden * inner / (time.perf_counter() - started))
    return best


def take_rounds(children: dict[str, Child], order: Sequence[str], rounds: int) -> dict[str, list[Turn]]:
    """`rounds` times the turns in `order`, after one of each that does not count."""
    turns: dict[str, list[Turn]] = {name: [] for name in children}
    for name in children:
        children[name].take_turn(do="step")
    for number in range(rounds):
        for name in order:
            turns[name].append(children[name].take_turn(do="step"))
        print(
            f"round {number}: "
            + ", ".join(
                f"{name} {statistics.median(turn.wall_s for turn in turns[name]):.2f} s" for name in turns
            ),
            flush=True,
        )
    return turns


def ratio_of(turns: dict[str, list[Turn]], ours: str, peer: str, field: str) -> float | None:
    """Median of peer / ours over turns that stood side by side."""
    if not turns.get(ours) or not turns.get(peer):
        return None
    found = compute_ratio(
        [getattr(turn, field) for turn in turns[ours]], [getattr(turn, field) for turn in turns[peer]]
    )
    print(f"{peer} / {ours}, {field}: {found}")
    return round(found.median, 3)


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, float | str | None]:
    path = resolve_model(arguments.model)
    setting = Setting(path, folder, arguments.threads, arguments.micro_batch_rows)
    model = load_hf_model(path)
    batch_path, tied_path = folder / "batch.npz", folder / "tied.npz"
    vocab_size = int(model.config.vocab_size)
    batch = make_step_batch(vocab_size=vocab_size)
    batch.save(batch_path)
    gemm = measure_gemm(model, tokens=1024, threads=arguments.threads)
    flops = count_flops(model, batch)
    del model
    has_trl = find_spec("trl") is not None
    error = check_gradients(setting, batch_path)
    metrics: dict[str, float | str | None] = {
        "gradient_error": float(f"{error:.2g}") if has_trl else None,
        "gemm_gflops": round(gemm / 1e9, 1),
    }
    if not has_trl:
        print("trl is not installed: only our own steps are measured")

    tied = make_step_batch(vocab_size=vocab_size, tied_groups=1).advantages
    replace(StepBatch.load(batch_path), advantages=tied).save(tied_path)
    shared = ("--share-prefix", "--skip-zero-advantage")
    with ExitStack() as stack:
        children = {"ours": stack.enter_context(open_ours(setting, "ours", batch_path, *shared))}
        if has_trl:
            children["trl"] = stack.enter_context(open_trl(setting, "trl", batch_path))
        order = ["ours", "trl", "trl", "ours"] if has_trl else ["ours", "ours"]
        turns = take_rounds(children, order, arguments.rounds)
        memory = {name: child.ask(do="memory")["peak_bytes"] for name, child in children.items()}
    if not arguments.quick:
        with (
            open_ours(setting, "ours", batch_path, *shared) as whole,
            open_ours(setting, "plain", batch_path) as plain,
            open_ours(setting, "tied", tied_path, *shared) as skipping,
        ):
            own = {"ours": whole, "plain": plain, "tied": skipping}
            others = take_rounds(own, [*own, *reversed(own)], max(arguments.rounds - 1, 1))
        metrics["sharing_gain"] = ratio_of(others, "ours", "plain", "wall_s")
        metrics["skipping_gain"] = ratio_of(others, "tied", "ours", "wall_s")
    step_s = statistics.median(turn.wall_s for turn in turns["ours"])
    return {
        "speedup": ratio_of(turns, "ours", "trl", "wall_s"),
        "cpu_ratio": ratio_of(turns, "ours", "trl", "cpu_s"),
        "peak_rss_ratio": round(memory["ours"] / memory["trl"], 3) if has_trl else None,
        "ours_step_s": round(step_s, 3),
        "trl_step_s": round(statistics.median(turn.wall_s for turn in turns["trl"]), 3) if has_trl else None,
        "ours_peak_gib": round(memory["ours"] / 2**30, 2),
        "trl_peak_gib": round(memory["trl"] / 2**30, 2) if has_trl else None,
        "trained_tokens_per_s": round(float(batch.lengths.sum()) / step_s, 1),
        "fraction_of_gemm": round(flops / step_s / gemm, 3),
        "micro_batch_rows": arguments.micro_batch_rows,
        **metrics,
    }


def main() -> int:
    parser = make_parser(__doc__, quick="one round, without the variants")
    parser.add_argument("--model", default="bundled:smollm2-135m-instruct")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3, help="of A B B A")
    parser.add_argument(
        "--micro-batch-rows", type=int, default=GROUPS * SAMPLES, help="of TRL's; a divisor of 32"
    )
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds = 1
    with tempfile.TemporaryDirectory(prefix="train_step-") as folder:
        metrics = measure(arguments, Path(folder))
    return finish("train_step", peer=PEER, metrics=metrics, targets=TARGETS)


if __name__ == "__main__":
    sys.exit(main())
