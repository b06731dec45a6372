"""The user's functions that a config names: imported and checked before a model loads, put where they run,
and called once by a check.

load_functions   config names ──► functions of this process, signatures checked
open_functions   sync rewards, tools and environments ──► worker processes that can be killed; async ones stay
                 in the event loop
call_functions   each is called on a made-up sample
"""

import copy
import inspect
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import field, replace
from functools import partial, wraps
from pathlib import Path
from typing import Any

from rollouts.advantages import ADVANTAGES, AdvantageFn, check_advantage_params
from rollouts.config.plugins import load_function
from rollouts.config.rollout import RolloutConfig
from rollouts.config.schema import RLTrainingConfig, RunConfig
from rollouts.config.secrets import flatten
from rollouts.data.rows import Row, parse_prompt
from rollouts.environments.protocol import Tool
from rollouts.environments.proxy import check_agent
from rollouts.environments.tools import load_tool
from rollouts.environments.trajectories import ResponseTemplate, load_response_template
from rollouts.environments.worlds import MCP, open_mcp_tools, open_world
from rollouts.errors import ConfigError, PlugInError, RolloutsError, UserFunctionError
from rollouts.filters import FILTERS, RANKERS, check_some_complete
from rollouts.loops.algorithm import check_algorithms
from rollouts.pair_selection import PairSelector, find_pair_selector
from rollouts.preflight.findings import Findings
from rollouts.preflight.rows import Rows
from rollouts.protocols import FilterFn, GenerateFn, GroupRewardFn, RankerFn, RewardFn, Say
from rollouts.rewards.call import call_filter, call_group_reward, call_ranker, call_reward, watch_blocking
from rollouts.rewards.check import apply_reward, function_name, is_async
from rollouts.rewards.combine import apply_weights, check_weights
from rollouts.rewards.library import LIBRARY
from rollouts.rewards.parts import RewardParts
from rollouts.rewards.workers import hide_process, name_function, open_workers
from rollouts.types import (
    TRAJECTORY,
    ChatMessage,
    Function,
    RewardResult,
    Sample,
    SampleGroup,
    Status,
    record,
)

SETTINGS = {  # that name functions: field of Functions → key, which ends with the role
    "generate": "rl.rollout.generate",
    "environment": "rl.rollout.environment",
    "reward": "rl.rollout.reward",
    "group_reward": "rl.rollout.group_reward",
    "eval_reward": "eval.reward",
    "context": "rl.distillation.context",
    "pairs": "rl.pairs",
    "ranker": "rl.rollout.ranker",
    "curriculum": "rl.curriculum",
}
WORLDS = 64  # sync environments open at once, each in a process; sync tool calls at once
WRONG_ANSWER = "(a made-up response)"


@record
class Functions:
    """What the config names; None where it names nothing."""

    generate: GenerateFn | None = None  # None: one chat turn
    # of a row; what the user wrote, and open_functions makes a World of it
    environment: Function | None = None
    read_turn: ResponseTemplate | None = None  # None: as the tokenizer says
    tools: Sequence[Tool] = ()  # those of MCP servers are among them after open_functions
    reward: RewardFn | None = None  # open_functions weighs it, unless a reward model is to be added first
    group_reward: GroupRewardFn | None = None
    parts: Mapping[str, Function] = field(default_factory=dict)  # of rl.rollout.rewards, but models
    eval_reward: RewardFn | None = None  # open_functions: the reward, where eval names none
    filters: tuple[FilterFn, ...] = ()
    ranker: RankerFn | None = None
    curriculum: Function | None = None
    pairs: PairSelector | None = None
    context: Function | None = None
    advantages: dict[str, AdvantageFn] = field(default_factory=dict)  # by names in rl.advantage, rl.changes


def load_functions(config: RunConfig, stages: Sequence[str], findings: Findings) -> Functions:
    """Every function as it is, in this process. Reports PlugInError for one that does not import or does not
    take what its role passes, ConfigError where a stage lacks one; the message names the setting.
    """
    rollout, filters = config.rollout, list(config.rollout.filters)
    if config.rl and config.rl.mask_truncated:
        filters.append(check_some_complete.__name__)

    def load(key: str, role: str, name: str | None, params: Mapping[str, Any] = {}) -> Any:
        with findings.reporting(key):
            if name:
                known = {"filter": FILTERS, "ranker": RANKERS, **LIBRARY}.get(role)
                if role == "pairs" and ":" not in name:
                    known = {name: find_pair_selector(name)}
                function = load_function(name, role=role, built_in=known, params=params)
                findings.note("ok", key, name)
                return function
        return None

    for key, lacking, others in (
        (
            "rl.rollout.reward",
            "rl" in stages and config.rl and not (rollout.is_scored or config.rl.distillation),
            "an environment, a group_reward or a reward_model, or [rl.distillation] with a teacher",
        ),
        (
            "eval.reward",
            config.eval
            and not (config.eval.reward or rollout.reward or rollout.environment or rollout.agent),
            "rl.rollout.reward, which [eval] takes too: other rewards, and a teacher, do not evaluate",
        ),
    ):
        with findings.reporting(key):
            if lacking:
                raise ConfigError(
                    f"{key} is empty; name a function of one sample as module:function or file.py:function,"
                    f" or {others}"
                )
            check_weights(rollout.reward_weights)
    names = flatten(config.model_dump())
    found = {name: load(key, key.rpartition(".")[2], names.get(key)) for name, key in SETTINGS.items()}
    found["parts"] = load_parts(rollout, load, findings)
    found["filters"] = tuple(load("rl.rollout.filters", "filter", name) for name in filters)
    with findings.reporting("rl.rollout.tools"):
        found["tools"] = [load_tool(name) for name in rollout.tools if not name.startswith(MCP)]
    with findings.reporting("rl.rollout.response_template"):
        found["read_turn"] = load_response_template(rollout.response_template)
    with findings.reporting("rl.rollout.agent"):
        if rollout.agent:
            check_agent(rollout.agent)
    with findings.reporting("rl.advantage"):
        if config.rl:
            found["advantages"] = load_advantages(config.rl)
    return Functions(**found)


def load_parts(rollout: RolloutConfig, load: Function, findings: Findings) -> dict[str, Function]:
    """The functions of rl.rollout.rewards with their parameters, by part. Reports also ConfigError for one
    that does not take them.
    """
    found = {}
    for name, part in rollout.rewards.items():
        key, role = f"rl.rollout.rewards.{name}", "group_reward" if part.group_reward else "reward"
        if function := load(key, role, getattr(part, role), part.params):  # a reward model is none
            found[name] = partial(function, **part.params)
            with findings.reporting(key):
                if function in LIBRARY["group_reward"].values():
                    check_options(key, found[name])
    return found


def check_options(key: str, function: Function) -> None:
    """Raises ConfigError where a function of the library does not take the values of its parameters."""
    try:
        list(getattr(function(()), "__await__", tuple)())  # an async one runs to its end
    except (ConfigError, TypeError) as error:
        raise ConfigError(f"{key}.params: {error}") from error


def load_advantages(config: RLTrainingConfig) -> dict[str, AdvantageFn]:
    """The functions that rl.advantage and rl.changes name, by name. Raises PlugInError if there is none,
    ConfigError if one does not take its parameters; the message names the change.
    """
    found = {}

    def load(settings: RLTrainingConfig) -> None:
        name = settings.advantage
        try:
            found[name] = load_function(name, role="advantage", built_in=ADVANTAGES)
        except PlugInError as error:
            raise PlugInError(f"rl.{error}") from error
        check_advantage_params(name, found[name], settings.advantage_params)

    check_algorithms(config, load)
    return found


@asynccontextmanager
async def open_functions(
    config: RunConfig, functions: Functions, *, warn: Say, num_workers: int | None = None
) -> AsyncIterator[Functions]:
    """The same functions where they run in a training run, for as long as this is open: sync rewards (at most
    num_workers at once; None: one per core that this process may use), tools and environments in worker
    processes, which start when they are needed; MCP servers started; and the reward weighed.

    `warn` gets a sentence when an async one blocks the event loop. Raises EnvironmentFailed for an MCP server
    that does not open, PlugInError for tools of one name.
    """
    rollout = config.rollout
    running = {key: getattr(functions, key) for key in ("reward", "group_reward", "eval_reward")}
    settings = flatten(config.model_dump())
    hide_process()
    async with AsyncExitStack() as stack:
        stack.enter_context(watch_blocking(warn))
        enter = stack.enter_async_context
        workers = await enter(
            open_workers(
                count=num_workers or len(os.sched_getaffinity(0)), timeout_s=rollout.reward_timeout_s
            )
        )
        parts = dict(functions.parts)
        for name, function in parts.items():
            part = rollout.rewards[name]
            if not is_async(function):
                role = "group_reward" if part.group_reward else "reward"
                parts[name] = workers.reward(getattr(part, role), Path.cwd(), role, part.params)
        for key, function in running.items():
            if function and not is_async(function):
                running[key] = workers.reward(settings[SETTINGS[key]], Path.cwd(), key.removeprefix("eval_"))
        pool = partial(
            open_workers,
            count=WORLDS,
            timeout_s=rollout.tool_timeout_s,
            module="rollouts.environments.worker",
        )
        # two, for environments that hold all workers of one call tools
        for_tools, for_worlds = await enter(pool()), await enter(pool())
        tools = []
        for name in rollout.tools:
            if name.startswith(MCP):
                tools += await enter(open_mcp_tools(name.removeprefix(MCP), rollout.tool_timeout_s))
            else:
                tools.append(load_tool(name, for_tools))
        if len({tool.name for tool in tools}) < len(tools):
            raise PlugInError(f"rl.rollout.tools: two have one name: {[tool.name for tool in tools]}")
        if functions.environment:
            running["environment"] = partial(
                open_world,
                opener=functions.environment,
                request=name_function("environment", rollout.environment),
                workers=for_worlds,
                timeout_s=rollout.tool_timeout_s,
            )
        if not rollout.reward_model:
            running["reward"] = weigh(running["reward"], rollout)
        running["eval_reward"] = running["eval_reward"] or running["reward"]
        yield replace(functions, **running, parts=parts, tools=tools)


def join_parts(
    config: RunConfig, functions: Mapping[str, Any], step: Callable[[], int], **models: Any
) -> RewardParts:
    """The parts of rl.rollout.rewards that are `functions`. One that has a parameter of the name is given a
    model, or a `state`: a dict of its own.
    """
    rollout, parts, states = config.rollout, {}, {}
    for name, function in functions.items():
        asked, own = inspect.signature(function).parameters, {**models, "state": {}}
        own = {key: one for key, one in own.items() if key in asked and asked[key].default is None}
        if own:
            function = partial(function, **own)
            function.keeps_own_time = True  # it waits for the device
        if "state" in own:
            states[name] = own["state"]
        parts[name] = rollout.rewards[name], function
    return RewardParts(parts, step, rollout.reward_timeout_s, states)


def weigh(reward: RewardFn | None, rollout: RolloutConfig) -> RewardFn | None:
    """`reward` with its parts weighed as the config says; `reward` itself if the config says nothing. What it
    makes raises UserFunctionError for weights that do not name every part.
    """
    if reward is None or not rollout.reward_weights:
        return reward

    @wraps(reward)
    async def weighed_reward(sample: Sample) -> RewardResult:
        result = await call_reward(reward, sample, timeout_s=rollout.reward_timeout_s)
        try:
            return apply_weights(result, rollout.reward_weights)
        except (ConfigError, UserFunctionError) as error:
            raise UserFunctionError(
                f"reward function {function_name(reward)} on sample {sample.id} does not fit"
                f" rl.rollout.reward_weights: {error}"
            ) from error

    # the call within has the deadline
    weighed_reward.keeps_own_time = True  # pyright: ignore[reportAttributeAccessIssue]
    return weighed_reward


# --- a trial call -------------------------------------------------------------------------------------------


async def call_functions(config: RunConfig, functions: Functions, rows: Rows, findings: Findings) -> None:
    """Notes for each function what it made of a sample of the first row. Sync rewards run in a worker
    process, as in training.

    The row's answer is the response of the first sample of the group, something else that of the second.
    `generate` is not called, for it needs an engine, nor is the curriculum. Raises: never for what functions
    do.
    """
    warn = partial(findings.note, "warning", "--call")
    try:
        async with open_functions(config, functions, warn=warn, num_workers=1) as running:
            await _call_each(config, running, rows, findings)
    except* RolloutsError as group:
        for error in group.exceptions:
            findings.note("error", "--call", str(error))


async def _call_each(config: RunConfig, functions: Functions, rows: Rows, findings: Findings) -> None:
    timeout_s = config.rollout.reward_timeout_s
    turns = config.rollout.has_turns
    both = make_trial_samples(rows.list_rows("rl"), turns=turns)
    group = None
    for key, function, samples in [
        (
            "eval.reward",
            functions.eval_reward if config.eval and config.eval.reward else None,
            make_trial_samples(rows.list_rows("eval"), turns=turns)[:1],
        ),
        ("rl.rollout.reward", functions.reward, both),
        ("rl.rollout.group_reward", functions.group_reward, both),
        ("rl.rollout.rewards", functions.parts, both),
    ]:
        with findings.reporting(key):
            if not function or not samples:
                continue
            if key == "rl.rollout.rewards":  # without reward models, which are not loaded here
                parts = join_parts(config, functions.parts, lambda: 1)
                scored = [apply_reward(sample, await parts.score(sample)) for sample in samples]
                results = await parts.score_group(scored)
            elif key == "rl.rollout.group_reward":
                results = await call_group_reward(function, samples, timeout_s=timeout_s)
            else:
                results = [await call_reward(function, sample, timeout_s=timeout_s) for sample in samples]
            texts = []
            for sample, result in zip(samples, results, strict=True):
                texts.append(
                    f"called with the response {sample.response[:40]!r}: {result.reward:g}"
                    f"{''.join(f', {name} {value:g}' for name, value in result.parts.items())}"
                )
            findings.note("ok", key, "\n".join(texts))
            if samples is both:
                group = SampleGroup(0, "row-0", tuple(map(apply_reward, samples, results)))
    if group is None:
        return
    for filter_ in functions.filters:
        with findings.reporting("rl.rollout.filters"):
            decision = await call_filter(filter_, group, timeout_s=timeout_s)
            verdict = f"{'keeps' if decision.keep else f'drops ({decision.reason})'} a group of these two"
            findings.note("ok", "rl.rollout.filters", f"{function_name(filter_)} {verdict}")
    with findings.reporting("rl.rollout.ranker"):
        if functions.ranker:
            score = await call_ranker(functions.ranker, group, timeout_s=timeout_s)
            findings.note(
                "ok",
                "rl.rollout.ranker",
                f"{function_name(functions.ranker)} gives {score:g} to a group of these two",
            )


def make_trial_samples(rows: Sequence[Row], *, turns: bool) -> list[Sample]:
    """Two samples of the first row: one whose response is its answer, and one with something else; with
    `turns` each as a conversation too, of one turn. None where there is no row.
    """
    samples = []
    for row in rows[:1]:
        for index, response in enumerate((str(row.get("answer", WRONG_ANSWER)), WRONG_ANSWER)):
            # a copy, as in a run: what a function changes in one sample is not in the other
            metadata = copy.deepcopy({**row, "prompt_id": "row-0", "epoch": 0})
            if turns:
                said = ChatMessage(role="assistant", content=response)
                metadata["messages"] = [*parse_prompt(row["prompt"]), said]
                metadata[TRAJECTORY] = {"end": "done", "turns": []}
            samples.append(
                Sample(
                    id=f"trial-s{index:03d}",
                    prompt=row["prompt"],
                    response=response,
                    group_index=0,
                    status=Status.COMPLETED,
                    metadata=metadata,
                )
            )
    return samples
