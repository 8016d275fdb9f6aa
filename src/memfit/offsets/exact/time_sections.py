"""Time cut into sections: the maximal sets of buffers that are alive together, in order of time.

    a ├──────────┤            sections   0: a b     1: b c d     2: d e
    b    ├───────────────┤    a covers [0, 1), b [0, 2), d [1, 3)
    c              ├──┤
    d              ├─────────────┤      two buffers are alive together exactly when they share a section,
    e                        ├───┤      and only the loads of sections matter: every other moment is a subset

Where in the flow: the exact search and its bounds work on sections instead of moments. Includes who meets whom, and which
buffers are interchangeable.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memfit.offsets.problem import Ints, Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Sections:
    """Buffer k covers sections [first[k], last[k]); its neighbours are meets[meets_start[k]:meets_start[k + 1]]."""

    count: int
    first: Ints
    last: Ints
    meets_start: Ints
    meets: Ints
    twin: Ints  # an earlier buffer that could be exchanged with this one, or -1

    def load(self, size: Ints) -> Ints:
        """Bytes alive in each section."""
        change = np.zeros(self.count + 1, np.int64)
        np.add.at(change, self.first, size)
        np.add.at(change, self.last, -size)
        return np.cumsum(change)[:-1]


def make_sections(problem: Problem) -> Sections:
    end = int(problem.stop.max(initial=0)) + 1
    births, deaths = np.zeros(end, bool), np.zeros(end, bool)
    births[problem.start], deaths[problem.stop] = True, True
    # a maximal set is complete when something dies; the next one begins with the first birth after that
    section_at, current, closed = np.zeros(end, np.int64), -1, True
    for moment in range(end):
        closed = closed or bool(deaths[moment])
        if births[moment] and closed:
            current, closed = current + 1, False
        section_at[moment] = current
    first, last = section_at[problem.start], section_at[problem.stop - 1] + 1
    meets_start, meets = _neighbours(first, last)
    return Sections(count=current + 1, first=first, last=last, meets_start=meets_start, meets=meets, twin=_twins(problem, first, last))


def restrict(whole: Sections, free: NDArray[np.bool_], others: NDArray[np.bool_]) -> tuple[Ints, Sections]:
    """The stretch of time of the free buffers, with those of the others that meet one: who they are, and their sections."""
    row = np.repeat(np.arange(len(free)), np.diff(whole.meets_start))
    is_met = np.zeros(len(free), bool)
    is_met[whole.meets[free[row]]] = True
    inside = free | (others & is_met)
    chosen = np.nonzero(inside)[0]
    new_name = np.full(len(free) + 1, -1, np.int64)  # the last one is for -1, no twin
    new_name[chosen] = np.arange(len(chosen))
    pairs = inside[row] & inside[whole.meets]
    meets_start = np.zeros(len(chosen) + 1, np.int64)
    np.cumsum(np.bincount(new_name[row[pairs]], minlength=len(chosen)), out=meets_start[1:])
    twin = whole.twin[chosen]
    begin, end = int(whole.first[free].min()), int(whole.last[free].max())
    return chosen, Sections(
        count=end - begin,
        first=np.maximum(whole.first[chosen] - begin, 0),
        last=np.minimum(whole.last[chosen], end) - begin,
        meets_start=meets_start,
        meets=new_name[whole.meets[pairs]],
        twin=np.where(free[chosen] & (twin >= 0) & free[twin], new_name[twin], -1),
    )


def num_meetings(problem: Problem) -> int:
    """How many ordered pairs are alive together, without listing them: who is born while another lives."""
    births, deaths = np.sort(problem.start), np.sort(problem.stop)
    alive_at_birth = np.searchsorted(births, births, side="right") - np.searchsorted(deaths, births, side="right")
    return int(2 * alive_at_birth.sum())


def _neighbours(first: Ints, last: Ints) -> tuple[Ints, Ints]:
    rows = [np.nonzero((first < last[k]) & (last > first[k]))[0] for k in range(len(first))]
    rows = [row[row != k] for k, row in enumerate(rows)]
    start = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(row) for row in rows], out=start[1:])
    return start, np.concatenate([*rows, np.zeros(0, np.int64)]).astype(np.int64)


def _twins(problem: Problem, first: Ints, last: Ints) -> Ints:
    """Same sections, size and alignment: swapping two of them gives the same packing."""
    latest: dict[tuple[int, ...], int] = {}
    twin = np.full(problem.num_buffers, -1, np.int64)
    for k in range(problem.num_buffers):
        if problem.fixed[k] < 0:
            key = (int(first[k]), int(last[k]), int(problem.size[k]), int(problem.alignment[k]))
            twin[k] = latest.get(key, -1)
            latest[key] = k
    return twin
