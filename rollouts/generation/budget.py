"""When a batch is given up: too many samples failed, or too many groups were drawn for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from rollouts.config.schema import RolloutConfig
from rollouts.errors import NotEnoughSamples
from rollouts.generation.draw import Draw
from rollouts.generation.group import INFRASTRUCTURE, failure_class_of
from rollouts.generation.ledger import FILTERED, STALE


def draw_limit(config: RolloutConfig) -> int:
    """Groups that may be drawn for one batch."""
    return config.num_prompts * config.max_attempts


def check_budget(draw: Draw, config: RolloutConfig, *, max_staleness: int) -> None:
    """Raises NotEnoughSamples when so many samples failed, or so many groups were drawn, that the batch is
    given up.
    """
    seen = (
        max(len(draw.decided), config.num_prompts) * config.samples_per_prompt
    )  # else the first failure would be a share of 1
    failed = draw.failed
    if len(failed) > config.max_failed_fraction * seen:
        failed = [
            sample for sample in failed if failure_class_of(sample) != INFRASTRUCTURE
        ]  # bounded by max_attempts alone
    if len(failed) > config.max_failed_fraction * seen:
        classes = Counter(failure_class_of(sample) for sample in failed)
        raise NotEnoughSamples(
            f"{len(failed)} of {seen} samples failed ({_count_text(classes)}), more than"
            f" max_failed_fraction={config.max_failed_fraction:g} allows; the first:"
            f" {failed[0].metadata['failure']['message']}"
        )
    if len(draw.kept) + len(draw.undecided) < config.num_prompts and draw.drawn >= draw_limit(config):
        hints = f"; the first failure: {draw.failed[0].metadata['failure']['message']}" if draw.failed else ""
        if STALE in draw.dropped:
            hints += (
                f"; stale: the engine's weights are more than max_staleness={max_staleness} steps behind the"
                " trainer's"
            )
        raise NotEnoughSamples(
            f"{len(draw.kept)} of num_prompts={config.num_prompts} groups were kept of {draw.drawn} drawn"
            f" ({_count_text(draw.dropped)}), and max_attempts={config.max_attempts} allows no more; loosen"
            f" the filters, use easier or harder prompts, or raise max_attempts{hints}"
        )


def _count_text(counts: Mapping[str, Any]) -> str:
    return (
        ", ".join(f"{name.removeprefix(FILTERED)}: {count}" for name, count in sorted(counts.items()))
        or "nothing dropped"
    )
