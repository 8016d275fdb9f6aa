"""The whole curve: the fastest plan at each of several budgets, monotone, each point warm-started from its neighbours.

    time │ x
         │   x            from the largest budget down: the last plan, repaired for less, is one more seed
         │      x  x      back up: a plan for less memory is a plan for more, so time never rises with the budget
         │            x  x
         └────────────────> budget

Bounds travel too: what is proven for a budget holds for every smaller one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from memfit.core.budget import Budget
from memfit.core.costs import Costs
from memfit.core.errors import BadInput
from memfit.core.graph import Graph
from memfit.core.outcome import Outcome
from memfit.planning.cuts.planner import judge_search, try_cuts
from memfit.planning.model.fast_judge import peak_and_time
from memfit.planning.model.lower_bounds import find_floor
from memfit.planning.model.reduce import Ints, Model, build_model
from memfit.planning.problem import Problem
from memfit.planning.search.improve import improve
from memfit.planning.search.state import Search

Point = tuple[Budget, Outcome]


def trace_frontier(
    graph: Graph, costs: Costs, budgets: Sequence[int], num_points: int, time_limit_s: float, progress: Callable[[int, int], None] | None
) -> tuple[Point, ...]:
    """What `planning.api.frontier` promises."""
    if num_points < 1 or not time_limit_s >= 0:
        raise BadInput(f"a frontier of {num_points} points in {time_limit_s} s cannot be drawn: give at least 1 point and 0 s.")
    model = build_model(graph, costs)
    limits = sorted(set(budgets)) or _choose_budgets(model, num_points)
    searches: list[Search] = []
    try:
        for limit in reversed(limits):
            searches.append(_plan_point(model, limit, time_limit_s / len(limits), searches[-1] if searches else None))
            if progress is not None:
                progress(len(searches), len(limits))
    except KeyboardInterrupt:
        if not searches:
            raise
    searches.reverse()
    _carry_up(searches)
    return tuple((s.problem.budget, judge_search(s, "auto")) for s in searches)


def _choose_budgets(model: Model, num_points: int) -> list[int]:
    low = find_floor(model).bytes
    high, _ = peak_and_time(model.arrays, np.array(model.agenda, np.int64))
    return sorted({int(x) for x in np.linspace(low, max(low, high), num_points)})


def _plan_point(model: Model, limit: int, seconds: float, larger: Search | None) -> Search:
    search = Search(Problem(graph=model.graph, costs=model.costs, budget=Budget(device_bytes=limit), time_limit_s=seconds, built=model))
    if larger is not None:
        search.raise_bound(larger.bound_ns)
        start = _find_start(larger)
        if start is not None and not search.proof:
            search.repair(start, larger.makers, "the plan for more memory, mended")
    if not search.settled and not search.good_enough:
        try_cuts(search, max_cuts=6, seconds=0.4 * seconds)
        improve(search)
    return search


def _find_start(search: Search) -> Ints | None:
    return search.best if search.best is not None else search.closest


def _carry_up(searches: list[Search]) -> None:
    """A plan for a smaller budget fits every larger one."""
    for smaller, larger in pairwise(searches):
        if smaller.best is not None:
            larger.consider(smaller.best, "the plan for less memory")
