"""Findings about a run before it starts: rows, functions, the model directory, the chat template and lengths.

A check reports instead of raising, so that one look shows everything that is wrong.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rollouts.config.plugins import Role, load_function
from rollouts.config.schema import RunConfig, SFTTrainingConfig
from rollouts.data.chat import ChatTokenizer, render_prompt, tokenize_prompt
from rollouts.data.datasets import Row, exclude_prompts, load_rows, require_prompts, unique_prompts
from rollouts.data.sft import prepare_sft_rows
from rollouts.errors import ModelError, RolloutsError
from rollouts.filters import FILTERS

LOOKED_AT = 64  # rows that are tokenized: enough to see a template or a length that does not fit, quick for any dataset


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    level: Literal["ok", "warning", "error"]  # error: the run would stop at it
    subject: str  # the setting or file
    message: str  # what is so, with its numbers


def check_run(
    config: RunConfig,
    stages: Sequence[str],
    *,
    find_model: Callable[[str], Path],
    open_tokenizer: Callable[[Path], ChatTokenizer],
    base_dir: Path,
) -> list[Finding]:
    """Everything that can be known about a run without weights: rows, functions, model directory, chat template, lengths.

    `find_model` answers model.name with a directory, `open_tokenizer` opens the tokenizer in it; both raise ModelError when they cannot.
    Raises: never for what files and users do; those become findings of level "error".
    """
    missing = [stage for stage in stages if getattr(config, stage) is None]
    findings = [Finding("error", stage, f"--mode has this stage but the config has no [{stage}] table") for stage in missing]
    rows = collect_rows(config, [stage for stage in stages if stage not in missing], findings)
    findings += check_functions(config, stages, base_dir=base_dir)
    with _reporting(findings, "model.name"):
        model_dir = find_model(config.model.name)
        tokenizer = open_tokenizer(model_dir)
        findings.append(Finding("ok", "model.name", str(model_dir)))
        findings += check_lengths(config, rows, tokenizer, context_length=read_context_length(model_dir))
    return findings


def has_errors(findings: Iterable[Finding]) -> bool:
    """Whether the run would stop."""
    return any(finding.level == "error" for finding in findings)


def format_findings(findings: Iterable[Finding]) -> str:
    """One line per finding: level, subject, message."""
    return "".join(f"{finding.level:<8} {finding.subject}: {finding.message}\n" for finding in findings)


@contextmanager
def _reporting(findings: list[Finding], subject: str) -> Iterator[None]:
    try:
        yield
    except RolloutsError as error:
        findings.append(Finding("error", subject, str(error).removeprefix(f"{subject}: ")))


# --- rows --------------------------------------------------------------------------------------------------------------------


def collect_rows(config: RunConfig, stages: Sequence[str], findings: list[Finding]) -> dict[str, list[Row]]:
    """The rows of "eval" and of each stage that could be read, held-out prompts left out; what was found is appended to `findings`."""
    rows: dict[str, list[Row]] = {}
    for stage in (*(["eval"] if config.eval else []), *stages):
        section = getattr(config, stage)
        with _reporting(findings, f"{stage}.data"):
            found = load_rows(section.data[0], name=f"{stage}.data")
            if stage != "sft":
                require_prompts(found, name=f"{stage}.data")
            rows[stage], removed = _without_held_out(stage, found, rows.get("eval", []))
            findings.append(_describe_rows(stage, len(rows[stage]), removed))
    return rows


def _without_held_out(stage: str, found: list[Row], held_out: list[Row]) -> tuple[list[Row], int]:
    if stage != "eval":
        return exclude_prompts(found, held_out)
    kept = unique_prompts(found)
    return kept, len(found) - len(kept)


def _describe_rows(stage: str, count: int, removed: int) -> Finding:
    why = "asked twice" if stage == "eval" else "held out by eval.data"
    left_out = f", {removed} left out because they are {why}" if removed else ""
    return Finding("ok" if count else "error", f"{stage}.data", f"{count} rows{left_out}")


# --- functions ---------------------------------------------------------------------------------------------------------------


def check_functions(config: RunConfig, stages: Sequence[str], *, base_dir: Path) -> list[Finding]:
    """One finding per function that the config names: it imports and takes what its role passes."""
    rollout = config.rl.rollout if config.rl else None
    named: list[tuple[str, Role, str]] = []
    findings: list[Finding] = []
    if rollout and config.rl:
        named.append(("rl.rollout.generate", "generate", rollout.generate))
        named.append(("rl.rollout.reward", "reward", rollout.reward))
        named.extend(("rl.rollout.filters", "filter", name) for name in rollout.filters if name not in FILTERS)
        named.append(("rl.loss", "loss", config.rl.loss if ":" in config.rl.loss else ""))
        if "rl" in stages and not rollout.reward:
            findings.append(Finding("error", "rl.rollout.reward", "empty; name a function as module:function or file.py:function"))
    if config.eval:
        named.append(("eval.reward", "reward", config.eval.reward))
        if not config.eval.reward and not (rollout and rollout.reward):
            findings.append(Finding("error", "eval.reward", "empty, and there is no rl.rollout.reward to fall back on; name a function"))
    for key, role, name in named:
        with _reporting(findings, key):
            if name:
                load_function(name, role=role, base_dir=base_dir)
                findings.append(Finding("ok", key, name))
    return findings


# --- the model's side --------------------------------------------------------------------------------------------------------


def read_context_length(model_dir: Path) -> int | None:
    """Tokens that the model's config.json allows for prompt and response together; None if it does not say. Raises ModelError."""
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
    config: RunConfig, rows: Mapping[str, Sequence[Row]], tokenizer: ChatTokenizer, *, context_length: int | None
) -> list[Finding]:
    """Whether the chat template takes the rows and the longest of them fit the context.

    Looks at the LOOKED_AT rows with the most characters; one with fewer characters but more tokens can escape.
    """
    findings: list[Finding] = []
    if config.rl and rows.get("rl"):
        with _reporting(findings, "rl.data"):
            findings += _check_prompts("rl", rows["rl"], tokenizer, config.rl.rollout.max_new_tokens, context_length)
    if config.eval and rows.get("eval"):
        with _reporting(findings, "eval.data"):
            findings += _check_prompts("eval", rows["eval"], tokenizer, config.eval.max_new_tokens, context_length)
    if config.sft and rows.get("sft"):
        with _reporting(findings, "sft.data"):
            findings += _check_conversations(config.sft, rows["sft"], tokenizer, context_length)
    return findings


def _check_prompts(
    stage: str, rows: Sequence[Row], tokenizer: ChatTokenizer, max_new_tokens: int, context_length: int | None
) -> list[Finding]:
    first = render_prompt(rows[0]["prompt"], tokenizer)
    prompts = sorted((row["prompt"] for row in rows), key=_count_characters, reverse=True)[:LOOKED_AT]
    longest = max(len(tokenize_prompt(prompt, tokenizer)) for prompt in prompts)
    needed = longest + max_new_tokens
    key = "rl.rollout.max_new_tokens" if stage == "rl" else "eval.max_new_tokens"
    total = f"the longest prompt has {longest} tokens, with max_new_tokens={max_new_tokens} that is {needed}"
    fits = context_length is None or needed <= context_length
    limit = "" if context_length is None else f" of {context_length}" if fits else f", more than the context of {context_length}; lower it"
    return [Finding("ok", f"{stage}.data", f"the first prompt reads {first!r}"), Finding("ok" if fits else "error", key, total + limit)]


def _count_characters(prompt: str | Sequence[Mapping[str, str]]) -> int:
    return len(prompt) if isinstance(prompt, str) else sum(len(message["content"]) for message in prompt)


def _check_conversations(config: SFTTrainingConfig, rows: Sequence[Row], tokenizer: ChatTokenizer, context_length: int | None) -> list[Finding]:
    longest = sorted(rows, key=_count_row_characters, reverse=True)[:LOOKED_AT]
    prepared = prepare_sft_rows(longest, tokenizer, max_length=config.max_length, train_on=config.train_on)
    tokens = max(len(sample.token_ids) for sample in prepared.samples)
    findings = [Finding("ok", "sft.data", f"the longest conversation trains {tokens} tokens of max_length={config.max_length}")]
    dropped = sum(prepared.dropped.values())
    if prepared.truncated or dropped:
        counts = f"of the {len(longest)} longest rows {prepared.truncated} are cut and {dropped} dropped; raise it if they matter"
        findings.append(Finding("warning", "sft.max_length", counts))
    if context_length is not None and tokens > context_length:
        findings.append(Finding("error", "sft.max_length", f"a row trains {tokens} tokens, more than the context of {context_length}; lower it"))
    return findings


def _count_row_characters(row: Row) -> int:
    answer = row.get("answer")
    return sum(_count_characters(row[key]) for key in ("prompt", "messages") if key in row) + (len(answer) if isinstance(answer, str) else 0)
