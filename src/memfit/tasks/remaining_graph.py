"""Part of a task graph: what is left to do when some items are already there.

a ─> b ─> d          todo {c, d}, present {b's item}:      [b] ─> d <─ c
     c ──┘                                                  an item there from the start, freed by its last reader
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from memfit.tasks.graph import Ints, TaskGraph, link


def restrict(graph: TaskGraph, todo: Sequence[int], present: Collection[int]) -> tuple[TaskGraph, Ints, Ints]:
    """The graph of the tasks in `todo` with the items in `present` held from the start; and the old ids of its tasks and items.

    Every item read by a task in `todo` must be present or made by one of them.
    """
    tasks = np.array(sorted(todo), np.int64)
    number = np.full(graph.num_tasks, -1, np.int64)
    number[tasks] = np.arange(len(tasks))
    made = [k for t in tasks.tolist() for k in graph.makes.of(t) if k not in present]
    items = np.array(sorted({*made, *present}), np.int64)
    rows, readers = [], []
    for row, item in enumerate(items.tolist()):
        for reader in graph.readers.of(item):
            if number[reader] >= 0:
                rows.append(row)
                readers.append(int(number[reader]))
    producer = np.array([-1 if k in present else int(number[graph.item_producer[k]]) for k in items.tolist()], np.int64)
    part = TaskGraph(
        names=[graph.names[t] for t in tasks.tolist()],
        memory_bytes=graph.memory_bytes[tasks],
        time=graph.time[tasks],
        item_bytes=graph.item_bytes[items],
        item_producer=producer,
        item_kept=graph.item_kept[items],
        readers=link(np.array(rows, np.int64), np.array(readers, np.int64), len(items)),
    )
    return part, tasks, items
