"""Everything that can be known about a run before it starts, or of a written run's files: in a check
reported, so that one look shows all that is wrong; in a run raised. What loads torch is imported when it is
needed.

The models beside the policy that RL asks for by name: what scores its samples, what its critic starts
from, and a teacher. For a run and for a check.
"""

import os
import re
import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import msgspec

from rollouts.checkpoints.load import check_checkpoint
from rollouts.config.load import load_recorded
from rollouts.config.rollout import is_address
from rollouts.config.schema import PreferenceTrainingConfig, RLTrainingConfig, RunConfig
from rollouts.config.spelling import did_you_mean
from rollouts.config.tables import AlertConfig, EngineConfig
from rollouts.engines.processes import find_server_python, read_api_key
from rollouts.errors import ConfigError, ModelError
from rollouts.loops.algorithm import check_algorithms, needs_reference
from rollouts.metrics.jsonl import iterate_rows
from rollouts.metrics.names import METRICS, find_metric
from rollouts.preflight.estimate import estimate_memory, estimate_work, read_model_config, read_model_size
from rollouts.preflight.findings import Findings
from rollouts.preflight.functions import Functions, load_functions
from rollouts.preflight.rows import PreparedRows, Rows, count_epochs, load_all_rows, prepare_rows
from rollouts.run_dir import RunDir, find_activity, list_parts, parse_step

if TYPE_CHECKING:
    from rollouts.models.directories import ModelHead
    from rollouts.reference.server import ServerKind

ANSWER_S = 10.0  # for each question to a server
# read-only paths: what tells the version, and what is guarded as control calls are
PATHS = {"vllm": ("/version", "/is_paused"), "sglang": ("/server_info", "/server_info")}


@dataclass(kw_only=True)
class PreparedRun:
    """What is known of a run before a model loads. After a check what it found wrong is missing."""

    config: RunConfig
    run_dir: RunDir
    rows: Rows
    functions: Functions
    # the directory that the first stage starts from; started servers load it before they get the trainer's
    # weights
    base_model: Path = Path()
    adapter_parameters: int = 0  # of model.lora
    tokenizer: Any = None
    teacher: Path | None = None  # the directory of RL's; None: there is none here
    against: Path | None = None  # the directory of eval.against; None: it names none
    prepared: PreparedRows = field(default_factory=PreparedRows)


def prepare_run(config: RunConfig, stages: Sequence[str], run_dir: RunDir, findings: Findings) -> PreparedRun:
    """Rows, functions, losses, the model's directory, its chat template and lengths, read and checked; the
    run's config has steps in place of epochs.
    """
    from rollouts.models.load import load_tokenizer, resolve_model
    from rollouts.models.lora import count_adapter

    rows = load_all_rows(config, stages, findings)
    functions = load_functions(config, stages, findings)
    run = PreparedRun(config=config, run_dir=run_dir, rows=rows, functions=functions)
    check_losses(config, stages, findings)
    check_alerts(config.alerts, findings)
    with findings.reporting("engine"):
        if "rl" in stages and config.engine.kind != "local" and not config.engine.urls:
            find_server_python(config.engine)
    with findings.reporting("model.name"):
        run.base_model = resolve_model(config.model.name, seed=config.seed)
        findings.note("ok", "model.name", str(run.base_model))
        context_length = read_model_config(run.base_model).get("max_position_embeddings")
        template = config.model.chat_template
        run.tokenizer = load_tokenizer(run.base_model, chat_template=Path(template) if template else None)
        if config.eval and (name := config.eval.against):
            against = resolve_model(name, seed=config.seed)
            run.against = check_tokens(against, "eval.against", run.tokenizer)
        run.prepared = prepare_rows(config, rows, run.tokenizer, context_length, findings)
        if config.model.lora:
            with findings.reporting("model.lora"):
                run.adapter_parameters = count_adapter(config.model.lora, run.base_model)
        with findings.reporting("output.dir"):
            saved = load_recorded(run_dir.config) if run_dir.config.exists() else None
            run.config = count_epochs(config, rows, run.prepared, saved, findings)
        rl, where = config.rl if "rl" in stages else None, config.reference.where
        with findings.reporting("reference.where"):
            if where != "trainer" and ("preference" in stages or (rl and needs_reference(rl))):
                check_served("reference.where", where, run.tokenizer)
        with findings.reporting("rl"):
            check_reward_models(run.config, stages, run_dir, run.tokenizer)
        with findings.reporting("rl.distillation"):
            asked = rl and rl.distillation
            if asked and asked.on_server:
                check_served(TEACHER, asked.teacher, run.tokenizer)
            elif asked and asked.teacher not in OWN:
                teacher = _find_model(config, TEACHER, asked.teacher)
                run.teacher = check_tokens(teacher, TEACHER, run.tokenizer)
    return run


def look_at_run(
    config: RunConfig, stages: Sequence[str], run_dir: RunDir, findings: Findings, *, local_ranks: int
) -> PreparedRun:
    """What prepare_run reads; beside what is wrong with it, `findings` has device, memory and work.
    `local_ranks` processes of the run are on this machine.
    """
    from rollouts.models.devices import read_free_gpu_memory
    from rollouts.reference.quantize import count_bytes_by_headers

    run, gpu_bytes = prepare_run(config, stages, run_dir, findings), None
    with findings.reporting("model.device"):
        gpu_bytes = read_free_gpu_memory(config, local_ranks=local_ranks)
        findings.note("ok", "model.device", "on the CPU" if gpu_bytes is None else "on a GPU")
    present = [stage for stage in stages if getattr(config, stage)]
    with findings.reporting("memory"):
        if run.tokenizer:
            size = read_model_size(run.base_model)
            if size and (lora := config.model.lora):
                frozen = count_bytes_by_headers(run.base_model, lora.base)
                size = size._replace(adapter=run.adapter_parameters, base_bytes=frozen)
            teacher = read_model_size(run.teacher) if run.teacher else None
            if size:
                for stage in present:
                    findings += estimate_memory(
                        run.config, stage, run.prepared, size, gpu_bytes, teacher=teacher
                    )
            else:
                findings.note(
                    "ok",
                    "memory",
                    "not estimated: config.json or the weight files do not say how large the model is",
                )
    estimate_work(run.config, present, run.rows, findings)
    return run


def check_losses(config: RunConfig, stages: Sequence[str], findings: Findings) -> None:
    """Reports what check_loss raises, and warns of, for the stages that name a loss."""
    for stage in ("preference", "rl"):
        section = getattr(config, stage)
        with findings.reporting(f"{stage}.loss"):
            if section and stage in stages:
                for warning in check_loss(section):
                    findings.note("warning", f"{stage}.normalise_by", warning)


def check_loss(config: RLTrainingConfig | PreferenceTrainingConfig) -> Collection[str]:
    """What to warn of: a unit that is not the loss's own. Raises ConfigError or PlugInError if there is no
    such loss, or it cannot be called with these parameters on what a batch will hold. Loads torch.
    """
    from rollouts.losses.row_losses import PREFERENCE_LOSSES, check_preference_loss

    if isinstance(config, PreferenceTrainingConfig):
        check_preference_loss(config.loss, config.loss_params)
        return ()
    from rollouts.loops.rl_batch import make_loss_spec
    from rollouts.losses import find_own_unit, try_loss

    warnings = {}

    def check(settings: RLTrainingConfig) -> None:
        if settings.pairs and settings.loss != "kto":
            check_preference_loss(settings.loss, settings.loss_params)
            return
        if settings.loss in PREFERENCE_LOSSES:
            raise ConfigError(f"rl.loss={settings.loss!r} is of pairs; set rl.pairs")
        spec = make_loss_spec(settings)
        try_loss(
            spec.name,
            spec.params,
            unit=spec.unit,
            reference=needs_reference(settings),
            recompute_old=settings.recompute_old,
        )
        own = find_own_unit(spec.name)
        if spec.unit != own:
            warnings[f"{spec.unit!r}, where loss {spec.name!r} is defined by {own!r}"] = None

    check_algorithms(config, check)
    return warnings


def check_alerts(alerts: Sequence[AlertConfig], findings: Findings) -> None:
    """Reports a command that is not there and a webhook's variable that is not set. A metric that is none of
    ours is a warning, for a loss of the user may log it.
    """
    for number, alert in enumerate(alerts):
        key = f"alerts.{number}"
        with findings.reporting(key):
            if alert.run and not shutil.which(alert.run[0]):
                raise ConfigError(f"{key}.run: there is no program {alert.run[0]!r}; give its path")
            if alert.webhook and not os.environ.get(alert.webhook):
                raise ConfigError(f"{key}.webhook: {alert.webhook} is not set; export it with the URL")
            if find_metric(alert.metric) is None:
                findings.note(
                    "warning",
                    key,
                    f"the metric {alert.metric!r} is none of ours"
                    f"{did_you_mean(alert.metric, (metric.name for metric in METRICS))}",
                )


# --- servers ------------------------------------------------------------------------------------------------


def check_servers(config: EngineConfig, findings: Findings) -> None:
    """Notes of each server of engine.urls whether it answers, and whether strangers may control it. Nothing
    is changed there.
    """
    if config.kind == "local":
        return
    key, (version_path, control) = read_api_key(config.kind), PATHS[config.kind]
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    for url in config.urls:
        try:
            with httpx.Client(base_url=url, timeout=ANSWER_S, trust_env=False) as client:
                client.get("/health", headers=headers).raise_for_status()
                answer = client.get(version_path, headers=headers).raise_for_status()
                version = re.search(r'"version": *"([ !#-~]{1,40})', answer.text)
                findings.note(
                    "ok", url, f"{config.kind} {version[1] if version else 'of unknown version'}, healthy"
                )
                is_local = re.match(r"localhost$|::1$|127\.", client.base_url.host)
                if not is_local and client.get(control).is_success:
                    findings.note(
                        "warning",
                        url,
                        f"whoever reaches it controls it: {control} needs no key; bind it to 127.0.0.1, or"
                        " put it behind a firewall",
                    )
        except httpx.HTTPError as error:
            findings.note(
                "error",
                url,
                f"{type(error).__name__}: {error}; start the server, export its key as"
                f" {config.kind.upper()}_API_KEY, or take it out of engine.urls",
            )


# --- a written run ------------------------------------------------------------------------------------------


def check_written_run(run_dir: RunDir, *, deep: bool) -> Findings:
    """All findings about the files of a run. `deep`: every byte of its checkpoints is read."""
    findings, whole, running = Findings(), 0, find_activity(run_dir).may_go_on
    for path in filter(list_parts, run_dir.row_files):
        torn = []
        with findings.reporting(path.name):
            count = sum(1 for _ in iterate_rows(path, report=torn.append))
            if torn and not running:
                findings.note("warning", path.name, f"{count} rows; {torn[0]}; --resume repairs it")
            else:
                findings.note("ok", path.name, f"{count} rows")
    for path in sorted(filter(Path.is_dir, run_dir.checkpoints.glob("*/*"))):
        subject = str(path.relative_to(run_dir.root))
        if path.name.startswith("damaged-"):
            findings.note("warning", subject, "was damaged and set aside")
        elif parse_step(path.name) is not None:
            with findings.reporting(subject):
                check_checkpoint(path, hashes=deep)
                whole += 1
    if whole:
        looked = "every byte read and hashed" if deep else "sizes as in the manifest; --deep reads every byte"
        findings.note("ok", "checkpoints", f"{whole} complete ({looked})")
    else:
        findings.note("warning", "checkpoints", "none: a run that dies now begins anew")
    return findings


# --- models beside the policy -------------------------------------------------------------------------------


STAGE = "stage"  # the name of this run's own reward model
OTHER_TOKENS = "{} has other tokens than the policy, whose ids it reads; name one with the same tokenizer"
OWN = ("self", "reference")  # teachers that a run has anyway
CRITIC, TEACHER = "rl.critic.model", "rl.distillation.teacher"


def find_server_kind(setting: str, url: str) -> "ServerKind":
    """What serves at the value of `setting`: a training service names itself to a call without a key; of the
    others only vLLM tells its version to anybody. Raises ConfigError for a server that does not answer.
    """
    from rollouts.reference.server import REALM

    try:
        answer = httpx.get(f"{url.rstrip('/')}/version", timeout=ANSWER_S, trust_env=False)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError(f"{setting}={url!r} does not answer ({error}); start the server") from error
    if answer.headers.get("www-authenticate") == REALM:
        return "rollouts"
    return "vllm" if answer.is_success else "sglang"


def check_served(setting: str, url: str, tokenizer: Any, *, head: "ModelHead" = "tokens") -> None:
    """Raises ConfigError unless something answers at the value of `setting`, and, of a training service,
    unless what it serves there has this head and the policy's tokens.
    """
    from rollouts.reference.server import Served, digest_vocabulary

    answer = None
    if find_server_kind(setting, url) != "rollouts":
        if head == "scalar":
            raise ConfigError(f"{setting}={url!r} is no training service, which alone serves reward models")
        return
    headers = {"x-api-key": read_api_key("rollouts") or ""}
    try:
        answer = httpx.get(url, headers=headers, timeout=ANSWER_S, trust_env=False)
        served = msgspec.json.decode(answer.content, type=Served)
    except (httpx.HTTPError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"{setting}={url!r} cannot be used: {answer.text[:300] if answer else error}; it ends with"
            " /references/NAME, and its key is in ROLLOUTS_API_KEY"
        ) from error
    if served.head != head:
        raise ConfigError(f"{setting}={url!r} has a head of {served.head!r}; it takes one of {head!r}")
    if served.vocabulary != digest_vocabulary(tokenizer):
        raise ConfigError(OTHER_TOKENS.format(f"{setting}: the model at {url}"))


def check_reward_models(config: RunConfig, stages: Sequence[str], run_dir: RunDir, tokenizer: Any) -> None:
    """Raises as find_scalar_model, check_served and check_tokens do, before anything trains, unless RL can
    have the models that it names. One that the stage reward_model will have trained needs not be there.
    """
    critic = config.rl.critic.model if config.rl and config.rl.critic else ""
    named = {**config.rollout.reward_models, CRITIC: critic}
    for setting, name in named.items() if "rl" in stages else ():
        if setting != CRITIC and is_address(name):
            check_served(setting, name, tokenizer, head="scalar")
        elif name and not (name == STAGE and "reward_model" in stages):
            check_tokens(find_scalar_model(config, run_dir, setting, name), setting, tokenizer)


def find_scalar_model(config: RunConfig, run_dir: RunDir, setting: str, name: str) -> Path:
    """The directory of the model `name`, the value of `setting`: "stage" is the last checkpoint of this run's
    reward model. A critic may also start from any causal model, which gets a head of 0.

    Raises ConfigError if this run has trained none or a reward model has no scalar head, ModelError if there
    is no such model.
    """
    from rollouts.models.directories import has_own_scalar_head

    if name == STAGE:
        steps = config.reward_model.steps if config.reward_model else 0
        path = run_dir.checkpoint("reward_model", steps)
        if not path.is_dir():
            raise ConfigError(
                f'{setting}="stage", but {run_dir.root} has no reward model of {steps} steps; add the stage:'
                " --mode …+reward_model+rl"
            )
        return path
    path = _find_model(config, setting, name, head="scalar")
    if setting != CRITIC and not has_own_scalar_head(path):
        raise ConfigError(
            f"{setting}={name!r} is no reward model: it has no scalar head; train one with the stage"
            " reward_model"
        )
    return path


def _find_model(config: RunConfig, setting: str, name: str, **options: Any) -> Path:
    from rollouts.models.load import resolve_model

    try:
        return resolve_model(name, seed=config.seed, **options)
    except ModelError as error:  # which names the setting that it mostly is about
        raise ModelError(str(error).replace(f"model.name={name!r}", f"{setting}={name!r}")) from error


def check_tokens(path: Path, setting: str, tokenizer: Any) -> Path:
    """The path. Raises ConfigError if the model's tokens are not the policy's, whose ids it reads; ModelError
    if it has no tokenizer.
    """
    from rollouts.models.load import load_tokenizer

    if load_tokenizer(path).get_vocab() != tokenizer.get_vocab():
        raise ConfigError(OTHER_TOKENS.format(f"{setting}: the model in {path}"))
    return path
