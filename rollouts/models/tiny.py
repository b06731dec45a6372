"""Random models of a few layers over bytes, one per family of architectures: small enough for a test, real
enough to break shortcuts.

byte    Llama, two layers, tied embeddings; what the examples use
llama   Llama, three layers, tied
qwen3   norms on queries and keys, untied
gemma   Gemma 2: layers with a window of 8 tokens in turn with full ones, soft caps on scores and on logits,
        tied
mamba   a state space model: no attention, no positions
moe     Qwen3-MoE: four experts of which two answer, untied
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from rollouts.errors import ModelError
from rollouts.models.directories import build_directory_once
from rollouts.models.quiet import quiet_transformers

TINY_KINDS = ("llama", "qwen3", "gemma", "mamba", "moe")
TINY_FORMAT = 1  # in the directory's name; raise it when what is written changes
TINY_BYTE_FORMAT = 1  # the same for tiny:byte
TINY_STD = 0.1  # of the weights: context moves log-probs by tenths of a nat, so that a wrong mask shows


def make_tiny(name: str, seed: int, cache: Path) -> Path:
    """The directory in `cache` of model tiny:`name`; equal seeds give equal files. Raises ModelError naming
    the nearest known one.
    """
    if name == "byte":
        return make_tiny_byte_model(seed, cache)
    if name not in TINY_KINDS:
        nearest = difflib.get_close_matches(name, ("byte", *TINY_KINDS), n=1, cutoff=0.0)[0]
        known = ", ".join(f"'tiny:{kind}'" for kind in ("byte", *TINY_KINDS))
        raise ModelError(
            f"model.name='tiny:{name}' is not known; did you mean 'tiny:{nearest}'? Known: {known}"
        )
    path = cache / f"tiny-{name}-{TINY_FORMAT}-seed{seed}"
    build_directory_once(path, lambda folder: make_tiny_model(name, folder, seed=seed))
    return path


def make_tiny_model(kind: str, path: Path, *, seed: int) -> None:
    """Writes a random model of TINY_KINDS and the byte tokenizer into `path` as a Hugging Face directory
    (float32 safetensors).

    Hidden size 64, two or three layers, vocabulary 259, context 2048. The caller's random numbers do not
    move.
    """
    import torch

    from rollouts.models.export import save_hf_model
    from rollouts.models.tokenizers import make_byte_tokenizer

    tokenizer = make_byte_tokenizer()
    with quiet_transformers(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(
            seed
        )  # for what a library draws itself, such as the time steps of a state space model
        model = _new_model(kind, len(tokenizer))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in sorted(model.named_parameters()):
                if parameter.ndim > 1 and not name.endswith("A_log"):
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * TINY_STD)
        save_hf_model(model, path, tokenizer)


def _new_model(kind: str, vocab_size: int) -> Any:
    import transformers

    from rollouts.models.tokenizers import END_ID, PAD_ID, START_ID

    tokens: dict[str, Any] = {
        "vocab_size": vocab_size,
        "bos_token_id": START_ID,
        "eos_token_id": END_ID,
        "pad_token_id": PAD_ID,
    }
    sizes: dict[str, Any] = {
        **tokens,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
    }
    if kind == "llama":
        return transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**{**sizes, "num_hidden_layers": 3}, tie_word_embeddings=True)
        )
    if kind == "qwen3":
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, tie_word_embeddings=False))
    if kind == "gemma":
        caps: dict[str, Any] = {
            "sliding_window": 8,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 4.0,
        }
        return transformers.Gemma2ForCausalLM(
            transformers.Gemma2Config(**sizes, **caps, tie_word_embeddings=True)
        )
    if kind == "mamba":
        return transformers.MambaForCausalLM(
            transformers.MambaConfig(
                **tokens, hidden_size=64, state_size=8, num_hidden_layers=2, tie_word_embeddings=True
            )
        )
    assert kind == "moe", kind
    experts: dict[str, Any] = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
    }
    return transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(**sizes, **experts, tie_word_embeddings=False)
    )


def make_tiny_byte_model(seed: int, cache: Path) -> Path:
    """The directory in `cache` of a random two-layer Llama over bytes (0.1 M parameters, tied embeddings);
    equal seeds give equal files.

    hidden 64, 4 heads with 2 key-value heads, feed-forward 128, vocabulary 259 (see `make_byte_tokenizer`),
    context 2048.
    """
    path = cache / f"tiny-byte-{TINY_BYTE_FORMAT}-seed{seed}"
    build_directory_once(path, lambda folder: _write_tiny_byte_model(seed, folder))
    return path


def _write_tiny_byte_model(seed: int, folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from rollouts.models.export import save_hf_model
    from rollouts.models.tokenizers import END_ID, PAD_ID, START_ID, make_byte_tokenizer

    tokenizer = make_byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=START_ID,
        eos_token_id=END_ID,
        pad_token_id=PAD_ID,
    )
    with quiet_transformers(), torch.random.fork_rng(devices=[]):
        model = LlamaForCausalLM(config)
        # our own generator: what the library draws, and in which order, may change between its versions
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for _, parameter in sorted(model.named_parameters()):
                if parameter.ndim > 1:
                    parameter.copy_(
                        torch.randn(parameter.shape, generator=generator) * config.initializer_range
                    )
                else:
                    parameter.fill_(1.0)
        save_hf_model(model, folder, tokenizer)
