"""The frontier as a value to choose from, and its renderers."""

from __future__ import annotations

import json

import pytest
from tests.small import chain

from memfit.core.costs import uniform_costs
from memfit.core.errors import BadInput, InfeasibleBudget
from memfit.planning import plan
from memfit.planning.frontier.monotone import plan_curve
from memfit.report.frontier import Frontier, FrontierPoint, Status, make_frontier


def _point(budget: int, peak: int | None, overhead: float | None) -> FrontierPoint:
    status = Status.UNKNOWN if peak is None else Status.FEASIBLE
    time_ns = None if overhead is None else int(100 * (1 + overhead))
    return FrontierPoint(
        budget_bytes=budget, status=status, peak_bytes=peak, time_ns=time_ns, overhead_fraction=overhead, lower_bound_ns=90
    )


FRONTIER = Frontier(
    points=(_point(20, None, None), _point(40, 38, 0.5), _point(60, 60, 0.1), _point(100, 100, 0.0)),
    keep_all_peak_bytes=100,
    keep_all_time_ns=100,
    proven_minimum_bytes=30,
)


def test_choosing() -> None:
    assert FRONTIER.at(50).peak_bytes == 38
    assert FRONTIER.at("1GiB").overhead_fraction == 0.0
    assert FRONTIER.within(0.2).peak_bytes == 60
    assert FRONTIER.within(0).peak_bytes == 100
    with pytest.raises(InfeasibleBudget, match="smallest holds 38 B") as refused:
        FRONTIER.at(37)
    assert refused.value.minimum_bytes == 30
    for bad in (-0.1, float("nan")):
        with pytest.raises(BadInput, match="fraction"):
            FRONTIER.within(bad)
    with pytest.raises(BadInput, match="cannot be read"):
        FRONTIER.at("banana")


def test_text_json_and_png() -> None:
    text = str(FRONTIER)
    assert "minimum     30 B: proven" in text
    assert [line.split()[-1] for line in text.splitlines()[3:]] == ["UNKNOWN", "FEASIBLE", "FEASIBLE", "FEASIBLE"]
    data = json.loads(json.dumps(FRONTIER.as_data()))
    assert [p["peak_bytes"] for p in data["points"]] == [None, 38, 60, 100]
    assert "plan" not in data["points"][0]
    assert FRONTIER.png(title="a title").startswith(b"\x89PNG")


def test_built_from_outcomes_with_what_is_held_elsewhere() -> None:
    graph = chain(6)
    costs = uniform_costs(graph)
    keep_all = plan(graph, costs, planner="keep_all").require_plan()
    points = plan_curve(graph, costs, [keep_all.timeline.peak_bytes], time_limit_s=0.2)
    found = make_frontier(points, keep_all=keep_all, elsewhere_bytes=1000)
    assert found.points[0].peak_bytes == found.keep_all_peak_bytes == keep_all.timeline.peak_bytes + 1000
    assert found.points[0].overhead_fraction == 0.0


def test_empty_and_zero_frontiers_render() -> None:
    nothing = Frontier(points=(), keep_all_peak_bytes=0, keep_all_time_ns=0)
    assert "keep-all" in str(nothing)
    assert nothing.png().startswith(b"\x89PNG")
