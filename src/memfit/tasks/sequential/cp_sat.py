"""The peak of a general DAG as a constraint program (OR-Tools CP-SAT, extra `solvers`): positions, lifetimes, a cumulative.

    position   0   1   2   3   4          one task per position
    item a     [===========)              from its producer's position to its last reader's, both included
    item b         [=======)              sum of what is alive and of working memories <= peak;  minimise the peak

Beyond what `exact.py` can enumerate; returns the best order, a proven bound, or both equal.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memfit.core import cp_sat
from memfit.core.outcome import Status
from memfit.tasks.graph import Ints, TaskGraph

_LARGEST = 2**40  # CP-SAT sums in 64 bits: larger byte counts are scaled, bounds rounded to the safe side


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    order: Ints | None
    lower_bound_bytes: int


def cpsat_order(graph: TaskGraph, hint: Ints, hint_peak: int, lower_bound: int, *, time_limit_s: float = 20.0, seed: int = 0) -> Solved:
    """Improve on `hint`; `order` is None when nothing better was found."""
    n = graph.num_tasks
    unit = max(1, int(graph.item_bytes.sum() + graph.memory_bytes.sum()) // _LARGEST)
    model = cp_sat.new_model("the algorithm cpsat")
    position = [model.new_int_var(0, n - 1, f"p{t}") for t in range(n)]
    model.add_all_different(position)
    for a, b in graph.edges.tolist():
        model.add(position[a] + 1 <= position[b])
    peak = model.new_int_var(lower_bound // unit, -(-hint_peak // unit), "peak")
    intervals, demands = _lifetimes(graph, model, position, unit)
    model.add_cumulative(intervals, demands, peak)
    model.minimize(peak)
    for k, task in enumerate(hint.tolist()):
        model.add_hint(position[task], k)
    solver = cp_sat.Solver()
    status = solver.solve(model, time_limit_s=time_limit_s, workers=2, seed=seed)
    if status is Status.INFEASIBLE:  # rounding cut the hint off: nothing in whole units is better
        return Solved(order=None, lower_bound_bytes=lower_bound)
    bound = max(lower_bound, int(np.ceil(solver.bound - 1e-6)) * unit)
    if status is Status.UNKNOWN:
        return Solved(order=None, lower_bound_bytes=bound)
    order = np.argsort([solver.value(p) for p in position], kind="stable")
    return Solved(order=order.astype(np.int64), lower_bound_bytes=bound)


def _lifetimes(graph: TaskGraph, model, position, unit: int):  # type: ignore[no-untyped-def]
    """Intervals over positions with their bytes, rounded down: the bound stays a bound."""
    n = graph.num_tasks
    intervals, demands = [], []
    for item, size in enumerate((graph.item_bytes // unit).tolist()):
        if size:
            producer, readers = int(graph.item_producer[item]), graph.readers.of(item)
            start = 0 if producer < 0 else position[producer]
            end = n
            if not graph.item_kept[item]:
                end = model.new_int_var(1, n, f"e{item}")
                for r in readers:
                    model.add(end >= position[r] + 1)
                if not readers and producer >= 0:
                    model.add(end >= position[producer] + 1)
            length = model.new_int_var(0, n, f"l{item}")
            intervals.append(model.new_interval_var(start, length, end, f"i{item}"))
            demands.append(size)
    for task, size in enumerate((graph.memory_bytes // unit).tolist()):
        if size:
            intervals.append(model.new_fixed_size_interval_var(position[task], 1, f"m{task}"))
            demands.append(size)
    return intervals, demands
