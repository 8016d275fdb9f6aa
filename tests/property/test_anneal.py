"""Annealing: whatever is moved, put in or taken out, the timeline knows what the judge says, and every undoing undoes."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from tests.strategies import PLAIN, Shape, random_costs, random_graph, random_training_graph

from memfit.core.budget import Budget
from memfit.core.costs import uniform_costs
from memfit.core.graph import Graph, Op, Storage, Tensor
from memfit.planning.annealing.anneal import anneal, first_place, last_place
from memfit.planning.annealing.group_moves import MAX_GROUP, gather, push, push_back
from memfit.planning.annealing.move_cost import clear_notes, do_move, weigh_deletion, weigh_move
from memfit.planning.annealing.move_table import ROW, STATE, Table, has_room, insert, make_table, remove, sequence_of
from memfit.planning.annealing.recompute_moves import MOST, WHERE_IT_FITS, delete, remake, undelete, unmake
from memfit.planning.annealing.runs import anneal_side_by_side
from memfit.planning.model.fast_judge import INVALID, measure, peak_and_time, usage_of
from memfit.planning.model.reduce import Ints, Model, build_model
from memfit.planning.problem import Problem
from memfit.planning.search.state import Search

SINGLE = Shape(max_ops=25, alternatives=False)
GO = np.zeros(1, np.int64)


def _model(seed: int) -> Model:
    rng = Random(seed)
    graph = random_training_graph(rng, max_layers=8) if seed % 3 == 0 else random_graph(rng, SINGLE if seed % 3 == 1 else PLAIN)
    return build_model(graph, random_costs(rng, graph, max_levels=0))


def _models(count: int) -> list[tuple[int, Model, Ints, int]]:
    """(seed, model, agenda, 80 % of its peak) of steps in which nothing is overwritten."""
    found = []
    for seed in range(count):
        model = _model(seed)
        agenda = np.array(model.agenda, np.int64)
        peak, _ = peak_and_time(model.arrays, agenda)
        if len(agenda) > 1 and peak != INVALID and not any(model.takes):
            found.append((seed, model, agenda, int(0.8 * peak)))
    assert len(found) > 10
    return found


def _agrees(model: Model, st: Table, limit: int, toll: int) -> bool:
    """Whether the timeline says what the judge says; the judge says nothing about sequences that cannot run."""
    sequence = sequence_of(st)
    usage = np.empty(len(sequence), np.int64)
    peak, time = measure(model.arrays, sequence, usage)
    readable = peak != INVALID
    if st[ROW.state, STATE.bad] or not readable:
        return bool(st[ROW.state, STATE.bad]) == (not readable) or not model.arrays.replayable.all() or bool(model.arrays.seeded.any())
    over = usage > limit
    same = np.array_equal(usage, st[ROW.usage, : len(sequence)]) and time == st[ROW.state, STATE.time]
    counted = st[ROW.state, STATE.over] - (st[ROW.usage, len(sequence)] > limit) * (st[ROW.usage, len(sequence)] - limit + toll)
    return bool(same and counted == (usage - limit)[over].sum() + toll * over.sum())


@pytest.mark.parametrize("toll", [0, 7])
def test_changes_are_measured_as_the_judge_measures(toll: int) -> None:
    for seed, model, agenda, limit in _models(60):
        a, random = model.arrays, np.random.default_rng(seed)
        st, ev = make_table(a, agenda, limit, 3 * len(agenda) + 8, 6, toll)
        assert _agrees(model, st, limit, toll), seed
        for _ in range(60):
            n, p, f = int(st[ROW.state, STATE.length]), int(random.integers(st[ROW.state, STATE.length])), int(random.choice(agenda))
            if random.random() < 0.5 and has_room(a, st, f):
                insert(a, st, ev, p, f)
            elif n > 2:
                remove(a, st, ev, p)
            assert _agrees(model, st, limit, toll), seed


def test_moves_are_weighed_as_they_turn_out() -> None:
    moved = 0
    for seed, model, agenda, limit in _models(90):
        a, random = model.arrays, np.random.default_rng(seed)
        st, ev = make_table(a, agenda, limit, 3 * len(agenda) + 8, 6, 7)
        for _ in range(120):
            p, f = int(random.integers(st[ROW.state, STATE.length])), int(random.choice(agenda))
            if random.random() < 0.3 and has_room(a, st, f):  # so that some things are made several times
                insert(a, st, ev, p, f)
                if st[ROW.state, STATE.bad]:
                    remove(a, st, ev, p)
            x = st[ROW.order, p]
            q = int(random.integers(first_place(a, st, ev, x), last_place(a, st, ev, x) + 1))
            if q == p:
                continue
            before, usage, over = sequence_of(st), st[ROW.usage].copy(), weigh_move(a, st, ev, p, q)
            if random.random() < 0.3:
                clear_notes(st)
                assert np.array_equal(usage, st[ROW.usage]), seed
            else:
                do_move(a, st, ev, p, q, over)
                moved += 1
                assert list(sequence_of(st)) == list(np.insert(np.delete(before, p), q, before[p])), seed
            assert _agrees(model, st, limit, 7), seed
            assert not st[ROW.change].any(), seed
    assert moved > 1000


def test_what_stands_in_the_way_goes_along_and_comes_back() -> None:
    pushed = 0
    for seed, model, agenda, limit in _models(90):
        a, random, log, group = model.arrays, np.random.default_rng(seed), np.empty(2 * MAX_GROUP, np.int64), np.empty(MAX_GROUP, np.int64)
        st, ev = make_table(a, agenda, limit, 3 * len(agenda) + 8, 6, 7)
        for _ in range(60):
            n, f = int(st[ROW.state, STATE.length]), int(random.choice(agenda))
            p, q = (int(place) for place in random.integers(n, size=2))
            if random.random() < 0.2 and has_room(a, st, f):
                insert(a, st, ev, p, f)
                if st[ROW.state, STATE.bad]:
                    remove(a, st, ev, p)
                continue
            before, usage, x = sequence_of(st), st[ROW.usage, : n + 1].copy(), st[ROW.order, p]
            count = 0 if p == q else gather(a, st, ev, x, q, group)
            if not count:
                continue
            last, to = push(a, st, ev, p, q, count, group, log)
            log[2 * count - 2], log[2 * count - 1] = last, to
            do_move(a, st, ev, last, to, weigh_move(a, st, ev, last, to))
            assert _agrees(model, st, limit, 7), seed
            assert st[ROW.state, STATE.bad] == 0, seed
            pushed += count > 1
            if random.random() < 0.5:
                push_back(a, st, ev, count, log)
                assert np.array_equal(sequence_of(st), before), seed
                assert np.array_equal(st[ROW.usage, : n + 1], usage), seed
            else:
                rest = [int(form) for form in before[np.delete(np.arange(n), p)]]
                assert sorted(sequence_of(st)) == sorted([*rest, int(before[p])]), seed
    assert pushed > 300


def test_a_strike_is_weighed_as_it_turns_out_or_not_at_all() -> None:
    exact = 0
    for seed, model, agenda, limit in _models(90):
        a, random, log = model.arrays, np.random.default_rng(seed), np.empty(2 * MOST, np.int64)
        st, ev = make_table(a, agenda, limit, 4 * len(agenda) + 64, 12, 3)
        for _ in range(60):
            p, f = int(random.integers(st[ROW.state, STATE.length])), int(random.choice(agenda))
            if random.random() < 0.4 and has_room(a, st, f):
                insert(a, st, ev, p, f)
                if st[ROW.state, STATE.bad]:
                    remove(a, st, ev, p)
                continue
            over, said = int(st[ROW.state, STATE.over]), weigh_deletion(a, st, ev, p)
            count = delete(a, st, ev, p, log)
            if said > -(2**61):
                exact += 1
                assert (count, st[ROW.state, STATE.over] - over) == (1, said), seed
            undelete(a, st, ev, count, log)
            assert not st[ROW.change].any(), seed
    assert exact > 100


def test_what_is_undone_leaves_no_trace() -> None:
    remade = struck = 0
    for seed, model, agenda, limit in _models(60):
        a, random, log = model.arrays, np.random.default_rng(seed), np.empty(2 * MOST, np.int64)
        st, ev = make_table(a, agenda, limit, 4 * len(agenda) + 64, 12, 3)
        for _ in range(20):
            before, rows = sequence_of(st), st[[ROW.usage, ROW.num_events]].copy()
            n = int(st[ROW.state, STATE.length])
            p, s = int(random.integers(n)), int(random.integers(len(a.size)))
            count = remake(a, st, ev, s, p, WHERE_IT_FITS if random.random() < 0.5 else float(random.random()), 1e18, log)
            remade += count
            assert _agrees(model, st, limit, 3), seed
            unmake(a, st, ev, p, count)
            count = delete(a, st, ev, p, log)
            struck += count
            assert _agrees(model, st, limit, 3), seed
            undelete(a, st, ev, count, log)
            assert np.array_equal(sequence_of(st), before), seed
            assert np.array_equal(st[ROW.usage, : n + 1], rows[0, : n + 1]), seed
            assert np.array_equal(st[ROW.num_events], rows[1]), seed
            if st[ROW.state, STATE.bad] == 0 and remake(a, st, ev, s, p, 1.0, 1e18, log):
                assert _agrees(model, st, limit, 3), seed
    assert min(remade, struck) > 100


def test_runs_come_back_with_sequences_that_can_run_and_are_no_worse() -> None:
    better = 0
    for seed, model, agenda, limit in _models(90):
        found = anneal(model.arrays, agenda, limit, 0, 3000, np.array([1e6, 1e4, 1e3, 1e6]), seed, GO)
        assert peak_and_time(model.arrays, found)[0] != INVALID, seed
        over = [int(np.maximum(usage_of(model.arrays, sequence) - limit, 0).sum()) for sequence in (agenda, found)]
        assert over[1] <= over[0], seed
        better += over[1] < over[0]
    assert better > 10


def test_a_run_stops_when_it_is_told_to() -> None:
    _, model, agenda, limit = _models(30)[0]
    stopped = anneal(model.arrays, agenda, limit, 0, 2**40, np.array([1e6, 1e4, 1e3, 1e6]), 0, np.ones(1, np.int64))
    assert peak_and_time(model.arrays, stopped)[0] != INVALID  # a whole sequence all the same


def test_recomputation_is_found_where_no_order_fits() -> None:
    """A large value that is read at once and at the end, and a large one between: the first must be made again, once, and that is all."""
    reads, sizes = ((), (0,), (1,), (2,), (3, 0)), (100, 1, 100, 1, 1)
    ops = tuple(Op(id=i, name="op", inputs=inputs, outputs=(i,)) for i, inputs in enumerate(reads))
    graph = Graph(
        ops=ops,
        tensors=tuple(Tensor(id=i, storage=i) for i in range(5)),
        storages=tuple(Storage(id=i, size_bytes=size) for i, size in enumerate(sizes)),
        sources=(),
        results=(4,),
    )
    search = Search(Problem(graph=graph, costs=uniform_costs(graph), budget=Budget(device_bytes=110), time_limit_s=20.0))
    anneal_side_by_side(search, seconds=0.5)
    assert search.best is not None
    assert list(search.best) == [0, 1, 2, 3, 0, 4]
