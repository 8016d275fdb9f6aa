"""The improvement loop: several plans are walked on from, the slower half is dropped again and again. Ctrl-C keeps the best plan.

    walks   a  b  c  d  e  f     each for a while, two at once
            a  .  c  .  e  .     the better half for as long
            .  .  c  .  e  .     two to the end

Which seed a search ends well from cannot be seen in the seed: near the floor plans of equal time lead to results points apart.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from os import cpu_count

from memfit.planning.model.reduce import Ints
from memfit.planning.search.neighbourhood import Neighbourhood
from memfit.planning.search.state import Search

_STALE_S = 2.0
_TELL_S, _LOOK_S = 0.5, 0.02
_WORTHWHILE = 1e-3  # an improvement of the plan's time that counts as one
_LEAST_PATIENCE_S = 1.0
_SLACK, _WAVE_S = 0.012, 3.0
"""How much slower a plan may be and still be walked on from: falling to nothing, again and again."""
_MOST_WALKS, _MOST_AT_ONCE = 6, 2
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
    at_once = min(_MOST_AT_ONCE, cpu_count() or 1)
    walks = _walks(search, seed, int(_SLICE * at_once * (clock.stop_s - search.problem.seconds) / _LEAST_WALK_S), at_once)
    with ThreadPoolExecutor(at_once) as pool:
        while walks and not clock.over:
            left = clock.stop_s - search.problem.seconds
            _walk_together(pool, walks, clock, _SLICE * left * at_once / len(walks) if len(walks) > at_once else left)
            walks.sort(key=lambda walk: walk.best_standing)
            walks = walks[: max(len(walks) // 2, at_once)]


def _walk_together(pool: ThreadPoolExecutor, walks: list[Neighbourhood], clock: _Clock, seconds: float) -> None:
    """Each for so long, as many at once as the pool has threads. They leave what they find; this thread alone offers it."""
    found: deque[tuple[Ints, Ints]] = deque()
    running = {pool.submit(_walk, walk, clock, seconds, found) for walk in walks}
    try:
        while running:
            done, running = wait(running, timeout=_LOOK_S, return_when=FIRST_COMPLETED)
            while found:
                sequence, makers = found.popleft()
                clock.search.offer(sequence, "search", makers)
            clock.tell()
            for future in done:
                future.result()
    finally:
        clock.stopped = bool(running)  # an interrupt: nobody waits for walks that go on


@dataclass(slots=True)
class _Clock:
    search: Search
    stop_s: float
    patience: float | None
    finish: bool
    reached_ns: int | None = None
    gained_s: float = 0.0
    told_s: float = 0.0
    stopped: bool = False

    @property
    def over(self) -> bool:
        search, now = self.search, self.search.problem.seconds
        if search.best is not None and (self.reached_ns is None or search.best_time_ns < self.reached_ns * (1 - _WORTHWHILE)):
            self.reached_ns, self.gained_s = search.best_time_ns, now
        tired = self.patience is not None and self.reached_ns is not None
        if tired and now - self.gained_s > max(_LEAST_PATIENCE_S, (self.patience or 0.0) * now):
            return True
        enough = search.nearly_closed if self.finish else search.good_enough
        return self.stopped or search.done or enough or now >= self.stop_s

    def tell(self) -> None:
        problem = self.search.problem
        if problem.seconds - self.told_s > _TELL_S:
            self.told_s = problem.seconds
            problem.tell(self.search.best_time_ns if self.search.best is not None else None, self.search.bound_ns, "search")


def _walks(search: Search, seed: int, most: int, least: int) -> list[Neighbourhood]:
    """One from each of the best plans known and of the closest misses where the gap is wide; no more than there is time for, no fewer than
    can walk at once.

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
    starts = starts[: max(most, least)]
    starts += starts[:1] * (least - len(starts))
    return [
        Neighbourhood(arrays=a, limit=limit, maker=makers, current=start, siblings=search.siblings, seed=seed + number)
        for number, (start, makers) in enumerate(starts)
        if len(start)
    ]


def _walk(walk: Neighbourhood, clock: _Clock, seconds: float, found: deque[tuple[Ints, Ints]]) -> None:
    problem = clock.search.problem
    began = improved = problem.seconds
    while not clock.over and problem.seconds - began < seconds:
        slack = _SLACK * (1 - (problem.seconds - began) / _WAVE_S % 1.0)
        if walk.round(slack):
            improved = problem.seconds
            found.append((walk.best, walk.maker))
        elif problem.seconds - improved > _STALE_S:
            walk.restart()
            improved = problem.seconds
    walk.restart()
