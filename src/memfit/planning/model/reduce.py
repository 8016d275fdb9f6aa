"""The graph as planners see it: only ops that move bytes, only storages, everything an array.

    captured:   conv ─> t1 ─ view ─> t2 ─> linear         an op reads *tensors*
    model:      conv ─> s1 ──────────────> linear         a form reads *storages*; the view is made again where it is read

This is the reduction: view ops are contracted (they hold no bytes and cost nothing worth planning), tensors become the
storages they live in, and what the caller holds throughout (sources that are also results) becomes one constant. Nothing
the judge would see is lost: `to_schedule.py` puts the views back, and every plan is judged on the full graph.

A *form* is an op in one of its variants; a storage may have several producing forms, which is how operator variants and
fused ops reach the planners. A plan is a sequence of forms with repeats: a use reads the latest production, and a
storage is freed after its last use before its next production.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memfit.core.costs import Costs, check_costs
from memfit.core.graph import Graph, Op, Variant
from memfit.planning.model.arrays import Arrays as Arrays
from memfit.planning.model.arrays import Flags as Flags
from memfit.planning.model.arrays import Floats as Floats
from memfit.planning.model.arrays import Ints as Ints


@dataclass(frozen=True, kw_only=True)
class Model:
    """`forms[f]` is the (op, variant) of form f; `agenda` the forms of the plain step, each once, in op order."""

    graph: Graph
    costs: Costs
    forms: tuple[tuple[int, int], ...]
    ins: tuple[tuple[int, ...], ...]
    outs: tuple[tuple[int, ...], ...]
    takes: tuple[tuple[tuple[int, int], ...], ...]
    producers: tuple[tuple[int, ...], ...]
    view_op: dict[int, int]
    needs_of_tensor: tuple[tuple[int, ...], ...]
    agenda: tuple[int, ...]
    arrays: Arrays
    partial: bool
    """The graph can do odd things that the model leaves out: plans are still judged, but nothing is proven from it."""

    @property
    def num_forms(self) -> int:
        return len(self.forms)

    @property
    def num_storages(self) -> int:
        return len(self.arrays.size)

    @property
    def base_time_ns(self) -> int:
        """The time of the plain step, views included: what overheads are measured against."""
        return int(self.arrays.time[list(self.agenda)].sum()) + self.view_time_ns

    @property
    def view_time_ns(self) -> int:
        return sum(self.costs.time_ns(op) for op in set(self.view_op.values()))

    def name(self, form: int) -> str:
        op, variant = self.forms[form]
        return self.graph.ops[op].name if variant == 0 else self.graph.ops[op].variants[variant - 1].name

    def describe(self, form: int) -> str:
        """For sentences: op number, name and where it comes from."""
        op = self.graph.ops[self.forms[form][0]]
        return f"op {op.id} ({self.name(form)}{', ' + op.where if op.where else ''})"


def build_model(graph: Graph, costs: Costs) -> Model:
    """Contract `graph` into what planners need."""
    check_costs(graph, costs)
    return _Builder(graph, costs).build()


def flatten(lists: tuple[tuple[int, ...], ...]) -> tuple[Ints, Ints]:
    ptr = np.zeros(len(lists) + 1, np.int64)
    np.cumsum([len(x) for x in lists], out=ptr[1:])
    return ptr, np.array([y for x in lists for y in x], np.int64)


class _Builder:
    def __init__(self, graph: Graph, costs: Costs) -> None:
        self.graph, self.costs = graph, costs
        of = graph.storage_of
        self.sources, self.returned = set(map(of, graph.sources)), set(map(of, graph.results))
        self.sizes = [s.size_bytes for s in graph.storages]
        self.view_op: dict[int, int] = {}
        self.marker: dict[int, int] = {}  # tensor made as a view by an op that also allocates -> a zero-byte stand-in
        self.unrepeatable: set[int] = set()
        self.roots: dict[int, tuple[int, set[int]]] = {}  # storage -> its default producer and the tensors that makes in it
        self.odd_forms = 0
        self._find_views()
        self.needs = self._tensor_needs()
        self.results = {s for t in graph.results for s in self.needs[t]}
        self.fixed = self.sources & self.results
        marks = set(self.marker.values())
        self.odd_views = sum(  # remade from more than their own storage
            bool(set(needs) - self.fixed - marks - {of(t)}) for t, needs in enumerate(self.needs)
        )

    def _is_view_op(self, op: Op) -> bool:
        plain = op.outputs and op.replayable and not op.seeded and not op.variants and not self.costs.workspace(op.id)
        return bool(plain) and not op.inplace_of and all(self.graph.is_view(op, t) for t in op.outputs)

    def _find_views(self) -> None:
        provided = set(self.graph.sources)
        for op in self.graph.ops:
            if self._is_view_op(op):
                for tensor in op.outputs:
                    if tensor not in provided:
                        self.view_op.setdefault(tensor, op.id)
            provided.update(t for form in op.forms for t in form.outputs)

    def _tensor_needs(self) -> tuple[tuple[int, ...], ...]:
        """For each tensor the storages that must be there to read it, or to make the view again."""
        needs: list[tuple[int, ...]] = [(t.storage,) for t in self.graph.tensors]
        for op in self.graph.ops:
            for form in op.forms:
                for tensor in form.outputs:
                    if self.view_op.get(tensor) == op.id:
                        merged = dict.fromkeys(s for t in form.inputs for s in needs[t])
                        needs[tensor] = tuple(dict.fromkeys((*needs[tensor], *merged)))
                    elif self.graph.is_view(form, tensor) and tensor not in self.view_op:
                        needs[tensor] = (*needs[tensor], self._mark(tensor))
        return tuple(needs)

    def _mark(self, tensor: int) -> int:
        """A view made by an op that does more (it allocates, or runs only once): readers of the view follow that op.

        The view dies when its storage is made anew, which does not happen to a result; any other storage is made only once.
        """
        if tensor not in self.marker:
            self.marker[tensor] = len(self.sizes)
            self.sizes.append(0)
            if self.graph.storage_of(tensor) not in self.returned:
                self.unrepeatable.add(self.graph.storage_of(tensor))
        return self.marker[tensor]

    def build(self) -> Model:
        forms: list[tuple[int, int]] = []
        ins: list[tuple[int, ...]] = []
        outs: list[tuple[int, ...]] = []
        takes: list[tuple[tuple[int, int], ...]] = []
        for op in self.graph.ops:
            if self._is_view_op(op):
                continue
            for variant, form in enumerate(op.forms):
                if self._is_odd(op.id, form):
                    self.odd_forms += 1
                    continue
                forms.append((op.id, variant))
                ins.append(self._ins(form))
                takes.append(tuple((self.graph.storage_of(a), self.graph.storage_of(b)) for a, b in form.inplace_of))
                outs.append(self._outs(form))
        producers = self._producers(forms, outs, takes)
        arrays = self._arrays(forms, ins, outs, takes, producers)
        return Model(
            graph=self.graph,
            costs=self.costs,
            forms=tuple(forms),
            ins=tuple(ins),
            outs=tuple(outs),
            takes=tuple(takes),
            producers=producers,
            view_op=self.view_op,
            needs_of_tensor=self.needs,
            agenda=_default_agenda(self.graph, forms, ins, producers, self.needs, arrays),
            arrays=arrays,
            partial=bool(self.unrepeatable or self.odd_forms or self.odd_views),
        )

    def _is_odd(self, op: int, form: Op | Variant) -> bool:
        """Forms no planner uses: they overwrite a result or remake a source, or make only part of what others make in a storage."""
        of = self.graph.storage_of
        if any(of(old) in self.results for _, old in form.inplace_of):
            return True
        read = {of(t) for t in form.inputs}
        made: dict[int, set[int]] = {}
        for t in form.outputs:
            if of(t) not in read:
                made.setdefault(of(t), set()).add(t)
        for s, tensors in made.items():
            home, roots = self.roots.setdefault(s, (op, tensors))
            if s in self.sources or not roots <= tensors or (s in self.unrepeatable and home != op):
                return True
        return False

    def _ins(self, form: Op | Variant) -> tuple[int, ...]:
        return tuple(s for s in dict.fromkeys(s for t in form.inputs for s in self.needs[t]) if s not in self.fixed)

    def _outs(self, form: Op | Variant) -> tuple[int, ...]:
        of = self.graph.storage_of
        not_fresh = {of(t) for t in form.inputs} | {of(new) for new, _ in form.inplace_of}
        fresh = [of(t) for t in form.outputs if of(t) not in not_fresh]
        markers = [self.marker[t] for t in form.outputs if t in self.marker]
        return tuple(dict.fromkeys((*fresh, *markers)))

    def _producers(
        self, forms: list[tuple[int, int]], outs: list[tuple[int, ...]], takes: list[tuple[tuple[int, int], ...]]
    ) -> tuple[tuple[int, ...], ...]:
        found: list[list[int]] = [[] for _ in self.sizes]
        for f in range(len(forms)):
            for s in (*outs[f], *(new for new, _ in takes[f])):
                found[s].append(f)
        return tuple(map(tuple, found))

    def _arrays(
        self,
        forms: list[tuple[int, int]],
        ins: list[tuple[int, ...]],
        outs: list[tuple[int, ...]],
        takes: list[tuple[tuple[int, int], ...]],
        producers: tuple[tuple[int, ...], ...],
    ) -> Arrays:
        num = len(self.sizes)
        in_ptr, in_idx = flatten(tuple(ins))
        out_ptr, out_idx = flatten(tuple(outs))
        take_ptr, take_new = flatten(tuple(tuple(new for new, _ in t) for t in takes))
        prod_ptr, prod_idx = flatten(producers)
        once = {f for s in self.unrepeatable for f in producers[s]}
        return Arrays(
            in_ptr=in_ptr,
            in_idx=in_idx,
            out_ptr=out_ptr,
            out_idx=out_idx,
            take_ptr=take_ptr,
            take_new=take_new,
            take_old=np.array([old for t in takes for _, old in t], np.int64),
            prod_ptr=prod_ptr,
            prod_idx=prod_idx,
            size=np.array(self.sizes, np.int64),
            time=np.array([self.costs.time_ns(*f) for f in forms], np.int64),
            workspace=np.array([self.costs.workspace(*f) for f in forms], np.int64),
            replayable=np.array([self.graph.ops[f[0]].replayable and i not in once for i, f in enumerate(forms)], np.bool_),
            op=np.array([f[0] for f in forms], np.int64),
            seeded=np.array([self.graph.ops[f[0]].seeded for f in forms], np.bool_),
            pinned=np.array([s in self.results and s not in self.sources for s in range(num)], np.bool_),
            source=np.array([s in self.sources and s not in self.results for s in range(num)], np.bool_),
            base_bytes=sum(self.sizes[s] for s in self.fixed),
            num_ops=len(self.graph.ops),
        )


def _default_agenda(
    graph: Graph,
    forms: list[tuple[int, int]],
    ins: list[tuple[int, ...]],
    producers: tuple[tuple[int, ...], ...],
    needs: tuple[tuple[int, ...], ...],
    arrays: Arrays,
) -> tuple[int, ...]:
    """What the plain step runs: the first producer of everything a result needs, and whatever cannot be replayed.

    An op that draws random numbers or runs only once is never left out: that would change what the step does.
    """
    ready = np.zeros(len(arrays.size), np.bool_)
    ready[[graph.storage_of(t) for t in graph.sources]] = True
    wanted = [s for t in graph.results for s in needs[t]]
    chosen: set[int] = set()
    for f, (op, variant) in enumerate(forms):
        if variant == 0 and (graph.ops[op].seeded or not graph.ops[op].replayable):
            chosen.add(f)
            wanted.extend(ins[f])
    while wanted:
        s = wanted.pop()
        if ready[s]:
            continue
        ready[s] = True
        if producers[s] and producers[s][0] not in chosen:
            chosen.add(producers[s][0])
            wanted.extend(ins[producers[s][0]])
    return tuple(sorted(chosen))
