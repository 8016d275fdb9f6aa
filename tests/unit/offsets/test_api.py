"""`pack`: statuses with their proofs, alignment, fixed offsets, arenas, sharing, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmarks.models.offset_instances import cut_anywhere, cut_evenly

from memfit.core.errors import BadInput
from memfit.core.outcome import Status
from memfit.core.packing import Buffer, Packing, check_packing
from memfit.offsets import pack


def buffers_from(rows: list[tuple[int, int, int]]) -> list[Buffer]:
    return [Buffer(id=str(k), start=a, stop=b, size=z) for k, (a, b, z) in enumerate(rows)]


def judged(buffers: list[Buffer], **options: object) -> Packing:
    packing = pack(buffers, **options)  # type: ignore[arg-type]
    shares = {k: v for k, v in options.items() if k in ("may_share", "must_share")}
    check_packing(buffers, packing.offsets, height=packing.height, **shares)  # type: ignore[arg-type]
    assert packing.lower_bound <= packing.height
    return packing


def test_nothing_to_pack() -> None:
    packing = pack([])
    assert (packing.status, packing.height, packing.offsets) == (Status.OPTIMAL, 0, ())


def test_one_buffer() -> None:
    packing = judged([Buffer(id="a", start=3, stop=9, size=7)])
    assert (packing.status, packing.height, packing.offset_of) == (Status.OPTIMAL, 7, {"a": 0})


def test_disjoint_lives_share_and_touching_lives_do_not_meet() -> None:
    assert judged(buffers_from([(0, 2, 5), (2, 4, 7), (4, 9, 3)])).height == 7


@pytest.mark.parametrize("seed", range(4))
def test_a_cut_rectangle_fits_back(seed: int) -> None:
    buffers, capacity = cut_anywhere(60, seed, length=64, height=64, unit=16)
    packing = judged(list(buffers), capacity=capacity)
    assert (packing.status, packing.height) == (Status.OPTIMAL, capacity)


def test_many_similar_buffers_fit_at_the_maximum_load() -> None:
    buffers, capacity = cut_evenly(3, levels=6)
    packing = judged(list(buffers), capacity=capacity)
    assert packing.status in (Status.OPTIMAL, Status.FEASIBLE)
    assert packing.height <= capacity


def test_below_the_load_is_proven_impossible() -> None:
    buffers, capacity = cut_anywhere(40, 1, unit=1)
    packing = pack(buffers, capacity - 1)
    assert (packing.status, packing.lower_bound) == (Status.INFEASIBLE, capacity)
    assert str(capacity) in packing.reason


def test_above_the_load_impossibility_is_proven_by_search() -> None:
    """Load 3, but a and d stack over c in ways that need 4 (the smallest such problem)."""
    rows = [(0, 2, 1), (0, 4, 1), (1, 6, 1), (3, 8, 1), (5, 9, 1), (7, 9, 1), (2, 3, 1), (6, 7, 1)]
    packing = pack(buffers_from([(a, b, 2 * z) if b - a > 3 else (a, b, 3 * z) for a, b, z in rows]), None)
    assert packing.status is Status.OPTIMAL
    below = pack(packing.buffers, packing.height - 1)
    assert below.status is Status.INFEASIBLE
    assert below.lower_bound == packing.height


def test_out_of_time_is_not_infeasible() -> None:
    buffers, capacity = cut_anywhere(200, 8, drop=0.0)
    packing = pack(buffers, capacity, time_limit_s=0.0)
    assert packing.status is Status.UNKNOWN
    assert packing.height > capacity
    check_packing(buffers, packing.offsets, height=packing.height)


def test_a_capacity_with_room_is_feasible_at_once() -> None:
    buffers, capacity = cut_anywhere(100, 2)
    packing = judged(list(buffers), capacity=2 * capacity, time_limit_s=0.0)
    assert packing.status in (Status.FEASIBLE, Status.OPTIMAL)


def test_alignment_is_kept_and_counted() -> None:
    buffers = [Buffer(id=str(k), start=0, stop=4, size=10, alignment=16) for k in range(3)]
    packing = judged(buffers)
    assert sorted(packing.offsets) == [0, 16, 32]
    assert (packing.status, packing.height) == (Status.OPTIMAL, 42)  # the topmost needs no padding


@pytest.mark.parametrize("align", [2, 3, 8])
def test_alignment_in_the_exact_search(align: int) -> None:
    buffers = [replace(b, alignment=align) for b in cut_anywhere(20, 4, length=20, height=20, unit=1).buffers]
    packing = judged(buffers, time_limit_s=1.0)
    assert packing.height >= packing.lower_bound >= 20


def test_fixed_offsets_are_obeyed() -> None:
    buffers = [*buffers_from([(0, 4, 4), (2, 6, 4)]), Buffer(id="pin", start=1, stop=5, size=2, offset=3)]
    packing = judged(buffers)
    assert packing.offset_of["pin"] == 3
    # neither fits in the 3 bytes below the pin, and all three meet: 5 + 4 + 4
    assert (packing.status, packing.height) == (Status.OPTIMAL, 13)


def test_fixed_offsets_that_collide_are_refused() -> None:
    with pytest.raises(BadInput, match="share addresses"):
        pack([Buffer(id="a", start=0, stop=2, size=4, offset=0), Buffer(id="b", start=1, stop=3, size=4, offset=2)])


def test_arenas_are_packed_apart() -> None:
    buffers = [replace(b, arena=k % 2) for k, b in enumerate(buffers_from([(0, 4, 4), (0, 4, 6), (0, 4, 4), (0, 4, 6)]))]
    packing = judged(buffers)
    assert packing.arena_heights == {0: 8, 1: 12}
    assert (packing.status, packing.height) == (Status.OPTIMAL, 12)


def test_capacity_holds_for_every_arena() -> None:
    buffers = [Buffer(id="a", start=0, stop=1, size=5), Buffer(id="b", start=0, stop=1, size=9, arena=7)]
    assert pack(buffers, 9).status is Status.OPTIMAL
    assert pack(buffers, 8).status is Status.INFEASIBLE


def test_buffers_without_bytes_or_life_are_in_nobodys_way() -> None:
    rows = [(0, 9, 0), (3, 3, 100), (0, 9, 5), (0, 9, 0)]
    packing = judged(buffers_from(rows))
    assert packing.height == 100  # the one without a life still lies inside the arena
    assert judged(buffers_from([(0, 9, 0), (0, 9, 5)])).height == 5


def test_must_share_lies_at_one_address() -> None:
    buffers = buffers_from([(0, 3, 8), (2, 6, 8), (0, 6, 4)])
    packing = judged(buffers, must_share=[("0", "1")])
    assert packing.offset_of["0"] == packing.offset_of["1"]
    assert (packing.status, packing.height) == (Status.OPTIMAL, 12)


def test_may_share_is_used_where_it_helps() -> None:
    chain = buffers_from([(k, k + 2, 8) for k in range(6)])
    assert judged(chain).height == 16
    shared = judged(chain, may_share=[(str(k), str(k + 1)) for k in range(5)])
    assert (shared.status, shared.height) == (Status.OPTIMAL, 8)


def test_may_share_is_left_where_it_hurts() -> None:
    """Sharing would tie a tall short buffer to a long thin one; apart they fit under the third."""
    buffers = buffers_from([(0, 2, 9), (1, 9, 1), (2, 9, 9)])
    apart = judged(buffers).height
    assert judged(buffers, may_share=[("0", "1")]).height <= apart


def test_sharing_is_not_passed_on_between_strangers() -> None:
    """b may share with a and with c, but a and c are alive together and may not."""
    buffers = buffers_from([(0, 4, 4), (1, 3, 4), (2, 6, 4)])
    packing = judged(buffers, may_share=[("0", "1"), ("1", "2")])
    assert packing.height == 8
    assert packing.offset_of["0"] != packing.offset_of["2"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stop": -1}, "before it starts"),
        ({"size": -1}, "sizes and offsets start at 0"),
        ({"alignment": 0}, "alignments at 1"),
        ({"offset": -4}, "offsets start at 0"),
        ({"size": 2**62}, "can address"),
        ({"stop": 2**62}, "can count"),
        ({"id": "b"}, "appears twice"),
        ({"offset": 3, "alignment": 2}, "no multiple"),
    ],
)
def test_bad_buffers_are_refused_by_name(change: dict[str, object], message: str) -> None:
    bad = replace(Buffer(id="a", start=0, stop=2, size=4), **change)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match=message):
        pack([bad, Buffer(id="b", start=0, stop=1, size=1)])


@pytest.mark.parametrize("options", [{"capacity": -1}, {"time_limit_s": -1.0}, {"time_limit_s": float("nan")}, {"may_share": [("a", "z")]}])
def test_bad_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(BadInput):
        pack([Buffer(id="a", start=0, stop=2, size=4)], **options)  # type: ignore[arg-type]


def test_sharing_across_arenas_is_refused() -> None:
    buffers = [Buffer(id="a", start=0, stop=2, size=4), Buffer(id="b", start=0, stop=2, size=4, arena=1)]
    with pytest.raises(BadInput, match="arenas 0 and 1"):
        pack(buffers, must_share=[("a", "b")])


def test_huge_sizes_do_not_overflow() -> None:
    buffers = buffers_from([(0, 5, 2**58), (1, 6, 2**58), (2, 7, 2**58 + 1), (6, 9, 2**59)])
    packing = judged(buffers)
    assert packing.height == 3 * 2**58 + 1
