"""Reading and writing by index: embeddings and the label's entry of each row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from memfit.core.errors import BadInput
from memfit.tape.array import Array, Node, get_only
from memfit.tape.array_view import Data, Spec
from memfit.tape.ops.activations import log_softmax
from memfit.tape.ops.broadcast import copy_if_strided
from memfit.tape.ops.elementwise import negate
from memfit.tape.ops.reduce import mean_over


def take_rows(table: Array, index: Array) -> Array:
    """table[index]: one row for every entry of an integer array."""
    _check_index("take_rows", index)
    table, index = copy_if_strided(table), copy_if_strided(index)
    num_rows = table.shape[0]

    def kernel(inputs: Sequence[Data], outputs: Sequence[Data], _: Sequence[Data]) -> None:
        _check_range(inputs[1], num_rows)
        np.take(inputs[0], inputs[1], axis=0, out=outputs[0], mode="clip")  # "raise" would buffer the whole output

    def vjp(node: Node, u: Sequence[Array | None]) -> list[Array | None]:
        return [add_rows(get_only(u), node.inputs[1], num_rows), None]

    return table.tape.apply("take_rows", [table, index], [Spec((*index.shape, *table.shape[1:]), table.dtype)], kernel, vjp=vjp, flops=0)[0]


def add_rows(g: Array, index: Array, num_rows: int) -> Array:
    """Zeros of `num_rows` rows, with g's rows added at `index`: the adjoint of `take_rows`."""
    tail = g.shape[index.ndim :]

    def kernel(inputs: Sequence[Data], outputs: Sequence[Data], _: Sequence[Data]) -> None:
        outputs[0][...] = 0
        np.add.at(outputs[0], inputs[1], inputs[0])

    def vjp(node: Node, u: Sequence[Array | None]) -> list[Array | None]:
        return [take_rows(get_only(u), node.inputs[1]), None]

    return g.tape.apply("add_rows", [g, index], [Spec((num_rows, *tail), g.dtype)], kernel, vjp=vjp)[0]


def pick(x: Array, index: Array) -> Array:
    """x[k, index[k]] for every row k of a matrix."""
    _check_index("pick", index)
    if x.ndim != 2 or index.shape != x.shape[:1]:
        raise BadInput(f"pick from shape {x.shape} with an index of shape {index.shape}: give a matrix and one index per row.")
    x = copy_if_strided(x)
    positions = Spec(index.shape, np.dtype(np.int64))
    width = x.shape[1]

    def kernel(inputs: Sequence[Data], outputs: Sequence[Data], scratch: Sequence[Data]) -> None:
        _flat_positions(inputs[1], width, scratch[0])
        np.take(inputs[0].reshape(-1), scratch[0], out=outputs[0], mode="clip")

    def vjp(node: Node, u: Sequence[Array | None]) -> list[Array | None]:
        return [unpick(get_only(u), node.inputs[1], width), None]

    return x.tape.apply("pick", [x, index], [Spec(index.shape, x.dtype)], kernel, vjp=vjp, scratch=[positions], flops=0)[0]


def unpick(g: Array, index: Array, width: int) -> Array:
    """Zeros of `width` columns, with g[k] at [k, index[k]]: the adjoint of `pick`."""

    def kernel(inputs: Sequence[Data], outputs: Sequence[Data], scratch: Sequence[Data]) -> None:
        outputs[0][...] = 0
        _flat_positions(inputs[1], width, scratch[0])
        outputs[0].reshape(-1)[scratch[0]] = inputs[0]

    def vjp(node: Node, u: Sequence[Array | None]) -> list[Array | None]:
        return [pick(get_only(u), node.inputs[1]), None]

    positions = Spec(index.shape, np.dtype(np.int64))
    return g.tape.apply("unpick", [g, index], [Spec((*g.shape, width), g.dtype)], kernel, vjp=vjp, scratch=[positions], flops=0)[0]


def cross_entropy(logits: Array, labels: Array) -> Array:
    """The mean over rows of -log softmax(logits)[label]."""
    return negate(mean_over(pick(log_softmax(logits), labels)))


def _flat_positions(index: Data, width: int, out: Data) -> None:
    _check_range(index, width)
    out[...] = width
    np.add.accumulate(out, out=out)  # width, 2 width, ...: arange without an array of its own
    np.subtract(out, width, out=out)
    np.add(out, index, out=out)


def _check_index(name: str, index: Array) -> None:
    if index.dtype != np.int64:
        raise BadInput(f"{name} needs an int64 index, not {index.dtype}.")


def _check_range(index: Data, length: int) -> None:
    if index.size and not (index.min() >= 0 and index.max() < length):
        raise BadInput(f"an index array reaches from {index.min()} to {index.max()}, outside [0, {length}).")
