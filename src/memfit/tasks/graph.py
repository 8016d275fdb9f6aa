"""A task graph: tasks that take time and working memory, and the items they make and read.

    load ──item 0──> split ──item 1──> left  ──item 3──┐        an item is bytes that live from the start of
                       │                               ▼        its producer to the end of its last reader
                       └────item 2──> right ──item 4──> join ──item 5 (no reader: stays to the end)

Running task i holds everything alive, plus `memory_bytes[i]`, plus the items it makes. In the plain model each task makes
one item (its output) that all successors read; an edge with bytes of its own is an item with a single reader, which is
the model of the papers on out-trees and series-parallel graphs. Every algorithm of this room starts from here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from memfit.core.errors import BadInput
from memfit.jit.kernel import kernel_above

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
TaskId = str | int
MAX_TOTAL_BYTES = 2**61
MAX_TOTAL_TIME = 1e150  # products of times stay finite
COMPILE_FROM = 4_000  # tasks; below, importing numba and loading a kernel takes longer than plain Python does


class Links(NamedTuple):
    """For each row the ids linked to it: `ids[ptr[row]:ptr[row + 1]]`."""

    ptr: Ints
    ids: Ints

    def of(self, row: int) -> list[int]:
        found: list[int] = self.ids[self.ptr[row] : self.ptr[row + 1]].tolist()
        return found

    @property
    def counts(self) -> Ints:
        return np.diff(self.ptr)


def link(rows: Ints, ids: Ints, num_rows: int) -> Links:
    """Links from pairs, in the order given within each row."""
    ptr = np.zeros(num_rows + 1, np.int64)
    np.cumsum(np.bincount(rows, minlength=num_rows), out=ptr[1:])
    return Links(ptr, ids[np.argsort(rows, kind="stable")])


@dataclass(frozen=True, kw_only=True, eq=False)
class TaskGraph:
    """Tasks are positions; `names[i]` is what the caller calls task i. Times are in the caller's unit.

    `item_producer[k]` is -1 for an item that is there from the start; `item_kept[k]` says that it stays to the end.
    """

    names: Sequence[TaskId]
    memory_bytes: Ints
    time: Floats
    item_bytes: Ints
    item_producer: Ints
    item_kept: Bools
    readers: Links

    def __post_init__(self) -> None:
        for label, values in (("memory_bytes", self.memory_bytes), ("output_bytes", self.item_bytes), ("time", self.time)):
            if len(values) and not np.all(np.isfinite(values)):
                raise BadInput(f"a task has a {label} that is not a finite number.")
            if len(values) and values.min() < 0:
                raise BadInput(f"a task has {label} {values.min()}: it is at least 0.")
        total = int(self.memory_bytes.astype(object).sum() + self.item_bytes.astype(object).sum()) if len(self.time) < 10_000 else 0
        about = float(self.item_bytes.sum(dtype=np.float64)) + float(self.memory_bytes.sum(dtype=np.float64))
        if total > MAX_TOTAL_BYTES or about > MAX_TOTAL_BYTES:
            raise BadInput("all outputs and working memories together exceed 2**61 bytes: check the unit of the sizes.")
        if len(self.time) and len(self.time) * float(self.time.max()) > MAX_TOTAL_TIME:
            raise BadInput(
                f"a task takes {self.time.max():g}: the times of all tasks add up to more than {MAX_TOTAL_TIME:g}; use a larger unit."
            )
        if len(self.topological_order) != self.num_tasks:
            stuck = self._in_cycle()
            raise BadInput(f"the graph has a cycle through task {stuck!r}: a task cannot wait for itself; remove one of its edges.")

    @property
    def num_tasks(self) -> int:
        return len(self.memory_bytes)

    @cached_property
    def makes(self) -> Links:
        """Task -> items it makes."""
        made = np.flatnonzero(self.item_producer >= 0)
        return link(self.item_producer[made], made, self.num_tasks)

    @cached_property
    def reads(self) -> Links:
        """Task -> items it reads."""
        items = np.repeat(np.arange(len(self.item_bytes)), self.readers.counts)
        return link(self.readers.ids, items, self.num_tasks)

    @cached_property
    def edges(self) -> Ints:
        """Distinct (from, to) pairs, sorted."""
        source = np.repeat(self.item_producer, self.readers.counts)
        pairs = np.stack([source, self.readers.ids], axis=1)[source >= 0]
        if len(np.unique(self.item_producer)) == len(self.item_producer):
            return pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]
        return np.unique(pairs, axis=0)

    @cached_property
    def successors(self) -> Links:
        return link(self.edges[:, 0], self.edges[:, 1], self.num_tasks)

    @cached_property
    def predecessors(self) -> Links:
        return link(self.edges[:, 1], self.edges[:, 0], self.num_tasks)

    @cached_property
    def output_bytes(self) -> Ints:
        """All bytes each task makes."""
        total = np.zeros(self.num_tasks, np.int64)
        made = self.item_producer >= 0
        np.add.at(total, self.item_producer[made], self.item_bytes[made])
        return total

    @cached_property
    def need_bytes(self) -> Ints:
        """Inputs, working memory and outputs of each task: the least memory in which it can run."""
        inputs = np.zeros(self.num_tasks, np.int64)
        np.add.at(inputs, self.readers.ids, np.repeat(self.item_bytes, self.readers.counts))
        return inputs + self.memory_bytes + self.output_bytes

    @cached_property
    def initial_bytes(self) -> int:
        return int(self.item_bytes[self.item_producer < 0].sum())

    @cached_property
    def final_bytes(self) -> int:
        return int(self.item_bytes[self.item_kept].sum())

    @cached_property
    def topological_order(self) -> Ints:
        """Shorter than the number of tasks when there is a cycle."""
        order = np.empty(self.num_tasks, np.int64)
        found = _kahn(self.successors.ptr, self.successors.ids, self.predecessors.counts.copy(), order)
        return order[:found]

    def _in_cycle(self) -> TaskId:
        ordered = np.zeros(self.num_tasks, np.bool_)
        ordered[self.topological_order] = True
        task = int(np.flatnonzero(~ordered)[0])
        seen: set[int] = set()
        while task not in seen:  # walking back from a task that never became ready ends in the cycle
            seen.add(task)
            task = next(p for p in self.predecessors.of(task) if not ordered[p])
        return self.names[task]


@kernel_above(COMPILE_FROM)
def _kahn(succ_ptr: Ints, succ_ids: Ints, missing: Ints, order: Ints) -> int:
    n = len(missing)
    found = 0
    for i in range(n):
        if missing[i] == 0:
            order[found] = i
            found += 1
    done = 0
    while done < found:
        i = order[done]
        done += 1
        for k in range(succ_ptr[i], succ_ptr[i + 1]):
            j = succ_ids[k]
            missing[j] -= 1
            if missing[j] == 0:
                order[found] = j
                found += 1
    return found


def task_graph(
    *,
    output_bytes: Iterable[int],
    edges: Iterable[tuple[int, int]] | Ints,
    memory_bytes: Iterable[int] | None = None,
    time: Iterable[float] | None = None,
    edge_bytes: Iterable[int] | None = None,
    names: Sequence[TaskId] | None = None,
) -> TaskGraph:
    """The plain model: one output per task, read by all successors. `edge_bytes[k]` adds bytes of edge k's own."""
    outputs = np.array(output_bytes if isinstance(output_bytes, np.ndarray) else list(output_bytes), np.int64)
    n = len(outputs)
    pairs = np.array(edges if isinstance(edges, np.ndarray) else list(edges), np.int64).reshape(-1, 2)
    _check_edges(pairs, n, names)
    keys, first = np.unique(pairs @ np.array([n + 1, 1]), return_index=True)
    distinct = pairs[first]
    links = link(distinct[:, 0], distinct[:, 1], n)
    item_bytes, producer, kept, readers = outputs, np.arange(n), links.counts == 0, links
    if edge_bytes is not None:
        own = np.array(list(edge_bytes), np.int64)
        summed = np.zeros(len(distinct), np.int64)
        np.add.at(summed, np.searchsorted(keys, pairs @ np.array([n + 1, 1])), own)
        carrying = np.flatnonzero(summed != 0)
        item_bytes = np.concatenate([outputs, summed[carrying]])
        producer = np.concatenate([producer, distinct[carrying, 0]])
        kept = np.concatenate([kept, np.zeros(len(carrying), np.bool_)])
        readers = link(
            np.concatenate([distinct[:, 0], n + np.arange(len(carrying))]),
            np.concatenate([distinct[:, 1], distinct[carrying, 1]]),
            n + len(carrying),
        )
    return TaskGraph(
        names=range(n) if names is None else names,
        memory_bytes=_column(memory_bytes, n, 0).astype(np.int64),
        time=_column(time, n, 1).astype(np.float64),
        item_bytes=item_bytes,
        item_producer=producer,
        item_kept=kept,
        readers=readers,
    )


def _column(values: Iterable[float] | None, n: int, default: float) -> Floats | Ints:
    if values is None:
        return np.full(n, default)
    column = np.asarray(values if isinstance(values, np.ndarray) else list(values))
    if len(column) != n:
        raise BadInput(f"{len(column)} values given for {n} tasks: give one per task.")
    return column


def _check_edges(pairs: Ints, n: int, names: Sequence[TaskId] | None) -> None:
    if len(pairs) and (pairs.min() < 0 or pairs.max() >= n):
        raise BadInput(f"an edge names task {int(pairs.max() if pairs.max() >= n else pairs.min())}, but there are {n} tasks.")
    loops = np.flatnonzero(pairs[:, 0] == pairs[:, 1])
    if len(loops):
        task = int(pairs[loops[0], 0])
        raise BadInput(f"task {names[task] if names else task!r} depends on itself: remove that edge.")
