"""The textbook rules, which need no optimisation; all keep states in level 0 and need a fixed number of its slots.

store-all      │x0 x1 x2 x3 x4                 l slots, l forwards: the fastest schedule and the largest
recompute-all  │x0                             1 slot, l (l + 1) / 2 forwards: the smallest and the slowest
sqrt           │x0      x4      x8  x12 x13    segments of √n states: 2 √n slots, each forward at most twice (Chen et al., 2016)
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

from memfit.chain.moves import Advance, Back, Drop, Move, Read, Write, count_moves
from memfit.chain.plan import ChainPlan, cost_of, refuse, set_against_bound
from memfit.chain.problem import Chain
from memfit.chain.strategies.revolve import lower_bound
from memfit.core.errors import BadInput


def plan_store_all(chain: Chain) -> ChainPlan:
    return _plan("store-all", chain, chain.num_steps, lambda: store_all_moves(chain.num_steps))


def plan_recompute_all(chain: Chain) -> ChainPlan:
    return _plan("recompute-all", chain, min(1, chain.num_steps), lambda: _recompute_all_moves(chain.num_steps))


def plan_sqrt(chain: Chain) -> ChainPlan:
    """Keep the first state of every segment, and store all inside one segment at a time."""
    return _plan("sqrt", chain, _slots_of_sqrt(chain.num_steps), lambda: _sqrt_moves(chain.num_steps))


def _plan(algorithm: str, chain: Chain, slots_needed: int, emit: Callable[[], Iterator[Move]]) -> ChainPlan:
    begin = time.perf_counter()
    if not chain.levels:
        raise BadInput(f"{algorithm} keeps states in level 0, but the chain has no storage level.")
    available = chain.levels[0].slots
    if available is not None and available < slots_needed:
        return refuse(
            algorithm,
            chain,
            f"{algorithm} keeps {slots_needed} states of a chain of {chain.num_steps} steps at once, level 0 has {available} slots. "
            f"Give it {slots_needed}, or use revolve, which fits any number from 1 on.",
        )
    cost = cost_of(chain, count_moves(emit(), len(chain.levels)))
    reason = f"{algorithm} follows a fixed rule; the bound is what no schedule in these slots can beat."
    return set_against_bound(algorithm, chain, cost, lower_bound(chain), emit, begin=begin, reason=reason)


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


def _recompute_all_moves(num_steps: int) -> Iterator[Move]:
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


def _sqrt_moves(num_steps: int) -> Iterator[Move]:
    length, starts = _segments(num_steps)
    for start in starts[:-1]:
        yield Write(start, 0)
        yield Advance(start, start + length)
    yield from store_all_moves(num_steps - starts[-1], offset=starts[-1])
    for start in reversed(starts[:-1]):
        yield Read(start, 0)
        yield from store_all_moves(length - 1, offset=start, stored=True)


def _segments(num_steps: int) -> tuple[int, range]:
    """The length of a segment, the root of `num_steps + 1` backward steps rounded up, and where the segments start."""
    length = math.isqrt(num_steps) + 1
    return length, range(0, num_steps + 1, length)


def _slots_of_sqrt(num_steps: int) -> int:
    """The first states of all segments, and all but the last state of the one being reversed."""
    length, starts = _segments(num_steps)
    return max(k + min(length, num_steps + 1 - start) - 1 for k, start in enumerate(starts))
