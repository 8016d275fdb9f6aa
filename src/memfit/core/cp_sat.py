"""OR-Tools' CP-SAT (extra `solvers`) behind one file: planners, offsets and task orders write models for it, and this runs them."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from memfit.core.errors import Unsupported
from memfit.core.outcome import Status


def is_installed() -> bool:
    return find_spec("ortools") is not None


def new_model(user: str) -> Any:
    """An empty `CpModel`. Without OR-Tools: an error that names `user`, the planner or algorithm that asked for it."""
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise Unsupported(f"{user} needs OR-Tools: pip install 'memfit[solvers]', or choose another one.") from None
    return cp_model.CpModel()


class Solver:
    """Runs of the solver, one after the other. Another thread may stop them, also before the first begins."""

    def __init__(self) -> None:
        self._solver: Any = None
        self._stopped = False

    def stop(self) -> None:
        self._stopped = True
        if self._solver is not None:
            self._solver.stop_search()

    def solve(self, model: Any, *, time_limit_s: float, workers: int, seed: int = 1) -> Status:
        """Search until the model is solved or refuted, the time is up, or somebody stops it."""
        from ortools.sat.python import cp_model

        self._solver = cp_model.CpSolver()
        self._solver.parameters.max_time_in_seconds = time_limit_s
        self._solver.parameters.num_workers = workers
        self._solver.parameters.random_seed = seed
        if self._stopped:
            return Status.UNKNOWN
        code = self._solver.solve(model)
        known = {cp_model.OPTIMAL: Status.OPTIMAL, cp_model.FEASIBLE: Status.FEASIBLE, cp_model.INFEASIBLE: Status.INFEASIBLE}
        return known.get(code, Status.UNKNOWN)

    def value(self, variable: Any) -> int:
        return int(self._solver.value(variable))

    @property
    def bound(self) -> float:
        """A lower bound on the objective of every solution."""
        return float(self._solver.best_objective_bound)
