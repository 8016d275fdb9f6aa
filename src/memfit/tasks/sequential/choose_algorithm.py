"""One processor: which algorithm for which graph, and what its answer proves.

    in-tree ── liu ─────────────┐
    out-tree ── reversal ───────┤  optimal by theorem
    series-parallel ────────────┘
    anything else ── greedy = bound? ── exact search ── beam, local search, CP-SAT      stops when peak = bound

`solve` is the part of the front door that knows these names; each algorithm lives in its own file.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from memfit.core import cp_sat
from memfit.core.errors import BadInput
from memfit.tasks.bounds import peak_lower_bound
from memfit.tasks.graph import Ints, TaskGraph
from memfit.tasks.judge import judge_order
from memfit.tasks.sequential.beam import beam_order
from memfit.tasks.sequential.cp_sat import cpsat_order
from memfit.tasks.sequential.exact import exact_order
from memfit.tasks.sequential.greedy import greedy_order
from memfit.tasks.sequential.liu import liu_order
from memfit.tasks.sequential.local_search import improve_order
from memfit.tasks.sequential.minmem import minmem_order
from memfit.tasks.sequential.out_tree import out_tree_order, recognize_out_tree
from memfit.tasks.sequential.postorder import best_postorder
from memfit.tasks.sequential.series_parallel import series_parallel_order
from memfit.tasks.trees.tree import Tree, recognize_tree

TREE_ALGORITHMS = ("liu", "minmem", "postorder")
DAG_ALGORITHMS = ("exact", "cpsat", "greedy", "beam", "local-search")
SEQUENTIAL = (*TREE_ALGORITHMS, "out-tree", "series-parallel", *DAG_ALGORITHMS)
_SEARCH_LIMIT = 64  # tasks up to which the exact search is tried
_CPSAT_LIMIT = 120
_SP_LIMIT = 50_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """An order, its peak as judged, and the best bound."""

    order: Ints
    peak_bytes: int
    lower_bound_bytes: int
    algorithm: str

    @property
    def optimal(self) -> bool:
        return self.peak_bytes <= self.lower_bound_bytes


Progress = Callable[[str], None]


def solve(
    graph: TaskGraph, algorithm: str = "auto", *, time_limit_s: float = 10.0, seed: int = 0, progress: Progress | None = None
) -> Solution:
    """The least peak that the algorithm finds; `auto` is optimal on trees, series-parallel graphs and small DAGs."""
    if algorithm not in ("auto", *SEQUENTIAL):
        raise BadInput(f"algorithm {algorithm!r} is not one for one processor: choose auto, {', '.join(SEQUENTIAL)}.")
    if not graph.num_tasks:
        return _accept_as_optimal(graph, graph.topological_order, algorithm)
    tree = recognize_tree(graph)
    if algorithm in TREE_ALGORITHMS:
        return _solve_tree(graph, _require(tree, algorithm, "an in-tree (every output has one reader)"), algorithm)
    if algorithm in DAG_ALGORITHMS:
        return _solve_dag(graph, algorithm, time_limit_s, seed)
    if algorithm == "auto" and tree is not None:
        return _solve_tree(graph, tree, "liu")
    special = _solve_special(graph, algorithm)
    return special if special is not None else _solve_any(graph, time_limit_s, seed, progress or (lambda _: None))


def _require(tree: Tree | None, algorithm: str, what: str) -> Tree:
    if tree is None:
        raise BadInput(f"algorithm {algorithm} needs {what}, which this graph is not: choose auto.")
    return tree


def _solve_special(graph: TaskGraph, algorithm: str) -> Solution | None:
    """Out-trees and series-parallel graphs, asked for or found."""
    if algorithm in ("auto", "out-tree"):
        mirror = recognize_out_tree(graph)
        if mirror is not None:
            order, _ = out_tree_order(mirror)
            return _accept_as_optimal(graph, order, "out-tree")
        if algorithm == "out-tree":
            _require(None, algorithm, "an out-tree whose items have one reader each (give edges their own bytes)")
    if graph.num_tasks <= _SP_LIMIT:
        found = series_parallel_order(graph)
        if found is not None:
            return _accept_as_optimal(graph, found[0], "series-parallel")
    if algorithm == "series-parallel":
        _require(None, algorithm, "a series-parallel graph whose items have one reader each (give edges their own bytes)")
    return None


def _accept_as_optimal(graph: TaskGraph, order: Ints, algorithm: str) -> Solution:
    peak = judge_order(graph, order).peak_bytes
    return Solution(order=order, peak_bytes=peak, lower_bound_bytes=peak, algorithm=algorithm)


def _solve_tree(graph: TaskGraph, tree: Tree, algorithm: str) -> Solution:
    if algorithm == "postorder":
        order, _ = best_postorder(tree)
        return Solution(
            order=order, peak_bytes=judge_order(graph, order).peak_bytes, lower_bound_bytes=liu_order(tree)[1], algorithm=algorithm
        )
    order, _ = liu_order(tree) if algorithm == "liu" else minmem_order(tree)
    return _accept_as_optimal(graph, order, algorithm)


def _solve_dag(graph: TaskGraph, algorithm: str, time_limit_s: float, seed: int) -> Solution:
    order, peak = greedy_order(graph)
    start = Solution(order=order, peak_bytes=peak, lower_bound_bytes=peak_lower_bound(graph), algorithm=algorithm)
    if algorithm == "exact":
        return _run_exact_search(graph, start, time_limit_s)
    if algorithm == "beam":
        return _take_better(graph, start, _run_beam(graph, time_limit_s), "beam")
    if algorithm == "local-search":
        found = improve_order(graph, order, stop_at=start.lower_bound_bytes, time_limit_s=time_limit_s, seed=seed)
        return _take_better(graph, start, found[0], algorithm)
    return _solve_cp_sat(graph, start, time_limit_s, seed) if algorithm == "cpsat" else start


def _solve_any(graph: TaskGraph, time_limit_s: float, seed: int, progress: Progress) -> Solution:
    deadline = time.monotonic() + time_limit_s
    order, peak = greedy_order(graph)
    best = Solution(order=order, peak_bytes=peak, lower_bound_bytes=peak_lower_bound(graph), algorithm="greedy")

    def left() -> float:
        return max(0.05, deadline - time.monotonic())

    if not best.optimal and graph.num_tasks <= 2_000:
        progress("beam search")
        best = _take_better(graph, best, _run_beam(graph, left() / 4), "beam")
    if not best.optimal and graph.num_tasks <= _SEARCH_LIMIT:
        progress("exact search")
        best = _run_exact_search(graph, best, left() if graph.num_tasks <= 30 else left() / 2)
    if not best.optimal and graph.num_tasks <= 20_000:
        progress("local search")
        found, _ = improve_order(graph, best.order, stop_at=best.lower_bound_bytes, time_limit_s=min(left() / 3, 5.0), seed=seed)
        best = _take_better(graph, best, found, "local-search")
    if not best.optimal and graph.num_tasks <= _CPSAT_LIMIT and cp_sat.is_installed() and left() > 0.5:
        progress("CP-SAT")
        best = _solve_cp_sat(graph, best, left(), seed)
    return best


def _run_beam(graph: TaskGraph, time_limit_s: float) -> Ints | None:
    width = 64 if graph.num_tasks <= 200 else 16
    found = beam_order(graph, width=width, time_limit_s=time_limit_s)
    return None if found is None else found[0]


def _run_exact_search(graph: TaskGraph, start: Solution, time_limit_s: float) -> Solution:
    """A complete search proves: its order is optimal, or the one it could not beat is."""
    found = exact_order(graph, below=start.peak_bytes, time_limit_s=time_limit_s)
    bound = max(start.lower_bound_bytes, found.lower_bound_bytes)
    if found.order is not None:
        peak = judge_order(graph, found.order).peak_bytes
        return Solution(order=found.order, peak_bytes=peak, lower_bound_bytes=peak, algorithm="exact")
    return replace(start, lower_bound_bytes=bound, algorithm="exact" if found.complete else start.algorithm)


def _solve_cp_sat(graph: TaskGraph, start: Solution, time_limit_s: float, seed: int) -> Solution:
    found = cpsat_order(graph, start.order, start.peak_bytes, start.lower_bound_bytes, time_limit_s=time_limit_s, seed=seed)
    better = _take_better(graph, start, found.order, "cpsat")
    return replace(better, lower_bound_bytes=min(better.peak_bytes, max(start.lower_bound_bytes, found.lower_bound_bytes)))


def _take_better(graph: TaskGraph, start: Solution, order: Ints | None, algorithm: str) -> Solution:
    if order is None:
        return start
    peak = judge_order(graph, order).peak_bytes
    return replace(start, order=order, peak_bytes=peak, algorithm=algorithm) if peak < start.peak_bytes else start
