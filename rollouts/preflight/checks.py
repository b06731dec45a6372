"""Findings about a run before it starts: rows, functions, the model directory, the chat template, lengths,
memory, and what it will compute.

A check reports instead of raising, so that one look shows everything that is wrong.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollouts.config.plugins import Role, load_function
from rollouts.config.schema import PreferenceTrainingConfig, RLTrainingConfig, RunConfig, SFTTrainingConfig
from rollouts.config.tables import DataSourceConfig, RolloutConfig
from rollouts.data.chat import (
    ChatTokenizer,
    TemplateOptions,
    compute_loss_mask,
    render_prompt,
    tokenize_conversation,
    tokenize_prompt,
)
from rollouts.data.datasets import (
    Mixture,
    Row,
    SourceRows,
    exclude_prompts,
    name_sources,
    read_source,
    require_good_rows,
    row_to_conversation,
    unique_prompts,
)
from rollouts.data.messages import parse_tools
from rollouts.data.rows import RowUse
from rollouts.data.sft import SFTMixture, prepare_sft_mixture, prepare_sft_rows
from rollouts.engines.open import check_engine_config
from rollouts.errors import ConfigError, DataError, ModelError
from rollouts.filters import FILTERS
from rollouts.loops.algorithm import list_algorithms
from rollouts.preflight.estimate import Lengths, estimate_memory, estimate_work, read_model_size
from rollouts.preflight.findings import Finding, reporting
from rollouts.preflight.functions import check_reward_settings, load_advantage
from rollouts.preflight.preferences import PREFERENCE_STAGES, check_preferences
from rollouts.preflight.rows import Rows, choose_use
from rollouts.types import IntArray

if TYPE_CHECKING:
    from rollouts.models.devices import DeviceMemory

LossSection = PreferenceTrainingConfig | RLTrainingConfig  # the table of a stage that names its loss
LOOKED_AT = (
    20_000  # rows that are tokenized: seconds; of more, the longest half of them and others evenly spaced
)
SHOWN_BAD_ROWS = 20
SHOWN_CHARACTERS = 600  # of a conversation whose trained parts are shown


@dataclass(frozen=True, slots=True)
class CheckedRun:
    """What was found, and the rows that were read on the way."""

    findings: list[Finding]
    rows: Mapping[str, Sequence[Row]]  # of "eval" and the stages, as far as they could be read


def look_at_run(
    config: RunConfig,
    stages: Sequence[str],
    *,
    find_model: Callable[[str], Path],
    open_tokenizer: Callable[[Path], ChatTokenizer],
    base_dir: Path,
    check_loss: Callable[[LossSection], None] | None = None,
    check_models: Callable[[Any], object] | None = None,
    look_at_device: Callable[[], DeviceMemory] | None = None,
) -> CheckedRun:
    """Everything that can be known about a run without weights: rows, functions, model directory, chat
    template, lengths, memory, work.

    `find_model` answers model.name with a directory, `open_tokenizer` opens the tokenizer in it; both raise
    ModelError when they cannot. `check_loss` raises ConfigError or PlugInError for a stage whose loss cannot
    be used; `check_models`, given the tokenizer, raises ConfigError or ModelError for a reward model or a
    critic that RL cannot have; `look_at_device` says where the run would compute and raises ConfigError where
    model.device is not to be had, None: on the CPU. They are asked for because they load torch. Raises: never
    for what files and users do; those become findings of level "error".
    """
    missing = [stage for stage in stages if getattr(config, stage) is None]
    no_table = "--mode has this stage but the config has no [{}] table; add it or choose another mode"
    findings = [Finding("error", stage, no_table.format(stage)) for stage in missing]
    present = [stage for stage in stages if stage not in missing]
    rows = collect_rows(config, present, findings)
    findings += check_functions(config, stages, base_dir=base_dir)
    for stage, section in (("preference", config.preference), ("rl", config.rl)):
        if check_loss and section and stage in stages:
            with reporting(findings, f"{stage}.loss"):
                check_loss(section)
    if "rl" in stages:
        with reporting(findings, "engine"):
            check_engine_config(config.engine)
    device: DeviceMemory | None = None
    with reporting(findings, "model.device"):
        if look_at_device is not None:
            device = look_at_device()
            findings.append(
                Finding("ok", "model.device", "on the CPU" if device.kind == "cpu" else "on a GPU")
            )
    with reporting(findings, "model.chat_template"):
        if config.model.chat_template and not Path(config.model.chat_template).is_file():
            raise ModelError(
                f"there is no file {config.model.chat_template}; name a Jinja file, or leave it out to use"
                " the tokenizer's own"
            )
    with reporting(findings, "model.name"):
        model_dir = find_model(config.model.name)
        tokenizer = open_tokenizer(model_dir)
        findings.append(Finding("ok", "model.name", str(model_dir)))
        if check_models is not None:
            with reporting(findings, "rl"):
                check_models(tokenizer)
        lengths = check_lengths(
            config, present, rows, tokenizer, context_length=read_context_length(model_dir), findings=findings
        )
        findings += estimate_memory(config, present, lengths, read_model_size(model_dir), device=device)
    findings += estimate_work(config, present, {name: len(found) for name, found in rows.items()})
    return CheckedRun(findings, rows)


# --- rows ---------------------------------------------------------------------------------------------------


def collect_rows(config: RunConfig, stages: Sequence[str], findings: list[Finding]) -> dict[str, list[Row]]:
    """The rows of "eval" and of each stage that could be read, held-out prompts left out; what was found is
    appended to `findings`.
    """
    rows: dict[str, list[Row]] = {}
    for stage in (*(["eval"] if config.eval else []), *stages):
        with reporting(findings, f"{stage}.data"):
            sources = _read_sources(
                getattr(config, stage).data, f"{stage}.data", choose_use(config, stage), findings
            )
            found = [row for source in sources for row in source.rows if row is not None]
            if not found and any(
                finding.level == "error" and finding.subject.startswith(f"{stage}.data")
                for finding in findings
            ):
                continue  # that there is no row follows from what was said
            rows[stage], removed = _without_held_out(stage, found, rows.get("eval", []))
            findings.append(_describe_rows(stage, len(rows[stage]), removed, sources))
    return rows


def _read_sources(
    sources: Sequence[DataSourceConfig], name: str, use: RowUse, findings: list[Finding]
) -> list[SourceRows]:
    """Every source that can be read, its malformed rows listed in a finding."""
    names = name_sources(sources)
    found: list[SourceRows] = []
    for index, source in enumerate(sources):
        key = f"{name}.{index}" if len(sources) > 1 else name
        with reporting(findings, key):
            rows = read_source(source, name=key, use=use)
            found.append(replace(rows, name=names[index]))
            findings += _describe_bad_rows(rows, source, key)
    Mixture(tuple(found)).check_fields(name=name)
    return found


def _describe_bad_rows(rows: SourceRows, source: DataSourceConfig, key: str) -> list[Finding]:
    if not rows.bad:
        return []
    found: list[Finding] = []
    with reporting(found, key):
        require_good_rows(rows, max_bad_fraction=source.max_bad_fraction, name=key)
    rule = (
        f"more than max_bad_fraction={source.max_bad_fraction:g} allows; mend them"
        if found
        else "they are skipped"
    )
    lines = [
        f"{len(rows.bad)} of {len(rows.rows)} rows are malformed, {rule}:",
        *(f"{bad}" for bad in rows.bad[:SHOWN_BAD_ROWS]),
    ]
    more = len(rows.bad) - SHOWN_BAD_ROWS
    return [
        Finding(
            "error" if found else "warning",
            key,
            "\n".join([*lines, *([f"and {more} more"] if more > 0 else [])]),
        )
    ]


def _without_held_out(stage: str, found: list[Row], held_out: list[Row]) -> tuple[list[Row], int]:
    if stage != "eval":
        kept = exclude_prompts(found, held_out)
        return kept.rows, kept.removed_count
    unique = unique_prompts(found)
    return unique, len(found) - len(unique)


def _describe_rows(stage: str, count: int, removed: int, sources: Sequence[SourceRows]) -> Finding:
    why = "asked twice" if stage == "eval" else "held out by eval.data"
    left_out = f", {removed} left out because they are {why}" if removed else ""
    total = sum(source.weight for source in sources)
    shares = ", ".join(
        f"{source.name} {source.good_count} rows ({source.weight / total:.0%} of the draws)"
        for source in sources
    )
    mixture = f": {shares}" if len(sources) > 1 else ""
    return Finding("ok" if count else "error", f"{stage}.data", f"{count} rows{left_out}{mixture}")


# --- functions ----------------------------------------------------------------------------------------------


def check_functions(config: RunConfig, stages: Sequence[str], *, base_dir: Path) -> list[Finding]:
    """One finding per function that the config names: it imports and takes what its role passes."""
    rl = config.rl
    rollout = rl.rollout if rl else RolloutConfig()
    findings: list[Finding] = []
    with reporting(findings, "rl.rollout.reward"):
        check_reward_settings(rollout, needed="rl" in stages and rl is not None)
    if config.eval and not config.eval.reward and not rollout.reward:
        findings.append(
            Finding(
                "error",
                "eval.reward",
                "empty, and there is no rl.rollout.reward to fall back on; name a function of one sample",
            )
        )
    if rl and "rl" in stages:
        findings += check_advantages(rl, base_dir=base_dir)
    for key, role, name in named_functions(config):
        with reporting(findings, key):
            load_function(name, role=role, base_dir=base_dir, built_in=FILTERS if role == "filter" else None)
            findings.append(Finding("ok", key, name))
    return findings


def check_advantages(rl: RLTrainingConfig, *, base_dir: Path) -> list[Finding]:
    """One finding per advantage that [rl] or a change of it names and that is the user's or wrong."""
    findings: list[Finding] = []
    seen: list[tuple[str, object]] = []
    for index, settings in enumerate(list_algorithms(rl)):
        if (settings.advantage, settings.advantage_params) in seen:
            continue
        seen.append((settings.advantage, settings.advantage_params))
        key = "rl.changes.advantage" if index else "rl.advantage"
        with reporting(findings, key):
            load_advantage(settings, base_dir=base_dir)
            findings += [Finding("ok", key, settings.advantage)] if ":" in settings.advantage else []
    return findings


def named_functions(config: RunConfig) -> list[tuple[str, Role, str]]:
    """(setting, role, name) of every function that the config names."""
    found: list[tuple[str, Role, str]] = []
    if config.rl:
        rollout = config.rl.rollout
        found.append(("rl.rollout.generate", "generate", rollout.generate))
        found.append(("rl.rollout.reward", "reward", rollout.reward))
        found.append(("rl.rollout.group_reward", "group_reward", rollout.group_reward))
        found.extend(("rl.rollout.filters", "filter", name) for name in rollout.filters)
        found.append(("rl.curriculum", "curriculum", config.rl.curriculum))
        found.append(("rl.loss", "loss", config.rl.loss if ":" in config.rl.loss else ""))
    if config.eval:
        found.append(("eval.reward", "reward", config.eval.reward))
    for stage in ("sft", "rl", *PREFERENCE_STAGES, "eval"):
        section = getattr(config, stage)
        found.extend(
            (f"{stage}.data.function", "rows", source.function)
            for source in (section.data if section else ())
        )
    return [(key, role, name) for key, role, name in found if name]


# --- the model's side ---------------------------------------------------------------------------------------


def read_context_length(model_dir: Path) -> int | None:
    """Tokens that the model's config.json allows for prompt and response together; None if it does not say.
    Raises ModelError.
    """
    path = model_dir / "config.json"
    try:
        settings: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{path}: there is no such file; a model directory has a config.json") from error
    except ValueError as error:
        raise ModelError(f"{path}: not JSON: {error}") from error
    length = settings.get("max_position_embeddings")
    return length if isinstance(length, int) else None


def check_lengths(
    config: RunConfig,
    stages: Sequence[str],
    rows: Mapping[str, Sequence[Row]],
    tokenizer: ChatTokenizer,
    *,
    context_length: int | None,
    findings: list[Finding],
) -> Lengths:
    """The longest prompt and conversation in tokens; whether the chat template takes the rows and they fit is
    appended to `findings`.

    Looks at every row, or at LOOKED_AT of them.
    """
    options = TemplateOptions(config.model.template_params)
    longest_prompt = longest_conversation = 0
    if config.rl and "rl" in stages and rows.get("rl"):
        with reporting(findings, "rl.data"):
            longest_prompt = _check_prompts(
                "rl",
                rows["rl"],
                tokenizer,
                config.rl.rollout.max_new_tokens,
                context_length,
                options,
                findings,
            )
    if config.eval and rows.get("eval"):
        with reporting(findings, "eval.data"):
            held_out = _check_prompts(
                "eval", rows["eval"], tokenizer, config.eval.max_new_tokens, context_length, options, findings
            )
            longest_prompt = max(longest_prompt, held_out)
    if config.sft and "sft" in stages and rows.get("sft"):
        with reporting(findings, "sft.data"):
            longest_conversation = _check_conversations(
                config.sft, rows["sft"], tokenizer, context_length, options, findings
            )
    for stage in PREFERENCE_STAGES:
        if stage in stages and rows.get(stage):
            with reporting(findings, f"{stage}.data"):
                looked_at = [
                    rows[stage][index] for index in _choose_rows([len(str(row)) for row in rows[stage]])
                ]
                longest = check_preferences(
                    config, stage, looked_at, tokenizer, context_length=context_length, findings=findings
                )
                longest_conversation = max(longest_conversation, longest)
    return Lengths(longest_prompt, longest_conversation)


def prepare_rows(
    config: RunConfig,
    stages: Sequence[str],
    rows: Rows,
    tokenizer: ChatTokenizer,
    *,
    context_length: int | None,
) -> SFTMixture | None:
    """The tokenized conversations of an SFT stage, after the same look at prompts and lengths as a check
    takes: before a model loads.

    Raises ConfigError for a length that does not fit the context, DataError and ModelError for rows that the
    chat template does not take.
    """
    findings: list[Finding] = []
    prompts = {
        stage: [row for source in mixture.sources for row in source.rows if row is not None]
        for stage, mixture in rows.training.items()
    }
    known = {"rl": prompts.get("rl", []), "eval": list(rows.held_out)}
    check_lengths(
        config,
        [stage for stage in stages if stage != "sft"],
        known,
        tokenizer,
        context_length=context_length,
        findings=findings,
    )
    wrong = next((finding for finding in findings if finding.level == "error"), None)
    if wrong is not None:
        raise ConfigError(f"{wrong.subject}: {wrong.message}")
    if "sft" not in stages or config.sft is None:
        return None
    options = TemplateOptions(config.model.template_params)
    prepared = prepare_sft_mixture(
        rows.training["sft"],
        tokenizer,
        max_length=config.sft.max_length,
        train_on=config.sft.train_on,
        options=options,
    )
    longest = max(len(sample.token_ids) for sample in prepared.slots if sample is not None)
    if context_length is not None and longest > context_length:
        raise ConfigError(
            f"sft.max_length: a row trains {longest} tokens, more than the context of {context_length};"
            " lower it"
        )
    return prepared


def _check_prompts(
    stage: str,
    rows: Sequence[Row],
    tokenizer: ChatTokenizer,
    max_new_tokens: int,
    context_length: int | None,
    options: TemplateOptions,
    findings: list[Finding],
) -> int:
    first = render_prompt(
        rows[0]["prompt"], tokenizer, options=options, tools=parse_tools(rows[0].get("tools"), where="tools")
    )
    findings.append(Finding("ok", f"{stage}.data", f"the first prompt reads {first!r}"))
    longest = 0
    for index in _choose_rows([_count_characters(row["prompt"]) for row in rows]):
        prompt = _tokenize_row(rows[index], f"row {index}", tokenizer, options)
        longest = max(longest, len(prompt))
    needed = longest + max_new_tokens
    key = "rl.rollout.max_new_tokens" if stage == "rl" else "eval.max_new_tokens"
    total = f"the longest prompt has {longest} tokens, with max_new_tokens={max_new_tokens} that is {needed}"
    fits = context_length is None or needed <= context_length
    limit = (
        ""
        if context_length is None
        else f" of {context_length}"
        if fits
        else f", more than the context of {context_length}; lower it"
    )
    findings.append(Finding("ok" if fits else "error", key, total + limit))
    return longest


def _count_characters(prompt: str | Sequence[Mapping[str, Any]]) -> int:
    return len(prompt) if isinstance(prompt, str) else sum(len(str(message)) for message in prompt)


def _tokenize_row(row: Row, where: str, tokenizer: ChatTokenizer, options: TemplateOptions) -> IntArray:
    try:
        return tokenize_prompt(
            row["prompt"], tokenizer, options=options, tools=parse_tools(row.get("tools"), where="tools")
        )
    except (DataError, ModelError) as error:
        raise type(error)(f"{where}: {error}") from error


def _choose_rows(characters: Sequence[int]) -> list[int]:
    """Numbers of the rows that are looked at, in order: all, or LOOKED_AT of them, half the longest, the
    others evenly spaced.
    """
    count = len(characters)
    if count <= LOOKED_AT:
        return list(range(count))
    by_length = sorted(range(count), key=lambda index: characters[index], reverse=True)[: LOOKED_AT // 2]
    spaced = (index * count // (LOOKED_AT // 2) for index in range(LOOKED_AT // 2))
    return sorted({*by_length, *spaced})


def _check_conversations(
    config: SFTTrainingConfig,
    rows: Sequence[Row],
    tokenizer: ChatTokenizer,
    context_length: int | None,
    options: TemplateOptions,
    findings: list[Finding],
) -> int:
    findings.append(
        Finding(
            "ok",
            "sft.data",
            f"of the first conversation this trains: {_mark_trained(rows[0], tokenizer, config, options)}",
        )
    )
    chosen = set(_choose_rows([_count_row_characters(row) for row in rows]))
    looked_at = [row if index in chosen else None for index, row in enumerate(rows)]
    prepared = prepare_sft_rows(
        looked_at, tokenizer, max_length=config.max_length, train_on=config.train_on, options=options
    )
    tokens = max(len(sample.token_ids) for sample in prepared.samples)
    findings.append(
        Finding(
            "ok",
            "sft.data",
            f"the longest conversation trains {tokens} tokens of max_length={config.max_length}",
        )
    )
    dropped = sum(prepared.dropped.values())
    if prepared.truncated or dropped:
        counts = (
            f"of {len(chosen)} rows {prepared.truncated} are cut and {dropped} dropped; raise it if they"
            " matter"
        )
        findings.append(Finding("warning", "sft.max_length", counts))
    if context_length is not None and tokens > context_length:
        findings.append(
            Finding(
                "error",
                "sft.max_length",
                f"a row trains {tokens} tokens, more than the context of {context_length}; lower it",
            )
        )
    return tokens


def _mark_trained(
    row: Row, tokenizer: ChatTokenizer, config: SFTTrainingConfig, options: TemplateOptions
) -> str:
    """The conversation as the model reads it, what trains within ⟦ ⟧; cut in the middle when it is long."""
    messages = row_to_conversation(row, where="row 0")
    conversation = tokenize_conversation(
        messages,
        tokenizer,
        train_on=config.train_on,
        options=options,
        tools=parse_tools(row.get("tools"), where="tools"),
    )
    mask = compute_loss_mask(conversation, config.train_on)
    decode: Any = getattr(tokenizer, "decode", None)
    counts = f"{int(mask.sum())} of {len(mask)} tokens"
    if decode is None:
        return counts
    edges = [0, *(at for at in range(1, len(mask)) if mask[at] != mask[at - 1]), len(mask)]
    pieces = [
        (decode(conversation.token_ids[begin:end].tolist()), bool(mask[begin]))
        for begin, end in pairwise(edges)
    ]
    text = repr("".join(f"⟦{piece}⟧" if trains else piece for piece, trains in pieces))
    half = SHOWN_CHARACTERS // 2
    return f"{counts}, within ⟦ ⟧: " + (
        text if len(text) <= SHOWN_CHARACTERS else f"{text[:half]} … {text[-half:]}"
    )


def _count_row_characters(row: Row) -> int:
    answer = row.get("answer")
    return sum(_count_characters(row[key]) for key in ("prompt", "messages") if key in row) + (
        len(answer) if isinstance(answer, str) else 0
    )
