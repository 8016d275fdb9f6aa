"""What a planner answers: a plan or a proof or an honest shrug, always with the best bound it has."""

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
class Outcome:
    """`lower_bound_ns` bounds the time of any plan inside the budget, `lower_bound_bytes` the peak of any plan at all.

    `gap_fraction` is (time - bound) / bound for the objective planned for; `reason` says in a sentence what happened.
    """

    status: Status
    plan: Plan | None = None
    lower_bound_ns: int = 0
    lower_bound_bytes: int = 0
    gap_fraction: float | None = None
    seconds: float = 0.0
    reason: str = ""

    def require_plan(self) -> Plan:
        """The plan, or the exception that says why there is none."""
        if self.plan is not None:
            return self.plan
        if self.status is Status.INFEASIBLE:
            raise InfeasibleBudget(self.reason, minimum_bytes=self.lower_bound_bytes)
        raise NoPlanFound(self.reason or Status.UNKNOWN.sentence)
