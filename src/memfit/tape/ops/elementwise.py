"""Element-by-element operations with NumPy broadcasting. All of them may overwrite an input that nobody else needs.

Gradients name only what they need: exp and tanh their output, log and sin their input, add and negate nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from memfit.core.errors import BadInput
from memfit.tape.array import Array, Node, Vjp, get_only
from memfit.tape.array_view import Data, Spec, joint_shape
from memfit.tape.ops.broadcast import broadcast_to

Fill = Callable[..., Any]


def lift(like: Array, other: Any) -> Array:
    """A constant as a leaf of the same tape and type."""
    if isinstance(other, Array):
        return other
    return like.tape.array(np.asarray(other, dtype=like.dtype), name="constant")


def unary(name: str, x: Array, fill: Fill, vjp: Vjp | None, *, flops_per_element: int = 1) -> Array:
    """`fill(x, out)` writes the result; it may be given out = x."""

    def kernel(inputs: Sequence[Data], outputs: Sequence[Data], _: Sequence[Data]) -> None:
        fill(inputs[0], outputs[0])

    return x.tape.apply(name, [x], [x.view.spec], kernel, vjp=vjp, overwrites=(0,), flops=flops_per_element * x.size)[0]


def _binary(name: str, ufunc: np.ufunc, a: Array, b: Any, vjp: Vjp) -> Array:
    b = lift(a, b)
    if a.dtype != b.dtype:
        raise BadInput(f"{name} of {a.dtype} and {b.dtype}: bring both to one type with cast() first.")
    shape = joint_shape(a.shape, b.shape)
    a, b = broadcast_to(a, shape), broadcast_to(b, shape)

    def kernel(inputs: Sequence[Data], outputs: Sequence[Data], _: Sequence[Data]) -> None:
        ufunc(inputs[0], inputs[1], out=outputs[0])

    return a.tape.apply(name, [a, b], [Spec(shape, a.dtype)], kernel, vjp=vjp, overwrites=(0, 1))[0]


def _scalar(x: Any) -> bool:
    return isinstance(x, (int, float, np.floating, np.integer)) and not isinstance(x, bool)


def add(a: Array, b: Any) -> Array:
    if _scalar(b):
        b = float(b)  # a NumPy scalar would widen float32
        return unary("add_scalar", a, lambda x, out: np.add(x, b, out=out), lambda _, u: [get_only(u)])
    return _binary("add", np.add, a, b, lambda _, u: [get_only(u), get_only(u)])


def subtract(a: Array, b: Any) -> Array:
    if _scalar(b):
        return add(a, -b)
    return _binary("subtract", np.subtract, a, b, lambda _, u: [get_only(u), negate(get_only(u))])


def multiply(a: Array, b: Any) -> Array:
    if _scalar(b):
        b = float(b)
        return unary("scale", a, lambda x, out: np.multiply(x, b, out=out), lambda _, u: [multiply(get_only(u), b)])
    return _binary("multiply", np.multiply, a, b, lambda n, u: [multiply(get_only(u), n.inputs[1]), multiply(get_only(u), n.inputs[0])])


def divide(a: Array, b: Any) -> Array:
    if _scalar(b):
        return multiply(a, 1.0 / b)

    def vjp(node: Node, u: Sequence[Array | None]) -> list[Array]:
        quotient = divide(get_only(u), node.inputs[1])
        return [quotient, negate(multiply(quotient, node.outputs[0]))]

    return _binary("divide", np.divide, a, b, vjp)


def negate(x: Array) -> Array:
    return unary("negate", x, lambda x, out: np.negative(x, out=out), lambda _, u: [negate(get_only(u))])


def exp(x: Array) -> Array:
    return unary("exp", x, lambda x, out: np.exp(x, out=out), lambda n, u: [multiply(get_only(u), n.outputs[0])], flops_per_element=10)


def log(x: Array) -> Array:
    return unary("log", x, lambda x, out: np.log(x, out=out), lambda n, u: [divide(get_only(u), n.inputs[0])], flops_per_element=10)


def sin(x: Array) -> Array:
    return unary("sin", x, lambda x, out: np.sin(x, out=out), lambda n, u: [multiply(get_only(u), cos(n.inputs[0]))], flops_per_element=20)


def cos(x: Array) -> Array:
    return unary(
        "cos", x, lambda x, out: np.cos(x, out=out), lambda n, u: [negate(multiply(get_only(u), sin(n.inputs[0])))], flops_per_element=20
    )


def sqrt(x: Array) -> Array:
    return unary(
        "sqrt", x, lambda x, out: np.sqrt(x, out=out), lambda n, u: [divide(multiply(get_only(u), 0.5), n.outputs[0])], flops_per_element=5
    )


def power(x: Array, exponent: float) -> Array:
    """x to a constant power."""

    def vjp(node: Node, u: Sequence[Array | None]) -> list[Array]:
        if exponent == 2:
            return [multiply(multiply(get_only(u), node.inputs[0]), 2.0)]
        return [multiply(multiply(get_only(u), power(node.inputs[0], exponent - 1)), float(exponent))]

    if exponent == 2:
        return unary("square", x, lambda x, out: np.multiply(x, x, out=out), vjp)
    return unary("power", x, lambda x, out: np.power(x, exponent, out=out), vjp, flops_per_element=20)


def cast(x: Array, dtype: Any) -> Array:
    """Another number type; the gradient is cast back."""
    target, origin = np.dtype(dtype), x.dtype
    if target == origin:
        return x

    def kernel(inputs: Sequence[Data], outputs: Sequence[Data], _: Sequence[Data]) -> None:
        np.copyto(outputs[0], inputs[0], casting="unsafe")

    return x.tape.apply("cast", [x], [Spec(x.shape, target)], kernel, vjp=lambda _, u: [cast(get_only(u), origin)])[0]
