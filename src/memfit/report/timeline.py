"""Memory over the steps of one or more schedules, with the budget line, as a PNG: the picture of what memfit does.

bytes │      ╱╲  keep all
      │- - -╱- ╲- - - - - - -   budget
      │  ╱╲╱╲╱╲╱╲  planned
      └──────────────────────> time
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from memfit.core.units import format_bytes
from memfit.report.figure import choose_unit, write_png


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Bytes held at each step, drawn over `times` (op time so far)."""

    label: str
    times: Sequence[float]
    bytes_held: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    title: str
    curves: Sequence[Curve]
    budget_bytes: int | None = None


def timeline_png(panels: Sequence[Panel]) -> bytes:
    """One picture, one panel per model."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4 * len(panels), 4.0), dpi=130, layout="tight")
    for axis, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _draw(axis, panel)
    return write_png(figure)


def _draw(axis: Any, panel: Panel) -> None:
    most = max(max(c.bytes_held, default=0) for c in panel.curves)
    unit, factor = choose_unit(most)
    colours = ("#b8bec9", "#2a6fdb", "#d1495b")
    for curve, colour in zip(panel.curves, colours, strict=False):
        values = [b / factor for b in curve.bytes_held]
        axis.fill_between(curve.times, values, step="post", color=colour, alpha=0.35, linewidth=0)
        axis.step(
            curve.times, values, where="post", color=colour, linewidth=1.2, label=f"{curve.label}: {format_bytes(max(curve.bytes_held))}"
        )
    if panel.budget_bytes is not None:
        axis.axhline(
            panel.budget_bytes / factor, color="#111111", linestyle="--", linewidth=1.2, label=f"budget: {format_bytes(panel.budget_bytes)}"
        )
    axis.set_title(panel.title)
    axis.set_xlabel("op time in the step (ms)")
    axis.set_ylabel(f"memory ({unit})")
    axis.set_ylim(0, most / factor * 1.3)
    axis.legend(loc="upper left", fontsize=8, frameon=False)
