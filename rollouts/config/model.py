"""The table of a config that says which model trains, and what of it."""

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from rollouts.config.tables import FrozenDtype, NameText, Once, PathText, Section

ALL_LINEAR = "all-linear"


class LoraConfig(Section):
    """Small matrices beside the model's, which alone train: W + alpha/rank · B·A; docs/lora.md."""

    rank: PositiveInt = 16
    """columns of B and rows of A"""
    alpha: PositiveFloat = 32.0
    """the product counts alpha/rank times"""
    targets: Annotated[list[str], Once, Field(min_length=1)] = [ALL_LINEAR]
    """ends of names of what is adapted, as ["q_proj", "v_proj"]; all-linear: every linear layer and every
    stack of experts, but not the head
    """
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """of what goes into A, in sft only: the other stages need exact log-probs"""
    init_from: PathText = ""
    """a directory of PEFT with the adapter that training starts from, of the same rank, alpha and targets;
    empty: B is 0
    """
    base: FrozenDtype = "float32"
    """how the model's own matrices, which do not train, are kept; all is computed from float32 copies of
    one layer at a time
    """


class ModelConfig(Section):
    """Which model trains and how its numbers are kept."""

    name: NameText = "bundled:smollm2-135m-instruct"
    """bundled:…, tiny:byte (random), a directory, a .gguf file, or a hub name"""
    chat_template: PathText = ""
    """a file to use instead of the tokenizer's own chat template"""
    template_params: dict[str, Any] = {}
    """passed to the chat template, for example enable_thinking = false"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass: less memory, about a third more time"""
    compile: bool = False
    """torch.compile of each layer: minutes at the start, faster steps afterwards; needs a C++ compiler
    """
    autocast: Literal["off", "bfloat16", "auto"] = "auto"
    """master weights are float32; auto: bfloat16 where the hardware multiplies it faster"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """of all that computes with torch; auto: a GPU where torch has one, but never if deterministic"""
    threads: NonNegativeInt = 0
    """torch threads of a process; 0: one per core it may use, divided by the ranks on this machine"""
    lora: LoraConfig | None = None
