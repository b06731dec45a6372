"""The log-prob head beside TRL's and beside plain log_softmax: time, memory and error of one forward and
backward pass. CPU.

    python -m benchmarks.logprob_head [--positions 2048] [--rounds 3] [--threads 2] [--quick]

N positions, V = 49,152 and H = 576 (SmolLM2-135M), random states and a head whose logits have a standard
deviation of 4. Each side gives the log-prob of one target per position and the entropy as a metric, then
takes the gradients of states and head for random upstream gradients.

    ours    rollouts.losses.logprobs.linear_logprobs
    TRL     trl.kernels.ChunkedLogProbFunction as GRPOTrainer calls it: its own chunk, outputs log_probs and
            entropy
    naive   all logits, log_softmax in float32, gather; entropy without gradient

    speed        time of the peer / ours, wall, median of the pairs of interleaved turns A B B A in one
                 process
    cpu_speed    the same of user and system time, which other load disturbs less
    memory       the most that became resident in a process of its own, over what was resident before the
                 pass: gradients, tiles, all. Linux forgets the peak on request (/proc/self/clear_refs);
                 before it, a pass over 16 positions has loaded the libraries
    error        the largest norm-wise relative error among log-probs, entropy and both gradients, against
                 float64, over 256 positions
    gemm_share   8·N·V·H operations (logits, twice, and the two products of the gradients) / time, as a share
                 of the rate at which torch.mm multiplies 2048-cubed float32 matrices in the same run

--quick times 512 positions in one round; memory is that of all positions. Where TRL is not installed its
metrics are None. The last line is JSON; exit status 1 if a target is missed.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.harness import (
    Turn,
    compute_ratio,
    finish,
    make_parser,
    measure_gemm_rate,
    read_status_bytes,
    restart_peak,
    take_turns,
)
from rollouts.losses.logprobs import linear_logprobs

VOCABULARY, HIDDEN = 49_152, 576
ERROR_POSITIONS = 256
TRL_CHUNK = 32_768  # trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE
TARGETS = {
    "speed_vs_trl": ">= 1.5",
    "extra_memory_vs_naive": "<= 0.125",
    "extra_memory_vs_trl": "<= 0.5",
    "max_error": "<= 1e-5",
    "bfloat16_error_vs_trl": "<= 0.25",
}
Head = Callable[
    [Tensor, Tensor, Tensor], tuple[Tensor, Tensor]
]  # hidden [N, H], weight [V, H], targets [N] to log-probs and entropy


def run_ours(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Tiles in float32; the entropy has no gradient."""
    found = linear_logprobs(hidden, weight, targets)
    return found.log_probs, found.entropy


def run_naive(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """All logits, then log_softmax, in float32 or in float64 for such inputs."""
    logits = hidden @ weight.T
    log_probs = (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(-1)
    with torch.no_grad():
        entropy = -(log_probs.exp() * log_probs).sum(-1)
    return log_probs.gather(-1, targets[:, None]).squeeze(-1), entropy


def load_trl() -> Head | None:
    """The function that GRPOTrainer scores with; None where TRL is not installed."""
    try:
        from trl.kernels import ChunkedLogProbFunction  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None

    def run_trl(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        found = ChunkedLogProbFunction.apply(
            hidden, weight, None, targets, 1.0, TRL_CHUNK, None, 1.0, ("log_probs", "entropy")
        )
        return found[0], found[1]

    return run_trl


def find_head(name: str) -> Head | None:
    """The side of that name; None where it is not installed."""
    return load_trl() if name == "trl" else {"ours": run_ours, "naive": run_naive}[name]


def make_inputs(positions: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden, weight, targets and the upstream gradients of the log-probs."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(positions, HIDDEN, generator=generator).to(dtype).requires_grad_()
    weight = (
        torch.randn(VOCABULARY, HIDDEN, generator=generator).mul_(4 / HIDDEN**0.5).to(dtype).requires_grad_()
    )
    targets = torch.randint(0, VOCABULARY, (positions,), generator=generator)
    return hidden, weight, targets, torch.randn(positions, generator=generator)


def run_pass(head: Head, hidden: Tensor, weight: Tensor, targets: Tensor, upstream: Tensor) -> list[Tensor]:
    """Log-probs, entropy and the gradients of hidden and weight."""
    log_probs, entropy = head(hidden, weight, targets)
    gradients = torch.autograd.grad((log_probs * upstream).sum(), [hidden, weight])
    return [log_probs.detach(), entropy.detach(), *gradients]


# --- error --------------------------------------------------------------------------------------------------


def compute_errors(dtype: torch.dtype) -> dict[str, float]:
    """Of each side that is installed, the largest relative error of the four results against float64 on the
    same, rounded inputs.
    """
    hidden, weight, targets, upstream = make_inputs(ERROR_POSITIONS, dtype)
    wide_hidden, wide_weight = (tensor.detach().double().requires_grad_() for tensor in (hidden, weight))
    wanted = run_pass(run_naive, wide_hidden, wide_weight, targets, upstream.double())
    errors: dict[str, float] = {}
    for name in ("ours", "trl", "naive"):
        head = find_head(name)
        if head is not None:
            found = run_pass(head, hidden, weight, targets, upstream)
            each = [
                float((one.double() - two).norm() / two.norm())
                for one, two in zip(found, wanted, strict=True)
            ]
            print(
                f"  {name:5} log-probs {each[0]:.1e}  entropy {each[1]:.1e}  d hidden {each[2]:.1e}  d weight"
                f" {each[3]:.1e}",
                flush=True,
            )
            errors[name] = max(each)
    return errors


# --- memory -------------------------------------------------------------------------------------------------


def measure_extra_memory(name: str, positions: int, dtype: torch.dtype) -> int:
    """Bytes that one pass adds at its peak to what this process holds."""
    head = find_head(name)
    assert head is not None, name
    hidden, weight, targets, upstream = make_inputs(positions, dtype)
    few = hidden[:16].detach().requires_grad_()
    run_pass(head, few, weight[:4096].detach().requires_grad_(), targets[:16] % 4096, upstream[:16])
    restart_peak()
    before = read_status_bytes("VmRSS")
    run_pass(head, hidden, weight, targets, upstream)
    return read_status_bytes("VmHWM") - before


def measure_apart(name: str, positions: int, dtype: str, threads: int) -> int | None:
    """`measure_extra_memory` in a process of its own; None where the side is not installed or the platform
    does not count pages so.
    """
    if find_head(name) is None or not Path("/proc/self/clear_refs").exists():
        return None
    options = [
        "--memory-of",
        name,
        "--positions",
        str(positions),
        "--dtype",
        dtype,
        "--threads",
        str(threads),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.logprob_head", *options],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


# --- time ---------------------------------------------------------------------------------------------------


def print_turns(name: str, turns: list[Turn]) -> None:
    walls, cpus = [turn.wall_s for turn in turns], [turn.cpu_s for turn in turns]
    wall, cpu = (f"{statistics.median(times):6.2f} s (best {min(times):.2f})" for times in (walls, cpus))
    print(f"  {name:5} wall {wall}  cpu {cpu}", flush=True)


def time_sides(positions: int, dtype: torch.dtype, rounds: int) -> dict[str, float | None]:
    """Speeds beside both peers, and our share of the rate of matrix products."""
    inputs = make_inputs(positions, dtype)
    found = run_pass(run_ours, *inputs)  # warms up, too
    metrics: dict[str, float | None] = {}
    operations = 8 * positions * VOCABULARY * HIDDEN
    for name, turns in (("trl", rounds), ("naive", 1)):
        peer = find_head(name)
        if peer is None:
            metrics |= {f"speed_vs_{name}": None, f"cpu_speed_vs_{name}": None}
            print(f"  {name}: not installed", flush=True)
            continue
        tolerance = (
            1e-4 if dtype == torch.float32 else 0.1
        )  # the peers round bfloat16 logits before the softmax
        for what, one, two in zip(
            ("log-probs", "entropy", "d hidden", "d weight"), found, run_pass(peer, *inputs), strict=True
        ):
            difference = float((one.float() - two.float()).norm() / one.float().norm())
            assert difference < tolerance, (name, what, difference)
        ours, theirs = take_turns(
            lambda: run_pass(run_ours, *inputs), lambda head=peer: run_pass(head, *inputs), rounds=turns
        )
        print_turns("ours", ours)
        print_turns(name, theirs)
        walls = compute_ratio([turn.wall_s for turn in ours], [turn.wall_s for turn in theirs])
        cpus = compute_ratio([turn.cpu_s for turn in ours], [turn.cpu_s for turn in theirs])
        print(f"  {name} takes {walls} times our wall time, {cpus} times our CPU time", flush=True)
        metrics |= {f"speed_vs_{name}": round(walls.median, 3), f"cpu_speed_vs_{name}": round(cpus.median, 3)}
        metrics["gemm_share"] = round(
            operations / min(turn.wall_s for turn in ours) / measure_gemm_rate(2048), 3
        )
    return metrics


def measure_row(
    dtype_name: str, *, positions: int, timed_positions: int, rounds: int, threads: int
) -> dict[str, float | None]:
    """All metrics of one dtype."""
    dtype: torch.dtype = getattr(torch, dtype_name)
    print(f"{dtype_name}: errors over {ERROR_POSITIONS} positions", flush=True)
    errors = compute_errors(dtype)
    print(f"{dtype_name}: memory of {positions} positions", flush=True)
    extra = {name: measure_apart(name, positions, dtype_name, threads) for name in ("ours", "trl", "naive")}
    print(
        "  "
        + "  ".join(
            f"{name} {'-' if size is None else f'{size / 2**20:.0f} MiB'}" for name, size in extra.items()
        ),
        flush=True,
    )
    print(f"{dtype_name}: time of {timed_positions} positions", flush=True)
    metrics = time_sides(timed_positions, dtype, rounds)
    ours, trl, naive = (extra[name] for name in ("ours", "trl", "naive"))
    return {
        **metrics,
        "extra_memory_mib": None if ours is None else round(ours / 2**20, 1),
        "extra_memory_vs_naive": None if ours is None or naive is None else round(ours / naive, 4),
        "extra_memory_vs_trl": None if ours is None or trl is None else round(ours / trl, 4),
        "max_error": errors["ours"],
        "error_vs_trl": errors["ours"] / errors["trl"] if "trl" in errors else None,
    }


def main() -> int:
    parser = make_parser(__doc__, quick="times 512 positions in one round")
    parser.add_argument("--positions", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3, help="turns A B B A beside TRL")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help=argparse.SUPPRESS)
    parser.add_argument("--memory-of", choices=("ours", "trl", "naive"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.memory_of is not None:
        print(measure_extra_memory(options.memory_of, options.positions, getattr(torch, options.dtype)))
        return 0
    timed = min(512, options.positions) if options.quick else options.positions
    rounds = 1 if options.quick else options.rounds
    metrics: dict[str, float | str | None] = {
        "positions": timed,
        "gemm_gflops": round(measure_gemm_rate(2048) / 1e9, 1),
    }
    for dtype, prefix in (("float32", ""), ("bfloat16", "bfloat16_")):
        row = measure_row(
            dtype, positions=options.positions, timed_positions=timed, rounds=rounds, threads=options.threads
        )
        metrics |= {f"{prefix}{name}": value for name, value in row.items()}
    peer = "TRL's ChunkedLogProbFunction as GRPOTrainer calls it; log_softmax of all logits"
    return finish("logprob_head", peer=peer, metrics=metrics, targets=TARGETS)


if __name__ == "__main__":
    sys.exit(main())
