"""What tools and environments are given and what they answer, checked; and a worker's process that calls
tools, or in which one environment lives from opening to closing.

`python -m rollouts.environments.worker PYTHONPATH`, as rewards/worker.py says. A request about an environment
names a method: open (with the row), one of its own, or tool.
"""

import inspect
import json
import re
from dataclasses import replace
from functools import partial, wraps
from typing import Any

from pydantic import TypeAdapter, ValidationError, validate_call

from rollouts.environments.protocol import Observation, Turn
from rollouts.errors import EnvironmentFailed, PlugInError, ToolError, UserFunctionError
from rollouts.messages import check_json, checked_messages
from rollouts.rewards.check import check_reward, describe, function_name, is_async, shorten
from rollouts.rewards.worker import Job, load_named, main
from rollouts.types import Fields, Function

OUTPUT_CHARS = 32_768  # of a tool's result, at most
ARGUMENT = re.compile(r"^ +(\w+)(?: \(.*?\))?: (.+(?:\n {6,}.+)*)", re.MULTILINE)  # in a docstring
_world: Fields = {}  # in a worker: the environment, as "", and its tools by name


def inspect_tool(function: Function) -> tuple[Fields, Function]:
    """The schema of a typed function for a chat template, and what turns a call's arguments into values of
    the types that it names, or raises ToolError in words for the model.

    Descriptions are from the docstring: its text before "Args:", and the lines "name: text" below that.
    Raises PlugInError for a function that JSON cannot call.
    """
    name, (text, _, told) = function_name(function), (inspect.getdoc(function) or "").partition("Args:\n")
    try:

        @validate_call
        @wraps(function)  # with its signature
        def check(**arguments: Any) -> Any:
            return arguments

        parameters = TypeAdapter(check).json_schema()  # pyright: ignore[reportArgumentType]
        # not False where there is a *, ** or /
        if (
            parameters.get("additionalProperties", 1)
            or parameters["properties"].keys() - check.__annotations__
        ):
            raise TypeError(f"it takes {inspect.signature(function)}")
    except Exception as error:
        raise PlugInError(
            f"tool {name}: a model cannot call it ({describe(error).partition(chr(10))[0]}); write a plain"
            " function whose parameters all have a type of JSON, as def search(query: str, limit: int = 5)"
        ) from error
    for one in parameters["properties"].values():
        one.pop("title", None)
    for key, said in ARGUMENT.findall(told):
        parameters["properties"].get(key, {})["description"] = " ".join(said.split())

    def read_arguments(arguments: Any) -> Any:
        try:
            return check(**arguments)
        except ValidationError as error:
            one = error.errors()[0]
            raise ToolError(
                "arguments", f"argument {'.'.join(map(str, one['loc']))!r}: {one['msg']}"
            ) from error

    described = {"name": name, "description": text.strip(), "parameters": parameters}
    return {"type": "function", "function": described}, read_arguments


def check_result(value: object) -> str:
    """What a tool returned, as the model reads it: text as it is, anything else as JSON. Raises ToolError for
    what is no JSON or too long.
    """
    if not isinstance(value, str):
        try:
            check_json("the result", value)
        except (ValueError, RecursionError) as error:
            raise ToolError("failed", str(error)) from error
        value = json.dumps(value, ensure_ascii=False, default=dict)
    if len(value) > OUTPUT_CHARS:
        raise ToolError(
            "too_long", f"the result has {len(value)} characters; at most {OUTPUT_CHARS} are allowed"
        )
    return value.encode(errors="replace").decode()


def check_answer(value: Any, method: str, where: str) -> Any:
    """What a method of an environment returned: messages as a list, text as a user turn, rewards as
    RewardResult. Raises EnvironmentFailed, beginning with `where`, for what the method may not return.
    """
    try:
        if method == "step":
            seen = Observation(messages=value) if isinstance(value, str) else value
            if not isinstance(seen, Observation):
                raise TypeError("it must be an Observation, or text")
            check_json("metadata", seen.metadata)
            messages = [] if seen.done and not seen.messages else check_answer(seen.messages, "reset", where)
            reward = None if seen.reward is None else check_reward(seen.reward, "it")
            return replace(seen, messages=messages, reward=reward, done=bool(seen.done))
        if value is None or method == "load_state_dict":
            return None
        if method == "score":
            return check_reward(value, "it")
        if method == "state_dict":
            check_json("the state", value)
            return value
        turns = [{"role": "user", "content": value}] if isinstance(value, str) else value
        return checked_messages(turns, "messages")
    except (TypeError, ValueError, RecursionError, UserFunctionError) as error:
        raise EnvironmentFailed(f"{where} returned {shorten(value)}: {error}") from error


# --- the process --------------------------------------------------------------------------------------------


def serve(request: Fields, where: str) -> Job:
    """A call of a tool, of the environment or else named by the request; the opening of an environment, whose
    answer is the schemas of its tools; or a call of one of its methods.
    """
    method, arguments = request["method"], request["arguments"]
    if method == "tool":
        function = _world.get(where) or load_named(request, where)
        value = yield partial(function, **inspect_tool(function)[1](arguments))
        yield check_result(value)
    if method == "open":
        world = yield partial(load_named(request, where), *arguments)
        tools = getattr(world, "tools", ())
        for function in (world.step, *tools):
            if is_async(function):
                raise EnvironmentFailed(
                    f"{where}: {function_name(function)} is async; to run in the trainer's loop an"
                    " environment is opened by an async function, or by its class if step is async"
                )
        _world.update({function_name(tool): tool for tool in tools}, **{"": world})
        yield [inspect_tool(tool)[0] for tool in tools]
    function = getattr(_world[""], method, lambda *_: None)
    if method == "step":
        arguments = [Turn(**arguments[0])]
    if method == "close":
        _world.clear()
    value = yield partial(function, *arguments)
    yield check_answer(value, method, where)


if __name__ == "__main__":
    main(serve)
