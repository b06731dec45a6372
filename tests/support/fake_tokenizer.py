"""A tokenizer of bytes with a chat template of two special tokens, without transformers."""

import re
from collections.abc import Mapping
from typing import Any

FAKE_START, FAKE_END = 256, 257
SPECIAL = {"<|start|>": FAKE_START, "<|end|>": FAKE_END}


class FakeTokenizer:
    """One token per byte of UTF-8, and 256 and 257 around each turn, written <|start|> and <|end|>."""

    chat_template = "<|start|>{role}\n{content}<|end|>"
    all_special_tokens = list(SPECIAL)
    added_tokens_decoder: Mapping[int, Any] = {}

    def __init__(self):
        self.encoded: list[str] = []  # every text that was tokenized

    def apply_chat_template(self, conversation, *, tokenize=False, add_generation_prompt=False):
        assert not tokenize
        turns = "".join(self.chat_template.format(**message) for message in conversation)
        return turns + ("<|start|>assistant\n" if add_generation_prompt else "")

    def encode(self, text, *, add_special_tokens=False):
        assert not add_special_tokens
        self.encoded.append(text)
        parts = re.split(r"(<\|start\|>|<\|end\|>)", text)
        return [token for part in parts for token in ([SPECIAL[part]] if part in SPECIAL else part.encode())]

    def decode(self, token_ids, *, skip_special_tokens=True):
        names = {token: b"" if skip_special_tokens else name.encode() for name, token in SPECIAL.items()}
        parts = (names.get(token, bytes([token % 256])) for token in token_ids)
        return b"".join(parts).decode(errors="replace")
