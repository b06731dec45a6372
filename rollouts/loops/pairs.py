"""Online DPO: pairs of the policy's own samples, made within each group, train it by a preference loss.

groups of an update ──► select ──► rows of pairs ──► log-prob sums ──► loss, a slope per row ──► the update
"""

from collections.abc import Callable, Sequence

import numpy as np

from rollouts.loops.rl_batch import ask_groups, select_rows
from rollouts.loops.steps import AsyncRowLoss, prepare_linear_step, sum_rows, train_prepared
from rollouts.loops.updates import Update, UpdateResult, train
from rollouts.pair_selection import PairSelector
from rollouts.protocols import LogProbScorer, TrainingBackend
from rollouts.types import LossSpec, Sample, SampleGroup, Total


async def train_on_pairs(
    backend: TrainingBackend,
    updates: Sequence[Update],
    *,
    version: int,
    select: PairSelector,
    find_loss: Callable[[LossSpec], AsyncRowLoss],
    reference: LogProbScorer | None,
) -> tuple[list[Update], list[UpdateResult]]:
    """(the updates that were made, their results). Each takes the loss of its pairs, and the slopes, with the
    weights that those before it have left; one without a pair is not made.

    Metrics: those of the true loss, and groups/unpaired of the update and of those that were not made before
    it. Raises as find_pairs.
    """
    made, results, unpaired = list[Update](), list[UpdateResult](), 0
    for batch, spec in updates:
        pairs = find_pairs(batch.samples, select)
        unpaired += pairs.count([])
        if any(pairs):
            rows = select_rows(batch, np.concatenate(pairs).astype(np.int64))
            ref = None if reference is None else sum_rows(await reference.score(rows))
            sums = sum_rows(await backend.forward(rows))
            found = await find_loss(spec)(sums, ref_log_probs=ref, lengths=rows.response_lengths)
            found.metrics["groups/unpaired"], unpaired = Total(unpaired), 0
            prepared = prepare_linear_step(rows, found)
            made.append(prepared[:2])
            results.append(await train_prepared(backend, prepared))
    await train(backend, (), version=version)
    return made, results


def find_pairs(samples: Sequence[Sample], select: PairSelector) -> list[list[int]]:
    """Of each group the rows of its pairs, chosen and rejected in turn. Raises as ask_groups, also for what
    is not pairs (chosen, rejected) of the group's samples.
    """
    row_of = {sample.id: row for row, sample in enumerate(samples)}

    def find(group: SampleGroup) -> list[int]:
        own = {sample.id: row_of[sample.id] for sample in group.samples}
        return [own[sample.id] for good, bad in select(group) for sample in (good, bad)]

    return ask_groups(samples, find, "rl.pairs, which gives pairs (chosen, rejected) of a group,")
