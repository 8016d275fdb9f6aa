"""Outcomes along a row of budgets: found by any planner, and put in order so that they are monotone in both directions.

    budget   4    5    6    7           every plan found at any budget is tried at every other one:
    plan     a    b    c    d           the fastest that fits is taken, of equally fast ones the smallest
    time     9 >= 7 >= 7 >= 5           more budget is never slower,
    peak     4 <= 5 <= 5 <= 7           less budget never holds more

`frontier/search.py` searches the whole curve at once with `planner="auto"`; this file does it for any planner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

from memfit.core.budget import Budget
from memfit.core.costs import Costs
from memfit.core.errors import BadInput
from memfit.core.graph import Graph
from memfit.core.outcome import Outcome, Status
from memfit.planning.api import frontier, plan
from memfit.planning.problem import Planner

Point = tuple[int, Outcome]
Told = Callable[[int, int], None]


def plan_curve(
    graph: Graph,
    costs: Costs,
    budgets: Sequence[int],
    *,
    planner: str | Planner = "auto",
    time_limit_s: float = 60.0,
    progress: Told | None = None,
) -> tuple[Point, ...]:
    """(budget, outcome) pairs by rising budget, monotone in both directions. The time limit is for all of them together."""
    if planner == "auto":
        pairs = frontier(graph, costs, budgets=budgets, time_limit_s=time_limit_s, progress=progress)
        return make_monotone([(budget.device_bytes or 0, outcome) for budget, outcome in pairs])
    found: list[Point] = []
    limits = sorted(set(budgets))
    for limit in limits:
        found.append((limit, plan(graph, costs, limit, planner=planner, time_limit_s=time_limit_s / len(limits))))
        if progress is not None:
            progress(len(found), len(limits))
    return make_monotone(found)


def spread_budgets(graph: Graph, costs: Costs, num_points: int) -> tuple[int, ...]:
    """Budgets from the proven minimum to the keep-all peak, evenly apart."""
    if num_points < 1:
        raise BadInput(f"a frontier of {num_points} points cannot be drawn: give at least 1.")
    high = plan(graph, costs, planner="keep_all").require_plan().timeline.peak_bytes
    low = min(plan(graph, costs, 0, time_limit_s=1.0).lower_bound_bytes, high)
    steps = max(num_points - 1, 1)
    return tuple(sorted({high - (high - low) * k // steps for k in range(num_points)}))


def share_out(keep_all_peak_bytes: int, fractions: Sequence[float]) -> tuple[int, ...]:
    """Budgets as fractions of the keep-all peak."""
    if not fractions or not all(0 <= f <= 1e6 for f in fractions):
        raise BadInput(f"fractions {list(fractions)} are no shares of the keep-all peak: give numbers from 0 up, such as 0.5, 0.75, 1.")
    return tuple(sorted({int(keep_all_peak_bytes * f) for f in fractions}))


def make_monotone(points: Sequence[Point]) -> tuple[Point, ...]:
    """Give each budget the fastest plan that fits it, and each bound to the budgets for which it holds too."""
    ordered = sorted(points, key=lambda point: point[0])
    least_bytes = max((outcome.lower_bound_bytes for _, outcome in ordered), default=0)  # of any plan at all
    falling = accumulate((outcome.lower_bound_ns for _, outcome in reversed(ordered)), max)  # holds for smaller budgets too
    bounds = list(falling)[::-1]
    plans = [outcome.plan for _, outcome in ordered if outcome.plan is not None]
    settled: list[Point] = []
    for (limit, outcome), bound in zip(ordered, bounds, strict=True):
        fitting = [p for p in plans if p.timeline.peak_bytes <= limit]
        best = min(fitting, key=lambda p: (p.timeline.time_ns, p.timeline.peak_bytes), default=None)
        new = replace(outcome, lower_bound_ns=bound, lower_bound_bytes=least_bytes)
        if best is not None:
            time_ns = best.timeline.time_ns
            new = replace(
                new,
                plan=replace(best, budget=Budget(device_bytes=limit)),
                status=Status.OPTIMAL if time_ns <= bound or outcome.status is Status.OPTIMAL else Status.FEASIBLE,
                gap_fraction=(time_ns - bound) / bound if bound > 0 else outcome.gap_fraction,
            )
        settled.append((limit, new))
    return tuple(settled)
