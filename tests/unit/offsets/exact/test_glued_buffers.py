"""Glued buffers: boxes cover exactly what they were made of, their packings are packings, and far fewer nodes are needed."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.models.offset_instances import Instance, cut_anywhere, cut_in_layers, dropped
from hypothesis import given
from hypothesis import strategies as st

from memfit.core.packing import check_packing
from memfit.offsets.exact.glued_buffers import can_glue, glue, search_glued
from memfit.offsets.exact.search import Verdict, start_search
from memfit.offsets.exact.time_sections import make_sections
from memfit.offsets.problem import Problem, load_at, make_problem

MANY_RUNS = 2_000


def as_problem(instance: Instance) -> Problem:
    return make_problem(*np.array([(b.start, b.stop, b.size) for b in instance.buffers], np.int64).T)


def first_packing(problem: Problem, capacity: int) -> tuple[np.ndarray | None, int]:  # type: ignore[type-arg]
    nodes = 0
    for run, progress in enumerate(search_glued(problem, capacity, np.random.default_rng(0))):
        nodes += progress.nodes
        if progress.verdict is Verdict.PACKED:
            return progress.offsets, nodes
        if run > MANY_RUNS:
            break
    return None, nodes


@given(seed=st.integers(0, 10**6), share=st.sampled_from([1.0, 0.7, 0.3]))
def test_boxes_have_the_same_load_and_their_packings_are_packings(seed: int, share: float) -> None:
    instance = cut_anywhere(30, seed, length=24, height=24, unit=1, drop=0.1)
    problem = as_problem(instance)
    glued = glue(problem, np.random.default_rng(seed), share)
    assert glued.problem.num_buffers <= problem.num_buffers
    np.testing.assert_array_equal(load_at(glued.problem), load_at(problem))
    stacked = np.cumsum(glued.problem.size) - glued.problem.size  # every box above all others: a packing, if a high one
    check_packing(instance.buffers, glued.offsets(stacked).tolist(), height=int(glued.problem.size.sum()))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("cut", [cut_anywhere, cut_in_layers])
def test_a_packing_of_boxes_is_one_of_the_buffers(cut: object, seed: int) -> None:
    assert callable(cut)
    instance = cut(150, seed, drop=0.03)
    offsets, _ = first_packing(as_problem(instance), instance.capacity)
    assert offsets is not None
    check_packing(instance.buffers, offsets.tolist(), height=instance.capacity)


def test_a_hundredth_of_the_nodes() -> None:
    """The instance that stayed open for half a minute on two cores: 192 buffers in 35 boxes."""
    instance = cut_anywhere(200, 102, drop=0.03)
    problem = as_problem(instance)
    offsets, nodes = first_packing(problem, instance.capacity)
    assert offsets is not None
    assert start_search(problem, make_sections(problem), instance.capacity).advance(100 * nodes) is Verdict.OPEN


def test_nothing_is_said_to_be_impossible() -> None:
    """Two that happen to agree in size: glued they stand in the way of the third, which is no proof."""
    start, stop, size = np.array([(0, 2, 2), (2, 4, 2), (1, 3, 2), (0, 1, 2), (3, 4, 2)], np.int64).T
    problem = make_problem(start, stop, size)
    for _, progress in zip(range(50), search_glued(problem, 2, np.random.default_rng(0)), strict=False):
        assert progress.verdict is Verdict.OPEN


def test_where_nothing_hands_over_it_ends_at_once() -> None:
    problem = as_problem(dropped(60, 2))
    assert glue(problem, np.random.default_rng(0)).problem.num_buffers > 0.9 * problem.num_buffers


def test_alignment() -> None:
    start, stop, size = np.array([(0, 2, 32), (2, 4, 32)], np.int64).T
    aligned = make_problem(start, stop, size, alignment=np.array([16, 16]))
    assert can_glue(aligned)
    assert glue(aligned, np.random.default_rng(0)).problem.alignment.tolist() == [16]
    assert not can_glue(make_problem(start, stop, size, alignment=np.array([16, 64])))
    assert not can_glue(make_problem(start, stop, size, fixed=np.array([0, -1])))
