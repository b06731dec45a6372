"""Trajectories of several requests: aborts do not reach their generate function, and what it has noted of its
progress is not lost.
"""

from dataclasses import replace

import numpy as np
import trio

from rollouts.generation.collector import STOP_S
from rollouts.generation.continuing import ContinuingEngine, note_progress
from rollouts.generation.generate import append_completion
from rollouts.generation.group import Member
from rollouts.testing.fakes import ScriptedEngine, ScriptedReply
from rollouts.types import GenerateRequest, Sample, SamplingParams, Status
from tests.support.fake_tokenizer import FakeTokenizer
from tests.support.text_tables import cases
from tests.unit.manager_runs import SAMPLING, Run, make_run, say

FIRST = "g00000000-s000"
SLOW_S = 1000.0


class Play:
    """Two requests, with a tool between them that takes `tool_s` by group. Group 0 does not end when its
    request is aborted. `begun` has each call and from how many tokens it went on.
    """

    def __init__(self, *tool_s: float):
        self.tool_s, self.begun = tool_s, list[tuple[str, int]]()

    async def __call__(self, sample: Sample, engine, sampling: SamplingParams) -> Sample:
        self.begun.append((sample.id, sample.response_length))
        for turn in range(int(sample.metadata.get("turns", 0)), 2):
            tokens = sample.tokens if turn else np.array([1, 2, 3])
            name = f"{sample.id}#{turn}"
            answer = await engine.generate(
                GenerateRequest(request_id=name, prompt_ids=tokens, sampling=sampling)
            )
            if answer.finish_reason == "abort":
                await trio.sleep(0 if sample.group_index else SLOW_S)
                return replace(sample, status=Status.ABORTED)
            done = sample.response_length
            sample = append_completion(sample, tokens, answer, FakeTokenizer(), done=done)
            if turn == 0:
                sample = replace(sample, metadata={**sample.metadata, "turns": 1})
                note_progress(sample)
                await trio.sleep(self.tool_s[sample.group_index or 0])
        return sample


def start(play: Play, script=None, **options) -> Run:
    options = {"num_prompts": 1, "max_staleness": 2, **options}
    return make_run(script or say(), generate=play, **options)


async def test_a_weight_update_that_aborts_does_not_reach_the_trajectory(autojump_clock):
    """Three tokens of 1 s, 5 s of a tool, three tokens; the abort comes after the first of the last three."""
    run = start(play := Play(5.0, 5.0))

    async def update():
        await trio.sleep(9.5)
        await run.engine.pause("abort")
        run.advance(1)
        await run.engine.resume()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(update)
        batch = await run.manager.generate_batch()
    assert sorted(play.begun) == [(sample.id, 0) for sample in batch.samples], "each began once"
    for sample in batch.samples:
        assert (sample.response, sample.status) == ("abab", Status.COMPLETED)
        assert sample.weight_versions[sample.loss_mask].tolist() == [0] * 4 + [1] * 2
    asked = [one for one in run.engine.requests if one.request_id.startswith(FIRST)]
    assert [one.request_id[len(FIRST) :] for one in asked] == ["#0", "#1", "#1@1"]
    assert asked[2].prompt_ids.tolist() == batch.samples[0].tokens[:-2].tolist()
    assert asked[2].sampling.max_new_tokens == SAMPLING.max_new_tokens - 1


@cases("""
in_engine | after_s
no        | 0
yes       | 10
""")
async def test_a_trajectory_that_is_stopped_goes_on_from_what_it_noted(
    autojump_clock, in_engine: bool, after_s: float
):
    """Group 0 waits for a tool when the batch of group 1 is full; or for an answer, and does not end when
    that is aborted.
    """

    def token_s(name):
        slow = in_engine and name.startswith("g00000000") and "#1" in name and trio.current_time() < 7
        return 100.0 if slow else 1.0

    play = Play(0.0 if in_engine else SLOW_S, 0.0, 0.0)
    run = start(play, say(token_s=token_s), over_sampling=2.0)
    assert await run.take() == [1]
    assert trio.current_time() == 6 + after_s, f"{STOP_S} s if it does not end"
    held = run.manager.state_dict()["unfinished"][0]
    assert [one["partial"]["metadata"]["turns"] for one in held["members"]] == [1, 1]
    run.advance(1)
    del play.begun[:]
    assert await run.take() == [0]
    assert (FIRST, 3) in play.begun, "from its three tokens"


async def test_a_snapshot_has_what_running_trajectories_noted(autojump_clock):
    run = start(Play(5.0, 5.0))
    async with run.manager.generating(), trio.open_nursery() as nursery:
        nursery.start_soon(run.take)
        await trio.sleep(2)
        assert run.manager.state_dict()["unfinished"] == [], "nothing is noted yet"
        await trio.sleep(2)  # each waits for its tool
        state = run.save()
        nursery.cancel_scope.cancel()
    resumed = start(play := Play(5.0, 5.0), state=state)
    assert await resumed.take() == [0] and len(resumed.engine.requests) == 2
    assert [done for _, done in play.begun[:2]] == [3, 3]
    resumed.manager.check_ledger()


async def test_an_answer_that_is_aborted_at_its_last_token_is_whole():
    plan = make_run().manager._plan
    engine = ScriptedEngine(lambda request: ScriptedReply("ab", finish="abort"))
    member = Member(Sample(id=FIRST, prompt="p"))
    call = ContinuingEngine(plan._replace(engine=engine), member)
    request = GenerateRequest(
        request_id="x", prompt_ids=np.array([1]), sampling=SamplingParams(max_new_tokens=5)
    )
    answer = await call.generate(request)
    assert (len(answer.token_ids), answer.finish_reason, answer.request_id) == (5, "length", "x")
    assert [one.request_id for one in engine.requests] == ["x", "x@2", "x@4"]
    assert call.features is engine.features and await call.weight_version() == 0
    note_progress(member.pending)  # nobody waits for it
