"""Batch and layer normalization: one op forward, one backward, keeping the input and two small rows of statistics.

    x ──> y, mean, 1/std          gradient reads x, mean, 1/std, gamma: the output y can go

The gradient op has no hand-written second derivative: it is written once more in simple ops, and those are differentiated.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from memfit.core.errors import BadInput
from memfit.tape.array import Array, Node
from memfit.tape.array_view import Data, Shape, Spec
from memfit.tape.gradient import vjp_through
from memfit.tape.ops.broadcast import reshape, sum_over
from memfit.tape.ops.elementwise import add, multiply, power, subtract


def batch_norm(x: Array, gamma: Array, beta: Array, *, epsilon: float = 1e-5) -> tuple[Array, Array, Array]:
    """Over every axis but the second (channels). Returns y, and the batch's mean and 1/std for running statistics."""
    if x.ndim < 2 or gamma.shape != (x.shape[1],) or beta.shape != gamma.shape:
        raise BadInput(f"batch_norm of {x.shape} with gamma {gamma.shape} and beta {beta.shape}: one entry per channel is expected.")
    row = (1, x.shape[1], *(1,) * (x.ndim - 2))
    return _norm("batch_norm", x, reshape(gamma, row), reshape(beta, row), row, epsilon)


def layer_norm(x: Array, gamma: Array, beta: Array, *, epsilon: float = 1e-5) -> Array:
    """Over the last axis."""
    if x.ndim < 1 or gamma.shape != x.shape[-1:] or beta.shape != gamma.shape:
        raise BadInput(f"layer_norm of {x.shape} with gamma {gamma.shape} and beta {beta.shape}: one entry per feature is expected.")
    scale = (*(1,) * (x.ndim - 1), x.shape[-1])
    return _norm("layer_norm", x, reshape(gamma, scale), reshape(beta, scale), (*x.shape[:-1], 1), epsilon)[0]


def _find_stretched_axes(shape: Shape, row: Shape) -> tuple[int, ...]:
    return tuple(k for k, n in enumerate(row) if n == 1 and shape[k] != 1)


def _norm(name: str, x: Array, gamma: Array, beta: Array, row: Shape, epsilon: float) -> tuple[Array, Array, Array]:
    axes = _find_stretched_axes(x.shape, row)
    count = prod(x.shape[a] for a in axes)

    def kernel(inputs: Sequence[Data], outputs: Sequence[Data], _: Sequence[Data]) -> None:
        (x, gamma, beta), (y, mean, rstd) = inputs, outputs
        _sum(x, axes, mean)
        np.multiply(mean, 1.0 / count, out=mean)
        np.subtract(x, mean, out=y)
        np.multiply(y, y, out=y)
        _sum(y, axes, rstd)
        np.multiply(rstd, 1.0 / count, out=rstd)
        np.add(rstd, epsilon, out=rstd)
        np.sqrt(rstd, out=rstd)
        np.divide(1.0, rstd, out=rstd)
        np.subtract(x, mean, out=y)
        np.multiply(y, rstd, out=y)
        np.multiply(y, gamma, out=y)
        np.add(y, beta, out=y)

    def vjp(node: Node, u: Sequence[Array | None]) -> Sequence[Array | None]:
        if u[1] is not None or u[2] is not None or u[0] is None:
            return vjp_through(lambda x, gamma, beta: _norm_in_simple_ops(x, gamma, beta, axes, count, epsilon), node, u)
        (x, gamma, _), (_, mean, rstd) = node.inputs, node.outputs
        return _norm_grad(name, u[0], x, mean, rstd, gamma, axes, count)

    specs = [x.view.spec, Spec(row, x.dtype), Spec(row, x.dtype)]
    y, mean, rstd = x.tape.apply(name, [x, gamma, beta], specs, kernel, vjp=vjp, flops=9 * x.size)
    return y, mean, rstd


def _norm_grad(
    name: str, g: Array, x: Array, mean: Array, rstd: Array, gamma: Array, axes: tuple[int, ...], count: int
) -> tuple[Array, Array, Array]:
    """dx = γ/σ (g - mean(g) - x̂ mean(g x̂)) with the means over the normalized axes of γ g; dγ = Σ g x̂; dβ = Σ g."""
    over = _find_stretched_axes(x.shape, gamma.shape)

    def kernel(inputs: Sequence[Data], outputs: Sequence[Data], scratch: Sequence[Data]) -> None:
        (g, x, mean, rstd, gamma), (dx, dgamma, dbeta), (row, whole) = inputs, outputs, scratch
        np.subtract(x, mean, out=whole)
        np.multiply(whole, rstd, out=whole)  # x̂
        np.multiply(g, whole, out=dx)
        _sum(dx, over, dgamma)
        _sum(g, over, dbeta)
        np.multiply(dx, gamma, out=dx)
        _sum(dx, axes, row)
        np.multiply(row, 1.0 / count, out=row)
        np.multiply(whole, row, out=whole)  # x̂ mean(γ g x̂)
        np.multiply(g, gamma, out=dx)
        _sum(dx, axes, row)
        np.multiply(row, 1.0 / count, out=row)
        np.subtract(dx, row, out=dx)
        np.subtract(dx, whole, out=dx)
        np.multiply(dx, rstd, out=dx)

    def vjp(node: Node, u: Sequence[Array | None]) -> Sequence[Array | None]:
        return vjp_through(lambda *inputs: _norm_grad_in_simple_ops(*inputs, axes=axes, over=over, count=count), node, u)

    specs = [x.view.spec, gamma.view.spec, gamma.view.spec]
    dx, dgamma, dbeta = x.tape.apply(
        f"{name}_grad", [g, x, mean, rstd, gamma], specs, kernel, vjp=vjp, scratch=[mean.view.spec, x.view.spec], flops=12 * x.size
    )
    return dx, dgamma, dbeta


def _norm_in_simple_ops(
    x: Array, gamma: Array, beta: Array, axes: tuple[int, ...], count: int, epsilon: float
) -> tuple[Array, Array, Array]:
    mean = multiply(sum_over(x, axes, keepdims=True), 1.0 / count)
    centred = subtract(x, mean)
    rstd = power(add(multiply(sum_over(power(centred, 2), axes, keepdims=True), 1.0 / count), epsilon), -0.5)
    return add(multiply(multiply(centred, rstd), gamma), beta), mean, rstd


def _norm_grad_in_simple_ops(
    g: Array, x: Array, mean: Array, rstd: Array, gamma: Array, *, axes: tuple[int, ...], over: tuple[int, ...], count: int
) -> tuple[Array, Array, Array]:
    hat = multiply(subtract(x, mean), rstd)
    scaled = multiply(g, gamma)
    mean_g = multiply(sum_over(scaled, axes, keepdims=True), 1.0 / count)
    mean_gx = multiply(sum_over(multiply(scaled, hat), axes, keepdims=True), 1.0 / count)
    dx = multiply(subtract(subtract(scaled, mean_g), multiply(hat, mean_gx)), rstd)
    return dx, sum_over(multiply(g, hat), over, keepdims=True), sum_over(g, over, keepdims=True)


def _sum(x: Data, axes: tuple[int, ...], out: Data) -> None:
    if axes:
        np.add.reduce(x, axis=axes, keepdims=True, out=out)
    else:
        np.copyto(out, x)


__all__ = ["batch_norm", "layer_norm"]
