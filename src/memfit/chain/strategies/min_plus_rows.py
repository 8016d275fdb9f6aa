"""One row of a checkpointing table: a min-plus convolution of a known row with the row being made.

    h(l) = min( fallback(l),  constant + min_{x + i = l - 1} [ known(x) + h(i) + slope (i + 1) ] ),   h(0) given

Every table of the family (H-Revolve at any level, Disk-Revolve's two rows) is made of such rows. Each is O(l^2) because the
rows are not convex (a write that pays off late bends them the wrong way), so no split can be skipped; what helps is
doing the additions in order in memory. Short rows take NumPy, long ones a compiled loop that pushes finished blocks of h
forward through the cache (about 5e9 additions a second on one core; NumPy about 5e8).
"""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt

from memfit.jit.kernel import kernel

Row = npt.NDArray[np.float64]
COMPILE_FROM = 4_000  # steps; below, importing and compiling takes longer than NumPy does
_BLOCK, _TILE = 64, 2_048
_STACK = 32  # rows at a time


def convolve_row(known: Row, fallback: Row, *, slope: float, constant: float, first: float) -> Row:
    """The row h above, for every length up to that of `known`."""
    if len(known) <= COMPILE_FROM:
        return _numpy_row(known, fallback, slope, constant, first)
    return _push_row(known, fallback, slope, constant, first)


def level_rows(below: Row, slots: int, *, slope: float, read: float, write: float, first: float) -> list[Row]:
    """Opt'(., m) for m = 1, 2, ... up to `slots`, or up to the first one that further slots do not change.

    Row m is made from min(below, write + row m - 1); short rows are made many at a time, because length l of every row needs
    only shorter lengths of the row before.
    """
    rows: list[Row] = []
    inner = below
    while len(rows) < slots:
        if len(below) <= COMPILE_FROM:
            made = list(_stack_rows(inner, below, min(_STACK, slots - len(rows)), slope, read, write, first))
        else:
            made = [convolve_row(inner, below, slope=slope, constant=read, first=first)]
        for row in made:
            rows.append(row)
            new = np.minimum(below, write + row)
            if np.array_equal(new, inner):
                return rows
            inner = new
    return rows


def find_split(known: Row, made: Row, length: int, *, slope: float) -> int:
    """The j = i + 1 at which h(length) is attained: how far the schedule advances before its next checkpoint."""
    candidates = made[:length] + slope * np.arange(1, length + 1) + known[:length][::-1]
    return int(candidates.argmin()) + 1


def find_split_of_known(known: Row, made: Row, length: int) -> int:
    """The x + 1 at which a row with slope 0 is attained, when the known part is the one before the checkpoint."""
    return int((known[:length] + made[:length][::-1]).argmin()) + 1


def _numpy_row(known: Row, fallback: Row, slope: float, constant: float, first: float) -> Row:
    last = len(known) - 1
    made, shifted = np.empty(last + 1), np.empty(last + 1)
    backwards = np.ascontiguousarray(known[::-1])
    made[0], shifted[0] = first, first + slope + constant
    scratch = np.empty(last + 1)
    for length in range(1, last + 1):
        np.add(shifted[:length], backwards[last - length + 1 :], out=scratch[:length])
        value = min(scratch[:length].min(), fallback[length])
        made[length] = value
        shifted[length] = value + (length + 1) * slope + constant
    return made


def _stack_rows(inner: Row, below: Row, num_rows: int, slope: float, read: float, write: float, first: float) -> Row:
    last = len(below) - 1
    made, shifted, backwards = np.empty((num_rows, last + 1)), np.empty((num_rows, last + 1)), np.empty((num_rows, last + 1))
    backwards[0], backwards[1:, last] = inner[::-1], first
    made[:, 0], shifted[:, 0] = first, first + slope + read
    scratch = np.empty((num_rows, last + 1))
    for length in range(1, last + 1):
        sums = scratch[:, :length]
        np.add(shifted[:, :length], backwards[:, last - length + 1 :], out=sums)
        values = np.minimum(sums.min(axis=1), below[length])
        made[:, length] = values
        shifted[:, length] = values + ((length + 1) * slope + read)
        if length < last:
            backwards[1:, last - length] = np.minimum(below[length], write + values[:-1])
    return made


# Without nnan a minimum of floats does not vectorise; there are infinities in the rows, but never a NaN.
@partial(kernel, fastmath={"nnan", "nsz"})
def _push_row(known: Row, fallback: Row, slope: float, constant: float, first: float) -> Row:
    size = len(known)
    made, shifted, best = np.empty(size), np.empty(size), fallback.copy()
    made[0], shifted[0] = first, first + slope + constant
    for start in range(0, size, _BLOCK):
        stop = min(start + _BLOCK, size)
        for length in range(max(start, 1), stop):  # inside the block, one length after another
            value = best[length]
            for i in range(start, length):
                value = min(value, shifted[i] + known[length - 1 - i])
            made[length] = value
            shifted[length] = value + (length + 1) * slope + constant
        for tile in range(stop, size, _TILE):  # the finished block's share in all later lengths
            width = min(_TILE, size - tile)
            target = best[tile : tile + width]
            for i in range(start, stop):
                base = shifted[i]
                source = known[tile - 1 - i : tile - 1 - i + width]
                for q in range(width):
                    value = base + source[q]
                    target[q] = value if value < target[q] else target[q]
    return made
