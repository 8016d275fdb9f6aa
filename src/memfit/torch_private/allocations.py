"""How many bytes are held at most between two moments, and how many are left: the allocator's own account.

On CUDA the caching allocator counts. On the CPU torch's profiler reports every allocation and free, op-internal ones
included; what libraries allocate behind torch's back (oneDNN, MKL scratch) is not seen on either.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch


class Meter(Protocol):
    """Counts from `start` to `stop`, which says (bytes left held, most bytes held on the way), both beyond those held at the start."""

    def start(self) -> None: ...

    def stop(self) -> tuple[int, int]: ...


def meter(device: torch.device) -> Meter:
    return CudaMeter(device) if device.type == "cuda" else CpuMeter()


def peaks_of(function: Callable[[], Any], device: torch.device) -> tuple[int, int]:
    """(bytes left held at the end, most bytes held on the way) of one call; its result counts as held."""
    counter = meter(device)
    counter.start()
    try:
        keep = function()
    finally:
        counted = counter.stop()
    del keep
    return counted


class CudaMeter:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0

    def start(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_allocated(self._device)

    def stop(self) -> tuple[int, int]:
        torch.cuda.synchronize(self._device)
        allocated, peak = torch.cuda.memory_allocated(self._device), torch.cuda.max_memory_allocated(self._device)
        return allocated - self._before, peak - self._before


_ONE_AT_A_TIME = threading.RLock()  # torch's profiler crashes when two threads start or stop it together


class CpuMeter:
    """Counts with torch's profiler. Nothing reaches file descriptor 2 meanwhile: the profiler prints a greeting there, and warnings."""

    def __init__(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        self._profiler: Any = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._quiet = contextlib.ExitStack()

    def start(self) -> None:
        self._quiet.enter_context(_ONE_AT_A_TIME)
        self._quiet.enter_context(_quiet())
        try:
            self._profiler.__enter__()
        except BaseException:
            self._quiet.close()
            raise

    def stop(self) -> tuple[int, int]:
        try:
            self._profiler.__exit__(None, None, None)
            events = [
                (e.start_ns(), e.nbytes())
                for e in self._profiler.profiler.kineto_results.events()
                if e.name() == "[memory]" and e.device_type() == torch.autograd.DeviceType.CPU  # type: ignore[attr-defined]
            ]
        finally:
            self._quiet.close()
        events.sort(key=lambda x: x[0])  # stable: events of one instant stay in their order
        held = peak = 0
        for _, change in events:
            held += change
            peak = max(peak, held)
        return held, peak


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)
