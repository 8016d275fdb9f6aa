"""Deleting by looking only at the bytes that move gives what judging every deletion from the start gives."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.strategies import FULL, random_case

from memfit.planning.model.fast_judge import INVALID, peak_and_time
from memfit.planning.model.inplace_forms import NONE
from memfit.planning.model.reduce import build_model
from memfit.planning.search.drop_repeats import judge_deletions, try_deletions


def _check(rng: Random) -> int:
    """The number of deletions that were judged both ways and stayed."""
    case = random_case(rng, FULL)
    model = build_model(case.graph, case.costs)
    a = model.arrays
    number = {form: f for f, form in enumerate(model.forms)}
    sequence = [number[c.op, c.variant] for c in case.schedule.computes if (c.op, c.variant) in number]
    for _ in range(rng.randint(0, 6) if model.num_forms else 0):
        sequence.insert(rng.randint(0, len(sequence)), rng.randrange(model.num_forms))
    seq = np.array(sequence, np.int64)
    peak, _ = peak_and_time(a, seq)
    if peak == INVALID or not len(seq):
        return 0
    limit = peak + rng.choice((0, 0, 1, peak // 8))
    _, first = np.unique(a.op[seq], return_index=True)
    fixed = {int(p) for p in first if a.seeded[seq[p]] or not a.replayable[seq[p]]}  # these the quick way never touches
    positions = np.array([p for p in rng.sample(range(len(seq)), len(seq)) if p not in fixed], np.int64)
    quick, slow = try_deletions(a, seq, limit, positions, NONE), judge_deletions(a, seq, limit, positions, NONE)
    assert quick.tolist() == slow.tolist()
    assert INVALID < peak_and_time(a, seq[quick])[0] <= limit
    return int((~quick).sum())


@settings(max_examples=300, deadline=None)
@given(st.randoms(use_true_random=False))
def test_deleting_quickly_equals_judging_each_deletion(rng: Random) -> None:
    _check(rng)


def test_many_deletions_stay() -> None:
    """So that the property above is not vacuous."""
    assert sum(_check(Random(seed)) for seed in range(300)) > 300


@pytest.mark.slow
def test_deleting_quickly_equals_judging_each_deletion_on_ten_thousand() -> None:
    for seed in range(10_000):
        _check(Random(seed))
