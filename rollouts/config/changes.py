"""The algorithm of [rl] piece by piece: what [[rl.changes]] make of it, each from its step on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

OWN = ("from_step", "kl_ramp_steps")  # of a change itself
BEGINS_WITH = {"loss": ("loss_params", "clip_low", "clip_high"), "advantage": ("advantage_params",)}


def list_tables(settings: BaseModel, changes: Sequence[BaseModel]) -> list[dict[str, Any]]:
    """The settings that a change may name, by piece: those of `settings`, then those from each change on.

    What a change does not name stays as it was before it, but another loss begins with the default parameters
    and clips, and another advantage with the default parameters. While kl_coef moves from one value to
    another (kl_ramp_steps), its entry is the larger of the two.
    """
    names = [name for change in changes[:1] for name in type(change).model_fields if name not in OWN]
    fields = type(settings).model_fields
    tables = [{name: getattr(settings, name) for name in names}]
    for change in changes:
        before, named = (
            tables[-1],
            {name: getattr(change, name) for name in names if getattr(change, name) is not None},
        )
        other = [key for key in BEGINS_WITH if key in named and named[key] != before[key]]
        fresh = {
            name: fields[name].get_default(call_default_factory=True)
            for key in other
            for name in BEGINS_WITH[key]
        }
        table = before | fresh | named
        if getattr(change, "kl_ramp_steps", None) is not None:
            table["kl_coef"] = max(before["kl_coef"], table["kl_coef"])
        tables.append(table)
    return tables
