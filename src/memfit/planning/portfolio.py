"""`planner="auto"`: the cut LP first, an answer within a second or two, then improvement until the gap is small or time is up."""

from __future__ import annotations

from dataclasses import dataclass

from memfit.core.outcome import Outcome
from memfit.planning.base import Problem
from memfit.planning.cut_planner import explore_cuts, outcome_of
from memfit.planning.search import Search


@dataclass(frozen=True, slots=True, kw_only=True)
class Portfolio:
    """`enough_points`: the gap to the proven bound, in points of the plain step's time, at which the search stops."""

    name: str = "auto"
    enough_points: float = 0.3

    def plan(self, problem: Problem) -> Outcome:
        search = Search(problem, enough_points=self.enough_points)
        explore_cuts(search, max_cuts=12)
        return outcome_of(search, self.name)
