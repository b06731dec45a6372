"""Packing of a step's samples for ranks: how full, how even, how fast, and how it grows.

    python -m benchmarks.packing [--quick]

512 to 16,384 samples of lognormal lengths (sigma 0.8, mean 1,500 before the cut at 16,384 tokens) for 8 to
512 ranks, micro-batches of one packed row of at most 16,384 nodes, every array of every micro-batch made;
costs by the FLOPs of a 1.5B model (28 layers of width 1,536). Once with samples that share nothing, once in
groups of 8 with a prompt of 100 to 500 tokens. Before anything is timed, the tokens that each trained token
is predicted from are read back from the arrays.

    fill              useful tokens / computed ones, padding and ranks without work included; the least of all
                      sizes, nothing shared
    budget_fill       the same over full budgets, for one rank, where nothing but best fit decides
    imbalance         costs of the busiest rank over the mean, whole step; the largest of all sizes.
                      round_imbalance: when ranks wait for the slowest in every round; a sample as long as the
                      budget costs 1.4 ordinary micro-batches, and its round waits for it
    growth_exponent   slope of log CPU time over log samples, from the fewest to the most
    groups_*          the same in groups, prompts counted once; with ranks about one group a micro-batch is
                      cut, and its prompt computed twice

Peers. padding: rows in their order, as many as keep to the budget, padded by trl.trainer.utils.pad; and
sorted by length first. TRL's TokenBudgetBatcher of its asynchronous trainer (512 samples: it goes token by
token).

Targets: fill >= 0.985, budget_fill >= 0.985, imbalance <= 1.03, growth_exponent <= 1.15.
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.harness import compute_ratio, finish, take_turns
from rollouts.backends.shares import compute_cost, deal_rounds
from rollouts.data.packing import (
    MicroBatch,
    compute_round_cost,
    make_micro_batches,
    spread_to_rows,
)
from rollouts.types import BoolArray, IntArray

BUDGET = 16_384
SIZES = {512: 8, 1024: 16, 2048: 32, 4096: 128, 8192: 256, 16_384: 512}  # samples: ranks
QUICK_SIZES = {512: 8, 1024: 16, 2048: 32}
PEER_SIZE = 4096
MEAN, SIGMA, VOCAB = 1500, 0.8, 150_000
GROUP = 8
MICRO_BATCH_COST = (
    512  # tokens: gathering a layer's weights and starting its kernels, next to 16,384 tokens of work
)
ATTENTION = 2 * 28 * 1536 / 1_540_000_000  # of 28 layers; see rollouts.backends.shares.find_attention_cost


class Rows(NamedTuple):
    tokens: list[IntArray]
    masks: list[BoolArray]
    # [B] tokens that a row adds to what must be computed; a group's prompt counts for its first row
    useful: IntArray

    def take(self, count: int) -> Rows:
        return Rows(self.tokens[:count], self.masks[:count], self.useful[:count])


def compute_imbalance(costs: Sequence[float], dealt: Sequence[Sequence[int | None]]) -> float:
    """What the busiest rank computes in all over what a rank does on average, at least 1; a rank without a
    micro-batch does nothing. 1 for none.
    """
    loads = [sum(costs[number] for number in mine if number is not None) for mine in dealt]
    return max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0


def make_rows(count: int, *, group: int) -> Rows:
    """`count` rows in groups; a row alone trains what follows its first 100 tokens or its first half."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(100, 501, -(-count // group)) if group > 1 else np.zeros(count, np.int64)
    lengths = rng.lognormal(math.log(MEAN) - SIGMA**2 / 2, SIGMA, count).round().astype(np.int64)
    tokens: list[IntArray] = []
    masks: list[BoolArray] = []
    useful: list[int] = []
    prompt = np.zeros(0, np.int64)
    for row, length in enumerate(lengths.clip(16, BUDGET - 500 if group > 1 else BUDGET).tolist()):
        given = int(prompts[row // group])
        if row % group == 0:
            prompt = rng.integers(0, VOCAB, given)
        tokens.append(
            np.concatenate([prompt, rng.integers(0, VOCAB, length)])
            if given
            else rng.integers(0, VOCAB, length)
        )
        masks.append(np.arange(len(tokens[-1])) >= (given or min(100, length // 2)))
        useful.append(len(tokens[-1]) - 1 - (given if row % group else 0))  # the last token is only a target
    return Rows(tokens, masks, np.asarray(useful))


# --- ours ---------------------------------------------------------------------------------------------------


def pack(rows: Rows, ranks: int) -> tuple[list[MicroBatch], list[list[int | None]]]:
    """The micro-batches and which of them each rank computes."""
    micro_batches = make_micro_batches(
        rows.tokens,
        rows.masks,
        micro_batch_tokens=BUDGET,
        share_prefix=True,
        padding_free=True,
        ranks=ranks,
        attention_cost=ATTENTION,
        micro_batch_cost=MICRO_BATCH_COST,
    )
    return micro_batches, deal_rounds(find_costs(micro_batches), ranks)


def find_costs(micro_batches: Sequence[MicroBatch]) -> list[float]:
    return [compute_cost(one, micro_batch_cost=0, attention_cost=ATTENTION) for one in micro_batches]


def check(rows: Rows, micro_batches: Sequence[MicroBatch]) -> None:
    """Every trained token comes back once, and each row's last one is predicted from what precedes it."""
    assert sum(len(one.token_pairs) for one in micro_batches) == sum(int(mask.sum()) for mask in rows.masks)
    found = spread_to_rows(
        micro_batches, [one.targets.astype(np.float32) for one in micro_batches], rows.tokens
    )
    for values, ids, mask in zip(found, rows.tokens, rows.masks, strict=True):
        assert np.array_equal(values, np.where(mask, ids, 0)), "a trained token is missing, or is another"
    for one in micro_batches:
        lasts = np.flatnonzero(np.append(np.diff(one.token_rows) > 0, True))
        for row, place, pair in zip(
            one.rows.tolist(),
            one.token_positions[lasts].tolist(),
            one.token_pairs[lasts].tolist(),
            strict=True,
        ):
            node = int(one.predictors[pair])
            seen = np.flatnonzero(one.subtree_end[0, : node + 1] > node)
            assert np.array_equal(one.input_ids[0, seen], rows.tokens[row][:place]), (
                f"row {row} is not what its last token sees"
            )
            assert np.array_equal(one.position_ids[0, seen], np.arange(place))


class Quality(NamedTuple):
    fill: float
    imbalance: float
    round_imbalance: float


def measure(
    rows: Rows, micro_batches: Sequence[MicroBatch], dealt: Sequence[Sequence[int | None]]
) -> Quality:
    ranks, costs = len(dealt), find_costs(micro_batches)
    idle = sum(number is None for mine in dealt for number in mine) * min(
        one.computed_tokens for one in micro_batches
    )
    computed = sum(one.computed_tokens for one in micro_batches) + idle
    return Quality(
        float(rows.useful.sum()) / computed,
        compute_imbalance(costs, dealt),
        compute_round_cost(costs, ranks) * ranks / sum(costs),
    )


def take_cpu_s(work: Callable[[], object], *, times: int) -> float:
    """The least CPU time of several runs; what a run gives is dropped at its end."""
    spent = []
    for _ in range(times):
        start = time.process_time()
        work()
        spent.append(time.process_time() - start)
    return min(spent)


def measure_sizes(rows: Rows, sizes: dict[int, int], label: str) -> dict[str, float]:
    """The metrics of all sizes, each checked before it is timed."""
    cpu: dict[int, float] = {}
    found: list[Quality] = []
    budget_fills, alone_fills = [], []
    for count, ranks in sizes.items():
        part = rows.take(count)
        micro_batches, dealt = pack(part, ranks)
        check(part, micro_batches)
        found.append(measure(part, micro_batches, dealt))
        del micro_batches
        alone, _ = pack(part, 1)
        check(part, alone)
        budget_fills.append(float(part.useful.sum()) / (len(alone) * BUDGET))
        alone_fills.append(float(part.useful.sum()) / sum(one.computed_tokens for one in alone))
        del alone
        cpu[count] = take_cpu_s(
            lambda part=part, ranks=ranks: pack(part, ranks), times=5 if count <= PEER_SIZE else 2
        )
        print(
            f"{label} {count:6} samples {ranks:4} ranks: {cpu[count]:.3f} CPU s, fill {found[-1].fill:.4f},"
            f" one rank's budgets {budget_fills[-1]:.4f}, imbalance {found[-1].imbalance:.4f}, of rounds"
            f" {found[-1].round_imbalance:.4f}",
            flush=True,
        )
    slope = float(np.polyfit(np.log(list(cpu)), np.log(list(cpu.values())), 1)[0])
    last = max(cpu)
    return {
        "fill": min(one.fill for one in found),
        "fill_one_rank": min(alone_fills),
        "budget_fill": min(budget_fills),
        "imbalance": max(one.imbalance for one in found),
        "round_imbalance": max(one.round_imbalance for one in found),
        "growth_exponent": slope,
        "cpu_s": cpu[last],
        "cpu_ns_per_token": 1e9 * cpu[last] / sum(len(ids) for ids in rows.tokens[:last]),
    }


def measure_copy(rows: Rows, ranks: int) -> float:
    """CPU seconds that only copying the arrays takes: no packing is faster."""
    micro_batches, _ = pack(rows, ranks)
    arrays = [
        getattr(one, name)
        for one in micro_batches
        for name in ("input_ids", "position_ids", "subtree_end", "predictors", "targets")
    ]
    arrays += [
        getattr(one, name)
        for one in micro_batches
        for name in ("token_rows", "token_positions", "token_pairs")
    ]
    return take_cpu_s(lambda: [array.copy() for array in arrays], times=3)


# --- peers --------------------------------------------------------------------------------------------------


def find_padding_fill(rows: Rows, *, sort: bool) -> float:
    """Useful tokens over padded ones, rows in micro-batches of as many as keep to the budget."""
    lengths = np.asarray([len(ids) - 1 for ids in rows.tokens])
    lengths = np.sort(lengths)[::-1] if sort else lengths
    padded, held, longest = 0, 0, 0
    for length in lengths.tolist():
        if held and (held + 1) * max(longest, length) > BUDGET:
            padded, held, longest = padded + held * longest, 0, 0
        held, longest = held + 1, max(longest, length)
    return float(rows.useful.sum()) / (padded + held * longest)


def check_padding(rows: Rows) -> bool:
    """Whether TRL's own function pads as find_padding_fill counts; False if TRL is not installed."""
    try:
        pad = importlib.import_module("trl.trainer.utils").pad
        torch = importlib.import_module("torch")
    except ImportError:
        return False
    first = [torch.from_numpy(ids) for ids in rows.tokens[:8]]
    assert pad(first).numel() == 8 * max(len(ids) for ids in first)
    return True


def load_trl_batcher() -> Any | None:
    """TRL's TokenBudgetBatcher; None if it is not installed."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    try:
        return importlib.import_module("trl.experimental.async_grpo.async_grpo_trainer").TokenBudgetBatcher
    except (ImportError, AttributeError):
        return None


def measure_trl(rows: Rows, ranks: int) -> dict[str, float | None]:
    """TRL's batcher beside ours on few samples in groups: ratio of CPU time, and how full and even its rows
    are.
    """
    batcher = load_trl_batcher()
    if batcher is None:
        print("TRL's TokenBudgetBatcher is not installed: not measured")
        return dict.fromkeys(("trl_cpu_ratio", "trl_fill", "trl_budget_fill", "trl_round_imbalance"))
    torch = importlib.import_module("torch")
    samples = [
        {
            "input_ids": torch.from_numpy(ids),
            "completion_mask": torch.from_numpy(mask.astype(np.int64)),
            "old_log_probs": torch.zeros(len(ids)),
            "advantage": 1.0,
            "group_id": number // GROUP,
        }
        for number, (ids, mask) in enumerate(zip(rows.tokens, rows.masks, strict=True))
    ]

    def run() -> list[list[Any]]:
        rounds = list(batcher(samples, ranks, BUDGET, defaultdict(list)))
        for one in rounds:
            for row in one:
                row.pack()
        return rounds

    rounds = run()
    nodes = np.asarray([[len(row.tokens) for row in one] for one in rounds])
    costs = np.asarray([[len(row.tokens) + ATTENTION * row.load for row in one] for one in rounds])
    held = sum(
        len(row.samples) for one in rounds for row in one
    )  # it leaves the last, unfinished round for the next step
    useful = float(nodes.sum()) if held < len(samples) else float(rows.useful.sum())
    ours, theirs = take_turns(lambda: pack(rows, ranks), run, rounds=1)
    ratio = compute_ratio([turn.cpu_s for turn in ours], [turn.cpu_s for turn in theirs])
    print(
        f"TRL's TokenBudgetBatcher, {len(samples)} samples ({held} in full rounds), {ranks} ranks: {ratio}"
        " times our CPU time"
    )
    return {
        "trl_cpu_ratio": ratio.median * len(samples) / held,
        "trl_fill": useful / float(nodes.sum()) if held == len(samples) else None,
        "trl_budget_fill": float(nodes.sum()) / (nodes.size * BUDGET),
        "trl_round_imbalance": float(costs.max(1).sum()) * ranks / float(costs.sum()),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.packing", description="Packing for ranks: fill, balance, CPU time."
    )
    parser.add_argument("--quick", action="store_true", help="up to 2,048 samples")
    options = parser.parse_args(argv)
    sizes = QUICK_SIZES if options.quick else SIZES
    most, peer_size = max(sizes), min(max(sizes), PEER_SIZE)

    rows = make_rows(most, group=1)
    metrics: dict[str, float | str | None] = {**measure_sizes(rows, sizes, "alone")}
    metrics["copy_cpu_s"] = measure_copy(rows, sizes[most])
    part = rows.take(peer_size)
    metrics["padding_fill_in_order"] = find_padding_fill(part, sort=False) if check_padding(part) else None
    metrics["padding_fill_sorted"] = find_padding_fill(part, sort=True)
    del rows, part
    rows = make_rows(most, group=GROUP)
    metrics.update({f"groups_{name}": value for name, value in measure_sizes(rows, sizes, "groups").items()})
    fewest = min(sizes)
    metrics.update(measure_trl(rows.take(fewest), sizes[fewest]))
    metrics["samples"] = float(most)
    targets = {
        "fill": ">= 0.985",
        "budget_fill": ">= 0.985",
        "groups_fill_one_rank": ">= 0.985",
        "imbalance": "<= 1.03",
        "groups_imbalance": "<= 1.03",
        "growth_exponent": "<= 1.15",
        "groups_growth_exponent": "<= 1.15",
    }
    return finish(
        "packing",
        peer="padding (TRL), TRL's TokenBudgetBatcher",
        metrics=metrics,
        targets=targets,
    )


if __name__ == "__main__":
    sys.exit(main())
