"""Recompute-all: keep x_0 only and come from it for every backward step.

slots │x0                   1 slot, l (l + 1) / 2 forwards: the smallest schedule and the slowest
"""

from __future__ import annotations

from collections.abc import Iterator

from memfit.chain.moves import Advance, Back, Drop, Move, Read, Write
from memfit.chain.plan import ChainPlan
from memfit.chain.problem import Chain
from memfit.chain.simple import simple_plan


def plan_recompute_all(chain: Chain) -> ChainPlan:
    return simple_plan("recompute-all", chain, min(1, chain.num_steps), lambda: _moves(chain.num_steps))


def _moves(num_steps: int) -> Iterator[Move]:
    if num_steps == 0:
        yield Back(0)
        return
    yield Write(0, 0)
    for step in range(num_steps, 0, -1):
        yield Advance(0, step)
        yield Back(step)
        yield Read(0, 0)
    yield Drop(0, 0)
    yield Back(0)
