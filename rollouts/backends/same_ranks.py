"""What must be the same on all ranks, compared before anything depends on it: devices, programs, model
directories, how the model is run.

Every check but that of devices is collective. What differs is found by all ranks alike, from what all have
told all, and raised on all with the same words.
"""

from __future__ import annotations

import dataclasses
import json
import socket
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from rollouts import __version__
from rollouts.distributed.process_group import AgreedFailure, Ranks, all_gather_bytes, run_agreed
from rollouts.errors import ConfigError, ModelError
from rollouts.models.digests import compute_model_digests
from rollouts.models.log_probs import ForwardPlan

COMPARED = (
    "torch",
    "transformers",
)  # packages that compute: another version may round, or lay a model out, in another way


DEVICE, CANNOT = "model.device", "error"  # what a rank says of its device


@dataclasses.dataclass(frozen=True, slots=True)
class Told:
    """What a rank has told."""

    rank: int
    host: str
    values: Mapping[str, str]  # by name
    where: str = ""  # the directory that the values are of


def tell_device(choose_device: Callable[[], str]) -> bytes:
    """What a rank says when it meets the others: where it would compute, or the ConfigError for which it
    cannot.
    """
    try:
        said = {DEVICE: choose_device()}
    except ConfigError as error:
        said = {CANNOT: str(error)}
    return json.dumps([socket.gethostname(), said]).encode()


def check_same_device(words: Sequence[bytes]) -> str:
    """The kind of device on which all ranks compute, by what each has said in tell_device. Not a collective:
    no process group is there yet, for what one is made of depends on this.

    Raises ConfigError, the same on all ranks: naming the first rank that cannot compute and why, or those
    whose choice is not rank 0's.
    """
    told = [Told(rank, *json.loads(word)) for rank, word in enumerate(words)]
    for one in told:
        if CANNOT in one.values:
            raise ConfigError(f"{_name_ranks([one])}: {one.values[CANNOT]}")
    found = find_difference(told)
    if found is None:
        return told[0].values[DEVICE]
    name, first, other, others = found
    raise ConfigError(
        f"{name} comes to {other.values[name]!r} on {_name_ranks(others)} and to {first.values[name]!r} on"
        f" rank 0 on {first.host}; use machines that are alike, or set model.device='cpu' for all"
    )


def read_versions() -> dict[str, str]:
    """Versions of what computes on this rank, by package."""
    return {"rollouts-rl": __version__, **{name: version(name) for name in COMPARED}}


def check_same_versions(ranks: Ranks, versions: Mapping[str, str]) -> None:
    """Raises ConfigError, on all ranks, naming the first package whose version differs, the ranks and both
    versions.
    """
    found = find_difference(_tell_all(ranks, versions))
    if found is None:
        return
    name, first, other, others = found
    raise ConfigError(
        f"{_name_ranks(others)} {_verb(others, 'run')} {name} {other.values.get(name)} and rank 0 on"
        f" {first.host} runs {name} {first.values.get(name)}; install the same versions on all machines of"
        " the run"
    )


def check_same_model(ranks: Ranks, path: Path) -> None:
    """Raises AgreedFailure with a ModelError naming the first file that differs between the ranks' own model
    directories.

    compute_model_digests says what is compared. A file that cannot be read is an AgreedFailure too.
    """
    digests = run_agreed(ranks, lambda: compute_model_digests(path)).value
    found = find_difference(_tell_all(ranks, digests, where=str(path)))
    if found is None:
        return
    name, first, other, others = found
    raise AgreedFailure(
        ModelError(
            f"{_name_ranks(others)} {_verb(others, 'have')} {_describe_file(other, name)} and rank 0 on"
            f" {first.host} has {_describe_file(first, name)}; copy the model directory again, so that all"
            " machines have the same files"
        )
    )


def check_same_plan(ranks: Ranks, plan: ForwardPlan) -> None:
    """Raises AgreedFailure with a ModelError if the ranks would run the model in unlike ways: their
    collectives would not fit together.
    """
    values = {field.name: repr(getattr(plan, field.name)) for field in dataclasses.fields(plan)}
    found = find_difference(_tell_all(ranks, values))
    if found is None:
        return
    name, first, other, others = found
    raise AgreedFailure(
        ModelError(
            f"{_name_ranks(others)} {_verb(others, 'have')} found {name}={other.values[name]} to be exact for"
            f" the model and rank 0 on {first.host} {name}={first.values[name]}; use machines with the same"
            " devices, drivers and libraries"
        )
    )


def find_difference(told: Sequence[Told]) -> tuple[str, Told, Told, list[Told]] | None:
    """(name, rank 0, the first rank that has another value, all that have) of the first name, sorted, whose
    values differ; None if none does.
    """
    first, *rest = told
    for name in sorted({name for one in told for name in one.values}):
        others = [one for one in rest if one.values.get(name) != first.values.get(name)]
        if others:
            return name, first, others[0], others
    return None


def _tell_all(ranks: Ranks, values: Mapping[str, str], *, where: str = "") -> list[Told]:
    data = json.dumps([socket.gethostname(), dict(values), where]).encode()
    return [Told(rank, *json.loads(block)) for rank, block in enumerate(all_gather_bytes(ranks, data))]


def _name_ranks(told: Sequence[Told]) -> str:
    if len(told) == 1:
        return f"rank {told[0].rank} on {told[0].host}"
    return f"ranks {', '.join(str(one.rank) for one in told)} (the first on {told[0].host})"


def _verb(told: Sequence[Told], verb: str) -> str:
    return verb if len(told) > 1 else {"have": "has", "run": "runs"}[verb]


def _describe_file(told: Told, name: str) -> str:
    file = Path(told.where) / name
    if name not in told.values:
        return f"no {file}"
    size, digest = told.values[name].split(":")
    return f"{file} with {size} bytes and digest {digest[:12]}"
