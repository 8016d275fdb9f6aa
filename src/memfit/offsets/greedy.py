"""Greedy placement: take the buffers in some order and put each into the hole that fits it best.

    address │ ┌────────┐   hole    ┌───────┐
            │ │   a    │  <──x──>  │   b   │      x goes into the smallest hole left open, over its whole
            └─┴────────┴───────────┴───────┴──>   life, by what was placed before; else above everything

Where in the flow: the first answer for every problem, and the only one for very large ones. By size is the classic
(TFLite's `greedy by size`, Pisarchyk and Lee 2020); by area and by lifetime do better on others, so all are tried.

Looking at every placed buffer for every new one is quadratic: 10**10 looks at 10**5 buffers. Instead time is cut into
windows at several widths, half overlapping, and every window keeps its placed buffers sorted by address. A buffer is
looked up in the narrowest window that covers its life, so a short-lived one only meets its own neighbourhood.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from memfit.jit.kernel import kernel_above, kernel_helper
from memfit.offsets.problem import Ints, Problem

_BUFFERS_PER_FINEST_WINDOW = 8
_MAX_WINDOWS = 512
_COMPILE_FROM = 128  # buffers; fewer are placed in plain Python as long as that takes less than loading the kernel
_PATIENCE_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Half-overlapping windows over time at widths 2, 4, 8 ... cells; `cell[t]` is the cell of time rank t."""

    first_cell: Ints  # per buffer
    last_cell: Ints
    level_start: Ints  # first window of each level; the last level is one window over everything
    list_start: Ints  # where each window's address-sorted list begins


def make_windows(problem: Problem) -> Windows:
    """Cells hold about equally many births, so that crowded times get finer windows."""
    n = problem.num_buffers
    num_cells = 1
    while num_cells < _MAX_WINDOWS and num_cells * _BUFFERS_PER_FINEST_WINDOW * 16 < n:
        num_cells *= 2
    births = np.sort(problem.start)
    edges = births[(np.arange(1, num_cells) * n) // num_cells] if num_cells > 1 else births[:0]
    first = np.searchsorted(edges, problem.start, side="right")
    last = np.maximum(np.searchsorted(edges, problem.stop - 1, side="right"), first)
    counts, level_start = _count_members(first, last, num_cells)
    list_start = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=list_start[1:])
    return Windows(first_cell=first, last_cell=last, level_start=level_start, list_start=list_start)


def _count_members(first: Ints, last: Ints, num_cells: int) -> tuple[Ints, Ints]:
    """How many buffers each window will ever hold. Window k of half-width h covers cells [k h, (k + 2) h)."""
    counts: list[Ints] = []
    level_start = [0]
    half = 1
    while half < num_cells:
        num = num_cells // half - 1 if num_cells // half > 1 else 1
        change = np.zeros(num + 1, np.int64)
        np.add.at(change, np.clip(first // half - 1, 0, num - 1), 1)
        np.add.at(change, np.clip(last // half, 0, num - 1) + 1, -1)
        counts.append(np.cumsum(change)[:-1])
        level_start.append(level_start[-1] + num)
        half *= 2
    counts.append(np.array([len(first)], np.int64))
    level_start.append(level_start[-1] + 1)
    return np.concatenate(counts), np.array(level_start, np.int64)


def greedy_orders(problem: Problem) -> Iterator[tuple[str, Ints]]:
    """The insertion orders worth trying, best on average first."""
    life, size = problem.stop - problem.start, problem.size  # counted in events: programs with idle stretches look alike
    area = life * size.astype(np.float64)
    yield "greedy by size", np.lexsort((problem.start, -size))
    yield "greedy by size and lifetime", np.lexsort((problem.start, -life, -size))
    yield "greedy by area", np.lexsort((problem.start, -size, -area))
    yield "greedy by lifetime", np.lexsort((problem.start, -size, -life))
    yield "greedy by birth", np.lexsort((-size, problem.start))


def place_in_order(problem: Problem, windows: Windows, order: Ints) -> Ints:
    """Offsets after inserting the buffers in `order`, fixed ones first, each into the best hole."""
    fixed_first = np.concatenate([order[problem.fixed[order] >= 0], order[problem.fixed[order] < 0]])
    lists = np.empty(int(windows.list_start[-1]), np.int32)
    counts = np.zeros(len(windows.list_start) - 1, np.int64)
    return _best_fit(
        problem.start,
        problem.stop,
        problem.size,
        problem.alignment,
        problem.fixed,
        fixed_first,
        windows.first_cell,
        windows.last_cell,
        windows.level_start,
        windows.list_start,
        lists,
        counts,
    )


@kernel_helper
def _window_of(first: int, last: int, level_start: Ints) -> Any:
    """The narrowest window that covers cells first .. last."""
    num_levels = len(level_start) - 1
    level, half = 0, 1
    while level < num_levels - 1 and last - (first // half) * half >= 2 * half:
        level += 1
        half *= 2
    window = level_start[level]
    if level < num_levels - 1:
        window += min(first // half, level_start[level + 1] - level_start[level] - 1)
    return window


@kernel_helper
def _best_hole(x: int, start: Ints, stop: Ints, size: Ints, alignment: Ints, offsets: Ints, members: Any) -> Any:
    """Where x goes among the members, lowest first: the smallest hole that fits over its whole life, else above all it meets."""
    end_of_last = np.int64(0)
    best, best_waste = np.int64(-1), np.int64(9223372036854775807)
    born, dies = start[x], stop[x]
    for y in members:
        if start[y] < dies and born < stop[y]:
            if offsets[y] > end_of_last:
                at = -(-end_of_last // alignment[x]) * alignment[x]
                waste = offsets[y] - at - size[x]
                if 0 <= waste < best_waste:
                    best, best_waste = at, waste
            end_of_last = max(end_of_last, offsets[y] + size[y])
    return best if best >= 0 else -(-end_of_last // alignment[x]) * alignment[x]


@kernel_helper
def _insert(x: int, offsets: Ints, members: Any, count: int) -> None:
    """Put x among the first `count` members, which are sorted by address."""
    a, b = 0, count
    while a < b:
        middle = (a + b) >> 1
        if offsets[members[middle]] <= offsets[x]:
            a = middle + 1
        else:
            b = middle
    for k in range(count, a, -1):
        members[k] = members[k - 1]
    members[a] = x


@kernel_above(_COMPILE_FROM, patience_s=_PATIENCE_S)
def _best_fit(
    start: Ints, stop: Ints, size: Ints, alignment: Ints, fixed: Ints, order: Ints,
    first: Ints, last: Ints, level_start: Ints, list_start: Ints, lists: Any, counts: Ints,
) -> Ints:  # fmt: skip
    offsets = np.full(len(size), -1, np.int64)
    num_levels = len(level_start) - 1
    last_look = np.full(len(counts), -1, np.int64)  # when a window is asked for the last time: later ones need not go in
    for position in range(len(order)):
        x = order[position]
        if fixed[x] < 0:
            last_look[_window_of(first[x], last[x], level_start)] = position
    for position in range(len(order)):
        x = order[position]
        if fixed[x] >= 0:
            offsets[x] = fixed[x]
        else:
            window = _window_of(first[x], last[x], level_start)
            begin = list_start[window]
            offsets[x] = _best_hole(x, start, stop, size, alignment, offsets, lists[begin : begin + counts[window]])
        half = 1
        for level in range(num_levels):
            if level < num_levels - 1:
                num = level_start[level + 1] - level_start[level]
                low = min(max(first[x] // half - 1, 0), num - 1)
                high = min(last[x] // half, num - 1)
            else:
                low = high = 0
            for window in range(level_start[level] + low, level_start[level] + high + 1):
                if last_look[window] > position:
                    _insert(x, offsets, lists[list_start[window] : list_start[window + 1]], counts[window])
                    counts[window] += 1
            half *= 2
    return offsets
