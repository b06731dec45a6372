"""The table of a config for learning from a stream of prompts."""

import re
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from rollouts.config.tables import Fraction, RuleConfig, Section, Tables

ADDRESS = re.compile(r"http://[^/]+:\d+/?")


class SignConfig(RuleConfig):
    """A sign of collapse: a rule on a metric of RL's rows, and what follows when it holds."""

    action: Literal["stop", "slow", "say"] = "stop"
    """stop: learning ends, with a checkpoint; slow: the learning rate is a tenth while it holds"""


def _sign(metric: str, rule: str, action: str) -> SignConfig:
    return SignConfig.model_validate({"metric": metric, "rule": rule, "action": action})


SIGNS = [
    _sign("online/label_share/change", "above(limit=0.1)", "stop"),
    _sign("online/length/change", "below(limit=-0.2)", "stop"),
    _sign("online/vote_entropy", "below(limit=0.05)", "slow"),
    _sign("groups/zero_std_frac", "above(limit=0.9)", "slow"),
]


# settings of [rl] with [online], unless they are given
ONLINE_RL = {
    "steps": 10**9,
    "kl_coef": 0.01,
    "kl_in": "loss",
    "kl_estimator": "exact",
    "kl_control": "two_sided(target=0.05, tolerance=0.01, factor=1.2, power=5, lowest=0.0001, highest=1)",
    "kl_ref_limit": 0.1,
    "grad_norm_limit": 100.0,
}


class OnlineConfig(Section):
    """Learning without end from a stream of prompts: docs/online.md."""

    capacity: PositiveInt = 4096
    """prompts in the buffer; what comes beyond waits in its file"""
    max_draws: PositiveInt = 3
    """of one prompt"""
    alpha: NonNegativeFloat = 0.6
    """a prompt is drawn in proportion to priority^alpha; 0: all alike"""
    correction: Fraction = 0.4
    """how far advantages are weighed for what priorities prefer; 1: prompts count as they came"""
    half_life: PositiveFloat = 20.0
    """steps after which a priority is half of what it was"""
    max_source_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """of the prompts drawn at once, from one source, while others have enough"""
    decay: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """of the average of the policy that is published: what a step leaves of it; 0: the policy"""
    keep: PositiveInt = 3
    """publications whose weights stay; others stay for ten minutes, for readers that are slow"""
    max_fall: Fraction = 0.03
    """of held-out accuracy below the best that was published: what falls further is not published"""
    max_refused: NonNegativeInt = 3
    """publications refused in a row after which learning stops; 0: never"""
    answer: Literal["number", "choice", "json", "text"] = "number"
    """how responses are read for the signs of collapse; docs/rewards.md"""
    signs: Annotated[list[SignConfig], *Tables] = SIGNS
    """rules on metrics of a step, as in alerts: what stops or slows learning"""


def list_online_rules(config: Any) -> dict[str, Any]:
    """What of a RunConfig cannot work online, or not without [online]: whether it is there."""
    rl, output = config.rl, config.output
    if not config.online:
        streams = [one for one in rl.data if one.kind == "stream"] if rl else ()
        return {"rl.data has a stream, which only [online] reads; add that table": streams}
    needs = {
        "[rl], which says how it learns": rl,
        "[eval], whose prompts a candidate answers before it is published": config.eval,
        "rl.eval_every: the steps from one publication to the next": rl and rl.eval_every,
        "output.checkpoint_every, as it has no last step": output.checkpoint_every,
        "output.keep_checkpoints, or the disk fills up": output.keep_checkpoints,
    }
    refused = {
        "model.lora": config.model.lora,
        "an rl.data.path that is an address other than http://HOST:PORT, where it serves": rl
        and any("://" in one.path and not ADDRESS.fullmatch(one.path) for one in rl.data),
        "rl.epochs": rl and rl.epochs,
        "rl.critic": rl and rl.critic,
        "rl.curriculum": rl and rl.curriculum,
        "rl.optim.schedule or warmup_steps": rl
        and (rl.optim.schedule != "constant" or rl.optim.warmup_steps),
    }
    return {f"online needs {what}; set it": not given for what, given in needs.items()} | {
        f"online with {what}, which it cannot have; leave it out": given for what, given in refused.items()
    }
