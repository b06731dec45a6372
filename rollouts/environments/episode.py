"""One trajectory: the model's turns, and what tools and an environment answer to them.

    open ──► reset ──► ask ──► read ─┬─ calls ──► tools, side by side ──┬──► extend ──► ask …
                                     └─ no call ──► step, or the end ───┘
    a limit, or the end ──► score ──► segments;  the engine stops ──► held, to go on from later

A trajectory that waits for a tool holds no slot of an engine. After each turn what there is is noted, so that
whoever stops it can go on from there: from its tokens where nothing but tools is in play or the environment
gave its state_dict, else it begins anew, which is counted.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import trio

from rollouts.config.tables import RolloutConfig
from rollouts.crash_points import reach
from rollouts.data.chat import NO_PARAMS, TemplateParams
from rollouts.environments.protocol import Tool, Turn, World
from rollouts.environments.tools import answer_unreadable, call_tools
from rollouts.environments.trajectories import (
    AgentTokenizer,
    ChatFormat,
    Node,
    ReadTurn,
    TurnRecord,
    collect_segments,
    make_chat_format,
    pack_trajectory,
    unpack_trajectory,
)
from rollouts.errors import TrajectoryLeftOut
from rollouts.generation.continuing import join_completions, note_progress
from rollouts.generation.generate import ask_for_rest, compute_request_seed
from rollouts.generation.samples import TRAJECTORY
from rollouts.protocols import GenerateFn, InferenceEngine
from rollouts.rewards.check import add_up, check_reward
from rollouts.types import (
    EMPTY,
    ChatMessage,
    Completion,
    GenerateRequest,
    JSONValue,
    RewardResult,
    Sample,
    SamplingParams,
    Status,
)

TOOL_CHARS = 16_384  # of a result; a longer one is an error that the model is told
SHOWN = ("segment", "reward", "rewards", "calls", "metadata")  # of a turn, in the record, where not 0

End = Literal["done", "turns", "tool_calls", "tokens", "time"]


OpenWorld = Callable[[Mapping[str, JSONValue]], AbstractAsyncContextManager[World | None]]
"""From a dataset row to its environment; to None where there are tools alone."""
MakeFormat = Callable[[Sequence[Tool]], ChatFormat]
"""How a conversation with these tools is written."""


class Stopped(Exception):
    """The engine stops before a turn has ended."""


@dataclass(eq=False)
class Episode:
    """A trajectory under way."""

    form: ChatFormat
    config: RolloutConfig
    engine: InferenceEngine
    sampling: SamplingParams
    sample: Sample  # as it was before the trajectory
    world: World | None
    tools: Sequence[Tool]
    node: Node  # the newest
    turns: list[TurnRecord]
    rest: Completion | None  # of the turn that a stop cut
    record: dict[str, JSONValue]  # restarts, resumed: how often; tool_calls; time/tools and time/all: seconds
    began: float  # trio's clock
    state: JSONValue = None  # of the world after the newest turn

    async def ask(self, number: int, draw: str = "") -> Completion | None:
        """The model's turn of that number; None if there is no room for one. Equal draws draw equal numbers;
        empty: those of the turn's number. Raises Stopped.
        """
        prompt, sample = self.node.tokens, self.sample
        limit = min(self.config.max_trajectory_tokens, self.engine.features.context_length)
        room = min(limit - len(prompt), self.sampling.max_new_tokens)
        if room < 1:
            return None
        name, seed = f"{sample.id}#{number}" if number else sample.id, self.sampling.seed
        if seed is not None and (number or draw):
            seed = compute_request_seed(seed, draw or name)
        request = GenerateRequest(
            request_id=name,
            prompt_ids=prompt,
            sampling=replace(self.sampling, max_new_tokens=room, seed=seed),
            affinity="" if sample.group_index is None else f"g{sample.group_index}",
            trajectory=sample.id,
        )
        held, self.rest = self.rest, None
        asked = request if held is None else ask_for_rest(request, held.token_ids)
        answer = await self.engine.generate(asked)
        whole = answer if held is None else join_completions(held, answer)
        if whole.finish_reason != "abort":
            return whole
        self.rest = whole
        raise Stopped

    async def answer(self, turn: Turn) -> list[ChatMessage] | End:
        """What the model reads next, or why there is nothing. The turn's record gets its calls and reward."""
        record, calls = self.turns[-1], turn.message.get("tool_calls", ())
        problem = turn.unreadable if self.tools else ""
        if turn.complete and (calls or problem):
            self.record["tool_calls"] += len(calls) or 1
            if self.record["tool_calls"] > self.config.max_tool_calls:
                return "tool_calls"
            if len(self.turns) == self.config.max_turns:
                return "turns"
            if problem:
                called = [{"name": "", "outcome": "unreadable", "time/call": 0.0}]
                self.turns[-1] = record._replace(calls=called)
                return [answer_unreadable(problem)]
            began = trio.current_time()
            results = await call_tools(
                calls, self.tools, timeout_s=self.config.tool_timeout_s, output_chars=TOOL_CHARS
            )
            self.record["time/tools"] += trio.current_time() - began
            called = [
                {"name": one.message.get("name", ""), "outcome": one.outcome, "time/call": one.seconds}
                for one in results
            ]
            self.turns[-1] = record._replace(calls=called)
            return [one.message for one in results]
        if self.world is None:
            return "done" if turn.complete else "tokens"
        began = trio.current_time()
        seen = await self.world.step(turn)
        self.record["time/tools"] += trio.current_time() - began
        self.turns[-1] = record._replace(metadata=seen.metadata)
        if seen.reward is not None:
            self.reward(check_reward(seen.reward, f"the environment of sample {self.sample.id}"))
        if seen.done:
            return "done"
        if len(self.turns) == self.config.max_turns:
            return "turns"
        text = seen.messages
        return [ChatMessage(role="user", content=text)] if isinstance(text, str) else list(text)

    async def play(self) -> End:
        """Why it ended. Raises Stopped."""
        while True:
            await self.note()
            completion = await self.ask(len(self.turns))
            if completion is None:
                return "tokens"
            self.node, turn = self.form.read(self.node, completion)
            self.turns.append(TurnRecord(self.node, turn.text))
            news = await self.answer(turn)
            if isinstance(news, str):
                return news
            self.node = self.form.extend(self.node, news)

    async def note(self) -> None:
        """Notes what there is to go on from."""
        if self.world is not None:
            self.state = await self.world.state()
        note_progress(self.hold())
        reach("rollout.turn")

    def hold(self) -> Sample:
        """What a later call goes on from: without tokens where the environment has to begin anew."""
        if (self.world is not None or self.config.agent) and self.state is None:
            record = {"restarts": self.record["restarts"] + 1, "resumed": self.record["resumed"]}
            return replace(
                self.sample, status=Status.ABORTED, metadata={**self.sample.metadata, TRAJECTORY: record}
            )
        packed, layout = pack_trajectory(self.node, self.turns, self.rest, self.sample)
        seconds = self.record["time/all"] + trio.current_time() - self.began
        record = {**self.record, "time/all": seconds, "state": self.state, **layout}
        return replace(packed, status=Status.ABORTED, metadata={**packed.metadata, TRAJECTORY: record})

    def reward(self, result: RewardResult) -> None:
        """Adds to the reward of the newest turn."""
        last = self.turns[-1]
        parts = {**last.rewards}
        for name, value in result.parts.items():
            parts[name] = parts.get(name, 0.0) + value
        self.turns[-1] = last._replace(reward=(last.reward or 0.0) + result.reward, rewards=parts)

    def segments(self, end: End) -> tuple[Sample, ...]:
        """The finished trajectory. Raises TrajectoryLeftOut where the config says so of the limit."""
        rule = "train" if end == "done" else self.config.at_limit.get(end, "train")
        if rule == "drop":
            raise TrajectoryLeftOut(f"its limit of {end} ended the trajectory; at_limit.{end} is 'drop'")
        own = [turn.reward for turn in self.turns if turn.reward is not None]
        parts: dict[str, float] = {}
        for turn in self.turns:
            for name, value in turn.rewards.items():
                parts[name] = parts.get(name, 0.0) + value
        # a segment begins with a turn whose path is a whole prompt and itself
        begun = itertools.accumulate(len(turn.answer.path()) == 2 for turn in self.turns)
        facts = [
            {"segment": count - 1, **turn._asdict()} for turn, count in zip(self.turns, begun, strict=True)
        ]
        turns = [
            {"tokens": len(one["answer"].token_ids), **{name: one[name] for name in SHOWN if one[name]}}
            for one in facts
        ]
        seconds = self.record["time/all"] + trio.current_time() - self.began
        record = {**self.record, "time/all": seconds, "end": end, "trains": rule == "train", "turns": turns}
        whole = replace(
            self.sample,
            response=self.turns[-1].text if self.turns else "",
            reward=add_up(own, "the environment's rewards") if own else None,
            rewards=parts,
            status=Status.COMPLETED if end == "done" else Status.TRUNCATED,
            metadata={**self.sample.metadata, "messages": list(self.node.messages), TRAJECTORY: record},
        )
        segments = collect_segments(self.turns, whole) or (replace(whole, tokens=self.node.tokens),)
        if not self.engine.features.log_probs:
            segments = tuple(replace(one, loss_mask=EMPTY, rollout_log_probs=EMPTY) for one in segments)
        # the record is the trajectory's, and stands in its last segment
        return (*(replace(one, metadata=self.sample.metadata) for one in segments[:-1]), segments[-1])


def make_agent_generate(
    make_format: MakeFormat,
    config: RolloutConfig,
    *,
    open_world: OpenWorld = lambda row: nullcontext(),
    tools: Sequence[Tool] = (),
    play: Callable[[Episode], Awaitable[End]] = Episode.play,
) -> GenerateFn:
    """A generate function that plays a trajectory in the environment of its row, with the tools of the run
    and those of the environment. `play` moves it to its end.

    Raises EnvironmentFailed, TrajectoryLeftOut; DataError where the chat template refuses; and like engines.
    """

    async def agent_generate(
        sample: Sample, engine: InferenceEngine, sampling: SamplingParams
    ) -> tuple[Sample, ...]:
        held: Any = sample.metadata.get(TRAJECTORY, {}) if sample.status is Status.ABORTED else {}
        start = make_pending(sample)
        row = {**start.metadata, "prompt": start.prompt}
        async with open_world(row) as world:
            callable_tools = [*tools, *(world.tools if world else ())]
            form = make_format(callable_tools)
            record = {"restarts": 0, "resumed": 0, "tool_calls": 0, "time/tools": 0.0, "time/all": 0.0}
            record |= {name: held[name] for name in record if name in held}
            turns, rest = list[TurnRecord](), None
            if "nodes" in held:
                node, turns, rest = unpack_trajectory(form, sample, held)
                record["resumed"] += 1
                if world is not None:
                    await world.restore(held["state"])
            else:
                said = await world.reset() if world else None
                node = form.begin(said or parse_prompt(start.prompt))
            episode = Episode(
                form,
                config,
                engine,
                sampling,
                start,
                world,
                callable_tools,
                node,
                turns,
                rest,
                record,
                trio.current_time(),
            )
            end: End = "time"
            try:
                with trio.move_on_after(config.trajectory_timeout_s - record["time/all"]):
                    end = await play(episode)
            except Stopped:
                return (episode.hold(),)
            final = await world.score() if world and episode.turns else None
            if final is not None:
                episode.reward(final)
            return episode.segments(end)

    return agent_generate


def make_pending(sample: Sample) -> Sample:
    """The sample as it was before anything was generated."""
    blank = dict.fromkeys(
        ("tokens", "loss_mask", "rollout_log_probs", "weight_versions", "turn_rewards"), EMPTY
    )
    metadata = {name: value for name, value in sample.metadata.items() if name != TRAJECTORY}
    return replace(sample, **blank, response="", status=Status.PENDING, metadata=metadata)


def parse_prompt(prompt: str | Sequence[ChatMessage]) -> list[ChatMessage]:
    """A prompt as messages; text is one user turn."""
    return [ChatMessage(role="user", content=prompt)] if isinstance(prompt, str) else list(prompt)


def make_formats(
    tokenizer: AgentTokenizer,
    *,
    params: TemplateParams = NO_PARAMS,
    read_turn: ReadTurn | Mapping[str, Any] | None = None,
    history: Literal["template", "extend"] = "template",
) -> MakeFormat:
    """make_chat_format for the tools of a trajectory, once for equal ones."""

    @functools.lru_cache(maxsize=64)
    def make(schemas: str) -> ChatFormat:
        return make_chat_format(
            tokenizer, params=params, tools=json.loads(schemas), read_turn=read_turn, history=history
        )

    return lambda tools: make(json.dumps([tool.schema for tool in tools]))
