"""The rows of a run: training mixtures without the held-out prompts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rollouts.config.schema import (
    PreferenceTrainingConfig,
    RewardModelTrainingConfig,
    RLTrainingConfig,
    RunConfig,
    SFTTrainingConfig,
)
from rollouts.data.datasets import exclude_from_mixture, load_sources, unique_prompts
from rollouts.data.mixture import Mixture
from rollouts.data.rows import USE_OF_STAGE, BadRow, Row, RowUse
from rollouts.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Rows:
    """The datasets of a run. No prompt of `held_out` is in a training mixture."""

    training: Mapping[str, Mixture]  # by stage
    held_out: tuple[Row, ...]  # each prompt once
    left_out: Mapping[str, int]  # training rows removed because their prompt is held out, by stage
    bad: Mapping[str, tuple[BadRow, ...]]  # malformed rows that are skipped, by setting

    def notes(self) -> Iterator[str]:
        """What a user should know of them, a line each."""
        for stage, count in self.left_out.items():
            if count:
                yield f"{stage}: {count} rows left out because their prompts are held out"
        for setting, bad in self.bad.items():
            for row in bad[:SHOWN]:
                yield f"{setting}: skipped: {row}"
            if len(bad) > SHOWN:
                yield f"{setting}: {len(bad) - SHOWN} more malformed rows skipped; --dry-run lists them"


SHOWN = 5


def load_all_rows(config: RunConfig, stages: Sequence[str]) -> Rows:
    """Raises DataError naming file, line and field; ConfigError for a stage that the config has no table
    for.
    """
    evaluation = (
        load_sources(config.eval.data, name="eval.data", use=USE_OF_STAGE["eval"]) if config.eval else None
    )
    held_out = (
        unique_prompts(row for source in evaluation.sources for row in source.rows) if evaluation else []
    )
    training: dict[str, Mixture] = {}
    left_out: dict[str, int] = {}
    bad = {"eval.data": _bad_rows(evaluation)} if evaluation else {}
    for stage in stages:
        name = f"{stage}.data"
        section = read_section(config, stage)
        if section is None:
            raise ConfigError(
                f"--mode has the stage {stage!r} but the config has no [{stage}] table; add it or choose"
                " another mode"
            )
        loaded = load_sources(section.data, name=name, use=choose_use(config, stage))
        bad[name] = _bad_rows(loaded)
        training[stage], left_out[stage] = exclude_from_mixture(loaded, held_out, name=name)
    return Rows(training, tuple(held_out), left_out, bad)


def read_section(
    config: RunConfig, stage: str
) -> SFTTrainingConfig | RLTrainingConfig | PreferenceTrainingConfig | RewardModelTrainingConfig | None:
    """The settings of a training stage; None if the config has none."""
    sections = {
        "sft": config.sft,
        "rl": config.rl,
        "preference": config.preference,
        "reward_model": config.reward_model,
    }
    return sections[stage]


def choose_use(config: RunConfig, stage: str) -> RowUse:
    """What the rows of "eval" or a training stage must be: of preferences pairs, but labelled responses for
    KTO.
    """
    is_kto = stage == "preference" and config.preference is not None and config.preference.loss == "kto"
    return "labelled" if is_kto else USE_OF_STAGE[stage]


def _bad_rows(mixture: Mixture) -> tuple[BadRow, ...]:
    return tuple(row for source in mixture.sources for row in source.bad)
