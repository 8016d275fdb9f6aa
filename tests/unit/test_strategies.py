"""The generators keep their promises: graphs run as written, legal schedules are legal, and every feature turns up."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from tests import strategies as some

from memfit.core.errors import IllegalSchedule
from memfit.core.schedule import Free, Offload, Reload
from memfit.core.simulate import simulate


def _is_legal(case: some.Case) -> bool:
    try:
        simulate(case.graph, case.schedule, case.costs)
    except IllegalSchedule:
        return False
    return True


@settings(max_examples=100, deadline=None)
@given(some.cases())
def test_legal_cases_are_legal(case: some.Case) -> None:
    simulate(case.graph, some.plain_schedule(case.graph), case.costs)
    simulate(case.graph, case.schedule, case.costs)


def test_most_mutated_cases_are_illegal() -> None:
    verdicts = [_is_legal(some.random_illegal_case(Random(seed))) for seed in range(500)]
    assert 250 < verdicts.count(False) < 500


def test_every_feature_turns_up() -> None:
    seen: set[str] = set()
    for seed in range(300):
        graph, costs, schedule = some.random_case(Random(seed))
        ran = [s.op for s in schedule.computes]
        forms = [f for op in graph.ops for f in op.forms]
        features = {
            "view": any(graph.is_view(f, t) for f in forms for t in f.outputs),
            "several outputs": any(len(op.outputs) > 1 for op in graph.ops),
            "in place": any(op.inplace_of for op in graph.ops),
            "in-place variant": any(v.inplace_of for op in graph.ops for v in op.variants),
            "once only": any(not op.replayable for op in graph.ops),
            "seeded": any(op.seeded for op in graph.ops),
            "zero size": any(s.size_bytes == 0 for s in graph.storages),
            "several producers": any(len(p) > 1 for p in graph.producers),
            "several results": len(graph.results) > 1,
            "several sources": len(graph.sources) > 1,
            "workspace": any(costs.workspace_bytes),
            "recomputation": len(set(ran)) < len(ran),
            "variant run": any(s.variant for s in schedule.computes),
            "free": any(isinstance(s, Free) and not s.level for s in schedule.steps),
            "free below": any(isinstance(s, Free) and s.level for s in schedule.steps),
            "offload": any(isinstance(s, Offload) for s in schedule.steps),
            "reload": any(isinstance(s, Reload) for s in schedule.steps),
            "another order": ran != sorted(ran),
        }
        seen |= {name for name, present in features.items() if present}
        missing = set(features) - seen
    assert not missing


@pytest.mark.parametrize("seed", range(20))
def test_plain_graphs_are_plain(seed: int) -> None:
    graph = some.random_graph(Random(seed), some.PLAIN)
    assert all(len(op.outputs) == 1 and op.replayable and not op.inplace_of and not op.variants for op in graph.ops)
    assert len(graph.storages) == len(graph.tensors)
    assert all(s.size_bytes > 0 for s in graph.storages)


@settings(max_examples=50, deadline=None)
@given(some.training_graphs())
def test_training_graphs_run_as_written(graph: some.Graph) -> None:
    simulate(graph, some.plain_schedule(graph))
    assert len({op.name for op in graph.ops}) == len(graph.ops)


def test_the_same_seed_gives_the_same_case() -> None:
    assert some.random_case(Random(7)) == some.random_case(Random(7))
