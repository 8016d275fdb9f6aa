"""Revolve: the optimal schedule for one free memory, in closed form (Griewank and Walther, 2000).

    slots  │x0          x5      x8
    steps  0 1 2 3 4 5 6 7 8 9 10        beta(c, r) = C(c + r, c) steps can be reversed
    time   ─────────────────────>        with c slots if each step runs at most r times
                         ─>
                   ─────>  ...

No table: the cost of any length is a formula, and so is the next checkpoint. A level whose writes and reads cost something
is H-Revolve's (`hrevolve.py`), which uses this file for its free first level.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from memfit.chain.moves import Advance, Back, Counts, Drop, Move, Read, Write
from memfit.chain.plan import ChainPlan, cost_of, refuse_no_slots, set_against_bound
from memfit.chain.problem import Chain
from memfit.core.errors import BadInput


def beta(slots: int, repeats: int) -> int:
    """The longest chain that `slots` slots reverse when every forward runs at most `repeats` times; 0 for repeats < 0."""
    return math.comb(slots + repeats, slots) if repeats >= 0 else 0


def num_forwards(num_backward: int, slots: int) -> int:
    """t(n, c): forward steps needed for n backward steps with c slots, x_0 included. Raises for c = 0 and n > 1."""
    if num_backward <= 1:
        return 0
    if slots < 1:
        raise BadInput(f"{num_backward} backward steps with {slots} slots: at least 1 slot is needed.")
    slots = min(slots, num_backward - 1)
    repeats = _repeats(num_backward, slots)
    return repeats * num_backward - beta(slots + 1, repeats - 1)


def _repeats(num_backward: int, slots: int) -> int:
    repeats, reach = 1, slots + 1
    while reach < num_backward:  # beta(c, r + 1) = beta(c, r) (c + r + 1) / (r + 1)
        repeats += 1
        reach = reach * (slots + repeats) // repeats
    return repeats


def forwards_row(num_steps: int, slots: int) -> npt.NDArray[np.float64]:
    """t(l + 1, c) for every l = 0 … num_steps at once: a piecewise linear function, one piece per repeat."""
    row = np.full(num_steps + 1, np.inf)
    row[0] = 0.0
    if slots < 1 or num_steps == 0:
        return row
    start, repeats = 2, 1  # in backward steps
    while start <= num_steps + 1:
        stop = min(beta(slots, repeats), num_steps + 1)
        lengths = np.arange(start, stop + 1, dtype=np.float64)
        row[start - 1 : stop] = repeats * lengths - float(beta(slots + 1, repeats - 1))
        start, repeats = stop + 1, repeats + 1
    return row


def choose_split(num_steps: int, slots: int) -> int:
    """How far to advance from a kept x_0 before the next checkpoint, for `num_steps` forwards and `slots` slots, x_0's included.

    With r repeats, any j works for which both parts stay within r (or r - 1) repeats: t is linear there.
    """
    slots = min(slots, num_steps)
    if slots <= 1:
        return num_steps
    total = num_steps + 1
    r = _repeats(total, slots)
    # left part j <= beta(c, r - 1) reversed with r - 1 repeats, right part total - j <= beta(c - 1, r) with r repeats
    lowest = max(beta(slots, r - 2), total - beta(slots - 1, r), 1)
    highest = min(beta(slots, r - 1), total - beta(slots - 1, r - 1), num_steps)
    return max(1, min(lowest, highest))


def revolve_moves(num_steps: int, slots: int, *, offset: int = 0, level: int = 0, stored: bool = False) -> Iterator[Move]:
    """Reverse `num_steps` forwards from x_offset, which is in the working buffer (and, if `stored`, already in a slot)."""
    stack: list[tuple[bool, int, int, int]] = [(stored, num_steps, slots, offset)]
    while stack:
        kept, length, free, base = stack.pop()
        if length < 0:  # marks a return to the checkpoint at `base`
            yield Read(base, level)
            stack.append((True, -length - 1, free, base))
            continue
        if length == 0:
            if kept:
                yield Drop(base, level)
            yield Back(base)
            continue
        if not kept:
            yield Write(base, level)
        jump = choose_split(length, free)
        yield Advance(base, base + jump)
        stack.append((True, -jump, free, base))
        stack.append((False, length - jump, free - 1, base + jump))


def plan_revolve(chain: Chain) -> ChainPlan:
    """The optimal schedule of a chain with one level whose writes and reads are free."""
    begin = time.perf_counter()
    if len(chain.levels) != 1 or chain.levels[0].write_cost or chain.levels[0].read_cost:
        raise BadInput("Revolve has one level that is free to write and read; use H-Revolve (plan_hrevolve) for levels with costs.")
    slots = chain.capacity(0)
    if slots < 1 and chain.num_steps:
        return refuse_no_slots("revolve", chain)
    cost = cost_in_memory(chain, num_forwards(chain.num_steps + 1, slots))
    reason = "Revolve is optimal for one free memory (Griewank and Walther, 2000)."
    return set_against_bound("revolve", chain, cost, cost, lambda: revolve_moves(chain.num_steps, slots), begin=begin, reason=reason)


def cost_in_memory(chain: Chain, forwards: int) -> float:
    """Forwards and all the backwards, where writes and reads are free."""
    free = (0,) * len(chain.levels)
    return cost_of(chain, Counts(num_forward=forwards, num_backward=chain.num_steps + 1, writes=free, reads=free))


def lower_bound(chain: Chain) -> float:
    """What no schedule beats, whatever its slots: Revolve's forwards in all slots together, every backward once, a read before
    each but the first, and one write."""
    num = chain.num_steps
    usable = [x for x in chain.levels if x.slots != 0]
    if not usable or not num:
        return num * chain.forward_cost + (num + 1) * chain.backward_cost
    slots = sum(num if x.slots is None else x.slots for x in usable)
    copies = min(x.write_cost for x in usable) + num * min(x.read_cost for x in usable)
    return num_forwards(num + 1, slots) * chain.forward_cost + (num + 1) * chain.backward_cost + copies
