"""Planning: a graph, its costs and a budget become a schedule. One planner per file, all through `plan`."""

from memfit.planning.api import PLANNERS, find_planner, plan
from memfit.planning.frontier.search import frontier
from memfit.planning.problem import Planner, Problem, Progress

__all__ = ["PLANNERS", "Planner", "Problem", "Progress", "find_planner", "frontier", "plan"]
