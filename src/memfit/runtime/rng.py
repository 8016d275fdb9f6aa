"""Replaying random ops: the generator's state before an op's first run is kept, put back for a replay, and taken forward again."""

from __future__ import annotations

import torch

from memfit.core.errors import Unsupported

_CAPTURED = b""  # stands for a state nobody can know: the step is being captured in a CUDA graph


def find_generator(device: torch.device) -> torch.Generator:
    """The default generator that ops on this device draw from."""
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        return torch.cuda.default_generators[index]
    return torch.default_generator


def get_state(device: torch.device) -> bytes:
    """The generator's state: 16 bytes on CUDA, 5 KB on the CPU, cheaper than any mask. Not a tensor, so not in the allocator.

    A CUDA graph takes the generator forward at every replay, so while one is captured there is no state to keep.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return _CAPTURED
    return find_generator(device).get_state().numpy().tobytes()


def set_state(device: torch.device, state: bytes) -> None:
    if state == _CAPTURED:
        raise Unsupported(
            'a step that draws the same random numbers twice cannot be captured in a CUDA graph: fit with engine="inductor", whose '
            "random numbers come from seeds that are kept, or leave dropout out."
        )
    find_generator(device).set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


class RandomStates:
    """States of one step's random ops."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._states: dict[int, bytes] = {}
        self._present = b""

    def record(self, op: int) -> None:
        self._states[op] = get_state(self._device)

    def restore(self, op: int) -> None:
        self._present = get_state(self._device)
        set_state(self._device, self._states[op])

    def resume(self) -> None:
        set_state(self._device, self._present)
