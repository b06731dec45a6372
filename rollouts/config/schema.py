"""The settings of a run: frozen pydantic models. Few settings; a new one is a decision."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from rollouts.config.model import ModelConfig
from rollouts.config.online import ONLINE_RL, OnlineConfig, list_online_rules
from rollouts.config.rollout import EvalConfig, RolloutConfig
from rollouts.config.serve import ServeConfig
from rollouts.config.stages import LossConfig, PairStageConfig, RowStageConfig, StageConfig
from rollouts.config.tables import (
    AlertConfig,
    DistributedConfig,
    EngineConfig,
    Fraction,
    FunctionText,
    NameText,
    OptimConfig,
    OutputConfig,
    Params,
    ReferenceConfig,
    Section,
    Seed,
    Tables,
)
from rollouts.errors import parse_call
from rollouts.types import Fields

# --- stages -------------------------------------------------------------------------------------------------


class SFTTrainingConfig(RowStageConfig):
    """Supervised fine-tuning."""

    train_on: Literal["all", "last"] = "all"
    """which assistant turns train"""
    optim: OptimConfig = OptimConfig(lr=1e-4)


REFERENCE_FREE = ("simpo", "cpo", "orpo")  # preference losses that compare with no reference model


class PreferenceTrainingConfig(PairStageConfig, LossConfig):
    """Training on preferences without a reward model: DPO and its family on pairs of responses, KTO on
    responses marked good or bad.
    """

    loss: str = "dpo"
    """the name of a loss in docs/losses_policy.md, of [preference] in docs/losses_preference.md, or
    module:function"""
    optim: OptimConfig = OptimConfig(lr=1e-6)


class RewardModelTrainingConfig(PairStageConfig):
    """Training of a reward model: one score per response, the higher the better."""

    loss: Literal["bradley_terry", "mse"] = "bradley_terry"
    """of pairs; mse: of responses with a score, which are brought to mean 0 and deviation 1"""


CLIPPED_BY_SETTINGS = ("ppo_clip", "clip_cov")  # losses whose clip is rl.clip_low and rl.clip_high


def choose_unit(loss: object) -> str:
    """The unit of a loss of that name where none is set; a function of the user has tokens."""
    return "sequences" if loss in ("gspo", "gspo_token", "gmpo") else "tokens"


class AlgorithmConfig(LossConfig):
    """What [[rl.changes]] may change in the course of RL."""

    advantage: FunctionText = "grpo"
    """a key of rollouts.advantages.ADVANTAGES, module:function or file.py:function"""
    advantage_params: Params = {}
    """passed to the advantage by keyword"""
    loss: str = "ppo_clip"
    """the name of a loss in docs/losses_policy.md, of [preference] in docs/losses_preference.md, or
    module:function"""
    normalise_by: Literal["tokens", "sequences", "sequence_sums", "constant"] = "tokens"
    """left out: the loss's own unit, sequences for gspo, gspo_token and gmpo; constant: (num_prompts +
    replay) * samples_per_prompt * max_new_tokens, or with environment, tools or agent max_trajectory_tokens
    """
    clip_low: PositiveFloat = 0.2
    """the ratio is clipped below 1 - clip_low; of ppo_clip and clip_cov"""
    clip_high: PositiveFloat = 0.2
    """the ratio is clipped above 1 + clip_high; of ppo_clip and clip_cov"""
    kl_coef: NonNegativeFloat = 0.0
    """0, here and in changes: no reference model is loaded"""
    kl_in: Literal["reward", "loss"] = "reward"
    """where the KL term goes"""
    kl_estimator: Literal["k1", "k2", "k3", "exact"] = "k1"
    """of sampled tokens, or exact: KL(reference || policy) over the vocabulary; in the reward only k1"""
    recompute_old: bool = False
    """old log-probs from a forward pass instead of the engine's, with truncated importance weights"""


class AlgorithmChange(AlgorithmConfig):
    """Settings of [rl] from a step on; the others stay as they were before it. Another loss or advantage
    begins with its defaults.
    """

    from_step: Annotated[int, Field(ge=2)]
    """the first step that has them"""
    kl_ramp_steps: NonNegativeInt = 0
    """over so many steps kl_coef moves here in a straight line; 0: at once"""

    @model_serializer(mode="wrap")
    def _dump(self, dump: SerializerFunctionWrapHandler) -> Fields:
        return {name: value for name, value in dump(self).items() if name in self.model_fields_set}


class CriticConfig(Section):
    """A critic: a model with one value per token, trained beside the policy. It makes RL PPO, with advantage
    "gae", unless another that gives returns is named.
    """

    model: str = ""
    """empty: the model that RL starts from, with a head of 0; "stage": this run's reward model; a directory
    or a hub name
    """
    optim: OptimConfig = OptimConfig()


class DistillationConfig(Section):
    """A teacher whose log-probs of the samples' tokens are advantages, beside those of the reward or, without
    a reward, alone: on-policy distillation.
    """

    teacher: NameText
    """a directory, a hub name, or the http(s) address of a server that serves it, as in reference.where, with
    the policy's tokens; "self": the policy itself; "reference": the model of [reference]
    """
    coef: PositiveFloat = 1.0
    """of the advantage coef * (log-prob of the teacher - log-prob of the policy) of each token"""
    clip: NonNegativeFloat = 0.0
    """this advantage is held between -clip and clip; 0: not at all"""
    context: FunctionText = ""
    """module:function or file.py:function from the samples of a group to a prompt for each, after which the
    teacher reads the response; None where it is to say nothing
    """

    @property
    def on_server(self) -> bool:
        """Whether the teacher is on a server."""
        return self.teacher.startswith(("http://", "https://"))


class RLTrainingConfig(StageConfig, AlgorithmConfig):
    """Reinforcement learning."""

    curriculum: FunctionText = ""
    """module:function or file.py:function from (step, statistics) to the weights of the sources"""
    rollout: RolloutConfig
    critic: CriticConfig | None = None
    distillation: DistillationConfig | None = None
    pairs: FunctionText = ""
    """what makes pairs of each group, to train by a loss of [preference] (online DPO): "best_worst",
    "margin(min_margin=0.5)", module:function or file.py:function; empty: samples train by advantages
    """
    kl_control: str = "fixed"
    """how kl_coef follows the measured KL, from step to step: fixed, "proportional(target=6, horizon=1000)"
    or "two_sided(target=6, tolerance=1)"
    """
    kl_stop: NonNegativeFloat = 0.0
    """no more updates on a batch once approx_kl/mean is above, in nats per token; 0: never"""
    kl_limit: NonNegativeFloat = 0.0
    """an update is undone, and none follows on its batch, if KL(before the batch || after it) is above, in
    nats per token; 0: never
    """
    kl_ref_limit: NonNegativeFloat = 0.0
    """the same if the KL of policy and reference after it is above, and above what it was, in nats per sample
    of its rows; 0: never
    """
    grad_norm_limit: NonNegativeFloat = 0.0
    """the same if its gradient norm, before clipping, was above; 0: never"""
    lr_by_error: Fraction = 0.0
    """a step's learning rate is optim.lr times its error, the best reward of a group less its mean, over the
    groups, and at least times this; 0: it is optim.lr
    """
    mask_truncated: bool = False
    """samples cut at the token limit count in their group's statistics and train nothing; a group of nothing
    else is dropped
    """
    updates_per_batch: PositiveInt = 1
    """times that each batch is trained on: optimizer steps, or passes of `minibatches` of them"""
    minibatches: PositiveInt = 1
    """parts that each pass divides the groups of a batch into anew, one optimizer step each"""
    sync_every: PositiveInt = 1
    """steps between weight updates of the engines"""
    max_staleness: NonNegativeInt = 0
    """steps a trained token may lag behind the trainer"""
    changes: Annotated[list[AlgorithmChange], *Tables] = []

    @model_validator(mode="before")
    @classmethod
    def _take_defaults(cls, settings: Any) -> Any:
        if not isinstance(settings, dict):
            return settings
        gae = {} if settings.get("critic") is None else {"advantage": "gae"}
        return {"normalise_by": choose_unit(settings.get("loss")), **gae, **settings}

    def _list_rules(self) -> Fields:
        rules, last, control = super()._list_rules() | self._list_own_rules(), 1, self.kl_control
        for change, table in zip(self.changes, list_tables(self, self.changes)[1:], strict=True):
            where, given = f"changes with from_step={change.from_step}", change.model_fields_set
            piece = self.model_copy(update={**table, "changes": []})
            rules |= {
                f"{where} comes after from_step={last}; write the changes in the order of their steps, one a"
                " step": change.from_step <= last,
                f"{where} changes nothing; name a setting, or leave it out": given == {"from_step"},
                f"{where} has kl_ramp_steps; it needs kl_coef beside it and kl_control='fixed', not"
                f" {control!r}": change.kl_ramp_steps and ("kl_coef" not in given or control != "fixed"),
            }
            rules |= {f"{where}: {rule}": broken for rule, broken in piece._list_own_rules().items()}
            last = change.from_step
        return rules

    def _list_own_rules(self) -> Fields:
        prompts, needed = self.rollout.num_prompts, self.sync_every - 1
        correction, cap = (self.loss_params.get(name) for name in ("correction", "importance_cap"))
        control, numbers = parse_call(self.kl_control)
        importance = self.loss_params.get("kl_importance")
        in_reward = self.kl_coef > 0 and self.kl_in == "reward"
        clips = {  # a resolved config has every setting, so defaults may stand
            f"{name}={getattr(self, name)} with loss={self.loss!r}; it is read by"
            f" {' and '.join(CLIPPED_BY_SETTINGS)} only: leave it out, and give other losses what they take"
            " in loss_params": getattr(self, name) != AlgorithmConfig.model_fields[name].default
            for name in ("clip_low", "clip_high")
            if self.loss not in CLIPPED_BY_SETTINGS
        }
        return {
            **clips,
            **self._list_unused(in_reward),
            **self._list_rollout_rules(),
            f"max_staleness={self.max_staleness} is below sync_every - 1 = {needed}: samples would always be"
            f" too old; set max_staleness = {needed} or more, or sync_every = {self.max_staleness + 1}": (
                self.max_staleness < needed
            ),
            f"importance_cap={cap} with correction={correction!r}; a correction takes the place of the capped"
            " weight: leave importance_cap out, or write the cap into it, as token_tis(cap=3)": (
                correction and cap is not None
            ),
            "advantage='gae' without a critic, whose values it needs; add [rl.critic], or choose another"
            " advantage": not self.critic and self.advantage == "gae",
            f"advantage={self.advantage!r} with [rl.critic]; it has no use for a critic: leave one of them"
            " out, or set 'gae'": self.critic and self.advantage != "gae" and ":" not in self.advantage,
            f"minibatches={self.minibatches} with rollout.num_prompts={prompts}; a group stays together, so"
            " there are at most as many parts as prompts: set minibatches to"
            f" {prompts} or less": self.minibatches > prompts,
            f"kl_stop={self.kl_stop} with one update a batch, after which nothing is left out; set"
            " updates_per_batch or minibatches": (
                self.kl_stop and self.updates_per_batch * self.minibatches == 1
            ),
            f"kl_control={self.kl_control!r}; write fixed, proportional(target=…, horizon=…) or"
            " two_sided(target=…, tolerance=…)": (
                control not in ("fixed", "proportional", "two_sided") or (control == "fixed" and numbers)
            ),
            f"kl_coef=0 with kl_control={self.kl_control!r}, which multiplies it and would leave it at 0;"
            " begin above 0": control != "fixed" and not self.kl_coef,
            "kl_ref_limit or lr_by_error with optim.schedule or warmup_steps, whose learning rate they do not"
            " know; leave one of them out": (self.kl_ref_limit or self.lr_by_error)
            and (self.optim.schedule != "constant" or self.optim.warmup_steps),
            "kl_ref_limit with kl_coef=0, where nothing asks the reference; set one of both otherwise": (
                self.kl_ref_limit and not self.kl_coef
            ),
            "advantage='gdpo' with kl_in='reward'; it reads the named rewards, which have no KL term: use"
            " kl_in='loss'": in_reward and self.advantage == "gdpo",
            f"kl_estimator={self.kl_estimator!r} with kl_in='reward'; KL in the reward is k1; use"
            " kl_in='loss' for the others": in_reward and self.kl_estimator != "k1",
            "kl_estimator='k1' with kl_in='loss'; as a loss k1 has an expected gradient of 0; use 'k2'"
            " (reverse KL) or 'k3', or set kl_importance = true in loss_params": (
                self.kl_coef and self.kl_in == "loss" and self.kl_estimator == "k1" and importance is not True
            ),
        }

    def _list_rollout_rules(self) -> Fields:
        rollout = self.rollout
        return {
            "rollout.rewards.turns has the name of what turns of trajectories earn; choose another": (
                "turns" in rollout.rewards
            ),
            "advantage='gdpo' with rollout.rewards that have a schedule or normalise, which it does not read;"
            " leave those out, or choose another advantage": self.advantage == "gdpo"
            and any(
                one.schedule != "constant" or one.normalise != "none" for one in rollout.rewards.values()
            ),
            "rollout.generate, rollout.environment and rollout.agent each make the trajectories; keep one of"
            " them": sum(map(bool, (rollout.generate, rollout.environment, rollout.agent))) > 1,
            "rollout.tools are of a conversation that this run leads; rollout.generate and rollout.agent lead"
            " their own: give them the tools, and leave rollout.tools out": (
                rollout.tools and (rollout.generate or rollout.agent)
            ),
            "rollout.group_reward beside rollout.reward or rollout.reward_model; score samples one by one or"
            " by group: keep one": rollout.group_reward and (rollout.reward or rollout.reward_model),
            "rollout.reward_weights with rollout.group_reward, which weighs its own parts; leave one of them"
            " out": rollout.group_reward and rollout.reward_weights,
            "rollout.rewards beside rollout.reward, group_reward, reward_model or reward_weights, which are"
            " short forms of it; make them parts, or leave rewards out": rollout.rewards
            and (rollout.reward or rollout.group_reward or rollout.reward_model or rollout.reward_weights),
            f"rollout.group_reward={rollout.group_reward!r} keeps a state or asks models, as parts may; make"
            " it one, in [rl.rollout.rewards.NAME]": (
                rollout.group_reward in ("coherence_scored", "curiosity", "novelty")
            ),
            "distillation.teacher='self' without context knows no more than the policy; set"
            " distillation.context": (
                self.distillation and self.distillation.teacher == "self" and not self.distillation.context
            ),
            f"rollout.replay={rollout.replay} with max_staleness=0; a group that trains again is a step old"
            " or more: set max_staleness to 1 or more, or replay to 0": (
                rollout.replay and not self.max_staleness
            ),
            f"rollout.ranker={rollout.ranker!r} with max_staleness={self.max_staleness}; the groups of a"
            " batch compete when all have finished, and nothing is carried over: set max_staleness = 0": (
                rollout.ranker and self.max_staleness
            ),
            f"rollout.ranker={rollout.ranker!r} with rollout.over_sampling=1, which leaves nothing to choose;"
            " set over_sampling = 2, or leave ranker out": rollout.ranker and rollout.over_sampling == 1,
        }

    def _list_unused(self, kl_in_reward: bool) -> Fields:
        """Settings that mean nothing to pairs, or to a teacher without a reward: whether they are set."""
        default, filters = AlgorithmConfig.model_fields["advantage"].default, self.rollout.filters
        unused = {"[rl.critic]": self.critic, f"advantage={self.advantage!r}": self.advantage != default}
        if self.pairs:
            why = "with pairs, which do not read it"
            names = "distillation kl_coef kl_stop kl_limit recompute_old"
            unused |= {name: getattr(self, name) for name in names.split()}
        elif self.distillation and not self.rollout.is_scored:
            why = "without a reward, which it is about"
            unused["kl_in='reward' with a kl_coef"] = kl_in_reward
            read_no_reward = {"check_response_diversity", "check_reasonable_length"}
            unused[f"filters={filters}"] = any(":" not in name for name in {*filters} - read_no_reward)
        else:
            return {}
        return {f"{setting} {why}; leave one of the two out": is_set for setting, is_set in unused.items()}


BEGINS_WITH = {"loss": ("loss_params", "clip_low", "clip_high"), "advantage": ("advantage_params",)}


def list_tables(settings: AlgorithmConfig, changes: Sequence[AlgorithmChange]) -> list[Fields]:
    """The settings that a change may name, by piece: those of `settings`, then those from each change on.

    What a change does not name stays as it was before it, but another loss begins with the default parameters
    and clips, and with its own unit after one that had its own; another advantage begins with the default
    parameters. While kl_coef moves from one value to another (kl_ramp_steps), its entry is the larger of the
    two.
    """
    fields = AlgorithmConfig.model_fields
    tables = [{name: getattr(settings, name) for name in fields}]
    for change in changes:
        before = tables[-1]
        named = {name: getattr(change, name) for name in change.model_fields_set if name in fields}
        for key, others in BEGINS_WITH.items():
            if key in named and named[key] != before[key]:
                named = {name: fields[name].default for name in others} | named
        if before["normalise_by"] == choose_unit(before["loss"]):
            named = {"normalise_by": choose_unit(named.get("loss", before["loss"]))} | named
        if change.kl_ramp_steps:
            named["kl_coef"] = max(before["kl_coef"], change.kl_coef)
        tables.append(before | named)
    return tables


# --- the run ------------------------------------------------------------------------------------------------


class RunConfig(Section):
    """Everything a run is made of. `--mode` says which of the stages run; else all do."""

    name: Annotated[str, Field(pattern="^[^/.][^/]{0,99}$")] = "run"
    """of the run directory, when output.dir is empty: a folder's, without / and not hidden"""
    seed: Seed = 0
    """of data order, sampling and random weights"""
    deterministic: bool = False
    """float32, fixed threads, fixed order: two runs give the same bits"""
    model: ModelConfig = ModelConfig()
    output: OutputConfig = OutputConfig()
    distributed: DistributedConfig = DistributedConfig()
    engine: EngineConfig = EngineConfig()
    sft: SFTTrainingConfig | None = None
    rl: RLTrainingConfig | None = None
    online: OnlineConfig | None = None
    preference: PreferenceTrainingConfig | None = None
    reward_model: RewardModelTrainingConfig | None = None
    reference: ReferenceConfig = ReferenceConfig()
    eval: EvalConfig | None = None
    serve: ServeConfig | None = None
    alerts: Annotated[list[AlertConfig], *Tables] = []

    @model_validator(mode="before")
    @classmethod
    def _take_online(cls, settings: Any) -> Any:
        rl = settings.get("rl") if isinstance(settings, dict) and settings.get("online") is not None else None
        return {**settings, "rl": {**ONLINE_RL, **rl}} if isinstance(rl, dict) else settings

    @property
    def rollout(self) -> RolloutConfig:
        """[rl.rollout], or its defaults where there is no [rl]."""
        return self.rl.rollout if self.rl else RolloutConfig()

    def _list_lora_rules(self) -> Fields:
        lora, reference = self.model.lora, self.reference
        if not lora:
            return {}
        exact = [name for name in ("preference", "reward_model", "rl") if getattr(self, name)]
        return {
            f"model.lora.dropout={lora.dropout} with {exact}, which need exact log-probs; set it to 0": (
                lora.dropout and exact
            ),
            f"reference.update={reference.update!r} with model.lora; the reference is what the adapter began"
            " with: leave update out": reference.update != "none",
            "model.compile=true with model.lora; the layers change with the adapters that are active: leave"
            " one of the two out": self.model.compile,
        }

    def _list_rules(self) -> Fields:
        where, engine, teacher = self.reference.where, self.engine, self.rl and self.rl.distillation
        rules = (
            {
                f"{setting} with deterministic=true; {reason}: leave one of the two out": wrong
                for wrong, setting, reason in (
                    (self.model.device == "cuda", "model.device='cuda'", "equal bits are shown on CPUs only"),
                    (self.model.compile, "model.compile=true", "compiled sums round in another order"),
                    (
                        self.model.autocast == "bfloat16",
                        "model.autocast='bfloat16'",
                        "it computes in float32",
                    ),
                    (engine.kind != "local", f"engine.kind={engine.kind!r}", "a server repeats no bits"),
                    (where != "trainer", f"reference.where={where!r}", "a server repeats no bits"),
                    (
                        teacher and teacher.on_server,
                        "rl.distillation.teacher on a server",
                        "it repeats no bits",
                    ),
                    (self.rollout.scores_on_server, "a reward model on a server", "it repeats no bits"),
                )
                if self.deterministic
            }
            | self._list_lora_rules()
            | list_online_rules(self)
        )
        if not self.rl:
            return rules
        sync_every, staleness = self.rl.sync_every, self.rl.max_staleness
        steps = {"rl.eval_every": self.rl.eval_every, "output.checkpoint_every": self.output.checkpoint_every}
        shares = engine.kind == "local" and engine.mode == "shared"
        tables, ranks = list_tables(self.rl, self.rl.changes), self.distributed.ranks
        exact = "exact" in {table["kl_estimator"] for table in tables}
        frozen = self.reference in (ReferenceConfig(), ReferenceConfig(dtype="bfloat16"))
        coefs = [table["kl_coef"] for table in tables]
        coefs += [change.kl_coef for change in self.rl.changes if "kl_coef" in change.model_fields_set]
        moves = self.reference.update != "none" and self.rl.kl_control == "fixed"
        return {
            **rules,
            f"rl.kl_estimator='exact' with reference={self.reference.model_dump()}, distributed.ranks={ranks}"
            f" and model.lora={self.model.lora}; it needs a frozen reference beside a trainer of one process,"
            " without an adapter: leave these out, but for dtype='bfloat16', or use 'k3'": exact
            and (self.model.lora or ranks > 1 or not frozen),
            **{
                f"{name}={every} with rl.sync_every={sync_every}; between updates the engines have older"
                f" weights than the trainer: use a multiple of {sync_every}": every % sync_every
                for name, every in steps.items()
            },
            f"engine.mode='shared' with rl.sync_every={sync_every}, rl.max_staleness={staleness}; a shared"
            " engine always has the newest weights: it needs sync_every=1 and max_staleness=0; set"
            " engine.mode='copied', or engine.kind to a server's": shares and (sync_every > 1 or staleness),
            f"reference.update={self.reference.update!r} with rl.kl_coef={coefs} over the run; in steps with"
            " 0 nobody asks the reference, and it would stand still: use a small number in place of 0": (
                moves and min(coefs) == 0 < max(coefs)
            ),
        }
