"""Milestones: where dropped values hang on each other, a few of them kept make the cut LP's seed fit."""

from __future__ import annotations

import numpy as np

import memfit
from memfit.core.budget import Budget
from memfit.core.costs import Costs
from memfit.planning.cuts.milestones import find_waiting_links, keep_milestones
from memfit.planning.cuts.near_peak import cuts_near_peak
from memfit.planning.cuts.program import CutProgram
from memfit.planning.cuts.rounding import seeds_from
from memfit.planning.model.fast_judge import peak_and_time
from memfit.planning.model.reduce import Ints
from memfit.planning.problem import Problem
from memfit.planning.search.state import Search

_BLOCKS, _STREAM, _BRANCH = 24, 40, 10


def _residual_network() -> tuple[memfit.Graph, Costs]:
    """x_i = x_(i-1) + f_i(x_(i-1)): f_i small and slow, the sum large and quick; backward of a block reads f_i and x_(i-1)."""
    sizes, ops, times = [_STREAM], [], []

    def run(name: str, inputs: tuple[int, ...], size: int, time: int) -> int:
        sizes.append(size)
        ops.append(memfit.Op(id=len(ops), name=name, inputs=inputs, outputs=(len(sizes) - 1,)))
        times.append(time)
        return len(sizes) - 1

    stream, saved = 0, []
    for _ in range(_BLOCKS):
        branch = run("branch", (stream,), _BRANCH, 100)
        saved.append((stream, branch))
        stream = run("add", (stream, branch), _STREAM, 2)
    gradient = stream
    for before, branch in reversed(saved):
        gradient = run("backward", (gradient, before, branch), _STREAM, 200)
    graph = memfit.Graph(
        ops=tuple(ops),
        tensors=tuple(memfit.Tensor(id=i, storage=i) for i in range(len(sizes))),
        storages=tuple(memfit.Storage(id=i, size_bytes=x) for i, x in enumerate(sizes)),
        sources=(0,),
        results=(0, gradient),
    )
    return graph, Costs(op_time_ns=tuple(times), workspace_bytes=(0,) * len(ops), device="test", graph_digest=graph.digest)


def _search(limit_bytes: int) -> tuple[Search, CutProgram]:
    graph, costs = _residual_network()
    search = Search(Problem(graph=graph, costs=costs, budget=Budget(device_bytes=limit_bytes), time_limit_s=20.0))
    model = search.problem.model
    return search, CutProgram(model, (next(cuts_near_peak(model)),))


def _seed(search: Search, program: CutProgram) -> tuple[Ints, list[int]]:
    solution = program.solve(search.problem.limit_bytes)
    assert solution is not None
    seed = next(seeds_from(search.problem.model, solution))
    return seed.sequence, find_waiting_links(search, seed.sequence, solution)


def test_the_links_of_a_residual_stream_wait_at_the_peak_of_the_lp_s_seed() -> None:
    search, program = _search(450)
    sequence, links = _seed(search, program)
    peak, _ = peak_and_time(search.problem.model.arrays, sequence)
    assert peak > 1.3 * search.problem.limit_bytes
    assert len(links) >= 12
    assert {int(search.problem.model.arrays.size[s]) for s in links} == {_STREAM}


def test_with_milestones_the_plan_fits_and_only_sums_run_again() -> None:
    search, program = _search(450)
    keep_milestones(search, program, seconds=10.0)
    assert search.best is not None
    model = search.problem.model
    runs = np.bincount(search.best, minlength=model.num_forms)
    again = {model.graph.ops[model.forms[f][0]].name for f in np.flatnonzero(runs > 1)}
    assert again == {"add"}
    assert search.best_time_ns < 1.02 * model.base_time_ns


def test_what_must_be_kept_is_kept_and_costs_something() -> None:
    search, program = _search(450)
    _, links = _seed(search, program)
    free, forced = program.solve(450), program.solve(450, kept=links[::4])
    assert free is not None
    assert forced is not None
    assert all(forced.keep[0][s] > 0.99 for s in links[::4])
    assert forced.time_ns >= free.time_ns


def test_nothing_to_do_where_the_seed_fits_already() -> None:
    search, program = _search(10_000)
    keep_milestones(search, program, seconds=10.0)
    assert search.best is None
