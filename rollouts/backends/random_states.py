"""torch's random states in one process: what a checkpoint keeps, and what a step that is given up leaves
behind.

step ends ──► note() ──► the next step draws ──► it ends: note()
                               └──► it is given up ──► restore(): who repeats it, now or after a resume, draws the same
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rollouts.backends.state_files import CPU_RNG, CUDA_RNG


def copy_random_states(device: torch.device) -> dict[str, Tensor]:
    """The states of torch's own generators, on the CPU and on the device, under their names in files."""
    states = {CPU_RNG: torch.get_rng_state()}
    if device.type == "cuda":
        states[CUDA_RNG] = torch.cuda.get_rng_state(device)
    return states


def set_random_states(states: Mapping[str, Tensor], device: torch.device) -> None:
    """torch draws as it did when `states` were copied. A kind that is not among them is left alone."""
    if CPU_RNG in states:
        torch.set_rng_state(states[CPU_RNG])
    if CUDA_RNG in states and device.type == "cuda":
        torch.cuda.set_rng_state(states[CUDA_RNG], device)


class DrawsOfSteps:
    """torch's random states as of the last step that ended. On the device thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._states: dict[str, Tensor] | None = None  # None: no step began yet

    def begin(self) -> None:
        """Before a step draws; only the first one needs it."""
        if self._states is None:
            self.note()

    def note(self) -> None:
        """A step has drawn what it draws, or a checkpoint was loaded."""
        self._states = copy_random_states(self._device)

    def restore(self) -> None:
        """The step since was given up: as if it had drawn nothing."""
        if self._states is not None:
            set_random_states(self._states, self._device)
