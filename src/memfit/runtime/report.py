"""What a fitted model says about itself: planned against measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from memfit.core.units import format_bytes, format_percent


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Predicted against measured, for the latest shape."""

    budget_bytes: int | None
    predicted_peak_bytes: int
    measured_peak_bytes: int | None
    keep_all_peak_bytes: int
    overhead_fraction: float
    planner: str
    num_shapes: int
    check: str
    notes: tuple[str, ...]
    arena_bytes: int | None = None  # height of the planned arena, after `use_planned_arena` and two steps

    def as_data(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}

    def __str__(self) -> str:
        measured = "not measured yet" if self.measured_peak_bytes is None else format_bytes(self.measured_peak_bytes)
        budget = "no limit" if self.budget_bytes is None else format_bytes(self.budget_bytes)
        lines = [
            f"budget     {budget}",
            f"predicted  {format_bytes(self.predicted_peak_bytes)} (without recomputation {format_bytes(self.keep_all_peak_bytes)})",
            f"measured   {measured}",
            f"recompute  {format_percent(self.overhead_fraction)} more op time, planner {self.planner}, {self.num_shapes} shape(s)",
            f"check      {self.check}",
        ]
        if self.arena_bytes is not None:
            lines.append(f"arena      {format_bytes(self.arena_bytes)} at planned offsets")
        return "\n".join([*lines, *(f"note       {n}" for n in self.notes)])
