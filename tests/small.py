"""Tiny graphs written by hand, for tests whose numbers can be checked in the head."""

from __future__ import annotations

from collections.abc import Sequence

from memfit.core.graph import Graph, Kind, Op, Storage, Tensor


def graph_of(
    sizes: Sequence[int], ops: Sequence[Op], *, sources: Sequence[int] = (0,), results: Sequence[int] = (), views: Sequence[int] = ()
) -> Graph:
    """Tensor i is the whole of storage i; `views` adds further tensors, each given by the storage it views."""
    storages = tuple(Storage(id=i, size_bytes=size, kind=Kind.INPUT if i in sources else Kind.ACTIVATION) for i, size in enumerate(sizes))
    tensors = tuple(Tensor(id=i, storage=s) for i, s in enumerate((*range(len(sizes)), *views)))
    return Graph(ops=tuple(ops), tensors=tensors, storages=storages, sources=tuple(sources), results=tuple(results))


def op(position: int, reads: Sequence[int], writes: Sequence[int], **details: object) -> Op:
    return Op(id=position, name=f"f{position}", inputs=tuple(reads), outputs=tuple(writes), **details)  # type: ignore[arg-type]


def chain(length: int, size_bytes: int = 10) -> Graph:
    """x0 -> f0 -> x1 -> f1 -> ... -> x_length; x0 is the source, the last one the result."""
    return graph_of([size_bytes] * (length + 1), [op(i, [i], [i + 1]) for i in range(length)], results=[length])


def training_chain(num_layers: int = 16, size_bytes: int = 100) -> Graph:
    """Forward and backward of equal layers: backward i reads activation i and the incoming gradient."""
    n = num_layers
    forward = [Op(id=i, name="relu", inputs=(i,), outputs=(i + 1,)) for i in range(n)]
    backward = [Op(id=n + k, name="backward", inputs=(n - 1 - k, n + k), outputs=(n + k + 1,)) for k in range(n)]
    return graph_of([size_bytes] * (2 * n + 1), [*forward, *backward], results=[0, 2 * n])
