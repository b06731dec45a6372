"""The rows of [preference] and [reward_model]: tokenized before a model loads, for a run and for a check."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollouts.config.schema import PreferenceTrainingConfig, RewardModelTrainingConfig, RunConfig
from rollouts.data.chat import ChatTokenizer, TemplateOptions
from rollouts.data.mixture import Mixture, make_mixture
from rollouts.data.preference import (
    LabelledSample,
    PairSample,
    PreferenceMixture,
    count_labels,
    prepare_labelled_mixture,
    prepare_pair_mixture,
    split_held_out,
)
from rollouts.data.rows import Row
from rollouts.errors import ConfigError
from rollouts.preflight.findings import Finding
from rollouts.preflight.rows import choose_use

PREFERENCE_STAGES = ("preference", "reward_model")
SHOWN_CHARACTERS = 300  # of each row of the first sample


@dataclass(frozen=True, slots=True)
class PreparedPairs:
    """Pairs of a stage."""

    training: PreferenceMixture[PairSample]
    held_out: tuple[PairSample, ...]


@dataclass(frozen=True, slots=True)
class PreparedLabels:
    """Labelled responses of a stage."""

    training: PreferenceMixture[LabelledSample]
    held_out: tuple[LabelledSample, ...]


def prepare_preferences(
    config: RunConfig, stage: str, rows: Mixture, tokenizer: ChatTokenizer, *, context_length: int | None
) -> PreparedPairs | PreparedLabels:
    """What the stage "preference" or "reward_model" trains on and what it is evaluated on.

    Raises ConfigError if a row does not fit the context; DataError and ModelError as prepare_pair_mixture and
    split_held_out do.
    """
    section = read_preference_section(config, stage)
    options, name = TemplateOptions(config.model.template_params), f"{stage}.data"
    prepared: PreparedPairs | PreparedLabels
    if choose_use(config, stage) == "labelled":
        labels = prepare_labelled_mixture(
            rows, tokenizer, max_length=section.max_length, options=options, name=name
        )
        prepared = PreparedLabels(*split_held_out(labels, section.held_out, name=stage))
    else:
        pairs = prepare_pair_mixture(
            rows, tokenizer, max_length=section.max_length, options=options, name=name
        )
        prepared = PreparedPairs(*split_held_out(pairs, section.held_out, name=stage))
    longest = measure_longest(prepared)
    if context_length is not None and longest > context_length:
        raise ConfigError(
            f"{stage}.max_length: a row has {longest} tokens, more than the context of {context_length};"
            " lower it"
        )
    return prepared


def read_preference_section(
    config: RunConfig, stage: str
) -> PreferenceTrainingConfig | RewardModelTrainingConfig:
    """The settings of the stage "preference" or "reward_model". Raises ConfigError if the config has none."""
    section = config.preference if stage == "preference" else config.reward_model
    if section is None:
        raise ConfigError(
            f"--mode has the stage {stage!r} but the config has no [{stage}] table; add it or choose another"
            " mode"
        )
    return section


def measure_longest(prepared: PreparedPairs | PreparedLabels) -> int:
    """Tokens of the longest row that trains or is evaluated."""
    return max(
        len(row.token_ids)
        for sample in (*prepared.training.samples, *prepared.held_out)
        for row in sample.rows
    )


def describe_counts(stage: str, prepared: PreparedPairs | PreparedLabels, max_length: int) -> list[str]:
    """What was cut or left out, a line each."""
    lines = (
        [f"{prepared.training.truncated} responses are cut at max_length={max_length}"]
        if prepared.training.truncated
        else []
    )
    lines += [
        f"{count} samples left out: {reason.replace('_', ' ')}"
        for reason, count in prepared.training.dropped.items()
        if count
    ]
    return [f"{stage}.data: {line}" for line in lines]


def check_preferences(
    config: RunConfig,
    stage: str,
    rows: Sequence[Row],
    tokenizer: ChatTokenizer,
    *,
    context_length: int | None,
    findings: list[Finding],
) -> int:
    """Tokens of the longest row; what a user should know of them is appended to `findings`. Raises what
    prepare_preferences raises.

    All rows are one source here: a source of a mixture that has none left to train on is found when the run
    starts.
    """
    section = read_preference_section(config, stage)
    prepared = prepare_preferences(
        config, stage, make_mixture(rows), tokenizer, context_length=context_length
    )
    first, longest = prepared.training.samples[0], measure_longest(prepared)
    kinds = ("chosen", "rejected") if isinstance(first, PairSample) else ("completion",)
    decode: Any = getattr(tokenizer, "decode", None)
    for kind, row in zip(kinds, first.rows, strict=False):
        text = (
            ""
            if decode is None
            else f": {repr(decode(row.token_ids[row.loss_mask].tolist()))[:SHOWN_CHARACTERS]}"
        )
        counts = f"{int(row.loss_mask.sum())} of {len(row.token_ids)} tokens"
        findings.append(Finding("ok", f"{stage}.data", f"{kind} of the first sample trains {counts}{text}"))
    count, held_out = len(prepared.training.samples), len(prepared.held_out)
    counts = f"of {len(rows)} rows that were looked at {count} train and {held_out} are held out"
    findings.append(
        Finding(
            "ok",
            f"{stage}.data",
            f"{counts}; the longest has {longest} tokens of max_length={section.max_length}",
        )
    )
    findings += [
        Finding("warning", f"{stage}.data", line.partition(": ")[2])
        for line in describe_counts(stage, prepared, section.max_length)
    ]
    if isinstance(prepared, PreparedLabels):
        good, bad = count_labels(prepared.training.samples)
        findings.append(
            Finding("ok", f"{stage}.data", f"{good} responses are desirable and {bad} undesirable")
        )
    return longest
