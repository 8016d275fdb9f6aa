"""Exact search: is there a packing under a given capacity? A depth-first search over canonical packings.

    address │        ┌──b──┐           placed in order of address: a, c, b, ...
            │ ┌──a──┐└─────┘┌─c─┐      every buffer rests on the ground or on one placed before,
            └─┴─────┴───────┴───┴──>   so the next one goes where the skyline lets it, and nowhere else

Any packing can be pushed down until every buffer rests on something, and read off from bottom to top; the search only
looks at packings in that form. After Moffitt, "MiniMalloc: A Lightweight Memory Allocator for Hardware-Accelerated
Machine Learning" (ASPLOS 2023), written anew on an explicit stack, so that a search can be paused, resumed and
interleaved with others; LIFT, FILL, TWINS and MEMO are our additions.

Rules that prune (each can be switched off, so that tests can count what it saves):
  PARTITION  when no unplaced buffer crosses a moment, the two sides are solved apart, and a failure of one side jumps
             back over the other
  CANONICAL  bottom to top, equal addresses by rank: each packing is met once
  DOMINANCE  nobody is placed above a hole into which an unplaced buffer fits for good
  SECTION    in each section the unplaced buffers at or above any address must fit between it and the capacity
  FLOOR      what was passed over cannot lie below the buffer placed last
  LIFT       what was passed over must come to rest on a neighbour placed later, so above the lowest of their tops
  FILL       a buffer at address v needs enough smaller ends below v, or the rest does not fit above it
  TWINS      of interchangeable buffers the earlier one is placed first
  MEMO       a set of unplaced buffers over the same skyline that failed before fails again
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from functools import cache
from typing import Any

import numpy as np

from memfit.jit.kernel import get_python, is_loaded
from memfit.offsets.exact import kernel
from memfit.offsets.exact.time_sections import Sections, make_sections
from memfit.offsets.problem import Ints, Problem, make_problem


class Rule(IntFlag):
    """The pruning rules, described above."""

    PARTITION = kernel.RULE.partition
    CANONICAL = kernel.RULE.canonical
    DOMINANCE = kernel.RULE.dominance
    SECTION = kernel.RULE.section
    FLOOR = kernel.RULE.floor
    LIFT = kernel.RULE.lift
    FILL = kernel.RULE.fill
    TWINS = kernel.RULE.twins
    MEMO = kernel.RULE.memo
    ALL = sum(kernel.RULE)


class Verdict(IntEnum):
    OPEN = 0
    PACKED = 1
    IMPOSSIBLE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """A search that can be resumed: `advance` spends some nodes and says where it stands."""

    tables: tuple[Any, ...]  # the arguments of `kernel.resume`, registers last
    capacity: int
    rules: Rule
    flush_first: bool

    def advance(self, num_nodes: int, *, in_python: bool = False) -> Verdict:
        resume = get_python(kernel.resume) if in_python else kernel.resume
        with np.errstate(over="ignore"):  # hashes wrap around
            return Verdict(resume(*(*self.tables, self.capacity, int(self.rules), self.flush_first, num_nodes)))

    @property
    def nodes(self) -> int:
        return int(self.tables[-1][kernel.REGISTER.nodes])

    @property
    def deepest(self) -> int:
        """The most buffers that were ever placed at once."""
        return int(self.tables[-1][kernel.REGISTER.deepest])

    @property
    def offsets(self) -> Ints:
        """Valid after PACKED."""
        return np.array(self.tables[0][:, kernel.BUFFER.offset])


def start_search(
    problem: Problem,
    sections: Sections,
    capacity: int,
    *,
    rank: Ints | None = None,
    rules: Rule = Rule.ALL,
    flush_first: bool = False,
    memo_bits: int = 14,
) -> Search:
    """A search for a packing of `problem` no higher than `capacity`. `rank` breaks ties, and decides much of the speed.

    `flush_first` tries buffers first that touch walls on both sides of the valley they go into.
    """
    n, is_fixed = problem.num_buffers, problem.fixed >= 0
    table = np.zeros((n, len(kernel.BUFFER)), np.int64)
    table[:, kernel.BUFFER.size], table[:, kernel.BUFFER.align] = problem.size, problem.alignment
    table[:, kernel.BUFFER.first], table[:, kernel.BUFFER.last] = sections.first, sections.last
    table[:, kernel.BUFFER.meets], table[:, kernel.BUFFER.meets_end] = sections.meets_start[:-1], sections.meets_start[1:]
    table[:, kernel.BUFFER.twin] = sections.twin
    # a fixed buffer is one that can begin and end up in one place only; among equals it comes first
    table[:, kernel.BUFFER.offset] = np.maximum(problem.fixed, 0)
    table[:, kernel.BUFFER.ceiling] = np.minimum(np.where(is_fixed, problem.fixed, capacity), capacity - problem.size)
    table[:, kernel.BUFFER.rank] = (np.arange(n) if rank is None else rank) - n * is_fixed
    return Search(
        tables=(table, sections.meets, *_working_tables(table, len(sections.meets), sections.count, memo_bits)),
        capacity=capacity,
        rules=rules,
        flush_first=flush_first,
    )


def _working_tables(table: Ints, num_meetings: int, num_sections: int, memo_bits: int) -> tuple[Any, ...]:
    """Empty stacks and scratch space, and the whole problem pending as one component."""
    n = len(table)
    first, last = table[:, kernel.BUFFER.first], table[:, kernel.BUFFER.last]
    crowd = np.zeros(num_sections + 1, np.int64)
    np.add.at(crowd, first, 1)
    np.add.at(crowd, last, -1)
    room = n * (n + 1) // 2 + 2 * n + 8
    pending = np.zeros((n + 8, 3), np.int64)
    pending[0] = (0, num_sections, -1)
    registers = np.zeros(len(kernel.REGISTER), np.int64)
    registers[kernel.REGISTER.top], registers[kernel.REGISTER.pending], registers[kernel.REGISTER.opening] = -1, 1, 1
    return (
        np.zeros((4, num_sections + 1), np.int64),
        np.zeros((num_sections + 1, int(np.cumsum(crowd).max(initial=0)) + 1, 2), np.int64),
        np.zeros((n + 2, len(kernel.FRAME)), np.int64),
        np.empty(room, np.int32),
        np.empty(room, np.int32),
        np.empty((num_meetings + int((last - first).sum()) + n + 8, 2), np.int64),
        pending,
        np.zeros((5, n + 1), np.int64),
        np.zeros((1 << memo_bits, 2), np.int64),
        registers,
    )


def is_warm() -> bool:
    """Whether the compiled search is there; loading it takes half a second, compiling it some."""
    return is_loaded(kernel.resume)


@cache
def warm_up() -> float:
    """Compile the search, or load it compiled, and say when that was done (`time.monotonic`; long ago if it was before).

    The first call on a new machine compiles for some seconds; the result is kept beside the source.
    """
    problem = make_problem(*np.array([[0], [1], [1]], np.int64))
    start_search(problem, make_sections(problem), 1).advance(1)
    return time.monotonic()
