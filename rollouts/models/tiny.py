"""Random models of a few layers over bytes, one per family of architectures: small enough for a test, real
enough to break shortcuts.

byte    Llama, two layers, tied embeddings (0.1 M parameters); what the examples use
llama   Llama, three layers, tied
qwen3   norms on queries and keys, untied
gemma   Gemma 2: layers with a window of 8 tokens in turn with full ones, soft caps on scores and on logits,
        tied
mamba   a state space model: no attention, no positions
moe     Qwen3-MoE: four experts of which two answer, untied
"""

from pathlib import Path
from typing import Any

from rollouts.errors import ModelError
from rollouts.models.directories import build_directory_once, quiet_transformers
from rollouts.models.tokenizers import END_ID, PAD_ID, START_ID, make_byte_tokenizer

TINY_FORMAT = 1  # in the directory's name; raise it when what is written changes
TINY_STD = 0.1  # of the weights: context moves log-probs by tenths of a nat, so that a wrong mask shows
BYTE_STD = 0.02
HEADS = {
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048,
}  # fmt: skip
SIZES = {
    **HEADS, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "tie_word_embeddings": True,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # family of transformers, its settings
    "byte": ("Llama", {**SIZES, "intermediate_size": 128}),
    "llama": ("Llama", {**SIZES, "num_hidden_layers": 3}),
    "qwen3": ("Qwen3", {**SIZES, "tie_word_embeddings": False}),
    "gemma": (
        "Gemma2",
        {
            **SIZES, "sliding_window": 8, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 4.0,
        },
    ),
    "mamba": (
        "Mamba", {"hidden_size": 64, "state_size": 8, "num_hidden_layers": 2, "tie_word_embeddings": True},
    ),
    "moe": (
        "Qwen3Moe",
        {
            **SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
            "norm_topk_prob": True, "tie_word_embeddings": False,
        },
    ),
}  # fmt: skip


def make_tiny(kind: str, seed: int, cache: Path) -> Path:
    """The directory in `cache` of model tiny:`kind`: float32 safetensors and the byte tokenizer; equal seeds
    give equal files. Raises ModelError naming the known ones.
    """
    if kind not in MODELS:
        known = ", ".join(repr(f"tiny:{one}") for one in MODELS)
        raise ModelError(f"model.name='tiny:{kind}' is not known; use one of {known}")
    path = cache / f"tiny-{kind}-{TINY_FORMAT}-seed{seed}"
    build_directory_once(path, lambda folder: _write(kind, folder, seed))
    return path


def _write(kind: str, folder: Path, seed: int) -> None:
    """Writes the model. The caller's random numbers do not move."""
    import torch
    import transformers

    from rollouts.models.export import save_hf_model

    tokenizer = make_byte_tokenizer()
    family, settings = MODELS[kind]
    ids = {"bos_token_id": START_ID, "eos_token_id": END_ID, "pad_token_id": PAD_ID}
    with quiet_transformers(), torch.random.fork_rng(devices=[]):
        # for what a library draws itself, such as the time steps of a state space model
        torch.manual_seed(seed)
        config = getattr(transformers, f"{family}Config")(vocab_size=len(tokenizer), **ids, **settings)
        model = getattr(transformers, f"{family}ForCausalLM")(config)
        # our own generator: what the library draws, and in which order, may change between its versions
        generator = torch.Generator().manual_seed(seed)
        std = BYTE_STD if kind == "byte" else TINY_STD
        with torch.no_grad():
            for name, parameter in sorted(model.named_parameters()):
                if parameter.ndim > 1 and not name.endswith("A_log"):
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
        save_hf_model(model, folder, tokenizer)
