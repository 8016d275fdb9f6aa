"""Allocations of a schedule, and whether a layout keeps them apart."""

from __future__ import annotations

from random import Random

import pytest
from tests.small import chain, graph_of, op

from memfit.core.costs import Costs, Level
from memfit.core.errors import BadInput
from memfit.core.lifetimes import SCRATCH, Lifetime, check_layout, lifetimes, max_load
from memfit.core.plan import Layout
from memfit.core.schedule import Compute, Free, Offload, Reload, Schedule


def _rows(items: tuple[Lifetime, ...]) -> list[tuple[int, int, int, int]]:
    return [(x.storage, x.start, x.stop, x.size_bytes) for x in items]


def test_a_chain() -> None:
    schedule = Schedule(steps=(Compute(0), Free(0), Compute(1), Free(1)))
    assert _rows(lifetimes(chain(2), schedule)) == [(1, 0, 3, 10), (2, 2, 4, 10)]  # the caller's x0 is not ours to place


def test_recomputation_is_a_second_allocation_and_workspace_a_short_one() -> None:
    schedule = Schedule(steps=(Compute(0), Free(1), Compute(0), Compute(0), Compute(1)))
    costs = Costs(op_time_ns=(1, 1), workspace_bytes=(0, 3))
    assert _rows(lifetimes(chain(2), schedule, costs)) == [
        (1, 0, 1, 10),
        (1, 2, 5, 10),
        (SCRATCH, 3, 4, 10),
        (2, 4, 5, 10),
        (SCRATCH, 4, 5, 3),
    ]


def test_in_place_extends_a_life_and_a_reloaded_source_becomes_ours() -> None:
    ops = [op(0, [0], [1]), op(1, [1], [2], inplace_of=((2, 1),))]
    graph = graph_of([10, 10, 10], ops, results=[2])
    costs = Costs(op_time_ns=(1, 1), workspace_bytes=(0, 0), levels=(Level(),))
    schedule = Schedule(steps=(Offload(0), Free(0), Reload(0), Compute(0), Compute(1), Free(0)))
    assert _rows(lifetimes(graph, schedule, costs)) == [(0, 2, 5, 10), (1, 3, 6, 10)]


def _life(start: int, stop: int, size_bytes: int) -> Lifetime:
    return Lifetime(storage=0, start=start, stop=stop, size_bytes=size_bytes)


def test_max_load_counts_half_open_ranges() -> None:
    assert max_load([]) == 0
    assert max_load([_life(0, 2, 5), _life(2, 4, 7)]) == 7
    assert max_load([_life(0, 3, 5), _life(2, 4, 7), _life(1, 1, 100)]) == 12


@pytest.mark.parametrize(
    ("offsets", "height", "complaint"),
    [
        ((0, 0), 12, "alive together and share addresses"),
        ((0, 4), 12, "share addresses"),
        ((0, 5), 11, "outside the arena of 11 bytes"),
        ((-1, 5), 12, "outside the arena"),
        ((0,), 12, "places 1 allocations, the schedule makes 2"),
    ],
)
def test_bad_layouts_are_refused(offsets: tuple[int, ...], height: int, complaint: str) -> None:
    with pytest.raises(BadInput, match=complaint):
        check_layout([_life(0, 3, 5), _life(2, 4, 7)], Layout(offsets=offsets, height_bytes=height))


def test_good_layouts_pass() -> None:
    check_layout([], Layout(offsets=(), height_bytes=0))
    check_layout([_life(0, 3, 5), _life(2, 4, 7)], Layout(offsets=(7, 0), height_bytes=12))
    check_layout([_life(0, 2, 5), _life(2, 4, 7), _life(0, 4, 0)], Layout(offsets=(0, 0, 3), height_bytes=7))


def test_check_layout_agrees_with_looking_at_every_pair() -> None:
    verdicts = []
    for seed in range(2000):
        rng = Random(seed)
        items = [_life(a := rng.randint(0, 6), a + rng.randint(0, 4), rng.randint(0, 5)) for _ in range(rng.randint(0, 6))]
        offsets = tuple(rng.randint(0, 16) for _ in items)
        layout = Layout(offsets=offsets, height_bytes=30)
        solid = [(x, at) for x, at in zip(items, offsets, strict=True) if x.size_bytes and x.start < x.stop]
        clash = any(
            a.start < b.stop and b.start < a.stop and x < y + b.size_bytes and y < x + a.size_bytes
            for i, (a, x) in enumerate(solid)
            for b, y in solid[:i]
        )
        try:
            check_layout(items, layout)
            verdicts.append(True)
        except BadInput:
            verdicts.append(False)
        assert verdicts[-1] == (not clash), seed
    assert 200 < verdicts.count(True) < 1800
