"""memfit trains any PyTorch model inside a byte budget, and schedules memory for everything else.

`import memfit` is quick: names are looked up here and their rooms loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_CORE = [
    "Budget",
    "Compute",
    "Costs",
    "Free",
    "Graph",
    "Kind",
    "Layout",
    "Level",
    "Lifetime",
    "Offload",
    "Op",
    "Outcome",
    "ParallelSchedule",
    "Placement",
    "Plan",
    "Reload",
    "Schedule",
    "Status",
    "Storage",
    "Tensor",
    "Timeline",
    "Variant",
    "BadInput",
    "IllegalSchedule",
    "InfeasibleBudget",
    "MemfitError",
    "NoPlanFound",
    "StorageFailed",
    "Unsupported",
    "simulate",
]

_HOME = {
    **dict.fromkeys(_CORE, "memfit.core"),
    **dict.fromkeys(("load", "loads", "save", "dumps"), "memfit.core.io"),
    "plan": "memfit.planning",
    "pack": "memfit.offsets",
    "fit": "memfit.api",
    "estimate": "memfit.api",
    "frontier": "memfit.api",
    "register_backend": "memfit.backend",
    "Inputs": "memfit.capture.inputs",
    "run_chain": "memfit.chain.run.run",
    "use_planned_arena": "memfit.runtime.arena.planned",
}

_ROOMS = ("chain", "tasks", "offsets", "schedules")  # libraries of their own: memfit.tasks.assembly_tree(...)

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"memfit.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'memfit' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
