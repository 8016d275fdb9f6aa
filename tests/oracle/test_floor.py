"""The proven minimum against exhaustive search: below it there is no plan at all."""

from __future__ import annotations

from random import Random

import pytest
from tests.oracle.best_plan import best_time_ns
from tests.oracle.test_planners_against_search import SMALL_FULL, SMALL_PLAIN, VARIANTS
from tests.strategies import Shape, random_costs, random_graph, random_training_graph

from memfit.planning.model.lower_bounds import find_floor, list_coexisting
from memfit.planning.model.reduce import build_model


def _check(seed: int, shape: Shape | None) -> str | None:
    """What the minimum was proven by; None where the search was too long."""
    rng = Random(seed)
    graph = random_graph(rng, shape) if shape else random_training_graph(rng, max_layers=3)
    costs = random_costs(rng, graph, max_levels=0)
    floor = find_floor(build_model(graph, costs))
    try:
        below = best_time_ns(graph, costs, floor.bytes - 1, max_states=5_000)
    except RuntimeError:
        return None
    assert below is None, f"seed {seed}: {floor.bytes} bytes are called the minimum ({floor.where}), but less will do"
    return floor.where.split()[0]


@pytest.mark.parametrize(
    ("shape", "least"), [(None, 0), (SMALL_PLAIN, 5), (VARIANTS, 2), (SMALL_FULL, 1)], ids=["training", "plain", "variants", "full"]
)
def test_below_the_proven_minimum_there_is_no_plan(shape: Shape | None, least: int) -> None:
    proofs = [_check(seed, shape) for seed in range(150)]
    assert proofs.count("at") >= 5
    assert proofs.count("when") >= least, "the moment the last input is made should matter now and then"


@pytest.mark.parametrize("shape", [None, SMALL_PLAIN, VARIANTS, SMALL_FULL], ids=["training", "plain", "variants", "full"])
def test_what_is_said_to_coexist_adds_up_to_the_minimum(shape: Shape | None) -> None:
    kinds = set()
    for seed in range(200):
        rng = Random(seed)
        graph = random_graph(rng, shape) if shape else random_training_graph(rng, max_layers=3)
        model = build_model(graph, random_costs(rng, graph, max_levels=0))
        floor = find_floor(model)
        storages, workspace = list_coexisting(model, floor)
        assert model.arrays.base_bytes + workspace + sum(int(model.arrays.size[s]) for s in storages) == floor.bytes, f"seed {seed}"
        kinds.add(floor.where.split()[0])
    assert {"at", "when"} <= kinds or shape is None
