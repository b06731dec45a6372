"""Everything that can be known about a run before it starts, or of a written run's files: reported, not
raised, so that one look shows all that is wrong. What loads torch is imported when it is needed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx

from rollouts.checkpoints.load import check_checkpoint
from rollouts.config.schema import PreferenceTrainingConfig, RLTrainingConfig, RunConfig
from rollouts.config.tables import EngineConfig
from rollouts.engines.open import check_engine_config, read_api_key
from rollouts.errors import ModelError
from rollouts.loops.algorithm import check_algorithms, needs_reference
from rollouts.metrics.jsonl import iterate_rows
from rollouts.preflight.estimate import Lengths, estimate_memory, estimate_work, read_model_size
from rollouts.preflight.findings import Findings, note, reporting
from rollouts.preflight.functions import load_functions
from rollouts.preflight.reward_models import check_reward_models
from rollouts.preflight.rows import Rows, load_all_rows, prepare_rows
from rollouts.run_dir import RunDir, find_activity, list_parts, parse_step

if TYPE_CHECKING:
    from rollouts.models.devices import DeviceMemory

ANSWER_S = 10.0  # for each question to a server
# read-only paths; /is_paused and /server_info are guarded as control calls are
VERSION_PATHS = {"vllm": "/version", "sglang": "/server_info"}
CONTROL_PATHS = {"vllm": "/is_paused", "sglang": "/server_info"}


class CheckedRun(NamedTuple):
    """What was found, and the rows that were read on the way."""

    findings: Findings
    rows: Rows


def look_at_run(
    config: RunConfig, stages: Sequence[str], run_dir: RunDir, *, base_dir: Path, local_ranks: int
) -> CheckedRun:
    """Everything that can be known about a run without weights: rows, functions, losses, device, model
    directory, chat template, lengths, memory, work. `local_ranks` processes of it are on this machine.

    Raises: never for what files and users do; that becomes a finding of level "error".
    """
    findings: Findings = []
    rows = load_all_rows(config, stages, findings)
    load_functions(config, stages, base_dir=base_dir, findings=findings)
    present = [stage for stage in stages if getattr(config, stage) is not None]
    for stage, section in (("preference", config.preference), ("rl", config.rl)):
        if section and stage in stages:
            with reporting(findings, f"{stage}.loss"):
                check_loss(section)
    with reporting(findings, "engine"):
        if "rl" in stages:
            check_engine_config(config.engine)
    from rollouts.models.devices import look_at_device
    from rollouts.models.load import load_tokenizer, resolve_model

    device: DeviceMemory | None = None
    with reporting(findings, "model.device"):
        wanted, deterministic = config.model.device, config.deterministic
        device = look_at_device(wanted, deterministic=deterministic, local_ranks=local_ranks)
        note(findings, "ok", "model.device", "on the CPU" if device.kind == "cpu" else "on a GPU")
    template = Path(config.model.chat_template) if config.model.chat_template else None
    with reporting(findings, "model.name"):
        model_dir = resolve_model(config.model.name, seed=config.seed)
        note(findings, "ok", "model.name", str(model_dir))
        context_length = read_context_length(model_dir)
        tokenizer: Any = load_tokenizer(model_dir, chat_template=template)
        with reporting(findings, "rl"):
            check_reward_models(config, stages, run_dir, tokenizer)
        prepared = prepare_rows(
            config, stages, rows, tokenizer, context_length=context_length, findings=findings
        )
        lengths = Lengths(prepared.longest_prompt, prepared.longest_conversation)
        findings += estimate_memory(config, present, lengths, read_model_size(model_dir), device=device)
    findings += estimate_work(
        config, present, {stage: len(rows.list_rows(stage)) for stage in (*stages, "eval")}
    )
    return CheckedRun(findings, rows)


def read_context_length(model_dir: Path) -> int | None:
    """Tokens that the model's config.json allows for prompt and response together; None if it does not say.
    Raises ModelError.
    """
    path = model_dir / "config.json"
    try:
        length = json.loads(path.read_text(encoding="utf-8")).get("max_position_embeddings")
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"{path} is not the config.json of a model directory: {error}") from error
    return length if isinstance(length, int) else None


def check_loss(config: RLTrainingConfig | PreferenceTrainingConfig) -> None:
    """Raises ConfigError or PlugInError if there is no such loss, or it cannot be called with these
    parameters on what a batch will hold. Loads torch.
    """
    if isinstance(config, PreferenceTrainingConfig):
        from rollouts.losses.row_losses import check_preference_loss

        check_preference_loss(config.loss, config.loss_params)
        return
    from rollouts.loops.rl_batch import make_loss_spec
    from rollouts.losses import try_loss

    def check(settings: RLTrainingConfig) -> None:
        spec = make_loss_spec(settings)
        try_loss(
            spec.name,
            spec.params,
            unit=spec.unit,
            recompute_old=settings.recompute_old,
            reference=needs_reference(settings),
        )

    check_algorithms(config, check)


# --- servers ------------------------------------------------------------------------------------------------


def check_servers(config: EngineConfig, *, transport: httpx.BaseTransport | None = None) -> Findings:
    """A finding for each server of engine.urls that answers or does not, and one for each that strangers may
    control. Nothing is changed there.
    """
    findings: Findings = []
    if config.kind == "local" or not config.urls:
        return findings
    kind, key = config.kind, read_api_key(config.kind)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    for url in config.urls:
        try:
            with httpx.Client(base_url=url, timeout=ANSWER_S, trust_env=False, transport=transport) as client:
                for path in ("/health", VERSION_PATHS[kind]):
                    answer = client.get(path, headers=headers)
                    if not answer.is_success:
                        raise httpx.HTTPError(f"GET {path}: {answer.status_code}")
                version = re.search(r'"version": *"([ !#-~]{1,40})', answer.text)
                named = version.group(1) if version else "of unknown version"
                note(findings, "ok", url, f"{kind} {named}, healthy")
                host, control = client.base_url.host, CONTROL_PATHS[kind]
                is_local = host in ("localhost", "::1") or host.startswith("127.")
                if not is_local and client.get(control).is_success:
                    problem = f"whoever reaches it controls it: {control} needs no key"
                    way_out = "bind it to 127.0.0.1, or put it behind a firewall"
                    note(findings, "warning", url, f"{problem}; {way_out}")
        except httpx.HTTPError as error:
            way_out = (
                f"start the server, export its key as {kind.upper()}_API_KEY, or take it out of engine.urls"
            )
            note(findings, "error", url, f"{type(error).__name__}: {error}; {way_out}")
    return findings


# --- a written run ------------------------------------------------------------------------------------------


def check_written_run(run_dir: RunDir, *, deep: bool) -> Findings:
    """All findings about the files of a run. `deep`: every byte of its checkpoints is read."""
    findings: Findings = []
    running = find_activity(run_dir).may_go_on
    for path in run_dir.row_files:
        torn: list[str] = []
        with reporting(findings, path.name):
            if list_parts(path):
                count = sum(1 for _ in iterate_rows(path, report=torn.append))
                if torn and not running:
                    note(findings, "warning", path.name, f"{count} rows; {torn[0]}; --resume repairs it")
                else:
                    note(findings, "ok", path.name, f"{count} rows")
    whole = 0
    for path in sorted(path for path in run_dir.checkpoints.glob("*/*") if path.is_dir()):
        subject = str(path.relative_to(run_dir.root))
        if path.name.startswith("damaged-"):
            note(findings, "warning", subject, "was damaged and set aside")
        elif parse_step(path.name) is not None:
            with reporting(findings, subject):
                check_checkpoint(path, hashes=deep)
                whole += 1
    looked = "every byte read and hashed" if deep else "sizes as in the manifest; --deep reads every byte"
    if whole:
        note(findings, "ok", "checkpoints", f"{whole} complete ({looked})")
    else:
        note(findings, "warning", "checkpoints", "none: a run that dies now begins anew")
    return findings
