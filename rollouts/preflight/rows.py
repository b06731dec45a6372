"""The rows of a run, for a run and for a check: read, without the held-out prompts, and tokenized before a
model loads.
"""

import math
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import groupby
from typing import Any, NamedTuple

from rollouts.config.load import list_stages, stage_config
from rollouts.config.schema import RunConfig
from rollouts.data.chat import tokenize_prompt
from rollouts.data.datasets import exclude_prompts, load_sources, unique_prompts
from rollouts.data.mixture import Mixture
from rollouts.data.rows import Row, RowUse, naming, parse_tools
from rollouts.data.samples import prepare_preference_mixture, prepare_sft_mixture, split_held_out
from rollouts.errors import ConfigError
from rollouts.preflight.findings import Findings

LOOKED_AT = 20_000  # prompts of RL that are tokenized, those with the longest text: seconds
SHOWN_BAD_ROWS = 5
SHORTENED = reprlib.Repr()
SHORTENED.maxstring = 600  # characters of a conversation whose trained parts are shown
USES: dict[str, RowUse] = {  # by stage, or stage and loss
    "sft": "conversation",
    "preference": "pair",
    "preference kto": "labelled",
    "reward_model": "pair",
    "reward_model mse": "scored",
}


class Rows(NamedTuple):
    """The datasets of a run. No prompt of `held_out` is in a training mixture."""

    training: dict[str, Mixture[Row]]  # by stage
    held_out: tuple[Row, ...]  # each prompt once

    def list_rows(self, stage: str) -> Sequence[Row]:
        """The rows of a stage or of "eval", without holes; none where they could not be read."""
        if stage == "eval":
            return self.held_out
        return self.training[stage].samples if stage in self.training else []


class StageSamples(NamedTuple):
    """What a stage trains on, tokenized, and the preferences that it is evaluated on."""

    training: Mixture[Any]
    held_out: tuple[Any, ...] = ()


@dataclass
class PreparedRows:
    """The samples of the stages that train on rows, and the lengths of what was looked at."""

    samples: dict[str, StageSamples] = field(default_factory=dict)  # by stage
    longest_prompt: int = 0  # in tokens; 0: unknown
    longest_row: int = 0

    def list_held_out(self, stage: str) -> tuple[Any, ...]:
        """The preferences on which a stage is evaluated; none where it has none."""
        return self.samples[stage].held_out if stage in self.samples else ()


def load_all_rows(config: RunConfig, stages: Sequence[str], findings: Findings) -> Rows:
    """The rows of every stage. Reports DataError naming file, line and field; ConfigError for a stage that
    the config has no table for.
    """
    held_out = []
    training = {}
    for stage in (*(["eval"] if config.eval else []), *stages):
        name = f"{stage}.data"
        with findings.reporting(name):
            section: Any = config.eval if stage == "eval" else stage_config(config, stage)
            mixture = load_sources(section.data, name=name, use=choose_use(config, stage))
            if stage == "eval":
                held_out, why = unique_prompts(mixture.samples), "asked twice"
                removed = len(mixture.samples) - len(held_out)
            else:
                training[stage], removed = exclude_prompts(mixture, held_out, name=name)
                why = "held out by eval.data"
            shares = ", ".join(
                f"{source.name} {len(source.good)} rows"
                f" ({source.weight / sum(one.weight for one in mixture.sources):.0%} of the draws)"
                for source in mixture.sources
            )
            findings.note(
                "ok",
                name,
                f"{len(mixture.samples) - removed} rows"
                f"{f', {removed} left out because they are {why}' if removed else ''}"
                f"{f': {shares}' if len(mixture.sources) > 1 else ''}",
            )
            if bad := [str(bad) for source in mixture.sources for bad in source.bad]:
                lines = [f"{len(bad)} malformed rows are skipped:", *bad[:SHOWN_BAD_ROWS]]
                if bad[SHOWN_BAD_ROWS:]:
                    lines.append("…")
                findings.note("warning", name, "\n".join(lines))
    return Rows(training, tuple(held_out))


def choose_use(config: RunConfig, stage: str) -> RowUse:
    """What the rows of "eval" or a training stage must be: of preferences pairs, but labelled responses for
    KTO, and scored ones for a reward model with loss "mse".
    """
    return USES.get(f"{stage} {getattr(getattr(config, stage), 'loss', '')}", USES.get(stage, "prompt"))


def count_epochs(
    config: RunConfig, rows: Rows, prepared: PreparedRows, saved: RunConfig | None, findings: Findings
) -> RunConfig:
    """The config with steps in place of epochs, for every stage whose rows are known; for another one the
    steps that the run had before, when its config was `saved`.

    Rounded up, so each row is drawn at least so often. An epoch of a mixture has as many draws as its sources
    have rows together. Warns where the run had another number before.
    """
    counted = {}
    for stage in list_stages(config):
        section = getattr(config, stage)
        before = getattr(getattr(saved, stage, None), "steps", 0)
        if stage == "rl":
            drawn, known = section.rollout.num_prompts, len(rows.list_rows(stage))
        else:
            made = prepared.samples.get(stage)
            drawn, known = section.batch_size, len(made.training.samples) if made else 0
        # exact in decimals: 0.1 epochs of 30 rows are 3 rows and no more
        steps = math.ceil(Fraction(str(section.epochs)) * known / drawn) or before
        if not section.epochs or not steps:
            continue
        counted[stage] = section.model_copy(update={"steps": steps, "epochs": 0.0})
        if before not in (0, steps):
            findings.note(
                "warning",
                f"{stage}.epochs",
                f"{section.epochs:g} epochs of {known} rows, {drawn} a step, are {steps} steps; at the last"
                f" start they were {before}: the rows or the setting have changed",
            )
    return config.model_copy(update=counted)


# --- tokens -------------------------------------------------------------------------------------------------


def prepare_rows(
    config: RunConfig, rows: Rows, tokenizer: Any, context_length: int | None, findings: Findings
) -> PreparedRows:
    """The rows of every stage as tokens, after a look at prompts and lengths.

    Reports ConfigError for a length that does not fit the context, DataError and ModelError for rows that the
    chat template does not take, and for a source without a row to train on.
    """
    prepared = PreparedRows()

    def check_fit(setting: str, tokens: int, what: str) -> None:
        with findings.reporting(setting):
            if context_length is not None and tokens > context_length:
                raise ConfigError(
                    f"{setting}: {what} {tokens}, more than the context of {context_length}; lower it"
                )
            findings.note("ok", setting, f"{what} {tokens} of {context_length or 'an unknown context'}")

    def tokenize(row: Row) -> Sequence[int]:
        tools = parse_tools(row.get("tools"))
        params = config.model.template_params
        return tokenize_prompt(row["prompt"], tokenizer, params=params, tools=tools).tolist()

    for stage, section, settings in (("rl", "rl.rollout", config.rollout), ("eval", "eval", config.eval)):
        name, found = f"{stage}.data", rows.list_rows(stage)
        with findings.reporting(name):
            if not settings or not found:
                continue
            findings.note("ok", name, f"the first prompt reads {tokenizer.decode(tokenize(found[0]))!r}")
            longest = 0
            for row_id in sorted(range(len(found)), key=lambda row_id: -len(str(found[row_id])))[:LOOKED_AT]:
                with naming(f"row {row_id}"):
                    longest = max(longest, len(tokenize(found[row_id])))
            prepared.longest_prompt = max(prepared.longest_prompt, longest)
            new_tokens = settings.max_new_tokens
            check_fit(
                f"{section}.max_new_tokens",
                longest + new_tokens,
                f"the longest prompt has {longest} tokens, with max_new_tokens={new_tokens} that is",
            )
    for stage, mixture in rows.training.items():
        with findings.reporting(f"{stage}.data"):
            if stage != "rl":
                made, longest = prepare_samples(config, stage, mixture, tokenizer, findings)
                prepared.samples[stage] = made
                prepared.longest_row = max(prepared.longest_row, longest)
                check_fit(f"{stage}.max_length", longest, "the longest row, in tokens:")
    return prepared


def prepare_samples(
    config: RunConfig, stage: str, mixture: Mixture[Row], tokenizer: Any, findings: Findings
) -> tuple[StageSamples, int]:
    """What a stage other than RL trains on and is evaluated on, and the tokens of its longest row. Notes what
    of the first sample trains, within ⟦ ⟧, and what was cut, left out or held out. Raises DataError and
    ModelError as prepare_sft_mixture, prepare_preference_mixture and split_held_out do.
    """
    section: Any = stage_config(config, stage)
    how: dict[str, Any] = {"max_length": section.max_length, "params": config.model.template_params}
    name = f"{stage}.data"
    if stage == "sft":
        made = StageSamples(prepare_sft_mixture(mixture, tokenizer, train_on=section.train_on, **how))
    else:
        use = choose_use(config, stage)
        samples = prepare_preference_mixture(mixture, tokenizer, use=use, name=name, **how)
        made = StageSamples(*split_held_out(samples, section.held_out, name=stage))
    training, held_out = made
    rows = [getattr(sample, "rows", (sample,)) for sample in (*training.samples, *held_out)]
    for row in rows[0]:
        pieces = groupby(zip(row.loss_mask, row.token_ids.tolist(), strict=True), lambda pair: bool(pair[0]))
        texts = [(trains, tokenizer.decode([token for _, token in pairs])) for trains, pairs in pieces]
        findings.note(
            "ok",
            name,
            f"of the first sample {int(row.loss_mask.sum())} of {len(row.loss_mask)} tokens train, within"
            f" ⟦ ⟧: {SHORTENED.repr(''.join(f'⟦{text}⟧' if trains else text for trains, text in texts))}",
        )
    if held_out:
        findings.note(
            "ok",
            name,
            f"of {len(rows)} samples {len(training.samples)} train and {len(held_out)} are held out",
        )
    left_out = {f"left out: {reason.replace('_', ' ')}": count for reason, count in training.dropped.items()}
    for what, count in {f"cut at max_length={section.max_length}": training.truncated, **left_out}.items():
        if count:
            findings.note("warning", name, f"{count} responses are {what}")
    longest = max(len(row.token_ids) for sample in rows for row in sample)
    return made, longest
