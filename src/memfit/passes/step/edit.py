"""Changing ops in the middle of a captured step: what they made is made by others, with storages and samples kept right.

a ─> old ─> b       edit.add(old, target, Ref(a), makes=b); edit.gone.add(old.id)       a ─> target ─> b
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from memfit.capture.captured import Captured, OpCall, Ref, Role
from memfit.capture.lower.storages import allocated_bytes, granularity_of, viewed_argument
from memfit.core.graph import Kind, Op, Storage, Tensor
from memfit.passes.assemble import Item, assemble, item_of
from memfit.torch_private.trees import leaves_of, map_leaves


@dataclass(slots=True)
class Edit:
    """Ops that are added, and others that they stand for: `gone`."""

    captured: Captured
    tensors: list[Tensor] = field(init=False)
    storages: list[Storage] = field(init=False)
    samples: list[torch.Tensor | None] = field(init=False)
    items: list[Item] = field(default_factory=list)
    gone: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        graph = self.captured.graph
        self.tensors, self.storages, self.samples = list(graph.tensors), list(graph.storages), list(self.captured.samples)

    def add(self, place: Op, target: Any, *args: Any, makes: int | None = None, lies_with: int | None = None, **kwargs: Any) -> int:
        """The tensor that an op makes: `makes`, if it was made otherwise before, or a new one; which lies where another one does, or is a
        view, or has its own bytes."""
        made = target(*map_leaves(lambda v: self.samples[v.tensor] if isinstance(v, Ref) else v, args), **kwargs)
        inputs = tuple(dict.fromkeys(v.tensor for v in leaves_of(args) if isinstance(v, Ref)))
        source = inputs[0] if viewed_argument(target, 0) is not None else lies_with
        if makes is None:
            makes = len(self.tensors)
            storage = len(self.storages) if source is None else self.tensors[source].storage
            if source is None:
                size = allocated_bytes(made, granularity_of(self.captured.device))
                self.storages.append(Storage(id=storage, size_bytes=size, kind=Kind.ACTIVATION, name=str(target)))
            self.tensors.append(Tensor(id=makes, storage=storage, name=str(target)))
            self.samples.append(made)
        self.samples[makes] = made
        op = Op(id=-1, name=str(target), inputs=inputs, outputs=(makes,), where=place.where)
        self.items.append(Item(op, [], OpCall(target=target, args=args, kwargs=kwargs, outputs=(makes,)), place.id))
        return makes

    def move(self, tensor: int, other: int) -> None:
        """A tensor and all that lies where it does, to where another one lies."""
        old, new = self.tensors[tensor].storage, self.tensors[other].storage
        self.tensors = [replace(t, storage=new) if t.storage == old else t for t in self.tensors]

    def finish(self) -> Captured:
        graph = replace(self.captured.graph, tensors=tuple(self.tensors), storages=tuple(self.storages), digest="")
        wider = replace(self.captured, graph=graph, samples=tuple(self.samples))
        old = [item_of(self.captured, op.id) for op in self.captured.graph.ops if op.id not in self.gone]
        return assemble(wider, _without_unread([*old, *self.items], graph.results))


def _without_unread(items: list[Item], kept: tuple[int, ...]) -> list[Item]:
    """Less ops that make what nobody reads."""
    while True:
        wanted = set(kept).union(*(item.inputs for item in items))
        left = [i for i in items if i.call.role is not Role.CALL or i.op.seeded or not i.op.outputs or not wanted.isdisjoint(i.op.outputs)]
        if len(left) == len(items):
            return left
        items = left
