"""Square root: cut the chain into segments of about √n states, keep their first states, store-all inside one at a time.

slots │x0      x4      x8      x12 x13 x14       2 √n slots, each forward at most twice (Chen et al., 2016)
      │└ kept ─┴───────┘       └ this segment
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from memfit.chain.moves import Advance, Move, Read, Write
from memfit.chain.plan import ChainPlan
from memfit.chain.problem import Chain
from memfit.chain.simple import simple_plan
from memfit.chain.store_all import store_all_moves


def plan_sqrt(chain: Chain) -> ChainPlan:
    """√n checkpointing in level 0."""
    return simple_plan("sqrt", chain, slots_needed(chain.num_steps), lambda: _moves(chain.num_steps))


def segment_length(num_steps: int) -> int:
    return math.isqrt(num_steps) + 1  # the root of n = num_steps + 1 backward steps, rounded up


def slots_needed(num_steps: int) -> int:
    """The first states of all segments, and all but the last state of the one being reversed."""
    length = segment_length(num_steps)
    starts = range(0, num_steps + 1, length)
    return max(k + min(length, num_steps + 1 - start) - 1 for k, start in enumerate(starts))


def _moves(num_steps: int) -> Iterator[Move]:
    length = segment_length(num_steps)
    starts = list(range(0, num_steps + 1, length))
    for start in starts[:-1]:
        yield Write(start, 0)
        yield Advance(start, start + length)
    yield from store_all_moves(num_steps - starts[-1], offset=starts[-1])
    for start in reversed(starts[:-1]):
        yield Read(start, 0)
        yield from store_all_moves(length - 1, offset=start, stored=True)
