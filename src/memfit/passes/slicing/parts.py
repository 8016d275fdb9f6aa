"""Parts of a step that are to run in slices: what they are given and must give, and what of the step is left beside them.

Values are *roots*: tensors that are not views of another. Views and constants cost nothing, so they are made wherever they are read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from memfit.capture.captured import Role
from memfit.core.graph import Op
from memfit.passes.slicing.analysis import Batch
from memfit.passes.slicing.states import UNIFORM


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Half of a block: ops in their order, views included; tensors that are given; values that are wanted outside."""

    ops: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """`left`: the ops of the step that still run beside it."""

    forward: Part
    backward: Part | None
    left: tuple[int, ...]


class PartFinder:
    """What is known about the ops of a step, for those who look for a block in it."""

    def __init__(self, batch: Batch) -> None:
        self.batch, self.captured, self.graph = batch, batch.captured, batch.captured.graph
        self.boundary = self.captured.boundary
        self.root = self._roots()
        self.maker = {t: op.id for op in self.graph.ops if not self.is_view(op) for t in op.outputs}
        self.kept = {self.root[t] for t in self.graph.results}

    def is_view(self, op: Op) -> bool:
        plain = self.captured.calls[op.id].role is Role.CALL
        return plain and bool(op.outputs) and all(self.graph.is_view(op, t) for t in op.outputs)

    def is_remade(self, op: int) -> bool:
        node = self.graph.ops[op]
        return self.is_view(node) or any(self.batch.states[t] is UNIFORM for t in node.outputs)

    def _roots(self) -> list[int]:
        root = list(range(len(self.graph.tensors)))
        for op in self.graph.ops:
            if self.is_view(op):
                for t in op.outputs:
                    root[t] = root[next(x for x in op.inputs if self.graph.storage_of(x) == self.graph.storage_of(t))]
        return root

    def depending(self, given: Iterable[int]) -> set[int]:
        """Tensors that depend on these."""
        found = set(given)
        for op in self.graph.ops:
            if not found.isdisjoint(op.inputs):
                found.update(op.outputs)
        return found

    def size(self, value: int) -> int:
        return self.graph.size_of(value)

    def left(self, inside: Collection[int], read: Collection[int], *, loose: Collection[int] = ()) -> tuple[int, ...]:
        """What still runs in the step: all but the block, which reads these, and but views, constants and loose ops that nobody reads
        any more."""
        wanted, left = {*self.graph.results, *read}, []
        for op in reversed(self.graph.ops):
            if op.id in inside or ((op.id in loose or self.is_remade(op.id)) and wanted.isdisjoint(op.outputs)):
                continue
            wanted.update(op.inputs)
            left.append(op.id)
        return tuple(reversed(left))

    def part(self, outputs: tuple[int, ...], own: Collection[int], *, given: Collection[int] = ()) -> Part:
        """What makes these, back to tensors that ops outside `own` make, or that are given."""
        ops: set[int] = set()
        inputs: set[int] = set()
        pending = list(outputs)
        while pending:
            t = pending.pop()
            maker = next(iter(self.graph.producers[t]), -1)
            if t not in given and self.batch.states[t] is UNIFORM:
                ops.add(maker)
            elif t not in given and maker in own:
                if maker not in ops:
                    ops.add(maker)
                    pending.extend(self.graph.ops[maker].inputs)
            else:
                inputs.add(t)
        return Part(ops=tuple(sorted(ops)), inputs=tuple(sorted(inputs)), outputs=outputs)
