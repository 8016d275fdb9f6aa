"""The one place that turns a sequence of forms with repeats into a schedule the judge and the engines obey.

    sequence   a  b  c  b  d
    schedule   a  b  c  Free(b)  b  [view of b]  d  Free(b) ...

- a use reads the latest production; a storage is freed after its last use before its next production;
- what the caller holds throughout is never freed, results are kept from their first production on;
- views are made again before a use when their storage was recomputed;
- executions nobody reads are dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from memfit.core.costs import Costs, uniform_costs
from memfit.core.graph import Graph
from memfit.core.schedule import Compute, Free, Schedule, Step
from memfit.planning.model.fast_judge import drop_dead
from memfit.planning.model.reduce import Model, build_model


def schedule_of(model: Model, sequence: Iterable[int]) -> Schedule:
    """The schedule of a sequence of form numbers. An impossible sequence becomes an illegal schedule: the judge says why."""
    seq = [int(f) for f in sequence]
    if tuple(seq) != model.agenda:  # of the plain step nothing is dead, and nothing need be compiled to see that
        seq = [int(f) for f in drop_dead(model.arrays, np.array(seq, np.int64))]
    return Schedule(steps=tuple(_Writer(model, seq).write()))


def schedule_from_ops(graph: Graph, executions: Iterable[tuple[int, int]], costs: Costs | None = None) -> Schedule:
    """The schedule of (op, variant) executions with repeats; view ops among them are placed by need."""
    model = build_model(graph, costs or uniform_costs(graph))
    number = {form: f for f, form in enumerate(model.forms)}
    return schedule_of(model, [number[e] for e in executions if e in number])


class _Writer:
    def __init__(self, model: Model, seq: Sequence[int]) -> None:
        self.model, self.seq = model, seq
        self.steps: list[Step] = []
        graph = model.graph
        self.num_real = len(graph.storages)
        self.pinned = model.arrays.pinned
        self.valid = set(graph.sources)
        self.resident = {graph.storage_of(t) for t in graph.sources}
        self.die_after = self._deaths()

    def _deaths(self) -> list[list[int]]:
        """For each position the storages whose current value nobody reads any more; index -1 is before the start."""
        model = self.model
        deaths: list[list[int]] = [[] for _ in range(len(self.seq) + 1)]
        last = {s: -1 for s in range(model.num_storages) if model.arrays.source[s]}
        for p, f in enumerate(self.seq):
            for s in model.ins[f]:
                last[s] = p
            for new, old in model.takes[f]:
                last.pop(old, None)
                self._close(last, deaths, new, p)
            for s in model.outs[f]:
                self._close(last, deaths, s, p)
        for s, p in last.items():
            if not self.pinned[s]:
                deaths[p].append(s)
        return deaths

    def _close(self, last: dict[int, int], deaths: list[list[int]], storage: int, position: int) -> None:
        if storage in last and not self.pinned[storage]:
            deaths[last[storage]].append(storage)
        last[storage] = position

    def write(self) -> list[Step]:
        self._free(self.die_after[-1])
        for p, f in enumerate(self.seq):
            op, variant = self.model.forms[f]
            form = self.model.graph.ops[op].form(variant)
            for tensor in form.inputs:
                self._view(tensor)
            self.steps.append(Compute(op, variant))
            self._note_outputs(f)
            self._free(self.die_after[p])
        for tensor in self.model.graph.results:
            self._view(tensor)
        return self.steps

    def _note_outputs(self, f: int) -> None:
        graph = self.model.graph
        op, variant = self.model.forms[f]
        fresh = {s for s in self.model.outs[f] if s not in self.resident}
        for new, old in self.model.takes[f]:
            self._forget(old)
            if new not in self.resident:
                fresh.add(new)
        self.resident |= fresh
        for tensor in graph.ops[op].form(variant).outputs:
            storage = graph.storage_of(tensor)
            if storage in fresh or (storage in self.resident and graph.is_view(graph.ops[op].form(variant), tensor)):
                self.valid.add(tensor)

    def _free(self, storages: list[int]) -> None:
        for s in storages:
            if s in self.resident and s < self.num_real:
                self.steps.append(Free(s))
            self._forget(s)

    def _forget(self, storage: int) -> None:
        self.resident.discard(storage)
        if storage < self.num_real:
            self.valid.difference_update(self.model.graph.tensors_of[storage])

    def _view(self, tensor: int) -> None:
        """Make `tensor` again if it is a view whose storage was recomputed, after the views it is a view of."""
        pending = [tensor]
        while pending:
            t = pending[-1]
            op = self.model.view_op.get(t)
            if t in self.valid or op is None:
                pending.pop()
                continue
            missing = [x for x in self.model.graph.ops[op].inputs if x not in self.valid and x in self.model.view_op]
            if missing:
                pending.extend(missing)
                continue
            pending.pop()
            self.steps.append(Compute(op))
            self.valid.update(self.model.graph.ops[op].outputs)
