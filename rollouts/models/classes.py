"""Which class of transformers a model directory is for, by its config.json alone: a causal language model, or
one with a scalar head. What cannot be trained is refused here.
"""

import json
from pathlib import Path
from typing import Any, Literal

from rollouts.errors import ModelError
from rollouts.models.quiet import naming_errors

ModelHead = Literal["tokens", "scalar"]
"""What a model says at each position: log-probs of the next token, or one number. See
rollouts.models.scalar_head.
"""

# ends of names of what is not a causal model
OTHER_HEADS = ("Model", "ForMaskedLM", "ForPreTraining", "Classification", "ForQuestionAnswering")


def has_own_scalar_head(path: Path) -> bool:
    """Whether the files in a directory that a scalar model can be made of hold the scalar head; else it is a
    causal model's, and the head is new.
    """
    found, config = find_class(path, "scalar")
    return found in config["architectures"]


def find_class(path: Path, head: ModelHead) -> tuple[str, dict[str, Any]]:
    """Name of transformers' class for the model in a directory with that head, and its config.json, with a
    list of architectures: all that is read.

    The directory holds a causal language model, or one with a scalar head itself. Raises ModelError, with the
    way out, for what cannot be trained: another kind of model or head, code in the directory, packed weights.
    """
    from transformers.models.auto import modeling_auto

    with naming_errors(f"{path / 'config.json'} cannot be read"):
        config = json.loads((path / "config.json").read_text("utf-8"))
        written = config["architectures"] = [str(name) for name in config.get("architectures") or []]
    kind, packed = str(config.get("model_type")), config.get("quantization_config")
    causal = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind, "")
    scalar = modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(kind, "")
    found = causal if head == "tokens" else scalar
    other = written and (
        config.get("is_encoder_decoder") or all(name.endswith(OTHER_HEADS) for name in written)
    )
    # 2 where nothing is written, as for transformers
    labels = len(config.get("id2label") or ()) or config.get("num_labels", 2)
    method = packed.get("quant_method") if isinstance(packed, dict) else packed
    problems = {
        "needs code from its directory (auto_map), which is never run; use a model that transformers itself"
        " implements": not causal and config.get("auto_map"),
        "is not a causal language model that transformers has; use a decoder-only model, one named"
        " …ForCausalLM": not causal,
        "reads images or sound as well; use its text-only model, one named …ForCausalLM": causal.endswith(
            "ForConditionalGeneration"
        ),
        f"has weights packed by {method!r} (quantization_config), which cannot train; use the model it was"
        " made from": packed,
        "cannot have a scalar head: transformers has no …ForSequenceClassification for it; use a Llama, Qwen"
        " or Gemma": not found,
        "was not trained to predict the next token; use a model named …ForCausalLM": head == "tokens"
        and other
        and causal not in written,
        "has neither the head of a causal language model nor a scalar one; use a model named"
        f" {causal} or {scalar}": head == "scalar" and other and not {causal, scalar} & set(written),
        f"has {labels} labels, and a scalar head has one; use a reward model with num_labels=1, or the model"
        f" named {causal}": head == "scalar" and scalar in written and labels != 1,
    }
    for problem, holds in problems.items():
        if holds:
            raise ModelError(f"the model in {path} (model_type={kind!r}, architectures={written}) {problem}")
    return found, config
