"""Measuring tasks by running some of them in this process: sizes, working memory, seconds.

names      chunk chunk chunk | sum sum | total         of each group of like-named tasks the cheapest to reach is run,
run          x               |  x      |   x           with all that it needs
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

from memfit.tasks.dask.worker import compact

Key = Any


class Node(Protocol):
    """A task of a Dask graph: what it reads, and itself as a function of those values."""

    @property
    def dependencies(self) -> Collection[Key]: ...

    def __call__(self, values: Mapping[Key, Any]) -> Any: ...


def sort_topologically(nodes: Mapping[Key, Node]) -> list[Key]:
    """A topological order."""
    missing = {key: len(node.dependencies) for key, node in nodes.items()}
    readers: dict[Key, list[Key]] = {}
    for key, node in nodes.items():
        for d in node.dependencies:
            readers.setdefault(d, []).append(key)
    ready = [key for key, count in missing.items() if not count]
    order = []
    while ready:
        key = ready.pop()
        order.append(key)
        for reader in readers.get(key, ()):
            missing[reader] -= 1
            if not missing[reader]:
                ready.append(reader)
    return order


def choose_samples(nodes: Mapping[Key, Node], order: list[Key], groups: Mapping[str, list[Key]], per_group: int) -> set[Key]:
    """Of each group the tasks with the fewest ancestors, and those ancestors."""
    above: dict[Key, set[Key]] = {}
    for key in order:
        above[key] = {key}.union(*(above[d] for d in nodes[key].dependencies))
    wanted: set[Key] = set()
    for members in groups.values():
        for key in sorted(members, key=lambda k: len(above[k]))[:per_group]:
            wanted |= above[key]
    return wanted


def run_here(
    nodes: Mapping[Key, Node], order: list[Key], sizeof: Callable[[Any], int]
) -> tuple[dict[Key, int], dict[Key, int], dict[Key, float]]:
    """Bytes of each value, bytes needed besides at the worst moment, and seconds; values go when their last reader has run."""
    size: dict[Key, int] = {}
    memory: dict[Key, int] = {}
    seconds: dict[Key, float] = {}
    values: dict[Key, Any] = {}
    last = {d: key for key in order for d in nodes[key].dependencies}
    tracing = tracemalloc.is_tracing()
    if not tracing:
        tracemalloc.start()
    try:
        for key in order:
            tracemalloc.reset_peak()
            before, begin = tracemalloc.get_traced_memory()[0], time.perf_counter()
            values[key] = compact(nodes[key]({d: values[d] for d in nodes[key].dependencies}))
            seconds[key] = time.perf_counter() - begin
            size[key] = int(sizeof(values[key]))
            memory[key] = max(0, tracemalloc.get_traced_memory()[1] - before - size[key])
            for d in nodes[key].dependencies:
                if last[d] == key:
                    values.pop(d)
    finally:
        if not tracing:
            tracemalloc.stop()
    return size, memory, seconds
