"""Every optimal chain algorithm against exhaustive search, and every schedule through the judge."""

from __future__ import annotations

import math
import random
from itertools import product

import pytest
from tests.oracle.chain_search import cheapest

from memfit.chain import Chain, StorageLevel, cost_of, disk_chain, plan_disk_revolve, plan_hrevolve, plan_revolve, single_level
from memfit.chain.moves import count_moves
from memfit.chain.strategies.exhaustive import search_all as exhaustive_search
from memfit.chain.strategies.hrevolve import make_tables, sort_levels
from memfit.chain.strategies.unsorted_levels import bound_by_relaxing, make_slot_tables
from memfit.core import Status


def random_chain(rng: random.Random, max_steps: int, kind: str) -> Chain:
    num_levels = rng.choice([1, 2, 2, 3])
    costs = [(rng.choice([0, 0, 1, 2, rng.randint(0, 9)]), rng.choice([0, 0, 1, 3, rng.randint(0, 9)])) for _ in range(num_levels)]
    if kind == "costly level 0":
        costs = [(w + 1, r + rng.randint(0, 2)) for w, r in costs]
    if kind != "crossed":
        writes, reads = sorted(w for w, _ in costs), sorted(r for _, r in costs)
        costs = list(zip(writes, reads, strict=True))
    slots = [rng.choice([0, 1, 1, 2, 2, 3, 9]) for _ in range(num_levels)]
    levels = tuple(StorageLevel(slots=s, write_cost=w, read_cost=r) for s, (w, r) in zip(slots, costs, strict=True))
    return Chain(
        num_steps=rng.randint(0, max_steps if num_levels < 3 else max_steps - 1),
        levels=levels,
        forward_cost=rng.choice([0, 1, 1, 2, 3, 7]),
        backward_cost=rng.choice([0, 1, 2, 5]),
    )


def search(chain: Chain) -> float:
    levels = chain.levels
    return cheapest(
        chain.num_steps,
        [chain.num_steps if x.slots is None else x.slots for x in levels],
        [x.write_cost for x in levels],
        [x.read_cost for x in levels],
        chain.forward_cost,
        chain.backward_cost,
    )


def check(chain: Chain) -> None:
    plan, truth = plan_hrevolve(chain), search(chain)
    assert plan.cost == truth, chain
    if math.isinf(truth):
        assert plan.status is Status.INFEASIBLE
        return
    assert plan.status is Status.OPTIMAL or (plan.algorithm.endswith("(crossed levels)") and plan.lower_bound <= truth)
    counts = plan.counts()
    assert counts.num_backward == chain.num_steps + 1
    assert cost_of(chain, counts) == truth
    assert plan.judge().serial_time_ns == truth * 10**9


@pytest.mark.parametrize("kind", ["sorted", "costly level 0", "crossed"])
def test_hrevolve_is_optimal(kind: str) -> None:
    rng = random.Random(f"hrevolve {kind}")
    for _ in range(350):
        check(random_chain(rng, 5, kind))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sorted", "costly level 0", "crossed"])
def test_hrevolve_is_optimal_on_thousands(kind: str) -> None:
    rng = random.Random(f"thousands {kind}")
    for _ in range(2_000):
        check(random_chain(rng, 6, kind))


def test_crossed_table_is_as_good_as_exhaustive_search() -> None:
    """The planner searches short crossed chains itself; here its table, which longer ones use, is held against the search."""
    rng = random.Random("crossed table")
    checked = 0
    while checked < 100:
        chain = random_chain(rng, 4, "crossed")
        slots = tuple(chain.capacity(k) for k in range(len(chain.levels)))
        if sort_levels(chain) is None and chain.num_steps:
            tables = make_slot_tables(chain)
            assert tables.best[slots][-1] == search(chain)
            found = exhaustive_search(chain)
            assert found is not None
            assert cost_of(chain, count_moves(found[1], len(slots))) == found[0] == tables.best[slots][-1]
            assert bound_by_relaxing(chain) <= found[0]
            assert cost_of(chain, count_moves(tables.moves(), len(slots))) == found[0]
            checked += 1


def test_longer_crossed_chains_are_judged_and_bounded() -> None:
    rng = random.Random("longer")
    for _ in range(25):
        chain = random_chain(rng, 25, "crossed")
        plan = plan_hrevolve(chain)
        if plan.status is not Status.INFEASIBLE:
            assert plan.lower_bound <= plan.cost
            assert (plan.status is Status.OPTIMAL) == (plan.cost == plan.lower_bound)
            assert plan.judge().serial_time_ns == plan.cost * 10**9


def test_every_small_single_level_case() -> None:
    for num_steps, slots, (write, read), forward in product(range(5), range(4), ((0, 0), (1, 0), (0, 1), (2, 3)), (1, 3)):
        chain = Chain(
            num_steps=num_steps,
            levels=(StorageLevel(slots=slots, write_cost=write, read_cost=read),),
            forward_cost=forward,
            backward_cost=2,
        )
        check(chain)


def test_revolve_is_optimal() -> None:
    for num_steps, slots in product(range(8), range(1, 5)):
        chain = single_level(num_steps, slots, forward_cost=2, backward_cost=3)
        plan = plan_revolve(chain)
        assert plan.cost == search(chain)
        assert plan.judge().serial_time_ns == plan.cost * 10**9


def test_disk_revolve_is_optimal() -> None:
    for num_steps, memory, (write, read) in product(range(6), range(3), ((0, 0), (1, 1), (3, 0), (0, 2), (4, 5))):
        chain = disk_chain(num_steps, memory, write_cost=write, read_cost=read, forward_cost=2, backward_cost=1)
        plan = plan_disk_revolve(chain)
        assert plan.cost == search(chain)
        assert plan.judge().serial_time_ns == plan.cost * 10**9


def test_two_tables_agree_where_both_apply() -> None:
    """H-Revolve's nesting against the table over all slot vectors, at lengths that exhaustive search cannot reach."""
    rng = random.Random(5)
    for _ in range(25):
        chain = random_chain(rng, 30, "sorted")
        if sort_levels(chain):
            slots = tuple(chain.capacity(k) for k in range(len(chain.levels)))
            crossed = make_slot_tables(chain).best[slots]
            assert crossed[-1] == make_tables(chain).optimum[-1]
