"""An insertion judged by the bytes it moves is judged as the whole sequence would be."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.strategies import FULL, random_case

from memfit.planning.cuts.just_in_time import default_makers
from memfit.planning.model.fast_judge import INVALID, drop_dead, measure
from memfit.planning.model.reduce import Arrays, Ints, build_model
from memfit.planning.search.event_table import EVENT, make_events
from memfit.planning.search.insertion_kernel import list_closure, make_scratch, measure_insertion, undo


def _over(a: Arrays, seq: Ints, limit: int) -> tuple[int, int, Ints]:
    usage = np.empty(len(seq), np.int64)
    peak, time = measure(a, seq, usage)
    return (-1, 0, usage) if peak == INVALID else (int(np.maximum(usage - limit, 0).sum()), int(time), usage)


def _check(rng: Random) -> int:
    """The number of insertions judged both ways."""
    case = random_case(rng, FULL)
    model = build_model(case.graph, case.costs)
    a, makers = model.arrays, default_makers(model)
    number = {form: f for f, form in enumerate(model.forms)}
    sequence = [number[c.op, c.variant] for c in case.schedule.computes if (c.op, c.variant) in number]
    for _ in range(rng.randint(0, 6) if model.num_forms else 0):
        sequence.insert(rng.randint(0, len(sequence)), rng.randrange(model.num_forms))
    seq = drop_dead(a, np.array(sequence, np.int64))
    limit = rng.choice((0, int(a.size.sum()) // 3, int(a.size.sum()) // 6))
    over, time, usage = _over(a, seq, limit)
    if over < 0 or any(model.takes[f] for f in seq) or not len(seq):
        return 0
    ev, work, before = make_events(a, seq), make_scratch(a, len(seq)), usage.copy()
    stack, out, judged = np.empty(model.num_forms + 2, np.int64), np.empty(4 * model.num_forms + 8, np.int64), 0
    for stamp in range(8):
        u = rng.randrange(len(seq))
        wanted = [s for s in model.ins[seq[u]] if makers[s] >= 0 and a.replayable[makers[s]] and not a.pinned[s]]
        if not wanted:
            continue
        latest, known = np.full(model.num_storages, -1, np.int64), np.full(model.num_storages, -1, np.int64)
        for e in range(ev[EVENT.ptr, u]):
            latest[ev[EVENT.storage, e]] = e
        mode = rng.randrange(3)
        count, _ = list_closure(
            a, ev, usage, limit, rng.choice(wanted), u, makers, mode, latest, known, stamp, int(a.time.sum()) * 9, stack, out, 0
        )
        ran = set(map(int, seq[:u]))
        if count < 0 or any(model.takes[f] or int(f) not in ran for f in out[:count]):
            continue  # what a repair inserts has run before: a first draw or a first result would move forward
        crossing = int(usage[u] - a.workspace[seq[u]] - sum(a.size[s] for s in model.outs[seq[u]]))
        change = measure_insertion(a, ev, usage, crossing, limit, u, out, 0, count, latest, work, stamp)
        undo(usage, work)
        assert usage.tolist() == before.tolist()
        after, takes, _ = _over(a, drop_dead(a, np.concatenate((seq[:u], out[:count], seq[u:]))), limit)
        if after >= 0:
            assert change == (after - over, takes - time)
            judged += 1
    return judged


@settings(max_examples=300, deadline=None)
@given(st.randoms(use_true_random=False))
def test_insertions_are_judged_as_whole_sequences(rng: Random) -> None:
    _check(rng)


def test_many_insertions_are_judged() -> None:
    """So that the property above is not vacuous."""
    assert sum(_check(Random(seed)) for seed in range(300)) > 100


@pytest.mark.slow
def test_ten_thousand_insertions() -> None:
    for seed in range(10_000):
        _check(Random(seed))
