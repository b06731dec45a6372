"""How long a row may be before its own length changes what the model says of its first tokens. No torch."""

from __future__ import annotations

from typing import Any, NamedTuple

CONTEXT_NAMES = (
    "max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length",
    "context_length",
)  # fmt: skip


class RotaryLimit(NamedTuple):
    """Rotary frequencies of every position are fixed in rows of at most `tokens`; in a longer row all of them
    change.
    """

    kind: str  # rope_type of the config: "dynamic" or "longrope"
    tokens: int
    field: str  # of the config, where `tokens` stands


def find_context_limit(config: Any) -> int | None:
    """Positions that the config allows, or None where it sets no limit (recurrent models, relative
    positions).
    """
    config = config.get_text_config()
    stated = [getattr(config, name, None) for name in CONTEXT_NAMES]
    return next((value for value in stated if isinstance(value, int) and value > 0), None)


def find_rotary_limit(config: Any) -> RotaryLimit | None:
    """The shortest limit of a Hugging Face config's rotary embeddings; None where frequencies do not depend
    on the length.
    """
    config = config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    found: list[RotaryLimit] = []
    for part in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        kind, field = str(part.get("rope_type", "")), "max_position_embeddings"
        tokens = getattr(config, field, None)
        if kind == "longrope":  # a dynamic one never looks at the original length
            name = "original_max_position_embeddings"
            if original := part.get(name) or getattr(config, name, None):
                field, tokens = name, original
        elif "dynamic" not in kind:
            continue
        found.append(RotaryLimit(kind, int(tokens or 0), field))
    return min(found, key=lambda limit: limit.tokens, default=None)
