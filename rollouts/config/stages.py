"""What the tables of several stages of training have."""

from typing import Any

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt, field_validator

from rollouts.config.tables import OptimConfig, Params, Section, Sources


class StageConfig(Section):
    """What every stage of training has."""

    data: Sources
    steps: NonNegativeInt = 0
    """training steps of the stage; or epochs"""
    epochs: NonNegativeFloat = 0.0
    """in place of steps: passes over the rows, of RL over the prompts with num_prompts a step; rounded up to
    whole steps
    """
    micro_batch_tokens: PositiveInt = 8192
    """padded tokens of one forward pass"""
    eval_every: NonNegativeInt = 0
    """steps; 0: only before and after"""
    optim: OptimConfig = OptimConfig()

    @field_validator("optim", mode="before")
    @classmethod
    def _keep_own_lr(cls, optim: Any) -> Any:
        # a table without lr would otherwise fall back to OptimConfig's, which suits RL
        return {"lr": cls.model_fields["optim"].default.lr, **optim} if isinstance(optim, dict) else optim

    def _list_rules(self) -> dict[str, Any]:
        return {
            f"steps={self.steps} and epochs={self.epochs:g}; set one of the two, and the other to 0": (
                bool(self.steps) == bool(self.epochs)
            )
        }


class RowStageConfig(StageConfig):
    """What every stage that trains on rows of its data has."""

    batch_size: PositiveInt = 16
    """conversations, pairs, or of loss = "kto" responses per step"""
    max_length: PositiveInt = 1024
    """tokens of one conversation, or of a prompt and one response; what is longer is cut"""


class PairStageConfig(RowStageConfig):
    """What every stage that trains on preferences has."""

    held_out: NonNegativeInt = 0
    """pairs (of "kto" responses) off the end of the data that are evaluated and do not train"""


class LossConfig(Section):
    """Which loss a stage has."""

    loss: str
    loss_params: Params = {}
    """passed to the loss by keyword, for example beta; "kto" sets weights left out by counts"""
