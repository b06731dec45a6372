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
from rollouts.config.schema import RunConfig
from rollouts.data.chat import ChatTokenizer, TemplateOptions, render_prompt, tokenize_prompt
from rollouts.data.datasets import exclude_prompts, load_sources, unique_prompts
from rollouts.data.mixture import Mixture
from rollouts.data.preference import (
    PreferenceSample,
    prepare_preference_mixture,
    split_held_out,
)
from rollouts.data.rows import Row, RowUse, naming, parse_tools
from rollouts.data.sft import SFTSample, prepare_sft_mixture
from rollouts.errors import ConfigError
from rollouts.preflight.findings import Findings, note, reporting

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
class PreparedPreferences:
    """Pairs of a stage, or labelled responses for KTO."""

    training: Mixture[PreferenceSample]
    held_out: tuple[PreferenceSample, ...]


@dataclass(slots=True)
class PreparedRows:
    """What the stages train on, tokenized."""

    conversations: Mixture[SFTSample] | None = None
    preferences: dict[str, PreparedPreferences] = field(default_factory=dict)  # by stage
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

    def check_fit(setting: str, tokens: int, what: str) -> None:
        with reporting(findings, setting):
            if context_length is not None and tokens > context_length:
                raise ConfigError(
                    f"{setting}: {what} {tokens}, more than the context of {context_length}; lower it"
                )
            of = "" if context_length is None else f" of {context_length}"
            note(findings, "ok", setting, f"{what} {tokens}{of}")

    for stage, section, setting in (
        ("rl", config.rl and config.rl.rollout, "rl.rollout.max_new_tokens"),
        ("eval", config.eval, "eval.max_new_tokens"),
    ):
        if section and (found := rows.list_rows(stage)):
            with reporting(findings, f"{stage}.data"):
                tools = parse_tools(found[0].get("tools"), where="tools")
                first = render_prompt(found[0]["prompt"], tokenizer, options=options, tools=tools)
                note(findings, "ok", f"{stage}.data", f"the first prompt reads {first!r}")
                longest = max(_measure_prompt(found, at, tokenizer, options) for at in _choose_rows(found))
                prepared.longest_prompt = max(prepared.longest_prompt, longest)
                new_tokens = section.max_new_tokens
                what = f"the longest prompt has {longest} tokens, with max_new_tokens={new_tokens} that is"
                check_fit(setting, longest + new_tokens, what)
    for stage, mixture in rows.training.items():
        if stage != "rl":
            with reporting(findings, f"{stage}.data"):
                longest = _prepare_stage(config, stage, mixture, tokenizer, prepared, findings)
                prepared.longest_conversation = max(prepared.longest_conversation, longest)
                check_fit(f"{stage}.max_length", longest, "the longest row, in tokens:")
    return prepared


def _prepare_stage(
    config: RunConfig,
    stage: str,
    mixture: Mixture[Row],
    tokenizer: ChatTokenizer,
    prepared: PreparedRows,
    findings: Findings | None,
) -> int:
    """Tokens of the longest row of a stage, whose samples are in `prepared` afterwards."""
    section: Any = stage_config(config, stage)
    mixture = mixture if findings is None else _thin(mixture)
    if stage == "sft":
        options = TemplateOptions(config.model.template_params)
        how = {"max_length": section.max_length, "train_on": section.train_on, "options": options}
        training = prepared.conversations = prepare_sft_mixture(mixture, tokenizer, **how)
        trained = training.samples
    else:
        made = prepared.preferences[stage] = prepare_preferences(config, stage, mixture, tokenizer)
        training, held_out = made.training, made.held_out
        trained = [row for one in (*training.samples, *held_out) for row in one.rows]
        counts = f"{len(training.samples)} train and {len(held_out)} are held out"
        note(findings, "ok", f"{stage}.data", f"of {len(mixture.samples)} rows {counts}")
    if findings is not None:
        _describe_first(findings, f"{stage}.data", training.samples[0], tokenizer)
        for line in describe_counts(stage, training, section.max_length):
            note(findings, "warning", f"{stage}.data", line.partition(": ")[2])
    return max(len(row.token_ids) for row in trained)


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


def _describe_first(findings: Findings, subject: str, sample: Any, tokenizer: Any) -> None:
    """Notes each text of the sample as the model reads it, what trains within ⟦ ⟧; cut in the middle when it
    is long.
    """
    texts = {"conversation": sample}
    if not isinstance(sample, SFTSample):
        names = ("chosen", "rejected") if sample.desirable is None else ("labelled",)
        texts = {f"{name} response": row for name, row in zip(names, sample.rows, strict=False)}
    for what, row in texts.items():
        mask = row.loss_mask
        edges = [0, *(at for at in range(1, len(mask)) if mask[at] != mask[at - 1]), len(mask)]
        pieces = [
            f"⟦{text}⟧" if mask[begin] else text
            for begin, end in pairwise(edges)
            for text in [tokenizer.decode(row.token_ids[begin:end].tolist())]
        ]
        text, half = repr("".join(pieces)), SHOWN_CHARACTERS // 2
        shown = text if len(text) <= SHOWN_CHARACTERS else f"{text[:half]} … {text[-half:]}"
        counts = f"{int(mask.sum())} of {len(mask)} tokens, within ⟦ ⟧"
        note(findings, "ok", subject, f"of the first {what} this trains: {counts}: {shown}")


# --- preferences --------------------------------------------------------------------------------------------


def prepare_preferences(
    config: RunConfig, stage: str, mixture: Mixture[Row], tokenizer: ChatTokenizer
) -> PreparedPreferences:
    """What the stage "preference" or "reward_model" trains on and what it is evaluated on. Raises DataError
    and ModelError as prepare_preference_mixture and split_held_out do.
    """
    section: Any = stage_config(config, stage)
    samples = prepare_preference_mixture(
        mixture,
        tokenizer,
        labelled=choose_use(config, stage) == "labelled",
        max_length=section.max_length,
        options=TemplateOptions(config.model.template_params),
        name=f"{stage}.data",
    )
    return PreparedPreferences(*split_held_out(samples, section.held_out, name=stage))


def describe_counts(stage: str, training: Mixture[Any], max_length: int) -> Iterator[str]:
    """What was cut or left out, a line each."""
    if training.truncated:
        yield f"{stage}.data: {training.truncated} responses are cut at max_length={max_length}"
    for reason, count in training.dropped.items():
        if count:
            yield f"{stage}.data: {count} samples left out: {reason.replace('_', ' ')}"
