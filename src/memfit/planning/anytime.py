"""The improvement loop: several plans are walked on from, the slower half is dropped again and again. Ctrl-C keeps the best plan.

    walks   a  b  c  d  e  f     each for a while
            a  .  c  .  e  .     the better half for as long
            .  .  c  .  .  .     one to the end

Which seed a search ends well from cannot be seen in the seed: near the floor plans of equal time lead to results points apart.
"""

from __future__ import annotations

from dataclasses import dataclass

from memfit.planning.lns import Neighbourhood
from memfit.planning.search import Search

_STALE_S = 2.0
_TELL_S = 0.5
_WORTHWHILE = 1e-3  # an improvement of the plan's time that counts as one
_LEAST_PATIENCE_S = 1.0
_SLACK, _WAVE_S = 0.012, 3.0
"""How much slower a plan may be and still be walked on from: falling to nothing, again and again."""
_MOST_WALKS = 6
_WIDE_POINTS = 5.0
"""A gap from which on walks also set out anew from what did not fit."""
_LEAST_WALK_S = 0.7
_SLICE = 0.35
"""Of the time left, the share that one round over all walks takes."""


def improve_until(search: Search, *, seconds: float = 1e9, seed: int = 0, patience: float | None = None, finish: bool = False) -> None:
    """Search until the gap is small enough (`finish`: until there is next to none), the time is up or the user has had enough.

    With `patience` also when a plan is known and nothing worthwhile was found for that share of the time spent.
    """
    clock = _Clock(search, search.problem.seconds + min(seconds, max(search.problem.seconds_left, 0.0)), patience, finish)
    walks = _walks(search, seed, int(_SLICE * (clock.stop_s - search.problem.seconds) / _LEAST_WALK_S))
    while walks and not clock.over:
        left = clock.stop_s - search.problem.seconds
        for walk in walks:
            _walk(search, walk, clock, _SLICE * left / len(walks) if len(walks) > 1 else left)
        walks.sort(key=lambda walk: walk.best_standing)
        walks = walks[: max(len(walks) // 2, 1)]


@dataclass(slots=True)
class _Clock:
    search: Search
    stop_s: float
    patience: float | None
    finish: bool
    reached_ns: int | None = None
    gained_s: float = 0.0
    told_s: float = 0.0

    @property
    def over(self) -> bool:
        search, now = self.search, self.search.problem.seconds
        if search.best is not None and (self.reached_ns is None or search.best_time_ns < self.reached_ns * (1 - _WORTHWHILE)):
            self.reached_ns, self.gained_s = search.best_time_ns, now
        tired = self.patience is not None and self.reached_ns is not None
        if tired and now - self.gained_s > max(_LEAST_PATIENCE_S, (self.patience or 0.0) * now):
            return True
        enough = search.nearly_closed if self.finish else search.good_enough
        return search.done or enough or now >= self.stop_s

    def tell(self) -> None:
        problem = self.search.problem
        if problem.seconds - self.told_s > _TELL_S:
            self.told_s = problem.seconds
            problem.tell(self.search.best_time_ns if self.search.best is not None else None, self.search.bound_ns, "search")


def _walks(search: Search, seed: int, most: int) -> list[Neighbourhood]:
    """One from each of the best plans known and of the closest misses where the gap is wide; no more than there is time for.

    Near the floor the first plan a walk finds decides where it ends, so while nothing fits several set out from the closest miss.
    """
    a, limit = search.problem.model.arrays, search.problem.limit_bytes
    most = min(max(most, 1), _MOST_WALKS)
    starts = [(sequence, makers) for _, sequence, makers in search.pool]
    if search.best is None and search.closest is not None:
        starts = [(search.closest, search.makers)] * _MOST_WALKS
    elif search.miss is not None and search.gap_points > _WIDE_POINTS and most > 1:
        again = [(search.miss, search.makers)] * (most // 2)
        starts = starts[: most - len(again)] + again
    starts = starts[:most]
    return [
        Neighbourhood(arrays=a, limit=limit, maker=makers, current=start, siblings=search.siblings, seed=seed + number)
        for number, (start, makers) in enumerate(starts)
        if len(start)
    ]


def _walk(search: Search, walk: Neighbourhood, clock: _Clock, seconds: float) -> None:
    problem = search.problem
    began = improved = problem.seconds
    while not clock.over and problem.seconds - began < seconds:
        slack = _SLACK * (1 - (problem.seconds - began) / _WAVE_S % 1.0)
        if walk.round(slack):
            improved = problem.seconds
            search.offer(walk.best, "search", walk.maker)
        elif problem.seconds - improved > _STALE_S:
            walk.restart()
            improved = problem.seconds
        clock.tell()
    walk.restart()
