"""The incremental judge of orders: after any number of moves it knows what the full judge says, and every order is legal."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from tests.strategies import PLAIN, Shape, random_costs, random_graph, random_training_graph

from memfit.planning.model.fast_judge import INVALID, peak_and_time, usage_of
from memfit.planning.model.precedence import find_precedence
from memfit.planning.model.reduce import Model, build_model
from memfit.planning.search.reorder import lower_peak, move_ops

SINGLE = Shape(max_ops=25, alternatives=False)


def _model(seed: int) -> Model:
    rng = Random(seed)
    graph = random_training_graph(rng, max_layers=8) if seed % 3 == 0 else random_graph(rng, SINGLE if seed % 3 == 1 else PLAIN)
    return build_model(graph, random_costs(rng, graph, max_levels=0))


@pytest.mark.parametrize("moves", [0, 1, 300])
def test_moves_are_measured_as_the_judge_measures(moves: int) -> None:
    compared = 0
    for seed in range(120):
        model = _model(seed)
        agenda = np.array(model.agenda, np.int64)
        peak, _ = peak_and_time(model.arrays, agenda)
        if peak == INVALID or not len(agenda):
            continue
        limit = int(0.8 * peak)
        graph = find_precedence(model)
        order, over = move_ops(graph.arrays, agenda, limit, *graph.before, *graph.after, graph.num_readers, moves, 0.05, seed)
        assert sorted(order) == sorted(agenda)
        assert peak_and_time(model.arrays, order)[0] != INVALID, seed
        assert over == np.maximum(usage_of(model.arrays, order) - limit, 0).sum(), seed
        compared += moves == 0 or not np.array_equal(order, agenda)
    assert compared > 10


def test_calming_ends_when_the_order_fits() -> None:
    model = _model(3)
    agenda = np.array(model.agenda, np.int64)
    peak, _ = peak_and_time(model.arrays, agenda)
    order = lower_peak(find_precedence(model), agenda, peak, seconds=60)
    assert peak_and_time(model.arrays, order)[0] <= peak
