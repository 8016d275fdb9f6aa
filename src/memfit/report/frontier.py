"""Memory against time, to look at and choose from: as values, text, JSON and PNG.

time │ x
     │   x  x
     │         x     x  x   keep all
     └──────────────────────> memory
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from memfit.core.errors import BadInput, InfeasibleBudget
from memfit.core.outcome import Outcome, Status
from memfit.core.plan import Plan
from memfit.core.units import format_bytes, format_percent, parse_bytes
from memfit.report.figure import choose_unit, open_frame, write_png


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierPoint:
    """The best plan known inside one budget; no plan and a status of INFEASIBLE or UNKNOWN where there is none."""

    budget_bytes: int
    status: Status
    peak_bytes: int | None = None
    time_ns: int | None = None
    overhead_fraction: float | None = None
    lower_bound_ns: int = 0
    gap_fraction: float | None = None
    plan: Plan | None = field(default=None, repr=False)

    def as_data(self) -> dict[str, Any]:
        shown = {name: getattr(self, name) for name in self.__slots__ if name != "plan"}
        return shown | {"status": str(self.status)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontier:
    """Points by rising budget. More budget is never slower, less budget never holds more."""

    points: tuple[FrontierPoint, ...]
    keep_all_peak_bytes: int
    keep_all_time_ns: int
    proven_minimum_bytes: int = 0
    device: str = ""

    def at(self, budget: int | str) -> FrontierPoint:
        """The fastest point that fits into `budget`."""
        limit = parse_bytes(budget, what="budget")
        fitting = [p for p in self.points if p.peak_bytes is not None and p.peak_bytes <= limit]
        if not fitting:
            least = min((p.peak_bytes for p in self.points if p.peak_bytes is not None), default=self.proven_minimum_bytes)
            raise InfeasibleBudget(
                f"no point of the frontier fits into {format_bytes(limit)}: the smallest holds {format_bytes(least)}, and less than "
                f"{format_bytes(self.proven_minimum_bytes)} is proven impossible. Try a larger budget or more points.",
                minimum_bytes=self.proven_minimum_bytes,
            )
        return min(fitting, key=lambda p: (p.time_ns or 0, p.peak_bytes or 0))

    def within(self, overhead_fraction: float) -> FrontierPoint:
        """The smallest point that costs at most this much more op time than keeping everything (0.1 is ten percent)."""
        if not overhead_fraction >= 0:
            raise BadInput(f"an overhead of {overhead_fraction} is not a fraction from 0 up, such as 0.1.")
        fitting = [p for p in self.points if p.overhead_fraction is not None and p.overhead_fraction <= overhead_fraction]
        if not fitting:
            raise BadInput(f"no point costs {format_percent(overhead_fraction)} or less: draw more points, up to the keep-all peak.")
        return min(fitting, key=lambda p: p.peak_bytes or 0)

    def as_data(self) -> dict[str, Any]:
        return {
            "format": "memfit.frontier",
            "version": 1,
            "device": self.device,
            "keep_all_peak_bytes": self.keep_all_peak_bytes,
            "keep_all_time_ns": self.keep_all_time_ns,
            "proven_minimum_bytes": self.proven_minimum_bytes,
            "points": [point.as_data() for point in self.points],
        }

    def __str__(self) -> str:
        rows = [("budget", "peak", "of keep-all", "more op time", "gap", "status"), *map(self._row, self.points)]
        widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
        lines = ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
        keep = f"keep-all    {format_bytes(self.keep_all_peak_bytes)}"
        return "\n".join([keep, f"minimum     {format_bytes(self.proven_minimum_bytes)}: proven for the step as it is traced", *lines])

    def _row(self, point: FrontierPoint) -> tuple[str, ...]:
        if point.peak_bytes is None or point.overhead_fraction is None:
            return (format_bytes(point.budget_bytes), "-", "-", "-", "-", str(point.status))
        share = format_percent(point.peak_bytes / self.keep_all_peak_bytes) if self.keep_all_peak_bytes else "-"
        gap = "-" if point.gap_fraction is None else format_percent(point.gap_fraction)
        peak = format_bytes(point.peak_bytes)
        return (format_bytes(point.budget_bytes), peak, share, format_percent(point.overhead_fraction), gap, str(point.status))

    def png(self, title: str = "") -> bytes:
        """The curve as a PNG file's bytes."""
        return frontier_png(self, title=title)


def make_frontier(outcomes: Sequence[tuple[int, Outcome]], *, keep_all: Plan, device: str = "", elsewhere_bytes: int = 0) -> Frontier:
    """The value from (budget, outcome) pairs. What the process holds outside the step is added to budgets and peaks alike."""
    base = keep_all.timeline.time_ns
    return Frontier(
        points=tuple(_point(limit, outcome, base, elsewhere_bytes) for limit, outcome in outcomes),
        keep_all_peak_bytes=keep_all.timeline.peak_bytes + elsewhere_bytes,
        keep_all_time_ns=base,
        proven_minimum_bytes=max((outcome.lower_bound_bytes for _, outcome in outcomes), default=0) + elsewhere_bytes,
        device=device,
    )


def _point(limit: int, outcome: Outcome, base_ns: int, elsewhere_bytes: int) -> FrontierPoint:
    timeline = outcome.plan.timeline if outcome.plan is not None else None
    return FrontierPoint(
        budget_bytes=limit + elsewhere_bytes,
        status=outcome.status,
        peak_bytes=timeline.peak_bytes + elsewhere_bytes if timeline else None,
        time_ns=timeline.time_ns if timeline else None,
        overhead_fraction=(timeline.time_ns / base_ns - 1 if base_ns else 0.0) if timeline else None,
        lower_bound_ns=outcome.lower_bound_ns,
        gap_fraction=outcome.gap_fraction if timeline else None,
        plan=outcome.plan,
    )


def frontier_png(frontier: Frontier, *, title: str = "") -> bytes:
    """Overhead over memory, with the proven bound beneath and the region below the proven minimum shaded."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.4), dpi=150, layout="constrained")
    axes = figure.subplots()
    unit, factor = choose_unit(frontier.keep_all_peak_bytes)
    _draw_curve(axes, frontier, factor)
    minimum = frontier.proven_minimum_bytes / factor
    axes.axvspan(0, minimum, color="#d1495b", alpha=0.12, linewidth=0, label=f"below {minimum:.2f} {unit}: proven impossible")
    axes.set_xlim(0, 1.04 * max(frontier.keep_all_peak_bytes, 1) / factor)
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    axes.set(xlabel=f"peak memory of the step ({unit})", ylabel="more op time than keep-all (%)", title=title)
    axes.legend(loc="upper right", fontsize=8, frameon=False)
    axes.grid(visible=True, alpha=0.3)
    open_frame(axes)
    return write_png(figure)


def _draw_curve(axes: Any, frontier: Frontier, factor: int) -> None:
    solved = [p for p in frontier.points if p.peak_bytes is not None and p.overhead_fraction is not None]
    base = max(frontier.keep_all_time_ns, 1)
    xs = [(p.peak_bytes or 0) / factor for p in solved]
    axes.plot(
        xs, [100 * (p.overhead_fraction or 0.0) for p in solved],
        color="#2a6fdb", marker="o", markersize=5, linewidth=1.5, drawstyle="steps-post", label="planned",
    )  # fmt: skip
    bounds = [max(0.0, 100 * (p.lower_bound_ns / base - 1)) for p in solved]
    axes.plot(
        [p.budget_bytes / factor for p in solved],
        bounds,
        color="#3f8f7f",
        linestyle="--",
        linewidth=1.0,
        drawstyle="steps-pre",
        label="proven bound",
    )
    keep = frontier.keep_all_peak_bytes / factor
    axes.plot(
        [keep],
        [0.0],
        color="#111111",
        marker="*",
        markersize=11,
        linestyle="none",
        label=f"keep-all: {format_bytes(frontier.keep_all_peak_bytes)}",
    )
