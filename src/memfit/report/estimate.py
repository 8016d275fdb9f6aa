"""Where a step's memory goes at its peak: by kind, by storage, by op. One aggregator; text and JSON from the same values."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from memfit.core.graph import Graph, Kind
from memfit.core.lifetimes import SCRATCH, lifetimes
from memfit.core.plan import Timeline
from memfit.core.schedule import Compute, Schedule
from memfit.core.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Large:
    """One of the largest storages at the peak. `where` is the op that made it."""

    name: str
    kind: str
    size_bytes: int
    where: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Will it fit? `smallest_bytes` is a budget memfit has a plan for, `proven_minimum_bytes` one below which the eager engine has none."""

    peak_bytes: int
    by_kind: dict[str, int]
    peak_at: str
    largest: tuple[Large, ...]
    num_ops: int
    smallest_bytes: int | None = None
    smallest_overhead_fraction: float | None = None
    proven_minimum_bytes: int = 0
    device: str = ""
    device_bytes: int | None = None

    @property
    def verdict(self) -> str:
        """FITS, FITS WITH MEMFIT or DOES NOT FIT on the named device; empty without one."""
        if self.device_bytes is None:
            return ""
        if self.peak_bytes <= self.device_bytes:
            return "FITS"
        if self.smallest_bytes is not None and self.smallest_bytes <= self.device_bytes:
            return "FITS WITH MEMFIT"
        return "DOES NOT FIT"

    def as_data(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict}

    def __str__(self) -> str:
        lines = [f"peak       {format_bytes(self.peak_bytes)} ({self.peak_bytes} bytes) at {self.peak_at}"]
        lines += [f"  {kind:<10} {format_bytes(size):>12}" for kind, size in self.by_kind.items() if size]
        if self.smallest_bytes is not None:
            extra = "" if self.smallest_overhead_fraction is None else f" at {100 * self.smallest_overhead_fraction:.0f} % more op time"
            lines.append(f"smallest   {format_bytes(self.smallest_bytes)}{extra}: a budget memfit has a plan for")
        lines.append(f"minimum    {format_bytes(self.proven_minimum_bytes)}: proven for the forms of the eager engine")
        if self.device_bytes is not None:
            lines.append(f"verdict    {self.verdict} in {format_bytes(self.device_bytes)} ({self.device})")
        lines.append("largest at the peak:")
        lines += [
            f"  {format_bytes(x.size_bytes):>12}  {x.kind:<10} {x.name}{'  made at ' + x.where if x.where else ''}" for x in self.largest
        ]
        return "\n".join(lines)


def summarize(graph: Graph, schedule: Schedule, timeline: Timeline, *, num_largest: int = 10) -> Estimate:
    """What the schedule holds at its peak."""
    step = timeline.peak_step
    by_kind = {str(k): row[step] for k, row in zip(timeline.kinds, timeline.bytes_by_kind, strict=True)} if step >= 0 else {}
    return Estimate(
        peak_bytes=timeline.peak_bytes,
        by_kind=by_kind,
        peak_at=describe_step(graph, schedule, step),
        largest=_largest(graph, schedule, step, num_largest),
        num_ops=len(graph.ops),
    )


def describe_step(graph: Graph, schedule: Schedule, step: int) -> str:
    """A step in words: op number, name, module and line."""
    if step < 0:
        return "the start of the step"
    what = schedule.steps[step]
    if not isinstance(what, Compute):
        return f"step {step}"
    op = graph.ops[what.op]
    return f"op {op.id} ({op.name}{', ' + op.where if op.where else ''})"


def _largest(graph: Graph, schedule: Schedule, step: int, count: int) -> tuple[Large, ...]:
    alive = {x.storage for x in lifetimes(graph, schedule) if x.start <= step < x.stop and x.storage != SCRATCH}
    alive |= {graph.storage_of(t) for t in graph.sources}
    maker = {graph.storage_of(t): op for op in reversed(graph.ops) for t in op.outputs}
    ordered = sorted(alive, key=lambda s: -graph.storages[s].size_bytes)[:count]
    return tuple(
        Large(
            name=graph.storages[s].name or f"storage {s}",
            kind=str(Kind(graph.storages[s].kind)),
            size_bytes=graph.storages[s].size_bytes,
            where=f"op {maker[s].id} ({maker[s].name}{', ' + maker[s].where if maker[s].where else ''})" if s in maker else "",
        )
        for s in ordered
    )
