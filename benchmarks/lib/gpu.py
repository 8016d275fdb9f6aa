"""Timing a step and comparing its gradients, on a GPU or a CPU."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memfit.torch_private.allocations import peaks_of


def timed(step: Callable[[], Any], model: nn.Module, device: str, parameter_bytes: int) -> dict[str, Any]:
    """Median of 10 after 3, forward and backward, gradients dropped in between; peak of one more step, everything counted."""

    def once() -> None:
        model.zero_grad(set_to_none=True)
        step()

    try:
        repeats = 10 if device == "cuda" else 2
        for _ in range(3 if device == "cuda" else 1):
            once()
        times = []
        for _ in range(repeats):
            model.zero_grad(set_to_none=True)
            synchronize(device)
            begin = time.perf_counter()
            step()
            synchronize(device)
            times.append((time.perf_counter() - begin) * 1e3)
        model.zero_grad(set_to_none=True)
        _, peak = peaks_of(step, torch.device(device))
        result = {"ms": statistics.median(times), "ms_min": min(times), "peak_bytes": parameter_bytes + peak}
        if device == "cuda":
            result["max_memory_allocated"] = torch.cuda.max_memory_allocated()
            result["max_memory_reserved"] = torch.cuda.max_memory_reserved()
        return result
    except torch.OutOfMemoryError as error:
        return {"error": str(error)[:200]}
    finally:
        model.zero_grad(set_to_none=True)
        clean(device)


def gradients(step: Callable[[], Any], model: nn.Module) -> list[torch.Tensor]:
    """The gradients of one step with a fixed seed, and statistics put back."""
    buffers = [b.clone() for b in model.buffers()]
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    step()
    found = [p.grad.detach().cpu() for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    for buffer, old in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(old)
    return found


def worst_difference(reference: list[torch.Tensor], found: list[torch.Tensor]) -> float:
    """The largest difference relative to the largest entry of its tensor."""
    pairs = zip(reference, found, strict=True)
    return max(((a.double() - b.double()).abs().max() / a.double().abs().max().clamp_min(1e-30)).item() for a, b in pairs)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def clean(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"
