"""Shapes, types and views: how the bytes of a storage are read as an array.

    storage   |0 1 2 3 4 5 6 7|           a View says: start at `offset`, step by `strides`
    View            (2, 3), strides (0, 8)    a broadcast row: no bytes of its own

Reshapes, transposes, slices and broadcasts are Views of the value they come from. They never become ops of the graph: the
op that reads them reads the storage underneath, so a planner sees only true dependencies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memfit.core.errors import BadInput

Data = NDArray[Any]
Shape = tuple[int, ...]
ALIGNMENT_BYTES = 8
"""Every buffer is a multiple of this: packed one behind the other in an arena, all of them stay aligned for float64."""


_NOTHING = bytearray(16)


def round_up_bytes(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def row_strides(shape: Shape, itemsize: int) -> tuple[int, ...]:
    strides, step = [], itemsize
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


@dataclass(frozen=True, slots=True)
class Spec:
    """A whole array in row order, with no bytes yet."""

    shape: Shape
    dtype: np.dtype[Any]

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def buffer_bytes(self) -> int:
        """What a buffer for it occupies."""
        return round_up_bytes(self.nbytes)

    def view(self) -> View:
        return View(self.shape, row_strides(self.shape, self.dtype.itemsize), 0, self.dtype)


@dataclass(frozen=True, slots=True)
class View:
    """How to read a buffer: NumPy's shape, strides and offset, in bytes."""

    shape: Shape
    strides: tuple[int, ...]
    offset: int
    dtype: np.dtype[Any]

    def of(self, buffer: Data) -> Data:
        """The array that this view sees in a buffer of bytes."""
        if 0 in self.shape:
            return np.ndarray(self.shape, self.dtype, buffer=_NOTHING)  # np.empty would allocate a byte
        return np.ndarray(self.shape, self.dtype, buffer=buffer.data, offset=self.offset, strides=self.strides)

    @property
    def spec(self) -> Spec:
        return Spec(self.shape, self.dtype)

    @property
    def is_rows(self) -> bool:
        """In row order without gaps, so that it can be reshaped or overwritten as a whole."""
        rows = row_strides(self.shape, self.dtype.itemsize)
        return all(n == 1 or s == r for n, s, r in zip(self.shape, self.strides, rows, strict=True))

    @property
    def suits_blas(self) -> bool:
        """Whether matmul can hand the last two axes to BLAS as they are; otherwise NumPy loops slowly."""
        if len(self.shape) < 2:
            return self.is_rows
        (m, n), (a, b), item = self.shape[-2:], self.strides[-2:], self.dtype.itemsize
        return (b == item and a >= n * item) or (a == item and b >= m * item)

    def broadcast(self, shape: Shape) -> View:
        lead = len(shape) - len(self.shape)
        if lead < 0 or any(n not in (1, target) for n, target in zip(self.shape, shape[lead:], strict=True)):
            raise BadInput(f"shape {self.shape} cannot be broadcast to {shape}: every axis must be equal or 1, aligned at the right.")
        inner = tuple(0 if n == 1 and target != 1 else s for n, target, s in zip(self.shape, shape[lead:], self.strides, strict=True))
        return View(shape, (0,) * lead + inner, self.offset, self.dtype)

    def transpose(self, axes: Sequence[int]) -> View:
        if sorted(axes) != list(range(len(self.shape))):
            raise BadInput(f"axes {tuple(axes)} are not an order of the {len(self.shape)} axes of shape {self.shape}.")
        return View(tuple(self.shape[a] for a in axes), tuple(self.strides[a] for a in axes), self.offset, self.dtype)

    def reshape(self, shape: Shape) -> View:
        if prod(shape) != prod(self.shape):
            raise BadInput(f"cannot reshape {self.shape} ({prod(self.shape)} elements) to {shape} ({prod(shape)} elements).")
        assert self.is_rows, "a view that is not in row order is copied before it is reshaped"
        return View(shape, row_strides(shape, self.dtype.itemsize), self.offset, self.dtype)

    def narrow(self, axis: int, start: int, stop: int) -> View:
        """The half-open range [start, stop) of one axis."""
        if not 0 <= start <= stop <= self.shape[axis]:
            raise BadInput(f"range [{start}, {stop}) is outside axis {axis} of shape {self.shape}.")
        shape = (*self.shape[:axis], stop - start, *self.shape[axis + 1 :])
        return View(shape, self.strides, self.offset + start * self.strides[axis], self.dtype)


def joint_shape(a: Shape, b: Shape) -> Shape:
    """The shape to which NumPy broadcasts both."""
    try:
        return tuple(np.broadcast_shapes(a, b))
    except ValueError:
        raise BadInput(f"shapes {a} and {b} do not broadcast: every axis must be equal or 1, aligned at the right.") from None


def normal_axis(axis: int, ndim: int) -> int:
    if not -ndim <= axis < ndim:
        raise BadInput(f"axis {axis} is outside an array of {ndim} axes.")
    return axis % ndim
