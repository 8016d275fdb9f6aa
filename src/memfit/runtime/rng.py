"""Random ops that run twice draw the same numbers twice, whoever else draws meanwhile.

    first run   state S of the default generator ── copied ──> own generator ── op ──> S' goes back to the default one
    again       S ────────────────────────────────────────> own generator ── op         (the default one is not touched)

An op that knows the default generator only is run on that, put back to S and taken forward again after, also when it fails; ops of
memfit's own wait for each other then, but a thread that draws from the default generator at that moment is not seen.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from memfit.core.errors import Unsupported
from memfit.torch_private.random_ops import from_generator

_CAPTURED = b""  # stands for a state nobody can know: the step is being captured in a CUDA graph
_ONE_AT_A_TIME = threading.RLock()


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
    find_generator(device).set_state(_as_tensor(state))


def _as_tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


class RandomStates:
    """States of one step's random ops: `draw` runs an op that will run again, `redraw` runs it again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._states: dict[int, bytes] = {}
        self._own: torch.Generator | None = None

    def draw(self, op: int, target: Any, *args: Any, **kwargs: Any) -> Any:
        run = from_generator(target)
        with _ONE_AT_A_TIME:
            state = self._states[op] = get_state(self._device)
            if run is None or state == _CAPTURED:
                return target(*args, **kwargs)
            result, after = self._run(run, state, args, kwargs)
            set_state(self._device, after)
            return result

    def redraw(self, op: int, target: Any, *args: Any, **kwargs: Any) -> Any:
        run, state = from_generator(target), self._states[op]
        if run is not None and state != _CAPTURED:
            return self._run(run, state, args, kwargs)[0]
        with _ONE_AT_A_TIME:
            present = get_state(self._device)
            try:
                set_state(self._device, state)
                return target(*args, **kwargs)
            finally:
                set_state(self._device, present)

    def _run(self, run: Callable[..., Any], state: bytes, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, bytes]:
        """The op from this state on, and the state after it."""
        own = self._own = self._own or torch.Generator(self._device)
        own.set_state(_as_tensor(state))
        return run(*args, generator=own, **kwargs), own.get_state().numpy().tobytes()
