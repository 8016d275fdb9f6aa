"""Many exact searches side by side: the order in which ties are broken decides whether one takes a millisecond or a year.

    TW    ━━━━━      ━━━━━━      ...      plain orders are paused and resumed, a little longer each round,
    TA        ━━━━━        ━━━━━━         so that one of them finishes a proof in the end;
    ~TW           ━━           ━━  ...    between them, short runs from orders that `tie_orders` learns to draw

Where in the flow: `solve` asks here whether one time partition fits under a capacity.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Lock

import numpy as np

from memfit.planning.layout.exact import Search, Verdict, start_search
from memfit.planning.layout.problem import Ints, Problem
from memfit.planning.layout.sections import Sections, make_sections
from memfit.planning.layout.tie_orders import Order, OrderSource

_CHUNK_NODES = 500
_NODES_PER_BUFFER = 5
_PATIENCES = (1, 1, 1, 2, 4)  # a run's nodes in multiples of the usual: most are short, some are given a chance
_GROWTH = 1.1
_SHORT_RUNS_PER_RESUMED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    verdict: Verdict
    offsets: Ints | None
    nodes: int


@dataclass(slots=True)
class _Race:
    """What the threads share: who runs next, when to stop, and the first answer."""

    problem: Problem
    sections: Sections
    capacity: int
    deadline: float
    source: OrderSource
    resting: list[Search]
    lock: Lock = field(default_factory=Lock)
    answer: Search | None = None
    verdict: Verdict = Verdict.OPEN
    interrupted: bool = False
    turn: int = 0
    resumed_nodes: float = 0.0
    nodes: int = 0

    @property
    def is_over(self) -> bool:
        return self.interrupted or self.verdict is not Verdict.OPEN or time.monotonic() > self.deadline

    def run(self) -> None:
        """One thread: take turns until somebody has the answer."""
        while not self.is_over:
            search, order, limit = self._take_turn()
            used = self._advance(search, limit)
            with self.lock:
                self.nodes += used
                if order is None:
                    self.resting.append(search)
                else:
                    self.source.report(order, search.deepest / self.problem.num_buffers)

    def _take_turn(self) -> tuple[Search, Order | None, int]:
        usual = _NODES_PER_BUFFER * self.problem.num_buffers
        with self.lock:
            self.turn += 1
            if self.resting and self.turn % (_SHORT_RUNS_PER_RESUMED + 1) == 0:
                self.resumed_nodes = max(self.resumed_nodes, float(usual)) * _GROWTH ** (1 / 10)
                return self.resting.pop(0), None, int(self.resumed_nodes)
            order = self.source.draw()
            limit = usual * int(self.source.random.choice(_PATIENCES))
        return start_search(self.problem, self.sections, self.capacity, rank=order.rank, flush_first=order.flush_first), order, limit

    def _advance(self, search: Search, limit: int) -> int:
        before = search.nodes
        while not self.is_over and search.nodes - before < limit:
            verdict = search.advance(min(_CHUNK_NODES, limit))
            if verdict is not Verdict.OPEN:
                with self.lock:
                    if self.verdict is Verdict.OPEN:
                        self.answer, self.verdict = search, verdict
        return search.nodes - before


def decide(problem: Problem, capacity: int, *, deadline: float, num_threads: int | None = None, seed: int = 0) -> Decision:
    """Is there a packing no higher than `capacity`? OPEN when the deadline (of `time.monotonic`) came first."""
    sections = make_sections(problem)
    source = OrderSource(problem, np.random.default_rng(seed))
    plain = [start_search(problem, sections, capacity, rank=o.rank, flush_first=o.flush_first) for o in source.plain()]
    race = _Race(problem, sections, capacity, deadline, source, plain)
    threads = num_threads or min(4, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads) as pool:
        try:
            for done in [pool.submit(race.run) for _ in range(threads)]:
                done.result()
        finally:
            race.interrupted = True
    offsets = race.answer.offsets(problem) if race.answer and race.verdict is Verdict.PACKED else None
    return Decision(verdict=race.verdict, offsets=offsets, nodes=race.nodes)
