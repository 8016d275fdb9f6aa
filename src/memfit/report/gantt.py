"""A Gantt chart and memory over time in one PNG, on one time axis.

    P0 |▇▇a▇▇|▇c▇|▇▇d▇▇|
    P1 |▇b▇|    |▇▇e▇▇▇▇|
       ─────────────────────> time
    memory  ▁▃▅▇▇▅▃▂    - - - bound

Takes plain values, not a planner's types: any schedule can be drawn.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from memfit.core.units import format_bytes
from memfit.report.figure import write_png

_MOST_BARS = 4_000


@dataclass(frozen=True, slots=True)
class Bar:
    """One task under way. `processors` is how many it takes: more than one is drawn over several lanes, less as a thin bar."""

    label: str
    start: float
    stop: float
    processors: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Gantt:
    """`bytes_held[k]` from `times[k]` on; `limit_bytes` and `lower_bound_bytes` are drawn as lines when given."""

    bars: Sequence[Bar]
    processors: int
    times: Sequence[float]
    bytes_held: Sequence[int]
    makespan: float
    limit_bytes: int | None = None
    lower_bound_bytes: int | None = None
    title: str = ""


def gantt_png(chart: Gantt) -> bytes:
    """The picture as PNG bytes."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    figure = Figure(figsize=(11, 2.6 + 0.35 * min(chart.processors, 12)), dpi=130, layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[1 + 0.25 * min(chart.processors, 12), 2])
    _draw_bars(top, chart)
    times, held = [*chart.times, chart.makespan], [*chart.bytes_held, chart.bytes_held[-1] if chart.bytes_held else 0]
    bottom.step(times, held, where="post", color="#1b6ca8")
    bottom.fill_between(times, held, step="post", alpha=0.25, color="#1b6ca8")
    if chart.limit_bytes is not None:
        bottom.axhline(chart.limit_bytes, color="#b3261e", linestyle="--", label=f"memory {format_bytes(chart.limit_bytes)}")
    if chart.lower_bound_bytes is not None:
        bottom.axhline(
            chart.lower_bound_bytes, color="#555555", linestyle=":", label=f"lower bound {format_bytes(chart.lower_bound_bytes)}"
        )
    if chart.limit_bytes is not None or chart.lower_bound_bytes is not None:
        bottom.legend(loc="lower right", fontsize=8)
    bottom.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_bytes(int(value))))
    bottom.set_ylim(bottom=0)
    bottom.set_xlim(0, max(chart.makespan, 1e-9))
    bottom.set_xlabel("time")
    bottom.set_ylabel("memory held")
    figure.suptitle(chart.title, fontsize=10)
    return write_png(figure)


def _draw_bars(axes, chart: Gantt) -> None:  # type: ignore[no-untyped-def]
    colours = ("#4878a8", "#e0a030", "#58a068", "#c06058", "#8868a8", "#708090")
    lanes = _lanes(chart)
    labelled = len(chart.bars) <= 120
    for k, (bar, (lane, height)) in enumerate(zip(chart.bars[:_MOST_BARS], lanes, strict=False)):
        axes.barh(
            lane + height / 2, bar.stop - bar.start, left=bar.start, height=height * 0.9, color=colours[k % len(colours)],
            edgecolor="white" if labelled else "none", linewidth=0.5,
        )  # fmt: skip
        if labelled and bar.stop - bar.start > 0.015 * chart.makespan:
            axes.text((bar.start + bar.stop) / 2, lane + height / 2, bar.label[:12], ha="center", va="center", fontsize=6, clip_on=True)
    axes.set_ylim(chart.processors, 0)
    axes.set_yticks(range(chart.processors + 1) if chart.processors <= 12 else [0, chart.processors])
    axes.set_ylabel("processor")
    if len(chart.bars) > _MOST_BARS:
        axes.set_title(f"first {_MOST_BARS} of {len(chart.bars)} tasks", fontsize=8)


def _lanes(chart: Gantt) -> list[tuple[float, float]]:
    """(first lane, lanes) of every bar: the lowest free processor for whole ones, stacked for shares."""
    found: list[tuple[float, float]] = []
    if any(bar.processors != 1.0 for bar in chart.bars):
        running: list[tuple[float, float, float]] = []
        for bar in chart.bars:
            running = [r for r in running if r[0] > bar.start]
            at = 0.0
            for _, low, high in sorted(running, key=lambda r: r[1]):
                if low - at >= bar.processors - 1e-9:
                    break
                at = max(at, high)
            running.append((bar.stop, at, at + bar.processors))
            found.append((at, bar.processors))
        return found
    free = list(range(chart.processors))
    busy: list[tuple[float, int]] = []
    for bar in chart.bars:
        while busy and busy[0][0] <= bar.start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lane = heapq.heappop(free) if free else chart.processors - 1
        heapq.heappush(busy, (bar.stop, lane))
        found.append((float(lane), 1.0))
    return found
