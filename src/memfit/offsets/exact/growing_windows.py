"""Packing outward from the fullest moment: a window of time is packed, widened at its fuller side, and repaired where that fails.

    load    ▁▃▅██▆▄▂        the window begins where the load is highest and there is least choice;
               ├─┤          what it newly meets is placed around what lies; if that cannot be, the buffers nearest
              ├───┤         the new edge are taken out as well, then twice as far, ... then all, and searched together
            ├───────┤

A search from bottom to top mixes the crowded moments with the empty ones and, when the crowd fails, goes back over placements
far away that have nothing to do with it. Here every question is small and exact (`exact.start_search`, with what stays put as
fixed buffers): "impossible" means that more must be taken out, and if all of a window's buffers were free it is a proof.
Growing is not complete: a window that stays open is given up and begun anew, elsewhere and in other orders, after about as
much time as it has cost. Where in the flow: each thread of `race.decide` grows windows half of its time.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from memfit.offsets.exact.search import Rule, Search, Verdict, start_search
from memfit.offsets.exact.tie_orders import Order, OrderSource
from memfit.offsets.exact.time_sections import Sections, restrict
from memfit.offsets.problem import Ints, Problem

_STEPS = (6, 3, 12)  # how many new buffers a widening should meet, at least
_RUN_NODES = (1_500, 500, 4_000)  # of one run before another order is tried
_PATIENCES = (1.0, 2.0)  # how long to try at one window, in units of the time it took to get there
_LEAST_PATIENCE_S = 0.05
_FIRST_RUNS = 3  # at each depth of the first round; later one
_FIRST_DEPTH = 2  # in sections
_BOLD_FRACTION = 0.7  # of the runs leave out FILL: windows are small, and twice the nodes find more
_MEMO_BITS = 12
_CROWDED_FRACTION = 0.98  # windows begin where the load is at least this part of the highest

Mask = NDArray[np.bool_]


class Progress(NamedTuple):
    """What one run gave. PACKED and IMPOSSIBLE are about the whole problem; nearly all runs end OPEN."""

    verdict: Verdict
    offsets: Ints | None
    nodes: int


@dataclass(slots=True)
class _Window:
    """Sections [begin, end) are to be packed, `offsets` holds what lies already (-1: nothing), `side` was widened last."""

    begin: int
    end: int
    side: int
    offsets: Ints
    began: float


def grow(problem: Problem, sections: Sections, capacity: int, random: np.random.Generator) -> Iterator[Progress]:
    """Windows after windows, one short search at a time, until the whole is packed or refuted; the caller decides when to stop."""
    return _Grower(problem, sections, capacity, random).windows()


class _Grower:
    def __init__(self, problem: Problem, sections: Sections, capacity: int, random: np.random.Generator) -> None:
        assert (problem.fixed < 0).all(), "buffers at prescribed offsets are for the tree search"
        self.problem, self.sections, self.capacity, self.random = problem, sections, capacity, random
        self.source = OrderSource(problem, random)
        self.load = sections.load(problem.size)
        self.step, self.run_nodes, self.patience = _STEPS[0], _RUN_NODES[0], _PATIENCES[0]

    def windows(self) -> Iterator[Progress]:
        while True:
            crowded = np.nonzero(self.load >= _CROWDED_FRACTION * self.load.max())[0]
            at = int(self.random.choice(crowded))
            window = _Window(at, at + 1, 0, np.full(self.problem.num_buffers, -1, np.int64), time.monotonic())
            while (yield from self._pack(window)):
                if window.begin == 0 and window.end == self.sections.count:
                    yield Progress(Verdict.PACKED, window.offsets, 0)
                self._widen(window)
            self.step, self.run_nodes = int(self.random.choice(_STEPS)), int(self.random.choice(_RUN_NODES))
            self.patience = float(self.random.choice(_PATIENCES))

    def _inside(self, window: _Window) -> Mask:
        inside: Mask = (self.sections.first < window.end) & (self.sections.last > window.begin)
        return inside

    def _widen(self, window: _Window) -> None:
        """Towards the fuller side, until enough new buffers are met."""
        left = self.load[window.begin - 1] if window.begin > 0 else -1
        right = self.load[window.end] if window.end < self.sections.count else -1
        window.side = 1 if right >= left else -1
        while window.end < self.sections.count if window.side > 0 else window.begin > 0:
            if window.side > 0:
                window.end += 1
            else:
                window.begin -= 1
            if (self._inside(window) & (window.offsets < 0)).sum() >= self.step:
                return

    def _pack(self, window: _Window) -> Generator[Progress, None, bool]:
        """Place what is new, taking out more and more of the rest; True when done, False when it took too long."""
        inside = self._inside(window)
        new = inside & (window.offsets < 0)
        if not new.any():
            return True
        entered = time.monotonic()
        enough_s = max(_LEAST_PATIENCE_S, self.patience * (entered - window.began))
        depth, least_depth, num_runs = 0, 0, _FIRST_RUNS
        while True:
            free = new | self._near_edge(window, inside, depth)
            is_all = bool((free == inside).all())
            verdict = Verdict.OPEN
            for run in range(num_runs):
                verdict, nodes = self._search(window, free, self._order(run if num_runs > 1 else _FIRST_RUNS))
                proven = verdict is Verdict.IMPOSSIBLE and is_all
                yield Progress(Verdict.IMPOSSIBLE if proven else Verdict.OPEN, None, nodes)
                if verdict is not Verdict.OPEN:
                    break
            if verdict is Verdict.PACKED:
                return True
            deeper = max(_FIRST_DEPTH, 2 * depth)
            if verdict is Verdict.IMPOSSIBLE:
                least_depth = deeper
            if is_all and time.monotonic() - entered > enough_s:
                return False
            depth, num_runs = (least_depth, 1) if is_all else (deeper, num_runs)

    def _near_edge(self, window: _Window, inside: Mask, depth: int) -> Mask:
        """Those that reach within `depth` sections of the edge that was moved last; the first section has no edge yet."""
        if depth == 0:
            return np.zeros_like(inside)
        if window.side > 0:
            return inside & (self.sections.last > window.end - depth)
        return inside & (self.sections.first < window.begin + depth)

    def _order(self, run: int) -> Order:
        order = self.source.plain()[(0, 1, 5)[run]] if run < _FIRST_RUNS else self.source.draw()
        return order._replace(fill=self.random.random() >= _BOLD_FRACTION)

    def _search(self, window: _Window, free: Mask, order: Order) -> tuple[Verdict, int]:
        """One run over the free buffers among those that lie and meet them; keeps the packing if it finds one."""
        search, chosen = self._start(window.offsets, free, order)
        verdict = search.advance(self.run_nodes)
        if verdict is Verdict.PACKED:
            window.offsets[chosen] = search.offsets
        return verdict, search.nodes

    def _start(self, offsets: Ints, free: Mask, order: Order) -> tuple[Search, Ints]:
        chosen, part = restrict(self.sections, free, offsets >= 0)
        p = self.problem
        problem = replace(
            p,
            start=p.start[chosen], stop=p.stop[chosen], life=p.life[chosen], size=p.size[chosen], alignment=p.alignment[chosen],
            fixed=np.where(free[chosen], -1, offsets[chosen]),
        )  # fmt: skip
        rules = Rule.ALL if order.fill else Rule.ALL & ~Rule.FILL
        search = start_search(
            problem, part, self.capacity, rank=order.rank[chosen], rules=rules, flush_first=order.flush_first, memo_bits=_MEMO_BITS
        )
        return search, chosen
