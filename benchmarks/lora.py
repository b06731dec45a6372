"""LoRA beside full fine-tuning, and beside TRL's GRPOTrainer with peft: the RL task of demo.toml on a CPU.

    python -m benchmarks.lora [--quick] [--rounds 3] [--steps 4] [--seeds 2]

SmolLM2-135M-Instruct, float32, 16 prompts x 16 samples, at most 6 new tokens; rank 16, alpha 32, the four
projections of each attention, thirty times the learning rate of full fine-tuning: as docs/lora.md trains.

Ours, full against LoRA: forward_backward and optim_step on one batch of the demo's prompts, each side a
process of its own, in turns A B B A; then one snapshot of what trains, which engines load. Memory is *above
the base*: the most that was resident of the process since its backend opened (VmHWM, restarted then), less
what was resident then (VmRSS, heap trimmed) without the adapter. So the base model and the libraries are
left out, and the adapter, gradients, AdamW's moments and activations are not. Each variant is a process of
its own: the base in float32, bfloat16 and 8 bits, and, `_checkpointed`, with gradient checkpointing.

Beside TRL: first our SFT of the demo makes the model that both start from. Then whole runs of train.py and of
GRPOTrainer.train() with the same settings and prompts take turns as in e2e_reward, each a program of its own;
a step is the median of all but a run's first, memory the peak of the process tree, base and libraries
included. TRL's micro-batch has --micro-batch-rows rows, ours as many tokens of 128 a row.

Metrics, ours: `step_ratio`, full / LoRA in wall seconds, and `cpu_ratio`; `memory_ratio` and
`memory_ratio_checkpointed`, LoRA / full above the base; `sync_bytes_ratio` and `sync_time_ratio`, LoRA / full
of a snapshot. Beside TRL: `trl_speed`, its step / ours; `trl_memory`, ours / its; and e2e_reward's others.
Targets: trl_speed >= 2.5, trl_memory <= 0.5, memory_ratio <= 0.5, sync_bytes_ratio <= 0.02. --quick: one
round, no checkpointing, two steps of one seed with 4 prompts of e2e_reward's `sums` from the model as it is.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.e2e.children import Child, open_child
from benchmarks.e2e.runs import RunResult, Setting
from benchmarks.e2e.step_batch import StepBatch
from benchmarks.e2e.tasks import DEMO, make_rows
from benchmarks.e2e_reward import compare, describe, describe_side, run_pair
from benchmarks.harness import compute_ratio, finish, make_parser
from rollouts.data.chat import tokenize_prompt
from rollouts.models.load import load_tokenizer, resolve_model
from rollouts.types import FloatArray, IntArray

PEER = "our full fine-tuning; trl GRPOTrainer with peft"
TARGETS = {
    "trl_speed": ">= 2.5",
    "trl_memory": "<= 0.5",
    "memory_ratio": "<= 0.5",
    "sync_bytes_ratio": "<= 0.02",
}
PROMPTS, SAMPLES, NEW_TOKENS = 16, 16, 6
FULL_LR = 2e-5
MICRO_BATCH_TOKENS = 8192
LORA: Mapping[str, Any] = {
    "rank": 16,
    "alpha": 32,
    "targets": ["q_proj", "k_proj", "v_proj", "o_proj"],
}
SNAPSHOTS = 3  # of each side; the first does not count


# --- ours, full against LoRA --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Variant:
    """What a child trains."""

    base: str | None = None  # how an adapter's base is kept; None: the whole model trains
    checkpointed: bool = False

    @property
    def flags(self) -> list[str]:
        lora = [] if self.base is None else ["--lora", json.dumps({**LORA, "base": self.base})]
        return [*lora, *(["--gradient-checkpointing"] if self.checkpointed else [])]


VARIANTS = {
    "full": Variant(),
    "lora": Variant("float32"),
    "lora_bfloat16": Variant("bfloat16"),
    "lora_8bit": Variant("8bit"),
    "full_checkpointed": Variant(checkpointed=True),
    "lora_checkpointed": Variant("float32", checkpointed=True),
}


def make_demo_batch(model: Path) -> StepBatch:
    """The demo's prompts, of one length; each response is a number near the answer and the end of a turn."""
    tokenizer, draw = load_tokenizer(model), np.random.default_rng(0)
    end: Any = tokenizer.eos_token_id
    found = [
        (tokenize_prompt(row["prompt"], tokenizer), int(row["answer"]))
        for row in make_rows("addition", count=2 * PROMPTS, seed=0)
    ]
    length = statistics.mode(len(tokens) for tokens, _ in found)
    groups = [(tokens, answer) for tokens, answer in found if len(tokens) == length][:PROMPTS]
    assert len(groups) == PROMPTS, "too few prompts of one length"
    prompts: list[IntArray] = []
    responses: list[list[int]] = []
    for tokens, answer in groups:
        for near in answer + draw.integers(-5, 6, SAMPLES):
            prompts.append(tokens)
            responses.append([*tokenizer.encode(str(near)), end])
    lengths = np.array([len(response) for response in responses])
    padded = [response + [0] * (int(lengths.max()) - len(response)) for response in responses]
    advantages: FloatArray = draw.standard_normal(len(padded)).astype(np.float32)
    old = np.zeros((len(padded), int(lengths.max())), np.float32)
    return StepBatch(np.stack(prompts), lengths, np.array(padded), advantages, old)


def open_variant(stack: ExitStack, name: str, arguments: argparse.Namespace, folder: Path) -> Child:
    common = ["--model", str(resolve_model(arguments.model)), "--batch", str(folder / "batch.npz")]
    common += ["--threads", str(arguments.threads), "--micro-batch-tokens", str(MICRO_BATCH_TOKENS)]
    flags = ["--share-prefix", *VARIANTS[name].flags]
    return stack.enter_context(
        open_child("benchmarks.e2e.step_ours", [*common, *flags], log=folder / f"{name}.log")
    )


def take_steps(children: Mapping[str, Child], order: Sequence[str], rounds: int) -> dict[str, list[Any]]:
    """Turns by side, after one of each that does not count."""
    turns: dict[str, list[Any]] = {name: [] for name in children}
    for child in children.values():
        child.take_turn(do="step")
    for _ in range(rounds):
        for name in order:
            turns[name].append(children[name].take_turn(do="step"))
    return turns


def measure_memory(name: str, child: Child) -> dict[str, float]:
    """MiB, after steps: what the base takes with the libraries, and the peak above it."""
    memory = child.ask(do="memory")
    above = memory["peak_bytes"] - memory["base_bytes"]
    print(f"{name}: {memory['base_bytes'] >> 20} MiB, peak {above >> 20} above it", flush=True)
    return {
        f"{name}_base_mib": round(memory["base_bytes"] / 2**20),
        f"{name}_above_mib": round(above / 2**20),
    }


def measure_snapshots(name: str, child: Child, folder: Path) -> dict[str, float]:
    """Of one weight sync."""
    made = [child.ask(do="snapshot", path=str(folder / f"{name}-v{n}")) for n in range(SNAPSHOTS)]
    return {
        f"{name}_sync_mb": round(made[0]["weight_bytes"] / 1e6, 2),
        f"{name}_sync_s": round(statistics.median(one["wall_s"] for one in made[1:]), 3),
    }


def measure_ours(arguments: argparse.Namespace, folder: Path) -> dict[str, float | str | None]:
    make_demo_batch(resolve_model(arguments.model)).save(folder / "batch.npz")
    found: dict[str, float] = {}
    with ExitStack() as stack:
        children = {name: open_variant(stack, name, arguments, folder) for name in ("full", "lora")}
        children["lora"].ask(do="old_log_probs")
        turns = take_steps(children, ["full", "lora", "lora", "full"], arguments.rounds)
        for name, child in children.items():
            found |= measure_memory(name, child)
            found |= measure_snapshots(name, child, folder)
    times = [[turn.wall_s for turn in turns[name]] for name in ("lora", "full")]
    cpu = [[turn.cpu_s for turn in turns[name]] for name in ("lora", "full")]
    print(f"full / LoRA: {compute_ratio(*times)} in wall seconds, {compute_ratio(*cpu)} in the CPU's")
    for name in [*VARIANTS][2 : 4 if arguments.quick else None]:
        with ExitStack() as stack:
            child = open_variant(stack, name, arguments, folder)
            others = take_steps({name: child}, [name], 1)
            found |= measure_memory(name, child)
            found[f"{name}_step_s"] = round(others[name][0].wall_s, 2)
    ratios = {
        "memory_ratio": ("lora_above_mib", "full_above_mib"),
        "memory_ratio_checkpointed": ("lora_checkpointed_above_mib", "full_checkpointed_above_mib"),
        "sync_bytes_ratio": ("lora_sync_mb", "full_sync_mb"),
        "sync_time_ratio": ("lora_sync_s", "full_sync_s"),
    }
    return {
        "step_ratio": round(compute_ratio(*times).median, 3),
        "cpu_ratio": round(compute_ratio(*cpu).median, 3),
        **{
            name: round(found[own] / found[other], 4) for name, (own, other) in ratios.items() if own in found
        },
        **{
            f"{name}_step_s": round(statistics.median(one), 2)
            for name, one in zip(("lora", "full"), times, strict=True)
        },
        **found,
    }


# --- beside TRL ---------------------------------------------------------------------------------------------


def train_sft(arguments: argparse.Namespace, folder: Path) -> str:
    """The directory of the model that the demo's RL starts from; made without an evaluation."""
    config = folder / "sft.toml"
    config.write_text(DEMO.read_text("utf-8").partition("\n[rl]\n")[0], encoding="utf-8")
    command = [sys.executable, "integration_training/train.py", "--config", str(config), "--mode", "sft"]
    command += ["--output.dir", str(folder / "sft"), "--model.name", arguments.model]
    with (folder / "sft.log").open("w", encoding="utf-8") as log:
        subprocess.run(command, stdout=log, stderr=log, check=True)
    (model,) = (folder / "sft" / "checkpoints" / "sft").glob("step_*")
    return str(model)


def measure_peer(arguments: argparse.Namespace, folder: Path) -> dict[str, float | str | None]:
    start, task = str(resolve_model(arguments.start or arguments.model)), "addition"
    if arguments.quick and not arguments.start:
        task = "sums"  # without SFT no answer is a number and nothing else, so that every group would be tied
    elif not arguments.start:
        start = train_sft(arguments, folder)
    ours: list[RunResult] = []
    peers: list[RunResult] = []
    pairs: list[dict[str, float]] = []
    prompts = 4 if arguments.quick else PROMPTS
    for seed in range(arguments.seeds):
        setting = Setting(
            task, start, arguments.steps, 30 * FULL_LR, seed, arguments.threads,
            arguments.micro_batch_rows, prompts, SAMPLES, NEW_TOKENS, clip_high=0.28, beta2=0.95, lora=LORA,
        )  # fmt: skip
        place = folder / f"seed-{seed}"
        place.mkdir()
        own, peer = run_pair(setting, place, ours_first=seed % 2 == 0)
        describe(f"seed {seed}, ours", own)
        ours.append(own)
        if peer is None:
            print("trl is not installed: only our own run is measured")
            continue
        describe(f"seed {seed}, trl ", peer)
        peers.append(peer)
        pairs.append(compare(own, peer, quick=True))
    medians = {name: statistics.median(pair[name] for pair in pairs) for name in (pairs[0] if pairs else ())}
    sides = describe_side("run_ours", ours) | (describe_side("run_trl", peers) if peers else {})
    named = {
        "trl_speed": medians.get("step_ratio"),
        "trl_memory": medians.get("memory_ratio"),
        "trl_generate_ratio": medians.get("generate_ratio"),
        "trl_rest_ratio": medians.get("rest_ratio"),
        "reward_gap": medians.get("reward_gap"),
        **sides,
    }
    return {name: None if value is None else round(value, 3) for name, value in named.items()}


def main() -> int:
    parser = make_parser(__doc__, quick="one round; two steps of one seed, from the model as it is")
    parser.add_argument("--model", default="bundled:smollm2-135m-instruct")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3, help="of A B B A, ours")
    parser.add_argument("--steps", type=int, default=4, help="of a run; the first does not count")
    parser.add_argument("--seeds", type=int, default=2, help="runs of each side")
    parser.add_argument("--micro-batch-rows", type=int, default=64, help="of TRL's; a divisor of 256")
    parser.add_argument("--start", help="model that runs start from, in place of one that SFT makes")
    parser.add_argument("--only", choices=("ours", "trl"), help="one of the two parts")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.steps, arguments.seeds = 1, 2, 1
    metrics: dict[str, float | str | None] = {}
    with tempfile.TemporaryDirectory(prefix="lora-") as folder:
        if arguments.only != "trl":
            metrics |= measure_ours(arguments, Path(folder))
        if arguments.only != "ours":
            metrics |= measure_peer(arguments, Path(folder))
    return finish(
        "lora", peer=PEER, metrics=metrics, targets=TARGETS, packages=("accelerate", "datasets", "peft")
    )


if __name__ == "__main__":
    sys.exit(main())
