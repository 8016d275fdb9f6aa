"""CP-SAT on the same question, where ortools is installed: a different way of searching, which now and then wins at once.

    offset_k in [0, capacity - size_k], boxes (life_k x [offset_k, offset_k + size_k)) do not overlap

Where in the flow: `race.decide` lets it race against the tree searches when those have not answered within a second or
two. It learns clauses and is strong where many similar buffers crowd a short stretch; the tree searches are stronger where
sizes differ widely. Everything works without it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from memfit.core import cp_sat
from memfit.core.outcome import Status
from memfit.offsets.exact.search import Verdict
from memfit.offsets.problem import Ints, Problem

_NUM_WORKERS = 1
_MAX_BUFFERS = 1_000  # beyond, building its model takes longer than it is worth


def is_available(problem: Problem) -> bool:
    return problem.num_buffers <= _MAX_BUFFERS and cp_sat.is_installed()


class Racer:
    """One run that can be stopped from another thread."""

    def __init__(self) -> None:
        self._solver = cp_sat.Solver()

    def stop(self) -> None:
        self._solver.stop()

    def run(self, problem: Problem, capacity: int, time_limit_s: float, seed: int) -> tuple[Verdict, Ints | None]:
        """Search until found, refuted, out of time or stopped."""
        unit = int(
            np.gcd.reduce(np.concatenate([problem.size, problem.fixed[problem.fixed > 0], problem.alignment[problem.alignment > 1]]))
        )
        model = cp_sat.new_model("this search for offsets")
        limit = capacity // unit
        starts = [self._start(model, problem, k, unit, limit) for k in range(problem.num_buffers)]
        if any(start is None for start in starts):
            return Verdict.IMPOSSIBLE, None
        lives = [model.new_fixed_size_interval_var(int(a), int(b - a), "") for a, b in zip(problem.start, problem.stop, strict=True)]
        boxes = [model.new_fixed_size_interval_var(s, int(z) // unit, "") for s, z in zip(starts, problem.size, strict=True)]
        model.add_no_overlap_2d(lives, boxes)
        status = self._solver.solve(model, time_limit_s=time_limit_s, workers=_NUM_WORKERS, seed=seed)
        if status in (Status.OPTIMAL, Status.FEASIBLE):
            return Verdict.PACKED, np.array([self._solver.value(s) * unit for s in starts], np.int64)
        return (Verdict.IMPOSSIBLE if status is Status.INFEASIBLE else Verdict.OPEN), None

    @staticmethod
    def _start(model: Any, problem: Problem, k: int, unit: int, limit: int) -> Any:
        """The offset of buffer k in units, an expression; None if it cannot lie under the limit."""
        room = limit - int(problem.size[k]) // unit
        if room < 0 or problem.fixed[k] > room * unit:
            return None
        if problem.fixed[k] >= 0:
            return model.new_constant(int(problem.fixed[k]) // unit)
        step = max(1, int(problem.alignment[k]) // unit)
        return step * model.new_int_var(0, room // step, "")
