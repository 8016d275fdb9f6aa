"""What every planner takes and gives: one verb, interchangeable nouns.

    problem = Problem(graph=..., costs=..., budget=Budget.parse("6GiB"))
    outcome = SqrtSegments().plan(problem)

A planner is a frozen object: its settings are fields, its data comes in the problem.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from memfit.core.budget import Budget
from memfit.core.costs import Costs
from memfit.core.graph import Graph
from memfit.core.outcome import Outcome
from memfit.core.units import MAX_SUM
from memfit.planning.model.reduce import Model, build_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a planner is. `best_time_ns` is None until a plan inside the budget is known."""

    seconds: float
    best_time_ns: int | None
    lower_bound_ns: int
    base_time_ns: int
    note: str = ""

    @property
    def gap_fraction(self) -> float | None:
        if self.best_time_ns is None or self.lower_bound_ns <= 0:
            return None
        return (self.best_time_ns - self.lower_bound_ns) / self.lower_bound_ns


Listener = Callable[[Progress], None]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What to plan. The model is built once and shared by all planners that look at this problem; `built` is one known already."""

    graph: Graph
    costs: Costs
    budget: Budget
    time_limit_s: float = 30.0
    progress: Listener | None = None
    started_s: float = field(default_factory=time.perf_counter)
    built: Model | None = field(default=None, repr=False)

    @cached_property
    def model(self) -> Model:
        known = self.built
        same = known is not None and known.graph is self.graph and known.costs is self.costs
        return known if known is not None and same else build_model(self.graph, self.costs)

    @property
    def limit_bytes(self) -> int:
        """The device budget as a number; no limit is a number nothing reaches."""
        return MAX_SUM if self.budget.device_bytes is None else min(self.budget.device_bytes, MAX_SUM)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started_s

    @property
    def seconds_left(self) -> float:
        return self.time_limit_s - self.seconds

    def tell(self, best_time_ns: int | None, lower_bound_ns: int, note: str = "") -> None:
        if self.progress is not None:
            self.progress(
                Progress(
                    seconds=self.seconds,
                    best_time_ns=best_time_ns,
                    lower_bound_ns=lower_bound_ns,
                    base_time_ns=self.model.base_time_ns,
                    note=note,
                )
            )


class Planner(Protocol):
    """`name` is how it is selected; `plan` answers with an outcome whose plan has been judged (see `outcome.py`)."""

    @property
    def name(self) -> str: ...

    def plan(self, problem: Problem) -> Outcome: ...
