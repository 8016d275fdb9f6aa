"""The improvement loop: clock, progress, restarts. Ctrl-C between rounds keeps the best plan."""

from __future__ import annotations

from memfit.planning.lns import Neighbourhood
from memfit.planning.search import Search

_STALE_S = 2.0
_TELL_S = 0.5


_WORTHWHILE = 1e-3  # an improvement of the plan's time that counts as one
_LEAST_PATIENCE_S = 1.0


def improve_until(search: Search, *, seconds: float = 1e9, seed: int = 0, patience: float | None = None) -> None:
    """Search until the gap is small enough, the time is up or the user has had enough.

    With `patience` also when a plan is known and nothing worthwhile was found for that share of the time spent.
    """
    start = search.best if search.best is not None else search.closest
    if start is None or not len(start):
        return
    problem = search.problem
    walk = Neighbourhood(arrays=problem.model.arrays, limit=problem.limit_bytes, maker=search.makers, current=start, seed=seed)
    began = improved = told = gained = problem.seconds
    reached = search.best_time_ns if search.best is not None else None
    while not search.done and not search.good_enough and problem.seconds - began < seconds:
        left = min(problem.seconds_left, seconds - (problem.seconds - began))
        slack = 0.01 * max(left, 0.0) / max(left + problem.seconds - began, 1e-9)
        if walk.round(slack):
            improved = problem.seconds
            search.offer(walk.best, "search")
        elif problem.seconds - improved > _STALE_S:
            walk.restart()
            improved = problem.seconds
        if search.best is not None and (reached is None or search.best_time_ns < reached * (1 - _WORTHWHILE)):
            reached, gained = search.best_time_ns, problem.seconds
        if patience is not None and reached is not None and problem.seconds - gained > max(_LEAST_PATIENCE_S, patience * problem.seconds):
            return
        if problem.seconds - told > _TELL_S:
            told = problem.seconds
            problem.tell(search.best_time_ns if search.best is not None else None, search.bound_ns, "search")
