"""Adding ops and variants to a Captured: remembers what is offered, then renumbers once."""

from __future__ import annotations

from dataclasses import replace

import torch

from memfit.capture.captured import Captured, OpCall
from memfit.capture.lower.storages import granularity_of
from memfit.core.graph import Graph, Kind, Op, Storage, Tensor, Variant


class Rewriter:
    """Collects additions to a captured step; `finish` makes the new one."""

    def __init__(self, captured: Captured, *, least_bytes: int) -> None:
        self.captured, self.graph, self.least_bytes = captured, captured.graph, least_bytes
        self.granularity = granularity_of(captured.device)
        self._tensors, self._storages = list(self.graph.tensors), list(self.graph.storages)
        self._samples = list(captured.samples)
        self._variants: dict[int, list[tuple[Variant, OpCall]]] = {}
        self._inserted: dict[int, list[tuple[Op, OpCall]]] = {}
        self._removed: set[int] = set()
        self._kept = {self.graph.storage_of(t) for t in (*self.graph.sources, *self.graph.results)}

    def sample(self, tensor: int) -> torch.Tensor:
        found = self._samples[tensor]
        assert found is not None
        return found

    def size(self, tensor: int) -> int:
        return self._storages[self._tensors[tensor].storage].size_bytes

    def is_large(self, tensor: int) -> bool:
        return self.size(tensor) >= self.least_bytes

    def maker_of(self, tensor: int) -> Op | None:
        """The op that allocates the storage behind a tensor; None for what the caller holds."""
        storage = self.graph.storage_of(tensor)
        roots = [t for t in self.graph.tensors_of[storage] if self.graph.producers[t]]
        for t in roots:
            op = self.graph.ops[self.graph.producers[t][0]]
            if not self.graph.is_view(op, t):
                return op
        return None

    def can_overwrite(self, argument: int, output: int) -> bool:
        """Whether `output` could lie where `argument` lies: all of a storage of its own size and layout, not kept by the caller."""
        old, new = self.graph.storage_of(argument), self.graph.storage_of(output)
        a, b = self.sample(argument), self.sample(output)
        same = a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()
        return same and old not in self._kept and self._storages[old].size_bytes == self._storages[new].size_bytes and old != new

    def new_tensor(self, size_bytes: int, sample: torch.Tensor, name: str) -> int:
        self._storages.append(Storage(id=len(self._storages), size_bytes=size_bytes, kind=Kind.ACTIVATION, name=name))
        self._tensors.append(Tensor(id=len(self._tensors), storage=len(self._storages) - 1, name=name))
        self._samples.append(sample)
        return len(self._tensors) - 1

    def add_variant(self, op: int, variant: Variant, call: OpCall) -> None:
        self._variants.setdefault(op, []).append((variant, call))

    def add_after(self, op: int, name: str, inputs: tuple[int, ...], outputs: tuple[int, ...], call: OpCall) -> None:
        """An op that may or may not be run, right after another one."""
        new = Op(id=-1, name=name, inputs=inputs, outputs=outputs, where=self.graph.ops[op].where)
        self._inserted.setdefault(op, []).append((new, call))

    def remove(self, ops: set[int]) -> None:
        """Leave ops out: what they made is made by something added, or not at all."""
        self._removed |= ops

    def finish(self) -> Captured:
        if not self._variants and not self._inserted:
            return self.captured
        ops: list[Op] = []
        calls: list[OpCall] = []
        variant_calls: list[tuple[OpCall, ...]] = []
        place: dict[int, int] = {}
        for op, call in zip(self.graph.ops, self.captured.calls, strict=True):
            place[op.id] = len(ops)
            offered = [*self.captured.variants_of(op.id), *self._variants.get(op.id, [])]
            if op.id not in self._removed:
                ops.append(replace(op, id=len(ops), variants=tuple(v for v, _ in offered)))
                calls.append(call)
                variant_calls.append(tuple(c for _, c in offered))
            for new, new_call in self._inserted.get(op.id, []):
                ops.append(replace(new, id=len(ops)))
                calls.append(new_call)
                variant_calls.append(())
        graph = Graph(
            ops=tuple(ops),
            tensors=tuple(self._tensors),
            storages=tuple(self._storages),
            sources=self.graph.sources,
            results=self.graph.results,
        )
        fixed = tuple((place[op], size) for op, size in self.captured.fixed_workspace)
        return replace(
            self.captured,
            graph=graph,
            calls=tuple(calls),
            variant_calls=tuple(variant_calls),
            samples=tuple(self._samples),
            fixed_workspace=fixed,
        )
