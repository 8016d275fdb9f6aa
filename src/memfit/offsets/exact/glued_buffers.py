"""Glue buffers that take over each other's place: what dies at a moment and what is born at it, if their sizes agree, become one box.

    ┌─────┬───┐         ┌─────────┐        a dies where b is born and they are equally large: one box a+b
    │  a  │ b │   ──>   │         │        c and d are born and die together, and e takes over from both: one box,
    ├─────┼───┤         ├─────────┤        c below d in its first half, e in its second
    │  c  │   │         │         │
    ├─────┤ e │         │         │        again and again, until nothing fits: half of the boxes, or fewer
    │  d  │   │         │         │
    └─────┴───┘         └─────────┘

Where a program is full it hands its memory over like this, since nothing else is free. Every packing of the boxes is a packing of the buffers, but
not the other way round, so this finds packings and proves nothing. Where in the flow: each thread of `race.decide` spends
part of its time on glued problems, first with everything glued that can be, then with part of it at random.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from memfit.offsets.exact.growing_windows import Progress, grow
from memfit.offsets.exact.search import Rule, Verdict, start_search
from memfit.offsets.exact.tie_orders import OrderSource
from memfit.offsets.exact.time_sections import make_sections
from memfit.offsets.problem import Ints, Problem

_SHARES = (1.0, 0.9, 0.7, 0.3)  # of the doubtful matches that are glued: one that only happens to agree can spoil all
_WHOLE_EXPONENT = 0.25  # of the others the share to this power
_FIRST_S = 0.1  # of search in a glued problem before another is made; grows
_GROWTH = 1.1
_MAX_BUFFERS = 1_000  # where hundreds are born at one moment, matching them takes a second
_NODES_PER_BOX = 20
_FILL_FRACTION = 0.5  # of the runs from bottom to top prune by FILL
_WORTH_FRACTION = 0.97  # with more boxes than this part of the buffers, nothing is gained


class _Box(NamedTuple):
    start: int
    stop: int
    life: int
    size: int
    members: tuple[tuple[int, int], ...]  # buffers with their addresses in the box


@dataclass(frozen=True, slots=True, kw_only=True)
class Glued:
    """The boxes as a problem of their own; buffer k lies `above[k]` bytes above the bottom of box `box[k]`."""

    problem: Problem
    box: Ints
    above: Ints

    def offsets(self, of_boxes: Ints) -> Ints:
        return of_boxes[self.box] + self.above


def can_glue(problem: Problem) -> bool:
    """Boxes have no prescribed place, every address inside one must be aligned, and there must not be too many."""
    step = int(problem.alignment.max(initial=1))
    if problem.num_buffers > _MAX_BUFFERS:
        return False
    return bool((problem.fixed < 0).all() and (problem.alignment == step).all() and (problem.size % step == 0).all())


def glue(problem: Problem, random: np.random.Generator, share: float = 1.0) -> Glued:
    """Match what dies with what is born, moment by moment, until nothing matches; `share` of the doubtful matches are made.

    Where all that dies at a moment matches all that is born, nearly every match is right (where nothing else is free it must be);
    where only a part does, the sizes may just happen to agree. So the doubtful ones wait until the others are done.
    """
    books = _Books(problem)
    doubtful = [int(t) for t in random.permutation(np.unique(problem.start))]
    waiting = doubtful.copy()
    wanted: dict[tuple[int, int], bool] = {}
    while waiting or doubtful:
        is_whole = bool(waiting)
        moment = (waiting or doubtful).pop()
        fraction = share**_WHOLE_EXPONENT if is_whole else share
        for size, before, after in books.matches(moment, is_whole):
            if wanted.setdefault((moment, size), bool(random.random() < fraction)):
                box = books.join(before, after)
                waiting += [moment, box.start, box.stop]
                doubtful += [] if is_whole else [moment]
                break
    return _make_glued(problem, books.boxes)


class _Books:
    """The boxes, and which die and which are born at each moment."""

    def __init__(self, problem: Problem) -> None:
        rows = zip(problem.start.tolist(), problem.stop.tolist(), problem.life.tolist(), problem.size.tolist(), strict=True)
        self.boxes: set[_Box] = set()
        self.dying: dict[int, set[_Box]] = defaultdict(set)
        self.born: dict[int, set[_Box]] = defaultdict(set)
        for k, (start, stop, life, size) in enumerate(rows):
            self._add(_Box(start, stop, life, size, ((k, 0),)))

    def _add(self, box: _Box) -> None:
        self.boxes.add(box)
        self.dying[box.stop].add(box)
        self.born[box.start].add(box)

    def matches(self, moment: int, is_whole: bool) -> Iterator[tuple[int, list[_Box], list[_Box]]]:
        """Blocks of equal size, one that ends and one that begins, the largest first; `is_whole`: nothing else ends or begins then."""
        ends, begins = _blocks(self.dying[moment]), _blocks(self.born[moment])
        for size in sorted(ends.keys() & begins.keys(), reverse=True):
            num_parts = len(ends[size]) + len(begins[size])
            if not is_whole or num_parts == len(self.dying[moment]) + len(self.born[moment]):
                yield size, ends[size], begins[size]

    def join(self, before: list[_Box], after: list[_Box]) -> _Box:
        box = _join(before, after)
        for part in (*before, *after):
            self.boxes.remove(part)
            self.dying[part.stop].remove(part)
            self.born[part.start].remove(part)
        self._add(box)
        return box


def _blocks(boxes: set[_Box]) -> dict[int, list[_Box]]:
    """By size; of two blocks of one size either does."""
    together: dict[tuple[int, int], list[_Box]] = defaultdict(list)
    for box in sorted(boxes):
        together[box.start, box.stop].append(box)
    blocks = [*together.values(), *([box] for box in sorted(boxes))]
    return {sum(box.size for box in block): block for block in blocks}


def _join(before: list[_Box], after: list[_Box]) -> _Box:
    members: list[tuple[int, int]] = []
    for block in (before, after):
        bottoms = accumulate((box.size for box in block), initial=0)
        members += [(k, bottom + above) for box, bottom in zip(block, bottoms, strict=False) for k, above in box.members]
    return _Box(
        before[0].start, after[0].stop, before[0].life + after[0].life, sum(box.size for box in before), tuple(members)
    )  # fmt: skip


def _make_glued(problem: Problem, boxes: set[_Box]) -> Glued:
    listed = sorted(boxes)
    box, above = np.zeros(problem.num_buffers, np.int64), np.zeros(problem.num_buffers, np.int64)
    for name, one in enumerate(listed):
        for k, at in one.members:
            box[k], above[k] = name, at
    column = np.array([(b.start, b.stop, b.life, b.size) for b in listed], np.int64).reshape(-1, 4).T.copy()
    step = int(problem.alignment.max(initial=1))
    whole = Problem(
        start=column[0], stop=column[1], life=column[2], size=column[3],
        alignment=np.full(len(listed), step, np.int64), fixed=np.full(len(listed), -1, np.int64),
    )  # fmt: skip
    return Glued(problem=whole, box=box, above=above)


def search_glued(problem: Problem, capacity: int, random: np.random.Generator) -> Iterator[Progress]:
    """Glued problems one after another, each searched for a while, one run at a time; ends at once where nothing can be glued."""
    if not can_glue(problem):
        return
    seconds, share = _FIRST_S, _SHARES[0]
    while True:
        glued = glue(problem, random, share)
        if share == 1.0 and glued.problem.num_buffers > _WORTH_FRACTION * problem.num_buffers:
            return
        runs, spent_s, is_open = _search_by_turns(glued.problem, capacity, random), 0.0, True
        while is_open and spent_s < seconds:
            began = time.monotonic()
            progress = next(runs)
            spent_s += time.monotonic() - began
            if progress.verdict is Verdict.PACKED and progress.offsets is not None:
                yield progress._replace(offsets=glued.offsets(progress.offsets))
            yield progress._replace(verdict=Verdict.OPEN, offsets=None)
            is_open = progress.verdict is Verdict.OPEN
        seconds, share = seconds * _GROWTH, float(random.choice(_SHARES))


def _search_by_turns(problem: Problem, capacity: int, random: np.random.Generator) -> Iterator[Progress]:
    """By turns from bottom to top, first in the plain orders, and outward in windows."""
    sections = make_sections(problem)
    windows = grow(problem, sections, capacity, random)
    source = OrderSource(problem, random)
    plain = source.plain()
    while True:
        order = plain.pop(0) if plain else source.draw()
        rules = Rule.ALL if random.random() < _FILL_FRACTION else Rule.ALL & ~Rule.FILL
        search = start_search(problem, sections, capacity, rank=order.rank, flush_first=order.flush_first, rules=rules)
        verdict = search.advance(_NODES_PER_BOX * problem.num_buffers)
        yield Progress(verdict, search.offsets if verdict is Verdict.PACKED else None, search.nodes)
        yield next(windows)
