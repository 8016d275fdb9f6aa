"""memfit trains any PyTorch model inside a byte budget, and schedules memory for everything else.

`import memfit` is quick: names are looked up here and their rooms loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from memfit.lazy import load_on_use

__version__ = "0.1.0"

_FILES = {
    "core.budget": ("Budget",),
    "core.costs": ("Costs", "Level"),
    "core.errors": ("BadInput", "IllegalSchedule", "InfeasibleBudget", "MemfitError", "NoPlanFound", "StorageFailed", "Unsupported"),
    "core.graph": ("Graph", "Kind", "Op", "Storage", "Tensor", "Variant"),
    "core.io": ("dumps", "load", "loads", "save"),
    "core.lifetimes": ("Lifetime",),
    "core.outcome": ("Outcome", "Status"),
    "core.plan": ("Layout", "Plan", "Timeline"),
    "core.schedule": ("Compute", "Free", "Offload", "ParallelSchedule", "Placement", "Reload", "Schedule"),
    "core.simulate": ("simulate",),
    "planning": ("plan",),
    "offsets.api": ("pack",),
    "api": ("doctor", "estimate", "fit", "frontier"),
    "backend": ("register_backend",),
    "capture.inputs": ("Inputs",),
    "chain.run.run": ("run_chain",),
    "runtime.arena.planned": ("use_planned_arena",),
}
_ROOMS = ("chain", "tasks", "offsets", "schedules")  # libraries of their own: memfit.tasks.assembly_tree(...)

_find, __dir__, __all__ = load_on_use(__name__, _FILES)
__all__ += ["__version__"]


def __getattr__(name: str) -> Any:
    return import_module(f"memfit.{name}") if name in _ROOMS else _find(name)
