"""Buffers that forward changes and also computes with: whoever runs forward again must have their old values.

Running statistics of training batch norm are not among them: they are read only to be updated.
"""

from __future__ import annotations

from memfit.capture.captured import Convention
from memfit.core.graph import Graph, Op


def rereads(graph: Graph, convention: Convention) -> tuple[int, ...]:
    """Positions of such sources."""
    mutated = {graph.storage_of(convention.sources[i]): i for i, _ in convention.mutations}
    if not mutated:
        return ()
    updating = _updating(graph, {t for _, t in convention.mutations})
    found = {
        mutated[graph.storage_of(t)]
        for op in graph.ops
        if "batch_norm" not in op.name and not _is_bookkeeping(op) and op.id not in updating
        for t in op.inputs
        if graph.storage_of(t) in mutated
    }
    return tuple(sorted(found))


def _updating(graph: Graph, new_values: set[int]) -> set[int]:
    """Ops whose results end in new buffer values and nowhere else."""
    kept = set(graph.results) - new_values
    found: set[int] = set()
    for op in reversed(graph.ops):
        readers = {r for t in op.outputs for r in graph.readers[t]}
        if not kept.intersection(op.outputs) and all(r in found or _is_bookkeeping(graph.ops[r]) for r in readers):
            found.add(op.id)
    return found


def _is_bookkeeping(op: Op) -> bool:
    return op.name in ("memfit.backward_begins", "memfit.accumulate", "memfit.optimizer_step")
