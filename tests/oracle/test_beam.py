"""The beam against exhaustive search: wide enough it follows every set, so it finds the fastest plan there is, or there is none."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import numpy as np
from tests.oracle.best_plan import best_time_ns
from tests.strategies import PLAIN, Shape, random_costs, random_graph

from memfit.planning import plan
from memfit.planning.annealing.beam import make_beam_tables, search_beam
from memfit.planning.model.fast_judge import INVALID, peak_and_time
from memfit.planning.model.lower_bounds import find_floor
from memfit.planning.model.reduce import Model, build_model

SMALL = Shape(**{name: getattr(PLAIN, name) for name in PLAIN.__slots__ if name != "max_ops"}, max_ops=7)
WIDE, ANY = 400, 2**60
GO = np.zeros(1, np.int64)


def _step(seed: int) -> tuple[Model, int | None, int] | None:
    """A step, the time of its fastest plan (if there is one), and the budget for that: below its peak, not below what one moment needs."""
    rng = Random(seed)
    graph = random_graph(rng, SMALL)
    costs = random_costs(rng, graph, max_levels=0)
    whole = plan(graph, costs, planner="keep_all").plan
    if whole is None or any(op.seeded or not op.replayable or op.variants for op in graph.ops):
        return None
    limit = int(whole.timeline.peak_bytes * rng.uniform(0.6, 1.0))
    model = build_model(graph, costs)
    usable = not any(model.takes) and not model.partial and find_floor(model).bytes <= limit
    return (model, best_time_ns(graph, costs, limit, max_states=10**6), limit) if usable else None


def _steps(count: int) -> Iterator[tuple[int, Model, int | None, int]]:
    for seed in range(count):
        step = _step(seed)
        if step is not None:
            yield seed, *step


def test_a_beam_that_follows_everything_finds_the_fastest_plan() -> None:
    seen = {"nothing to repeat": 0, "repeats": 0, "none": 0}
    for seed, model, best, limit in _steps(400):
        a, plain = model.arrays, np.array(model.agenda, np.int64)
        sequence = search_beam(a, make_beam_tables(model, plain), limit, ANY, WIDE, 0.0, seed % 2 == 0, 0, seed, GO)
        lean = search_beam(
            a, make_beam_tables(model, plain), limit, ANY, WIDE, 0.3, True, 0, seed, GO
        )  # memory has a price: it need not be the fastest
        assert len(lean) >= len(plain) if len(sequence) else not len(lean), seed
        if best is None:
            assert not len(sequence), f"seed {seed}: there is no plan"
            seen["none"] += 1
            continue
        peak, time = peak_and_time(a, sequence)
        assert peak != INVALID, seed
        assert peak <= limit, seed
        assert time + model.view_time_ns == best, f"seed {seed}: {time}, the fastest takes {best}"
        seen["repeats" if len(sequence) > len(plain) else "nothing to repeat"] += 1
    assert min(seen.values()) >= 5, seen


def test_what_repeats_too_much_is_not_followed() -> None:
    tried = 0
    for seed, model, _, limit in _steps(200):
        a, plain = model.arrays, np.array(model.agenda, np.int64)
        ways = make_beam_tables(model, plain)
        sequence = search_beam(a, ways, limit, ANY, WIDE, 0.0, False, 0, 0, GO)
        late = int(a.time[sequence].sum() - a.time[plain].sum())
        if len(sequence) and late > 0:
            tried += 1
            assert not len(search_beam(a, ways, limit, late, WIDE, 0.0, False, 0, 0, GO)), seed
            assert len(search_beam(a, ways, limit, late + 1, WIDE, 0.0, False, 0, 0, GO)), seed
            stopped = search_beam(a, ways, limit, ANY, WIDE, 0.0, False, 0, 0, np.ones(1, np.int64))
            assert not len(stopped), seed
    assert tried >= 3
