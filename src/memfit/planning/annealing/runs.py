"""Runs of annealing and of the beam side by side, on two threads: where one of them ends is a matter of luck, so there are many.

    thread 1   annealing, from the step itself ── again ── ... ──┬─ from the best ones found ── ... until the time is up
    thread 2   a beam, while nothing else finds a plan ── wider ─┴─ annealing too

Annealing finds the better plans where there is some room, a beam the first one where there is next to none.
"""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import cached_property, partial
from os import cpu_count
from time import perf_counter

import numpy as np

from memfit.planning.annealing.anneal import anneal
from memfit.planning.annealing.beam import Ways, beam, ways_of
from memfit.planning.model.fast_judge import measure
from memfit.planning.model.reduce import Floats, Ints
from memfit.planning.search.drop_repeats import polish
from memfit.planning.search.repair_kernel import excess
from memfit.planning.search.state import Search

_FIRST_SHARE = 0.55
"""Share of the time for runs from the step itself; in the rest runs set out from the best of those."""
_LENGTHS = (1, 1, 2)
"""How long runs are, as multiples of the shortest: short ones find most by their number, long ones what short ones never find."""
_RUNS = 6
"""The shortest run is so that this many of them fill the time of one thread."""
_HOTS = (3.0, 6.0, 2.0)
"""How hot runs begin, in times of an average op: the tighter the budget the hotter it must be, and nobody knows beforehand how tight it is."""
_HOPE_SHARE = 0.5
"""Share of the time after which annealing gives up where it has met no plan and something else has: walks from that are then worth more."""
_ELITE = 3
_TRIAL_MOVES = 20_000
_COLD, _DEAR = 0.03, 300.0
"""In the end: warmth, and the price of an average storage too much, in times of an average op. (Against 0.1 and 60 in 30 s: random layered 100 and
200 of seed 31337 at 60 % 8.0 and 9.4 points for 11.6 and none, 200 of seed 20611 at 50 % 0.8 for 1.4, `layered_n250` at 60 % 7.5 for 6.8.)"""
_OVER_WARMTH = 3.0
"""At first: of how many average storages too much one makes as little as of the warmth in time."""
_TOLL = 0.005
"""What a position over the limit counts extra, as a part of the limit: else a hundred bytes too much would be cheaper than any way to avoid them."""
_MANY_FORMS, _MANY_RUNS, _MANY_HOTS, _MANY_COLD, _MANY_DEAR = 3000, 1.5, (0.3, 1.0), 0.1, 60.0
"""Large graphs: from how many forms on there are so few runs, from an order that holds less, how hot they begin and how they end. On 10,000 random ops at
60 % of the peak a run of 25 s ends with a plan of 0.2 points, where twelve short ones end with none."""


_BEAMS = ((64, 0.0, False), (32, 1.0, True), (64, 0.3, True), (64, 3.0, True), (128, 0.0, False), (128, 1.0, True))
"""Beams, one after the other: sets they follow for each height of memory, the price of all memory, in times of the step, and whether deep. Which of them gets
past the widest ops nobody knows; they end early where they do not."""
_LATE_WIDTH, _LATE_FORMS = 256, 150
"""Of the first beam that looks for a plan faster than the best one known, and the size of graphs up to which it is tried: on larger ones it takes more of the
time than it is worth. What takes longer than the plan is not followed, so it is as good as a wider one without."""
_BEAM_SHARE, _MOST_FORMS, _TIE = 0.3, 1000, 1e-4
"""Share of the time in which beams for a first plan begin, the size of graphs up to which they do, and the share of the step's time below which
chance decides between two sets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    over: int
    time: int
    sequence: Ints


@dataclass(kw_only=True)
class _Crowd:
    """Where runs set out from, and what they came to, the best first. `number` counts runs, `beams` those of the beam, `beaming` while one
    runs, `late` if that is one that looks for a faster plan.

    `fits` once annealing has a plan of its own: that of a beam is seldom the place to spend all the time from.
    """

    search: Search
    start: Ints
    random: np.random.Generator
    stop: Ints = field(default_factory=lambda: np.zeros(1, np.int64))
    found: list[_Found] = field(default_factory=list)
    number: int = 0
    beams: int = 0
    beaming: bool = False
    late: bool = False
    fits: bool = False
    late_width: int = _LATE_WIDTH

    @cached_property
    def ways(self) -> Ways:
        return ways_of(self.search.problem.model, self.start)

    def next_beam(self, late: bool) -> partial[_Found | None] | None:
        """One at a time: until one of them or annealing has a plan; `late` one that looks for a faster plan, and wider ones as long as they find it."""
        if self.beaming or self.search.problem.model.num_forms > _MOST_FORMS:
            return None
        if late and self.search.best is not None and self.late_width and self.search.problem.model.num_forms <= _LATE_FORMS:
            kind = (self.late_width, 0.0, False)
        elif not late and not self.fits and self.beams < len(_BEAMS):
            kind, self.beams = _BEAMS[self.beams], self.beams + 1
        else:
            return None
        self.beaming, self.late = True, late
        return partial(self.run_beam, *kind, int(self.random.integers(2**31)))

    def arguments(self, moves: int, again: bool) -> tuple[Ints, int, int, Floats, int]:
        """Of the next run, from the step itself or (`again`, then less hot and with bytes dear from the beginning) from something found."""
        hots, cold, dear = (_MANY_HOTS, _MANY_COLD, _MANY_DEAR) if _is_large(self.search) else (_HOTS, _COLD, _DEAR)
        a, random, hot = self.search.problem.model.arrays, self.random, hots[self.number % len(hots)]
        op_ns = max(float(a.time[self.start].mean()), 1.0)
        byte_ns = op_ns / max(float(a.size[a.size > 0].mean()), 1.0)
        start, cheap = self.start, hot / _OVER_WARMTH
        self.number += 1
        if again and self.found:
            start = self.found[int(random.integers(min(_ELITE, len(self.found))))].sequence
            hot, cheap = float(np.exp(random.uniform(-1.0, 1.0))), float(np.exp(random.uniform(1.0, 3.0)))
        heat = np.array([hot * op_ns, cold * op_ns, cheap * byte_ns, dear * byte_ns])
        return start, int(_TOLL * self.search.problem.limit_bytes), moves, heat, int(random.integers(2**31))

    def run(self, start: Ints, toll: int, moves: int, heat: Floats, seed: int) -> _Found | None:
        a, limit = self.search.problem.model.arrays, self.search.problem.limit_bytes
        sequence = anneal(a, start, limit, toll, moves, heat, seed, self.stop)
        usage = np.empty(len(sequence), np.int64)
        measure(a, sequence, usage)
        return self._polished(sequence, int(excess(usage, len(sequence), limit)))

    def run_beam(self, width: int, lean: float, deep: bool, seed: int) -> _Found | None:
        problem, a = self.search.problem, self.search.problem.model.arrays
        base_ns, limit = int(a.time[self.start].sum()), problem.limit_bytes
        most_ns = 2**60 if self.search.best is None else self.search.best_time_ns - base_ns
        sequence = beam(a, self.ways, limit, most_ns, width, lean * base_ns / max(limit, 1), deep, int(_TIE * base_ns), seed, self.stop)
        return self._polished(sequence, 0) if len(sequence) else None

    def _polished(self, sequence: Ints, over: int) -> _Found:
        a = self.search.problem.model.arrays
        sequence = polish(a, sequence, self.search.problem.limit_bytes) if over == 0 else sequence
        return _Found(over=over, time=int(a.time[sequence].sum()), sequence=sequence)

    def take(self, found: _Found | None, is_beam: bool) -> None:
        """Remember it, and offer it as a plan."""
        better = False
        if found is not None:
            if all((found.over, found.time) != (known.over, known.time) for known in self.found):
                self.found = sorted((*self.found, found), key=lambda item: (item.over, item.time))
            better = self.search.offer(found.sequence, "beam" if is_beam else "annealing")
            self.fits |= found.over == 0 and not is_beam
        if is_beam:
            self.beaming = False
            self.beams = self.beams if found is None else len(_BEAMS)
            self.late_width *= (2 if better else 0) if self.late else 1


def _is_large(search: Search) -> bool:
    return search.problem.model.num_forms >= _MANY_FORMS


def explore_annealed(search: Search, *, seconds: float, seed: int = 0) -> None:
    """Runs of annealing and beams, as many at once as there are cores (two at most), until the time is up or the plan is good enough."""
    problem = search.problem
    start, takes = search.siblings.plain[np.array(problem.model.agenda, np.int64)], problem.model.takes
    if search.done or search.good_enough or not len(start) or any(takes[f] for f in start):
        return  # what overwrites is not moved about
    if _is_large(search) and search.rank is not None:
        start = start[np.argsort(search.rank[start], kind="stable")]
    began, seconds = problem.seconds, min(seconds, problem.seconds_left)
    crowd = _Crowd(search=search, start=start, random=np.random.default_rng(seed))
    if search.best is not None:
        crowd.found.append(_Found(over=0, time=search.best_time_ns, sequence=search.siblings.plain[search.best]))
    crowd.run(*crowd.arguments(1, False))  # loads it from disk
    clock = perf_counter()
    crowd.take(crowd.run(*crowd.arguments(_TRIAL_MOVES, False)), False)
    runs = _MANY_RUNS if _is_large(search) else _RUNS
    shortest = max(int(_TRIAL_MOVES * seconds / runs / max(perf_counter() - clock, 1e-3)), 1000)
    running: dict[Future[_Found | None], bool] = {}  # and whether it is a beam
    workers = min(2, cpu_count() or 1)
    with ThreadPoolExecutor(workers) as pool:
        try:
            while problem.seconds - began < seconds and not search.done and not search.good_enough:
                if not crowd.fits and search.best is not None and problem.seconds - began > _HOPE_SHARE * seconds:
                    break
                while len(running) < workers:
                    share = (problem.seconds - began) / max(seconds, 1e-9)
                    late = share > _FIRST_SHARE
                    may_beam = (running or workers == 1) and (late or share < _BEAM_SHARE)
                    if may_beam and (job := crowd.next_beam(late)) is not None:
                        running[pool.submit(job)] = True
                        continue
                    again = late and (crowd.fits or crowd.number % 2 == 0)
                    length = 1 if _is_large(search) else _LENGTHS[crowd.number % len(_LENGTHS)]
                    moves = shortest // 2 if again else shortest * length
                    running[pool.submit(crowd.run, *crowd.arguments(moves, again))] = False
                left = seconds - (problem.seconds - began)
                for future in wait(running, timeout=max(min(left, 0.5), 0.0), return_when=FIRST_COMPLETED).done:
                    crowd.take(future.result(), running.pop(future))
        finally:
            crowd.stop[0] = 1
    for future, is_beam in running.items():
        crowd.take(future.result(), is_beam)
