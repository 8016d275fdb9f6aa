"""Which ops of a captured step run together: groups that a compiler turns into shared kernels, cut at library calls.

    conv ─> [var_mean sub mul add relu] ─> conv ─> [ ... ]          forward: one group between two library calls
                     │ mean, var, y
    conv' <─ [le where mul sum sub ...] <─ conv'                    backward: its own groups

An op's depth is the number of library calls on the longest way to it. Linked ops of one depth are a group: a way out of a
group and back would pass a library call, and so arrive deeper. What crosses between groups is a *crossing* value. Backward
makes cheap elementwise values of forward again inside its own kernels instead of reading them, and values made from next to
nothing (constants, random numbers from a seed) are made wherever they are read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from memfit.capture.captured import Captured, Role
from memfit.core.graph import Op
from memfit.passes.regions.piece import Slice

_LIGHT_BYTES = 4096
_ELEMENTWISE = {
    "prims.convert_element_type",
    "prims.inductor_random",
    "prims.inductor_lookup_seed",
    "prims.iota",
    "prims._low_memory_max_pool_offsets_to_indices",  # 64 bits from 8: what is kept are the 8
    "prims.fma",
    "aten.full",
    "aten.clone",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """`outputs` are the crossing values it makes; `is_backward` when it needs the incoming gradients."""

    ops: frozenset[int]
    outputs: tuple[int, ...]
    is_backward: bool


class Fusion:
    """The groups of a step and how to cut slices out of it. Values are *roots*: tensors that are not views of another."""

    def __init__(self, captured: Captured, fuses: Callable[[Any], bool]) -> None:
        self.captured, self.graph = captured, captured.graph
        self.root = self._roots()
        self.reads = [tuple(dict.fromkeys(self.root[t] for form in op.forms for t in form.inputs)) for op in self.graph.ops]
        self.maker: dict[int, int] = {t: op.id for op in self.graph.ops if not self.is_view(op) for t in op.outputs}
        self.readers = self._readers()
        self.kept = {self.root[t] for t in self.graph.results}
        self.fused = [self._is_fused(op, fuses) for op in self.graph.ops]
        self.backward = self._backward()
        self.light = self._light()
        self.depth = self._depths()
        self.group_of = self._group_numbers()
        self.crossing = self._crossings()
        self.groups = self._groups()

    def size(self, value: int) -> int:
        return self.graph.size_of(value)

    def is_view(self, op: Op) -> bool:
        """One that is made again wherever it is read. A seed among several is not: code that reads it would be that seed's alone."""
        views = bool(op.outputs) and self.captured.calls[op.id].role is Role.CALL and all(self.graph.is_view(op, t) for t in op.outputs)
        return views and not self._picks_seed(op)

    def _picks_seed(self, op: Op) -> bool:
        if len(op.inputs) != 1 or self.size(op.inputs[0]) > _LIGHT_BYTES:
            return False
        return any(self.graph.ops[maker].seeded for maker in self.graph.producers[op.inputs[0]])

    def is_elementwise(self, op: int) -> bool:
        target = self.captured.calls[op].target
        name = str(getattr(target, "overloadpacket", ""))
        return torch.Tag.pointwise in getattr(target, "tags", ()) or name in _ELEMENTWISE

    def slice(
        self, outputs: tuple[int, ...], *, own: frozenset[int], given: frozenset[int] = frozenset(), opened: frozenset[int] = frozenset()
    ) -> Slice:
        """What makes `outputs`: back to values that are `given` or cross a border, but through the crossing values in `opened`."""
        inputs: dict[int, None] = {}
        ops: set[int] = set()
        pending = list(outputs)
        while pending:
            value = pending.pop()
            op = self.maker.get(value)
            goes_on = op is not None and self.fused[op] and value not in given
            if goes_on and (value in outputs or op in own or value not in self.crossing or value in opened):
                assert op is not None
                if op not in ops:
                    ops.add(op)
                    pending.extend(self.reads[op])
            else:
                inputs[value] = None
        ordered = self._with_views(ops)
        position = {t: k for k, t in enumerate(dict.fromkeys(self.root[t] for op in ordered for t in self.graph.ops[op].inputs))}
        return Slice(ops=ordered, inputs=tuple(sorted(inputs, key=lambda v: position.get(v, -1))), outputs=outputs)

    # -- what is known about values and ops -------------------------------------------------------------------------

    def _roots(self) -> list[int]:
        root = list(range(len(self.graph.tensors)))
        for op in self.graph.ops:
            if self.is_view(op):
                for t in op.outputs:
                    base = next(x for x in op.inputs if self.graph.storage_of(x) == self.graph.storage_of(t))
                    root[t] = root[base]
        return root

    def _readers(self) -> dict[int, list[int]]:
        readers: dict[int, list[int]] = defaultdict(list)
        for op in self.graph.ops:
            if not self.is_view(op):
                for value in self.reads[op.id]:
                    readers[value].append(op.id)
        return readers

    def _is_fused(self, op: Op, fuses: Callable[[Any], bool]) -> bool:
        call = self.captured.calls[op.id]
        if call.role is not Role.CALL or op.seeded or op.variants or op.inplace_of or not op.outputs or self.is_view(op):
            return False
        storages = [self.graph.storage_of(t) for t in op.outputs]
        fresh = not any(self.graph.is_view(op, t) for t in op.outputs) and len(set(storages)) == len(storages)
        known = all(self.captured.samples[t] is not None for t in (*op.inputs, *op.outputs))
        return fresh and known and fuses(call.target)

    def _backward(self) -> list[bool]:
        """Whether an op needs the incoming gradients."""
        values: set[int] = set()
        found = []
        for op in self.graph.ops:
            begins = self.captured.calls[op.id].role is Role.BACKWARD_BEGINS
            found.append(begins or any(v in values for v in self.reads[op.id]))
            if found[-1]:
                values.update(op.outputs)
        return found

    def _light(self) -> list[bool]:
        """Elementwise from next to nothing, and not from what a group has worked out: made again wherever it is read."""
        light = [False] * len(self.graph.ops)
        for op in self.graph.ops:
            makers = [(v, self.maker.get(v)) for v in self.reads[op.id]]
            easy = all(light[m] if m is not None and self.fused[m] else self.size(v) <= _LIGHT_BYTES for v, m in makers)
            light[op.id] = self.fused[op.id] and self.is_elementwise(op.id) and easy and not self.backward[op.id]
        return light

    def _depths(self) -> list[int]:
        of_value: dict[int, int] = defaultdict(int)
        depth = []
        for op in self.graph.ops:
            here = max((of_value[v] for v in self.reads[op.id]), default=0)
            depth.append(here)
            if not self.is_view(op):
                of_value.update((t, here if self.fused[op.id] else here + 1) for t in op.outputs)
        for op in reversed(self.graph.ops):  # what is read only deeper, and by one group, is made there
            if self.fused[op.id]:
                later = {depth[r] if self.fused[r] else -1 for t in op.outputs for r in self._plain_readers(op.id, t)}
                if len(later) == 1 and not self.kept.intersection(op.outputs):
                    depth[op.id] = max(depth[op.id], *later)
        return depth

    def _plain_readers(self, op: int, value: int) -> list[int]:
        """Readers that do not make the value again for themselves."""
        return [r for r in self.readers[value] if not (self.fused[r] and self.backward[r] and not self.backward[op])]

    # -- groups and what crosses ------------------------------------------------------------------------------------

    def _group_numbers(self) -> dict[int, int]:
        parent = {op.id: op.id for op in self.graph.ops if self.fused[op.id]}

        def find(x: int) -> int:
            while parent[x] != x:
                parent[x] = parent[parent[x]]
                x = parent[x]
            return x

        for op in parent:
            for value in self.reads[op]:
                made_by = self.maker.get(value, -1)
                if made_by in parent and self._join(made_by, op):
                    parent[find(op)] = find(made_by)
        return {op: find(op) for op in parent}

    def _join(self, one: int, other: int) -> bool:
        same = self.depth[one] == self.depth[other] and self.backward[one] == self.backward[other]
        return same and not self.light[one] and not self.light[other]

    def _crossings(self) -> frozenset[int]:
        crossing = {
            v for v, op in self.maker.items() if self.fused[op] and (v in self.kept or any(not self.fused[r] for r in self.readers[v]))
        }
        for backward in (False, True):  # what forward passes on decides what backward can read
            for op, group in self.group_of.items():
                if self.backward[op] is backward and not self.light[op]:
                    self._cross(crossing, op, group, backward)
        return frozenset(crossing)

    def _cross(self, crossing: set[int], op: int, group: int, backward: bool) -> None:
        """Add what `op` must read from other groups; what it makes again instead is looked through."""
        pending, seen = list(self.reads[op]), set()
        while pending:
            value = pending.pop()
            made_by = self.maker.get(value)
            if value in seen or made_by is None or not self.fused[made_by] or (self.group_of[made_by] == group and not self.light[made_by]):
                continue
            seen.add(value)
            if self.light[made_by]:
                pending.extend(self.reads[made_by])
            elif value not in crossing:
                if backward and not self.backward[made_by] and self.is_elementwise(made_by):
                    pending.extend(self.reads[made_by])
                else:
                    crossing.add(value)

    def _groups(self) -> tuple[Group, ...]:
        members: dict[int, set[int]] = defaultdict(set)
        made: dict[int, list[int]] = defaultdict(list)
        for op, group in self.group_of.items():
            members[group].add(op)
        for value in sorted(self.crossing):
            made[self.group_of[self.maker[value]]].append(value)
        return tuple(Group(ops=frozenset(members[g]), outputs=tuple(made[g]), is_backward=self.backward[g]) for g in sorted(made))

    def _with_views(self, ops: set[int]) -> tuple[int, ...]:
        """The ops in order, with the views that they read."""
        every = set(ops)
        pending = [t for op in ops for t in self.graph.ops[op].inputs]
        while pending:
            t = pending.pop()
            if self.root[t] != t:
                (op,) = self.graph.producers[t][:1]
                if op not in every:
                    every.add(op)
                    pending.extend(self.graph.ops[op].inputs)
        return tuple(sorted(every))
