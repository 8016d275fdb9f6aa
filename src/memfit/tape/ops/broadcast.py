"""Broadcasting and summing, each the other's adjoint, and the reshapes between them.

broadcast_to  (3,) -> (2, 3)    a view: no bytes          adjoint: sum over the stretched axes
sum_over      (2, 3) -> (3,)    an op                     adjoint: a broadcast view; nothing of the input is needed
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from memfit.core.errors import BadInput
from memfit.tape.array import Array, Node, get_only
from memfit.tape.array_view import Data, Shape, Spec, normal_axis


def copy(x: Array) -> Array:
    """The same values in row order, in bytes of their own."""

    def kernel(inputs: Sequence[Data], outputs: Sequence[Data], _: Sequence[Data]) -> None:
        np.copyto(outputs[0], inputs[0])

    return x.tape.apply("copy", [x], [x.view.spec], kernel, vjp=lambda _, u: [get_only(u)], flops=0)[0]


def copy_if_strided(x: Array) -> Array:
    """x itself where its elements lie in row order without gaps, else a copy that does."""
    return x if x.view.is_rows else copy(x)


def reshape(x: Array, shape: Sequence[int]) -> Array:
    target = _infer(x.shape, tuple(shape))
    if target == x.shape:
        return x
    source = copy_if_strided(x)
    return x.tape.look("reshape", source, [source.view.reshape(target)], lambda n, u: [reshape(get_only(u), n.inputs[0].shape)])[0]


def _infer(shape: Shape, target: Shape) -> Shape:
    if target.count(-1) > 1:
        raise BadInput(f"reshape to {target}: only one axis can be -1.")
    if -1 not in target:
        return target
    known = prod(n for n in target if n != -1)
    if known == 0 or prod(shape) % known:
        raise BadInput(f"cannot reshape {shape} to {target}: {prod(shape)} elements are not a multiple of {known}.")
    return tuple(prod(shape) // known if n == -1 else n for n in target)


def broadcast_to(x: Array, shape: Shape) -> Array:
    if x.shape == shape:
        return x
    return x.tape.look("broadcast", x, [x.view.broadcast(shape)], lambda n, u: [unbroadcast(get_only(u), n.inputs[0].shape)])[0]


def unbroadcast(x: Array, shape: Shape) -> Array:
    """Sum over the axes that broadcasting from `shape` stretched."""
    lead = x.ndim - len(shape)
    stretched = tuple(range(lead)) + tuple(lead + k for k, n in enumerate(shape) if n == 1 and x.shape[lead + k] != 1)
    return reshape(sum_over(x, stretched), shape)


def sum_over(x: Array, axes: int | Sequence[int] | None = None, *, keepdims: bool = False) -> Array:
    chosen = resolve_axes(x, axes)
    if not chosen:
        return x
    kept = tuple(1 if k in chosen else n for k, n in enumerate(x.shape))
    shape = kept if keepdims else tuple(n for k, n in enumerate(x.shape) if k not in chosen)

    def kernel(inputs: Sequence[Data], outputs: Sequence[Data], _: Sequence[Data]) -> None:
        np.add.reduce(inputs[0], axis=chosen, out=outputs[0], keepdims=keepdims)

    def vjp(node: Node, u: Sequence[Array | None]) -> list[Array]:
        return [broadcast_to(reshape(get_only(u), kept), node.inputs[0].shape)]

    return x.tape.apply("sum", [x], [Spec(shape, x.dtype)], kernel, vjp=vjp, flops=x.size)[0]


def resolve_axes(x: Array, axes: int | Sequence[int] | None) -> tuple[int, ...]:
    if axes is None:
        return tuple(range(x.ndim))
    return tuple(sorted({normal_axis(a, x.ndim) for a in ([axes] if isinstance(axes, int) else axes)}))
