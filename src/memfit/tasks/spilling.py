"""Short of memory: what to write out and read back so that a given order runs in M bytes (MinIO).

    order      a  b  c  d  e          M = 10
    memory     3  7  9 [12]           evict from the item whose next use is furthest: 2 bytes of it go out ...
                         e reads it   ... and come back before its next reader runs

For a fixed order and files that can be cut, evicting from the furthest next use writes the least (Belady's argument).
With `divisible=False` whole items move: then it is a heuristic, and what an engine like Dask can do. Choosing the order
too is NP-hard: `least_io` tries several and keeps the best. What is written once stays on disk: a second eviction is free.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from memfit.core.errors import InfeasibleBudget
from memfit.core.units import format_bytes
from memfit.tasks.graph import Ints, TaskGraph
from memfit.tasks.judge import SpillPlan, Transfer

_END = 1 << 60


def least_io(graph: TaskGraph, orders: Iterable[Ints | Sequence[int]], memory_bytes: int, *, divisible: bool = True) -> SpillPlan:
    """The plan of the order that writes least."""
    plans = [spill_plan(graph, order, memory_bytes, divisible=divisible) for order in orders]
    return min(plans, key=lambda p: (p.written_bytes, p.read_bytes))


def spill_plan(graph: TaskGraph, order: Ints | Sequence[int], memory_bytes: int, *, divisible: bool = True) -> SpillPlan:
    """Raises InfeasibleBudget when some task alone needs more than `memory_bytes`: no spilling helps then."""
    need = graph.need_bytes
    if graph.num_tasks and int(need.max()) > memory_bytes:
        task = int(need.argmax())
        raise InfeasibleBudget(
            f"{format_bytes(memory_bytes)} is below the {format_bytes(int(need[task]))} ({int(need[task])} bytes) that task "
            f"{graph.names[task]!r} needs for its inputs, working memory and output: spilling cannot help. Give it at least that.",
            minimum_bytes=int(need[task]),
        )
    return _Walk(graph, [int(t) for t in order], memory_bytes, divisible).run()


class _Walk:
    def __init__(self, graph: TaskGraph, order: list[int], limit: int, divisible: bool) -> None:
        self.graph, self.order, self.limit, self.divisible = graph, order, limit, divisible
        step_of = {task: k for k, task in enumerate(order)}
        self.uses = [sorted((step_of[r] for r in graph.readers.of(k)), reverse=True) for k in range(len(graph.item_bytes))]
        for item in range(len(self.uses)):
            if graph.item_kept[item]:
                self.uses[item].insert(0, _END)
        self.size = graph.item_bytes.tolist()
        self.inside = [0] * len(self.size)  # bytes of each item now in memory
        self.on_disk = [0] * len(self.size)  # bytes that have a copy on disk already
        self.held = self.peak = self.written = self.read = 0
        self.queue: list[tuple[int, int]] = []  # (-next use, item) of what may be evicted; stale entries are skipped
        self.transfers: list[Transfer] = []

    def run(self) -> SpillPlan:
        for item, producer in enumerate(self.graph.item_producer.tolist()):
            if producer < 0:
                self._enter(item, 0, set())
        for step, task in enumerate(self.order):
            self._step(step, task)
        return SpillPlan(
            order=tuple(self.order), transfers=tuple(self.transfers),
            written_bytes=self.written, read_bytes=self.read, peak_bytes=self.peak,
        )  # fmt: skip

    def _step(self, step: int, task: int) -> None:
        reads, makes = self.graph.reads.of(task), self.graph.makes.of(task)
        busy = set(reads)
        for item in reads:
            missing = self.size[item] - self.inside[item]
            if missing:
                self._make_room(missing, step, busy)
                self._move(item, missing, step, out=False)
        working = int(self.graph.memory_bytes[task])
        self._make_room(working + sum(self.size[k] for k in makes), step, busy)
        for item in makes:
            self.inside[item] = self.size[item]
            self.held += self.size[item]
        self.peak = max(self.peak, self.held + working)
        for item in (*reads, *makes):
            while self.uses[item] and self.uses[item][-1] <= step:
                self.uses[item].pop()
            if self.uses[item]:
                heapq.heappush(self.queue, (-self.uses[item][-1], item))
            else:
                self.held -= self.inside[item]
                self.inside[item] = 0

    def _enter(self, item: int, step: int, busy: set[int]) -> None:
        self._make_room(self.size[item], step, busy)
        self.inside[item] = self.size[item]
        self.held += self.size[item]
        self.peak = max(self.peak, self.held)
        if self.uses[item]:
            heapq.heappush(self.queue, (-self.uses[item][-1], item))

    def _make_room(self, wanted: int, step: int, busy: set[int]) -> None:
        aside = []
        while self.held + wanted > self.limit:
            entry = heapq.heappop(self.queue)
            use, item = -entry[0], entry[1]
            if not self.inside[item] or not self.uses[item] or self.uses[item][-1] != use:
                continue
            if item in busy:
                aside.append(entry)
                continue
            excess = self.held + wanted - self.limit
            self._move(item, min(excess, self.inside[item]) if self.divisible else self.inside[item], step, out=True)
            if self.inside[item]:
                heapq.heappush(self.queue, entry)
        for entry in aside:
            heapq.heappush(self.queue, entry)

    def _move(self, item: int, size: int, step: int, *, out: bool) -> None:
        self.transfers.append(Transfer(step, item, size, out))
        self.inside[item] += -size if out else size
        self.held += -size if out else size
        if out:
            fresh = max(0, self.size[item] - self.inside[item] - self.on_disk[item])
            self.on_disk[item] += fresh
            self.written += fresh
        else:
            self.read += size
            self.peak = max(self.peak, self.held)
