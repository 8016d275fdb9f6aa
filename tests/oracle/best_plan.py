"""The fastest plan inside a budget by exhaustive shortest path over what the device holds: slow, obvious, and right.

A state is the set of valid tensors, the set of resident storages and which ops that may run once (or draw) have run.
Computing costs its time and must fit; freeing costs nothing. Everything the judge allows on one level is tried: any
order, any number of recomputations, every variant. One rule is the planners' own: a result once made is held, because
an engine hands it over (a gradient is added into its buffer) and never takes it back.
"""

from __future__ import annotations

import heapq
from itertools import count

from memfit.core.costs import Costs
from memfit.core.graph import Graph

State = tuple[frozenset[int], frozenset[int], frozenset[int]]


def best_time_ns(graph: Graph, costs: Costs, limit_bytes: int, *, max_states: int = 200_000) -> int | None:
    """The least time of a legal schedule inside the limit; None if there is none."""
    of, sizes = graph.storage_of, [s.size_bytes for s in graph.storages]
    resident = frozenset(map(of, graph.sources))
    if sum(sizes[s] for s in resident) > limit_bytes:
        return None
    start: State = (frozenset(graph.sources), resident, frozenset())
    seen: set[State] = set()
    returned = frozenset(map(of, graph.results))
    ticket = count()
    queue = [(0, next(ticket), start)]
    while queue:
        time, _, state = heapq.heappop(queue)
        if state in seen:
            continue
        seen.add(state)
        if len(seen) > max_states:
            raise RuntimeError("too many states: use a smaller graph")
        if state[0].issuperset(graph.results):
            return time
        for storage in state[1] - returned:
            gone = frozenset(t for t in state[0] if of(t) != storage)
            heapq.heappush(queue, (time, next(ticket), (gone, state[1] - {storage}, state[2])))
        for op in graph.ops:
            for variant in range(len(op.forms)):
                after = _compute(graph, costs, sizes, state, op.id, variant, limit_bytes)
                if after is not None:
                    heapq.heappush(queue, (time + costs.time_ns(op.id, variant), next(ticket), after))
    return None


def _compute(graph: Graph, costs: Costs, sizes: list[int], state: State, op: int, variant: int, limit: int) -> State | None:
    valid, resident, ran = state
    the_op, form, of = graph.ops[op], graph.ops[op].form(variant), graph.storage_of
    if not valid.issuperset(form.inputs) or (op in ran and not the_op.replayable):
        return None
    if the_op.seeded and op not in ran and any(x > op for x in ran if graph.ops[x].seeded):
        return None
    read = {of(t) for t in form.inputs}
    taken = {of(new): of(old) for new, old in form.inplace_of}
    fresh = {of(t) for t in form.outputs} - read - taken.keys()
    held = sum(sizes[s] for s in resident) + sum(sizes[s] for s in fresh) + costs.workspace(op, variant)
    if held > limit:
        return None
    gone = set(taken.values())
    if gone & {of(t) for t in graph.results}:
        return None
    made = {of(t) for t in form.outputs if of(t) in read or of(t) not in resident}
    still = {t for t in valid if of(t) not in gone} | {t for t in form.outputs if of(t) in made and of(t) not in gone}
    once = ran | {op} if the_op.seeded or not the_op.replayable else ran
    return frozenset(still), frozenset((set(resident) | fresh | taken.keys()) - gone), once
