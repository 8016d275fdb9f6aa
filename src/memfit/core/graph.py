"""The graph of one training step: storages, the tensors that view them, and the ops between.

    storage 3  [16 MiB activation]        bytes that live and die together
      ├─ tensor 7   relu output           tensors are views; a view keeps its storage alive
      └─ tensor 8   its reshape

Ids are positions (`graph.ops[i].id == i`) and the order of `ops` is topological. A tensor may have several producers:
the op that makes it, and variants or fused ops that make the same value another way. An in-place op gives its output a
storage of its own that *takes over* the bytes of the overwritten one, so every storage holds one value for life.
"""

from __future__ import annotations

import hashlib
import json
import operator
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Any

from memfit.core.errors import BadInput
from memfit.core.units import MAX_SUM


class Kind(StrEnum):
    """What a storage is for: the categories in which memory is reported."""

    PARAMETER = "parameter"
    GRADIENT = "gradient"
    OPTIMIZER = "optimizer"
    INPUT = "input"
    BUFFER = "buffer"
    ACTIVATION = "activation"
    TEMPORARY = "temporary"


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    id: int
    size_bytes: int
    kind: Kind = Kind.ACTIVATION
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    id: int
    storage: int
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """Another implementation of an op: other inputs read, other outputs, other in-place pairs; its costs are in Costs."""

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    inplace_of: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """Reads tensors, writes tensors. Variant 0 is the op as written here, variant v >= 1 is `variants[v - 1]`.

    `inplace_of` holds (output tensor, input tensor) pairs: the output's storage takes over the input's bytes.
    An op that is not `replayable` (a mutation, the arrival of a gradient) may run once. A `seeded` op draws random
    numbers: first runs of seeded ops keep their order, and an engine replays one by restoring the generator.
    """

    id: int
    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    replayable: bool = True
    seeded: bool = False
    inplace_of: tuple[tuple[int, int], ...] = ()
    variants: tuple[Variant, ...] = ()
    where: str = ""

    def form(self, variant: int) -> Op | Variant:
        """What runs under `Compute(op, variant)`: has `inputs`, `outputs` and `inplace_of`."""
        return self if variant == 0 else self.variants[variant - 1]

    @property
    def forms(self) -> tuple[Op | Variant, ...]:
        return (self, *self.variants)

    def keep_forms(self, kept: Sequence[int]) -> Op:
        """This op with only some of its forms, the first of them as the plain one."""
        first, others = self.form(kept[0]), tuple(self.variants[v - 1] for v in kept[1:])
        return replace(self, name=first.name, inputs=first.inputs, outputs=first.outputs, inplace_of=first.inplace_of, variants=others)


@dataclass(frozen=True, kw_only=True)
class Graph:
    """One step. `sources` are tensors present at the start, `results` those that must be present at the end.

    What the caller holds throughout (parameters, inputs, optimizer state) is both a source and a result.
    """

    ops: tuple[Op, ...]
    tensors: tuple[Tensor, ...]
    storages: tuple[Storage, ...]
    sources: tuple[int, ...]
    results: tuple[int, ...]
    digest: str = ""

    def __post_init__(self) -> None:
        _check(self)
        digest = _digest(self)
        if self.digest not in ("", digest):
            raise BadInput(
                f"graph digest {self.digest[:12]} does not match its content ({digest[:12]}): the file was changed; regenerate it."
            )
        object.__setattr__(self, "digest", digest)

    def storage_of(self, tensor: int) -> int:
        return self.tensors[tensor].storage

    def size_of(self, tensor: int) -> int:
        return self.storages[self.tensors[tensor].storage].size_bytes

    @cached_property
    def storage_ids(self) -> tuple[int, ...]:
        """For each tensor its storage: `storage_of` for inner loops."""
        return tuple([tensor.storage for tensor in self.tensors])

    @cached_property
    def known_forms(self) -> defaultdict[int, dict[int, Any]]:
        """What `core.op_forms.form_of` has looked up so far: variant -> op -> form."""
        return defaultdict(dict)

    @cached_property
    def producers(self) -> tuple[tuple[int, ...], ...]:
        """For each tensor the ops that can produce it, in op order; its own op comes before fused alternatives."""
        found: list[dict[int, None]] = [{} for _ in self.tensors]
        for op in self.ops:
            for form in op.forms:
                for tensor in form.outputs:
                    found[tensor][op.id] = None
        return tuple(tuple(ops) for ops in found)

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """For each tensor the ops that read it in their first form."""
        found: list[list[int]] = [[] for _ in self.tensors]
        for op in self.ops:
            for tensor in dict.fromkeys(op.inputs):
                found[tensor].append(op.id)
        return tuple(map(tuple, found))

    @cached_property
    def tensors_of(self) -> tuple[tuple[int, ...], ...]:
        """For each storage the tensors that view it."""
        found: list[list[int]] = [[] for _ in self.storages]
        for tensor in self.tensors:
            found[tensor.storage].append(tensor.id)
        return tuple(map(tuple, found))

    def is_view(self, op: Op | Variant, output: int) -> bool:
        """Whether `output` is a view of one of the op's inputs: same storage, nothing written."""
        storage = self.tensors[output].storage
        return any(self.tensors[t].storage == storage for t in op.inputs)


def _digest(graph: Graph) -> str:
    """Over everything that changes what a schedule means; names and source lines do not."""
    parts: tuple[object, ...] = (
        tuple((s.size_bytes, str(s.kind)) for s in graph.storages),
        tuple(t.storage for t in graph.tensors),
        tuple(
            (op.name, op.replayable, op.seeded, tuple((f.name, f.inputs, f.outputs, f.inplace_of) for f in op.forms)) for op in graph.ops
        ),
        graph.sources,
        graph.results,
    )
    text = json.dumps(parts, separators=(",", ":"), default=operator.index)
    return hashlib.sha256(text.encode()).hexdigest()


def _check(graph: Graph) -> None:
    families: tuple[tuple[str, Sequence[Op | Tensor | Storage]], ...] = (
        ("op", graph.ops),
        ("tensor", graph.tensors),
        ("storage", graph.storages),
    )
    for label, items in families:
        for position, item in enumerate(items):
            if item.id != position:
                raise BadInput(f"{label} at position {position} has id {item.id}: ids are positions; renumber the graph.")
    for storage in graph.storages:
        if storage.size_bytes < 0:
            raise BadInput(f"storage {storage.id} has {storage.size_bytes} bytes: sizes cannot be negative.")
    if sum(storage.size_bytes for storage in graph.storages) >= MAX_SUM:
        raise BadInput("the storages hold 2**62 bytes or more together, which is more than memfit can count: check the sizes.")
    for tensor in graph.tensors:
        if not 0 <= tensor.storage < len(graph.storages):
            raise BadInput(f"tensor {tensor.id} views storage {tensor.storage}, but there are {len(graph.storages)} storages.")
    for label, ids in (("source", graph.sources), ("result", graph.results)):
        for t in ids:
            _check_tensor(graph, t, label)
    _check_order(graph)


def _check_tensor(graph: Graph, tensor: int, who: str) -> None:
    if not 0 <= tensor < len(graph.tensors):
        raise BadInput(f"{who} names tensor {tensor}, but there are {len(graph.tensors)} tensors.")


def _check_order(graph: Graph) -> None:
    available = [False] * len(graph.tensors)
    for t in graph.sources:
        available[t] = True
    for op in graph.ops:
        for form in op.forms:
            for t in (*form.inputs, *form.outputs, *(x for pair in form.inplace_of for x in pair)):
                _check_tensor(graph, t, f"op {op.id} ({op.name})")
            for t in form.inputs:
                if not available[t]:
                    raise BadInput(
                        f"op {op.id} ({op.name}) reads tensor {t} before any earlier op or source provides it: "
                        "a cycle, or the ops are not in topological order."
                    )
            _check_inplace(graph, op, form)
        for form in op.forms:
            for t in form.outputs:
                available[t] = True
    for t in graph.results:
        if not available[t]:
            raise BadInput(f"result tensor {t} is neither a source nor produced by any op.")


def _check_inplace(graph: Graph, op: Op, form: Op | Variant) -> None:
    if not form.inplace_of:
        return
    new_storages = [graph.tensors[output].storage for output, _ in form.inplace_of]
    old_storages = [graph.tensors[source].storage for _, source in form.inplace_of]
    if len(set(old_storages)) != len(old_storages) or len(set(new_storages)) != len(new_storages):
        raise BadInput(f"op {op.id} ({op.name}) uses one storage in two in-place pairs: each pair needs storages of its own.")
    for output in form.outputs:
        if graph.tensors[output].storage in old_storages:
            raise BadInput(f"op {op.id} ({op.name}) makes tensor {output} a view of a storage that it overwrites in place.")
    for source in form.inputs:
        if graph.tensors[source].storage in new_storages:
            raise BadInput(f"op {op.id} ({op.name}) reads tensor {source} of the storage that its in-place output is about to become.")
    for output, source in form.inplace_of:
        if output not in form.outputs or source not in form.inputs:
            raise BadInput(f"op {op.id} ({op.name}): in-place pair ({output}, {source}) is not (one of its outputs, one of its inputs).")
        new, old = graph.tensors[output].storage, graph.tensors[source].storage
        if new == old or graph.storages[new].size_bytes != graph.storages[old].size_bytes:
            raise BadInput(
                f"op {op.id} ({op.name}): in place, storage {new} takes over storage {old}, so they must be two storages of "
                f"equal size, not {graph.storages[new].size_bytes} and {graph.storages[old].size_bytes} bytes."
            )
