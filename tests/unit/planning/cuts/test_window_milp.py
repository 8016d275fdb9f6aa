"""Chains of cuts at wide ops, and exact programs over windows of a plan."""

from __future__ import annotations

from random import Random

import numpy as np
from tests.oracle.best_plan import best_time_ns
from tests.strategies import PLAIN, random_costs, random_graph

import memfit
from memfit.core.budget import Budget
from memfit.core.costs import uniform_costs
from memfit.planning import plan
from memfit.planning.baselines.sqrt_segments import SqrtSegments
from memfit.planning.cuts.refine import CutChain
from memfit.planning.cuts.wide_ops import cut_wide_ops, lengthen_at_wide_ops
from memfit.planning.cuts.window_milp import _Window, find_crossing, find_kept, improve_windows
from memfit.planning.model.fast_judge import peak_and_time, usage_of
from memfit.planning.model.lower_bounds import list_working_sets
from memfit.planning.problem import Problem
from memfit.planning.search.state import Search
from memfit.planning.settings import WideOpSettings


def _layers(num_layers: int, wide: int = -1) -> memfit.Graph:
    """Forward and backward of layers of different sizes; the backward of layer `wide` makes much, or less in place and slower."""
    rng = Random(5)
    storages, ops = [memfit.Storage(id=0, size_bytes=10, kind=memfit.Kind.INPUT)], []
    for i in range(num_layers):
        storages.append(memfit.Storage(id=len(storages), size_bytes=rng.randint(5, 20)))
        ops.append(memfit.Op(id=i, name="f", inputs=(i,), outputs=(i + 1,)))
    incoming = num_layers
    for i in reversed(range(num_layers)):
        out = len(storages)
        storages.append(memfit.Storage(id=out, size_bytes=storages[incoming].size_bytes if i == wide else 10))
        over = memfit.Variant(name="in place", inputs=(i, incoming), outputs=(out,), inplace_of=((out, incoming),))
        ops.append(memfit.Op(id=len(ops), name="b", inputs=(i, incoming), outputs=(out,), variants=(over,) if i == wide else ()))
        incoming = out
    tensors = tuple(memfit.Tensor(id=s.id, storage=s.id) for s in storages)
    return memfit.Graph(ops=tuple(ops), tensors=tensors, storages=tuple(storages), sources=(0,), results=(0, incoming))


def _search(graph: memfit.Graph, limit: int, seconds: float = 20.0) -> Search:
    return Search(Problem(graph=graph, costs=uniform_costs(graph), budget=Budget(device_bytes=limit), time_limit_s=seconds))


def test_what_a_plan_keeps_adds_up_to_what_it_holds() -> None:
    graph = _layers(20)
    model = Problem(graph=graph, costs=uniform_costs(graph), budget=Budget(device_bytes=130)).model
    a = model.arrays
    for sequence in (np.array(model.agenda, np.int64), SqrtSegments().sequence(_search(graph, 130).problem)):
        assert sequence is not None
        usage = usage_of(a, sequence)
        for cut in CutChain(model).fullest(sequence):
            at = next(p for p, f in enumerate(sequence) if int(f) in model.producers[cut])
            fresh = sum(int(a.size[s]) for s in model.outs[sequence[at]])
            assert a.base_bytes + int(a.size[find_kept(model, sequence, cut)].sum()) + fresh == usage[at]


def test_a_plan_is_a_solution_of_its_own_windows() -> None:
    """Nothing free: the program has the plan itself, at no more than its time (a stage counts a form once)."""
    search = _search(_layers(20), 130)
    sequence = SqrtSegments().sequence(search.problem)
    assert sequence is not None
    search.repair(sequence, search.makers, "")
    assert search.best is not None
    windows = _Window(search)
    assert set(windows.movable) <= set(np.flatnonzero(find_crossing(search.problem.model, search.best, windows.chain.cuts)))
    solution = windows.solve(np.zeros(0, np.int64), 5.0)
    assert solution is not None
    assert solution.time_ns <= search.best_time_ns
    whole = windows.solve(windows.movable, 5.0)
    assert whole is not None
    assert whole.time_ns <= solution.time_ns


def test_windows_improve_a_plan_and_stay_inside() -> None:
    search = _search(_layers(24), 130)
    sequence = SqrtSegments().sequence(search.problem)
    assert sequence is not None
    assert search.consider(sequence)
    before = search.best_time_ns
    improve_windows(search, seconds=8.0)
    assert search.best is not None
    assert search.best_time_ns < before
    peak, time = peak_and_time(search.problem.model.arrays, search.best)
    assert peak <= 130
    assert time == search.best_time_ns


def test_the_widest_ops_are_cuts_from_the_beginning() -> None:
    graph = _layers(20, wide=3)
    search = _search(graph, 90)
    model = search.problem.model
    needs = list_working_sets(model)
    assert needs == sorted(needs, reverse=True)
    first = CutChain(model).fullest(np.array(model.agenda, np.int64))[0]
    chain = cut_wide_ops(search.problem, first, WideOpSettings())
    assert 1 < len(chain.cuts) <= 5
    lengthen_at_wide_ops(search, chain, seconds=6.0)
    known = plan(graph, budget=90, time_limit_s=3.0).require_plan().timeline.time_ns
    assert search.floor.time_ns < search.bound_ns <= known


def test_stages_bound_the_optimum() -> None:
    compared = 0
    for seed in range(60):
        rng = Random(seed)
        graph = random_graph(rng, PLAIN)
        costs = random_costs(rng, graph, max_levels=0)
        whole = plan(graph, costs, planner="keep_all").plan
        limit = int(0.85 * whole.timeline.peak_bytes) if whole is not None else 0
        search = Search(Problem(graph=graph, costs=costs, budget=Budget(device_bytes=limit), time_limit_s=5.0))
        required = [s for s in sorted(CutChain(search.problem.model).required) if search.problem.model.producers[s]]
        if search.proof or not required or search.problem.model.partial:
            continue
        try:
            best = best_time_ns(graph, costs, limit, max_states=10_000)
        except RuntimeError:
            continue
        lengthen_at_wide_ops(search, cut_wide_ops(search.problem, required[-1], WideOpSettings()), seconds=2.0)
        if best is not None:
            compared += 1
            assert search.bound_ns <= best, f"seed {seed}"
            assert search.best is None or search.best_time_ns >= best, f"seed {seed}"
    assert compared >= 5
