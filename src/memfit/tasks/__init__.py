"""Task graphs: the order that needs least memory on one processor, and schedules for many under a memory bound.

    graph = memfit.tasks.read_tasks("graph.json")
    memfit.tasks.schedule(graph, processors=4, memory_bytes=8 * 2**30)

One algorithm per file; names are looked up here and their files loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_FILES = {
    "all_to_all_mapping": ("all_to_all",),
    "assembly": ("assembly_tree",),
    "beam": ("beam_order",),
    "bounds": ("forced_live_bound", "forest_bound", "makespan_lower_bound", "peak_lower_bound", "single_task_bound"),
    "cpsat": ("cpsat_order",),
    "exact": ("exact_order",),
    "generators": ("harpoon", "random_dag", "random_series_parallel", "random_tree"),
    "greedy": ("greedy_order", "priority_order"),
    "judge": ("ParallelProfile", "Profile", "Run", "SpillPlan", "Transfer", "judge_order", "judge_parallel", "judge_spill"),
    "list_scheduling": ("list_schedule", "par_deepest_first", "par_inner_first"),
    "liu": ("liu_order",),
    "local_search": ("improve_order",),
    "mem_booking": ("Booking", "membooking"),
    "memory_aware_mapping": ("memory_aware",),
    "minio": ("least_io", "spill_plan"),
    "minmem": ("minmem_order",),
    "model": ("TaskGraph", "task_graph"),
    "outcome": ("TaskOutcome",),
    "subtree_scheduling": ("par_subtrees",),
    "postorder": ("best_postorder",),
    "proportional_mapping": ("proportional",),
    "read": ("parse_tasks", "read_tasks"),
    "reversal": ("as_out_tree", "out_tree_order"),
    "safe_booking": ("SafeBooking", "safebooking"),
    "front": ("ALGORITHMS", "schedule"),
    "series_parallel": ("series_parallel_order",),
    "training": ("from_training_graph",),
    "tree": ("Tree", "as_tree", "tree_graph"),
}
_HOME = {name: f"{__name__}.{file}" for file, names in _FILES.items() for name in names}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(_HOME)
