from __future__ import annotations

import heapq
import warnings

import pytest

from memfit.chain.strategies.mixed import make_mixed_rows, plan_mixed
from memfit.chain.strategies.revolve import num_forwards
from memfit.core import BadInput, InfeasibleBudget


def cheapest_mixed(num_steps: int, slots: int) -> int:
    """Dijkstra: (next step to reverse, working state or -1, working tape or -1, states kept, tapes kept)."""
    start = (num_steps - 1, 0, -1, frozenset[int](), frozenset[int]())
    best, heap, count = {start: 0}, [(0, 0, start)], 0
    while heap:
        distance, _, node = heapq.heappop(heap)
        if distance > best[node]:
            continue
        need, state, tape, states, tapes = node
        if need < 0:
            return distance
        after = []
        if 0 <= state <= need:
            after += [(1, (need, state + 1, tape, states, tapes)), (1, (need, state + 1, state, states, tapes))]
        if tape == need:
            after.append((0, (need - 1, state, -1, frozenset(s for s in states if s < need), frozenset(t for t in tapes if t < need))))
        room = len(states) + len(tapes) < slots
        if room and state >= 0:
            after.append((0, (need, state, tape, states | {state}, tapes)))
        if room and tape >= 0:
            after.append((0, (need, state, -1, states, tapes | {tape})))
        after += [(0, (need, s, tape, states, tapes)) for s in states]
        after += [(0, (need, state, t, states, tapes)) for t in tapes]
        after += [(0, (need, state, tape, states - {s}, tapes)) for s in states]
        after += [(0, (need, state, tape, states, tapes - {t})) for t in tapes]
        for cost, neighbour in after:
            if distance + cost < best.get(neighbour, 10**9):
                best[neighbour] = distance + cost
                count += 1
                heapq.heappush(heap, (distance + cost, count, neighbour))
    return 10**9


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_optimal_against_exhaustive_search(slots: int) -> None:
    for num_steps in range(1, 7):
        assert plan_mixed(num_steps, slots).num_forward == cheapest_mixed(num_steps, slots)


def test_against_checkpoint_schedules() -> None:
    other = pytest.importorskip("checkpoint_schedules.mixed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for num_steps in range(2, 25):
            for slots in range(1, 6):
                assert plan_mixed(num_steps, slots).num_forward == other.optimal_steps_mixed(num_steps, min(slots, num_steps - 1))


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 10, 77])
@pytest.mark.parametrize("slots", [1, 2, 5, 100])
def test_schedules_are_judged_and_beat_revolve(num_steps: int, slots: int) -> None:
    plan = plan_mixed(num_steps, slots)
    assert plan.judge().serial_time_ns == plan.num_forward
    assert plan.num_forward <= num_forwards(num_steps, slots) + num_steps


def test_bad_input() -> None:
    with pytest.raises(InfeasibleBudget):
        plan_mixed(3, 0)
    with pytest.raises(BadInput):
        plan_mixed(-1, 2)
    assert plan_mixed(1, 0).num_forward == 1
    assert len(make_mixed_rows(10, 3)) == 4
