from __future__ import annotations

import numpy as np
import pytest

from memfit.chain import Chain, StorageLevel, cost_of, plan_hrevolve, plan_revolve, single_level
from memfit.chain.strategies import hrevolve as module
from memfit.chain.strategies.hrevolve import make_tables, sort_levels
from memfit.chain.strategies.hrevolve import plan_hrevolve as plan
from memfit.chain.strategies.min_plus_rows import _numpy_row, _push_row, level_rows
from memfit.chain.strategies.unsorted_levels import relax
from memfit.core import BadInput, NoPlanFound, Status


def levels(*rows: tuple[int | None, float, float]) -> tuple[StorageLevel, ...]:
    return tuple(StorageLevel(slots=s, write_cost=w, read_cost=r) for s, w, r in rows)


def test_compiled_rows_equal_numpy_rows() -> None:
    rng = np.random.default_rng(0)
    for size in (1, 2, 63, 64, 65, 300, 2_500):
        known, fallback = rng.uniform(0, 100, size), rng.uniform(100, 10_000, size)
        fallback[rng.integers(0, size)] = np.inf
        expected = _numpy_row(known, fallback, 1.5, 2.0, 3.0)
        np.testing.assert_array_equal(_push_row(known, fallback, 1.5, 2.0, 3.0), expected)


def test_stacked_rows_equal_single_rows() -> None:
    rng = np.random.default_rng(1)
    for size, slots in ((1, 3), (2, 1), (40, 5), (150, 40)):
        below = np.cumsum(rng.integers(1, 9, size)).astype(float) ** 1.5
        rows = level_rows(below, slots, slope=1.0, read=2.0, write=3.0, first=below[0])
        inner = below
        for row in rows:
            np.testing.assert_array_equal(row, _numpy_row(inner, below, 1.0, 2.0, below[0]))
            inner = np.minimum(below, 3.0 + row)
        if len(rows) < slots:
            np.testing.assert_array_equal(np.minimum(below, 3.0 + rows[-1]), np.minimum(below, 3.0 + rows[-2]) if len(rows) > 1 else below)


def test_long_chain_through_the_compiled_rows() -> None:
    chain = Chain(num_steps=4_500, levels=levels((4, 0, 0), (6, 10, 5)), backward_cost=2)
    answer = plan(chain)
    assert cost_of(chain, answer.counts()) == answer.cost
    assert answer.judge().serial_time_ns == answer.cost * 10**9


def test_decimal_costs_are_exact() -> None:
    chain = Chain(num_steps=60, levels=levels((2, 0.1, 0.2), (3, 0.7, 0.3)), forward_cost=0.1, backward_cost=0.3)
    tenfold = Chain(num_steps=60, levels=levels((2, 1, 2), (3, 7, 3)), forward_cost=1, backward_cost=3)
    assert plan(chain).cost == plan(tenfold).cost / 10
    assert cost_of(chain, plan(chain).counts()) == plan(chain).cost


def test_one_free_level_is_revolve() -> None:
    for steps, slots in ((1, 1), (17, 3), (100, 100), (100, 7)):
        assert plan_hrevolve(single_level(steps, slots)).cost == plan_revolve(single_level(steps, slots)).cost


def test_more_slots_never_cost_more_and_unbounded_is_their_limit() -> None:
    costs = [plan(Chain(num_steps=40, levels=levels((2, 0, 0), (c, 4, 3)))).cost for c in (0, 1, 2, 3, 5, 8, 39, 40, None)]
    assert costs == sorted(costs, reverse=True)
    assert costs[-3] == costs[-2] == costs[-1]


def test_order_of_the_levels_does_not_matter() -> None:
    one = Chain(num_steps=30, levels=levels((2, 1, 0), (3, 5, 2), (1, 9, 9)))
    other = Chain(num_steps=30, levels=levels((1, 9, 9), (2, 1, 0), (3, 5, 2)))
    assert plan(one).cost == plan(other).cost
    assert plan(other).judge().serial_time_ns == plan(other).cost * 10**9


def test_costs_after_saturation_do_not_grow_tables() -> None:
    table = make_tables(Chain(num_steps=20, levels=levels((1, 0, 0), (19, 50, 50))))
    assert len(table.levels[1].stored) < 19


def test_crossed_levels_too_large_for_the_exact_table(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = Chain(num_steps=25, levels=levels((2, 5, 0), (2, 0, 3)))
    assert sort_levels(chain) is None
    exact = plan(chain)
    monkeypatch.setattr(module, "is_affordable", lambda _: False)
    quick = plan(chain)
    assert quick.lower_bound <= exact.cost <= quick.cost
    assert quick.status is (Status.OPTIMAL if quick.cost == quick.lower_bound else Status.FEASIBLE)
    assert quick.judge().serial_time_ns == quick.cost * 10**9
    assert sort_levels(relax(chain)) is not None


def test_what_would_take_hours_gets_a_plan_with_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TABLE_BYTES", 1_000)
    chain = Chain(num_steps=300, levels=levels((3, 0, 0), (4, 2, 2)), backward_cost=2)
    answer = plan(chain)
    assert answer.algorithm == "spread"
    assert answer.status is Status.FEASIBLE
    assert answer.judge().serial_time_ns == answer.cost * 10**9
    monkeypatch.undo()
    assert answer.lower_bound <= plan(chain).cost <= answer.cost
    with pytest.raises(NoPlanFound, match="additions"):
        plan(Chain(num_steps=10**7, levels=levels((5, 1, 1), (50, 2, 2))))


def test_many_slots_that_do_not_matter_need_no_table() -> None:
    chain = Chain(num_steps=3_000, levels=levels((5, 0, 0), (2_000, 10, 5)))
    answer = plan(chain)
    assert answer.cost == plan(Chain(num_steps=3_000, levels=levels((5, 0, 0), (None, 10, 5)))).cost
    assert answer.judge().level_peak_bytes[2] <= 2_000


def test_costs_beyond_floats_are_refused() -> None:
    with pytest.raises(BadInput, match="larger unit"):
        plan(Chain(num_steps=100, levels=levels((2, 0, 0), (2, 1, 1)), forward_cost=1e308))


@pytest.mark.parametrize(
    "bad",
    [
        lambda: Chain(num_steps=-1, levels=()),
        lambda: Chain(num_steps=1, levels=(), forward_cost=-1),
        lambda: Chain(num_steps=1, levels=(), forward_cost=float("nan")),
        lambda: StorageLevel(slots=-1),
        lambda: StorageLevel(slots=1, write_cost=float("inf")),
        lambda: StorageLevel.of_bytes("banana", 5),
        lambda: StorageLevel.of_bytes("5", 0),
    ],
)
def test_bad_input(bad: object) -> None:
    with pytest.raises(BadInput):
        bad()  # type: ignore[operator]


def test_no_levels_at_all() -> None:
    assert plan(Chain(num_steps=0, levels=())).cost == 1
    assert plan(Chain(num_steps=2, levels=())).status is Status.INFEASIBLE


def test_capacity_in_bytes() -> None:
    assert StorageLevel.of_bytes("1KiB", 100).slots == 10
    assert StorageLevel.of_bytes(None, 100).slots is None
