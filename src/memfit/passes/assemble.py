"""Ops that are to make up a captured step, put in an order that runs and numbered: where passes end that replace many ops by few.

    items: library calls, regions, blocks, views ... in any order   ->   Captured with ids that are positions

Tensors and storages that no item names any more are left out.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

from memfit.capture.captured import Captured, OpCall, Ref
from memfit.core.graph import Graph, Op, Variant
from memfit.torch_private.trees import map_leaves


class CycleError(ValueError):
    """Ops were put together that wait for something that waits for them."""


@dataclass(slots=True)
class Item:
    """An op of the coarse step before it has a number. `forms` beyond the first are variants."""

    op: Op
    forms: list[tuple[Variant, OpCall]] = field(default_factory=list)
    call: OpCall = field(default_factory=OpCall)
    place: int = 0  # where in the fine step: orders what nothing else orders
    optional: bool = False  # another way to make what another item makes

    @property
    def every_form(self) -> tuple[Op | Variant, ...]:
        return (self.op, *(v for v, _ in self.forms))

    @property
    def inputs(self) -> set[int]:
        return {t for form in self.every_form for t in form.inputs}


def item_of(captured: Captured, op: int) -> Item:
    """An op as it is, with its forms."""
    return Item(captured.graph.ops[op], captured.variants_of(op), captured.calls[op], op)


def _order(items: list[Item]) -> list[Item]:
    """In an order that gives every item its inputs first, otherwise as in the fine step."""
    made_by = {t: i for i, item in enumerate(items) if not item.optional for t in item.op.outputs}
    waits = [len(needs) for needs in ({made_by[t] for t in item.inputs if t in made_by} - {i} for i, item in enumerate(items))]
    followers: dict[int, set[int]] = defaultdict(set)
    for i, item in enumerate(items):
        for t in item.inputs:
            if t in made_by and made_by[t] != i:
                followers[made_by[t]].add(i)
    ready = [(item.place, item.optional, i) for i, item in enumerate(items) if not waits[i]]
    heapq.heapify(ready)
    order = []
    while ready:
        _, _, i = heapq.heappop(ready)
        order.append(items[i])
        for j in followers[i]:
            waits[j] -= 1
            if not waits[j]:
                heapq.heappush(ready, (items[j].place, items[j].optional, j))
    if len(order) < len(items):
        raise CycleError(f"{len(items) - len(order)} of {len(items)} ops wait for each other")
    return order


def assemble(captured: Captured, unordered: list[Item]) -> Captured:
    """Numbers for the items, and only the tensors and storages that are left."""
    items = _order(unordered)
    graph, convention = captured.graph, captured.convention
    used = {*graph.sources, *graph.results, *convention.tangents, *(t for _, t in convention.mutations)}
    used |= {o.tensor for o in convention.outputs if isinstance(o, Ref)}
    for item in items:
        used |= {t for form in item.every_form for t in (*form.inputs, *form.outputs)}
        used |= {t for call in (item.call, *(c for _, c in item.forms)) for t in call.outputs if t is not None}
    tensors = {old: new for new, old in enumerate(sorted(used))}
    storages = {old: new for new, old in enumerate(sorted({graph.storage_of(t) for t in used}))}

    def move(value: Any) -> Any:
        return Ref(tensors[value.tensor]) if isinstance(value, Ref) else value

    def call_of(call: OpCall) -> OpCall:
        args, kwargs = map_leaves(move, (call.args, dict(call.kwargs)))
        return replace(call, args=args, kwargs=kwargs, outputs=tuple(None if t is None else tensors[t] for t in call.outputs))

    def moved(form: Op | Variant) -> dict[str, Any]:
        pairs = tuple((tensors[a], tensors[b]) for a, b in form.inplace_of)
        return {"inputs": tuple(tensors[t] for t in form.inputs), "outputs": tuple(tensors[t] for t in form.outputs), "inplace_of": pairs}

    ops = tuple(
        replace(item.op, id=i, variants=tuple(replace(v, **moved(v)) for v, _ in item.forms), **moved(item.op))
        for i, item in enumerate(items)
    )
    place = {item.op.id: i for i, item in enumerate(items)}
    return replace(
        captured,
        graph=Graph(
            ops=ops,
            tensors=tuple(replace(graph.tensors[old], id=new, storage=storages[graph.storage_of(old)]) for old, new in tensors.items()),
            storages=tuple(replace(graph.storages[old], id=new) for old, new in storages.items()),
            sources=tuple(tensors[t] for t in graph.sources),
            results=tuple(tensors[t] for t in graph.results),
        ),
        calls=tuple(call_of(item.call) for item in items),
        variant_calls=tuple(tuple(call_of(c) for _, c in item.forms) for item in items),
        samples=tuple(captured.samples[old] for old in tensors),
        fixed_workspace=tuple((place[op], size) for op, size in captured.fixed_workspace),
        convention=replace(
            convention,
            sources=tuple(tensors[t] for t in convention.sources),
            outputs=tuple(map(move, convention.outputs)),
            tangents=tuple(tensors[t] for t in convention.tangents),
            mutations=tuple((i, tensors[t]) for i, t in convention.mutations),
        ),
    )
