"""The race of searches: answers are right with and without CP-SAT, time is kept, orders are learnt."""

from __future__ import annotations

import time

import numpy as np
import pytest
from benchmarks.models.offset_instances import cut_anywhere

from memfit.offsets.exact import cp_sat as cpsat
from memfit.offsets.exact import race as portfolio
from memfit.offsets.exact.race import decide
from memfit.offsets.exact.search import Verdict
from memfit.offsets.exact.tie_orders import OrderSource
from memfit.offsets.problem import Problem, height_of, make_problem


def problem_of(pieces: int, seed: int) -> tuple[Problem, int]:
    buffers, capacity = cut_anywhere(pieces, seed, length=64, height=64, unit=8)
    return make_problem(*np.array([(b.start, b.stop, b.size) for b in buffers], np.int64).T), capacity


def clash(problem: Problem, offsets: np.ndarray) -> bool:  # type: ignore[type-arg]
    ends = offsets + problem.size
    meets = (problem.start[:, None] < problem.stop) & (problem.start < problem.stop[:, None])
    overlap = (offsets[:, None] < ends) & (offsets < ends[:, None])
    return bool((meets & overlap & ~np.eye(len(offsets), dtype=bool)).any())


@pytest.mark.parametrize("threads", [1, 3])
def test_packed_and_refuted_without_cpsat(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpsat, "is_available", lambda problem: False)
    problem, capacity = problem_of(40, 2)
    found = decide(problem, capacity, deadline=time.monotonic() + 60, num_threads=threads)
    assert found.verdict is Verdict.PACKED
    assert found.offsets is not None
    assert height_of(problem, found.offsets) <= capacity
    assert not clash(problem, found.offsets)
    assert decide(problem, capacity - 8, deadline=time.monotonic() + 60, num_threads=threads).verdict is Verdict.IMPOSSIBLE


def test_cpsat_answers_the_same_question() -> None:
    pytest.importorskip("ortools")
    problem, capacity = problem_of(20, 3)
    verdict, offsets = cpsat.Racer().run(problem, capacity, 60.0, 0)
    assert verdict is Verdict.PACKED
    assert offsets is not None
    assert not clash(problem, offsets)
    assert cpsat.Racer().run(problem, capacity - 8, 60.0, 0)[0] is Verdict.IMPOSSIBLE


def test_cpsat_keeps_alignment_and_fixed_offsets() -> None:
    pytest.importorskip("ortools")
    rows = np.array([(0, 4, 10), (0, 4, 10), (1, 3, 10)], np.int64).T
    problem = make_problem(*rows, alignment=np.array([16, 16, 1]), fixed=np.array([-1, 32, -1]))
    verdict, offsets = cpsat.Racer().run(problem, 42, 60.0, 0)
    assert verdict is Verdict.PACKED
    assert offsets is not None
    assert offsets[1] == 32
    assert offsets[0] % 16 == 0
    assert not clash(problem, offsets)


def test_a_stopped_racer_does_not_start() -> None:
    pytest.importorskip("ortools")
    problem, capacity = problem_of(30, 4)
    racer = cpsat.Racer()
    racer.stop()
    assert racer.run(problem, capacity, 60.0, 0) == (Verdict.OPEN, None)


def test_cpsat_wins_when_the_tree_searches_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patience of nothing and tree searches that never move: the answer must come from the other thread."""
    pytest.importorskip("ortools")
    problem, capacity = problem_of(20, 3)
    monkeypatch.setattr(portfolio, "_CPSAT_PATIENCE_S", 0.0)
    monkeypatch.setattr(portfolio.Search, "advance", lambda self, num_nodes, **_: time.sleep(0.01) or Verdict.OPEN)
    assert decide(problem, capacity, deadline=time.monotonic() + 60).verdict is Verdict.PACKED


def test_the_deadline_is_kept() -> None:
    problem, capacity = problem_of(40, 2)
    assert decide(problem, capacity, deadline=time.monotonic() - 1).verdict is Verdict.OPEN


def test_deep_and_quick_families_are_drawn_more_often() -> None:
    problem, _ = problem_of(40, 2)
    source = OrderSource(problem, np.random.default_rng(0))
    orders = source.plain()
    for _ in range(20):
        for order in orders:
            source.report(order, 0.9 if order.family == 3 else 0.1, 0.01 if order.family == 3 else 0.1)
    drawn = [source.draw().family for _ in range(50)]
    assert drawn.count(3) > 40
    assert all(sorted(order.rank) == list(range(40)) for order in orders)
