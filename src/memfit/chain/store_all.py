"""Store-all: keep every state, recompute nothing.

slots │x0 x1 x2 x3 x4       l slots, l forwards: the fastest and the largest schedule
"""

from __future__ import annotations

from collections.abc import Iterator

from memfit.chain.moves import Advance, Back, Drop, Move, Read, Write
from memfit.chain.plan import ChainPlan
from memfit.chain.problem import Chain
from memfit.chain.simple import simple_plan


def plan_store_all(chain: Chain) -> ChainPlan:
    return simple_plan("store-all", chain, chain.num_steps, lambda: store_all_moves(chain.num_steps))


def store_all_moves(num_steps: int, *, offset: int = 0, stored: bool = False) -> Iterator[Move]:
    """Keep x_offset (unless `stored`) and every later state, then walk back. The last state is used where it is."""
    last = offset + num_steps
    for step in range(offset, last):
        if step > offset or not stored:
            yield Write(step, 0)
        yield Advance(step, step + 1)
    yield from _use(last, kept=stored and num_steps == 0)
    for step in range(last - 1, offset - 1, -1):
        yield Read(step, 0)
        yield from _use(step, kept=True)


def _use(step: int, *, kept: bool) -> Iterator[Move]:
    if kept:
        yield Drop(step, 0)
    yield Back(step)
