"""Everything that can be known about a run before it starts, or of a written run's files: reported, not
raised, so that one look shows all that is wrong. What loads torch is imported when it is needed.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx

from rollouts.checkpoints.manifest import compute_sha256, read_manifest
from rollouts.config.schema import PreferenceTrainingConfig, RLTrainingConfig, RunConfig
from rollouts.config.tables import EngineConfig
from rollouts.engines.open import check_engine_config, read_api_key
from rollouts.errors import CheckpointError, ModelError
from rollouts.loops.algorithm import check_algorithms, needs_reference
from rollouts.metrics.jsonl import parse_row
from rollouts.preflight.estimate import Lengths, estimate_memory, estimate_work, read_model_size
from rollouts.preflight.findings import Finding, Findings, note, reporting
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
SHOWN_LINES = 5  # damaged ones that are named


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
    key = read_api_key(config.kind)
    for url in config.urls:
        try:
            with httpx.Client(base_url=url, timeout=ANSWER_S, trust_env=False, transport=transport) as client:
                problem = _ask_server(client, config.kind, key, findings)
        except httpx.HTTPError as error:
            problem = f"{type(error).__name__}: {error}"
        if problem:
            note(findings, "error", url, f"{problem}; start the server, or take it out of engine.urls")
    return findings


def _ask_server(client: httpx.Client, kind: str, key: str | None, findings: Findings) -> str:
    """What is wrong with a server; "" if it is healthy. Raises httpx.HTTPError."""
    url = str(client.base_url).rstrip("/")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    health = client.get("/health", headers=headers).status_code
    if health != 200:
        return f"GET /health: {health}"
    answer = client.get(VERSION_PATHS[kind], headers=headers)
    if answer.status_code in (401, 403):
        return f"GET {VERSION_PATHS[kind]}: {answer.status_code}; export its key as {kind.upper()}_API_KEY"
    try:
        version = str(answer.json()["version"])[:40].encode("ascii", "replace").decode()
    except (ValueError, KeyError, TypeError):
        version = "of unknown version"
    note(findings, "ok", url, f"{kind} {version}, healthy")
    if not _is_loopback(client.base_url.host) and client.get(CONTROL_PATHS[kind]).is_success:
        open_to_all = f"whoever reaches it controls it: {CONTROL_PATHS[kind]} needs no key"
        note(findings, "warning", url, f"{open_to_all}; bind it to 127.0.0.1, or put it behind a firewall")
    return ""


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


# --- a written run ------------------------------------------------------------------------------------------


def check_written_run(run_dir: RunDir, *, deep: bool) -> Findings:
    """All findings about the files of a run. `deep`: every byte of its checkpoints is read."""
    findings: Findings = []
    running = find_activity(run_dir).may_go_on
    for parts in map(list_parts, run_dir.row_files):
        if parts:
            findings.append(check_rows(parts, running=running))
    whole = 0
    for path in sorted(path for path in run_dir.checkpoints.glob("*/*") if path.is_dir()):
        subject = str(path.relative_to(run_dir.root))
        if path.name.startswith("damaged-"):
            note(findings, "warning", subject, "was damaged and set aside")
        elif parse_step(path.name) is not None:
            damage = find_damage(path, deep=deep)
            whole += not damage
            if damage:
                way_out = "--resume takes the one before it; restore or remove it"
                note(findings, "error", subject, f"{damage}; {way_out}")
    looked = "every byte read and hashed" if deep else "sizes as in the manifest; --deep reads every byte"
    if whole:
        note(findings, "ok", "checkpoints", f"{whole} complete ({looked})")
    else:
        note(findings, "warning", "checkpoints", "none: a run that dies now begins anew")
    return findings


def check_rows(parts: Sequence[Path], *, running: bool) -> Finding:
    """Whether every line of a file is a row. The last line of a running writer may be incomplete."""
    rows, torn, damaged = 0, 0, list[str]()
    for part in parts:
        with part.open("rb") as file:
            for number, line in enumerate(file, 1):
                if parse_row(line) is not None:
                    rows += 1
                elif part == parts[-1] and not line.endswith(b"\n"):
                    torn = len(line)
                else:
                    damaged.append(f"{part.name}:{number}")
    name = parts[0].name
    if damaged:
        named = ", ".join(damaged[:SHOWN_LINES]) + (" and more" if len(damaged) > SHOWN_LINES else "")
        problem = f"{len(damaged)} lines are no JSON object ({named}); restore the file, or delete them"
        return Finding("error", name, problem)
    if torn and not running:
        torn_line = f"the last line is torn ({torn} bytes): its writer was killed; --resume repairs it"
        return Finding("warning", name, f"{rows} rows; {torn_line}")
    return Finding("ok", name, f"{rows} rows")


def find_damage(checkpoint: Path, *, deep: bool) -> str:
    """What is wrong with a checkpoint, "" if nothing is."""
    try:
        for record in read_manifest(checkpoint).files:
            file = checkpoint / record.path
            if file.is_symlink() or not file.is_file():
                return f"{record.path} is missing, or no plain file"
            if file.stat().st_size != record.size:
                return f"{record.path} has {file.stat().st_size} bytes, not {record.size}"
            if deep and compute_sha256(file) != record.sha256:
                return f"{record.path} is not as it was written: its SHA-256 differs"
    except (CheckpointError, OSError) as error:
        return str(error)
    return ""
