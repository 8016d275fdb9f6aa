"""Schedules that need no planner: run everything in order, and drop values as early as their readers allow.

    keep_all          compute ─ compute ─ compute ─ ...                         naive: one buffer per op, to the end
    drop_early        compute ─ compute ─ free ─ compute ─ free ─ free          liveness counters; in place where legal
    recompute_dropped an order with repeats from a set of values to keep        checkpointing

The liveness counter of a value is the number of its readers yet to run; at zero it is dropped. An op overwrites an input in
place when it is that input's last reader and may do so (SOURCES A4, A5).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from memfit.core.graph import Graph
from memfit.core.schedule import Compute, Free, Schedule, Step


def keep_all(graph: Graph) -> Schedule:
    return Schedule(steps=tuple(Compute(op.id) for op in graph.ops))


def drop_early(graph: Graph, order: Sequence[int] | None = None, *, inplace: bool = False) -> Schedule:
    """Ops in `order` (with repeats for recomputation), each value freed after its last reader before it is made again."""
    order = range(len(graph.ops)) if order is None else order
    steps: list[Step] = []
    dies = _last_uses(graph, order)
    for position, op in enumerate(order):
        dying = dies[position]
        variant = _inplace_variant(graph, op, dying) if inplace else 0
        steps.append(Compute(op, variant))
        taken = {graph.storage_of(old) for _, old in graph.ops[op].form(variant).inplace_of}
        steps.extend(Free(storage) for storage in dying if storage not in taken)
    return Schedule(steps=tuple(steps))


def _last_uses(graph: Graph, order: Sequence[int]) -> list[list[int]]:
    """For each position the storages whose last reader before their next production (or the end) runs there."""
    pinned = {graph.storage_of(t) for t in (*graph.results, *graph.sources)}
    dies: list[list[int]] = [[] for _ in order]
    wanted: set[int] = set()  # storages read later, before they are made again
    for position in range(len(order) - 1, -1, -1):
        op = graph.ops[order[position]]
        outputs = dict.fromkeys(map(graph.storage_of, op.outputs))
        inputs = dict.fromkeys(map(graph.storage_of, op.inputs))
        dies[position] = [s for s in (*inputs, *outputs) if s not in wanted and s not in pinned]
        wanted.difference_update(outputs)
        wanted.update(inputs)
    return dies


def _inplace_variant(graph: Graph, op: int, dying: Sequence[int]) -> int:
    """The first in-place form whose victim dies here (and whose output does not)."""
    for variant, form in enumerate(graph.ops[op].variants, start=1):
        (new, old), *rest = form.inplace_of or ((-1, -1),)
        if not rest and old >= 0 and graph.storage_of(old) in dying and graph.storage_of(new) not in dying:
            return variant
    return 0


def recompute_dropped(graph: Graph, keep: set[int], boundary: int, *, share: bool = True) -> tuple[int, ...]:
    """An order that runs ops [0, boundary), forgets every value outside `keep`, and rebuilds what later ops read.

    With `share` a rebuilt value stays for its later readers (segment-level checkpointing: about one extra forward pass);
    without it, every reader rebuilds its inputs anew from the nearest kept values.
    """
    order = list(range(boundary))
    present = {graph.storage_of(t) for t in graph.sources} | keep
    pinned = {graph.storage_of(t) for t in graph.results}
    made = {graph.storage_of(t) for op in graph.ops[:boundary] for t in op.outputs}
    present |= made & pinned
    producer = {graph.storage_of(t): op.id for op in reversed(graph.ops) for t in op.outputs}
    for op in graph.ops[boundary:]:
        rebuilt: set[int] = set()
        _rebuild(graph, [graph.storage_of(t) for t in op.inputs], present, rebuilt, producer, order.append)
        order.append(op.id)
        present.update(graph.storage_of(t) for t in op.outputs)
        if share:
            present |= rebuilt
    return tuple(order)


def _rebuild(
    graph: Graph, wanted: Sequence[int], present: set[int], rebuilt: set[int], producer: dict[int, int], run: Callable[[int], None]
) -> None:
    """Run the producers of missing storages, inputs first, without recursion (chains can be thousands long)."""
    waiting = [(s, False) for s in reversed(wanted)]
    while waiting:
        storage, inputs_done = waiting.pop()
        if storage in present or storage in rebuilt:
            continue
        op = graph.ops[producer[storage]]
        if inputs_done:
            run(op.id)
            rebuilt.update(map(graph.storage_of, op.outputs))
            continue
        waiting.append((storage, True))
        waiting.extend((graph.storage_of(t), False) for t in reversed(op.inputs))


def count_recomputations(schedule: Schedule) -> int:
    """How many computes repeat an op."""
    runs: dict[int, int] = defaultdict(int)
    for step in schedule.computes:
        runs[step.op] += 1
    return sum(count - 1 for count in runs.values())
