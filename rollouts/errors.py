"""Every error the package raises on purpose, drawn once.

    RolloutsError
    ├── ConfigError                 a setting: unknown key, wrong type, broken rule          (exit 2)
    ├── DataError                   a dataset file or row                                    (exit 2 at start)
    ├── ModelError                  a model directory, tokenizer or chat template            (exit 2 at start)
    ├── PlugInError                 a user function that does not import or has a wrong signature (exit 2)
    ├── RunDirError                 the output directory is another run's, or not a run      (exit 2)
    ├── CheckpointError             a checkpoint that cannot be read, or is another model's
    │   └── CheckpointDamaged       it is proven not to be as it was written: something is missing or differs
    ├── StorageError                a disk that refuses a write or gives other bytes back
    ├── MetricError                 a metric name or value that may not be written
    ├── RecordError                 what is asked of a run's record is absent, removed or damaged
    ├── TrackerError                a tracker that does not take rows
    │   ├── SinkUnavailable         a tracker's service did not take rows now; they are sent again
    │   ├── SinkRefused             a tracker's service will not take rows until a person acts (a wrong key)
    │   └── RowsRefused             a tracker's service will never take these rows; they are left out
    ├── UserFunctionError           a generate, reward or filter function raised or returned nonsense
    │   ├── RewardTimeout           a reward function took longer than it may
    │   ├── RewardCrashed           a reward function ended or spoiled the process it ran in
    │   └── EnvironmentFailed       an environment, not the policy, is at fault
    ├── TrajectoryLeftOut           a limit ended a trajectory, and rl.rollout.at_limit leaves such out
    ├── ToolError                   what a tool call did wrong, in words for the model
    ├── BackendError
    │   ├── EarlierStepFailed       a step before this one failed; call reset()
    │   ├── BackendClosed           the backend is no longer open
    │   ├── StepInterrupted         a step was given up because a stop was requested
    │   ├── DenominatorMismatch     a loss counted something else than its unit
    │   └── NonFiniteSteps          k steps in a row were not finite
    ├── EngineError
    │   ├── EngineClosed            the engine is no longer open
    │   ├── RequestRefused          the request breaks a rule of the engine
    │   ├── WeightVersionError      an engine's version is not the one that was asked for
    │   ├── EngineSetupError        a server that would falsify training, or does not start (exit 2 at start)
    │   ├── FleetDown               no engine has been in service for longer than allowed
    │   └── InfrastructureError     the engine is at fault, not the request: asked elsewhere
    │       ├── EngineUnreachable   no connection, or one that broke
    │       ├── EngineSilent        nothing came and nothing moved for longer than allowed
    │       ├── EngineOverloaded    429 or 503; says when to come back
    │       └── ReplyError          an answer that is cut, malformed or impossible
    ├── WeightSyncError             an update could not be verified
    │   └── SnapshotError           a weight snapshot that is incomplete or damaged
    ├── MessageRefused              bytes that crossed processes are not the record that they should be
    ├── ServiceRefused              what a client asks of the service breaks a rule
    ├── ServiceFailed               the service cannot be reached, or failed at no fault of the client
    ├── RankLost                    a process of the run ended, fell silent or failed (exit 75)
    ├── CrashPointReached           a test made this place in the code raise (ROLLOUTS_RAISE_AT)
    ├── StalenessError              a sample older than max_staleness reached the trainer
    └── NotEnoughSamples            the manager's attempt or failure budget is spent

Messages name the field, the value, the rule and the way out. Causes are kept with `from`.
"""

import difflib
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any


class RolloutsError(Exception):
    """Base of every error that rollouts raises on purpose."""

    exit_code = 1  # of a program that ends with it; 2: a setting, file or plug-in is wrong


class ConfigError(RolloutsError):
    """A setting is unknown, of the wrong type, or breaks a rule."""

    exit_code = 2


class DataError(RolloutsError):
    """A dataset file or row is missing or malformed."""

    exit_code = 2


class ModelError(RolloutsError):
    """A model directory, tokenizer or chat template cannot be used."""

    exit_code = 2


class PlugInError(RolloutsError):
    """A user function named in the config does not import or has the wrong signature."""

    exit_code = 2


class RunDirError(RolloutsError):
    """The output directory belongs to another run, or is not a run directory."""

    exit_code = 2


class CheckpointError(RolloutsError):
    """A checkpoint cannot be read, is not what it should be, or of another model."""

    exit_code = 2


class CheckpointDamaged(CheckpointError):
    """A checkpoint is proven not to be as it was written: a file is missing, or its size or hash differs.
    Trying again would not help.
    """


class StorageError(RolloutsError):
    """A disk refuses a write, or gives back other bytes than were written. What was complete before is
    complete still.
    """


class MetricError(RolloutsError):
    """A metric name or value that may not be written."""


class RecordError(RolloutsError):
    """What is asked of a run's record is not in it: it was never written, was removed to make room, or is
    damaged.
    """


class RecordLost(RolloutsError):
    """A file of the record is no longer what the run has written: deleted, moved or cut by someone else."""


class TrackerError(RolloutsError):
    """A tracker does not take rows. Raised in a follower's own process, never in a run."""


class SinkUnavailable(TrackerError):
    """A tracker's service did not take rows, but may later."""


class SinkRefused(TrackerError):
    """A tracker's service will not take rows until a person changes something: a key, a permission, a
    quota.
    """


class RowsRefused(TrackerError):
    """A tracker's service will never take these rows together: one of them is at fault, or they are too many.
    In parts it takes the others.
    """


class UserFunctionError(RolloutsError):
    """A user's generate, reward or filter function raised or returned nonsense."""

    kind = "failed"  # of a ToolError that says so to the model; in a worker's answer


class RewardTimeout(UserFunctionError):
    """A reward function took longer than `reward_timeout_s`. Its sample has failed; it is not a reward of
    0.
    """

    kind = "timeout"


class RewardCrashed(UserFunctionError):
    """A reward function took its worker process down: a signal, an exit, memory, output without end, a fork.
    Its sample has failed.
    """

    kind = "crashed"


class EnvironmentFailed(UserFunctionError):
    """An environment, not the policy, is at fault. Its trajectory has failed; it is not a reward of 0."""

    kind = "environment"


class TrajectoryLeftOut(RolloutsError):
    """A limit ended a trajectory, and rl.rollout.at_limit says that such are left out."""


class ToolError(RolloutsError):
    """A tool call that did not give what was asked for; its text is what the model reads.

    `kind` is what it is counted by: unreadable, unknown, arguments, failed, timeout, crashed, too_long.
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class BackendError(RolloutsError):
    """A training backend could not do what was asked."""


class EarlierStepFailed(BackendError):
    """A step submitted before this one failed, so this one did not run. The way out is `backend.reset()`."""


class BackendClosed(BackendError):
    """The backend is no longer open."""


class StepInterrupted(BackendError):
    """A step was given up because a stop was requested. The way out is `backend.reset()`: the weights are
    those before the step.
    """


class DenominatorMismatch(BackendError):
    """A loss returned a count that differs from the denominator computed for its unit."""


class NonFiniteSteps(BackendError):
    """Too many steps in a row had a loss or gradient that is not finite."""


class EngineError(RolloutsError):
    """An inference engine failed."""


class EngineClosed(EngineError):
    """The engine is no longer open."""


class RequestRefused(EngineError):
    """A request breaks a rule of the engine: too long, a token outside the vocabulary, an unsupported
    setting.
    """


class WeightVersionError(EngineError):
    """An engine's weight version is not the one that was asked for."""


class EngineSetupError(EngineError):
    """A server whose settings would falsify training, or one that does not start. The message names the flag
    to set.
    """

    exit_code = 2


class FleetDown(EngineError):
    """No engine of the fleet has been in service for longer than allowed. State can be saved: nothing is in
    flight.
    """


class InfrastructureError(EngineError):
    """The engine, not the request, is at fault. The request may be sent to another engine as it is."""


class EngineUnreachable(InfrastructureError):
    """No connection to the engine's server, or one that broke before the answer was whole."""


class EngineSilent(InfrastructureError):
    """The engine's server sent nothing, and did nothing, for longer than allowed."""


class EngineOverloaded(InfrastructureError):
    """The engine's server takes no more requests now."""

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        # seconds that the server asks to be left alone; None: it does not say
        self.retry_after_s = retry_after_s


class ReplyError(InfrastructureError):
    """An answer that is cut, malformed or impossible: it is never repaired."""


class WeightSyncError(RolloutsError):
    """A weight update could not be verified."""


class SnapshotError(WeightSyncError):
    """A weight snapshot that is incomplete, damaged or not there."""


class ServiceRefused(RolloutsError):
    """What a client asks of the service breaks a rule; it may ask for something else."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status  # of HTTP, where the answer is not a future's


class MessageRefused(RolloutsError):
    """Bytes that crossed processes are not the record that they should be, or a record may not cross."""


class ServiceFailed(RolloutsError):
    """A training service cannot be reached for longer than allowed, or failed at no fault of its client."""


class RankLost(RolloutsError):
    """A process of the run ended, fell silent or failed. The others cannot go on without it; torchrun starts
    them all again.
    """

    def __init__(self, rank: int, phase: str, reason: str) -> None:
        super().__init__(f"rank {rank} was lost during {phase}: {reason}")
        self.rank = rank
        self.phase = phase  # what it was last heard to be doing
        self.reason = reason


class CrashPointReached(RolloutsError):
    """A named place in the code was reached at which ROLLOUTS_RAISE_AT asked for an error."""


class StalenessError(RolloutsError):
    """A sample older than `max_staleness` reached the trainer."""


class NotEnoughSamples(RolloutsError):
    """The rollout manager spent its attempt or failure budget before the batch was full."""


class LearningStopped(RolloutsError):
    """A guardrail of online learning has ended it; what was published stays."""


def require(condition: bool, message: str) -> None:
    """Raises ConfigError with the message unless the condition holds."""
    if not condition:
        raise ConfigError(message)


def check_keywords(
    what: str, function: Callable[..., Any], names: Iterable[str], *, beside: Collection[str]
) -> None:
    """Raises ConfigError if the function takes no keyword of one of the names, naming the nearest one and all
    that it takes. beside: parameters that are no setting.
    """
    parameters = inspect.signature(function).parameters.values()
    accepted = [parameter.name for parameter in parameters if parameter.name not in beside]
    for name in names:
        if name not in accepted and all(
            parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters
        ):
            close = difflib.get_close_matches(name, accepted, n=1)
            hint = f"did you mean {close[0]!r}? It" if close else "it"
            raise ConfigError(
                f"{what} has no parameter {name!r}; {hint} takes {', '.join(accepted) or 'none'}"
            )


def parse_call(text: str) -> tuple[str, dict[str, float]]:
    """The name and numbers of "name" or "name(key=number, …)"; a name may be module:function. Raises
    ValueError.
    """
    found = re.fullmatch(r"\s*([\w.]*(?::\w+)?)\s*(?:\(([^()]*)\))?\s*", text)
    name, numbers = found.groups() if found else ("", "not numbers")
    try:
        pairs = dict(part.split("=") for part in (numbers or "").split(",") if part.strip())
        return name, {key.strip(): float(number) for key, number in pairs.items()}
    except ValueError as error:
        raise ValueError(f"{text!r} is not of the form name or name(key=number, …)") from error


def find_by_name(what: str, choice: Any, makers: Mapping[str, Callable[..., Any]]) -> Any:
    """What "name" or "name(key=number, …)" stands for: what the maker of that name makes with these numbers.
    Anything that is no text, such as a function, stands for itself.

    Raises ConfigError for text that names none, or numbers that it does not take, naming all there are.
    """
    if not isinstance(choice, str):
        return choice
    try:
        name, numbers = parse_call(choice)
        return makers[name](**numbers)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{what}={choice!r}: {error}; there are {', '.join(makers)}, as name or name(key=number), or a"
            " function"
        ) from error
