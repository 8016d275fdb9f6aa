"""`planner="auto"`: try the planners that answer at once, and give the fastest plan that stays inside the budget."""

from __future__ import annotations

from dataclasses import dataclass

from memfit.core.outcome import Outcome, Status
from memfit.planning.base import Planner, Problem
from memfit.planning.drop_cheap import DropCheap
from memfit.planning.greedy import Greedy
from memfit.planning.keep_all import KeepAll
from memfit.planning.sqrt_segments import SqrtSegments


@dataclass(frozen=True, slots=True, kw_only=True)
class Portfolio:
    name: str = "auto"

    def plan(self, problem: Problem) -> Outcome:
        planners: tuple[Planner, ...] = (KeepAll(), DropCheap(), SqrtSegments(), Greedy())
        best: Outcome | None = None
        for planner in planners:
            outcome = planner.plan(problem)
            if outcome.status in (Status.OPTIMAL, Status.INFEASIBLE):
                return outcome
            if best is None or _key(outcome) < _key(best):
                best = outcome
        assert best is not None
        return best


def _key(outcome: Outcome) -> tuple[bool, int]:
    return (outcome.plan is None, outcome.plan.timeline.time_ns if outcome.plan else 0)
