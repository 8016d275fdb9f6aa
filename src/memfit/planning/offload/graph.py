"""A graph in which some storages may wait on the host: for a planner that knows nothing of links.

    F ──> t ──> readers before the peak               F ──> t ──> send ──> token (no bytes) ──> fetch ──> t' ──> readers after it

A fetched value has a new name, so that nothing is made from itself. Readers after the peak read the new one; whatever read the first
name can, made again, read the second, as one more form; views are made again from it. Copies take time that this graph does not
know: a value that must be there in time is read by an op that comes so much earlier, and fetching it twice costs what it takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from memfit.core.costs import HOST, Costs
from memfit.core.graph import Graph, Op, Storage, Tensor, Variant
from memfit.core.schedule import Compute, Free, Offload, Reload, Schedule, Step


def is_pure_view(graph: Graph, op: Op) -> bool:
    """Whether an op only gives its inputs' bytes new names."""
    return bool(op.outputs) and not op.inplace_of and not op.variants and all(graph.is_view(op, t) for t in op.outputs)


def find_waitable(graph: Graph) -> set[int]:
    """Storages that one op makes and only pure views, which can be made again, name again."""
    outside = {graph.storage_of(t) for t in (*graph.sources, *graph.results)}
    others = [op for op in graph.ops if not (is_pure_view(graph, op) and op.replayable)]
    mixed = {graph.storage_of(t) for op in others for form in op.forms for t in form.outputs if graph.is_view(form, t)}
    made = {graph.storage_of(t) for op in others for t in op.outputs}
    return made - outside - mixed


class OffloadGraph:
    """`late`: storage -> ops that read it after the peak. `ahead`: op -> storages that must be there when it runs."""

    def __init__(self, graph: Graph, costs: Costs, late: Mapping[int, Iterable[int]], ahead: Mapping[int, Iterable[int]]) -> None:
        self._old = graph
        self._origin: list[Step] = []  # for each new op what it is in a schedule of the old graph
        self._forms: list[tuple[int, ...]] = []  # for each of its forms the old one
        self._tensors, self._storages = list(graph.tensors), list(graph.storages)
        self._names: dict[int, int] = {}
        self._same: dict[int, int] = {}  # new storage -> the one it stands for
        self._token: dict[int, int] = {}
        for storage in late:
            self._add_names(storage)
        self._ops: list[Op] = []
        readers = {op for ops in late.values() for op in ops}
        early = {op: tuple(self._names[graph.tensors_of[s][0]] for s in storages) for op, storages in ahead.items()}
        makers = _find_makers(graph, late)
        for op in graph.ops:
            self._add(_add_inputs(self._rename_inputs(op, op.id in readers), early.get(op.id, ())), Compute(op.id))
            if is_pure_view(graph, op) and all(t in self._names for t in op.outputs):
                again = replace(op, inputs=self._rename(op.inputs), outputs=self._rename(op.outputs))
                self._add(again, Compute(op.id))
            for storage in makers.get(op.id, ()):
                roots = tuple(t for t in op.outputs if graph.storage_of(t) == storage)
                token = (self._token[storage],)
                self._add(Op(id=0, name="memfit.send", inputs=roots[:1], outputs=token, replayable=False), Offload(storage, HOST))
                self._add(Op(id=0, name="memfit.fetch", inputs=token, outputs=self._rename(roots)), Reload(storage, HOST))
        self.graph = replace(graph, ops=tuple(self._ops), tensors=tuple(self._tensors), storages=tuple(self._storages), digest="")
        self.costs = self._costs(costs)

    def _add_names(self, storage: int) -> None:
        size, number = self._old.storages[storage].size_bytes, len(self._storages)
        self._storages += [Storage(id=number, size_bytes=size), Storage(id=number + 1, size_bytes=0)]
        self._same[number] = storage
        for tensor in self._old.tensors_of[storage]:
            self._names[tensor] = len(self._tensors)
            self._tensors.append(Tensor(id=len(self._tensors), storage=number))
        self._token[storage] = len(self._tensors)
        self._tensors.append(Tensor(id=len(self._tensors), storage=number + 1))

    def _add(self, op: Op, origin: Step) -> None:
        self._ops.append(replace(op, id=len(self._ops)))
        self._origin.append(origin)
        if len(self._forms) < len(self._ops):
            self._forms.append((0,))

    def _rename_inputs(self, op: Op, late: bool) -> Op:
        """Reads the new names: instead where it comes after the peak, as further forms where it comes before or may come anywhere."""
        forms = tuple(range(len(op.forms)))
        concerned = () if is_pure_view(self._old, op) else tuple(v for v in forms if any(t in self._names for t in op.form(v).inputs))
        if late:
            self._forms.append(forms)
            return replace(
                op,
                inputs=self._rename(op.inputs),
                inplace_of=self._rename_pairs(op),
                variants=tuple(map(self._make_reloading_form, op.variants)),
            )
        again = concerned if op.replayable else ()
        self._forms.append((*forms, *again))
        return replace(op, variants=(*op.variants, *(self._make_reloading_form(op.form(v)) for v in again)))

    def _make_reloading_form(self, form: Op | Variant) -> Variant:
        return Variant(
            name=f"{form.name} fetched", inputs=self._rename(form.inputs), outputs=form.outputs, inplace_of=self._rename_pairs(form)
        )

    def _rename_pairs(self, form: Op | Variant) -> tuple[tuple[int, int], ...]:
        return tuple((new, self._names.get(old, old)) for new, old in form.inplace_of)

    def _rename(self, tensors: Iterable[int]) -> tuple[int, ...]:
        return tuple(self._names.get(t, t) for t in tensors)

    def _costs(self, costs: Costs) -> Costs:
        """A second fetch costs what it takes; the first one, which is hidden, is a constant."""
        link = costs.levels[HOST - 1]
        times, workspaces = [], []
        for origin, forms in zip(self._origin, self._forms, strict=True):
            if isinstance(origin, Compute):
                times.append([costs.time_ns(origin.op, v) for v in forms])
                workspaces.append([costs.workspace(origin.op, v) for v in forms])
            else:
                times.append([link.read_ns(self._old.storages[origin.storage].size_bytes) if isinstance(origin, Reload) else 1])
                workspaces.append([0])
        return replace(
            costs,
            op_time_ns=tuple(t[0] for t in times),
            workspace_bytes=tuple(w[0] for w in workspaces),
            variant_time_ns=tuple(tuple(t[1:]) for t in times),
            variant_workspace_bytes=tuple(tuple(w[1:]) for w in workspaces),
            graph_digest=self.graph.digest,
        )

    def translate(self, schedule: Schedule) -> Schedule:
        """Into a schedule of the old graph, where both names are one storage: there once, freed with the last of them."""
        steps: list[Step] = []
        held = dict.fromkeys(self._same.values(), 0)
        for step in schedule.steps:
            if isinstance(step, Compute):
                origin = self._origin[step.op]
                if isinstance(origin, Compute):
                    steps.append(Compute(origin.op, self._forms[step.op][step.variant]))
                    steps += [Reload(storage, HOST) for storage in self._count_overwritten(step, held)]
                elif isinstance(origin, Offload):
                    steps.append(origin)
                else:
                    steps += [] if held[origin.storage] else [origin]
                    held[origin.storage] += 1
            elif isinstance(step, Free):
                storage = self._same.get(step.storage, step.storage)
                if storage in held:
                    held[storage] -= 1
                if storage < len(self._old.storages) and not held.get(storage, 0):
                    steps.append(Free(storage))
        return Schedule(steps=tuple(steps))

    def _count_overwritten(self, step: Compute, held: dict[int, int]) -> list[int]:
        """Counts what a step makes and overwrites; returns what was overwritten under one name and is still held under the other."""
        form = self.graph.ops[step.op].form(step.variant)
        for storage in {self.graph.storage_of(t) for t in form.outputs if not self.graph.is_view(form, t)} & held.keys():
            held[storage] += 1
        gone = [self._same.get(self.graph.storage_of(old), self.graph.storage_of(old)) for _, old in form.inplace_of]
        for storage in gone:
            if storage in held:
                held[storage] -= 1
        return [storage for storage in gone if held.get(storage, 0)]


def _find_makers(graph: Graph, storages: Iterable[int]) -> dict[int, list[int]]:
    """Op -> storages that it makes, as the first of all."""
    found: dict[int, list[int]] = {}
    for storage in storages:
        first = min(op for t in graph.tensors_of[storage] for op in graph.producers[t] if not is_pure_view(graph, graph.ops[op]))
        found.setdefault(first, []).append(storage)
    return found


def _add_inputs(op: Op, more: tuple[int, ...]) -> Op:
    """The op with more inputs, in every form."""
    if not more:
        return op
    joined = [tuple(dict.fromkeys((*form.inputs, *more))) for form in op.forms]
    variants = tuple(replace(v, inputs=inputs) for v, inputs in zip(op.variants, joined[1:], strict=True))
    return replace(op, inputs=joined[0], variants=variants)
