"""When each allocation of a schedule is born and dies, and whether a layout keeps them apart.

    bytes │   ┌──── storage 2 ────┐
          │   │       ┌───────────┴──┐
          │   └───────┤  storage 5   │        a storage recomputed later is a second allocation
          └───────────┴──────────────┴──> steps

An allocation lives over the half-open range of steps [start, stop). What the caller holds (the sources, until freed and
reloaded) is outside the arena and not listed. An in-place op extends the life of the allocation it takes over.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

from memfit.core.costs import DEVICE, Costs, uniform_costs
from memfit.core.errors import BadInput
from memfit.core.graph import Graph
from memfit.core.op_forms import form_of
from memfit.core.plan import Layout
from memfit.core.schedule import Compute, Free, Reload, Schedule

SCRATCH = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetime:
    """One allocation. `storage` is SCRATCH for an op's workspace and for second copies that last one step."""

    storage: int
    start: int
    stop: int
    size_bytes: int


def lifetimes(graph: Graph, schedule: Schedule, costs: Costs | None = None) -> tuple[Lifetime, ...]:
    """The allocations of a legal schedule in the order in which they are made. `Layout.offsets` follows this order."""
    return _Walk(graph, costs or uniform_costs(graph)).run(schedule)


class _Walk:
    def __init__(self, graph: Graph, costs: Costs) -> None:
        self.graph, self.costs = graph, costs
        self.born: list[tuple[int, int, int]] = []  # storage, start, size
        self.died: dict[int, int] = {}
        self.live: dict[int, int | None] = {graph.storage_of(t): None for t in graph.sources}  # None: the caller's

    def run(self, schedule: Schedule) -> tuple[Lifetime, ...]:
        for position, step in enumerate(schedule.steps):
            if isinstance(step, Compute):
                self._compute(position, step)
            elif isinstance(step, Free) and step.level == DEVICE:
                self._die(step.storage, position)
            elif isinstance(step, Reload):
                self._bear(step.storage, position)
        end = len(schedule.steps)
        return tuple(
            Lifetime(storage=storage, start=start, stop=self.died.get(k, end), size_bytes=size)
            for k, (storage, start, size) in enumerate(self.born)
        )

    def _compute(self, position: int, step: Compute) -> None:
        form = form_of(self.graph, step.op, step.variant)
        for storage, _ in form.fresh:
            if storage in self.live:
                self._scratch(position, self.graph.storages[storage].size_bytes)
            else:
                self._bear(storage, position)
        for new, old, _ in form.takeovers:
            self._take_over(new, old, position)
        self._scratch(position, self.costs.workspace(step.op, step.variant))

    def _bear(self, storage: int, position: int) -> None:
        self.live[storage] = len(self.born)
        self.born.append((storage, position, self.graph.storages[storage].size_bytes))

    def _die(self, storage: int, position: int) -> None:
        allocation = self.live.pop(storage)
        if allocation is not None:
            self.died[allocation] = position

    def _take_over(self, new: int, old: int, position: int) -> None:
        if new in self.live:  # the value is still there: the overwritten bytes are simply let go
            self._die(old, position + 1)
        else:
            self.live[new] = self.live.pop(old)

    def _scratch(self, position: int, size_bytes: int) -> None:
        if size_bytes:
            self.died[len(self.born)] = position + 1
            self.born.append((SCRATCH, position, size_bytes))


def max_load(items: Sequence[Lifetime]) -> int:
    """The most bytes alive at once: no layout can be lower."""
    events = sorted(
        [(x.start, x.size_bytes) for x in items if x.stop > x.start] + [(x.stop, -x.size_bytes) for x in items if x.stop > x.start]
    )
    load = peak = 0
    for _, delta in events:  # at equal times the negative sizes sort first: half-open ranges do not meet
        load += delta
        peak = max(peak, load)
    return peak


def check_layout(items: Sequence[Lifetime], layout: Layout) -> None:
    """Refuse a layout in which two live allocations overlap, or one sticks out."""
    if len(layout.offsets) != len(items):
        raise BadInput(
            f"the layout places {len(layout.offsets)} allocations, the schedule makes {len(items)}: it belongs to another schedule."
        )
    for k, (item, offset) in enumerate(zip(items, layout.offsets, strict=True)):
        if offset < 0 or offset + item.size_bytes > layout.height_bytes:
            raise BadInput(
                f"allocation {k} (storage {item.storage}) lies at [{offset}, {offset + item.size_bytes}), "
                f"outside the arena of {layout.height_bytes} bytes."
            )
    solid = [k for k, x in enumerate(items) if x.size_bytes > 0 and x.stop > x.start]
    events = sorted([(items[k].start, 1, k) for k in solid] + [(items[k].stop, 0, k) for k in solid])
    active: list[tuple[int, int]] = []  # (offset, allocation) of what is alive, by address
    for _, is_start, k in events:
        entry = (layout.offsets[k], k)
        if not is_start:
            active.pop(bisect_left(active, entry))
            continue
        at = bisect_left(active, entry)
        for neighbour in active[max(at - 1, 0) : at + 1]:
            _refuse_overlap(items, layout, k, neighbour[1])
        insort(active, entry)


def _refuse_overlap(items: Sequence[Lifetime], layout: Layout, a: int, b: int) -> None:
    (start_a, start_b), (size_a, size_b) = (layout.offsets[a], layout.offsets[b]), (items[a].size_bytes, items[b].size_bytes)
    if start_a < start_b + size_b and start_b < start_a + size_a:
        raise BadInput(
            f"allocations {a} and {b} (storages {items[a].storage} and {items[b].storage}) are alive together and share addresses: "
            f"[{start_a}, {start_a + size_a}) and [{start_b}, {start_b + size_b})."
        )
