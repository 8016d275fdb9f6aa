"""Means and variances, in terms of sums."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from memfit.tape.array import Array
from memfit.tape.ops.broadcast import resolve_axes, sum_over
from memfit.tape.ops.elementwise import multiply, power, subtract


def mean_over(x: Array, axes: int | Sequence[int] | None = None, *, keepdims: bool = False) -> Array:
    count = prod(x.shape[a] for a in resolve_axes(x, axes))
    return multiply(sum_over(x, axes, keepdims=keepdims), 1.0 / max(count, 1))


def variance_over(x: Array, axes: int | Sequence[int] | None = None, *, keepdims: bool = False) -> Array:
    """The mean squared distance from the mean (not Bessel's)."""
    return mean_over(power(subtract(x, mean_over(x, axes, keepdims=True)), 2), axes, keepdims=keepdims)
