"""A plan: a schedule, where its buffers go, and how the judge saw it run."""

from __future__ import annotations

from dataclasses import dataclass, field

from memfit.core.budget import Budget
from memfit.core.graph import Kind
from memfit.core.schedule import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What the judge saw. `bytes_at_step[i]` is what the device holds *during* step i, workspace included.

    `peak_step` is -1 when nothing later exceeds what the sources hold before the first step.
    `time_ns` overlaps copies with compute; `serial_time_ns` adds them up, as the checkpointing literature does.
    `bytes_by_kind` has one row per kind of `kinds`, workspaces counting as temporary. `level_peak_bytes[k]` is the peak
    of level k (0 is the device).
    """

    bytes_at_step: tuple[int, ...]
    peak_bytes: int
    peak_step: int
    time_ns: int
    serial_time_ns: int
    compute_time_ns: int
    kinds: tuple[Kind, ...]
    bytes_by_kind: tuple[tuple[int, ...], ...]
    level_peak_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """`offsets[k]` is the address of the k-th allocation of the schedule, in the order of `core.lifetimes.lifetimes`."""

    offsets: tuple[int, ...]
    height_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    schedule: Schedule
    timeline: Timeline
    planner: str
    graph_digest: str
    budget: Budget = field(default_factory=Budget)
    layout: Layout | None = None
