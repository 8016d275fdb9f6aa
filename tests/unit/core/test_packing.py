"""The judge of packings refuses every kind of fault, and only faults."""

from __future__ import annotations

from random import Random

import pytest

from memfit.core.errors import BadInput
from memfit.core.packing import Buffer, check_packing

A = Buffer(id="a", start=0, stop=4, size=8)
B = Buffer(id="b", start=2, stop=6, size=8)
C = Buffer(id="c", start=4, stop=8, size=8)


def test_good_packings_pass() -> None:
    check_packing([A, B, C], [0, 8, 0], height=16)
    check_packing([], [])


@pytest.mark.parametrize(
    ("offsets", "message"),
    [([0, 7, 0], "share addresses"), ([0, 8], "another problem"), ([0, -8, 0], "outside"), ([0, 9, 0], "outside the arena of 16")],
)
def test_faults_are_refused(offsets: list[int], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        check_packing([A, B, C], offsets, height=16)


def test_alignment_and_fixed_offsets_are_judged() -> None:
    with pytest.raises(BadInput, match="no multiple of its alignment 16"):
        check_packing([Buffer(id="a", start=0, stop=1, size=1, alignment=16)], [8])
    with pytest.raises(BadInput, match="fixed at 4"):
        check_packing([Buffer(id="a", start=0, stop=1, size=1, offset=4)], [8])


def test_arenas_do_not_meet() -> None:
    check_packing([A, Buffer(id="z", start=0, stop=4, size=8, arena=1)], [0, 0], height=8)


def test_sharing_is_judged() -> None:
    check_packing([A, B, C], [0, 0, 8], may_share=[("a", "b")])
    with pytest.raises(BadInput, match="share addresses"):
        check_packing([A, B, C], [0, 4, 12], may_share=[("a", "b")])  # sharing means the same first address
    with pytest.raises(BadInput, match="must share"):
        check_packing([A, B, C], [0, 8, 0], must_share=[("a", "b")])
    with pytest.raises(BadInput, match="share addresses"):
        check_packing([A, B, C], [0, 0, 0], may_share=[("a", "b")])  # b and c meet and are strangers


def test_a_tall_sharer_is_not_overlooked() -> None:
    """The newcomer's next neighbour below shares and is thin; the tall one under it reaches up."""
    tall = Buffer(id="tall", start=0, stop=9, size=100)
    thin = Buffer(id="thin", start=1, stop=9, size=1)
    late = Buffer(id="late", start=2, stop=9, size=1)
    with pytest.raises(BadInput, match=r"late and tall|tall and late"):
        check_packing([tall, thin, late], [0, 0, 50], may_share=[("tall", "thin")])


def test_the_judge_agrees_with_looking_at_every_pair() -> None:
    random = Random(3)
    verdicts = set()
    for _ in range(600):
        buffers = [
            Buffer(id=str(k), start=(s := random.randint(0, 9)), stop=s + random.randint(0, 5), size=random.randint(0, 4)) for k in range(6)
        ]
        pairs = [(str(a), str(b)) for a in range(6) for b in range(a) if random.random() < 0.15]
        offsets = [random.randint(0, 9) for _ in buffers]
        bad = any(
            a.start < b.stop and b.start < a.stop and a.stop > a.start and b.stop > b.start and a.size and b.size
            and offsets[i] < offsets[j] + b.size and offsets[j] < offsets[i] + a.size
            and not (offsets[i] == offsets[j] and ((a.id, b.id) in pairs or (b.id, a.id) in pairs))
            for i, a in enumerate(buffers) for j, b in enumerate(buffers) if i < j
        )  # fmt: skip
        verdicts.add(bad)
        if bad:
            with pytest.raises(BadInput):
                check_packing(buffers, offsets, may_share=pairs)
        else:
            check_packing(buffers, offsets, may_share=pairs)
    assert verdicts == {True, False}
