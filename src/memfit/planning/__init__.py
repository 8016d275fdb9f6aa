"""Planning: a graph, its costs and a budget become a schedule. One planner per file, all through `plan`."""

from memfit.planning.base import Planner, Problem, Progress
from memfit.planning.door import PLANNERS, find_planner, plan
from memfit.planning.frontier import frontier

__all__ = ["PLANNERS", "Planner", "Problem", "Progress", "find_planner", "frontier", "plan"]
