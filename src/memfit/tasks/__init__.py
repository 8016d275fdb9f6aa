"""Task graphs: the order that needs least memory on one processor, and schedules for many under a memory bound.

    graph = memfit.tasks.read_tasks("graph.json")
    memfit.tasks.schedule(graph, processors=4, memory_bytes=8 * 2**30)

One algorithm per file; names are looked up here and their files loaded on first use.
"""

from __future__ import annotations

from memfit.lazy import load_on_use

_FILES = {
    "parallel.all_to_all_mapping": ("all_to_all",),
    "trees.assembly": ("assembly_tree",),
    "sequential.beam": ("beam_order",),
    "bounds": ("forced_live_bound", "forest_bound", "makespan_lower_bound", "peak_lower_bound", "single_task_bound"),
    "sequential.cp_sat": ("cpsat_order",),
    "sequential.exact": ("exact_order",),
    "trees.generators": ("harpoon", "random_dag", "random_series_parallel", "random_tree"),
    "sequential.greedy": ("greedy_order", "priority_order"),
    "judge": ("ParallelProfile", "Profile", "Run", "SpillPlan", "Transfer", "judge_order", "judge_parallel", "judge_spill"),
    "parallel.list_scheduling": ("list_schedule", "par_deepest_first", "par_inner_first"),
    "sequential.liu": ("liu_order",),
    "sequential.local_search": ("improve_order",),
    "parallel.mem_booking": ("Booking", "membooking"),
    "parallel.memory_aware_mapping": ("memory_aware",),
    "spilling": ("least_io", "spill_plan"),
    "sequential.minmem": ("minmem_order",),
    "graph": ("TaskGraph", "task_graph"),
    "outcome": ("TaskOutcome",),
    "parallel.subtree_scheduling": ("par_subtrees",),
    "sequential.postorder": ("best_postorder",),
    "parallel.proportional_mapping": ("proportional",),
    "trees.read_files": ("parse_tasks", "read_tasks"),
    "sequential.out_tree": ("recognize_out_tree", "out_tree_order"),
    "parallel.safe_booking": ("SafeBooking", "safebooking"),
    "api": ("ALGORITHMS", "schedule"),
    "sequential.series_parallel": ("series_parallel_order",),
    "trees.from_training_graph": ("from_training_graph",),
    "trees.tree": ("Tree", "recognize_tree", "tree_graph"),
}
__getattr__, __dir__, __all__ = load_on_use(__name__, _FILES)
