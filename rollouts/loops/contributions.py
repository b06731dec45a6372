"""What the loops tell the record of each update of the weights."""

from __future__ import annotations

from collections.abc import Sequence

from rollouts.metrics.contributions import UpdateRecord
from rollouts.types import ForwardBackwardResult, OptimStepResult, RolloutBatch


def list_updates(
    batches: Sequence[RolloutBatch],
    results: Sequence[tuple[ForwardBackwardResult, OptimStepResult]],
    *,
    kl_coef: float | None = None,
    part: str = "",
    contributes: bool = False,
) -> list[UpdateRecord]:
    """A record of each update that was made: of the first of `batches`, where a stop rule left the last of
    them out. See UpdateRecord.
    """
    return [
        UpdateRecord(
            update=number,
            batch=batch,
            forward=forward,
            optim=optim,
            kl_coef=None if batch.ref_log_probs is None else kl_coef,
            part=part,
            contributes=contributes,
        )
        for number, (batch, (forward, optim)) in enumerate(zip(batches, results, strict=False))
    ]
