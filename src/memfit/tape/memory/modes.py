"""The memory modes side by side: the same program, the same numbers, other bytes.

naive        one buffer per op, all kept                       Fresh, nothing freed
exact        freed at the last reader                          Fresh
pool         freed buffers are recycled at run time            Pool
static       tags shared by a plan made before, in place       Arena at shared tags
arena        the same, at the offsets of a layout planner      Arena
<planner>    any planner's schedule: √n, budgeted, ...         Fresh, or Arena if the plan has a layout
inference    no gradients: two buffers used in turn            Arena
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from memfit.core.costs import Costs
from memfit.core.errors import Unsupported
from memfit.core.graph import Graph
from memfit.core.plan import Layout, Plan
from memfit.core.schedule import Schedule
from memfit.tape.array_view import Data
from memfit.tape.executor import Executor
from memfit.tape.memory.byte_trace import Trace, predict, trace
from memfit.tape.memory.memories import Fresh, Memory, Pool
from memfit.tape.memory.sharing_tags import share_tags, two_buffers
from memfit.tape.plain_schedules import count_recomputations, drop_early, keep_all
from memfit.tape.program import Program

Place = Callable[[Graph, Schedule, Costs], Layout]
"""A layout planner: offsets for every allocation of a schedule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """One way to run a program."""

    name: str
    program: Program
    schedule: Schedule
    memory: Callable[[], Memory] = Fresh
    layout: Layout | None = None

    def executor(self) -> Executor:
        return Executor(self.program, self.schedule, memory=self.memory, layout=self.layout)

    def predicted_bytes(self) -> tuple[int, ...]:
        return predict(self.program, self.schedule, memory=self.memory, layout=self.layout)

    def trace(self) -> Trace:
        return trace(self.program, self.schedule, memory=self.memory, layout=self.layout)

    def trace_peak(self) -> Trace:
        """Looks only at the steps that matter: the predicted peak, and the last."""
        return trace(self.program, self.schedule, memory=self.memory, layout=self.layout, only_peak=True)


def planless_modes(program: Program, *, place: Place | None = None) -> tuple[Mode, ...]:
    """Naive, exact, pool, static and, given a layout planner, arena."""
    graph, costs = program.graph, program.costs
    early, inplace = drop_early(graph), drop_early(graph, inplace=True)
    modes = [
        Mode(name="naive", program=program, schedule=keep_all(graph)),
        Mode(name="exact", program=program, schedule=early),
        Mode(name="pool", program=program, schedule=early, memory=Pool),
        Mode(name="static", program=program, schedule=inplace, layout=share_tags(graph, inplace, costs)),
    ]
    if place is not None:
        modes.append(Mode(name="arena", program=program, schedule=inplace, layout=place(graph, inplace, costs)))
    return tuple(modes)


def planned_mode(name: str, program: Program, plan: Plan, *, place: Place | None = None) -> Mode:
    """Any planner's plan; in an arena if the plan brings a layout or a layout planner is given."""
    layout = plan.layout or (place(program.graph, plan.schedule, program.costs) if place else None)
    return Mode(name=name, program=program, schedule=plan.schedule, layout=layout)


def inference_mode(program: Program) -> Mode:
    """For a net compiled without gradients: two buffers, or a few more where it carries more than one value along."""
    schedule = drop_early(program.graph, inplace=True)
    try:
        layout = two_buffers(program.graph, schedule, program.costs)
    except Unsupported:
        layout = share_tags(program.graph, schedule, program.costs)
    return Mode(name="inference", program=program, schedule=schedule, layout=layout)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One row of the table of modes. Bytes are of the whole step, sources included."""

    name: str
    predicted_bytes: int
    measured_bytes: int
    exact: bool  # prediction = measurement in every step looked at
    num_ops: int
    num_recomputed: int
    recomputed_fraction: float  # their time by the program's costs, over that of running every op once
    time_ns: int
    same_numbers: bool  # results bitwise equal to the first mode's


def compare(modes: Sequence[Mode], *, repeats: int = 3, every_step: bool = True) -> tuple[Comparison, ...]:
    """Run every mode: once traced, then timed (the least of `repeats` interleaved runs)."""
    traces = [mode.trace() if every_step else mode.trace_peak() for mode in modes]
    times = _least_times(modes, repeats)
    reference = traces[0].results if traces else ()
    return tuple(
        Comparison(
            name=mode.name,
            predicted_bytes=seen.predicted_peak_bytes,
            measured_bytes=seen.peak_bytes,
            exact=seen.predicted_bytes == seen.measured_bytes,
            num_ops=len(mode.program.graph.ops),
            num_recomputed=count_recomputations(mode.schedule),
            recomputed_fraction=_measure_recomputed_fraction(mode),
            time_ns=time_ns,
            same_numbers=_equal(reference, seen.results),
        )
        for mode, seen, time_ns in zip(modes, traces, times, strict=True)
    )


def _measure_recomputed_fraction(mode: Mode) -> float:
    once = sum(mode.program.costs.op_time_ns)
    return sum(mode.program.costs.time_ns(s.op, s.variant) for s in mode.schedule.computes) / once - 1 if once else 0.0


def _least_times(modes: Sequence[Mode], repeats: int) -> list[int]:
    executors = [mode.executor() for mode in modes]
    least = [2**62] * len(modes)
    for _ in range(repeats):  # interleaved, so that a busy moment of the machine does not hit one mode alone
        for k, executor in enumerate(executors):
            start = time.perf_counter_ns()
            executor.run()
            least[k] = min(least[k], time.perf_counter_ns() - start)
    return least


def _equal(a: Sequence[Data], b: Sequence[Data]) -> bool:
    return len(a) == len(b) and all(np.array_equal(x, y, equal_nan=True) for x, y in zip(a, b, strict=True))
