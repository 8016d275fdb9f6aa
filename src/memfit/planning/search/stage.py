"""A stage of `planner="auto"`: one way to better plans or bounds. `auto.py` has the table of them.

Slot(Windows(), share=0.12)      the stage, and how much of the time it gets where it applies
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from memfit.planning.search.state import Search


class Stage(Protocol):
    """`name` is how it is left out; `run` leaves what it finds in the search."""

    @property
    def name(self) -> str: ...

    def applies(self, search: Search) -> bool:
        """Whether it is worth its time as the search stands."""
        ...

    def run(self, search: Search, seconds: float) -> None: ...


class Part(Enum):
    """What a slot's share is a share of."""

    LIMIT = "the time limit"
    LEFT = "the time left"
    UNTIL = "the time limit, counted from the start"


@dataclass(frozen=True, slots=True)
class Slot:
    """A stage with its share of the time; `first_share` takes its place while no plan is known."""

    stage: Stage
    share: float = 1.0
    of: Part = Part.LIMIT
    least_s: float = 0.0
    first_share: float | None = None

    def seconds(self, search: Search) -> float:
        problem = search.problem
        share = self.share if self.first_share is None or search.best is not None else self.first_share
        if self.of is Part.LEFT:
            return max(share * problem.seconds_left, self.least_s)
        spent = problem.seconds if self.of is Part.UNTIL else 0.0
        return max(share * problem.time_limit_s - spent, self.least_s)
