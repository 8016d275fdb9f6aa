"""Greedy placement and local search: always legal, best fit, and the windows change nothing but the speed."""

from __future__ import annotations

import time

import numpy as np
import pytest

from memfit.core.packing import Buffer, check_packing
from memfit.offsets import greedy
from memfit.offsets.greedy import greedy_orders, make_windows, place_in_order
from memfit.offsets.local_search import improve_order
from memfit.offsets.problem import Ints, Problem, height_of, load_at, lower_bound, make_problem, time_partitions


def random_problem(seed: int, n: int, span: int = 300) -> Problem:
    random = np.random.default_rng(seed)
    start = random.integers(0, span, n)
    stop = start + 1 + (random.exponential(span / 12, n)).astype(np.int64)
    return make_problem(start, stop, random.integers(1, 1000, n), random.choice([1, 1, 4], n))


def judge(problem: Problem, offsets: Ints) -> None:
    rows = zip(problem.start, problem.stop, problem.size, problem.alignment, strict=True)
    buffers = [Buffer(id=str(k), start=int(a), stop=int(b), size=int(z), alignment=int(g)) for k, (a, b, z, g) in enumerate(rows)]
    check_packing(buffers, offsets.tolist())


def slow_best_fit(problem: Problem, order: Ints) -> Ints:
    """The definition, without windows: look at everything placed."""
    offsets = np.zeros(problem.num_buffers, np.int64)
    placed: list[int] = []
    for x in order:
        meets = [y for y in placed if problem.start[y] < problem.stop[x] and problem.start[x] < problem.stop[y]]
        end, best = 0, None
        step = int(problem.alignment[x])
        for y in sorted(meets, key=lambda y: int(offsets[y])):
            at = -(-end // step) * step
            waste = int(offsets[y]) - at - int(problem.size[x])
            if offsets[y] > end and waste >= 0 and (best is None or waste < best[0]):
                best = (waste, at)
            end = max(end, int(offsets[y] + problem.size[y]))
        offsets[x] = best[1] if best else -(-end // step) * step
        placed.append(int(x))
    return offsets


@pytest.mark.parametrize("seed", range(3))
def test_windows_give_what_the_definition_gives(seed: int) -> None:
    problem = random_problem(seed, 700)
    windows = make_windows(problem)
    assert len(windows.level_start) > 3  # there is something to get wrong
    for _, order in greedy_orders(problem):
        offsets = place_in_order(problem, windows, order)
        judge(problem, offsets)
        assert (offsets == slow_best_fit(problem, order)).all()


def test_a_single_window_is_enough_for_few(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_problem(9, 500)
    order = next(greedy_orders(problem))[1]
    many = place_in_order(problem, make_windows(problem), order)
    monkeypatch.setattr(greedy, "_MAX_WINDOWS", 1)
    assert (place_in_order(problem, make_windows(problem), order) == many).all()


def test_the_best_hole_is_taken() -> None:
    """Between b and c is a hole of 3, between a and b one of 5: a buffer of 3 takes the first."""
    rows = np.array([(0, 9, 1), (0, 2, 5), (0, 9, 1), (0, 2, 3), (0, 9, 1), (3, 9, 3)], np.int64)
    problem = make_problem(*rows.T)
    offsets = place_in_order(problem, make_windows(problem), np.arange(6))
    assert offsets[5] == offsets[3]


def test_local_search_never_gets_worse_and_often_better() -> None:
    better = 0
    for seed in range(6):
        problem = random_problem(seed, 60, 40)
        order = next(greedy_orders(problem))[1]
        windows = make_windows(problem)
        before = height_of(problem, place_in_order(problem, windows, order))
        deadline = time.monotonic() + 60
        best, offsets = improve_order(problem, windows, order, target=lower_bound(problem), deadline=deadline, max_rounds=300)
        judge(problem, offsets)
        assert sorted(best) == list(range(60))
        assert height_of(problem, offsets) <= before
        better += height_of(problem, offsets) < before
    assert better >= 2


def test_partitions_do_not_meet_and_loads_add_up() -> None:
    problem = make_problem(*np.array([(0, 2, 3), (1, 4, 5), (4, 6, 7), (6, 9, 1), (7, 8, 2)], np.int64).T)
    assert [sorted(p.tolist()) for p in time_partitions(problem)] == [[0, 1], [2], [3, 4]]
    assert load_at(problem).max() == lower_bound(problem) == 8
