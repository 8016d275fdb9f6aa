"""What scheduling a task graph answers: an order or a parallel schedule, judged, with bounds that say how good it is."""

from __future__ import annotations

from dataclasses import dataclass

from memfit.core.outcome import Answer
from memfit.tasks.judge import ParallelProfile, Profile, Run, SpillPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOutcome(Answer):
    """`status` is about the peak on one processor, about the makespan within the memory on several.

    `order` holds positions of tasks (by start, on several processors, with `runs` beside it). Times are in the graph's unit.
    """

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

    def require_order(self) -> tuple[int, ...]:
        """The order, or the exception that says why there is none."""
        self.require(self.lower_bound_bytes)
        return self.order
