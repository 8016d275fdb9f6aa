"""Costs by running: ops with real kernels on the real device, one by one.

Three runs are timed after a warm-up and the median taken; the bytes an op holds beyond its inputs and outputs are its
workspace. Values are random, integers are zero (a valid index everywhere).
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from memfit.capture.captured import Captured, OpCall, Ref
from memfit.core.costs import Level
from memfit.profile.roofline import estimate_ns
from memfit.torch_private.allocations import peaks_of
from memfit.torch_private.cuda import keep_busy
from memfit.torch_private.tensors import disable_autocast
from memfit.torch_private.trees import map_leaves

Progress = Callable[[str, int, int], None]
_TARGET_S = 0.02  # stop repeating an op once it has run this long
_MAX_RUNS = 7


Form = tuple[int, int]
"""An op, and which of its forms: 0 is the plain one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """`costs`: time in ns and bytes of workspace. `estimated`: the same for plain ops that could not run alone; a form that could not is in
    neither."""

    costs: Mapping[Form, tuple[int, int]]
    estimated: Mapping[Form, tuple[int, int]]
    link: Level


def measure(captured: Captured, forms: Sequence[Form], progress: Progress | None = None) -> Measured:
    """Run each of these forms on the device where the model lives."""
    costs: dict[Form, tuple[int, int]] = {}
    estimated: dict[Form, tuple[int, int]] = {}
    devices = [captured.device] if captured.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):  # the caller's random numbers must not depend on whether we measured
        for position, form in enumerate(forms):
            if progress:
                progress("measuring ops", position, len(forms))
            try:
                costs[form] = _measure_op(captured, *form)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:  # invented values are not always what a kernel wants
                if form[1] == 0:
                    estimated[form] = (estimate_ns(captured, form[0]), 0)
    return Measured(costs=costs, estimated=estimated, link=link(captured.device))


def first_calls(captured: Captured, forms: Sequence[Form]) -> Iterator[None]:
    """Run those that are not compiled, one by one, while somebody waits for a compiler: on the GPU a library chooses and loads its kernels
    then. A failure is left to the measurement."""
    if captured.device.type != "cuda":
        return
    for form in forms:
        if not hasattr(captured.call(*form).target, "is_compiled"):
            with suppress(RuntimeError), torch.random.fork_rng(devices=[captured.device]):
                _runner(captured, *form)()
            yield


def _measure_op(captured: Captured, op: int, variant: int) -> tuple[int, int]:
    run, device = _runner(captured, op, variant), captured.device
    run()
    made, peak = peaks_of(run, device)
    return _median_ns(run, device), max(0, peak - made)


def _runner(captured: Captured, op: int, variant: int) -> Callable[[], Any]:
    """Runs it once with invented values."""
    call = captured.call(op, variant)
    args, kwargs = _real_arguments(captured, call)
    assert call.target is not None
    target = call.target

    def run() -> Any:
        with torch.no_grad(), disable_autocast():  # the casts are ops of their own
            return target(*args, **kwargs)

    return run


def _real_arguments(captured: Captured, call: OpCall) -> tuple[Any, Any]:
    made: dict[int, torch.Tensor] = {}

    def realise(value: Any) -> Any:
        if not isinstance(value, Ref):
            return value
        if value.tensor not in made:
            sample = captured.samples[value.tensor]
            assert sample is not None
            made[value.tensor] = _like(sample, captured.device)
        return made[value.tensor]

    args, kwargs = map_leaves(realise, (call.args, dict(call.kwargs)))
    return args, kwargs


def _like(sample: torch.Tensor, device: torch.device) -> torch.Tensor:
    where = device if sample.device.type in ("meta", device.type) else sample.device
    real = torch.empty_strided(sample.shape, sample.stride(), dtype=sample.dtype, device=where)
    if sample.dtype.is_floating_point and all(size == 1 or stride > 0 for size, stride in zip(sample.shape, sample.stride(), strict=True)):
        return real.uniform_(0.1, 1.0)
    return real.zero_()


def _median_ns(run: Callable[[], Any], device: torch.device) -> int:
    if device.type == "cuda":
        return _median_cuda_ns(run)
    times: list[int] = []
    while len(times) < 3 or (sum(times) < _TARGET_S * 1e9 and len(times) < _MAX_RUNS):
        begin = time.perf_counter_ns()
        run()
        times.append(time.perf_counter_ns() - begin)
    return round(statistics.median(times))


_LEAST_NS = 500
_ASLEEP_CYCLES = 500_000  # a quarter of a millisecond: lets the launches queue, so that kernels are timed and not Python


def _median_cuda_ns(run: Callable[[], Any]) -> int:
    return max(_LEAST_NS, _time_between_events_ns(run) - _time_nothing_ns(torch.cuda.current_device()))


@functools.cache
def _time_nothing_ns(device: int) -> int:
    """The time between two CUDA events with nothing between them: microseconds, which short kernels must not be charged for."""
    return _time_between_events_ns(lambda: None)


def _time_between_events_ns(run: Callable[[], Any]) -> int:
    times: list[float] = []
    for _ in range(5):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        keep_busy(_ASLEEP_CYCLES)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e6)
    return round(statistics.median(times))


_LINKS: dict[str, Level] = {}


def link(device: torch.device) -> Level:
    """Bandwidth between device and pinned host memory, measured once; on the CPU there is no link."""
    if device.type != "cuda":
        return Level()
    name = str(device)
    if name not in _LINKS:
        size = 64 * 2**20
        host, here = torch.empty(size, dtype=torch.uint8, pin_memory=True), torch.empty(size, dtype=torch.uint8, device=device)
        write_ns = _median_cuda_ns(lambda: host.copy_(here, non_blocking=True))
        read_ns = _median_cuda_ns(lambda: here.copy_(host, non_blocking=True))
        _LINKS[name] = Level(
            write_bytes_per_s=size / (write_ns / 1e9),
            read_bytes_per_s=size / (read_ns / 1e9),
            write_latency_ns=10_000,
            read_latency_ns=10_000,
        )
    return _LINKS[name]
