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

import numpy as np

from memfit.planning.cuts.program import CutProgram, CutSolution
from memfit.planning.cuts.refine import Chain, offer_seeds
from memfit.planning.cuts.wide_ops import SMALL
from memfit.planning.model.reduce import Flags, Ints, Model
from memfit.planning.search.state import Search

_CUTS, _MOST_CUTS = 10, 18
_WIDTH, _LEAST_WIDTH = 24, 8
"""Storages free at once: at first, and when the solver cannot follow."""
_WIDER, _NARROWER = 1.25, 0.7
_ROUND_S = 1.0
_GAP = 5e-4
_WORTHWHILE = 2e-5
"""A gain, in parts of the step's time, worth playing for."""
_TIRED = 8
"""Windows in a row without a better plan; those that the solver did not finish count twice."""


def explore_windows(search: Search, *, seconds: float, seed: int = 0) -> None:
    """Improve the best plan by exact programs over windows of its storages until the time is up or it looks like nothing is left."""
    problem, stop = search.problem, search.problem.seconds + seconds
    random, width, idle = np.random.default_rng(seed), float(_WIDTH), 0
    window: _Windows | None = None
    while idle < _TIRED and not search.done and not search.nearly_closed and search.best is not None:
        left = min(stop - problem.seconds, problem.seconds_left)
        if left <= 0:
            break
        if window is None or window.time_ns != search.best_time_ns:
            window, idle = _Windows(search), 0
        if not len(window.movable):
            break
        began, round_s = problem.seconds, min(_ROUND_S, left)
        solution = window.solve(_chosen(window.movable, int(width), random), round_s)
        late = problem.seconds - began > 0.8 * round_s
        width = max(width * _NARROWER, _LEAST_WIDTH) if late else min(width * _WIDER, len(window.movable))
        idle += 2 if late else 1
        if solution is None or solution.time_ns >= window.time_ns - _WORTHWHILE * problem.model.base_time_ns:
            continue
        played, _ = offer_seeds(search, solution, "window")
        if search.best_time_ns == window.time_ns:
            window.cut_again(played)


def _chosen(movable: Ints, width: int, random: np.random.Generator) -> Ints:
    """Neighbours in the order in which they are made."""
    begin = int(random.integers(-width // 2, max(len(movable) - width // 2, 1)))
    return movable[max(begin, 0) : begin + width]


class _Windows:
    """The best plan as values of a program of cuts at its tightest moments."""

    def __init__(self, search: Search) -> None:
        assert search.best is not None
        self.model, self.limit = search.problem.model, search.problem.limit_bytes
        self.plan, self.time_ns = search.best, search.best_time_ns
        self.small = self.model.arrays.size < SMALL * self.limit
        self.chain = Chain(self.model)
        for storage in self.chain.fullest(self.plan):
            if len(self.chain.cuts) >= _CUTS:
                break
            self.chain.insert(storage)
        self._prepare()

    def _prepare(self) -> None:
        self.program = CutProgram(self.model, self.chain.cuts, spans=False)
        self.kept = [kept_when_made(self.model, self.plan, cut) for cut in self.chain.cuts]
        free = np.flatnonzero(across(self.model, self.plan, self.chain.cuts) & ~self.small & ~self.model.arrays.pinned)
        made_first = np.array([min(self.model.producers[s], default=-1) for s in free], np.int64)
        self.movable = free[np.argsort(made_first, kind="stable")]

    def cut_again(self, played: Ints) -> None:
        if len(self.chain.cuts) < _MOST_CUTS and self.chain.cut_again(played, self.limit):
            self._prepare()

    def solve(self, free: Ints, time_limit_s: float) -> CutSolution | None:
        """The best plan through the cuts that treats all storages but the free and the small ones as this plan does."""
        low, high = np.zeros(self.program.num_variables), self.program.most.copy()
        held = ~self.small
        held[free] = False
        for numbers, kept in zip(self.program.keep, self.kept, strict=True):
            fixed = held & (numbers >= 0)
            low[numbers[fixed]] = high[numbers[fixed]] = kept[fixed]
        small = int(SMALL * self.limit)
        return self.program.solve_whole(self.limit, time_limit_s=time_limit_s, gap=_GAP, low=low, high=high, small_bytes=small)


def across(model: Model, sequence: Ints, cuts: tuple[int, ...]) -> Flags:
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


def kept_when_made(model: Model, sequence: Ints, cut: int) -> Flags:
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
