"""Many runs of annealing and of the beam, two at once: where a single run ends is a matter of luck.

    thread 1   annealing, from the step itself ── again ── ... ──┬─ from the best sequences found ── ... until the time is up
    thread 2   beams, wider and wider, until a plan is known ────┴─ annealing too

With some room annealing finds the better plans; with next to none a beam finds the first one.
"""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import cached_property, partial
from os import cpu_count
from time import perf_counter

import numpy as np

from memfit.planning.annealing.anneal import anneal
from memfit.planning.annealing.beam import BeamTables, make_beam_tables, search_beam
from memfit.planning.jit.warm_up import prepare_kernels
from memfit.planning.model.fast_judge import measure
from memfit.planning.model.reduce import Floats, Ints
from memfit.planning.search.drop_repeats import polish
from memfit.planning.search.repair_kernel import sum_excess
from memfit.planning.search.state import Search


@dataclass(frozen=True, slots=True, kw_only=True)
class Annealing:
    """The stage that searches order and recomputation together. `first_plan`: it runs only while no plan is known."""

    name: str = "annealing"
    first_plan: bool = False

    def applies(self, search: Search) -> bool:
        wanted = search.best is None or search.found_way_back
        return not self.first_plan or (search.may_reorder and wanted and not search.done and not search.is_large)

    def run(self, search: Search, seconds: float) -> None:
        search.problem = prepare_kernels(search.problem, ("annealing", "beam"))
        anneal_side_by_side(search, seconds=seconds, seed=search.seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    over: int
    time: int
    sequence: Ints


@dataclass(kw_only=True)
class _Runs:
    """What runs start from and what they have found, the best first.

    `number` counts runs of annealing and `beams` those of the beam; `beaming` is true while a beam runs, and `late` if it looks for a plan
    faster than the best one. `fits` is true once annealing itself has found a plan; a beam's plan is seldom a good one to start from.
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
    late_width: int = 0

    def __post_init__(self) -> None:
        self.late_width = self.search.settings.beam.late_width

    @cached_property
    def ways(self) -> BeamTables:
        return make_beam_tables(self.search.problem.model, self.start)

    def next_beam(self, late: bool) -> partial[_Found | None] | None:
        """The next beam, if one is due: at first until a plan is known; `late` in the search, as long as wider ones find faster plans."""
        numbers, num_forms = self.search.settings.beam, self.search.problem.model.num_forms
        if self.beaming or num_forms > numbers.most_forms:
            return None
        if late and self.search.best is not None and self.late_width and num_forms <= numbers.late_forms:
            kind = (self.late_width, 0.0, False)
        elif not late and not self.fits and self.beams < len(numbers.kinds):
            kind, self.beams = numbers.kinds[self.beams], self.beams + 1
        else:
            return None
        self.beaming, self.late = True, late
        return partial(self.run_beam, *kind, int(self.random.integers(2**31)))

    def arguments(self, moves: int, again: bool) -> tuple[Ints, int, int, Floats, int]:
        """The arguments of the next run. `again`: it starts from one of the best sequences found, cooler, and with bytes dear from the beginning."""
        n, large = self.search.settings.annealing, self.search.is_large
        hots, cold, dear = (n.hot_large, n.cold_large, n.dear_large) if large else (n.hot, n.cold, n.dear)
        a, random, hot = self.search.problem.model.arrays, self.random, hots[self.number % len(hots)]
        op_ns = max(float(a.time[self.start].mean()), 1.0)
        byte_ns = op_ns / max(float(a.size[a.size > 0].mean()), 1.0)
        start, cheap = self.start, hot / n.cheap
        self.number += 1
        if again and self.found:
            start = self.found[int(random.integers(min(n.num_elite, len(self.found))))].sequence
            hot, cheap = float(np.exp(random.uniform(-1.0, 1.0))), float(np.exp(random.uniform(1.0, 3.0)))
        heat = np.array([hot * op_ns, cold * op_ns, cheap * byte_ns, dear * byte_ns])
        return start, int(n.toll * self.search.problem.limit_bytes), moves, heat, int(random.integers(2**31))

    def run(self, start: Ints, toll: int, moves: int, heat: Floats, seed: int) -> _Found | None:
        a, limit = self.search.problem.model.arrays, self.search.problem.limit_bytes
        sequence = anneal(a, start, limit, toll, moves, heat, seed, self.stop)
        usage = np.empty(len(sequence), np.int64)
        measure(a, sequence, usage)
        return self._polish(sequence, int(sum_excess(usage, len(sequence), limit)))

    def run_beam(self, width: int, lean: float, deep: bool, seed: int) -> _Found | None:
        problem, a = self.search.problem, self.search.problem.model.arrays
        base_ns, limit = int(a.time[self.start].sum()), problem.limit_bytes
        most_ns = 2**60 if self.search.best is None else self.search.best_time_ns - base_ns
        lean_ns, tie_ns = lean * base_ns / max(limit, 1), int(self.search.settings.beam.tie * base_ns)
        sequence = search_beam(a, self.ways, limit, most_ns, width, lean_ns, deep, tie_ns, seed, self.stop)
        return self._polish(sequence, 0) if len(sequence) else None

    def _polish(self, sequence: Ints, over: int) -> _Found:
        a = self.search.problem.model.arrays
        sequence = polish(a, sequence, self.search.problem.limit_bytes) if over == 0 else sequence
        return _Found(over=over, time=int(a.time[sequence].sum()), sequence=sequence)

    def take(self, found: _Found | None, is_beam: bool) -> None:
        """Keep what a run found, and hand it to the search."""
        better = False
        if found is not None:
            if all((found.over, found.time) != (known.over, known.time) for known in self.found):
                self.found = sorted((*self.found, found), key=lambda item: (item.over, item.time))
            better = self.search.consider(found.sequence, "beam" if is_beam else "annealing")
            self.fits |= found.over == 0 and not is_beam
        if is_beam:
            self.beaming = False
            self.beams = self.beams if found is None else len(self.search.settings.beam.kinds)
            self.late_width *= (2 if better else 0) if self.late else 1


def anneal_side_by_side(search: Search, *, seconds: float, seed: int = 0) -> None:
    """Run annealing and beams, on two cores at most, until the time is up or the plan is good enough."""
    problem, numbers = search.problem, search.settings.annealing
    start, takes = search.siblings.plain[np.array(problem.model.agenda, np.int64)], problem.model.takes
    if search.done or search.good_enough or not len(start) or any(takes[f] for f in start):
        return  # in-place forms cannot be moved freely
    if search.is_large and search.rank is not None:
        start = start[np.argsort(search.rank[start], kind="stable")]
    began, seconds = problem.seconds, min(seconds, problem.seconds_left)
    runs = _Runs(search=search, start=start, random=np.random.default_rng(seed))
    if search.best is not None:
        runs.found.append(_Found(over=0, time=search.best_time_ns, sequence=search.siblings.plain[search.best]))
    runs.run(*runs.arguments(1, False))  # loads it from disk
    clock = perf_counter()
    runs.take(runs.run(*runs.arguments(numbers.trial_moves, False)), False)
    num_runs = numbers.num_runs_large if search.is_large else numbers.num_runs
    shortest = max(int(numbers.trial_moves * seconds / num_runs / max(perf_counter() - clock, 1e-3)), 1000)
    running: dict[Future[_Found | None], bool] = {}  # and whether it is a beam
    workers = min(2, cpu_count() or 1)
    with ThreadPoolExecutor(workers) as pool:
        try:
            while problem.seconds - began < seconds and not search.done and not search.good_enough:
                if not runs.fits and search.best is not None and problem.seconds - began > numbers.give_up_share * seconds:
                    break
                while len(running) < workers:
                    share = (problem.seconds - began) / max(seconds, 1e-9)
                    late = share > numbers.first_share
                    may_beam = (running or workers == 1) and (late or share < search.settings.beam.begin_share)
                    if may_beam and (job := runs.next_beam(late)) is not None:
                        running[pool.submit(job)] = True
                        continue
                    again = late and (runs.fits or runs.number % 2 == 0)
                    length = 1 if search.is_large else numbers.lengths[runs.number % len(numbers.lengths)]
                    moves = shortest // 2 if again else shortest * length
                    running[pool.submit(runs.run, *runs.arguments(moves, again))] = False
                left = seconds - (problem.seconds - began)
                for future in wait(running, timeout=max(min(left, 0.5), 0.0), return_when=FIRST_COMPLETED).done:
                    runs.take(future.result(), running.pop(future))
        finally:
            runs.stop[0] = 1
    for future, is_beam in running.items():
        runs.take(future.result(), is_beam)
