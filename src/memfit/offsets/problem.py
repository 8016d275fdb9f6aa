"""One arena's packing problem as plain arrays: what every algorithm of this folder works on.

Times are ranks (0, 1, 2 ... of the distinct births and deaths), so nothing depends on their scale. Every buffer here has
a positive size and a non-empty life; `api.pack` takes the others out and puts them back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """`fixed[k]` is a prescribed offset or -1; `life[k]` the length of its life before times became ranks."""

    start: Ints
    stop: Ints
    life: Ints
    size: Ints
    alignment: Ints
    fixed: Ints

    @property
    def num_buffers(self) -> int:
        return len(self.size)


def make_problem(start: Ints, stop: Ints, size: Ints, alignment: Ints | None = None, fixed: Ints | None = None) -> Problem:
    """A problem from raw times, which become ranks."""
    times = np.unique(np.concatenate([start, stop]))
    return Problem(
        start=np.searchsorted(times, start).astype(np.int64),
        stop=np.searchsorted(times, stop).astype(np.int64),
        life=np.ascontiguousarray(stop - start, np.int64),
        size=np.ascontiguousarray(size, np.int64),
        alignment=np.ones(len(size), np.int64) if alignment is None else np.ascontiguousarray(alignment, np.int64),
        fixed=np.full(len(size), -1, np.int64) if fixed is None else np.ascontiguousarray(fixed, np.int64),
    )


def select(problem: Problem, chosen: Ints) -> Problem:
    """The sub-problem of some buffers, in that order, with its own time ranks."""
    part = make_problem(problem.start[chosen], problem.stop[chosen], problem.size[chosen], problem.alignment[chosen], problem.fixed[chosen])
    return replace(part, life=problem.life[chosen])


def height_of(problem: Problem, offsets: Ints) -> int:
    return int((offsets + problem.size).max(initial=0))


def load_at(problem: Problem) -> Ints:
    """Bytes alive at each time rank."""
    change = np.zeros(int(problem.stop.max(initial=0)) + 1, np.int64)
    np.add.at(change, problem.start, problem.size)
    np.add.at(change, problem.stop, -problem.size)
    return np.cumsum(change)


def lower_bound(problem: Problem) -> int:
    """No packing is lower: the maximum load, also with sizes padded, and the top of every buffer that must lie where it lies."""
    tops = np.where(problem.fixed >= 0, problem.fixed + problem.size, 0)
    return max(int(load_at(problem).max(initial=0)), int(tops.max(initial=0)), _measure_padded_load(problem))


def _measure_padded_load(problem: Problem) -> int:
    """With one alignment for all, every buffer but the topmost takes up its padding too."""
    if problem.num_buffers == 0 or (step := int(problem.alignment[0])) == 1 or (problem.alignment != step).any():
        return 0
    padded = -(-problem.size // step) * step
    return int(load_at(replace(problem, size=padded)).max()) - int((padded - problem.size).max())


def time_partitions(problem: Problem) -> list[Ints]:
    """Groups of buffers with no time in common between groups: each can be packed by itself."""
    order = np.argsort(problem.start, kind="stable")
    last_death = np.maximum.accumulate(problem.stop[order])
    cuts = np.nonzero(problem.start[order][1:] >= last_death[:-1])[0] + 1
    return list(np.split(order, cuts))
