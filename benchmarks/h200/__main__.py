"""The suite for one large GPU: training, the head, decoding, weight sync and a whole step at the size of a
1.5B model, in at most ten minutes.

    python -m benchmarks.h200 [--parts NAME ...] [--budget-s 540] [--tiny]

Random weights, made on the device; nothing is downloaded and 3 GB are never written to disk. Parts run one
after the other: `ceilings` measures what the machine gives (a product of 8192³ in bf16, a copy), then g1 to
g6. Every number is printed when it is known and every part ends with a line of JSON, so a run that is cut off
has said what it measured; the last line is the whole. A part that fails is reported with its error and the
others go on. Exit status 1 if a part failed, was not begun for want of time, or missed a target.

Times are CUDA's events or a clock read after the device has finished, without the first call of anything. MFU
counts 6 FLOPs a weight and token and causal attention (6 · layers · heads · head_dim · T), useful tokens
only, against 989 TFLOP/s. Targets are those of an H200 (141 GB); on a device of less than 100 GiB
micro-batches hold 8,192 tokens, not 16,384. Peers: transformers (padded rows with whole logits; `generate`),
and for the head TRL's chunked function, liger-kernel and cut-cross-entropy, each where it is installed. TRL's
whole step is compared on a CPU, by benchmarks/train_step.py and benchmarks/e2e_reward.py.

`--tiny`: every part at the size of a test on the CPU, in less than a minute; it shows that the parts run, its
numbers mean nothing and no target is applied.

On a machine that has torch 2.11 or newer for its GPU, transformers 5.17 or newer, numpy, safetensors and
attrs, but no index of packages, fetch the rest where there is one, and take it along (for Python 3.12):

    pip download --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux_2_17_x86_64 -d
    wheels \\
        trio outcome sniffio sortedcontainers idna msgspec pydantic pydantic-core==VERSION annotated-types
        typing-inspection
    python3 -m pip install --no-index --no-deps --target /tmp/site wheels/*.whl
    PYTHONPATH=/tmp/site:. python3 -m benchmarks.h200

where VERSION is what the downloaded pydantic asks for.
"""

import logging
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial

import torch
import trio

from benchmarks.h200 import colocated, generating, head, training
from benchmarks.h200.place import Place
from benchmarks.h200.report import Part, Report, run_part
from benchmarks.h200.targets import TARGETS
from benchmarks.harness import finish, make_parser

PARTS = (
    Part("ceilings", "what the machine gives", 10, training.CEILINGS, training.measure_ceilings),
    Part(
        "g1",
        "a training step of a 1.5B model, packed rows of 1.5k tokens on average",
        60,
        training.TRAIN,
        training.measure_train,
    ),
    Part(
        "g2",
        "log-probs and entropy of 32,768 positions over 151,936 tokens, forward and backward",
        15,
        head.METRICS,
        head.measure_head,
    ),
    Part("g3", "decoding 256 rows at 1k tokens of context", 40, generating.DECODE, generating.measure_decode),
    Part(
        "g4",
        "3 GB of weights from the trainer into the embedded engine",
        15,
        generating.SYNC,
        generating.measure_sync,
    ),
    Part(
        "g5",
        "eight answers of 256 tokens to each prompt of 1,024",
        40,
        training.SHARING,
        training.measure_sharing,
    ),
    Part(
        "g1b",
        "one row of 16,384 tokens in a 0.6B model, with recomputation",
        30,
        training.LONG,
        training.measure_long,
    ),
    Part(
        "g6",
        "a whole step of GRPO, 32 x 8 answers of at most 512 tokens",
        60,
        colocated.METRICS,
        colocated.measure_step,
    ),
    Part("g1_recomputed", "g1 with recomputation", 50, training.RECOMPUTED, training.measure_recomputed),
)
PACKAGES = ("triton", "liger-kernel", "cut-cross-entropy")


async def run_parts(
    parts: Sequence[Part], place: Place, targets: Mapping[str, str], *, budget_s: float
) -> tuple[list[Report], dict[str, str]]:
    """Their reports, and of those that failed why."""
    began, reports = time.perf_counter(), []
    failures: dict[str, str] = {}
    for part in parts:
        report, failure = await run_part(
            part, place, targets, left_s=budget_s - (time.perf_counter() - began)
        )
        reports.append(report)
        failures |= {part.name: failure} if failure else {}
    return reports, failures


def main() -> int:
    parser = make_parser(__doc__)
    names = [part.name for part in PARTS]
    parser.add_argument(
        "--parts", nargs="+", choices=names, default=names, metavar="NAME", help=f"of {', '.join(names)}; all"
    )
    parser.add_argument(
        "--budget-s", type=float, default=540.0, help="no part begins that would end later by its estimate"
    )
    parser.add_argument("--tiny", action="store_true", help="at the size of a test, on the CPU")
    arguments = parser.parse_args()
    if not arguments.tiny and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device; --tiny runs every part at the size of a test on the CPU")
    logging.basicConfig(level=logging.WARNING)
    place = Place("cpu" if arguments.tiny else "cuda", tiny=arguments.tiny)
    chosen = [part for part in PARTS if part.name in arguments.parts]
    reported = {name for part in chosen for name in part.metrics}
    targets = {} if place.tiny else {name: target for name, target in TARGETS.items() if name in reported}
    if place.tiny:
        print("tiny: every size is that of a test; the numbers mean nothing, and no target is applied")
    with tempfile.TemporaryDirectory(prefix="h200-") as cache:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{cache}/inductor")
        os.environ.setdefault("TRITON_CACHE_DIR", f"{cache}/triton")
        reports, failures = trio.run(partial(run_parts, chosen, place, targets, budget_s=arguments.budget_s))
    missed = finish(
        "h200_tiny" if place.tiny else "h200",
        peer="transformers; TRL, liger-kernel and cut-cross-entropy for the head where they are installed",
        metrics={name: value for report in reports for name, value in report.metrics.items()},
        targets=targets,
        packages=PACKAGES,
        unmeasured={name: why for report in reports for name, why in report.unmeasured.items()},
        failures=failures,
    )
    return 1 if failures else missed


if __name__ == "__main__":
    sys.exit(main())
