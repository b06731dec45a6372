"""One trajectory: the model's turns, and what tools and an environment answer to them.

    open ──► reset ──► ask ──► read ─┬─ calls ──► tools, side by side ──┬──► extend ──► ask …
                                     └─ no call ──► step, or the end ───┘
    a limit, or the end ──► score ──► segments;  the engine stops ──► held, to go on from later

A trajectory that waits for a tool holds no slot of an engine. After each turn what there is is noted, so that
whoever stops it can go on from there: from its tokens where nothing but tools is in play or the environment
gave its state_dict, else it begins anew, which is counted.
"""

import functools
import json
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from typing import Any

import trio

from rollouts.config.rollout import RolloutConfig
from rollouts.crash_points import reach
from rollouts.data.chat import ChatTokenizer
from rollouts.data.rows import parse_prompt
from rollouts.environments.protocol import Tool, Turn, World
from rollouts.environments.tools import call_tools
from rollouts.environments.trajectories import (
    ChatFormat,
    Node,
    TurnRecord,
    make_chat_format,
    pack_trajectory,
    unpack_trajectory,
)
from rollouts.environments.turns import (
    NEW_RECORD,
    End,
    Trajectory,
    add_reward,
    finish_trajectory,
    make_pending,
    make_request,
    play_turns,
)
from rollouts.generation.continuing import ask_on, note_progress
from rollouts.protocols import GenerateFn, InferenceEngine
from rollouts.types import TRAJECTORY, Completion, JSONObject, JSONValue, Sample, SamplingParams, Status, live

OpenWorld = Callable[[JSONObject], AbstractAsyncContextManager[World | None]]
"""From a dataset row to its environment; to None where there are tools alone."""
MakeFormat = Callable[[Sequence[Tool]], ChatFormat]
"""How a conversation with these tools is written."""


class Stopped(Exception):
    """The engine stops before a turn has ended."""


@live
class Episode(Trajectory):
    """A trajectory under way, with what it is played on."""

    engine: InferenceEngine
    world: World | None
    tools: Sequence[Tool]
    rest: Completion | None  # of the turn that a stop cut
    began: float  # trio's clock; as much earlier as it had gone on before a stop
    state: JSONValue = None  # of the world after the newest turn

    async def ask(self, number: int, draw: str = "") -> Completion | None:
        """The model's turn of that number; None if there is no room for one. Equal draws draw equal numbers;
        empty: those of the turn's number. Raises Stopped.
        """
        limit = min(self.config.max_trajectory_tokens, self.engine.features.context_length)
        request = make_request(self, number, limit, draw=draw)
        if request is None:
            return None
        held, self.rest = self.rest, None
        whole = await ask_on(self.engine, request, held)
        if whole.finish_reason != "abort":
            return whole
        self.rest = whole
        raise Stopped

    async def play(self) -> End:
        """Why it ended. Raises Stopped."""
        playing, answer = play_turns(self), None
        while not isinstance(wanted := playing.send(answer), str):
            if isinstance(wanted, Node):
                if self.world is not None:
                    self.state = await self.world.call("state_dict")
                note_progress(self.hold())  # what there is to go on from
                reach("rollout.turn")
                answer = await self.ask(len(self.turns))
                continue
            began = trio.current_time()
            if isinstance(wanted, Turn):
                answer = await self.world.call("step", wanted) if self.world else None
            else:
                answer = await call_tools(wanted, self.tools, timeout_s=self.config.tool_timeout_s)
            self.record["time/tools"] += trio.current_time() - began
        return wanted

    def hold(self) -> Sample:
        """What a later call goes on from: without tokens where the environment has to begin anew."""
        sample, record = self.sample, {name: self.record[name] for name in ("restarts", "resumed")}
        if (self.world is not None or self.config.agent) and self.state is None:
            record["restarts"] += 1
        else:
            sample, layout = pack_trajectory(self.node, self.turns, self.rest, sample)
            seconds = trio.current_time() - self.began
            record = {**self.record, "time/all": seconds, "state": self.state, **layout}
        return replace(sample, status=Status.ABORTED, metadata={**sample.metadata, TRAJECTORY: record})


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
        held = sample.metadata.get(TRAJECTORY, {}) if sample.status is Status.ABORTED else {}
        start = make_pending(sample)
        async with open_world({**start.metadata, "prompt": start.prompt}) as world:
            callable_tools = [*tools, *(world.tools if world else ())]
            form = make_format(callable_tools)
            record = {name: held.get(name, value) for name, value in NEW_RECORD.items()}
            turns, rest = list[TurnRecord](), None
            if "nodes" in held:
                node, turns, rest = unpack_trajectory(form, sample, held)
                record["resumed"] += 1
                if world is not None:
                    await world.call("load_state_dict", held["state"])
            else:
                node = form.begin(
                    (await world.call("reset") if world else None) or parse_prompt(start.prompt)
                )
            began = trio.current_time() - record["time/all"]
            played = form, config, sampling, start, node, turns, record
            episode = Episode(*played, engine, world, callable_tools, rest, began)
            end = "time"
            try:
                with trio.move_on_at(began + config.trajectory_timeout_s):
                    end = await play(episode)
            except Stopped:
                return (episode.hold(),)
            final = await world.call("score") if world and episode.turns else None
            if final is not None:
                add_reward(turns, final)
            record["time/all"] = trio.current_time() - began
            return finish_trajectory(episode, end, log_probs=engine.features.log_probs)

    return agent_generate


def make_formats(tokenizer: ChatTokenizer, **options: Any) -> MakeFormat:
    """make_chat_format, with its other options, for the tools of a trajectory, once for equal ones."""

    @functools.lru_cache(maxsize=64)
    def make(schemas: str) -> ChatFormat:
        return make_chat_format(tokenizer, tools=json.loads(schemas), **options)

    return lambda tools: make(json.dumps([tool.schema for tool in tools]))
