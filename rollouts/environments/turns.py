"""Trajectories of several turns without an event loop: tier 1, and what is the same in an episode of tier 2.

    play_turns ──► a prompt, tool calls, or a turn without any ──► its driver answers ──► play_turns … the end

Loads neither trio nor torch.
"""

from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from rollouts.config.rollout import RolloutConfig
from rollouts.data.rows import parse_prompt
from rollouts.environments.protocol import Observation, Turn
from rollouts.environments.trajectories import ChatFormat, Node, ReadTurn, TurnRecord, collect_segments
from rollouts.environments.worker import check_result, inspect_tool
from rollouts.errors import ToolError, TrajectoryLeftOut
from rollouts.generation.generate import compute_request_seed
from rollouts.generation.rollouts import CompleteFn
from rollouts.messages import parse_tool_arguments
from rollouts.rewards.check import add_up, check_reward, describe
from rollouts.types import (
    EMPTY,
    TRAJECTORY,
    ChatMessage,
    Fields,
    Function,
    GenerateRequest,
    JSONValue,
    RewardResult,
    Sample,
    SamplingParams,
    Status,
    live,
)

SHOWN = ("segment", "reward", "rewards", "calls", "metadata")  # of a turn, in the record, where not 0

End = Literal["done", "turns", "tool_calls", "tokens", "time"]
ToolCalls = Sequence[Fields]
Record = dict[str, JSONValue]
"""Of a trajectory. restarts, resumed: how often; tool_calls; time/tools and time/all: seconds."""
NEW_RECORD: Record = {"restarts": 0, "resumed": 0, "tool_calls": 0, "time/tools": 0.0, "time/all": 0.0}


@live
class Trajectory:
    """A trajectory under way."""

    form: ChatFormat
    config: RolloutConfig
    sampling: SamplingParams
    sample: Sample  # as it was before the trajectory
    node: Node  # the newest prompt
    turns: list[TurnRecord]
    record: Record


class ToolResult(NamedTuple):
    """What became of one tool call."""

    message: ChatMessage  # the tool's
    outcome: str  # ok, or the kind of a ToolError
    seconds: float = 0.0  # from the call to the answer


def extract_tool_calls(message: ChatMessage) -> ToolCalls:
    """The tool calls of a message."""
    return message.get("tool_calls", ())


def play_turns(
    played: Trajectory, stops: Callable[[Turn], bool] = lambda turn: False
) -> Generator[Node | ToolCalls | Turn | End, Any, None]:
    """What a trajectory needs next, from its newest prompt on, and at last why it ended. It is sent the
    completion of a prompt, or None if there is no room for one; a ToolResult for each of some tool calls; an
    Observation for a turn without any, or None where there is no environment.
    """
    form, turns, config, record = played.form, played.turns, played.config, played.record
    while completion := (yield played.node):
        answer, turn = form.read(played.node, completion)
        turns.append(TurnRecord(answer, turn.text))
        calls = extract_tool_calls(turn.message)
        if turn.complete and stops(turn):
            yield "done"
            return
        if turn.complete and (calls or (turn.unreadable and form.tools)):
            record["tool_calls"] += len(calls) or 1
            if record["tool_calls"] > config.max_tool_calls:
                yield "tool_calls"
                return
            if len(turns) == config.max_turns:
                yield "turns"
                return
            text = f"Error: the tool call could not be read: {turn.unreadable[:2000]}"
            refused = [ToolResult(ChatMessage(role="user", content=text), "unreadable")]
            results = (yield calls) if calls else refused
            noted = [{"name": said.get("name", ""), "outcome": o, "time/call": s} for said, o, s in results]
            turns[-1] = turns[-1]._replace(calls=noted)
            news = [one.message for one in results]
        else:
            seen = yield turn
            if seen is None:
                yield "done" if turn.complete else "tokens"
                return
            turns[-1] = turns[-1]._replace(metadata=seen.metadata)
            if seen.reward is not None:
                add_reward(turns, check_reward(seen.reward, "the environment"))
            if seen.done or len(turns) == config.max_turns:
                yield "done" if seen.done else "turns"
                return
            news = parse_prompt(seen.messages)
        played.node = form.extend(answer, news)
    yield "tokens"


def make_request(
    played: Trajectory, number: int, max_tokens: int, *, draw: str = ""
) -> GenerateRequest | None:
    """The request of that number, from 0, for the newest prompt; None if max_tokens leave no room. Equal
    draws draw equal numbers; empty: those of the request's number.
    """
    sample, sampling, prompt = played.sample, played.sampling, played.node.tokens
    room = min(max_tokens - len(prompt), sampling.max_new_tokens)
    if room < 1:
        return None
    name, seed = f"{sample.id}#{number}" if number else sample.id, sampling.seed
    if seed is not None and (number or draw):
        seed = compute_request_seed(seed, draw or name)
    return GenerateRequest(
        request_id=name,
        prompt_ids=prompt,
        sampling=replace(sampling, max_new_tokens=room, seed=seed),
        affinity="" if sample.group_index is None else f"g{sample.group_index}",
        trajectory=sample.id,
    )


def add_reward(turns: list[TurnRecord], result: RewardResult) -> None:
    """Adds to the reward of the newest turn."""
    last = turns[-1]
    parts = Counter(last.rewards)
    parts.update(result.parts)
    turns[-1] = last._replace(reward=(last.reward or 0.0) + result.reward, rewards=dict(parts))


def finish_trajectory(played: Trajectory, end: End, *, log_probs: bool = True) -> tuple[Sample, ...]:
    """One sample for each segment. log_probs: False where the engine gave none, so that nothing trains.
    Raises TrajectoryLeftOut where the config says so of the limit.
    """
    sample, node, turns = played.sample, played.node, played.turns
    rule = "train" if end == "done" else played.config.at_limit.get(end, "train")
    if rule == "drop":
        raise TrajectoryLeftOut(
            f"its limit of {end} ended the trajectory, and rl.rollout.at_limit.{end} = 'drop' leaves it out;"
            " raise the limit, or let it train"
        )
    own = [turn.reward for turn in turns if turn.reward is not None]
    parts = Counter()
    shown, segment = list[Record](), -1
    for turn in turns:
        parts.update(turn.rewards)
        segment += len(turn.answer.path()) == 2  # one begins where the path is a whole prompt and the answer
        facts = {"segment": segment, **turn._asdict()}
        told = {name: facts[name] for name in SHOWN if facts[name]}
        shown.append({"tokens": len(turn.answer.token_ids), **told})
    if turns and turns[-1].answer.parent is node:
        node = turns[-1].answer
    record = {**played.record, "end": end, "trains": rule == "train", "turns": shown}
    whole = replace(
        sample,
        response=turns[-1].text if turns else "",
        reward=add_up(own, "the environment's rewards") if own else None,
        rewards=parts,
        status=Status.COMPLETED if end == "done" else Status.TRUNCATED,
        metadata={**sample.metadata, "messages": list(node.messages), TRAJECTORY: record},
    )
    segments = collect_segments(turns, whole) or (replace(whole, tokens=node.tokens),)
    if not log_probs:
        segments = tuple(replace(one, loss_mask=EMPTY, rollout_log_probs=EMPTY) for one in segments)
    # the record is the trajectory's, and stands in its last segment
    return (*(replace(one, metadata=sample.metadata) for one in segments[:-1]), segments[-1])


def make_pending(sample: Sample) -> Sample:
    """The sample as it was before anything was generated."""
    metadata = {name: value for name, value in sample.metadata.items() if name != TRAJECTORY}
    return Sample(id=sample.id, prompt=sample.prompt, group_index=sample.group_index, metadata=metadata)


# --- tier 1 -------------------------------------------------------------------------------------------------


def generate_conversation_turn(
    complete: CompleteFn,
    form: ChatFormat,
    conversation: Node,
    sampling: SamplingParams,
    *,
    request_id: str = "turn",
) -> tuple[Node, Turn]:
    """The model's next turn, appended to the conversation, and read. form.begin(messages) begins a
    conversation; form.extend(conversation, messages) appends what the turn is answered.
    """
    request = GenerateRequest(request_id=request_id, prompt_ids=conversation.tokens, sampling=sampling)
    return form.read(conversation, *complete([request]))


def execute_tools(calls: ToolCalls, tools: Sequence[Function]) -> list[ToolResult]:
    """What the tools, plain typed functions, answer to calls, one after the other. Whatever a call does wrong
    becomes text for the model, beginning with "Error:". Raises PlugInError for a function that is no tool.
    """
    known = {tool.__name__: (tool, inspect_tool(tool)[1]) for tool in tools}
    results = []
    for call in calls:
        name, outcome = call["function"]["name"], "ok"
        try:
            if name not in known:
                raise ToolError("unknown", f"there is no tool {name!r}; the tools are {', '.join(known)}")
            tool, read_arguments = known[name]
            arguments = read_arguments(parse_tool_arguments(call["function"]["arguments"]))
            content = check_result(tool(**arguments))
        except ToolError as error:
            outcome, content = error.kind, f"Error: {error}"
        except Exception as error:
            outcome, content = "failed", f"Error: {name} raised {describe(error)}"
        message = ChatMessage(role="tool", content=content, tool_call_id=call["id"], name=name)
        results.append(ToolResult(message, outcome))
    return results


def create_multiturn_rollout(
    sample: Sample,
    complete: CompleteFn,
    form: ChatFormat,
    sampling: SamplingParams,
    *,
    config: RolloutConfig = RolloutConfig(),  # noqa: B008  (it is frozen)
    tool_parser: ReadTurn | None = None,
    tool_executor: Callable[[ToolCalls], Sequence[ToolResult]] = lambda calls: execute_tools(calls, ()),
    stop_condition: Callable[[Turn], bool] = lambda turn: False,
    step: Callable[[Turn], Observation] | None = None,
) -> tuple[Sample, ...]:
    """The segments of one trajectory, as tier 2 makes them of the same completions. It ends at a turn for
    which stop_condition is true, at a limit of the config, where `step`, an environment's answer to a turn
    without calls, says so, or without one at such a turn.

    Raises like finish_trajectory, DataError where the chat template refuses the conversation, and what the
    functions raise.
    """
    start, form = make_pending(sample), replace(form, read_turn=tool_parser or form.read_turn)
    node = form.begin(parse_prompt(start.prompt))
    played = Trajectory(form, config, sampling, start, node, [], {**NEW_RECORD})
    playing, answer = play_turns(played, stop_condition), None
    while not isinstance(wanted := playing.send(answer), str):
        if isinstance(wanted, Node):
            request = make_request(played, len(played.turns), config.max_trajectory_tokens)
            answer = complete([request])[0] if request else None
        elif isinstance(wanted, Turn):
            answer = step(wanted) if step else None
        else:
            answer = tool_executor(wanted)
    return finish_trajectory(played, wanted)
