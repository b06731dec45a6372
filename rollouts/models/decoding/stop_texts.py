"""Texts that end a row that is being decoded."""

import copy
from collections.abc import Sequence
from functools import cache, partial
from itertools import islice
from typing import Any

HEAD = 8  # tokens before a text's: it may begin within a token, and the first token of all may lose its space
CHARACTER_BYTES = 4  # of the longest; a token may be as little as one
HALF = "\ufffd"  # in place of bytes that are no character


class StopTexts:
    """What a tokenizer's tokens spell. Only those that may hold a text's last character make it decode."""

    def __init__(self, tokenizer: Any) -> None:
        # a copy, for this thread: others set their padding meanwhile
        self._decode = partial(copy.deepcopy(tokenizer).decode, skip_special_tokens=False)
        self._spell = cache(lambda token: self._decode([token, token]))  # the second as it is within a row

    def complete(self, token_ids: Sequence[int], texts: Sequence[str]) -> bool:
        """Whether the last of the tokens completes one of the texts.

        A token that spells anything has a byte at least, so as many as a text's bytes reach back far enough.
        One of four places to begin at is the beginning of a character: after half of one, a tokenizer may
        spell nothing of the bytes that follow.
        """
        last = self._spell(token_ids[-1])
        if not any(text[-1] in last or HALF in last for text in texts):
            return False
        longest = max(len(text.encode()) for text in texts) + HEAD
        tail = [*islice(filter(self._spell, reversed(token_ids)), longest)][::-1]
        for first in range(CHARACTER_BYTES):
            said = self._decode(tail[first:])
            found = any(text in said for text in texts)
            if found or HALF not in said:
                return found
        return False
