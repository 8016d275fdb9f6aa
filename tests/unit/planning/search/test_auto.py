"""`auto`: anytime, interruptible, monotone in what it says, and better than the simple planners."""

from __future__ import annotations

from os import cpu_count
from random import Random
from threading import get_ident
from time import perf_counter
from typing import Any

import numpy as np
import pytest
from tests.small import training_chain
from tests.strategies import PLAIN, Shape, random_costs, random_graph

import memfit
from memfit.core.budget import Budget
from memfit.core.costs import uniform_costs
from memfit.core.outcome import Status
from memfit.planning import Progress, plan
from memfit.planning.cuts.near_peak import cuts_near_peak
from memfit.planning.cuts.program import CutProgram
from memfit.planning.cuts.refine import CutChain, refine
from memfit.planning.cuts.rounding import seeds_from
from memfit.planning.model.fast_judge import peak_and_time
from memfit.planning.model.inplace_forms import find_siblings
from memfit.planning.model.reduce import build_model
from memfit.planning.problem import Problem
from memfit.planning.search import improve as anytime
from memfit.planning.search.auto import Portfolio
from memfit.planning.search.drop_repeats import polish
from memfit.planning.search.improve import begin_walks, improve
from memfit.planning.search.neighbourhood import Neighbourhood
from memfit.planning.search.repair import Repairer
from memfit.planning.search.state import Search

LAYERS = Shape(
    min_ops=25,
    max_ops=40,
    max_size_bytes=64,
    views=False,
    multi_output=False,
    inplace=False,
    variants=False,
    once_only=False,
    zero_sizes=False,
    dead_values=False,
)
assert PLAIN.max_ops < LAYERS.min_ops


def test_never_worse_than_the_simple_planners() -> None:
    compared = 0
    for seed in range(6):
        rng = Random(seed)
        graph = random_graph(rng, LAYERS)
        costs = random_costs(rng, graph, max_levels=0)
        whole = plan(graph, costs, planner="keep_all").require_plan().timeline
        budget = int(whole.peak_bytes * 0.9)
        best = plan(graph, costs, budget, time_limit_s=2.0)
        for planner in ("sqrt_segments", "drop_cheap", "greedy", "chain_dp"):
            other = plan(graph, costs, budget, planner=planner)
            if other.plan is not None:
                compared += 1
                assert best.plan is not None, (seed, planner)
                good_enough = best.lower_bound_ns + 0.003 * whole.time_ns  # where auto stops
                assert best.plan.timeline.time_ns <= max(other.plan.timeline.time_ns, good_enough), (seed, planner)
    assert compared >= 5


def test_progress_tells_a_falling_best_and_a_bound_below_it() -> None:
    graph = training_chain(40, 10)
    heard: list[Progress] = []
    outcome = plan(graph, budget=150, time_limit_s=1.5, progress=heard.append)
    times = [p.best_time_ns for p in heard if p.best_time_ns is not None]
    assert times
    assert times == sorted(times, reverse=True)
    assert all(p.lower_bound_ns <= times[-1] for p in heard)
    assert outcome.require_plan().timeline.time_ns == times[-1]
    assert heard[-1].gap_fraction is not None


def test_interrupting_keeps_the_best_plan() -> None:
    graph = training_chain(60, 10)
    calls = 0

    def interrupt(progress: Progress) -> None:
        nonlocal calls
        calls += progress.best_time_ns is not None
        if calls == 2:
            raise KeyboardInterrupt

    problem = Problem(graph=graph, costs=uniform_costs(graph), budget=Budget(device_bytes=170), time_limit_s=30.0, progress=interrupt)
    outcome = Portfolio(enough_points=0.0).plan(problem)
    assert calls >= 2
    assert outcome.seconds < 25
    assert outcome.require_plan().timeline.peak_bytes <= 170


def test_abilities_can_be_taken_away() -> None:
    """For ablations: a chain in little memory runs ops many times; held to two runs each it is slower, or there is no plan."""
    graph = training_chain(40, 10)
    problem = Problem(graph=graph, costs=uniform_costs(graph), budget=Budget(device_bytes=90), time_limit_s=3.0, progress=None)

    def most_runs(found: memfit.Plan) -> int:
        ops = [step.op for step in found.schedule.steps if isinstance(step, memfit.Compute)]
        return max(ops.count(op) for op in set(ops))

    whole = Portfolio().plan(problem).require_plan()
    assert most_runs(whole) > 2
    held = Portfolio(max_runs=2, reorder=False).plan(problem).plan
    assert held is None or (most_runs(held) <= 2 and held.timeline.time_ns > whole.timeline.time_ns)
    roomy = Problem(graph=graph, costs=problem.costs, budget=Budget(device_bytes=250), time_limit_s=2.0, progress=None)
    assert most_runs(Portfolio(max_runs=2, reorder=False).plan(roomy).require_plan()) == 2


def test_a_time_limit_of_zero_still_answers() -> None:
    graph = training_chain(30, 10)
    outcome = plan(graph, budget=200, time_limit_s=0)
    assert outcome.require_plan().timeline.peak_bytes <= 200


def test_repair_and_polish_do_what_they_say() -> None:
    graph = training_chain(30, 10)
    model = build_model(graph, uniform_costs(graph))
    makers = np.array([forms[0] if forms else -1 for forms in model.producers], np.int64)
    agenda = np.array(model.agenda, np.int64)
    fixed = Repairer(arrays=model.arrays, limit=160, maker=makers).run(agenda, 400)
    peak, time = peak_and_time(model.arrays, fixed)
    assert peak <= 160
    polished = polish(model.arrays, fixed, 160)
    polished_peak, polished_time = peak_and_time(model.arrays, polished)
    assert polished_peak <= 160
    assert polished_time <= time
    walk = Neighbourhood(arrays=model.arrays, limit=160, maker=makers, current=polished, siblings=find_siblings(model), seed=3)
    for _ in range(60):
        walk.round(0.01)
    over, best = walk.best_standing
    assert over == 0
    assert best <= polished_time


def test_chains_of_cuts_only_raise_the_bound() -> None:
    """Near the floor a value is recomputed more than once, which one cut cannot see."""
    graph = training_chain(24, 10)
    model = build_model(graph, uniform_costs(graph))
    first = next(cuts_near_peak(model))
    for limit, higher in ((100, 0), (50, 1)):
        chain = CutChain(model, first)
        single = solution = CutProgram(model, chain.cuts).solve_whole(limit, time_limit_s=5)
        for _ in range(4):
            assert solution is not None
            seed = next(seeds_from(model, solution))
            assert peak_and_time(model.arrays, seed.sequence)[1] == solution.time_ns  # played as it is
            if not chain.cut_again(seed.sequence, limit):
                break
            solution = CutProgram(model, chain.cuts).solve_whole(limit, time_limit_s=5)
        assert len(chain.cuts) > 1
        assert single is not None
        assert solution is not None
        assert solution.bound_ns >= single.bound_ns + higher
        assert solution.bound_ns <= plan(graph, budget=limit, time_limit_s=1).require_plan().timeline.time_ns


def test_what_one_op_makes_is_one_cut() -> None:
    """Two cuts at one moment would pay for its op twice: a bound above plans that exist."""
    storages = tuple(memfit.Storage(id=i, size_bytes=10) for i in range(5))
    tensors = tuple(memfit.Tensor(id=i, storage=i) for i in range(5))
    wiring = [((0,), (1,)), ((1,), (2, 3)), ((2, 3), (4,))]
    ops = tuple(memfit.Op(id=i, name="op", inputs=ins, outputs=outs) for i, (ins, outs) in enumerate(wiring))
    graph = memfit.Graph(ops=ops, tensors=tensors, storages=storages, sources=(0,), results=(4,))
    model = build_model(graph, uniform_costs(graph))
    chain = CutChain(model, 2)
    assert not chain.insert(3)
    assert chain.insert(1)
    assert chain.insert(4)
    assert chain.cuts == (1, 2, 4)
    solution = CutProgram(model, chain.cuts).solve(1000)
    assert solution is not None
    assert solution.bound_ns <= model.base_time_ns


def test_what_is_overwritten_is_made_again() -> None:
    """Where only the in-place form fits, what it overwrote is not there for those who read it later, and comes back by running its op."""
    storages = tuple(memfit.Storage(id=i, size_bytes=size) for i, size in enumerate((1, 10, 10, 1)))
    tensors = tuple(memfit.Tensor(id=i, storage=i) for i in range(4))
    over = memfit.Variant(name="in place", inputs=(1,), outputs=(2,), inplace_of=((2, 1),))
    ops = (
        memfit.Op(id=0, name="a", inputs=(0,), outputs=(1,)),
        memfit.Op(id=1, name="b", inputs=(1,), outputs=(2,), variants=(over,)),
        memfit.Op(id=2, name="c", inputs=(1, 2), outputs=(3,)),
    )
    graph = memfit.Graph(ops=ops, tensors=tensors, storages=storages, sources=(0,), results=(0, 3))
    model = build_model(graph, uniform_costs(graph))
    time = model.arrays.time
    roomy, tight = (CutProgram(model, (2,)).solve_whole(limit, time_limit_s=5) for limit in (25, 15))
    assert roomy is not None
    assert tight is not None
    assert roomy.time_ns == model.base_time_ns
    assert tight.time_ns == tight.bound_ns == model.base_time_ns + int(time[0])


def test_refined_cuts_meet_the_plan() -> None:
    """Where the program's answer fits when it is played, nothing is left to search for."""
    graph = training_chain(24, 10)
    problem = Problem(graph=graph, costs=uniform_costs(graph), budget=Budget(device_bytes=120), time_limit_s=20.0)
    search = Search(problem)
    refine(search, next(cuts_near_peak(problem.model)), seconds=10)
    assert search.best is not None
    assert search.best_time_ns == search.bound_ns


def test_another_order_can_be_enough() -> None:
    """Two branches that the given order interleaves: one after the other they hold half as much, at no cost."""
    sizes = [1, 100, 100, 1, 1, 1]
    storages = tuple(memfit.Storage(id=i, size_bytes=x) for i, x in enumerate(sizes))
    tensors = tuple(memfit.Tensor(id=i, storage=i) for i in range(6))
    wiring = [((0,), 1), ((0,), 2), ((1,), 3), ((2,), 4), ((3, 4), 5)]
    ops = tuple(memfit.Op(id=i, name="op", inputs=ins, outputs=(out,)) for i, (ins, out) in enumerate(wiring))
    graph = memfit.Graph(ops=ops, tensors=tensors, storages=storages, sources=(0,), results=(5,))
    outcome = plan(graph, budget=103)
    assert outcome.status is Status.OPTIMAL


@pytest.mark.parametrize("planner", ["auto", "cut_lp"])
def test_plans_are_reproducible(planner: str) -> None:
    graph = training_chain(20, 10)
    first, second = (plan(graph, budget=130, planner=planner, time_limit_s=0) for _ in range(2))
    assert first.require_plan().schedule == second.require_plan().schedule


def test_while_nothing_fits_several_walks_set_out_and_some_again_later() -> None:
    graph = training_chain(30, 10)
    search = Search(Problem(graph=graph, costs=uniform_costs(graph), budget=Budget(device_bytes=60), time_limit_s=20.0))
    search.consider(np.array(search.problem.model.agenda, np.int64))
    walks = begin_walks(search, seed=0, most=4, least=2)
    assert len(walks) == 4
    assert all(walk.best_standing[0] > 0 for walk in walks)
    improve(search, seconds=6.0)
    assert search.best is not None
    assert search.miss is not None
    assert search.gap_points > 5
    standings = [walk.best_standing[0] for walk in begin_walks(search, seed=0, most=4, least=2)]
    assert min(standings) == 0
    assert max(standings) > 0


def test_walks_at_once_are_from_different_seeds_and_only_one_thread_offers(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = training_chain(30, 10)
    search = Search(Problem(graph=graph, costs=uniform_costs(graph), budget=Budget(device_bytes=120), time_limit_s=20.0), enough_points=0.0)
    search.repair(np.array(search.problem.model.agenda, np.int64), search.makers, "")
    alone = begin_walks(search, seed=0, most=1, least=2)
    assert len({walk.seed for walk in alone}) == len(alone) == 2  # one plan is known: both set out from it
    offering, walking = set[int](), set[int]()
    offer, round_ = Search.consider, Neighbourhood.round
    monkeypatch.setattr(Search, "consider", lambda *given, **more: (offering.add(get_ident()), offer(*given, **more))[1])
    monkeypatch.setattr(Neighbourhood, "round", lambda *given: (walking.add(get_ident()), round_(*given))[1])
    improve(search, seconds=1.0)
    assert offering <= {get_ident()}
    assert len(walking) == min(2, cpu_count() or 1)
    assert get_ident() not in walking


def test_an_interrupt_ends_the_walks(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = training_chain(30, 10)
    search = Search(Problem(graph=graph, costs=uniform_costs(graph), budget=Budget(device_bytes=120), time_limit_s=60.0), enough_points=0.0)
    search.repair(np.array(search.problem.model.agenda, np.int64), search.makers, "")

    def interrupt(_: Any) -> None:
        if search.problem.seconds > 0.3:
            raise KeyboardInterrupt

    monkeypatch.setattr(anytime._Clock, "tell", interrupt)
    began = perf_counter()
    with pytest.raises(KeyboardInterrupt):
        improve(search, seconds=50.0)
    assert perf_counter() - began < 20  # and not when their time is up
    assert search.best is not None


def test_mending_is_no_worse_than_either_way_of_repair() -> None:
    """A repair that wants no more than what is over, and one that values all it can get: now one is cheaper, now the other."""
    compared = differed = 0
    for seed in range(40):
        rng = Random(seed)
        graph = random_graph(rng, LAYERS)
        costs = random_costs(rng, graph, max_levels=0)
        peak = plan(graph, costs, planner="keep_all").require_plan().timeline.peak_bytes
        problem = Problem(graph=graph, costs=costs, budget=Budget(device_bytes=int(0.85 * peak)))
        search = Search(problem)
        a, agenda = problem.model.arrays, np.array(problem.model.agenda, np.int64)
        times = []
        for bold in (False, True):
            fixed = Repairer(arrays=a, limit=problem.limit_bytes, maker=search.makers, bold=bold).run(agenda, 400)
            if peak_and_time(a, fixed)[0] <= problem.limit_bytes:
                times.append(peak_and_time(a, polish(a, fixed, problem.limit_bytes))[1])
        search.repair(agenda, search.makers, "")
        if times and not search.siblings.any:
            compared += 1
            differed += len(set(times)) > 1
            assert search.best is not None
            assert search.best_time_ns <= min(times)
    assert compared >= 10
    assert differed >= 1
