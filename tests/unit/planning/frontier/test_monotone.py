"""Outcomes along budgets are monotone in both directions, whatever the planner found at each."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from tests.strategies import random_costs, random_training_graph

from memfit.core.budget import Budget
from memfit.core.errors import BadInput
from memfit.core.outcome import Outcome, Status
from memfit.core.plan import Plan, Timeline
from memfit.core.schedule import Schedule
from memfit.core.simulate import simulate
from memfit.planning.frontier.monotone import make_monotone, plan_curve, share_out, spread_budgets


def _outcome(peak_bytes: int | None, time_ns: int, bound_ns: int = 0) -> Outcome:
    if peak_bytes is None:
        return Outcome(status=Status.UNKNOWN, lower_bound_ns=bound_ns)
    timeline = Timeline(
        bytes_at_step=(), peak_bytes=peak_bytes, peak_step=-1, time_ns=time_ns, serial_time_ns=time_ns, compute_time_ns=time_ns,
        kinds=(), bytes_by_kind=(), level_peak_bytes=(peak_bytes,),
    )  # fmt: skip
    plan = Plan(schedule=Schedule(steps=()), timeline=timeline, planner="by hand", graph_digest="")
    return Outcome(status=Status.FEASIBLE, plan=plan, lower_bound_ns=bound_ns)


def test_a_plan_is_offered_up_and_down_and_bounds_go_down() -> None:
    points = [
        (10, _outcome(9, 50)),
        (20, _outcome(None, 0)),
        (30, _outcome(8, 40, bound_ns=30)),
        (40, _outcome(40, 60)),
        (5, _outcome(None, 0)),
    ]
    settled = make_monotone(points)
    assert [limit for limit, _ in settled] == [5, 10, 20, 30, 40]
    assert settled[0][1].plan is None
    found = [outcome.require_plan().timeline for _, outcome in settled[1:]]
    assert [(t.peak_bytes, t.time_ns) for t in found] == [(8, 40)] * 4  # smaller and faster than every other: taken everywhere it fits
    assert [outcome.lower_bound_ns for _, outcome in settled] == [30, 30, 30, 30, 0]
    assert settled[2][1].require_plan().budget == Budget(device_bytes=20)
    assert settled[1][1].gap_fraction == pytest.approx(10 / 30)


@pytest.mark.parametrize("planner", ["auto", "greedy", "sqrt_segments"])
@pytest.mark.parametrize("seed", range(3))
def test_monotone_in_both_directions_and_judged(planner: str, seed: int) -> None:
    rng = Random(seed)
    graph = random_training_graph(rng, max_layers=7)
    costs = random_costs(rng, graph, max_levels=0)
    budgets = spread_budgets(graph, costs, 6)
    points = plan_curve(graph, costs, budgets, planner=planner, time_limit_s=0.6)
    assert [limit for limit, _ in points] == list(budgets)
    found = [(limit, outcome.plan) for limit, outcome in points if outcome.plan is not None]
    assert found[-1][0] == budgets[-1]  # keep-all always fits there
    for limit, plan in found:
        timeline = simulate(graph, plan.schedule, costs, Budget(device_bytes=limit))
        assert (timeline.peak_bytes, timeline.time_ns) == (plan.timeline.peak_bytes, plan.timeline.time_ns)
    for (_, smaller), (_, larger) in pairwise(found):
        assert larger.timeline.time_ns <= smaller.timeline.time_ns
        assert smaller.timeline.peak_bytes <= larger.timeline.peak_bytes
    for _, outcome in points:
        assert outcome.plan is None or outcome.lower_bound_ns <= outcome.plan.timeline.time_ns


def test_bad_budgets_are_refused() -> None:
    graph = random_training_graph(Random(0))
    costs = random_costs(Random(0), graph)
    with pytest.raises(BadInput, match="at least 1"):
        spread_budgets(graph, costs, 0)
    for fractions in ([], [-0.1], [float("nan")]):
        with pytest.raises(BadInput, match="shares"):
            share_out(100, fractions)
    assert share_out(100, [1, 0.5, 0.5]) == (50, 100)
    assert len(spread_budgets(graph, costs, 1)) == 1
