"""Matrix products, in BLAS wherever the operands' strides allow it; others are copied first, as an op the planner sees."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from memfit.core.errors import BadInput
from memfit.tape.array import Array, Node, get_only
from memfit.tape.array_view import Data, Spec, joint_shape
from memfit.tape.ops.broadcast import copy, reshape, unbroadcast
from memfit.tape.ops.elementwise import add
from memfit.tape.ops.views import swap_axes


def matmul(a: Array, b: Array) -> Array:
    """NumPy's `@` for two or more axes each; leading axes broadcast."""
    if a.ndim < 2 or b.ndim < 2:
        raise BadInput(f"matmul of shapes {a.shape} and {b.shape}: both need at least two axes; reshape a vector to a row or column.")
    if a.shape[-1] != b.shape[-2] or a.dtype != b.dtype:
        raise BadInput(f"matmul of {a.shape} {a.dtype} and {b.shape} {b.dtype}: inner axes and types must agree.")
    a, b = (x if x.view.suits_blas else copy(x) for x in (a, b))
    shape = (*joint_shape(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])

    def kernel(inputs: Sequence[Data], outputs: Sequence[Data], _: Sequence[Data]) -> None:
        np.matmul(inputs[0], inputs[1], out=outputs[0])

    spec = Spec(shape, a.dtype)
    return a.tape.apply("matmul", [a, b], [spec], kernel, vjp=_vjp, flops=2 * spec.size * a.shape[-1])[0]


def _vjp(node: Node, u: Sequence[Array | None]) -> list[Array]:
    (a, b), g = node.inputs, get_only(u)
    if a.ndim > 2 and b.ndim == 2:  # fold the batch into rows: one product instead of a sum of many
        rows, g_rows = reshape(a, (-1, a.shape[-1])), reshape(g, (-1, g.shape[-1]))
        return [reshape(matmul(g_rows, swap_axes(b, 0, 1)), a.shape), matmul(swap_axes(rows, 0, 1), g_rows)]
    return [
        unbroadcast(matmul(g, swap_axes(b, -1, -2)), a.shape),
        unbroadcast(matmul(swap_axes(a, -1, -2), g), b.shape),
    ]


def linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """x @ weight + bias"""
    product = matmul(x, weight)
    return product if bias is None else add(product, bias)
