"""One step of GRPO on one device: generate with the embedded engine, train on the answers, give the engine
the new weights.
"""

import numpy as np

from benchmarks.forced_lengths import copy_in, run_engine
from benchmarks.h200.place import (
    NO_PEAK,
    Place,
    draw_tokens,
    make_backend,
    make_model,
    open_thread,
    read_clock,
    read_peak_gib,
    reset_peak,
    take_step,
)
from benchmarks.h200.report import Report
from rollouts.advantages import compute_group_advantages
from rollouts.engines.local import open_local_engine
from rollouts.types import Completion, IntArray, RolloutBatch
from rollouts.weight_sync.sync import stream_into

STAGES = ("generate", "train", "sync")
METRICS = (
    "g6_step_s",
    *(f"g6_{stage}_share" for stage in (*STAGES, "rest")),
    "g6_generate_and_train_share",
    "g6_tokens_per_s",
    "g6_peak_gib",
)


async def measure_step(place: Place, report: Report) -> None:
    """32 prompts x 8 answers of at most 512 tokens, rewards by length; the mean of two steps after one. The
    engine has a copy of its own.
    """
    groups, samples, prompt, longest = (2, 4, 16, 16) if place.tiny else (32, 8, 192, 512)
    shape, rows = place.shape, groups * samples
    prompts = [draw_tokens(place, prompt, shape.vocab) for _ in range(groups)]
    repeated = [prompts[row // samples] for row in range(rows)]
    spent, tokens = dict.fromkeys((*STAGES, "rest"), 0.0), 0
    async with open_thread(place) as thread:
        model = await thread.submit(lambda: make_model(shape, place))
        backend = await thread.submit(
            lambda: make_backend(model, place, thread, micro_batch_tokens=place.micro_batch_tokens)
        )
        async with open_local_engine(
            await thread.submit(lambda: copy_in(model, place.dtype)),
            device_thread=thread,
            mode="given",
            trainer_version=lambda: 0,
            max_rows=rows,
            max_context=prompt + longest,
        ) as engine:
            for step in range(1, 4):
                if step == 2:  # the first compiled, captured and grew
                    spent, tokens = dict.fromkeys(spent, 0.0), 0
                    await thread.submit(lambda: reset_peak(place))
                lengths = (
                    place.rng.lognormal(np.log(0.4 * longest), 0.8, rows)
                    .astype(np.int64)
                    .clip(min(8, longest), longest)
                )
                clock = [await read_clock(thread, place)]
                completions = await run_engine(engine, repeated, lengths.tolist(), f"step{step}")
                clock.append(await read_clock(thread, place))
                batch = make_grpo_batch(repeated, completions, samples=samples)
                clock.append(await read_clock(thread, place))
                await take_step(backend, batch)
                await backend.set_weight_version(step).result()
                clock.append(await read_clock(thread, place))
                await stream_into(backend, engine, step)
                clock.append(await read_clock(thread, place))
                for stage, seconds in zip(("generate", "rest", "train", "sync"), np.diff(clock), strict=True):
                    spent[stage] += float(seconds)
                tokens += int(lengths.sum())
        peak = read_peak_gib(place)
    total = sum(spent.values())
    report.add("g6_step_s", total / 2)
    for stage, seconds in spent.items():
        report.add(f"g6_{stage}_share", seconds / total)
    report.add("g6_generate_and_train_share", (spent["generate"] + spent["train"]) / total)
    report.add("g6_tokens_per_s", tokens / total)
    report.add_or_leave_out("g6_peak_gib", peak, NO_PEAK)


def make_grpo_batch(prompts: list[IntArray], completions: list[Completion], *, samples: int) -> RolloutBatch:
    """The rows with the engine's log-probs, and GRPO's advantages of a reward that falls with the length. [B]
    rows.
    """
    lengths = np.asarray([len(completion.token_ids) for completion in completions], np.float64)
    groups = np.arange(len(prompts)) // samples
    advantages = compute_group_advantages(-lengths, groups, lengths=lengths)
    rows = list(zip(prompts, completions, advantages, strict=True))
    return RolloutBatch(
        tokens=tuple(np.concatenate([prompt, done.token_ids]) for prompt, done, _ in rows),
        loss_masks=tuple(
            np.arange(len(prompt) + len(done.token_ids)) >= len(prompt) for prompt, done, _ in rows
        ),
        rollout_log_probs=tuple(
            np.concatenate([np.zeros(len(prompt), np.float32), done.log_probs]) for prompt, done, _ in rows
        ),
        advantages=tuple(
            np.concatenate([np.zeros(len(prompt)), np.full(len(done.token_ids), advantage)]).astype(
                np.float32
            )
            for prompt, done, advantage in rows
        ),
        rewards=-lengths.astype(np.float32),
        group_indices=groups,
    )
