"""Window search: what becomes of some storages of a plan is decided anew and exactly, the others stay as they are.

    plan, at its tightest moments       k  a b c d e f g h
                                 cut 1     ■ ■ □ ■ □ ■ ■ □      ■ kept there, □ not
                                 cut 2     ■ □ □ ■ □ □ ■ □
    free: c d e                            ■ ■ ? ? ? ■ ■ □      a 0-1 program small enough for branch and bound
                                           ■ □ ? ? ? □ ■ □

The plan itself is a solution, so the program's answer is never slower; what no cut sees shows when it is played, is mended, and
becomes a cut. Forms of ops are free throughout. It finds in a second what thousands of broken and mended plans do not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memfit.planning.cuts.program import CutProgram, CutSolution
from memfit.planning.cuts.refine import CutChain, repair_seeds
from memfit.planning.model.reduce import Flags, Ints, Model
from memfit.planning.search.state import Search


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Improve the best plan by exact programs over windows of its storages until the time is up or nothing seems left."""

    name: str = "windows"

    def applies(self, search: Search) -> bool:
        return not search.done and not search.good_enough and not search.is_large

    def run(self, search: Search, seconds: float) -> None:
        improve_windows(search, seconds=seconds)


def improve_windows(search: Search, *, seconds: float) -> None:
    problem, numbers, stop = search.problem, search.settings.windows, search.problem.seconds + seconds
    random, width, idle = np.random.default_rng(search.seed), float(numbers.width), 0
    window: _Window | None = None
    while idle < numbers.patience and not search.done and not search.nearly_closed and search.best is not None:
        left = min(stop - problem.seconds, problem.seconds_left)
        if left <= 0:
            break
        if window is None or window.time_ns != search.best_time_ns:
            window, idle = _Window(search), 0
        if not len(window.movable):
            break
        began, round_s = problem.seconds, min(numbers.round_s, left)
        solution = window.solve(_choose_window(window.movable, int(width), random), round_s)
        late = problem.seconds - began > numbers.late_share * round_s
        width = max(width * numbers.narrower, numbers.least_width) if late else min(width * numbers.wider, len(window.movable))
        idle += 2 if late else 1
        if solution is None or solution.time_ns >= window.time_ns - numbers.worthwhile * problem.model.base_time_ns:
            continue
        played, _ = repair_seeds(search, solution, "window")
        if search.best_time_ns == window.time_ns:
            window.cut_again(played)


def _choose_window(movable: Ints, width: int, random: np.random.Generator) -> Ints:
    """Neighbours in the order in which they are made."""
    begin = int(random.integers(-width // 2, max(len(movable) - width // 2, 1)))
    return movable[max(begin, 0) : begin + width]


class _Window:
    """The best plan as values of a program of cuts at its tightest moments."""

    def __init__(self, search: Search) -> None:
        assert search.best is not None
        self.model, self.limit = search.problem.model, search.problem.limit_bytes
        self.plan, self.time_ns, self.numbers = search.best, search.best_time_ns, search.settings.windows
        self.small_bytes = int(search.settings.wide.small * self.limit)
        self.small = self.model.arrays.size < search.settings.wide.small * self.limit
        self.chain = CutChain(self.model)
        for storage in self.chain.fullest(self.plan):
            if len(self.chain.cuts) >= self.numbers.num_cuts:
                break
            self.chain.insert(storage)
        self._prepare()

    def _prepare(self) -> None:
        self.program = CutProgram(self.model, self.chain.cuts, spans=False)
        self.kept = [find_kept(self.model, self.plan, cut) for cut in self.chain.cuts]
        free = np.flatnonzero(find_crossing(self.model, self.plan, self.chain.cuts) & ~self.small & ~self.model.arrays.pinned)
        made_first = np.array([min(self.model.producers[s], default=-1) for s in free], np.int64)
        self.movable = free[np.argsort(made_first, kind="stable")]

    def cut_again(self, played: Ints) -> None:
        if len(self.chain.cuts) < self.numbers.most_cuts and self.chain.cut_again(played, self.limit):
            self._prepare()

    def solve(self, free: Ints, time_limit_s: float) -> CutSolution | None:
        """The best plan through the cuts that treats all storages but the free and the small ones as this plan does."""
        low, high = np.zeros(self.program.num_variables), self.program.most.copy()
        held = ~self.small
        held[free] = False
        for numbers, kept in zip(self.program.keep, self.kept, strict=True):
            fixed = held & (numbers >= 0)
            low[numbers[fixed]] = high[numbers[fixed]] = kept[fixed]
        return self.program.solve_whole(
            self.limit, time_limit_s=time_limit_s, gap=self.numbers.gap, low=low, high=high, small_bytes=self.small_bytes
        )


def find_crossing(model: Model, sequence: Ints, cuts: tuple[int, ...]) -> Flags:
    """The storages that are first made before one of the cuts and read after it, so that something is to be decided about them."""
    makers = {f: cut for cut in cuts for f in model.producers[cut]}
    made, found, passed = np.zeros(model.num_storages, np.int64), np.zeros(model.num_storages, np.bool_), 0
    crossed: set[int] = set()
    for f in map(int, sequence):
        if f in makers and makers[f] not in crossed:
            crossed.add(makers[f])
            passed += 1
        else:
            for s in model.ins[f]:
                found[s] |= 0 < made[s] <= passed
        for s in (*model.outs[f], *(new for new, _ in model.takes[f])):
            made[s] = made[s] or passed + 1
    return found


def find_kept(model: Model, sequence: Ints, cut: int) -> Flags:
    """What a sequence holds for later, or as input, when it first makes `cut`."""
    makers = set(model.producers[cut])
    at = next(p for p, f in enumerate(sequence) if int(f) in makers)
    there = model.arrays.source.copy()
    for f in sequence[:at]:
        there[[old for _, old in model.takes[f]]] = False
        there[[*model.outs[f], *(new for new, _ in model.takes[f])]] = True
    kept, gone = there & model.arrays.pinned, ~there
    for f in sequence[at:]:
        for s in model.ins[f]:
            kept[s] |= not gone[s]
        gone[[*model.outs[f], *(s for pair in model.takes[f] for s in pair)]] = True
    return kept
