"""Planning: a graph, its costs and a budget become a schedule. One planner per file, all through `plan`.

Planners are imported when they are asked for: this room alone brings neither scipy nor numba.
"""

import memfit.planning.frontier  # noqa: F401  the folder first: the function below takes its name
from memfit.planning.api import PLANNERS, find_planner, frontier, plan
from memfit.planning.problem import Planner, Problem, Progress

__all__ = ["PLANNERS", "Planner", "Problem", "Progress", "find_planner", "frontier", "plan"]
