"""Bytes after every step, measured by `tracemalloc` and predicted by the judge.

    step          0      1      2      3    ...
    predicted    64     96     96    128        memory by memory: the judge, the pool's policy, or the arena's height
    measured     64     96     96    128        array data that NumPy holds, to the byte

NumPy reports its array data to tracemalloc in a domain of its own, so Python objects do not blur the count. A step is looked
at after its kernel ran and before its scratch goes: what the judge means by "during". What a kernel allocates and frees
inside is invisible to that look; `hidden_bytes` is the most any kernel allocated inside beyond what was declared.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from memfit.core.plan import Layout
from memfit.core.schedule import Schedule
from memfit.core.simulate import simulate
from memfit.tape.array_view import Data
from memfit.tape.executor import Executor
from memfit.tape.instructions import Drop, Load, Run, lower
from memfit.tape.memory.memories import FreeList, Fresh, Memory, Pool
from memfit.tape.program import Program


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One run, step by step. Equal tuples mean that the prediction was right to the byte."""

    predicted_bytes: tuple[int, ...]
    measured_bytes: tuple[int, ...]
    predicted_peak_bytes: int
    hidden_bytes: int
    results: tuple[Data, ...]

    @property
    def peak_bytes(self) -> int:
        return max(self.measured_bytes, default=0)


def trace(
    program: Program,
    schedule: Schedule,
    *,
    memory: Callable[[], Memory] = Fresh,
    layout: Layout | None = None,
    only_peak: bool = False,
) -> Trace:
    """Run once under tracemalloc, in buffers of the run's own (sources included), and look during every step.

    A look costs a walk over everything traced: `only_peak` looks at the predicted peak and at the last step alone.
    """
    predicted = predict(program, schedule, memory=memory, layout=layout)
    peak = max(predicted, default=0)
    at_steps = {predicted.index(peak), len(predicted) - 1} if only_peak and predicted else range(len(predicted))
    measured: list[int] = []
    meter = _Meter()
    executor = Executor(program, schedule, memory=memory, layout=layout, copy_sources=True)
    with meter:
        executor.prepare()
        meter.begin()

        def observe(step: int) -> None:
            if step in at_steps:
                meter.end()
                measured.append(meter.array_bytes())
            meter.begin()

        results = executor.run(observe=observe)
    return Trace(
        predicted_bytes=tuple(predicted[k] for k in sorted(at_steps)),
        measured_bytes=tuple(measured),
        predicted_peak_bytes=peak,
        hidden_bytes=meter.hidden_bytes,
        results=results,
    )


def predict(program: Program, schedule: Schedule, *, memory: Callable[[], Memory] = Fresh, layout: Layout | None = None) -> tuple[int, ...]:
    """Bytes during every step. Exact frees: the judge's own count. Pool: its policy replayed. Arena: its height throughout."""
    timeline = simulate(program.graph, schedule, program.costs)
    if layout is None and memory is not Pool:
        return timeline.bytes_at_step
    held = sum(program.graph.size_of(t) for t in program.graph.sources)
    if layout is not None:
        return (held + layout.height_bytes,) * len(schedule.steps)
    return tuple(held + pooled for pooled in _replay_pool(program, schedule))


def _replay_pool(program: Program, schedule: Schedule) -> list[int]:
    lowered, policy = lower(program, schedule), FreeList()
    block_of: dict[int, int] = {}
    series = []
    for step in lowered.instructions:
        takes = step.takes if isinstance(step, Run) else (step.buffer,) if isinstance(step, Load) else ()
        for k in takes:
            block_of[k] = policy.take(lowered.sizes_bytes[k])[0]
        drops = step.drops if isinstance(step, Run) else (step.buffer,) if isinstance(step, Drop) else ()
        series.append(policy.held_bytes)
        for k in drops:
            if k >= 0:
                policy.give_back(block_of.pop(k))
    return series


class _Meter:
    """tracemalloc, started and stopped, read in NumPy's domain."""

    def __init__(self) -> None:
        self.hidden_bytes = 0
        self._before = 0
        self._ours = False

    def __enter__(self) -> None:
        self._ours = not tracemalloc.is_tracing()
        if self._ours:
            tracemalloc.start(1)
        else:
            gc.collect()  # garbage that goes during the run would be counted against it
        self._base = self._read()

    def __exit__(self, *_: object) -> None:
        if self._ours:
            tracemalloc.stop()

    def array_bytes(self) -> int:
        return self._read() - self._base

    def _read(self) -> int:
        raw = tracemalloc.take_snapshot().traces._traces  # type: ignore[attr-defined]  # its public iterator is ten times slower
        return sum(trace[1] for trace in raw if trace[0] == np.lib.tracemalloc_domain)

    def begin(self) -> None:
        self._before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()

    def end(self) -> None:
        """Peak within the step beyond what it held at its end: temporaries that nobody declared."""
        now, peak = tracemalloc.get_traced_memory()
        self.hidden_bytes = max(self.hidden_bytes, peak - max(now, self._before))
