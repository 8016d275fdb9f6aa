"""Static memory by sharing tags (SOURCES A4), and two buffers for inference (B9). Both give the core's Layout.

    box of free tags          op 5 dies ──> tag 2 goes into the box
      [tag 2: 4 KiB]          op 8 needs 3 KiB ──> takes the smallest free tag that is large enough, else a new one

In-place is not decided here: a schedule from `schedules.drop_early(inplace=True)` has it already, and a take-over makes no
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
from memfit.tape.memory import FreeList

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
    """Two buffers used in turn, and one region for scratch: O(1) memory whatever the depth. For chains without gradients.

    x ─> [A] ─> [B] ─> [A] ─> [B] ─> y
    """
    items = lifetimes(graph, schedule, costs)
    turns = [k for k, item in enumerate(items) if item.storage != SCRATCH]
    _refuse_three(items, turns)
    even = max((items[k].size_bytes for k in turns[::2]), default=0)
    odd = max((items[k].size_bytes for k in turns[1::2]), default=0)
    scratch = max((item.size_bytes for item in items if item.storage == SCRATCH), default=0)
    place = {k: (0, even)[n % 2] for n, k in enumerate(turns)}
    layout = Layout(offsets=tuple(place.get(k, even + odd) for k in range(len(items))), height_bytes=even + odd + scratch)
    check_layout(items, layout)
    return layout


def _refuse_three(items: Sequence[Lifetime], turns: Sequence[int]) -> None:
    for first, third in zip(turns, turns[2:], strict=False):
        if items[first].stop > items[third].start:
            raise Unsupported(
                f"two alternating buffers serve a chain: at step {items[third].start} storage {items[first].storage} is still needed "
                f"when a third value ({items[third].storage}) is made. Use share_tags or a planned layout, which handle branches and gradients."
            )
