"""What scheduling a task graph answers: an order or a parallel schedule, judged, with bounds that say how good it is."""

from __future__ import annotations

from dataclasses import dataclass

from memfit.core.errors import InfeasibleBudget, NoPlanFound
from memfit.core.outcome import Status
from memfit.tasks.judge import ParallelProfile, Profile, Run, SpillPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOutcome:
    """`status` is about the peak on one processor, about the makespan within the memory on several.

    `order` holds positions of tasks (by start, on several processors, with `runs` beside it). Times are in the graph's unit.
    """

    status: Status
    algorithm: str
    processors: int = 1
    memory_bytes: int | None = None
    order: tuple[int, ...] = ()
    runs: tuple[Run, ...] = ()
    peak_bytes: int | None = None
    lower_bound_bytes: int = 0
    makespan: float | None = None
    makespan_lower_bound: float = 0.0
    spill: SpillPlan | None = None
    profile: Profile | ParallelProfile | None = None
    seconds: float = 0.0
    reason: str = ""

    def require_order(self) -> tuple[int, ...]:
        """The order, or the exception that says why there is none."""
        if self.status is Status.INFEASIBLE:
            raise InfeasibleBudget(self.reason, minimum_bytes=self.lower_bound_bytes)
        if self.status is Status.UNKNOWN:
            raise NoPlanFound(self.reason)
        return self.order
