"""The front door of this room: a task graph, processors and memory in; a judged schedule with its bounds out.

schedule(graph)                                   least peak on one processor
schedule(graph, memory_bytes=M)                   the same, and whether it fits; spill=True writes out what does not
schedule(graph, processors=P, memory_bytes=M)     short makespan, never above M
"""

from __future__ import annotations

import time
from dataclasses import replace

from memfit.core.errors import BadInput, InfeasibleBudget
from memfit.core.outcome import Status
from memfit.core.units import format_bytes
from memfit.tasks.bounds import makespan_lower_bound
from memfit.tasks.graph import TaskGraph
from memfit.tasks.judge import Run, judge_order, judge_parallel, judge_spill
from memfit.tasks.outcome import TaskOutcome
from memfit.tasks.parallel.all_to_all_mapping import all_to_all
from memfit.tasks.parallel.list_scheduling import par_deepest_first, par_inner_first
from memfit.tasks.parallel.mem_booking import membooking
from memfit.tasks.parallel.memory_aware_mapping import memory_aware
from memfit.tasks.parallel.proportional_mapping import proportional
from memfit.tasks.parallel.safe_booking import safebooking
from memfit.tasks.parallel.subtree_scheduling import par_subtrees
from memfit.tasks.sequential.choose_algorithm import SEQUENTIAL, Progress, Solution, solve
from memfit.tasks.sequential.postorder import best_postorder
from memfit.tasks.spilling import least_io
from memfit.tasks.trees.tree import Tree, recognize_tree

PARALLEL = (
    "membooking", "safebooking", "par-subtrees", "par-inner-first", "par-deepest-first", "all-to-all", "proportional", "memory-aware",
)  # fmt: skip
ALGORITHMS = ("auto", *SEQUENTIAL, *PARALLEL)
_SPREADING = ("all-to-all", "proportional", "memory-aware")  # a task may run on several processors or on a part of one
_SAFE_LIMIT = 500  # tasks of a tree up to which safebooking is tried besides membooking: O(n) a decision


def schedule(
    graph: TaskGraph,
    *,
    processors: int = 1,
    memory_bytes: int | None = None,
    algorithm: str = "auto",
    spill: bool = False,
    time_limit_s: float = 10.0,
    seed: int = 0,
    progress: Progress | None = None,
) -> TaskOutcome:
    """Never raises for a memory that is too small: `status` says INFEASIBLE (proven) or UNKNOWN, `reason` why."""
    if algorithm not in ALGORITHMS:
        raise BadInput(f"algorithm {algorithm!r} is unknown: choose one of {', '.join(ALGORITHMS)}.")
    if processors < 1:
        raise BadInput(f"{processors} processors cannot run anything: give at least 1.")
    begin = time.perf_counter()
    parallel = graph.num_tasks > 0 and (algorithm in PARALLEL or (algorithm == "auto" and processors > 1))
    chosen = "auto" if algorithm in PARALLEL else algorithm
    solution = solve(graph, chosen, time_limit_s=time_limit_s, seed=seed, progress=progress)
    if memory_bytes is not None and solution.peak_bytes > memory_bytes and (algorithm not in PARALLEL or spill):
        outcome = _answer_short(graph, solution, memory_bytes, spill=spill)
    elif parallel:
        outcome = _answer_in_parallel(graph, solution, processors, memory_bytes, algorithm)
    else:
        outcome = _answer_in_order(graph, solution, memory_bytes)
    bound = makespan_lower_bound(graph, processors if parallel else 1)
    if outcome.algorithm in _SPREADING:
        bound = float(graph.time.sum()) / processors
    outcome = replace(outcome, processors=processors, makespan_lower_bound=bound, seconds=time.perf_counter() - begin)
    return _judge_makespan(outcome) if parallel and outcome.runs else outcome


def _answer_in_order(graph: TaskGraph, solution: Solution, memory_bytes: int | None) -> TaskOutcome:
    profile = judge_order(graph, solution.order)
    return TaskOutcome(
        status=Status.OPTIMAL if solution.optimal else Status.FEASIBLE,
        algorithm=solution.algorithm,
        memory_bytes=memory_bytes,
        order=tuple(solution.order.tolist()),
        peak_bytes=profile.peak_bytes,
        lower_bound_bytes=solution.lower_bound_bytes,
        makespan=float(graph.time.sum()),
        profile=profile,
        reason="no order holds less, and that is proven." if solution.optimal else "no order is known to hold less.",
    )


def _answer_short(graph: TaskGraph, solution: Solution, memory_bytes: int, *, spill: bool) -> TaskOutcome:
    """The order found does not fit: spill, or say why not."""
    have, least = format_bytes(memory_bytes), f"{format_bytes(solution.lower_bound_bytes)} ({solution.lower_bound_bytes} bytes)"
    empty = TaskOutcome(
        status=Status.INFEASIBLE,
        algorithm=solution.algorithm,
        memory_bytes=memory_bytes,
        lower_bound_bytes=solution.lower_bound_bytes,
        reason=f"{have} is below the proven minimum {least}: no order of these tasks holds less. Give it that much, or spill (--spill).",
    )
    if spill:
        return _spill(graph, solution, memory_bytes, empty)
    if memory_bytes < solution.lower_bound_bytes:
        return empty
    found = f"{format_bytes(solution.peak_bytes)} ({solution.peak_bytes} bytes)"
    reason = f"the best order found holds {found}, more than {have}; none below {least} exists. Allow more time, or spill (--spill)."
    return replace(empty, status=Status.UNKNOWN, peak_bytes=solution.peak_bytes, reason=reason)


def _spill(graph: TaskGraph, solution: Solution, memory_bytes: int, empty: TaskOutcome) -> TaskOutcome:
    orders = [solution.order, graph.topological_order]
    tree = recognize_tree(graph)
    if tree is not None:
        orders.append(best_postorder(tree)[0])
    try:
        plan = least_io(graph, orders, memory_bytes)
    except InfeasibleBudget as error:
        return replace(empty, lower_bound_bytes=error.minimum_bytes or 0, reason=str(error))
    judge_spill(graph, plan, memory_bytes=memory_bytes)
    return replace(
        empty,
        status=Status.FEASIBLE,
        algorithm=f"{solution.algorithm}+minio",
        order=plan.order,
        peak_bytes=plan.peak_bytes,
        makespan=float(graph.time.sum()),
        spill=plan,
        reason=f"one task after another; {format_bytes(plan.written_bytes)} are written out and {format_bytes(plan.read_bytes)} read back.",
    )


def _answer_in_parallel(graph: TaskGraph, solution: Solution, processors: int, memory_bytes: int | None, algorithm: str) -> TaskOutcome:
    names = _choose_algorithms(graph, memory_bytes) if algorithm == "auto" else (algorithm,)
    tree = recognize_tree(graph)
    best: TaskOutcome | None = None
    for name in names:
        try:
            runs = run_parallel(graph, tree, solution, name, processors, memory_bytes)
        except InfeasibleBudget as error:
            return _refuse(solution, name, memory_bytes, str(error))
        profile = judge_parallel(graph, runs, processors=processors)
        outcome = TaskOutcome(
            status=Status.FEASIBLE,
            algorithm=name,
            memory_bytes=memory_bytes,
            order=tuple(r.task for r in runs),
            runs=tuple(runs),
            peak_bytes=profile.peak_bytes,
            lower_bound_bytes=solution.lower_bound_bytes,
            makespan=profile.makespan,
            profile=profile,
        )
        if memory_bytes is not None and profile.peak_bytes > memory_bytes:
            need = f"{format_bytes(profile.peak_bytes)} ({profile.peak_bytes} bytes)"
            return _refuse(solution, name, memory_bytes, f"{name} does not look at memory and holds {need}: choose membooking or auto.")
        key = (outcome.makespan or 0.0, profile.peak_bytes)
        if best is None or key < (best.makespan or 0.0, best.peak_bytes or 0):
            best = outcome
    assert best is not None
    return best


def _refuse(solution: Solution, name: str, memory_bytes: int | None, reason: str) -> TaskOutcome:
    proven = memory_bytes is not None and memory_bytes < solution.lower_bound_bytes
    return TaskOutcome(
        status=Status.INFEASIBLE if proven else Status.UNKNOWN,
        algorithm=name,
        memory_bytes=memory_bytes,
        lower_bound_bytes=solution.lower_bound_bytes,
        reason=reason,
    )


def _choose_algorithms(graph: TaskGraph, memory_bytes: int | None) -> tuple[str, ...]:
    if memory_bytes is None:
        return ("par-deepest-first", "par-inner-first")
    tree = recognize_tree(graph) is not None
    if tree and graph.num_tasks > _SAFE_LIMIT:
        return ("membooking",)
    return ("membooking", "safebooking") if tree else ("safebooking",)


def run_parallel(
    graph: TaskGraph, tree: Tree | None, solution: Solution, name: str, processors: int, memory_bytes: int | None
) -> list[Run]:
    """The schedule of one parallel algorithm. Those that book memory take the sequential peak when no memory is given."""
    limit = solution.peak_bytes if memory_bytes is None else memory_bytes
    if name == "safebooking":
        return safebooking(graph, processors, limit, solution.order)
    if name == "par-inner-first":
        return par_inner_first(graph, processors, solution.order)
    if name == "par-deepest-first":
        return par_deepest_first(graph, processors, solution.order)
    if tree is None:
        raise BadInput(f"algorithm {name} needs an in-tree (every output has one reader), which this graph is not: choose auto.")
    if name == "membooking":
        return membooking(tree, processors, limit, solution.order, solution.peak_bytes)
    if name == "memory-aware":
        return memory_aware(tree, processors, max(limit, best_postorder(tree)[1]) if memory_bytes is None else limit)
    return {"all-to-all": all_to_all, "proportional": proportional, "par-subtrees": par_subtrees}[name](tree, processors)


def _judge_makespan(outcome: TaskOutcome) -> TaskOutcome:
    """On several processors the makespan is the aim: optimal when it meets its bound."""
    assert outcome.makespan is not None
    optimal = outcome.makespan <= outcome.makespan_lower_bound * (1 + 1e-12)
    return replace(
        outcome,
        status=Status.OPTIMAL if optimal else Status.FEASIBLE,
        reason="no schedule is shorter, and that is proven."
        if optimal
        else "the bound on the makespan says how far from optimal it may be.",
    )
