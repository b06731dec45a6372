"""Log-probs and entropy of a linear head over a large vocabulary, forward and backward: time, memory, error;
ours and whoever is installed.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.h200.place import (
    GIB,
    NO_CEILINGS,
    NO_PEAK,
    Place,
    open_thread,
    read_peak_gib,
    reset_peak,
    time_job,
)
from benchmarks.h200.report import Report
from rollouts.losses.logprobs import linear_logprobs

Head = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]
"""hidden [N, H], weight [V, H], targets [N] to log-probs [N] and entropy [N], where it has one."""

PEERS = ("trl", "liger", "cce")
ROWS_CHECKED = 256
LARGEST_ERROR = 0.05  # nats; bfloat16 rounds logits near 1 to 1/256, and peers round them
METRICS = (
    "g2_ms", "g2_extra_gib", "g2_error", "g2_of_floor", "g2_bf16_weight_ms", "g2_bf16_weight_extra_gib",
    "g2_naive_gib", "g2_memory_against_naive",
    *(f"g2_{peer}_{what}" for peer in PEERS for what in ("ms", "extra_gib", "ratio")),
)  # fmt: skip


class Cost(NamedTuple):
    """What forward and backward of a head cost."""

    ms: float
    extra_gib: float | None  # beyond the inputs, gradients included; None on a CPU
    error: float  # largest, of the log-probs checked, against float32; nats


async def measure_head(place: Place, report: Report) -> None:
    """As training calls it: hidden states in half precision, the weight in float32; then with a weight in
    half precision, beside the peers.
    """
    count, vocab, hidden_size = (64, 515, 32) if place.tiny else (32768, 151936, 1536)
    floor_flops = 2.0 * 4 * count * vocab * hidden_size  # logits, the two gradients, and the logits again

    def make(weight_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(0)
        hidden = torch.randn(count, hidden_size, device=place.device, dtype=place.dtype)
        weight = (
            (torch.randn(vocab, hidden_size, device=place.device) * 0.02).to(place.dtype).to(weight_dtype)
        )
        return (
            hidden.requires_grad_(),
            weight.requires_grad_(),
            torch.randint(0, vocab, (count,), device=place.device),
        )

    async with open_thread(place) as thread:
        inputs = await thread.submit(lambda: make(torch.float32))
        cost = await thread.submit(lambda: measure_cost(run_ours, inputs, place))
        add_cost(report, "g2", cost)
        report.add("g2_error", cost.error)
        of_floor = None if place.gemm_flops is None else floor_flops / place.gemm_flops / (cost.ms / 1000)
        report.add_or_leave_out("g2_of_floor", of_floor, NO_CEILINGS)
        naive_gib = await thread.submit(lambda: measure_naive(inputs, place))
        ratio = None if cost.extra_gib is None or naive_gib is None else naive_gib / cost.extra_gib
        report.add_or_leave_out("g2_naive_gib", naive_gib, NO_PEAK)
        report.add_or_leave_out("g2_memory_against_naive", ratio, NO_PEAK)
        del inputs
        inputs = await thread.submit(lambda: make(place.dtype))
        ours = await thread.submit(lambda: measure_cost(run_ours, inputs, place))
        add_cost(report, "g2_bf16_weight", ours)
        for peer in PEERS:
            names = [f"g2_{peer}_{what}" for what in ("ms", "extra_gib", "ratio")]
            why = ""
            try:
                theirs = await thread.submit(lambda peer=peer: measure_cost(find_peer(peer), inputs, place))
            except ImportError as error:
                why = f"not installed ({error})"
            # a peer that does not run here, or runs out of memory, is no failure of ours; it is said
            except Exception as error:
                why = f"it does not run here ({type(error).__name__}: {str(error)[:100]})"
            else:
                add_cost(report, f"g2_{peer}", theirs)
                report.add(names[2], theirs.ms / ours.ms)
            for name in names if why else ():
                report.leave_out(name, f"{peer}: {why}")


def measure_naive(inputs: tuple[Tensor, Tensor, Tensor], place: Place) -> float | None:
    """Extra GiB of whole logits and autograd: measured with an eighth of the positions, and what grows with
    them counted eight times.
    """
    hidden, weight, targets = inputs
    part = hidden.detach()[: len(hidden) // 8].requires_grad_()

    def naive(states: Tensor, matrix: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        log_probs = (states @ matrix.to(states.dtype).T).float().log_softmax(-1)
        return log_probs.gather(-1, wanted[:, None])[:, 0], -(log_probs.exp() * log_probs).sum(-1)

    found = measure_cost(naive, (part, weight, targets[: len(part)]), place).extra_gib
    fixed = weight.numel() * weight.element_size() / GIB  # the weight's gradient
    return None if found is None else 8 * (found - fixed) + fixed


def run_ours(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
    """As training calls it."""
    found = linear_logprobs(hidden, weight, targets)
    return found.log_probs, found.entropy


def find_peer(name: str) -> Head:
    """Raises ImportError if it is not installed."""
    if name == "trl":
        from trl.kernels import ChunkedLogProbFunction  # pyright: ignore[reportMissingImports]
        from trl.trainer import utils  # pyright: ignore[reportMissingImports]

        chunk = utils._CHUNKED_LOGPROB_CHUNK_SIZE
        return lambda hidden, weight, targets: ChunkedLogProbFunction.apply(
            hidden, weight, None, targets, 1.0, chunk, None, 1.0, ("entropy",)
        )[:2]
    if name == "liger":  # no entropy, and a mean
        from liger_kernel.transformers.functional import (
            liger_fused_linear_cross_entropy,
        )  # pyright: ignore[reportMissingImports]

        return lambda hidden, weight, targets: (
            -liger_fused_linear_cross_entropy(hidden, weight, targets, reduction="sum")[None],
            None,
        )
    from cut_cross_entropy import linear_cross_entropy  # pyright: ignore[reportMissingImports]

    return lambda hidden, weight, targets: (
        -linear_cross_entropy(hidden, weight, targets, reduction="none"),
        None,
    )


def measure_cost(head: Head, inputs: tuple[Tensor, Tensor, Tensor], place: Place) -> Cost:
    """On the device thread. The error is asserted before anything is timed; of a head that only gives a sum
    there is none.
    """
    hidden, weight, targets = inputs
    checked = slice(0, ROWS_CHECKED)
    with torch.no_grad():
        logits = hidden[checked].float() @ weight.float().T
        wanted = logits.log_softmax(-1).gather(-1, targets[checked, None])[:, 0]
        del logits

    def run() -> Tensor:
        hidden.grad = weight.grad = None
        log_probs, _ = head(hidden, weight, targets)
        (log_probs.sum() if log_probs.numel() == 1 else (log_probs * 0.5).sum()).backward()
        return log_probs.detach()

    found = run()
    error = (
        0.0
        if found.numel() == 1 and len(targets) > 1
        else float((found[checked].float() - wanted).abs().max())
    )
    assert error <= LARGEST_ERROR, f"log-probs differ by {error:.1e} nats from float32's"
    del found
    run()  # a second warm-up: what is tuned is tuned now
    hidden.grad = weight.grad = None
    before = reset_peak(place)
    run()
    peak = read_peak_gib(place)
    seconds = time_job(run, place, repeats=3, warm_up=0)
    hidden.grad = weight.grad = None
    return Cost(seconds * 1000, None if peak is None else peak - before / GIB, error)


def add_cost(report: Report, prefix: str, cost: Cost) -> None:
    report.add(f"{prefix}_ms", cost.ms)
    report.add_or_leave_out(f"{prefix}_extra_gib", cost.extra_gib, NO_PEAK)
