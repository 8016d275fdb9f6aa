"""The words every room shares: graphs, costs, budgets, schedules, plans, outcomes, and the judge. Needs numpy at most."""

from memfit.core.budget import Budget
from memfit.core.costs import DEVICE, DISK, HOST, Costs, Level, uniform_costs
from memfit.core.errors import BadInput, IllegalSchedule, InfeasibleBudget, MemfitError, NoPlanFound, StorageFailed, Unsupported
from memfit.core.graph import Graph, Kind, Op, Storage, Tensor, Variant
from memfit.core.lifetimes import Lifetime, check_layout, lifetimes, max_load
from memfit.core.outcome import Outcome, Status
from memfit.core.plan import Layout, Plan, Timeline
from memfit.core.schedule import Compute, Free, Offload, ParallelSchedule, Placement, Reload, Schedule, Step
from memfit.core.simulate import simulate
from memfit.core.units import exact_bytes, format_bytes, parse_bytes

__all__ = [
    "DEVICE",
    "DISK",
    "HOST",
    "BadInput",
    "Budget",
    "Compute",
    "Costs",
    "Free",
    "Graph",
    "IllegalSchedule",
    "InfeasibleBudget",
    "Kind",
    "Layout",
    "Level",
    "Lifetime",
    "MemfitError",
    "NoPlanFound",
    "Offload",
    "Op",
    "Outcome",
    "ParallelSchedule",
    "Placement",
    "Plan",
    "Reload",
    "Schedule",
    "Status",
    "Step",
    "Storage",
    "StorageFailed",
    "Tensor",
    "Timeline",
    "Unsupported",
    "Variant",
    "check_layout",
    "exact_bytes",
    "format_bytes",
    "lifetimes",
    "max_load",
    "parse_bytes",
    "simulate",
    "uniform_costs",
]
