"""`pack` against exhaustive search: on small problems the height, the status and the proofs must be exact."""

from __future__ import annotations

from itertools import permutations
from random import Random

import pytest

from memfit.core.outcome import Status
from memfit.core.packing import Buffer, check_packing
from memfit.offsets import pack


def least_height(buffers: list[Buffer]) -> int:
    """Every packing pushed down is some order in which each buffer lies on what it meets among those before it."""
    best = sum(b.size + b.alignment for b in buffers)
    for order in permutations(buffers):
        placed: list[tuple[Buffer, int]] = []
        for b in order:
            at = max((o + p.size for p, o in placed if p.start < b.stop and b.start < p.stop), default=0)
            placed.append((b, -(-at // b.alignment) * b.alignment))
        best = min(best, max(o + b.size for b, o in placed))
    return best


def random_buffers(random: Random, *, aligned: bool) -> list[Buffer]:
    rows = []
    for k in range(random.randint(2, 7)):
        start = random.randint(0, 7)
        rows.append(
            Buffer(
                id=str(k),
                start=start,
                stop=start + random.randint(1, 5),
                size=random.randint(1, 6),
                alignment=random.choice((1, 1, 2, 3)) if aligned else 1,
            )
        )
    return rows


@pytest.mark.parametrize("aligned", [False, True], ids=["plain", "aligned"])
def test_heights_and_proofs_are_exact(aligned: bool) -> None:
    random = Random(8 + aligned)
    for _ in range(60):
        buffers = random_buffers(random, aligned=aligned)
        best = least_height(buffers)
        packing = pack(buffers, num_threads=1)
        assert packing.height == best, buffers
        assert packing.status is Status.OPTIMAL
        tight = pack(buffers, best, num_threads=1)
        assert tight.status in (Status.OPTIMAL, Status.FEASIBLE)
        check_packing(buffers, tight.offsets, height=best)
        below = pack(buffers, best - 1, num_threads=1)
        assert below.status is Status.INFEASIBLE, buffers
        assert below.lower_bound == best
