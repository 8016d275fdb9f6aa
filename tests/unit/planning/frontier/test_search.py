"""The frontier is monotone, judged point by point, and its bounds hold along it."""

from __future__ import annotations

from random import Random

import pytest
from tests.strategies import random_costs, random_training_graph

from memfit.core.errors import BadInput
from memfit.core.outcome import Status
from memfit.planning import frontier


@pytest.mark.parametrize("seed", range(4))
def test_more_budget_is_never_slower(seed: int) -> None:
    rng = Random(seed)
    graph = random_training_graph(rng, max_layers=8)
    costs = random_costs(rng, graph, max_levels=0)
    points = frontier(graph, costs, num_points=6, time_limit_s=1.0)
    limits = [budget.device_bytes or 0 for budget, _ in points]
    assert limits == sorted(limits)
    plans = [(limit, outcome) for limit, (_, outcome) in zip(limits, points, strict=True) if outcome.plan is not None]
    times = [outcome.require_plan().timeline.time_ns for _, outcome in plans]
    assert times
    assert times == sorted(times, reverse=True)
    for limit, outcome in plans:
        timeline = outcome.require_plan().timeline
        assert timeline.peak_bytes <= limit
        assert outcome.lower_bound_ns <= timeline.time_ns
    assert points[-1][1].status is Status.OPTIMAL  # the last point is keep-all


def test_given_budgets_and_bad_ones() -> None:
    rng = Random(1)
    graph = random_training_graph(rng)
    points = frontier(graph, budgets=[10**6, 1], time_limit_s=0.2)
    assert [b.device_bytes for b, _ in points] == [1, 10**6]
    assert [o.status for _, o in points] == [Status.INFEASIBLE, Status.OPTIMAL]
    with pytest.raises(BadInput, match="points"):
        frontier(graph, num_points=0)
