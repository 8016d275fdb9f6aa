"""Activations and softmaxes. Each gradient is one op that reads the *output*, so the input can go (SOURCES A4)."""

from __future__ import annotations

from collections.abc import Sequence
from math import pi, sqrt

import numpy as np

from memfit.tape.array import Array, Kernel, Node, Vjp, get_only
from memfit.tape.array_view import Data, Spec
from memfit.tape.ops.broadcast import sum_over
from memfit.tape.ops.elementwise import add, exp, multiply, negate, power, subtract, unary


def relu(x: Array) -> Array:
    return unary("relu", x, lambda x, out: np.maximum(x, 0, out=out), lambda n, u: [relu_grad(get_only(u), n.outputs[0])])


def relu_grad(g: Array, y: Array) -> Array:
    """g where y > 0; linear in g."""

    def kernel(inputs: Sequence[Data], outputs: Sequence[Data], _: Sequence[Data]) -> None:
        np.sign(inputs[1], out=outputs[0])  # y is never negative: 0 or 1
        np.multiply(outputs[0], inputs[0], out=outputs[0])

    return _gradient("relu_grad", g, y, kernel, lambda n, u: [relu_grad(get_only(u), n.inputs[1]), None], overwrites=(1,))


def tanh(x: Array) -> Array:
    return unary("tanh", x, lambda x, out: np.tanh(x, out=out), lambda n, u: [tanh_grad(get_only(u), n.outputs[0])], flops_per_element=20)


def tanh_grad(g: Array, y: Array) -> Array:
    """g (1 - y²)"""

    def kernel(inputs: Sequence[Data], outputs: Sequence[Data], _: Sequence[Data]) -> None:
        np.multiply(inputs[1], inputs[1], out=outputs[0])
        np.subtract(1, outputs[0], out=outputs[0])
        np.multiply(outputs[0], inputs[0], out=outputs[0])

    def vjp(node: Node, u: Sequence[Array | None]) -> list[Array]:
        g, y = node.inputs
        return [tanh_grad(get_only(u), y), multiply(multiply(multiply(get_only(u), g), y), -2.0)]

    return _gradient("tanh_grad", g, y, kernel, vjp, overwrites=(1,))


def sigmoid(x: Array) -> Array:
    def fill(x: Data, out: Data) -> None:
        np.multiply(x, 0.5, out=out)  # (1 + tanh(x / 2)) / 2 does not overflow
        np.tanh(out, out=out)
        np.add(out, 1, out=out)
        np.multiply(out, 0.5, out=out)

    return unary("sigmoid", x, fill, lambda n, u: [sigmoid_grad(get_only(u), n.outputs[0])], flops_per_element=23)


def sigmoid_grad(g: Array, y: Array) -> Array:
    """g y (1 - y)"""

    def kernel(inputs: Sequence[Data], outputs: Sequence[Data], _: Sequence[Data]) -> None:
        np.subtract(1, inputs[1], out=outputs[0])
        np.multiply(outputs[0], inputs[1], out=outputs[0])
        np.multiply(outputs[0], inputs[0], out=outputs[0])

    def vjp(node: Node, u: Sequence[Array | None]) -> list[Array]:
        g, y = node.inputs
        return [sigmoid_grad(get_only(u), y), multiply(multiply(get_only(u), g), add(multiply(y, -2.0), 1.0))]

    return _gradient("sigmoid_grad", g, y, kernel, vjp)


def gelu(x: Array) -> Array:
    """The tanh form of GELU."""
    inner = multiply(add(x, multiply(multiply(power(x, 2), x), 0.044715)), sqrt(2 / pi))
    return multiply(multiply(x, 0.5), add(tanh(inner), 1.0))


def softmax(x: Array) -> Array:
    """Over the last axis."""

    def kernel(inputs: Sequence[Data], outputs: Sequence[Data], scratch: Sequence[Data]) -> None:
        (out,), (row,) = outputs, scratch
        np.maximum.reduce(inputs[0], axis=-1, keepdims=True, out=row)
        np.subtract(inputs[0], row, out=out)
        np.exp(out, out=out)
        np.add.reduce(out, axis=-1, keepdims=True, out=row)
        np.divide(out, row, out=out)

    return x.tape.apply(
        "softmax", [x], [x.view.spec], kernel, vjp=_softmax_vjp, scratch=[_rows(x)], overwrites=(0,), flops=14 * x.size
    )[0]  # fmt: skip


def _softmax_vjp(node: Node, u: Sequence[Array | None]) -> list[Array]:
    return [softmax_grad(get_only(u), node.outputs[0])]


def softmax_grad(g: Array, y: Array) -> Array:
    """y (g - Σ g y)"""

    def kernel(inputs: Sequence[Data], outputs: Sequence[Data], scratch: Sequence[Data]) -> None:
        (g, y), (out,), (row,) = inputs, outputs, scratch
        np.multiply(g, y, out=out)
        np.add.reduce(out, axis=-1, keepdims=True, out=row)
        np.subtract(g, row, out=out)
        np.multiply(out, y, out=out)

    def vjp(node: Node, u: Sequence[Array | None]) -> list[Array]:
        (g, y), v = node.inputs, get_only(u)
        centred = subtract(g, sum_over(multiply(g, y), -1, keepdims=True))
        return [softmax_grad(v, y), subtract(multiply(v, centred), multiply(g, sum_over(multiply(v, y), -1, keepdims=True)))]

    return _gradient("softmax_grad", g, y, kernel, vjp, scratch=[_rows(y)], flops=5 * y.size)


def log_softmax(x: Array) -> Array:
    """Over the last axis."""

    def kernel(inputs: Sequence[Data], outputs: Sequence[Data], scratch: Sequence[Data]) -> None:
        (out,), (row, whole) = outputs, scratch
        np.maximum.reduce(inputs[0], axis=-1, keepdims=True, out=row)
        np.subtract(inputs[0], row, out=out)
        np.exp(out, out=whole)
        np.add.reduce(whole, axis=-1, keepdims=True, out=row)
        np.log(row, out=row)
        np.subtract(out, row, out=out)

    def vjp(node: Node, u: Sequence[Array | None]) -> list[Array]:
        return [log_softmax_grad(get_only(u), node.outputs[0])]

    return x.tape.apply(
        "log_softmax", [x], [x.view.spec], kernel, vjp=vjp, scratch=[_rows(x), x.view.spec], overwrites=(0,), flops=14 * x.size
    )[0]  # fmt: skip


def log_softmax_grad(g: Array, y: Array) -> Array:
    """g - exp(y) Σ g"""

    def kernel(inputs: Sequence[Data], outputs: Sequence[Data], scratch: Sequence[Data]) -> None:
        (g, y), (out,), (row,) = inputs, outputs, scratch
        np.add.reduce(g, axis=-1, keepdims=True, out=row)
        np.exp(y, out=out)
        np.multiply(out, row, out=out)
        np.subtract(g, out, out=out)

    def vjp(node: Node, u: Sequence[Array | None]) -> list[Array]:
        (g, y), v = node.inputs, get_only(u)
        weighted = multiply(v, exp(y))
        return [
            subtract(v, sum_over(weighted, -1, keepdims=True)),
            negate(multiply(weighted, sum_over(g, -1, keepdims=True))),
        ]

    return _gradient("log_softmax_grad", g, y, kernel, vjp, scratch=[_rows(y)], overwrites=(1,), flops=13 * y.size)


def _rows(x: Array) -> Spec:
    return Spec((*x.shape[:-1], 1), x.dtype)


def _gradient(
    name: str,
    g: Array,
    y: Array,
    kernel: Kernel,
    vjp: Vjp,
    *,
    scratch: Sequence[Spec] = (),
    overwrites: Sequence[int] = (),
    flops: int | None = None,
) -> Array:
    flops = 3 * y.size if flops is None else flops
    return g.tape.apply(name, [g, y], [y.view.spec], kernel, vjp=vjp, scratch=scratch, overwrites=overwrites, flops=flops)[0]
