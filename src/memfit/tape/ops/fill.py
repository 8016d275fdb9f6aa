"""Arrays of one number. They read nothing, so a schedule may run them as late as their first reader."""

from __future__ import annotations

from collections.abc import Sequence

from memfit.tape.array import Array
from memfit.tape.array_view import Data, Shape, Spec
from memfit.tape.ops.broadcast import broadcast_to


def full_like(x: Array, number: float, name: str, shape: Shape | None = None) -> Array:
    def kernel(_: Sequence[Data], outputs: Sequence[Data], __: Sequence[Data]) -> None:
        outputs[0][...] = number

    return x.tape.apply(name, [], [Spec(x.shape if shape is None else shape, x.dtype)], kernel, vjp=None)[0]


def zeros_like(x: Array) -> Array:
    """Zeros in bytes of their own: a gradient buffer."""
    return full_like(x, 0.0, "zeros")


def ones_like(x: Array) -> Array:
    """A single one, seen as the shape of x."""
    return broadcast_to(full_like(x, 1.0, "one", ()), x.shape)
