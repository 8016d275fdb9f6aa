"""Costs by running: every distinct op (same target, shapes, types, arguments) once with real kernels on the real device.

Three runs are timed after a warm-up and the median taken; the bytes an op holds beyond its inputs and outputs are its
workspace. Values are random, integers are zero (a valid index everywhere).
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch

from memfit.capture.captured import Captured, OpCall, Ref, Role
from memfit.core.costs import Costs, Level
from memfit.kernels.implementation import Implementation
from memfit.profile.cache import Cache
from memfit.profile.roofline import add_fixed_workspace, estimate_ns, is_free
from memfit.torch_private.allocations import peaks_of
from memfit.torch_private.cuda import keep_busy
from memfit.torch_private.tensors import disable_autocast
from memfit.torch_private.trees import map_leaves

Progress = Callable[[str, int, int], None]
_TARGET_S = 0.02  # stop repeating an op once it has run this long
_MAX_RUNS = 7
_METHOD = 3  # figures measured in another way are other figures


class Measurement:
    """The costs of a step's ops on the device where its model lives: what is not in the cache is to be run, and compiled before that.

    `targets` are about to run; `first_calls` runs those that are not compiled, one by one, while somebody waits for a compiler: a library
    chooses and loads its kernels then.
    """

    def __init__(self, captured: Captured, *, cache: Cache | None = None) -> None:
        self.captured, self.cache = captured, cache or Cache()
        self.device_name = name_of(captured.device)
        forms = [(op.id, v) for op in captured.graph.ops for v in range(len(op.forms))]
        self.signatures = {form: signature(captured, *form) for form in forms if _is_measured(captured, *form)}
        distinct = {text: form for form, text in reversed(self.signatures.items())}
        self.missing = [(text, form) for text, form in distinct.items() if self.cache.get(self.device_name, text) is None]
        self.guessed: dict[str, tuple[int, int]] = {}
        self.broken: set[str] = set()  # variants that cannot run here

    @property
    def targets(self) -> list[Any]:
        return [self.captured.call(*form).target for _, form in self.missing]

    def first_calls(self) -> Iterator[None]:
        """On the GPU. A failure is left to the measurement."""
        if self.captured.device.type != "cuda":
            return
        for _, form in self.missing:
            if not hasattr(self.captured.call(*form).target, "is_compiled"):
                with suppress(RuntimeError), torch.random.fork_rng(devices=[self.captured.device]):
                    _runner(self.captured, *form)()
                yield

    def run(self, progress: Progress | None = None) -> Costs:
        """Time and workspace of every op."""
        devices = [self.captured.device] if self.captured.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):  # the caller's random numbers must not depend on whether we measured
            for position, (text, form) in enumerate(self.missing):
                if progress:
                    progress("measuring ops", position, len(self.missing))
                self._measure(text, form)
        self.cache.save()
        ops = self.captured.graph.ops
        plain = [self._cost(op.id, 0) for op in ops]
        others = [tuple(self._cost(op.id, v + 1) for v in range(len(op.variants))) for op in ops]
        return Costs(
            op_time_ns=tuple(p[0] for p in plain),
            workspace_bytes=add_fixed_workspace(self.captured, [p[1] for p in plain]),
            variant_time_ns=tuple(tuple(p[0] for p in pairs) for pairs in others),
            variant_workspace_bytes=tuple(tuple(p[1] for p in pairs) for pairs in others),
            levels=(link(self.captured.device),),
            device=self.device_name,
            graph_digest=self.captured.graph.digest,
        )

    def _measure(self, text: str, form: tuple[int, int]) -> None:
        try:
            self.cache.put(self.device_name, text, _measure_op(self.captured, *form))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # invented values are not always what a kernel wants: such an op is estimated, and not cached
            if form[1]:
                self.broken.add(text)
            else:
                self.guessed[text] = (estimate_ns(self.captured, form[0]), 0)

    def _cost(self, op: int, variant: int) -> tuple[int, int]:
        text = self.signatures.get((op, variant))
        if text in self.broken:
            return _price_out(self.captured, self._cost(op, 0)[0])
        return (0, 0) if text is None else self.guessed.get(text) or self.cache.get(self.device_name, text) or (0, 0)


def measure_costs(captured: Captured, *, cache: Cache | None = None, progress: Progress | None = None) -> Costs:
    """Time and workspace of every op on the device where the captured model lives; what has to be compiled is compiled as it is met."""
    return Measurement(captured, cache=cache).run(progress)


def _is_measured(captured: Captured, op: int, variant: int) -> bool:
    return captured.call(op, variant).role is Role.CALL and (variant > 0 or not is_free(captured, op))


def _price_out(captured: Captured, plain_ns: int) -> tuple[int, int]:
    """What no plan takes, since the op has another form."""
    return 1000 * max(plain_ns, 1), sum(s.size_bytes for s in captured.graph.storages)


def name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu-{torch.get_num_threads()}"


def signature(captured: Captured, op: int, variant: int = 0) -> str:
    """Equal for calls that run the same kernel on the same shapes."""
    call, name = captured.call(op, variant), captured.graph.ops[op].form(variant).name
    if variant:
        name = f"{captured.graph.ops[op].name} {name}"
    if isinstance(call.target, Implementation):
        name = f"{name} {call.target.name}"

    def describe(value: Any) -> Any:
        if isinstance(value, Ref):
            sample = captured.samples[value.tensor]
            return "?" if sample is None else (str(sample.dtype), tuple(sample.shape), sample.stride())
        return repr(value)

    return f"{_METHOD} {torch.__version__} {name} {map_leaves(describe, (call.args, dict(call.kwargs)))} {_settings()}"


def _settings() -> str:
    return f"{torch.backends.cuda.matmul.allow_tf32}{torch.backends.cudnn.allow_tf32}{torch.backends.cudnn.benchmark}"


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
