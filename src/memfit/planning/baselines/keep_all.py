"""Keep everything: the step as written, each value freed after its last use. The fastest plan when it fits."""

from __future__ import annotations

from dataclasses import dataclass

from memfit.core.outcome import Outcome
from memfit.planning.outcome import judge_sequence
from memfit.planning.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepAll:
    name: str = "keep_all"

    def plan(self, problem: Problem) -> Outcome:
        return judge_sequence(problem, planner=self.name, sequence=problem.model.agenda)
