"""Means, in terms of sums."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from memfit.tape.array import Array
from memfit.tape.ops.broadcast import resolve_axes, sum_over
from memfit.tape.ops.elementwise import multiply


def mean_over(x: Array, axes: int | Sequence[int] | None = None, *, keepdims: bool = False) -> Array:
    count = prod(x.shape[a] for a in resolve_axes(x, axes))
    return multiply(sum_over(x, axes, keepdims=keepdims), 1.0 / max(count, 1))
