"""Windows that grow outward from the fullest moment: their packings are legal, their refusals true, and they need fewer nodes."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.models.offset_instances import Instance, cut_anywhere, cut_evenly

from memfit.core.packing import check_packing
from memfit.offsets.exact.growing_windows import Progress, grow
from memfit.offsets.exact.search import Verdict, start_search
from memfit.offsets.exact.time_sections import make_sections, restrict
from memfit.offsets.problem import Problem, make_problem

MANY_RUNS = 3_000


def as_problem(instance: Instance) -> Problem:
    return make_problem(*np.array([(b.start, b.stop, b.size) for b in instance.buffers], np.int64).T)


def grown(problem: Problem, capacity: int, seed: int = 0) -> tuple[Progress, int]:
    """The first answer and the nodes spent on it."""
    nodes = 0
    for run, progress in enumerate(grow(problem, make_sections(problem), capacity, np.random.default_rng(seed))):
        nodes += progress.nodes
        if progress.verdict is not Verdict.OPEN or run > MANY_RUNS:
            return progress, nodes
    raise AssertionError("windows end only with an answer")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["evenly", "anywhere"])
def test_a_grown_packing_is_a_packing(kind: str, seed: int) -> None:
    instance = cut_evenly(seed, levels=7) if kind == "evenly" else cut_anywhere(60, seed, length=128, height=128, unit=8)
    progress, _ = grown(as_problem(instance), instance.capacity, seed)
    assert progress.verdict is Verdict.PACKED
    assert progress.offsets is not None
    check_packing(instance.buffers, progress.offsets.tolist(), height=instance.capacity)


def test_fewer_nodes_than_from_bottom_to_top() -> None:
    """The whole problem with every rule, in the best plain order, against windows: half of the nodes and less."""
    instance = cut_evenly(203)
    problem = as_problem(instance)
    progress, nodes = grown(problem, instance.capacity)
    assert progress.verdict is Verdict.PACKED
    sections = make_sections(problem)
    load = sections.load(problem.size)
    fullest = np.array([load[a:b].max() for a, b in zip(sections.first, sections.last, strict=True)])
    rank = np.argsort(np.lexsort((-problem.life, -fullest)))
    assert start_search(problem, sections, instance.capacity, rank=rank).advance(2 * nodes) is Verdict.OPEN


@pytest.mark.parametrize("seed", range(6))
def test_impossible_is_said_only_where_the_tree_search_says_it_too(seed: int) -> None:
    problem = as_problem(cut_anywhere(20, seed, length=24, height=24, unit=1, drop=0.12))
    sections = make_sections(problem)
    for capacity in (int(sections.load(problem.size).max()), 24):
        expected = start_search(problem, sections, capacity).advance(10**6)
        assert expected is not Verdict.OPEN
        assert grown(problem, capacity, seed)[0].verdict is expected


def test_alignment_is_kept() -> None:
    start, stop, size = np.array([(0, 4, 10), (1, 6, 10), (3, 8, 20), (5, 9, 6), (7, 9, 3)], np.int64).T
    problem = make_problem(start, stop, size, alignment=np.array([16, 8, 16, 4, 1]))
    progress, _ = grown(problem, 64)
    assert progress.verdict is Verdict.PACKED
    assert progress.offsets is not None
    assert not (progress.offsets % problem.alignment).any()


def test_restrict_keeps_meetings_sections_and_twins() -> None:
    problem = as_problem(cut_anywhere(40, 3, length=20, height=40, unit=1))
    whole = make_sections(problem)
    random = np.random.default_rng(0)
    free, others = random.random(40) < 0.3, random.random(40) < 0.5
    others &= ~free
    chosen, part = restrict(whole, free, others)
    meet = (problem.start[:, None] < problem.stop) & (problem.start < problem.stop[:, None])
    assert set(chosen) == {k for k in range(40) if free[k] or (others[k] and (meet[k] & free).any())}
    for row, k in enumerate(chosen):
        met = chosen[part.meets[part.meets_start[row] : part.meets_start[row + 1]]]
        assert set(met) == {x for x in chosen if meet[k, x] and x != k}
        assert 0 <= part.first[row] < part.last[row] <= part.count
        if part.twin[row] >= 0:
            assert free[k] and free[chosen[part.twin[row]]] and whole.twin[k] == chosen[part.twin[row]]  # noqa: PT018
