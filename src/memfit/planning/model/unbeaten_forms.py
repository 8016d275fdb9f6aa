"""Which forms of an op are worth planning with: none that another form of it beats, as fast or faster, in no more workspace, reading no more.

In a compiled backward region, making an activation again in registers is often faster than reading it. What that form reads
besides (a bias, a seed) is held throughout anyway, and then the form that reads the activation is no choice at all.

Two forms of two ops can belong together (another kernel for attention: its backward reads what only its forward makes). Such a
pair is left out when it is no faster than the plain pair, taken together, and needs no less room.

A form that writes over an input differs from its twin in nothing but the place: what their measured times differ by is noise.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from memfit.core.costs import Costs
from memfit.core.graph import Graph, Op

_NOISE = 0.05


def find_unbeaten(graph: Graph, costs: Costs) -> list[list[int]]:
    """The forms of each op that are worth planning with, by number; the plain one first unless it is beaten."""
    fixed = {graph.storage_of(t) for t in graph.sources} & {graph.storage_of(t) for t in graph.results}
    useless = _slower_pairs(graph, costs)
    return [[v for v in _unbeaten_of(graph, costs, op, fixed) if (op.id, v) not in useless] for op in graph.ops]


def even_out(graph: Graph, costs: Costs) -> Costs:
    """In-place forms no slower than the same form beside its input, where they are so nearly."""

    def time_ns(op: Op, v: int) -> int:
        own, form = costs.time_ns(op.id, v), op.form(v)
        twins = [k for k, other in enumerate(op.forms) if not other.inplace_of and set(other.inputs) == set(form.inputs)]
        other = min((costs.time_ns(op.id, k) for k in twins), default=own)
        return min(own, other) if form.inplace_of and own <= (1 + _NOISE) * other else own

    times = tuple(tuple(time_ns(op, v) for v in range(1, len(op.forms))) for op in graph.ops)
    return replace(costs, variant_time_ns=times)


def _slower_pairs(graph: Graph, costs: Costs) -> set[tuple[int, int]]:
    """Forms (op, variant) that only serve each other and are together no faster than the plain forms, in no less workspace."""
    makers: dict[int, list[tuple[int, int]]] = defaultdict(list)
    readers: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for op in graph.ops:
        for v, form in enumerate(op.forms):
            for t in form.outputs:
                makers[t].append((op.id, v))
            for t in form.inputs:
                readers[t].append((op.id, v))
    found: set[tuple[int, int]] = set()
    for tensor, made_by in makers.items():
        pair = (*made_by, *readers[tensor])
        if len(made_by) != 1 or len(pair) != 2 or any(v == 0 for _, v in pair):
            continue
        slower = sum(costs.time_ns(*form) for form in pair) >= sum(costs.time_ns(op) for op, _ in pair)
        if slower and all(costs.workspace(op, v) >= costs.workspace(op) for op, v in pair):
            found |= set(pair)
    return found


def _unbeaten_of(graph: Graph, costs: Costs, op: Op, fixed: set[int]) -> list[int]:
    needs = [frozenset(graph.storage_of(t) for t in form.inputs) - fixed for form in op.forms]
    kept: list[int] = []
    for v in sorted(range(len(op.forms)), key=lambda v: (costs.time_ns(op.id, v), v)):
        room = costs.workspace(op.id, v) - sum(graph.size_of(old) for _, old in op.form(v).inplace_of)
        beaten = any(needs[k] <= needs[v] and costs.workspace(op.id, k) <= room and _alike(op, k, v) for k in kept)
        if not beaten:
            kept.append(v)
    return sorted(kept) if 0 in kept else kept


def _alike(op: Op, one: int, other: int) -> bool:
    """Whether two forms make the same tensors, the first of them beside its inputs."""
    a, b = op.form(one), op.form(other)
    return set(a.outputs) == set(b.outputs) and not a.inplace_of
