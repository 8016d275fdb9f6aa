"""Attention in simple ops: the reference for the blocked op, and its second derivative."""

from __future__ import annotations

from typing import Literal, overload

from memfit.tape.array import Array
from memfit.tape.ops.activations import log_softmax, softmax
from memfit.tape.ops.broadcast import sum_over
from memfit.tape.ops.elementwise import exp, multiply, subtract
from memfit.tape.ops.linear import matmul
from memfit.tape.ops.views import narrow, swap_axes


@overload
def standard_attention(q: Array, k: Array, v: Array, *, with_lse: Literal[True]) -> tuple[Array, Array]: ...
@overload
def standard_attention(q: Array, k: Array, v: Array, *, with_lse: Literal[False] = False) -> Array: ...


def standard_attention(q: Array, k: Array, v: Array, *, with_lse: bool = False) -> Array | tuple[Array, Array]:
    """softmax(q kᵀ) v with S and P stored; with the log of each row's normalizer if asked."""
    scores = matmul(q, swap_axes(k, -1, -2))
    if not with_lse:
        return matmul(softmax(scores), v)
    first = subtract(narrow(scores, -1, 0, 1), narrow(log_softmax(scores), -1, 0, 1))  # s - log softmax(s), in any column
    return matmul(softmax(scores), v), first


def attention_grads(g: Array, q: Array, k: Array, v: Array, o: Array, lse: Array) -> tuple[Array, Array, Array]:
    """dQ, dK, dV from the output and the rows' log-normalizers, as the blocked backward computes them."""
    p = exp(subtract(matmul(q, swap_axes(k, -1, -2)), lse))
    rows = sum_over(multiply(g, o), -1, keepdims=True)
    ds = multiply(p, subtract(matmul(g, swap_axes(v, -1, -2)), rows))
    return matmul(ds, k), matmul(swap_axes(ds, -1, -2), q), matmul(swap_axes(p, -1, -2), g)
