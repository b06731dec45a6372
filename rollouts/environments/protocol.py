"""What an environment and a tool are, and the words that they and the model exchange.

reset() ──► messages ──► the model's Turn ──► step(turn) ──► Observation ──► Turn ──► … done ──► score()
                           └─ has tool calls: the tools answer, and step() is not called for it
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import field
from typing import Any, NamedTuple, Protocol

from rollouts.protocols import RewardValue
from rollouts.types import ChatMessage, JSONObject, JSONValue, record


@record
class Turn:
    """What the model did in one turn."""

    message: ChatMessage  # read back: content, reasoning_content, tool_calls with ids of ours
    text: str  # as sampled, special tokens left out
    complete: bool = True  # False: cut at a limit of tokens; no call in it is run
    unreadable: str = ""  # why its tool calls could not be read; the content is then the whole text


@record
class Observation:
    """What an environment answers to a turn."""

    messages: str | Sequence[ChatMessage] = ()  # what the model reads next; text is one user turn
    reward: RewardValue | None = None  # of the turn before it; parts are added up; None: it has none
    done: bool = False  # the trajectory is over; without it there must be a message
    metadata: JSONObject = field(default_factory=dict)  # for the record of this turn


class Environment(Protocol):
    """The world of one trajectory, opened for one dataset row by the function that the config names, which is
    called with the row. Every method may be async; all but `step` may be left out.

    Opened by an async function or an asynccontextmanager, or by its class if `step` is async, it runs in the
    trainer's loop, else in a worker process of its own. What it raises fails the trajectory, and no other.
    """

    tools: Sequence[Any]  # plain typed functions, of which methods are some, or Tools

    def reset(self) -> str | Sequence[ChatMessage] | None:
        """What the model sees first, text as one user turn; None, or left out: the row's prompt."""
        ...

    def step(self, turn: Turn, /) -> Observation | str:
        """The answer to a turn that calls no tool. Text is what the model reads next."""
        ...

    def score(self) -> RewardValue | None:
        """The final reward, added to those of the turns; None: `reward` of the config gives it, if at all."""
        ...

    def close(self) -> None:
        """Called once on every way out."""
        ...

    def state_dict(self) -> JSONValue:
        """What load_state_dict of a freshly opened one goes on from, as JSON."""
        ...

    def load_state_dict(self, state: JSONValue, /) -> None: ...


class Tool(NamedTuple):
    """Something that the model may call."""

    name: str
    schema: JSONObject  # {"type": "function", "function": {"name", "description", "parameters"}}
    # The answer, text or another JSON value, to the arguments of a call; call_tools gives it its time. Raises
    # ToolError for what the model is to be told, as it is told of any other exception; EnvironmentFailed
    # where the world, and not the call, is at fault.
    call: Callable[[JSONObject], Awaitable[JSONValue]]


class World(NamedTuple):
    """An open environment."""

    tools: list[Tool]
    # A method by its name, with its arguments: reset, step, score, state_dict or load_state_dict; None where
    # the environment offers none. What it returned is checked: messages are a list, rewards RewardResults.
    # Raises EnvironmentFailed.
    call: Callable[..., Awaitable[Any]]
