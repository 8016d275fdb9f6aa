"""The improvement loop: a search walks from each of several plans; the worse half is dropped again and again. Ctrl-C keeps the best plan.

    walks   a  b  c  d  e  f     each for a while, two at once
            a  .  c  .  e  .     the better half for as long
            .  .  c  .  e  .     two to the end

A seed does not show how well a search from it ends: near the smallest budget, seeds of equal time lead to very different plans.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from os import cpu_count

from memfit.planning.model.reduce import Ints
from memfit.planning.search.neighbourhood import Neighbourhood
from memfit.planning.search.state import Search


@dataclass(frozen=True, slots=True, kw_only=True)
class Walks:
    """The neighbourhood search. `add_to_seed` gives each slot of the table its own random numbers."""

    name: str = "search"
    add_to_seed: int = 0
    patient: bool = True  # whether the caller's patience ends it

    def applies(self, search: Search) -> bool:
        return not search.done and not search.good_enough

    def run(self, search: Search, seconds: float) -> None:
        patience = search.patience if self.patient else None
        improve(search, seconds=seconds, seed=search.seed + self.add_to_seed, patience=patience)


@dataclass(frozen=True, slots=True, kw_only=True)
class HurriedWalks(Walks):
    """With little time and a wide gap a search comes before exact chains: what it gains it gains at once."""

    name: str = "hurried search"
    add_to_seed: int = 50
    patient: bool = False

    def applies(self, search: Search) -> bool:
        far = search.best is None or search.gap_points > search.settings.walks.hurried_points
        hurried = search.problem.time_limit_s < search.settings.wide.ample_s
        return hurried and far and not search.done and not search.good_enough


@dataclass(frozen=True, slots=True, kw_only=True)
class WalksOn(Walks):
    """After annealing: search from the best plan, whichever stage found it."""

    name: str = "search after annealing"
    patient: bool = False

    def applies(self, search: Search) -> bool:
        return search.best is not None


def improve(search: Search, *, seconds: float = 1e9, seed: int = 0, patience: float | None = None) -> None:
    """Search until the gap is small enough the time is up or the user has had enough.

    With `patience` also when a plan is known and nothing worthwhile was found for that share of the time spent.
    """
    numbers = search.settings.walks
    clock = _Clock(search, search.problem.seconds + min(seconds, max(search.problem.seconds_left, 0.0)), patience)
    at_once = min(numbers.at_once, cpu_count() or 1)
    most = int(numbers.round_share * at_once * (clock.stop_s - search.problem.seconds) / numbers.least_walk_s)
    walks = begin_walks(search, seed, most, at_once)
    with ThreadPoolExecutor(at_once) as pool:
        while walks and not clock.over:
            left = clock.stop_s - search.problem.seconds
            _walk_together(pool, walks, clock, numbers.round_share * left * at_once / len(walks) if len(walks) > at_once else left)
            walks.sort(key=lambda walk: walk.best_standing)
            walks = walks[: max(len(walks) // 2, at_once)]


def _walk_together(pool: ThreadPoolExecutor, walks: list[Neighbourhood], clock: _Clock, seconds: float) -> None:
    """Walk each for `seconds`, as many at once as the pool has threads. Walks queue what they find; only this thread updates the search."""
    found: deque[tuple[Ints, Ints]] = deque()
    running = {pool.submit(_walk, walk, clock, seconds, found) for walk in walks}
    try:
        while running:
            done, running = wait(running, timeout=clock.search.settings.walks.look_s, return_when=FIRST_COMPLETED)
            while found:
                sequence, makers = found.popleft()
                clock.search.consider(sequence, "search", makers)
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
    reached_ns: int | None = None
    gained_s: float = 0.0
    told_s: float = 0.0
    stopped: bool = False

    @property
    def over(self) -> bool:
        search, now, numbers = self.search, self.search.problem.seconds, self.search.settings.walks
        if search.best is not None and (self.reached_ns is None or search.best_time_ns < self.reached_ns * (1 - numbers.worthwhile)):
            self.reached_ns, self.gained_s = search.best_time_ns, now
        tired = self.patience is not None and self.reached_ns is not None
        if tired and now - self.gained_s > max(numbers.least_patience_s, (self.patience or 0.0) * now):
            return True
        return self.stopped or search.done or search.good_enough or now >= self.stop_s

    def tell(self) -> None:
        problem = self.search.problem
        if problem.seconds - self.told_s > self.search.settings.walks.tell_s:
            self.told_s = problem.seconds
            problem.tell(self.search.best_time_ns if self.search.best is not None else None, self.search.bound_ns, "search")


def begin_walks(search: Search, seed: int, most: int, least: int) -> list[Neighbourhood]:
    """A walk from each of the best plans and, where the gap is wide, from the closest sequence that did not fit.

    There are at most `most` (as time allows) and at least `least` (as many as run at once). While nothing fits, several start from the
    closest miss, because the first plan that a walk finds decides where it ends.
    """
    a, limit, numbers = search.problem.model.arrays, search.problem.limit_bytes, search.settings.walks
    most = min(max(most, 1), numbers.most_walks)
    starts = [(sequence, makers) for _, sequence, makers in search.pool]
    if search.best is None and search.closest is not None:
        starts = [(search.closest, search.makers)] * numbers.most_walks
    elif search.miss is not None and search.gap_points > numbers.miss_points and most > 1:
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
    problem, numbers = clock.search.problem, clock.search.settings.walks
    began = improved = problem.seconds
    while not clock.over and problem.seconds - began < seconds:
        slack = numbers.slack * (1 - (problem.seconds - began) / numbers.wave_s % 1.0)
        if walk.round(slack):
            improved = problem.seconds
            found.append((walk.best, walk.maker))
        elif problem.seconds - improved > numbers.stale_s:
            walk.restart()
            improved = problem.seconds
    walk.restart()
