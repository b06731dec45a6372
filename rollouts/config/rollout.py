"""The tables of a config that say how samples are made and scored: in RL, and in evaluation."""

import math
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from rollouts.config.tables import Fraction, FunctionText, NameText, Params, Section, Sources
from rollouts.errors import parse_call
from rollouts.types import Texts


class SamplingConfig(Section):
    """What is sampled for each prompt and scored, in RL and in evaluation."""

    samples_per_prompt: PositiveInt = 1
    """G of RL: samples of a group; or of each held-out prompt"""
    max_new_tokens: PositiveInt = 256
    """tokens of one response, at most"""
    temperature: NonNegativeFloat = 0.0
    """0: greedy, in evaluation only; the trainer divides its logits by that of RL too"""
    reward: FunctionText = ""
    """of one sample: a name of docs/rewards.md, module:function or file.py:function; empty in [eval]:
    rl.rollout.reward
    """


def is_address(name: str) -> bool:
    """Whether a model is named by the address of a server."""
    return name.startswith(("http://", "https://"))


class RewardPartConfig(Section):
    """A named part of the reward: what gives it, and what it counts; docs/rewards.md."""

    reward: FunctionText = ""
    """of one sample: a name of docs/rewards.md, module:function or file.py:function; empty in [eval]:
    rl.rollout.reward
    """
    group_reward: FunctionText = ""
    """instead of reward, of all samples of a group"""
    reward_model: str = ""
    """instead: as rl.rollout.reward_model"""
    params: Params = {}
    """passed to the function by keyword"""
    weight: float = 1.0
    """what multiplies it in the sum that is the reward"""
    schedule: str = "constant"
    """of the weight: constant, or from `first` at step `begin` to the weight at step `end`, as
    "linear(first=0, begin=1, end=100)" or "cosine(…)".
    """
    normalise: Literal["none", "running", "rank"] = "none"
    """before it is weighed: by mean and deviation of all its values in earlier batches, or its rank in the
    group, 0 to 1
    """

    def _list_rules(self) -> dict[str, Any]:
        given = [self.reward, self.group_reward, self.reward_model]
        name, numbers = parse_call(self.schedule)
        curve = name in ("linear", "cosine") and numbers.keys() == {"first", "begin", "end"}
        curve = curve and all(map(math.isfinite, numbers.values()))
        return {
            "it names no reward, group_reward or reward_model, or more than one; name one": (
                sum(map(bool, given)) != 1
            ),
            "params with reward_model, which takes none; leave them out": self.params and self.reward_model,
            f"schedule={self.schedule!r}; write constant, linear(first=…, begin=…, end=…) or cosine(…), with"
            " whole steps 1 <= begin < end": not (
                1 <= int(numbers["begin"]) == numbers["begin"] < int(numbers["end"]) == numbers["end"]
                if curve
                else self.schedule == "constant"
            ),
        }


class RolloutConfig(SamplingConfig):
    """How samples of RL are made."""

    num_prompts: PositiveInt = 8
    """P: new groups in a batch"""
    samples_per_prompt: PositiveInt = 8
    """G of RL: samples of a group; or of each held-out prompt"""
    temperature: PositiveFloat = 1.0
    """0: greedy, in evaluation only; the trainer divides its logits by that of RL too"""
    over_sampling: Annotated[float, Field(ge=1)] = 1.0
    """groups launched at once = ceil(num_prompts * over_sampling)"""
    replay: NonNegativeInt = 0
    """groups of earlier batches, at most, that train again beside the num_prompts new ones of each batch, as
    long as rl.max_staleness allows; docs/async.md
    """
    generate: FunctionText = ""
    """module:function or file.py:function, or a factory of one (a parameter is called tokenizer); empty: one
    chat turn, or what environment, tools or agent say
    """
    environment: FunctionText = ""
    """module:function or file.py:function, called with a row: the world of a trajectory; docs/agents.md"""
    tools: list[FunctionText] = []
    """plain typed functions that the model may call, module:function or file.py:function; and MCP servers, as
    "mcp:command" or "mcp:http://…"
    """
    agent: FunctionText = ""
    """instead of environment: a command, or module:function or file.py:function of a child process, which
    talks to the model through OPENAI_BASE_URL
    """
    response_template: FunctionText = ""
    """how tool calls and thinking are read: a JSON file in transformers' format, or module:function or
    file.py:function from text to message; empty: the tokenizer's own
    """
    history: Literal["template", "extend"] = "template"
    """where the chat template rewrites earlier turns: as it would, in a new segment; or kept as sampled"""
    max_turns: PositiveInt = 16
    """of the model in a trajectory"""
    max_tool_calls: PositiveInt = 64
    """of a trajectory"""
    max_trajectory_tokens: PositiveInt = 8192
    """prompt, answers and results of a trajectory; max_new_tokens stays the limit of one answer"""
    trajectory_timeout_s: PositiveFloat = 600.0
    """seconds from the opening of a trajectory's environment to its last turn"""
    tool_timeout_s: PositiveFloat = 30.0
    """seconds that one tool call, or one call of an environment, may take"""
    at_limit: dict[Literal["turns", "tool_calls", "tokens", "time"], Literal["train", "reward", "drop"]] = {}
    """what becomes of a trajectory that a limit ended: trains (the default), counts in its group with its
    reward but does not train, or is left out
    """
    group_reward: FunctionText = ""
    """instead of reward, of all samples of a group"""
    reward_model: str = ""
    """added to reward, or instead of it: "stage" (this run's reward_model stage), a directory, a hub name, or
    the http(s) address of one that a training service serves, …/references/NAME
    """
    rewards: dict[Annotated[str, Field(pattern="^[a-z][a-z0-9_]*$")], RewardPartConfig] = {}
    reward_weights: dict[str, float] = {}
    """weight of each named part of the reward; empty: the reward is what the function says"""
    filters: list[FunctionText] = []
    """group filters, run in order; names of rollouts.filters, module:function or file.py:function"""
    ranker: FunctionText = ""
    """of the groups launched at once, those train that it gives the highest numbers: reward_std,
    module:function or file.py:function; empty: the first by launch
    """
    max_attempts: PositiveInt = 20
    """a batch may draw at most num_prompts * max_attempts groups"""
    max_failed_fraction: Fraction = 0.2
    """of the samples of a batch; above it the run stops"""
    generate_timeout_s: PositiveFloat = 1800.0
    """seconds that generate may take without asking the engine; after it the sample has failed"""
    reward_timeout_s: PositiveFloat = 30.0
    """seconds one reward call may take; after it the sample has failed"""

    @property
    def has_turns(self) -> bool:
        """Whether trajectories may have several turns."""
        return bool(self.environment or self.tools or self.agent)

    @property
    def reward_models(self) -> Texts:
        """The reward models that are named, by setting."""
        parts = {f"rewards.{name}": part.reward_model for name, part in self.rewards.items()}
        named = {"": self.reward_model, **parts}
        return {f"rl.rollout.{key}.reward_model".replace("..", "."): one for key, one in named.items() if one}

    @property
    def scores_on_server(self) -> bool:
        """Whether a reward model is on a server."""
        return any(map(is_address, self.reward_models.values()))

    @property
    def is_scored(self) -> bool:
        """Whether samples get a reward."""
        short = self.reward or self.group_reward or self.reward_model
        return bool(short or self.rewards or self.environment or self.agent)


class EvalConfig(SamplingConfig):
    """Evaluation on held-out prompts. Rows whose prompt occurs here are left out of every training stage."""

    data: Sources
    policy_metrics: bool = False
    """also perplexity, entropy and diversity of what was sampled"""
    against: NameText = ""
    """with policy_metrics: a model, by a name that model.name takes, to which KL is measured"""
