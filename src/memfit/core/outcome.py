"""What solvers answer: a result, a proof that there is none, or neither; always with the best bound they have.

Answer  status, seconds, reason      Outcome adds a plan, Packing offsets, TaskOutcome an order, ChainPlan and StagePlan their moves
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from memfit.core.errors import InfeasibleBudget, NoPlanFound
from memfit.core.plan import Plan


class Status(StrEnum):
    OPTIMAL = "OPTIMAL"
    FEASIBLE = "FEASIBLE"
    INFEASIBLE = "INFEASIBLE"
    UNKNOWN = "UNKNOWN"

    @property
    def sentence(self) -> str:
        return {
            "OPTIMAL": "No plan inside the budget is better, and that is proven.",
            "FEASIBLE": "A plan inside the budget; the gap says how far from proven optimal it may be.",
            "INFEASIBLE": "No plan can stay inside the budget, and that is proven.",
            "UNKNOWN": "No plan was found and none was ruled out; allow more time or another planner.",
        }[self.value]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """How good a solver's result is, how long it took to find, and in a sentence what happened."""

    status: Status
    seconds: float = 0.0
    reason: str = ""

    def require(self, minimum_bytes: int | None = None) -> None:
        """Raise InfeasibleBudget where nothing can exist, NoPlanFound where nothing was found."""
        if self.status is Status.INFEASIBLE:
            raise InfeasibleBudget(self.reason, minimum_bytes=minimum_bytes)
        if self.status is Status.UNKNOWN:
            raise NoPlanFound(self.reason or self.status.sentence)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome(Answer):
    """`lower_bound_ns` bounds the time of any plan inside the budget, `lower_bound_bytes` the peak of any plan at all.

    `gap_fraction` is (time - bound) / bound for the objective planned for.
    """

    plan: Plan | None = None
    lower_bound_ns: int = 0
    lower_bound_bytes: int = 0
    gap_fraction: float | None = None

    def require_plan(self) -> Plan:
        """The plan, or the exception that says why there is none."""
        if self.plan is None:
            self.require(self.lower_bound_bytes)
            raise NoPlanFound(self.reason or Status.UNKNOWN.sentence)
        return self.plan
