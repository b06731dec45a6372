"""What a pass over one long row holds, against the same tokens in many short rows. CPU.

    python -m benchmarks.long_context [--tokens 32768] [--threads N] [--quick]

A random Llama of four layers (hidden 256, heads of 64, 8,192 tokens, float32); forward and backward of
Σ w·log p over one row of `--tokens` tokens, of which the last 1,024 train, and over 32 rows that have as many
together, of each of which the last 32 train. Both are one packed micro-batch. What tensors made in the pass
hold at most, by torch's own record of allocations, and the CPU time of all threads:

    peak_ratio     of the long row over the short ones; target <= 1.3: a mask matrix of 32,768² would be 4 GiB
    peak_8k_ratio  of a row of a quarter of the tokens over the long one, times four: 1 is linear in length
    time_ratio     no target: the pairs of a query and a key are 32 times as many

The last line is JSON; exit status 1 if a target is missed.
"""

import sys
import time
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.harness import finish, make_parser
from benchmarks.prefix_share import Group, measure_peak, run_pass
from rollouts.data.packing import MicroBatch, make_micro_batches
from rollouts.models.forward_plan import plan_forward

ROWS, TRAINED = 32, 1024
TARGETS = {"peak_ratio": "<= 1.3"}


def make_rows(count: int, length: int, vocab_size: int) -> tuple[Group, list[MicroBatch]]:
    """Random tokens in one micro-batch."""
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, vocab_size, length) for _ in range(count)]
    masks = [np.arange(length) >= length - min(TRAINED // count, length // 2)] * count
    weights = torch.from_numpy(rng.standard_normal((count, length)).astype(np.float32))
    options: dict[str, Any] = {"share_prefix": False, "padding_free": True}
    parts = make_micro_batches(tokens, masks, micro_batch_tokens=count * length, **options)
    assert len(parts) == 1
    return Group(tokens, masks, weights), parts


def main() -> int:
    parser = make_parser(__doc__, quick="2,048 tokens")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    asked = parser.parse_args()
    asked.tokens = 2048 if asked.quick else asked.tokens
    torch.set_num_threads(asked.threads)
    torch.manual_seed(0)
    settings = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "head_dim": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    model: Any = LlamaForCausalLM(
        LlamaConfig(vocab_size=8192, max_position_embeddings=asked.tokens, **settings, **heads)
    )
    plan = plan_forward(model)
    assert plan.choose_layout(asked.tokens) == "packed", plan.reason
    peaks: dict[str, float] = {}
    seconds: dict[str, float] = {}
    for name, count, length in (
        ("short", ROWS, asked.tokens // ROWS),
        ("long", 1, asked.tokens),
        ("quarter", 1, asked.tokens // 4),
    ):
        rows = make_rows(count, length, model.config.vocab_size)
        peaks[name] = measure_peak(model, plan, *rows)
        began = time.process_time()
        run_pass(model, plan, *rows)
        seconds[name] = time.process_time() - began
        model.zero_grad(set_to_none=True)
        print(f"{name}: {peaks[name] / 2**20:.0f} MiB, {seconds[name]:.1f} s of CPU time", flush=True)
    metrics = {
        "tokens": asked.tokens,
        "peak_mib_long": round(peaks["long"] / 2**20, 1),
        "peak_mib_short": round(peaks["short"] / 2**20, 1),
        "peak_ratio": round(peaks["long"] / peaks["short"], 3),
        "peak_8k_ratio": round(4 * peaks["quarter"] / peaks["long"], 3),
        "time_ratio": round(seconds["long"] / seconds["short"], 2),
    }
    return finish("long_context", peer="32 rows of 1k tokens", metrics=metrics, targets=TARGETS)


if __name__ == "__main__":
    sys.exit(main())
