"""Static memory by sharing tags (SOURCES A4), and two buffers for inference (B9). Both give the core's Layout.

    box of free tags          op 5 dies ──> tag 2 goes into the box
      [tag 2: 4 KiB]          op 8 needs 3 KiB ──> takes the smallest free tag that is large enough, else a new one

In-place is not decided here: a schedule from `plain_schedules.drop_early(inplace=True)` has it already, and a take-over makes no
allocation. A tag is a fixed region of the arena, so the result is a Layout like any other, and the layout planners can be
compared with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from memfit.core.costs import Costs
from memfit.core.errors import Unsupported
from memfit.core.graph import Graph
from memfit.core.lifetimes import SCRATCH, Lifetime, check_layout, lifetimes
from memfit.core.plan import Layout
from memfit.core.schedule import Schedule
from memfit.tape.memory.memories import FreeList

_SLACKS = (1.0, 2.0, 4.0, 16.0)


def share_tags(graph: Graph, schedule: Schedule, costs: Costs) -> Layout:
    """Every allocation gets a tag. How badly a tag may fit is tried several ways: planning ahead costs nothing at run time."""
    items = lifetimes(graph, schedule, costs)
    layout = min((_share(items, slack) for slack in _SLACKS), key=lambda layout: layout.height_bytes)
    check_layout(items, layout)
    return layout


def _share(items: Sequence[Lifetime], slack: float) -> Layout:
    """Walk the allocations once; a tag's address is where the tags before it end."""
    box = FreeList(slack, grow=True)
    tag_of = [0] * len(items)
    ends: list[tuple[int, int]] = []  # (stop, allocation) of what is alive, soonest first
    for k, item in enumerate(items):
        while ends and ends[0][0] <= item.start:
            box.give_back(tag_of[heappop(ends)[1]])
        tag_of[k] = box.take(item.size_bytes)[0]
        heappush(ends, (item.stop, k))
    starts = [0]
    for size in box.sizes:
        starts.append(starts[-1] + size)
    return Layout(offsets=tuple(starts[tag] for tag in tag_of), height_bytes=starts[-1])


def two_buffers(graph: Graph, schedule: Schedule, costs: Costs) -> Layout:
    """Two buffers used in turn, and one region for scratch: O(1) memory whatever the depth. For nets without gradients.

        x ─> [A] ─> [B] ─> [A] ─> [B] ─> y          a residual block works in B and adds into A

    Every value goes to the buffer that is free; a net that needs three values at once is refused.
    """
    items = lifetimes(graph, schedule, costs)
    until, sizes, buffer_of = [0, 0], [0, 0], {}
    for k, item in enumerate(items):
        if item.storage == SCRATCH:
            continue
        free = min((0, 1), key=lambda b: until[b])
        if until[free] > item.start:
            raise Unsupported(
                f"two buffers do not suffice: at step {item.start} both hold values still needed when a third (storage {item.storage}) is "
                "made. Use share_tags or a planned layout, which handle branches and gradients."
            )
        buffer_of[k], until[free], sizes[free] = free, item.stop, max(sizes[free], item.size_bytes)
    scratch = max((item.size_bytes for item in items if item.storage == SCRATCH), default=0)
    starts = (0, sizes[0], sum(sizes))
    layout = Layout(offsets=tuple(starts[buffer_of.get(k, 2)] for k in range(len(items))), height_bytes=sum(sizes) + scratch)
    check_layout(items, layout)
    return layout
