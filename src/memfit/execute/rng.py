"""Replaying random ops: the generator's state before an op's first run is kept, put back for a replay, and taken forward again."""

from __future__ import annotations

import torch


def generator_of(device: torch.device) -> torch.Generator:
    """The default generator ops on this device draw from."""
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        return torch.cuda.default_generators[index]
    return torch.default_generator


class Replay:
    """States of one step's random ops. A state is a few kilobytes on the CPU and 16 bytes on CUDA: cheaper than any mask."""

    def __init__(self, device: torch.device) -> None:
        self._generator = generator_of(device)
        self._states: dict[int, torch.Tensor] = {}
        self._present: torch.Tensor | None = None

    def record(self, op: int) -> None:
        self._states[op] = self._generator.get_state()

    def restore(self, op: int) -> None:
        self._present = self._generator.get_state()
        self._generator.set_state(self._states[op])

    def resume(self) -> None:
        assert self._present is not None
        self._generator.set_state(self._present)
