"""The rows of a run, for a run and for a check: read, without the held-out prompts, and tokenized before a
model loads.

A run passes findings=None, and the first thing that is wrong rises. A check passes a list, and everything
that is wrong or worth knowing is in it afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from rollouts.config.modes import stage_config
from rollouts.config.schema import PreferenceTrainingConfig, RewardModelTrainingConfig, RunConfig
from rollouts.data.chat import ChatTokenizer, TemplateOptions, render_prompt, tokenize_prompt
from rollouts.data.datasets import load_sources
from rollouts.data.held_out import exclude_prompts, unique_prompts
from rollouts.data.messages import naming, parse_tools
from rollouts.data.mixture import Mixture
from rollouts.data.preference import (
    LabelledSample,
    PairSample,
    count_labels,
    prepare_labelled_mixture,
    prepare_pair_mixture,
    split_held_out,
)
from rollouts.data.rows import Row, RowUse
from rollouts.data.sft import SFTSample, prepare_sft_mixture
from rollouts.errors import ConfigError
from rollouts.preflight.findings import Findings, note, reporting

PREFERENCE_STAGES = ("preference", "reward_model")
LOOKED_AT = 20_000  # rows that a check tokenizes: seconds; half of them the longest, the others evenly spaced
SHOWN_BAD_ROWS = 5
SHOWN_CHARACTERS = 600  # of a conversation whose trained parts are shown


@dataclass(frozen=True, slots=True)
class Rows:
    """The datasets of a run. No prompt of `held_out` is in a training mixture."""

    training: Mapping[str, Mixture[Row]]  # by stage
    held_out: tuple[Row, ...]  # each prompt once
    notes: tuple[str, ...]  # what a user should know of them, a line each

    def list_rows(self, stage: str) -> list[Row]:
        """The rows of a stage or of "eval", without holes; none where they could not be read."""
        if stage == "eval":
            return list(self.held_out)
        return self.training[stage].samples if stage in self.training else []


@dataclass(frozen=True, slots=True)
class PreparedPairs:
    """Pairs of a stage."""

    training: Mixture[PairSample]
    held_out: tuple[PairSample, ...]


@dataclass(frozen=True, slots=True)
class PreparedLabels:
    """Labelled responses of a stage."""

    training: Mixture[LabelledSample]
    held_out: tuple[LabelledSample, ...]


@dataclass(slots=True)
class PreparedRows:
    """What the stages train on, tokenized."""

    conversations: Mixture[SFTSample] | None = None
    preferences: dict[str, PreparedPairs | PreparedLabels] = field(default_factory=dict)  # by stage
    longest_prompt: int = 0  # in tokens, of those that were looked at; 0: unknown
    longest_conversation: int = 0


def load_all_rows(config: RunConfig, stages: Sequence[str], findings: Findings | None = None) -> Rows:
    """The rows of every stage. Raises DataError naming file, line and field; ConfigError for a stage that the
    config has no table for.
    """
    held_out: list[Row] = []
    training: dict[str, Mixture[Row]] = {}
    notes: list[str] = []
    for stage in (*(["eval"] if config.eval else []), *stages):
        name = f"{stage}.data"
        with reporting(findings, name):
            section: Any = config.eval if stage == "eval" else stage_config(config, stage)
            mixture = load_sources(section.data, name=name, use=choose_use(config, stage))
            if stage == "eval":
                held_out = unique_prompts(mixture.samples)
                count, why = len(held_out), "asked twice"
                removed = len(mixture.samples) - count
            else:
                training[stage], removed = exclude_prompts(mixture, held_out, name=name)
                count, why = len(training[stage].samples), "held out by eval.data"
                if removed:
                    notes.append(f"{stage}: {removed} rows left out because their prompts are held out")
            left_out = f", {removed} left out because they are {why}" if removed else ""
            note(findings, "ok", name, f"{count} rows{left_out}{_describe_shares(mixture)}")
            if bad := [bad for source in mixture.sources for bad in source.bad]:
                more = [f"and {len(bad) - SHOWN_BAD_ROWS} more"] if len(bad) > SHOWN_BAD_ROWS else []
                lines = [f"{len(bad)} malformed rows are skipped:", *map(str, bad[:SHOWN_BAD_ROWS]), *more]
                note(findings, "warning", name, "\n".join(lines))
                notes.append(f"{name}: " + "\n  ".join(lines))
    return Rows(training, tuple(held_out), tuple(notes))


def choose_use(config: RunConfig, stage: str) -> RowUse:
    """What the rows of "eval" or a training stage must be: of preferences pairs, but labelled responses for
    KTO.
    """
    is_kto = stage == "preference" and config.preference is not None and config.preference.loss == "kto"
    uses: dict[str, RowUse] = {"sft": "conversation", "preference": "pair", "reward_model": "pair"}
    return "labelled" if is_kto else uses.get(stage, "prompt")


def _describe_shares(mixture: Mixture[Row]) -> str:
    total = sum(source.weight for source in mixture.sources)
    shares = (
        f"{source.name} {len(source.good)} rows ({source.weight / total:.0%} of the draws)"
        for source in mixture.sources
    )
    return ": " + ", ".join(shares) if len(mixture.sources) > 1 else ""


# --- tokens -------------------------------------------------------------------------------------------------


def prepare_rows(
    config: RunConfig,
    stages: Sequence[str],
    rows: Rows,
    tokenizer: ChatTokenizer,
    *,
    context_length: int | None,
    findings: Findings | None = None,
) -> PreparedRows:
    """The rows of every stage as tokens, after a look at prompts and lengths. A check looks at LOOKED_AT rows
    of a source.

    Raises ConfigError for a length that does not fit the context, DataError and ModelError for rows that the
    chat template does not take, and for a source without a row to train on.
    """
    prepared = PreparedRows()
    options = TemplateOptions(config.model.template_params)
    for stage, setting, new_tokens in (
        ("rl", "rl.rollout.max_new_tokens", config.rl and config.rl.rollout.max_new_tokens),
        ("eval", "eval.max_new_tokens", config.eval and config.eval.max_new_tokens),
    ):
        if (found := rows.list_rows(stage)) and new_tokens is not None:
            with reporting(findings, f"{stage}.data"):
                tools = parse_tools(found[0].get("tools"), where="tools")
                first = render_prompt(found[0]["prompt"], tokenizer, options=options, tools=tools)
                note(findings, "ok", f"{stage}.data", f"the first prompt reads {first!r}")
                longest = max(_measure_prompt(found, at, tokenizer, options) for at in _choose_rows(found))
                prepared.longest_prompt = max(prepared.longest_prompt, longest)
                what = f"the longest prompt has {longest} tokens, with max_new_tokens={new_tokens} that is"
                _check_fit(findings, setting, longest + new_tokens, context_length, what)
    for stage, mixture in rows.training.items():
        looked_at = mixture if findings is None else _thin(mixture)
        with reporting(findings, f"{stage}.data"):
            if stage == "sft":
                prepared.conversations = _prepare_sft(config, looked_at, tokenizer, findings)
                tokens = max(len(sample.token_ids) for sample in prepared.conversations.samples)
            elif stage in PREFERENCE_STAGES:
                pairs = prepare_preferences(config, stage, looked_at, tokenizer)
                prepared.preferences[stage] = pairs
                samples = (*pairs.training.samples, *pairs.held_out)
                tokens = max(len(row.token_ids) for sample in samples for row in sample.rows)
                _describe_preferences(config, stage, pairs, looked_at, tokens, tokenizer, findings)
            else:
                continue
            prepared.longest_conversation = max(prepared.longest_conversation, tokens)
            _check_fit(findings, f"{stage}.max_length", tokens, context_length, "the longest row, in tokens:")
    return prepared


def _check_fit(
    findings: Findings | None, setting: str, tokens: int, context_length: int | None, what: str
) -> None:
    with reporting(findings, setting):
        if context_length is not None and tokens > context_length:
            raise ConfigError(
                f"{setting}: {what} {tokens}, more than the context of {context_length}; lower it"
            )
        of = "" if context_length is None else f" of {context_length}"
        note(findings, "ok", setting, f"{what} {tokens}{of}")


def _measure_prompt(rows: Sequence[Row], at: int, tokenizer: ChatTokenizer, options: TemplateOptions) -> int:
    with naming(f"row {at}"):
        tools = parse_tools(rows[at].get("tools"), where="tools")
        return len(tokenize_prompt(rows[at]["prompt"], tokenizer, options=options, tools=tools))


def _choose_rows(rows: Sequence[Row | None]) -> list[int]:
    """Numbers of the rows that are looked at, in order."""
    count, half = len(rows), LOOKED_AT // 2
    if count <= LOOKED_AT:
        return list(range(count))
    longest = sorted(range(count), key=lambda at: len(str(rows[at])), reverse=True)[:half]
    return sorted({*longest, *(at * count // half for at in range(half))})


def _thin(mixture: Mixture[Row]) -> Mixture[Row]:
    """The mixture with holes in the place of rows that are not looked at."""
    sources = []
    for source in mixture.sources:
        chosen = set(_choose_rows(source.rows))
        rows = tuple(row if at in chosen else None for at, row in enumerate(source.rows))
        sources.append(replace(source, rows=rows))
    return Mixture(tuple(sources))


def _prepare_sft(
    config: RunConfig, mixture: Mixture[Row], tokenizer: ChatTokenizer, findings: Findings | None
) -> Mixture[SFTSample]:
    section = config.sft
    assert section is not None
    prepared = prepare_sft_mixture(
        mixture,
        tokenizer,
        max_length=section.max_length,
        train_on=section.train_on,
        options=TemplateOptions(config.model.template_params),
    )
    if findings is not None:
        trained = _mark_trained(prepared.samples[0], tokenizer)
        note(findings, "ok", "sft.data", f"of the first conversation this trains: {trained}")
        dropped = sum(prepared.dropped.values())
        if prepared.truncated or dropped:
            counts = f"of {len(mixture.samples)} rows {prepared.truncated} are cut and {dropped} dropped"
            note(findings, "warning", "sft.max_length", f"{counts}; raise it if they matter")
    return prepared


def _mark_trained(sample: SFTSample, tokenizer: Any) -> str:
    """The conversation as the model reads it, what trains within ⟦ ⟧; cut in the middle when it is long."""
    mask = sample.loss_mask
    edges = [0, *(at for at in range(1, len(mask)) if mask[at] != mask[at - 1]), len(mask)]
    pieces = [
        f"⟦{text}⟧" if mask[begin] else text
        for begin, end in pairwise(edges)
        for text in [tokenizer.decode(sample.token_ids[begin:end].tolist())]
    ]
    text, half = repr("".join(pieces)), SHOWN_CHARACTERS // 2
    shown = text if len(text) <= SHOWN_CHARACTERS else f"{text[:half]} … {text[-half:]}"
    return f"{int(mask.sum())} of {len(mask)} tokens, within ⟦ ⟧: {shown}"


# --- preferences --------------------------------------------------------------------------------------------


def prepare_preferences(
    config: RunConfig, stage: str, mixture: Mixture[Row], tokenizer: ChatTokenizer
) -> PreparedPairs | PreparedLabels:
    """What the stage "preference" or "reward_model" trains on and what it is evaluated on. Raises DataError
    and ModelError as prepare_pair_mixture and split_held_out do.
    """
    section = read_preference_section(config, stage)
    name = f"{stage}.data"
    how: dict[str, Any] = {
        "max_length": section.max_length,
        "options": TemplateOptions(config.model.template_params),
        "name": name,
    }
    if choose_use(config, stage) == "labelled":
        labels = prepare_labelled_mixture(mixture, tokenizer, **how)
        return PreparedLabels(*split_held_out(labels, section.held_out, name=stage))
    pairs = prepare_pair_mixture(mixture, tokenizer, **how)
    return PreparedPairs(*split_held_out(pairs, section.held_out, name=stage))


def read_preference_section(
    config: RunConfig, stage: str
) -> PreferenceTrainingConfig | RewardModelTrainingConfig:
    """The settings of the stage "preference" or "reward_model". Raises ConfigError if the config has none."""
    section = stage_config(config, stage)
    assert isinstance(section, PreferenceTrainingConfig | RewardModelTrainingConfig), stage
    return section


def describe_counts(stage: str, prepared: PreparedPairs | PreparedLabels, max_length: int) -> Iterator[str]:
    """What was cut or left out, a line each."""
    if prepared.training.truncated:
        yield f"{stage}.data: {prepared.training.truncated} responses are cut at max_length={max_length}"
    for reason, count in prepared.training.dropped.items():
        if count:
            yield f"{stage}.data: {count} samples left out: {reason.replace('_', ' ')}"


def _describe_preferences(
    config: RunConfig,
    stage: str,
    prepared: PreparedPairs | PreparedLabels,
    mixture: Mixture[Row],
    longest: int,
    tokenizer: Any,
    findings: Findings | None,
) -> None:
    if findings is None:
        return
    name, max_length = f"{stage}.data", read_preference_section(config, stage).max_length
    first = prepared.training.samples[0]
    kinds = ("chosen", "rejected") if isinstance(first, PairSample) else ("completion",)
    for kind, row in zip(kinds, first.rows, strict=False):
        text = repr(tokenizer.decode(row.token_ids[row.loss_mask].tolist()))[: SHOWN_CHARACTERS // 2]
        counts = f"{int(row.loss_mask.sum())} of {len(row.token_ids)} tokens"
        note(findings, "ok", name, f"{kind} of the first sample trains {counts}: {text}")
    counts = f"{len(prepared.training.samples)} train and {len(prepared.held_out)} are held out"
    looked = f"of {len(mixture.samples)} rows that were looked at {counts}"
    note(findings, "ok", name, f"{looked}; the longest has {longest} tokens of max_length={max_length}")
    for line in describe_counts(stage, prepared, max_length):
        note(findings, "warning", name, line.partition(": ")[2])
    if isinstance(prepared, PreparedLabels):
        good, bad = count_labels(prepared.training.samples)
        note(findings, "ok", name, f"{good} responses are desirable and {bad} undesirable")
