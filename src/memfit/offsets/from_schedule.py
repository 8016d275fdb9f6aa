"""From a schedule to addresses: the layout that goes with a plan, and the list an engine allocates from.

    graph + schedule ──lifetimes──> allocations ──solve──> Layout ──judge──> plan.layout ──addresses──> engine

Where in the flow: after planning, before execution. `lifetimes` (core) decides what is allocated and when; in-place ops have
already taken over their input's allocation there, so nothing needs to share here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from memfit.core.costs import Costs
from memfit.core.errors import BadInput
from memfit.core.graph import Graph
from memfit.core.lifetimes import Lifetime, check_layout, lifetimes, max_load
from memfit.core.packing import Buffer
from memfit.core.plan import Layout, Plan
from memfit.core.schedule import Schedule
from memfit.offsets.problem import make_problem
from memfit.offsets.solve_arena import solve

QUICK_S = 0.2
"""For the greedy orders that `memfit.plan` tries first for the layout it attaches to every plan."""
SEARCH_S = 2.0
"""For the search that follows when greedy wastes more than QUICK_GAP_FRACTION, or would not fit into the budget."""
QUICK_GAP_FRACTION = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """The index-th allocation a schedule makes: at step `start` it needs `size_bytes` at `offset`, until step `stop`."""

    index: int
    storage: int
    start: int
    stop: int
    offset: int
    size_bytes: int


def layout_plan(
    graph: Graph,
    schedule: Schedule,
    costs: Costs | None = None,
    *,
    time_limit_s: float = 10.0,
    alignment_bytes: int = 1,
    search: bool = True,
) -> Layout:
    """Addresses for every allocation of a legal schedule, as low as the time allows, judged.

    With `alignment_bytes` every address and the height are multiples of it (an engine's kernels may ask for 16 or 512).
    Without `search` only greedy orders are tried: milliseconds, and mostly within a percent of the peak.
    """
    return layout_of(lifetimes(graph, schedule, costs), time_limit_s=time_limit_s, alignment_bytes=alignment_bytes, search=search)


def layout_of(items: Sequence[Lifetime], *, time_limit_s: float = 10.0, alignment_bytes: int = 1, search: bool = True) -> Layout:
    """The layout of a list of lifetimes; `layout_plan` without the graph."""
    if alignment_bytes < 1:
        raise BadInput(f"alignment {alignment_bytes} is not a number of bytes: give 1 or more.")
    deadline = time.monotonic() + time_limit_s
    start, stop, size = np.array([(x.start, x.stop, x.size_bytes) for x in items], np.int64).reshape(-1, 3).T
    solid = np.nonzero((size > 0) & (stop > start))[0]
    padded = -(-size[solid] // alignment_bytes) * alignment_bytes  # then every end is aligned too, and addresses stay so
    problem = make_problem(start[solid], stop[solid], padded)
    solution = solve(problem, deadline=deadline, search=search)
    offsets = np.zeros(len(items), np.int64)
    offsets[solid] = solution.offsets
    reach = (offsets + size).max(initial=0)
    layout = Layout(offsets=tuple(offsets.tolist()), height_bytes=max(solution.height, -(-int(reach) // alignment_bytes) * alignment_bytes))
    check_layout(items, layout)
    return layout


def tight_layout(
    items: Sequence[Lifetime],
    *,
    alignment_bytes: int = 1,
    search_s: float = SEARCH_S,
    limit_bytes: int | None = None,
    gap_fraction: float = QUICK_GAP_FRACTION,
) -> Layout:
    """Greedy, and `search_s` of search if that wastes more than `gap_fraction` or lies above `limit_bytes`."""
    layout = layout_of(items, time_limit_s=QUICK_S, alignment_bytes=alignment_bytes, search=False)
    wasteful = layout.height_bytes > (1 + gap_fraction) * max_load(items)
    if wasteful or (limit_bytes is not None and layout.height_bytes > limit_bytes):
        better = layout_of(items, time_limit_s=search_s, alignment_bytes=alignment_bytes)
        layout = min(layout, better, key=lambda found: found.height_bytes)
    return layout


def with_layout(graph: Graph, plan: Plan, costs: Costs | None = None, *, alignment_bytes: int = 1, search_s: float = SEARCH_S) -> Plan:
    """The plan with a layout: greedy, and `search_s` of search if that wastes much or does not fit beside what the caller holds."""
    held = sum(graph.storages[s].size_bytes for s in {graph.storage_of(t) for t in graph.sources})
    limit = plan.budget.device_bytes
    layout = tight_layout(
        lifetimes(graph, plan.schedule, costs),
        alignment_bytes=alignment_bytes,
        search_s=search_s,
        limit_bytes=None if limit is None else limit - held,
    )
    return replace(plan, layout=layout)


def allocations(graph: Graph, plan: Plan, costs: Costs | None = None) -> tuple[Allocation, ...]:
    """What an engine allocates while it obeys the plan, in order, each with its address. The layout is judged once more."""
    if plan.layout is None:
        raise BadInput("the plan has no layout: make one with memfit.offsets.with_layout(graph, plan).")
    items = lifetimes(graph, plan.schedule, costs)
    check_layout(items, plan.layout)
    return tuple(
        Allocation(index=k, storage=x.storage, start=x.start, stop=x.stop, offset=at, size_bytes=x.size_bytes)
        for k, (x, at) in enumerate(zip(items, plan.layout.offsets, strict=True))
    )


def buffers_of(items: Sequence[Lifetime], *, alignment_bytes: int = 1) -> tuple[Buffer, ...]:
    """Lifetimes as buffers for `pack`, e.g. to write a schedule's allocations to a file; ids are positions."""
    return tuple(Buffer(id=str(k), start=x.start, stop=x.stop, size=x.size_bytes, alignment=alignment_bytes) for k, x in enumerate(items))
