"""How long Python takes to issue a step, and the step replayed from a CUDA graph, which needs no Python."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memfit.runtime.autograd_step import Ready, run
from memfit.runtime.cuda_graphs import Recording, Replayed, cuda_graphs_for

_WARM, _REPEATS = 3, 10


def issued_ms(step: Callable[[], Any], model: nn.Module) -> float:
    """The fastest of three calls of a step that nobody waits for: where it is near the step's own time, kernels wait for Python."""
    found = []
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        found.append((time.perf_counter() - begin) * 1e3)
    torch.cuda.synchronize()
    model.zero_grad(set_to_none=True)
    return min(found)


def recorded(ready: Ready, sources: tuple[torch.Tensor, ...], held_bytes: int) -> tuple[Callable[[], torch.Tensor], dict[str, Any]]:
    """A planned step as `memfit.fit(..., replay=True)` runs it, and the bytes: at the peak of what was recorded, and reserved by the process after."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    recording = Recording(ready, sources, cuda_graphs_for(ready))
    peak = torch.cuda.max_memory_allocated() - before
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved()

    def step() -> torch.Tensor:
        loss: torch.Tensor = run(Replayed(recording, sources))
        loss.backward()
        return loss.detach()

    return step, {"peak_bytes": held_bytes + peak, "reserved_after_bytes": reserved}


def replayed(step: Callable[[], Any], model: nn.Module, held_bytes: int) -> dict[str, Any]:
    """As docs/how-to/cuda-graphs.md captures it; the peak is that of the captured step, whose blocks lie in a pool of their own."""
    graph = torch.cuda.CUDAGraph()
    try:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM):
                model.zero_grad(set_to_none=True)
                step()
        torch.cuda.current_stream().wait_stream(side)
        model.zero_grad(set_to_none=True)
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before, reserved_before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        with torch.cuda.graph(graph):
            step()
        peak, reserved = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_reserved() - reserved_before
        times = []
        for _ in range(_WARM + _REPEATS):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            graph.replay()
            torch.cuda.synchronize()
            times.append((time.perf_counter() - begin) * 1e3)
        times = times[_WARM:]
        return {"ms": statistics.median(times), "ms_min": min(times), "peak_bytes": held_bytes + peak, "pool_bytes": reserved}
    except RuntimeError as error:
        return {"error": f"{type(error).__name__}: {error}"[:300]}
    finally:
        graph.reset()
        model.zero_grad(set_to_none=True)
        gc.collect()
        torch.cuda.empty_cache()
