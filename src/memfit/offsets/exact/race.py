"""Many exact searches side by side: the order in which ties are broken decides whether one takes a millisecond or a year.

    TW    ━━━━━      ━━━━━━      ...      plain orders are paused and resumed, a little longer each round,
    TA        ━━━━━        ━━━━━━         so that one of them finishes a proof in the end;
    ~TW           ━━           ━━  ...    between them, short runs from orders that `tie_orders` learns to draw;
    glued   ━━━━━━━━━━━━━━━━━━━━━         a third of the time with buffers glued that take over each other's place (`glued_buffers`),
    outward ━━━━━━━━━━━━━━━━━━━━━         a third in windows that grow outward from the fullest moment (`growing_windows`);
    CP-SAT                   ━━━━━━━━━    and, where it is installed, CP-SAT joins in after some seconds

Where in the flow: `solve_arena` asks here whether one time partition fits under a capacity.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Lock
from typing import NamedTuple

import numpy as np

from memfit.offsets.exact import cp_sat as cpsat
from memfit.offsets.exact.glued_buffers import search_glued
from memfit.offsets.exact.growing_windows import Progress, grow
from memfit.offsets.exact.search import Rule, Search, Verdict, is_warm, start_search, warm_up
from memfit.offsets.exact.tie_orders import Order, OrderSource
from memfit.offsets.exact.time_sections import Sections, make_sections
from memfit.offsets.problem import Ints, Problem

_CHUNK_NODES = 500
_NODES_PER_BUFFER = 5
_PATIENCES = (1, 1, 1, 2, 4)  # a run's nodes in multiples of the usual: most are short, some are given a chance
_GROWTH = 1.01  # per turn, of what a resumed search gets
_SHORT_RUNS_PER_RESUMED = 3
_BOLD_FRACTION = 0.3  # of the short runs leave out FILL
_FAR_S = 1e9
_CPSAT_PATIENCE_S = 2.0
_PYTHON_BUFFERS, _PYTHON_NODES, _PYTHON_S = 128, 20, 0.1  # of a first search before the compiled one is loaded
_LEAST_SEARCH_S = 1.0  # after compiling, which the first time on a machine takes seconds, however short the time given
_CPSAT_FIRST_S = 4.0  # doubled with every run: a second run with another seed is worth more than a longer first


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    verdict: Verdict
    offsets: Ints | None
    nodes: int


class _Turn(NamedTuple):
    """What a thread does next. `order` is None for a search that is resumed."""

    search: Search
    order: Order | None
    num_nodes: int
    seconds: float
    is_resumable: bool


@dataclass(slots=True)
class _Race:
    """What the threads share: who runs next, when to stop, and the first answer."""

    problem: Problem
    sections: Sections
    capacity: int
    deadline: float
    source: OrderSource  # of runs with FILL
    bold: OrderSource  # of runs without
    plain: list[Order]  # not started yet
    resting: list[Search] = field(default_factory=list)  # started, to be resumed
    lock: Lock = field(default_factory=Lock)
    offsets: Ints | None = None
    verdict: Verdict = Verdict.OPEN
    interrupted: bool = False
    turn: int = 0
    patience: float = 1.0
    nodes: int = 0

    @property
    def is_over(self) -> bool:
        return self.interrupted or self.verdict is not Verdict.OPEN or time.monotonic() > self.deadline

    def try_in_python(self) -> None:
        """The first order without the compiled search: what packs few buffers packs them at once, mostly."""
        search, until = self._take_turn().search, time.monotonic() + _PYTHON_S
        self.resting.append(search)
        while not self.is_over and time.monotonic() < until:
            verdict = search.advance(_PYTHON_NODES, in_python=True)
            if verdict is not Verdict.OPEN:
                self._answer(verdict, search.offsets if verdict is Verdict.PACKED else None)
        self.nodes += search.nodes

    def run(self, random: np.random.Generator) -> None:
        """One thread: glued problems, windows and tree searches by turns, each as long as the others, until somebody has the answer."""
        ways = [search_glued(self.problem, self.capacity, random)]
        if (self.problem.fixed < 0).all():
            ways.append(grow(self.problem, self.sections, self.capacity, random))
        used_s = {id(way): 0.0 for way in ways}
        searching_s = 0.0
        while not self.is_over:
            began = time.monotonic()
            way = min(ways, key=lambda way: used_s[id(way)], default=None)
            if way is None or searching_s < used_s[id(way)]:
                self._search()
                searching_s += time.monotonic() - began
            elif self._follow(way):
                used_s[id(way)] += time.monotonic() - began
            else:
                ways.remove(way)

    def _follow(self, way: Iterator[Progress]) -> bool:
        """One run of it; False when it has come to its end."""
        progress = next(way, None)
        if progress is None:
            return False
        if progress.verdict is not Verdict.OPEN:
            self._answer(progress.verdict, progress.offsets)
        with self.lock:
            self.nodes += progress.nodes
        return True

    def _search(self) -> None:
        began = time.monotonic()
        turn = self._take_turn()
        used = self._advance(turn.search, turn.num_nodes, began + turn.seconds)
        with self.lock:
            self.nodes += used
            if turn.is_resumable:
                self.resting.append(turn.search)
            if turn.order is not None:
                (self.source if turn.order.fill else self.bold).report(
                    turn.order, turn.search.deepest / self.problem.num_buffers, time.monotonic() - began
                )

    def _take_turn(self) -> _Turn:
        """First every plain order once, then mostly new orders and now and then a resumed one."""
        usual = _NODES_PER_BUFFER * self.problem.num_buffers
        with self.lock:
            self.turn += 1
            if self.plain:
                order = self.plain.pop(0)
                return _Turn(self._start(order), order, usual, _FAR_S, True)
            if self.resting and self.turn % (_SHORT_RUNS_PER_RESUMED + 1) == 0:
                self.patience *= _GROWTH
                return _Turn(self.resting.pop(0), None, int(usual * self.patience), self.patience * self.source.typical_seconds, True)
            order = (self.bold if self.source.random.random() < _BOLD_FRACTION else self.source).draw()
            limit = usual * int(self.source.random.choice(_PATIENCES))
        return _Turn(self._start(order), order, limit, _FAR_S, False)

    def _start(self, order: Order) -> Search:
        rules = Rule.ALL if order.fill else Rule.ALL & ~Rule.FILL
        return start_search(self.problem, self.sections, self.capacity, rank=order.rank, flush_first=order.flush_first, rules=rules)

    def _advance(self, search: Search, limit: int, until: float) -> int:
        before = search.nodes
        while not self.is_over and search.nodes - before < limit and time.monotonic() < until:
            verdict = search.advance(min(_CHUNK_NODES, limit))
            if verdict is not Verdict.OPEN:
                self._answer(verdict, search.offsets if verdict is Verdict.PACKED else None)
        return search.nodes - before

    def _answer(self, verdict: Verdict, offsets: Ints | None) -> None:
        with self.lock:
            if self.verdict is Verdict.OPEN:
                self.offsets, self.verdict = offsets, verdict

    def run_cpsat(self, racer: cpsat.Racer, seed: int) -> None:
        """The other way of searching, once it is clear that this will take long: runs of growing length, each with its own seed."""
        begin = time.monotonic() + _CPSAT_PATIENCE_S
        while time.monotonic() < begin and not self.is_over:
            time.sleep(0.05)
        limit_s = _CPSAT_FIRST_S
        while not self.is_over:
            verdict, offsets = racer.run(self.problem, self.capacity, max(0.01, min(limit_s, self.deadline - time.monotonic())), seed)
            if verdict is not Verdict.OPEN:
                self._answer(verdict, offsets)
            limit_s, seed = 2 * limit_s, seed + 1


def decide(problem: Problem, capacity: int, *, deadline: float, num_threads: int | None = None, seed: int = 0) -> Decision:
    """Is there a packing no higher than `capacity`? OPEN when the deadline (of `time.monotonic`) came first."""
    if time.monotonic() >= deadline:
        return Decision(verdict=Verdict.OPEN, offsets=None, nodes=0)
    random = np.random.default_rng(seed)
    source = OrderSource(problem, random)
    bold = OrderSource(problem, random, fill=False)
    race = _Race(problem, make_sections(problem), capacity, deadline, source, bold, source.plain())
    if problem.num_buffers <= _PYTHON_BUFFERS and not is_warm():
        race.try_in_python()
    if race.verdict is Verdict.OPEN:
        _run_threads(race, num_threads or min(4, os.cpu_count() or 1), seed, random)
    return Decision(verdict=race.verdict, offsets=race.offsets, nodes=race.nodes)


def _run_threads(race: _Race, num_threads: int, seed: int, random: np.random.Generator) -> None:
    began = time.monotonic()
    ready = warm_up()
    if ready > began:
        race.deadline = max(race.deadline, ready + _LEAST_SEARCH_S)
    racer = cpsat.Racer()
    with ThreadPoolExecutor(num_threads + 1) as pool:
        try:
            if cpsat.is_available(race.problem):
                pool.submit(race.run_cpsat, racer, seed)
            for done in [pool.submit(race.run, own) for own in random.spawn(num_threads)]:
                done.result()
        finally:
            race.interrupted = True
            racer.stop()
