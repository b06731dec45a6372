"""Memory of each rank while a sharded model is loaded, trained, saved and copied for a later save, on 1, 2
and 4 ranks (gloo, CPU).

    python -m benchmarks.ranks [--quick] [--ranks 1 2 4]

A random Llama whose weights dominate (353 MB in float32; --quick: 53 MB), tied, two steps of SFT with AdamW
on one short row a rank. Phases: load (meta device, own slices of the files), train (forward, backward,
AdamW), export (Hugging Face directory and optimizer state, while training waits), capture (the same copied to
memory, and written from there), resume (read back). Measured is VmHWM of /proc/self/status, reset before each
phase by writing 5 to /proc/self/clear_refs: the peak of what is resident, libraries and pages of mapped files
included. "own" is the peak less what was resident after the same phases with a model of 0.4 MB, which loads
every library: what sharding is about. max_over_min is the largest ratio of own between ranks of one
run; most_over_fewer_ranks the largest ratio, of any phase, of own to that with the next smaller number of
ranks, so below 1 it falls everywhere. Targets: max_over_min <= 1.15, most_over_fewer_ranks <= 0.99.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.harness import finish, make_parser, read_status_bytes, restart_peak

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[1]
PHASES = {
    "open_trainer": "load",
    "forward_backward": "train",
    "optim_step": "train",
    "save": "export",
    "capture": "capture",
    "load": "resume",
}
SIZES = {False: (768, 2048, 12, 4096), True: (512, 1408, 4, 1024)}  # hidden, feed-forward, layers, tokens
SMALL = (64, 128, 1, 256)
TARGETS = {"max_over_min": "<= 1.15", "most_over_fewer_ranks": "<= 0.99"}
MB = 1e6


# --- one rank -----------------------------------------------------------------------------------------------


class Peaks:
    """The highest resident memory of each phase, in bytes."""

    def __init__(self) -> None:
        self.before = 0  # resident, in bytes, when the last model was opened
        self.by_phase: dict[str, int] = {}

    def measure(self, phase: str, work: Callable[..., T]) -> Callable[..., T]:
        """`work`, measured."""

        def measured(*args: Any, **kwargs: Any) -> T:
            if phase == "load":
                self.before, self.by_phase = read_status_bytes("VmRSS"), {}
            restart_peak()
            try:
                return work(*args, **kwargs)
            finally:
                self.by_phase[phase] = max(self.by_phase.get(phase, 0), read_status_bytes("VmHWM"))

        return measured


def run_rank(model: str, folder: Path) -> None:
    """One rank's program: rank 0 drives, all measure."""
    import trio

    from rollouts.backends import fsdp
    from rollouts.backends import open as opening
    from rollouts.backends.captures import HeldPart
    from rollouts.backends.open import open_trainer
    from rollouts.backends.trainer import Trainer
    from rollouts.ranks.launch import read_launch
    from rollouts.ranks.meet import open_ranks

    async def main() -> None:
        launch = read_launch(os.environ)
        async with open_ranks(launch) as connected:
            peaks = Peaks()
            for module in (opening, fsdp):  # the first opens rank 0's trainer, the second the others'
                vars(module)["open_trainer"] = peaks.measure(PHASES["open_trainer"], open_trainer)
            for name, phase in PHASES.items():
                if hasattr(Trainer, name):
                    setattr(Trainer, name, peaks.measure(phase, getattr(Trainer, name)))
            HeldPart.write = peaks.measure(PHASES["capture"], HeldPart.write)
            if launch.rank == 0:
                for name in ("small", "large"):
                    await drive(connected, Path(model) / name, folder / name)
            else:
                await fsdp.serve_backends(connected.channel, connected.ranks)
            found = {"before": peaks.before, **peaks.by_phase}
            (folder / f"rank-{launch.rank}.json").write_text(json.dumps(found))

    trio.run(main)


async def drive(connected: Any, model: Path, folder: Path) -> None:
    import numpy as np

    from rollouts.backends.fsdp import open_fsdp_backend
    from rollouts.config.tables import OptimConfig
    from rollouts.types import LossSpec, RolloutBatch

    ranks = connected.ranks
    rng = np.random.default_rng(0)
    tokens = tuple(rng.integers(3, 250, 32) for _ in range(ranks.world_size))
    masks = tuple(np.arange(len(row)) > 8 for row in tokens)
    batch = RolloutBatch(tokens=tokens, loss_masks=masks)
    async with open_fsdp_backend(
        model,
        channel=connected.channel,
        ranks=ranks,
        optim=OptimConfig(),
        total_steps=2,
        micro_batch_tokens=64,
    ) as backend:
        for _ in range(2):
            await backend.forward_backward(batch, LossSpec("sft")).result()
            await backend.optim_step().result()
        await backend.save(folder / "checkpoint").result()
        write = await backend.capture().result()
        assert write is not None, "no memory for a copy"
        (folder / "beside").mkdir()
        await write(folder / "beside")
        await backend.load(folder / "checkpoint").result()


# --- all ----------------------------------------------------------------------------------------------------


def make_models(path: Path, *, quick: bool) -> int:
    """Writes the model, and a small one; bytes of the large one's weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from rollouts.models.export import save_hf_model

    size = 0
    for name, (hidden, feed_forward, layers, tokens) in {"small": SMALL, "large": SIZES[quick]}.items():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=tokens,
            hidden_size=hidden,
            intermediate_size=feed_forward,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 32,
            num_key_value_heads=hidden // 32,
            tie_word_embeddings=True,
        )
        model = LlamaForCausalLM(config)
        save_hf_model(model, path / name)
        size = sum(parameter.nbytes for parameter in model.parameters())
    return size


def run(ranks: int, model: Path, folder: Path) -> list[dict[str, int]]:
    """Peaks of every rank, by phase."""
    from rollouts.ranks.launch import torchrun_command

    folder.mkdir()
    command = torchrun_command(ranks, ["-m", "benchmarks.ranks", "--rank-of", str(model), str(folder)])
    environ = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MALLOC_MMAP_THRESHOLD_": "262144",
    }  # what is freed goes back to the system at once
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=900, check=False
    )
    if done.returncode:
        raise SystemExit(f"{ranks} ranks ended with {done.returncode}\n{done.stderr[:8000]}")
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]


def main() -> int:
    parser = make_parser(__doc__, quick="a model of 53 MB")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rank-of", nargs=2, metavar=("MODEL", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of:
        run_rank(arguments.rank_of[0], Path(arguments.rank_of[1]))
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        weights = make_models(folder / "model", quick=arguments.quick)
        found = {ranks: run(ranks, folder / "model", folder / f"ranks-{ranks}") for ranks in arguments.ranks}
    print(
        f"weights: {weights / MB:.0f} MB in float32; resident before the model:"
        f" {found[arguments.ranks[0]][0]['before'] / MB:.0f} MB a rank"
    )
    return finish("ranks", peer="one rank", metrics=compare_ranks(found, weights), targets=TARGETS)


def compare_ranks(found: dict[int, list[dict[str, int]]], weights: int) -> dict[str, float | None]:
    """Own memory of the fullest rank by phase and number of ranks, and the two ratios; printed as a table."""
    print("ranks  phase    peak, highest  own, highest  own, lowest  max/min")
    metrics: dict[str, float | None] = {"weights_mb": round(weights / MB, 1)}
    between_ranks: list[float] = []
    between_runs: list[float] = []
    fewer: dict[str, int] = {}  # by phase, of the run before
    for ranks, peaks in found.items():
        for phase in dict.fromkeys(PHASES.values()):
            own = [peak[phase] - peak["before"] for peak in peaks]
            between_ranks.append(max(own) / min(own))
            if phase in fewer:
                between_runs.append(max(own) / fewer[phase])
            fewer[phase] = max(own)
            metrics[f"{phase}_mb_{ranks}"] = round(max(own) / MB, 1)
            print(
                f"{ranks:>5}  {phase:<7} {max(peak[phase] for peak in peaks) / MB:>11.0f} MB"
                f" {max(own) / MB:>10.0f} MB {min(own) / MB:>9.0f} MB {between_ranks[-1]:>8.2f}"
            )
    return metrics | {
        "max_over_min": round(max(between_ranks), 3),
        "most_over_fewer_ranks": round(max(between_runs), 3) if between_runs else None,
    }


if __name__ == "__main__":
    sys.exit(main())
