"""How many bytes a function holds at most while it runs, and how many it leaves: the allocator's own account.

On CUDA the caching allocator counts. On the CPU torch's profiler reports every allocation and free, op-internal ones
included; what libraries allocate behind torch's back (oneDNN, MKL scratch) is not seen on either.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch


def peaks_of(function: Callable[[], Any], device: torch.device) -> tuple[int, int]:
    """(bytes left held at the end, most bytes held on the way), both beyond what was held before."""
    if device.type == "cuda":
        return _on_cuda(function, device)
    changes, keep = cpu_changes(function)
    held = peak = 0
    for change in changes:
        held += change
        peak = max(peak, held)
    del keep
    return held, peak


def _on_cuda(function: Callable[[], Any], device: torch.device) -> tuple[int, int]:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    keep = function()
    torch.cuda.synchronize(device)
    left, peak = torch.cuda.memory_allocated(device) - before, torch.cuda.max_memory_allocated(device) - before
    del keep
    return left, peak


def cpu_changes(function: Callable[[], Any]) -> tuple[list[int], Any]:
    """The signed sizes of every CPU allocation and free during the call, in order, and its result."""
    from torch.profiler import ProfilerActivity, profile

    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with _quiet():
        profiler.__enter__()
    try:
        result = function()
    finally:
        with _quiet():
            profiler.__exit__(None, None, None)
    inner: Any = profiler.profiler
    events = [
        (e.start_ns(), e.nbytes())
        for e in inner.kineto_results.events()
        if e.name() == "[memory]" and e.device_type() == torch._C._autograd.DeviceType.CPU
    ]
    events.sort(key=lambda x: x[0])
    return [size for _, size in events], result


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The profiler greets on file descriptor 2; users did not ask for that."""
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)
