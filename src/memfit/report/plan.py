"""A report of one plan: what it holds at its peak and over time, what it recomputes, against the same step without recomputation.

One aggregator; text and JSON here, PNG from `timeline.py`, HTML from `plan_page.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from memfit.core.costs import Costs
from memfit.core.errors import BadInput
from memfit.core.graph import Graph
from memfit.core.plan import Plan, Timeline
from memfit.core.schedule import Compute, Schedule
from memfit.core.simulate import simulate
from memfit.core.units import format_bytes, format_ns, format_percent
from memfit.report.estimate import Estimate, summarize
from memfit.report.timeline import Curve, Panel, timeline_png

MOST_SHOWN = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputed:
    """An op that runs more than once. `extra_time_ns` is what the further runs take."""

    name: str
    where: str
    extra_runs: int
    extra_time_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    planner: str
    budget_bytes: int | None
    at_peak: Estimate
    timeline: Timeline
    keep_all_peak_bytes: int | None
    overhead_fraction: float | None
    num_steps: int
    num_computes: int
    num_ops: int
    recomputed: tuple[Recomputed, ...]
    layout_height_bytes: int | None
    curves: tuple[Curve, ...]

    @property
    def inside(self) -> bool:
        return self.budget_bytes is None or self.timeline.peak_bytes <= self.budget_bytes

    def as_data(self) -> dict[str, Any]:
        at_peak = self.at_peak.as_data()
        return {
            "planner": self.planner,
            "budget_bytes": self.budget_bytes,
            "inside": self.inside,
            "peak_bytes": self.timeline.peak_bytes,
            "peak_at": self.at_peak.peak_at,
            "bytes_by_kind_at_peak": self.at_peak.by_kind,
            "largest": at_peak["largest"],
            "keep_all_peak_bytes": self.keep_all_peak_bytes,
            "overhead_fraction": self.overhead_fraction,
            "time_ns": self.timeline.time_ns,
            "num_steps": self.num_steps,
            "num_computes": self.num_computes,
            "num_ops": self.num_ops,
            "layout_height_bytes": self.layout_height_bytes,
            "recomputed": [
                {"name": r.name, "where": r.where, "extra_runs": r.extra_runs, "extra_time_ns": r.extra_time_ns} for r in self.recomputed
            ],
        }

    def rows(self) -> list[tuple[str, str]]:
        """The facts in a few lines, for the terminal and for the page."""
        timeline = self.timeline
        budget = "no limit" if self.budget_bytes is None else format_bytes(self.budget_bytes)
        rows = [
            ("planner", self.planner),
            ("budget", f"{budget}{'' if self.inside else ': ABOVE IT'}"),
            ("peak", f"{format_bytes(timeline.peak_bytes)} ({timeline.peak_bytes} bytes) at {self.at_peak.peak_at}"),
        ]
        if self.keep_all_peak_bytes:
            share = format_percent(timeline.peak_bytes / self.keep_all_peak_bytes)
            rows.append(("keep-all", f"{format_bytes(self.keep_all_peak_bytes)}: the plan holds {share} of it"))
        more = "" if self.overhead_fraction is None else f", {format_percent(self.overhead_fraction)} over keep-all"
        rows.append(("time", f"{format_ns(timeline.time_ns)}{more}"))
        rows.append(("steps", f"{self.num_steps}: {self.num_computes} computes of {self.num_ops} ops"))
        if self.layout_height_bytes is not None:
            rows.append(("layout", f"{format_bytes(self.layout_height_bytes)} of addresses for what the step allocates itself"))
        return rows

    def __str__(self) -> str:
        lines = [f"{name:<9}  {value}" for name, value in self.rows()]
        lines.append("at the peak:")
        lines += [f"  {kind:<10} {format_bytes(size):>12}" for kind, size in self.at_peak.by_kind.items() if size]
        lines.append("largest at the peak:")
        lines += [f"  {format_bytes(x.size_bytes):>12}  {x.kind:<10} {x.name}" for x in self.at_peak.largest]
        if self.recomputed:
            lines.append("recomputed, dearest first:")
            lines += [
                f"  {format_ns(r.extra_time_ns):>9}  {r.extra_runs} x {r.name}{', ' + r.where if r.where else ''}"
                for r in self.recomputed[:MOST_SHOWN]
            ]
        return "\n".join(lines)

    def png(self, title: str = "") -> bytes:
        """Memory over time with the budget line."""
        return timeline_png([Panel(title=title, curves=self.curves, budget_bytes=self.budget_bytes)])


def report_plan(graph: Graph, plan: Plan, costs: Costs, *, keep_all: Plan | None = None) -> PlanReport:
    """Judge the plan anew on its graph and gather what there is to say. `keep_all` is what to compare it with."""
    if plan.graph_digest not in ("", graph.digest):
        raise BadInput(f"the plan belongs to graph {plan.graph_digest[:12]}, not to {graph.digest[:12]}: give the graph it was made for.")
    timeline = simulate(graph, plan.schedule, costs)
    base = keep_all.timeline.time_ns if keep_all is not None else 0
    curves = [make_curve("planned", plan.schedule, timeline, costs)]
    if keep_all is not None:
        curves.insert(0, make_curve("keep all", keep_all.schedule, keep_all.timeline, costs))
    return PlanReport(
        planner=plan.planner,
        budget_bytes=plan.budget.device_bytes,
        at_peak=summarize(graph, plan.schedule, timeline),
        timeline=timeline,
        keep_all_peak_bytes=keep_all.timeline.peak_bytes if keep_all is not None else None,
        overhead_fraction=timeline.time_ns / base - 1 if base else None,
        num_steps=len(plan.schedule.steps),
        num_computes=len(plan.schedule.computes),
        num_ops=len(graph.ops),
        recomputed=_find_recomputed(graph, plan.schedule, costs),
        layout_height_bytes=plan.layout.height_bytes if plan.layout is not None else None,
        curves=tuple(curves),
    )


def make_curve(label: str, schedule: Schedule, timeline: Timeline, costs: Costs) -> Curve:
    """Bytes against op time so far, in milliseconds."""
    durations = [costs.time_ns(s.op, s.variant) / 1e6 if isinstance(s, Compute) else 0.0 for s in schedule.steps]
    return Curve(label=label, times=list(accumulate(durations, initial=0.0))[:-1], bytes_held=timeline.bytes_at_step)


def _find_recomputed(graph: Graph, schedule: Schedule, costs: Costs) -> tuple[Recomputed, ...]:
    computes: Sequence[Compute] = [s for s in schedule.steps if isinstance(s, Compute)]
    runs, spent = Counter(s.op for s in computes), Counter[int]()
    seen: set[int] = set()
    for step in computes:
        if step.op in seen:
            spent[step.op] += costs.time_ns(step.op, step.variant)
        seen.add(step.op)
    found = [
        Recomputed(name=graph.ops[op].name, where=graph.ops[op].where, extra_runs=count - 1, extra_time_ns=spent[op])
        for op, count in runs.items()
        if count > 1
    ]
    return tuple(sorted(found, key=lambda r: (-r.extra_time_ns, -r.extra_runs, r.name)))
