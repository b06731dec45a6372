"""Memory of each rank while a sharded model is loaded, trained, saved and copied for a later save, on 1, 2
and 4 ranks (gloo, CPU).

    python -m benchmarks.ranks [--quick] [--ranks 1 2 4] [--bar 1.15]

A random Llama whose weights dominate (353 MB in float32; --quick: 53 MB), tied, two steps of SFT with AdamW
on one short row a rank. Phases: load (meta device, own slices of the files), train (forward, backward,
AdamW), export (Hugging Face directory and optimizer state, while training waits), capture (the same copied to
memory, and written from there), resume (read back). Measured is VmHWM of /proc/self/status, reset before each
phase by writing 5 to /proc/self/clear_refs: the peak of what is resident, libraries and pages of mapped files
included. "own" is the peak less what was resident after the same phases with a model of 0.4 MB, which loads
every library: what sharding is about. max/min is over the ranks of one run, of own. The last line is JSON;
the exit code says whether all max/min are below the bar and own memory falls with the number of ranks.
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
MB = 1e6


# --- one rank -----------------------------------------------------------------------------------------------


def read_status(field: str) -> int:
    """Bytes of a field of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {field}; this benchmark needs Linux")


class Peaks:
    """The highest resident memory of each phase, in bytes."""

    def __init__(self) -> None:
        self.before = 0  # resident, in bytes, when the last model was opened
        self.by_phase: dict[str, int] = {}

    def measure(self, phase: str, work: Callable[..., T]) -> Callable[..., T]:
        """`work`, measured."""

        def measured(*args: Any, **kwargs: Any) -> T:
            if phase == "load":
                self.before, self.by_phase = read_status("VmRSS"), {}
            Path("/proc/self/clear_refs").write_text("5")
            try:
                return work(*args, **kwargs)
            finally:
                self.by_phase[phase] = max(self.by_phase.get(phase, 0), read_status("VmHWM"))

        return measured


def run_rank(model: str, folder: Path) -> None:
    """One rank's program: rank 0 drives, all measure."""
    import trio

    from rollouts.backends import fsdp
    from rollouts.backends.captures import HeldPart
    from rollouts.backends.trainer import Trainer
    from rollouts.ranks.launch import read_launch
    from rollouts.ranks.meet import open_ranks

    async def main() -> None:
        launch = read_launch(os.environ)
        async with open_ranks(launch) as connected:
            peaks = Peaks()
            fsdp.open_trainer = peaks.measure(PHASES["open_trainer"], fsdp.open_trainer)
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
    command = torchrun_command(
        ranks, ["-m", "benchmarks.ranks", "--rank-of", str(model), str(folder)], max_restarts=0
    )
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--bar", type=float, default=1.15)
    parser.add_argument("--rank-of", nargs=2, metavar=("MODEL", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        run_rank(args.rank_of[0], Path(args.rank_of[1]))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        weights = make_models(folder / "model", quick=args.quick)
        found = {ranks: run(ranks, folder / "model", folder / f"ranks-{ranks}") for ranks in args.ranks}
    print(
        f"weights: {weights / MB:.0f} MB in float32; resident before the model:"
        f" {found[args.ranks[0]][0]['before'] / MB:.0f} MB a rank"
    )
    print(
        f"{'ranks':>5}  {'phase':<7} {'peak, highest':>14} {'own, highest':>13} {'own, lowest':>12}"
        f" {'max/min':>8}"
    )
    rows: list[dict[str, Any]] = []
    for ranks, peaks in found.items():
        for phase in dict.fromkeys(PHASES.values()):
            own = [peak[phase] - peak["before"] for peak in peaks]
            ratio = max(own) / min(own)
            rows.append(
                {
                    "ranks": ranks,
                    "phase": phase,
                    "own_mb": [round(value / MB, 1) for value in own],
                    "max_over_min": round(ratio, 3),
                }
            )
            highest = max(peak[phase] for peak in peaks)
            print(
                f"{ranks:>5}  {phase:<7} {highest / MB:>11.0f} MB {max(own) / MB:>10.0f} MB"
                f" {min(own) / MB:>9.0f} MB {ratio:>8.2f}"
            )
    highest_own = {(row["ranks"], row["phase"]): max(row["own_mb"]) for row in rows}
    falls = all(
        highest_own[more, phase] < highest_own[fewer, phase]
        for fewer, more in zip(args.ranks, args.ranks[1:], strict=False)
        for phase in dict.fromkeys(PHASES.values())
    )
    even = all(row["max_over_min"] <= args.bar for row in rows)
    print(json.dumps({"weights_mb": round(weights / MB, 1), "rows": rows, "even": even, "falls": falls}))
    sys.exit(0 if even and falls else 1)


if __name__ == "__main__":
    main()
