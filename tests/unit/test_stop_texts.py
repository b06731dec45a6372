"""Texts that end what is sampled: found like by decoding everything after each token, and by the embedded
engine.
"""

import random
from dataclasses import replace

import pytest
from tokenizers import Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from rollouts.errors import RequestRefused
from rollouts.models.decoding.batch import StopTexts
from rollouts.models.load import load_tokenizer, resolve_model
from rollouts.testing.engine_contracts import make_request
from tests.support.plain_backend import load_tiny
from tests.unit.chat_tokenizers import byte_tokenizer
from tests.unit.test_local_engine import generate_all, open_engine

Pieces = dict[bytes, int]  # what tokens spell, and their ids
PARTS = ["a", "ab", "b a", " ", "  ", "\n", "\n\n", "é", "✓", "😀", "漢字", "User", ":", " User:", "."]
WORDS = ["ab", "er:", "  ", "\n\n", " U", "Us", "a ", " a", "ser", "b a", "User:"]


def make_bytes():
    """Like GPT-2's: tokens of bytes, some of several and some that end within a character."""
    turn = bytes_to_unicode()
    spelled = [word.encode() for word in (*WORDS, *"é✓😀")] + ["a✓".encode()[:2], "✓😀".encode()[2:5]]
    merges, made = list[tuple[str, str]](), set(ByteLevel.alphabet())
    for word in spelled:
        symbols = "".join(turn[byte] for byte in word)
        for end in range(2, len(symbols) + 1):
            if symbols[:end] not in made:
                merges.append((symbols[: end - 1], symbols[end - 1]))
                made.add(symbols[:end])
    tokenizer, back = byte_tokenizer(merges=merges), {symbol: byte for byte, symbol in turn.items()}
    known = {word: token for word, token in tokenizer.get_vocab().items() if {*word} <= back.keys()}
    return tokenizer, {bytes(back[symbol] for symbol in word): token for word, token in known.items()}


def make_fallback():
    """Like Llama 2's: words with marks for spaces, the first of which is left out, and bytes for the rest."""
    words = [word.replace(" ", "▁") for word in ("é", "✓", *"abUser:.", "▁", *WORDS) if "\n" not in word]
    symbols = [*(f"<0x{byte:02X}>" for byte in range(256)), *dict.fromkeys(words)]
    vocabulary = {symbol: token for token, symbol in enumerate(symbols)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    pieces = {bytes([byte]): byte for byte in range(256)}
    pieces |= {word.replace("▁", " ").encode(): vocabulary[word] for word in words}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer), pieces


def split(text, pieces, draw):
    """Tokens that spell the text, drawn among all that do; between them some that spell nothing."""
    left, tokens = text.encode(), list[int]()
    while left:
        piece = draw.choice([piece for piece in pieces if left.startswith(piece)])
        tokens.append(pieces[piece])
        left = left[len(piece) :]
        if draw.random() < 0.05:
            tokens += [10**6] * draw.randrange(1, 30)
    return tokens


@pytest.mark.parametrize("make", [make_bytes, make_fallback])
def test_a_text_is_complete_with_the_token_with_which_all_that_was_sampled_holds_it(make):
    draw = random.Random(1)
    (tokenizer, pieces), found = make(), 0
    stops = StopTexts(tokenizer)
    for _ in range(100):
        text = "".join(draw.choices(PARTS, k=draw.randrange(1, 25)))
        begins = draw.randrange(len(text))
        texts = ["".join(draw.choices(PARTS, k=2)), text[begins : begins + draw.randrange(1, 7)]]
        tokens = split(text, pieces, draw)
        for count in range(1, len(tokens) + 1):
            said = tokenizer.decode(tokens[:count])
            wanted = any(stop in said for stop in texts)
            assert stops.complete(tokens[:count], texts) == wanted, (text, texts, tokens[:count])
            if wanted:
                found += 1
                break
    assert found > 80


def test_what_holds_no_last_character_is_not_decoded_and_of_what_does_a_tail_is():
    tokenizer = byte_tokenizer()
    stops, decoded = StopTexts(tokenizer), list[int]()
    decode = stops._decode
    tokens = tokenizer.encode("abcdefgh" * 1000)
    assert not stops.complete(tokens, ["\n\nUser:"])
    counted = lambda ids: decoded.append(len(ids)) or decode(ids)  # noqa: E731
    stops._decode = counted
    assert not stops.complete(tokens, ["\n\nUser:"])
    assert decoded == []
    assert not stops.complete(tokens, ["xxxxxxxh"])
    assert 8 < max(decoded) < 20 and len(decoded) == 7 + 1


async def test_a_row_ends_with_the_token_that_completes_a_text_and_others_go_on():
    tokenizer = load_tokenizer(resolve_model("tiny:llama"))
    model = load_tiny("llama")
    whole = make_request("whole", max_new_tokens=40, seed=3)
    async with open_engine(model, tokenizer=tokenizer) as engine:
        tokens = (await engine.generate(whole)).token_ids.tolist()
        end = next(end for end in range(12, 40) if max(tokens[end - 2 : end]) < 128)
        text = tokenizer.decode(tokens[end - 2 : end])
        first = next(end for end in range(41) if text in tokenizer.decode(tokens[:end]))
        stopping = replace(whole, request_id="cut", sampling=replace(whole.sampling, stop_texts=("…", text)))
        at_limit = replace(
            stopping, request_id="limit", sampling=replace(stopping.sampling, max_new_tokens=first)
        )
        answers = await generate_all(engine, [whole, stopping, at_limit])
    assert answers["whole"].token_ids.tolist() == tokens
    for name in ("cut", "limit"):
        assert answers[name].token_ids.tolist() == tokens[:first]
        assert answers[name].finish_reason == "stop"
        assert answers[name].log_probs.tolist() == answers["whole"].log_probs.tolist()[:first]


async def test_a_text_is_refused_without_a_tokenizer_and_an_empty_one_always():
    async with open_engine() as engine:
        with pytest.raises(RequestRefused, match="opened with a tokenizer"):
            await engine.generate(make_request(stop_texts=("a",)))
        with pytest.raises(RequestRefused, match="one is empty"):
            await engine.generate(make_request(stop_texts=("a", "")))
