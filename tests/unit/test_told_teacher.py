"""A teacher that is told more than the policy: which rows it reads, and where what it says ends up."""

import json
from typing import Any

import numpy as np
import pytest

from rollouts.errors import UserFunctionError
from rollouts.generation.samples import convert_to_batch
from rollouts.loops.rl_batch import score_told
from rollouts.types import Sample, Status
from tests.support.text_tables import cases
from tests.unit.test_rl_batch import FixedReference


def answer(name, mask):
    """Tokens 10, 11, …; the policy's log-prob of those that train is −1."""
    arrays = {
        "tokens": range(10, 10 + len(mask)),
        "loss_mask": mask,
        "rollout_log_probs": [-one for one in mask],
    }
    return Sample(id=name, prompt="own", group_index=0, status=Status.COMPLETED, **arrays)


def tell(context, *samples, **options):
    """A prompt is one token 7 per letter; prompt and response may have 9 together."""
    tell = {"tokenize": lambda sample: np.full(len(sample.prompt), 7), "limit": 9, "context": context}
    return score_told(convert_to_batch(samples), **{"score": FixedReference().score, **tell, **options})


async def test_a_response_is_scored_after_the_other_prompt_and_each_token_gets_its_own_value():
    seen = []

    async def score(batch):
        seen.extend(tokens.tolist() for tokens in batch.tokens)
        return tuple(-tokens.astype(np.float32) for tokens in batch.tokens)

    def tell_a(samples):
        return ["xyz" if sample.id == "a" else None for sample in samples]

    found = await tell(tell_a, answer("a", [0, 0, 1, 0, 1]), answer("b", [0, 1, 1]), score=score)
    assert seen == [[7, 7, 7, 12, 13, 14]]  # from the first trained token on, what a tool said too
    np.testing.assert_equal(found, json.loads("[[0, 0, -12, 0, -14], [0, -1, -1]]"), "or the policy's own")


@cases("""
answers              | second | said
null                 | b      | TypeError
["x"]                | b      | ValueError: zip
["x", 5]             | b      | ValueError: Sample.prompt
["x", "long prompt"] | b      | ValueError: prompt and response have 12 tokens, the context 9
[null, null]         | a.1    | ValueError: a trajectory has several segments
""")
async def test_what_a_context_function_does_wrong_is_named(answers: Any, second, said):
    with pytest.raises(UserFunctionError, match=rf"rl\.distillation\.context, .* failed on group 0: {said}"):
        await tell(lambda samples: answers, answer("a", [0, 1]), answer(second, [0, 1]))
