from __future__ import annotations

from functools import cache

import pytest

from memfit.chain import plan_revolve, single_level
from memfit.chain.strategies.revolve import beta, choose_split, forwards_row, num_forwards, revolve_moves
from memfit.core import BadInput, InfeasibleBudget, Status


@cache
def recurrence(num_backward: int, slots: int) -> float:
    if num_backward <= 1:
        return 0
    if slots == 0:
        return float("inf")
    return min(j + recurrence(num_backward - j, slots - 1) + recurrence(j, slots) for j in range(1, num_backward))


@pytest.mark.parametrize("slots", [1, 2, 3, 5, 8])
def test_closed_form_and_split_match_the_recurrence(slots: int) -> None:
    row = forwards_row(79, slots)
    for n in range(1, 81):
        assert num_forwards(n, slots) == recurrence(n, slots) == row[n - 1]
        if n > 1:
            j = choose_split(n - 1, slots)
            assert j + recurrence(n - j, slots - 1) + recurrence(j, slots) == recurrence(n, slots)


def test_beta() -> None:
    assert [beta(2, r) for r in range(-1, 4)] == [0, 1, 3, 6, 10]


def test_the_slides_numbers() -> None:
    """Five steps: store-all holds 6 and recomputes 0, one slot 3 and 10, two slots 4 and 3 (the slides show 4; 3 is optimal)."""
    for slots, peak, recomputed in ((5, 6, 0), (1, 3, 10), (2, 4, 3)):
        plan = plan_revolve(single_level(5, slots))
        assert plan.judge(one_memory=True).peak_bytes == peak
        assert plan.counts().num_forward - 5 == recomputed


def test_length_is_not_limited_by_recursion() -> None:
    plan = plan_revolve(single_level(50_000, 3))
    assert plan.counts().num_forward == num_forwards(50_001, 3)


def test_emission_is_lazy() -> None:
    moves = revolve_moves(10**15, 5)
    assert [type(next(moves)).__name__ for _ in range(3)] == ["Write", "Advance", "Write"]


def test_no_slots() -> None:
    plan = plan_revolve(single_level(4, 0))
    assert plan.status is Status.INFEASIBLE
    with pytest.raises(InfeasibleBudget, match="at least 1 slot"):
        plan.moves()
    assert plan_revolve(single_level(0, 0)).cost == 1
    with pytest.raises(BadInput):
        num_forwards(2, 0)
