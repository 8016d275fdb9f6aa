"""The fast judge and the real one agree on every sequence: peak, time, and whether it can run at all."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.strategies import FULL, random_case

from memfit.core.errors import IllegalSchedule
from memfit.core.schedule import Compute
from memfit.core.simulate import simulate
from memfit.planning.model.fast_judge import INVALID, drop_dead, peak_and_time
from memfit.planning.model.reduce import Model, build_model
from memfit.planning.model.to_schedule import schedule_of


def _random_sequence(rng: Random, model: Model, computes: list[tuple[int, int]]) -> list[int]:
    """The forms of a legal schedule, or the plain agenda, with a few random edits."""
    number = {form: f for f, form in enumerate(model.forms)}
    sequence = [number[c] for c in computes if c in number] if rng.random() < 0.7 else list(model.agenda)
    for _ in range(rng.randint(0, 3)):
        at = rng.randint(0, len(sequence))
        if rng.random() < 0.6 and model.num_forms:
            sequence.insert(at, rng.randrange(model.num_forms))
        elif at < len(sequence):
            del sequence[at]
    return sequence


def _check(rng: Random) -> bool:
    case = random_case(rng, FULL)
    model = build_model(case.graph, case.costs)
    computes = [(c.op, c.variant) for c in case.schedule.computes]
    sequence = np.array(_random_sequence(rng, model, computes), np.int64)
    sequence = drop_dead(model.arrays, sequence)
    peak, time = peak_and_time(model.arrays, sequence)
    schedule = schedule_of(model, sequence)
    try:
        timeline = simulate(case.graph, schedule, case.costs)
    except IllegalSchedule:
        assert peak == INVALID
        return False
    if peak == INVALID:
        return False
    views = set(model.view_op.values())
    of_views = sum(case.costs.time_ns(s.op) for s in schedule.steps if isinstance(s, Compute) and s.op in views)
    assert (peak, time) == (timeline.peak_bytes, timeline.compute_time_ns - of_views)
    return True


@settings(max_examples=300, deadline=None)
@given(st.randoms(use_true_random=False))
def test_fast_judge_equals_the_judge(rng: Random) -> None:
    _check(rng)


def test_most_sequences_are_judged_legal() -> None:
    """So that the property above is not vacuous."""
    assert sum(_check(Random(seed)) for seed in range(300)) > 120


@pytest.mark.slow
def test_fast_judge_equals_the_judge_on_ten_thousand() -> None:
    for seed in range(10_000):
        _check(Random(seed))
